// The filters of a list; each change is written to the address.

import { el, field, select } from "./dom.js";
import { words } from "./format.js";

const TYPING_PAUSE_MS = 300;
const ANY = ["", "any"];

function choices(values) {
  return [ANY, ...values.map((value) => [value, words(value)])];
}

/** An input that calls `onchange` shortly after the last keystroke. */
function textInput(name, query, onchange, properties) {
  const input = el("input", properties);
  input.value = query[name] ?? "";
  let timer;
  input.addEventListener("input", () => {
    clearTimeout(timer);
    timer = setTimeout(() => onchange({ [name]: input.value }), TYPING_PAUSE_MS);
  });
  return input;
}

function range(label, name, query, onchange, step) {
  const end = (side, word) =>
    textInput(`${side}_${name}`, query, onchange, {
      type: "number",
      step,
      "aria-label": `${label}, ${word}`,
      placeholder: word,
    });
  return el("fieldset", { class: "range" }, el("legend", {}, label), end("min", "from"), end("max", "to"));
}

/** `answer`: the result of `getList`, which has the names of all sub-tasks and stop reasons. */
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
    field("Task", textInput("task", query, onchange, { type: "search", size: "14" })),
    range("Return", "return", query, onchange, "any"),
    range("Turns", "turns", query, onchange, "1"),
    el("label", { class: "check" }, parseErrors, "with parse errors"),
  );
  form.addEventListener("submit", (event) => event.preventDefault());
  return form;
}
