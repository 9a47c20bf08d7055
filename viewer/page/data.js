// Where the data comes from: the server that reads the run, or what an exported page carries with it.
//
// An export holds `{"<path>": answer, ...}` in one element. It has no server behind it: no updates, no play.

import { selectRows } from "./rows.js";

const inlined = document.getElementById("replay-data");
const answers = inlined ? JSON.parse(inlined.textContent) : null;

export const isExport = answers !== null;

function own(path) {
  if (!Object.hasOwn(answers, path)) throw new Error("This file holds only what was chosen at export.");
  return answers[path];
}

async function ask(path, options) {
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
  if (isExport) return own(path);
  return (await ask(path)).json();
}

/** The trajectories of a file that fit the query. */
export async function getList(path, query) {
  return selectRows((await get(path)).rows, query);
}

export async function post(path, body = {}) {
  const response = await ask(path, {
    method: "POST",
    headers: { "Content-Type": "application/json" },
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
      const excerpt = content.slice(Math.max(0, at - 60), at + text.length + 60);
      yield { hit: { file: decodeURIComponent(file), line: Number(line), turn, excerpt } };
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
