// The conversation on the page: asks, streams, edits, retries, and forgets the oldest turns when the context is full.
import { $, make, atEnd, keepEnd } from "./dom.js";
import { ApiError, streamChat } from "./api.js";
import { Meter } from "./drafting.js";
import { Bubble } from "./message.js";
import * as store from "./store.js";

const EXAMPLES = ["Why is the sky blue?", "Write a Python function that reverses a list.", "List ten animals, one a line."];

export class Chat {
  constructor({ settings, panel, speaker, tell, calm, changed }) {
    Object.assign(this, { settings, panel, speaker, tell, calm, changed });
    this.log = $("log");
    this.bubbles = [];
    this.running = null;
    this.log.addEventListener("scroll", () => { $("latest").hidden = atEnd(this.log); });
    $("latest").addEventListener("click", () => { this.log.scrollTop = this.log.scrollHeight; });
    $("system").addEventListener("change", () => {
      this.conversation.system = $("system").value;
      localStorage.setItem("outrider.system", $("system").value);
      if (this.conversation.messages.length) store.save(this.conversation);
    });
  }

  async open(conversation) {
    if (this.running) { this.stop(); await this.finished; } // its answer belongs to the old one
    this.conversation = conversation;
    localStorage.setItem("outrider.current", conversation.id);
    $("system").value = conversation.system;
    this.draw();
    this.log.scrollTop = this.log.scrollHeight;
    this.changed();
  }
  stop() { this.running?.abort(); }

  // ---- the page
  draw() {
    this.bubbles = this.conversation.messages.map((m) => new Bubble(m, this.actions(m)));
    const nodes = this.bubbles.map((b) => b.node);
    this.log.replaceChildren(...(nodes.length ? nodes : [this.empty()]));
    this.divide();
  }
  empty() {
    const examples = EXAMPLES.map((text) => make("button", { type: "button", onclick: () => this.ask(text) }, text));
    return make("div", { id: "empty" },
      make("p", {}, "A small drafter rides ahead and guesses; the model checks every guess and keeps only what it would have said itself."),
      make("p", {}, "Ask something and watch the tokens arrive several at a time."),
      make("div", { id: "examples" }, ...examples));
  }
  divide() {
    this.log.querySelector(".divider")?.remove();
    const first = this.bubbles[this.conversation.from];
    if (this.conversation.from && first) first.node.before(make("p", { className: "divider" }, "Messages above this line no longer fit the context and are not sent."));
  }
  actions(message) {
    const { messages } = this.conversation, at = () => messages.indexOf(message);
    const busy = (go) => (...values) => { if (!this.running) go(...values); };
    if (message.role === "user") {
      return {
        edit: busy((text) => { this.truncate(at()); this.ask(text); }),
        retry: message.refused === undefined ? null : busy(() => { this.drop(at()); this.ask(message.content); }),
        remove: busy(() => this.drop(at())),
      };
    }
    return { retry: busy(() => { const tries = (message.tries ?? 0) + 1; this.truncate(at()); this.answer(tries); }) };
  }
  add(message) {
    $("empty")?.remove();
    this.conversation.messages.push(message);
    const bubble = new Bubble(message, this.actions(message));
    this.bubbles.push(bubble);
    this.log.append(bubble.node);
    this.log.scrollTop = this.log.scrollHeight; // one's own message is always shown
    return bubble;
  }
  truncate(at) {
    for (const bubble of this.bubbles.splice(at)) bubble.node.remove();
    this.conversation.messages.splice(at);
    this.conversation.from = Math.min(this.conversation.from, Math.max(0, at - 1));
    this.divide();
  }
  drop(at) {
    this.bubbles.splice(at, 1)[0].node.remove();
    this.conversation.messages.splice(at, 1);
    if (at < this.conversation.from) this.conversation.from -= 1;
    if (!this.conversation.messages.length) this.draw();
    this.save();
  }
  save(conversation = this.conversation) {
    if (conversation.messages.length && !store.save(conversation)) this.tell(new Error("The browser has no room to keep this conversation."));
    if (!conversation.messages.length) store.remove(conversation.id);
    this.changed();
  }

