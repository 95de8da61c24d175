"""Behaviour that clients of llama.cpp's and vLLM's servers rely on, as small cases against one server with a tiny model.

Written from the behaviour that their server tests describe; each case is a line or two. The share that passes is
printed (`pytest -s`), and what fails is named. KNOWN holds what we do otherwise on purpose, with the reason.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from tests import conformance_clients, conformance_more, conformance_peers, conformance_routes
from tests.conformance import (
    CASES,
    CONTEXT,
    HI,
    SCHEMA,
    TOOL,
    Api,
    case,
    content,
    endless_target,
    holds,
    is_a,
    many,
    matches,
    same,
)
from tests.server_fakes import Served

from outrider.config import EngineConfig
from outrider.llm import LLM

assert (
    conformance_more and conformance_clients and conformance_peers and conformance_routes
)  # their cases are in the table, too
KNOWN: dict[str, str] = {}  # name -> why it is otherwise here
OUTCOMES: dict[str, bool] = {}


# ---- accepted, and of no effect

PLAIN_FIELDS: dict[str, Any] = {
    "store": True, "metadata": {"a": "b"}, "service_tier": "auto", "prompt_cache_key": "k", "safety_identifier": "s",
    "user": "u",
    "modalities": ["text"], "cache_prompt": True, "request_id": "r", "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "add_special_tokens": False, "timings_per_token": True, "id_slot": 0, "prompt_cache_retention": "24h",
    "verbosity": "low", "audio": {"voice": "alloy", "format": "wav"},
}  # fmt: skip
for field_name, given in PLAIN_FIELDS.items():
    many(
        "inert", {field_name: lambda api, f=field_name, v=given: same(content(api.chat(**{f: v})), content(api.chat()))}
    )
NULLS = (
    "stop",
    "tools",
    "tool_choice",
    "response_format",
    "logit_bias",
    "top_p",
    "n",
    "stream",
    "seed_",
    "nonsense",
    "functions",
    "logprobs",
)
for field_name in NULLS:
    many("null", {field_name: lambda api, f=field_name: api.chat(**{f.rstrip("_"): None})})
DEFAULTS: dict[str, dict[str, Any]] = {
    "top_k_minus_one": {"top_k": -1}, "top_k_zero": {"top_k": 0}, "stop_empty": {"stop": ""},
    "stop_list_empty": {"stop": []},
    "stop_list_of_empty": {"stop": [""]}, "top_p_one": {"top_p": 1.0}, "min_p_zero": {"min_p": 0.0},
    "penalty_one": {"repetition_penalty": 1.0},
    "repeat_penalty": {"repeat_penalty": 1.0}, "n_one": {"n": 1}, "tools_empty": {"tools": []},
    "format_text": {"response_format": {"type": "text"}},
    "bias_empty": {"logit_bias": {}}, "priority": {"priority": 3},
    "prediction": {"prediction": {"type": "content", "content": "hello there"}},
    "temperature": {"temperature": 0.7}, "outrider": {"outrider": {"draft_tokens": 0}},
    "kwargs_empty": {"chat_template_kwargs": {}},
    "completion_tokens": {"max_completion_tokens": 8}, "both_limits": {"max_completion_tokens": 8, "max_tokens": 8},
}  # fmt: skip
for field_name, given in DEFAULTS.items():
    many("default", {field_name: lambda api, v=given: same(content(api.chat(**v)), content(api.chat()))})
for effort in ("none", "minimal", "low", "medium", "high", "xhigh", "max"):
    many("reasoning_effort", {effort: lambda api, v=effort: api.chat(reasoning_effort=v)})

# ---- refused, by name

REFUSED: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": -1}, "top_p": {"top_p": 2}, "n": {"n": 0}, "max_tokens": {"max_tokens": 0},
    "unknown": {"foo": 1},
    "logprobs": {"logprobs": True, "top_logprobs": 21}, "top_logprobs": {"top_logprobs": 2},
    "messages": {"messages": []},
    "role": {"messages": [{"role": "a king", "content": "x"}]},
    "image": {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
    "stream_options": {"stream_options": {"include_usage": True}},
    "schema": {"response_format": {"type": "json_schema"}},
    "schema_not": {"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}},
    "regex": {"guided_regex": "("},
    "format_type": {"response_format": {"type": "xml"}}, "two_formats": {"guided_regex": "a", "guided_choice": ["a"]},
    "tool_choice": {"tool_choice": "required"}, "bias": {"logit_bias": {"5": "x"}},
    "bias_range": {"logit_bias": {"5": 101}}, "bias_id": {"logit_bias": {"999999": 1}},
    "seed": {"seed": "x"}, "stops": {"stop": ["x"] * 17}, "allowed": {"allowed_token_ids": [999999]},
    "allowed_empty": {"allowed_token_ids": []},
    "kwargs": {"chat_template_kwargs": {"messages": []}}, "continue_user": {"continue_final_message": True},
    "modalities": {"modalities": ["audio"]}, "presence": {"presence_penalty": 3},
    "frequency": {"frequency_penalty": -3}, "grammar": {"grammar": "root ::= ("},
}  # fmt: skip
for field_name, given in REFUSED.items():
    many(
        "refused",
        {
            field_name: lambda api, v=given: holds(
                set(api.chat(400, **v)["error"]) == {"message", "type", "param", "code"}
            )
        },
    )
many("missing", {
    "messages": lambda api: same(api.post("/v1/chat/completions", {}, 400)["error"]["param"], "messages"),
    "prompt": lambda api: same(api.post("/v1/completions", {}, 400)["error"]["param"], "prompt"),
    "model": lambda api: same(api.chat(model="other")["model"], "fake"),
    "route": lambda api: api.post("/v1/nowhere", {}, 404),
    "method": lambda api: holds(api.http.get("/v1/chat/completions").status_code == 405),
})  # fmt: skip

# ---- shapes


@case
def whole_shape(api: Api) -> None:
    got = api.chat()
    assert got["object"] == "chat.completion" and got["id"].startswith("chatcmpl-") and got["model"] == "fake"
    assert got["choices"][0]["message"]["role"] == "assistant" and got["choices"][0]["finish_reason"] == "length"
    assert got["usage"]["completion_tokens"] == 8 and got["usage"]["total_tokens"] == got["usage"]["prompt_tokens"] + 8


@case
def stream_shape(api: Api) -> None:
    chunks = api.stream()
    assert {c["object"] for c in chunks} == {"chat.completion.chunk"} and len({c["id"] for c in chunks}) == 1
    assert (
        chunks[0]["choices"][0]["delta"]["role"] == "assistant"
        and chunks[-1]["choices"][0]["finish_reason"] == "length"
    )
    assert "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks) == content(api.chat())


many("shape", {
    "completion": lambda api: same(api.text()["object"], "text_completion"),
    "completion_index": lambda api: same([c["index"] for c in api.text(n=3)["choices"]], [0, 1, 2]),
    "chat_n": lambda api: same(len(api.chat(n=4)["choices"]), 4),
    "fingerprint": lambda api: holds(api.chat()["system_fingerprint"].startswith("outrider")),
    "done": lambda api: holds(api.http.post("/v1/chat/completions", json={"messages": HI, "stream": True, "max_tokens": 2}).text.endswith("data: [DONE]\n\n")),
    "include_usage": lambda api: same(api.stream(stream_options={"include_usage": True})[-1]["usage"]["completion_tokens"], 8),
    "no_usage": lambda api: holds(all("usage" not in c for c in api.stream())),
    "continuous_usage": lambda api: holds(all(c["usage"] for c in api.stream(stream_options={"include_usage": True, "continuous_usage_stats": True}))),
    "obfuscation": lambda api: api.stream(stream_options={"include_obfuscation": False}),
    "cached_tokens": lambda api: holds("cached_tokens" in api.chat()["usage"]["prompt_tokens_details"]),
    "request_id": lambda api: same(api.http.get("/health", headers={"X-Request-Id": "me-7"}).headers["x-request-id"], "me-7"),
    "request_id_made": lambda api: holds(re.fullmatch("[0-9a-f]{32}", api.http.get("/health").headers["x-request-id"])),
    "token_ids": lambda api: same(len(api.chat(return_token_ids=True)["choices"][0]["token_ids"]), 8),
    "prompt_token_ids": lambda api: holds(api.chat(return_token_ids=True)["prompt_token_ids"]),
    "text_token_ids": lambda api: same(len(api.text(return_token_ids=True)["choices"][0]["prompt_token_ids"]), 5),
    "stream_token_ids": lambda api: same(sum(len(c["choices"][0].get("token_ids") or []) for c in api.stream(return_token_ids=True)), 8),
})  # fmt: skip

# ---- limits, stops, choosing

# 60 printable letters, whatever the model.
SPELLED: dict[str, Any] = {
    "max_tokens": 60,
    "temperature": 1,
    "ignore_eos": True,
    "allowed_token_ids": list(range(70, 96)),
}


@case
def stop_is_left_out(api: Api) -> None:
    text = api.text(**SPELLED)["choices"][0]["text"]
    stop = text[30]
    got = api.text(**SPELLED, stop=stop)["choices"][0]
    assert got["text"] == text[: text.index(stop)] and got["finish_reason"] == "stop"


@case
def stop_is_included(api: Api) -> None:
    text = api.text(**SPELLED)["choices"][0]["text"]
    stop = text[30]
    got = api.text(**SPELLED, stop=stop, include_stop_str_in_output=True)["choices"][0]["text"]
    assert got == text[: text.index(stop) + 1]


@case
def stop_token_ids_end(api: Api) -> None:
    ids = api.text(max_tokens=20, return_token_ids=True, temperature=1, ignore_eos=True)["choices"][0]["token_ids"]
    got = api.text(max_tokens=20, return_token_ids=True, temperature=1, stop_token_ids=[ids[9]], ignore_eos=True)[
        "choices"
    ][0]["token_ids"]
    assert got == ids[: ids.index(ids[9]) + 1]


@case
def allowed_tokens_only(api: Api) -> None:
    ids = api.text(max_tokens=20, temperature=1, allowed_token_ids=[70, 71, 72], return_token_ids=True)["choices"][0][
        "token_ids"
    ]
    assert set(ids) <= {70, 71, 72}


@case
def bad_words_never(api: Api) -> None:
    word = api.text(**SPELLED)["choices"][0]["text"][0]
    assert word not in api.text(**SPELLED, bad_words=[word])["choices"][0]["text"]


@case
def bias_forces(api: Api) -> None:
    ids = api.text(logit_bias={"80": 100}, return_token_ids=True)["choices"][0]["token_ids"]
    assert ids == [80] * 8


many("choosing", {
    "seed_repeats": lambda api: same(content(api.chat(temperature=1)), content(api.chat(temperature=1))),
    "seed_differs": lambda api: holds(content(api.chat(temperature=1.5, max_tokens=20)) != content(api.chat(temperature=1.5, max_tokens=20, seed=9))),
    "n_differ": lambda api: holds(len({c["message"]["content"] for c in api.chat(temperature=1.5, max_tokens=20, n=4)["choices"]}) > 1),
    "greedy": lambda api: same(content(api.chat(temperature=0)), content(api.chat(temperature=0, seed=5))),
    "top_k_one": lambda api: same(content(api.chat(temperature=1, top_k=1)), content(api.chat(temperature=0))),
    "top_p_zero": lambda api: same(content(api.chat(temperature=1, top_p=0)), content(api.chat(temperature=0))),
    "max_tokens_minus_one": lambda api: same(api.chat(max_tokens=-1, ignore_eos=True)["usage"]["total_tokens"], CONTEXT),
    "max_tokens_beyond": lambda api: same(api.chat(max_tokens=10**7, ignore_eos=True)["usage"]["total_tokens"], CONTEXT),
    "min_tokens": lambda api: holds(api.chat(min_tokens=6, max_tokens=8)["usage"]["completion_tokens"] >= 6),
    "default_limit": lambda api: holds(api.post("/v1/completions", {"prompt": "x", "ignore_eos": True})["usage"]["completion_tokens"] == 16),
    "negative_seed": lambda api: api.chat(seed=-1),
    "draft_changes_nothing": lambda api: same(content(api.chat(outrider={"draft_tokens": 0}, max_tokens=30)), content(api.chat(outrider={"draft_tokens": 9}, max_tokens=30))),
    "prediction_changes_nothing": lambda api: same(content(api.chat(max_tokens=30, prediction={"type": "content", "content": content(api.chat(max_tokens=30))})), content(api.chat(max_tokens=30))),
    "too_long": lambda api: same(api.text(400, prompt="x" * 2 * CONTEXT)["error"]["code"], "context_length_exceeded"),
    "many_prompts": lambda api: same(len(api.text(prompt=["a", "b"] * 15, max_tokens=1)["choices"]), 30),
    "token_prompt": lambda api: same(api.text(prompt=[70, 71])["usage"]["prompt_tokens"], 2),
    "token_prompts": lambda api: same(len(api.text(prompt=[[70, 71], [72]])["choices"]), 2),
    "mixed_prompts": lambda api: same(len(api.text(prompt=["a", [72]])["choices"]), 2),
    "best_of": lambda api: same(len(api.text(best_of=4, n=2, temperature=1)["choices"]), 2),
    "best_of_hides": lambda api: same(api.text(best_of=2, temperature=1)["choices"][0]["logprobs"], None),
})  # fmt: skip

# ---- log-probabilities and scoring


@case
def echo_logprobs_zero_tokens(api: Api) -> None:
    got = api.text(prompt="hello", echo=True, logprobs=1, max_tokens=0)["choices"][0]
    assert (
        got["text"] == "hello"
        and got["logprobs"]["tokens"] == list("hello")
        and got["logprobs"]["token_logprobs"][0] is None
    )
    assert all(p < 0 for p in got["logprobs"]["token_logprobs"][1:]) and got["logprobs"]["text_offset"] == [
        0,
        1,
        2,
        3,
        4,
    ]
    assert len(got["logprobs"]["top_logprobs"]) == 5 and got["logprobs"]["top_logprobs"][0] is None


@case
def scores_are_the_models(api: Api) -> None:
    """Scoring a greedy continuation gives the log-probabilities of its generation."""
    answer = api.text(prompt="hello", max_tokens=6, temperature=0, logprobs=0, return_token_ids=True)["choices"][0]
    ids = [*api.post("/tokenize", {"prompt": "hello"})["tokens"], *answer["token_ids"]]
    scored = api.text(prompt=ids, echo=True, logprobs=0, max_tokens=0)["choices"][0]["logprobs"]["token_logprobs"]
    assert scored[5:] == pytest.approx(answer["logprobs"]["token_logprobs"], abs=1e-4)


@case
def echo_with_generation(api: Api) -> None:
    got = api.text(prompt="hello", echo=True, logprobs=0, max_tokens=3)["choices"][0]
    assert got["text"].startswith("hello") and len(got["logprobs"]["token_logprobs"]) == 8


many("logprobs", {
    "chat": lambda api: same(len(api.chat(logprobs=True, top_logprobs=5)["choices"][0]["logprobs"]["content"][0]["top_logprobs"]), 5),
    "chat_zero": lambda api: same(api.chat(logprobs=True)["choices"][0]["logprobs"]["content"][0]["top_logprobs"], []),
    "chat_off": lambda api: same(api.chat()["choices"][0]["logprobs"], None),
    "chat_count": lambda api: same(len(api.chat(logprobs=True)["choices"][0]["logprobs"]["content"]), 8),
    "text": lambda api: same(len(api.text(logprobs=2, temperature=0)["choices"][0]["logprobs"]["top_logprobs"][0]), 2),
    "stream": lambda api: same(sum(len((c["choices"][0]["logprobs"] or {}).get("content", [])) for c in api.stream(logprobs=True)), 8),
    "prompt_text": lambda api: same(api.text(prompt_logprobs=2)["choices"][0]["prompt_logprobs"][0], None),
    "prompt_text_count": lambda api: same(len(api.text(prompt_logprobs=0)["choices"][0]["prompt_logprobs"]), 5),
    "prompt_chat": lambda api: holds(len(api.chat(prompt_logprobs=1)["prompt_logprobs"]) > 5),
    "prompt_rank": lambda api: holds(all("rank" in e for t in api.text(prompt_logprobs=1)["choices"][0]["prompt_logprobs"][1:] for e in t.values())),
    "zero_without_echo": lambda api: same(api.text(max_tokens=0)["choices"][0]["text"], ""),
    "zero_usage": lambda api: same(api.text(max_tokens=0)["usage"]["completion_tokens"], 0),
    "echo_text": lambda api: holds(api.text(echo=True)["choices"][0]["text"].startswith("hello")),
    "echo_stream": lambda api: holds(api.lines("/v1/completions", {"prompt": "hello", "echo": True, "stream": True, "max_tokens": 2})[0]["choices"][0]["text"] == "hello"),
})  # fmt: skip

# ---- structured output

many("structured", {
    "schema": lambda api: is_a(content(api.chat(max_tokens=60, response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}))),
    "schema_no_name": lambda api: is_a(content(api.chat(max_tokens=60, response_format={"type": "json_schema", "json_schema": {"schema": SCHEMA}}))),
    "schema_strict": lambda api: is_a(content(api.chat(max_tokens=60, response_format={"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}}))),
    "object_schema": lambda api: is_a(content(api.chat(max_tokens=60, response_format={"type": "json_object", "schema": SCHEMA}))),
    "llama_schema": lambda api: is_a(content(api.chat(max_tokens=60, json_schema=SCHEMA))),
    "guided_json": lambda api: is_a(content(api.chat(max_tokens=60, guided_json=SCHEMA))),
    "guided_json_text": lambda api: is_a(content(api.chat(max_tokens=60, guided_json=json.dumps(SCHEMA)))),
    "guided_regex": lambda api: matches("[ab]{4}", content(api.chat(guided_regex="[ab]{4}"))),
    "guided_choice": lambda api: holds(content(api.chat(guided_choice=["red", "green"])) in ("red", "green")),
    "guided_grammar": lambda api: holds(content(api.chat(guided_grammar='root ::= "yes" | "no"')) in ("yes", "no")),
    "grammar": lambda api: holds(content(api.chat(grammar='root ::= "a" [0-9]+ "b"', max_tokens=40)).startswith("a")),
    "outputs_json": lambda api: is_a(content(api.chat(max_tokens=60, structured_outputs={"json": SCHEMA}))),
    "outputs_regex": lambda api: matches("x{3}", content(api.chat(structured_outputs={"regex": "x{3}"}))),
    "outputs_choice": lambda api: same(content(api.chat(structured_outputs={"choice": ["only"]})), "only"),
    "outputs_grammar": lambda api: same(content(api.chat(structured_outputs={"grammar": 'root ::= "ok"'})), "ok"),
    "text_format": lambda api: is_a(api.text(max_tokens=60, response_format={"type": "json_schema", "json_schema": {"schema": SCHEMA}})["choices"][0]["text"]),
    "text_schema": lambda api: is_a(api.text(max_tokens=60, json_schema=SCHEMA)["choices"][0]["text"]),
    "text_grammar": lambda api: same(api.text(grammar='root ::= "ok"')["choices"][0]["text"], "ok"),
    "text_choice": lambda api: same(api.text(guided_choice=["ok"])["choices"][0]["text"], "ok"),
    "stream": lambda api: is_a("".join(c["choices"][0]["delta"].get("content") or "" for c in api.stream(max_tokens=60, json_schema=SCHEMA))),
    "with_tools": lambda api: holds(api.chat(max_tokens=90, tools=[TOOL], response_format={"type": "json_schema", "json_schema": {"schema": SCHEMA}})["choices"][0]["finish_reason"] in ("stop", "tool_calls")),
    "declared_only": lambda api: is_a(content(api.chat(max_tokens=60, temperature=1.5, json_schema={**SCHEMA, "additionalProperties": False}))),
})  # fmt: skip

# ---- tools


@case
def forced_tool(api: Api) -> None:
    choice = api.chat(tools=[TOOL], tool_choice="required", max_tokens=200, parallel_tool_calls=False)["choices"][0]
    (call,) = choice["message"]["tool_calls"]
    assert (
        choice["finish_reason"] == "tool_calls"
        and call["function"]["name"] == "time"
        and json.loads(call["function"]["arguments"])["zone"] in ("UTC", "CET")
    )


@case
def named_tool(api: Api) -> None:
    choice = api.chat(tools=[TOOL], tool_choice={"type": "function", "function": {"name": "time"}}, max_tokens=200)[
        "choices"
    ][0]
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "time" and choice["message"]["content"] is None


@case
def streamed_tool(api: Api) -> None:
    deltas = [
        d
        for c in api.stream(tools=[TOOL], tool_choice="required", max_tokens=200)
        for d in c["choices"][0]["delta"].get("tool_calls", [])
    ]
    first = [d for d in deltas if d["index"] == 0]
    assert first[0]["id"] and first[0]["function"]["name"] == "time"
    assert json.loads("".join(d["function"]["arguments"] for d in first))["zone"] in ("UTC", "CET")


@case
def old_functions(api: Api) -> None:
    choice = api.chat(functions=[TOOL["function"]], function_call={"name": "time"}, max_tokens=200)["choices"][0]
    assert (
        choice["finish_reason"] == "function_call"
        and choice["message"]["function_call"]["name"] == "time"
        and "tool_calls" not in choice["message"]
    )


CALL = {"id": "c1", "index": 0, "type": "function", "function": {"name": "time", "arguments": '{"zone":"UTC"}'}}
HISTORY: dict[str, list[dict[str, Any]]] = {
    "annotations": [{"role": "assistant", "content": "x", "annotations": [], "refusal": None, "audio": None, "function_call": None, "tool_calls": None}],
    "litellm": [{"role": "assistant", "content": "x", "provider_specific_fields": {"a": 1}}],
    "null_content": [{"role": "assistant", "content": None}],
    "calls": [{"role": "assistant", "content": None, "tool_calls": [CALL]}, {"role": "tool", "tool_call_id": "c1", "content": "12:00"}],
    "calls_empty": [{"role": "assistant", "content": "x", "tool_calls": []}],
    "cache_control": [{"role": "user", "content": [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}]}],
    "reasoning": [{"role": "assistant", "content": "x", "reasoning_content": "hm", "reasoning": "hm"}],
    "parts": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
    "name": [{"role": "user", "content": "x", "name": "bob"}], "developer": [{"role": "developer", "content": "x"}],
    "old_function": [{"role": "assistant", "content": None, "function_call": {"name": "time", "arguments": "{}"}}, {"role": "function", "name": "time", "content": "12"}],
    "tool_without_id": [{"role": "tool", "content": "12"}],
    "tool_parts": [{"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "12"}]}],
    "empty_user": [{"role": "user", "content": ""}],
    "dict_arguments": [{"role": "assistant", "content": "", "tool_calls": [{"id": "c", "type": "function", "function": {"name": "time", "arguments": {"zone": "UTC"}}}]}],
}  # fmt: skip
for field_name, messages in HISTORY.items():
    many("history", {field_name: lambda api, m=messages: api.chat(messages=[*HI, *m, *HI])})


@case
def history_round_trip(api: Api) -> None:
    message = api.chat(tools=[TOOL], tool_choice="required", parallel_tool_calls=False, max_tokens=200)["choices"][0][
        "message"
    ]
    results = [{"role": "tool", "tool_call_id": c["id"], "content": "12:00"} for c in message["tool_calls"]]
    api.chat(messages=[*HI, message, *results], tools=[TOOL])


@case
def prefill(api: Api) -> None:
    shown = api.post(
        "/apply-template",
        {"messages": [*HI, {"role": "assistant", "content": "The answer"}], "continue_final_message": True},
    )["prompt"]
    assert shown.endswith("<|im_start|>assistant\nThe answer")
    api.chat(
        messages=[*HI, {"role": "assistant", "content": "The answer"}],
        continue_final_message=True,
        add_generation_prompt=False,
    )


# ---- the run


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    folder = endless_target(tmp_path_factory.mktemp("conformance") / "target")
    llm = LLM.load(
        str(folder), drafter="ngram", draft_tokens=2, threads=1, engine=EngineConfig(max_batch=10, max_context=CONTEXT)
    )
    assert llm.tokenizer is not None
    with Served(
        llm.engine, llm.tokenizer, llm.engine.max_context, llm.config.vocab_size, max_concurrent=8, max_queued=64
    ) as s:
        yield Api(s.url)
    passed = sum(OUTCOMES.values())
    failed = sorted(name for name, ok in OUTCOMES.items() if not ok)
    print(
        f"\nconformance: {passed} of {len(OUTCOMES)} cases ({100 * passed / max(1, len(OUTCOMES)):.1f} %); failed: {failed or 'none'}"
    )


@pytest.mark.parametrize("name", list(CASES))
def test_conformance(api: Api, name: str) -> None:
    OUTCOMES[name] = False
    if name in KNOWN:
        pytest.xfail(KNOWN[name])
    CASES[name](api)
    OUTCOMES[name] = True
