// The server's figures over time, from /metrics every two seconds: the differences between readings.
import { $ } from "./dom.js";
import { readMetrics } from "./api.js";
import { Chart } from "./chart.js";

const EVERY = 2000,
  KEEP = 300; // ten minutes
const change = (name) => (a, b) => (b[name] ?? 0) - (a[name] ?? 0);
const rate = (name) => (a, b) => change(name)(a, b) / ((b.at - a.at) / 1000);
const share =
  (part, whole, scale, plus = 0) =>
  (a, b) =>
    change(whole)(a, b) ? (scale * change(part)(a, b)) / change(whole)(a, b) + plus : null;
const level = (name) => (a, b) => b[name] ?? 0;

// Counters restart at zero in a new process: its first reading has no difference to the one before.
const COUNTERS = ["new_tokens", "cycles", "prompt_tokens", "finished", "step_seconds", "ttft_seconds_count"];
const restarted = (a, b) =>
  a.process_start_time_seconds !== b.process_start_time_seconds || COUNTERS.some((name) => change(name)(a, b) < 0);

const CHARTS = [
  [{ title: "Generated", unit: "tokens/s", floor: 10 }, rate("new_tokens")],
  [{ title: "Tokens per cycle", unit: "tokens", digits: 2 }, share("accepted", "cycles", 1, 1)],
  [{ title: "Drafts accepted", unit: "%", digits: 0, floor: 100 }, share("accepted", "drafted", 100)],
  [
    { title: "Time to first token", unit: "ms", digits: 0, floor: 50, bridge: true },
    share("ttft_seconds_sum", "ttft_seconds_count", 1000),
  ],
  [
    { title: "Sequences", unit: "at once", digits: 0, floor: 4, names: ["running", "waiting"] },
    level("running"),
    level("waiting"),
  ],
  [
    { title: "Prompts", unit: "tokens/s", digits: 0, floor: 10, names: ["received", "from the cache"] },
    rate("prompt_tokens"),
    rate("cached_tokens"),
  ],
  [{ title: "Requests finished", unit: "a minute", digits: 0, floor: 4 }, (a, b) => 60 * rate("finished")(a, b)],
  [{ title: "Free cache", unit: "pages", digits: 0 }, level("free_pages")],
  [
    { title: "Engine busy", unit: "% of the time", digits: 0, floor: 100 },
    (a, b) => Math.min(100, 100 * rate("step_seconds")(a, b)),
  ],
];

const ago = (seconds) =>
  seconds > -1 ? "now" : seconds <= -120 ? `−${Math.round(-seconds / 60)} min` : `−${Math.round(-seconds)} s`;

export class Figures {
  constructor(tell) {
    this.tell = tell;
    this.history = [];
    this.charts = CHARTS.map(([options, ...lines]) => ({ chart: new Chart(options), lines }));
    $("charts").append(...this.charts.map((c) => c.chart.node));
    setInterval(() => {
      if (!document.hidden) this.poll();
    }, EVERY);
  }
  async poll() {
    try {
      this.history.push({ at: performance.now(), ...(await readMetrics()) });
      if (this.history.length > KEEP) this.history.shift();
    } catch (error) {
      if (!$("view-server").hidden) this.tell(error);
      return;
    }
    if (!$("view-server").hidden) this.draw();
  }
  draw() {
    const h = this.history,
      now = h.at(-1)?.at ?? 0;
    const span = Math.max(60, (now - (h[0]?.at ?? now)) / 1000);
    for (const { chart, lines } of this.charts) {
      chart.draw(
        lines.map((of) => h.slice(1).map((b, i) => [(b.at - now) / 1000, restarted(h[i], b) ? null : of(h[i], b)])),
        -span,
        0,
        ago,
      );
    }
    const last = h.at(-1) ?? {};
    const total = (label, value) => `${label} ${Math.round(value ?? 0).toLocaleString("en")}`;
    $("totals").textContent = [
      "Since the server started:",
      total("requests", last.finished),
      total("· tokens", last.new_tokens),
      total("· prompt tokens", last.prompt_tokens),
      total("· of them from the cache", last.cached_tokens),
    ].join(" ");
  }
}
