"""OpenAI's Responses API as a translation: input items become messages, our answer becomes output items.

Answers are kept for `previous_response_id` unless `store` is false (stores.py); `conversation`, `background`
and `prompt` are refused. Tools are functions, also those in a namespace (as Codex has those of an MCP server); tools of
other types (web search and the like) are not offered to the model, and the answer's `tools` tells which are.
"""

from __future__ import annotations

import secrets
from itertools import takewhile
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter

from .answer import Answer, AnswerChoice, Delta, Json, ToolCall, Wire, sse
from .errors import ApiError, bad, bad_if
from .schema import INERT, ChatRequest, Lenient, Message, ResponseFormat, Strict
from .stores import ResponseStore, stored_id

BODY = TypeAdapter(dict[str, object])
# in addition to those of schema.py
IGNORED_FIELDS = ("background", "max_tool_calls", "client_metadata", "context_management", "access_programs")
# fields that have the same name and meaning in a chat request
SHARED_FIELDS = {"model", "temperature", "top_p", "stream", "parallel_tool_calls", "outrider", "seed", "tool_choice"}
NAMESPACE_SEPARATOR = "__"  # between namespace and name
LOGPROBS = "message.output_text.logprobs"  # a value of `include`
# request fields that the answer repeats, with defaults
NULL_FIELDS = (
    "instructions", "temperature", "top_p", "max_output_tokens", "max_tool_calls", "user", "previous_response_id"
)  # fmt: skip
REPEATED_FIELDS: Json = {
    **dict.fromkeys((*NULL_FIELDS, "prompt_cache_key", "safety_identifier")),
    "metadata": {},
    "parallel_tool_calls": True,
    "tool_choice": "auto",
    "truncation": "disabled",
    "text": {"format": {"type": "text"}},
    "reasoning": {"effort": None, "summary": None},
    "top_logprobs": 0,
    "store": True,
    "background": False,
}
# name of the events of each type of output item
EVENT_NAMES = {"reasoning": "reasoning_text", "message": "output_text", "function_call": "function_call_arguments"}


class ResponsesItem(Lenient):
    type: str = "message"
    role: str | None = None
    content: str | list[dict[str, object]] | None = None  # parts as in messages of chat requests
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: str | None = None
    output: str | list[dict[str, object]] | None = None


class ResponsesTool(Lenient):
    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, object] | None = None
    strict: bool | None = None
    tools: list[ResponsesTool] | None = None  # if the type is namespace


class TextOptions(Lenient):
    format: ResponseFormat | None = None


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
    reasoning: dict[str, object] | None = None
    truncation: Literal["disabled", "auto"] | None = None
    include: list[str] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    outrider: dict[str, object] | None = None
    previous_response_id: Annotated[str, Field(max_length=128)] | None = None
    seed: int | None = None


def _listed(item: ResponsesItem) -> Json:
    """An entry of /v1/responses/{id}/input_items."""
    text = {"content": [{"type": "input_text", "text": item.content}]} if isinstance(item.content, str) else {}
    return {"id": f"msg_{secrets.token_hex(12)}", **item.model_dump(exclude_none=True), **text}


def offered(tools: list[ResponsesTool], namespace: str | None = None) -> list[Json]:
    """The functions among the tools. One in a namespace is called NAMESPACE__NAME towards the model, and by its own
    name in the answer."""
    out: list[Json] = []
    for tool in tools:
        if tool.type == "namespace" and namespace is None:
            out += offered(tool.tools or [], tool.name or "")
        elif tool.type == "function":
            name = full_name(tool.name or "", namespace)
            function: Json = {"name": name, "description": tool.description, "parameters": tool.parameters}
            if tool.strict:
                function["strict"] = True
            out.append({"type": "function", "function": function})
    return out


def full_name(name: str, namespace: str | None) -> str:
    return f"{namespace.rstrip('_')}{NAMESPACE_SEPARATOR}{name}" if namespace else name


def own_name(tools: list[dict[str, Any]], called: str) -> Json:
    """Name and, if any, namespace of a call's function, as fields of the item."""
    for tool in tools:
        for inner in tool.get("tools") or []:
            if full_name(str(inner.get("name")), str(tool.get("name"))) == called:
                return {"name": inner["name"], "namespace": tool["name"]}
    return {"name": called}


