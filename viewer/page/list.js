// The trajectories of one file: filter, sort, group and search them. The address records the current choices.

import { get, getList } from "./data.js";
import { button, el, scrollable, select } from "./dom.js";
import { nameOf, number, outcome, signed, words } from "./format.js";
import { filterForm } from "./filters.js";
import { groupCards } from "./groups.js";
import { patch } from "./patch.js";
import { apiPath, listHref, trajectoryHref } from "./routes.js";
import { searchBox } from "./search.js";
import { fileTitle, sourceOf } from "./sources.js";
import { showError } from "./status.js";

const PAGE = 200;
const COLUMNS = [
  { key: "line", title: "line", first: "" },
  { key: "task_id", title: "task", first: "" },
  { key: "subtask", title: "sub-task", first: "" },
  { key: null, title: "outcome" },
  { key: "return", title: "return", first: "-", numeric: true },
  { key: null, title: "advantage", numeric: true },
  { key: "num_turns", title: "turns", first: "-", numeric: true },
  { key: "num_tokens", title: "tokens", first: "-", numeric: true },
  { key: "parse_errors", title: "parse errors", first: "-", numeric: true },
  { key: "stop_reason", title: "stopped by", first: "" },
];

/** A link to the previous file, a menu of all files of all sources, a link to the next file. */
function filePicker(site, source, index) {
  const choices = site.sources.flatMap(({ id, name, files }) =>
    files.map((file) => {
      const prefix = site.sources.length > 1 ? `${name}: ` : "";
      return [listHref(id, file.name), `${prefix}${fileTitle(file)}`];
    }),
  );
  const current = listHref(source.id, source.files[index].name);
  const picker = select(choices, current, () => (location.hash = picker.value));
  picker.setAttribute("aria-label", "File");
  const neighbour = (offset, sign, name) => {
    const file = source.files[index + offset];
    return file
      ? el("a", { class: "step-link", href: listHref(source.id, file.name), "aria-label": `${name} file` }, sign)
      : null;
  };
  return el("div", { class: "picker" }, neighbour(-1, "←", "Previous"), picker, neighbour(1, "→", "Next"));
}

function tableRow(route, row) {
  const cells = [
    el("td", { class: "number quiet" }, row.line),
    el(
      "th",
      { scope: "row" },
      el("a", { class: "row-link", href: trajectoryHref(route.source, route.file, row.line) }, nameOf(row)),
    ),
    el("td", {}, row.subtask),
    el("td", {}, el("span", { class: `outcome ${outcome(row)}` }, outcome(row))),
    el("td", { class: "number" }, number(row.return)),
    el("td", { class: "number" }, row.used_in_loss || row.advantage !== null ? signed(row.advantage) : "unused"),
    el("td", { class: "number" }, number(row.num_turns)),
    el("td", { class: "number" }, number(row.num_tokens)),
    el("td", { class: "number" }, row.parse_errors || ""),
    el("td", {}, words(row.stop_reason)),
  ];
  return el("tr", { "data-key": `line ${row.line}`, class: outcome(row) }, cells);
}

function headRow(sort, onsort) {
  const cells = COLUMNS.map(({ key, title, first, numeric }) => {
    const kind = numeric ? "number" : null;
    if (key === null) return el("th", { scope: "col", class: kind }, title);
    const sorted = sort === key ? "ascending" : sort === `-${key}` ? "descending" : null;
    const arrow = el(
      "span",
      { class: "arrow", "aria-hidden": "true" },
      { ascending: "↑", descending: "↓" }[sorted] ?? "",
    );
    const press = () => onsort(key, first);
    const label = numeric ? [arrow, title] : [title, arrow]; // numbers are aligned with the end of the title
    return el("th", { scope: "col", class: kind, "aria-sort": sorted }, button(label, press));
  });
  return el("thead", {}, el("tr", {}, cells));
}

