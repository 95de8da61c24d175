// Two recorded runs side by side, at real speed or slower. Drafts of the current cycle are ghosts after the text;
// when the cycle ends they are confirmed and join it, or are struck out and leave.
import { $, make, keepEnd } from "./dom.js";
import { treeOf } from "./cycles.js";

const DRAFTING = 0.35; // share of a cycle's time after which its draft is shown; ghosts need time to be seen
const SEEN = 100; // minimum milliseconds of a cycle on the screen for its ghosts to be shown

// The number of tokens after given seconds, and the seconds of a given number (null: never).
export const reached = (cycles, seconds) =>
  cycles.reduce((sum, c) => (c.at <= seconds ? sum + c.tokens.length : sum), 0);
export function secondsTo(cycles, tokens) {
  let sum = 0;
  for (const { at, tokens: some } of cycles) {
    sum += some.length;
    if (sum >= tokens) return at;
  }
  return null;
}
// A cycle's draft before and after verification: the accepted path, else the likeliest one.
export function ghosts(cycle) {
  const tree = treeOf(cycle);
  if (!tree) return { drafted: [], struck: [] };
  const line = [];
  for (let at = 0; ;) {
    const next = tree.path.find((row) => tree.parents[row - 1] === at) ?? tree.parents.indexOf(at) + 1;
    if (!next) break;
    line.push([next, tree.tokens[next - 1] ?? ""]);
    at = next;
  }
  return {
    drafted: line.map(([, text]) => text),
    struck: line.filter(([row]) => !tree.path.includes(row)).map(([, text]) => text),
  };
}

export class Lane {
  constructor(node) {
    this.text = node.querySelector(".text");
    this.bar = node.querySelector(".bar i");
    this.speed = node.querySelector(".speed");
    this.clear();
  }
  clear() {
    this.shown = 0;
    this.text.replaceChildren();
    this.progress(0);
    this.say("…");
  }
  progress(share) {
    this.bar.style.width = `${Math.min(100, 100 * share)}%`;
  }
  say(words) {
    this.speed.textContent = words;
  }
  add(cycles) {
    const spans = cycles.flatMap((c) => c.tokens).map(([text, kind]) => make("span", { className: kind }, text));
    keepEnd(this.text, () => {
      this.text.querySelector(".draft")?.remove();
      this.text.append(...spans);
    });
    this.shown += cycles.length;
  }
  // The text at a time of the recording, with the current draft (`slow`: cycles are long enough to see it).
  at(cycles, seconds, slow) {
    let done = 0;
    while (done < cycles.length && cycles[done].at <= seconds) done += 1;
    if (done < this.shown) {
      this.text.replaceChildren();
      this.shown = 0;
    }
    if (done > this.shown) this.add(cycles.slice(this.shown, done));
    const next = cycles[done],
      last = cycles[done - 1],
      from = last?.at ?? 0;
    const drafting = next && seconds - from >= DRAFTING * (next.at - from);
    const words = !slow || !next ? [] : drafting ? ghosts(next).drafted : last ? ghosts(last).struck : [];
    keepEnd(this.text, () => {
      this.text.querySelector(".draft")?.remove();
      if (words.length)
        this.text.append(
          make(
            "span",
            { className: `draft ${drafting ? "open" : "struck"}` },
            ...words.map((w) => make(drafting ? "i" : "s", {}, w)),
          ),
        );
    });
  }
}

export class Replay {
  constructor(lanes) {
    this.lanes = lanes;
    this.forget();
    $("replay-play").addEventListener("click", () => (this.playing ? this.pause() : this.play()));
    $("replay-at").addEventListener("input", () => {
      this.pause();
      this.seek(Number($("replay-at").value));
    });
    $("replay-speed").addEventListener("change", () => {
      if (this.end && !this.playing) this.play();
    });
  }
  forget() {
    this.pause();
    this.runs = null;
    this.end = this.seconds = 0;
    $("replay").hidden = true;
    $("saved").textContent = "";
  }
  load(plain, spec) {
    this.runs = { plain, spec };
    this.end = Math.max(plain.at(-1)?.at ?? 0, spec.at(-1)?.at ?? 0);
    $("replay").hidden = false;
    $("rival").hidden = true;
    $("replay-at").max = this.end;
    $("replay-at").step = this.end / 1000;
    if (matchMedia("(prefers-reduced-motion: reduce)").matches) this.seek(this.end);
    else {
      this.seek(0);
      this.play();
    }
  }
  get speed() {
    return Number($("replay-speed").value);
  }
  play() {
    if (!this.runs) return;
    if (this.seconds >= this.end) this.seek(0);
    this.playing = true;
    $("replay-play").textContent = "Pause";
    let before = performance.now();
    const frame = (now) => {
      if (!this.playing) return;
      this.seek(this.seconds + (Math.max(0, now - before) / 1000) * this.speed);
      before = now;
      if (this.seconds < this.end) requestAnimationFrame(frame);
      else this.pause();
    };
    requestAnimationFrame(frame);
  }
  pause() {
    this.playing = false;
    $("replay-play").textContent = "Play";
  }
  seek(seconds) {
    const { plain, spec } = this.runs;
    this.seconds = Math.min(this.end, seconds);
    for (const [name, cycles] of Object.entries(this.runs)) {
      const last = cycles.at(-1)?.at ?? 0,
        tokens = reached(cycles, this.seconds),
        total = reached(cycles, last);
      const slow = !this.playing || (1000 * (last / Math.max(1, cycles.length))) / this.speed >= SEEN;
      this.lanes[name].at(cycles, this.seconds, slow);
      this.lanes[name].progress(tokens / Math.max(1, total));
      const now = Math.min(this.seconds, last);
      this.lanes[name].say(
        `${now ? (tokens / now).toFixed(1) : "–"} tokens/s · ${now.toFixed(2)} s${this.seconds >= last ? " ✓" : ""}`,
      );
    }
    const saved = this.ahead(plain, spec);
    $("saved").textContent = saved > 0.005 ? `${saved.toFixed(2)} s saved so far` : "";
    $("replay-at").value = this.seconds;
    $("replay-at").setAttribute("aria-valuetext", `${this.seconds.toFixed(2)} of ${this.end.toFixed(2)} seconds`);
    $("replay-time").textContent = `${this.seconds.toFixed(2)} / ${this.end.toFixed(2)} s`;
  }
  // Seconds by which plain decoding reaches the present position of speculation later.
  ahead(plain, spec) {
    const tokens = reached(spec, this.seconds),
      there = secondsTo(plain, tokens),
      here = secondsTo(spec, tokens);
    return tokens && there !== null ? there - here : 0;
  }
}