def _add(messages: list[dict[str, Any]], item: ResponsesItem) -> None:
    last = messages[-1] if messages else {}
    if item.type == "message":
        messages.append({"role": item.role or "user", "content": item.content or ""})
    elif item.type == "function_call":
        name = full_name(item.name or "", item.namespace)
        call = _call(item.call_id, name, item.arguments or "{}")
        if last.get("role") == "assistant":  # calls made together belong to one message
            last["tool_calls"] = [*last.get("tool_calls", []), call]
        else:
            messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
    elif item.type == "function_call_output":
        parts = [] if isinstance(item.output, str) else item.output or []
        texts = [str(p.get("text", f"[{str(p.get('type'))[:40]}: can't be read here]")) for p in parts]
        output = item.output if isinstance(item.output, str) else "".join(texts)
        messages.append({"role": "tool", "tool_call_id": item.call_id or "", "content": output})
    elif item.type != "reasoning":  # thoughts of earlier turns are not rendered again
        raise bad(f"input: items of type '{item.type[:40]}' can't be read here.", "input")


def _call(id: str | None, name: str, arguments: str) -> Json:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


class ResponsesWire(Wire):
    def __init__(self, store: ResponseStore | None = None, client: str = "") -> None:
        self._store = ResponseStore() if store is None else store
        self._client = client
        self._asked: dict[str, Any] = {}  # request fields that the answer repeats
        self._messages: list[Json] = []
        self._input: list[Json] = []
        self._number = 0
        self._items: list[dict[str, Any]] = []  # finished items, then the open one
        self._open = ""  # the type of the open item
        self._logprobs: list[Json] = []  # entries of tokens whose text has not been sent yet

    def parse(self, raw: bytes) -> ChatRequest:
        sent: dict[str, Any] = BODY.validate_json(raw)
        for name in ("conversation", "prompt", "background"):
            advice = "send input, and previous_response_id to go on from an answer"
            bad_if(sent.get(name), f"{name} can't be used here; {advice}.", name)
        fields = {k: v for k, v in sent.items() if v is not None and k not in (*INERT, *IGNORED_FIELDS)}
        body = ResponsesRequest.model_validate(fields)
        before = body.previous_response_id
        messages = [] if before is None else self._store.get(self._client, before, "previous_response_id").messages
        items = [ResponsesItem(role="user", content=body.input)] if isinstance(body.input, str) else body.input
        for item in items:
            _add(messages, item)
        self._messages = messages
        self._input = [_listed(item) for item in items]
        self._asked = {k: v if sent.get(k) is None else sent[k] for k, v in REPEATED_FIELDS.items()}
        self._asked["tools"] = [t for t in sent.get("tools") or [] if t["type"] in ("function", "namespace")]
        out: Json = {
            **body.model_dump(include=SHARED_FIELDS),
            "messages": [*([{"role": "system", "content": body.instructions}] if body.instructions else []), *messages],
            "max_tokens": body.max_output_tokens,
            "reasoning_effort": (body.reasoning or {}).get("effort"),
            "tools": offered(body.tools or []) or None,
            "response_format": body.text.format if body.text is not None else None,
            **{k: sent[k] for k in INERT if k in sent},
        }
        if body.top_logprobs is not None or LOGPROBS in (body.include or ()):
            out["logprobs"] = True
            out["top_logprobs"] = body.top_logprobs or 0
        chat = ChatRequest.model_validate(out)
        system = [m.text for m in takewhile(lambda m: m.role in ("system", "developer"), chat.messages)]
        if len(system) > 1:  # many templates accept only one system message
            chat.messages[: len(system)] = [Message(role="system", content="\n\n".join(system))]
        return chat

    def whole(self, answer: Answer) -> Json:
        one = answer.choices[0]
        self.delta(answer, one, Delta(one.parts, one.logprobs))
        self._finish()
        return self._response(answer)

    def opening(self, answer: Answer) -> str:
        response = {**self._head(answer), "status": "in_progress", "output": [], "usage": None}
        return "".join(self._event(kind, response=response) for kind in ("created", "in_progress"))

    def delta(self, answer: Answer, choice: AnswerChoice, delta: Delta) -> str:
        out = ""
        self._logprobs += answer.entries(delta.logprobs)
        for part in delta.parts:
            if part.kind == "call":
                out += self._begin(self._function(choice.calls[part.index]))
                continue
            kind = {"content": "message", "reasoning": "reasoning"}.get(part.kind, self._open)
            if kind != self._open:
                out += self._begin(_empty(kind))
            out += self._grow(part.text)
        return out

    def closing(self, answer: Answer) -> str:
        out = self._finish()
        response = self._response(answer)
        return out + self._event(str(response["status"]), response=response)

    def error(self, error: ApiError) -> str:
        return self._event("error", code=error.code, message=error.message, param=error.param)

    def _response(self, answer: Answer) -> Json:
        """The response object. It is stored for later requests unless `store` is false."""
        one = answer.choices[0]
        cut = one.finish == "length"
        response = {
            **self._head(answer),
            "status": "incomplete" if cut else "completed",
            "output": self._items,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "usage": {
                "input_tokens": answer.prompt_tokens,
                "input_tokens_details": {"cache_write_tokens": 0, "cached_tokens": answer.cached_tokens},
                "output_tokens": answer.new_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": answer.prompt_tokens + answer.new_tokens,
            },
        }
        if self._asked["store"]:
            calls = [_call(c.id, c.name, c.arguments) for c in one.calls]
            said: Json = {"role": "assistant", "content": one.content, **({"tool_calls": calls} if calls else {})}
            messages = [*self._messages, said] if one.content or calls else self._messages
            self._store.put(self._client, messages, items=self._input, response=response)
        return response

    def _head(self, answer: Answer) -> Json:
        return {
            "id": stored_id("resp_", self._store.tag, answer.id),
            "object": "response",
            "created_at": answer.created,
            "model": answer.model,
            "error": None,
            "incomplete_details": None,
            **self._asked,
            "service_tier": "default",
        }

    def _function(self, call: ToolCall) -> dict[str, Any]:
        id = f"fc_{secrets.token_hex(12)}"
        named = own_name(self._asked["tools"], call.name)
        return {"type": "function_call", "id": id, "call_id": call.id, **named, "arguments": ""}

    def _event(self, kind: str, **fields: object) -> str:
        self._number += 1
        type_ = kind if kind == "error" else f"response.{kind}"
        return sse({"type": type_, "sequence_number": self._number - 1, **fields}, type_)

    def _begin(self, item: dict[str, Any]) -> str:
        out = self._finish()
        self._open = item["type"]
        self._items.append(item)
        item["status"] = "in_progress"
        empty: Json = {"content": []} if "content" in item else {}
        out += self._event("output_item.added", item={**item, **empty}, output_index=len(self._items) - 1)
        if self._open == "message":
            out += self._event("content_part.added", part=item["content"][0], **self._place())
        return out

    def _place(self) -> Json:
        item = self._items[-1]
        place: Json = {"item_id": item["id"], "output_index": len(self._items) - 1}
        return {**place, "content_index": 0} if "content" in item else place

    def _grow(self, text: str) -> str:
        item = self._items[-1]
        more = self._place()
        if self._open == "function_call":
            item["arguments"] += text
        else:
            item["content"][0]["text"] += text
        if self._open == "message":
            more["logprobs"] = self._logprobs
            item["content"][0]["logprobs"] += self._logprobs
            self._logprobs = []
        return self._event(f"{EVENT_NAMES[self._open]}.delta", delta=text, **more)

    def _finish(self) -> str:
        """Completes the open item."""
        if not self._open:
            return ""
        item = self._items[-1]
        place = self._place()
        kind = self._open
        self._open = ""
        item["status"] = "completed"
        part = item if kind == "function_call" else item["content"][0]
        content = {name: part[name] for name in ("name", "arguments", "text", "logprobs") if name in part}
        out = self._event(f"{EVENT_NAMES[kind]}.done", **content, **place)
        if kind == "message":
            out += self._event("content_part.done", part=part, **place)
        return out + self._event("output_item.done", item=item, output_index=place["output_index"])


def _empty(kind: str) -> dict[str, Any]:
    """A new output item without text."""
    id = secrets.token_hex(12)
    part = {"type": EVENT_NAMES[kind], "text": ""}
    if kind == "reasoning":
        return {"type": kind, "id": f"rs_{id}", "summary": [], "content": [part]}
    content = [{**part, "annotations": [], "logprobs": []}]
    return {"type": kind, "id": f"msg_{id}", "role": "assistant", "content": content}
