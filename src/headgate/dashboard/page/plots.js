// Line plots in SVG. A plot keeps its elements and its scale, so that what moves does not jump.

const SVG = "http://www.w3.org/2000/svg";
const LEFT = 44, TOP = 8, BOTTOM = 18;
export const plots = { live: true }; // else the newest point is not of now

function make(tag, parent, attributes = {}) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  parent.append(made);
  return made;
}

// The next number of 1, 2, 5, 10, 20, ...: an axis ends there.
export function nice(value) {
  if (!(value > 0)) return 1;
  const size = 10 ** Math.floor(Math.log10(value));
  for (const step of [1, 2, 5, 10]) if (value <= step * size * 1.0001) return step * size;
  return 10 * size;
}

export function short(value, unit = "") {
  if (unit === "s") return seconds(value);
  if (unit === "B") return bytes(value);
  if (value >= 1e6) return `${(value / 1e6).toFixed(1)}M`;
  if (value >= 1e4) return `${(value / 1e3).toFixed(0)}k`;
  if (value >= 1e3) return `${(value / 1e3).toFixed(1)}k`;
  return value >= 10 || Number.isInteger(value) ? value.toFixed(0) : value.toFixed(1);
}

export function seconds(value) {
  if (value < 0.0005) return "0 s";
  if (value < 1) return `${(value * 1000).toFixed(0)} ms`;
  if (value < 120) return `${value.toFixed(value < 10 ? 1 : 0)} s`;
  if (value < 7200) return `${Math.floor(value / 60)} min`;
  return `${(value / 3600).toFixed(1)} h`;
}

export function bytes(value) {
  if (value >= 1e9) return `${(value / 1e9).toFixed(1)} GB`;
  if (!value) return "0";
  return value >= 1e6 ? `${(value / 1e6).toFixed(0)} MB` : `${(value / 1e3).toFixed(0)} kB`;
}

// Which points begin a new line: between them and those before there was nothing to see, for longer than between others.
export function begins(times) {
  const steps = times.slice(1).map((time, i) => time - times[i]);
  const usual = [...steps].sort((a, b) => a - b)[Math.floor(steps.length / 2)] ?? 1;
  return times.map((_, i) => i === 0 || steps[i - 1] > Math.max(3.5, 3 * usual));
}

// Points as lines; a point that is alone is a short one.
function path(begin, x, y) {
  let made = "";
  begin.forEach((isFirst, i) => { made += `${isFirst ? "M" : "L"}${x(i).toFixed(1)},${y(i).toFixed(1)}${isFirst && begin[i + 1] !== false ? "h1" : ""}`; });
  return made;
}

// The same, down to the floor.
function filled(begin, x, y, floor) {
  let made = "";
  begin.forEach((isFirst, i) => {
    made += isFirst ? `M${x(i).toFixed(1)},${floor}V${y(i).toFixed(1)}` : `L${x(i).toFixed(1)},${y(i).toFixed(1)}`;
    if (begin[i + 1] !== false) made += `V${floor}Z`;
  });
  return made;
}

export class Plot {
  // `unit` is "", "s" or "B"; `update` gets times in Unix seconds and series of the same length. A series that is null
  // keeps its place and its colour free; where a value of one is null it has no line. `places`: the legend has two lines with three places each.
  constructor(unit = "", label = "", places = false) {
    this.unit = unit;
    this.element = document.createElement("div");
    this.element.className = "plot";
    this.legend = document.createElement("div");
    this.legend.className = places ? "legend places" : "legend";
    this.svg = make("svg", this.element, { role: "img", "aria-label": label });
    this.element.prepend(this.legend);
    this.rules = [0, 0.5, 1].map(() => [make("line", this.svg, { class: "rule" }), make("text", this.svg, { class: "axis", "text-anchor": "end" })]);
    this.times = [make("text", this.svg, { class: "axis" }), make("text", this.svg, { class: "axis", "text-anchor": "end" })];
    this.cross = make("line", this.svg, { class: "cross", visibility: "hidden" });
    this.lines = [];
    this.top = 0;
    this.at = null;
    this.begin = [];
    this.data = { times: [], series: [] };
    this.size = [600, 170]; // asked for when it changes, because asking makes the browser lay out the page
    new ResizeObserver(([seen]) => { this.size = [seen.contentRect.width || 600, seen.contentRect.height || 170]; this.draw(); }).observe(this.svg);
    this.svg.addEventListener("pointermove", (event) => this.point(event));
    this.svg.addEventListener("pointerleave", () => { this.at = null; this.draw(); });
  }

  update(times, series) {
    this.data = { times, series };
    this.begin = begins(times);
    const most = nice(Math.max(0, ...series.map((one) => (one?.values ?? []).reduce((a, b) => Math.max(a, b), 0))));
    if (most > this.top || most < this.top / 2.4) this.top = most; // it shrinks late, so that it does not flutter
    this.draw();
  }

