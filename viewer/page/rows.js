// A file's trajectories filtered, sorted and cut into pages: what the server does, for a page that has none.

import { outcome } from "./format.js";

const NUMERIC = ["line", "return", "num_turns", "num_tokens", "parse_errors"];

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
    (!query.task ||
      String(row.task_id ?? "")
        .toLowerCase()
        .includes(query.task.toLowerCase())) &&
    (!query.parse_errors || row.parse_errors > 0) &&
    within(row.return, query.min_return, query.max_return) &&
    within(row.num_turns, query.min_turns, query.max_turns)
  );
}

function compare(key) {
  if (NUMERIC.includes(key)) return (a, b) => (a[key] ?? -Infinity) - (b[key] ?? -Infinity);
  return (a, b) => String(a[key] ?? "").localeCompare(String(b[key] ?? ""));
}

/** `list`: the answer to `list/<source>/<file>` with every row in it. */
export function selectRows(list, query) {
  const sort = query.sort || "line";
  const ascending = compare(sort.replace("-", ""));
  const order = sort.startsWith("-") ? (a, b) => ascending(b, a) : ascending;
  const matching = list.rows.filter((row) => fits(row, query)).sort(order);
  const offset = Number(query.offset || 0);
  return { ...list, matching: matching.length, rows: matching.slice(offset, offset + Number(query.limit)) };
}
