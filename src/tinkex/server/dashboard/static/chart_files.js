// A chart as a file: PNG from the canvas of uPlot, SVG with the same scales.

const NAMESPACE = "http://www.w3.org/2000/svg";
const FONT = "12px system-ui, sans-serif";
const PAD = 16;
const ROW = 20;

function svg(tag, attributes = {}, text = null) {
  const created = document.createElementNS(NAMESPACE, tag);
  for (const [name, value] of Object.entries(attributes)) created.setAttribute(name, value);
  if (text !== null) created.textContent = text;
  return created;
}

/** The chart with its title and legend as a PNG blob. */
export function drawPng(plot, title, lines, cssColor) {
  const chart = plot.ctx.canvas;
  const scale = chart.width / plot.width;
  const canvas = document.createElement("canvas");
  canvas.width = chart.width + 2 * PAD * scale;
  canvas.height = chart.height + (2 * PAD + ROW * (lines.length + 1)) * scale;
  const context = canvas.getContext("2d");
  context.fillStyle = cssColor("--card");
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.drawImage(chart, PAD * scale, (PAD + ROW) * scale);
  context.scale(scale, scale);
  context.fillStyle = cssColor("--ink");
  context.font = `600 ${FONT.replace("12px", "14px")}`;
  context.fillText(title, PAD, PAD + 8);
  context.font = FONT;
  lines.forEach(({ label, color }, row) => {
    const y = PAD + ROW * (row + 1) + plot.height + 12;
    context.fillStyle = color;
    context.fillRect(PAD, y - 5, 14, 3);
    context.fillStyle = cssColor("--ink");
    context.fillText(label, PAD + 22, y);
  });
  return new Promise((resolve) => canvas.toBlob(resolve, "image/png"));
}

/** The chart with its title and legend as the text of an SVG file. */
export function drawSvg(plot, title, lines, { isLog }, cssColor) {
  const [left, top, width, height] = [80, 40, 720, 320];
  const { min: x0, max: x1 } = plot.scales.x;
  const { min: y0, max: y1 } = plot.scales.y;
  const scaled = isLog ? Math.log : (value) => value;
  const toX = (x) => left + (width * (x - x0)) / (x1 - x0 || 1);
  const toY = (y) => top + height * (1 - (scaled(y) - scaled(y0)) / (scaled(y1) - scaled(y0) || 1));
  const total = top + height + 60 + ROW * lines.length;
  const root = svg("svg", { xmlns: NAMESPACE, viewBox: `0 0 ${left + width + 20} ${total}`, "font-family": "system-ui, sans-serif", "font-size": 12 });
  const [ink, grid] = [cssColor("--ink"), cssColor("--line")];
  root.append(svg("rect", { width: "100%", height: "100%", fill: cssColor("--card") }));
  root.append(svg("text", { x: left, y: 24, fill: ink, "font-size": 15, "font-weight": 600 }, title));
  for (const [axis, ticks] of [["x", ticksOf(plot, 0)], ["y", ticksOf(plot, 1)]]) {
    for (const [value, label] of ticks) {
      const isX = axis === "x";
      const at = isX ? toX(value) : toY(value);
      const ends = isX ? { x1: at, x2: at, y1: top, y2: top + height } : { x1: left, x2: left + width, y1: at, y2: at };
      root.append(svg("line", { ...ends, stroke: grid }));
      const place = isX ? { x: at, y: top + height + 16, "text-anchor": "middle" } : { x: left - 8, y: at + 4, "text-anchor": "end" };
      root.append(svg("text", { ...place, fill: ink }, label));
    }
  }
  root.append(svg("text", { x: left + width / 2, y: top + height + 36, fill: ink, "text-anchor": "middle" }, "step"));
  lines.forEach((line, row) => {
    const points = line.steps.map((step, index) => [step, line.values[index]]).filter(([x, y]) => x >= x0 && x <= x1 && (!isLog || y > 0));
    const path = points.map(([x, y]) => `${toX(x).toFixed(1)},${toY(y).toFixed(1)}`).join(" ");
    root.append(svg("polyline", { points: path, fill: "none", stroke: line.color, "stroke-width": 2 }));
    const y = top + height + 56 + ROW * row;
    root.append(svg("rect", { x: left, y: y - 6, width: 14, height: 3, fill: line.color }));
    root.append(svg("text", { x: left + 22, y, fill: ink }, line.label));
  });
  return new XMLSerializer().serializeToString(root);
}

/** The ticks of an axis that the plot shows: value and label. */
function ticksOf(plot, axis) {
  const { _splits: splits, _values: labels } = plot.axes[axis];
  return (splits ?? []).map((value, index) => [value, labels?.[index] ?? String(value)]).filter(([, label]) => label !== "" && label !== null);
}
