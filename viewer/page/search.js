// Search all files of a source. Hits appear while the search is running, and the user can stop it.

import { search } from "./data.js";
import { button, el, foreign } from "./dom.js";
import { count } from "./format.js";
import { trajectoryHref } from "./routes.js";
import { showError } from "./status.js";

const MAX_HITS = 200;

/** The excerpt with the search text highlighted. */
function highlight(excerpt, text) {
  const start = excerpt.toLowerCase().indexOf(text.toLowerCase());
  if (start < 0) return foreign(excerpt);
  const end = start + text.length;
  return el(
    "span",
    { class: "foreign" },
    excerpt.slice(0, start),
    el("mark", {}, excerpt.slice(start, end)),
    excerpt.slice(end),
  );
}

function hitItem(source, hit, text) {
  const href = trajectoryHref(source, hit.file, hit.line, Math.max(1, hit.turn));
  const place = hit.turn === 0 ? "before the first turn" : `turn ${hit.turn}`;
  return el("li", {}, el("a", { href }, `${hit.file}, line ${hit.line}, ${place}`), highlight(hit.excerpt, text));
}

/** {element, focus, stop} */
export function searchBox(source, name) {
  const input = el("input", {
    type: "search",
    "aria-label": `Search all files of ${name}`,
    placeholder: "Search all texts of this source",
  });
  const progress = el("progress", { "aria-label": "Progress of the search", hidden: true });
  const stopButton = button("Stop", () => stop(), { hidden: true });
  const summary = el("p", { class: "quiet", role: "status" });
  const hits = el("ol", { class: "hits" });
  const clearButton = button("Clear", () => clear(), { hidden: true });
  let running = null;

  function stop() {
    running?.abort();
  }

  function clear() {
    stop();
    hits.replaceChildren();
    summary.textContent = "";
    clearButton.hidden = true;
    input.focus();
  }

  function showRunning(controller) {
    running = controller;
    progress.hidden = controller === null;
    stopButton.hidden = controller === null;
  }

  function showEvent(event, text) {
    if (event.progress) [progress.value, progress.max] = event.progress;
    if (event.hit && hits.children.length < MAX_HITS) hits.append(hitItem(source, event.hit, text));
    if (!event.done) return;
    const limit = event.cut || event.hits > MAX_HITS ? `, showing the first ${hits.children.length}` : "";
    summary.textContent = `${count(event.hits, "hit")}${limit}`;
  }

  async function run(text) {
    stop();
    clearButton.hidden = false;
    hits.replaceChildren();
    summary.textContent = "Searching…";
    progress.removeAttribute("value");
    const controller = new AbortController();
    showRunning(controller);
    try {
      for await (const event of search(source, text, controller.signal)) {
        if (controller.signal.aborted) break;
        showEvent(event, text);
      }
    } catch (error) {
      if (error.name !== "AbortError") showError(error);
    }
    if (running !== controller) return; // a later search is running
    showRunning(null);
    if (controller.signal.aborted) summary.textContent = `${count(hits.children.length, "hit")} before you stopped it`;
  }

  const form = el("form", { role: "search" }, input, el("button", {}, "Search"), stopButton, clearButton, progress);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (input.value) run(input.value);
  });
  return { element: el("div", { class: "search" }, form, summary, hits), focus: () => input.focus(), stop };
}
