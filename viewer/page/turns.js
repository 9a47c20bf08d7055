// Turns as cards: the observation before, then thought and action apart, and what came of it.

import { button, el, foreign } from "./dom.js";
import { number, outcome, seconds, words } from "./format.js";
import { tokenView } from "./tokens.js";

function block(kind, label, content) {
  return el("div", { class: `block ${kind}` }, el("span", { class: "label" }, label), content);
}

function said(turn) {
  if (turn.action === null) return block("action", "said", foreign(turn.action_text, "p"));
  const thought = turn.thought ? block("thought", "thought", foreign(turn.thought, "p")) : null;
  return [thought, block("action", "action", foreign(turn.action, "p"))];
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

function shownText(text, tokens, label, withTokens) {
  return withTokens && tokens?.ids.length ? tokenView(label, tokens) : foreign(text, "p");
}

function firstObservation(opening) {
  return opening.at(-1)?.role === "user" ? opening.at(-1).content : null;
}

/** What was said before the first turn; as tokens, with the first observation that belongs to the same stretch. */
export function openingCard(opening, tokens = null, withTokens = false) {
  if (withTokens && tokens) {
    return el("li", { class: "opening" }, block("observation", "opening", tokenView("Tokens of the opening", tokens)));
  }
  const messages = firstObservation(opening) === null ? opening : opening.slice(0, -1);
  if (!messages.length) return null;
  const blocks = messages.map(({ role, content }) => block(role, role, foreign(content, "p")));
  return el("li", { class: "opening" }, el("details", {}, el("summary", {}, "Prompt"), blocks));
}

/** `before`: {text, tokens} of the observation that the turn answers; `heading`: a button or a plain title. */
export function turnCard(turn, place, before, heading, withTokens = false) {
  const seen =
    before.text === null
      ? null
      : block(
          "observation",
          "observation",
          shownText(before.text, before.tokens, `Tokens of the observation before turn ${place}`, withTokens),
        );
  const own =
    withTokens && turn.action_tokens
      ? block("action", "said", tokenView(`Tokens of turn ${place}`, turn.action_tokens))
      : said(turn);
  return el("li", { class: "turn" }, el("div", { class: "turn-head" }, heading, meta(turn)), seen, own);
}

function endCard(row, before, heading, withTokens) {
  const became = el("span", { class: `outcome ${outcome(row)}` }, outcome(row));
  const result = el("span", { class: "meta" }, became, el("span", {}, words(row.stop_reason)));
  const seen = before.text
    ? block(
        "observation",
        "observation",
        shownText(before.text, before.tokens, "Tokens of the last observation", withTokens),
      )
    : null;
  return el("li", { class: "turn end" }, el("div", { class: "turn-head" }, heading, result), seen);
}

/** The observation before turn `place`; none for the first when it already stands among the opening's tokens. */
export function observationBefore(opening, turns, place, openingShown = false) {
  if (place > 1) return { text: turns[place - 2].observation_text, tokens: turns[place - 2].observation_tokens };
  return { text: openingShown ? null : firstObservation(opening), tokens: null };
}

/** {element, show(position), showTokens(shown), tokensShown(), scrollToCurrent()} */
export function turnList(answer, onselect) {
  const element = el("ol", { class: "turns" });
  let withTokens = false;
  let cards = [];

  function build() {
    const openingShown = withTokens && answer.opening_tokens !== null;
    const title = (label, place) => button(label, () => onselect(place), { class: "turn-title" });
    const before = (place) => observationBefore(answer.opening, answer.turns, place, openingShown);
    cards = answer.turns.map((turn, i) =>
      turnCard(turn, i + 1, before(i + 1), title(`Turn ${i + 1}`, i + 1), withTokens),
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
