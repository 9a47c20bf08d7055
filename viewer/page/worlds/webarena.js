// WebArena: the objective, a screenshot of the page, and the one before with the element that was acted on.

import { el, foreign } from "../dom.js";
import { amount, listOf, required, section, textOf, verdict } from "./parts.js";

const IMAGE = /^data:image\/jpeg;base64,[A-Za-z0-9+/]+=*$/;
const WIDTH = 1280;
const HEIGHT = 720;

/** A screenshot; `box` is [left, top, width, height] in pixels of the browser's window. */
function screenshot(state, box = []) {
  const source = textOf(state?.screenshot);
  if (!IMAGE.test(source)) return null;
  const image = el("img", { src: source, alt: `Screenshot of ${textOf(state.url)}` });
  const frame = el("div", { class: "screenshot" }, image);
  if (box.length === 4 && box.every(Number.isFinite)) {
    const mark = el("div", { class: "acted-on" });
    const [left, top, width, height] = box;
    mark.style.left = `${(100 * left) / WIDTH}%`;
    mark.style.top = `${(100 * top) / HEIGHT}%`;
    mark.style.width = `${(100 * width) / WIDTH}%`;
    mark.style.height = `${(100 * height) / HEIGHT}%`;
    frame.append(mark);
  }
  return frame;
}

export function drawWebArena(state, previous) {
  const objective = required(state, "objective");
  const before = screenshot(previous, listOf(state.acted_on));
  return [
    el("p", { class: "mission long" }, foreign(objective)),
    verdict(state, amount(state.num_turns, "turn"), textOf(state.subtask)),
    section("Page", el("p", {}, foreign(required(state, "url"))), screenshot(state)),
    section("Last action", el("p", {}, foreign(textOf(state.previous_action))), before),
  ];
}
