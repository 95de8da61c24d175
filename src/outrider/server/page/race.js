// The same prompt and seed twice: plain, then speculative. One after the other: side by side they would share the machine
// and neither time would be true.
import { $, keepEnd } from "./dom.js";
import { streamChat } from "./api.js";
import { Marks, Meter } from "./drafting.js";

export class Race {
  constructor({ settings, panel, speaker, tell, calm }) {
    Object.assign(this, { settings, panel, speaker, tell, calm });
    this.running = null;
    $("race-form").addEventListener("submit", (event) => { event.preventDefault(); this.go(); });
    $("measure").addEventListener("click", () => this.measure());
  }
  stop() { this.running?.abort(); }

  async go() {
    if (this.running) { this.stop(); return; }
    const prompt = $("race-prompt").value.trim();
    if (!prompt) return;
    this.calm();
    this.running = new AbortController();
    $("race-go").textContent = "Stop";
    try {
      this.verdict("Plain decoding runs…");
      this.clear("lane-spec");
      const plain = await this.lane("lane-plain", 0, prompt);
      this.panel.plain = plain.tps;
      this.verdict("Speculative decoding runs…");
      const spec = await this.lane("lane-spec", this.settings.drafts || "auto", prompt, plain.timeline);
      const same = plain.answer === spec.answer;
      const ratio = spec.tps && plain.tps ? ` · ${(spec.tps / plain.tps).toFixed(2)}× the speed` : "";
      this.verdict((same ? "identical" : "the texts differ") + ratio, same ? "same" : "differs");
    } catch (error) {
      this.verdict(error.name === "AbortError" ? "Stopped." : "");
      if (error.name !== "AbortError") this.tell(error);
    } finally {
      this.running = null;
      $("race-go").textContent = "Race";
    }
  }
  verdict(text, kind = "") {
    $("verdict").className = kind;
    $("verdict").textContent = text;
  }
  clear(id) {
    const lane = $(id);
    lane.querySelector(".text").replaceChildren();
    lane.querySelector(".bar i").style.width = "0";
    lane.querySelector(".speed").textContent = "…";
  }
  async lane(id, drafts, prompt, rival) {
    this.clear(id);
    const lane = $(id), text = lane.querySelector(".text"), bar = lane.querySelector(".bar i"), speed = lane.querySelector(".speed");
    const meter = new Meter(), marks = new Marks(), most = this.settings.limit, timeline = [];
    $("ghost").hidden = !rival;
    let answer = "", finish = null;
    const request = this.settings.request([{ role: "user", content: prompt }], { drafts });
    for await (const chunk of streamChat(request, this.running.signal)) {
      if (chunk.outrider?.tokens) {
        meter.take(chunk.outrider);
        const from = marks.raw.length;
        for (const [piece, kind] of chunk.outrider.tokens) marks.push(piece, kind);
        keepEnd(text, () => text.append(marks.nodes(marks.raw.slice(from), from)));
        const elapsed = performance.now() - meter.began;
        timeline.push([elapsed, meter.tokens]);
        bar.style.width = `${Math.min(100, (100 * meter.tokens) / most)}%`;
        if (rival) $("ghost").style.left = `${Math.min(99, (100 * (rival.filter(([t]) => t <= elapsed).at(-1)?.[1] ?? 0)) / most)}%`;
        if (meter.tps) speed.textContent = `${meter.tps.toFixed(1)} tokens/s`;
        this.panel.show(meter, null);
      }
      answer += chunk.choices[0]?.delta?.content ?? "";
      if (chunk.choices[0]?.finish_reason) {
        finish = chunk.choices[0].finish_reason;
        if (chunk.outrider) this.panel.show(meter, chunk.outrider);
      }
    }
    if (finish === null) throw new Error("The stream ended early.");
    speed.textContent = `${meter.tps.toFixed(1)} tokens/s · ${((performance.now() - meter.began) / 1000).toFixed(2)} s`;
    return { answer, timeline, tps: meter.tps };
  }

  // Plain decoding's speed alone, for the chart beside the chat.
  async measure() {
    const button = $("measure"), meter = new Meter();
    button.disabled = true;
    try {
      const request = this.settings.request([{ role: "user", content: "Count from one to fifty in words." }], { drafts: 0, limit: 48 });
      let stats = null;
      for await (const chunk of streamChat(request)) {
        if (chunk.outrider?.tokens) meter.take(chunk.outrider);
        if (chunk.choices[0]?.finish_reason) stats = chunk.outrider;
      }
      this.panel.plain = stats?.decode_tps || meter.tps;
      this.speaker.say(`Plain decoding: ${this.panel.plain?.toFixed(1)} tokens a second.`);
    } catch (error) {
      this.tell(error);
    } finally {
      button.disabled = false;
    }
  }
}
