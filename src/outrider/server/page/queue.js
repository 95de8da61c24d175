// Messages that wait until the streaming answer is complete: shown above the message field, withdrawn by a
// click, kept over a reload of this window.
import { $, make, grow, removable } from "./dom.js";

export class Queue {
  constructor() {
    try {
      this.items = JSON.parse(sessionStorage.getItem("outrider.queue")) ?? [];
    } catch {
      this.items = [];
    }
    this.draw();
  }
  add(item) {
    this.items.push(item);
    this.draw();
  }
  next() {
    const item = this.items.shift();
    this.draw();
    return item;
  }
  // After a stopped or refused answer the waiting text returns to the message field.
  giveBack() {
    if (!this.items.length) return;
    const field = $("prompt");
    field.value = [...this.items.map((i) => i.text), field.value].filter(Boolean).join("\n\n");
    document.dispatchEvent(new CustomEvent("media", { detail: this.items.flatMap((i) => i.media) }));
    this.items = [];
    grow(field);
    this.draw();
  }
  draw() {
    try {
      sessionStorage.setItem("outrider.queue", JSON.stringify(this.items));
    } catch {
      /* large files: only this page knows them */
    }
    $("queue").hidden = !this.items.length;
    $("queue").replaceChildren(
      ...this.items.map((item) =>
        removable(make("span", {}, item.text || "A file"), `Do not send: ${item.text || "a file"}`, () => {
          this.items = this.items.filter((i) => i !== item);
          this.draw();
        }),
      ),
    );
  }
}
