// Which charts a run gets, in the order in which one asks: does it learn, how does it behave, is the update healthy?
//
// Pure: from the overviews of the runs that are switched on to the data of each chart. A run is
// {id, name, overview, colour, dash}.

import { align } from "./charts.js";
import { count, number, percent, seconds } from "./format.js";

const LEARNING = "Return and success";
const SUBTASKS = "Success by sub-task";
const BEHAVIOUR = "How it behaves";
const PREFERENCE = "What it prefers";
const UPDATE = "Is the update healthy?";
const TIME = "Where the time goes";
export const OTHER = "All other metrics";
export const SECTIONS = [LEARNING, SUBTASKS, BEHAVIOUR, PREFERENCE, UPDATE, TIME, OTHER];

const METRICS = {
  [LEARNING]: ["train/return_mean", "train/success_rate", "eval/loss", "data/evolving"],
  [BEHAVIOUR]: ["policy/entropy", "train/parse_error_rate", "train/repeated_token_rate"],
  [PREFERENCE]: [
    "preference/sft_loss",
    "preference/margin",
    "preference/accuracy",
    "preference/chosen_log_prob",
    "preference/rejected_log_prob",
    "preference/chosen_reward",
    "preference/rejected_reward",
    "data/pairs",
  ],
  [UPDATE]: [
    "policy/approx_kl",
    "policy/kl",
    "policy/clip_frac",
    "policy/grad_norm",
    "sync/log_prob_diff_mean",
    "sampler/log_prob_diff_mean",
    "sampler/log_prob_diff_max",
    "sampler/is_weight_mean",
    "train/groups_zero_variance",
  ],
};
const SHARES = ["train/success_rate", "train/parse_error_rate", "train/repeated_token_rate", "policy/clip_frac", "preference/accuracy"];
const WHOLE = [0, 1];
const STOPS = /^train\/stop\/(.+)$/;
const PHASES = /^time\/(?!step_s)(.+)_s$/;
const STOP_COLOURS = {
  success: "--solved",
  failure: "--failed",
  max_rounds: "--series-1",
  env_limit: "--series-3",
  length: "--series-4",
  env_error: "--series-5",
  engine_error: "--muted",
};
const PARTS = ["--series-0", "--series-1", "--series-2", "--series-3", "--series-4", "--series-5", "--muted"];

function lineOf(run, values, more = {}) {
  return { name: run.name, colour: run.colour, dash: run.dash, values, ...more };
}

function marksOf(runs) {
  return runs.flatMap((run) => run.overview.alarms.map(({ step, severity }) => ({ step, severity })));
}

function sentenceOf(name, runs) {
  return runs.map((run) => run.overview.glossary?.[name]).find(Boolean) ?? "";
}

/** One metric, a line for each run that has it; null where none has. */
function metricPanel(section, name, runs) {
  const having = runs.filter((run) => run.overview.series[name]?.length);
  if (!having.length) return null;
  const { steps, columns } = align(having.map((run) => run.overview.series[name]));
  const isShare = SHARES.includes(name) || name.startsWith("train/stop/");
  return {
    key: name,
    section,
    title: name,
    sentence: sentenceOf(name, having),
    label: name,
    steps,
    lines: having.map((run, i) => lineOf(run, columns[i])),
    marks: marksOf(having),
    format: isShare ? percent : number,
    fixed: name === "train/success_rate" ? WHOLE : null,
  };
}

/** What evaluations measured, with its interval; `choose` picks the measure out of one evaluation. */
function evaluationPanel(panel, runs, choose) {
  const having = runs.filter((run) => run.overview.evaluations.some(choose));
  if (!having.length) return [];
  const curve = (run, end) => run.overview.evaluations.filter(choose).map((one) => [one.step ?? 0, choose(one)[end]]);
  const { steps, columns } = align(["value", "low", "high"].flatMap((end) => having.map((run) => curve(run, end))));
  const lines = having.map((run, i) =>
    lineOf(run, columns[i], { low: columns[having.length + i], high: columns[2 * having.length + i] }),
  );
  return [{ ...panel, label: panel.title, steps, lines, format: percent, fixed: WHOLE }];
}

function evaluationsOf(runs) {
  return runs.flatMap((run) => run.overview.evaluations);
}