  draw() {
    const { times, series } = this.data;
    const [wide, high] = this.size;
    const right = wide - 2, floor = high - BOTTOM;
    const y = (value) => floor - (Math.min(value, this.top) / (this.top || 1)) * (floor - TOP);
    const first = times[0] ?? 0, last = times[times.length - 1] ?? 1;
    const span = Math.max(last - first, 30); // seconds: a plot that has just begun fills from the right
    const x = (time) => LEFT + ((time - (last - span)) / span) * (right - LEFT);
    this.rules.forEach(([rule, text], index) => {
      const value = (this.top * index) / 2;
      set(rule, { x1: LEFT, x2: right, y1: y(value), y2: y(value) });
      set(text, { x: LEFT - 6, y: y(value) + 4 });
      said(text, short(value, this.unit));
    });
    set(this.times[0], { x: LEFT, y: high - 3 });
    set(this.times[1], { x: right, y: high - 3 });
    said(this.times[0], `${span >= 120 ? `${Math.round(span / 60)} min` : `${Math.round(span)} s`} ago`);
    const at = this.at === null ? times.length - 1 : this.nearest(x);
    said(this.times[1], this.at === null ? (plots.live ? "now" : times.length ? new Date(last * 1000).toTimeString().slice(0, 8) : "") : `${Math.max(0, Math.round(last - times[at]))} s ago`);
    this.cross.setAttribute("visibility", this.at === null || at < 0 ? "hidden" : "visible");
    if (at >= 0) set(this.cross, { x1: x(times[at]), x2: x(times[at]), y1: TOP, y2: floor });
    series.forEach((one, index) => this.line(index, one ?? { name: "", values: [] }, (i) => x(times[i]), y, floor, at));
    for (const [index, line] of this.lines.entries()) {
      const unused = !series[index];
      line.entry.classList.toggle("unused", unused);
      line.path.setAttribute("visibility", unused ? "hidden" : "visible");
      line.area.setAttribute("visibility", unused || index > 0 ? "hidden" : "visible");
    }
  }

  line(index, one, x, y, floor, at) {
    let line = this.lines[index];
    if (!line) {
      const area = make("path", this.svg), path = make("path", this.svg);
      const entry = document.createElement("span"), swatch = document.createElement("i");
      const name = document.createElement("em"), value = document.createElement("b");
      entry.append(swatch, name, value);
      this.legend.append(entry);
      line = this.lines[index] = { area, path, swatch, name, value, entry };
    }
    const colour = one.colour ?? `c${(index % 8) + 1}`;
    line.path.setAttribute("class", `line ${colour}`);
    line.area.setAttribute("class", `area ${colour}`);
    line.swatch.className = colour;
    said(line.name, one.name);
    if (line.entry.title !== one.name) line.entry.title = one.name;
    said(line.value, at >= 0 ? short(one.values[at] ?? 0, this.unit) : "");
    const known = one.values.map((_, i) => i).filter((i) => one.values[i] !== null);
    const begin = known.map((i, n) => this.begin[i] || known[n - 1] !== i - 1);
    const across = (n) => x(known[n]), high = (n) => y(one.values[known[n]] ?? 0);
    line.path.setAttribute("d", path(begin, across, high));
    if (index === 0) line.area.setAttribute("d", filled(begin, across, high, floor));
  }

  point(event) {
    this.at = event.clientX - this.svg.getBoundingClientRect().left;
    this.draw();
  }

  nearest(x) {
    let best = -1, gap = Infinity;
    this.data.times.forEach((time, index) => {
      const away = Math.abs(x(time) - this.at);
      if (away < gap) [best, gap] = [index, away];
    });
    return best;
  }
}

export class Spark {
  constructor() {
    this.element = document.createElementNS(SVG, "svg");
    this.element.setAttribute("viewBox", "0 0 100 24");
    this.element.setAttribute("preserveAspectRatio", "none");
    this.element.setAttribute("aria-hidden", "true");
    this.path = make("path", this.element, { class: "line c1", fill: "none", "stroke-width": 1.4, "vector-effect": "non-scaling-stroke" });
    this.top = 0;
  }

  update(times, values) {
    const most = nice(Math.max(0, ...values));
    if (most > this.top || most < this.top / 2.4) this.top = most;
    const first = times[0], span = Math.max(times[times.length - 1] - first, 1);
    this.path.setAttribute("d", path(begins(times), (i) => (100 * (times[i] - first)) / span, (i) => 22.5 - (Math.min(values[i], this.top) / this.top) * 21));
  }
}

function set(element, attributes) {
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, typeof value === "number" ? value.toFixed(1) : value);
}

function said(element, text) {
  if (element.textContent !== text) element.textContent = text;
}
