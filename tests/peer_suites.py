"""The cases of llama.cpp's and vLLM's own server tests, by the names they have there, against our server.

Each is written anew: what their test asks for, in our words, on the OpenAI route where theirs has a route of its own. A
case passes, is otherwise on purpose (`purpose`: a row of the table in docs/api-reference.md), or is missing. Left out are
their command lines, what one of their models says, and models that are not here. Run by tests/e2e/test_peer_suites.py.
"""

from __future__ import annotations

import base64
import json
import re
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx
import openai
import pytest
from tests.conformance import HI, Api, content
from tests.waiting import PATIENCE

Check = Callable[[Api], Any]


@dataclass(frozen=True)
class PeerCase:
    suite: str
    name: str
    check: Check | None  # None: missing
    purpose: str = ""  # the row of the docs' table that says why it is otherwise here


CASES: list[PeerCase] = []


def add(suite: str, file: str, checks: dict[str, Check | None], purpose: str = "") -> None:
    CASES.extend(PeerCase(suite, f"{file}::{name}", check, purpose) for name, check in checks.items())


def must(true: Any, what: Any = "") -> None:
    assert true, what


TOOL: Any = {
    "type": "function",
    "function": {"name": "test", "description": "", "parameters": {"type": "object", "properties": {"success": {"const": True}}, "required": ["success"]}},
}  # fmt: skip
WHEN: Any = {"type": "function", "function": {"name": "when", "parameters": {"type": "object", "properties": {}}}}
BOOK = [{"role": "system", "content": "Book"}, {"role": "user", "content": "What is the best book"}]
PARTS = [{"type": "text", "text": "What is"}, {"type": "text", "text": "the best book"}]
SAID = [{"role": "user", "content": "tell me"}, {"role": "assistant", "content": "An apple a day"}]


def refuses(api: Api, path: str, body: Any, *words: str, status: int = 400) -> None:
    answer = api.post(path, body, status)
    assert all(w in json.dumps(answer["error"]) for w in words), answer


def chat_shape(api: Api, **body: Any) -> None:
    answer = api.chat(messages=BOOK, **body)
    choice = answer["choices"][0]
    usage = answer["usage"]
    assert "cmpl" in answer["id"] and answer["system_fingerprint"] and choice["finish_reason"] == "length"
    assert choice["message"]["role"] == "assistant" and usage["completion_tokens"] == 8
    assert usage["total_tokens"] == usage["prompt_tokens"] + 8


def chat_stream(api: Api, **body: Any) -> None:
    chunks = api.stream(messages=BOOK, stream_options={"include_usage": True}, **body)
    first, *middle, end, usage = chunks
    assert first["choices"][0]["delta"]["role"] == "assistant" and not first["choices"][0]["delta"]["content"]
    assert not any("role" in c["choices"][0]["delta"] for c in [*middle, end]) and len({c["id"] for c in chunks}) == 1
    assert end["choices"][0]["finish_reason"] == "length" and "content" not in end["choices"][0]["delta"]
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] > 0
    text = "".join(c["choices"][0]["delta"].get("content") or "" for c in middle)
    assert text == content(api.chat(messages=BOOK, **body))


def library(api: Api) -> openai.OpenAI:
    return openai.OpenAI(base_url=str(api.http.base_url.join("/v1")), api_key="none", timeout=120)


def by_library(api: Api) -> None:
    answer = library(api).chat.completions.create(model="gpt-3.5-turbo", messages=BOOK, max_tokens=8, seed=42)  # type: ignore[arg-type]
    assert answer.system_fingerprint and answer.choices[0].message.content is not None


def text_by_library(api: Api, stream: bool) -> None:
    body: Any = {
        "model": "davinci-002",
        "prompt": "hello",
        "max_tokens": 8,
        "seed": 1,
        "extra_body": {"ignore_eos": True},
    }
    whole = library(api).completions.create(**body)
    assert whole.choices[0].finish_reason == "length"
    if stream:
        answer = "".join(c.choices[0].text for c in library(api).completions.create(**body, stream=True))
        assert answer == whole.choices[0].text


