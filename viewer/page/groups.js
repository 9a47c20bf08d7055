// The samples of a task side by side, as GRPO compares them: each return with the others in its group.

import { el } from "./dom.js";
import { count, nameOf, number, outcome, signed, words } from "./format.js";
import { trajectoryHref } from "./routes.js";

function sampleLink(route, row) {
  const advantage = row.advantage === null ? (row.used_in_loss ? "" : "unused") : signed(row.advantage);
  return el(
    "li",
    { "data-key": `line ${row.line}` },
    el(
      "a",
      { class: `sample ${outcome(row)}`, href: trajectoryHref(route.source, route.file, row.line) },
      el("strong", {}, number(row.return)),
      el("span", {}, outcome(row)),
      el("span", {}, `${count(row.num_turns, "turn")}, ${words(row.stop_reason)}`),
      advantage ? el("span", {}, row.advantage === null ? advantage : `advantage ${advantage}`) : null,
    ),
  );
}

function verdict(rows) {
  const returns = new Set(rows.filter((row) => outcome(row) !== "lost").map((row) => row.return));
  const solved = rows.filter((row) => row.success).length;
  const signal = returns.size > 1 ? "" : "; equal returns, so no advantage";
  return `${solved} of ${rows.length} solved${signal}`;
}

function card(route, group) {
  return el(
    "section",
    { class: "group", "data-key": `group ${group.group_id} ${group.task_id}` },
    el("h2", {}, nameOf(group.rows[0]), group.subtask ? el("small", {}, ` ${group.subtask}`) : null),
    el("p", { class: "quiet" }, verdict(group.rows)),
    el(
      "ul",
      {},
      group.rows.map((row) => sampleLink(route, row)),
    ),
  );
}

export function groupCards(route, groups) {
  if (!groups.length) return el("p", { class: "empty", "data-key": "empty" }, "This file has no groups.");
  return el(
    "div",
    { class: "groups", "data-key": "groups" },
    groups.map((group) => card(route, group)),
  );
}
