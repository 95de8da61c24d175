// Syntax highlighting for code blocks: comments, strings, numbers, keywords, names that are called. One pass with
// one regular expression per language; an unknown language gets no colours.

const set = (text) => new Set(text.split(/\s+/));
const C = `auto break case catch class const constexpr continue default delete do else enum explicit extern for friend
   goto if inline namespace new noexcept operator private protected public register return sizeof static struct
   switch template this throw try typedef typename union using virtual volatile while bool char double float int
   long short signed unsigned void true false nullptr NULL`;
const JS = `async await break case catch class const continue debugger default delete do else export extends finally for
   from function get if import in instanceof let new of return set static super switch this throw try typeof var
   void while with yield true false null undefined`;
const KEYWORDS = {
  python: set(
    `and as assert async await break case class continue def del elif else except finally for from global if
     import in is lambda match nonlocal not or pass raise return try while with yield True False None self`,
  ),
  js: set(JS),
  ts: set(
    `${JS} abstract any boolean declare enum implements interface keyof namespace never number private protected
     public readonly string type unknown as is`,
  ),
  c: set(C),
  java: set(
    `${C} abstract boolean byte extends final finally implements import instanceof interface native package super
     synchronized throws transient var record null`,
  ),
  go: set(
    `break case chan const continue default defer else fallthrough for func go goto if import interface map
     package range return select struct switch type var true false nil int string bool error byte rune float64`,
  ),
  rust: set(
    `as async await break const continue crate dyn else enum extern fn for if impl in let loop match mod move mut
     pub ref return self Self static struct super trait type unsafe use where while true false i32 i64 u8 u32 u64
     usize f32 f64 bool str String Option Result Vec`,
  ),
  bash: set(
    `if then elif else fi for while until do done case esac in function return local export set unset echo cd
     exit read source alias`,
  ),
  sql: set(
    `select from where and or not insert into values update set delete create table drop alter add index view
     join left right inner outer full on as group by order having limit offset distinct union all null is in like
     between case when then else end primary key foreign references default begin commit`,
  ),
  json: set("true false null"),
  yaml: set("true false null yes no"),
  css: set("important media supports keyframes import"),
};
const ALIASES = {
  py: "python",
  python3: "python",
  javascript: "js",
  jsx: "js",
  mjs: "js",
  typescript: "ts",
  tsx: "ts",
  "c++": "c",
  cpp: "c",
  h: "c",
  hpp: "c",
  cuda: "c",
  "c#": "java",
  csharp: "java",
  cs: "java",
  kotlin: "java",
  kt: "java",
  scala: "java",
  swift: "java",
  golang: "go",
  rs: "rust",
  sh: "bash",
  shell: "bash",
  zsh: "bash",
  console: "bash",
  yml: "yaml",
  toml: "yaml",
  ini: "yaml",
  json5: "json",
  jsonc: "json",
  scss: "css",
  xml: "html",
  svg: "html",
};

const HASH = "#[^\\n]*",
  SLASHES = "\\/\\/[^\\n]*|\\/\\*[\\s\\S]*?(?:\\*\\/|$)",
  QUOTED = "\"(?:\\\\.|[^\"\\\\\\n])*(?:\"|$|(?=\\n))|'(?:\\\\.|[^'\\\\\\n])*(?:'|$|(?=\\n))";
const TRIPLE = "\"\"\"[\\s\\S]*?(?:\"\"\"|$)|'''[\\s\\S]*?(?:'''|$)",
  TICKS = "`(?:\\\\[\\s\\S]|[^`\\\\])*(?:`|$)";
const NUMBER = "\\b(?:0[xXbBoO][\\da-fA-F_]+|\\d[\\d_]*(?:\\.\\d+)?(?:[eE][+-]?\\d+)?)\\b",
  WORD = "[A-Za-z_$][\\w$]*";
const rules = (comment, string, word = WORD) =>
  new RegExp(`(?<comment>${comment})|(?<string>${string})|(?<number>${NUMBER})|(?<word>${word})`, "g");
const DEFAULT = () => rules(SLASHES, `${QUOTED}|${TICKS}`);
const RULES = {
  python: () => rules(HASH, `[rbfuRBFU]{0,2}(?:${TRIPLE}|${QUOTED})`, `@?${WORD}`),
  rust: () => rules(SLASHES, '"(?:\\\\[\\s\\S]|[^"\\\\])*(?:"|$)', `${WORD}!?`),
  bash: () => rules("(?<![\\w$])#[^\\n]*", QUOTED, "\\$?[A-Za-z_][\\w-]*|\\$\\{[^}]*\\}"),
  sql: () => rules(`--[^\\n]*|\\/\\*[\\s\\S]*?(?:\\*\\/|$)`, QUOTED),
  yaml: () => rules(HASH, QUOTED, "[A-Za-z_][\\w.-]*(?=\\s*[:=])|[A-Za-z]+"),
  css: () => rules("\\/\\*[\\s\\S]*?(?:\\*\\/|$)", QUOTED, "[@.#]?-{0,2}[A-Za-z][\\w-]*"),
};

// [[kind or null, text], ...]; the texts together are the source
export function highlight(language, source) {
  const name = ALIASES[language.toLowerCase()] ?? language.toLowerCase();
  if (name === "diff")
    return source
      .split(/(?<=\n)/)
      .map((line) => [line[0] === "+" ? "added" : line[0] === "-" ? "removed" : null, line]);
  if (name === "html")
    return pieces(
      source,
      /(?<comment><!--[\s\S]*?(?:-->|$))|(?<keyword><\/?[\w:-]+|\/?>)|(?<string>"[^"<>]*"|'[^'<>]*')|(?<name>[\w:-]+(?==))/g,
      (kind) => kind,
    );
  const keywords = KEYWORDS[name];
  if (!keywords) return [[null, source]];
  return pieces(source, (RULES[name] ?? DEFAULT)(), (kind, text, end) => {
    if (kind !== "word")
      return name === "json" && kind === "string" && /^\s*:/.test(source.slice(end, end + 20)) ? "name" : kind;
    if (keywords.has(name === "sql" ? text.toLowerCase() : text)) return "keyword";
    return source[end] === "(" ||
      text[0] === "@" ||
      text[0] === "$" ||
      text.at(-1) === "!" ||
      (name === "yaml" && /^\s*[:=]/.test(source.slice(end, end + 4)))
      ? "name"
      : null;
  });
}

function pieces(source, pattern, kindOf) {
  const out = [];
  let at = 0;
  for (const match of source.matchAll(pattern)) {
    const [kind] = Object.entries(match.groups).find(([, text]) => text !== undefined),
      end = match.index + match[0].length;
    if (match.index > at) out.push([null, source.slice(at, match.index)]);
    if (match[0]) out.push([kindOf(kind, match[0], end), match[0]]);
    at = end;
  }
  if (at < source.length) out.push([null, source.slice(at)]);
  return out;
}
