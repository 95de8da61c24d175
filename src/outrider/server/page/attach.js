// Files attached to a message: texts, and images and sound if the model takes them. They are chosen, pasted,
// dropped or recorded, and reduced to a size that can be sent and stored.
import { $, make, removable } from "./dom.js";
import { Recorder, isSound, soundUrl } from "./sound.js";

const SIDE = 1024, // pixels of the longer side
  MAX_FILES = 8, // per message
  MAX_TEXT_BYTES = 256 * 1024,
  TEXT_URL = "data:text/plain;charset=utf-8,";

export const isText = (url) => url.startsWith("data:text/plain");
const textOf = (url) => decodeURIComponent(url.slice(url.indexOf(",") + 1));

// An image, a player, or a text that can be opened.
export function mediaNode({ url, name }) {
  if (isText(url))
    return make(
      "details",
      { className: "file" },
      make("summary", {}, name || "Attached text"),
      make("pre", { tabIndex: 0 }, textOf(url)),
    );
  return isSound(url)
    ? make("audio", { src: url, controls: true, "aria-label": name || "Attached sound" })
    : make("img", { src: url, alt: name || "Attached image" });
}

// The text in a code fence longer than any fence inside it.
function fenced({ url, name }) {
  const text = textOf(url),
    ticks = Math.max(2, ...[...text.matchAll(/`{3,}/g)].map(([run]) => run.length)) + 1,
    fence = "`".repeat(ticks);
  return `${name || "File"}:\n${fence}\n${text.replace(/\n$/, "")}\n${fence}\n\n`;
}

// The parts that are sent: texts inside the message, images before it, sound after it, as Google recommends.
export function contentParts(message, files) {
  const text = files.filter(({ url }) => isText(url)).map(fenced).join("") + message,
    media = files.filter(({ url }) => !isText(url));
  if (!media.length) return text;
  const images = media.filter(({ url }) => !isSound(url)).map(({ url }) => ({ type: "image_url", image_url: { url } })),
    clips = media.filter(({ url }) => isSound(url)).map(({ url }) => ({
      type: "input_audio",
      input_audio: { data: url.slice(url.indexOf(",") + 1), format: "wav" },
    }));
  return [...images, ...(text ? [{ type: "text", text }] : []), ...clips];
}

// A data URL of the image, scaled down if it is large.
async function shrink(file) {
  let bitmap;
  try {
    bitmap = await createImageBitmap(file);
  } catch {
    throw new Error(`${file.name || "This file"} is no image that this browser can read.`);
  }
  const scale = Math.min(1, SIDE / Math.max(bitmap.width, bitmap.height)),
    canvas = make("canvas");
  canvas.width = Math.max(1, Math.round(bitmap.width * scale));
  canvas.height = Math.max(1, Math.round(bitmap.height * scale));
  canvas.getContext("2d").drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  const png = canvas.toDataURL("image/png"),
    jpeg = canvas.toDataURL("image/jpeg", 0.9);
  return file.type === "image/png" && png.length <= 2 * jpeg.length ? png : jpeg; // drawings stay sharp
}

async function textUrl(file) {
  const name = file.name || "This file";
  if (file.size > MAX_TEXT_BYTES) throw new Error(`${name} is larger than ${MAX_TEXT_BYTES / 1024} KiB.`);
  let text;
  try {
    text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
  } catch {
    text = "\0";
  }
  if (text.includes("\0")) throw new Error(`${name} is no text file, and nothing else that can be attached here.`);
  return TEXT_URL + encodeURIComponent(text);
}

const WORDS = { image: "images", audio: "sound", video: "video" };
const kindOf = (file) => Object.keys(WORDS).find((kind) => file.type.startsWith(`${kind}/`)) ?? "text";

export class Attachments {
  constructor({ tell, settings }) {
    this.tell = tell;
    this.settings = settings;
    this.media = [];
    this.kinds = []; // of "image", "audio": the kinds that the model takes
    this.recorder = new Recorder({ take: (files) => this.take(files), tell });
    $("attach").addEventListener("click", () => $("media-file").click());
    $("media-file").addEventListener("change", async () => {
      await this.take($("media-file").files);
      $("media-file").value = "";
    });
    $("prompt").addEventListener("paste", (event) => {
      const files = [...event.clipboardData.files],
        hasText = event.clipboardData.types.includes("text/plain"); // copied from a table: use the text
      if (files.length && !(hasText && !files.some((file) => this.kinds.includes(kindOf(file))))) {
        event.preventDefault();
        this.take(files);
      }
    });
    const view = $("view-chat"),
      files = (event) => [...event.dataTransfer.items].some((i) => i.kind === "file");
    view.addEventListener("dragover", (event) => {
      if (files(event)) {
        event.preventDefault();
        view.classList.add("dropping");
      }
    });
    view.addEventListener("dragleave", (event) => {
      if (!view.contains(event.relatedTarget)) view.classList.remove("dropping");
    });
    view.addEventListener("drop", (event) => {
      view.classList.remove("dropping");
      if (files(event)) {
        event.preventDefault();
        this.take(event.dataTransfer.files);
      }
    });
    document.addEventListener("media", ({ detail }) => {
      this.media.push(...detail);
      this.draw();
    }); // returned by the queue
  }
  allow({ vision, audio }) {
    this.kinds = [...(vision ? ["image"] : []), ...(audio ? ["audio"] : [])];
    const lacking = ["image", "audio"].filter((kind) => !this.kinds.includes(kind)).map((kind) => WORDS[kind]),
      hint = `Attach ${["text files", ...this.kinds.map((kind) => WORDS[kind])].join(" or ")}`;
    $("attach").title = lacking.length ? `${hint} (this model takes no ${lacking.join(" and no ")})` : hint;
    $("attach").setAttribute("aria-label", hint);
    this.recorder.allow(audio);
  }
  async url(file) {
    const kind = kindOf(file);
    if (kind === "text") return textUrl(file);
    if (!this.kinds.includes(kind)) {
      const takes = ["text files", ...this.kinds.map((other) => WORDS[other])].join(" and ");
      throw new Error(`${file.name || "This file"}: ${this.settings.model} takes no ${WORDS[kind]}, only ${takes}.`);
    }
    return kind === "audio" ? soundUrl(file) : shrink(file);
  }
  async take(files) {
    for (const file of files) {
      if (this.media.length >= MAX_FILES) {
        this.tell(new Error(`At most ${MAX_FILES} files go with a message.`));
        break;
      }
      try {
        const url = await this.url(file);
        this.media.push({ name: file.name, url });
      } catch (error) {
        this.tell(error);
      }
    }
    this.draw();
    $("prompt").focus();
  }
  release() {
    const { media } = this;
    this.media = [];
    this.draw();
    return media;
  }
  draw() {
    $("thumbs").hidden = !this.media.length;
    $("thumbs").replaceChildren(
      ...this.media.map((item) =>
        removable(mediaNode(item), `Remove ${item.name || "the image"}`, () => {
          this.media = this.media.filter((other) => other !== item);
          this.draw();
        }),
      ),
    );
  }
}
