// TextCraft: what is held and what the turn changed, the plan that the oracle has from here, and the commands.

import { el, foreign } from "../dom.js";
import { count, signed } from "../format.js";
import { amount, changed, entriesOf, folding, listOf, required, section, textOf, verdict } from "./parts.js";

/** "craft 3 white carpet using 2 white wool" as {item, inputs}; null if it is no craft command. */
function craftOf(command) {
  const match = /^craft \d+ (.+) using (.+)$/.exec(command);
  if (!match) return null;
  return { item: match[1], inputs: match[2].split(", ").map((input) => input.replace(/^\d+ /, "")) };
}

/** The item that an action of the plan brings. */
function itemOf(action) {
  return craftOf(action)?.item ?? action.replace(/^get \d+ /, "");
}

function amounts(inventory) {
  return new Map(entriesOf(inventory).filter(([, held]) => Number.isFinite(held)));
}

function chip(item, held, difference, goal) {
  const sign = difference === 0 ? null : changed(difference > 0 ? "more" : "less", signed(difference));
  const isGoal = item === goal ? el("span", { class: "quiet" }, "the goal") : null;
  return el("li", { class: held === 0 ? "gone" : null }, el("b", {}, held), " ", foreign(item), sign, isGoal);
}

/** All that is held, then what was used up; differences only where the state before is known. */
function inventory(state, previous) {
  const now = amounts(state.inventory);
  const before = previous?.inventory ? amounts(previous.inventory) : now;
  const usedUp = [...before.keys()].filter((item) => !now.has(item));
  const chips = [...now.keys(), ...usedUp].map((item) => {
    const held = now.get(item) ?? 0;
    return chip(item, held, held - (before.get(item) ?? 0), state.goal);
  });
  return chips.length > 0 ? el("ul", { class: "chips" }, chips) : el("p", { class: "quiet" }, "Nothing is held.");
}

/** For each action of the plan the place of the later one that uses what it brings; the last serves the goal. */
function consumers(plan) {
  return plan.map((action, place) =>
    plan.findIndex((later, at) => at > place && craftOf(later)?.inputs.includes(itemOf(action))),
  );
}

/** In the order of doing; the further an action is from the goal, the deeper it is indented. */
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

/** First the commands that make something of the plan; the rest is there to distract. */
function commandParts(commands, plan) {
  const wanted = new Set(plan.map(itemOf));
  const useful = commands.filter((command) => wanted.has(craftOf(command)?.item));
  const others = commands.filter((command) => !useful.includes(command));
  const title = useful.length === 0 ? count(others.length, "command") : count(others.length, "other");
  return [
    useful.length > 0 ? el("p", { class: "quiet" }, "These make something of the plan:") : null,
    useful.length > 0 ? commandList(useful) : null,
    others.length > 0 ? folding("textcraft commands", false, title, commandList(others)) : null,
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
    section("Plan: what is left to do", plan.length > 0 ? planList(plan) : null),
    section("Commands", commandParts(commands, plan)),
  ];
}
