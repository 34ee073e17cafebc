// Draws the panels of curves that the server has down-sampled. The band around a line is the
// lowest and highest value of each group of rounds, or the spread over clients.
/* global uPlot */
const DASHES = { solid: [], dashed: [6, 4], dotted: [2, 3] };
const HEIGHT = 240;
const holder = document.querySelector("[data-curves]");
const dark = window.matchMedia("(prefers-color-scheme: dark)");
let charts = [];
let loaded = null;

const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

const fade = (stroke, percent) => `color-mix(in srgb, ${stroke} ${percent}%, transparent)`;

function format(value) {
  if (value == null) return "-";
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e7) return value.toLocaleString("en");
  return size < 1000 && size >= 0.001 ? value.toFixed(4) : value.toPrecision(4);
}

// One table per line, joined on the rounds that any of them has.
function align(lines) {
  return uPlot.join(lines.map((line) => [line.rounds, line.values, line.lows, line.highs]));
}

function seriesOf(line) {
  const stroke = color(line.color ?? `run-${line.run}`);
  const shown = { label: line.label, stroke, width: 2, dash: DASHES[line.style], spanGaps: true,
    points: { show: line.rounds.length < 40, size: 5 },
    // Without a cursor, the legend shows the last value.
    value: (_, value, __, at) => format(at == null ? line.values.at(-1) : value) };
  const edge = { stroke: fade(stroke, 35), width: 1, spanGaps: true, points: { show: false }, class: "hidden" };
  return [shown, { ...edge, label: "lowest" }, { ...edge, label: "highest" }];
}

function optionsOf(panel, width) {
  const ink = color("soft");
  const grid = { stroke: color("rule"), width: 1 };
  const axis = { stroke: ink, grid, ticks: { show: false }, size: 30, font: "12px system-ui, sans-serif" };
  const bands = panel.lines.map((line, i) => ({ series: [3 * i + 3, 3 * i + 2],
    fill: fade(color(line.color ?? `run-${line.run}`), 20) }));
  return {
    width, height: HEIGHT, bands,
    scales: { x: { time: false }, y: panel.from_zero ? { range: (_, __, high) => [0, high * 1.05] } : {} },
    cursor: { sync: { key: "rounds" }, points: { size: 7 } },
    axes: [{ ...axis, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 50000] },
      { ...axis, size: 56, values: (_, ticks) => ticks.map((each) => String(+each.toPrecision(6))) }],
    series: [{ label: "round", value: (u, value, _, at) => format(at == null ? u.data[0].at(-1) : value) }, ...panel.lines.flatMap(seriesOf)],
  };
}

// The arrow keys move the cursor of all charts, so that values can be read without a mouse.
function moveByKeys(box, chart) {
  let at = null;
  box.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step) return;
    event.preventDefault();
    const last = chart.data[0].length - 1;
    at = Math.min(last, Math.max(0, at === null ? last : at + step));
    chart.setCursor({ left: chart.valToPos(chart.data[0][at], "x"), top: 20 });
  });
}

function describe(panel) {
  const ends = panel.lines.map((line) => {
    const last = line.values.length - 1;
    return `${line.label} ${format(line.values[last])} after round ${format(line.rounds[last])}`;
  });
  return `${panel.title}: ${ends.join("; ")}`;
}

function draw() {
  charts.forEach(({ chart }) => chart.destroy());
  holder.replaceChildren();
  charts = loaded.panels.map((panel) => {
    const box = document.createElement("figure");
    box.className = "chart";
    const title = document.createElement("h3");
    title.textContent = panel.title;
    const plot = document.createElement("div");
    plot.tabIndex = 0;
    plot.setAttribute("role", "group");
    plot.setAttribute("aria-label", describe(panel));
    box.append(title, plot);
    holder.append(box);
    const chart = new uPlot(optionsOf(panel, box.clientWidth), align(panel.lines), plot);
    moveByKeys(plot, chart);
    return { chart, box };
  });
  if (!charts.length) holder.textContent = "No round has finished.";
  if (loaded.num_left_out) holder.append(`${loaded.num_left_out} more metrics are not drawn.`);
}

async function load() {
  const answer = await fetch(holder.dataset.curves);
  if (!answer.ok) {
    holder.textContent = "The curves cannot be read; the page shows why when it is loaded again.";
    return;
  }
  const found = await answer.json();
  const same = loaded && loaded.panels.length === found.panels.length
    && loaded.panels.every((each, i) => each.lines.length === found.panels[i].lines.length);
  loaded = found;
  if (same) charts.forEach(({ chart }, i) => chart.setData(align(found.panels[i].lines)));
  else draw();
}

// The charts follow the width of the page, and the colors of the system.
new ResizeObserver(() => {
  charts.forEach(({ chart, box }) => {
    if (box.clientWidth !== chart.width) chart.setSize({ width: box.clientWidth, height: HEIGHT });
  });
}).observe(holder);
dark.addEventListener("change", () => loaded && draw());
document.body.addEventListener("rounds", load);
load();
