// Parts that the pictures of all environments share: checked values, sections, the verdict, folding lists.

import { el } from "../dom.js";
import { count } from "../format.js";

/** The text of a string or a number, "" for everything else, so that "[object Object]" never appears. */
export function textOf(value) {
  return typeof value === "string" || typeof value === "number" ? String(value) : "";
}

export function listOf(value) {
  return Array.isArray(value) ? value : [];
}

/** [name, value] of an object's fields; empty if the value is not an object. */
export function entriesOf(value) {
  return value !== null && typeof value === "object" && !Array.isArray(value) ? Object.entries(value) : [];
}

/** The text of a field that the drawing needs. Without it the error makes index.js show the state as text. */
export function required(state, name) {
  const text = textOf(state?.[name]);
  if (!text) throw new Error(`no ${name}`);
  return text;
}

/** A titled section of the picture; null if it has no content. */
export function section(title, ...children) {
  const content = children.flat().filter((child) => child !== null && child !== undefined && child !== "");
  return content.length === 0 ? null : el("section", {}, el("h2", {}, title), content);
}

/** "✓ solved" or "○ not solved", followed by further facts; empty ones are left out. */
export function verdict(state, ...facts) {
  const solved = state.success === true;
  const word = el("span", { class: solved ? "verdict solved" : "verdict" }, solved ? "✓ solved" : "○ not solved");
  const items = facts.filter(Boolean).map((fact) => el("span", {}, fact));
  return el("p", { class: "world-facts" }, word, items);
}

/** `amount(3, "turn")` is "3 turns"; "" if the amount is not a number. */
export function amount(value, noun) {
  return Number.isFinite(value) ? count(value, noun) : "";
}

/** A change in one turn, as a sign and a word, so that it does not depend on colour. */
export function changed(kind, text) {
  return el("span", { class: `changed ${kind}` }, text);
}

const isOpen = new Map();

/** A part that folds. The picture is redrawn at every turn, so the user's choice is stored under `key`. */
export function folding(key, open, title, ...children) {
  const summary = el("summary", {}, title);
  const details = el("details", { open: isOpen.get(key) ?? open }, summary, children);
  // "click" also fires for the keyboard, before the change. "toggle" would also fire when the page opens the part.
  summary.addEventListener("click", () => isOpen.set(key, !details.open));
  return details;
}
