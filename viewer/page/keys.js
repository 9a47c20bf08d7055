// Keyboard: one place that knows every key and shows them all at `?`.
//
// A single letter can be struck by accident or by speech input, so the reader can switch them off; and none
// acts while something is typed or a control has its own use for the key.

import { button, el } from "./dom.js";
import { recall, remember } from "./theme.js";

const TYPING = "input:not([type=range], [type=checkbox]), select, dialog";
const USES_SPACE = "button, a, summary, [type=checkbox]";
const USES_ARROWS = "[type=range]";
const ARROWS = ["ArrowLeft", "ArrowRight", "Home", "End"];
const NAMES = { ArrowLeft: "←", ArrowRight: "→", " ": "Space" };

let shortcuts = [];
let enabled = recall("keys") !== "off";

/** `list`: {keys: ["ArrowRight", "j"], does: "next turn", run} each; they replace those of the view before. */
export function setShortcuts(list) {
  shortcuts = list;
}

function isTaken(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented) return true;
  const within = (selector) => event.target.closest(selector) !== null;
  return (
    within(TYPING) || (event.key === " " && within(USES_SPACE)) || (ARROWS.includes(event.key) && within(USES_ARROWS))
  );
}

/** The dialog that lists the keys; it is built when it opens, so it shows the view's own. */
export function showKeys() {
  const toggle = el("input", { type: "checkbox" });
  toggle.checked = enabled;
  toggle.addEventListener("change", () => {
    enabled = toggle.checked;
    remember("keys", enabled ? "on" : "off");
  });
  const rows = [...shortcuts, { keys: ["?"], does: "these keys" }].map(({ keys, does }) =>
    el(
      "div",
      {},
      el(
        "dt",
        {},
        keys.map((key) => el("kbd", {}, NAMES[key] ?? key)),
      ),
      el("dd", {}, does),
    ),
  );
  const dialog = el(
    "dialog",
    { "aria-labelledby": "keys-title" },
    el("h2", { id: "keys-title" }, "Keys"),
    el("dl", { class: "keys" }, rows),
    el("label", { class: "check" }, toggle, "Keys are on"),
    el(
      "p",
      {},
      button("Close", () => dialog.close()),
    ),
  );
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
}

export function listenForKeys() {
  document.addEventListener("keydown", (event) => {
    if (!enabled || isTaken(event)) return;
    const shortcut = event.key === "?" ? { run: showKeys } : shortcuts.find(({ keys }) => keys.includes(event.key));
    if (!shortcut) return;
    event.preventDefault();
    shortcut.run();
  });
}
