// The status line at the bottom of the page, for notices and errors. Screen readers announce it.

import { button, el } from "./dom.js";

const NOTICE_MS = 8000;
let timer;

function show(kind, ...content) {
  const region = document.getElementById("status");
  clearTimeout(timer);
  region.className = kind;
  region.replaceChildren(...content);
}

function clear() {
  show("");
}

export function showNotice(text) {
  show("notice", el("span", {}, text));
  timer = setTimeout(clear, NOTICE_MS);
}

/** Show an error until the user dismisses it. */
export function showError(error) {
  show("error", el("span", {}, error.message), button("Dismiss", clear));
}
