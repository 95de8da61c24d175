// The sliders, kept in the browser, and the request they make.
import { $ } from "./dom.js";

const SHOW = {
  k: (v) => (v < 0 ? "auto" : v === 0 ? "0 (plain)" : String(v)),
  temperature: (v) => v.toFixed(1),
  seed: String,
  "max-tokens": String,
};

export class Settings {
  constructor() {
    this.models = [];
    for (const [id, text] of Object.entries(SHOW)) {
      const input = $(id), saved = localStorage.getItem(`outrider.${id}`);
      if (saved !== null) input.value = saved;
      const update = () => {
        $(`${id}-out`).textContent = text(Number(input.value));
        input.setAttribute("aria-valuetext", text(Number(input.value)));
        localStorage.setItem(`outrider.${id}`, input.value);
      };
      input.addEventListener("input", update);
      update();
    }
    $("colour").checked = localStorage.getItem("outrider.colour") !== "no";
    const paint = () => {
      document.body.classList.toggle("coloured", $("colour").checked);
      localStorage.setItem("outrider.colour", $("colour").checked ? "yes" : "no");
    };
    $("colour").addEventListener("change", paint);
    paint();
    $("model-choice").addEventListener("change", () => this.choose($("model-choice").value));
    const theme = localStorage.getItem("outrider.theme") ?? (matchMedia("(prefers-color-scheme: light)").matches ? "light" : "dark");
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
      option.textContent = option.value + (state === "loading" ? " (loading)" : state === "unloaded" ? " (loads when asked)" : "");
    }
  }
  choose(id) {
    const card = this.models.find((c) => c.id === id);
    this.model = id;
    localStorage.setItem("outrider.model", id);
    $("model-choice").value = id;
    const drafter = card?.outrider?.drafter?.replace(/(?:[A-Za-z]:)?[/\\]\S*[/\\]/, ""); // a folder's last part says enough
    $("model").textContent = [this.models.length > 1 ? "" : id, drafter].filter(Boolean).join(" · ");
    $("model").title = $("model").textContent;
    $("max-tokens").max = Math.min(4096, card?.outrider?.max_context ?? 1024);
  }
  get limit() { return Number($("max-tokens").value); }
  get drafts() { const k = Number($("k").value); return k < 0 ? "auto" : k; }
  request(messages, { drafts = this.drafts, limit = this.limit, tries = 0 } = {}) {
    return {
      model: this.model,
      messages,
      temperature: Number($("temperature").value),
      seed: Number($("seed").value) + tries,
      ...(limit === null ? {} : { max_completion_tokens: limit }),
      outrider: { stats: true, token_kinds: true, draft_tokens: drafts },
    };
  }
}
