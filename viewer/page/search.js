// Search of a whole source: hits come in while the server reads on, and it can be stopped.

import { search } from "./data.js";
import { button, el, foreign } from "./dom.js";
import { count } from "./format.js";
import { trajectoryHref } from "./routes.js";
import { sayError } from "./status.js";

const HITS_SHOWN = 200;

/** The excerpt with what was looked for marked in it. */
function marked(excerpt, text) {
  const at = excerpt.toLowerCase().indexOf(text.toLowerCase());
  if (at < 0) return foreign(excerpt);
  const end = at + text.length;
  return el(
    "span",
    { class: "foreign" },
    excerpt.slice(0, at),
    el("mark", {}, excerpt.slice(at, end)),
    excerpt.slice(end),
  );
}

function hitItem(source, hit, text) {
  const href = trajectoryHref(source, hit.file, hit.line, Math.max(1, hit.turn));
  const place = hit.turn === 0 ? "before the first turn" : `turn ${hit.turn}`;
  return el("li", {}, el("a", { href }, `${hit.file}, line ${hit.line}, ${place}`), marked(hit.excerpt, text));
}

/** {element, focus, stop} */
export function searchBox(source, name) {
  const input = el("input", {
    type: "search",
    "aria-label": `Search in all of ${name}`,
    placeholder: "Search all texts of this source",
  });
  const progress = el("progress", { "aria-label": "Searched so far", hidden: true });
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
    if (event.hit && hits.children.length < HITS_SHOWN) hits.append(hitItem(source, event.hit, text));
    if (!event.done) return;
    const cut = event.cut || event.hits > HITS_SHOWN ? `, the first ${hits.children.length} of them shown` : "";
    summary.textContent = `${count(event.hits, "hit")}${cut}`;
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
      if (error.name !== "AbortError") sayError(error);
    }
    if (running !== controller) return; // a later search has taken the place
    showRunning(null);
    if (controller.signal.aborted) summary.textContent = `${count(hits.children.length, "hit")} until it was stopped`;
  }

  const form = el("form", { role: "search" }, input, el("button", {}, "Search"), stopButton, clearButton, progress);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (input.value) run(input.value);
  });
  return { element: el("div", { class: "search" }, form, summary, hits), focus: () => input.focus(), stop };
}
