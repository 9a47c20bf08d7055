// The first screen: is the run learning, and how does it fail? Below that: all metrics and all files of the run.

import { Chart, swatch } from "./charts.js";
import { get } from "./data.js";
import { button, el, field, scrollable } from "./dom.js";
import { number, percent } from "./format.js";
import { OTHER, SECTIONS, panelsOf } from "./panels.js";
import { patch } from "./patch.js";
import { apiPath, listHref, overviewHref } from "./routes.js";
import { fileTitle, newestFile, sourceOf } from "./sources.js";
import { failureSection } from "./failures.js";

const ALARMS_SHOWN = 2;
const DASHES = [undefined, [7, 3], [2, 3], [9, 3, 2, 3], [4, 4], [12, 3]];

/** All open runs, to be drawn in the same charts. A source that is not a run is shown alone. */
async function readRuns(site, primary) {
  const sources = primary.kind === "run" ? site.sources.filter(({ kind }) => kind === "run") : [primary];
  return Promise.all(
    sources.map(async ({ id, name }, i) => {
      const overview = await get(apiPath(["overview", id]));
      return { id, name, overview, colour: `--series-${i % DASHES.length}`, dash: DASHES[i % DASHES.length] };
    }),
  );
}

function factsLine(source, overview) {
  const step = overview.steps ? `step ${overview.step} of ${overview.steps}` : null;
  const model = overview.model?.split("/").pop(); // shorten a path or hub id; the table of options has it in full
  const facts = [overview.env, overview.algorithm, model, source.status || step].filter(Boolean);
  return el(
    "p",
    { class: "facts" },
    facts.map((fact) => el("span", {}, fact)),
  );
}

function headlines(overview) {
  return el(
    "ul",
    { class: "headline" },
    overview.headline.map((sentence) => el("li", {}, sentence)),
  );
}

function runTable(site, runs, hidden, toggle) {
  if (runs.length < 2) return el("div");
  const options = Object.keys(site.differing);
  const rows = runs.map((run) => {
    const box = el("input", { type: "checkbox", onchange: () => toggle(run.id) });
    box.checked = !hidden.has(run.id);
    const place = site.sources.findIndex(({ id }) => id === run.id);
    return el(
      "tr",
      { "data-key": `run ${run.id}` },
      el("td", {}, el("label", { class: "chip" }, box, swatch(run), run.name)),
      el("td", {}, el("a", { href: overviewHref(run.id), "aria-label": `Details of ${run.name}` }, "details")),
      el("td", { class: "quiet" }, sourceOf(site, run.id).status),
      options.map((name) => el("td", { class: "code" }, JSON.stringify(site.differing[name][place] ?? null))),
    );
  });
  const heads = ["shown in the charts", "", "state"].map((head) =>
    head ? el("th", { scope: "col" }, head) : el("td"),
  );
  const optionHeads = options.map((name) => el("th", { scope: "col", class: "code" }, name));
  const table = el("table", {}, el("thead", {}, el("tr", {}, heads, optionHeads)), el("tbody", {}, rows));
  return el("div", { class: "runs" }, scrollable("Runs, and the options in which they differ", table));
}

function alarmItem(site, run, alarm, named) {
  const file = sourceOf(site, run.id).files.find(({ step, kind }) => step === alarm.step && kind === "train");
  const step = `step ${alarm.step}`;
  const where = file ? el("a", { href: listHref(run.id, file.name) }, step) : step;
  const severity = el("strong", { class: alarm.severity }, alarm.severity === "stop" ? "stopped" : "warning");
  return el("li", {}, severity, named ? ` ${run.name},` : "", " ", where, ": ", alarm.text);
}

/** The most severe and newest alarms; the rest are folded, so that the charts fit on the first screen. */
function alarmList(site, runs) {
  const severity = ({ alarm }) => (alarm.severity === "stop" ? 1 : 0);
  const alarms = runs.flatMap((run) => run.overview.alarms.map((alarm) => ({ run, alarm })));
  alarms.sort((a, b) => severity(b) - severity(a) || b.alarm.step - a.alarm.step);
  if (!alarms.length) return el("div");
  const items = alarms.map(({ run, alarm }) => alarmItem(site, run, alarm, runs.length > 1));
  const more = items.splice(ALARMS_SHOWN);
  const rest = more.length ? el("details", {}, el("summary", {}, `${more.length} more`), el("ul", {}, more)) : null;
  return el("section", { class: "alarms", "aria-label": "Alarms" }, el("ul", {}, items), rest);
}

function valueAt(overview, metric, step) {
  return overview.series[metric]?.find(([pointStep]) => pointStep === step)?.[1] ?? null;
}

/** The evaluation of a file: by step in a run, by environment in results of several environments. */
function evaluationOf(overview, file) {
  if (file.kind !== "eval") return null;
  const { evaluations } = overview;
  if (file.step !== null) return evaluations.find(({ step }) => step === file.step);
  return evaluations.length === 1 ? evaluations[0] : evaluations.find(({ env }) => env === file.name);
}

function fileRow(source, overview, file) {
  const evaluation = evaluationOf(overview, file);
  const train = file.kind === "train";
  const success = train ? valueAt(overview, "train/success_rate", file.step) : evaluation?.overall.value;
  const interval = evaluation ? ` [${percent(evaluation.overall.low)}, ${percent(evaluation.overall.high)}]` : "";
  const broken = file.broken ? el("span", { class: "warn" }, ` ${file.broken} unreadable`) : null;
  return el(
    "tr",
    { "data-key": file.name, class: file.kind },
    el("th", { scope: "row" }, el("a", { href: listHref(source.id, file.name) }, fileTitle(file))),
    el("td", { class: "number" }, number(file.count), broken),
    el("td", { class: "number" }, number(train ? valueAt(overview, "train/return_mean", file.step) : null)),
    el("td", { class: "number" }, percent(success), interval),
  );
}

