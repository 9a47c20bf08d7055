// One line at the foot of the page that says what happened; screen readers read it when they are free.

import { button, el } from "./dom.js";

const CLEARED_AFTER = 8000;
let clearing;

function show(kind, ...content) {
  const region = document.getElementById("status");
  clearTimeout(clearing);
  region.className = kind;
  region.replaceChildren(...content);
}

function clear() {
  show("");
}

export function say(text) {
  show("notice", el("span", {}, text));
  clearing = setTimeout(clear, CLEARED_AFTER);
}

/** An error stays until it is read and put away. */
export function sayError(error) {
  show("error", el("span", {}, error.message), button("Dismiss", clear));
}
