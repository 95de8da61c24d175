"""The conjunction of two schemas as one schema without `allOf` and `$ref` at the top level.

The grammar of Gemma's calls has no intersection, so `allOf`, and constraints beside `$ref` or `anyOf`, are merged
before rules are written. Inputs are schemas as tool_schema.py returns them. Several `pattern`s or `format`s become
lists.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import cast

from ..types import Json
from .tool_schema import matches_pattern

MAX_ALTERNATIVES = 64
MAX_DEPTH = 24
Schema = dict[str, Json]


class TooComplexToMerge(Exception):
    """The conjunction would need too many alternatives, or recurses for ever."""


class SchemaMerger:
    def __init__(self, resolve: Callable[[str], Json]) -> None:
        self._resolve = resolve

    def flatten(self, schema: Json, depth: int = 0) -> Json:
        """The schema without `$ref` and `allOf` at the top level; nothing stands beside an `anyOf`. False: no value
        matches."""
        if not isinstance(schema, Mapping):
            return schema
        if depth > MAX_DEPTH:
            raise TooComplexToMerge
        plain: Schema = {key: value for key, value in schema.items() if key not in ("$ref", "allOf", "anyOf", "$defs")}
        out: Json = plain
        if "$ref" in schema:
            out = self.both(out, self._resolve(str(schema["$ref"])), depth + 1)
        for part in _list(schema.get("allOf")):
            out = self.both(out, part, depth + 1)
        if "anyOf" not in schema:
            return out
        alternatives = _list(schema["anyOf"])
        if out == {}:  # nothing to merge: a reference stays one, so a schema may contain itself
            return {"anyOf": alternatives}
        return _any_of([self.both(out, part, depth + 1) for part in alternatives])

    def both(self, a: Json, b: Json, depth: int = 0) -> Json:
        """A schema of the values that match both schemas."""
        if a is False or b is False:
            return False
        if a is True or a == {} or a == b:
            return self.flatten(b, depth + 1)
        if b is True or b == {}:
            return self.flatten(a, depth + 1)
        first = self.flatten(a, depth + 1)
        second = self.flatten(b, depth + 1)
        if first is True:
            return second
        if second is True:
            return first
        if not isinstance(first, Mapping) or not isinstance(second, Mapping):
            return False
        if "anyOf" in first:
            return _any_of([self.both(part, second, depth + 1) for part in _list(first["anyOf"])])
        if "anyOf" in second:
            return _any_of([self.both(first, part, depth + 1) for part in _list(second["anyOf"])])
        return self._plain(first, second, depth + 1)

    def _lazily(self, a: Json, b: Json) -> Json:
        """The conjunction of two subschemas, merged only when its rule is written: they may be recursive."""
        if a is False or b is False:
            return False
        if a is True or a == {} or a == b:
            return b
        if b is True or b == {}:
            return a
        return {"allOf": [a, b]}

    def _plain(self, a: Mapping[str, Json], b: Mapping[str, Json], depth: int) -> Json:
        out: Schema = {**a, **b}
        for keyword in a.keys() & b.keys():
            first = a[keyword]
            second = b[keyword]
            if keyword in ("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties"):
                out[keyword] = max(_number(first), _number(second))
            elif keyword in ("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties"):
                out[keyword] = min(_number(first), _number(second))
            elif keyword == "multipleOf":
                out[keyword] = _common_multiple(_number(first), _number(second))
            elif keyword in ("pattern", "format") or keyword == "required":
                out[keyword] = list(dict.fromkeys([*_texts(first), *_texts(second)]))
            elif keyword == "type":
                shared = _shared_types(_texts(first), _texts(second))
                if not shared:
                    return False
                out[keyword] = cast(Json, shared)
        values = _shared_values(a, b)
        if values == []:
            return False
        if values is not None:
            out.pop("const", None)
            out["enum"] = values
        self._properties(a, b, out)
        self._items(a, b, out)
        return out

    def _properties(self, a: Mapping[str, Json], b: Mapping[str, Json], out: Schema) -> None:
        names = [*_map(a.get("properties")), *_map(b.get("properties"))]
        if names:
            out["properties"] = {name: self._lazily(_property(a, name), _property(b, name)) for name in names}
        if "additionalProperties" in a and "additionalProperties" in b:
            out["additionalProperties"] = self._lazily(a["additionalProperties"], b["additionalProperties"])
        if "patternProperties" in a and "patternProperties" in b:
            first = _map(a["patternProperties"])
            second = _map(b["patternProperties"])
            out["patternProperties"] = {
                pattern: self._lazily(first.get(pattern, True), second.get(pattern, True))
                for pattern in {**first, **second}
            }

    def _items(self, a: Mapping[str, Json], b: Mapping[str, Json], out: Schema) -> None:
        if "items" in a and "items" in b:
            out["items"] = self._lazily(a["items"], b["items"])
        first = _list(a.get("prefixItems"))
        second = _list(b.get("prefixItems"))
        if first and second:
            count = max(len(first), len(second))
            first = [*first, *[a.get("items", True)] * (count - len(first))]
            second = [*second, *[b.get("items", True)] * (count - len(second))]
            out["prefixItems"] = [self._lazily(one, other) for one, other in zip(first, second, strict=True)]


def _any_of(alternatives: list[Json]) -> Json:
    flat: list[Json] = []
    for part in alternatives:
        flat += _list(part["anyOf"]) if isinstance(part, Mapping) and part.keys() == {"anyOf"} else [part]
    possible = [part for part in flat if part is not False]
    if len(possible) > MAX_ALTERNATIVES:
        raise TooComplexToMerge
    if not possible:
        return False
    return possible[0] if len(possible) == 1 else {"anyOf": possible}


def _property(schema: Mapping[str, Json], name: str) -> Json:
    """A schema's rules for the property of this name."""
    properties = _map(schema.get("properties"))
    if name in properties:
        return properties[name]
    for pattern, child in _map(schema.get("patternProperties")).items():
        if matches_pattern(pattern, name):
            return child
    return schema.get("additionalProperties", True)


def _shared_types(first: list[str], second: list[str]) -> list[str]:
    shared = [name for name in first if name in second or (name == "integer" and "number" in second)]
    return shared + [name for name in second if name == "integer" and "number" in first and name not in shared]


def _shared_values(a: Mapping[str, Json], b: Mapping[str, Json]) -> list[Json] | None:
    """The constants that both schemas allow; None if neither lists any."""
    listed = [
        [schema["const"]] if "const" in schema else _list(schema["enum"])
        for schema in (a, b)
        if "const" in schema or "enum" in schema
    ]
    if len(listed) < 2:
        return listed[0] if listed else None
    return [value for value in listed[0] if any(same_json(value, other) for other in listed[1])]


def same_json(a: Json, b: Json) -> bool:
    """Equality of JSON values: 1 equals 1.0, but not true."""
    return a == b and isinstance(a, bool) == isinstance(b, bool)


def _common_multiple(a: float, b: float) -> float:
    if isinstance(a, int) and isinstance(b, int):
        return math.lcm(a, b)
    if (a / b).is_integer():
        return a
    if (b / a).is_integer():
        return b
    raise TooComplexToMerge


def _number(value: Json) -> float:
    assert isinstance(value, (int, float))
    return value


def _texts(value: Json) -> list[str]:
    return [str(text) for text in value] if isinstance(value, list) else [str(value)]


def _list(value: Json) -> list[Json]:
    return value if isinstance(value, list) else []


def _map(value: Json) -> Mapping[str, Json]:
    return value if isinstance(value, Mapping) else {}
