// The conversation on the page: sends, streams, edits, retries, queues, and drops the oldest turns when the context
// is full.
import { $, make, atEnd, keepEnd } from "./dom.js";
import { ApiError, streamChat } from "./api.js";
import { Meter } from "./drafting.js";
import { contentParts } from "./attach.js";
import { Bubble } from "./message.js";
import { Queue } from "./queue.js";
import { WINDOW } from "./store.js";

const EXAMPLES = [
  "Why is the sky blue?",
  "Write a Python function that reverses a list.",
  "Explain in simple words what gravity is.",
];
const KEEP = 700; // milliseconds between saves of a streaming answer
const SILENT = 5000; // milliseconds without a save after which another window's answer counts as ended

export class Chat {
  constructor({ settings, panel, baseline, speaker, tell, calm, changed }) {
    Object.assign(this, { settings, panel, baseline, speaker, tell, calm, changed });
    this.log = $("log");
    this.bubbles = [];
    this.running = null;
    this.queue = new Queue();
    this.log.addEventListener("scroll", () => {
      $("latest").hidden = atEnd(this.log);
    });
    $("latest").addEventListener("click", () => {
      this.log.scrollTop = this.log.scrollHeight;
    });
    $("stop").addEventListener("click", () => {
      this.stop();
      $("prompt").focus();
    });
    $("system").addEventListener("change", () => {
      this.conversation.system = $("system").value;
      if (this.conversation.messages.size) this.conversation.keepHead();
    });
    const leave = () => {
      this.answering?.keep();
      this.leaving = true;
    };
    addEventListener("beforeunload", () => {
      leave();
      setTimeout(() => {
        this.leaving = false;
      }, 1000);
    }); // the user may cancel leaving
    addEventListener("pagehide", leave);
    setInterval(() => this.proceed(), SILENT);
    addEventListener("pageshow", ({ persisted }) => {
      if (persisted) location.reload();
    });
  }

  async open(conversation) {
    if (this.running) {
      this.stop();
      await this.finished;
    } // a running answer belongs to the previous conversation
    this.conversation = conversation;
    localStorage.setItem("outrider.current", conversation.id);
    sessionStorage.setItem("outrider.current", conversation.id);
    $("system").value = conversation.system;
    this.draw();
    this.log.scrollTop = this.log.scrollHeight;
    this.changed();
  }
  // Resumes an answer that streamed when the page was reloaded.
  resume() {
    const last = this.conversation.path.at(-1);
    if (!this.running && last?.role === "assistant" && !last.done && last.window === WINDOW)
      this.answer({ resume: last });
  }
  stop() {
    this.running?.abort();
  }
  // Does another window stream this answer?
  elsewhere(message) {
    return (
      message?.role === "assistant" && !message.done && message.window !== WINDOW && Date.now() - message.beat < SILENT
    );
  }
  // Sends waiting messages once another window's answer is complete or has gone silent.
  proceed() {
    if (this.running || this.elsewhere(this.conversation?.path.at(-1))) return;
    if (this.log.querySelector(".running")) this.draw();
    const next = this.queue.next();
    if (next) this.ask(next.text, next.media);
  }

  // Another window changed this conversation.
  refresh() {
    const before = this.conversation.path.map((m) => m.id).join();
    if (!this.conversation.refresh(this.answering?.message.id)) return false;
    this.bubbles.forEach((b) => {
      b.message = this.conversation.get(b.message.id) ?? b.message;
      b.branches(this.branches(b.message));
    });
    if (this.running) return true;
    const { path } = this.conversation,
      last = path.at(-1);
    if (before !== path.map((m) => m.id).join()) keepEnd(this.log, () => this.draw());
    else if (last && this.bubbles.length) {
      // its last answer grew
      const next = this.bubble(last);
      keepEnd(this.log, () => this.bubbles.pop().node.replaceWith(next.node));
      this.bubbles.push(next);
    }
    this.proceed();
    return true;
  }

