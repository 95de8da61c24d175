// Counts and records of streamed tokens; the server's own figures replace the counts when the answer
// is complete.
export class Meter {
  constructor() {
    this.began = performance.now();
    this.first = null;
    this.last = this.began;
    this.tokens = this.firstTokens = 0;
    // { at: seconds, tokens: [[text, kind], ...], draft: [text, ...] or tree: { tokens, parents, path }, where known }
    this.cycles = [];
  }
  take({ tokens, draft, tree }) {
    this.last = performance.now();
    if (this.first === null) {
      this.first = this.last;
      this.firstTokens = tokens.length;
    }
    this.tokens += tokens.length;
    const at = (this.last - this.began) / 1000;
    for (let from = 0; from < tokens.length;) {
      // a cycle ends with the model's own token; a chunk may hold several cycles
      const own = tokens.findIndex(([, kind], i) => i >= from && kind !== "accepted"),
        to = own < 0 ? tokens.length : own + 1;
      this.cycles.push({
        at,
        tokens: tokens.slice(from, to),
        ...(to < tokens.length ? {} : tree ? { tree } : draft ? { draft } : {}),
      });
      from = to;
    }
  }
  get ttft() {
    return this.first === null ? null : this.first - this.began;
  }
  get tps() {
    const t = this.last - this.first;
    return t > 0 ? ((this.tokens - this.firstTokens) * 1000) / t : 0;
  }
  // Tokens per second over the last second or so, at each arrival: [seconds, rate]
  get speeds() {
    const out = [],
      times = [];
    for (const { at, tokens } of this.cycles) {
      const sum = (times.at(-1)?.[1] ?? 0) + tokens.length;
      if (times.at(-1)?.[0] === at) times.at(-1)[1] = sum;
      else times.push([at, sum]);
    }
    for (let i = 1, j = 0; i < times.length; i += 1) {
      while (j < i - 1 && times[i][0] - times[j + 1][0] > 1) j += 1;
      const seconds = times[i][0] - times[j][0];
      if (seconds > 0.15 || (i === times.length - 1 && seconds > 0))
        out.push([times[i][0], (times[i][1] - times[j][1]) / seconds]);
    }
    return out;
  }
}
