// Search and answer: the question, what was given as its answer, and what each query found.

import { el, foreign } from "../dom.js";
import { amount, changed, folding, listOf, required, section, textOf, verdict } from "./parts.js";

/** Finds any of the answers as whole words ("no" is not in "north"); null where there is none to find. */
function finder(answers) {
  // The longest first: of "York" and "New York" the whole name is to be marked.
  const escaped = [...answers]
    .sort((a, b) => b.length - a.length)
    .map((answer) => answer.replace(/[\\^$.*+?()[\]{}|/]/g, "\\$&"));
  if (escaped.length === 0) return null;
  return new RegExp(`(?<![\\p{L}\\p{N}])(?:${escaped.join("|")})(?![\\p{L}\\p{N}])`, "giu");
}

/** The text with every golden answer in a <mark>. */
function marked(text, golden) {
  const pieces = [];
  let end = 0;
  for (const match of golden ? text.matchAll(golden) : []) {
    pieces.push(text.slice(end, match.index), el("mark", {}, match[0]));
    end = match.index + match[0].length;
  }
  return el("span", { class: "foreign" }, pieces, text.slice(end));
}

function passageItem(passage, golden) {
  const title = marked(textOf(passage?.title) || "(no title)", golden);
  const text = marked(textOf(passage?.text), golden);
  const hasAnswer = title.querySelector("mark") || text.querySelector("mark");
  const note = hasAnswer ? changed("more", "names an answer") : null;
  return el("li", {}, el("p", { class: "passage-title" }, title, note), el("p", {}, text));
}

function queryItem(entry, place, open, golden) {
  const passages = listOf(entry?.passages);
  const items = passages.map((passage) => passageItem(passage, golden));
  const found = items.filter((item) => item.querySelector("mark")).length;
  const summary = [
    foreign(textOf(entry?.query) || "(empty query)"),
    el("span", { class: "quiet" }, ` ${amount(passages.length, "passage")}, ${found} with an answer`),
  ];
  const content = items.length > 0 ? el("ol", { class: "passages" }, items) : el("p", { class: "quiet" }, "Nothing found.");
  return el("li", {}, folding(`searchqa ${place}`, open, summary, content));
}

function answerRow(term, value) {
  return el("div", {}, el("dt", {}, term), el("dd", {}, value));
}

function answerList(state, answers) {
  const given = textOf(state.given);
  const golden = answers.map((answer, at) => [at > 0 ? " or " : "", foreign(answer)]);
  return el(
    "dl",
    { class: "tree" },
    answerRow("given", given ? foreign(given) : el("span", { class: "quiet" }, "none yet")),
    answers.length > 0 ? answerRow("golden", golden) : null,
  );
}

export function drawSearchQA(state) {
  const question = required(state, "question");
  const answers = listOf(state.answers).map((answer) => textOf(answer).trim()).filter(Boolean);
  const golden = finder(answers);
  const queries = listOf(state.queries);
  // The newest is what the turn brought; older ones wait folded.
  const items = queries.map((entry, at) => queryItem(entry, at, at === queries.length - 1, golden));
  return [
    el("p", { class: "mission long" }, foreign(question)),
    verdict(state, amount(state.num_turns, "turn"), amount(state.hops, "hop")),
    section("Answer", answerList(state, answers)),
    section("Queries", items.length > 0 ? el("ol", { class: "queries" }, items) : null),
  ];
}