function pages(query, matching, move) {
  const offset = Number(query.offset || 0);
  const last = Math.min(offset + PAGE, matching);
  if (matching <= PAGE) return el("p");
  const before = button("Previous page", () => move(-PAGE));
  const after = button("Next page", () => move(PAGE));
  before.disabled = offset === 0;
  after.disabled = last === matching;
  return el("p", { class: "pages" }, before, ` ${offset + 1} to ${last} of ${matching} `, after);
}

function summaryLine(answer) {
  const numbers = answer.matching === answer.total ? `${answer.total}` : `${answer.matching} of ${answer.total}`;
  return el("p", { class: "quiet", role: "status" }, `${numbers} trajectories`);
}

export async function listView(route, site) {
  const source = () => sourceOf(site, route.source);
  const index = source().files.findIndex(({ name }) => name === route.file);
  if (index < 0) throw new Error(`there is no file ${route.file} in ${source().name}`);
  let query = { ...route.query };
  const filePath = [route.source, route.file];

  const results = el("div", { class: "results" });
  let lastRequest = 0;

  function fetchRows() {
    return getList(apiPath(["list", ...filePath]), { ...query, limit: PAGE });
  }

  function tableOf(answer) {
    const rows = answer.rows.map((row) => tableRow(route, row));
    const head = headRow(query.sort || "line", sortBy);
    const table = el("table", { class: "trajectories" }, head, el("tbody", {}, rows));
    const body = rows.length
      ? scrollable("Trajectories", table)
      : el("p", { class: "empty" }, "No trajectory matches these filters.");
    const key = rows.length ? "table" : "empty";
    return el("div", { "data-key": key }, summaryLine(answer), body, pages(query, answer.matching, turnPage));
  }

  async function contents() {
    if (query.group) return groupCards(route, (await get(apiPath(["groups", ...filePath]))).groups);
    return tableOf(await fetchRows());
  }

  /** Show the results of the query; drop an answer if a later request has been sent. */
  async function refresh() {
    const request = ++lastRequest;
    try {
      const next = el("div", { class: "results" }, await contents());
      if (request === lastRequest) patch(results, next);
    } catch (error) {
      showError(error);
    }
  }

  async function changeQuery(changes) {
    query = { ...query, offset: "", ...changes };
    history.replaceState(null, "", listHref(route.source, route.file, query));
    showMode();
    await refresh();
  }

  async function sortBy(key, first) {
    const reversed = query.sort === `${first}${key}` ? (first ? "" : "-") : first;
    await changeQuery({ sort: `${reversed}${key}` });
  }

  async function turnPage(by) {
    const offset = Number(query.offset || 0) + by;
    await changeQuery({ offset: offset > 0 ? String(offset) : "" });
    results.scrollIntoView();
  }

  const answer = await fetchRows();
  const form = filterForm(query, answer, changeQuery);
  const groups = button("By group", () => changeQuery({ group: query.group ? "" : "1" }));
  function showMode() {
    form.hidden = Boolean(query.group);
    groups.setAttribute("aria-pressed", String(Boolean(query.group)));
  }
  showMode();
  const find = searchBox(route.source, source().name);
  await refresh();
  const title = `${fileTitle(source().files[index])} · ${source().name}`;
  const picker = el("div", {}, filePicker(site, source(), index));
  return {
    title,
    element: el(
      "div",
      { class: "list" },
      el(
        "div",
        { class: "title-row" },
        el("h1", {}, "Trajectories of ", fileTitle(source().files[index])),
        picker,
        groups,
      ),
      find.element,
      form,
      results,
    ),
    shortcuts: [
      { keys: ["/"], does: "search this source", run: find.focus },
      { keys: ["g"], does: "switch grouping on or off", run: () => groups.click() },
    ],
    opened: () => "find" in route.query && find.focus(),
    async update() {
      if (!picker.contains(document.activeElement)) picker.replaceChildren(filePicker(site, source(), index));
      await refresh();
    },
    close: find.stop,
  };
}
