"""The grammars of forced calls, in both syntaxes: every keyword that is enforced, and what becomes of the others."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from llguidance import LLMatcher
from tests.server_fakes import VOCAB, masks, tokenizer
from tests.tool_schemas import CLIENT_SCHEMAS, TOOLS, compact_choice, expected_note, relaxed

from outrider.engine.grammar import GrammarCompiler
from outrider.server.grammar_source import GrammarSource, GrammarText, build, close_objects
from outrider.server.string_formats import FORMATS, compiles
from outrider.server.tools import GEMMA_CLOSE, GEMMA_OPEN, GEMMA_QUOTE, GemmaCalls, JsonCalls
from outrider.types import OutriderError

TOKENIZERS = {gemma: tokenizer(gemma) for gemma in (False, True)}
COMPILERS = {gemma: GrammarCompiler(tok.json, VOCAB, tok.eos_ids) for gemma, tok in TOKENIZERS.items()}


def grammar(functions: list[tuple[str, Any, bool]], gemma: bool, most: int = 1, **more: Any) -> GrammarText:
    tok = TOKENIZERS[gemma]
    ids = {tag: tok.encode(tag)[0] for tag in (GEMMA_OPEN, GEMMA_CLOSE, GEMMA_QUOTE)}
    payload = json.dumps({"functions": functions, "most": most, "ids": ids, **more})
    return build(GrammarSource("gemma_calls" if gemma else "json_calls", payload, "tools"))


def accepts(text: str, answer: str, gemma: bool) -> bool:
    tok = TOKENIZERS[gemma]
    matcher = COMPILERS[gemma].compile(text).matcher()
    ids = tok.encode(answer)
    rows, valid = masks(matcher, ids)
    return valid == len(ids) and bool(rows[-1][tok.eos_ids[0]])


def spelled(value: Any) -> str:
    """Arguments as Gemma writes them."""
    if isinstance(value, str):
        return f"{GEMMA_QUOTE}{value}{GEMMA_QUOTE}"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{spelled(child)}" for key, child in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(spelled, value)) + "]"
    return json.dumps(value)


def call_of(arguments: Any, gemma: bool, name: str = "f") -> str:
    if gemma:
        return f"{GEMMA_OPEN}call:{name}{spelled(arguments)}{GEMMA_CLOSE}"
    return "<tool_call>" + json.dumps([{"name": name, "arguments": arguments}], ensure_ascii=False) + "</tool_call>"


DEFINITIONS = {
    "day": {"type": "integer", "minimum": 1, "maximum": 31},
    "node": {"type": "object", "properties": {"v": {"type": "integer"}, "next": {"$ref": "#/$defs/node"}}},
    "weird~/name": {"const": "w"},
    "chain": {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#/$defs/chain"}, {"type": "null"}]}}, "required": ["next"]},
}  # fmt: skip
# a schema of the property `x`; values that it takes, and values that it refuses
CASES: dict[str, tuple[Any, list[Any], list[Any]]] = {
    "integer bounds": ({"type": "integer", "minimum": 3, "maximum": 120}, [3, 99, 120], [2, 121, -5, 3.5]),
    "exclusive bounds": ({"type": "number", "exclusiveMinimum": 0, "maximum": 1}, [0.5, 1], [0, 1.5, -1]),
    "draft 4 bounds": ({"type": "integer", "minimum": 0, "exclusiveMinimum": True, "maximum": 9}, [1, 9], [0, 10]),
    "multiple": ({"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 50}, [0, 15], [3, 55]),
    "length": ({"type": "string", "minLength": 2, "maxLength": 3}, ["ab", "äöü"], ["a", "abcd"]),
    "pattern": ({"type": "string", "pattern": "^[a-z]+/[0-9]{2}$"}, ["ab/12"], ["ab/1", "xab/123", "/12"]),
    "pattern inside": ({"type": "string", "pattern": "b|^c"}, ["abc", "b", "cx"], ["a", "xc"]),
    "pattern and length": ({"type": "string", "pattern": "^a", "maxLength": 3}, ["a", "abc"], ["b", "abcd"]),
    "date": ({"type": "string", "format": "date"}, ["2024-02-29", "2026-12-31"], ["2023-02-30", "x", "2026-1-1"]),
    "uuid": ({"type": "string", "format": "uuid"}, ["123e4567-e89b-12d3-a456-426614174000"], ["123e4567"]),
    "enum": ({"enum": ["a b", 3, None, True, "🦊"]}, ["a b", 3, None, True, "🦊"], ["a", 4, False]),
    "enum of a type": ({"type": "string", "enum": ["a", "b", None]}, ["a", "b"], [None, "c"]),
    "const object": ({"const": {"a": [1, "b"]}}, [{"a": [1, "b"]}], [{"a": [1]}, {}]),
    "types": ({"type": ["integer", "null"], "minimum": 2}, [2, None], [1, "2"]),
    "any": ({}, [1, "a", None, [1, {"k": "v"}], {"k": {}}], []),
    "array counts": ({"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 3}, [[1], [1, 2, 3]], [[], [1, 2, 3, 4], ["a"]]),
    "tuple": ({"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}], "items": False, "minItems": 1}, [[1], [1, "a"]], [[], ["a"], [1, "a", 2]]),
    "draft 7 tuple": ({"type": "array", "items": [{"type": "integer"}], "additionalItems": {"type": "boolean"}, "minItems": 1}, [[1], [1, True, False]], [[True], [1, 2]]),
    "no others": ({"type": "object", "properties": {"a": {"type": "integer"}}}, [{}, {"a": 1}], [{"b": 1}]),
    "others": ({"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": {"type": "string"}}, [{"a": 1, "b": "x"}, {"bc": "y"}], [{"a": "x"}, {"b": 1}]),
    "map": ({"type": "object", "additionalProperties": {"type": "integer"}}, [{}, {"k": 1, "Content-Type": 2}], [{"k": "v"}]),
    "names": ({"type": "object", "patternProperties": {"^n_": {"type": "integer"}}, "additionalProperties": False}, [{"n_a": 1}, {}], [{"m": 1}, {"n_a": "x"}]),
    "record of names": ({"type": "object", "propertyNames": {"enum": ["p", "q"]}, "additionalProperties": {"type": "integer"}}, [{"p": 1}, {"p": 1, "q": 2}], [{"r": 1}]),
    "property counts": ({"type": "object", "properties": {k: {"type": "integer"} for k in "abc"}, "minProperties": 1, "maxProperties": 2}, [{"a": 1}, {"b": 1, "c": 2}], [{}, {"a": 1, "b": 2, "c": 3}]),
    "required of others": ({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["b"], "additionalProperties": {"type": "integer"}}, [{"b": 1}], [{"a": 1}, {"b": "x"}]),
    "reference": ({"$ref": "#/$defs/day"}, [1, 31], [0, 32]),
    "escaped reference": ({"$ref": "#/$defs/weird~0~1name"}, ["w"], ["x"]),
    "reference and bound": ({"$ref": "#/$defs/day", "minimum": 10, "description": "d"}, [10, 31], [9, 32]),
    "recursive": ({"$ref": "#/$defs/node"}, [{"v": 1, "next": {"next": {"v": 2}}}], [{"next": 1}]),
    "anyOf": ({"anyOf": [{"type": "integer", "maximum": 5}, {"type": "string", "maxLength": 1}]}, [5, "a"], [6, "ab", None]),
    "anyOf beside properties": ({"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]}, [{"a": 1}, {"b": 1}, {"a": 1, "b": 2}], [{}]),
    "oneOf by a constant": ({"oneOf": [{"type": "object", "properties": {"k": {"const": "i"}, "v": {"type": "integer"}}, "required": ["k", "v"]}, {"type": "object", "properties": {"k": {"const": "s"}, "v": {"type": "string"}}, "required": ["k", "v"]}]}, [{"k": "i", "v": 1}, {"k": "s", "v": "a"}], [{"k": "i", "v": "a"}, {"k": "t", "v": 1}]),
    "allOf": ({"allOf": [{"type": "integer", "minimum": 2}, {"maximum": 4}]}, [2, 4], [1, 5]),
    "allOf of objects": ({"allOf": [{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}, {"properties": {"b": {"type": "integer"}, "a": {"maximum": 3}}}]}, [{"a": 3}, {"a": 1, "b": 2}], [{"b": 1}, {"a": 4}]),
    "Gemini's types": ({"type": "INTEGER"}, [1], ["a"]),
    "recursive in anyOf": ({"$ref": "#/$defs/chain"}, [{"next": None}, {"next": {"next": None}}], [{"next": 1}, {}]),
    "digits of ASCII": ({"type": "string", "pattern": r"^\d\w[\w-]\W$"}, ["1a-!"], ["١a-!", "1é-!", "1a-a"]),
    "never": ({"type": "object", "properties": {"a": {"not": {}}, "b": {"type": "integer"}}}, [{"b": 1}, {}], [{"a": 1}]),
}  # fmt: skip


@pytest.mark.parametrize("gemma", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_keywords_are_enforced(case: str, gemma: bool) -> None:
    """Gemma's grammar refused bounds, patterns of parts, formats and maps by name; both syntaxes take the same values."""
    schema, good, bad = CASES[case]
    root = {"type": "object", "properties": {"x": schema}, "required": ["x"], "$defs": DEFINITIONS}
    if case == "property counts" and not gemma:
        assert grammar([("f", root, False)], gemma).unenforced == "f: minProperties, maxProperties"
        return
    built = grammar([("f", root, True)], gemma)
    assert built.unenforced == ""
    for value in good:
        assert accepts(built.text, call_of({"x": value}, gemma), gemma), value
    for value in bad:
        assert not accepts(built.text, call_of({"x": value}, gemma), gemma), value


