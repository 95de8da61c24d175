"""Conformance cases of the routes beside OpenAI's: Anthropic's, Responses, Ollama's, tokens, models, health."""

from __future__ import annotations

import json

from tests.conformance import HI, SCHEMA, TOOL, Api, case, holds, is_a, many, same

ANTHROPIC = {"model": "fake", "max_tokens": 8, "messages": HI}


@case
def anthropic_stream(api: Api) -> None:
    events = api.lines("/v1/messages", {**ANTHROPIC, "stream": True})
    kinds = [e["type"] for e in events]
    assert (
        kinds[0] == "message_start"
        and kinds[-1] == "message_stop"
        and "content_block_delta" in kinds
        and "message_delta" in kinds
    )
    assert kinds.count("content_block_start") == kinds.count("content_block_stop")


@case
def anthropic_tools(api: Api) -> None:
    tools = [{"name": "time", "description": "d", "input_schema": TOOL["function"]["parameters"]}]  # type: ignore[index]
    got = api.post(
        "/v1/messages",
        {
            **ANTHROPIC,
            "max_tokens": 200,
            "tools": tools,
            "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
        },
    )
    use = next(b for b in got["content"] if b["type"] == "tool_use")
    assert got["stop_reason"] == "tool_use" and use["input"]["zone"] in ("UTC", "CET")
    cut = api.post("/v1/messages", {**ANTHROPIC, "max_tokens": 40, "tools": tools, "tool_choice": {"type": "any"}})
    assert cut["stop_reason"] == "max_tokens"  # and the call that was cut off is no 500
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": use["id"], "content": "12:00"}]}
    api.post(
        "/v1/messages",
        {**ANTHROPIC, "tools": tools, "messages": [*HI, {"role": "assistant", "content": got["content"]}, result]},
    )


@case
def responses_stream(api: Api) -> None:
    events = api.lines("/v1/responses", {"input": "hello", "stream": True, "max_output_tokens": 8})
    kinds = [e["type"] for e in events]
    assert kinds[0] == "response.created" and kinds[-1] in ("response.completed", "response.incomplete")
    text = "".join(e["delta"] for e in events if e["type"] == "response.output_text.delta")
    assert events[-1]["response"]["output"][0]["content"][0]["text"] == text and [
        e["sequence_number"] for e in events
    ] == list(range(len(events)))


@case
def responses_tools(api: Api) -> None:
    tools = [{"type": "function", **TOOL["function"]}]  # type: ignore[dict-item]
    got = api.post(
        "/v1/responses",
        {
            "input": "hello",
            "tools": tools,
            "tool_choice": "required",
            "parallel_tool_calls": False,
            "max_output_tokens": 200,
        },
    )
    call = next(i for i in got["output"] if i["type"] == "function_call")
    again = [
        {"role": "user", "content": "hello"},
        call,
        {"type": "function_call_output", "call_id": call["call_id"], "output": "12:00"},
    ]
    assert api.post("/v1/responses", {"input": again, "tools": tools, "max_output_tokens": 4})["object"] == "response"


@case
def ollama_stream(api: Api) -> None:
    text = api.http.post(
        "/api/chat",
        json={"model": "fake:latest", "messages": HI, "options": {"num_predict": 8, "seed": 1, "num_ctx": 4096}},
    ).text
    lines = [json.loads(x) for x in text.splitlines()]
    assert (
        lines[-1]["done"]
        and lines[-1]["done_reason"] == "length"
        and lines[-1]["eval_count"] == 8
        and not lines[0]["done"]
    )


