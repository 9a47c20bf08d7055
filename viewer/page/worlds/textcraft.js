// TextCraft: the inventory and how the turn changed it, the oracle's plan from this state, and the commands.

import { el, foreign } from "../dom.js";
import { count, signed } from "../format.js";
import { amount, changed, entriesOf, folding, listOf, required, section, textOf, verdict } from "./parts.js";

/** "craft 3 white carpet using 2 white wool" as {item, inputs}; null if it is not a craft command. */
function craftOf(command) {
  const match = /^craft \d+ (.+) using (.+)$/s.exec(command); // without "s", quadratic before a line break
  if (!match) return null;
  return { item: match[1], inputs: match[2].split(", ").map((input) => input.replace(/^\d+ /, "")) };
}

/** The item that an action of the plan produces. */
function itemOf(action) {
  return craftOf(action)?.item ?? action.replace(/^get \d+ /, "");
}

function amounts(inventory) {
  return new Map(entriesOf(inventory).filter(([, quantity]) => Number.isFinite(quantity)));
}

function chip(item, quantity, difference, goal) {
  const sign = difference === 0 ? null : changed(difference > 0 ? "more" : "less", signed(difference));
  const isGoal = item === goal ? el("span", { class: "quiet" }, "the goal") : null;
  return el("li", { class: quantity === 0 ? "gone" : null }, el("b", {}, quantity), " ", foreign(item), sign, isGoal);
}

/** All items in the inventory, then the items that were used up. Changes are shown if the previous state is known. */
function inventory(state, previous) {
  const current = amounts(state.inventory);
  const before = previous?.inventory ? amounts(previous.inventory) : current;
  const usedUp = [...before.keys()].filter((item) => !current.has(item));
  const chips = [...current.keys(), ...usedUp].map((item) => {
    const quantity = current.get(item) ?? 0;
    return chip(item, quantity, quantity - (before.get(item) ?? 0), state.goal);
  });
  return chips.length > 0 ? el("ul", { class: "chips" }, chips) : el("p", { class: "quiet" }, "Empty.");
}

/** For each action of the plan, the index of the later action that uses its item; -1 for the last one. */
function consumers(plan) {
  return plan.map((action, place) =>
    plan.findIndex((later, at) => at > place && craftOf(later)?.inputs.includes(itemOf(action))),
  );
}

/** The actions in order; the further an action is from the goal, the more it is indented. */
function planList(plan) {
  const consumer = consumers(plan);
  const depth = [];
  for (let place = plan.length - 1; place >= 0; place--) {
    depth[place] = consumer[place] < 0 ? 0 : depth[consumer[place]] + 1;
  }
  const items = plan.map((action, place) => {
    const use = consumer[place] < 0 ? "" : `for ${consumer[place] + 1}`;
    const item = el("li", {}, foreign(action), " ", el("span", { class: "quiet" }, use));
    item.style.marginInlineStart = `${Math.min(depth[place], 6) * 0.9}rem`;
    return item;
  });
  return el("ol", { class: "plan" }, items);
}

function commandList(commands) {
  return el("ul", { class: "world-lines" }, commands.map((command) => el("li", {}, foreign(command))));
}

/** First the commands that the plan uses, then the distractors. */
function commandParts(commands, plan) {
  const planItems = new Set(plan.map(itemOf));
  const useful = commands.filter((command) => planItems.has(craftOf(command)?.item));
  const distractors = commands.filter((command) => !useful.includes(command));
  const title = useful.length === 0 ? count(distractors.length, "command") : count(distractors.length, "other");
  return [
    useful.length > 0 ? el("p", { class: "quiet" }, "These make items of the plan:") : null,
    useful.length > 0 ? commandList(useful) : null,
    distractors.length > 0 ? folding("textcraft commands", false, title, commandList(distractors)) : null,
  ];
}

export function drawTextCraft(state, previous) {
  const goal = required(state, "goal");
  const plan = listOf(state.plan).map(textOf).filter(Boolean);
  const commands = listOf(state.commands).map(textOf).filter(Boolean);
  return [
    el("p", { class: "mission" }, "Craft ", foreign(goal)),
    verdict(state, amount(state.num_turns, "turn"), textOf(state.subtask)),
    section("Inventory", inventory(state, previous)),
    section("Plan: remaining actions", plan.length > 0 ? planList(plan) : null),
    section("Commands", commandParts(commands, plan)),
  ];
}
