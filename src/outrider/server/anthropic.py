"""Anthropic's Messages API, as a translation: a body becomes a chat request of ours, our answer becomes a message.

Text, images, tools, tool results, prefill, stop sequences, thinking, structured output, streaming, counting tokens.
Documents are refused, and so are tools that Anthropic's servers would run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, cast

from pydantic import Field

from .errors import ApiError, bad
from .prepare import Preparer
from .schema import ChatRequest, Lenient, Strict
from .wire import AnswerText, Json, answer_texts, arguments_of, sse

REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class ContentBlock(Lenient):
    type: str
    text: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, object] | None = None
    tool_use_id: str | None = None
    content: str | list[ContentBlock] | None = None
    is_error: bool | None = None
    source: dict[str, object] | None = None  # of an image


class AnthropicMessage(Lenient):
    role: Literal["user", "assistant", "system"]
    content: str | list[ContentBlock]


class AnthropicTool(Lenient):
    name: str
    description: str | None = None
    input_schema: dict[str, object] | None = None
    type: str | None = None


class ToolChoice(Strict):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class OutputFormat(Lenient):
    type: Literal["json_schema"]
    schema_: dict[str, object] = Field(alias="schema")


class OutputConfig(Lenient):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class MessagesRequest(Strict):
    model: str | None = None
    messages: Annotated[list[AnthropicMessage], Field(min_length=1, max_length=4096)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    system: str | list[ContentBlock] | None = None
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
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None  # its older place
    # of no effect here: how a prompt is cached, where it is computed, what a client would have left out of a long
    # conversation
    cache_control: dict[str, object] | None = None
    context_management: dict[str, object] | None = None
    inference_geo: str | None = None
    speed: str | None = None
    betas: list[str] | None = None


def parse(raw: bytes) -> ChatRequest:
    body = MessagesRequest.model_validate_json(raw)
    messages: list[Json] = []
    if body.system:
        messages.append({"role": "system", "content": _text(body.system)})
    for message in body.messages:
        messages += _messages(message)
    out: Json = {
        "model": body.model,
        "messages": messages,
        "max_tokens": body.max_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": body.top_k,
        "stop": body.stop_sequences,
        "stream": body.stream,
        "metadata": body.metadata,
        "service_tier": body.service_tier,
    }
    if body.stream:
        out["stream_options"] = {"continuous_usage_stats": True}  # the first event tells how long the prompt is
    if body.messages[-1].role == "assistant":
        out["continue_final_message"] = True  # a prefill: the answer goes on from it
    for tool in body.tools or []:
        if tool.type not in (None, "custom"):
            raise bad(f"tools: '{tool.name[:64]}' is of type '{tool.type[:40]}', which can't be run here.", "tools")
    if body.tools:
        out["tools"] = [
            {
                "type": "function",
                "function": {"name": t.name, "description": t.description, "parameters": t.input_schema},
            }
            for t in body.tools
        ]
    choice = body.tool_choice
    if choice is not None:
        named = {"type": "function", "function": {"name": choice.name}}
        out["tool_choice"] = {"auto": "auto", "any": "required", "none": "none", "tool": named}[choice.type]
        out["parallel_tool_calls"] = False if choice.disable_parallel_tool_use else None
    config = body.output_config or OutputConfig()
    if body.thinking is not None:
        out["reasoning_effort"] = "none" if body.thinking.get("type") == "disabled" else config.effort or "medium"
    form = config.format or body.output_format
    if form is not None:
        out["response_format"] = {"type": "json_schema", "json_schema": {"schema": form.schema_}}
    return ChatRequest.model_validate(out)


def count_tokens(raw: bytes, preparer: Preparer) -> Json:
    return {"input_tokens": len(preparer.conversation(parse(raw)).ids)}


def _messages(message: AnthropicMessage) -> list[Json]:
    """One of theirs may be several of ours: results of tools come first, then what the user says."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    results: list[Json] = []
    calls: list[Json] = []
    parts: list[Json] = []  # where there are images
    text = ""
    for block in message.content:
        if block.type == "image":
            parts += [{"type": "text", "text": text}] if text else []
            text = ""
            parts.append({"type": "image_url", "image_url": _image_url(block.source or {})})
        elif block.type == "text":
            text += block.text or ""
        elif block.type == "tool_use":
            calls.append(
                {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": block.input or {}}}
            )
        elif block.type == "tool_result":
            results.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": _text(block.content or "")})
        elif block.type not in ("thinking", "redacted_thinking"):
            raise bad(f"messages: blocks of type '{block.type[:40]}' can't be read here.", "messages")
    if message.role == "assistant":
        return [{"role": "assistant", "content": text, **({"tool_calls": calls} if calls else {})}]
    if parts:
        return [*results, {"role": message.role, "content": [*parts, {"type": "text", "text": text}]}]
    return results + ([{"role": message.role, "content": text}] if text or not results else [])


def _image_url(source: Mapping[str, object]) -> str:
    """A data URL; an address is refused where images are read."""
    if source.get("type") == "base64":
        return f"data:{source.get('media_type')};base64,{source.get('data')}"
    return str(source.get("url") or source.get("file_id") or "")


def _text(content: str | list[ContentBlock]) -> str:
    """Of a tool's result or the system's text. A picture that a tool took is named: the conversation must be able to go
    on."""
    if isinstance(content, str):
        return content
    return "".join(b.text or "" if b.type == "text" else f"[{b.type[:40]}: can't be read here]" for b in content)


class AnthropicWire:
    media_type = "text/event-stream"
    still_working = 'event: ping\ndata: {"type":"ping"}\n\n'

    def __init__(self) -> None:
        self._open: str | None = None  # the kind of the block that is open
        self._index = -1
        self._ended: Json = {"stop_reason": "end_turn", "stop_sequence": None}
        self._began = False

    def whole(self, answer: Json) -> Json:
        one = answer_texts(answer)[0]
        blocks: list[Json] = []
        if one.thoughts:
            blocks.append({"type": "thinking", "thinking": one.thoughts, "signature": ""})
        if one.text:
            blocks.append({"type": "text", "text": one.text})
        blocks += [
            {"type": "tool_use", "id": c.id, "name": c.name, "input": arguments_of(c.arguments)} for c in one.calls
        ]
        return {**self._message(answer), "content": blocks, **_ended(one), "usage": _usage(answer)}

    def chunk(self, chunk: Json) -> str:
        out = ""
        if not self._began:
            self._began = True
            start = {
                **self._message(chunk),
                "content": [],
                "stop_reason": None,
                "stop_sequence": None,
                "usage": _usage(chunk),
            }
            out += self._event("message_start", message=start)
        for one in answer_texts(chunk):
            if one.thoughts:
                out += self._block("thinking", {"type": "thinking", "thinking": "", "signature": ""})
                out += self._delta({"type": "thinking_delta", "thinking": one.thoughts})
            if one.text:
                out += self._block("text", {"type": "text", "text": ""})
                out += self._delta({"type": "text_delta", "text": one.text})
            for call in one.calls:
                if call.id:
                    out += self._block(
                        f"call {call.which}", {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
                    )
                if call.arguments:
                    out += self._delta({"type": "input_json_delta", "partial_json": call.arguments})
            if one.finish:
                self._ended = _ended(one)
        if not chunk["choices"] and chunk.get("usage"):
            out += self._stop()
            out += self._event("message_delta", delta=self._ended, usage=_usage(chunk))
        return out

    def done(self) -> str:
        return self._event("message_stop")

    def error(self, error: ApiError) -> str:
        return sse(self.refusal(error), "error")

    def refusal(self, error: ApiError) -> Json:
        return error.body_for("/v1/messages")

    def _message(self, answer: Json) -> Json:
        id = str(answer["id"]).replace("chatcmpl-", "msg_")
        return {"id": id, "type": "message", "role": "assistant", "model": answer["model"]}

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


def _ended(one: AnswerText) -> Json:
    sequence = one.stopped_by if isinstance(one.stopped_by, str) else None
    reason = REASONS.get(one.finish or "", "end_turn") if sequence is None else "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": sequence}


def _usage(answer: Json) -> Json:
    """What was in the cache is not among the input tokens there."""
    usage = cast(Json, answer["usage"])
    cached = cast(int, cast(Json, usage["prompt_tokens_details"])["cached_tokens"])
    return {
        "input_tokens": cast(int, usage["prompt_tokens"]) - cached,
        "output_tokens": usage["completion_tokens"],
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
    }
