// Plain decoding's speed, with which speculation is compared. It is measured, never guessed, and dated; it
// expires after an hour. A race measures it, an answer without drafts, the button, or the page
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
    setInterval(() => this.changed(), 60000); // its age is shown
  }
  get key() {
    return `outrider.plain.${this.settings.model}`;
  }
  // { tps, at }, or null if no dated measurement is stored
  get kept() {
    try {
      const kept = JSON.parse(localStorage.getItem(this.key));
      return kept?.tps > 0 && kept.at > 0 ? kept : null;
    } catch {
      return null;
    }
  }
  // Tokens per second, until they expire.
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

  // Measures on its own when the user and the server have been idle for a moment.
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
