// A draft that branched: its guesses as a tree, one column a position, one row a branch; what the model took stands out.
import { $, make } from "./dom.js";

const PAUSE = 400; // milliseconds that a tree is left standing while others come

// [{ text, row, column, parent, taken }], the first guess of each place in the row of what it follows
export function layout({ tokens, parents, path }) {
  const children = [[]], nodes = [], taken = new Set(path);
  parents.forEach((parent, i) => { children.push([]); children[parent].push(i + 1); });
  let rows = 0;
  const place = (at, row, column) => {
    nodes.push({ text: tokens[at - 1] ?? "·", row, column, parent: parents[at - 1], taken: taken.has(at) });
    spread(children[at], row, column + 1);
  };
  const spread = (below, row, column) => below.forEach((child, i) => {
    const own = i === 0 ? row : rows + 1;
    rows = Math.max(rows, own);
    place(child, own, column);
  });
  spread(children[0], 0, 0);
  return nodes;
}

// Did the model take a guess that a draft without branches would not have held?
export const helped = ({ path }) => path.some((row, i) => row !== i + 1);

const visible = (text) => text.replaceAll("\n", "⏎").replace(/^ | $/g, "␣");

export class Branches {
  constructor() { this.forget(); }
  forget() { this.latest = this.best = null; this.drawn = 0; $("branches").hidden = true; }
  take(tree) {
    this.latest = tree;
    if (helped(tree)) this.best = tree;
  }
  // While an answer streams the latest tree, now and then; at its end the last one that a branch made longer.
  show(stats) {
    if (!this.latest) return;
    if (!stats && performance.now() - this.drawn < PAUSE) return;
    this.drawn = performance.now();
    this.draw((stats && this.best) || this.latest);
    $("branched").textContent = stats ? `${stats.branched} tokens of this answer came from a branch.` : "";
  }
  draw(tree) {
    const nodes = layout(tree);
    $("tree").replaceChildren(...nodes.map(({ text, row, column, taken }) => {
      const node = make("span", { className: taken ? "taken" : "left", title: text }, visible(text));
      node.style.gridRow = `${row + 1}`;
      node.style.gridColumn = `${column + 1}`;
      if (nodes.some((n) => n.column === column - 1 && n.row < row) && !nodes.some((n) => n.row === row && n.column < column)) node.classList.add("first");
      return node;
    }));
    const words = tree.path.map((row) => tree.tokens[row - 1] ?? "").join("").trim();
    const rows = 1 + Math.max(...nodes.map((n) => n.row));
    $("tree").setAttribute("aria-label", `A draft of ${nodes.length} tokens in ${rows} ${rows === 1 ? "line" : "branches"}. ${
      tree.path.length ? `The model took ${tree.path.length}${words ? `: ${words}` : ""}.` : "The model took none."}`);
    $("branches").hidden = false;
  }
}
