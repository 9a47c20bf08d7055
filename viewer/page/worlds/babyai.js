// BabyAI: the full grid from above. The agent sees only the dashed window, and only up to the next wall or closed door.

import { el, foreign, svg } from "../dom.js";
import { amount, folding, listOf, required, section, textOf, verdict } from "./parts.js";
import { CELL, nameOf, readGrid, shapeOf } from "./babyaicells.js";

const VIEW = 7; // cells per side; the agent is in the middle of the near edge
const COLORS = ["red", "green", "blue", "purple", "yellow", "grey"];
const KINDS = ["key", "ball", "box"];

function place({ x, y }) {
  return `column ${x}, row ${y}`;
}

function walls(cells) {
  const squares = cells.filter((cell) => cell.kind === "wall").map(({ x, y }) => `M${x * CELL} ${y * CELL}h20v20h-20z`);
  return svg("path", { class: "wall", d: squares.join("") });
}

function lines({ width, height }) {
  const columns = Array.from({ length: width - 1 }, (_, at) => `M${(at + 1) * CELL} 0v${height * CELL}`);
  const rows = Array.from({ length: height - 1 }, (_, at) => `M0 ${(at + 1) * CELL}h${width * CELL}`);
  return svg("path", { class: "grid-lines", d: [...columns, ...rows].join("") });
}

/** The window in front of the agent. The picture's edge cuts off the part outside the grid. */
function view({ x, y, direction }) {
  const half = (VIEW - 1) / 2;
  const corner = {
    right: [x, y - half],
    left: [x - VIEW + 1, y - half],
    down: [x - half, y],
    up: [x - half, y - VIEW + 1],
  }[direction];
  const side = VIEW * CELL;
  return svg(
    "rect",
    { class: "view", x: corner[0] * CELL, y: corner[1] * CELL, width: side, height: side },
    svg("title", {}, "The agent's view, except cells behind walls and closed doors"),
  );
}

/** A mark where the agent was before the turn, if it has moved. */
function footprint(grid, agent, previous) {
  const [x, y] = listOf(previous?.position);
  const isInside = Number.isInteger(x) && Number.isInteger(y) && x >= 0 && y >= 0 && x < grid.width && y < grid.height;
  if (!isInside || (x === agent?.x && y === agent?.y)) return null;
  const circle = { class: "footprint", cx: (x + 0.5) * CELL, cy: (y + 0.5) * CELL, r: 4 };
  return svg("circle", circle, svg("title", {}, `The agent was here before: ${place({ x, y })}`));
}

function object(cell) {
  const at = `translate(${cell.x * CELL} ${cell.y * CELL})`;
  return svg("g", { transform: at }, svg("title", {}, `${nameOf(cell)}, ${place(cell)}`), shapeOf(cell));
}

function picture(grid, agent, previous, label) {
  const objects = grid.cells.filter((cell) => cell.kind !== "wall");
  return svg(
    "svg",
    { class: "grid-picture", role: "img", "aria-label": label, viewBox: `0 0 ${grid.width * CELL} ${grid.height * CELL}` },
    lines(grid),
    walls(grid.cells),
    footprint(grid, agent, previous),
    objects.map(object),
    agent ? view(agent) : null,
  );
}

/** A picture of the carried object, if its name is known. */
function carriedShape(carrying) {
  const [color, kind] = carrying.split(" ");
  if (!COLORS.includes(color) || !KINDS.includes(kind)) return null;
  return svg("svg", { class: "carried", viewBox: "0 0 20 20", "aria-hidden": "true" }, shapeOf({ kind, color }));
}

function objectList(cells) {
  const objects = cells.filter((cell) => !["wall", "agent"].includes(cell.kind));
  if (objects.length === 0) return null;
  const items = objects.map((cell) => el("li", {}, foreign(nameOf(cell)), el("span", { class: "quiet" }, ` ${place(cell)}`)));
  return folding("babyai objects", false, `${objects.length} objects as a list`, el("ul", { class: "world-lines" }, items));
}

function stepsOf(state) {
  const limit = Number.isFinite(state.max_steps) ? ` of ${state.max_steps}` : "";
  return Number.isFinite(state.steps) ? `step ${state.steps}${limit}` : "";
}

function levelOf(state) {
  const seed = textOf(state.level_seed);
  return textOf(state.level) + (seed && `, seed ${seed}`);
}

export function drawBabyAI(state, previous) {
  const mission = required(state, "mission");
  const grid = readGrid(state.grid);
  if (!grid) throw new Error("no grid");
  const agent = grid.cells.find((cell) => cell.kind === "agent");
  const position = agent ? `${place(agent)}, facing ${agent.direction}` : "";
  const carrying = textOf(state.carrying) || "nothing";
  const label =
    `Grid of ${grid.width} by ${grid.height} cells. Mission: ${mission}. ` +
    `Agent: ${position || "not in the grid"}. Carrying: ${carrying}.`;
  const score = state.score > 0 ? `return ${Number(state.score).toFixed(2)}` : "";
  return [
    el("p", { class: "mission" }, foreign(mission)),
    verdict(state, amount(state.num_turns, "turn"), stepsOf(state), score, levelOf(state)),
    picture(grid, agent, previous, label),
    el("p", { class: "carrying" }, "Carrying ", carriedShape(carrying), foreign(carrying)),
    position ? el("p", {}, `Agent: ${position}.`) : null,
    agent ? el("p", { class: "quiet" }, "Columns and rows count from 0. The dashed window is the agent's view.") : null,
    section("Objects", objectList(grid.cells)),
  ];
}
