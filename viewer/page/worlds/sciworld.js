// ScienceWorld: the score and its steps, the inventory, the room, and a tree of all objects.

import { el, foreign } from "../dom.js";
import { signed } from "../format.js";
import { amount, changed, folding, listOf, required, section, textOf, verdict } from "./parts.js";

const MAX_DEPTH = 40; // of the tree; no real object is nested this deep
// Every object has two terminals for electric circuits. They would fill two thirds of the tree.
const TERMINALS = new Set(["terminal 1", "terminal 2", "anode", "cathode"]);

function lines(text) {
  return textOf(text).split("\n").map((line) => line.trimEnd()).filter(Boolean);
}

function score(state, previous) {
  if (!Number.isFinite(state.score)) return null;
  const gained = Number.isFinite(previous?.score) ? state.score - previous.score : 0;
  const meter = el("meter", { min: 0, max: 100, value: Math.max(0, state.score), "aria-label": "Score" });
  const words = el("span", {}, el("b", {}, state.score), " of 100 points");
  return el("p", { class: "score" }, meter, words, gained ? changed(gained > 0 ? "more" : "less", signed(gained)) : null);
}

function goalItem(entry, place, before) {
  const done = entry?.done === true;
  const isNew = done && before.length > 0 && before[place]?.done !== true;
  const words = textOf(entry?.goal);
  return el(
    "li",
    { class: done ? "done" : "open" },
    el("span", { class: "state" }, done ? "✓ done" : "○ not done"),
    words ? foreign(words) : el("span", { class: "quiet" }, "(the environment does not describe it)"),
    isNew ? changed("more", "now") : null,
  );
}

function checklist(goals, before) {
  return goals.length > 0 ? el("ul", { class: "checklist" }, goals.map((goal, at) => goalItem(goal, at, before))) : null;
}

/** Lines of the environment's text. Lines that are new at this turn are marked; lines that it removed come last. */
function changedLines(text, before) {
  const current = lines(text);
  const previous = before === null ? current : lines(before);
  const item = (line, sign) =>
    el("li", { class: /^\s/.test(line) ? "inner" : null }, foreign(line.trim()), sign ? changed(...sign) : null);
  const items = current.map((line) => item(line, previous.includes(line) ? null : ["more", "+ new"]));
  const removed = previous.filter((line) => !current.includes(line)).map((line) => item(line, ["less", "− gone"]));
  return current.length + removed.length > 0 ? el("ul", { class: "world-lines" }, items, removed) : null;
}

/** The description of the room before the turn; null if the agent has moved to another room. */
function roomBefore(state, previous) {
  const before = textOf(previous?.look);
  return before && lines(before)[0] === lines(state.look)[0] ? before : null;
}

function holdsAgent(node, depth = 0) {
  if (depth > MAX_DEPTH) return false;
  return listOf(node?.contents).some((inner) => inner?.name === "agent" || holdsAgent(inner, depth + 1));
}

/** `path` identifies the object in the tree, so that an object that the user opened stays open at the next turn. */
function objectItem(node, path, depth) {
  const name = textOf(node?.name) || "(no name)";
  const inner = listOf(node?.contents).filter((child) => !TERMINALS.has(child?.name));
  if (inner.length === 0 || depth > MAX_DEPTH) return el("li", {}, foreign(name));
  const key = `${path}/${name}`;
  const title = [foreign(name), el("span", { class: "quiet" }, ` ${inner.length}`)];
  const items = el("ul", {}, inner.map((child) => objectItem(child, key, depth + 1)));
  return el("li", {}, folding(key, depth === 0 || holdsAgent(node), title, items));
}

function objectTree(root) {
  if (!root || typeof root !== "object") return null;
  const note = el("p", { class: "quiet" }, "All objects, also those the agent cannot see. The agent's location is unfolded.");
  return [note, el("ul", { class: "objects" }, objectItem(root, "sciworld", 0))];
}

export function drawSciWorld(state, previous) {
  const goal = required(state, "goal");
  const goals = listOf(state.goals);
  const done = goals.filter((entry) => entry?.done === true).length;
  const previousInventory = typeof previous?.inventory === "string" ? previous.inventory : null;
  return [
    el("p", { class: "mission long" }, foreign(goal)),
    verdict(state, amount(state.num_turns, "turn"), textOf(state.subtask), textOf(state.task)),
    score(state, previous),
    section(`Steps that count: ${done} of ${goals.length} done`, checklist(goals, listOf(previous?.goals))),
    section("Inventory", changedLines(state.inventory, previousInventory)),
    section("Room", changedLines(state.look, roomBefore(state, previous))),
    section("Objects", objectTree(state.objects)),
  ];
}
