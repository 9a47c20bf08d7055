// To take away: the trajectory in AgentTraj's format, and the command that makes it again.

import { button } from "./dom.js";
import { say, sayError } from "./status.js";

function copyButton(label, text) {
  return button(label, () => navigator.clipboard.writeText(text).then(() => say("Copied."), sayError));
}

export function copyTools(answer) {
  return [
    copyButton("Copy AgentTraj", JSON.stringify(answer.agenttraj, null, 1)),
    answer.command ? copyButton("Copy command", answer.command) : null,
  ];
}
