"""The source of a grammar, before it is compiled: a schema, a pattern, a grammar's text, or the functions of forced
calls (tool_choice "required" or a named function), which become a grammar in llguidance's Lark dialect.

JSON models get a list of calls whose arguments validate against the function's parameters. Gemma 4 writes arguments in
its own syntax, so the JSON schema is translated: literals for keys, token ids for the quotes. Keywords that aren't
translated are refused by name; a schema that is only half enforced would be a promise broken.

A client's source may be arbitrarily large and complex, so `build` runs where its time and memory are limited (see
grammar_sandbox.py), never on a thread that serves other requests.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, cast

from ..engine.grammar import WHITESPACE, schema_grammar
from ..types import Json, OutriderError
from .tools import GEMMA_CLOSE, GEMMA_OPEN, GEMMA_QUOTE, JSON_CLOSE, JSON_OPEN

Kind = Literal["json_schema", "regex", "gbnf", "choice", "json_calls", "gemma_calls"]
MAX_CHARS = 512 << 10  # of a source, and of the text that is made of it
CHILDREN = ("properties", "$defs", "definitions", "patternProperties")
LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
Schema = Mapping[str, Json]
MAX_CALLS = 8
IGNORED = {"title", "description", "default", "examples", "$schema", "additionalProperties", "$defs", "definitions"}


@dataclass(frozen=True)
class GrammarSource:
    """`payload`: JSON text for schemas and calls, else the text itself. `field`: of the request, for refusals."""

    kind: Kind
    payload: str
    field: str

    @cached_property
    def digest(self) -> bytes:
        """Stands for it where it is remembered: a source may have half a megabyte."""
        return hashlib.sha256(f"{self.kind} {self.field} {self.payload}".encode("utf-8", "surrogatepass")).digest()


def build(source: GrammarSource) -> str:
    """The grammar in the compiler's own language. OutriderError when it can't be one."""
    import llguidance

    try:
        if source.kind == "json_schema":
            return schema_grammar(close_objects(json.loads(source.payload)))
        if source.kind == "regex":
            return str(llguidance.LLMatcher.grammar_from_regex(source.payload))
        if source.kind == "gbnf":
            from llguidance.gbnf_to_lark import any_to_lark

            return str(llguidance.LLMatcher.grammar_from_lark(any_to_lark(source.payload)))
        if source.kind == "choice":
            words = " | ".join(json.dumps(word, ensure_ascii=False) for word in json.loads(source.payload))
            return str(llguidance.LLMatcher.grammar_from_lark(f"start: {words}"))
        calls = json.loads(source.payload)
        functions = [
            (str(name), cast(dict[str, Json], close_objects(parameters))) for name, parameters in calls["functions"]
        ]
        if source.kind == "json_calls":
            text = json_calls(functions, calls["most"])
        else:
            text = gemma_calls(functions, calls["most"], lambda token: int(calls["ids"][token]))
        if "format" in calls:  # a call, or an answer of this form
            form = cast(dict[str, object], close_objects(calls["format"]))
            schema = json.dumps({**form, "x-guidance": {"whitespace_pattern": WHITESPACE}})
            text = f"start: calls | answer\nanswer: %json {schema}\n" + text.replace("start: ", "calls: ", 1)
        return str(llguidance.LLMatcher.grammar_from_lark(text))
    except (ValueError, TypeError, KeyError, RecursionError) as e:
        why = " ".join(str(e).split())[:200] or type(e).__name__
        raise OutriderError(f"it can't be turned into a grammar: {why}") from e


def close_objects(schema: object) -> object:
    """The schema with `additionalProperties: false` where an object lists its properties and says nothing of others.
    Parts of an `allOf` stay open, since together they describe one object."""
    shared: set[str] = set()
    _refs_of_parts(schema, shared)
    return _close(schema, schema, shared, "#")


def _close(node: object, root: object, shared: set[str], path: str, part: bool = False) -> object:
    if not isinstance(node, dict):
        return node
    out = dict(node)
    for key in CHILDREN:
        if isinstance(out.get(key), dict):
            out[key] = {name: _close(child, root, shared, f"{path}/{key}/{name}") for name, child in out[key].items()}
    for key in LISTS:
        if isinstance(out.get(key), list):
            several = part or (key == "allOf" and (len(out[key]) > 1 or "properties" in node))
            out[key] = [_close(child, root, shared, f"{path}/{key}/{i}", several) for i, child in enumerate(out[key])]
    for key in ("items", "additionalProperties"):
        if isinstance(out.get(key), dict):
            out[key] = _close(out[key], root, shared, f"{path}/{key}")
    combined = part or path in shared or any(key in out for key in ("allOf", "anyOf", "oneOf", "$ref", "if"))
    said = {"additionalProperties", "patternProperties", "unevaluatedProperties"} & out.keys()
    if out.get("properties") and not combined and not said:
        out["additionalProperties"] = False
    return out


def _refs_of_parts(node: object, shared: set[str], part: bool = False) -> None:
    """References from inside an `allOf` of several parts."""
    if isinstance(node, dict):
        if part and isinstance(node.get("$ref"), str):
            shared.add(node["$ref"])
        for key, child in node.items():
            several = key == "allOf" and isinstance(child, list) and (len(child) > 1 or "properties" in node)
            _refs_of_parts(child, shared, several)
    elif isinstance(node, list):
        for child in node:
            _refs_of_parts(child, shared, part)


# ---- forced calls


def json_calls(functions: Sequence[tuple[str, Schema]], most: int) -> str:
    """`functions`: (name, parameters schema). One to `most` calls in one list."""
    calls = []
    for i, (name, parameters) in enumerate(functions):
        arguments = _rebase(dict(parameters), f"#/items/anyOf/{i}/properties/arguments")
        properties = {"name": {"const": name}, "arguments": arguments}
        shape = {"type": "object", "properties": properties, "required": ["name", "arguments"]}
        calls.append({**shape, "additionalProperties": False})
    schema = {
        "type": "array",
        "minItems": 1,
        "maxItems": most,
        "items": {"anyOf": calls},
        "x-guidance": {"whitespace_pattern": WHITESPACE},
    }
    return f"start: {_quote(JSON_OPEN)} body {_quote(JSON_CLOSE)}\nbody: %json {json.dumps(schema)}\n"


def _rebase(schema: Json, base: str) -> Json:
    """A schema moved inside another: its references '#/...' must follow."""
    if isinstance(schema, Mapping):
        return {
            k: base + v[1:] if k == "$ref" and isinstance(v, str) and v.startswith("#") else _rebase(v, base)
            for k, v in schema.items()
        }
    return [_rebase(v, base) for v in schema] if isinstance(schema, list) else schema


def gemma_calls(functions: Sequence[tuple[str, Schema]], most: int, token_id: Callable[[str], int]) -> str:
    """`token_id`: the id of a control token."""
    writer = _Gemma(quote=f"<[{token_id(GEMMA_QUOTE)}]>")
    bodies = []
    for name, parameters in functions:
        arguments = writer.rule({"type": "object", **parameters}, parameters, f"tool '{name}'")
        bodies.append(f"{_quote(f'call:{name}')} {arguments}")
    lines = [
        f"start: call{'' if most == 1 else '{1,' + str(most) + '}'}",
        f"call: <[{token_id(GEMMA_OPEN)}]> ({' | '.join(bodies)}) <[{token_id(GEMMA_CLOSE)}]>",
        *writer.lines(),
    ]
    return "\n".join(lines) + "\n"


@dataclass
class _Gemma:
    quote: str
    rules: dict[str, str] = field(default_factory=dict)  # name -> body
    refs: dict[str, str] = field(default_factory=dict)  # $ref -> rule name, for recursive schemas

    def lines(self) -> list[str]:
        fixed = {
            "any": f"string | NUMBER | WORD | {_quote('[')} [any ({_quote(',')} any)*] {_quote(']')} | anyobject",
            "anyobject": f"{_quote('{')} [pair ({_quote(',')} pair)*] {_quote('}')}",
            "pair": f"KEY {_quote(':')} any",
            "string": f"{self.quote} TEXT {self.quote}",
            "TEXT": r"/(.|\n)*/",
            "KEY": "/[A-Za-z_][A-Za-z0-9_]*/",
            "WORD": "/true|false|null/",
            "NUMBER": r"/-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?/",
            "INTEGER": "/-?(0|[1-9][0-9]*)/",
        }
        return [f"{name}: {body}" for name, body in {**self.rules, **fixed}.items()]

    def rule(self, schema: Json, root: Schema, where: str) -> str:
        """The name of a rule (or a literal) for one schema."""
        if schema is True or schema == {}:
            return "any"
        if not isinstance(schema, Mapping):
            raise OutriderError(f"{where}: a schema must be an object")
        if "$ref" in schema:
            ref = str(schema["$ref"])
            if ref not in self.refs:
                self.refs[ref] = self._fresh()
                self.rules[self.refs[ref]] = self.rule(_resolve(root, ref, where), root, where)
            return self.refs[ref]
        left = set(schema) - IGNORED
        for keyword in ("anyOf", "oneOf"):
            if keyword in schema:
                self._only(left, {keyword, "type"}, where)
                return self._new(" | ".join(self.rule(s, root, where) for s in _list(schema, keyword, where)))
        if "const" in schema or "enum" in schema:
            self._only(left, {"const", "enum", "type"}, where)
            values = _list(schema, "enum", where) if "enum" in schema else [schema["const"]]
            return self._new(" | ".join(map(self._literal, values)))
        kind = schema.get("type")
        if isinstance(kind, list):
            return self._new(" | ".join(self.rule({**schema, "type": k}, root, where) for k in kind))
        if kind == "object" or (kind is None and "properties" in schema):
            return self._object(schema, left, root, where)
        if kind == "array":
            self._only(left, {"type", "items", "minItems", "maxItems"}, where)
            return self._array(schema, root, where)
        if kind == "string":
            self._only(left, {"type", "minLength", "maxLength", "pattern"}, where)
            return self._string(schema, where)
        self._only(left, {"type"}, where)
        if kind is None:
            return "any"
        known = {"number": "NUMBER", "integer": "INTEGER", "boolean": '("true" | "false")', "null": '"null"'}
        if not isinstance(kind, str) or kind not in known:
            raise OutriderError(f"{where}: unknown type {kind!r}")
        return known[kind]

    def _object(self, schema: Schema, left: set[str], root: Schema, where: str) -> str:
        self._only(left, {"type", "properties", "required"}, where)
        properties = schema.get("properties") or {}
        if not isinstance(properties, Mapping) or not properties:
            return "anyobject"
        required = set(_list(schema, "required", where)) if schema.get("required") else set()
        for key in properties:
            if not re.fullmatch(r"[^:{}\[\],\"<>\n]{1,64}", key):
                raise OutriderError(f"{where}: property {key!r} can't be written as a bare key")
        members = [
            (f"{_quote(key + ':')} {self.rule(s, root, where)}", key in required) for key, s in properties.items()
        ]
        # rest[i]: members i.. when something stands before them (so each brings its comma); head[i]: when nothing does
        comma = _quote(",")
        rest, head = '""', '""'
        for text, needed in reversed(members):
            follow = self._new(f"{text} {rest}".replace(' ""', ""))
            head = follow if needed else self._new(f"{follow} | {head}")
            rest = self._new(f"{comma} {follow}" if needed else f"{comma} {follow} | {rest}")
        return self._new(f"{_quote('{')} {head} {_quote('}')}")

    def _array(self, schema: Schema, root: Schema, where: str) -> str:
        item = self.rule(schema.get("items", {}), root, where)
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if not isinstance(least, int) or (most is not None and (not isinstance(most, int) or most < max(least, 0))):
            raise OutriderError(f"{where}: minItems and maxItems don't fit")
        if most == 0:
            return _quote("[]")
        more = f"{{{max(least - 1, 0)},{'' if most is None else most - 1}}}"
        body = f"{item} ({_quote(',')} {item}){more}"
        return self._new(f"{_quote('[')} {body if least else f'[{body}]'} {_quote(']')}")

    def _string(self, schema: Schema, where: str) -> str:
        if "pattern" in schema:
            self._only(set(schema) - IGNORED, {"type", "pattern"}, where)
            pattern = str(schema["pattern"])
            pattern = ("" if pattern.startswith("^") else "(.|\\n)*") + pattern.removeprefix("^").removesuffix("$")
            pattern += "" if str(schema["pattern"]).endswith("$") else "(.|\\n)*"
            body = "/" + pattern.replace("/", "\\/") + "/"
        elif "minLength" in schema or "maxLength" in schema:
            least, most = schema.get("minLength", 0), schema.get("maxLength", "")
            if not isinstance(least, int) or not (most == "" or isinstance(most, int)):
                raise OutriderError(f"{where}: minLength and maxLength must be whole numbers")
            body = f"/(.|\\n){{{least},{most}}}/"
        else:
            return "string"
        name = self._fresh().upper()
        self.rules[name] = body
        return self._new(f"{self.quote} {name} {self.quote}")

    def _literal(self, value: Json) -> str:
        if isinstance(value, str):
            return f"{self.quote} {_quote(value)} {self.quote}" if value else f"{self.quote} {self.quote}"
        if value is None or isinstance(value, (bool, int, float)):
            return _quote(json.dumps(value))
        raise OutriderError("enum and const may hold strings, numbers, booleans and null")

    def _only(self, left: set[str], known: set[str], where: str) -> None:
        if left - known:
            keyword = sorted(left - known)[0]
            raise OutriderError(f"{where}: the schema keyword {keyword!r} is not supported in forced tool calls")

    def _fresh(self) -> str:
        return f"r{len(self.rules) + len(self.refs)}"

    def _new(self, body: str) -> str:
        name = self._fresh()
        self.rules[name] = body
        return name


def _list(schema: Schema, keyword: str, where: str) -> list[Json]:
    value = schema[keyword]
    if not isinstance(value, list):
        raise OutriderError(f"{where}: {keyword!r} must be a list")
    return value


def _resolve(root: Schema, ref: str, where: str) -> Json:
    node: Json = root
    for part in ref.removeprefix("#").strip("/").split("/") if ref != "#" else []:
        node = node.get(part) if isinstance(node, Mapping) else None
    if not ref.startswith("#") or node is None:
        raise OutriderError(f"{where}: the reference {ref!r} points nowhere")
    return node


def _quote(text: str) -> str:
    return json.dumps(text)
