// A picture of an environment's state at one turn. Each of our environments has a file that draws it; the state of any
// other environment is shown as text.
//
// A state comes from a file that anyone could have written, so its fields are checked. If a drawing lacks a field
// that it needs, it throws, and the state is shown as text.

import { el } from "../dom.js";
import { drawBabyAI } from "./babyai.js";
import { drawSciWorld } from "./sciworld.js";
import { drawSearchQA } from "./searchqa.js";
import { drawText } from "./text.js";
import { drawTextCraft } from "./textcraft.js";
import { drawWebArena } from "./webarena.js";

// A Map, because the name comes from a file, and an object would also have "constructor".
const drawings = new Map([
  ["textcraft", drawTextCraft],
  ["babyai", drawBabyAI],
  ["sciworld", drawSciWorld],
  ["searchqa", drawSearchQA],
  ["webarena", drawWebArena],
]);

/** `previous`: the state before this one, or null. */
export function draw(env, state, previous) {
  try {
    const drawing = drawings.get(env) ?? drawText;
    return el("div", { class: "world" }, drawing(state, previous));
  } catch (error) {
    console.debug(`The state of ${env} is shown as text:`, error);
    return el("div", { class: "world" }, drawText(state));
  }
}