UNENFORCED = {
    "not": {"not": {"const": 1}},
    "uniqueItems": {"type": "array", "uniqueItems": True},
    "if": {"if": {"minimum": 3}, "then": {"maximum": 9}},
    "contains": {"type": "array", "contains": {"type": "integer"}},
    "dependentRequired": {"type": "object", "dependentRequired": {"a": ["b"]}},
    "format": {"type": "string", "format": "cuid2"},
    "pattern": {"type": "string", "pattern": "^(?=.*[0-9]).{8,}$"},
    "type": {"type": "strin"},
    "oneOf": {"oneOf": [{"type": "string"}, {"type": "string", "minLength": 3}]},
    "$ref": {"$ref": "https://example.com/schema"},
    "$ref ": {"$ref": "#/properties/x"},
    "minimum": {"type": "integer", "minimum": "one"},
}


@pytest.mark.parametrize("gemma", [False, True])
@pytest.mark.parametrize("keyword", UNENFORCED)
def test_other_keywords_are_ignored_and_named_unless_strict(keyword: str, gemma: bool) -> None:
    """A request was refused for any of them, though vLLM and llama.cpp answer it."""
    root = {"type": "object", "properties": {"x": UNENFORCED[keyword], "y": {"const": 7}}, "required": ["y"]}
    built = grammar([("f", root, False), ("g", {"type": "object"}, False)], gemma)
    assert built.unenforced == f"f: {keyword.strip()}"
    assert accepts(built.text, call_of({"y": 7}, gemma), gemma)
    assert not accepts(built.text, call_of({"y": 8}, gemma), gemma)
    with pytest.raises(OutriderError, match=r"tool 'f': .*not supported"):
        grammar([("f", root, True)], gemma)