def formed(api: Api, form: Any, pattern: str | None) -> None:
    if pattern is None:
        refuses(api, "/v1/chat/completions", {"messages": HI, "response_format": form})
    else:
        answer = content(api.chat(response_format=form, max_tokens=60))
        assert re.match(pattern, answer), answer


def logprobs(api: Api, stream: bool) -> None:
    letters = {"allowed_token_ids": api.post("/tokenize", {"content": "abcdefghijklm"})["tokens"]}  # one byte each
    body = {"messages": BOOK, "temperature": 0, "max_tokens": 5, "logprobs": True, "top_logprobs": 10, **letters}
    if stream:
        chunks = api.lines("/v1/chat/completions", {**body, "stream": True})
        entries = [e for c in chunks for e in (c["choices"][0]["logprobs"] or {"content": []})["content"]]
    else:
        entries = api.chat(**body)["choices"][0]["logprobs"]["content"]
    assert len(entries) == 5
    assert all(e["logprob"] <= 0 and e["bytes"] is not None and len(e["top_logprobs"]) == 10 for e in entries)
    text = b"".join(bytes(e["bytes"]) for e in entries).decode("utf-8", "replace")
    assert text == content(api.chat(**{**body, "logprobs": None, "top_logprobs": None}))


def unbiased(api: Api, tokenize: bool, as_object: bool) -> None:
    """None of the banned tokens is chosen."""
    banned = "aeiou"
    ids = api.post("/tokenize", {"content": banned})["tokens"]
    pairs: Any = [[t, -100] for t in (ids if tokenize else banned)]
    biases = {str(t): v for t, v in pairs} if as_object else pairs
    answer = api.text(max_tokens=32, logit_bias=biases, return_token_ids=True)["choices"][0]
    assert not set(answer["token_ids"]) & set(ids)


def at_once(api: Api, many: int) -> None:
    """Answers at once are the same as alone."""
    bodies = [{"prompt": f"Write {i}.", "max_tokens": 12, "seed": 42, "temperature": 1.0} for i in range(many)]
    alone = [api.post("/v1/completions", b)["choices"][0]["text"] for b in bodies]
    with ThreadPoolExecutor(many) as pool:
        together = list(pool.map(lambda b: api.post("/v1/completions", b)["choices"][0]["text"], bodies))
    assert alone == together


def cancelled(api: Api) -> None:
    with pytest.raises(httpx.ReadTimeout):
        api.http.post("/v1/completions", json={"prompt": "hi", "max_tokens": 1400, "ignore_eos": True}, timeout=0.2)
    assert api.text()["choices"]


def prompt_of_ids(api: Api) -> None:
    ids = api.post("/tokenize", {"prompt": "hello", "add_special_tokens": True})["tokens"]
    one, two, mixed = (api.text(prompt=p, temperature=0)["choices"] for p in (ids, [ids, ids], [ids, "hello"]))
    assert len(one) == 1 and two[0]["text"] == two[1]["text"] == one[0]["text"] == mixed[1]["text"] == mixed[0]["text"]
    assert api.text(prompt=[1, 2, 3, "hello", 7, 8, "x"])["choices"][0]["text"] is not None


def begun(api: Api, said: Any) -> None:
    """Continued where that is asked for."""
    body = {"messages": [HI[0], {"role": "assistant", "content": said}], "continue_final_message": True}
    assert api.post("/apply-template", body)["prompt"].endswith("book" if said is PARTS else said)


def invalid(messages: Any) -> Check:
    return lambda api: refuses(api, "/v1/chat/completions", {"messages": messages})


