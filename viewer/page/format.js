// Numbers for people: three significant digits, and a dash for missing values.

const MISSING = "–";
const LOST = ["env_error", "engine_error"];

/** 0.0031, 0.25, 12.5, 1,234, 6.43 M, 2.5e-7 */
export function number(value) {
  if (value === null || value === undefined) return MISSING;
  const size = Math.abs(value);
  if (size !== 0 && size < 0.0005) return value.toExponential(1);
  if (size >= 1e9) return `${Number((value / 1e9).toPrecision(3))} G`;
  if (size >= 1e6) return `${Number((value / 1e6).toPrecision(3))} M`;
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  return String(Number(value.toPrecision(3)));
}

export function percent(value) {
  if (value === null || value === undefined) return MISSING;
  return `${Math.round(value * 100)} %`;
}

export function seconds(value) {
  if (value === null || value === undefined) return MISSING;
  return value < 0.0095 ? `${number(value * 1000)} ms` : `${number(value)} s`;
}

/** A number with its sign, e.g. an advantage, whose sign matters most. */
export function signed(value) {
  if (value === null || value === undefined) return MISSING;
  return value > 0 ? `+${number(value)}` : number(value).replace("-", "−");
}

/** `count(1, "turn")` is "1 turn", `count(3, "turn")` "3 turns". */
export function count(value, noun, plural = `${noun}s`) {
  return `${number(value)} ${value === 1 ? noun : plural}`;
}

/** A name such as "max_rounds" as words of a sentence. */
export function words(name) {
  return name === null ? MISSING : name.replaceAll("_", " ");
}

/** The outcome of a trajectory: solved, failed, lost to the infrastructure, or unknown if it was not recorded. */
export function outcome(row) {
  if (LOST.includes(row.stop_reason)) return "lost";
  if (row.success === null) return "unknown";
  return row.success ? "solved" : "failed";
}

/** The title of a trajectory: its task, or its id, or its line number. */
export function nameOf(row) {
  return row.task_id ?? row.trajectory_id ?? `line ${row.line}`;
}
