// The world's own picture of its state at the turn that is shown; where none was kept, playing it again finds it.

import { isExport, post } from "./data.js";
import { button, el, foreign } from "./dom.js";
import { apiPath } from "./routes.js";
import { sayError } from "./status.js";
import { draw } from "./worlds/index.js";

function reenactmentResult(result) {
  const { first_difference: difference } = result;
  if (!difference) return el("p", { class: "quiet" }, "Played again just now: every observation came out as before.");
  return el(
    "div",
    { class: "difference" },
    el("p", {}, `Played again just now: it differs first at turn ${difference.turn}.`),
    el("p", {}, "then: ", foreign(difference.then)),
    el("p", {}, "now: ", foreign(difference.now)),
  );
}

/** {element, show(position)} */
export function picturePanel(answer, route) {
  const caption = el("p", { class: "caption" });
  const canvas = el("div", { class: "canvas" });
  const note = el("div");
  const element = el("section", { class: "picture", "aria-label": "The world", tabindex: "0" }, caption, canvas, note);
  let states = [answer.first_state, ...answer.turns.map((turn) => turn.state)];
  let position = 1;

  async function reenact() {
    const pressed = note.querySelector("button");
    pressed.disabled = true;
    pressed.textContent = "Playing it again…";
    try {
      const result = await post(apiPath(["reenact", route.source, route.file, route.line]));
      states = [result.first_state, ...result.states];
      note.replaceChildren(reenactmentResult(result));
      show(position);
    } catch (error) {
      sayError(error);
      offer();
    }
  }

  function offer() {
    if (states.some(Boolean)) return;
    const about = el("p", { class: "quiet" }, "No picture was kept with this trajectory.");
    const again = answer.can_reenact && !isExport ? button("Re-enact it", reenact) : null;
    note.replaceChildren(...[about, again].filter(Boolean));
  }

  function show(at) {
    position = at;
    const last = answer.turns[at - 2];
    const place = at > answer.turns.length ? "At the end" : `Before turn ${at}`;
    const state = states[at - 1];
    caption.replaceChildren(place, ...(last?.action ? [", after ", foreign(last.action)] : []));
    canvas.replaceChildren(...(state ? [draw(answer.row.env, state, states[at - 2] ?? null)] : []));
    element.classList.toggle("without", !states.some(Boolean));
  }

  offer();
  return { element, show };
}
