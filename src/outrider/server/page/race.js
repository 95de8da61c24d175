// The same prompt and seed twice: plain, then speculative. One after the other: side by side they would share the
// machine and neither time would be true. Both are recorded, and then replayed side by side.
import { $ } from "./dom.js";
import { streamChat } from "./api.js";
import { Meter } from "./drafting.js";
import { Lane, Replay, reached } from "./replay.js";

export class Race {
  constructor({ settings, panel, baseline, speaker, tell, calm }) {
    Object.assign(this, { settings, panel, baseline, speaker, tell, calm });
    this.running = null;
    this.lanes = { plain: new Lane($("lane-plain")), spec: new Lane($("lane-spec")) };
    this.replay = new Replay(this.lanes);
    $("race-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.go();
    });
  }
  stop() {
    this.running?.abort();
    this.replay.pause();
  }

  async go() {
    if (this.running) {
      this.stop();
      return;
    }
    const prompt = $("race-prompt").value.trim();
    if (!prompt) return;
    this.calm();
    this.baseline.stop();
    this.replay.forget();
    this.running = new AbortController();
    $("race-go").textContent = "Stop";
    Object.values(this.lanes).forEach((lane) => lane.clear());
    try {
      this.verdict("Plain decoding runs…");
      const plain = await this.run("plain", 0, prompt);
      this.baseline.set(plain.stats?.decode_tps || plain.meter.tps);
      this.verdict("Speculative decoding runs…");
      const spec = await this.run("spec", this.settings.drafts || "auto", prompt, plain.meter.cycles);
      const same = plain.answer === spec.answer,
        saved = plain.seconds - spec.seconds;
      const ratio =
        spec.meter.tps && plain.meter.tps ? ` · ${(spec.meter.tps / plain.meter.tps).toFixed(2)}× the speed` : "";
      const won = saved > 0 ? ` · ${saved.toFixed(2)} s saved of ${plain.seconds.toFixed(2)} s` : "";
      this.verdict(`${same ? "identical" : "the texts differ"}${ratio}${won}`, same ? "same" : "differs");
      this.replay.load(plain.meter.cycles, spec.meter.cycles);
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
  // rival: the cycles of the other run, whose position at the same time is marked on the bar
  async run(name, drafts, prompt, rival) {
    const lane = this.lanes[name],
      meter = new Meter(),
      most = this.settings.limit;
    let answer = "",
      finish = null,
      stats = null;
    $("rival").hidden = !rival;
    this.panel.show(meter, null);
    const request = { ...this.settings.sampling(0, { drafts }), messages: [{ role: "user", content: prompt }] };
    for await (const chunk of streamChat(request, this.running.signal)) {
      if (chunk.outrider?.tokens) {
        const before = meter.cycles.length;
        meter.take(chunk.outrider);
        lane.add(meter.cycles.slice(before));
        lane.progress(meter.tokens / most);
        if (rival) $("rival").style.left = `${Math.min(99, (100 * reached(rival, meter.cycles.at(-1).at)) / most)}%`;
        if (meter.tps) lane.say(`${meter.tps.toFixed(1)} tokens/s`);
        this.panel.show(meter, null);
      }
      answer += chunk.choices[0]?.delta?.content ?? "";
      if (chunk.choices[0]?.finish_reason) {
        finish = chunk.choices[0].finish_reason;
        stats = chunk.outrider;
        if (stats) this.panel.show(meter, stats);
      }
    }
    if (finish === null) throw new Error("The stream ended early.");
    const seconds = meter.cycles.at(-1)?.at ?? 0;
    lane.say(`${meter.tps.toFixed(1)} tokens/s · ${seconds.toFixed(2)} s`);
    return { answer, meter, seconds, stats };
  }
}