  // ---- the page
  draw() {
    this.bubbles = this.conversation.path.map((m) => this.bubble(m));
    const nodes = this.bubbles.map((b) => b.node);
    this.log.replaceChildren(...(nodes.length ? nodes : [this.empty()]));
    this.divide();
  }
  bubble(message) {
    const bubble = new Bubble(message, this.actions(message));
    bubble.branches(this.branches(message));
    if (message.role === "assistant" && !message.done && message !== this.answering?.message) {
      if (this.elsewhere(message)) bubble.node.classList.add("running");
      else if (message.window !== WINDOW) {
        message.note ||= "interrupted";
        bubble.finish();
      }
    }
    return bubble;
  }
  empty() {
    const examples = EXAMPLES.map((text) => make("button", { type: "button", onclick: () => this.ask(text) }, text));
    return make(
      "div",
      { id: "empty" },
      make(
        "p",
        {},
        "A small drafter proposes the next tokens; the model verifies each of them " +
          "and keeps only what it would have said itself.",
      ),
      make("p", {}, "Ask something and watch the tokens arrive several at a time."),
      make("div", { id: "examples" }, ...examples),
    );
  }
  divide() {
    this.log.querySelector(".divider")?.remove();
    const at = this.bubbles.findIndex((b) => b.message.id === this.conversation.from);
    if (at > 0)
      this.bubbles[at].node.before(
        make("p", { className: "divider" }, "Messages above this line no longer fit the context and are not sent."),
      );
  }
  actions(message) {
    const { conversation } = this,
      busy =
        (go) =>
        (...values) => {
          if (!this.running) go(...values);
        };
    if (message.role === "user") {
      return {
        edit: busy((text) => {
          this.branch(message.parent);
          this.ask(text, message.media);
        }),
        retry:
          message.refused === undefined
            ? null
            : busy(() => {
                this.remove(message);
                this.ask(message.content, message.media);
              }),
        remove: busy(() => this.remove(message)),
      };
    }
    return {
      resume: busy(() => this.answer({ resume: message })),
      extend: busy(() => this.answer({ extend: message })),
      retry: busy(() => {
        const tries = conversation.siblings(message).length;
        this.branch(message.parent);
        this.answer({ tries });
      }),
    };
  }
  // The number of this version of an edited message or retried answer, with buttons to the others.
  branches(message) {
    const all = this.conversation.siblings(message),
      at = all.indexOf(message);
    return {
      at,
      count: all.length,
      go: (by) => {
        if (this.running || !all[at + by]) return;
        this.branch(this.conversation.newest(all[at + by].id));
        this.conversation.keepHead();
        this.bubbles
          .find((b) => b.message === all[at + by])
          ?.node.querySelector(`.branches [data-by="${by}"]`)
          ?.focus();
        this.speaker.say(`Version ${at + by + 1} of ${all.length}.`);
      },
    };
  }
  branch(leaf) {
    this.conversation.leaf = leaf;
    const { scrollTop } = this.log;
    this.draw();
    this.log.scrollTop = scrollTop;
  }
  add(message, parent) {
    $("empty")?.remove();
    const bubble = this.bubble(this.conversation.add(message, parent));
    this.bubbles.push(bubble);
    this.log.append(bubble.node);
    this.log.scrollTop = this.log.scrollHeight; // always show the user's own message
    return bubble;
  }
  remove(message) {
    this.conversation.remove(message);
    this.branch(this.conversation.leaf);
    this.conversation.keepHead();
    this.changed();
  }
  keep(message, conversation = this.conversation) {
    if (!conversation.keep(message)) this.tell(new Error("The browser has no room to keep this conversation."));
  }

  // ---- sending. While an answer streams, a message waits for its end.
  ask(text, media = []) {
    if (this.running || this.elsewhere(this.conversation.path.at(-1))) {
      this.queue.add({ text, media });
      return;
    }
    const question = this.add({ role: "user", content: text, ...(media.length ? { media } : {}) });
    this.keep(question.message);
    this.answer();
  }
  answer(options = {}) {
    this.baseline.stop();
    this.finished = this.attempt(options).then((complete) => {
      if (complete) this.proceed();
      else this.queue.giveBack();
    });
    return this.finished;
  }
  // The messages that are sent: the system prompt and all messages that were not refused and still fit.
  sent(path) {
    const { system, from } = this.conversation,
      first = Math.max(
        0,
        path.findIndex((m) => m.id === from),
      );
    const turns = path
      .slice(first)
      .filter((m) => !m.refused && (m.content || m.media))
      .map(({ role, content, media }) => ({ role, content: contentParts(content, media ?? []) }));
    return system.trim() ? [{ role: "system", content: system.trim() }, ...turns] : turns;
  }
  // Drops the oldest turn. False if only the newest question is left.
  forget(path) {
    const from = path.findIndex((m) => m.id === this.conversation.from);
    const next = path.find((m, i) => i > Math.max(0, from) && m.role === "user" && !m.refused);
    if (!next) return false;
    this.conversation.from = next.id;
    this.divide();
    return true;
  }

