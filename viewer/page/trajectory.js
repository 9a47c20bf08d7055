// One trajectory, turn by turn: observations, actions and pictures of the environment's state.
//
// Position p = 1..N is the state before the action of turn p; N + 1 is the end. The address, the slider, the
// highlighted card and the picture all show the same position.

import { copyTools } from "./copy.js";
import { get } from "./data.js";
import { button, el } from "./dom.js";
import { nameOf, number, outcome, signed, words } from "./format.js";
import { patch } from "./patch.js";
import { picturePanel } from "./picture.js";
import { playBar } from "./playbar.js";
import { apiPath, listHref, trajectoryHref } from "./routes.js";
import { sourceOf } from "./sources.js";
import { recall, remember } from "./theme.js";
import { tokenLegend } from "./tokens.js";
import { turnList } from "./turns.js";

function fact(name, value, kind = null) {
  if (value === null || value === undefined || value === "") return null;
  return el("div", {}, el("dt", {}, name), el("dd", { class: kind }, value));
}

function ending(answer) {
  const kind = answer.terminated ? "terminated" : answer.truncated ? "truncated" : "";
  return kind ? `${words(answer.row.stop_reason)} (${kind})` : words(answer.row.stop_reason);
}

function facts(answer) {
  const { row } = answer;
  const hasAttempts = answer.turns.some((turn) => turn.kind === "reflect");
  const unit = hasAttempts ? " acts in an attempt" : "";
  const limit = answer.max_rounds ? ` of at most ${answer.max_rounds}${unit}` : "";
  return el(
    "dl",
    { class: "facts-list" },
    fact("outcome", el("span", { class: `outcome ${outcome(row)}` }, outcome(row))),
    fact("return", number(row.return)),
    fact("advantage", row.advantage === null ? null : signed(row.advantage)),
    fact("stopped by", ending(answer)),
    fact("turns", `${number(row.num_turns)}${limit}`),
    fact("tokens", row.num_tokens === null ? null : number(row.num_tokens)),
    fact("sub-task", row.subtask),
    fact("in the loss", row.used_in_loss ? "yes" : "no"),
    fact("step", row.step),
    fact("weights of step", answer.weight_version),
    fact("seed", answer.seed),
    fact("id", row.trajectory_id, "code"),
  );
}

function siblings(route, answer) {
  if (answer.group.length < 2) return null;
  const items = answer.group.map((row) => {
    const isCurrent = row.line === answer.row.line;
    const turn = answer.parts_at[row.line];
    const difference = isCurrent ? "this one" : turn ? `differs at turn ${turn}` : "the same actions";
    const href = trajectoryHref(route.source, route.file, row.line, turn ?? 1);
    const content = [el("strong", {}, number(row.return)), el("span", {}, `${outcome(row)}, ${difference}`)];
    const current = isCurrent ? "true" : null;
    const link = el("a", { class: `sample ${outcome(row)}`, href, "aria-current": current }, content);
    return el("li", { "data-key": `line ${row.line}` }, link);
  });
  return el("section", { class: "siblings" }, el("h2", {}, `Group of ${answer.group.length}`), el("ul", {}, items));
}

function side(route, answer) {
  const error = answer.row.error ? el("p", { class: "lost-error foreign" }, answer.row.error) : null;
  return el("div", { class: "side" }, error, facts(answer), siblings(route, answer));
}

function neighbours(route, source, answer) {
  const link = (line, sign, name) =>
    line === null
      ? null
      : el("a", { class: "step-link", href: trajectoryHref(route.source, route.file, line), "aria-label": name }, sign);
  return el(
    "p",
    { class: "neighbours" },
    link(answer.previous, "←", "Previous trajectory"),
    el("a", { href: listHref(route.source, route.file) }, route.file),
    ` line ${route.line} of ${source.name}`,
    link(answer.next, "→", "Next trajectory"),
  );
}

export async function trajectoryView(route, site) {
  const read = () => get(apiPath(["trajectory", route.source, route.file, route.line]));
  let answer = await read();
  const source = () => sourceOf(site, route.source);
  const end = answer.turns.length + 1;
  const clamp = (turn) => Math.min(Math.max(turn, 1), end);
  let position = clamp(route.turn);

  const turns = turnList(answer, (turn) => go(turn));
  const picture = picturePanel(answer, route);
  const bar = playBar(end, (turn) => go(turn));
  const sideNode = side(route, answer);
  const navigation = neighbours(route, source(), answer);
  const hasTokens = answer.turns.some((turn) => turn.action_tokens);
  const tokensButton = button("Tokens", () => showTokens(!turns.tokensShown()));
  const legend = tokenLegend();

  function show() {
    turns.show(position);
    picture.show(position);
    bar.show(position);
  }

  function go(turn) {
    const next = clamp(turn);
    if (next === position) return;
    position = next;
    history.replaceState(null, "", trajectoryHref(route.source, route.file, route.line, position));
    show();
    turns.scrollToCurrent();
  }

  function showTokens(shown) {
    turns.showTokens(shown);
    tokensButton.setAttribute("aria-pressed", String(shown));
    legend.hidden = !shown;
    remember("tokens", shown ? "on" : "off");
    show();
  }

  const goLine = (line) => line !== null && (location.hash = trajectoryHref(route.source, route.file, line));
  const focusGroup = () =>
    (sideNode.querySelector(".siblings a[aria-current]") ?? sideNode.querySelector(".siblings a"))?.focus();
  const tools = el("div", { class: "title-tools" }, hasTokens ? tokensButton : null, copyTools(answer));

  if (hasTokens) showTokens(recall("tokens") === "on");
  else legend.hidden = true;
  show();
  return {
    title: `${nameOf(answer.row)} · ${route.file} line ${route.line}`,
    element: el(
      "div",
      { class: "trajectory" },
      el("div", { class: "title-row" }, el("h1", {}, nameOf(answer.row)), navigation, tools),
      sideNode,
      picture.element,
      el("div", { class: "turns-column" }, legend, turns.element),
      bar.element,
    ),
    shortcuts: [
      { keys: ["ArrowRight", "j"], does: "next turn", run: () => go(position + 1) },
      { keys: ["ArrowLeft", "k"], does: "previous turn", run: () => go(position - 1) },
      { keys: ["Home"], does: "first turn", run: () => go(1) },
      { keys: ["End"], does: "the end", run: () => go(end) },
      { keys: [" "], does: "play or pause", run: bar.toggle },
      { keys: ["g"], does: "go to the group", run: focusGroup },
      { keys: ["t"], does: "show or hide tokens", run: () => hasTokens && showTokens(!turns.tokensShown()) },
      { keys: ["["], does: "previous trajectory", run: () => goLine(answer.previous) },
      { keys: ["]"], does: "next trajectory", run: () => goLine(answer.next) },
      { keys: ["/"], does: "search", run: () => (location.hash = listHref(route.source, route.file, { find: "1" })) },
    ],
    opened: () => position > 1 && turns.scrollToCurrent(),
    async update() {
      answer = await read(); // the trajectory does not change, but its group and the file can grow
      patch(sideNode, side(route, answer));
      patch(navigation, neighbours(route, source(), answer));
    },
    close: bar.stop,
  };
}
