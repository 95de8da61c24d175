"""Reduces a tool's parameters to the part of JSON Schema that a grammar of forced calls enforces.

Clients write schemas of every draft and of none: pydantic, zod and MCP servers add keywords that no grammar enforces.
`enforceable` translates the older spellings and drops annotations. It also drops keywords that cannot be enforced, with
one message each; a tool with `strict: true` refuses such a schema by the keyword's name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from ..types import Json, OutriderError
from .string_formats import FORMATS, compiles

TYPES = frozenset({"object", "array", "string", "number", "integer", "boolean", "null"})
LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
SCHEMAS = ("items", "additionalProperties")
NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
# Keywords that restrict values but are not enforced. Keywords listed nowhere are annotations.
UNENFORCED = (
    "not", "if", "contains", "minContains", "maxContains", "uniqueItems", "propertyNames", "dependentRequired",
    "dependentSchemas", "dependencies", "unevaluatedProperties", "unevaluatedItems", "$dynamicRef", "$recursiveRef",
)  # fmt: skip
# their values that restrict nothing
HARMLESS: dict[str, tuple[Json, ...]] = {
    "uniqueItems": (False,),
    "propertyNames": (True, {}, {"type": "string"}),
    "unevaluatedProperties": (True, {}),
    "unevaluatedItems": (True, {}),
    "minContains": (0,),
}
MAX_REFERENCES = 512


@dataclass(frozen=True)
class ToolFunction:
    """A function of a request. `strict`: refuse a schema that cannot be enforced in full."""

    name: str
    parameters: Mapping[str, Json]
    strict: bool = False


@dataclass
class SchemaNotes:
    """Keywords of a tool's schema that the grammar does not enforce, in order of discovery."""

    tool: str
    strict: bool
    keywords: list[str] = field(default_factory=list)

    def ignore(self, keyword: str, detail: str = "") -> None:
        """Records a keyword that is not enforced; raises OutriderError for a strict tool."""
        if self.strict:
            suffix = f" ({detail})" if detail else ""
            message = f"the schema keyword {keyword!r} is not supported in forced tool calls{suffix}"
            raise OutriderError(f"tool '{self.tool}': {message}; send 'strict': false to have it ignored")
        if keyword not in self.keywords:
            self.keywords.append(keyword)


def enforceable(function: ToolFunction, notes: SchemaNotes) -> dict[str, Json]:
    """The function's parameters as an object schema whose references all point to `#` or to `#/$defs/...`."""
    reader = _SchemaReader(function.parameters, notes)
    root = reader.read({"type": "object", **function.parameters})
    if not isinstance(root, dict):
        notes.ignore("not", "no arguments match this schema")
        root = {"type": "object"}
    if root.get("properties") == {} and not {"additionalProperties", "patternProperties"} & root.keys():
        root["additionalProperties"] = False  # a function without parameters
    while reader.pending:
        pointer, name = reader.pending.popitem()
        reader.definitions[name] = reader.read(reader.target(pointer))
    reader.check_references()
    reader.check_alternatives()
    return {**root, "$defs": reader.definitions} if reader.definitions else root


