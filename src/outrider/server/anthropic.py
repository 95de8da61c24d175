"""Anthropic's Messages API, as a translation: a body becomes a chat request of ours, our answer becomes a message.

Text, tools, tool results, prefill, stop sequences, thinking and streaming. Images and documents are refused.
"""

from __future__ import annotations

from typing import Annotated, Literal, cast

from pydantic import Field

from .errors import TYPES, ApiError, bad
from .schema import ChatRequest, Lenient, Strict
from .wire import Json, arguments_of, said, sse

REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class Block(Lenient):
    type: str
    text: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, object] | None = None
    tool_use_id: str | None = None
    content: str | list[Block] | None = None
    is_error: bool | None = None


class AnthropicMessage(Lenient):
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class AnthropicTool(Lenient):
    name: str
    description: str | None = None
    input_schema: dict[str, object] | None = None
    type: str | None = None


class ToolChoice(Strict):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class MessagesRequest(Strict):
    model: str | None = None
    messages: Annotated[list[AnthropicMessage], Field(min_length=1, max_length=4096)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    system: str | list[Block] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    tools: list[AnthropicTool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: dict[str, object] | None = None
    metadata: dict[str, object] | None = None
    service_tier: str | None = None


def parse(raw: bytes) -> ChatRequest:
    body = MessagesRequest.model_validate_json(raw)
    messages: list[Json] = []
    if body.system:
        messages.append({"role": "system", "content": _text(body.system)})
    for message in body.messages:
        messages += _messages(message)
    out: Json = {
        "model": body.model, "messages": messages, "max_tokens": body.max_tokens, "temperature": body.temperature, "top_p": body.top_p,
        "top_k": body.top_k, "stop": body.stop_sequences, "stream": body.stream, "metadata": body.metadata,
        "service_tier": body.service_tier,
    }  # fmt: skip
    if body.stream:
        out["stream_options"] = {"include_usage": True}
    if body.messages[-1].role == "assistant":
        out["continue_final_message"] = True  # a prefill: the answer goes on from it
    if body.tools:
        out["tools"] = [
            {"type": "function", "function": {"name": t.name, "description": t.description, "parameters": t.input_schema}}
            for t in body.tools
        ]
    choice = body.tool_choice
    if choice is not None:
        named = {"type": "function", "function": {"name": choice.name}}
        out["tool_choice"] = {"auto": "auto", "any": "required", "none": "none", "tool": named}[choice.type]
        out["parallel_tool_calls"] = False if choice.disable_parallel_tool_use else None
    if body.thinking is not None:
        out["reasoning_effort"] = "none" if body.thinking.get("type") == "disabled" else "medium"
    return ChatRequest.model_validate(_without_nulls(out))


def _messages(message: AnthropicMessage) -> list[Json]:
    """One of theirs may be several of ours: results of tools come first, then what the user says."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    results: list[Json] = []
    calls: list[Json] = []
    text = ""
    for block in message.content:
        if block.type == "text":
            text += block.text or ""
        elif block.type == "tool_use":
            calls.append({"id": block.id, "type": "function", "function": {"name": block.name, "arguments": block.input or {}}})
        elif block.type == "tool_result":
            results.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": _text(block.content or "")})
        elif block.type not in ("thinking", "redacted_thinking"):
            raise bad(f"messages: blocks of type '{block.type[:40]}' can't be read here.", "messages")
    if message.role == "assistant":
        return [{"role": "assistant", "content": text, **({"tool_calls": calls} if calls else {})}]
    return results + ([{"role": message.role, "content": text}] if text or not results else [])


def _text(content: str | list[Block]) -> str:
    return content if isinstance(content, str) else "".join(b.text or "" for b in content)


def _without_nulls(value: object) -> object:
    if isinstance(value, dict):
        return {k: _without_nulls(v) for k, v in value.items() if v is not None}
    return [_without_nulls(v) for v in value] if isinstance(value, list) else value


class AnthropicWire:
    media_type = "text/event-stream"
    still_working = 'event: ping\ndata: {"type":"ping"}\n\n'

    def __init__(self) -> None:
        self._open: str | None = None  # the kind of the block that is open
        self._index = -1
        self._reason = "end_turn"
        self._began = False

    def whole(self, answer: Json) -> Json:
        one = said(answer)[0]
        blocks: list[Json] = []
        if one.thoughts:
            blocks.append({"type": "thinking", "thinking": one.thoughts, "signature": ""})
        if one.text:
            blocks.append({"type": "text", "text": one.text})
        blocks += [{"type": "tool_use", "id": c.id, "name": c.name, "input": arguments_of(c.arguments)} for c in one.calls]
        reason = REASONS.get(one.finish or "", "end_turn")
        return {**self._message(answer), "content": blocks, "stop_reason": reason, "usage": _usage(answer)}

    def chunk(self, chunk: Json) -> str:
        out = ""
        if not self._began:
            self._began = True
            empty = {"input_tokens": 0, "output_tokens": 0}
            start = {**self._message(chunk), "content": [], "stop_reason": None, "usage": empty}
            out += self._event("message_start", message=start)
        for one in said(chunk):
            if one.thoughts:
                out += self._block("thinking", {"type": "thinking", "thinking": "", "signature": ""})
                out += self._delta({"type": "thinking_delta", "thinking": one.thoughts})
            if one.text:
                out += self._block("text", {"type": "text", "text": ""})
                out += self._delta({"type": "text_delta", "text": one.text})
            for call in one.calls:
                if call.id:
                    out += self._block(f"call {call.which}", {"type": "tool_use", "id": call.id, "name": call.name, "input": {}})
                if call.arguments:
                    out += self._delta({"type": "input_json_delta", "partial_json": call.arguments})
            if one.finish:
                self._reason = REASONS.get(one.finish, "end_turn")
        if not chunk["choices"] and chunk.get("usage"):
            out += self._stop()
            out += self._event("message_delta", delta={"stop_reason": self._reason, "stop_sequence": None}, usage=_usage(chunk))
        return out

    def done(self) -> str:
        return self._event("message_stop")

    def error(self, error: ApiError) -> str:
        return sse(self.refusal(error), "error")

    def refusal(self, error: ApiError) -> Json:
        kind = TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": error.message}}

    def _message(self, answer: Json) -> Json:
        id = str(answer["id"]).replace("chatcmpl-", "msg_")
        return {"id": id, "type": "message", "role": "assistant", "model": answer["model"], "stop_sequence": None}

    def _event(self, type_: str, **fields: object) -> str:
        return sse({"type": type_, **fields}, type_)

    def _block(self, kind: str, begin: Json) -> str:
        if kind == self._open:
            return ""
        out = self._stop()
        self._open, self._index = kind, self._index + 1
        return out + self._event("content_block_start", index=self._index, content_block=begin)

    def _delta(self, delta: Json) -> str:
        return self._event("content_block_delta", index=self._index, delta=delta)

    def _stop(self) -> str:
        if self._open is None:
            return ""
        self._open = None
        return self._event("content_block_stop", index=self._index)


def _usage(answer: Json) -> Json:
    usage = cast(Json, answer["usage"])
    cached = cast(Json, usage["prompt_tokens_details"])["cached_tokens"]
    return {
        "input_tokens": usage["prompt_tokens"], "output_tokens": usage["completion_tokens"], "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
    }  # fmt: skip
