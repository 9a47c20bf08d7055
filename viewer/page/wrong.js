// "What goes wrong" in one file: where failures end, what is done again and again, why trajectories stop.

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

/** `wrong`: the answer to `wrong/<source>/<file>`. Text and links alone: it is patched while a run is live. */
export function wrongSection(source, file, wrong) {
  const links = ({ lines }) => lineLinks(source, file, lines);
  const failed = listHref(source.id, file.name, { outcome: "failed" });
  const share = wrong.episodes ? ` (${percent(wrong.failures / wrong.episodes)})` : "";
  const all = count(wrong.episodes, "trajectory", "trajectories");
  const summary = [el("a", { href: failed }, count(wrong.failures, "failure")), ` in ${all}${share}`];
  return el(
    "section",
    { class: "goes-wrong", "aria-label": "What goes wrong" },
    el("h2", {}, "What goes wrong"),
    el("p", {}, `${fileTitle(file)}: `, summary),
    entryList("Failures end with", wrong.observations, (entry) => [foreign(entry.text, "p"), links(entry)]),
    entryList("Repeated actions", wrong.repeated, (entry) => [foreign(entry.text, "p"), links(entry)]),
    entryList("Why they stop", wrong.stops, ({ text }) =>
      el("a", { href: listHref(source.id, file.name, { stop_reason: text }) }, words(text)),
    ),
  );
}
