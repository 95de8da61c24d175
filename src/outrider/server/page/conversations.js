// The list of conversations at the side: open, search, rename, delete, new, export and import.
import { $, make, smallButton } from "./dom.js";
import * as store from "./store.js";

export class Conversations {
  constructor(chat, { tell, speaker }) {
    Object.assign(this, { chat, tell, speaker, drawing: null });
    $("new-chat").addEventListener("click", () => this.fresh());
    $("list-toggle").addEventListener("click", () => this.toggle());
    $("search").addEventListener("input", () => this.draw());
    $("export").addEventListener("click", () => this.export());
    $("import").addEventListener("click", () => $("import-file").click());
    $("import-file").addEventListener("change", () => this.import());
    document.addEventListener("pointerdown", ({ target }) => {
      // on a phone the list covers the page: a tap outside closes it
      if (
        document.body.classList.contains("listing") &&
        !$("side").contains(target) &&
        !$("list-toggle").contains(target)
      )
        this.toggle(false);
    });
    store.watch((id) => this.changed(id));
  }
  toggle(open = !document.body.classList.contains("listing")) {
    document.body.classList.toggle("listing", open);
    $("list-toggle").setAttribute("aria-expanded", String(open));
    if (open) $("new-chat").focus();
  }
  create() {
    return new store.Conversation({});
  }
  start() {
    const current = sessionStorage.getItem("outrider.current") ?? localStorage.getItem("outrider.current");
    this.chat.open((current && store.load(current)) || this.create());
  }
  fresh() {
    this.toggle(false);
    this.chat.open(this.create());
    $("prompt").focus();
  }
  // Another window wrote: several entries at once, so the page is drawn once for all of them.
  changed(id) {
    const { conversation } = this.chat,
      empty = !conversation?.messages.size;
    if ((id === null || id === conversation?.id) && !empty && !this.chat.refresh() && !this.chat.running)
      this.chat.open(this.create());
    this.drawing ??= requestAnimationFrame(() => {
      this.drawing = null;
      this.draw();
    });
  }
  draw() {
    const now = this.chat.conversation?.id,
      words = $("search").value.trim(),
      found = words ? store.search(words) : store.heads();
    $("conversations").replaceChildren(...found.map((c) => this.item(c, c.id === now)));
    $("found").textContent = words ? `${found.length} found` : "";
  }
  item(head, current) {
    const open = make(
      "button",
      {
        type: "button",
        className: "open",
        title: head.title,
        ondblclick: () => this.rename(head, item),
        onclick: () => {
          this.toggle(false);
          if (!current) this.chat.open(store.load(head.id));
        },
      },
      head.title || "New chat",
    );
    if (current) open.setAttribute("aria-current", "true");
    const small = (label, hint, onclick) =>
      smallButton(label, { "aria-label": `${hint} the conversation ${head.title}`, title: hint, onclick });
    const item = make(
      "li",
      {},
      open,
      small("✎", "Rename", () => this.rename(head, item)),
      small("✕", "Delete", () => {
        if (!confirm(`Delete “${head.title}”?`)) return;
        store.remove(head.id);
        if (current) this.fresh();
        else this.draw();
      }),
    );
    return item;
  }
  rename(head, item) {
    const field = make("input", { value: head.title, "aria-label": "Name of the conversation", maxLength: 120 });
    const done = (keep) => {
      if (!field.isConnected) return;
      const title = field.value.trim();
      if (keep && title) {
        store.rename(head.id, title);
        if (head.id === this.chat.conversation.id) this.chat.conversation.title = title;
      }
      field.replaceWith(item.firstElementChild ?? "");
      this.draw();
    };
    field.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.isComposing) done(true);
      if (event.key === "Escape") {
        event.stopPropagation();
        done(false);
      }
    });
    field.addEventListener("blur", () => done(true));
    item.replaceChildren(field);
    field.select();
  }
  export() {
    const url = URL.createObjectURL(new Blob([store.exported()], { type: "application/json" }));
    make("a", { href: url, download: `outrider-chats-${new Date().toISOString().slice(0, 10)}.json` }).click();
    setTimeout(() => URL.revokeObjectURL(url), 1000);
  }
  async import() {
    const [file] = $("import-file").files;
    $("import-file").value = "";
    if (!file) return;
    try {
      const count = store.imported(await file.text());
      this.changed(null);
      this.speaker.say(`${count} conversations read.`);
    } catch (error) {
      this.tell(error);
    }
  }
}
