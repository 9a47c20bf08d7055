// The filters of a list; each change goes into the address, and so to the server.

import { el, field, select } from "./dom.js";
import { words } from "./format.js";

const TYPING_PAUSE = 300;
const ANY = ["", "any"];

function choices(values) {
  return [ANY, ...values.map((value) => [value, words(value)])];
}

/** An input whose every keystroke counts, a moment after the last one. */
function typed(name, query, onchange, properties) {
  const input = el("input", properties);
  input.value = query[name] ?? "";
  let waiting;
  input.addEventListener("input", () => {
    clearTimeout(waiting);
    waiting = setTimeout(() => onchange({ [name]: input.value }), TYPING_PAUSE);
  });
  return input;
}

function range(label, name, query, onchange, step) {
  const end = (side, word) =>
    typed(`${side}_${name}`, query, onchange, {
      type: "number",
      step,
      "aria-label": `${label}, ${word}`,
      placeholder: word,
    });
  return el("fieldset", { class: "range" }, el("legend", {}, label), end("min", "from"), end("max", "to"));
}

/** `answer`: the list's, which knows what sub-tasks and stop reasons there are. */
export function filterForm(query, answer, onchange) {
  const pick = (name, values) => {
    const node = select(values, query[name] ?? "", () => onchange({ [name]: node.value }));
    return node;
  };
  const parseErrors = el("input", { type: "checkbox" });
  parseErrors.checked = query.parse_errors === "1";
  parseErrors.addEventListener("change", () => onchange({ parse_errors: parseErrors.checked ? "1" : "" }));
  const form = el(
    "form",
    { class: "filters", "aria-label": "Filters" },
    field(
      "Outcome",
      pick("outcome", [ANY, ["solved", "solved"], ["failed", "failed"], ["lost", "lost"], ["unknown", "unknown"]]),
    ),
    field("Sub-task", pick("subtask", [ANY, ...answer.subtasks.map((name) => [name, name])])),
    field("Stopped by", pick("stop_reason", choices(answer.stop_reasons))),
    field("Task", typed("task", query, onchange, { type: "search", size: "14" })),
    range("Return", "return", query, onchange, "any"),
    range("Turns", "turns", query, onchange, "1"),
    el("label", { class: "check" }, parseErrors, "with parse errors"),
  );
  form.addEventListener("submit", (event) => event.preventDefault());
  return form;
}
