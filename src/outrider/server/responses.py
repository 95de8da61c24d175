"""OpenAI's Responses API as a translation: input items become messages, our answer becomes output items.

Answers are kept for `previous_response_id` unless `store` is false (stores.py); `conversation`, `background`
and `prompt` are refused. Tools are functions, also those in a namespace (as Codex has those of an MCP server); tools of
other types (web search and the like) are not offered to the model, and the answer's `tools` tells which are.
"""

from __future__ import annotations

import secrets
from dataclasses import replace
from typing import Annotated, Literal, cast

from pydantic import Field, TypeAdapter, model_validator

from .answer import Answer, AnswerChoice, Delta, Json, ToolCall, sse
from .errors import ApiError, bad
from .schema import INERT, ChatRequest, Lenient, Strict
from .stores import ResponseStore

BODY = TypeAdapter(dict[str, object])
# in addition to those of schema.py
UNHEEDED = ("background", "max_tool_calls", "client_metadata", "context_management", "access_programs")
# fields that have the same name and meaning in a chat request
SAME = {"model", "temperature", "top_p", "stream", "parallel_tool_calls", "outrider", "seed", "tool_choice"}
BETWEEN = "__"  # a namespace and a name
LOGPROBS = "message.output_text.logprobs"  # of `include`


class ResponsesPart(Lenient):
    type: str = "input_text"
    text: str | None = None
    refusal: str | None = None
    image_url: str | None = None


class ResponsesItem(Lenient):
    type: str = "message"
    role: str | None = None
    content: str | list[ResponsesPart] | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: str | None = None
    output: str | list[ResponsesPart] | None = None


class ResponsesTool(Lenient):
    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, object] | None = None
    strict: bool | None = None
    tools: list[ResponsesTool] | None = None  # of a namespace


class TextFormat(Lenient):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema_: dict[str, object] | None = Field(default=None, alias="schema")

    @model_validator(mode="after")
    def with_schema(self) -> TextFormat:
        if self.type == "json_schema" and self.schema_ is None:
            raise ValueError("type 'json_schema' needs a schema")
        return self


class TextOptions(Lenient):
    format: TextFormat | None = None


class Reasoning(Lenient):
    effort: str | None = None
    summary: str | None = None


