// The list of charts, in the order of the questions: does the run learn, how does it behave, is the update healthy?
//
// Pure functions from the overviews of the visible runs to the data of each chart. A run is
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
const UNIT_RANGE = [0, 1];
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
const PART_COLOURS = ["--series-0", "--series-1", "--series-2", "--series-3", "--series-4", "--series-5", "--muted"];

function lineOf(run, values, more = {}) {
  return { name: run.name, colour: run.colour, dash: run.dash, values, ...more };
}

function marksOf(runs) {
  return runs.flatMap((run) => run.overview.alarms.map(({ step, severity }) => ({ step, severity })));
}

function sentenceOf(name, runs) {
  return runs.map((run) => run.overview.glossary?.[name]).find(Boolean) ?? "";
}

/** The chart of one metric, with a line for each run that has it; null if no run has it. */
function metricPanel(section, name, allRuns) {
  const runs = allRuns.filter((run) => run.overview.series[name]?.length);
  if (!runs.length) return null;
  const { steps, columns } = align(runs.map((run) => run.overview.series[name]));
  const isShare = SHARES.includes(name) || name.startsWith("train/stop/");
  return {
    key: name,
    section,
    title: name,
    sentence: sentenceOf(name, runs),
    label: name,
    steps,
    lines: runs.map((run, i) => lineOf(run, columns[i])),
    marks: marksOf(runs),
    format: isShare ? percent : number,
    fixed: name === "train/success_rate" ? UNIT_RANGE : null,
  };
}

/** A chart of evaluation results with intervals; `choose` returns {value, low, high} of one evaluation, or null. */
function evaluationPanel(panel, allRuns, choose) {
  const runs = allRuns.filter((run) => run.overview.evaluations.some(choose));
  if (!runs.length) return [];
  const curve = (run, key) =>
    run.overview.evaluations.filter(choose).map((evaluation) => [evaluation.step ?? 0, choose(evaluation)[key]]);
  const { steps, columns } = align(["value", "low", "high"].flatMap((key) => runs.map((run) => curve(run, key))));
  const lines = runs.map((run, i) =>
    lineOf(run, columns[i], { low: columns[runs.length + i], high: columns[2 * runs.length + i] }),
  );
  return [{ ...panel, label: panel.title, steps, lines, format: percent, fixed: UNIT_RANGE }];
}

function evaluationsOf(runs) {
  return runs.flatMap((run) => run.overview.evaluations);
}

/** One success chart per environment. The evaluations of a run do not name an environment. */
function successPanels(key, runs, choose) {
  const envs = new Set(evaluationsOf(runs).map(({ env }) => env ?? null));
  return [...envs].flatMap((env) => {
    const title = envs.size > 1 ? `${key}, ${env ?? "environment of the run"}` : key;
    const panel = { key: title, section: LEARNING, title, sentence: sentenceOf(key, runs) };
    const chooseEnv = (evaluation) => ((evaluation.env ?? null) === env ? choose(evaluation) : null);
    return evaluationPanel(panel, runs, chooseEnv);
  });
}

function subtaskPanels(runs) {
  const evaluations = evaluationsOf(runs);
  const names = new Set(evaluations.flatMap(({ subtasks }) => Object.keys(subtasks)));
  return [...names].flatMap((name) => {
    const last = evaluations.findLast(({ subtasks }) => subtasks[name]);
    const sentence = count(last.subtasks[name].items, last.trained_on ? "task" : "held-out task");
    const panel = { key: `sub-task ${name}`, section: SUBTASKS, title: name, sentence, height: 110, small: true };
    return evaluationPanel(panel, runs, ({ subtasks }) => subtasks[name]);
  });
}

function turnsPanel(runs) {
  const panel = metricPanel(BEHAVIOUR, "train/turns_mean", runs);
  if (!panel) return null;
  const scheduled = runs.filter((run) => run.overview.series["horizon/max_rounds"]);
  const limits = scheduled.map((run) => {
    const horizons = new Map(run.overview.series["horizon/max_rounds"]);
    const values = panel.steps.map((step) => horizons.get(step));
    return { name: `${run.name}: allowed`, colour: run.colour, dash: [2, 3], stepped: true, values };
  });
  const sentence = `${panel.sentence}; dotted: the maximum (horizon)`;
  return { ...panel, sentence, lines: [...panel.lines, ...limits] };
}

/** [name, curve] of a run's metrics that match `pattern` and are not always 0; the name is the pattern's group. */
function partsOf(run, pattern) {
  const parts = Object.entries(run.overview.series).map(([name, curve]) => [pattern.exec(name)?.[1], curve]);
  return parts.filter(([name, curve]) => name && curve.some(([, value]) => value));
}

/** Stacked charts cannot be overlaid, so each run has its own. */
function stackedPanels(section, pattern, title, sentence, allRuns, more) {
  const runs = allRuns.filter((run) => partsOf(run, pattern).length);
  return runs.map((run) => {
    const parts = partsOf(run, pattern);
    const { steps, columns } = align(parts.map(([, curve]) => curve));
    const lines = parts.map(([name], i) => {
      return { name, colour: STOP_COLOURS[name] ?? PART_COLOURS[i % PART_COLOURS.length], values: columns[i] };
    });
    const fullTitle = runs.length > 1 ? `${title}: ${run.name}` : title;
    const panel = { key: `${title} ${run.id}`, section, title: fullTitle, label: fullTitle, sentence, steps, lines };
    return { ...panel, stacked: true, named: true, height: 170, wide: true, ...more };
  });
}

/** The data of every chart of these runs, for `Chart`, with {key, section, title, sentence}. */
export function panelsOf(runs) {
  const metric = (section) => (METRICS[section] ?? []).map((name) => metricPanel(section, name, runs));
  const stops = "share of this step's trajectories that ended for each reason";
  const times = "wall time of each phase of a step (s)";
  const main = [
    ...metric(LEARNING),
    ...successPanels("eval/avg", runs, ({ overall }) => overall),
    ...successPanels("eval/pass", runs, ({ pass }) => pass),
    ...subtaskPanels(runs),
    turnsPanel(runs),
    ...metric(BEHAVIOUR),
    ...stackedPanels(BEHAVIOUR, STOPS, "stop reasons", stops, runs, { format: percent, fixed: UNIT_RANGE }),
    ...metric(PREFERENCE),
    ...metric(UPDATE),
    ...stackedPanels(TIME, PHASES, "time by phase", times, runs, { format: seconds }),
  ].filter(Boolean);
  const mainNames = new Set([...main.map(({ key }) => key), "horizon/max_rounds"]);
  const names = new Set(runs.flatMap((run) => Object.keys(run.overview.series)));
  const otherNames = [...names].filter((name) => !mainNames.has(name) && !name.startsWith("train/stop/")).sort();
  return [...main, ...otherNames.map((name) => metricPanel(OTHER, name, runs)).filter(Boolean)];
}
