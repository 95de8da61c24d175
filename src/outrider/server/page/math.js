// LaTeX formulas to MathML, which browsers draw themselves: fractions, roots, scripts, sums, fences, matrices,
// accents, text. Unknown commands are shown as they were written.

const NS = "http://www.w3.org/1998/Math/MathML",
  DEEP = 60;
const node = (tag, attributes = {}, ...children) => {
  const made = document.createElementNS(NS, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
};

const words = (text) =>
  Object.fromEntries(
    text
      .trim()
      .split(/\s+/)
      .map((pair) => pair.split("=")),
  );
const LETTERS = words(`
  alpha=α beta=β gamma=γ delta=δ epsilon=ϵ varepsilon=ε zeta=ζ eta=η theta=θ vartheta=ϑ iota=ι kappa=κ lambda=λ
  mu=μ nu=ν xi=ξ pi=π rho=ρ sigma=σ tau=τ upsilon=υ phi=ϕ varphi=φ chi=χ psi=ψ omega=ω Gamma=Γ Delta=Δ Theta=Θ
  Lambda=Λ Xi=Ξ Pi=Π Sigma=Σ Upsilon=Υ Phi=Φ Psi=Ψ Omega=Ω infty=∞ ell=ℓ hbar=ℏ partial=∂ nabla=∇ emptyset=∅
  varnothing=∅ Re=ℜ Im=ℑ aleph=ℵ dots=… ldots=… cdots=⋯ vdots=⋮ ddots=⋱ prime=′ circ=∘ degree=° angle=∠ top=⊤
  bot=⊥`);
const SIGNS = words(`
  times=× cdot=⋅ div=÷ pm=± mp=∓ ast=∗ star=⋆ oplus=⊕ otimes=⊗ leq=≤ le=≤ geq=≥ ge=≥ neq=≠ ne=≠ approx=≈ equiv=≡
  sim=∼ simeq=≃ cong=≅ propto=∝ ll=≪ gg=≫ in=∈ notin=∉ ni=∋ subset=⊂ subseteq=⊆ supset=⊃ supseteq=⊇ cup=∪ cap=∩
  setminus=∖ land=∧ wedge=∧ lor=∨ vee=∨ lnot=¬ neg=¬ forall=∀ exists=∃ to=→ rightarrow=→ leftarrow=← gets=←
  Rightarrow=⇒ implies=⟹ Leftarrow=⇐ iff=⟺ Leftrightarrow=⇔ leftrightarrow=↔ mapsto=↦ uparrow=↑ downarrow=↓ mid=∣
  parallel=∥ perp=⊥ colon=: langle=⟨ rangle=⟩ lfloor=⌊ rfloor=⌋ lceil=⌈ rceil=⌉ lvert=| rvert=| vert=| lVert=‖
  rVert=‖ Vert=‖ therefore=∴ because=∵ models=⊨ vdash=⊢`);
const LARGE = words("sum=∑ prod=∏ coprod=∐ bigcup=⋃ bigcap=⋂ bigoplus=⨁ bigotimes=⨂ bigvee=⋁ bigwedge=⋀"),
  INTEGRALS = words("int=∫ iint=∬ iiint=∭ oint=∮");
const NAMES = new Set(
  "sin cos tan cot sec csc sinh cosh tanh arcsin arccos arctan log ln lg exp det dim ker deg arg gcd Pr hom".split(" "),
);
const LIMITS = new Set("lim max min sup inf argmax argmin limsup liminf".split(" "));
const SPACES = {
  ",": ".167em",
  ":": ".222em",
  ">": ".222em",
  ";": ".278em",
  "!": "-.167em",
  " ": ".25em",
  quad: "1em",
  qquad: "2em",
  enspace: ".5em",
  thinspace: ".167em",
};
const ACCENTS = words(
  "hat=^ widehat=^ bar=‾ overline=‾ tilde=~ widetilde=~ vec=→ dot=˙ ddot=¨ overrightarrow=→ overbrace=⏞",
);
const FONTS = {
  mathbb: "double-struck",
  mathcal: "script",
  mathscr: "script",
  mathfrak: "fraktur",
  mathbf: "bold",
  boldsymbol: "bold",
  bm: "bold",
  mathsf: "sans-serif",
  mathtt: "monospace",
};
const UPRIGHT = new Set(["text", "textrm", "textit", "textbf", "mathrm", "operatorname", "mbox", "texttt", "mathit"]);
const FENCES = {
  matrix: ["", ""],
  pmatrix: ["(", ")"],
  bmatrix: ["[", "]"],
  Bmatrix: ["{", "}"],
  vmatrix: ["|", "|"],
  Vmatrix: ["‖", "‖"],
  cases: ["{", ""],
};
const PLAIN = new Set(["aligned", "align", "align*", "gathered", "split", "array", "equation", "equation*"]);
const SKIP = new Set([
  "displaystyle",
  "textstyle",
  "limits",
  "nolimits",
  "big",
  "Big",
  "bigg",
  "Bigg",
  "bigl",
  "bigr",
  "Bigl",
  "Bigr",
  "biggl",
  "biggr",
  "tfrac",
  "nonumber",
]);

// Mathematical alphabets: Unicode's code points, with the exceptions.
const BASE = {
  "double-struck": [0x1d538, 0x1d552, 0x1d7d8],
  script: [0x1d49c, 0x1d4b6],
  fraktur: [0x1d504, 0x1d51e],
  bold: [0x1d400, 0x1d41a, 0x1d7ce],
  "sans-serif": [0x1d5a0, 0x1d5ba, 0x1d7e2],
  monospace: [0x1d670, 0x1d68a, 0x1d7f6],
};
const APART = { "double-struck": "CℂHℍNℕPℙQℚRℝZℤ", script: "BℬEℰFℱHℋIℐLℒMℳRℛeℯgℊoℴ", fraktur: "CℭHℌIℑRℜZℨ" };
function styled(text, font) {
  return [...text]
    .map((c) => {
      const apart = [...(APART[font] ?? "")],
        at = apart.indexOf(c),
        [upper, lower, digit] = BASE[font];
      if (at >= 0 && at % 2 === 0) return apart[at + 1];
      if (/[A-Z]/.test(c)) return String.fromCodePoint(upper + c.charCodeAt(0) - 65);
      if (/[a-z]/.test(c)) return String.fromCodePoint(lower + c.charCodeAt(0) - 97);
      return digit && /\d/.test(c) ? String.fromCodePoint(digit + Number(c)) : c;
    })
    .join("");
}

const TOKEN = /\\(?:[A-Za-z]+\*?|[\s\S])|[\s\S]/gu;

class Parser {
  constructor(source) {
    this.tokens = source.match(TOKEN) ?? [];
    this.at = 0;
    this.depth = 0;
  }
  get token() {
    return this.tokens[this.at];
  }
  space() {
    while (/^\s+$/.test(this.token ?? "")) this.at += 1;
  }
  fail() {
    throw new Error("no formula");
  }
  raw() {
    // {text} unparsed
    this.space();
    if (this.token !== "{") {
      const one = this.token ?? this.fail();
      this.at += 1;
      return one;
    }
    let out = "",
      open = 1;
    for (this.at += 1; open; this.at += 1) {
      const token = this.token ?? this.fail();
      open += token === "{" ? 1 : token === "}" ? -1 : 0;
      if (open) out += token;
    }
    return out;
  }
  // Reads up to one of the tokens, exclusive.
  row(...ends) {
    const out = [];
    if ((this.depth += 1) > DEEP) this.fail();
    for (this.space(); this.token !== undefined && !ends.includes(this.token); this.space()) {
      const part = this.scripts();
      if (part) out.push(part);
    }
    this.depth -= 1;
    return out.length === 1 ? out[0] : node("mrow", {}, ...out);
  }
  group() {
    // an argument: {…} or one atom
    this.space();
    if (this.token !== "{") return this.atom() ?? node("mrow");
    this.at += 1;
    const inner = this.row("}");
    if (this.token !== "}") this.fail();
    this.at += 1;
    return inner;
  }
  scripts() {
    const start = this.token,
      base = this.atom();
    if (!base) return null;
    let sub = null,
      sup = null,
      primes = "";
    for (this.space(); this.token === "_" || this.token === "^" || this.token === "'"; this.space()) {
      const mark = this.token;
      this.at += 1;
      if (mark === "'") primes += "′";
      else if (mark === "_") {
        if (sub) this.fail();
        sub = this.group();
      } else {
        if (sup) this.fail();
        sup = this.group();
      }
    }
    if (primes) sup = sup ? node("mrow", {}, node("mo", {}, primes), sup) : node("mo", {}, primes);
    if (!sub && !sup) return base;
    const name = start.slice(1),
      below = name in LARGE || LIMITS.has(name) || name === "underbrace" || name === "overbrace";
    const [both, under, over] = below ? ["munderover", "munder", "mover"] : ["msubsup", "msub", "msup"];
    return sub && sup ? node(both, {}, base, sub, sup) : sub ? node(under, {}, base, sub) : node(over, {}, base, sup);
  }
  atom() {
    const token = this.token ?? this.fail();
    if (token === "{") return this.group();
    if (token === "}" || token === "&" || token === "\\\\") this.fail();
    this.at += 1;
    if (token[0] === "\\") return this.command(token.slice(1));
    if (/\d/.test(token)) {
      let number = token;
      while (/^[\d.]$/.test(this.token ?? "") && !(this.token === "." && !/\d/.test(this.tokens[this.at + 1] ?? ""))) {
        number += this.token;
        this.at += 1;
      }
      return node("mn", {}, number);
    }
    if (/\p{L}/u.test(token)) return node("mi", {}, token);
    if (token === "_" || token === "^") {
      this.at -= 1;
      return node("mrow");
    } // a script without a base
    if (token === "~") return node("mspace", { width: ".25em" });
    return node(
      "mo",
      /[()[\]|]/.test(token) ? { stretchy: "false" } : {},
      { "-": "−", "*": "∗", "'": "′" }[token] ?? token,
    );
  }
  command(name) {
    if (name in LETTERS) return node("mi", {}, LETTERS[name]);
    if (name in SIGNS) return node("mo", /[⟨⟩⌊⌋⌈⌉|‖]/.test(SIGNS[name]) ? { stretchy: "false" } : {}, SIGNS[name]);
    if (name in LARGE) return node("mo", { movablelimits: "true" }, LARGE[name]);
    if (name in INTEGRALS) return node("mo", {}, INTEGRALS[name]);
    if (NAMES.has(name)) return node("mi", {}, name);
    if (LIMITS.has(name)) return node("mo", { movablelimits: "true" }, name);
    if (name in SPACES) return node("mspace", { width: SPACES[name] });
    if (SKIP.has(name) && name !== "tfrac") return null;
    if (name in ACCENTS) return node("mover", { accent: "true" }, this.group(), node("mo", {}, ACCENTS[name]));
    if (name in FONTS) return node("mi", { mathvariant: "normal" }, styled(this.raw(), FONTS[name]));
    if (UPRIGHT.has(name))
      return name === "mathrm" || name === "operatorname"
        ? node("mi", { mathvariant: "normal" }, this.raw())
        : node("mtext", {}, this.raw());
    if (/^[{}%$#&_|]$/.test(name)) return node("mo", { stretchy: "false" }, name === "|" ? "‖" : name);
    switch (name) {
      case "frac":
      case "dfrac":
      case "tfrac":
      case "cfrac":
        return node("mfrac", {}, this.group(), this.group());
      case "binom":
        return node(
          "mrow",
          {},
          node("mo", {}, "("),
          node("mfrac", { linethickness: "0" }, this.group(), this.group()),
          node("mo", {}, ")"),
        );
      case "sqrt": {
        this.space();
        if (this.token !== "[") return node("msqrt", {}, this.group());
        this.at += 1;
        const index = this.row("]");
        this.at += 1;
        return node("mroot", {}, this.group(), index);
      }
      case "underbrace":
        return node("munder", {}, this.group(), node("mo", {}, "⏟"));
      case "underline":
        return node("munder", {}, this.group(), node("mo", {}, "_"));
      case "overset":
      case "stackrel": {
        const over = this.group();
        return node("mover", {}, this.group(), over);
      }
      case "underset": {
        const under = this.group();
        return node("munder", {}, this.group(), under);
      }
      case "boxed":
        return node("mrow", { class: "boxed" }, this.group());
      case "not": {
        const sign = this.atom();
        sign.textContent += "\u0338";
        return sign;
      }
      case "left": {
        const open = this.fence(),
          inner = this.row("\\right");
        if (this.token !== "\\right") this.fail();
        this.at += 1;
        return node("mrow", {}, open, inner, this.fence());
      }
      case "begin":
        return this.table(this.raw());
      default:
        return this.fail();
    }
  }
  fence() {
    this.space();
    const token = this.token ?? this.fail();
    this.at += 1;
    const sign =
      token === "."
        ? ""
        : token[0] === "\\"
          ? (SIGNS[token.slice(1)] ?? (token === "\\|" ? "‖" : token.slice(1)))
          : token;
    return node("mo", { fence: "true", stretchy: "true" }, sign);
  }
  table(name) {
    if (!(name in FENCES) && !PLAIN.has(name)) this.fail();
    if (name === "array") this.raw();
    const rows = [[]];
    for (;;) {
      rows.at(-1).push(node("mtd", {}, this.row("&", "\\\\", "\\end")));
      const end = this.token ?? this.fail();
      this.at += 1;
      if (end === "\\\\") rows.push([]);
      else if (end === "\\end") {
        if (this.raw() !== name) this.fail();
        break;
      }
    }
    const [open, close] = FENCES[name] ?? ["", ""],
      left = PLAIN.has(name) && name !== "array" ? { class: "aligned" } : name === "cases" ? { class: "cases" } : {};
    const table = node(
      "mtable",
      left,
      ...rows.filter((r) => r.some((cell) => cell.textContent)).map((cells) => node("mtr", {}, ...cells)),
    );
    return open || close
      ? node(
          "mrow",
          {},
          node("mo", { fence: "true" }, open),
          table,
          ...(close ? [node("mo", { fence: "true" }, close)] : []),
        )
      : table;
  }
}

// A <math> node; null if the source cannot be parsed.
export function formula(source, display = false) {
  try {
    const parser = new Parser(source.trim()),
      inner = parser.row();
    if (parser.token !== undefined || !source.trim()) return null;
    return node("math", { display: display ? "block" : "inline", alttext: source.trim() }, inner);
  } catch {
    return null;
  }
}
