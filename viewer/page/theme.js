// Light or dark: as the system says, until the reader says otherwise. And the memory of such choices.

import { button } from "./dom.js";

const systemDark = matchMedia("(prefers-color-scheme: dark)");

/** A choice kept from an earlier visit; null where there is none, or where the browser keeps nothing. */
export function recall(name) {
  try {
    return localStorage.getItem(`replay.${name}`);
  } catch {
    return null;
  }
}

export function remember(name, value) {
  try {
    localStorage.setItem(`replay.${name}`, value);
  } catch {
    // Private windows may refuse; the choice then lasts as long as the page.
  }
}

function isDark() {
  const chosen = recall("theme") ?? sessionChoice;
  return chosen ? chosen === "dark" : systemDark.matches;
}

let sessionChoice = null; // for a browser that keeps nothing

/** The toggle; `onchange` is called whenever the colours have changed, for pictures that are painted with them. */
export function themeToggle(onchange) {
  const toggle = button("", () => {
    sessionChoice = isDark() ? "light" : "dark";
    remember("theme", sessionChoice);
    show();
    onchange();
  });
  const show = () => {
    document.documentElement.dataset.theme = isDark() ? "dark" : "light"; // which colours the style sheet takes
    toggle.textContent = isDark() ? "Light" : "Dark";
    toggle.setAttribute("aria-label", isDark() ? "Light colours" : "Dark colours");
  };
  show();
  systemDark.addEventListener("change", () => {
    show();
    onchange();
  });
  return toggle;
}
