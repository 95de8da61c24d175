"""How a model writes thoughts and tool calls, and how tools are told to one whose chat template knows nothing of
them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ..engine.text import Tokenizer
from ..types import Json, OutriderError
from .reasoning import GEMMA4_CHANNEL, THINK_TAGS, ThoughtFormat
from .tools import GEMMA_OPEN, JSON_CLOSE, JSON_OPEN

TOOLS_PROMPT = """You can call functions. These are available:
<tools>{tools}</tools>

When a function is needed, answer with nothing but a list of calls in this format, with arguments of the right types:
<tool_call>[{{"name": "function_name", "arguments": {{"argument": "value"}}}}]</tool_call>
If no function is needed, answer the user directly."""


@dataclass(frozen=True)
class Dialect:
    """How this model writes thoughts and tool calls, found out from its vocabulary and template."""

    tools: Literal["gemma4", "json"]
    thoughts: ThoughtFormat
    template_tools: bool  # the chat template writes the tools into the prompt

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Dialect:
        gemma = len(tokenizer.encode(GEMMA_OPEN, bos=False)) == 1
        function: Json = {"name": "zq_probe", "description": "", "parameters": {"type": "object", "properties": {}}}
        probe: Json = {"type": "function", "function": function}
        try:
            shown = "zq_probe" in tokenizer.render([{"role": "user", "content": "x"}], tools=[probe])
        except OutriderError:
            shown = False
        return cls("gemma4" if gemma else "json", GEMMA4_CHANNEL if gemma else THINK_TAGS, shown)


def spell_out_tools(messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]]:
    """For templates that know nothing of tools: definitions go into the system message, calls and results into text."""
    out = []
    for message in messages:
        text = message["content"]
        if message.get("tool_calls"):
            calls = [c["function"] for c in message["tool_calls"]]
            text += JSON_OPEN + json.dumps(calls, ensure_ascii=False) + JSON_CLOSE
        if message["role"] == "tool":
            out.append({"role": "user", "content": f"<tool_response>{text}</tool_response>"})
        else:
            out.append({"role": message["role"], "content": text})
    if tools:
        prompt = TOOLS_PROMPT.format(tools=json.dumps([t["function"] for t in tools], ensure_ascii=False))
        if out[0]["role"] == "system":
            out[0] = {"role": "system", "content": f"{out[0]['content']}\n\n{prompt}"}
        else:
            out.insert(0, {"role": "system", "content": prompt})
    return out
