"""A model's syntax of thoughts and tool calls, and the text that describes tools to chat templates without tool
support."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ..engine.text import Tokenizer
from ..types import Json, OutriderError
from .reasoning import GEMMA4_CHANNEL, THINK_TAGS, ThoughtFormat
from .tools import GEMMA_OPEN, JSON_CLOSE, JSON_OPEN

Content = str | list[Json]  # a message's content as chat templates read it: text, or parts with images among them
TOOLS_PROMPT = """You can call functions. These are available:
<tools>{tools}</tools>

When a function is needed, answer with nothing but a list of calls in this format, with arguments of the right types:
<tool_call>[{{"name": "function_name", "arguments": {{"argument": "value"}}}}]</tool_call>
If no function is needed, answer the user directly."""


# Tokens before the prefix, before the suffix and before what the model writes, by family.
MARKS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek-Coder
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # Code Llama
)
# End tokens of infilled text, besides the model's own: padding, and the beginning of another file.
ENDS = (
    "<|fim_pad|>",
    "<fim_pad>",
    "<|repo_name|>",
    "<|file_sep|>",
    "<|file_separator|>",
    "<file_sep>",
    "<|endoftext|>",
    "▁<EOT>",
)


@dataclass(frozen=True)
class Dialect:
    """Syntax of thoughts and tool calls of one model, derived from its vocabulary and template."""

    tools: Literal["gemma4", "json"]
    thoughts: ThoughtFormat
    template_tools: bool  # the chat template writes the tools into the prompt
    turns: bool  # the chat template refuses neighbours of the same role

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Dialect:
        gemma = len(tokenizer.encode(GEMMA_OPEN, bos=False)) == 1
        function: Json = {"name": "zq_probe", "description": "", "parameters": {"type": "object", "properties": {}}}
        probe: Json = {"type": "function", "function": function}

        def rendered(users: int, tools: list[Json]) -> str | None:
            """The rendered conversation; None: the template refuses it."""
            try:
                return tokenizer.render([{"role": "user", "content": "x"}] * users, tools=tools or None)
            except OutriderError:
                return None

        shown = "zq_probe" in (rendered(1, [probe]) or "")
        turns = rendered(1, []) is not None and rendered(2, []) is None
        return cls("gemma4" if gemma else "json", GEMMA4_CHANNEL if gemma else THINK_TAGS, shown, turns)


def in_turns(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages for templates with strictly alternating turns (Gemma 3, Mistral): consecutive messages of one role, as
    agents send them, are joined; a system message after the first turn becomes the user's."""
    out: list[dict[str, Any]] = []
    for message in messages:
        role = message["role"]
        if role == "system" and any(earlier["role"] != "system" for earlier in out):
            role = "user"
        if out and role != "tool" and out[-1]["role"] == role:
            last = out[-1]
            calls = [*last.get("tool_calls", []), *message.get("tool_calls", [])]
            out[-1] = {**last, "content": joined(last["content"], message["content"])}
            if calls:
                out[-1]["tool_calls"] = calls
        else:
            out.append({**message, "role": role})
    return out


def joined(first: Content, second: Content) -> Content:
    """Joins the contents of two messages: texts as paragraphs, anything else as a list of parts."""
    if isinstance(first, str) and isinstance(second, str):
        return "\n\n".join(filter(None, (first, second)))
    return [*_parts(first), *_parts(second)]


def enclosed(content: Content, before: str = "", after: str = "") -> Content:
    """Puts text before and after a message's content."""
    if isinstance(content, str):
        return before + content + after
    return [*_parts(before), *content, *_parts(after)]


def _parts(content: Content) -> list[Json]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if content else []
    return content


def spell_out_tools(messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]]:
    """Rewrites messages for templates without tool support: definitions go into the system message, calls and results
    into text."""
    out = []
    for message in messages:
        content: Content = message["content"]
        if message.get("tool_calls"):
            calls = [call["function"] for call in message["tool_calls"]]
            content = enclosed(content, after=JSON_OPEN + json.dumps(calls, ensure_ascii=False) + JSON_CLOSE)
        if message["role"] == "tool":
            result = enclosed(content, "<tool_response>", "</tool_response>")
            out.append({"role": "user", "content": result})
        else:
            out.append({"role": message["role"], "content": content})
    if tools:
        prompt = TOOLS_PROMPT.format(tools=json.dumps([t["function"] for t in tools], ensure_ascii=False))
        if out[0]["role"] == "system":
            out[0] = {"role": "system", "content": enclosed(out[0]["content"], after=f"\n\n{prompt}")}
        else:
            out.insert(0, {"role": "system", "content": prompt})
    return out


@dataclass(frozen=True)
class Infill:
    """Fill-in-the-middle: `suffix` of /v1/completions and of Ollama's /api/generate, for models with tokens for it."""

    marks: tuple[int, int, int]
    ends: tuple[int, ...]

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Infill | None:
        """The model's tokens for fill-in-the-middle; None: it has none."""
        known = tokenizer.backend.token_to_id
        for names in MARKS:
            first, second, third = (known(name) for name in names)
            if first is not None and second is not None and third is not None:
                ends = [token for token in map(known, ENDS) if token is not None]
                return cls((first, second, third), (first, second, third, *ends))
        return None
