// The source of all data: the server that reads the run, or the data inside an exported page.
//
// An export holds `{"<path>": answer, ...}` in one element. Without a server it has no updates and no live play.

import { selectRows } from "./rows.js";

const inlined = document.getElementById("replay-data");
const answers = inlined ? JSON.parse(inlined.textContent) : null;

export const isExport = answers !== null;

function inlinedAnswer(path) {
  if (!Object.hasOwn(answers, path)) throw new Error("This was not included in the export.");
  return answers[path];
}

async function request(path, options) {
  let response;
  try {
    response = await fetch(`api/${path}`, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("The server does not answer. Is replay.py still running?");
  }
  if (response.ok) return response;
  const problem = await response.json().catch(() => ({}));
  throw new Error(problem.error ?? `the server answered ${response.status}`);
}

export async function get(path) {
  if (isExport) return inlinedAnswer(path);
  return (await request(path)).json();
}

/** The trajectories of a file that match the query. */
export async function getList(path, query) {
  return selectRows((await get(path)).rows, query);
}

export async function post(path, body = {}) {
  const response = await request(path, {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
    keepalive: path === "play/close", // sent while the page is being closed
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

function* searchExport(source, text) {
  const lowerText = text.toLowerCase();
  let hits = 0;
  for (const [path, answer] of Object.entries(answers)) {
    const [kind, sourceId, file, line] = path.split("/");
    if (kind !== "trajectory" || sourceId !== String(source)) continue;
    const texts = answer.opening.map((message) => [0, message.content]);
    answer.turns.forEach((turn, i) => texts.push([i + 1, turn.action_text], [i + 1, turn.observation_text]));
    for (const [turn, content] of texts) {
      const start = content.toLowerCase().indexOf(lowerText);
      if (start < 0) continue;
      hits += 1;
      const excerpt = content.slice(Math.max(0, start - 60), start + text.length + 60);
      yield { hit: { file: decodeURIComponent(file), line: Number(line), turn, excerpt } };
    }
  }
  yield { done: true, hits, cut: false };
}

/** Search a source. Yields events {progress}, {hit}, {done, hits, cut}; `signal` stops the search. */
export async function* search(source, text, signal) {
  if (isExport) {
    yield* searchExport(source, text);
    return;
  }
  const query = new URLSearchParams({ text });
  yield* jsonLines(await request(`search/${source}?${query}`, { signal }));
}
