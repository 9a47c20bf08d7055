// A web page that an agent operates: its screenshot, and the element that the action touched outlined on it.

import { button, el, foreign, scrollable, svg, visible } from "../dom.js";
import { amount, listOf, required, section, textOf, verdict } from "./parts.js";

// The only address that an image may have: a picture within the state.
const DATA_URL = /^data:image\/(?:png|jpeg|webp);base64,[A-Za-z0-9+/]+={0,2}$/;

function imageAddress(value) {
  const text = textOf(value);
  return DATA_URL.test(text) ? text : null;
}

/** Exactly `length` numbers, else null. */
function numbers(value, length) {
  const list = listOf(value);
  return list.length === length && list.every(Number.isFinite) ? list : null;
}

/** The size of the screenshot in its own pixels, which those of the box are. */
function sizeOf(state) {
  const size = numbers(state.size, 2);
  return size && size.every((side) => side > 0) ? size : null;
}

/** Two outlines, light on dark, because a screenshot may have any colour. */
function outline([width, height], box) {
  const [x, y, boxWidth, boxHeight] = box;
  const shape = { x, y, width: Math.max(0, boxWidth), height: Math.max(0, boxHeight) };
  return svg(
    "svg",
    { viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true" },
    svg("rect", { class: "outline-under", ...shape }),
    svg("rect", { class: "outline", ...shape }),
  );
}

function screenshot(state, address, box) {
  const size = sizeOf(state);
  const image = el("img", { src: address, alt: `Screenshot of ${visible(textOf(state.url) || "the page")}` });
  if (size) {
    image.setAttribute("width", size[0]); // known before it is loaded, so that nothing jumps
    image.setAttribute("height", size[1]);
  }
  const frame = el("div", { class: "screenshot" }, image, size && box ? outline(size, box) : null);
  const toggle = button("Full size", () => {
    const isFull = frame.classList.toggle("full-size");
    toggle.setAttribute("aria-pressed", isFull);
  });
  toggle.setAttribute("aria-pressed", "false");
  return [scrollable("Screenshot", frame), toggle];
}

function elementLine(element, box) {
  if (!element) return null;
  const place = box ? ` at ${box.map(Math.round).join(", ")} (x, y, width, height)` : "";
  return el("p", {}, "Outlined: ", foreign(textOf(element.name) || "(no name)"), el("span", { class: "quiet" }, place));
}

export function drawWebArena(state) {
  const goal = required(state, "goal");
  const address = imageAddress(state.screenshot);
  const element = state.element && typeof state.element === "object" ? state.element : null;
  const box = numbers(element?.box, 4);
  const missing = el("p", { class: "quiet" }, "No screenshot that can be shown.");
  return [
    el("p", { class: "mission long" }, foreign(goal)),
    verdict(state, amount(state.num_turns, "turn")),
    // Text, not a link: it is an address of the world's, and whoever wrote the file chose it.
    section("Address", textOf(state.url) ? foreign(textOf(state.url), "p") : null),
    section("Page", address ? screenshot(state, address, box) : missing, elementLine(element, box)),
  ];
}
