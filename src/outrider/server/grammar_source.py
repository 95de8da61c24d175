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
from typing import Any, Literal

from ..engine.grammar import WHITESPACE, schema_grammar
from ..types import Json, OutriderError, require
from .tools import GEMMA_CLOSE, GEMMA_OPEN, GEMMA_QUOTE, JSON_CLOSE, JSON_OPEN

Kind = Literal["json_schema", "regex", "gbnf", "choice", "json_calls", "gemma_calls"]
MAX_CHARS = 512 << 10  # of a source, and of the text that is made of it
CHILDREN = ("properties", "$defs", "definitions", "patternProperties")
LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
Schema = Mapping[str, Json]
_quote = json.dumps  # a literal of Lark
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
        functions = [(str(name), close_objects(parameters)) for name, parameters in calls["functions"]]
        if source.kind == "json_calls":
            text = json_calls(functions, calls["most"])
        else:
            text = gemma_calls(functions, calls["most"], lambda token: int(calls["ids"][token]))
        if "format" in calls:  # a call, or an answer of this form
            form = {**close_objects(calls["format"]), "x-guidance": {"whitespace_pattern": WHITESPACE}}
            text = f"start: calls | answer\nanswer: %json {json.dumps(form)}\n" + text.replace("start: ", "calls: ", 1)
        return str(llguidance.LLMatcher.grammar_from_lark(text))
    except (ValueError, TypeError, KeyError, RecursionError) as e:
        why = " ".join(str(e).split())[:200] or type(e).__name__
        raise OutriderError(f"it can't be turned into a grammar: {why}") from e


def close_objects(schema: object) -> Any:
    """The schema with `additionalProperties: false` where an object lists its properties and says nothing of others.
    Parts of an `allOf` stay open, since together they describe one object."""
    shared: set[str] = set()
    _refs_of_parts(schema, shared)
    return _close(schema, shared, "#")


def _close(node: object, shared: set[str], path: str, part: bool = False) -> object:
    if not isinstance(node, dict):
        return node
    out = dict(node)
    for key, child in node.items():
        if key in CHILDREN and isinstance(child, dict):
            out[key] = {name: _close(one, shared, f"{path}/{key}/{name}") for name, one in child.items()}
        elif key in LISTS and isinstance(child, list):
            several = part or (key == "allOf" and (len(child) > 1 or "properties" in node))
            out[key] = [_close(one, shared, f"{path}/{key}/{i}", several) for i, one in enumerate(child)]
        elif key in ("items", "additionalProperties"):
            out[key] = _close(child, shared, f"{path}/{key}")
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
    quote = f"<[{token_id(GEMMA_QUOTE)}]>"
    rules = dict[str, str]()
    bodies = []
    for name, parameters in functions:
        arguments = _Gemma(quote, rules, parameters, f"tool '{name}'").rule({"type": "object", **parameters})
        bodies.append(f"{_quote(f'call:{name}')} {arguments}")
    fixed = {
        "any": f"string | NUMBER | WORD | {_quote('[')} [any ({_quote(',')} any)*] {_quote(']')} | anyobject",
        "anyobject": f"{_quote('{')} [pair ({_quote(',')} pair)*] {_quote('}')}",
        "pair": f"KEY {_quote(':')} any",
        "string": f"{quote} TEXT {quote}",
        "TEXT": r"/(.|\n)*/",
        "KEY": "/[A-Za-z_][A-Za-z0-9_]*/",
        "WORD": "/true|false|null/",
        "NUMBER": r"/-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?/",
        "INTEGER": "/-?(0|[1-9][0-9]*)/",
    }
    start = {
        "start": f"call{'' if most == 1 else '{1,' + str(most) + '}'}",
        "call": f"<[{token_id(GEMMA_OPEN)}]> ({' | '.join(bodies)}) <[{token_id(GEMMA_CLOSE)}]>",
    }
    return "".join(f"{name}: {body}\n" for name, body in {**start, **rules, **fixed}.items())


