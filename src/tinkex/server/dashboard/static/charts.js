// Curves of one or several runs: a chart per metric, drawn by uPlot, with zoom, smoothing, a log
// scale and downloads. Data comes from /page/curves, downsampled by the server.
import { RequestError, act, element, saveFile, send } from "./page.js";
import { drawPng, drawSvg } from "./chart_files.js";

const HEIGHT = 230;
const COLORS = 8;
// Metrics that are shown unless the user chooses others; the server sends these first.
const DEFAULT_METRICS = 8;
const MAX_CHOICES = 200;
const LABELS = { kl: "KL", eval_kl: "Eval KL", grad_norm: "Gradient norm", tokens_per_second: "Tokens/s" };

export function metricLabel(name) {
  const words = name.replaceAll("_", " ");
  return LABELS[name] ?? words[0].toUpperCase() + words.slice(1);
}

/** A number with enough digits to see it change. */
export function formatValue(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (value !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(2);
  return Number.isInteger(value) ? value.toLocaleString("en") : String(Number(value.toPrecision(5)));
}

/** Exponential moving average without the bias of its start; null values stay. */
export function smooth(values, factor) {
  let sum = 0;
  let weight = 0;
  return values.map((value) => {
    if (value === null || value === undefined) return value;
    sum = factor * sum + (1 - factor) * value;
    weight = factor * weight + (1 - factor);
    return sum / weight;
  });
}

function cssColor(name) {
  const probe = element("span", { class: "unseen" });
  probe.style.color = `var(${name})`;
  document.body.append(probe);
  const color = getComputedStyle(probe).color;
  probe.remove();
  return color;
}

class MetricChart {
  constructor(grid, metric) {
    this.grid = grid;
    this.metric = metric;
    this.plot = null;
    this.shape = "";
    this.body = element("div", { class: "plot" });
    this.spoken = element("p", { class: "unseen", "aria-live": "polite" });
    const label = metricLabel(metric);
    const save = (kind) => (event) => act(event.currentTarget, () => this.save(kind));
    const button = (kind) =>
      element("button", { type: "button", class: "icon small", "aria-label": `Save the chart of ${label} as ${kind}`, onclick: save(kind) }, kind);
    this.figure = element(
      "figure",
      { class: "chart", "data-metric": metric },
      element("figcaption", {}, element("h3", {}, label), button("PNG"), button("SVG")),
      this.body,
      this.spoken,
    );
  }

  /** Draw the runs that have this metric. */
  draw(runs) {
    this.lines = runs.map((run) => this.grid.lineOf(run, this.metric));
    const { smoothing, isLog, theme } = this.grid;
    const shape = JSON.stringify([this.lines.map(({ label, color }) => [label, color]), smoothing > 0, isLog, theme]);
    const data = this.align();
    if (shape !== this.shape) this.build(shape, data);
    else this.plot.setData(data, this.grid.range === null);
    if (this.grid.range) this.plot.setScale("x", { min: this.grid.range[0], max: this.grid.range[1] });
    this.plot.root.querySelector(".u-wrap").setAttribute("aria-label", this.describe());
  }

  align() {
    const { smoothing, isLog } = this.grid;
    const keep = (values) => (isLog ? values.map((value) => (value > 0 ? value : null)) : values);
    return uPlot.join(
      this.lines.map(({ steps, values }) =>
        smoothing > 0 ? [steps, keep(values), keep(smooth(values, smoothing))] : [steps, keep(values)],
      ),
    );
  }

  build(shape, data) {
    this.plot?.destroy();
    this.shape = shape;
    this.plot = new uPlot(this.options(), data, this.body);
    const wrap = this.plot.root.querySelector(".u-wrap");
    wrap.setAttribute("role", "img");
    wrap.tabIndex = 0;
    wrap.addEventListener("keydown", (event) => this.moveCursor(event));
    wrap.addEventListener("dblclick", () => this.grid.setRange(null));
  }

  options() {
    const [ink, line] = [cssColor("--soft"), cssColor("--line")];
    const font = "12px system-ui, sans-serif";
    const axis = { stroke: ink, font, labelFont: font, grid: { stroke: line, width: 1 }, ticks: { stroke: line, width: 1 } };
    const value = (_, raw) => formatValue(raw);
    const series = this.lines.flatMap(({ label, color, dash }) => {
      const main = { label, stroke: color, width: 2, dash, spanGaps: true, value, points: { size: 5 } };
      if (!(this.grid.smoothing > 0)) return [main];
      const faint = { ...main, label: `${label} (not smoothed)`, width: 1, alpha: 0.35, points: { show: false } };
      return [faint, { ...main, points: { show: false } }];
    });
    return {
      width: this.width(),
      height: HEIGHT,
      series: [{ label: "Step", value }, ...series],
      scales: { x: { time: false }, y: { distr: this.grid.isLog ? 3 : 1 } },
      axes: [
        { ...axis, label: "step", labelSize: 18, size: 34 },
        { ...axis, label: metricLabel(this.metric), labelSize: 18, size: 62, values: (_, ticks) => ticks.map((tick) => (tick === null ? "" : formatValue(tick))) },
      ],
      cursor: { drag: { x: true, y: false, setScale: false }, sync: { key: this.grid.key } },
      hooks: { setSelect: [(plot) => this.select(plot)] },
    };
  }

  width() {
    return Math.max(this.body.clientWidth || this.grid.chartWidth(), 200);
  }

  resize() {
    if (this.plot && this.plot.width !== this.width()) this.plot.setSize({ width: this.width(), height: HEIGHT });
  }

  select(plot) {
    const { left, width } = plot.select;
    if (width < 4) return;
    const range = [plot.posToVal(left, "x"), plot.posToVal(left + width, "x")];
    plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
    this.grid.setRange(range);
  }

  /** Arrow keys move the cursor over the points and speak their values. */
  moveCursor(event) {
    const moves = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity };
    if (event.key === "Escape") this.grid.setRange(null);
    if (!(event.key in moves)) return;
    event.preventDefault();
    const [steps, ...columns] = this.plot.data;
    const from = this.plot.cursor.idx ?? (moves[event.key] > 0 ? -1 : steps.length);
    const index = Math.min(Math.max(from + moves[event.key], 0), steps.length - 1);
    this.plot.setCursor({ left: this.plot.valToPos(steps[index], "x"), top: HEIGHT / 3 });
    const values = columns.map((column, place) => `${this.plot.series[place + 1].label}: ${formatValue(column[index])}`);
    this.spoken.textContent = `Step ${steps[index]}. ${values.join(", ")}`;
  }

  describe() {
    const parts = this.lines.map(({ label, steps, values }) => {
      const last = values.length - 1;
      return `${label} from ${formatValue(values[0])} at step ${steps[0]} to ${formatValue(values[last])} at step ${steps[last]}`;
    });
    return `${metricLabel(this.metric)} by step: ${parts.join("; ")}`;
  }

  async save(kind) {
    const name = `${this.metric.replaceAll(/[^\w.-]+/g, "_")}.${kind.toLowerCase()}`;
    const title = metricLabel(this.metric);
    if (kind === "PNG") saveFile(name, await drawPng(this.plot, title, this.lines, cssColor));
    else saveFile(name, drawSvg(this.plot, title, this.lines, this.grid, cssColor), "image/svg+xml");
  }

  destroy() {
    this.plot?.destroy();
    this.figure.remove();
  }
}