class _SchemaReader:
    def __init__(self, root: Mapping[str, Json], notes: SchemaNotes) -> None:
        self._root = root
        self._notes = notes
        self._names: dict[str, str] = {}  # $ref -> name of its definition
        self.pending: dict[str, str] = {}  # definitions still to be read
        self.definitions: dict[str, Json] = {}
        self._exclusive: list[list[Json]] = []  # the alternatives of each oneOf

    def check_alternatives(self) -> None:
        """Notes each oneOf with overlapping alternatives: enforced as anyOf, it also accepts values that match two."""
        for alternatives in self._exclusive:
            resolved = [self.definitions.get(_definition(part), part) for part in alternatives]
            if not disjoint(resolved):
                self._notes.ignore("oneOf", "alternatives that overlap; anyOf can be enforced")

    def check_references(self) -> None:
        """Replaces definitions that only refer to each other in a circle: no value follows from them."""
        for name in self.definitions:
            passed = {name}
            following = _definition(self.definitions[name])
            while following and following not in passed:
                passed.add(following)
                following = _definition(self.definitions[following])
            if following:
                self._notes.ignore("$ref", "references in a circle")
                self.definitions[name] = {}

    def target(self, pointer: str) -> Json:
        """The part of the root that a JSON pointer names; None if there is none."""
        node: Json = dict(self._root)
        for escaped in pointer.removeprefix("#").lstrip("/").split("/"):
            part = escaped.replace("%25", "%").replace("%24", "$").replace("~1", "/").replace("~0", "~")
            if isinstance(node, Mapping):
                node = node.get(part)
            elif isinstance(node, list) and part.isdecimal() and int(part) < len(node):
                node = node[int(part)]
            else:
                return None
        return node

    def read(self, node: Json) -> Json:
        if isinstance(node, bool):
            return node
        if not isinstance(node, Mapping):
            raise OutriderError(f"tool '{self._notes.tool}': a schema must be an object")
        schema = _current_spelling(node)
        if schema.get("not") in ({}, True):  # zod's never and undefined
            return False
        out: dict[str, Json] = {}
        self._reference(schema, out)
        self._type(schema, out)
        self._values(schema, out)
        self._strings(schema, out)
        self._names_of_properties(schema)
        self._children(schema, out)
        for keyword in UNENFORCED:
            if keyword in schema and schema[keyword] not in HARMLESS.get(keyword, ()):
                self._notes.ignore(keyword)
        return out

    def _reference(self, schema: dict[str, Json], out: dict[str, Json]) -> None:
        reference = schema.get("$ref")
        if reference is None:
            return
        if reference == "#":
            out["$ref"] = "#"
        elif not isinstance(reference, str) or not reference.startswith("#/") or self.target(reference) is None:
            self._notes.ignore("$ref", f"{str(reference)[:60]!r} points nowhere in the schema")
        elif reference not in self._names and len(self._names) >= MAX_REFERENCES:
            self._notes.ignore("$ref", f"more than {MAX_REFERENCES} different references")
        else:
            if reference not in self._names:
                self._names[reference] = f"ref{len(self._names)}"
                self.pending[reference] = self._names[reference]
            out["$ref"] = f"#/$defs/{self._names[reference]}"

    def _type(self, schema: dict[str, Json], out: dict[str, Json]) -> None:
        types = schema.get("type")
        if types is None:
            return
        listed = types if isinstance(types, list) else [types]
        names = [
            name.lower() if isinstance(name, str) else name for name in listed
        ]  # Gemini's clients write types in capitals
        if names and all(isinstance(name, str) and name in TYPES for name in names):
            out["type"] = names if isinstance(types, list) else names[0]
        else:
            self._notes.ignore("type", f"unknown type {str(types)[:40]!r}")

    def _values(self, schema: dict[str, Json], out: dict[str, Json]) -> None:
        if "const" in schema:
            out["const"] = schema["const"]
        values = schema.get("enum")
        if isinstance(values, list) and values:
            out["enum"] = values
        elif values is not None:
            self._notes.ignore("enum", "it must be a list of values")
        for keyword in (*NUMBERS, *COUNTS):
            bound = schema.get(keyword)
            if bound is None:
                continue
            if not isinstance(bound, (int, float)) or isinstance(bound, bool):
                self._notes.ignore(keyword, "it must be a number")
            elif keyword in COUNTS and (bound < 0 or bound != int(bound)):
                self._notes.ignore(keyword, "it must be a whole number")
            elif keyword == "multipleOf" and bound <= 0:
                self._notes.ignore(keyword, "it must be positive")
            else:
                out[keyword] = int(bound) if keyword in COUNTS else bound

    def _strings(self, schema: dict[str, Json], out: dict[str, Json]) -> None:
        pattern = schema.get("pattern")
        if pattern is not None:
            if isinstance(pattern, str) and compiles(pattern):
                out["pattern"] = pattern
            else:
                self._notes.ignore("pattern", "this regular expression has no automaton")
        name = schema.get("format")
        types = schema.get("type", "string")
        if name is None or ("string" not in types if isinstance(types, list) else types != "string"):
            return  # the format of a number ("int32") is an annotation
        if isinstance(name, str) and name in FORMATS:
            out["format"] = name
        else:
            self._notes.ignore("format", str(name)[:40])

    def _names_of_properties(self, schema: dict[str, Json]) -> None:
        """Rewrites a map's `propertyNames` (zod's records) as properties or patterns, in place."""
        names = schema.get("propertyNames")
        if not isinstance(names, Mapping) or schema.get("properties") or schema.get("patternProperties"):
            return
        value = schema.get("additionalProperties", True)
        listed = names.get("enum", [names["const"]] if "const" in names else None)
        others = set(names) - {"type", "enum", "const", "pattern", "$schema", "description", "title"}
        if others or names.get("type", "string") != "string":
            return
        pattern = names.get("pattern")
        if isinstance(listed, list) and all(isinstance(name, str) for name in listed):
            schema["properties"] = dict.fromkeys(listed, value)
        elif isinstance(pattern, str) and compiles(pattern):
            schema["patternProperties"] = {pattern: value}
        else:
            return
        schema["additionalProperties"] = False
        del schema["propertyNames"]

    def _children(self, schema: dict[str, Json], out: dict[str, Json]) -> None:
        properties = schema.get("properties")
        if isinstance(properties, Mapping):
            out["properties"] = {str(name): self.read(child) for name, child in properties.items()}
        elif properties is not None:
            self._notes.ignore("properties", "it must be an object")
        required = schema.get("required")
        if isinstance(required, list) and all(isinstance(name, str) for name in required):
            out["required"] = list(dict.fromkeys(required))
        elif required is not None and not isinstance(required, bool):  # draft 3 marked each property
            self._notes.ignore("required", "it must be a list of names")
        patterns = schema.get("patternProperties")
        if isinstance(patterns, Mapping) and all(compiles(pattern) for pattern in patterns):
            out["patternProperties"] = {pattern: self.read(child) for pattern, child in patterns.items()}
        elif patterns is not None:
            self._notes.ignore("patternProperties")
        for keyword in SCHEMAS:
            if keyword in schema:
                out[keyword] = self.read(schema[keyword])
        for keyword in LISTS:
            parts = schema.get(keyword)
            if isinstance(parts, list) and parts:
                children = [self.read(part) for part in parts]
                if keyword == "oneOf":
                    self._exclusive.append(children)
                    self._alternatives(out, children)
                elif keyword == "anyOf":
                    self._alternatives(out, children)
                elif len(children) == 1 and _definition(children[0]) and "$ref" not in out:
                    out["$ref"] = f"#/$defs/{_definition(children[0])}"  # draft 7 wrote notes beside a reference so
                else:
                    out[keyword] = children
            elif parts is not None and parts != []:
                self._notes.ignore(keyword, "it must be a list of schemas")

    def _alternatives(self, out: dict[str, Json], children: list[Json]) -> None:
        """Adds alternatives; a schema with both anyOf and oneOf keeps the second group as a part of `allOf`."""
        if "anyOf" in out:
            parts = out.get("allOf")
            out["allOf"] = [*(parts if isinstance(parts, list) else ()), {"anyOf": children}]
        else:
            out["anyOf"] = children


