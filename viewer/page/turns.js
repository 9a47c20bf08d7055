// One card per turn: the observation before it, the thought, the action and the reward.

import { button, el, foreign } from "./dom.js";
import { number, outcome, seconds, words } from "./format.js";
import { tokenView } from "./tokens.js";

function block(kind, label, content) {
  return el("div", { class: `block ${kind}` }, el("span", { class: "label" }, label), content);
}

const KINDS = { plan: "plan", reflect: "reflection" }; // of turns that no environment answers

function modelText(turn) {
  if (turn.kind in KINDS) return block("thought", KINDS[turn.kind], foreign(turn.action_text, "p"));
  if (turn.action === null) return block("action", "model", foreign(turn.action_text, "p"));
  const thought = turn.thought ? block("thought", "thought", foreign(turn.thought, "p")) : null;
  const advice = turn.advice ? block("thought", "oracle", foreign(turn.advice, "p")) : null;
  return [thought, block("action", "action", foreign(turn.action, "p")), advice];
}

function meta(turn) {
  return el(
    "span",
    { class: "meta" },
    turn.parse_error ? el("span", { class: "parse-error" }, "parse error: ", turn.parse_error) : null,
    el("span", { class: turn.reward ? "rewarded" : null }, `reward ${number(turn.reward)}`),
    Number.isFinite(turn.generate_s) ? el("span", {}, `model ${seconds(turn.generate_s)}`) : null,
    Number.isFinite(turn.env_s) ? el("span", {}, `env ${seconds(turn.env_s)}`) : null,
  );
}

function textOrTokens(text, tokens, label, withTokens) {
  return withTokens && tokens?.ids.length ? tokenView(label, tokens) : foreign(text, "p");
}

function firstObservation(opening) {
  return opening.at(-1)?.role === "user" ? opening.at(-1).content : null;
}

/** The prompt before the first turn. Shown as tokens, it includes the first observation. */
export function openingCard(opening, tokens = null, withTokens = false) {
  if (withTokens && tokens) {
    return el("li", { class: "opening" }, block("observation", "opening", tokenView("Tokens of the opening", tokens)));
  }
  const messages = firstObservation(opening) === null ? opening : opening.slice(0, -1);
  if (!messages.length) return null;
  const blocks = messages.map(({ role, content }) => block(role, role, foreign(content, "p")));
  return el("li", { class: "opening" }, el("details", {}, el("summary", {}, "Prompt"), blocks));
}

/** `before`: {text, tokens} of the observation before the turn; `heading`: a button or a plain title. */
export function turnCard(turn, number, before, heading, withTokens = false) {
  const observation =
    before.text === null
      ? null
      : block(
          "observation",
          "observation",
          textOrTokens(before.text, before.tokens, `Tokens of the observation before turn ${number}`, withTokens),
        );
  const action =
    withTokens && turn.action_tokens
      ? block("action", "model", tokenView(`Tokens of turn ${number}`, turn.action_tokens))
      : modelText(turn);
  return el("li", { class: "turn" }, el("div", { class: "turn-head" }, heading, meta(turn)), observation, action);
}

function endCard(row, before, heading, withTokens) {
  const outcomeLabel = el("span", { class: `outcome ${outcome(row)}` }, outcome(row));
  const result = el("span", { class: "meta" }, outcomeLabel, el("span", {}, words(row.stop_reason)));
  const observation = before.text
    ? block(
        "observation",
        "observation",
        textOrTokens(before.text, before.tokens, "Tokens of the last observation", withTokens),
      )
    : null;
  return el("li", { class: "turn end" }, el("div", { class: "turn-head" }, heading, result), observation);
}

/** The observation before turn `number`. The first one is left out if the opening's tokens already include it. */
export function observationBefore(opening, turns, number, openingShown = false) {
  if (number > 1) return { text: turns[number - 2].observation_text, tokens: turns[number - 2].observation_tokens };
  return { text: openingShown ? null : firstObservation(opening), tokens: null };
}

function turnTitle(turn, number) {
  return turn.kind in KINDS ? `Turn ${number}: ${KINDS[turn.kind]}` : `Turn ${number}`;
}

/** Returns {element, show(position), showTokens(shown), tokensShown(), scrollToCurrent()}. */
export function turnList(answer, onselect) {
  const element = el("ol", { class: "turns" });
  let withTokens = false;
  let cards = [];

  function build() {
    const openingShown = withTokens && answer.opening_tokens !== null;
    const title = (label, position) => button(label, () => onselect(position), { class: "turn-title" });
    const before = (position) => observationBefore(answer.opening, answer.turns, position, openingShown);
    cards = answer.turns.map((turn, i) =>
      turnCard(turn, i + 1, before(i + 1), title(turnTitle(turn, i + 1), i + 1), withTokens),
    );
    const end = answer.turns.length + 1;
    cards.push(endCard(answer.row, before(end), title("End", end), withTokens));
    const opening = openingCard(answer.opening, answer.opening_tokens, withTokens);
    element.replaceChildren(...[opening, ...cards].filter(Boolean));
  }

  build();
  return {
    element,
    tokensShown: () => withTokens,
    show(position) {
      cards.forEach((card, i) => {
        if (i + 1 === position) card.setAttribute("aria-current", "step");
        else card.removeAttribute("aria-current");
      });
    },
    showTokens(shown) {
      withTokens = shown;
      build();
    },
    scrollToCurrent() {
      element.querySelector("[aria-current]")?.scrollIntoView({ block: "nearest" });
    },
  };
}
