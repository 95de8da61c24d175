// Plain decoding's speed, which speculation is compared with. It is measured, never guessed, and dated; after an
// hour it counts no more. It is measured by a race, by an answer without drafts, by the button, or by the page
// itself when it is idle.
import { $ } from "./dom.js";
import { readMetrics, streamChat } from "./api.js";
import { Meter } from "./drafting.js";

const FRESH = 3600e3,
  IDLE = 1500; // milliseconds
const PROMPT = "Count from one to fifty in words.";

export function ago(at, now = Date.now()) {
  const minutes = Math.max(0, (now - at) / 60000);
  if (minutes < 1.5) return "just now";
  if (minutes < 90) return `${Math.round(minutes)} min ago`;
  if (minutes < 60 * 36) return `${Math.round(minutes / 60)} h ago`;
  return `on ${new Date(at).toLocaleDateString()}`;
}

export class Baseline {
  constructor({ settings, speaker, tell }) {
    Object.assign(this, { settings, speaker, tell });
    this.changed = () => {};
    this.running = this.timer = null;
    $("measure").addEventListener("click", () => this.measure());
    setInterval(() => this.changed(), 60000); // it ages
  }
  get key() {
    return `outrider.plain.${this.settings.model}`;
  }
  // { tps, at }, or null where nothing with a date is kept
  get kept() {
    try {
      const kept = JSON.parse(localStorage.getItem(this.key));
      return kept?.tps > 0 && kept.at > 0 ? kept : null;
    } catch {
      return null;
    }
  }
  // Tokens per second, while they are true enough to compare with.
  get tps() {
    const { kept } = this;
    return kept && Date.now() - kept.at < FRESH ? kept.tps : null;
  }
  set(tps) {
    if (tps > 0) localStorage.setItem(this.key, JSON.stringify({ tps: Number(tps.toFixed(2)), at: Date.now() }));
    this.changed();
  }
  get words() {
    const { kept, tps } = this;
    if (!kept) return "Plain speed not measured yet.";
    return `Plain: ${kept.tps.toFixed(1)} tokens/s, measured ${ago(kept.at)}${tps ? "" : ", too old to compare with"}.`;
  }

  // By the page itself: when nothing was asked for a moment and nobody else uses the server.
  soon() {
    clearTimeout(this.timer);
    if (!$("auto-plain").checked || this.tps) return;
    this.timer = setTimeout(async () => {
      try {
        if (document.hidden || this.running || (await readMetrics()).running) return;
      } catch {
        return;
      }
      if (this.timer) this.measure(true);
    }, IDLE);
  }
  stop() {
    clearTimeout(this.timer);
    this.timer = null;
    this.running?.abort();
  }
  async measure(quietly = false) {
    if (this.running) return;
    const meter = new Meter();
    this.running = new AbortController();
    $("measure").disabled = true;
    try {
      const request = {
        ...this.settings.sampling(0, { drafts: 0, limit: 48 }),
        messages: [{ role: "user", content: PROMPT }],
      };
      let stats = null;
      for await (const chunk of streamChat(request, this.running.signal)) {
        if (chunk.outrider?.tokens) meter.take(chunk.outrider);
        if (chunk.choices[0]?.finish_reason) stats = chunk.outrider;
      }
      this.set(stats?.decode_tps || meter.tps);
      if (!quietly) this.speaker.say(`Plain decoding: ${this.kept?.tps.toFixed(1)} tokens per second.`);
    } catch (error) {
      if (!quietly && error.name !== "AbortError") this.tell(error);
    } finally {
      this.running = null;
      $("measure").disabled = false;
    }
  }
}
