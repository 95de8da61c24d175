"""Anthropic's Messages API, as a translation: a body becomes a chat request of ours, our answer becomes a message.

Text, images, tools, tool results, prefill, stop sequences, thinking, structured output, streaming, counting tokens.
Documents are refused, and so are tools that Anthropic's servers would run.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field, model_validator

from .answer import Answer, AnswerChoice, Delta, Json, ToolCall, Wire, arguments_of, sse
from .errors import ApiError, bad
from .media_fetch import IMAGE
from .schema import (
    TOOL_NAME_PATTERN,
    ChatRequest,
    Function,
    FunctionCall,
    Lenient,
    Message,
    ResponseFormat,
    Strict,
    TextPart,
    Tool,
    ToolCallIn,
    ToolName,
    refuse,
    url_of,
)

# fields that have the same name and meaning in a chat request
SHARED_FIELDS = {
    "model", "max_tokens", "temperature", "top_p", "top_k", "stream", "metadata", "service_tier", "tool_choice"
}  # fmt: skip
TOOL_NAME = re.compile(TOOL_NAME_PATTERN)
REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class ReadBlock(Lenient):
    """A block of a tool's result or of the system prompt. Only its text is read."""

    type: str
    text: str | None = None


class ContentBlock(Lenient):
    type: str
    text: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, object] | None = None
    tool_use_id: str | None = None
    content: str | list[ReadBlock] | None = None
    source: dict[str, object] | None = None  # of an image
    image: str | None = None  # its data URL or address

    @model_validator(mode="after")
    def complete(self) -> ContentBlock:
        self.image = url_of(_image_url(self.source or {}), "source", IMAGE) if self.type == "image" else None
        if self.type == "tool_use":
            refuse(self.name is None or TOOL_NAME.fullmatch(self.name) is None, "name is not a valid tool name")
        return self


class AnthropicMessage(Lenient):
    role: Literal["user", "assistant", "system"]
    content: str | list[ContentBlock]


class AnthropicTool(Lenient):
    name: ToolName
    description: str | None = None
    input_schema: dict[str, object] | None = None
    strict: bool | None = None
    type: str | None = None


class OutputConfig(Lenient):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: ResponseFormat | None = None


