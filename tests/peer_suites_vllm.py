"""vLLM's cases; see tests/peer_suites.py."""

from __future__ import annotations

import json
from typing import Any

from tests.conformance import HI, Api, content
from tests.peer_suites import BOOK, SAID, TOOL, WHEN, add, cancelled, forced, must, refuses
from tests.waiting import until

V = "vLLM"
CHOICES = ["Python", "Rust", "C"]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["a", "b"]}, "age": {"type": "integer", "maximum": 9, "minimum": 0}},
    "required": ["name", "age"],
}


def text(api: Api, **body: Any) -> Any:
    return api.text(**body)["choices"][0]


def single(api: Api) -> None:
    answer = api.text(max_tokens=5, temperature=0)
    assert answer["choices"][0]["finish_reason"] == "length" and answer["usage"]["completion_tokens"] == 5
    assert answer["usage"]["total_tokens"] == answer["usage"]["prompt_tokens"] + 5
    assert "cached_tokens" in answer["usage"]["prompt_tokens_details"]
    assert "prompt_logprobs" not in text(api, prompt=[9, 9, 9])


def streamed_text(api: Api) -> None:
    chunks = api.lines(
        "/v1/completions", {"prompt": "x", "max_tokens": 5, "temperature": 0, "stream": True, "ignore_eos": True}
    )
    ends = [c["choices"][0]["finish_reason"] for c in chunks if c["choices"][0]["finish_reason"]]
    assert (
        ends == ["length"]
        and "".join(c["choices"][0]["text"] for c in chunks)
        == text(api, prompt="x", max_tokens=5, temperature=0)["text"]
    )


def several(api: Api, stream: bool) -> None:
    body = {"prompt": "x", "n": 3, "temperature": 1.0, "seed": 42, "max_tokens": 30, "ignore_eos": True}
    whole = api.post("/v1/completions", body)["choices"]
    assert [c["index"] for c in whole] == [0, 1, 2] and len({c["text"] for c in whole}) == 3
    if stream:
        texts = ["", "", ""]
        ends = 0
        for c in api.lines("/v1/completions", {**body, "stream": True}):
            texts[c["choices"][0]["index"]] += c["choices"][0]["text"]
            ends += c["choices"][0]["finish_reason"] is not None
        assert ends == 3 and texts == [c["text"] for c in whole]


def usage_in_streams(api: Api, path: str, body: Any) -> None:
    def chunks(**options: Any) -> list[Any]:
        return api.lines(path, {**body, "stream": True, "stream_options": options, "max_tokens": 5, "ignore_eos": True})

    assert not any(c.get("usage") for c in [*chunks(include_usage=False), *chunks()])
    *others, last = chunks(include_usage=True, continuous_usage_stats=False)
    assert not any(c.get("usage") for c in others) and last["choices"] == []
    assert last["usage"]["total_tokens"] == last["usage"]["prompt_tokens"] + last["usage"]["completion_tokens"]
    counts = [c["usage"]["completion_tokens"] for c in chunks(include_usage=True, continuous_usage_stats=True)]
    assert counts == sorted(counts) and counts[-1] == 5
    for options in ({"include_usage": True}, {"continuous_usage_stats": True}):
        refuses(api, path, {**body, "stream": False, "stream_options": options})


def batch(api: Api) -> None:
    for prompts in (["hello"] * 2, [[9, 9, 9]] * 2):
        one, two = api.text(prompt=prompts, temperature=0)["choices"]
        assert one["text"] == two["text"]
        texts = ["", ""]
        for c in api.lines(
            "/v1/completions",
            {"prompt": prompts, "temperature": 0, "max_tokens": 8, "ignore_eos": True, "stream": True},
        ):
            texts[c["choices"][0]["index"]] += c["choices"][0]["text"]
        assert texts == [one["text"]] * 2


def echoed(api: Api, many: int) -> None:
    for prompt in ("hello", [104, 105]):
        answer = text(api, prompt=prompt, echo=True, logprobs=many, temperature=0)
        scores = answer["logprobs"]
        assert scores["token_logprobs"][0] is None and scores["top_logprobs"][0] is None
        assert all(max(many, 1) <= len(t) <= many + 1 for t in scores["top_logprobs"][1:]), scores
        assert len(scores["text_offset"]) == len(scores["tokens"]) > 8


def scored_prompt(api: Api, many: int | None) -> None:
    answer = api.text(prompt=["A robot", "My name"], **({} if many is None else {"prompt_logprobs": many}))["choices"]
    assert all((c.get("prompt_logprobs") is None) == (many is None) for c in answer)