@dataclass
class _Gemma:
    """Writes the rules for one function's parameters."""

    quote: str
    rules: dict[str, str]  # name -> body, of all functions
    root: Schema
    where: str
    refs: dict[str, str] = field(default_factory=dict)  # $ref -> rule name, for recursive schemas

    def rule(self, schema: Json) -> str:
        """The name of a rule (or a literal) for one schema."""
        if schema is True or schema == {}:
            return "any"
        if not isinstance(schema, Mapping):
            raise OutriderError(f"{self.where}: a schema must be an object")
        if "$ref" in schema:
            ref = str(schema["$ref"])
            if ref not in self.refs:
                name = self.refs[ref] = self._new("")
                self.rules[name] = self.rule(self._resolve(ref))
            return self.refs[ref]
        for keyword in ("anyOf", "oneOf"):
            if keyword in schema:
                self._only(schema, keyword)
                return self._new(" | ".join(map(self.rule, self._list(schema, keyword))))
        if "const" in schema or "enum" in schema:
            self._only(schema, "const", "enum")
            values = self._list(schema, "enum") if "enum" in schema else [schema["const"]]
            return self._new(" | ".join(map(self._literal, values)))
        kind = schema.get("type")
        if isinstance(kind, list):
            return self._new(" | ".join(self.rule({**schema, "type": k}) for k in kind))
        if kind == "object" or (kind is None and "properties" in schema):
            return self._object(schema)
        if kind == "array":
            return self._array(schema)
        if kind == "string":
            return self._string(schema)
        self._only(schema)
        if kind is None:
            return "any"
        known = {"number": "NUMBER", "integer": "INTEGER", "boolean": '("true" | "false")', "null": '"null"'}
        if not isinstance(kind, str) or kind not in known:
            raise OutriderError(f"{self.where}: unknown type {kind!r}")
        return known[kind]

    def _object(self, schema: Schema) -> str:
        self._only(schema, "properties", "required")
        properties = schema.get("properties") or {}
        if not isinstance(properties, Mapping) or not properties:
            return "anyobject"
        required = set(self._list(schema, "required")) if schema.get("required") else set()
        for key in properties:
            if not re.fullmatch(r"[^:{}\[\],\"<>\n]{1,64}", key):
                raise OutriderError(f"{self.where}: property {key!r} can't be written as a bare key")
        members = [(f"{_quote(key + ':')} {self.rule(s)}", key in required) for key, s in properties.items()]
        # rest[i]: members i.. when something stands before them (so each brings its comma); head[i]: when nothing does
        comma = _quote(",")
        rest = '""'
        head = '""'
        for text, needed in reversed(members):
            follow = self._new(f"{text} {rest}".replace(' ""', ""))
            head = follow if needed else self._new(f"{follow} | {head}")
            rest = self._new(f"{comma} {follow}" if needed else f"{comma} {follow} | {rest}")
        return self._new(f"{_quote('{')} {head} {_quote('}')}")

    def _array(self, schema: Schema) -> str:
        self._only(schema, "items", "minItems", "maxItems")
        item = self.rule(schema.get("items", {}))
        least = schema.get("minItems", 0)
        most = schema.get("maxItems")
        if not isinstance(least, int) or (most is not None and (not isinstance(most, int) or most < max(least, 0))):
            raise OutriderError(f"{self.where}: minItems and maxItems don't fit")
        if most == 0:
            return _quote("[]")
        more = f"{{{max(least - 1, 0)},{'' if most is None else most - 1}}}"
        body = f"{item} ({_quote(',')} {item}){more}"
        return self._new(f"{_quote('[')} {body if least else f'[{body}]'} {_quote(']')}")

    def _string(self, schema: Schema) -> str:
        if "pattern" in schema:
            self._only(schema, "pattern")
            pattern = str(schema["pattern"])
            pattern = ("" if pattern.startswith("^") else "(.|\\n)*") + pattern.removeprefix("^").removesuffix("$")
            pattern += "" if str(schema["pattern"]).endswith("$") else "(.|\\n)*"
            body = "/" + pattern.replace("/", "\\/") + "/"
        elif "minLength" in schema or "maxLength" in schema:
            self._only(schema, "minLength", "maxLength")
            least = schema.get("minLength", 0)
            most = schema.get("maxLength", "")
            if not isinstance(least, int) or not (most == "" or isinstance(most, int)):
                raise OutriderError(f"{self.where}: minLength and maxLength must be whole numbers")
            body = f"/(.|\\n){{{least},{most}}}/"
        else:
            self._only(schema)
            return "string"
        return self._new(f"{self.quote} {self._new(body, 'R')} {self.quote}")

    def _literal(self, value: Json) -> str:
        if isinstance(value, str):
            return f"{self.quote} {_quote(value)} {self.quote}" if value else f"{self.quote} {self.quote}"
        if value is None or isinstance(value, (bool, int, float)):
            return _quote(json.dumps(value))
        raise OutriderError("enum and const may hold strings, numbers, booleans and null")

    def _only(self, schema: Schema, *known: str) -> None:
        """Refuses a schema that says more than that."""
        if left := sorted(set(schema) - IGNORED - {"type", *known}):
            raise OutriderError(f"{self.where}: the schema keyword {left[0]!r} is not supported in forced tool calls")

    def _new(self, body: str, kind: str = "r") -> str:
        name = f"{kind}{len(self.rules)}"
        self.rules[name] = body
        return name

    def _list(self, schema: Schema, keyword: str) -> list[Json]:
        value = schema[keyword]
        if not isinstance(value, list):
            raise OutriderError(f"{self.where}: {keyword!r} must be a list")
        return value

    def _resolve(self, ref: str) -> Json:
        node: Json = self.root
        for part in ref.removeprefix("#").strip("/").split("/") if ref != "#" else []:
            node = node.get(part) if isinstance(node, Mapping) else None
        require(ref.startswith("#") and node is not None, f"{self.where}: the reference {ref!r} points nowhere")
        return node