class MessagesRequest(Strict):
    model: str | None = None
    messages: Annotated[list[AnthropicMessage], Field(min_length=1, max_length=4096)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    system: str | list[ReadBlock] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    tools: list[AnthropicTool] | None = None
    tool_choice: dict[str, object] | None = None
    thinking: dict[str, object] | None = None
    metadata: dict[str, object] | None = None
    service_tier: str | None = None
    output_config: OutputConfig | None = None
    output_format: ResponseFormat | None = None  # an older name of output_config.format
    # accepted without effect: prompt caching, placement, truncation of long conversations
    cache_control: dict[str, object] | None = None
    context_management: dict[str, object] | None = None
    inference_geo: str | None = None
    speed: str | None = None
    betas: list[str] | None = None


def _messages(message: AnthropicMessage) -> list[Message]:
    """Translates a message into one or more of ours: results of tools come first, then the user's text. Its values were
    validated already, so the new messages are built without validation."""
    if isinstance(message.content, str):
        return [Message.model_construct(role=message.role, content=message.content)]
    results: list[Message] = []
    calls: list[ToolCallIn] = []
    parts: list[TextPart] = []
    for block in message.content:
        if block.type == "image":
            parts.append(TextPart.model_construct(type="image_url", image=block.image))
        elif block.type == "text":
            parts += [TextPart.model_construct(type="text", text=block.text)] if block.text else []
        elif block.type == "tool_use":
            function = FunctionCall.model_construct(name=block.name or "", arguments=block.input or {})
            calls.append(ToolCallIn.model_construct(id=block.id, type="function", function=function))
        elif block.type == "tool_result":
            text = _text(block.content or "")
            results.append(Message.model_construct(role="tool", tool_call_id=block.tool_use_id, content=text))
        elif block.type not in ("thinking", "redacted_thinking"):
            raise bad(f"messages: blocks of type '{block.type[:40]}' can't be read here.", "messages")
    if message.role == "assistant":
        return [Message.model_construct(role="assistant", content=parts, tool_calls=calls or None)]
    if parts or not results:
        return [*results, Message.model_construct(role=message.role, content=parts)]
    return results


def _tool(tool: AnthropicTool) -> Tool:
    if tool.type not in (None, "custom"):
        raise bad(f"tools: '{tool.name[:64]}' is of type '{tool.type[:40]}', which can't be run here.", "tools")
    function = Function.model_construct(
        name=tool.name, description=tool.description, parameters=tool.input_schema, strict=tool.strict or None
    )
    return Tool.model_construct(type="function", function=function)


def _image_url(source: Mapping[str, object]) -> str:
    """An image as a data URL or an address. Addresses are refused later, where images are read."""
    if source.get("type") == "base64":
        return f"data:{source.get('media_type')};base64,{source.get('data')}"
    return str(source.get("url") or source.get("file_id") or "")


def _text(content: str | list[ReadBlock]) -> str:
    """Text of a tool's result or of the system prompt. An image in a tool's result is mentioned, not shown."""
    if isinstance(content, str):
        return content
    return "".join(b.text or "" if b.type == "text" else f"[{b.type[:40]}: can't be read here]" for b in content)


class AnthropicWire(Wire):
    still_working = 'event: ping\ndata: {"type":"ping"}\n\n'

    def __init__(self) -> None:
        self._open: str | None = None  # kind of the open block
        self._index = -1

    def parse(self, raw: bytes) -> ChatRequest:
        body = MessagesRequest.model_validate_json(raw)
        messages: list[Message] = []
        if body.system:
            messages.append(Message.model_construct(role="system", content=_text(body.system)))
        for message in body.messages:
            messages += _messages(message)
        out: Json = {**body.model_dump(include=SHARED_FIELDS), "messages": messages, "stop": body.stop_sequences}
        if body.messages[-1].role == "assistant":
            out["continue_final_message"] = True  # a prefill: the answer continues this message
        tools = [_tool(tool) for tool in body.tools or []]
        if (body.tool_choice or {}).get("disable_parallel_tool_use"):
            out["parallel_tool_calls"] = False
        config = body.output_config or OutputConfig()
        if body.thinking is not None:
            out["reasoning_effort"] = "none" if body.thinking.get("type") == "disabled" else config.effort or "medium"
        form = config.format or body.output_format
        return ChatRequest.model_validate({**out, "tools": tools or None, "response_format": form})

    def whole(self, answer: Answer) -> Json:
        one = answer.choices[0]
        said = [_said(kind, text) for kind, text in (("thinking", one.reasoning), ("text", one.content)) if text]
        calls = [_use(call, arguments_of(call.arguments)) for call in one.calls]
        return {**_message(answer), "content": [*said, *calls], **_ended(one), "usage": _usage(answer)}

    def opening(self, answer: Answer) -> str:
        ended = {"stop_reason": None, "stop_sequence": None}
        return _event("message_start", message={**_message(answer), "content": [], **ended, "usage": _usage(answer)})

    def delta(self, answer: Answer, choice: AnswerChoice, delta: Delta) -> str:
        out = ""
        for part in delta.parts:
            if part.kind == "call":
                out += self._begin("tool_use", _use(choice.calls[part.index], {}))
            elif part.kind == "args":
                out += self._grow("input_json_delta", partial_json=part.text)
            else:
                kind = "thinking" if part.kind == "reasoning" else "text"
                if kind != self._open:
                    out += self._begin(kind, _said(kind, ""))
                out += self._grow(f"{kind}_delta", **{kind: part.text})
        return out

    def closing(self, answer: Answer) -> str:
        ended = _event("message_delta", delta=_ended(answer.choices[0]), usage=_usage(answer))
        return self._stop() + ended + _event("message_stop")

    def error(self, error: ApiError) -> str:
        return sse(error.body_for("/v1/messages"), "error")

    def _begin(self, kind: str, block: Json) -> str:
        out = self._stop()
        self._open = kind
        self._index = self._index + 1
        return out + _event("content_block_start", index=self._index, content_block=block)

    def _grow(self, kind: str, **new: str) -> str:
        return _event("content_block_delta", index=self._index, delta={"type": kind, **new})

    def _stop(self) -> str:
        if self._open is None:
            return ""
        self._open = None
        return _event("content_block_stop", index=self._index)


def _event(type_: str, **fields: object) -> str:
    return sse({"type": type_, **fields}, type_)


def _said(kind: str, text: str) -> Json:
    return {"type": kind, kind: text, **({"signature": ""} if kind == "thinking" else {})}


def _use(call: ToolCall, arguments: object) -> Json:
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": arguments}


def _message(answer: Answer) -> Json:
    return {"id": f"msg_{answer.id}", "type": "message", "role": "assistant", "model": answer.model}


def _ended(one: AnswerChoice) -> Json:
    sequence = one.stopped_by if isinstance(one.stopped_by, str) else None
    reason = REASONS.get(one.finish or "", "end_turn") if sequence is None else "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": sequence}


def _usage(answer: Answer) -> Json:
    """Token counts. Anthropic counts cached tokens apart from input tokens."""
    return {
        "input_tokens": answer.prompt_tokens - answer.cached_tokens,
        "output_tokens": answer.new_tokens,
        "cache_read_input_tokens": answer.cached_tokens,
        "cache_creation_input_tokens": 0,
    }