def scored_chat(api: Api, many: int | None) -> None:
    answer = api.chat(**({} if many is None else {"prompt_logprobs": many})).get("prompt_logprobs")
    assert (answer is None) == (many is None)


add(V, "basic/test_basic", {
    "show_version": lambda api: must(api.http.get("/version").json()["version"]),
    "check_health": lambda api: must(api.http.get("/health").status_code == 200),
    "request_cancellation": cancelled,
    "health_check_engine_dead_error": lambda api: must(api.http.get("/readyz").status_code == 200),
    "server_load": lambda api: until(lambda: api.http.get("/load").json() == {"server_load": 0}, lambda: "busy for ever"),
})  # fmt: skip
add(V, "basic/test_basic", {
    "request_wrong_content_type": lambda api: must(api.http.post("/v1/chat/completions", content="{}", headers={"Content-Type": "text/plain"}).status_code == 415),
}, "a body whose content type is a form")  # fmt: skip


def ids_of_text(api: Api) -> None:
    answer = text(api, prompt="I love 🚀", temperature=0, logprobs=1, return_token_ids=True)
    back = api.post("/detokenize", {"tokens": answer["prompt_token_ids"]})["prompt"]
    assert "I love 🚀" in back and len(answer["token_ids"]) == 8
    assert "token_ids" not in text(api, return_token_ids=False)


def ids_of_chat(api: Api, **more: Any) -> None:
    answer = api.chat(messages=BOOK, return_token_ids=True, **more)
    assert "What is the best book" in api.post("/detokenize", {"tokens": answer["prompt_token_ids"]})["prompt"]
    assert len(answer["choices"][0]["token_ids"]) == answer["usage"]["completion_tokens"]


def ids_as_tokens(api: Api) -> None:
    answer = text(api, echo=True, logprobs=1, return_token_ids=True, return_tokens_as_token_ids=True, temperature=0)
    named = [int(t.removeprefix("token_id:")) for t in answer["logprobs"]["tokens"]]
    assert named == [*answer["prompt_token_ids"], *answer["token_ids"]]


def ids_in_stream(api: Api) -> None:
    first, *others = api.stream(messages=BOOK, return_token_ids=True)
    assert first["prompt_token_ids"] and not any("prompt_token_ids" in c for c in others)
    assert len([t for c in others for t in c["choices"][0].get("token_ids") or []]) == 8


add(V, "basic/test_return_token_ids", {
    "basic_completion_with_emoji": ids_of_text,
    "chat_completion_with_tool_use": lambda api: ids_of_chat(api, tools=[TOOL], tool_choice="auto"),
    "comparison_with_prompt_logprobs_and_logprobs": ids_as_tokens,
    "chat_completion_with_emoji_and_token_ids": ids_in_stream,
})  # fmt: skip
add(V, "completion/test_prompt_validation", {
    "empty_prompt": lambda api: refuses(api, "/v1/completions", {"prompt": None}),
    "out_of_vocab_token_ids": lambda api: refuses(api, "/v1/completions", {"prompt": [999999]}, "999999"),
})  # fmt: skip
add(V, "completion/test_completion", {
    "single_completion": single,
    "truncation_side[left]": lambda api: must(text(api, prompt=[*range(7, 15)], truncate_prompt_tokens=4, return_token_ids=True)["prompt_token_ids"] == [11, 12, 13, 14]),
    "truncation_side[right]": None,
    "no_logprobs": lambda api: must(text(api, logprobs=None)["logprobs"] is None),
    "zero_logprobs": lambda api: must(len(text(api, logprobs=0)["logprobs"]["top_logprobs"][0]) == 1),
    "some_logprobs": lambda api: must(5 <= len(text(api, logprobs=5, return_tokens_as_token_ids=True)["logprobs"]["top_logprobs"][0]) <= 6),
    "too_many_completion_logprobs": lambda api: refuses(api, "/v1/completions", {"prompt": "x", "logprobs": 21}, "logprobs"),
    "prompt_logprobs[0]": lambda api: scored_prompt(api, 0), "prompt_logprobs[1]": lambda api: scored_prompt(api, 1),
    "prompt_logprobs[none]": lambda api: scored_prompt(api, None),
    "completion_streaming": streamed_text, "parallel_no_streaming": lambda api: several(api, False),
    "parallel_streaming": lambda api: several(api, True),
    "completion_stream_options": lambda api: usage_in_streams(api, "/v1/completions", {"prompt": "x"}),
    "batch_completions": batch, "echo_logprob_completion[1]": lambda api: echoed(api, 1),
    "echo_logprob_completion[0]": lambda api: echoed(api, 0),
    "invalid_json_schema": lambda api: refuses(api, "/v1/completions", {"prompt": "x", "structured_outputs": {"json": {"type": "object", "properties": {"foo": "bar"}}}}),
    "invalid_regex": lambda api: refuses(api, "/v1/completions", {"prompt": "x", "structured_outputs": {"regex": "[.*"}}),
    "invalid_grammar": lambda api: refuses(api, "/v1/completions", {"prompt": "x", "structured_outputs": {"grammar": "root ::= nothing_of_the_kind"}}),
})  # fmt: skip
add(V, "completion/test_completion", {
    "prompt_logprobs[-1]": lambda api: scored_prompt(api, -1),
}, "more than 20 `logprobs`")  # fmt: skip
add(V, "completion/test_completion", {
    "batch_completions[beams]": lambda api: refuses(api, "/v1/completions", {"prompt": "x", "n": 2, "use_beam_search": True}, "beam"),
}, "`use_beam_search`")  # fmt: skip


