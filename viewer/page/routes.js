// Addresses: every view, filter and turn has an address after the `#`, so it can be shared as a link.
//
//     #/0                      overview of source 0         #/0/step_000003/17      line 17 of the file
//     #/0/step_000003?sort=…   list of one file             #/0/step_000003/17/4    the same, at turn 4
//     #/play/textcraft/12      task 12 of an environment, live

const INTEGER = /^\d+$/;

function number(part) {
  return INTEGER.test(part) ? Number(part) : NaN;
}

function decode(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part; // a single % is not an encoding
  }
}

/** {view, source, file, line, turn, query} of a hash; the view is "unknown" if no rule matches. */
export function parse(hash) {
  const [path, search = ""] = hash.replace(/^#?\/?/, "").split("?");
  const query = Object.fromEntries(new URLSearchParams(search));
  const parts = path.split("/").filter(Boolean).map(decode);
  if (parts[0] === "play" && parts.length <= 3) {
    return { view: "play", env: parts[1] ?? null, taskIndex: parts[2] === undefined ? null : number(parts[2]), query };
  }
  const source = parts.length ? number(parts[0]) : 0;
  const line = parts.length > 2 ? number(parts[2]) : 0;
  const turn = parts.length > 3 ? number(parts[3]) : 1;
  if ([source, line, turn].some(Number.isNaN) || parts.length > 4) return { view: "unknown", query };
  const view = ["overview", "overview", "list", "trajectory", "trajectory"][parts.length];
  return { view, source, file: parts[1] ?? null, line, turn, query };
}

function withQuery(path, query) {
  const entries = Object.entries(query).filter(([, value]) => value !== "" && value !== null && value !== undefined);
  return entries.length ? `${path}?${new URLSearchParams(entries)}` : path;
}

export function overviewHref(source) {
  return `#/${source}`;
}

export function listHref(source, file, query = {}) {
  return withQuery(`#/${source}/${encodeURIComponent(file)}`, query);
}

export function trajectoryHref(source, file, line, turn = null) {
  return `#/${source}/${encodeURIComponent(file)}/${line}${turn === null ? "" : `/${turn}`}`;
}

export function playHref(env = null, taskIndex = null) {
  return env === null ? "#/play" : `#/play/${encodeURIComponent(env)}/${taskIndex}`;
}

/** Percent-encode exactly like Python's `quote`, because an export stores its answers under these paths. */
function quoted(part) {
  return encodeURIComponent(part).replace(/[!'()*]/g, (sign) => `%${sign.charCodeAt(0).toString(16).toUpperCase()}`);
}

/** The path of a request to the server; an export stores the answer under the same path. */
export function apiPath(parts) {
  return parts.map(quoted).join("/");
}
