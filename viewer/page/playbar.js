// Playback of a trajectory: buttons for first, previous, play, next and last turn, and a slider.

import { button, el, svg } from "./dom.js";

const FRAME_MS = 1200;
const SHAPES = {
  first: "M5 4v12M15 4l-6 6 6 6",
  back: "M13 4l-6 6 6 6",
  play: "M6 4l10 6-10 6z",
  pause: "M7 4v12M13 4v12",
  next: "M7 4l6 6-6 6",
  last: "M15 4v12M5 4l6 6-6 6",
};

function icon(name) {
  return svg(
    "svg",
    { viewBox: "0 0 20 20", class: `icon ${name}`, "aria-hidden": "true" },
    svg("path", { d: SHAPES[name] }),
  );
}

/** `go(position)` is called to move. Returns {element, show(position), toggle, stop}. Positions are 1..end. */
export function playBar(end, go) {
  let position = 1;
  let playing = null;

  const slider = el("input", { type: "range", min: "1", max: String(end), step: "1", "aria-label": "Turn" });
  slider.addEventListener("input", () => move(Number(slider.value)));
  const output = el("output", { class: "place" });
  const control = (name, label, run) => button(icon(name), run, { "aria-label": label, title: label });
  const playButton = control("play", "Play", () => toggle());

  function showPlaying() {
    const [name, label] = playing ? ["pause", "Pause"] : ["play", "Play"];
    playButton.replaceChildren(icon(name));
    playButton.setAttribute("aria-label", label);
    playButton.title = label;
  }

  function stop() {
    clearInterval(playing);
    playing = null;
    showPlaying();
  }

  function advance() {
    if (position < end) go(position + 1);
    if (position >= end) stop();
  }

  function toggle() {
    if (playing) {
      stop();
      return;
    }
    if (position >= end) go(1);
    playing = setInterval(advance, FRAME_MS);
    showPlaying();
  }

  function move(to) {
    stop();
    go(to);
  }

  function show(newPosition) {
    position = newPosition;
    const text = position >= end ? "the end" : `turn ${position} of ${end - 1}`;
    slider.value = String(position);
    slider.setAttribute("aria-valuetext", text);
    output.value = text;
  }

  const element = el(
    "div",
    { class: "play-bar", role: "group", "aria-label": "Playback" },
    control("first", "First turn", () => move(1)),
    control("back", "Previous turn", () => move(position - 1)),
    playButton,
    control("next", "Next turn", () => move(position + 1)),
    control("last", "The end", () => move(end)),
    slider,
    output,
  );
  return { element, show, toggle, stop };
}