def chat_session(api: Api) -> None:
    answer = api.chat(messages=BOOK, logprobs=True, top_logprobs=5)
    assert answer["choices"][0]["finish_reason"] == "length"
    assert content(api.chat(messages=[*BOOK, answer["choices"][0]["message"], HI[0]])) is not None


def streamed_chat(api: Api) -> None:
    chunks = [c["choices"][0] for c in api.stream(temperature=0)]
    assert [c["finish_reason"] for c in chunks if c["finish_reason"]] == ["length"]
    assert "".join(c["delta"].get("content") or "" for c in chunks) == content(api.chat(temperature=0))


def alternatives(api: Api, many: int) -> None:
    entries = api.chat(logprobs=True, top_logprobs=many)["choices"][0]["logprobs"]["content"]
    assert all(len(e["top_logprobs"]) == many for e in entries)


def one_of(api: Api) -> None:
    answer = content(api.chat(structured_outputs={"choice": CHOICES}))
    again = content(
        api.chat(
            messages=[*HI, {"role": "assistant", "content": answer}, HI[0]], structured_outputs={"choice": CHOICES}
        )
    )
    assert {answer, again} <= set(CHOICES)


def by_schema(api: Api, **how: Any) -> None:
    assert set(json.loads(content(api.chat(max_tokens=60, **how)))) == {"name", "age"}


def least_logprob(api: Api) -> None:
    answer = api.chat(structured_outputs={"choice": CHOICES}, logprobs=True, top_logprobs=5)["choices"][0]["logprobs"]
    assert all(e["logprob"] >= -9999.0 for t in answer["content"] for e in t["top_logprobs"])


def other_role(api: Api) -> None:
    plain, parts = (
        api.chat(messages=[{"role": "narrator", "content": c}]) for c in ("1+1?", [{"type": "text", "text": "1+1?"}])
    )
    assert content(plain) == content(parts)


def n_chat(api: Api, stream: bool) -> None:
    whole = api.chat(n=3, temperature=1.0, max_tokens=20)["choices"]
    assert [c["index"] for c in whole] == [0, 1, 2] and len({c["message"]["content"] for c in whole}) > 1
    if stream:
        chunks = [c["choices"][0] for c in api.stream(n=3, temperature=1.0, max_tokens=20)]
        texts = ["".join(c["delta"].get("content") or "" for c in chunks if c["index"] == i) for i in range(3)]
        assert texts == [c["message"]["content"] for c in whole]


