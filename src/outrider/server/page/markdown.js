// Markdown to DOM nodes: headings, lists, quotes, tables, fenced code, formulas, emphasis, code, links. HTML stays
// text, images become their description, links lead to http, https and mailto only; nothing is fetched. Nesting ends
// at a maximum depth: deeper markup stays text.
//
// Every character that reaches the page remembers where in the source it stood, so that the caller's `leaf(text, from)`
// can mark it (by the kind of its token). A half-finished document is fine: it is rendered again as it grows, and
// blocks that did not change keep their nodes.
import { make, copy } from "./dom.js";
import { highlight } from "./highlight.js";
import { formula } from "./math.js";

const DEEP = 16; // maximum nesting of blocks, and of emphasis
const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^\s`]*)[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*$/;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])(\s+|$)/;
const MATHS = /^ {0,3}(\$\$|\\\[)/;
const DIVIDER = /^ *\|?(?: *:?-+:? *\|)+ *:?-*:? *$/;

// ---- blocks: a line is { text, at }; at: its offset in the source
function lines(source) {
  let at = 0;
  return source.split("\n").map((text) => {
    const line = { text, at };
    at += text.length + 1;
    return line;
  });
}
const cut = (line, n) => ({ text: line.text.slice(n), at: line.at + Math.min(n, line.text.length) });
const blank = (line) => !line.text.trim();
const starts = (text) =>
  FENCE.test(text) || HEADING.test(text) || RULE.test(text) || QUOTE.test(text) || ITEM.test(text) || MATHS.test(text);

export function parse(all, depth = 0) {
  const blocks = [];
  for (let i = 0; i < all.length;) {
    const line = all[i],
      first = i;
    const fence = FENCE.exec(line.text),
      heading = HEADING.exec(line.text),
      item = depth < DEEP && ITEM.exec(line.text);
    let block;
    if (blank(line)) {
      i += 1;
      continue;
    }
    if (fence) {
      const closing = new RegExp(`^ {0,3}\\${fence[1][0]}{${fence[1].length},}\\s*$`);
      for (i += 1; i < all.length && !closing.test(all[i].text);) i += 1;
      block = { type: "code", language: fence[2], lines: all.slice(first + 1, i), closed: i < all.length };
      i += 1;
    } else if (heading) {
      const from = line.text.indexOf(heading[2], heading[1].length);
      block = {
        type: "heading",
        level: heading[1].length,
        lines: [{ text: heading[2], at: line.at + Math.max(0, from) }],
      };
      i += 1;
    } else if (RULE.test(line.text)) {
      block = { type: "rule" };
      i += 1;
    } else if (MATHS.test(line.text) && display(all, i)) {
      const { source, end } = display(all, i);
      block = { type: "math", source };
      i = end;
    } else if (depth < DEEP && QUOTE.test(line.text)) {
      const inner = [];
      for (; i < all.length && !blank(all[i]) && (QUOTE.test(all[i].text) || !starts(all[i].text)); i += 1) {
        inner.push(cut(all[i], (QUOTE.exec(all[i].text) ?? [""])[0].length));
      }
      block = { type: "quote", children: parse(inner, depth + 1) };
    } else if (item) {
      [block, i] = list(all, i, item, depth + 1);
    } else if (line.text.includes("|") && i + 1 < all.length && DIVIDER.test(all[i + 1].text)) {
      for (i += 2; i < all.length && !blank(all[i]) && all[i].text.includes("|");) i += 1;
      block = { type: "table", rows: [line, ...all.slice(first + 2, i)].map(cells) };
    } else {
      for (i += 1; i < all.length && !blank(all[i]) && !starts(all[i].text);) i += 1;
      block = { type: "paragraph", lines: all.slice(first, i) };
    }
    const end = all[Math.min(i, all.length) - 1];
    blocks.push({ ...block, from: line.at, to: end.at + end.text.length });
  }
  return blocks;
}

// A formula that begins with line i: { source, end }, end being the line after it; null without an end, or with
// text after it.
function display(all, i) {
  const mark = MATHS.exec(all[i].text),
    close = mark[1] === "$$" ? "$$" : "\\]";
  let text = all[i].text.slice(mark[0].length);
  for (let end = i + 1; ; end += 1) {
    const at = text.indexOf(close);
    if (at >= 0) return text.slice(at + 2).trim() ? null : { source: text.slice(0, at), end };
    if (end >= all.length || blank(all[end])) return null;
    text += `\n${all[end].text}`;
  }
}

function list(all, i, first, level) {
  const ordered = /\d/.test(first[2]),
    items = [],
    depth = first[1].length;
  while (i < all.length) {
    const item = ITEM.exec(all[i].text);
    if (
      !item ||
      item[1].length < depth ||
      item[1].length > depth + 3 ||
      /\d/.test(item[2]) !== ordered ||
      RULE.test(all[i].text)
    )
      break;
    const indent = item[0].length - (item[3].length > 4 ? item[3].length - 1 : 0),
      inner = [cut(all[i], indent)];
    for (i += 1; i < all.length; i += 1) {
      const { text } = all[i],
        space = text.length - text.trimStart().length;
      if (blank(all[i])) {
        const next = all.slice(i + 1).find((l) => !blank(l));
        if (!next || next.text.length - next.text.trimStart().length <= depth) break;
      } else if (space <= depth && (starts(text) || blank(all[i - 1]))) break;
      inner.push(cut(all[i], Math.min(space, indent)));
    }
    items.push(parse(inner, level));
    while (i < all.length && blank(all[i]) && ITEM.test(all[i + 1]?.text ?? "")) i += 1;
  }
  return [{ type: "list", ordered, start: Number.parseInt(first[2], 10) || 1, items }, i];
}

function cells(line) {
  const out = [],
    { text } = line;
  let from = text.search(/\S/);
  if (text[from] === "|") from += 1;
  for (let i = from; i <= text.length; i += 1) {
    if (i < text.length && (text[i] !== "|" || text[i - 1] === "\\")) continue;
    if (i < text.length || text.slice(from).trim()) {
      const raw = text.slice(from, i),
        lead = raw.length - raw.trimStart().length;
      out.push([{ text: raw.trim(), at: line.at + from + lead }]);
    }
    from = i + 1;
  }
  return out;
}

// ---- inline: a string with the source place of each of its characters
function flatten(some) {
  let text = "";
  const places = [];
  some.forEach((line, i) => {
    const part = i < some.length - 1 ? `${line.text.replace(/ +$/, "")}\n` : line.text;
    for (let j = 0; j < part.length; j += 1) places.push(line.at + j);
    text += part;
  });
  return { text, places };
}

const MARKS = [
  ["***", "strong"],
  ["___", "strong"],
  ["**", "strong"],
  ["__", "strong"],
  ["~~", "del"],
  ["*", "em"],
  ["_", "em"],
];
const LINK = /^(!?)\[([^\]\n]*)\]\(\s*<?([^\s()<>]*(?:\([^\s()]*\)[^\s()<>]*)*)>?(?:\s+"[^"]*")?\s*\)/;
const word = (c) => c !== undefined && /[\p{L}\p{N}_]/u.test(c);

// Characters that a backslash escapes; before others it stays, as in \, and \; of LaTeX.
const ESCAPED = /[\\`*_{}[\]()#+\-.!|~<>$"'&]/;
const FORMULA =
  /^(?:\$\$([^$]+)\$\$|\$(?![\s$])((?:\\[\s\S]|[^$\\\n])*?[^\s$\\]|\\[^\s$])\$(?!\d)|\\\(([\s\S]+?)\\\)|\\\[([\s\S]+?)\\\])/;

