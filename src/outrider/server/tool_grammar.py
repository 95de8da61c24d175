"""Grammars that force a tool call (tool_choice "required" or a named function), in llguidance's Lark dialect.

JSON models get a list of calls whose arguments validate against the function's parameters. Gemma 4 writes arguments in
its own syntax, so the JSON schema is translated: literals for keys, token ids for the quotes. Keywords that aren't
translated are refused by name; a schema that is only half enforced would be a promise broken.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ..engine.grammar import WHITESPACE
from ..types import Json, OutriderError
from .tools import GEMMA_CLOSE, GEMMA_OPEN, GEMMA_QUOTE, JSON_CLOSE, JSON_OPEN

Schema = Mapping[str, Json]
MAX_CALLS = 8
IGNORED = {"title", "description", "default", "examples", "$schema", "additionalProperties", "$defs", "definitions"}


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