add(V, "chat_completion/test_chat", {
    "no_logprobs_chat": lambda api: must(api.chat(logprobs=False)["choices"][0]["logprobs"] is None),
    "zero_logprobs_chat": lambda api: alternatives(api, 0), "some_logprobs_chat": lambda api: alternatives(api, 5),
    "too_many_chat_logprobs": lambda api: refuses(api, "/v1/chat/completions", {"messages": HI, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    "prompt_logprobs_chat[1]": lambda api: scored_chat(api, 1), "prompt_logprobs_chat[0]": lambda api: scored_chat(api, 0),
    "prompt_logprobs_chat[none]": lambda api: scored_chat(api, None),
    "more_than_one_prompt_logprobs_chat": lambda api: must(len(api.chat(prompt_logprobs=2)["prompt_logprobs"][3]) in (2, 3)),
    "single_chat_session": chat_session, "chat_streaming": streamed_chat,
    "chat_completion_stream_options": lambda api: usage_in_streams(api, "/v1/chat/completions", {"messages": HI}),
    "structured_outputs_choice_chat": one_of,
    "structured_outputs_json_chat": lambda api: by_schema(api, structured_outputs={"json": SCHEMA}),
    "structured_outputs_regex_chat": lambda api: must(content(api.chat(structured_outputs={"regex": "[0-9]{3}"})).isdigit()),
    "structured_outputs_type_error": lambda api: refuses(api, "/v1/chat/completions", {"messages": HI, "structured_outputs": {"regex": {"1": "x"}}}),
    "structured_outputs_choice_chat_logprobs": least_logprob,
    "response_format_json_object": lambda api: must(content(api.chat(response_format={"type": "json_object"}, max_tokens=8)).lstrip().startswith("{")),
    "response_format_json_schema": lambda api: by_schema(api, response_format={"type": "json_schema", "json_schema": {"name": "t", "schema": SCHEMA}}),
    "response_format_text": lambda api: must(content(api.chat(response_format={"type": "text"})) is not None),
    "extra_fields_allowed": lambda api: must(api.chat(messages=[{**HI[0], "extra_field": "0"}])["choices"]),
    "complex_message_content": lambda api: must(content(api.chat(messages=[{"role": "user", "content": [{"type": "text", "text": "hello"}]}])) == content(api.chat())),
    "custom_role": other_role,
    "long_seed": lambda api: [refuses(api, "/v1/chat/completions", {"messages": HI, "seed": s}, "seed") for s in (-(2**63) - 1, 2**63)],
    "n_parameter_non_streaming": lambda api: n_chat(api, False), "n_parameter_streaming": lambda api: n_chat(api, True),
    "n_with_seed": lambda api: must(api.chat(n=2)["choices"] == api.chat(n=2)["choices"]),
    "n_equals_1": lambda api: must(len(api.chat(n=1)["choices"]) == 1),
    "request_n_parameter_default": lambda api: must(len(api.chat()["choices"]) == 1),
})  # fmt: skip
add(
    V,
    "chat_completion/test_chat",
    {"prompt_logprobs_chat[-1]": lambda api: scored_chat(api, -1)},
    "more than 20 `logprobs`",
)
add(V, "chat_completion/test_chat", {
    "stream_options[min_characters]": lambda api: refuses(api, "/v1/chat/completions", {"messages": HI, "min_characters": 10}, "min_characters"),
}, "unknown fields")  # fmt: skip
add(V, "chat_completion/test_chat", {
    "invocations": lambda api: must(api.http.post("/invocations", json={"messages": HI}).status_code == 404),
}, "`/infill`")  # fmt: skip
add(V, "chat_completion/test_chat_echo", {
    "echo_and_continue_final_message[on]": lambda api: must(content(api.chat(messages=SAID, echo=True, continue_final_message=True, add_generation_prompt=False)).startswith("An apple a day")),
    "echo_and_continue_final_message[off]": lambda api: must("An apple" not in content(api.chat(messages=SAID, continue_final_message=True, add_generation_prompt=False))),
    "prompt_logprobs": lambda api: must(api.chat(prompt_logprobs=-1)["prompt_logprobs"]),
})  # fmt: skip
add(V, "chat_completion/test_chat_echo", {
    "top_logprobs": lambda api: must(len(api.chat(logprobs=True, top_logprobs=-1)["choices"][0]["logprobs"]["content"][0]["top_logprobs"]) == 20),
}, "more than 20 `logprobs`")  # fmt: skip
add(V, "chat_completion/test_chat_logit_bias_validation", {
    "valid": lambda api: must(api.chat(logit_bias={"287": 1.0})["choices"]),
    "invalid": lambda api: refuses(api, "/v1/chat/completions", {"messages": HI, "logit_bias": {"289": 1.0}}, "logit_bias", "289"),
    "non_numeric_value": lambda api: refuses(api, "/v1/chat/completions", {"messages": HI, "logit_bias": {"1": "x"}}, "logit_bias"),
})  # fmt: skip
add(V, "chat_completion/test_chat_logit_bias_validation", {
    "non_integer_key": lambda api: must(api.chat(logit_bias={"not": 50})["choices"]),
    "multiple_non_integer_keys": lambda api: must(api.chat(logit_bias={"bad": 50.0, "worse": 20.0})["choices"]),
}, "`logit_bias` beyond")  # fmt: skip
add(V, "chat_completion/test_chat_stop_token_ids_validation", {
    "valid": lambda api: must(api.chat(stop_token_ids=[287])["choices"]),
    "out_of_vocab": lambda api: refuses(api, "/v1/chat/completions", {"messages": HI, "stop_token_ids": [289]}, "289"),
    "negative": lambda api: refuses(api, "/v1/chat/completions", {"messages": HI, "stop_token_ids": [-1]}),
})  # fmt: skip


def called(api: Api, arguments: str) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "when", "arguments": arguments}}
    said = [
        *HI,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "noon"},
    ]
    assert content(api.chat(messages=said, tools=[WHEN])) is not None


