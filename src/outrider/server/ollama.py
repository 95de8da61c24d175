"""Ollama's /api/chat and /api/generate as a translation: lines of JSON, Ollama's options, streaming by default. A call
without a prompt or a message loads the model."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Annotated

from pydantic import Field, JsonValue, model_validator

from .answer import Answer, AnswerChoice, Delta, Json, ToolCall, Wire, arguments_of
from .errors import ApiError, bad, bad_if
from .output import loaded
from .schema import (
    CALLS_OF_ASSISTANT,
    MAX_MESSAGES,
    MAX_TOOLS,
    ChatRequest,
    CompletionRequest,
    FunctionCall,
    Lenient,
    Message,
    Role,
    TextPart,
    Tool,
    ToolCallIn,
    refuse,
    sound_of,
)
from .spellings import OLLAMA

VERSION = "0.14.2"  # the Ollama version whose routes these are: clients ask for it and refuse old ones
SMALL = 1024  # maximum bytes of a body without a prompt

# Options with an equivalent in chat requests. Others, on how to run a model, are ignored.
PENALTIES = ("repeat_penalty", "presence_penalty", "frequency_penalty")
OPTIONS = ("temperature", "top_p", "top_k", "min_p", "seed", "stop", *PENALTIES)


class OllamaChat(ChatRequest):
    defaults = OLLAMA


class OllamaCompletion(CompletionRequest):
    defaults = OLLAMA


class OllamaToolCall(Lenient):
    function: FunctionCall


class OllamaMessage(Lenient):
    role: Role
    content: str | None = None
    tool_calls: list[OllamaToolCall] | None = None
    tool_name: str | None = None
    images: list[str] | None = None

    @model_validator(mode="after")
    def fits_role(self) -> OllamaMessage:
        refuse(self.tool_calls and self.role != "assistant", CALLS_OF_ASSISTANT)
        return self


class OllamaRequest(Lenient):
    model: str | None = None
    stream: bool | None = None
    format: str | dict[str, object] | None = None
    options: dict[str, JsonValue] | None = None
    think: bool | str | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None


class ChatBody(OllamaRequest):
    messages: Annotated[list[OllamaMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None


class GenerateBody(OllamaRequest):
    prompt: str = ""
    system: str | None = None
    raw: bool | None = None
    images: list[str] | None = None
    suffix: str | None = None
    template: str | None = None
    context: list[int] | None = None


class ShowBody(Lenient):
    model: str | None = None
    name: str | None = None  # older spelling of model


def asks_nothing(raw: bytes) -> bool:
    """True for a body without a prompt or a message. Invalid bodies are false; their errors are reported by the normal
    path."""
    body = loaded(raw)
    return isinstance(body, dict) and not any(body.get(name) for name in ("prompt", "messages", "images", "suffix"))


def untagged(name: str | None) -> str | None:
    """Drops :latest, which Ollama's clients append to names."""
    return None if name is None else name.removesuffix(":latest")


def with_media(text: str, files: list[str] | None) -> str | list[TextPart]:
    """A message's content. Files in Ollama's `images` are bare base64 and stand before the text; sound clips are among
    them."""
    if not files:
        return text
    parts: list[TextPart] = []
    for file in files:
        if is_sound(file):
            parts.append(TextPart.model_construct(type="input_audio", clip=sound_of(file)))
        else:
            parts.append(TextPart.model_construct(type="image_url", image=f"data:image;base64,{file}"))
    return [*parts, TextPart.model_construct(type="text", text=text)]


def is_sound(file: str) -> bool:
    """True for base64 of a WAV, FLAC, Ogg or MP3 file, recognised by its first bytes."""
    try:
        head = base64.b64decode(file[:16], validate=True)
    except ValueError:
        return False
    wave = head[:4] == b"RIFF" and head[8:12] == b"WAVE"
    mpeg = len(head) > 2 and head[0] == 0xFF and head[1] & 0xE0 == 0xE0 and head[1] & 0x06 != 0
    return wave or mpeg or head[:4] in (b"fLaC", b"OggS") or head[:3] == b"ID3"


def _message(index: int, message: OllamaMessage) -> Message:
    """Its values were validated already, so the new message is built without validation."""
    calls = [
        ToolCallIn.model_construct(id=f"call_{index}_{i}", type="function", function=call.function)
        for i, call in enumerate(message.tool_calls or [])
    ]
    return Message.model_construct(
        role=message.role,
        content=with_media(message.content or "", message.images),
        tool_calls=calls or None,
        tool_call_id="",
        name=message.tool_name,
    )


def parse_chat(raw: bytes) -> ChatRequest:
    body = ChatBody.model_validate_json(raw)
    messages = [_message(i, message) for i, message in enumerate(body.messages)]
    return OllamaChat.model_validate({**_common(body), "messages": messages, "tools": body.tools or None})


