"""Requests of well-known clients that no description of an API contains: harmless fields, other spellings, histories as
clients send them back."""

from __future__ import annotations

import gzip
import json
from typing import Any

from tests.conformance import HI, Api, case, content, holds, many, same

TOOL: Any = {"type": "function", "function": {"name": "time", "parameters": {"type": "object", "properties": {"zone": {"enum": ["UTC", "CET"]}}, "required": ["zone"]}}}  # fmt: skip
OTHER: Any = {"type": "function", "function": {"name": "other", "parameters": {"type": "object", "properties": {}}}}


def alike(**fields: Any) -> Any:
    """These fields change nothing."""
    return lambda api: same(content(api.chat(**fields)), content(api.chat()))


def called(api: Api, **fields: Any) -> set[str]:
    """The functions that are called."""
    answer = api.chat(**{"tools": [TOOL, OTHER], "max_tokens": 200, "parallel_tool_calls": False, **fields})
    return {c["function"]["name"] for c in answer["choices"][0]["message"]["tool_calls"]}


def history(*parts: Any) -> list[Any]:
    return [*HI, {"role": "assistant", "content": list(parts)}, *HI]


def call_with(arguments: Any, **more: Any) -> list[Any]:
    call = {"id": "a", "function": {"name": "time", "arguments": arguments}, **more}
    return [
        *HI,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "12:00"},
    ]


def raw(api: Api, body: bytes, path: str = "/v1/chat/completions", **headers: str) -> Any:
    return api.http.post(path, content=body, headers={"Content-Type": "application/json", **headers})


BODY = json.dumps({"messages": HI, "max_tokens": 2}).encode()

many("harmless", {
    "prompt_cache_options": alike(prompt_cache_options={"mode": "auto"}),
    "samplers_off": alike(typical_p=1.0, mirostat=0, mirostat_tau=5.0, tfs_z=1, top_a=0, dry_multiplier=0.0, dry_base=1.75, xtc_probability=0, repeat_last_n=64, repeat_penalty=1.0),
    "beams_off": alike(use_beam_search=False, length_penalty=1.0, early_stopping=False),
    "reasoning_told": alike(include_reasoning=True, separate_reasoning=True),
    "echo_and_best_of": alike(echo=False, best_of=1),
    "no_alternatives": alike(top_logprobs=0, logprobs=False),
    "whole_floats": alike(max_tokens=8.0, n=1.0, seed=1.0),
    "no_model": alike(model=""),
    "no_thoughts": alike(thinking={"type": "disabled"}),
    "no_effort": alike(reasoning={"effort": "none"}),
    "effort_that_is_no_switch": alike(reasoning={"enabled": []}),
    "template_switch": alike(enable_thinking=False),
    "window_of_a_penalty_that_is_on": lambda api: same(api.chat(400, repeat_last_n=64, repeat_penalty=1.2)["error"]["param"], "repeat_last_n"),
    "sampler_on": lambda api: same(api.chat(400, mirostat=2)["error"]["param"], "mirostat"),
    "cache_control": lambda api: api.chat(tools=[{**TOOL, "cache_control": {"type": "ephemeral"}}]),
    "suffix_says_why": lambda api: holds("suffix" in api.text(400, suffix="x")["error"]["message"] and api.text(suffix="")),
})  # fmt: skip