class ResponsesRequest(Strict):
    model: str | None = None
    input: str | Annotated[list[ResponsesItem], Field(min_length=1, max_length=4096)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    stream_options: dict[str, object] | None = None
    tools: list[ResponsesTool] | None = None
    tool_choice: str | dict[str, object] | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    truncation: Literal["disabled", "auto"] | None = None
    include: list[str] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    outrider: dict[str, object] | None = None
    previous_response_id: Annotated[str, Field(max_length=128)] | None = None
    seed: int | None = None


def _told_again(item: ResponsesItem) -> Json:
    """As /v1/responses/{id}/input_items lists it."""
    told = {"id": f"msg_{secrets.token_hex(12)}", **item.model_dump(exclude_none=True)}
    text = [{"type": "input_text", "text": item.content}] if isinstance(item.content, str) else None
    return {**told, "content": text} if text else told


def told(given: Json) -> Json:
    defaults: Json = {
        "instructions": None,
        "metadata": {},
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "temperature": None,
        "top_p": None,
        "max_output_tokens": None,
        "max_tool_calls": None,
        "truncation": "disabled",
        "text": {"format": {"type": "text"}},
        "reasoning": {"effort": None, "summary": None},
        "user": None,
        "prompt_cache_key": None,
        "safety_identifier": None,
        "top_logprobs": 0,
    }
    tools = [t for t in cast(list[Json], given.get("tools") or []) if t.get("type") in ("function", "namespace")]
    again = {k: v if given.get(k) is None else given[k] for k, v in defaults.items()}
    return {
        **again,
        "tools": tools,
        "store": given.get("store") is not False,
        "previous_response_id": given.get("previous_response_id"),
        "background": False,
        "service_tier": "default",
    }


def offered(tools: list[ResponsesTool], namespace: str | None = None) -> list[Json]:
    """The functions among them. One of a namespace is called by both names here, and by its own in the answer."""
    out: list[Json] = []
    for tool in tools:
        if tool.type == "namespace" and namespace is None:
            out += offered(tool.tools or [], tool.name or "")
        elif tool.type == "function":
            name = full_name(tool.name or "", namespace)
            out.append({"name": name, "description": tool.description, "parameters": tool.parameters})
    return out


def full_name(name: str, namespace: str | None) -> str:
    return f"{namespace.rstrip('_')}{BETWEEN}{name}" if namespace else name


def own_name(tools: list[Json], called: str) -> Json:
    """What a call's item says of the function: its name, and the namespace it is in."""
    for tool in tools:
        for inner in cast(list[Json], tool.get("tools") or []):
            if full_name(str(inner.get("name")), str(tool.get("name"))) == called:
                return {"name": inner["name"], "namespace": tool["name"]}
    return {"name": called}


def _add(messages: list[Json], item: ResponsesItem) -> None:
    parts = [] if isinstance(item.content, str) else item.content or []
    text = item.content if isinstance(item.content, str) else "".join(p.text or p.refusal or "" for p in parts)
    last = messages[-1] if messages else {}
    if item.type == "message":
        pictures = any(p.type == "input_image" for p in parts)
        if any(p.text is None and p.refusal is None and p.image_url is None for p in parts):
            raise bad("input: only text and images as URLs can be read here.", "input")
        role = {"developer": "system"}.get(item.role or "user", item.role or "user")
        if role == "system" and last.get("role") == "system" and len(messages) == 1:  # many templates know one
            last["content"] = f"{last['content']}\n\n{text}"
        elif pictures:
            content = [
                {"type": "image_url", "image_url": p.image_url}
                if p.type == "input_image"
                else {"type": "text", "text": p.text or p.refusal or ""}
                for p in parts
            ]
            messages.append({"role": role, "content": content})
        else:
            messages.append({"role": role, "content": text})
    elif item.type == "function_call":
        name = full_name(item.name or "", item.namespace)
        call = {"id": item.call_id, "type": "function", "function": {"name": name, "arguments": item.arguments or "{}"}}
        if last.get("role") == "assistant":  # calls that were made together belong to one message
            last["tool_calls"] = [*cast(list[Json], last.get("tool_calls") or []), call]
        else:
            messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
    elif item.type == "function_call_output":
        parts = [] if isinstance(item.output, str) else item.output or []
        output = "".join(f"[{p.type[:40]}: can't be read here]" if p.text is None else p.text for p in parts)
        output = item.output if isinstance(item.output, str) else output
        messages.append({"role": "tool", "tool_call_id": item.call_id or "", "content": output})
    elif item.type != "reasoning":  # thoughts of earlier turns are not rendered again
        raise bad(f"input: items of type '{item.type[:40]}' can't be read here.", "input")


class ResponsesWire:
    media_type = "text/event-stream"
    still_working = ": still working\n\n"

    def __init__(self, store: ResponseStore | None = None, client: str = "") -> None:
        self._store, self._client = ResponseStore() if store is None else store, client
        self._asked: Json = {}  # fields of the request that the answer repeats
        self._messages: list[Json] = []
        self._input: list[Json] = []
        self._number = 0
        self._items: list[Json] = []  # finished ones, then the open one
        self._open: str | None = None
        self._logprobs: list[Json] = []  # of tokens whose text has not been sent yet

    def parse(self, raw: bytes) -> ChatRequest:
        given = BODY.validate_json(raw)
        for name in ("conversation", "prompt", "background"):
            if given.get(name):
                advice = "send input, and previous_response_id to go on from an answer"
                raise bad(f"{name} can't be used here; {advice}.", name)
        kept = {k: v for k, v in given.items() if v is not None and k not in (*INERT, *UNHEEDED)}
        body = ResponsesRequest.model_validate(kept)
        before = body.previous_response_id
        earlier = [] if before is None else self._store.get(self._client, before, "previous_response_id").messages
        messages = [dict(m) for m in earlier]
        items = [ResponsesItem(role="user", content=body.input)] if isinstance(body.input, str) else body.input
        for item in items:
            _add(messages, item)
        self._asked, self._messages, self._input = told(given), messages, [_told_again(item) for item in items]
        read = list(messages)
        if body.instructions:  # many templates know one message of the system's
            more = f"\n\n{read.pop(0)['content']}" if read[:1] and read[0]["role"] == "system" else ""
            read.insert(0, {"role": "system", "content": body.instructions + more})
        out: Json = {
            **body.model_dump(include=SAME),
            "messages": read,
            "max_tokens": body.max_output_tokens,
            "reasoning_effort": body.reasoning.effort if body.reasoning is not None else None,
            "tools": [{"type": "function", "function": f} for f in offered(body.tools or [])] or None,
            **{k: given[k] for k in INERT if k in given},
        }
        if body.top_logprobs is not None or LOGPROBS in (body.include or ()):
            out["logprobs"], out["top_logprobs"] = True, body.top_logprobs or 0
        form = body.text.format if body.text is not None else None
        if form is not None and form.type != "text":
            schema = {"json_schema": {"name": form.name, "schema": form.schema_}} if form.type == "json_schema" else {}
            out["response_format"] = {"type": form.type, **schema}
        return ChatRequest.model_validate(out)

    def whole(self, answer: Answer) -> Json:
        one = answer.choices[0]
        items = [_reasoning(one.reasoning)] if one.reasoning else []
        if one.content:
            items.append(_message(one.content, answer.entries(one.logprobs)))
        items += [self._function(call) for call in one.calls]
        return self._kept(self._whole(answer, items))

    def opening(self, answer: Answer) -> str:
        response = {**self._head(answer), "status": "in_progress", "output": [], "usage": None}
        return "".join(self._event(f"response.{kind}", response=response) for kind in ("created", "in_progress"))

    def delta(self, answer: Answer, choice: AnswerChoice, delta: Delta) -> str:
        out = ""
        self._logprobs += answer.entries(delta.logprobs)
        for part in delta.parts:
            if part.kind == "reasoning":
                out += self._begin("reasoning", _reasoning(""))
                out += self._grow("response.reasoning_text.delta", part.text)
            elif part.kind == "content":
                out += self._begin("message", _message(""))
                out += self._grow("response.output_text.delta", part.text)
            elif part.kind == "call":
                call = replace(choice.calls[part.index], arguments="")
                out += self._begin(f"call {part.index}", self._function(call))
            else:
                out += self._grow("response.function_call_arguments.delta", part.text)
        return out

    def closing(self, answer: Answer) -> str:
        out, whole = self._finish(), self._whole(answer, self._items)
        kind = "response.completed" if whole["status"] == "completed" else "response.incomplete"
        return out + self._event(kind, response=self._kept(whole))

    def error(self, error: ApiError) -> str:
        return self._event("error", code=error.code, message=error.message, param=error.param)

    def _kept(self, response: Json) -> Json:
        """Stored for the requests that go on from it, unless its sender does not want that."""
        if self._asked.get("store"):
            messages = [dict(m) for m in self._messages]
            for item in cast(list[Json], response["output"]):
                _add(messages, ResponsesItem.model_validate(item))
            self._store.put(self._client, messages, self._input, response)
        return response

    def _whole(self, answer: Answer, items: list[Json]) -> Json:
        cut = answer.choices[0].finish == "length"
        return {
            **self._head(answer),
            "status": "incomplete" if cut else "completed",
            "output": items,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "usage": {
                "input_tokens": answer.prompt_tokens,
                "input_tokens_details": {"cache_write_tokens": 0, "cached_tokens": answer.cached_tokens},
                "output_tokens": answer.new_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": answer.prompt_tokens + answer.new_tokens,
            },
        }

    def _head(self, answer: Answer) -> Json:
        return {
            "id": f"resp_{answer.id}",
            "object": "response",
            "created_at": answer.created,
            "model": answer.model,
            "error": None,
            "incomplete_details": None,
            **self._asked,
        }

    def _function(self, call: ToolCall) -> Json:
        return {
            "type": "function_call",
            "id": f"fc_{secrets.token_hex(12)}",
            "call_id": call.id,
            **own_name(cast(list[Json], self._asked.get("tools") or []), call.name),
            "arguments": call.arguments,
            "status": "completed",
        }

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
        empty: Json = {"content": []} if "content" in item else {}
        out += self._event("response.output_item.added", item={**self._items[-1], **empty}, **place)
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
            out = self._event(
                "response.function_call_arguments.done", name=item["name"], arguments=item["arguments"], **place
            )
        else:
            part = cast(list[Json], item["content"])[0]
            message = item["type"] == "message"
            done = "response.output_text.done" if message else "response.reasoning_text.done"
            out = self._event(
                done, text=part["text"], content_index=0, **({"logprobs": part["logprobs"]} if message else {}), **place
            )
            if message:
                out += self._event("response.content_part.done", part=part, content_index=0, **place)
        return out + self._event("response.output_item.done", item=item, output_index=place["output_index"])


def _message(text: str, logprobs: list[Json] | None = None) -> Json:
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs or []}
    item = {"type": "message", "id": f"msg_{secrets.token_hex(12)}", "role": "assistant"}
    return {**item, "status": "completed", "content": [part]}


def _reasoning(text: str) -> Json:
    part = {"type": "reasoning_text", "text": text}
    return {"type": "reasoning", "id": f"rs_{secrets.token_hex(12)}", "summary": [], "content": [part]}
