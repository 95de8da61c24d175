// One message on the page: a bubble with its text, its images and clips, its state and its buttons.
import { make, copy, grow, growing, smallButton } from "./dom.js";
import { mediaNode } from "./attach.js";
import { Document } from "./markdown.js";
import { Marks } from "./marks.js";

export class Bubble {
  // actions: { retry, edit(text), remove, resume, extend }, those that make sense for this message
  constructor(message, actions) {
    this.message = message;
    this.actions = actions;
    this.behind = false; // a re-requested answer has not reached the shown text yet
    const mine = message.role === "user";
    this.body = make("div", { className: "body" });
    this.node = make(
      "article",
      { className: `message ${message.role}`, "aria-label": mine ? "You" : "Answer" },
      this.body,
    );
    if (mine) {
      const media = (message.media ?? []).map(mediaNode);
      this.body.append(...(media.length ? [make("div", { className: "media" }, ...media)] : []), message.content);
    } else {
      this.marks = new Marks(message.marks ?? "");
      this.offset = message.marks ? 0 : -1;
      this.document = new Document(this.body, (text, from) =>
        this.offset < 0 ? document.createTextNode(text) : this.marks.nodes(text, from + this.offset),
      );
      if (message.reasoning) this.thoughts(message.reasoning);
      this.document.show(message.content);
    }
    if (message.refused) this.refuse(message.refused);
    else if (mine || message.done) this.finish();
  }

  // ---- while it streams
  // extend: the answer continues after its text
  start(extend = false) {
    const { content, marks } = this.message;
    this.marks = new Marks(extend ? (marks ?? "") : "");
    if (extend) this.marks.continue(content);
    this.node.classList.add("running");
    this.foot?.remove();
  }
  token(piece, kind) {
    this.marks.push(piece, kind);
  }
  show() {
    if (this.behind) return;
    const { content, reasoning } = this.message;
    const after = reasoning ? Math.max(0, this.marks.raw.indexOf(reasoning)) + reasoning.length : 0;
    const offset = this.marks.raw.indexOf(content, Math.min(after, this.marks.raw.length)),
      moved = offset !== this.offset;
    this.offset = offset;
    this.document.show(content, moved && content.length > 0);
    if (reasoning) this.thoughts(reasoning);
  }
  thoughts(text) {
    if (!this.thought) {
      this.thought = make("div", { className: "thought" });
      this.body.before(make("details", {}, make("summary", {}, "Thoughts"), this.thought));
    }
    this.thought.textContent = text;
  }
  keep() {
    if (!this.behind && this.offset >= 0)
      this.message.marks = this.marks.pack(this.offset, this.offset + this.message.content.length);
  }

  // ---- afterwards
  finish() {
    const { message, actions } = this,
      buttons = [];
    const button = (label, onclick, hint) =>
      smallButton(label, { onclick, "aria-label": hint });
    const copying = button("Copy", () => copy(message.content, copying), "Copy this message");
    buttons.push(copying);
    if (actions.resume && !message.done)
      buttons.push(button("Resume", actions.resume, "Resume: ask for the rest of this answer"));
    if (actions.extend && message.cut)
      buttons.push(button("Continue", actions.extend, "Continue this answer where it was cut"));
    if (actions.edit) buttons.push(button("Edit", () => this.edit(), "Edit this message and ask again"));
    if (actions.retry)
      buttons.push(
        button(
          "Retry",
          actions.retry,
          message.role === "user" ? "Retry: send this message again" : "Retry: answer again",
        ),
      );
    if (actions.remove && message.refused) buttons.push(button("Remove", actions.remove, "Remove this message"));
    const note = message.note ? [make("span", { className: "meta" }, message.note)] : [];
    this.node.classList.remove("running");
    this.foot?.remove();
    this.foot = make("div", { className: "foot" }, ...note, make("span", { className: "actions" }, ...buttons));
    this.node.append(this.foot);
    if (this.versions) this.branches(this.versions);
  }
  // The number of this version, and of all.
  branches(versions) {
    this.versions = versions;
    this.foot?.querySelector(".branches")?.remove();
    const { at, count, go } = versions;
    if (count < 2 || !this.foot) return;
    const button = (by, label, hint) =>
      smallButton(label, {
        disabled: at + by < 0 || at + by >= count,
        "data-by": String(by),
        "aria-label": hint,
        onclick: () => go(by),
      });
    this.foot.prepend(
      make(
        "span",
        { className: "branches", role: "group", "aria-label": `Version ${at + 1} of ${count}` },
        button(-1, "‹", "Previous version"),
        make("span", {}, `${at + 1}/${count}`),
        button(1, "›", "Next version"),
      ),
    );
  }
  refuse(reason) {
    this.message.refused = reason;
    this.node.classList.add("refused");
    this.node.querySelector(".reason")?.remove();
    this.node.append(make("p", { className: "reason" }, make("b", {}, "Not answered. "), reason));
    this.finish();
  }
  edit() {
    const area = make("textarea", { value: this.message.content, rows: 1, "aria-label": "Edit your message" });
    const close = () => {
      form.replaceWith(this.body);
      this.foot.hidden = false;
    };
    const form = make(
      "form",
      {
        className: "edit",
        onsubmit: (event) => {
          event.preventDefault();
          const text = area.value.trim();
          if (text) {
            close();
            this.actions.edit(text);
          }
        },
      },
      area,
      make("button", { className: "primary" }, "Ask again"),
      smallButton("Cancel", { onclick: close }),
    );
    growing(area, () => form.requestSubmit());
    area.addEventListener("keydown", (event) => {
      if (event.key === "Escape") {
        event.stopPropagation();
        close();
        this.foot.querySelector("button").focus();
      }
    });
    this.body.replaceWith(form);
    this.foot.hidden = true;
    grow(area);
    area.focus();
  }
}