L = "llama.cpp"
add(L, "test_basic", {
    "server_start_simple": lambda api: must(api.http.get("/health").status_code == 200),
    "server_props": lambda api: must(api.http.get("/props").json()["default_generation_settings"]["n_ctx"] == 1536),
    "server_models": lambda api: must(len(api.http.get("/models").json()["data"]) == 1),
    "server_slots": lambda api: must(isinstance(api.http.get("/slots").json(), list)),
    "no_webui (on)": lambda api: must("<!doctype html>" in api.http.get("/").text.lower()),
})  # fmt: skip
add(L, "test_chat_completion", {
    "chat_completion[plain]": chat_shape,
    "chat_completion[another model's name]": lambda api: chat_shape(api, model="codellama70b"),
    "chat_completion[parts]": lambda api: must(api.chat(messages=[{"role": "user", "content": PARTS}])["choices"]),
    "chat_completion_stream[short]": chat_stream,
    "chat_completion_stream[long]": lambda api: chat_stream(api, max_tokens=64),
    "chat_completion_with_openai_library": by_library,
    "apply_chat_template": lambda api: must("hello" in api.post("/apply-template", {"messages": HI})["prompt"]),
    "response_format[object with const]": lambda api: formed(api, {"type": "json_object", "schema": {"const": "42"}}, '"42"'),
    "response_format[items]": lambda api: formed(api, {"type": "json_object", "schema": {"type": "array", "items": {"enum": [1]}, "maxItems": 2}}, r"\[.*\]"),
    "response_format[json_schema]": lambda api: formed(api, {"type": "json_schema", "json_schema": {"schema": {"const": "foo"}}}, '"foo"'),
    "response_format[json_object]": lambda api: formed(api, {"type": "json_object"}, r"\s*\{"),
    "response_format[sound]": lambda api: formed(api, {"type": "sound"}, None),
    "response_format[schema 123]": lambda api: formed(api, {"type": "json_object", "schema": 123}, None),
    "response_format[type 123]": lambda api: formed(api, {"type": "json_object", "schema": {"type": 123}}, None),
    "response_format[type hiccup]": lambda api: formed(api, {"type": "json_object", "schema": {"type": "hiccup"}}, None),
    "json_schema": lambda api: must(content(api.chat(json_schema={"const": "42"})) == '"42"'),
    "grammar": lambda api: must(content(api.chat(grammar='root ::= "a"{5,5}')) == "aaaaa"),
    "invalid[none]": invalid(None), "invalid[string]": invalid("string"), "invalid[number]": invalid([123]),
    "invalid[empty]": invalid([{}]), "invalid[role]": invalid([{"role": 123}]),
    "invalid[content]": invalid([{"role": "system", "content": 123}]),
    "invalid[second]": invalid([{"role": "system", "content": "test"}, {}]),
    "invalid[two assistants]": invalid([*SAID, SAID[-1]]),
    "logprobs": lambda api: logprobs(api, False), "logprobs_stream": lambda api: logprobs(api, True),
    "logit_bias": lambda api: unbiased(api, True, True),
    "chat_completions_multiple_choices": lambda api: must([c["index"] for c in api.chat(n=2)["choices"]] == [0, 1]),
})  # fmt: skip
add(L, "test_chat_completion", {
    "context_size_exceeded": lambda api: refuses(api, "/v1/chat/completions", {"messages": [*BOOK * 60]}, "maximum context length", "context_length_exceeded"),
    "context_size_exceeded_stream": lambda api: refuses(api, "/v1/chat/completions", {"messages": [*BOOK * 60], "stream": True}, "maximum context length"),
}, "a prompt longer than the context")  # fmt: skip
add(L, "test_chat_completion", {
    "chat_template_assistant_prefill[text]": lambda api: begun(api, "An apple a day"),
    "chat_template_assistant_prefill[parts]": lambda api: begun(api, PARTS),
}, "an assistant message at the end")  # fmt: skip
add(L, "test_chat_completion", {
    "timings_per_token": lambda api: chat_stream(api, timings_per_token=True),
    "return_progress[]": lambda api: chat_stream(api, return_progress=True),
    "return_progress[reuse]": lambda api: chat_stream(api, return_progress=True),
}, "timings_per_token")  # fmt: skip
add(L, "test_completion", {
    "completion[short]": lambda api: must(api.text(n_predict=8, return_token_ids=True)["choices"][0]["token_ids"]),
    "completion[long]": lambda api: must(api.text(n_predict=64, max_tokens=None)["usage"]["completion_tokens"] == 64),
    "completion_stream[short]": lambda api: text_by_library(api, True),
    "completion_stream[long]": lambda api: must(api.lines("/v1/completions", {"prompt": "x", "n_predict": 64, "ignore_eos": True, "stream": True})[-1]["choices"][0]["finish_reason"] == "length"),
    "completion_stream_vs_non_stream": lambda api: text_by_library(api, True),
    "completion_with_openai_library": lambda api: text_by_library(api, False),
    "completion_stream_with_openai_library": lambda api: text_by_library(api, True),
    "consistent_result_same_seed": lambda api: must(len({api.text(seed=42, temperature=0.9)["choices"][0]["text"] for _ in range(4)}) == 1),
    "different_result_different_seed": lambda api: must(len({api.text(seed=s, temperature=1.0, max_tokens=16)["choices"][0]["text"] for s in range(4)}) == 4),
    "consistent_result_different_batch_size": lambda api: at_once(api, 5),
    "cache_vs_nocache_prompt": lambda api: must(api.text(cache_prompt=True)["choices"] == api.text(cache_prompt=False)["choices"]),
    "nocache_long_input_prompt": lambda api: refuses(api, "/v1/completions", {"prompt": "hello there " * 200}),
    "completion_with_tokens_input": prompt_of_ids,
    "completion_parallel_slots[3]": lambda api: at_once(api, 3), "completion_parallel_slots[2]": lambda api: at_once(api, 2),
    "completion_parallel_slots[4]": lambda api: at_once(api, 4), "completion_parallel_slots[6]": lambda api: at_once(api, 6),
    "n_probs": lambda api: must(len(api.text(n_probs=10, temperature=0, max_tokens=5)["choices"][0]["logprobs"]["tokens"]) == 5),
    "n_probs_stream": lambda api: must(any(c["choices"][0]["logprobs"] for c in api.lines("/v1/completions", {"prompt": "x", "n_probs": 10, "max_tokens": 5, "stream": True, "ignore_eos": True}))),
    "logit_bias[text, list]": lambda api: unbiased(api, False, False), "logit_bias[text, object]": lambda api: unbiased(api, False, True),
    "logit_bias[ids, list]": lambda api: unbiased(api, True, False), "logit_bias[ids, object]": lambda api: unbiased(api, True, True),
    "cancel_request": cancelled,
})  # fmt: skip
add(L, "test_completion", {
    "completion_response_fields[some]": lambda api: refuses(api, "/v1/completions", {"prompt": "x", "response_fields": ["content"]}, "response_fields"),
    "n_probs_post_sampling": lambda api: refuses(api, "/v1/completions", {"prompt": "x", "n_probs": 3, "post_sampling_probs": True}, "post_sampling_probs"),
}, "unknown fields")  # fmt: skip


