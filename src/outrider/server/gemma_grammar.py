"""The grammar of Gemma 4's forced calls, in llguidance's Lark dialect.

Gemma writes arguments in its own syntax: bare keys, control tokens as quotes, strings without escapes. So a schema,
simplified by tool_schema.py, is translated: rules for objects and arrays, regular expressions for strings, the
compiler's JSON rules for bounded numbers, literals for constants. Keywords that cannot be expressed are noted, or
refused for strict tools.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

from ..types import Json
from .schema_merge import SchemaMerger, TooComplexToMerge, same_json
from .string_formats import ANY_TEXT, FORMATS, terminal, whole
from .tool_schema import NUMBERS, SchemaNotes, ToolFunction, enforceable, matches_pattern
from .tools import GEMMA_CLOSE, GEMMA_OPEN, GEMMA_QUOTE

BARE_KEY = re.compile(r"[^:{}\[\],\"<>\s][^:{}\[\],\"<>\n]{0,255}")
KEY = "[A-Za-z0-9_$@][A-Za-z0-9_$@./-]*"
MAX_COUNTED = 32  # maximum properties that are counted for minProperties and maxProperties
MAX_RULES = 20_000
SCALARS = {"boolean": '("true" | "false")', "null": '"null"'}
ALL_TYPES = ("string", "number", "boolean", "null", "array", "object")
ANNOTATION_KEYS = {"$defs"}
FIXED_RULES = {
    "any": 'string | NUMBER | WORD | "[" [any ("," any)*] "]" | anyobject',
    "anyobject": '"{" [pair ("," pair)*] "}"',
    "pair": 'KEY ":" any',
    "TEXT": r"/(.|\n)*/",
    "KEY": terminal(KEY),
    "WORD": "/true|false|null/",
    "NUMBER": r"/-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?/",
    "INTEGER": "/-?(0|[1-9][0-9]*)/",
}


def quote_literal(text: str) -> str:
    """The text as a Lark literal."""
    return json.dumps(text, ensure_ascii=False)


class NoValue(Exception):
    """Raised for a schema that no value matches."""


def gemma_calls(
    functions: Sequence[ToolFunction], max_calls: int, token_id: Callable[[str], int], notes: Sequence[SchemaNotes]
) -> str:
    """Grammar of one to `max_calls` calls. token_id: the id of a control token; notes: one entry per function."""
    quote = f"<[{token_id(GEMMA_QUOTE)}]>"
    rules = dict[str, str]()
    calls = []
    for function, note in zip(functions, notes, strict=True):
        arguments = _Writer(quote, rules, enforceable(function, note), notes=note).arguments()
        calls.append(f"{quote_literal(f'call:{function.name}')} {arguments}")
    start = {
        "start": "call" if max_calls == 1 else f"call{{1,{max_calls}}}",
        "call": f"<[{token_id(GEMMA_OPEN)}]> ({' | '.join(calls)}) <[{token_id(GEMMA_CLOSE)}]>",
    }
    fixed = {**FIXED_RULES, "string": f"{quote} TEXT {quote}"}
    return "".join(f"{name}: {body}\n" for name, body in {**start, **rules, **fixed}.items())


@dataclass
class _Writer:
    """Writes the rules for one function's parameters."""

    quote: str
    rules: dict[str, str]  # name -> body, of all functions
    root: dict[str, Json]
    notes: SchemaNotes
    references: dict[str, str] = field(default_factory=dict)  # $ref -> rule name; schemas may be recursive
    merged: dict[str, str] = field(default_factory=dict)  # JSON of a schema with allOf or anyOf -> rule name

    def __post_init__(self) -> None:
        self._merger = SchemaMerger(self._resolve)

    def arguments(self) -> str:
        try:
            return self.rule(self.root)
        except NoValue:
            self.notes.ignore("properties", "no arguments match this schema")
            return "anyobject"

    def rule(self, schema: Json) -> str:
        """The name of a rule (or a literal) for one schema. NoValue if nothing matches it."""
        if schema is False:
            raise NoValue
        if not isinstance(schema, Mapping) or not schema.keys() - ANNOTATION_KEYS:
            return "any"
        if "$ref" in schema and schema.keys() - ANNOTATION_KEYS == {"$ref"}:
            return self._reference(str(schema["$ref"]))
        if not schema.keys() & {"$ref", "allOf", "anyOf"}:
            return self._plain(schema)
        key = json.dumps(schema, sort_keys=True)
        if key not in self.merged:
            name = self._new("any")  # what a value refers to while its own rule is written
            self.merged[key] = name
            try:
                self.rules[name] = self._merge(schema)
            except NoValue:
                del self.merged[key]
                raise
        return self.merged[key]

    def _merge(self, schema: Mapping[str, Json]) -> str:
        """The rule of a schema with references or alternatives."""
        try:
            flat = self._merger.flatten(schema)
        except TooComplexToMerge:
            keyword = next(key for key in ("allOf", "anyOf", "$ref", "multipleOf") if key in schema)
            self.notes.ignore(keyword, "it combines too many alternatives")
            flat = {key: value for key, value in schema.items() if key not in ("allOf", "anyOf", "$ref")}
        if not isinstance(flat, Mapping) or not flat:
            return self.rule(flat)
        if "anyOf" in flat:
            return self._alternatives(cast(Sequence[Json], flat["anyOf"]))
        return self._plain(flat)

    def _plain(self, schema: Mapping[str, Json]) -> str:
        if "const" in schema or "enum" in schema:
            listed = [schema["const"]] if "const" in schema else cast(Sequence[Json], schema["enum"])
            values = [value for value in listed if _valid(value, schema)]
            if not values:
                raise NoValue
            return self._listed(values)
        types = schema.get("type", list(ALL_TYPES))
        if isinstance(types, list):
            return self._alternatives([{**schema, "type": name} for name in types])
        if types == "object":
            return self._object(schema)
        if types == "array":
            return self._array(schema)
        if types == "string":
            return self._string(schema)
        if types in SCALARS:
            return SCALARS[str(types)]
        bounds = {keyword: schema[keyword] for keyword in NUMBERS if keyword in schema}
        if bounds:
            return self._new(f"%json {json.dumps({'type': types, **bounds})}")
        return "INTEGER" if types == "integer" else "NUMBER"

    def _alternatives(self, schemas: Sequence[Json]) -> str:
        rules = []
        for schema in schemas:
            try:
                rules.append(self.rule(schema))
            except NoValue:
                continue
        if not rules:
            raise NoValue
        return self._new(" | ".join(dict.fromkeys(rules)))

    def _reference(self, reference: str) -> str:
        if reference not in self.references:
            name = self._new("")
            self.references[reference] = name
            try:
                self.rules[name] = self.rule(self._resolve(reference))
            except NoValue:
                self.rules[name] = "any"
                self.notes.ignore("$ref", "no value matches it")
        return self.references[reference]

    def _resolve(self, reference: str) -> Json:
        if reference == "#":
            return {key: value for key, value in self.root.items() if key != "$defs"}
        definitions = self.root["$defs"]
        assert isinstance(definitions, Mapping)
        return definitions[reference.removeprefix("#/$defs/")]

    # ---- objects

    def _object(self, schema: Mapping[str, Json]) -> str:
        properties = dict(_map(schema.get("properties")))
        required = [str(name) for name in _list(schema.get("required"))]
        patterns = _map(schema.get("patternProperties"))
        additional = schema.get("additionalProperties", not (properties or patterns))
        for name in required:
            if name not in properties:
                properties[name] = schema.get("additionalProperties", True)
        members = self._members(properties, set(required))
        extra = self._extra(list(properties), patterns, additional)
        least = cast(int, schema.get("minProperties", 0))
        most = cast(int | None, schema.get("maxProperties"))
        if not members and extra == "pair" and least == 0 and most is None:
            return "anyobject"
        if least <= sum(needed for _, needed in members):
            least = 0
        if most is not None and extra is None and most >= len(members):
            most = None
        if members and max(least, most or 0) > MAX_COUNTED:
            self.notes.ignore("minProperties" if least > MAX_COUNTED else "maxProperties", "too many to count")
            least = 0
            most = None
        if most is not None and most < max(least, sum(needed for _, needed in members)):
            raise NoValue
        return self._new(f'"{{" {self._sequence(members, extra, least, most=most)} "}}"')

    def _members(self, properties: Mapping[str, Json], required: set[str]) -> list[tuple[str, bool]]:
        """(key and value, whether it must be there) of each property that can be written."""
        members = []
        for name, child in properties.items():
            needed = name in required
            if not BARE_KEY.fullmatch(name) or name != name.strip():
                self.notes.ignore("properties", f"{name[:40]!r} can't be written as a bare key")
                continue
            try:
                members.append((f"{quote_literal(name + ':')} {self.rule(child)}", needed))
            except NoValue:
                if needed:
                    raise
        return members

    def _extra(self, declared: list[str], patterns: Mapping[str, Json], additional: Json) -> str | None:
        """Rule of undeclared properties; None if they are not allowed."""
        if not patterns and not declared and additional in (True, {}):
            return "pair"
        not_declared = "".join(f" & ~{terminal(re.escape(name))}" for name in declared)
        rules = []
        expressions = [terminal(whole(pattern)) for pattern in patterns]
        children = [*patterns.values(), additional]
        for i, child in enumerate(children):
            matching = f" & {expressions[i]}" if i < len(expressions) else ""
            others = "".join(f" & ~{other}" for j, other in enumerate(expressions) if j != i)
            try:
                value = self.rule(child)
            except NoValue:
                continue
            key = self._new(f"{terminal(KEY)}{matching}{not_declared}{others}", "K")
            rules.append(self._new(f'{key} ":" {value}'))
        return self._new(" | ".join(rules)) if rules else None

    def _sequence(self, members: list[tuple[str, bool]], extra: str | None, least: int, most: int | None) -> str:
        """Members in declared order, then undeclared ones, between the braces. A state is the number of properties so
        far, up to the largest number that matters: the first property needs no comma, and counts have bounds."""
        cap = max(1, least, most or 0)
        after = [self._extras(extra, count, least=least, most=most) for count in range(cap + 1)]
        for text, needed in reversed(members):
            before = []
            for count in range(cap + 1):
                bodies: list[str] = []
                following = after[min(count + 1, cap)] if most is None or count < most else None
                if following is not None:
                    comma = '"," ' if count > 0 else ""
                    bodies.append(f"{comma}{text} {following}")
                without = None if needed else after[count]
                if without is not None:
                    bodies.append(without)
                before.append(self._new(" | ".join(bodies)) if bodies else None)
            after = before
        if after[0] is None:
            raise NoValue
        return after[0]

    def _extras(self, extra: str | None, count: int, least: int, most: int | None) -> str | None:
        """Undeclared properties after `count` others; None if no valid end can be reached."""
        minimum = max(0, least - count)
        maximum = None if most is None else most - count
        if (maximum is not None and maximum < minimum) or (extra is None and minimum > 0):
            return None
        if extra is None or maximum == 0:
            return '""'
        if count:
            return self._new(f'("," {extra}){_times(minimum, maximum)}')
        more = _times(max(0, minimum - 1), None if maximum is None else maximum - 1)
        listed = f'{extra} ("," {extra}){more}'
        return self._new(listed if minimum else f"[{listed}]")

    # ---- arrays

    def _array(self, schema: Mapping[str, Json]) -> str:
        least = cast(int, schema.get("minItems", 0))
        most = cast(int | None, schema.get("maxItems"))
        first: list[str] = []
        item: str | None = None
        try:
            first = [self.rule(child) for child in _list(schema.get("prefixItems"))]
            item = self.rule(schema.get("items", True)) if most is None or most > len(first) else None
        except NoValue:
            item = None
        if item is None:
            most = len(first) if most is None else min(most, len(first))
        if most is not None and most < least:
            raise NoValue
        first = first[:most]
        body = '""' if item is None else self._items(item, len(first), least=least, most=most)
        for i in reversed(range(len(first))):
            element = f'"," {first[i]}' if i else first[i]
            optional = i >= least
            body = self._new(f'{element} {body} | ""' if optional else f"{element} {body}")
        return self._new(f'"[" {body} "]"')

    def _items(self, item: str, before: int, least: int, most: int | None) -> str:
        """Items of an array after the first `before`."""
        minimum = max(0, least - before)
        maximum = None if most is None else most - before
        if maximum == 0:
            return '""'
        if before:
            return self._new(f'("," {item}){_times(minimum, maximum)}')
        more = _times(max(0, minimum - 1), None if maximum is None else maximum - 1)
        listed = f'{item} ("," {item}){more}'
        return self._new(listed if minimum else f"[{listed}]")

    # ---- strings and constants

    def _string(self, schema: Mapping[str, Json]) -> str:
        parts = [terminal(whole(pattern)) for pattern in _texts(schema.get("pattern"))]
        parts += [terminal(FORMATS[name]) for name in _texts(schema.get("format"))]
        if "minLength" in schema or "maxLength" in schema:
            least = cast(int, schema.get("minLength", 0))
            most = schema.get("maxLength")
            if isinstance(most, int) and most < least:
                raise NoValue
            parts.append(terminal(f"{ANY_TEXT}{{{least},{'' if most is None else most}}}"))
        if not parts:
            return "string"
        return self._new(f"{self.quote} {self._new(' & '.join(parts), 'R')} {self.quote}")

    def _listed(self, values: Sequence[Json]) -> str:
        """The rule of listed values. Texts are one terminal, and so are numbers and words: the compiler follows no more
        than 2,000 alternatives of a rule."""
        texts = [quote_literal(value) for value in values if isinstance(value, str) and value]
        words = [quote_literal(json.dumps(value)) for value in values if not isinstance(value, (str, Mapping, list))]
        rules = [self._literal(value) for value in values if isinstance(value, (Mapping, list)) or value == ""]
        if texts:
            rules.append(f"{self.quote} {self._new(' | '.join(texts), 'R')} {self.quote}")
        if words:
            rules.append(self._new(" | ".join(words), "R"))
        return self._new(" | ".join(rules))

    def _literal(self, value: Json) -> str:
        if isinstance(value, str):
            return f"{self.quote} {quote_literal(value)} {self.quote}" if value else f"{self.quote} {self.quote}"
        if isinstance(value, Mapping):
            members = [f"{quote_literal(key + ':')} {self._literal(child)}" for key, child in value.items()]
            return f'"{{" {_separated(members)} "}}"'
        if isinstance(value, list):
            return f'"[" {_separated([self._literal(child) for child in value])} "]"'
        return quote_literal(json.dumps(value))

    def _new(self, body: str, kind: str = "r") -> str:
        if len(self.rules) >= MAX_RULES:
            raise ValueError(f"more than {MAX_RULES} rules")
        name = f"{kind}{len(self.rules)}"
        self.rules[name] = body
        return name


