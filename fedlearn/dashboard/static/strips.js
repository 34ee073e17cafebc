// Draws a strip for each client of the page: one column for each group of rounds, in the color of
// the worst status in it.
const dark = window.matchMedia("(prefers-color-scheme: dark)");
const tip = document.createElement("div");
tip.className = "tip";
tip.hidden = true;
document.body.append(tip);
let map = null;

const list = () => document.getElementById("list");
const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

function columns() {
  return Math.max(1, Math.ceil((map.end - map.first) / map.rounds_per_column));
}

function drawStrip(canvas, colors) {
  const cells = map.byClient.get(Number(canvas.dataset.client)) ?? [];
  const ratio = window.devicePixelRatio || 1;
  canvas.width = canvas.clientWidth * ratio;
  canvas.height = canvas.clientHeight * ratio;
  const pen = canvas.getContext("2d");
  const width = canvas.width / columns();
  for (const [column, code] of cells) {
    pen.fillStyle = colors[code];
    const left = Math.round(column * width);
    // At least two pixels: a single round among thousands stays visible.
    pen.fillRect(left, 0, Math.max(2 * ratio, Math.round((column + 1) * width) - left - 0.5 * ratio), canvas.height);
  }
}

function draw() {
  if (!map) return;
  const colors = Object.fromEntries(Object.entries(map.statuses).map(([code, name]) => [code, color(name)]));
  document.querySelectorAll("canvas[data-client]").forEach((canvas) => drawStrip(canvas, colors));
}

async function load() {
  const answer = await fetch(list().dataset.map);
  if (!answer.ok) return;
  map = await answer.json();
  map.byClient = new Map();
  for (const [client, column, code] of map.cells) {
    if (!map.byClient.has(client)) map.byClient.set(client, []);
    map.byClient.get(client).push([column, code]);
  }
  draw();
}

function explain(event) {
  const canvas = event.target.closest?.("canvas[data-client]");
  if (!canvas || !map) {
    tip.hidden = true;
    return;
  }
  const column = Math.floor((event.offsetX / canvas.clientWidth) * columns());
  const first = map.first + column * map.rounds_per_column + 1;
  const last = Math.min(first + map.rounds_per_column - 1, map.end);
  const cell = map.byClient.get(Number(canvas.dataset.client))?.find(([at]) => at === column);
  const rounds = first === last ? `round ${first}` : `rounds ${first} to ${last}`;
  tip.textContent = `${rounds}: ${cell ? map.statuses[cell[1]] : "not asked"}`;
  tip.hidden = false;
  tip.style.left = `${Math.min(event.clientX + 12, window.innerWidth - tip.offsetWidth - 8)}px`;
  tip.style.top = `${event.clientY + 16}px`;
}

document.addEventListener("pointermove", explain);
document.body.addEventListener("htmx:afterSettle", load);
window.addEventListener("resize", draw);
dark.addEventListener("change", draw);
load();
