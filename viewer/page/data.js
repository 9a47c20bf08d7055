// Where the data comes from: the server that reads the run, or what an exported page carries with it.
//
// An export holds `{"<path>": answer, ...}` in one element. It has no server behind it: no updates, no play.

import { selectRows } from "./rows.js";

const inlined = document.getElementById("replay-data");
const answers = inlined ? JSON.parse(inlined.textContent) : null;

export const isExport = answers !== null;

/** What went wrong, and what to do about it, in the server's words. */
class ServerError extends Error {
  constructor(message, hint = "") {
    super(message);
    this.hint = hint;
  }
}

function own(path) {
  if (!Object.hasOwn(answers, path))
    throw new ServerError("not in this export", "Only what was chosen at export is in this file.");
  return answers[path];
}

async function ask(path, options) {
  let response;
  try {
    response = await fetch(`api/${path}`, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError("the server does not answer", "Is replay.py still running?");
  }
  if (response.ok) return response;
  const problem = await response.json().catch(() => ({}));
  throw new ServerError(problem.error ?? `the server answered ${response.status}`, problem.hint);
}

export async function get(path) {
  if (isExport) return own(path);
  return (await ask(path)).json();
}

/** One page of a file's trajectories; an export has them all and chooses here as the server does there. */
export async function getList(path, query) {
  if (isExport) return selectRows(own(path), query);
  return get(`${path}?${new URLSearchParams(query)}`);
}

export async function post(path, body = {}) {
  const token = document.querySelector('meta[name="replay-token"]').content;
  const response = await ask(path, {
    method: "POST",
    headers: { "Content-Type": "application/json", "X-Replay-Token": token },
    body: JSON.stringify(body),
    keepalive: path === "play/close", // it is sent while the page goes
  });
  return response.json();
}

async function* jsonLines(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) break;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    yield* lines.filter(Boolean).map((line) => JSON.parse(line));
  }
  if (rest) yield JSON.parse(rest);
}

function excerptAround(text, at, length) {
  return text.slice(Math.max(0, at - 60), at + length + 60);
}

function* searchExport(source, text) {
  const wanted = text.toLowerCase();
  let hits = 0;
  for (const [path, answer] of Object.entries(answers)) {
    const [kind, where, file, line] = path.split("/");
    if (kind !== "trajectory" || where !== String(source)) continue;
    const texts = answer.opening.map((message) => [0, message.content]);
    answer.turns.forEach((turn, i) => texts.push([i + 1, turn.action_text], [i + 1, turn.observation_text]));
    for (const [turn, content] of texts) {
      const at = content.toLowerCase().indexOf(wanted);
      if (at < 0) continue;
      hits += 1;
      const excerpt = excerptAround(content, at, text.length);
      const { trajectory_id } = answer.row;
      yield { hit: { file: decodeURIComponent(file), line: Number(line), trajectory_id, turn, excerpt } };
    }
  }
  yield { done: true, hits, cut: false };
}

/** Events {progress}, {hit}, {done, hits, cut} while a source is searched; `signal` stops it. */
export async function* search(source, text, signal) {
  if (isExport) {
    yield* searchExport(source, text);
    return;
  }
  const query = new URLSearchParams({ text });
  yield* jsonLines(await ask(`search/${source}?${query}`, { signal }));
}