function inline(parent, { text, places }, from, to, leaf, depth = 0) {
  let plain = from;
  const hopeless = new Set(); // marks without a closing one from here on
  const flush = (end) => {
    if (end > plain) emit(parent, text, places, plain, end, leaf);
  };
  for (let i = from; i < to;) {
    const c = text[i];
    const maths =
      c === "$" || (c === "\\" && (text[i + 1] === "(" || text[i + 1] === "["))
        ? FORMULA.exec(text.slice(i, to))
        : null;
    const drawn =
      maths && formula(maths[1] ?? maths[2] ?? maths[3] ?? maths[4], maths[1] !== undefined || maths[4] !== undefined);
    if (drawn) {
      flush(i);
      parent.append(drawn);
      i = plain = i + maths[0].length;
      continue;
    }
    if (maths) {
      i += maths[0].length;
      continue;
    } // an unknown formula stays as it was written
    if (c === "\\" && i + 1 < to && ESCAPED.test(text[i + 1])) {
      flush(i);
      plain = i + 1;
      i += 2;
      continue;
    }
    if (c === "`") {
      const ticks = /^`+/.exec(text.slice(i, to))[0],
        end = text.indexOf(ticks, i + ticks.length);
      if (end >= 0 && end < to) {
        flush(i);
        const node = make("code");
        emit(node, text, places, i + ticks.length, end, leaf);
        parent.append(node);
        i = plain = end + ticks.length;
        continue;
      }
      i += ticks.length;
      continue;
    }
    const link = depth < DEEP && (c === "[" || c === "!") ? LINK.exec(text.slice(i, to)) : null;
    if (link) {
      flush(i);
      const start = i + link[1].length + 1,
        safe = !link[1] && /^(https?:\/\/|mailto:)/i.test(link[3]);
      const node = safe
        ? make("a", { href: link[3], target: "_blank", rel: "noopener noreferrer nofollow" })
        : make("span");
      inline(node, { text, places }, start, start + link[2].length, leaf, depth + 1);
      if (!safe && !link[1] && link[3]) node.append(` (${link[3]})`);
      parent.append(node);
      i = plain = i + link[0].length;
      continue;
    }
    const mark = depth < DEEP && MARKS.find(([m]) => text.startsWith(m, i) && i + m.length < to);
    if (mark) {
      const [m, tag] = mark,
        start = i + m.length,
        end = hopeless.has(m) ? -1 : closing(text, m, start, to, i > from ? text[i - 1] : undefined);
      if (end === Infinity) hopeless.add(m);
      else if (end > start) {
        flush(i);
        const node = make(tag),
          inner = m.length === 3 ? node.appendChild(make("em")) : node;
        inline(inner, { text, places }, start, end, leaf, depth + 1);
        parent.append(node);
        i = plain = end + m.length;
        continue;
      }
      i += m.length;
      continue;
    }
    i += 1;
  }
  flush(to);
}

// The mark's end; -1: it does not begin here; Infinity: it is never closed.
function closing(text, mark, start, to, before) {
  if (/\s/.test(text[start]) || (mark[0] === "_" && word(before))) return -1;
  for (
    let end = text.indexOf(mark, start + 1);
    end >= 0 && end + mark.length <= to;
    end = text.indexOf(mark, end + 1)
  ) {
    const after = text[end + mark.length];
    if (
      /\s/.test(text[end - 1]) ||
      (mark.length === 1 && (after === mark || text[end - 1] === mark)) ||
      (mark[0] === "_" && word(after))
    )
      continue;
    return end;
  }
  return Infinity;
}

// One leaf for each run that is contiguous in the source.
function emit(parent, text, places, from, to, leaf) {
  for (let i = from; i < to;) {
    let j = i + 1;
    while (j < to && places[j] === places[j - 1] + 1) j += 1;
    parent.append(leaf(text.slice(i, j), places[i]));
    i = j;
  }
}

// ---- blocks to nodes
function fill(node, some, leaf) {
  const flat = flatten(some);
  inline(node, flat, 0, flat.text.length, leaf);
  return node;
}

function build(block, leaf) {
  const inside = (children) => children.map((b) => build(b, leaf));
  switch (block.type) {
    case "heading":
      return fill(make(`h${Math.min(6, block.level + 2)}`), block.lines, leaf); // the page itself has h1 and h2
    case "rule":
      return make("hr");
    case "math": {
      const drawn = formula(block.source, true);
      return drawn
        ? make("div", { className: "wide", tabIndex: 0, role: "region", "aria-label": "Formula" }, drawn)
        : make("pre", { className: "source" }, block.source);
    }
    case "quote":
      return make("blockquote", {}, ...inside(block.children));
    case "list": {
      const node = make(
        block.ordered ? "ol" : "ul",
        {},
        ...block.items.map((children) => {
          const tight = children.length && children[0].type === "paragraph";
          const rest = inside(tight ? children.slice(1) : children);
          return tight ? make("li", {}, fill(make("span"), children[0].lines, leaf), ...rest) : make("li", {}, ...rest);
        }),
      );
      if (block.ordered && block.start !== 1) node.start = block.start;
      return node;
    }
    case "table": {
      const width = block.rows[0].length;
      const row = (tag, some) =>
        make("tr", {}, ...Array.from({ length: width }, (_, i) => fill(make(tag), some[i] ?? [], leaf)));
      const body = make("tbody", {}, ...block.rows.slice(1).map((r) => row("td", r)));
      const table = make("table", {}, make("thead", {}, row("th", block.rows[0])), body);
      return make("div", { className: "wide", tabIndex: 0, role: "region", "aria-label": "Table" }, table);
    }
    case "code": {
      const text = block.lines.map((l) => l.text).join("\n"),
        code = make("code");
      const flat = { text, places: [] };
      block.lines.forEach((l) => {
        for (let j = 0; j <= l.text.length; j += 1) flat.places.push(l.at + j);
      });
      let at = 0;
      for (const [kind, piece] of highlight(block.language, text)) {
        const part = kind ? code.appendChild(make("span", { className: `hl-${kind}` })) : code;
        emit(part, text, flat.places, at, at + piece.length, leaf);
        at += piece.length;
      }
      const button = make("button", { type: "button", className: "small", onclick: () => copy(text, button) }, "Copy");
      const head = make("div", { className: "code-head" }, make("span", {}, block.language || "code"), button);
      return make(
        "div",
        { className: "code" },
        head,
        make("pre", { tabIndex: 0, "aria-label": `Code, ${block.language || "plain text"}` }, code),
      );
    }
    default:
      return fill(make("p"), block.lines, leaf);
  }
}

// Renders into `parent`; call it again with longer sources. `leaf(text, from)` gives the node for a piece of source.
export class Document {
  constructor(parent, leaf) {
    this.parent = parent;
    this.leaf = leaf;
    this.blocks = [];
  }
  show(source, fresh = false) {
    const blocks = parse(lines(source));
    const key = (b) => `${b.from}:${source.slice(b.from, b.to)}:${b.closed ?? ""}`;
    let same = 0;
    while (!fresh && same < blocks.length && same < this.blocks.length && this.blocks[same].key === key(blocks[same]))
      same += 1;
    for (const old of this.blocks.splice(same)) old.node.remove();
    for (const block of blocks.slice(same)) {
      const node = build(block, this.leaf);
      this.parent.append(node);
      this.blocks.push({ key: key(block), node });
    }
  }
}
