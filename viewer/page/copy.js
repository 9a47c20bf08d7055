// To take away: the trajectory in AgentTraj's format, and the command that makes it again.

import { button, el } from "./dom.js";
import { say } from "./status.js";

/** Where the browser refuses the clipboard, the text itself, selected, to be copied by hand. */
function showToCopy(text) {
  const area = el("textarea", { readonly: true, rows: "12", "aria-label": "To copy" });
  area.value = text;
  const dialog = el(
    "dialog",
    { "aria-label": "To copy" },
    area,
    el(
      "p",
      {},
      button("Close", () => dialog.close()),
    ),
  );
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
  area.select();
}

function copyButton(label, text) {
  return button(label, async () => {
    try {
      await navigator.clipboard.writeText(text);
      say("Copied.");
    } catch {
      showToCopy(text);
    }
  });
}

export function copyTools(answer) {
  return [
    answer.agenttraj ? copyButton("Copy AgentTraj", JSON.stringify(answer.agenttraj, null, 1)) : null,
    answer.command ? copyButton("Copy command", answer.command) : null,
  ];
}