/** An evaluation of several worlds has a success for each; a run has one world, which it need not name. */
function successPanels(key, runs, choose) {
  const worlds = new Set(evaluationsOf(runs).map(({ env }) => env ?? null));
  return [...worlds].flatMap((env) => {
    const title = worlds.size > 1 ? `${key}, ${env ?? "own world"}` : key;
    const panel = { key: title, section: LEARNING, title, sentence: sentenceOf(key, runs) };
    return evaluationPanel(panel, runs, (one) => ((one.env ?? null) === env ? choose(one) : null));
  });
}

function subtaskPanels(runs) {
  const evaluations = evaluationsOf(runs);
  const names = new Set(evaluations.flatMap((one) => Object.keys(one.subtasks)));
  return [...names].flatMap((name) => {
    const last = evaluations.findLast((one) => one.subtasks[name]);
    const sentence = count(last.subtasks[name].items, last.trained_on ? "task" : "held-out task");
    const panel = { key: `sub-task ${name}`, section: SUBTASKS, title: name, sentence, height: 110, small: true };
    return evaluationPanel(panel, runs, (one) => one.subtasks[name]);
  });
}

function turnsPanel(runs) {
  const panel = metricPanel(BEHAVIOUR, "train/turns_mean", runs);
  if (!panel) return null;
  const scheduled = runs.filter((run) => run.overview.series["horizon/max_rounds"]);
  const limits = scheduled.map((run) => {
    const allowed = new Map(run.overview.series["horizon/max_rounds"]);
    const values = panel.steps.map((step) => allowed.get(step));
    return { name: `${run.name}: allowed`, colour: run.colour, dash: [2, 3], stepped: true, values };
  });
  const sentence = `${panel.sentence}; dotted: how many the horizon allowed`;
  return { ...panel, sentence, lines: [...panel.lines, ...limits] };
}

/** The metrics of a run whose names `pattern` matches, by what its group catches, without those that are always 0. */
function partsOf(run, pattern) {
  const named = Object.entries(run.overview.series).map(([name, curve]) => [pattern.exec(name)?.[1], curve]);
  return named.filter(([name, curve]) => name && curve.some(([, value]) => value));
}

/** Parts of a whole cannot be overlaid, so each run has a chart of its own. */
function stackedPanels(section, pattern, title, sentence, runs, more) {
  const having = runs.filter((run) => partsOf(run, pattern).length);
  return having.map((run) => {
    const parts = partsOf(run, pattern);
    const { steps, columns } = align(parts.map(([, curve]) => curve));
    const lines = parts.map(([name], i) => {
      return { name, colour: STOP_COLOURS[name] ?? PARTS[i % PARTS.length], values: columns[i] };
    });
    const full = having.length > 1 ? `${title}: ${run.name}` : title;
    const panel = { key: `${title} ${run.id}`, section, title: full, label: full, sentence, steps, lines };
    return { ...panel, stacked: true, named: true, height: 170, wide: true, ...more };
  });
}

/** Every chart of these runs, as `Chart` takes it, with {key, section, title, sentence}. */
export function panelsOf(runs) {
  const metric = (section) => (METRICS[section] ?? []).map((name) => metricPanel(section, name, runs));
  const stops = "share of this step's trajectories that ended for each reason";
  const times = "wall time of each phase of a step (s)";
  const main = [
    ...metric(LEARNING),
    ...successPanels("eval/avg", runs, (one) => one.overall),
    ...successPanels("eval/pass", runs, (one) => one.pass),
    ...subtaskPanels(runs),
    turnsPanel(runs),
    ...metric(BEHAVIOUR),
    ...stackedPanels(BEHAVIOUR, STOPS, "stop reasons", stops, runs, { format: percent, fixed: WHOLE }),
    ...metric(PREFERENCE),
    ...metric(UPDATE),
    ...stackedPanels(TIME, PHASES, "time by phase", times, runs, { format: seconds }),
  ].filter(Boolean);
  const shown = new Set([...main.map(({ key }) => key), "horizon/max_rounds"]);
  const names = new Set(runs.flatMap((run) => Object.keys(run.overview.series)));
  const others = [...names].filter((name) => !shown.has(name) && !name.startsWith("train/stop/")).sort();
  return [...main, ...others.map((name) => metricPanel(OTHER, name, runs)).filter(Boolean)];
}
