// One chart: curves over training steps, drawn by uPlot, with a description for screen readers.
//
// All charts share one cursor: point at a step in one chart and all others show their values at that step. A run has
// about fifty charts, so each is drawn only when it scrolls into view. Colours are read from the style sheet each
// time, so they follow the theme. vendor/uPlot.iife.min.js defines the global `uPlot`.

import { el, svg } from "./dom.js";
import { number } from "./format.js";

const TICK_STEPS = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000];
const BAND_ALPHA = "26"; // appended to #rrggbb
const charts = new Set();
const chartOf = new WeakMap();
const visibility = new IntersectionObserver(
  (entries) => entries.filter((entry) => entry.isIntersecting).forEach((entry) => chartOf.get(entry.target)?.draw()),
  { rootMargin: "200px" },
);
const sizes = new ResizeObserver((entries) => entries.forEach((entry) => chartOf.get(entry.target)?.fit()));

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

export function redrawCharts() {
  charts.forEach((chart) => chart.plot?.redraw());
}

/** Curves on one axis: the union of their steps. A value is undefined where a curve has none, null if not finite. */
export function align(curves) {
  const steps = [...new Set(curves.flatMap((curve) => curve.map(([step]) => step)))].sort((a, b) => a - b);
  const columns = curves.map((curve) => {
    const valueAt = new Map(curve);
    return steps.map((step) => valueAt.get(step));
  });
  return { steps, columns };
}

/** A sample of the line, for a legend. */
export function swatch(line) {
  const stroke = svg("line", {
    x1: 1,
    y1: 5,
    x2: 17,
    y2: 5,
    "stroke-width": 2.5,
    "stroke-dasharray": line.dash?.join(" "),
  });
  const block = svg("rect", { x: 3, y: 0, width: 10, height: 10, rx: 2 });
  const shape = line.block ? block : stroke;
  shape.style.setProperty(line.block ? "fill" : "stroke", `var(${line.colour})`);
  return svg("svg", { class: "swatch", viewBox: "0 0 18 10", "aria-hidden": "true" }, shape);
}

function cumulativeSums(columns) {
  const sums = columns[0].map(() => 0);
  return columns.map((column) => column.map((value, i) => (sums[i] += value ?? 0)));
}

/** The range of the steps. uPlot's default would show a hundred steps around a single one. */
function xRange(widen) {
  return (plot) => {
    const [first, last] = [plot.data[0][0], plot.data[0].at(-1)];
    return first === last ? [first - 1, last + 1] : [first - widen, last + widen];
  };
}

function yRange(plot, low, high) {
  if (low === null) return [0, 1];
  if (low === high) return low === 0 ? [0, 1] : [Math.min(0, 2 * low), Math.max(0, 2 * low)];
  return uPlot.rangeNum(low, high, 0.1, true);
}

function describe(line, steps, format) {
  const points = steps.map((step, i) => [step, line.values[i]]).filter(([, value]) => Number.isFinite(value));
  if (!points.length) return `${line.name}: no values`;
  const at = ([step, value]) => `${format(value)} at step ${step}`;
  if (points.length === 1) return `${line.name}: ${at(points[0])}`;
  const sorted = [...points].sort((a, b) => a[1] - b[1]);
  return `${line.name}: first ${at(points[0])}, last ${at(points.at(-1))}, lowest ${at(sorted[0])}, highest ${at(sorted.at(-1))}`;
}

export class Chart {
  /** `data`, which `show` replaces later:
   *  {label, steps, lines: [{name, colour, dash, values, low?, high?, stepped?}], marks: [{step, severity}],
   *   format, height, fixed: [low, high] | null, stacked: draw the lines as parts of their sum} */
  constructor(data) {
    this.readout = el("p", { class: "readout" });
    this.canvas = el("div", { class: "plot", role: "img" });
    this.element = el("div", { class: "chart" }, this.readout, this.canvas);
    charts.add(this);
    chartOf.set(this.canvas, this);
    this.show(data);
    visibility.observe(this.canvas);
    sizes.observe(this.canvas);
  }

  show(data) {
    const lines = data.stacked ? data.lines.map((line) => ({ ...line, block: true })) : data.lines;
    this.data = { height: 150, format: number, marks: [], fixed: null, ...data, lines };
    this.canvas.style.height = `${this.data.height}px`;
    const { label, steps, format } = this.data;
    this.canvas.setAttribute("aria-label", [label, ...lines.map((line) => describe(line, steps, format))].join(". "));
    this.read(null);
    if (!this.plot) return;
    if (this.drawnNames === this.names()) {
      this.plot.setData(this.columns());
    } else {
      this.plot.destroy();
      this.plot = null;
      this.draw();
    }
  }

  close() {
    this.plot?.destroy();
    visibility.unobserve(this.canvas);
    sizes.unobserve(this.canvas);
    charts.delete(this);
  }

  names() {
    return JSON.stringify(this.data.lines.map((line) => [line.name, Boolean(line.low)]));
  }