  // ---- asking
  ask(text) {
    if (this.running) return null;
    this.add({ role: "user", content: text });
    return this.answer();
  }
  answer(tries = 0) {
    this.finished = this.attempt(tries);
    return this.finished;
  }
  // What is sent: the system prompt and every message that was not refused and still fits.
  get sent() {
    const { system, from, messages } = this.conversation;
    const turns = messages.slice(from).filter((m) => !m.refused && m.content).map(({ role, content }) => ({ role, content }));
    return system.trim() ? [{ role: "system", content: system.trim() }, ...turns] : turns;
  }
  // Leave out the oldest turn. False when only the newest question is left.
  forget() {
    const { from, messages } = this.conversation;
    const next = messages.findIndex((m, i) => i > from && m.role === "user" && !m.refused);
    if (next < 0) return false;
    this.conversation.from = next;
    this.divide();
    return true;
  }

  async attempt(tries) {
    this.calm();
    const { conversation } = this, question = this.bubbles.at(-1), abort = new AbortController();
    this.running = abort;
    $("send").textContent = "Stop";
    this.changed();
    let limit = this.settings.limit;
    for (;;) {
      const messages = this.sent;
      const bubble = this.add({ role: "assistant", content: "", reasoning: "", tries });
      bubble.node.classList.add("running");
      try {
        await this.stream(bubble, this.settings.request(messages, { limit, tries }), abort.signal);
        break;
      } catch (error) {
        if (bubble.message.content || bubble.message.reasoning) {
          const stopped = error.name === "AbortError";
          this.close(bubble, stopped ? "stopped" : `interrupted: ${error.message}`);
          if (!stopped) this.tell(error);
          break;
        }
        bubble.node.remove();
        this.bubbles.pop();
        conversation.messages.pop();
        if (error.code === "context_length_exceeded") {
          if (this.forget()) continue;
          if (limit !== null) { limit = null; continue; } // as long as there is room
        }
        this.refused(question, error);
        break;
      }
    }
    this.running = null;
    $("send").textContent = "Send";
    this.save(conversation);
  }
  refused(question, error) {
    const stopped = error.name === "AbortError";
    question.message.refused = stopped ? "Stopped before the first word." : error.message;
    question.actions = this.actions(question.message);
    question.refuse(question.message.refused);
    this.speaker.end(`Not answered. ${question.message.refused}`);
    if (error instanceof ApiError && error.status === 401) this.tell(error);
  }
  close(bubble, note) {
    bubble.show();
    bubble.keep();
    Object.assign(bubble.message, { note, done: true });
    keepEnd(this.log, () => bubble.finish());
    bubble.node.classList.remove("running");
    this.speaker.end(`The answer is complete: ${note}.`);
  }

  async stream(bubble, request, signal) {
    const meter = new Meter(), { message } = bubble;
    let stats = null, finish = null, due = false;
    const paint = () => { due = false; if (bubble.foot === undefined) keepEnd(this.log, () => bubble.show()); if (meter.tokens) this.panel.show(meter, stats); };
    try {
      for await (const chunk of streamChat(request, signal)) {
        const choice = chunk.choices[0], delta = choice?.delta ?? {};
        if (chunk.outrider?.tokens) {
          meter.take(chunk.outrider);
          for (const [piece, kind] of chunk.outrider.tokens) bubble.token(piece, kind);
        }
        message.content += delta.content ?? "";
        message.reasoning += delta.reasoning_content ?? "";
        this.speaker.stream(delta.content ?? "");
        if (choice?.finish_reason) { finish = choice.finish_reason; stats = chunk.outrider; }
        if (!due) { due = true; requestAnimationFrame(paint); }
      }
    } finally {
      bubble.node.classList.remove("running");
    }
    this.panel.show(meter, stats);
    if (request.outrider.draft_tokens === 0 && stats?.decode_tps) this.panel.plain = stats.decode_tps;
    const speed = stats?.decode_tps ? ` · ${stats.decode_tps.toFixed(1)} tokens/s` : "";
    this.close(bubble, `${meter.tokens} tokens${speed}${finish === "length" ? " · cut at the limit" : ""}`);
  }
}
