// A picture of the environment's state at the current turn. If no states were recorded, re-enacting produces them.

import { isExport, post } from "./data.js";
import { button, el, foreign } from "./dom.js";
import { apiPath } from "./routes.js";
import { showError } from "./status.js";
import { draw } from "./worlds/index.js";

function reenactmentResult(result) {
  const { first_difference: difference } = result;
  if (!difference) return el("p", { class: "quiet" }, "Re-enacted: every observation equals the recorded one.");
  return el(
    "div",
    { class: "difference" },
    el("p", {}, `Re-enacted: the first difference is at turn ${difference.turn}.`),
    el("p", {}, "recorded: ", foreign(difference.then)),
    el("p", {}, "now: ", foreign(difference.now)),
  );
}

/** {element, show(position)} */
export function picturePanel(answer, route) {
  const caption = el("p", { class: "caption" });
  const canvas = el("div", { class: "canvas" });
  const note = el("div");
  const element = el("section", { class: "picture", "aria-label": "State of the environment", tabindex: "0" }, caption, canvas, note);
  let states = [answer.first_state, ...answer.turns.map((turn) => turn.state)];
  let position = 1;

  async function reenact() {
    const reenactButton = note.querySelector("button");
    reenactButton.disabled = true;
    reenactButton.textContent = "Re-enacting…";
    try {
      const result = await post(apiPath(["reenact", route.source, route.file, route.line]));
      states = [result.first_state, ...result.states];
      note.replaceChildren(reenactmentResult(result));
      show(position);
    } catch (error) {
      showError(error);
      offerReenactment();
    }
  }

  function offerReenactment() {
    if (states.some(Boolean)) return;
    const notice = el("p", { class: "quiet" }, "This trajectory was recorded without states to draw.");
    const reenactButton = answer.can_reenact && !isExport ? button("Re-enact it", reenact) : null;
    note.replaceChildren(...[notice, reenactButton].filter(Boolean));
  }

  function show(newPosition) {
    position = newPosition;
    const lastTurn = answer.turns[position - 2];
    const time = position > answer.turns.length ? "At the end" : `Before turn ${position}`;
    const state = states[position - 1];
    caption.replaceChildren(time, ...(lastTurn?.action ? [", after ", foreign(lastTurn.action)] : []));
    canvas.replaceChildren(...(state ? [draw(answer.row.env, state, states[position - 2] ?? null)] : []));
    element.classList.toggle("without", !states.some(Boolean));
  }

  offerReenactment();
  return { element, show };
}