many("tool_choice", {
    "any": lambda api: holds(called(api, tool_choice="any")),
    "any_object": lambda api: holds(called(api, tool_choice={"type": "any"})),
    "flat": lambda api: same(called(api, tool_choice={"type": "function", "name": "time"}), {"time"}),
    "allowed": lambda api: same(called(api, tool_choice={"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [{"type": "function", "function": {"name": "other"}}]}}), {"other"}),
    "auto_object": lambda api: api.chat(tools=[TOOL], tool_choice={"type": "auto"}),
    "long_name": lambda api: same(called(api, tools=[{"type": "function", "function": {**OTHER["function"], "name": "x" * 128}}], tool_choice="required"), {"x" * 128}),
})  # fmt: skip

many("history", {
    "refusal": lambda api: holds("cannot" in api.post("/apply-template", {"messages": history({"type": "refusal", "refusal": "I cannot"})})["prompt"]),
    "thoughts": lambda api: same(api.post("/apply-template", {"messages": history({"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "yes"})}), api.post("/apply-template", {"messages": history({"type": "text", "text": "yes"})})),
    "image": lambda api: holds("image" in api.chat(400, messages=history({"type": "image_url", "image_url": {"url": "x"}}))["error"]["message"]),
    "no_text": lambda api: holds("text is missing" in api.chat(400, messages=history({"type": "text"}))["error"]["message"]),
    "null_arguments": lambda api: api.chat(messages=call_with(None, type=None)),
    "arguments_cut_off": lambda api: holds('{"zone": "U' in api.post("/apply-template", {"messages": call_with('{"zone": "U')})["prompt"].replace('\\"', '"')),
})  # fmt: skip

many("body", {
    "mark_of_utf8": lambda api: same(raw(api, b"\xef\xbb\xbf" + BODY).status_code, 200),
    "half_a_character": lambda api: holds("a? b" in raw(api, b'{"messages": [{"role": "user", "content": "a\\ud83d b"}]}', "/apply-template").json()["prompt"]),
    "whole_characters_beside_it": lambda api: holds("\U0001f600?" in raw(api, b'{"messages": [{"role": "user", "content": "\\ud83d\\ude00\\ud83d"}]}', "/apply-template").json()["prompt"]),
    "empty": lambda api: holds(all("empty" in raw(api, body).json()["error"]["message"] for body in (b"", b" \n"))),
    "cut_at_a_line": lambda api: holds("line 2 column 0" in raw(api, b'{"messages":\n').json()["error"]["message"]),
    "deep_with_half_a_character": lambda api: same(raw(api, b'["\\ud83d",' + b"[" * 50000).json()["error"]["code"], "invalid_json"),
    "position": lambda api: holds("line 1 column 2" in raw(api, b"{'a': 1}").json()["error"]["message"]),
    "compressed": lambda api: same(raw(api, gzip.compress(BODY), **{"Content-Encoding": "gzip"}).status_code, 415),
})  # fmt: skip


@case
def paths_with_a_slash_too_many(api: Api) -> None:
    for path in ("/v1/chat/completions/", "//v1/chat/completions", "/v1//chat/completions//"):
        assert api.http.post(path, json={"messages": HI, "max_tokens": 2}, follow_redirects=False).status_code == 200, (
            path
        )
    assert api.http.get("/v1/models/").json() == api.http.get("/v1/models").json()
    assert "/v1/v1/models" in api.http.get("/v1/v1/models").json()["error"]["message"]
    assert "POST is" in api.http.get("/v1/completions").json()["error"]["message"]


# ---- Anthropic's, as Claude Code asks

ASK: Any = {"model": "fake", "max_tokens": 8, "messages": HI, "temperature": 0}
CLAUDE: Any = {
    **ASK, "max_tokens": 32000, "stop_sequences": ["\n"], "metadata": {"user_id": "u"},
    "thinking": {"type": "adaptive"},
    "system": [{"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}}],
    "output_config": {"effort": "medium"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "cache_control": {"type": "ephemeral"},
    "tools": [{"name": "time", "description": "d", "input_schema": TOOL["function"]["parameters"], "eager_input_streaming": True}],
}  # fmt: skip


def results(*blocks: Any) -> list[Any]:
    use = {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "time", "input": {"zone": None}}]}
    return [
        *HI,
        use,
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": list(blocks)}]},
    ]


@case
def claude_code(api: Api) -> None:
    assert api.post("/v1/messages?beta=true", CLAUDE)["type"] == "message"
    assert (
        api.post("/v1/messages/count_tokens?beta=true", {k: v for k, v in CLAUDE.items() if k != "max_tokens"})[
            "input_tokens"
        ]
        > 20
    )


@case
def anthropic_stop_sequence(api: Api) -> None:
    whole = api.post("/v1/messages", {**ASK, "max_tokens": 40})["content"][0]["text"]
    end = whole[10:12]
    ask = {**ASK, "max_tokens": 40, "stop_sequences": ["never said", end]}
    got = api.post("/v1/messages", ask)
    assert (got["stop_reason"], got["stop_sequence"]) == ("stop_sequence", end)
    last = next(e for e in api.lines("/v1/messages", {**ask, "stream": True}) if e["type"] == "message_delta")
    assert last["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": end}
    assert api.chat(max_tokens=40, temperature=0, stop=end)["choices"][0]["stop_reason"] == end  # vLLM's name for it
    text = {"prompt": "Say it", "temperature": 0, "return_token_ids": True}
    first = api.post("/v1/completions", text)["choices"][0]
    [token, *_] = first["token_ids"]
    letter = first["text"][0]
    by_token = api.post("/v1/completions", {**text, "stop_token_ids": [token], "stop": letter})["choices"][0]
    assert (
        by_token["finish_reason"] == "stop" and by_token["stop_reason"] == token
    )  # what the token says is not part of the answer
    assert (
        "stop_reason"
        not in api.post("/v1/completions", {**text, "max_tokens": 0, "echo": True, "stop": letter})["choices"][0]
    )


@case
def anthropic_usage(api: Api) -> None:
    """Tokens from the cache are told apart, and how long the prompt is from the beginning."""
    ask = {**ASK, "system": "brief " * 40}
    length = api.post("/v1/messages/count_tokens", ask)["input_tokens"]
    for _ in range(2):
        usage = api.post("/v1/messages", ask)["usage"]
        assert usage["input_tokens"] + usage["cache_read_input_tokens"] == length
    assert usage["cache_read_input_tokens"] > 0
    assert api.lines("/v1/messages", {**ask, "stream": True})[0]["message"]["usage"]["input_tokens"] == length


many("anthropic", {
    "picture_of_a_tool": lambda api: api.post("/v1/messages", {**ASK, "messages": results({"type": "text", "text": "see"}, {"type": "image", "source": {}})}),
    "their_own_tools": lambda api: holds("web_search_20250305" in api.post("/v1/messages", {**ASK, "tools": [{"type": "web_search_20250305", "name": "web_search"}]}, 400)["error"]["message"]),
    "format": lambda api: holds(json.loads(api.post("/v1/messages", {**ASK, "max_tokens": 60, "output_config": {"format": {"type": "json_schema", "schema": TOOL["function"]["parameters"]}}})["content"][0]["text"])["zone"] in ("UTC", "CET")),
    "count_bad": lambda api: api.post("/v1/messages/count_tokens", {"messages": []}, 400),
})  # fmt: skip


# ---- the Responses API, as Codex asks

FLAT: Any = {"type": "function", **TOOL["function"], "strict": False}
CODEX: Any = {
    "model": "fake", "instructions": "be brief", "store": False, "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "k",
    "text": {"verbosity": "low"}, "reasoning": {"effort": "low", "summary": "auto"}, "parallel_tool_calls": False,
    "tool_choice": "auto",
    "client_metadata": {"a": "b"}, "max_output_tokens": 8, "temperature": 0,
    "input": [{"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "rules"}]}, {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hello"}]}],
    "tools": [FLAT, {"type": "web_search", "external_web_access": True}, {"type": "image_generation"}, {"type": "namespace", "name": "mcp__clock__", "description": "d", "tools": [{**FLAT, "name": "alarm"}]}],
}  # fmt: skip


@case
def codex(api: Api) -> None:
    whole = api.post("/v1/responses", CODEX)
    assert [t["type"] for t in whole["tools"]] == ["function", "namespace"]  # those that the model is told of
    last = api.lines("/v1/responses", {**CODEX, "stream": True})[-1]["response"]
    assert last["output"][0]["content"][0]["text"] == whole["output"][0]["content"][0]["text"]
    for answer in (whole, last):
        arguments = (
            "instructions",
            "text",
            "reasoning",
            "temperature",
            "parallel_tool_calls",
            "max_output_tokens",
            "prompt_cache_key",
        )
        assert {k: answer[k] for k in arguments} == {k: CODEX[k] for k in arguments}


@case
def codex_namespace(api: Api) -> None:
    """A function of a namespace is called by both names, comes back with its own, and may be sent back so."""
    ask = {**CODEX, "max_output_tokens": 200, "tools": CODEX["tools"][1:], "tool_choice": "required"}
    whole = api.post("/v1/responses", ask)
    call = next(i for i in whole["output"] if i["type"] == "function_call")
    assert (call["namespace"], call["name"]) == ("mcp__clock__", "alarm")
    done = [
        e["item"]
        for e in api.lines("/v1/responses", {**ask, "stream": True})
        if e["type"] == "response.output_item.done"
    ]
    assert [(i["namespace"], i["name"], i["arguments"]) for i in done] == [("mcp__clock__", "alarm", call["arguments"])]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": [{"type": "input_text", "text": "x"}, {"type": "input_image", "image_url": "y"}]}  # fmt: skip
    api.post("/v1/responses", {**CODEX, "input": [*CODEX["input"], call, result]})


many("responses", {
    "defaults_told": lambda api: same({k: api.post("/v1/responses", {"input": "x", "max_output_tokens": 2})[k] for k in ("tools", "tool_choice", "truncation", "metadata")}, {"tools": [], "tool_choice": "auto", "truncation": "disabled", "metadata": {}}),
    "metadata_told": lambda api: same(api.post("/v1/responses", {"input": "x", "max_output_tokens": 2, "metadata": {"a": "b"}})["metadata"], {"a": "b"}),
    "allowed_tools": lambda api: same(api.post("/v1/responses", {"input": "x", "max_output_tokens": 200, "parallel_tool_calls": False, "tools": [FLAT, {**FLAT, "name": "b"}], "tool_choice": {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "b"}]}})["output"][0]["name"], "b"),
    "hosted_tool_forced": lambda api: same(api.post("/v1/responses", {"input": "x", "tools": [{"type": "web_search"}], "tool_choice": "required"}, 400)["error"]["code"], "invalid_value"),
    "input_tokens": lambda api: same(api.post("/v1/responses/input_tokens", {"input": "hello", "instructions": "brief"})["input_tokens"], api.post("/v1/responses", {"input": "hello", "instructions": "brief", "max_output_tokens": 2})["usage"]["input_tokens"]),
    "refusal": lambda api: api.post("/v1/responses", {"max_output_tokens": 2, "input": [*HI, {"type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}, *HI]}),
    "half_a_character": lambda api: same(raw(api, b'{"input": "a\\ud83d", "max_output_tokens": 2}', "/v1/responses").status_code, 200),
    "broken": lambda api: same(raw(api, b"{", "/v1/responses").json()["error"]["code"], "invalid_json"),
})  # fmt: skip


# ---- Open WebUI, over either API


@case
def open_webui(api: Api) -> None:
    """It lists models, streams with usage whatever the user set, and asks for a title and tags in the background."""
    cards = api.http.get("/v1/models", headers={"Authorization": "Bearer none"}).json()["data"]
    assert [card["id"] for card in cards] == ["fake"] and all(card.get("name", "fake") for card in cards)
    said = [{"role": "system", "content": "be brief"}, *HI]
    streamed = {
        "model": "fake",
        "messages": said,
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0,
        "top_p": 0.9,
        "max_tokens": 8,
        "logit_bias": {"5": 0},
        "metadata": {"chat_id": "a"},
    }
    events = api.lines("/v1/chat/completions", streamed)
    assert events[-1]["usage"]["completion_tokens"] > 0 and events[-1]["choices"] == []
    task = {"model": "fake", "messages": HI, "stream": False, "max_completion_tokens": 1000, "stop": ["\n"]}
    assert len(api.post("/v1/chat/completions", task)["choices"]) == 1


@case
def open_webui_over_ollama(api: Api) -> None:
    assert api.http.get("/api/version").json()["version"]
    name = api.http.get("/api/tags").json()["models"][0]["model"]
    assert api.http.get("/api/ps").json()["models"][0]["model"] == name
    body = {"model": name, "messages": HI, "options": {"num_predict": 8, "temperature": 0}, "stream": True}
    events = [json.loads(line) for line in api.http.post("/api/chat", json=body).text.splitlines()]
    assert events[-1]["done"] and events[-1]["eval_count"] > 0
    assert "".join(event["message"]["content"] for event in events)


# ---- Ollama's

OLLAMA: Any = {"model": "fake", "stream": False, "options": {"num_predict": 4, "temperature": 0}}


@case
def ollama_loads(api: Api) -> None:
    for path, body, key in (
        ("/api/generate", {}, "response"),
        ("/api/generate", {"prompt": "", "keep_alive": "5m"}, "response"),
        ("/api/chat", {"messages": []}, "message"),
    ):
        got = api.post(path, {"model": "fake", **body})
        assert got["done"] and got["done_reason"] == "load" and key in got
    assert api.post("/api/generate", {"model": "other"})["model"] == "fake"  # the only one there is


@case
def ollama_logprobs(api: Api) -> None:
    ask = {**OLLAMA, "messages": HI, "logprobs": True, "top_logprobs": 2}
    whole = api.post("/api/chat", ask)["logprobs"]
    assert len(whole) == 4 and all(len(entry["top_logprobs"]) == 2 for entry in whole)
    lines = [json.loads(x) for x in api.http.post("/api/chat", json={**ask, "stream": True}).text.splitlines()]
    assert [entry for line in lines for entry in line.get("logprobs", [])] == whole


many("ollama", {
    "null_content": lambda api: api.post("/api/chat", {**OLLAMA, "messages": [*HI, {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "time", "arguments": {}}}]}, {"role": "tool", "content": "12:00", "tool_name": "time"}]}),
    "no_limit": lambda api: same(api.post("/api/chat", {**OLLAMA, "messages": HI, "format": {"enum": ["x" * 300]}, "options": {"num_predict": 0}})["message"]["content"], f'"{"x" * 300}"'),
    "unknown_format": lambda api: holds("xml" in api.post("/api/chat", {**OLLAMA, "messages": HI, "format": "xml"}, 400)["error"]),
    "suffix": lambda api: holds("suffix" in api.post("/api/generate", {**OLLAMA, "prompt": "a", "suffix": "b"}, 400)["error"]),
    "template": lambda api: holds("template" in api.post("/api/generate", {**OLLAMA, "prompt": "a", "template": "b"}, 400)["error"]),
    "older_embeddings": lambda api: same(api.post("/api/embeddings", {"model": "fake", "prompt": "hi"})["embedding"], api.post("/api/embed", {"model": "fake", "input": "hi"})["embeddings"][0]),
    # VS Code asks for it
    "new_enough": lambda api: holds(tuple(map(int, api.http.get("/api/version").json()["version"].split("."))) >= (0, 6, 4)),
    "error_of_a_route": lambda api: holds(isinstance(api.post("/api/pull", {"model": "x"}, 404)["error"], str)),
    "error_of_show": lambda api: holds(isinstance(api.post("/api/show", {"model": "other"}, 404)["error"], str)),
})  # fmt: skip
