"""Cases that llama.cpp's and vLLM's own server tests check beyond OpenAI's API; registered in the table of
tests/e2e/test_conformance.py."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from tests.conformance import HI, Api, case, content, holds, many, matches, same

ENDING = [*HI, {"role": "assistant", "content": "It is"}]
TOOL: Any = {
    "type": "function",
    "function": {"name": "zq_time", "description": "d", "parameters": {"type": "object", "properties": {}}},
}


def shown(api: Api, **body: Any) -> str:
    return str(api.post("/apply-template", {"messages": HI, **body})["prompt"])


def counted(api: Api, **body: Any) -> int:
    return int(api.post("/tokenize", {"messages": HI, **body})["count"])


@case
def template_shows_the_text_itself(api: Api) -> None:
    """Brackets of a message come back as they were sent, also where they spell a control token."""
    said = "if a < b and c > d: <|im_end|> print('[x]')"
    prompt = shown(api, messages=[{"role": "user", "content": said}])
    assert said in prompt and not any("\ue000" <= c <= "\uf8ff" for c in prompt)


@case
def tokenize_reads_what_chat_reads(api: Api) -> None:
    for more in (
        {},
        {"tools": [TOOL]},
        {"add_generation_prompt": False},
        {"chat_template_kwargs": {"add_generation_prompt": False}},
    ):
        answer = api.post("/tokenize", {"messages": HI, **more})
        assert api.post("/detokenize", {"tokens": answer["tokens"]})["prompt"] == shown(api, **more)
        assert (
            answer["count"] == api.post("/v1/chat/completions/input_tokens", {"messages": HI, **more})["input_tokens"]
        )
    assert counted(api, tools=[TOOL]) > counted(api) > counted(api, add_generation_prompt=False)
    assert counted(api, messages=ENDING, continue_final_message=True) < counted(api, messages=ENDING)
    assert counted(api) == api.chat()["usage"]["prompt_tokens"]


@case
def pieces_that_are_no_text_are_bytes(api: Api) -> None:
    pieces = api.post("/tokenize", {"content": "aé", "with_pieces": True})["tokens"]
    assert [p["piece"] for p in pieces] == ["a", [0xC3], [0xA9]]


def ids(api: Api, **body: Any) -> list[int]:
    return list(api.text(return_token_ids=True, **body)["choices"][0]["token_ids"])


def prompt_ids(api: Api, **body: Any) -> list[int]:
    return list(api.text(return_token_ids=True, max_tokens=1, **body)["choices"][0]["prompt_token_ids"])


@case
def biases_as_pairs_and_by_text(api: Api) -> None:
    [a] = api.post("/tokenize", {"content": "A"})["tokens"]
    assert (
        ids(api, logit_bias={"A": 100})
        == ids(api, logit_bias=[["A", 100]])
        == ids(api, logit_bias=[[a, 100]])
        == [a] * 8
    )
    likeliest = ids(api, temperature=0, max_tokens=1)[0]
    assert ids(api, temperature=0, max_tokens=1, logit_bias=[[likeliest, False]])[0] != likeliest
    for bad in ([[a]], [["", 1]], [[a, True]], [[a, 101]], "x", [[a, "x"]], [[1.5, 1]]):
        assert api.text(400, logit_bias=bad)["error"]["param"] == "logit_bias"


@case
def prompts_of_ids_and_text(api: Api) -> None:
    hello = api.post("/tokenize", {"content": "hello"})["tokens"]
    assert prompt_ids(api, prompt=[70, "hello", 71]) == [70, *hello, 71]
    both = api.text(prompt=[[70, "hello"], "hello", [71]], max_tokens=1, return_token_ids=True)["choices"]
    assert [c["prompt_token_ids"] for c in both] == [[70, *hello], hello, [71]]
    one, same_ids = (api.post("/v1/embeddings", {"input": given}) for given in ([70, "hello", 71], [[70, *hello, 71]]))
    assert one["data"] == same_ids["data"] and len(one["data"]) == 1
    assert api.text(400, prompt=[70, {"a": 1}])["error"]["param"] == "prompt"


@case
def stop_token_is_the_reason(api: Api) -> None:
    tokens = ids(api, temperature=0)
    stopped = api.text(temperature=0, stop_token_ids=[tokens[2]])["choices"][0]
    assert stopped["finish_reason"] == "stop" and stopped["stop_reason"] == tokens[2]
    last = api.lines(
        "/v1/completions",
        {"prompt": "hello", "temperature": 0, "seed": 1, "stop_token_ids": [tokens[2]], "stream": True},
    )[-1]
    assert last["choices"][0]["stop_reason"] == tokens[2]


@case
def prompt_ids_come_with_the_first_chunk(api: Api) -> None:
    chunks = api.stream(return_token_ids=True)
    assert chunks[0]["prompt_token_ids"] == api.chat(return_token_ids=True)["prompt_token_ids"]
    assert all("prompt_token_ids" not in c for c in chunks[1:])
    texts = api.lines(
        "/v1/completions",
        {"prompt": "hello", "seed": 1, "max_tokens": 4, "stream": True, "return_token_ids": True, "n": 2},
    )
    first = {c["choices"][0]["index"]: c["choices"][0].get("prompt_token_ids") for c in reversed(texts)}
    assert first[0] == first[1] == prompt_ids(api, prompt="hello")


@case
def prompts_are_cut_from_the_side_that_is_asked_for(api: Api) -> None:
    whole = prompt_ids(api, prompt="hello there")
    assert prompt_ids(api, prompt="hello there", truncate_prompt_tokens=4) == whole[-4:]
    assert prompt_ids(api, prompt="hello there", truncate_prompt_tokens=4, truncation_side="left") == whole[-4:]
    assert prompt_ids(api, prompt="hello there", truncate_prompt_tokens=4, truncation_side="right") == whole[:4]
    long = "hello " * 2000
    first = prompt_ids(api, prompt=long, truncate_prompt_tokens=40, truncation_side="right")
    assert first == prompt_ids(api, prompt=long[:600])[:40]
    assert len(prompt_ids(api, prompt=long, truncate_prompt_tokens=-1)) > 1000
    assert api.chat(truncate_prompt_tokens=5)["usage"]["prompt_tokens"] == 5
    assert (
        api.chat(messages=[{"role": "user", "content": long}], truncate_prompt_tokens=7)["usage"]["prompt_tokens"] == 7
    )
    assert api.post("/v1/embeddings", {"input": long, "truncate_prompt_tokens": 9})["usage"]["prompt_tokens"] == 9
    for bad in (0, -2, 10**6):
        assert api.text(400, truncate_prompt_tokens=bad)["error"]["param"] == "truncate_prompt_tokens"


@case
def tokens_are_told_by_their_ids(api: Api) -> None:
    plain, named = (
        api.text(logprobs=1, return_token_ids=True, return_tokens_as_token_ids=flag)["choices"][0]
        for flag in (False, True)
    )
    assert named["logprobs"]["tokens"] == [f"token_id:{i}" for i in named["token_ids"]]
    assert named["logprobs"]["text_offset"] == plain["logprobs"]["text_offset"] and named["text"] == plain["text"]
    entry = api.chat(logprobs=True, top_logprobs=1, return_tokens_as_token_ids=True)["choices"][0]["logprobs"][
        "content"
    ][0]
    assert entry["token"].startswith("token_id:") and entry["top_logprobs"][0]["token"].startswith("token_id:")


@case
def chosen_token_is_among_the_likeliest(api: Api) -> None:
    none = api.text(logprobs=0, temperature=1.5)["choices"][0]["logprobs"]
    assert all(list(table) == [token] for token, table in zip(none["tokens"], none["top_logprobs"]))
    some = api.text(logprobs=3, temperature=1.5, return_tokens_as_token_ids=True)["choices"][0]["logprobs"]
    assert all(token in table and 3 <= len(table) <= 4 for token, table in zip(some["tokens"], some["top_logprobs"]))


def likeliest(api: Api, **body: Any) -> int:
    return len(api.chat(**body)["choices"][0]["logprobs"]["content"][0]["top_logprobs"])


@case
def roles_of_other_templates(api: Api) -> None:
    assert "<|im_start|>my-own-role\nx" in shown(api, messages=[{"role": "my-own-role", "content": "x"}])
    parts = api.chat(messages=[{"role": "critic", "content": [{"type": "text", "text": "x"}]}])
    assert content(parts) == content(api.chat(messages=[{"role": "critic", "content": "x"}]))
    for role in ("", "<|im_end|>", "a b", "x" * 65):
        assert api.chat(400, messages=[{"role": role, "content": "x"}])["error"]["param"] == "messages[0].role"


@case
def echo_of_a_message_at_the_end(api: Api) -> None:
    answer = content(api.chat(messages=ENDING, continue_final_message=True))
    assert content(api.chat(messages=ENDING, continue_final_message=True, echo=True)) == "It is" + answer
    assert content(api.chat(echo=True)) == content(api.chat())  # the last word was the user's
    chunks = api.stream(messages=ENDING, continue_final_message=True, echo=True)
    assert "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks) == "It is" + answer


@case
def another_name_is_answered_with_a_warning(api: Api) -> None:
    bodies: dict[str, Any] = {
        "/v1/chat/completions": {"messages": HI, "max_tokens": 1}, "/v1/completions": {"prompt": "x", "max_tokens": 1},
        "/v1/messages": {"messages": HI, "max_tokens": 1}, "/v1/responses": {"input": "x", "max_output_tokens": 16},
        "/v1/embeddings": {"input": "x"}, "/api/chat": {"messages": HI, "stream": False, "options": {"num_predict": 1}},
    }  # fmt: skip
    for path, body in bodies.items():
        answer = api.http.post(path, json={"model": "gpt-4\r\nx: é", **body})
        assert answer.status_code == 200 and answer.json()["model"] == "fake", (path, answer.text)
        assert (
            "gpt-4??x: ?" in answer.headers["x-outrider-warning"] and "'fake'" in answer.headers["x-outrider-warning"]
        )
    assert (
        "x-outrider-warning"
        not in api.http.post("/v1/completions", json={"model": "fake", "prompt": "x", "max_tokens": 1}).headers
    )
    assert api.http.get("/v1/models/gpt-4").status_code == 404


OVERFLOW = "x" * 4000


@case
def overflow_in_the_words_of_each_protocol(api: Api) -> None:
    """litellm's ContextWindowExceededError, and agents that compact, look for these sentences."""
    long: Any = [{"role": "user", "content": OVERFLOW}]
    for path, body, param in (
        ("/v1/chat/completions", {"messages": long}, "messages"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 1530}]}, "messages"),
        ("/v1/completions", {"prompt": OVERFLOW}, "prompt"),
        ("/v1/completions", {"prompt": [70] * 1600}, "prompt"),
        ("/v1/embeddings", {"input": OVERFLOW}, "input"),
        ("/v1/responses", {"input": OVERFLOW}, "input"),
    ):
        error = api.post(path, body, 400)["error"]
        assert error["message"].startswith("This model's maximum context length is 1536 tokens. However, your "), error
        assert (error["type"], error["param"], error["code"]) == (
            "invalid_request_error",
            param,
            "context_length_exceeded",
        ), (path, error)
    answer = api.post("/v1/messages", {"messages": long, "max_tokens": 4}, 400)
    assert answer["type"] == "error" and answer["error"]["type"] == "invalid_request_error"
    matches(r"prompt is too long: \d+ tokens > 1535 maximum", answer["error"]["message"])
    with pytest.raises(openai.BadRequestError) as raised:
        openai.OpenAI(
            base_url=f"{api.http.base_url}/v1", api_key="x", max_retries=0, timeout=60
        ).chat.completions.create(model="fake", messages=long)
    assert raised.value.code == "context_length_exceeded"
    assert "maximum context length is 1536 tokens" in api.post("/api/chat", {"messages": long}, 400)["error"]


