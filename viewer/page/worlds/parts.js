// What the pictures of all worlds are made of: values read with care, sections, the verdict, things that fold.

import { el } from "../dom.js";
import { count } from "../format.js";

/** The text of a string or a number, "" for everything else: never "[object Object]". */
export function textOf(value) {
  return typeof value === "string" || typeof value === "number" ? String(value) : "";
}

export function listOf(value) {
  return Array.isArray(value) ? value : [];
}

/** Name and value of what is an object; nothing of what is not. */
export function entriesOf(value) {
  return value !== null && typeof value === "object" && !Array.isArray(value) ? Object.entries(value) : [];
}

/** The text of a field without which there is nothing to draw: the error makes index.js show the state as text. */
export function required(state, name) {
  const text = textOf(state?.[name]);
  if (!text) throw new Error(`no ${name}`);
  return text;
}

/** A part of the picture under its title; left out where it has no content. */
export function section(title, ...children) {
  const content = children.flat().filter((child) => child !== null && child !== undefined && child !== "");
  return content.length === 0 ? null : el("section", {}, el("h2", {}, title), content);
}

/** Solved or not, in a word and by a sign, then further facts; empty ones are left out. */
export function verdict(state, ...facts) {
  const solved = state.success === true;
  const word = el("span", { class: solved ? "verdict solved" : "verdict" }, solved ? "✓ solved" : "○ not solved");
  const others = facts.filter(Boolean).map((fact) => el("span", {}, fact));
  return el("p", { class: "world-facts" }, word, others);
}

/** `amount(3, "turn")` is "3 turns"; "" where the amount is no number. */
export function amount(value, noun) {
  return Number.isFinite(value) ? count(value, noun) : "";
}

/** What one turn changed, as a sign and a word, so that neither colour nor shape alone says it. */
export function changed(kind, text) {
  return el("span", { class: `changed ${kind}` }, text);
}

const chosen = new Map();

/** A part that folds. The picture is drawn anew at every turn, so what the reader opened is remembered by `key`. */
export function folding(key, open, title, ...children) {
  const summary = el("summary", {}, title);
  const details = el("details", { open: chosen.get(key) ?? open }, summary, children);
  // The click comes before the change, and from the keyboard too; "toggle" would also tell of our own opening.
  summary.addEventListener("click", () => chosen.set(key, !details.open));
  return details;
}