  /** uPlot's data: steps, then the values of each line, followed by the two ends of its interval if it has one. */
  columns() {
    const { steps, lines, stacked } = this.data;
    if (stacked) return [steps, ...cumulativeSums(lines.map((line) => line.values)).reverse()];
    return [steps, ...lines.flatMap((line) => (line.low ? [line.values, line.low, line.high] : [line.values]))];
  }

  draw() {
    if (this.plot || !this.canvas.clientWidth) return;
    this.drawnNames = this.names();
    this.plot = new uPlot(this.options(), this.columns(), this.canvas);
    visibility.unobserve(this.canvas);
  }

  fit() {
    this.plot?.setSize({ width: this.canvas.clientWidth, height: this.data.height });
  }

  options() {
    const { height, format, fixed, stacked } = this.data;
    const { series, bands } = stacked ? this.stackedSeries() : this.lineSeries();
    const axis = { stroke: () => colour("--muted"), font: "11px system-ui, sans-serif", ticks: { show: false } };
    const grid = { stroke: () => colour("--line"), width: 1 };
    return {
      width: this.canvas.clientWidth,
      height,
      padding: [10, 14, 0, 0],
      legend: { show: false },
      cursor: { y: false, drag: { x: false, y: false }, points: { size: 7 }, sync: { key: "step" } },
      scales: { x: { time: false, range: xRange(stacked ? 0.5 : 0) }, y: { range: fixed ?? yRange } },
      axes: [
        { ...axis, size: 26, gap: 5, incrs: TICK_STEPS, grid: { show: false } },
        { ...axis, size: 46, gap: 4, grid, space: 32, values: (plot, splits) => splits.map((value) => format(value)) },
      ],
      series: [{}, ...series],
      bands,
      hooks: {
        draw: [(plot) => this.drawIntervals(plot), (plot) => this.drawMarks(plot)],
        setCursor: [(plot) => this.read(plot.cursor.idx)],
      },
    };
  }

  lineSeries() {
    const series = [];
    const bands = [];
    for (const line of this.data.lines) {
      const stroke = () => colour(line.colour);
      const paths = line.stepped ? uPlot.paths.stepped({ align: 1 }) : uPlot.paths.linear();
      const width = line.stepped ? 1 : 1.75;
      series.push({ stroke, width, dash: line.dash, paths, points: { size: 5, stroke, fill: stroke } });
      if (!line.low) continue;
      const end = { width: 0, points: { show: false } };
      bands.push({ series: [series.length + 2, series.length + 1], fill: () => stroke() + BAND_ALPHA });
      series.push(end, end);
    }
    return { series, bands };
  }

  stackedSeries() {
    const paths = uPlot.paths.bars({ size: [1, 60], gap: 0 });
    const series = this.data.lines.map((line) => ({
      width: 0,
      paths,
      points: { show: false },
      fill: () => colour(line.colour),
    }));
    return { series: series.reverse(), bands: [] };
  }

  /** Draw each interval as a vertical line, because a single evaluation has no visible band. */
  drawIntervals(plot) {
    const { steps, lines } = this.data;
    for (const line of lines.filter(({ low }) => low)) {
      steps.forEach((step, i) => {
        if (!Number.isFinite(line.low[i])) return;
        this.stroke(plot, step, [line.low[i], line.high[i]], line.colour, []);
      });
    }
  }

  drawMarks(plot) {
    const { min, max } = plot.scales.y;
    for (const { step, severity } of this.data.marks) {
      this.stroke(plot, step, [min, max], `--${severity}`, severity === "stop" ? [] : [3, 3]);
    }
  }

  stroke(plot, step, [low, high], colourName, dash) {
    const { ctx } = plot;
    const x = plot.valToPos(step, "x", true);
    ctx.save();
    ctx.strokeStyle = colour(colourName);
    ctx.lineWidth = 1.5 * devicePixelRatio;
    ctx.setLineDash(dash.map((length) => length * devicePixelRatio));
    ctx.beginPath();
    ctx.moveTo(x, plot.valToPos(low, "y", true));
    ctx.lineTo(x, plot.valToPos(high, "y", true));
    ctx.stroke();
    ctx.restore();
  }

  /** Show the values under the cursor, or the last value of each line. */
  read(cursorIndex) {
    const { steps, lines, format, named } = this.data;
    const index = cursorIndex ?? steps.length - 1;
    const values = lines.map((line) => {
      const value = cursorIndex === null ? line.values.findLast((entry) => entry !== undefined) : line.values[index];
      const interval =
        line.low && Number.isFinite(line.low[index])
          ? ` [${format(line.low[index])}, ${format(line.high[index])}]`
          : "";
      const name = named ? el("span", { class: "name" }, line.name) : null;
      return el("span", { class: "value", title: line.name }, swatch(line), name, `${format(value)}${interval}`);
    });
    this.readout.replaceChildren(
      el("span", { class: "step" }, steps.length ? `step ${steps[index]}` : "no values"),
      ...values,
    );
  }
}
