"""The source of a grammar, before it is compiled: a schema, a pattern, a grammar's text, or the functions of forced
calls (tool_choice "required" or a named function), which become a grammar in llguidance's Lark dialect.

JSON models get a list of calls whose arguments validate against the function's parameters. Gemma 4 writes arguments in
its own syntax (gemma_grammar.py). Keywords of a function's schema that cannot be enforced are ignored, and the answer's
header names them; a function with `strict: true` is refused instead (tool_schema.py). The schema of a `response_format`
is enforced in full or refused.

A client's source may be arbitrarily large and complex, so `build` runs where its time and memory are limited (see
grammar_sandbox.py), never on a thread that serves other requests.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from ..engine.grammar import WHITESPACE, first_line, schema_grammar
from ..types import Json, OutriderError
from .gemma_grammar import gemma_calls
from .tool_schema import SchemaNotes, ToolFunction, enforceable
from .tools import JSON_CLOSE, JSON_OPEN

Kind = Literal["json_schema", "regex", "gbnf", "choice", "json_calls", "gemma_calls"]
MAX_CHARS = 512 << 10  # maximum length of a source, and of the grammar built from it
CHILDREN = ("properties", "$defs", "definitions", "patternProperties")
LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
Schema = Mapping[str, Json]
MAX_CALLS = 8


@dataclass(frozen=True)
class GrammarSource:
    """A grammar before it is built. `payload`: JSON text for schemas and calls, else the grammar's text. `field`: the
    request's field, for refusals."""

    kind: Kind
    payload: str
    field: str

    @cached_property
    def digest(self) -> bytes:
        """Key under which the grammar is cached: a source may have half a megabyte."""
        return hashlib.sha256(f"{self.kind} {self.field} {self.payload}".encode("utf-8", "surrogatepass")).digest()


@dataclass(frozen=True)
class GrammarText:
    """A grammar in the compiler's own language. `unenforced`: one line on keywords of functions' schemas that it does
    not enforce; empty if none."""

    text: str
    unenforced: str = ""


def build(source: GrammarSource) -> GrammarText:
    """Builds the grammar of a source. Raises OutriderError if the source is not one."""
    import llguidance

    try:
        if source.kind == "json_schema":
            return GrammarText(schema_grammar(close_objects(json.loads(source.payload))))
        if source.kind == "regex":
            return GrammarText(str(llguidance.LLMatcher.grammar_from_regex(source.payload)))
        if source.kind == "gbnf":
            from llguidance.gbnf_to_lark import any_to_lark

            return GrammarText(_from_lark(any_to_lark(source.payload)))
        if source.kind == "choice":
            words = " | ".join(json.dumps(word, ensure_ascii=False) for word in json.loads(source.payload))
            return GrammarText(_from_lark(f"start: {words}"))
        calls = json.loads(source.payload)
        grammar = _CallsGrammar(source.kind == "gemma_calls", calls["most"], calls.get("ids", {}))
        functions = [ToolFunction(name, parameters, strict) for name, parameters, strict in calls["functions"]]
        text, notes = grammar.enforced(functions)
        if "format" in calls:  # either a call or an answer of this format
            form = {**close_objects(calls["format"]), "x-guidance": {"whitespace_pattern": WHITESPACE}}
            text = f"start: calls | answer\nanswer: %json {json.dumps(form)}\n" + text.replace("start: ", "calls: ", 1)
        unenforced = [f"{note.tool}: {', '.join(note.keywords)}" for note in notes if note.keywords]
        return GrammarText(_from_lark(text), "; ".join(unenforced))
    except (ValueError, TypeError, KeyError, RecursionError) as e:
        why = " ".join(str(e).split())[:200] or type(e).__name__
        raise OutriderError(f"it can't be turned into a grammar: {why}") from e


def _from_lark(text: str) -> str:
    import llguidance

    return str(llguidance.LLMatcher.grammar_from_lark(text))


def compiler_error(text: str) -> str:
    """The compiler's error for a grammar in Lark; empty if it accepts the grammar."""
    import llguidance

    try:
        error = llguidance.LLMatcher.validate_grammar(_from_lark(text), None)
    except ValueError as e:
        return str(e)
    return "" if error.startswith("WARNING") else str(error)