def _definition(schema: Json) -> str:
    """Name of the definition that a bare reference points to; empty for other schemas."""
    reference = schema.get("$ref") if isinstance(schema, Mapping) and len(schema) == 1 else None
    return reference.removeprefix("#/$defs/") if isinstance(reference, str) else ""


def _current_spelling(node: Mapping[str, Json]) -> dict[str, Json]:
    """Rewrites a schema of an older draft in the keywords of draft 2020-12."""
    schema = dict(node)
    for bound, exclusive in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
        if isinstance(schema.get(exclusive), bool):  # drafts 3 and 4
            excluded = schema.pop(exclusive)
            if excluded and bound in schema:
                schema[exclusive] = schema.pop(bound)
    if isinstance(schema.get("items"), list):  # tuples before 2020
        schema["prefixItems"] = schema.pop("items")
        if "additionalItems" in schema:
            schema["items"] = schema.pop("additionalItems")
    return schema


def disjoint(alternatives: list[Json]) -> bool:
    """True if no value can match two of these schemas, as far as types, constants and discriminators tell."""
    pairs = [(a, b) for i, a in enumerate(alternatives) for b in alternatives[:i]]
    return all(isinstance(a, Mapping) and isinstance(b, Mapping) and _apart(a, b) for a, b in pairs)


def _apart(a: Mapping[str, Json], b: Mapping[str, Json]) -> bool:
    types_a = _types(a)
    types_b = _types(b)
    if types_a is not None and types_b is not None and not types_a & types_b:
        return True
    values_a = _constants(a)
    values_b = _constants(b)
    if values_a is not None and values_b is not None:
        return not any(value in values_b for value in values_a)
    required = set(_names(a.get("required"))) & set(_names(b.get("required")))
    properties_a = a.get("properties")
    properties_b = b.get("properties")
    if not isinstance(properties_a, Mapping) or not isinstance(properties_b, Mapping):
        return False
    for name in required & properties_a.keys() & properties_b.keys():
        one = properties_a[name]
        other = properties_b[name]
        if isinstance(one, Mapping) and isinstance(other, Mapping) and _apart(one, other):
            return True
    return False


def _types(schema: Mapping[str, Json]) -> set[str] | None:
    types = schema.get("type")
    if types is None:
        return None
    names = {str(name) for name in (types if isinstance(types, list) else [types])}
    return names | {"integer"} if "number" in names else names


def _constants(schema: Mapping[str, Json]) -> list[Json] | None:
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) else None


def _names(value: Json) -> list[str]:
    return [name for name in value if isinstance(name, str)] if isinstance(value, list) else []


def matches_pattern(pattern: str, text: str) -> bool:
    """True if the pattern of `patternProperties` matches this name. An expression that Python cannot parse matches
    nothing."""
    try:
        return re.search(pattern, text, re.ASCII) is not None
    except re.error:
        return False
