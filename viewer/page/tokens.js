// A text token by token: which tokens the policy sampled, and with what probability.
//
// Policy tokens (loss_mask 1) are underlined; the less likely they were, the darker. All others are context. One token
// at a time has the focus. The arrow keys move the focus, and a tooltip shows the token's numbers.

import { el } from "./dom.js";
import { number, signed } from "./format.js";

const SHADES = [0.9, 0.5, 0.2, 0.05]; // the shade of a token is the number of these limits above its probability
const MOVES = { ArrowRight: 1, ArrowLeft: -1, Home: -Infinity, End: Infinity };
let tooltips = 0;

function shadeOf(probability) {
  return SHADES.filter((limit) => probability < limit).length;
}

function tokenText(tokens, i) {
  if (tokens.text === null) return `${tokens.ids[i]} `;
  return tokens.text[i].replaceAll("\n", "⏎\n") || "∅";
}

function tokenSpan(tokens, i) {
  const isPolicy = tokens.mask[i] === 1;
  const shade = isPolicy ? shadeOf(Math.exp(tokens.log_prob[i])) : 0;
  return el(
    "span",
    { class: isPolicy ? "token policy" : "token", "data-shade": shade, tabindex: "-1" },
    tokenText(tokens, i),
  );
}

function explanation(tokens, i) {
  const id = `id ${tokens.ids[i]}`;
  if (tokens.mask[i] !== 1) return [id, "context: not trained on"];
  const logProb = tokens.log_prob[i];
  const lines = [id, `log-prob ${number(logProb)}`, `probability ${number(Math.exp(logProb))}`];
  return tokens.advantage ? [...lines, `advantage ${signed(tokens.advantage[i])}`] : lines;
}

export function tokenView(label, tokens) {
  const spans = tokens.ids.map((_, i) => tokenSpan(tokens, i));
  const tooltip = el("div", { role: "tooltip", id: `token-tooltip-${++tooltips}`, hidden: true });
  const text = el(
    "div",
    { class: "tokens", role: "group", "aria-label": `${label}; use the arrow keys to move` },
    spans,
  );
  const element = el("div", { class: "token-view" }, text, tooltip);
  let focused = 0;

  function hide() {
    tooltip.hidden = true;
  }

  function explain(i) {
    tooltip.replaceChildren(...explanation(tokens, i).map((line) => el("div", {}, line)));
    tooltip.hidden = false;
    const box = spans[i].getClientRects()[0] ?? spans[i].getBoundingClientRect();
    const frame = element.getBoundingClientRect();
    const maxLeft = Math.max(0, frame.width - tooltip.offsetWidth);
    tooltip.style.left = `${Math.min(Math.max(0, box.left - frame.left), maxLeft)}px`;
    tooltip.style.top = `${box.bottom - frame.top + 4}px`;
  }

  /** Make token i the view's only tab stop. */
  function enter(i) {
    spans[focused].tabIndex = -1;
    spans[focused].removeAttribute("aria-describedby");
    focused = i;
    spans[focused].tabIndex = 0;
    spans[focused].setAttribute("aria-describedby", tooltip.id);
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
    spans[Math.min(Math.max(focused + MOVES[event.key], 0), spans.length - 1)].focus();
  });
  if (spans.length) enter(0);
  return element;
}

export function tokenLegend() {
  const sample = (kind, shade, text) => el("span", { class: `token ${kind}`, "data-shade": shade }, text);
  return el(
    "p",
    { class: "token-legend" },
    el("span", {}, sample("policy", 0, "policy token"), " sampled by the model, in the loss"),
    el("span", {}, sample("", 0, "context"), " from the prompt or the environment"),
    el(
      "span",
      {},
      "probability: ",
      [1, 2, 3, 4].map((shade) => sample("policy", shade, ["<0.9", "<0.5", "<0.2", "<0.05"][shade - 1])),
    ),
  );
}
