// What a world looks like at one turn: each world has a file that draws its state; any other is shown as its JSON.
//
// A state comes from a file that anyone may have written, so nothing in it is taken for granted: a drawing that
// misses what it is about throws, and the state is then shown as text.

import { el } from "../dom.js";
import { drawBabyAI } from "./babyai.js";
import { drawSciWorld } from "./sciworld.js";
import { drawSearchQA } from "./searchqa.js";
import { drawText } from "./text.js";
import { drawTextCraft } from "./textcraft.js";

// A Map, because the name comes from a file: an object would find "constructor" as well.
const drawings = new Map([
  ["textcraft", drawTextCraft],
  ["babyai", drawBabyAI],
  ["sciworld", drawSciWorld],
  ["searchqa", drawSearchQA],
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
