// Filter and sort a file's trajectories and return one page of them. The query comes from the address of the list.

import { outcome } from "./format.js";

/** Whether a value is in a range; an unknown value is in no range. */
function isInRange(value, low, high) {
  if (!low && !high) return true;
  return value !== null && (!low || value >= Number(low)) && (!high || value <= Number(high));
}

function matches(row, query) {
  return (
    (!query.subtask || row.subtask === query.subtask) &&
    (!query.stop_reason || row.stop_reason === query.stop_reason) &&
    (!query.outcome || outcome(row) === query.outcome) &&
    (!query.task || (row.task_id ?? "").toLowerCase().includes(query.task.toLowerCase())) &&
    (!query.parse_errors || row.parse_errors > 0) &&
    isInRange(row.return, query.min_return, query.max_return) &&
    isInRange(row.num_turns, query.min_turns, query.max_turns)
  );
}

/** Sort numbers by size and texts in natural order (textcraft_9 before textcraft_10); unknown values come last. */
function compare(a, b, sign) {
  if (a === null || b === null) return (a === null) - (b === null);
  return sign * (typeof a === "string" ? a.localeCompare(b, "en", { numeric: true }) : a - b);
}

function distinctValues(rows, name) {
  return [...new Set(rows.map((row) => row[name]).filter(Boolean))].sort();
}

/** {rows, matching, total, subtasks, stop_reasons}: one page of the rows of a file, and facts about all of them. */
export function selectRows(allRows, query) {
  const sort = query.sort || "line";
  const key = sort.replace("-", "");
  const sign = sort.startsWith("-") ? -1 : 1;
  const matching = allRows.filter((row) => matches(row, query)).sort((a, b) => compare(a[key], b[key], sign));
  const offset = Number(query.offset || 0);
  return {
    rows: matching.slice(offset, offset + query.limit),
    matching: matching.length,
    total: allRows.length,
    subtasks: distinctValues(allRows, "subtask"),
    stop_reasons: distinctValues(allRows, "stop_reason"),
  };
}