@dataclass(frozen=True)
class _CallsGrammar:
    """Writes forced calls in one of the two syntaxes."""

    gemma: bool
    max_calls: int
    token_ids: Mapping[str, int]  # of Gemma's control tokens

    def enforced(self, functions: Sequence[ToolFunction]) -> tuple[str, list[SchemaNotes]]:
        """The grammar, and what it does not enforce. A schema that the compiler refuses as a whole (contradictory
        bounds) is not enforced at all, or refused for a strict function."""
        accepted = []
        unenforced = set()
        for function in functions:  # one by one: the compiler silently drops an alternative that nothing matches
            error = self._error(function)
            if error and function.strict:
                raise OutriderError(f"tool '{function.name}': {first_line(error)}")
            if error:
                unenforced.add(function.name)
                function = ToolFunction(function.name, {"type": "object"})
            accepted.append(function)
        text, notes = self.write(accepted)
        for note in notes:
            if note.tool in unenforced:
                note.keywords.append("its whole schema")
        return text, notes

    def _error(self, function: ToolFunction) -> str:
        """Why a function's whole schema makes no grammar; empty if it makes one."""
        try:
            return compiler_error(self.write([function])[0])
        except (RecursionError, ValueError) as error:
            return str(error)

    def write(self, functions: Sequence[ToolFunction]) -> tuple[str, list[SchemaNotes]]:
        notes = [SchemaNotes(function.name, function.strict) for function in functions]
        if self.gemma:
            return gemma_calls(functions, self.max_calls, lambda token: int(self.token_ids[token]), notes=notes), notes
        return json_calls(functions, self.max_calls, notes), notes


def close_objects(schema: object) -> Any:
    """Adds `additionalProperties: false` to objects that list their properties and say nothing of others. Parts of an
    `allOf`, and alternatives beside properties, stay open, since together they describe one object."""
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
            beside = {"properties", "required", "additionalProperties", "$ref", "allOf"} & node.keys() - {key}
            several = part or (key != "prefixItems" and bool(beside)) or (key == "allOf" and len(child) > 1)
            out[key] = [_close(one, shared, f"{path}/{key}/{i}", part=several) for i, one in enumerate(child)]
        elif key in ("items", "additionalProperties"):
            out[key] = _close(child, shared, f"{path}/{key}")
    combined = part or path in shared or any(key in out for key in ("allOf", "anyOf", "oneOf", "$ref", "if"))
    said = {"additionalProperties", "patternProperties", "unevaluatedProperties"} & out.keys()
    declared = set(out.get("required") or ()) <= set(out.get("properties") or ())
    if out.get("properties") and declared and not combined and not said:
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


def json_calls(functions: Sequence[ToolFunction], max_calls: int, notes: Sequence[SchemaNotes]) -> str:
    """Grammar of one to `max_calls` calls in one list. notes: one entry per function."""
    calls = []
    for i, (function, note) in enumerate(zip(functions, notes, strict=True)):
        parameters = close_objects(_in_json(enforceable(function, note), note))
        arguments = _rebase(parameters, f"#/items/anyOf/{i}/properties/arguments")
        properties = {"name": {"const": function.name}, "arguments": arguments}
        shape = {"type": "object", "properties": properties, "required": ["name", "arguments"]}
        calls.append({**shape, "additionalProperties": False})
    schema = {
        "type": "array",
        "minItems": 1,
        "maxItems": max_calls,
        "items": {"anyOf": calls},
        "x-guidance": {"whitespace_pattern": WHITESPACE},
    }
    return f"start: {json.dumps(JSON_OPEN)} body {json.dumps(JSON_CLOSE)}\nbody: %json {json.dumps(schema)}\n"


def _in_json(schema: Json, notes: SchemaNotes) -> Json:
    """The schema without what the compiler's JSON grammar cannot express: counts of optional properties, and lengths
    beside a pattern that it cannot intersect with them."""
    if isinstance(schema, list):
        return [_in_json(part, notes) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    out: dict[str, Json] = {}
    for key, child in schema.items():
        if key in ("const", "enum"):
            out[key] = child
        elif key in CHILDREN and isinstance(child, Mapping):
            out[key] = {name: _in_json(part, notes) for name, part in child.items()}
        else:
            out[key] = _in_json(child, notes)
    required = out.get("required")
    properties = out.get("properties")
    names = set(properties) if isinstance(properties, Mapping) else set()
    optional = names - {str(name) for name in (required if isinstance(required, list) else [])}
    for keyword in ("minProperties", "maxProperties"):
        if keyword in out and optional:
            notes.ignore(keyword, "with optional properties")
            del out[keyword]
    text = {key: out[key] for key in ("pattern", "format", "minLength", "maxLength") if key in out}
    if "pattern" in text and len(text) > 1 and compiler_error(f"start: %json {json.dumps({'type': 'string', **text})}"):
        for keyword in sorted(text.keys() - {"pattern"}):
            notes.ignore(keyword, "beside this pattern")
            del out[keyword]
    return out


def _rebase(schema: Json, base: str) -> Json:
    """Adjusts a schema that moves into another: its references '#/...' get the new path."""
    if isinstance(schema, Mapping):
        return {
            k: base + v[1:] if k == "$ref" and isinstance(v, str) and v.startswith("#") else _rebase(v, base)
            for k, v in schema.items()
        }
    return [_rebase(v, base) for v in schema] if isinstance(schema, list) else schema
