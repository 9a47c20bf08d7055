// Numbers as people read them: three digits that matter, a dash for what is not there.

const NOTHING = "–";
const LOST = ["env_error", "engine_error"];

/** 0.0031, 0.25, 12.5, 1,234, 6.43 M, 2.5e-7 */
export function number(value) {
  if (value === null || value === undefined) return NOTHING;
  const size = Math.abs(value);
  if (size !== 0 && size < 0.0005) return value.toExponential(1);
  if (size >= 1e9) return `${Number((value / 1e9).toPrecision(3))} G`;
  if (size >= 1e6) return `${Number((value / 1e6).toPrecision(3))} M`;
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  return String(Number(value.toPrecision(3)));
}

export function percent(value) {
  if (value === null || value === undefined) return NOTHING;
  return `${Math.round(value * 100)} %`;
}

export function seconds(value) {
  if (value === null || value === undefined) return NOTHING;
  return value < 0.0095 ? `${number(value * 1000)} ms` : `${number(value)} s`;
}

/** With its sign, because the sign of an advantage is what it says. */
export function signed(value) {
  if (value === null || value === undefined) return NOTHING;
  return value > 0 ? `+${number(value)}` : number(value).replace("-", "−");
}

/** `count(1, "turn")` is "1 turn", `count(3, "turn")` "3 turns". */
export function count(value, noun, plural = `${noun}s`) {
  return `${number(value)} ${value === 1 ? noun : plural}`;
}

/** "max_rounds" as a word of a sentence. */
export function words(name) {
  return name === null ? NOTHING : name.replaceAll("_", " ");
}

/** What became of a trajectory: solved, failed, lost to the infrastructure, or unknown where nobody wrote it down. */
export function outcome(row) {
  if (LOST.includes(row.stop_reason)) return "lost";
  if (row.success === null) return "unknown";
  return row.success ? "solved" : "failed";
}

/** What a trajectory is called: its task, where it has one. */
export function nameOf(row) {
  return row.task_id ?? row.trajectory_id ?? `line ${row.line}`;
}
