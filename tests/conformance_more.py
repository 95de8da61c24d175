"""More conformance cases: embeddings, spellings of prefill, log-probabilities in other protocols, durations."""

from __future__ import annotations

import base64
import json
import struct
from typing import Any

from tests.conformance import HI, Api, case, content, holds, many, same


def embed(api: Api, given: Any, status: int = 200, **more: Any) -> Any:
    return api.post("/v1/embeddings", {"model": "fake", "input": given, **more}, status)


def vectors(answer: Any) -> list[list[float]]:
    return [d["embedding"] for d in answer["data"]]


@case
def embeddings_kinds_of_input(api: Api) -> None:
    """A text, its tokens, and lists of both are the same vectors, however they come and whoever is beside them."""
    ids = api.post("/tokenize", {"prompt": "hello there", "add_special_tokens": True})["tokens"]
    (one,) = vectors(embed(api, "hello there"))
    assert vectors(embed(api, ids)) == [one] == vectors(embed(api, [ids])) == vectors(embed(api, ["hello there"]))
    both = embed(api, ["hello there", "something else"])
    assert vectors(both)[0] == one != vectors(both)[1] and [d["index"] for d in both["data"]] == [0, 1]
    assert abs(sum(x * x for x in one) - 1.0) < 1e-4
    assert both["usage"]["prompt_tokens"] == both["usage"]["total_tokens"] > len(ids)
    for nothing in ("", [], [""], ["hello", ["", ""]]):
        assert embed(api, nothing, 400)["error"]["param"] == "input"


@case
def embeddings_long_texts_are_read_in_parts(api: Api) -> None:
    (vector,) = vectors(embed(api, "word " * 100))
    assert abs(sum(x * x for x in vector) - 1.0) < 1e-4


@case
def embeddings_base64(api: Api) -> None:
    (plain,) = vectors(embed(api, "hello"))
    (coded,) = vectors(embed(api, "hello", encoding_format="base64"))
    raw = base64.b64decode(str(coded))
    assert list(struct.unpack(f"<{len(raw) // 4}f", raw)) == plain


@case
def embeddings_dimensions(api: Api) -> None:
    (whole,) = vectors(embed(api, "hello"))
    (short,) = vectors(embed(api, "hello", dimensions=8))
    length = sum(x * x for x in whole[:8]) ** 0.5
    assert len(short) == 8 and all(abs(a / length - b) < 1e-5 for a, b in zip(whole, short))
    assert embed(api, "hello", 400, dimensions=10_000)["error"]["param"] == "dimensions"


@case
def responses_logprobs(api: Api) -> None:
    ask = {"input": "hello", "max_output_tokens": 6, "seed": 1}
    part = api.post("/v1/responses", {**ask, "top_logprobs": 2, "include": ["message.output_text.logprobs"]})["output"][
        0
    ]["content"][0]
    assert len(part["logprobs"]) == 6 and all(len(e["top_logprobs"]) == 2 for e in part["logprobs"])
    assert api.post("/v1/responses", ask)["output"][0]["content"][0]["logprobs"] == []
    events = api.lines("/v1/responses", {**ask, "top_logprobs": 2, "stream": True})
    entries = [e for event in events if event["type"] == "response.output_text.delta" for e in event["logprobs"]]
    done = next(event for event in events if event["type"] == "response.output_text.done")
    assert entries == done["logprobs"] == part["logprobs"][: len(entries)] and entries


@case
def ollama_durations(api: Api) -> None:
    ask = {"model": "fake", "messages": HI, "options": {"num_predict": 8, "seed": 1}}
    whole = api.post("/api/chat", {**ask, "stream": False})
    last = api.http.post("/api/chat", json=ask).text.strip().splitlines()[-1]
    assert '"done": true' in last
    for end in (whole, json.loads(last)):
        parts = [end[name] for name in ("load_duration", "prompt_eval_duration", "eval_duration")]
        assert all(isinstance(x, int) and x >= 0 for x in parts) and end["eval_duration"] > 1000, end
        # the engine of these tests has a clock of its own, so its seconds may be more than the call's
        assert parts[0] == max(0, end["total_duration"] - sum(parts[1:])) and end["total_duration"] > 100_000, end


PREFILL: list[Any] = [*HI, {"role": "assistant", "content": "It is"}]


def prefilled(api: Api, **more: Any) -> str:
    return str(api.post("/apply-template", {"messages": PREFILL, **more})["prompt"])


many("prefill", {
    "flag": lambda api: holds(prefilled(api, continue_final_message=True, add_generation_prompt=False).endswith("assistant\nIt is")),
    "kwargs": lambda api: same(prefilled(api, chat_template_kwargs={"continue_final_message": True, "add_generation_prompt": False}), prefilled(api, continue_final_message=True)),
    "prefix": lambda api: same(str(api.post("/apply-template", {"messages": [*HI, {**PREFILL[1], "prefix": True}]})["prompt"]), prefilled(api, continue_final_message=True)),
    "answer": lambda api: same(content(api.chat(messages=PREFILL, continue_final_message=True)), content(api.chat(messages=[*HI, {**PREFILL[1], "prefix": True}]))),
    "not_asked": lambda api: holds(prefilled(api).endswith("assistant\n")),
    "no_generation_prompt": lambda api: holds(prefilled(api, chat_template_kwargs={"add_generation_prompt": False}).endswith("<|im_end|>\n")),
    "contradiction": lambda api: api.chat(400, messages=PREFILL, continue_final_message=True, add_generation_prompt=True),
})  # fmt: skip
many("embeddings", {
    "empty": lambda api: same(embed(api, "", 400)["error"]["param"], "input"),
    "empty_list": lambda api: embed(api, [], 400),
    "not_text": lambda api: embed(api, [{"a": 1}], 400),
    "bad_token": lambda api: same(embed(api, [10**6], 400)["error"]["param"], "input"),
    "unknown_model": lambda api: same(api.post("/v1/embeddings", {"model": "other", "input": "x"})["model"], "fake"),
    "unknown_field": lambda api: same(embed(api, "x", 400, temperature=1)["error"]["param"], "temperature"),
    "too_long": lambda api: same(embed(api, "x" * 4000, 400)["error"]["code"], "context_length_exceeded"),
    "ollama": lambda api: same(api.post("/api/embed", {"model": "fake", "input": ["a", "b"]})["embeddings"], vectors(embed(api, ["a", "b"]))),
})  # fmt: skip
many("tokenizer", {
    "info": lambda api: holds(api.http.get("/tokenizer_info").json()["eos_token"]),
    "info_template": lambda api: holds("add_generation_prompt" in api.http.get("/tokenizer_info").json()["chat_template"]),
})  # fmt: skip
many("logprobs", {
    "prompt_stream_chat": lambda api: same(api.chat(400, prompt_logprobs=1, stream=True)["error"]["code"], "invalid_value"),
    "prompt_stream_text": lambda api: holds("prompt_logprobs" in api.text(400, prompt_logprobs=1, stream=True)["error"]["message"]),
})  # fmt: skip