def answered(api: Api, form: Any, pattern: str) -> None:
    answer = api.post("/v1/responses", {"input": "Write", "max_output_tokens": 60, "text": {"format": form}})
    text = next(o for o in answer["output"] if o["type"] == "message")["content"][0]["text"]
    assert re.match(pattern, text, re.DOTALL), text


def responses_by_library(api: Api) -> None:
    answer = library(api).responses.create(model="gpt-4.1", input=BOOK, max_output_tokens=8, temperature=0)  # type: ignore[arg-type]
    assert answer.id.startswith("resp_") and (answer.output[0].id or "").startswith("msg_")


def responses_stream_by_library(api: Api) -> None:
    text = ""
    ids = set()
    done = None
    for r in library(api).responses.create(model="m", input=BOOK, max_output_tokens=8, temperature=0, stream=True):  # type: ignore[call-overload]
        ids |= {r.item_id} if hasattr(r, "item_id") else set()
        text += r.delta if r.type == "response.output_text.delta" else ""
        done = r.response if r.type in ("response.completed", "response.incomplete") else done
    assert done is not None and text == done.output_text and ids == {done.output[0].id}


add(L, "test_compat_oai_responses", {
    "text_format[json_schema]": lambda api: answered(api, {"type": "json_schema", "name": "t", "schema": {"const": "foo"}}, '"foo"'),
    "text_format[json_object]": lambda api: answered(api, {"type": "json_object"}, r"\s*\{"),
    "text_format[text]": lambda api: answered(api, {"type": "text"}, ""),
    "text_format[no schema]": lambda api: refuses(api, "/v1/responses", {"input": "x", "text": {"format": {"type": "json_schema", "name": "t"}}}),
    "with_openai_library": responses_by_library, "stream_with_openai_library": responses_stream_by_library,
})  # fmt: skip
add(L, "test_compat_oai_responses", {
    "stream_with_llama_telemetry": lambda api: must(api.post("/v1/responses", {"input": "x", "max_output_tokens": 4, "timings_per_token": True, "return_progress": True})["output"]),
}, "timings_per_token")  # fmt: skip


