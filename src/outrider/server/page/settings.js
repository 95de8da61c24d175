// The settings, kept in the browser, and the request they make.
import { $ } from "./dom.js";

const SLIDERS = {
  k: (v) => (v < 0 ? "auto" : v === 0 ? "0 (plain)" : String(v)),
  temperature: (v) => String(+v.toFixed(2)),
  "top-p": (v) => (v >= 1 ? "off" : v.toFixed(2)),
};
const NUMBERS = ["top-k", "seed", "max-tokens"];
const SAMPLING = { temperature: "temperature", "top-p": "top_p", "top-k": "top_k" }; // as the server names them
const SWITCHES = ["auto-plain", "shortcuts"];
const key = (id) => `outrider.${id === "temperature" ? "chosen.temperature" : id}`; // 0 was once stored without a choice

const clamp = (input) => {
  const value = Math.round(Number(input.value) || 0); // NaN becomes 0
  input.value = String(Math.min(Number(input.max), Math.max(Number(input.min), value)));
};

export class Settings {
  constructor() {
    this.models = [];
    for (const id of Object.keys(SLIDERS)) {
      const input = $(id);
      input.value = localStorage.getItem(key(id)) ?? input.value;
      input.addEventListener("input", () => {
        this.show(id);
        localStorage.setItem(key(id), input.value);
      });
      this.show(id);
    }
    for (const id of NUMBERS) {
      const input = $(id);
      input.value = localStorage.getItem(key(id)) ?? input.value;
      input.addEventListener("change", () => {
        clamp(input);
        localStorage.setItem(key(id), input.value);
      });
    }
    for (const id of SWITCHES) {
      const input = $(id);
      const apply = () => {
        document.body.dataset[id === "shortcuts" ? "shortcuts" : "autoPlain"] = input.checked ? "yes" : "no";
      };
      input.checked = localStorage.getItem(key(id)) !== "no";
      input.addEventListener("change", () => {
        localStorage.setItem(key(id), input.checked ? "yes" : "no");
        apply();
      });
      apply();
    }
    const paint = () => {
      document.body.dataset.marks = $("marks").value;
      localStorage.setItem("outrider.marks", $("marks").value);
    };
    const marks = localStorage.getItem("outrider.marks");
    if (["off", "quiet", "full"].includes(marks)) $("marks").value = marks;
    $("marks").addEventListener("change", paint);
    paint();
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
  show(id) {
    const text = SLIDERS[id](Number($(id).value));
    $(`${id}-out`).textContent = text;
    $(id).setAttribute("aria-valuetext", text);
  }
  // The model's own sampling (the server's /props), except for what was chosen here.
  advise(defaults) {
    for (const [id, name] of Object.entries(SAMPLING)) {
      if (localStorage.getItem(key(id)) !== null || typeof defaults[name] !== "number") continue;
      $(id).value = String(defaults[name]);
      if (SLIDERS[id]) this.show(id);
      else clamp($(id));
    }
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
  // The loaded models change over time: only labels are updated, so that an open list stays open.
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
    // the last part of a folder's path
    const drafter = card?.outrider?.drafter?.replace(/(?:[A-Za-z]:)?[/\\]\S*[/\\]/, "");
    $("model").textContent = [this.models.length > 1 ? "" : id, drafter].filter(Boolean).join(" · ");
    $("model").title = $("model").textContent;
    const context = card?.outrider?.max_context ?? 4096;
    $("max-tokens").max = String(context);
    $("max-tokens").title = `Tokens, up to the context of ${context}`;
  }
  get limit() {
    const { value, max } = $("max-tokens");
    return Math.max(1, Math.min(Number(value) || Number(max), Number(max)));
  }
  get drafts() {
    const k = Number($("k").value);
    return k < 0 ? "auto" : k;
  }
  // The request without its messages.
  sampling(tries = 0, { drafts = this.drafts, limit = this.limit } = {}) {
    return {
      model: this.model,
      temperature: Number($("temperature").value),
      top_p: Number($("top-p").value), // 1 and 0 are sent too: without them the model's own values would apply
      top_k: Number($("top-k").value),
      seed: Number($("seed").value) + tries,
      max_completion_tokens: limit,
      outrider: { stats: true, token_kinds: true, draft_tokens: drafts },
    };
  }
}
