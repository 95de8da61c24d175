// Images and clips of sound that go with a message, where the model takes them: chosen, pasted, dropped or recorded,
// made small enough to send and to keep.
import { $, make, removable } from "./dom.js";
import { Recorder, isSound, soundUrl } from "./sound.js";

const SIDE = 1024, // pixels of the longer side
  MAX_FILES = 8; // per message

// An image or a player.
export const mediaNode = ({ url, name }) =>
  isSound(url)
    ? make("audio", { src: url, controls: true, "aria-label": name || "Attached sound" })
    : make("img", { src: url, alt: name || "Attached image" });

// What is sent: images stand before the text, sound behind it, as Google recommends.
export function contentParts(text, media) {
  const images = media.filter(({ url }) => !isSound(url)).map(({ url }) => ({ type: "image_url", image_url: { url } })),
    clips = media.filter(({ url }) => isSound(url)).map(({ url }) => ({
      type: "input_audio",
      input_audio: { data: url.slice(url.indexOf(",") + 1), format: "wav" },
    }));
  return [...images, ...(text ? [{ type: "text", text }] : []), ...clips];
}

// A data URL of the image; scaled down and, if it was scaled, encoded anew.
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

export class Attachments {
  constructor({ tell }) {
    this.tell = tell;
    this.media = [];
    this.kinds = []; // "image", "audio": those that the model takes
    this.recorder = new Recorder({ take: (files) => this.take(files), tell });
    $("attach").addEventListener("click", () => $("media-file").click());
    $("media-file").addEventListener("change", async () => {
      await this.take($("media-file").files);
      $("media-file").value = "";
    });
    $("prompt").addEventListener("paste", (event) => {
      const files = [...event.clipboardData.files].filter((file) =>
        this.kinds.some((kind) => file.type.startsWith(`${kind}/`)),
      );
      if (files.length) {
        event.preventDefault();
        this.take(files);
      }
    });
    const view = $("view-chat"),
      files = (event) => this.kinds.length && [...event.dataTransfer.items].some((i) => i.kind === "file");
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
    }); // given back by the queue
  }
  allow({ vision, audio }) {
    this.kinds = [...(vision ? ["image"] : []), ...(audio ? ["audio"] : [])];
    const words = { image: "images", audio: "sound" },
      hint = `Attach ${this.kinds.map((kind) => words[kind]).join(" or ")}`;
    $("attach").hidden = !this.kinds.length;
    $("attach").title = hint;
    $("attach").setAttribute("aria-label", hint);
    $("media-file").accept = this.kinds.map((kind) => `${kind}/*`).join();
    this.recorder.allow(audio);
  }
  // A file that says no kind is taken for what the model takes first.
  url(file) {
    const kind = this.kinds.find((k) => file.type.startsWith(`${k}/`)) ?? this.kinds[0];
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
