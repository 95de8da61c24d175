// What nobody else shows: which tokens were drafted, how fast they come, and how fast plain decoding would be.
import { $, make } from "./dom.js";
import { Branches } from "./branches.js";
import { Chart } from "./chart.js";

export const KINDS = { accepted: "a", corrected: "c", bonus: "b", plain: "p" };
const NAMES = Object.fromEntries(Object.entries(KINDS).map(([name, letter]) => [letter, name]));

// The tokens of an answer as marks on its text: "3a5c" says three characters accepted, five corrected.
export class Marks {
  constructor(text = "") {
    this.raw = "";
    this.ends = []; // [end, letter] of each token in `raw`
    for (const [, length, letter] of text.matchAll(/(\d+)([acbp])/g)) this.push(" ".repeat(Number(length)), NAMES[letter]);
  }
  push(piece, kind) {
    this.raw += piece;
    if (piece) this.ends.push([this.raw.length, KINDS[kind] ?? "p"]);
  }
  // Spans for text[from ...], which stands at `from` + offset in the raw text.
  nodes(text, from) {
    const out = document.createDocumentFragment();
    let low = 0, high = this.ends.length; // the first token that ends after `from`
    while (low < high) { const mid = (low + high) >> 1; if (this.ends[mid][0] > from) high = mid; else low = mid + 1; }
    for (let at = 0; at < text.length; low += 1) {
      const [end, letter] = this.ends[low] ?? [Infinity, "p"];
      const piece = text.slice(at, Math.max(at + 1, end - from));
      out.append(make("span", { className: NAMES[letter] }, piece));
      at += piece.length;
    }
    return out;
  }
  // Marks of raw[from, to) alone, for keeping.
  pack(from, to) {
    let out = "", at = from;
    for (const [end, letter] of this.ends) {
      if (end <= at) continue;
      out += `${Math.min(end, to) - at}${letter}`;
      at = end;
      if (at >= to) break;
    }
    return out;
  }
}

// Counted here while tokens stream; replaced by the server's own figures when the answer is complete.
export class Meter {
  constructor() { this.began = performance.now(); this.first = null; this.last = this.began; this.tokens = 0; this.firstTokens = 0; this.cycles = 0; this.accepted = 0; this.times = []; this.trees = []; }
  take({ tokens, tree }) {
    const kinds = tokens.map((t) => t[1]);
    if (tree) this.trees.push(tree);
    this.last = performance.now();
    if (this.first === null) { this.first = this.last; this.firstTokens = kinds.length; }
    this.tokens += kinds.length;
    this.cycles += 1;
    this.accepted += kinds.filter((k) => k === "accepted").length;
    this.times.push([(this.last - this.began) / 1000, this.tokens]);
  }
  get ttft() { return this.first === null ? null : this.first - this.began; }
  get tps() { const t = this.last - this.first; return t > 0 ? ((this.tokens - this.firstTokens) * 1000) / t : 0; }
  // Tokens a second over the last second or so, at each arrival: [seconds, rate]
  get speeds() {
    const out = [];
    for (let i = 1, j = 0; i < this.times.length; i += 1) {
      while (j < i - 1 && this.times[i][0] - this.times[j + 1][0] > 1) j += 1;
      const seconds = this.times[i][0] - this.times[j][0];
      if (seconds > 0.15 || (i === this.times.length - 1 && seconds > 0)) out.push([this.times[i][0], (this.times[i][1] - this.times[j][1]) / seconds]);
    }
    return out;
  }
}

// The figures beside the chat. Plain decoding's speed is measured, never guessed: by a race, by an answer without
// drafts, or by the button.
export class Panel {
  constructor(model) {
    this.model = model;
    this.chart = new Chart({ title: "Speed, last second", unit: "tokens/s", width: 250, names: ["this answer", "plain"] });
    $("speed").prepend(this.chart.node);
    this.meter = null;
    this.branches = new Branches();
  }
  get plain() { return Number(localStorage.getItem(`outrider.plain.${this.model()}`)) || null; }
  set plain(tps) {
    if (tps > 0) localStorage.setItem(`outrider.plain.${this.model()}`, tps.toFixed(2));
    this.draw();
  }
  show(meter, stats) {
    if (meter !== this.meter) this.branches.forget();
    this.meter = meter;
    for (const tree of meter.trees.splice(0)) this.branches.take(tree);
    this.branches.show(stats);
    const tps = stats?.decode_tps || meter.tps;
    $("s-tps").textContent = tps ? tps.toFixed(tps < 100 ? 1 : 0) : "–";
    const ttft = stats?.ttft_ms ?? meter.ttft;
    $("s-ttft").textContent = ttft === null ? "–" : `${Math.round(ttft)} ms`;
    $("s-cycle").textContent = stats ? stats.tokens_per_cycle.toFixed(2) : meter.cycles ? (meter.tokens / meter.cycles).toFixed(2) : "–";
    $("s-accept").textContent = stats ? (stats.drafted ? `${Math.round((100 * stats.accepted) / stats.drafted)} %` : "–") : "…";
    if (stats) this.positions(stats.by_position);
    this.draw(tps);
  }
  draw(tps = this.meter?.tps) {
    const speeds = this.meter?.speeds ?? [], end = Math.max(1, Math.ceil(speeds.at(-1)?.[0] ?? 1)), plain = this.plain;
    this.chart.draw([speeds, plain ? [[0, plain], [end, plain]] : []], 0, end, (v) => `${+v.toFixed(1)} s`, 2);
    const ratio = plain && tps ? `${(tps / plain).toFixed(2)} × plain (${plain.toFixed(1)} tokens/s)` : "";
    $("against").textContent = plain ? ratio || `Plain: ${plain.toFixed(1)} tokens/s` : "Plain speed not measured yet.";
  }
  positions(positions) {
    const rates = positions.map((p) => (p.drafted ? p.accepted / p.drafted : 0));
    $("positions").replaceChildren(...rates.map((rate, i) => {
      const bar = make("i");
      bar.style.height = `${Math.round(62 * rate)}px`;
      return make("div", { title: `position ${i + 1}: ${positions[i].accepted} of ${positions[i].drafted}` }, `${Math.round(100 * rate)}`, bar, `${i + 1}`);
    }));
    $("positions").classList.toggle("many", rates.length > 8);
    const spoken = rates.map((r, i) => `position ${i + 1}: ${Math.round(100 * r)} percent`).join(", ");
    $("positions").setAttribute("aria-label", spoken || "No drafts in this answer");
  }
}