def _valid(value: Json, schema: Mapping[str, Json]) -> bool:
    """True if a listed value also satisfies the schema's type and bounds."""
    types = schema.get("type")
    if types is not None and not any(_has_type(value, str(name)) for name in _list_of(types)):
        return False
    if "const" in schema and not same_json(value, schema["const"]):
        return False
    if isinstance(value, str):
        patterns = all(matches_pattern(pattern, value) for pattern in _texts(schema.get("pattern")))
        return patterns and cast(int, schema.get("minLength", 0)) <= len(value) <= cast(
            int, schema.get("maxLength", len(value))
        )
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        low = schema.get("minimum")
        high = schema.get("maximum")
        return (not isinstance(low, (int, float)) or value >= low) and (
            not isinstance(high, (int, float)) or value <= high
        )
    return True


def _has_type(value: Json, name: str) -> bool:
    if isinstance(value, bool) or value is None:
        return name == ("null" if value is None else "boolean")
    if isinstance(value, (int, float)):
        return name == "number" or (name == "integer" and float(value).is_integer())
    if isinstance(value, str):
        return name == "string"
    return name == ("array" if isinstance(value, list) else "object")


def _times(least: int, most: int | None) -> str:
    if least == 0 and most is None:
        return "*"
    return f"{{{least},{'' if most is None else most}}}"


def _separated(members: list[str]) -> str:
    return ' "," '.join(members) if members else '""'


def _list_of(value: Json) -> list[Json]:
    return value if isinstance(value, list) else [value]


def _list(value: Json) -> list[Json]:
    return value if isinstance(value, list) else []


def _map(value: Json) -> Mapping[str, Json]:
    return value if isinstance(value, Mapping) else {}


def _texts(value: Json) -> list[str]:
    return [] if value is None else [str(text) for text in _list_of(value)]
