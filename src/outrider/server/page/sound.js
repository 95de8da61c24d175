// Sound attached to a message: files that the browser can play, as 16 kHz mono WAV, and recordings.
import { $ } from "./dom.js";

const RATE = 16000,
  MAX_SECONDS = 30, // maximum of a clip, as in the models' training
  HEADER_BYTES = 44;

export const isSound = (url) => url.startsWith("data:audio/");

// A WAV file of 16 bits, as a data URL.
function wavUrl(samples) {
  const bytes = new ArrayBuffer(HEADER_BYTES + 2 * samples.length),
    view = new DataView(bytes);
  const text = (at, letters) => [...letters].forEach((letter, i) => view.setUint8(at + i, letter.charCodeAt(0)));
  text(0, "RIFF");
  view.setUint32(4, bytes.byteLength - 8, true);
  text(8, "WAVEfmt ");
  view.setUint32(16, 16, true); // bytes of the format chunk
  view.setUint16(20, 1, true); // integers
  view.setUint16(22, 1, true); // one channel
  view.setUint32(24, RATE, true);
  view.setUint32(28, 2 * RATE, true);
  view.setUint16(32, 2, true); // bytes of a frame
  view.setUint16(34, 16, true);
  text(36, "data");
  view.setUint32(40, 2 * samples.length, true);
  samples.forEach((sample, i) => {
    const level = Math.max(-1, Math.min(1, sample));
    view.setInt16(HEADER_BYTES + 2 * i, Math.round(level * 32767), true);
  });
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(new Blob([bytes], { type: "audio/wav" }));
  });
}

// The mean of the channels.
function mono(buffer) {
  const channels = Array.from({ length: buffer.numberOfChannels }, (_, i) => buffer.getChannelData(i));
  return channels[0].map((_, i) => channels.reduce((sum, channel) => sum + channel[i], 0) / channels.length);
}

export async function soundUrl(file) {
  const name = file.name || "This recording";
  let buffer;
  try {
    buffer = await new OfflineAudioContext(1, 1, RATE).decodeAudioData(await file.arrayBuffer()); // resamples
  } catch {
    throw new Error(`${name} is no sound that this browser can read.`);
  }
  const samples = mono(buffer);
  if (samples.length > MAX_SECONDS * RATE)
    throw new Error(`${name} is longer than ${MAX_SECONDS} seconds: cut it into shorter clips.`);
  return wavUrl(samples);
}

// The microphone: one press begins, the next one, or 30 seconds, ends. `take` gets the recording as a file.
export class Recorder {
  constructor({ take, tell }) {
    this.take = take;
    this.tell = tell;
    this.recording = null;
    this.button = $("record");
    this.button.addEventListener("click", () => (this.recording ? this.recording.stop() : this.start()));
  }
  allow(yes) {
    this.button.hidden = !yes || !navigator.mediaDevices; // browsers record on https pages and on this machine only
  }
  async start() {
    let stream;
    try {
      stream = await navigator.mediaDevices.getUserMedia({ audio: true });
    } catch {
      this.tell(new Error("The browser gives no access to a microphone."));
      return;
    }
    const pieces = [],
      began = Date.now();
    this.recording = new MediaRecorder(stream);
    this.recording.addEventListener("dataavailable", ({ data }) => pieces.push(data));
    const clock = setInterval(() => {
      const seconds = Math.floor((Date.now() - began) / 1000);
      this.show(seconds);
      // a recorder may add a few milliseconds at either end
      if (Date.now() - began > 1000 * MAX_SECONDS - 500) this.recording?.stop();
    }, 100);
    this.recording.addEventListener("stop", () => {
      clearInterval(clock);
      stream.getTracks().forEach((track) => track.stop());
      const { mimeType } = this.recording;
      this.recording = null;
      this.show(null);
      this.take([new File(pieces, "Recording", { type: mimeType })]);
    });
    this.recording.start();
    this.show(0);
  }
  // seconds: null when nothing is recorded
  show(seconds) {
    const on = seconds !== null;
    this.button.textContent = on ? `■ ${seconds} s` : "●";
    this.button.setAttribute("aria-label", on ? "Stop the recording" : "Record sound");
    this.button.setAttribute("aria-pressed", String(on));
  }
}