@pytest.mark.parametrize("gemma", [False, True])
def test_annotations_restrict_nothing(gemma: bool) -> None:
    notes = {
        "title": "T",
        "default": 1,
        "examples": [1],
        "deprecated": True,
        "x-order": 2,
        "$comment": "c",
        "nullable": True,
    }
    schema = {"type": "integer", "format": "int32", "uniqueItems": False, "propertyNames": {"type": "string"}, **notes}
    root = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "$id": "i",
        "type": "object",
        "properties": {"x": schema},
    }
    assert grammar([("f", root, True)], gemma).unenforced == ""


@pytest.mark.parametrize("gemma", [False, True])
def test_a_schema_that_nothing_matches_is_left_out_as_a_whole(gemma: bool) -> None:
    root = {"type": "object", "properties": {"x": {"type": "integer", "minimum": 9, "maximum": 1}}, "required": ["x"]}
    built = grammar([("f", root, False), ("g", {"properties": {"y": {"const": 1}}, "required": ["y"]}, False)], gemma)
    assert built.unenforced == "f: its whole schema"
    assert accepts(built.text, call_of({"anything": [1]}, gemma), gemma)
    assert not accepts(built.text, call_of({"y": 2}, gemma, "g"), gemma)
    with pytest.raises(OutriderError, match="tool 'f'"):
        grammar([("f", root, True)], gemma)