def cut_call(api: Api, choice: Any) -> None:
    answer = api.chat(tools=[TOOL], tool_choice=choice, max_tokens=1)["choices"][0]
    assert answer["finish_reason"] == "length" and not answer["message"].get("tool_calls")


NAMED = {"type": "function", "function": {"name": "test"}}
for streams in (False, True):
    mode = "streamed" if streams else "whole"
    add(V, "chat_completion/test_completion_with_function_calling", {
        f"function_tool_use[required, {mode}]": lambda api, s=streams: forced(api, s),
        f"function_tool_use[named, {mode}]": lambda api, s=streams: forced(api, s, choice=NAMED),
        f"named_tool_use[{mode}]": lambda api, s=streams: forced(api, s, WHEN, {"type": "function", "function": {"name": "when"}}),
    })  # fmt: skip
add(V, "chat_completion/test_completion_with_function_calling", {
    "no_args_tool_call[{}]": lambda api: called(api, "{}"), "no_args_tool_call[]": lambda api: called(api, ""),
    "inconsistent_tool_choice[no tools]": lambda api: refuses(api, "/v1/chat/completions", {"messages": HI, "tool_choice": NAMED}),
    "inconsistent_tool_choice[other name]": lambda api: refuses(api, "/v1/chat/completions", {"messages": HI, "tools": [WHEN], "tool_choice": NAMED}),
    "inconsistent_tool_choice[empty]": lambda api: refuses(api, "/v1/chat/completions", {"messages": HI, "tools": [TOOL], "tool_choice": {}}),
    "max_tokens_with_tool_choice[required]": lambda api: cut_call(api, "required"),
    "max_tokens_with_tool_choice[named]": lambda api: cut_call(api, NAMED),
})  # fmt: skip
add(V, "chat_completion/test_non_object_body_validation", {
    f"rejects_non_object_body[{body!r}]": lambda api, b=body: refuses(api, "/v1/chat/completions", b)
    for body in ("this is not {{{", ["not", "an", "object"], 42, None)
} | {"cache_salt_still_validated": lambda api: refuses(api, "/v1/chat/completions", {"messages": HI, "cache_salt": ""}, "cache_salt")})  # fmt: skip


def tokenized(api: Api, **body: Any) -> None:
    answer = api.post("/tokenize", body)
    assert answer["count"] == len(answer["tokens"]) and answer["max_model_len"] == 1536


TOLD = {"messages": SAID, "continue_final_message": True, "add_generation_prompt": False}
add(V, "test_tokenization", {
    "tokenize_completions": lambda api: [tokenized(api, prompt="vllm1", add_special_tokens=s) for s in (True, False)],
    "tokenize_chat": lambda api: [tokenized(api, **b) for b in ({"messages": HI}, {"messages": HI, "add_generation_prompt": False}, TOLD)],
    "tokenize_chat_with_tools": lambda api: [tokenized(api, tools=[TOOL], **b) for b in ({"messages": HI}, TOLD)],
    "tokenize_with_return_token_strs": lambda api: must(len(api.post("/tokenize", {"prompt": "abc", "return_token_strs": True})["token_strs"]) >= 3),
    "detokenize": lambda api: must(api.post("/detokenize", {"tokens": api.post("/tokenize", {"prompt": "a b"})["tokens"]})["prompt"].endswith("a b")),
    "tokenizer_info_basic": lambda api: must(api.http.get("/tokenizer_info").json()["tokenizer_class"]),
    "tokenizer_info_schema": lambda api: must(isinstance(api.http.get("/tokenizer_info").json().get("eos_token", ""), str)),
    "tokenizer_info_chat_template": lambda api: must(api.http.get("/tokenizer_info").json()["chat_template"]),
})  # fmt: skip
