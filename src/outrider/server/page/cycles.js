// A cycle as a picture: the drafted tokens, those that the model confirmed, and the token that it added. One column
// per position, one row per branch. A slider goes through the cycles of the last answer.
import { $, make } from "./dom.js";

const PAUSE = 400; // milliseconds for which a cycle is shown while others arrive

// A draft without branches is a tree with one branch. Null: no draft, or the server does not report it.
export function treeOf({ tree, draft, tokens }) {
  if (tree?.tokens.length) return tree;
  if (!draft?.length) return null;
  const right = tokens.filter(([, kind]) => kind === "accepted").length;
  return { tokens: draft, parents: draft.map((_, i) => i), path: draft.slice(0, right).map((_, i) => i + 1) };
}

// [{ text, row, column, parent, taken }]; a parent's first child is in the parent's row
export function layout({ tokens, parents, path }) {
  const children = [[]],
    nodes = [],
    taken = new Set(path);
  parents.forEach((parent, i) => {
    children.push([]);
    children[parent].push(i + 1);
  });
  let rows = 0;
  const place = (at, row, column) => {
    nodes.push({ text: tokens[at - 1] ?? "·", row, column, parent: parents[at - 1], taken: taken.has(at) });
    spread(children[at], row, column + 1);
  };
  const spread = (below, row, column) =>
    below.forEach((child, i) => {
      const own = i === 0 ? row : rows + 1;
      rows = Math.max(rows, own);
      place(child, own, column);
    });
  spread(children[0], 0, 0);
  return nodes;
}

// True if the model accepted a token that a draft without branches would not contain.
export const helped = ({ path }) => path.some((row, i) => row !== i + 1);

const visible = (text) => text.replaceAll("\n", "⏎").replace(/^ | $/g, "␣") || "∅";

export class Cycles {
  constructor() {
    $("cycle").addEventListener("input", () => this.draw(Number($("cycle").value)));
    $("cycle-larger").addEventListener("click", () => this.larger());
    $("cycle-dialog").addEventListener("close", () => {
      $("legend").before($("cycles"));
      $("cycle-larger").textContent = "Larger";
      $("cycle-larger").focus();
    });
    this.forget();
  }
  // The same picture on the whole page.
  larger() {
    const dialog = $("cycle-dialog");
    if (dialog.open) {
      dialog.close();
      return;
    }
    dialog.append($("cycles"));
    $("cycle-larger").textContent = "Close";
    dialog.showModal();
    $("cycle").focus();
  }
  forget() {
    this.meter = null;
    this.drawn = 0;
    $("cycles").hidden = true;
  }
  // During an answer its latest cycle, every PAUSE; at its end the longest cycle, preferring those that a branch made
  // longer.
  show(meter, stats) {
    this.meter = meter;
    if (!stats && performance.now() - this.drawn < PAUSE) return;
    const drafted = meter.cycles.map((c, i) => [treeOf(c), i]).filter(([tree]) => tree);
    if (!drafted.length) return;
    this.drawn = performance.now();
    const branched = drafted.filter(([tree]) => helped(tree)),
      some = branched.length ? branched : drafted;
    const longest = Math.max(...some.map(([tree]) => tree.path.length));
    this.draw((stats ? some.find(([tree]) => tree.path.length === longest) : drafted.at(-1))[1]);
    $("branched").textContent = stats?.branched ? `${stats.branched} tokens of this answer came from a branch.` : "";
  }
  draw(index) {
    const cycle = this.meter.cycles[index],
      tree = treeOf(cycle);
    $("cycle").max = this.meter.cycles.length - 1;
    $("cycle").value = index;
    $("cycle").setAttribute("aria-valuetext", `cycle ${index + 1} of ${this.meter.cycles.length}`);
    $("cycles").hidden = false;
    const own = cycle.tokens.at(-1)?.[1] === "accepted" ? null : cycle.tokens.at(-1);
    const nodes = tree ? layout(tree) : [],
      end = nodes.filter((n) => n.taken).at(-1);
    const cells = nodes.map(({ text, row, column, taken }) => {
      const cell = make("span", { className: taken ? "taken" : "left", title: text }, visible(text));
      cell.style.gridRow = `${row + 1}`;
      cell.style.gridColumn = `${column + 1}`;
      if (row && !nodes.some((n) => n.row === row && n.column < column)) cell.classList.add("first");
      return cell;
    });
    if (own) {
      const row = 1 + Math.max(-1, ...nodes.map((n) => n.row)),
        column = end ? end.column + 1 : 0;
      const cell = make("span", { className: "own first", title: own[0] }, visible(own[0]));
      cell.style.gridRow = `${row + 1}`;
      cell.style.gridColumn = `${column + 1}`;
      cells.push(cell);
    }
    $("tree").replaceChildren(...cells);
    const right = tree?.path.length ?? 0,
      rows = nodes.length ? 1 + Math.max(...nodes.map((n) => n.row)) : 0;
    $("cycle-out").textContent =
      `${index + 1} of ${this.meter.cycles.length}: ${tree ? `${right} of ${nodes.length} right` : "no draft"}`;
    const words = (tree?.path ?? [])
      .map((row) => tree.tokens[row - 1] ?? "")
      .join("")
      .trim();
    $("tree").setAttribute(
      "aria-label",
      `${
        tree
          ? `A draft of ${nodes.length} tokens in ${rows} ${rows === 1 ? "line" : "branches"}. ${
              right ? `The model took ${right}${words ? `: ${words}` : ""}.` : "The model took none."
            }`
          : "No draft."
      }${own ? ` Its own token: ${own[0].trim() || "a space"}.` : ""}`,
    );
  }
}
