// Create elements. One rule holds for the whole page: text from models, environments, tasks or files is never markup.
//
// Every string on the page passes through `el`, which only creates text nodes and makes control characters visible.
// Links can only lead to other places in this page (`#...`).

const BIDI_CONTROL = /[\u200e\u200f\u061c\u202a-\u202e\u2066-\u2069]/g;
const C0_CONTROL = /[\u0000-\u0008\u000b-\u001f]/g;
const DELETE_OR_C1 = /[\u007f-\u009f]/g;
const HALF_SURROGATE = /[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]/g;
const TEXT_ATTRIBUTES = ["aria-label", "title", "placeholder"];

function codePoint(character) {
  return `⟨U+${character.charCodeAt(0).toString(16).toUpperCase().padStart(4, "0")}⟩`;
}

/** The text with control characters made visible; they could otherwise change how the text is shown. */
export function visible(text) {
  return String(text)
    .replace(C0_CONTROL, (control) => String.fromCharCode(0x2400 + control.charCodeAt(0)))
    .replace(DELETE_OR_C1, (control) => (control === "\u007f" ? "\u2421" : codePoint(control)))
    .replace(BIDI_CONTROL, codePoint)
    .replace(HALF_SURROGATE, codePoint);
}

function fill(node, properties, children) {
  for (const [name, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "href" && !value.startsWith("#")) throw new Error(`a link that leaves the page: ${value}`);
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (TEXT_ATTRIBUTES.includes(name)) node.setAttribute(name, visible(value));
    else node.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    node.append(child instanceof Node ? child : visible(child));
  }
  return node;
}

/** `el("a", {href: "#/", class: "run", onclick: f}, "text", node, [more])`; null and false are left out. */
export function el(tag, properties = {}, ...children) {
  return fill(document.createElement(tag), properties, children);
}

/** The same for the elements of an SVG picture. */
export function svg(tag, properties = {}, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), properties, children);
}

/** Text from a model or a file inside our own sentence; it has its own style and writing direction. */
export function foreign(text, tag = "span") {
  return el(tag, { class: "foreign" }, text);
}

export function button(label, onclick, properties = {}) {
  return el("button", { type: "button", onclick, ...properties }, label);
}

/** A labelled control of a form: `field("Sub-task", select)`. */
export function field(label, control, properties = {}) {
  return el("label", { class: "field", ...properties }, el("span", {}, label), control);
}

/** `choices`: a list of [value, label]. */
export function select(choices, selectedValue, onchange) {
  const node = el("select", { onchange });
  for (const [value, label] of choices) {
    const option = el("option", {}, label);
    option.value = value;
    option.selected = value === selectedValue;
    node.append(option);
  }
  return node;
}

/** A scrolling region that the keyboard can reach and a screen reader can name. */
export function scrollable(label, ...children) {
  return el("div", { class: "scrollable", role: "region", tabindex: "0", "aria-label": label }, children);
}
