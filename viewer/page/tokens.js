// Text as the model has it: token by token, which of them it wrote itself, and how likely each was to it.
//
// Policy tokens (loss_mask 1) are underlined and shaded by how unlikely they were; the others were given. One
// token at a time has the focus; the arrow keys move it, and its numbers stand in a tooltip.

import { el } from "./dom.js";
import { number, signed } from "./format.js";

const SHADES = [0.9, 0.5, 0.2, 0.05]; // a token below the n-th of these probabilities has shade n + 1
const MOVES = { ArrowRight: 1, ArrowLeft: -1, Home: -Infinity, End: Infinity };
let tooltips = 0;

function shadeOf(probability) {
  return SHADES.filter((limit) => probability < limit).length;
}

function shownPiece(tokens, i) {
  if (tokens.text === null) return `${tokens.ids[i]} `;
  return tokens.text[i].replaceAll("\n", "⏎\n") || "∅";
}

function tokenSpan(tokens, i) {
  const isPolicy = tokens.mask[i] === 1;
  const shade = isPolicy ? shadeOf(Math.exp(tokens.log_prob[i])) : 0;
  return el(
    "span",
    { class: isPolicy ? "token policy" : "token", "data-shade": shade, tabindex: "-1" },
    shownPiece(tokens, i),
  );
}

function explanation(tokens, i) {
  const id = `id ${tokens.ids[i]}`;
  if (tokens.mask[i] !== 1) return [id, "given: not trained on"];
  const logProb = tokens.log_prob[i];
  const lines = [id, `log-prob ${number(logProb)}`, `probability ${number(Math.exp(logProb))}`];
  return tokens.advantage ? [...lines, `advantage ${signed(tokens.advantage[i])}`] : lines;
}

export function tokenView(label, tokens) {
  const spans = tokens.ids.map((_, i) => tokenSpan(tokens, i));
  const tooltip = el("div", { role: "tooltip", id: `token-tooltip-${++tooltips}`, hidden: true });
  const text = el(
    "div",
    { class: "tokens", role: "group", "aria-label": `${label}; arrow keys go through them` },
    spans,
  );
  const element = el("div", { class: "token-view" }, text, tooltip);
  let entry = 0;

  function hide() {
    tooltip.hidden = true;
  }

  function explain(i) {
    tooltip.replaceChildren(...explanation(tokens, i).map((line) => el("div", {}, line)));
    tooltip.hidden = false;
    const box = spans[i].getClientRects()[0] ?? spans[i].getBoundingClientRect();
    const home = element.getBoundingClientRect();
    const furthest = Math.max(0, home.width - tooltip.offsetWidth);
    tooltip.style.left = `${Math.min(Math.max(0, box.left - home.left), furthest)}px`;
    tooltip.style.top = `${box.bottom - home.top + 4}px`;
  }

  /** Only one token of the view is a tab stop: the one that had the focus last. */
  function enter(i) {
    spans[entry].tabIndex = -1;
    spans[entry].removeAttribute("aria-describedby");
    entry = i;
    spans[entry].tabIndex = 0;
    spans[entry].setAttribute("aria-describedby", tooltip.id);
  }

  text.addEventListener("focusin", (event) => {
    const i = spans.indexOf(event.target);
    if (i < 0) return;
    enter(i);
    explain(i);
  });
  text.addEventListener("focusout", hide);
  text.addEventListener("pointerover", (event) => {
    const i = spans.indexOf(event.target);
    if (i >= 0) explain(i);
  });
  element.addEventListener("pointerleave", hide);
  text.addEventListener("keydown", (event) => {
    if (event.key === "Escape") hide();
    if (!(event.key in MOVES)) return;
    event.preventDefault();
    spans[Math.min(Math.max(entry + MOVES[event.key], 0), spans.length - 1)].focus();
  });
  if (spans.length) enter(0);
  return element;
}

export function tokenLegend() {
  const sample = (kind, shade, text) => el("span", { class: `token ${kind}`, "data-shade": shade }, text);
  return el(
    "p",
    { class: "token-legend" },
    el("span", {}, sample("policy", 0, "policy token"), " the model wrote it; the loss counts it"),
    el("span", {}, sample("", 0, "given"), " prompt or world"),
    el(
      "span",
      {},
      "the less likely: ",
      [1, 2, 3, 4].map((shade) => sample("policy", shade, ["<0.9", "<0.5", "<0.2", "<0.05"][shade - 1])),
    ),
  );
}
