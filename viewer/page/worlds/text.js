// Any state as an indented tree of names and values, for environments without a drawing.

import { el, foreign } from "../dom.js";

const MAX_DEPTH = 12; // deeper nesting would not fit the page, or would overflow the call stack
const MAX_CHARS = 4000; // of one text; an image in base64 would fill the page

function shortened(text) {
  if (text.length <= MAX_CHARS) return text;
  return `${text.slice(0, MAX_CHARS)}… (${(text.length - MAX_CHARS).toLocaleString("en")} more characters)`;
}

function leaf(value) {
  if (value === "") return el("span", { class: "quiet" }, "empty text");
  if (value === null || value === undefined) return el("span", { class: "quiet" }, "none");
  return foreign(shortened(String(value)));
}

function branch(value, depth) {
  const isList = Array.isArray(value);
  const entries = Object.entries(value);
  if (entries.length === 0) return el("span", { class: "quiet" }, isList ? "empty list" : "nothing");
  if (depth >= MAX_DEPTH) return el("span", { class: "quiet" }, `${entries.length} more, too deep to show`);
  const rows = entries.map(([name, inner]) =>
    el("div", {}, el("dt", { class: isList ? "index" : null }, shortened(name)), el("dd", {}, tree(inner, depth + 1))),
  );
  return el("dl", { class: "tree" }, rows);
}

function tree(value, depth) {
  return value !== null && typeof value === "object" ? branch(value, depth) : leaf(value);
}

export function drawText(state) {
  return tree(state, 0);
}
