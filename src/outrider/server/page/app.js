// The page: a chat, a race and the server's metrics, through the same public API any client uses.
// Text goes into the document as text nodes only, never as markup.
import { streamChat, ApiError, readMetrics } from "/page/api.js";

const $ = (id) => document.getElementById(id);
const state = { model: "", messages: [], running: null, race: null, history: [] };
const EXAMPLES = ["Why is the sky blue?", "Write a Python function that reverses a list.", "List ten animals, one a line."];

// ---- settings -------------------------------------------------------------------------------------------------------
const show = {
  k: (v) => (v < 0 ? "auto" : v === 0 ? "0 (plain)" : String(v)),
  temperature: (v) => v.toFixed(1),
  seed: String,
  "max-tokens": String,
};
for (const id of Object.keys(show)) {
  const input = $(id);
  const saved = localStorage.getItem(`outrider.${id}`);
  if (saved !== null) input.value = saved;
  const update = () => { $(`${id}-out`).textContent = show[id](Number(input.value)); localStorage.setItem(`outrider.${id}`, input.value); };
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

const dark = localStorage.getItem("outrider.theme") ?? (matchMedia("(prefers-color-scheme: light)").matches ? "light" : "dark");
document.documentElement.dataset.theme = dark;
$("theme").addEventListener("click", () => {
  const next = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  document.documentElement.dataset.theme = next;
  localStorage.setItem("outrider.theme", next);
});

function request(messages, drafts) {
  const k = drafts ?? (Number($("k").value) < 0 ? "auto" : Number($("k").value));
  return {
    model: state.model,
    messages,
    temperature: Number($("temperature").value),
    seed: Number($("seed").value),
    max_completion_tokens: Number($("max-tokens").value),
    outrider: { stats: true, token_kinds: true, draft_tokens: k },
  };
}

// ---- errors ---------------------------------------------------------------------------------------------------------
function tell(error) {
  const needsKey = error instanceof ApiError && error.status === 401;
  $("error-text").textContent = needsKey ? "This server needs an API key." : error.message;
  $("key-form").hidden = !needsKey;
  $("error").hidden = false;
  if (needsKey) $("key").focus();
}
const calm = () => { $("error").hidden = true; };
$("error-close").addEventListener("click", calm);
$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("outrider.key", $("key").value);
  $("key").value = "";
  calm();
  start();
});

// ---- live statistics ------------------------------------------------------------------------------------------------
// Counted here while tokens stream; replaced by the server's own figures when the answer is complete.
class Meter {
  constructor() { this.began = performance.now(); this.first = null; this.tokens = 0; this.firstTokens = 0; this.cycles = 0; this.accepted = 0; }
  take(kinds) {
    const now = performance.now();
    if (this.first === null) { this.first = now; this.firstTokens = kinds.length; }
    this.tokens += kinds.length;
    this.cycles += 1;
    this.accepted += kinds.filter((k) => k === "accepted").length;
    this.last = now;
  }
  get ttft() { return this.first === null ? null : this.first - this.began; }
  get tps() { const t = this.last - this.first; return t > 0 ? ((this.tokens - this.firstTokens) * 1000) / t : 0; }
}
function showStats(meter, stats) {
  const tps = stats?.decode_tps || meter.tps;
  $("s-tps").textContent = tps ? tps.toFixed(tps < 100 ? 1 : 0) : "–";
  const ttft = stats?.ttft_ms ?? meter.ttft;
  $("s-ttft").textContent = ttft === null ? "–" : `${Math.round(ttft)} ms`;
  $("s-cycle").textContent = stats ? stats.tokens_per_cycle.toFixed(2) : meter.cycles ? (meter.tokens / meter.cycles).toFixed(2) : "–";
  $("s-accept").textContent = stats ? (stats.drafted ? `${Math.round((100 * stats.accepted) / stats.drafted)} %` : "–") : "…";
  if (stats) showPositions(stats.by_position);
}
function showPositions(positions) {
  const rates = positions.map((p) => (p.drafted ? p.accepted / p.drafted : 0));
  $("positions").replaceChildren(...rates.map((rate, i) => {
    const column = document.createElement("div");
    const bar = document.createElement("i");
    bar.style.height = `${Math.round(62 * rate)}px`;
    column.title = `position ${i + 1}: ${positions[i].accepted} of ${positions[i].drafted}`;
    column.append(`${Math.round(100 * rate)}`, bar, `${i + 1}`);
    return column;
  }));
  $("positions").classList.toggle("many", rates.length > 8);
  const spoken = rates.map((r, i) => `position ${i + 1}: ${Math.round(100 * r)} percent`).join(", ");
  $("positions").setAttribute("aria-label", spoken || "No drafts in this answer");
}