/** The charts of some runs, with their controls. */
export class CurveGrid {
  constructor(container) {
    this.key = uPlot.sync("curves").key;
    this.runs = [];
    this.charts = new Map();
    this.metrics = null;
    this.choices = readChoices();
    this.range = null;
    this.smoothing = 0;
    this.isLog = false;
    this.theme = 0;
    this.tag = null;
    this.reply = null;
    this.container = container;
    this.note = element("p", { class: "note", role: "status" });
    this.area = element("div", { class: "charts" });
    container.replaceChildren(this.controls(), this.note, this.area);
    document.addEventListener("refresh", () => this.load());
    document.addEventListener("themechange", () => this.redrawTheme());
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.redrawTheme());
    new ResizeObserver(() => this.charts.forEach((chart) => chart.resize())).observe(container);
  }

  controls() {
    const labelled = (text, field) => element("label", {}, element("span", {}, text), field);
    const smoothing = element("input", { type: "range", min: "0", max: "0.99", step: "0.01", value: "0", "aria-label": "Smoothing" });
    smoothing.addEventListener("input", () => this.change({ smoothing: Number(smoothing.value) }));
    const log = element("input", { type: "checkbox" });
    log.addEventListener("change", () => this.change({ isLog: log.checked }));
    this.bounds = ["From step", "To step"].map((text) => {
      const field = element("input", { type: "number", min: "1", step: "1", "aria-label": text, placeholder: text });
      field.addEventListener("change", () => this.readBounds());
      field.addEventListener("keydown", ({ key }) => key === "Enter" && this.readBounds());
      return field;
    });
    this.reset = element("button", { type: "button", class: "second small", onclick: () => this.setRange(null), disabled: true }, "Reset zoom");
    this.picker = element("fieldset", { class: "picker" }, element("legend", { class: "unseen" }, "Metrics"));
    this.downloads = element("span", { class: "buttons" });
    return element(
      "div",
      { class: "controls" },
      labelled("Smoothing", smoothing),
      element("label", { class: "check" }, log, " Log scale"),
      ...this.bounds,
      this.reset,
      element("details", { class: "metrics" }, element("summary", {}, "Metrics"), this.picker),
      this.downloads,
    );
  }

  change(values) {
    Object.assign(this, values);
    this.draw();
  }

  redrawTheme() {
    this.theme += 1;
    this.draw();
  }

  readBounds() {
    const [first, last] = this.bounds.map((field) => (field.value === "" ? null : Number(field.value)));
    const end = last ?? Math.max(1, ...(this.reply?.runs ?? []).map((run) => run.last_step));
    this.applyRange(first === null && last === null ? null : [first ?? 1, end]);
  }

  setRange(range) {
    this.bounds.forEach((field, place) => {
      field.value = range ? Math.round(range[place]) : "";
    });
    this.applyRange(range);
  }

  applyRange(range) {
    const wanted = range && range[1] > range[0] ? range : null;
    if (JSON.stringify(wanted) === JSON.stringify(this.range)) return;
    this.range = wanted;
    this.reset.disabled = wanted === null;
    this.charts.forEach((chart) => chart.plot?.setData(chart.plot.data, true));
    this.tag = null;
    this.load();
  }

  /** Show these runs: `{id, name}` each. */
  show(runs) {
    if (JSON.stringify(runs) === JSON.stringify(this.runs)) return;
    this.runs = runs;
    this.tag = null;
    this.downloads.replaceChildren(
      ...runs.map(({ id, name }) =>
        element("a", { class: "button second small", href: `/runs/${encodeURIComponent(id)}/metrics.csv`, download: "metrics.csv" }, runs.length > 1 ? `CSV: ${name}` : "CSV"),
      ),
    );
    this.load();
  }

  /** Fetch the curves if they have changed, and draw them. */
  async load() {
    if (!this.runs.length) return;
    const query = new URLSearchParams(this.runs.map(({ id }) => ["run", id]));
    if (this.metrics) this.shownMetrics().forEach((name) => query.append("metric", name));
    if (this.metrics && !this.shownMetrics().length) query.append("metric", "");
    if (this.range) {
      query.set("first", Math.floor(this.range[0]));
      query.set("last", Math.ceil(this.range[1]));
    }
    const asked = query.toString();
    this.asked = asked;
    try {
      const response = await send(`/page/curves?${query}`, { headers: this.tag ? { "If-None-Match": this.tag } : {} });
      if (response.status === 304 || this.asked !== asked) return;
      if (!response.ok) throw new RequestError((await response.json()).error ?? response.statusText, response.status);
      this.tag = response.headers.get("etag");
      this.reply = await response.json();
    } catch (error) {
      if (error instanceof RequestError) this.note.textContent = `The curves cannot be shown: ${error.message}`;
      return;
    }
    const isFirst = this.metrics === null;
    this.metrics = this.reply.metrics;
    this.drawPicker();
    this.draw();
    if (isFirst && this.shownMetrics().some((name) => !this.reply.runs.some((run) => name in run.metrics))) this.load();
  }

  shownMetrics() {
    return (this.metrics ?? []).filter((name, place) => this.choices.get(name) ?? place < DEFAULT_METRICS);
  }

  drawPicker() {
    const names = this.metrics.join("\n");
    if (this.picker.dataset.names === names) return;
    this.picker.dataset.names = names;
    const shown = new Set(this.shownMetrics());
    const boxes = this.metrics.map((name) => {
      const box = element("input", { type: "checkbox" });
      box.checked = shown.has(name);
      box.addEventListener("change", () => {
        this.choices.delete(name);
        this.choices.set(name, box.checked);
        writeChoices(this.choices);
        this.tag = null;
        this.draw();
        this.load();
      });
      return element("label", { class: "check" }, box, ` ${metricLabel(name)}`);
    });
    this.picker.replaceChildren(this.picker.firstElementChild, ...boxes);
  }

  lineOf(run, metric) {
    const place = this.runs.findIndex(({ id }) => id === run.id);
    return {
      ...run.metrics[metric],
      label: this.runs[place]?.name ?? run.id,
      color: cssColor(`--curve-${place % COLORS}`),
      dash: place >= COLORS ? [6, 4] : undefined,
    };
  }

  chartWidth() {
    return this.area.clientWidth - 40;
  }

  draw() {
    if (!this.reply) return;
    const shown = this.shownMetrics().filter((name) => this.reply.runs.some((run) => run.metrics[name]?.steps.length));
    for (const [name, chart] of this.charts) {
      if (!shown.includes(name)) {
        chart.destroy();
        this.charts.delete(name);
      }
    }
    shown.forEach((name, place) => {
      if (!this.charts.has(name)) this.charts.set(name, new MetricChart(this, name));
      const { figure } = this.charts.get(name);
      if (this.area.children[place] !== figure) this.area.insertBefore(figure, this.area.children[place] ?? null);
      this.charts.get(name).draw(this.reply.runs.filter((run) => run.metrics[name]?.steps.length));
    });
    this.showNote(shown);
  }

  showNote(shown) {
    let text = "";
    if (!this.reply.metrics.length) text = "The curves start with the first optim_step after a forward_backward.";
    else if (!shown.length) text = "No metric is selected, or there is no value in this range.";
    else if (this.reply.num_left_out) text = "Further metrics are left out: a run shows at most 64.";
    if (this.note.textContent !== text) this.note.textContent = text;
  }
}

const CHOICES_KEY = "tinkex-metrics";

function readChoices() {
  try {
    return new Map(Object.entries(JSON.parse(localStorage.getItem(CHOICES_KEY) ?? "{}")));
  } catch {
    return new Map();
  }
}

function writeChoices(choices) {
  try {
    const newest = Object.fromEntries([...choices].slice(-MAX_CHOICES));
    localStorage.setItem(CHOICES_KEY, JSON.stringify(newest));
  } catch {
    // Without storage the choice holds for this page only.
  }
}
