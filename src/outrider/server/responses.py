"""OpenAI's Responses API without state, as a translation: input items become messages, our answer becomes output items.

What needs a store on the server (`previous_response_id`, `conversation`, `background`, `prompt`) is refused; `store` is taken and
nothing is stored. Tools are functions.
"""

from __future__ import annotations

import json
import secrets
from typing import Annotated, Literal, cast

from pydantic import Field

from .errors import ApiError, bad
from .schema import INERT, ChatRequest, Lenient, Strict
from .wire import Json, said, sse

LOGPROBS = "message.output_text.logprobs"  # of `include`


class Part(Lenient):
    type: str = "input_text"
    text: str | None = None


class Item(Lenient):
    type: str = "message"
    role: str | None = None
    content: str | list[Part] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[Part] | None = None


class FunctionTool(Lenient):
    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, object] | None = None
    strict: bool | None = None


class TextFormat(Lenient):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema_: dict[str, object] | None = Field(default=None, alias="schema")


class TextOptions(Lenient):
    format: TextFormat | None = None


class NamedChoice(Lenient):
    type: Literal["function"]
    name: str


class Reasoning(Lenient):
    effort: str | None = None


class ResponsesRequest(Strict):
    model: str | None = None
    input: str | Annotated[list[Item], Field(min_length=1, max_length=4096)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    stream_options: dict[str, object] | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    truncation: Literal["disabled", "auto"] | None = None
    include: list[str] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    outrider: dict[str, object] | None = None
    seed: int | None = None


def parse(raw: bytes) -> ChatRequest:
    try:
        given = json.loads(raw)
    except (ValueError, RecursionError) as e:
        raise bad("The body is not valid JSON.", None, "invalid_json") from e
    if not isinstance(given, dict):
        raise bad("The body must be a JSON object.", None, "invalid_json")
    for name in ("previous_response_id", "conversation", "prompt", "background"):
        if given.get(name):
            raise bad(f"{name}: nothing is stored on this server; send the whole conversation as input.", name)
    kept = {k: v for k, v in given.items() if v is not None and k not in (*INERT, "background", "max_tool_calls")}
    body = ResponsesRequest.model_validate(kept)
    messages: list[Json] = [{"role": "system", "content": body.instructions}] if body.instructions else []
    for item in [Item(role="user", content=body.input)] if isinstance(body.input, str) else body.input:
        _add(messages, item)
    out: Json = {
        "model": body.model, "messages": messages, "max_tokens": body.max_output_tokens, "temperature": body.temperature,
        "top_p": body.top_p, "stream": body.stream, "parallel_tool_calls": body.parallel_tool_calls, "outrider": body.outrider,
        "seed": body.seed, "reasoning_effort": body.reasoning.effort if body.reasoning is not None else None,
        **{k: given[k] for k in INERT if k in given},
    }  # fmt: skip
    if body.top_logprobs is not None or LOGPROBS in (body.include or ()):
        out["logprobs"], out["top_logprobs"] = True, body.top_logprobs or 0
    if body.stream:
        out["stream_options"] = {"include_usage": True}
    if body.tools:
        out["tools"] = [
            {"type": "function", "function": {"name": t.name, "description": t.description, "parameters": t.parameters}} for t in body.tools
        ]
    choice = body.tool_choice
    out["tool_choice"] = {"type": "function", "function": {"name": choice.name}} if isinstance(choice, NamedChoice) else choice
    form = body.text.format if body.text is not None else None
    if form is not None and form.type != "text":
        schema = {"json_schema": {"name": form.name, "schema": form.schema_}} if form.type == "json_schema" else {}
        out["response_format"] = {"type": form.type, **schema}
    return ChatRequest.model_validate(out)


def _add(messages: list[Json], item: Item) -> None:
    text = item.content if isinstance(item.content, str) else "".join(p.text or "" for p in item.content or [])
    if item.type == "message":
        if not isinstance(item.content, str) and any(p.text is None for p in item.content or []):
            raise bad("input: only text can be read here.", "input")
        messages.append({"role": item.role or "user", "content": text})
    elif item.type == "function_call":
        call = {"id": item.call_id, "type": "function", "function": {"name": item.name, "arguments": item.arguments or "{}"}}
        last = messages[-1] if messages else {}
        if last.get("role") == "assistant":  # calls that were made together belong to one message
            last["tool_calls"] = [*cast(list[Json], last.get("tool_calls") or []), call]
        else:
            messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
    elif item.type == "function_call_output":
        output = item.output if isinstance(item.output, str) else "".join(p.text or "" for p in item.output or [])
        messages.append({"role": "tool", "tool_call_id": item.call_id or "", "content": output})
    elif item.type != "reasoning":  # thoughts of earlier turns are not rendered again
        raise bad(f"input: items of type '{item.type[:40]}' can't be read here.", "input")


class ResponsesWire:
    media_type = "text/event-stream"
    still_working = ": still working\n\n"

    def __init__(self) -> None:
        self._number = 0
        self._response: Json = {}
        self._items: list[Json] = []  # finished ones, then the open one
        self._open: str | None = None
        self._logprobs: list[Json] = []  # of tokens whose text has not been sent yet

    def whole(self, answer: Json) -> Json:
        one = said(answer)[0]
        items = [_reasoning(one.thoughts)] if one.thoughts else []
        if one.text:
            items.append(_message(one.text, one.logprobs))
        items += [_function(call.id, call.name, call.arguments) for call in one.calls]
        return self._whole(answer, items, one.finish)

    def chunk(self, chunk: Json) -> str:
        out = ""
        if not self._response:
            self._response = {**_head(chunk), "status": "in_progress", "output": [], "usage": None}
            out += self._event("response.created", response=self._response) + self._event("response.in_progress", response=self._response)
        for one in said(chunk):
            self._logprobs += one.logprobs
            if one.thoughts:
                out += self._begin("reasoning", _reasoning(""))
                out += self._grow("response.reasoning_text.delta", one.thoughts)
            if one.text:
                out += self._begin("message", _message(""))
                out += self._grow("response.output_text.delta", one.text)
            for call in one.calls:
                if call.id:
                    out += self._begin(f"call {call.which}", _function(call.id, call.name, ""))
                if call.arguments:
                    out += self._grow("response.function_call_arguments.delta", call.arguments)
            if one.finish:
                self._response["finish"] = one.finish
        if not chunk["choices"] and chunk.get("usage"):
            out += self._finish()
            whole = self._whole(chunk, self._items, self._response.get("finish"))
            kind = "response.completed" if whole["status"] == "completed" else "response.incomplete"
            out += self._event(kind, response={**whole, "id": self._response["id"]})
        return out

    def done(self) -> str:
        return ""

    def error(self, error: ApiError) -> str:
        return self._event("error", code=error.code, message=error.message, param=error.param)

    def refusal(self, error: ApiError) -> Json:
        return error.body()

    def _whole(self, answer: Json, items: list[Json], finish: object) -> Json:
        usage = cast(Json, answer["usage"])
        cut = finish == "length"
        return {
            **_head(answer), "status": "incomplete" if cut else "completed", "output": items,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "usage": {
                "input_tokens": usage["prompt_tokens"], "input_tokens_details": usage["prompt_tokens_details"],
                "output_tokens": usage["completion_tokens"], "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage["total_tokens"],
            },
        }  # fmt: skip

    def _event(self, type_: str, **fields: object) -> str:
        self._number += 1
        return sse({"type": type_, "sequence_number": self._number - 1, **fields}, type_)

    def _begin(self, kind: str, item: Json) -> str:
        if kind == self._open:
            return ""
        out = self._finish()
        self._open = kind
        self._items.append({**item, "status": "in_progress"})
        place = {"output_index": len(self._items) - 1}
        out += self._event(
            "response.output_item.added", item={**self._items[-1], **({"content": []} if "content" in item else {})}, **place
        )
        if kind == "message":
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            out += self._event("response.content_part.added", item_id=item["id"], content_index=0, part=part, **place)
        return out

    def _grow(self, event: str, text: str) -> str:
        item = self._items[-1]
        if item["type"] == "function_call":
            item["arguments"] = str(item["arguments"]) + text
            more: Json = {}
        else:
            part = cast(list[Json], item["content"])[0]
            part["text"] = str(part["text"]) + text
            more = {"content_index": 0}
            if item["type"] == "message":
                more["logprobs"], self._logprobs = self._logprobs, []
                part["logprobs"] = [*cast(list[Json], part["logprobs"]), *cast(list[Json], more["logprobs"])]
        return self._event(event, item_id=item["id"], output_index=len(self._items) - 1, delta=text, **more)

    def _finish(self) -> str:
        """The open item is complete."""
        if self._open is None:
            return ""
        item, self._open = self._items[-1], None
        item["status"] = "completed"
        place: Json = {"item_id": item["id"], "output_index": len(self._items) - 1}
        if item["type"] == "function_call":
            out = self._event("response.function_call_arguments.done", name=item["name"], arguments=item["arguments"], **place)
        else:
            part = cast(list[Json], item["content"])[0]
            message = item["type"] == "message"
            done = "response.output_text.done" if message else "response.reasoning_text.done"
            out = self._event(done, text=part["text"], content_index=0, **({"logprobs": part["logprobs"]} if message else {}), **place)
            if message:
                out += self._event("response.content_part.done", part=part, content_index=0, **place)
        return out + self._event("response.output_item.done", item=item, output_index=place["output_index"])


def _head(answer: Json) -> Json:
    return {
        "id": str(answer["id"]).replace("chatcmpl-", "resp_"), "object": "response", "created_at": answer["created"],
        "model": answer["model"], "error": None, "incomplete_details": None, "instructions": None, "metadata": {},
        "parallel_tool_calls": True, "tools": [], "tool_choice": "auto", "temperature": None, "top_p": None, "store": False,
    }  # fmt: skip


def _message(text: str, logprobs: list[Json] | None = None) -> Json:
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs or []}
    return {"type": "message", "id": f"msg_{secrets.token_hex(12)}", "role": "assistant", "status": "completed", "content": [part]}


def _reasoning(text: str) -> Json:
    part = {"type": "reasoning_text", "text": text}
    return {"type": "reasoning", "id": f"rs_{secrets.token_hex(12)}", "summary": [], "content": [part]}


def _function(call: str, name: str, arguments: str) -> Json:
    id = f"fc_{secrets.token_hex(12)}"
    return {"type": "function_call", "id": id, "call_id": call, "name": name, "arguments": arguments, "status": "completed"}
