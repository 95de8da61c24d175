// A line chart with axes, units and a sentence for screen readers. Fixed drawing size, scaled by the style
// sheet.
import { make, svg } from "./dom.js";

const HEIGHT = 128,
  LEFT = 40,
  RIGHT = 10,
  TOP = 10,
  BOTTOM = 22;

export function niceStep(most, count) {
  const raw = most / count,
    power = 10 ** Math.floor(Math.log10(raw || 1));
  return power * ([1, 2, 5, 10].find((m) => m * power >= raw) ?? 10);
}
const short = (v) =>
  v >= 1e6 ? `${+(v / 1e6).toFixed(1)}M` : v >= 1e4 ? `${+(v / 1e3).toFixed(0)}k` : `${+v.toFixed(2)}`;

export class Chart {
  // names: of the lines, the first drawn full, the second dashed; floor: the minimum top of the axis; bridge: no
  // gaps
  constructor({ title, unit, names = [title], digits = 1, floor = 1, width = 340, bridge = false }) {
    Object.assign(this, { title, unit, names, digits, floor, width, bridge });
    this.value = make("b", {}, "–");
    this.svg = svg("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, role: "img" });
    const key =
      names.length > 1
        ? [make("p", { className: "key" }, ...names.map((n, i) => make("span", { className: `line-${i}` }, n)))]
        : [];
    this.node = make(
      "figure",
      { className: "chart" },
      make("figcaption", {}, make("span", {}, title), make("span", {}, this.value, ` ${unit}`)),
      ...key,
      this.svg,
    );
    this.draw([], 0, 1, (v) => String(v));
  }

  // series: one list of [x, y or null] for each name; ticks: formats an x
  draw(series, from, to, tick, count = 4) {
    const known = series
      .flat()
      .map((p) => p[1])
      .filter((v) => v !== null && Number.isFinite(v));
    const step = niceStep(Math.max(this.floor, ...known), 4),
      top = step * Math.ceil(Math.max(this.floor, ...known) / step - 1e-9);
    const x = (v) => LEFT + ((v - from) / (to - from || 1)) * (this.width - LEFT - RIGHT);
    const y = (v) => HEIGHT - BOTTOM - (v / top) * (HEIGHT - TOP - BOTTOM);
    const parts = [];
    for (let v = 0; v <= top + 1e-9; v += step) {
      parts.push(svg("line", { class: "grid", x1: LEFT, x2: this.width - RIGHT, y1: y(v), y2: y(v) }));
      parts.push(svg("text", { x: LEFT - 6, y: y(v) + 3.5, "text-anchor": "end" }, short(v)));
    }
    for (let i = 0; i <= count; i += 1) {
      const at = from + ((to - from) * i) / count,
        anchor = i === 0 ? "start" : i === count ? "end" : "middle";
      parts.push(svg("text", { x: x(at), y: HEIGHT - 6, "text-anchor": anchor }, tick(at)));
    }
    series.forEach((points, i) => {
      let path = "",
        pen = false; // a gap where nothing was measured
      for (const [px, py] of points) {
        if (py === null || !Number.isFinite(py)) {
          pen &&= this.bridge;
          continue;
        }
        // h0: a lone point is a dot
        path += `${pen ? "L" : "M"}${x(px).toFixed(1)} ${y(py).toFixed(1)}${pen ? "" : "h0"}`;
        pen = true;
      }
      parts.push(svg("path", { class: `line-${i}`, d: path }));
    });
    this.svg.replaceChildren(...parts);
    const last = series[0]?.filter((p) => p[1] !== null && Number.isFinite(p[1])).at(-1)?.[1];
    this.value.textContent = last === undefined ? "–" : last.toFixed(this.digits);
    const own = (series[0] ?? []).map((p) => p[1]).filter((v) => v !== null && Number.isFinite(v));
    const say = (v) => v.toFixed(this.digits);
    const spoken = own.length
      ? `now ${say(own.at(-1))}, lowest ${say(Math.min(...own))}, highest ${say(Math.max(...own))} ${this.unit}`
      : "no figures yet";
    this.svg.setAttribute("aria-label", `${this.title}: ${spoken}.`);
  }
}