def vectors(api: Api, given: Any, **more: Any) -> list[Any]:
    answer = api.post("/v1/embeddings", {"input": given, **more})
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] > 0
    return [d["embedding"] for d in answer["data"]]


def in_base64(api: Api) -> None:
    [plain] = vectors(api, "x")
    [packed] = vectors(api, "x", encoding_format="base64")
    raw = base64.b64decode(packed)
    assert struct.unpack(f"{len(raw) // 4}f", raw) == pytest.approx(plain)


add(L, "test_embedding", {
    "embedding_single": lambda api: must(abs(sum(x * x for x in vectors(api, "x")[0]) - 1) < 1e-3),
    "embedding_multiple": lambda api: must(len(vectors(api, ["a", "b", "c", "d"])) == 4),
    "mixed_input[text]": lambda api: vectors(api, "string"), "mixed_input[ids]": lambda api: vectors(api, [12, 34, 56]),
    "mixed_input[ids and text]": lambda api: must(len(vectors(api, [12, 34, "string", 56])) == 1),
    "mixed_input[texts]": lambda api: must(len(vectors(api, ["a", "b"])) == 2),
    "mixed_input[text, ids]": lambda api: must(len(vectors(api, ["a", [12, 34]])) == 2),
    "mixed_input[lists of ids]": lambda api: must(len(vectors(api, [[12, 34], [12, 34]])) == 2),
    "mixed_input[ids, mixed]": lambda api: must(len(vectors(api, [[12, 34], [12, "string", 34]])) == 2),
    "invalid_input[empty list]": lambda api: refuses(api, "/v1/embeddings", {"input": []}),
    "invalid_input[content]": lambda api: refuses(api, "/v1/embeddings", {"input": {"content": "string"}}),
    "invalid_input[audio]": lambda api: refuses(api, "/v1/embeddings", {"input": {"content": [{"type": "input_audio"}]}}),
    "invalid_input[image]": lambda api: refuses(api, "/v1/embeddings", {"input": {"content": [{"type": "image_url"}]}}),
    "openai_library_single": lambda api: must(len(library(api).embeddings.create(model="m", input="x").data) == 1),
    "openai_library_multiple": lambda api: must(len(library(api).embeddings.create(model="m", input=["x", "y"]).data) == 2),
    "error_prompt_too_long": lambda api: refuses(api, "/v1/embeddings", {"input": "This is a test " * 512}, "maximum context"),
    "same_prompt_give_same_result": lambda api: must(len({tuple(v) for v in vectors(api, ["same"] * 5)}) == 1),
    "usage_single": lambda api: vectors(api, "x"),
    "usage_multiple": lambda api: must(len(vectors(api, ["x", "x"])) == 2),
    "openai_library_base64": in_base64,
    "mixed_input[prompt_string]": None, "mixed_input[content]": None, "mixed_input[objects]": None,
    "content_text_same_as_string": None,
})  # fmt: skip
add(
    L,
    "test_embedding",
    {"mixed_input[empty text]": lambda api: refuses(api, "/v1/embeddings", {"input": ""})},
    "an empty text to embed",
)