@pytest.mark.parametrize("gemma", [False, True])
def test_a_function_without_parameters_gets_none(gemma: bool) -> None:
    built = grammar([("f", {"type": "object", "properties": {}}, False)], gemma)
    assert accepts(built.text, call_of({}, gemma), gemma) and not accepts(built.text, call_of({"a": 1}, gemma), gemma)


def test_each_function_has_its_own_definitions() -> None:
    """The second function's reference led to the definition of that name in the first."""
    item = {"type": "object", "properties": {"a": {"$ref": "#/$defs/item"}}}
    functions = [("f", {**item, "$defs": {"item": {"type": "integer"}}}, True)]
    functions.append(("g", {**item, "$defs": {"item": {"type": "boolean"}}}, True))
    for gemma in (False, True):
        text = grammar(functions, gemma).text
        for name, value, good in (("f", 1, True), ("f", True, False), ("g", 1, False), ("g", True, True)):
            assert accepts(text, call_of({"a": value}, gemma, name), gemma) is good


def test_several_calls_and_other_functions() -> None:
    functions = [("f", {"type": "object", "properties": {"u": {"type": "integer"}}}, False)]
    one = call_of({"u": 1}, True)
    assert accepts(grammar(functions, True, most=2).text, one + one, True)
    assert not accepts(grammar(functions, True, most=2).text, one * 3, True)
    assert not accepts(grammar(functions, True).text, call_of({}, True, "h"), True)
    pair = call_of({"u": 1}, False).replace("}]", '}, {"name": "f", "arguments": {}}]')
    assert accepts(grammar(functions, False, most=2).text, pair, False)
    assert not accepts(grammar(functions, False).text, pair, False)


def test_alternatives_beside_properties_stay_open() -> None:
    """An alternative that lists properties was closed, so that the properties beside it could not be written."""
    schema = {"properties": {"kind": {}}, "required": ["kind"], "anyOf": [{"properties": {"a": {}}}]}
    assert close_objects(schema)["anyOf"] == schema["anyOf"]


FORMAT_EXAMPLES = {
    "date-time": (["2026-11-19T04:35:36Z", "2026-01-01t00:00:00.5+01:00"], ["2026-11-19", "2026-11-19T24:00:00Z"]),
    "time": (["23:59:59Z"], ["23:60:00Z", "23:59"]),
    "duration": (["P1Y2M3DT4H", "PT5M", "P2W"], ["P", "PT", "1D"]),
    "email": (["a.b+c@example.org"], ["a@", "@b", "a b@c.de"]),
    "hostname": (["a-b.example"], ["-a", "a..b"]),
    "ipv4": (["255.0.10.1"], ["256.0.0.1", "1.2.3"]),
    "ipv6": (["::", "::1", "2001:db8::8:800:200c:417a", "::ffff:1.2.3.4"], [":::", "1::2::3", "12345::"]),
    "uri": (["https://a.example:8080/b/c?d=e#f", "mailto:a@b.c", "http://[::1]/"], ["//a", "https://a b", "a"]),
}


