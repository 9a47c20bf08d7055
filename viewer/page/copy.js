// Copy to the clipboard: the trajectory in AgentTraj's format, and the command that opens its task.

import { button } from "./dom.js";
import { showError, showNotice } from "./status.js";

function copyButton(label, text) {
  return button(label, () => navigator.clipboard.writeText(text).then(() => showNotice("Copied."), showError));
}

export function copyTools(answer) {
  return [
    copyButton("Copy AgentTraj", JSON.stringify(answer.agenttraj, null, 1)),
    answer.command ? copyButton("Copy command", answer.command) : null,
  ];
}
