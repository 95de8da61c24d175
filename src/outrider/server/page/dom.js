// Small helpers. Text enters the document as text nodes only, never as markup.

export const $ = (id) => document.getElementById(id);

export function make(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name in node) node[name] = value;
    else node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}

export const smallButton = (label, properties) =>
  make("button", { type: "button", className: "small", ...properties }, label);

// An entry of an outgoing list, with a button that removes it.
export const removable = (shown, hint, remove) =>
  make("li", {}, shown, smallButton("✕", { "aria-label": hint, onclick: () => (remove(), $("prompt").focus()) }));

const SVG = "http://www.w3.org/2000/svg";
export function svg(tag, attributes = {}, ...children) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

// Text areas grow with their text up to the style sheet's limit.
export function grow(area) {
  area.style.height = "auto";
  area.style.height = `${area.scrollHeight + area.offsetHeight - area.clientHeight}px`;
}
export function growing(area, submit) {
  area.addEventListener("input", () => grow(area));
  if (submit) {
    area.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        submit();
      }
    });
  }
}

// Follow the end of a scrolling box only while the reader is at the end.
export const atEnd = (box) => box.scrollHeight - box.scrollTop - box.clientHeight < 48;
export function keepEnd(box, change) {
  const follow = atEnd(box);
  change();
  if (follow) box.scrollTop = box.scrollHeight;
}

export async function copy(text, button) {
  const before = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    // no permission, or not a secure page: use execCommand
    const area = make("textarea", { value: text, className: "sr" });
    document.body.append(area);
    area.select();
    button.textContent = document.execCommand("copy") ? "Copied" : "Can't copy";
    area.remove();
    button.focus();
  }
  setTimeout(() => {
    button.textContent = before;
  }, 1500);
}

// Screen readers read whole sentences only, in order.
export class Speaker {
  constructor(region) {
    this.region = region;
    this.rest = "";
  }
  say(sentence) {
    this.region.append(make("p", {}, sentence));
    while (this.region.childElementCount > 6) this.region.firstElementChild.remove();
  }
  stream(text) {
    this.rest += text;
    const end = Math.max(...[". ", "! ", "? ", ".\n", "\n\n", ":\n"].map((mark) => this.rest.lastIndexOf(mark)));
    if (end < 0) return;
    this.say(this.rest.slice(0, end + 1).trim());
    this.rest = this.rest.slice(end + 1);
  }
  end(last) {
    const rest = this.rest.trim();
    this.rest = "";
    if (rest) this.say(rest);
    if (last) this.say(last);
  }
}