  // True if the answer was completed. resume: request the answer again; extend: continue it after its
  // text.
  async attempt({ tries = 0, resume = null, extend = null }) {
    this.calm();
    const { conversation } = this,
      abort = new AbortController();
    const old = resume ?? extend,
      path = old ? conversation.pathTo(old.parent) : conversation.path;
    const question = this.bubbles.find((b) => b.message.id === path.at(-1)?.id);
    let complete = false,
      sampling = resume?.sampling ?? this.settings.sampling(tries);
    const bubble = old
      ? this.bubbles.find((b) => b.message.id === old.id)
      : this.add({ role: "assistant", content: "", reasoning: "", sampling }, path.at(-1)?.id);
    const { message } = bubble;
    Object.assign(message, { done: false, window: WINDOW, note: "", cut: false });
    this.running = abort;
    this.answering = {
      message,
      keep: () => {
        message.beat = Date.now();
        bubble.keep();
        this.keep(message, conversation);
      },
    };
    this.answering.keep();
    const beat = setInterval(this.answering.keep, KEEP);
    document.body.classList.add("answering");
    bubble.start(Boolean(extend));
    this.changed();
    for (;;) {
      try {
        const messages = this.sent(path);
        if (extend) {
          messages.push({ role: "assistant", content: message.content });
          Object.assign(sampling, { continue_final_message: true, add_generation_prompt: false });
        }
        await this.stream(bubble, { ...sampling, messages }, abort.signal, Boolean(extend));
        complete = true;
        break;
      } catch (error) {
        if (this.leaving) await new Promise(() => {}); // the page is closing; the next one requests the answer again
        if (message.content || message.reasoning) {
          const stopped = error.name === "AbortError";
          message.cut = Boolean(message.content);
          this.close(bubble, stopped ? "stopped" : `interrupted: ${error.message}`);
          if (!stopped) this.tell(error);
          break;
        }
        if (error.code === "context_length_exceeded") {
          if (this.forget(path)) continue;
          if (sampling.max_completion_tokens) {
            const { max_completion_tokens: _, ...rest } = sampling;
            sampling = rest;
            continue;
          } // without a maximum the answer takes what fits
        }
        bubble.node.remove();
        this.bubbles = this.bubbles.filter((b) => b !== bubble);
        conversation.remove(message);
        this.refused(question, error);
        break;
      }
    }
    clearInterval(beat);
    this.running = this.answering = null;
    document.body.classList.remove("answering");
    this.keep(complete || conversation.get(message.id) ? message : question.message, conversation);
    this.changed();
    return complete;
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
    this.speaker.end(`The answer is complete: ${note}.`);
  }

  // Decoding is a function of the request and its seed: the same request gives the same text after a reload, so
  // the old text stays until the new one has caught up with it.
  async stream(bubble, request, signal, extend = false) {
    const meter = new Meter(),
      { message } = bubble,
      kept = message.content;
    let stats = null,
      finish = null,
      due = false,
      content = extend ? kept : "",
      reasoning = extend ? (message.reasoning ?? "") : "";
    const caughtUp = () => content.length >= kept.length || !kept.startsWith(content);
    const paint = () => {
      due = false;
      if (!message.done) keepEnd(this.log, () => bubble.show());
      if (meter.tokens) this.panel.show(meter, stats);
    };
    bubble.behind = Boolean(kept) && !extend;
    this.panel.show(meter, null);
    for await (const chunk of streamChat(request, signal)) {
      const choice = chunk.choices[0],
        delta = choice?.delta ?? {};
      if (chunk.outrider?.tokens) {
        meter.take(chunk.outrider);
        for (const [piece, kind] of chunk.outrider.tokens) bubble.token(piece, kind);
      }
      content += delta.content ?? "";
      reasoning += delta.reasoning_content ?? "";
      if (caughtUp()) {
        Object.assign(message, { content, reasoning });
        bubble.behind = false;
      }
      this.speaker.stream(content.length > kept.length ? (delta.content ?? "") : "");
      if (choice?.finish_reason) {
        finish = choice.finish_reason;
        stats = chunk.outrider;
      }
      if (!due) {
        due = true;
        requestAnimationFrame(paint);
      }
    }
    Object.assign(message, { content, reasoning });
    bubble.behind = false;
    this.panel.show(meter, stats);
    if (request.outrider.draft_tokens === 0 && stats?.decode_tps) this.baseline.set(stats.decode_tps);
    else this.baseline.soon();
    const speed = stats?.decode_tps ? ` · ${stats.decode_tps.toFixed(1)} tokens/s` : "";
    message.cut = finish === "length" && Boolean(content);
    this.close(bubble, `${meter.tokens} tokens${speed}${message.cut ? " · cut at the maximum length" : ""}`);
  }
}
