// The list of conversations at the side: open, delete, new.
import { $, make } from "./dom.js";
import * as store from "./store.js";

export class Conversations {
  constructor(chat) {
    this.chat = chat;
    $("new-chat").addEventListener("click", () => this.fresh());
    $("list-toggle").addEventListener("click", () => this.toggle());
    document.addEventListener("pointerdown", ({ target }) => { // on a phone the list lies over the page: a tap beside it closes it
      if (document.body.classList.contains("listing") && !$("side").contains(target) && !$("list-toggle").contains(target)) this.toggle(false);
    });
    addEventListener("storage", () => this.draw()); // another window
  }
  toggle(open = !document.body.classList.contains("listing")) {
    document.body.classList.toggle("listing", open);
    $("list-toggle").setAttribute("aria-expanded", String(open));
    if (open) $("new-chat").focus();
  }
  start() {
    const current = localStorage.getItem("outrider.current");
    this.chat.open((current && store.load(current)) || store.create(localStorage.getItem("outrider.system") ?? ""));
  }
  fresh() {
    this.toggle(false);
    this.chat.open(store.create(localStorage.getItem("outrider.system") ?? ""));
    $("prompt").focus();
  }
  draw() {
    const now = this.chat.conversation?.id;
    $("conversations").replaceChildren(...store.all().map((c) => {
      const open = make("button", { type: "button", className: "open", onclick: () => { this.toggle(false); this.chat.open(c); } }, c.title || "New chat");
      if (c.id === now) open.setAttribute("aria-current", "true");
      const away = make("button", { type: "button", className: "small", "aria-label": `Delete the conversation ${c.title}`, onclick: () => {
        if (!confirm(`Delete “${c.title}”?`)) return;
        store.remove(c.id);
        if (c.id === now) this.fresh(); else this.draw();
      } }, "✕");
      return make("li", {}, open, away);
    }));
  }
}
