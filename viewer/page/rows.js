// A file's trajectories filtered, sorted and cut into pages. The address of a list holds what is asked for.

import { outcome } from "./format.js";

/** What is unknown lies in no range that was asked for. */
function within(value, low, high) {
  if (!low && !high) return true;
  return value !== null && (!low || value >= Number(low)) && (!high || value <= Number(high));
}

function fits(row, query) {
  return (
    (!query.subtask || row.subtask === query.subtask) &&
    (!query.stop_reason || row.stop_reason === query.stop_reason) &&
    (!query.outcome || outcome(row) === query.outcome) &&
    (!query.task || (row.task_id ?? "").toLowerCase().includes(query.task.toLowerCase())) &&
    (!query.parse_errors || row.parse_errors > 0) &&
    within(row.return, query.min_return, query.max_return) &&
    within(row.num_turns, query.min_turns, query.max_turns)
  );
}

/** Numbers by size, texts in natural order (textcraft_9 before textcraft_10), then what is unknown. */
function compare(a, b) {
  if (a === null || b === null) return (a === null) - (b === null);
  return typeof a === "string" ? a.localeCompare(b, "en", { numeric: true }) : a - b;
}

function kinds(rows, name) {
  return [...new Set(rows.map((row) => row[name]).filter(Boolean))].sort();
}

/** {rows, matching, total, subtasks, stop_reasons} of all rows of a file. */
export function selectRows(all, query) {
  const sort = query.sort || "line";
  const key = sort.replace("-", "");
  const sign = sort.startsWith("-") ? -1 : 1;
  const matching = all.filter((row) => fits(row, query)).sort((a, b) => sign * compare(a[key], b[key]));
  const offset = Number(query.offset || 0);
  return {
    rows: matching.slice(offset, offset + query.limit),
    matching: matching.length,
    total: all.length,
    subtasks: kinds(all, "subtask"),
    stop_reasons: kinds(all, "stop_reason"),
  };
}
