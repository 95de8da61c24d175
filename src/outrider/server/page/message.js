// One message on the page: a bubble with its text, its state and its buttons.
import { make, copy, grow, growing } from "./dom.js";
import { Document } from "./markdown.js";
import { Marks } from "./drafting.js";

export class Bubble {
  // actions: { retry, edit(text), remove }, those that make sense for this message
  constructor(message, actions) {
    this.message = message;
    this.actions = actions;
    const mine = message.role === "user";
    this.body = make("div", { className: "body" });
    this.node = make("article", { className: `message ${message.role}`, "aria-label": mine ? "You" : "Answer" }, this.body);
    if (mine) this.body.textContent = message.content;
    else {
      this.marks = new Marks(message.marks ?? "");
      this.offset = 0;
      this.document = new Document(this.body, (text, from) => (this.offset < 0 ? document.createTextNode(text) : this.marks.nodes(text, from + this.offset)));
      if (message.reasoning) this.thoughts(message.reasoning);
      this.document.show(message.content);
    }
    if (message.refused) this.refuse(message.refused);
    else if (mine || message.done) this.finish();
  }

  // ---- while it streams
  token(piece, kind) { this.marks.push(piece, kind); }
  show() {
    const { content, reasoning } = this.message;
    const after = reasoning ? Math.max(0, this.marks.raw.indexOf(reasoning)) + reasoning.length : 0;
    const offset = this.marks.raw.indexOf(content, Math.min(after, this.marks.raw.length));
    this.document.show(content, offset !== this.offset && content.length > 0);
    this.offset = offset;
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
    if (this.offset >= 0) this.message.marks = this.marks.pack(this.offset, this.offset + this.message.content.length);
  }

  // ---- afterwards
  finish() {
    const { message, actions } = this, buttons = [];
    const button = (label, onclick, hint) => make("button", { type: "button", className: "small", onclick, "aria-label": hint }, label);
    const copying = button("Copy", () => copy(message.content, copying), "Copy this message");
    buttons.push(copying);
    if (actions.edit) buttons.push(button("Edit", () => this.edit(), "Edit this message and ask again"));
    if (actions.retry) buttons.push(button("Retry", actions.retry, message.role === "user" ? "Retry: send this message again" : "Retry: answer again"));
    if (actions.remove && message.refused) buttons.push(button("Remove", actions.remove, "Remove this message"));
    const note = message.note ? [make("span", { className: "meta" }, message.note)] : [];
    this.foot?.remove();
    this.foot = make("div", { className: "foot" }, ...note, make("span", { className: "actions" }, ...buttons));
    this.node.append(this.foot);
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
    const close = () => { form.replaceWith(this.body); this.foot.hidden = false; };
    const form = make("form", { className: "edit", onsubmit: (event) => {
      event.preventDefault();
      const text = area.value.trim();
      if (text) { close(); this.actions.edit(text); }
    } }, area, make("button", { className: "primary" }, "Ask again"), make("button", { type: "button", className: "small", onclick: close }, "Cancel"));
    growing(area, () => form.requestSubmit());
    area.addEventListener("keydown", (event) => { if (event.key === "Escape") { event.stopPropagation(); close(); this.foot.querySelector("button").focus(); } });
    this.body.replaceWith(form);
    this.foot.hidden = true;
    grow(area);
    area.focus();
  }
}
