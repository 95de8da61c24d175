// Images that go with a message, where the model sees: chosen, pasted or dropped, made small enough to send and to
// keep.
import { $, make, removable } from "./dom.js";

const SIDE = 1024,
  MOST = 8; // pixels of the longer side; images per message

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
    this.images = [];
    this.allowed = false;
    $("attach").addEventListener("click", () => $("image-file").click());
    $("image-file").addEventListener("change", async () => {
      await this.take($("image-file").files);
      $("image-file").value = "";
    });
    $("prompt").addEventListener("paste", (event) => {
      const files = [...event.clipboardData.files].filter((f) => f.type.startsWith("image/"));
      if (this.allowed && files.length) {
        event.preventDefault();
        this.take(files);
      }
    });
    const view = $("view-chat"),
      images = (event) => this.allowed && [...event.dataTransfer.items].some((i) => i.kind === "file");
    view.addEventListener("dragover", (event) => {
      if (images(event)) {
        event.preventDefault();
        view.classList.add("dropping");
      }
    });
    view.addEventListener("dragleave", (event) => {
      if (!view.contains(event.relatedTarget)) view.classList.remove("dropping");
    });
    view.addEventListener("drop", (event) => {
      view.classList.remove("dropping");
      if (images(event)) {
        event.preventDefault();
        this.take(event.dataTransfer.files);
      }
    });
    document.addEventListener("images", ({ detail }) => {
      this.images.push(...detail);
      this.draw();
    }); // given back by the queue
  }
  allow(yes) {
    this.allowed = yes;
    $("attach").hidden = !yes;
  }
  async take(files) {
    for (const file of files) {
      if (this.images.length >= MOST) {
        this.tell(new Error(`At most ${MOST} images go with a message.`));
        break;
      }
      try {
        this.images.push({ name: file.name, url: await shrink(file) });
      } catch (error) {
        this.tell(error);
      }
    }
    this.draw();
    $("prompt").focus();
  }
  release() {
    const { images } = this;
    this.images = [];
    this.draw();
    return images;
  }
  draw() {
    $("thumbs").hidden = !this.images.length;
    $("thumbs").replaceChildren(
      ...this.images.map((image) =>
        removable(
          make("img", { src: image.url, alt: image.name || "Attached image" }),
          `Remove ${image.name || "the image"}`,
          () => {
            this.images = this.images.filter((i) => i !== image);
            this.draw();
          },
        ),
      ),
    );
  }
}