@case
def sampling_defaults_are_told(api: Api) -> None:
    answer = api.http.get("/props").json()
    assert (
        answer["default_generation_settings"]["n_ctx"] == 1536
        and answer["default_generation_settings"]["params"]["temperature"] == 0.7
    )
    assert answer["outrider"]["sampling"]["ollama"] == {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "min_p": 0.0}
    assert answer["outrider"]["sampling_from"] == "protocol" and answer["chat_template"]
    assert "temperature 0.8" in api.post("/api/show", {"model": "fake"})["parameters"]
    explicit = {"temperature": 0.8, "top_p": 0.9, "top_k": 40}
    left_out, said = (
        api.post("/api/chat", {"messages": HI, "stream": False, "options": {"seed": 3, "num_predict": 20, **options}})[
            "message"
        ]
        for options in ({}, explicit)
    )
    assert left_out == said


@case
def cards_tell_the_context(api: Api) -> None:
    listed = api.http.get("/v1/models").json()
    card = listed["data"][0]
    assert (
        card["max_model_len"]
        == card["context_length"]
        == card["max_input_tokens"]
        == card["outrider"]["max_context"]
        == 1536
    )
    assert (
        card["type"] == "model"
        and card["display_name"] == "fake"
        and card["created_at"].endswith("Z")
        and listed["has_more"] is False
    )
    running = api.http.get("/api/ps").json()["models"][0]
    assert running["context_length"] == 1536 and running["expires_at"].endswith("Z") and "size_vram" in running
    assert api.post("/api/show", {"model": "fake"})["model_info"]["outrider.context_length"] == 1536


