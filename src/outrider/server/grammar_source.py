"""The source of a grammar, before it is compiled: a schema, a pattern, a grammar's text, or the functions of forced
calls.

A client's source may be arbitrarily large and complex, so `build` runs where its time and memory are limited (see
grammar_sandbox.py), never on a thread that serves other requests.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, cast

from ..engine.grammar import WHITESPACE, schema_grammar
from ..types import Json, OutriderError
from .tool_grammar import gemma_calls, json_calls

Kind = Literal["json_schema", "regex", "gbnf", "choice", "json_calls", "gemma_calls"]
MAX_CHARS = 512 << 10  # of a source, and of the text that is made of it
CHILDREN = ("properties", "$defs", "definitions", "patternProperties")
LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")


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
