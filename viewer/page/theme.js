// Light or dark theme: the system's setting until the user chooses one. Also stores the user's choices in the browser.

import { button } from "./dom.js";

const systemDark = matchMedia("(prefers-color-scheme: dark)");

/** A choice stored earlier; null if there is none or the browser stores nothing. */
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
    // Private windows can refuse. Then the choice is lost when the page is closed.
  }
}

function isDark() {
  const choice = recall("theme") ?? sessionChoice;
  return choice ? choice === "dark" : systemDark.matches;
}

let sessionChoice = null; // for a browser that stores nothing

/** The toggle button; `onchange` is called after every change of colours, so that charts can be redrawn. */
export function themeToggle(onchange) {
  const toggle = button("", () => {
    sessionChoice = isDark() ? "light" : "dark";
    remember("theme", sessionChoice);
    show();
    onchange();
  });
  const show = () => {
    document.documentElement.dataset.theme = isDark() ? "dark" : "light"; // selects the colours in style.css
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