def parse_generate(raw: bytes) -> ChatRequest | CompletionRequest:
    body = GenerateBody.model_validate_json(raw)
    bad_if(body.images and (body.raw or body.suffix), "images can't be read with raw or suffix here.", "images")
    for name in ("template", "context"):
        bad_if(getattr(body, name), f"{name} can't be used here.", name)
    if body.raw or body.suffix:
        common = _common(body)
        common.pop("reasoning_effort", None)
        bad_if(common.get("logprobs"), "logprobs can't be had with raw or suffix here.", "logprobs")
        return OllamaCompletion.model_validate(
            {"max_tokens": -1, **common, "prompt": body.prompt, "suffix": body.suffix}
        )
    messages = [Message.model_construct(role="system", content=body.system)] if body.system else []
    messages.append(Message.model_construct(role="user", content=with_media(body.prompt, body.images)))
    return OllamaChat.model_validate({**_common(body), "messages": messages})


def _common(body: OllamaRequest) -> Json:
    out: Json = {"model": untagged(body.model), "stream": body.stream is not False}
    options = body.options or {}
    out |= {name: options[name] for name in OPTIONS if options.get(name) is not None}
    limit = options.get("num_predict")
    if limit is not None:
        out["max_tokens"] = -1 if isinstance(limit, int) and limit <= 0 else limit
    if body.logprobs:
        out["logprobs"] = True
        out["top_logprobs"] = body.top_logprobs
    if body.format == "json":
        out["response_format"] = {"type": "json_object"}
    elif isinstance(body.format, str) and body.format:
        raise bad(f'format is "json" or a JSON schema, not {body.format[:40]!r}.', "format")
    elif isinstance(body.format, dict):
        out["response_format"] = {"type": "json_schema", "json_schema": {"schema": body.format}}
    if body.think is not None:
        effort = body.think if isinstance(body.think, str) else "medium"
        out["reasoning_effort"] = effort if body.think else "none"
    return out


class OllamaWire(Wire):
    media_type = "application/x-ndjson"
    still_working = ""

    def __init__(self, chat: bool = True) -> None:
        self._chat = chat
        self._began = time.monotonic()
        self._logprobs: list[Json] = []  # entries of tokens whose line was not sent yet

    def parse(self, raw: bytes) -> ChatRequest | CompletionRequest:
        return parse_chat(raw) if self._chat else parse_generate(raw)

    def whole(self, answer: Answer) -> Json:
        one = answer.choices[0]
        self._logprobs = answer.entries(one.logprobs)
        return {**self._line(answer.model, one.content, thought=one.reasoning, calls=one.calls), **self._end(answer)}

    def delta(self, answer: Answer, choice: AnswerChoice, delta: Delta) -> str:
        self._logprobs += answer.entries(delta.logprobs)
        lines = []
        for part in delta.parts:
            if part.kind == "content":
                lines.append(self._line(answer.model, part.text))
            elif part.kind == "reasoning":
                lines.append(self._line(answer.model, thought=part.text))
        if choice.finish and choice.calls:
            lines.append(self._line(answer.model, calls=choice.calls))
        return "".join(_dumped({**line, "done": False}) for line in lines)

    def closing(self, answer: Answer) -> str:
        return _dumped({**self._line(answer.model), **self._end(answer)})

    def error(self, error: ApiError) -> str:
        return _dumped(error.body_for("/api/"))

    def loaded(self, model: str) -> Json:
        """The answer to a call without a prompt. `keep_alive: 0` has no effect: another model evicts this one."""
        return {**self._line(model), "done": True, "done_reason": "load"}

    def _line(self, model: str, text: str = "", thought: str = "", calls: Sequence[ToolCall] = ()) -> Json:
        more: Json = {"thinking": thought} if thought else {}
        if calls:
            more["tool_calls"] = [{"function": {"name": c.name, "arguments": arguments_of(c.arguments)}} for c in calls]
        logprobs = self._logprobs
        self._logprobs = []
        head = {"model": model, "created_at": datetime.now(UTC).isoformat().replace("+00:00", "Z")}
        said = {"message": {"role": "assistant", "content": text, **more}} if self._chat else {"response": text, **more}
        return {**head, **said, **({"logprobs": logprobs} if logprobs else {})}

    def _end(self, answer: Answer) -> Json:
        """The last line's statistics. Durations are in nanoseconds; load_duration is everything except prefill and
        decoding."""
        one = answer.choices[0]
        total = int(1e9 * (time.monotonic() - self._began))
        prompt, new = (0, 0) if one.stats is None else (int(1e9 * one.stats.prefill_s), int(1e9 * one.stats.decode_s))
        return {
            "done": True,
            "done_reason": "length" if one.finish == "length" else "stop",
            "prompt_eval_count": answer.prompt_tokens,
            "eval_count": answer.new_tokens,
            "total_duration": total,
            "load_duration": max(0, total - prompt - new),
            "prompt_eval_duration": prompt,
            "eval_duration": new,
        }


def _dumped(data: Json) -> str:
    return json.dumps(data, ensure_ascii=False) + "\n"