// ---- chat -----------------------------------------------------------------------------------------------------------
function bubble(role, text) {
  $("empty")?.remove();
  const node = document.createElement("div");
  node.className = `message ${role}`;
  if (text) node.append(text);
  $("log").append(node);
  $("log").scrollTop = $("log").scrollHeight;
  return node;
}
function appendTokens(node, tokens, thought) {
  for (const [text, kind] of tokens) {
    if (!text) continue;
    const span = document.createElement("span");
    span.className = thought ? `${kind} thought` : kind;
    span.textContent = text;
    node.append(span);
  }
}
async function ask(text) {
  calm();
  state.messages.push({ role: "user", content: text });
  bubble("user", text);
  const node = bubble("assistant", "");
  node.classList.add("running");
  const meter = new Meter();
  const abort = new AbortController();
  state.running = abort;
  $("send").textContent = "Stop";
  let answer = "", stats = null, finish = null;
  try {
    for await (const chunk of streamChat(request(state.messages), abort.signal)) {
      const choice = chunk.choices[0];
      if (chunk.outrider?.tokens) {
        meter.take(chunk.outrider.tokens.map((t) => t[1]));
        appendTokens(node, chunk.outrider.tokens, Boolean(choice?.delta?.reasoning_content));
        showStats(meter, null);
      }
      if (choice?.delta?.content) answer += choice.delta.content;
      if (choice?.finish_reason) { finish = choice.finish_reason; stats = chunk.outrider; }
      const log = $("log");
      if (log.scrollHeight - log.scrollTop - log.clientHeight < 120) log.scrollTop = log.scrollHeight;
    }
    if (stats) showStats(meter, stats);
  } catch (error) {
    if (error.name === "AbortError") finish = "stopped";
    else tell(error);
  } finally {
    node.classList.remove("running");
    state.running = null;
    $("send").textContent = "Send";
    if (answer || node.textContent) {
      state.messages.push({ role: "assistant", content: answer || node.textContent });
      const foot = document.createElement("span");
      foot.className = "foot";
      const speed = stats?.decode_tps ? ` · ${stats.decode_tps.toFixed(1)} tokens/s` : "";
      foot.textContent = `${meter.tokens} tokens${speed}${finish === "length" ? " · cut at the limit" : finish === "stopped" ? " · stopped" : ""}`;
      node.append(foot);
      foot.scrollIntoView({ block: "nearest" });
    } else {
      node.remove();
      state.messages.pop();
      $("prompt").value = text; // nothing came: give the words back
    }
  }
}
$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  if (state.running) { state.running.abort(); return; }
  const text = $("prompt").value.trim();
  if (!text) return;
  $("prompt").value = "";
  grow($("prompt"));
  ask(text);
});
for (const text of EXAMPLES) {
  const button = document.createElement("button");
  button.type = "button";
  button.textContent = text;
  button.addEventListener("click", () => ask(text));
  $("examples").append(button);
}
const grow = (area) => { area.style.height = "auto"; area.style.height = `${area.scrollHeight}px`; };
for (const [area, form] of [[$("prompt"), $("ask")], [$("race-prompt"), $("race-form")]]) {
  area.addEventListener("input", () => grow(area));
  area.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); form.requestSubmit(); }
  });
}
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && state.running) state.running.abort();
  if (event.key === "Escape" && state.race) state.race.abort();
  if (event.key === "/" && !/^(TEXTAREA|INPUT)$/.test(document.activeElement.tagName)) { event.preventDefault(); $("prompt").focus(); }
});

// ---- race -----------------------------------------------------------------------------------------------------------
async function runLane(id, drafts, prompt, signal, rival) {
  const lane = $(id), text = lane.querySelector(".text"), bar = lane.querySelector(".bar i"), speed = lane.querySelector(".speed");
  text.replaceChildren();
  bar.style.width = "0";
  speed.textContent = "…";
  const meter = new Meter(), most = Number($("max-tokens").value), timeline = [];
  $("ghost").hidden = !rival;
  let answer = "", finish = null;
  for await (const chunk of streamChat(request([{ role: "user", content: prompt }], drafts), signal)) {
    if (chunk.outrider?.tokens) {
      meter.take(chunk.outrider.tokens.map((t) => t[1]));
      appendTokens(text, chunk.outrider.tokens);
      text.scrollTop = text.scrollHeight;
      const elapsed = performance.now() - meter.began;
      timeline.push([elapsed, meter.tokens]);
      bar.style.width = `${Math.min(100, (100 * meter.tokens) / most)}%`;
      if (rival) {
        const there = rival.filter(([t]) => t <= elapsed).at(-1)?.[1] ?? 0;
        $("ghost").style.left = `${Math.min(99, (100 * there) / most)}%`;
      }
      if (meter.tps) speed.textContent = `${meter.tps.toFixed(1)} tokens/s`;
    }
    answer += chunk.choices[0]?.delta?.content ?? "";
    if (chunk.choices[0]?.finish_reason) {
      finish = chunk.choices[0].finish_reason;
      if (id === "lane-spec" && chunk.outrider) showStats(meter, chunk.outrider);
    }
  }
  if (finish === null) throw new Error("The stream ended early.");
  const seconds = (performance.now() - meter.began) / 1000;
  speed.textContent = `${meter.tps.toFixed(1)} tokens/s · ${seconds.toFixed(2)} s`;
  return { answer, seconds, timeline, tps: meter.tps };
}
$("race-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  if (state.race) { state.race.abort(); return; }
  const prompt = $("race-prompt").value.trim();
  if (!prompt) return;
  calm();
  const abort = new AbortController();
  state.race = abort;
  $("race-go").textContent = "Stop";
  const verdict = $("verdict");
  verdict.className = "";
  try {
    // one after the other: side by side they would share the machine and neither time would be true
    verdict.textContent = "Plain decoding runs…";
    $("lane-spec").querySelector(".text").replaceChildren();
    $("lane-spec").querySelector(".bar i").style.width = "0";
    const plain = await runLane("lane-plain", 0, prompt, abort.signal);
    verdict.textContent = "Speculative decoding runs…";
    const k = Number($("k").value);
    const spec = await runLane("lane-spec", k <= 0 ? "auto" : k, prompt, abort.signal, plain.timeline);
    const same = plain.answer === spec.answer;
    const ratio = spec.tps && plain.tps ? ` · ${(spec.tps / plain.tps).toFixed(2)}× the speed` : "";
    verdict.className = same ? "same" : "differs";
    verdict.textContent = (same ? "identical" : "the texts differ") + ratio;
  } catch (error) {
    verdict.textContent = error.name === "AbortError" ? "Stopped." : "";
    if (error.name !== "AbortError") tell(error);
  } finally {
    state.race = null;
    $("race-go").textContent = "Race";
  }
});

