// The sliders, kept in the browser, and the request they make.
import { $ } from "./dom.js";

const SHOW = {
  k: (v) => (v < 0 ? "auto" : v === 0 ? "0 (plain)" : String(v)),
  temperature: (v) => v.toFixed(1),
  "top-p": (v) => (v >= 1 ? "off" : v.toFixed(2)),
  "max-tokens": String,
};

export class Settings {
  constructor() {
    this.models = [];
    for (const [id, text] of Object.entries(SHOW)) {
      const input = $(id),
        saved = localStorage.getItem(`outrider.${id}`);
      if (saved !== null) input.value = saved;
      const update = () => {
        $(`${id}-out`).textContent = text(Number(input.value));
        input.setAttribute("aria-valuetext", text(Number(input.value)));
        localStorage.setItem(`outrider.${id}`, input.value);
      };
      input.addEventListener("input", update);
      update();
    }
    for (const id of ["top-k", "seed"]) {
      // numbers; what is none, or out of bounds, becomes the nearest that is in
      const input = $(id);
      input.value = localStorage.getItem(`outrider.${id}`) ?? input.value;
      const update = () => {
        input.value = String(
          Math.min(Number(input.max), Math.max(Number(input.min), Math.round(Number(input.value) || 0))),
        );
        localStorage.setItem(`outrider.${id}`, input.value);
      };
      input.addEventListener("change", update);
      update();
    }
    const paint = () => {
      document.body.dataset.marks = $("marks").value;
      localStorage.setItem("outrider.marks", $("marks").value);
    };
    const marks = localStorage.getItem("outrider.marks");
    if (["off", "quiet", "full"].includes(marks)) $("marks").value = marks;
    $("marks").addEventListener("change", paint);
    paint();
    $("auto-plain").checked = localStorage.getItem("outrider.auto-plain") !== "no";
    $("auto-plain").addEventListener("change", () =>
      localStorage.setItem("outrider.auto-plain", $("auto-plain").checked ? "yes" : "no"),
    );
    $("model-choice").addEventListener("change", () => this.choose($("model-choice").value));
    const theme =
      localStorage.getItem("outrider.theme") ??
      (matchMedia("(prefers-color-scheme: light)").matches ? "light" : "dark");
    this.theme(theme);
    $("theme").addEventListener("click", () => {
      const next = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
      localStorage.setItem("outrider.theme", next);
      this.theme(next);
    });
  }
  theme(name) {
    document.documentElement.dataset.theme = name;
    $("theme").setAttribute("aria-label", `Use the ${name === "dark" ? "light" : "dark"} theme`);
  }
  offer(cards) {
    this.models = cards;
    $("model-choice").replaceChildren(...cards.map((c) => new Option("", c.id)));
    this.tell(cards);
    $("model-choice").hidden = cards.length < 2;
    const saved = localStorage.getItem("outrider.model");
    this.choose(cards.some((c) => c.id === saved) ? saved : cards[0].id);
  }
  // What is loaded changes while we look: only the words do, so that an open list stays as it is.
  tell(cards) {
    this.models = cards;
    for (const option of $("model-choice").options) {
      const state = cards.find((c) => c.id === option.value)?.outrider?.state;
      option.textContent =
        option.value + (state === "loading" ? " (loading)" : state === "unloaded" ? " (loads when asked)" : "");
    }
  }
  choose(id) {
    const card = this.models.find((c) => c.id === id);
    this.model = id;
    localStorage.setItem("outrider.model", id);
    $("model-choice").value = id;
    // a folder's last part says enough
    const drafter = card?.outrider?.drafter?.replace(/(?:[A-Za-z]:)?[/\\]\S*[/\\]/, "");
    $("model").textContent = [this.models.length > 1 ? "" : id, drafter].filter(Boolean).join(" · ");
    $("model").title = $("model").textContent;
    $("max-tokens").max = Math.min(4096, card?.outrider?.max_context ?? 1024);
  }
  get limit() {
    return Number($("max-tokens").value);
  }
  get drafts() {
    const k = Number($("k").value);
    return k < 0 ? "auto" : k;
  }
  // What is asked for, without the messages.
  sampling(tries = 0, { drafts = this.drafts, limit = this.limit } = {}) {
    const topP = Number($("top-p").value),
      topK = Number($("top-k").value);
    return {
      model: this.model,
      temperature: Number($("temperature").value),
      ...(topP < 1 ? { top_p: topP } : {}),
      ...(topK > 0 ? { top_k: topK } : {}),
      seed: Number($("seed").value) + tries,
      max_completion_tokens: limit,
      outrider: { stats: true, token_kinds: true, draft_tokens: drafts },
    };
  }
}
