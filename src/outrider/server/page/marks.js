// The origin of each token of an answer, as marks on its text.
import { make } from "./dom.js";

export const KINDS = { accepted: "a", corrected: "c", bonus: "b", plain: "p" };
const NAMES = Object.fromEntries(Object.entries(KINDS).map(([name, letter]) => [letter, name]));

// The tokens of an answer as marks on its text: "3a5c" says three characters accepted, five corrected.
export class Marks {
  constructor(text = "") {
    this.raw = "";
    this.ends = []; // [end, letter] of each token in `raw`
    for (const [, length, letter] of text.matchAll(/(\d+)([acbp])/g))
      this.push(" ".repeat(Number(length)), NAMES[letter]);
  }
  push(piece, kind) {
    this.raw += piece;
    if (piece) this.ends.push([this.raw.length, KINDS[kind] ?? "p"]);
  }
  // Continues after this text, whose end may have no marks.
  continue(text) {
    if (this.raw.length < text.length) this.push(text.slice(this.raw.length), "plain");
    this.raw = text;
  }
  // Spans for text[from ...], which stands at `from` + offset in the raw text.
  nodes(text, from) {
    const out = document.createDocumentFragment();
    let low = 0,
      high = this.ends.length; // the first token that ends after `from`
    while (low < high) {
      const mid = (low + high) >> 1;
      if (this.ends[mid][0] > from) high = mid;
      else low = mid + 1;
    }
    for (let at = 0; at < text.length; low += 1) {
      const [end, letter] = this.ends[low] ?? [Infinity, "p"];
      const piece = text.slice(at, Math.max(at + 1, end - from));
      out.append(make("span", { className: NAMES[letter] }, piece));
      at += piece.length;
    }
    return out;
  }
  // Marks of raw[from, to), for storage.
  pack(from, to) {
    let out = "",
      at = from;
    for (const [end, letter] of this.ends) {
      if (end <= at) continue;
      out += `${Math.min(end, to) - at}${letter}`;
      at = end;
      if (at >= to) break;
    }
    return out;
  }
}