function fileTable(source, overview) {
  const files = [...source.files].sort((a, b) => (b.step ?? 0) - (a.step ?? 0));
  const heads = ["file", "trajectories", "return", "success"].map((name, i) =>
    el("th", { scope: "col", class: i ? "number" : null }, name),
  );
  const rows = files.map((file) => fileRow(source, overview, file));
  const table = el("table", {}, el("thead", {}, el("tr", {}, heads)), el("tbody", {}, rows));
  return el("section", {}, el("h2", {}, "Trajectories, step by step"), scrollable("Files of trajectories", table));
}

function optionTable(overview) {
  const rows = Object.entries(overview.options ?? {}).map(([name, value]) =>
    el("tr", {}, el("th", { scope: "row", class: "code" }, name), el("td", { class: "code" }, JSON.stringify(value))),
  );
  if (!rows.length) return el("div");
  const table = scrollable("Options of the run", el("table", {}, el("tbody", {}, rows)));
  return el("details", { class: "options" }, el("summary", {}, "Options of this run"), table);
}

/** All charts. They are updated in place when a run writes new steps; a new metric adds a chart. */
class Panels {
  constructor() {
    this.charts = new Map();
    this.grids = new Map(SECTIONS.map((title) => [title, el("div", { class: "grid" })]));
    this.sections = new Map(SECTIONS.map((title) => [title, this.section(title)]));
  }

  section(title) {
    const grid = this.grids.get(title);
    if (title !== OTHER) return el("section", {}, el("h2", {}, title), grid);
    const input = el("input", {
      type: "search",
      placeholder: "memory, train/…",
      oninput: () => this.filter(input.value),
    });
    return el("section", {}, el("h2", {}, title), field("Filter by name", input), grid);
  }

  show(runs) {
    const panels = panelsOf(runs);
    const keys = new Set(panels.map(({ key }) => key));
    for (const [key, { panel, chart }] of this.charts) {
      if (keys.has(key)) continue;
      chart.close();
      panel.remove();
      this.charts.delete(key);
    }
    panels.forEach((data) => this.showPanel(data));
    for (const [title, section] of this.sections) section.hidden = !this.grids.get(title).children.length;
  }

  showPanel(data) {
    const existing = this.charts.get(data.key);
    if (existing) {
      existing.chart.show(data);
      return;
    }
    const chart = new Chart(data);
    const title = el("h3", { class: "code" }, data.title);
    const sentence = data.sentence ? el("p", { class: "quiet" }, data.sentence) : null;
    const kind = ["panel", data.small && "small", data.wide && "wide"].filter(Boolean).join(" ");
    const panel = el("article", { class: kind }, title, sentence, chart.element);
    this.grids.get(data.section).append(panel);
    this.charts.set(data.key, { panel, chart });
  }

  filter(text) {
    const query = text.trim().toLowerCase();
    for (const panel of this.grids.get(OTHER).children) {
      panel.hidden = !panel.textContent.toLowerCase().includes(query);
    }
  }

  close() {
    for (const { chart } of this.charts.values()) chart.close();
  }
}

export async function overviewView(route, site) {
  const primary = () => sourceOf(site, route.source);
  const hidden = new Set();
  const panels = new Panels();
  let runs = [];
  let failures = null;

  async function read() {
    runs = await readRuns(site, primary());
    const newest = newestFile(primary());
    failures = newest && { file: newest, answer: await get(apiPath(["wrong", route.source, newest.name])) };
  }

  const overview = () => runs.find(({ id }) => id === route.source).overview;
  const toggle = (id) => {
    if (!hidden.delete(id)) hidden.add(id);
    panels.show(runs.filter((run) => !hidden.has(run.id)));
  };
  const parts = {
    facts: () => factsLine(primary(), overview()),
    headline: () => headlines(overview()),
    alarms: () => alarmList(site, runs),
    runTable: () => runTable(site, runs, hidden, toggle),
    failureSection: () => (failures ? failureSection(primary(), failures.file, failures.answer) : el("div")),
    files: () => fileTable(primary(), overview()),
  };

  await read();
  const elements = Object.fromEntries(Object.entries(parts).map(([name, build]) => [name, build()]));
  panels.show(runs);
  const [learningSection, ...otherSections] = SECTIONS.map((title) => panels.sections.get(title));
  const toTop = button("Back to the top", () => scrollTo(0, 0), { class: "to-top" });
  const element = el(
    "div",
    { class: "overview" },
    el("div", { class: "masthead" }, el("h1", {}, primary().name), elements.facts, elements.headline),
    elements.alarms,
    elements.runTable,
    el("div", { class: "first" }, learningSection, elements.failureSection),
    ...otherSections.slice(0, -1),
    elements.files,
    otherSections.at(-1),
    optionTable(overview()),
    toTop,
  );

  return {
    title: primary().name,
    element,
    async update() {
      await read();
      for (const [name, build] of Object.entries(parts)) patch(elements[name], build());
      panels.show(runs.filter((run) => !hidden.has(run.id)));
    },
    updateStatus() {
      patch(elements.facts, parts.facts());
      patch(elements.runTable, parts.runTable());
    },
    close: () => panels.close(),
  };
}
