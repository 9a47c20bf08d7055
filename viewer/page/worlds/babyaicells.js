// BabyAI's grid: read the two letters of each cell, and draw a shape for it.
//
// Shapes fill a box of 20 x 20. Every kind has a different shape and an outline, for readers who cannot tell the
// colours apart. The name is in the <title>, which browsers show when the mouse is over the object.

import { svg } from "../dom.js";

export const CELL = 20;
const MAX_SIDE = 64; // cells; BabyAI's largest level has 22

const KINDS = new Map([
  ["W", "wall"],
  ["K", "key"],
  ["A", "ball"],
  ["B", "box"],
  ["D", "closed door"],
  ["L", "locked door"],
  ["O", "open door"],
]);
const HEADINGS = new Map([[">>", "right"], ["vv", "down"], ["<<", "left"], ["^^", "up"]]);
const COLORS = new Map([
  ["R", "red"],
  ["G", "green"],
  ["B", "blue"],
  ["P", "purple"],
  ["Y", "yellow"],
  ["E", "grey"],
]);
const TURNS = { right: 0, down: 90, left: 180, up: 270 };

function cellOf(letters, x, y) {
  if (letters.trim() === "") return null;
  if (HEADINGS.has(letters)) return { kind: "agent", color: "", direction: HEADINGS.get(letters), x, y };
  const [kind, color] = [KINDS.get(letters[0]), COLORS.get(letters[1])];
  return kind && color ? { kind, color, x, y } : { kind: "unknown", color: "", letters, x, y };
}

/** {width, height, cells} of the rows of text, without empty cells; null if it is not a grid. */
export function readGrid(rows) {
  const isGrid = Array.isArray(rows) && rows.length > 0 && rows.every((row) => typeof row === "string");
  if (!isGrid) return null;
  const [width, height] = [Math.ceil(Math.max(...rows.map((row) => row.length)) / 2), rows.length];
  if (width === 0 || width > MAX_SIDE || height > MAX_SIDE) return null;
  const cells = rows.flatMap((row, y) =>
    Array.from({ length: width }, (_, x) => cellOf(row.slice(2 * x, 2 * x + 2), x, y)).filter(Boolean),
  );
  return { width, height, cells };
}

/** "blue key", 'unknown object "XX"'. */
export function nameOf(cell) {
  if (cell.kind === "unknown") return `unknown object "${cell.letters}"`;
  return [cell.color, cell.kind].filter(Boolean).join(" ");
}

const detail = (d) => svg("path", { class: "detail", d });

const SHAPES = new Map([
  ["key", (paint) => [svg("path", { ...paint, "fill-rule": "evenodd", d:
    "M1 9a5 5 0 1 0 10 0a5 5 0 1 0-10 0zM4.4 9a1.6 1.6 0 1 0 3.2 0a1.6 1.6 0 1 0-3.2 0z" +
    "M10.9 7.4H19V15H15.8V11.2H14.6V13.6H11.8V11.2H10.5z" })]],
  ["ball", (paint) => [svg("circle", { ...paint, cx: 10, cy: 10, r: 6.2 })]],
  ["box", (paint) => [svg("rect", { ...paint, x: 3.5, y: 4, width: 13, height: 12.5 }), detail("M3.5 8.6H16.5M10 7.2v3")]],
  ["closed door", (paint) => [
    svg("rect", { ...paint, x: 1, y: 1, width: 18, height: 18 }),
    detail("M4.5 4.5h11v11h-11zM13 9.5v1"),
  ]],
  ["locked door", (paint) => [
    svg("rect", { ...paint, x: 1, y: 1, width: 18, height: 18 }),
    svg("path", { class: "keyhole", d: "M10 4.6a2.9 2.9 0 0 1 1.3 5.5l1.2 5h-5l1.2-5A2.9 2.9 0 0 1 10 4.6z" }),
  ]],
  ["open door", (paint) => [
    svg("rect", { class: "frame", x: 1, y: 1, width: 18, height: 18 }),
    svg("rect", { ...paint, x: 1, y: 1, width: 4.5, height: 18 }),
  ]],
]);

function agentShape(direction) {
  const turn = `rotate(${TURNS[direction]} 10 10)`;
  return [
    svg("rect", { class: "agent", width: CELL, height: CELL }),
    svg("path", { class: "arrow", d: "M3.5 3.5L17.5 10L3.5 16.5L7 10z", transform: turn }),
  ];
}

/** The shape of a cell. */
export function shapeOf(cell) {
  if (cell.kind === "agent") return agentShape(cell.direction);
  const shape = SHAPES.get(cell.kind);
  if (!shape) return [svg("text", { x: 10, y: 14, "text-anchor": "middle" }, cell.letters ?? "")];
  return shape({ class: `paint ${cell.color}` });
}
