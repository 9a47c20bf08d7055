// "What goes wrong?": the failures of one file by last observation, repeated actions and stop reason.

import { el, foreign } from "./dom.js";
import { count, number, percent, words } from "./format.js";
import { listHref, trajectoryHref } from "./routes.js";
import { fileTitle } from "./sources.js";

const LINES_SHOWN = 4;
const ENTRIES_SHOWN = 4;

function lineLinks(source, file, lines) {
  const links = lines
    .slice(0, LINES_SHOWN)
    .map((line) =>
      el("a", { href: trajectoryHref(source.id, file.name, line), "aria-label": `trajectory at line ${line}` }, line),
    );
  return el("span", { class: "lines" }, "see ", links, lines.length > LINES_SHOWN ? "…" : null);
}

function entryList(title, entries, describe) {
  if (!entries.length) return null;
  const items = entries
    .slice(0, ENTRIES_SHOWN)
    .map((entry) =>
      el(
        "li",
        { "data-key": entry.text },
        el("span", { class: "count" }, `${number(entry.count)} ×`),
        el("div", {}, describe(entry)),
      ),
    );
  return [el("h3", {}, title), el("ol", { class: "wrong" }, items)];
}

/** `answer`: the answer to `wrong/<source>/<file>`. The section has only text and links, because `patch` updates it. */
export function failureSection(source, file, answer) {
  const links = ({ lines }) => lineLinks(source, file, lines);
  const failuresHref = listHref(source.id, file.name, { outcome: "failed" });
  const share = answer.episodes ? ` (${percent(answer.failures / answer.episodes)})` : "";
  const total = count(answer.episodes, "trajectory", "trajectories");
  const summary = [el("a", { href: failuresHref }, count(answer.failures, "failure")), ` in ${total}${share}`];
  return el(
    "section",
    { class: "goes-wrong", "aria-label": "What goes wrong?" },
    el("h2", {}, "What goes wrong?"),
    el("p", {}, `${fileTitle(file)}: `, summary),
    entryList("Last observation", answer.observations, (entry) => [foreign(entry.text, "p"), links(entry)]),
    entryList("Repeated actions", answer.repeated, (entry) => [foreign(entry.text, "p"), links(entry)]),
    entryList("Stop reason", answer.stops, ({ text }) =>
      el("a", { href: listHref(source.id, file.name, { stop_reason: text }) }, words(text)),
    ),
  );
}
