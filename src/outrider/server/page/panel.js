// The figures beside the chat: those of the answer that streams, or of the last one.
import { $, make } from "./dom.js";
import { Cycles } from "./cycles.js";
import { Chart } from "./chart.js";

export class Panel {
  constructor(baseline) {
    this.baseline = baseline;
    baseline.changed = () => this.draw();
    this.chart = new Chart({
      title: "Speed, last second",
      unit: "tokens/s",
      width: 250,
      names: ["this answer", "plain"],
    });
    $("speed").prepend(this.chart.node);
    this.meter = this.tps = null;
    this.cycles = new Cycles();
  }
  show(meter, stats) {
    if (meter !== this.meter) {
      // another answer: clear the previous one's figures
      this.meter = meter;
      this.cycles.forget();
      this.positions([]);
    }
    this.cycles.show(meter, stats);
    this.tps = stats?.decode_tps || meter.tps;
    const ttft = stats?.ttft_ms ?? meter.ttft,
      cycles = meter.cycles.length;
    $("s-tps").textContent = this.tps ? this.tps.toFixed(this.tps < 100 ? 1 : 0) : "–";
    $("s-ttft").textContent = ttft === null ? "–" : `${Math.round(ttft)} ms`;
    $("s-cycle").textContent = stats
      ? stats.tokens_per_cycle.toFixed(2)
      : cycles
        ? (meter.tokens / cycles).toFixed(2)
        : "–";
    $("s-accept").textContent = stats?.drafted ? `${Math.round((100 * stats.accepted) / stats.drafted)} %` : "–";
    if (stats) this.positions(stats.by_position);
    this.draw();
  }
  draw() {
    const speeds = this.meter?.speeds ?? [],
      end = Math.max(1, Math.ceil(speeds.at(-1)?.[0] ?? 1)),
      plain = this.baseline.tps;
    this.chart.draw(
      [
        speeds,
        plain
          ? [
              [0, plain],
              [end, plain],
            ]
          : [],
      ],
      0,
      end,
      (v) => `${+v.toFixed(1)} s`,
      2,
    );
    const saved = plain && this.tps ? this.meter.tokens / plain - this.meter.tokens / this.tps : 0;
    $("against").textContent =
      (plain && this.tps
        ? `${(this.tps / plain).toFixed(2)} × plain${saved > 0.05 ? `, ${saved.toFixed(1)} s saved` : ""}. `
        : "") + this.baseline.words;
  }
  positions(positions) {
    const rates = positions.map((p) => (p.drafted ? p.accepted / p.drafted : 0));
    $("positions").replaceChildren(
      ...rates.map((rate, i) => {
        const bar = make("i");
        bar.style.height = `${Math.round(62 * rate)}px`;
        return make(
          "div",
          { title: `position ${i + 1}: ${positions[i].accepted} of ${positions[i].drafted}` },
          `${Math.round(100 * rate)}`,
          bar,
          `${i + 1}`,
        );
      }),
    );
    $("positions").classList.toggle("many", rates.length > 8);
    const spoken = rates.map((r, i) => `position ${i + 1}: ${Math.round(100 * r)} percent`).join(", ");
    $("positions").setAttribute("aria-label", spoken || "No drafts yet");
  }
}
