"""Thoughts and tool calls, case by case (the cutting of the text is tested in
tests/property/test_output_chunking.py)."""

from __future__ import annotations

import json

import pytest

from outrider.server import reasoning, tools
from outrider.server.answer import arguments_of, encoded
from outrider.server.output import OutputPart, Parser, ParserChain, join
from outrider.server.reasoning import GEMMA4_CHANNEL, THINK_TAGS, Thoughts
from outrider.server.tools import GemmaCalls, JsonCalls


def run(parser: Parser, text: str, complete: bool = True) -> list[tuple[str, str]]:
    return [(p.kind, p.text) for p in join([*parser.feed(text), *parser.finish(complete)])]


def calls(parser: Parser, text: str) -> list[tuple[str, object]]:
    out: list[list[str]] = []
    for part in [*parser.feed(text), *parser.finish(True)]:
        if part.kind == "call":
            out.append([part.text, ""])
        elif part.kind == "args":
            out[part.index][1] += part.text
    return [(name, json.loads(args)) for name, args in out]


THOUGHTS = {
    "think tags": (THINK_TAGS, "", "<think>\nhm\n</think>\n\nYes.", [("reasoning", "hm"), ("content", "Yes.")]),
    "opened by the template": (THINK_TAGS, "<think>\n", "hm</think>Yes.", [("reasoning", "hm"), ("content", "Yes.")]),
    "only at the start": (THINK_TAGS, "", "Yes <think>no</think>", [("content", "Yes <think>no</think>")]),
    "never closed": (THINK_TAGS, "", "<think>hm, a <", [("reasoning", "hm, a <")]),
    "no thoughts keep their blanks": (THINK_TAGS, "", " \n Yes. ", [("content", " \n Yes. ")]),
    "channel": (GEMMA4_CHANNEL, "", "<|channel>thought\nhm\n<channel|>Yes.", [("reasoning", "hm"), ("content", "Yes.")]),
    "empty channel": (GEMMA4_CHANNEL, "", "<|channel>thought\n<channel|>Yes.", [("content", "Yes.")]),
    "channel later": (GEMMA4_CHANNEL, "", "A <|channel>thought\nb<channel|> c", [("content", "A "), ("reasoning", "b"), ("content", "c")]),
    "a call ends the channel": (
        GEMMA4_CHANNEL, "", "<|channel>thought\nhm<|tool_call>x", [("reasoning", "hm"), ("content", "<|tool_call>x")],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", THOUGHTS)
def test_thoughts(name: str) -> None:
    form, prompt, text, want = THOUGHTS[name]
    assert run(Thoughts(form, prompt), text) == want


def test_what_looked_like_a_tag_stays_in_its_place() -> None:
    assert run(Thoughts(THINK_TAGS), "<<b and") == [("content", "<<b and")]


GEMMA = {
    "all kinds of values": (
        'call:f{s:<|"|>a "b" \\ {c}, [d]\n<|"|>,n:-1.5e3,i:7,t:true,z:null,l:[1,<|"|>x<|"|>,[]],o:{k:{}}}',
        {"s": 'a "b" \\ {c}, [d]\n', "n": -1500.0, "i": 7, "t": True, "z": None, "l": [1, "x", []], "o": {"k": {}}},
    ),
    "no arguments": ("call:f{}", {}),
    "blanks": ('call: f { a : 1 , b : <|"|>x<|"|> }', {"a": 1, "b": "x"}),
    "python's words and bare strings": (
        "call:f{a:None,b:True,c:Paris,d:007}",
        {"a": None, "b": True, "c": "Paris", "d": "007"},
    ),
    "quoted keys and JSON strings": ('call:f{<|"|>a<|"|>:1,"b":"x\\n\\"y"}', {"a": 1, "b": 'x\n"y'}),
    "braces left open": ("call:f{a:[1,2", {"a": [1, 2]}),
    "a closing tag inside a string": ('call:f{a:<|"|><tool_call|><|"|>}', {"a": "<tool_call|>"}),
}


@pytest.mark.parametrize("name", GEMMA)
def test_gemma_arguments_become_json(name: str) -> None:
    text, want = GEMMA[name]
    assert calls(GemmaCalls(), f"<|tool_call>{text}<tool_call|>") == [("f", want)]


def test_gemma_calls_among_text() -> None:
    text = "Let me look.\n<|tool_call>call:f{a:1}<tool_call|>\n<|tool_call>call:g{}<tool_call|>"
    assert run(GemmaCalls(), text) == [
        ("content", "Let me look."),
        ("call", "f"),
        ("args", '{"a":1}'),
        ("call", "g"),
        ("args", "{}"),
    ]


JSON = {
    "an object": '{"name": "f", "arguments": {"a": "}"}}',
    "a list": '\n[{"name": "f", "arguments": {"a": "}"}}]\n',
    "parameters first": '{"parameters": {"a": "}"}, "id": 3, "name": "f"}',
    "arguments as a string": '{"name": "f", "arguments": "{\\"a\\": \\"}\\"}"}',
}


@pytest.mark.parametrize("name", JSON)
def test_json_calls(name: str) -> None:
    assert calls(JsonCalls(), f"<tool_call>{JSON[name]}</tool_call>") == [("f", {"a": "}"})]


@pytest.mark.parametrize(
    "parser, text",
    [
        (JsonCalls, "<tool_call>no call</tool_call> and more"),
        (JsonCalls, '<tool_call>{"arguments": {}}</tool_call>'),
        (JsonCalls, '<tool_call>{"name": "not a name!"}</tool_call>'),
        (JsonCalls, "5 <tool_call"),
        (JsonCalls, 'as in <tool_call>{"a": '),
        (JsonCalls, "as in <tool_call>x </tool_call> "),
        (GemmaCalls, "<|tool_call>not a call<tool_call|> and more"),
        (GemmaCalls, "<|tool_call>call:f"),
        (GemmaCalls, "as in <|tool_call>call: "),
        (GemmaCalls, "  "),
    ],
)
def test_what_is_no_call_is_given_back(parser: type[JsonCalls], text: str) -> None:
    assert run(parser(), text) == [("content", text)]


def test_a_call_without_its_last_brace_ends_with_its_tag() -> None:
    """The text behind it, further calls included, was dropped."""
    text = '<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call><tool_call>{"name": "g"}</tool_call>'
    assert calls(JsonCalls(), text) == [("f", {"a": 1}), ("g", {})]


BROKEN = {
    "arguments": ('{"name": "f", "arguments": {"a": {"b": 1}', [("f", {"a": {"b": 1}})]),
    "arguments before the name": ('{"arguments": {"a": 1}, "name": "f"', [("f", {"a": 1})]),
    "no arguments": ('{"name": "f"', [("f", {})]),
    "no name": ('{"arguments": {"a": [', []),
    "no JSON": ("{hello", []),
    "no JSON behind a call": ('{"name": "f"}, {"name": ', [("f", {})]),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_left_open_ends_with_the_tag(name: str) -> None:
    """It swallowed what followed, further calls included, up to the end of the text."""
    block, parts = BROKEN[name]
    text = f"<tool_call>{block}</tool_call>"
    last = '<tool_call>{"name": "g", "arguments": {}}</tool_call>'
    assert calls(JsonCalls(), f"{text} tail {last}") == [*parts, ("g", {})]
    shown = "".join(part for kind, part in run(JsonCalls(), f"{text} tail {last}") if kind == "content")
    assert shown == (" tail" if parts else f"{text} tail")


@pytest.mark.parametrize(
    "value, meant",
    [
        ('"a\\ud800"', {"x": "a?"}),
        ("[NaN, -Infinity]", {"x": [None, None]}),
        ("1e999", {}),
        ("[" * 5000 + "]" * 5000, {}),
    ],
)
def test_arguments_that_json_cannot_say_do_not_break_an_answer(value: str, meant: object) -> None:
    """An answer with them was lost: they could not be written."""
    assert encoded(arguments := arguments_of(f'{{"x": {value}}}')) and arguments == meant
    for text in (f'"name": "f", "arguments": {{"x": {value}}}', f'"arguments": {{"x": {value}}}, "name": "f"'):
        parts = run(JsonCalls(), f"<tool_call>{{{text}}}</tool_call>")
        assert encoded([part for _, part in parts])


def test_a_call_behind_a_stray_bracket_is_a_call() -> None:
    """The bracket and the tag's first character were read together, so the tag was text."""
    text = '<tool_call><<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    assert run(JsonCalls(), text) == [("content", "<tool_call><"), ("call", "f"), ("args", "{}")]


LONG = "some words, " * 500
IN_SPANS = {
    "content": (Thoughts(THINK_TAGS), LONG),
    "thoughts": (Thoughts(GEMMA4_CHANNEL), f"<|channel>thought\n{LONG}<channel|>{LONG}"),
    "gemma call": (GemmaCalls(), f'{LONG}<|tool_call>call:f{{a:<|"|>{LONG}<|"|>}}<tool_call|>'),
    "gemma call with JSON strings": (GemmaCalls(), f'<|tool_call>call:f{{a:"{LONG}"}}<tool_call|>'),
    "JSON call": (JsonCalls(), f'{LONG}<tool_call>{{"name": "f", "arguments": {{"a": "{LONG}"}}}}</tool_call>'),
}


@pytest.mark.parametrize("name", IN_SPANS)
def test_text_is_passed_on_in_spans(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every character of a text became a part of its own, which were joined then."""
    parser, text = IN_SPANS[name]
    num_parts = 0

    def counted(kind: str, text: str, index: int = 0) -> OutputPart:
        nonlocal num_parts
        num_parts += 1
        return OutputPart(kind, text, index)  # type: ignore[arg-type]

    for module in (reasoning, tools):
        monkeypatch.setattr(module, "OutputPart", counted)
    parts = [*parser.feed(text), *parser.finish(True)]
    assert sum(len(part.text) for part in parts) >= len(LONG.strip())
    assert num_parts < 30


def test_what_cannot_become_a_call_is_not_held_back() -> None:
    assert JsonCalls().feed("<tool_call>{ hello") == [OutputPart("content", "<tool_call>{ hello")]


def test_an_empty_list_means_no_call() -> None:
    assert run(JsonCalls(), "<tool_call>[]</tool_call>") == []


def test_a_call_cut_by_the_limit_stays_cut() -> None:
    assert run(JsonCalls(), '<tool_call>{"name": "f", "arguments": {"a": "b', complete=False)[-1] == (
        "args",
        '{"a": "b',
    )
    assert calls(JsonCalls(), '<tool_call>{"name": "f", "arguments": {"a": ["b') == [("f", {"a": ["b"]})]


def test_thoughts_then_calls() -> None:
    parser = ParserChain(Thoughts(GEMMA4_CHANNEL), GemmaCalls())
    parts = run(parser, "<|channel>thought\nuse f<|tool_call>call:f{}<tool_call|>")
    assert parts == [("reasoning", "use f"), ("call", "f"), ("args", "{}")] and parser.calls == 1


def test_parts_join() -> None:
    assert join([OutputPart("args", "a"), OutputPart("args", "b"), OutputPart("args", "c", 1)]) == [
        OutputPart("args", "ab"),
        OutputPart("args", "c", 1),
    ]