def with_key(api: Api, key: str | None, header: str = "Authorization") -> int:
    assert api.keyed is not None
    headers = {} if key is None else {header: key if header != "Authorization" else f"Bearer {key}"}
    return httpx.post(
        f"{api.keyed}/v1/completions", json={"prompt": "x", "max_tokens": 2}, headers=headers, timeout=120
    ).status_code


def open_path(api: Api, path: str) -> int:
    return httpx.get(f"{api.keyed}{path}", timeout=120).status_code


def cors(api: Api, origin: str) -> Any:
    headers = {
        "Origin": origin,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "Authorization",
    }
    return api.http.options("/v1/completions", headers=headers).headers


add(L, "test_security", {
    "access_public_endpoint[/health]": lambda api: must(open_path(api, "/health") == 200),
    "access_static_assets_without_api_key[/]": lambda api: must(open_path(api, "/") == 200),
    "access_static_assets_without_api_key[js]": lambda api: must(open_path(api, "/page/app.js") == 200),
    "access_static_assets_without_api_key[css]": lambda api: must(open_path(api, "/page/app.css") == 200),
    "incorrect_api_key[none]": lambda api: must(with_key(api, None) == 401),
    "incorrect_api_key[wrong]": lambda api: must(with_key(api, "wrong") == 401),
    "correct_api_key": lambda api: must(with_key(api, "secret") == 200),
    "correct_api_key_anthropic_header": lambda api: must(with_key(api, "secret", "X-Api-Key") == 200),
    "openai_library_correct_api_key": lambda api: must(openai.OpenAI(base_url=f"{api.keyed}/v1", api_key="secret", timeout=PATIENCE).completions.create(model="m", prompt="x", max_tokens=1)),
    "cors_options[localhost]": lambda api: must(cors(api, "http://localhost:3000")["access-control-allow-origin"] == "http://localhost:3000"),
    "cors_options[other]": lambda api: must(cors(api, "http://web.example")["access-control-allow-origin"] == "http://web.example"),
    "cors_options[methods]": lambda api: must("POST" in cors(api, "http://localhost")["access-control-allow-methods"]),
    "cors_options[headers]": lambda api: must("Authorization" in cors(api, "http://localhost")["access-control-allow-headers"]),
    "local_media_file[off]": lambda api: refuses_image(api, "file://a.jpeg"),
    "local_media_file[not there]": lambda api: refuses_image(api, "file://notfound.jpeg"),
    "local_media_file[above]": lambda api: refuses_image(api, "file://../a.jpeg"),
})  # fmt: skip
add(L, "test_security", {
    "access_public_endpoint[/models]": lambda api: must(open_path(api, "/models") == 401),
    "cors_options[credentials]": lambda api: must("access-control-allow-credentials" not in cors(api, "http://localhost")),
}, "API keys in")  # fmt: skip
add(L, "test_security", {
    "local_media_file[allowed]": lambda api: refuses_image(api, "file://mtmd/a.jpeg"),
    "local_media_file[allowed, slashes]": lambda api: refuses_image(api, "file:////mtmd//a.jpeg"),
}, "image URLs other than")  # fmt: skip