// ---- the server's metrics -------------------------------------------------------------------------------------------
const CHARTS = [
  ["Tokens a second", (a, b, s) => (b.new_tokens - a.new_tokens) / s, (v) => v.toFixed(1)],
  ["Tokens a cycle", (a, b) => (b.cycles - a.cycles ? (b.accepted - a.accepted) / (b.cycles - a.cycles) + 1 : null), (v) => v.toFixed(2)],
  ["Drafts right", (a, b) => (b.drafted - a.drafted ? (100 * (b.accepted - a.accepted)) / (b.drafted - a.drafted) : null), (v) => `${v.toFixed(0)} %`],
  ["Sequences in flight", (a, b) => b.in_flight, (v) => String(v)],
  ["Requests finished", (a, b) => b.finished, (v) => String(v)],
  ["Prompt tokens from the cache", (a, b) => b.cached_tokens, (v) => String(v)],
];
const charts = CHARTS.map(([name]) => {
  const box = document.createElement("div");
  box.className = "chart";
  const title = document.createElement("h3"), value = document.createElement("b");
  value.textContent = "–";
  title.append(name, value);
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("viewBox", "0 0 100 40");
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("aria-hidden", "true");
  const line = document.createElementNS("http://www.w3.org/2000/svg", "polyline");
  svg.append(line);
  box.append(title, svg);
  $("charts").append(box);
  return { value, line };
});
async function poll() {
  try {
    const now = await readMetrics();
    state.history.push({ at: performance.now(), ...now });
    if (state.history.length > 150) state.history.shift();
    if (!$("view-server").hidden) draw();
  } catch (error) {
    if (!$("view-server").hidden) tell(error);
  }
}
function draw() {
  const h = state.history;
  CHARTS.forEach(([, rate, text], i) => {
    const values = h.slice(1).map((b, j) => rate(h[j], b, (b.at - h[j].at) / 1000));
    const known = values.filter((v) => v !== null && Number.isFinite(v));
    const top = Math.max(1e-9, ...known);
    const step = 100 / Math.max(1, values.length - 1);
    const points = values.map((v, j) => (v === null ? null : `${(j * step).toFixed(1)},${(38 - (36 * v) / top).toFixed(1)}`));
    charts[i].line.setAttribute("points", points.filter(Boolean).join(" "));
    charts[i].value.textContent = known.length ? text(known[known.length - 1]) : "–";
  });
}
setInterval(() => { if (!document.hidden) poll(); }, 2000);

// ---- tabs -----------------------------------------------------------------------------------------------------------
const tabs = [...document.querySelectorAll("[role=tab]")];
function select(tab) {
  for (const other of tabs) {
    const on = other === tab;
    other.setAttribute("aria-selected", String(on));
    other.tabIndex = on ? 0 : -1;
    $(other.getAttribute("aria-controls")).hidden = !on;
  }
  if (tab.id === "tab-server") poll();
}
tabs.forEach((tab, i) => {
  tab.addEventListener("click", () => select(tab));
  tab.addEventListener("keydown", (event) => {
    const move = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!move) return;
    const next = tabs[(i + move + tabs.length) % tabs.length];
    next.focus();
    select(next);
  });
});

// ---- start ----------------------------------------------------------------------------------------------------------
async function start() {
  try {
    const response = await fetch("/v1/models", { headers: ApiError.headers() });
    if (!response.ok) throw await ApiError.from(response);
    const card = (await response.json()).data[0];
    state.model = card.id;
    $("model").textContent = `${card.id} · ${card.outrider?.drafter ?? ""}`;
    $("max-tokens").max = Math.min(4096, card.outrider?.max_context ?? 1024);
    poll();
  } catch (error) {
    tell(error instanceof TypeError ? new Error("The server can't be reached.") : error);
  }
}
start();
