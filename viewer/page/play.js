// Live play in an environment: act yourself, ask the oracle, or let the model act.

import { post } from "./data.js";
import { button, el, field, foreign, select } from "./dom.js";
import { number } from "./format.js";
import { playHref } from "./routes.js";
import { showError, showNotice } from "./status.js";
import { observationBefore, openingCard, turnCard } from "./turns.js";
import { draw } from "./worlds/index.js";

/** The prompt and all turns so far, newest last; `opening` ends with the first observation. */
function transcript(game, opening) {
  const cards = game.turns.map((turn, i) => {
    const heading = el("span", { class: "turn-title" }, `Turn ${i + 1}`);
    return turnCard(turn, i + 1, observationBefore(opening, game.turns, i + 1), heading);
  });
  return el("ol", { class: "turns" }, openingCard(opening), cards);
}

function observationNow(game) {
  const verdict = `The episode is over: ${game.success ? "solved" : "not solved"}, reward ${number(game.reward)}.`;
  const label = el("span", { class: "label" }, game.done ? "last observation" : "observation");
  const text = el(
    "div",
    { role: "status" },
    foreign(game.observation, "p"),
    game.done ? el("p", { class: "over" }, verdict) : null,
  );
  return el("div", { class: "block observation now", tabindex: "-1" }, label, text);
}

class Player {
  constructor(model) {
    this.model = model;
    this.game = null;
    this.states = [];
    this.element = el("div", { class: "player" });
  }

  /** Send a request and pass the answer to `use`. Further requests are ignored until it is done. */
  async request(path, body, use) {
    if (this.busy) return;
    this.busy = true;
    this.element.setAttribute("aria-busy", "true");
    try {
      await use(await post(path, body));
    } catch (error) {
      showError(error);
    } finally {
      this.busy = false;
      this.element.removeAttribute("aria-busy");
    }
  }

  async start(env, taskIndex) {
    await this.close();
    await this.request("play/new", { env, task_index: taskIndex }, (game) => {
      this.env = env;
      this.states = [];
      this.opening = [...game.prompt, { role: "user", content: game.observation }];
      this.show(game);
    });
  }

  async step(action) {
    if (!action.trim()) return;
    await this.request("play/step", { session: this.game.session, action }, (game) => this.show(game));
  }

  async letModelAct() {
    await this.request("play/model", { session: this.game.session }, (game) => this.show(game));
  }

  async askOracle() {
    await this.request("play/oracle", { session: this.game.session }, ({ thought, action }) => {
      this.input.value = action;
      this.input.focus();
      this.advice.replaceChildren(el("p", {}, "Oracle: ", foreign(thought ?? ""), " ", foreign(action)));
    });
  }

  async save() {
    await this.request("play/save", { session: this.game.session }, ({ path }) => showNotice(`Saved to ${path}`));
  }

  async close() {
    if (this.game) await post("play/close", { session: this.game.session }).catch(() => {}); // it may be closed already
    this.game = null;
  }

  show(game) {
    this.game = game;
    this.states.push(game.state);
    this.advice = el("div", { role: "status", class: "advice" });
    const controls = game.done ? this.saveTools() : this.controls();
    this.element.replaceChildren(
      el("div", { class: "player-main" }, transcript(game, this.opening), observationNow(game), this.advice, controls),
      this.picture(),
    );
    (game.done ? this.element.querySelector(".now") : this.input).focus();
  }

  picture() {
    const [previousState, state] = [null, null, ...this.states].slice(-2);
    const canvas = el("div", { class: "canvas" }, state ? draw(this.env, state, previousState) : null);
    const kind = state ? "picture" : "picture without";
    return el("section", { class: kind, "aria-label": "State of the environment", tabindex: "0" }, canvas);
  }

  saveTools() {
    return el(
      "p",
      { class: "tools" },
      button("Save", () => this.save()),
    );
  }

  controls() {
    const available = this.game.available ?? [];
    const names = el("datalist", { id: "actions" });
    for (const action of available) {
      const option = el("option");
      option.value = action;
      names.append(option);
    }
    this.input = el("input", { type: "text", list: "actions", autocomplete: "off", spellcheck: "false" });
    const form = el(
      "form",
      { class: "act" },
      field("Your action", this.input),
      el("button", { class: "primary" }, "Act"),
      names,
    );
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.step(this.input.value);
    });
    const choices = available.map((action) =>
      el(
        "li",
        {},
        button(foreign(action), () => this.step(action)),
      ),
    );
    return [
      form,
      choices.length ? el("ul", { class: "actions", "aria-label": "Available actions" }, choices) : null,
      el(
        "p",
        { class: "tools" },
        button("Ask the oracle", () => this.askOracle()),
        this.model ? button("Let the model act", () => this.letModelAct(), { title: this.model }) : null,
        button("Save", () => this.save()),
      ),
    ];
  }
}

export async function playView(route) {
  const { worlds, model } = await post("play/worlds");
  const player = new Player(model);
  const playable = worlds.filter((world) => world.why_not === null);
  const initial = playable.find(({ env }) => env === route.env) ?? playable[0];
  const taskInput = el("input", { type: "number", min: "0" });
  const envSelect = select(
    playable.map(({ env, tasks }) => [env, `${env} (${tasks} test tasks)`]),
    initial?.env,
    () => showTask(null),
  );

  /** Set the task field to `taskIndex` or, if it is null, to the environment's first test task. */
  function showTask(taskIndex) {
    const tasks = playable.find(({ env }) => env === envSelect.value);
    taskInput.max = String(tasks?.last ?? 0);
    taskInput.value = String(taskIndex ?? tasks?.first ?? 0);
  }

  function start() {
    history.replaceState(null, "", playHref(envSelect.value, taskInput.value));
    return player.start(envSelect.value, Number(taskInput.value));
  }

  showTask(route.env === initial?.env ? route.taskIndex : null);
  const form = el(
    "form",
    { class: "choose" },
    field("Environment", envSelect),
    field("Task", taskInput),
    el("button", { class: "primary" }, "New"),
  );
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    start();
  });
  const unplayable = worlds.filter((world) => world.why_not !== null);
  const hints = unplayable.map(({ env, why_not }) => el("li", {}, `${env}: `, foreign(why_not)));
  const leave = () => player.close();
  addEventListener("pagehide", leave);
  return {
    title: "Live play",
    element: el(
      "div",
      { class: "live-play" },
      el("h1", {}, "Live play"),
      model ? el("p", { class: "quiet" }, "Model: ", foreign(model)) : null,
      playable.length ? form : el("p", { class: "empty" }, "No environment is installed."),
      hints.length ? el("div", { class: "missing" }, el("p", {}, "Not installed:"), el("ul", {}, hints)) : null,
      player.element,
    ),
    opened: () => playable.some(({ env }) => env === route.env) && start(),
    close() {
      removeEventListener("pagehide", leave);
      leave();
    },
  };
}