@pytest.mark.parametrize("name", FORMAT_EXAMPLES)
def test_formats_of_strings(name: str) -> None:
    good, bad = FORMAT_EXAMPLES[name]
    root = {"properties": {"x": {"type": "string", "format": name}}, "required": ["x"]}
    text = grammar([("f", root, True)], True).text
    for value in good:
        assert accepts(text, call_of({"x": value}, True), True), value
    for value in bad:
        assert not accepts(text, call_of({"x": value}, True), True), value


def test_formats_are_those_of_json_answers() -> None:
    """Both syntaxes enforce the same formats; llguidance decides which."""
    for name in FORMATS:
        schema = {"type": "string", "format": name}
        assert not LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(json.dumps(schema)), None), name


@pytest.mark.parametrize("pattern", ["(?=a)b", r"(a)\1", "(^a|b)", r"\bword\b", "[", "a{"])
def test_patterns_without_an_automaton(pattern: str) -> None:
    assert not compiles(pattern)


def test_an_enum_of_thousands_of_values_is_followed() -> None:
    """The compiler follows 2,000 alternatives of a rule: the call ended in an error after its first token."""
    values: list[Any] = [*(f"value {i}" for i in range(3000)), *range(3000), None, "", [1]]
    built = grammar([("f", {"properties": {"x": {"enum": values}}, "required": ["x"]}, True)], gemma=True)
    for value in ("value 2999", 2999, None, "", [1]):
        assert accepts(built.text, call_of({"x": value}, gemma=True), gemma=True)
    assert not accepts(built.text, call_of({"x": "value"}, gemma=True), gemma=True)
    assert not accepts(built.text, call_of({"x": 3000}, gemma=True), gemma=True)


def _nested(depth: int) -> Any:
    schema: Any = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


@pytest.mark.parametrize("gemma", [False, True])
@pytest.mark.parametrize("schema", [_nested(300), {"type": "object", "minProperties": 10**6}], ids=["deep", "counts"])
def test_a_schema_that_is_too_complex_is_left_out_as_a_whole(schema: Any, gemma: bool) -> None:
    """Both were a 400, with the name of a Python exception."""
    built = grammar([("f", schema, False)], gemma)
    assert built.unenforced in ("f: its whole schema", "")
    with_strict = [("f", _nested(300), True)]
    with pytest.raises(OutriderError, match="tool 'f'"):
        grammar(with_strict, gemma)


CHECKED_FORMATS = ("email", "ipv4", "ipv6", "uuid")  # jsonschema reads times and dates in its own way


@pytest.mark.parametrize("gemma", [False, True])
@pytest.mark.parametrize("tool", TOOLS + CLIENT_SCHEMAS, ids=[tool["name"] for tool in TOOLS + CLIENT_SCHEMAS])
def test_calls_of_clients_tools_are_valid(tool: dict[str, Any], gemma: bool) -> None:
    """Sixty published schemas, and fifty of pydantic and zod: none is refused, and calls that follow the grammar
    validate. A class that contains itself in an Optional or a Union overflowed the writer's stack."""
    import jsonschema

    name = tool["name"]
    built = grammar([(name, tool["parameters"], False)], gemma)
    assert built.unenforced == expected_note(tool, gemma)
    validator = jsonschema.Draft202012Validator(relaxed(tool), format_checker=jsonschema.FormatChecker(CHECKED_FORMATS))
    tok = TOKENIZERS[gemma]
    compiled = COMPILERS[gemma].compile(built.text)
    for seed in range(2):
        matcher = compiled.matcher()
        rng = random.Random(f"{name}-{seed}")
        ids: list[int] = []
        while not matcher.done and len(ids) < 6000:
            ids.append(compact_choice(tok, masks(matcher, [])[0][0], rng))
            matcher.advance(ids[-1:])
        assert matcher.done and matcher.failed is None
        parser = GemmaCalls() if gemma else JsonCalls()
        parts = [*parser.feed(tok.decode(ids, keep_special=True)), *parser.finish(True)]
        assert [part.text for part in parts if part.kind == "call"] == [name]
        arguments = json.loads("".join(part.text for part in parts if part.kind == "args"))
        validator.validate(arguments)