many("routes", {
    "anthropic": lambda api: same(api.post("/v1/messages", ANTHROPIC)["stop_reason"], "max_tokens"),
    "anthropic_system": lambda api: api.post("/v1/messages", {**ANTHROPIC, "system": [{"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}}]}),
    "anthropic_prefill": lambda api: api.post("/v1/messages", {**ANTHROPIC, "messages": [*HI, {"role": "assistant", "content": "The"}]}),
    "anthropic_thinking": lambda api: api.post("/v1/messages", {**ANTHROPIC, "thinking": {"type": "enabled", "budget_tokens": 100}}),
    "anthropic_error": lambda api: same(api.post("/v1/messages", {**ANTHROPIC, "messages": []}, 400)["type"], "error"),
    "responses": lambda api: same(api.post("/v1/responses", {"input": "hello", "max_output_tokens": 8})["status"], "incomplete"),
    "responses_instructions": lambda api: api.post("/v1/responses", {"input": HI, "instructions": "brief", "max_output_tokens": 4, "store": False}),
    "responses_format": lambda api: is_a(api.post("/v1/responses", {"input": "x", "max_output_tokens": 60, "text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}})["output"][0]["content"][0]["text"]),
    "responses_stateful": lambda api: same(api.post("/v1/responses", {"input": "x", "previous_response_id": "r"}, 400)["error"]["param"], "previous_response_id"),
    "ollama_chat": lambda api: holds("content" in api.post("/api/chat", {"model": "fake", "messages": HI, "stream": False, "options": {"num_predict": 4}})["message"]),
    "ollama_generate": lambda api: holds("response" in api.post("/api/generate", {"model": "fake", "prompt": "hello", "stream": False, "options": {"num_predict": 4}})),
    "ollama_raw": lambda api: holds("response" in api.post("/api/generate", {"model": "fake", "prompt": "hello", "raw": True, "stream": False, "options": {"num_predict": 4}})),
    "ollama_format": lambda api: is_a(api.post("/api/chat", {"model": "fake", "messages": HI, "stream": False, "format": SCHEMA, "options": {"num_predict": 60}})["message"]["content"]),
    "ollama_tags": lambda api: same(api.http.get("/api/tags").json()["models"][0]["name"], "fake"),
    "ollama_show": lambda api: holds(api.post("/api/show", {"model": "fake"})["model_info"]),
    "ollama_version": lambda api: holds(api.http.get("/api/version").json()["version"]),
    "ollama_error": lambda api: holds(api.post("/api/chat", {"model": "fake", "messages": HI, "options": {"temperature": -1}}, 400)["error"]),
    "tokenize": lambda api: same(api.post("/tokenize", {"prompt": "hello"})["count"], 5),
    "tokenize_content": lambda api: same(len(api.post("/tokenize", {"content": "hello"})["tokens"]), 5),
    "tokenize_pieces": lambda api: same([t["piece"] for t in api.post("/tokenize", {"content": "hi", "with_pieces": True})["tokens"]], ["h", "i"]),
    "tokenize_strs": lambda api: same(api.post("/tokenize", {"prompt": "hi", "return_token_strs": True})["token_strs"], ["h", "i"]),
    "tokenize_chat": lambda api: holds(api.post("/tokenize", {"messages": HI})["count"] > 10),
    "detokenize": lambda api: same(api.post("/detokenize", {"tokens": api.post("/tokenize", {"prompt": "hello"})["tokens"]})["prompt"], "hello"),
    "detokenize_content": lambda api: same(api.post("/detokenize", {"tokens": [70]})["content"], api.post("/detokenize", {"tokens": [70]})["prompt"]),
    "apply_template": lambda api: holds("<|im_start|>user\nhello" in api.post("/apply-template", {"messages": HI})["prompt"]),
    "models": lambda api: same(api.http.get("/v1/models").json()["data"][0]["id"], "fake"),
    "models_unversioned": lambda api: same(api.http.get("/models").json()["data"][0]["id"], "fake"),
    "model": lambda api: same(api.http.get("/v1/models/fake").json()["id"], "fake"),
    "chat_unversioned": lambda api: api.post("/chat/completions", {"messages": HI, "max_tokens": 2}),
    "completions_unversioned": lambda api: api.post("/completions", {"prompt": "x", "max_tokens": 2}),
    "health": lambda api: same(api.http.get("/health").json()["status"], "ok"),
    "livez": lambda api: same(api.http.get("/livez").status_code, 200),
    "readyz": lambda api: same(api.http.get("/readyz").status_code, 200),
    "version": lambda api: holds(api.http.get("/version").json()["version"]),
    "metrics": lambda api: holds("outrider_http_requests_total" in api.http.get("/metrics").text),
    "ignored_counted": lambda api: holds('outrider_ignored_fields_total{field="store"}' in (api.chat(store=True), api.http.get("/metrics").text)[1]),
    "openapi": lambda api: holds("/v1/chat/completions" in api.http.get("/openapi.json").json()["paths"]),
})  # fmt: skip