def refuses_image(api: Api, url: str) -> None:
    part = {"type": "image_url", "image_url": {"url": url}}
    refuses(api, "/v1/chat/completions", {"messages": [{"role": "user", "content": [part]}]})


def pieces(api: Api) -> None:
    answer = api.post("/tokenize", {"content": "unicode 媽 and emoji 🤗", "with_pieces": True})["tokens"]
    assert all(t["id"] > 0 and len(t["piece"]) > 0 for t in answer)


add(L, "test_tokenize", {
    "tokenize_detokenize": lambda api: must(api.post("/detokenize", {"tokens": api.post("/tokenize", {"content": "of France ?"})["tokens"]})["content"] == "of France ?"),
    "tokenize_with_bos": lambda api: must(api.post("/tokenize", {"content": "x", "add_special": True})["count"] >= api.post("/tokenize", {"content": "x"})["count"]),
    "tokenize_with_pieces": pieces,
})  # fmt: skip


def uncalled(api: Api, stream: bool, **body: Any) -> None:
    if stream:
        chunks = api.stream(**body)
        assert not any("tool_calls" in c["choices"][0]["delta"] for c in chunks)
    else:
        assert "tool_calls" not in api.chat(**body)["choices"][0]["message"]


def forced(api: Api, stream: bool, tool: Any = TOOL, choice: Any = "required") -> None:
    body: Any = {"tools": [tool], "tool_choice": choice, "parallel_tool_calls": False, "max_tokens": 120}
    if stream:
        deltas = [c["choices"][0]["delta"].get("tool_calls", [None])[0] for c in api.stream(**body) if c["choices"]]
        calls = [d["function"] for d in deltas if d]
        name = calls[0]["name"]
        arguments = "".join(c.get("arguments", "") for c in calls)
    else:
        [call] = api.chat(**body)["choices"][0]["message"]["tool_calls"]
        name = call["function"]["name"]
        arguments = call["function"]["arguments"]
    assert name == tool["function"]["name"] and isinstance(json.loads(arguments), dict)


for streams in (False, True):
    mode = "streamed" if streams else "normal"
    add(L, "test_tool_call", {
        f"without_tool_call[no tools, {mode}]": lambda api, s=streams: uncalled(api, s),
        f"without_tool_call[none, {mode}]": lambda api, s=streams: uncalled(api, s, tools=[TOOL], tool_choice="none"),
        f"required_tool[const, {mode}]": lambda api, s=streams: forced(api, s),
        f"required_tool[no arguments, {mode}]": lambda api, s=streams: forced(api, s, WHEN),
    })  # fmt: skip
add(L, "test_ctx_shift", {
    "disabled_short_prompt[limit]": lambda api: must(api.text(max_tokens=64)["usage"]["completion_tokens"] == 64),
    "disabled_short_prompt[-1]": lambda api: must(api.text(max_tokens=-1)["choices"][0]["finish_reason"] == "length"),
    "disabled_long_prompt": lambda api: refuses(api, "/v1/completions", {"prompt": "hello there " * 200}, "maximum context"),
    "disabled_stream": lambda api: must(api.lines("/v1/completions", {"prompt": "Once", "n_predict": 256, "ignore_eos": True, "stream": True})[-1]["choices"][0]["finish_reason"] == "length"),
})  # fmt: skip
add(
    L,
    "test_ctx_shift",
    {"enabled": lambda api: refuses(api, "/v1/completions", {"prompt": "hello there " * 200})},
    "a prompt longer than the context",
)
add(L, "test_template", {
    "add_generation_prompt[true]": lambda api: must(api.post("/apply-template", {"messages": HI, "add_generation_prompt": True})["prompt"].endswith("assistant\n")),
    "add_generation_prompt[false]": lambda api: must(not api.post("/apply-template", {"messages": HI, "add_generation_prompt": False})["prompt"].endswith("assistant\n")),
})  # fmt: skip
