// SearchQA: the question, the agent's answer and the golden answers, and the passages that each query found.

import { el, foreign } from "../dom.js";
import { amount, changed, folding, listOf, required, section, textOf, verdict } from "./parts.js";

/** A pattern that finds the answers as full words ("no" is not in "north"); null if there are no answers. */
function answerPattern(answers) {
  // Longest first, so that "New York" is marked and not only "York".
  const escaped = [...answers]
    .sort((a, b) => b.length - a.length)
    .map((answer) => answer.replace(/[\\^$.*+?()[\]{}|/]/g, "\\$&"));
  if (escaped.length === 0) return null;
  return new RegExp(`(?<![\\p{L}\\p{N}])(?:${escaped.join("|")})(?![\\p{L}\\p{N}])`, "giu");
}

/** The text with every golden answer in a <mark>. */
function markAnswers(text, golden) {
  const pieces = [];
  let end = 0;
  for (const match of golden ? text.matchAll(golden) : []) {
    pieces.push(text.slice(end, match.index), el("mark", {}, match[0]));
    end = match.index + match[0].length;
  }
  return el("span", { class: "foreign" }, pieces, text.slice(end));
}

function passageItem(passage, golden) {
  const title = markAnswers(textOf(passage?.title) || "(no title)", golden);
  const text = markAnswers(textOf(passage?.text), golden);
  const hasAnswer = title.querySelector("mark") || text.querySelector("mark");
  const note = hasAnswer ? changed("more", "contains an answer") : null;
  return el("li", {}, el("p", { class: "passage-title" }, title, note), el("p", {}, text));
}

function queryItem(entry, place, open, golden) {
  const passages = listOf(entry?.passages);
  const items = passages.map((passage) => passageItem(passage, golden));
  const numWithAnswer = items.filter((item) => item.querySelector("mark")).length;
  const summary = [
    foreign(textOf(entry?.query) || "(empty query)"),
    el("span", { class: "quiet" }, ` ${amount(passages.length, "passage")}, ${numWithAnswer} with an answer`),
  ];
  const content = items.length > 0 ? el("ol", { class: "passages" }, items) : el("p", { class: "quiet" }, "Nothing found.");
  return el("li", {}, folding(`searchqa ${place}`, open, summary, content));
}

function answerRow(term, value) {
  return el("div", {}, el("dt", {}, term), el("dd", {}, value));
}

function answerList(state, answers) {
  const answer = textOf(state.given);
  const golden = answers.map((text, i) => [i > 0 ? " or " : "", foreign(text)]);
  return el(
    "dl",
    { class: "tree" },
    answerRow("given", answer ? foreign(answer) : el("span", { class: "quiet" }, "none yet")),
    answers.length > 0 ? answerRow("golden", golden) : null,
  );
}

export function drawSearchQA(state) {
  const question = required(state, "question");
  const answers = listOf(state.answers).map((answer) => textOf(answer).trim()).filter(Boolean);
  const golden = answerPattern(answers);
  const queries = listOf(state.queries);
  // The newest query is open; older ones are folded.
  const items = queries.map((entry, at) => queryItem(entry, at, at === queries.length - 1, golden));
  return [
    el("p", { class: "mission long" }, foreign(question)),
    verdict(state, amount(state.num_turns, "turn"), amount(state.hops, "hop")),
    section("Answer", answerList(state, answers)),
    section("Queries", items.length > 0 ? el("ol", { class: "queries" }, items) : null),
  ];
}