@case
def cache_salt_keeps_prefixes_apart(api: Api) -> None:
    def cached(**body: Any) -> int:
        answer = api.text(prompt="a salted prompt " * 20, max_tokens=1, **body)
        return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

    cached()
    assert cached() > 0 and cached(cache_salt="s") == 0 and cached(cache_salt="s") > 0 and cached(cache_salt="t") == 0


many("peers", {
    "n_predict": lambda api: same(api.text(n_predict=3, max_tokens=None, ignore_eos=True)["usage"]["completion_tokens"], 3),
    "n_predict_chat": lambda api: same(api.chat(n_predict=3, max_tokens=None, ignore_eos=True)["usage"]["completion_tokens"], 3),
    "n_predict_differs": lambda api: holds("n_predict" in api.chat(400, n_predict=3)["error"]["message"]),
    "n_probs": lambda api: same(likeliest(api, n_probs=4), 4),
    "n_probs_text": lambda api: same(api.text(n_probs=2)["choices"][0]["logprobs"], api.text(logprobs=2)["choices"][0]["logprobs"]),
    "n_probs_off": lambda api: same(api.chat(n_probs=0)["choices"][0]["logprobs"], None),
    "top_logprobs_all": lambda api: same(likeliest(api, logprobs=True, top_logprobs=-1), 20),
    "top_logprobs_below": lambda api: same(api.chat(400, logprobs=True, top_logprobs=-2)["error"]["param"], "top_logprobs"),
    "v1_health": lambda api: same(api.http.get("/v1/health").status_code, 200),
    "ping": lambda api: same(api.http.get("/ping").status_code, 200),
    "two_final_assistants": lambda api: holds("assistant" in api.chat(400, messages=[*ENDING, ENDING[-1]])["error"]["message"]),
    "suffix_needs_tokens": lambda api: same(api.text(400, suffix="b")["error"]["param"], "suffix"),
    "unversioned_input_tokens": lambda api: holds(api.post("/chat/completions/input_tokens", {"messages": HI})["input_tokens"] > 0),
})  # fmt: skip
