// Keyboard shortcuts: this file handles all keys and lists them when `?` is pressed.
//
// Single letters can be pressed by accident or by speech input, so the user can switch them off. Shortcuts do nothing
// while the user types, or when the focused control uses the key itself.

import { button, el } from "./dom.js";
import { recall, remember } from "./theme.js";

const TYPING = "input:not([type=range], [type=checkbox]), select, dialog";
const USES_SPACE = "button, a, summary, [type=checkbox]";
const USES_ARROWS = "[type=range]";
const ARROWS = ["ArrowLeft", "ArrowRight", "Home", "End"];
const NAMES = { ArrowLeft: "←", ArrowRight: "→", " ": "Space" };

let shortcuts = [];
let enabled = recall("keys") !== "off";

/** Replace the shortcuts with those of the current view: a list of {keys: ["ArrowRight", "j"], does: "next turn", run}. */
export function setShortcuts(list) {
  shortcuts = list;
}

function isTaken(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented) return true;
  const isIn = (selector) => event.target.closest(selector) !== null;
  return isIn(TYPING) || (event.key === " " && isIn(USES_SPACE)) || (ARROWS.includes(event.key) && isIn(USES_ARROWS));
}

/** Open a dialog that lists the keys of the current view. */
export function showKeys() {
  const toggle = el("input", { type: "checkbox" });
  toggle.checked = enabled;
  toggle.addEventListener("change", () => {
    enabled = toggle.checked;
    remember("keys", enabled ? "on" : "off");
  });
  const rows = [...shortcuts, { keys: ["?"], does: "show these keys" }].map(({ keys, does }) =>
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
    el("label", { class: "check" }, toggle, "Keyboard shortcuts are on"),
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
