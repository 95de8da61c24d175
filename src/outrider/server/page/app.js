// The page: a chat, a race and the server's figures, through the same public API any client uses.
import { $, Speaker, growing, grow } from "./dom.js";
import { ApiError, readModels, readProps } from "./api.js";
import { Settings } from "./settings.js";
import { Baseline } from "./baseline.js";
import { Panel } from "./panel.js";
import { Attachments } from "./attach.js";
import { Chat } from "./chat.js";
import { Conversations } from "./conversations.js";
import { Race } from "./race.js";
import { Figures } from "./figures.js";

function tell(error) {
  const needsKey = error instanceof ApiError && error.status === 401;
  $("error-text").textContent = needsKey ? "This server needs an API key." : error.message;
  $("key-form").hidden = !needsKey;
  $("error").hidden = false;
  if (needsKey) $("key").focus();
}
const calm = () => {
  $("error").hidden = true;
};
$("error-close").addEventListener("click", calm);
$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("outrider.key", $("key").value);
  $("key").value = "";
  calm();
  start();
});

const settings = new Settings(),
  speaker = new Speaker($("announce"));
const baseline = new Baseline({ settings, speaker, tell }),
  panel = new Panel(baseline);
const shared = { settings, panel, baseline, speaker, tell, calm };
const chat = new Chat({ ...shared, changed: () => conversations.draw() });
const conversations = new Conversations(chat, shared),
  attachments = new Attachments(shared);
const race = new Race(shared),
  figures = new Figures(tell);

$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = $("prompt").value.trim();
  if (!text && !attachments.media.length) return;
  $("prompt").value = "";
  grow($("prompt"));
  sessionStorage.removeItem("outrider.draft");
  chat.ask(text, attachments.release());
});
$("prompt").value = sessionStorage.getItem("outrider.draft") ?? ""; // unsent text survives a reload
$("prompt").addEventListener("input", () => sessionStorage.setItem("outrider.draft", $("prompt").value));
growing($("prompt"), () => $("ask").requestSubmit());
growing($("race-prompt"), () => $("race-form").requestSubmit());
growing($("system"));

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || $("cycle-dialog").open) return;
  const typing = /^(TEXTAREA|INPUT|SELECT)$/.test(document.activeElement.tagName);
  if (event.key === "Escape") {
    if (document.body.classList.contains("listing")) conversations.toggle(false);
    chat.stop();
    race.stop();
    baseline.stop();
  } else if (event.key === "ArrowUp" && document.activeElement === $("prompt") && !$("prompt").value) {
    const mine = chat.bubbles.filter((b) => b.message.role === "user").at(-1);
    if (mine && !chat.running) {
      event.preventDefault();
      mine.edit();
    }
  } else if (typing || !$("shortcuts").checked) {
    return; // single keys can be turned off: speech input and switches press them by mistake
  } else if (event.key === "/") {
    event.preventDefault();
    select($("tab-chat"));
    $("prompt").focus();
  } else if (event.key === "n") {
    event.preventDefault();
    select($("tab-chat"));
    conversations.fresh();
  }
});

// ---- tabs
const tabs = [...document.querySelectorAll("[role=tab]")];
function select(tab) {
  for (const other of tabs) {
    const on = other === tab;
    other.setAttribute("aria-selected", String(on));
    other.tabIndex = on ? 0 : -1;
    $(other.getAttribute("aria-controls")).hidden = !on;
  }
  document.body.dataset.view = tab.id.slice(4);
  if (tab.id === "tab-server") {
    figures.draw();
    figures.poll();
  }
  if (tab.id === "tab-race") grow($("race-prompt"));
}
tabs.forEach((tab, i) => {
  tab.addEventListener("click", () => select(tab));
  tab.addEventListener("keydown", (event) => {
    const to = { ArrowRight: i + 1, ArrowLeft: i - 1 + tabs.length, Home: 0, End: tabs.length - 1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    tabs[to % tabs.length].focus();
    select(tabs[to % tabs.length]);
  });
});

$("model-choice").addEventListener("focus", () => readModels().then((cards) => settings.tell(cards), tell));

async function start() {
  try {
    settings.offer(await readModels());
    chat.resume();
    const props = await readProps();
    settings.advise(props.default_generation_settings?.params ?? {});
    attachments.allow(props.modalities ?? {});
    panel.draw();
    figures.poll();
  } catch (error) {
    tell(error);
  }
}
conversations.start();
start();
