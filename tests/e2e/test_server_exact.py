"""An HTTP answer does not depend on drafting: 40 seeds, five draft lengths, stop strings, log-probabilities, streamed
and whole.

Catches: log-probabilities and usage that hold the tokens a draft brought behind a stop string (38 of 40 seeds once
did).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from tests import tiny
from tests.server_fakes import FakeEngine, Served, tokenizer

from outrider.config import EngineConfig
from outrider.llm import LLM

SEEDS = range(40)
KS = ("auto", 0, 1, 4, 16)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    path = tmp_path_factory.mktemp("exact")
    tiny.write_target("gemma4_e2b", path / "target")
    tiny.write_assistant("gemma4_e2b", path / "drafter", clustered=True)
    config = EngineConfig(max_batch=8, max_context=512, prefill_chunk=32)
    llm = LLM.load(str(path / "target"), drafter=str(path / "drafter"), draft_tokens=3, threads=1, engine=config)
    assert llm.tokenizer is not None
    with Served(
        llm.engine, llm.tokenizer, llm.engine.max_context, llm.config.vocab_size, max_concurrent=8, max_queued=64
    ) as s:
        yield s


def whole(s: Served, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = httpx.post(s.url + path, json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    out = answer.json()
    return {"choices": out["choices"], "usage": {**out["usage"], "prompt_tokens_details": None}}


def streamed(s: Served, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The chunks put together again, in the shape of `whole`."""
    text = ""
    finish = None
    stopped_by = None
    entries = []
    usage = None
    lists: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    ask = {**body, "stream": True, "stream_options": {"include_usage": True}}
    for line in httpx.post(s.url + path, json=ask, timeout=120).text.split("\n\n"):
        if not line.startswith("data: {"):
            continue
        chunk = json.loads(line[6:])
        usage = chunk.get("usage") or usage
        for choice in chunk["choices"]:
            text += choice.get("text", "") or choice.get("delta", {}).get("content", "")
            finish = choice["finish_reason"] or finish
            stopped_by = choice.get("stop_reason") or stopped_by
            logprobs = choice["logprobs"] or {}
            entries += logprobs.get("content", [])
            for key, values in lists.items():
                values += logprobs.get(key, [])
    assert usage is not None
    choice: dict[str, Any] = {
        "index": 0,
        "finish_reason": finish,
        **({"stop_reason": stopped_by} if stopped_by else {}),
    }
    if "chat" in path:
        choice |= {
            "logprobs": {"content": entries, "refusal": None},
            "message": {"role": "assistant", "content": text, "refusal": None},
        }
    else:
        choice |= {"logprobs": lists, "text": text}
    return {"choices": [choice], "usage": {**usage, "prompt_tokens_details": None}}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_drafting_changes_nothing_in_an_answer(served: Served, path: str) -> None:
    chat = "chat" in path

    def one(seed: int) -> int:
        body: dict[str, Any] = {
            "model": "fake",
            "seed": seed,
            "temperature": seed % 3 / 2,
            "max_tokens": 32,
            "ignore_eos": True,
        }
        body |= (
            {"messages": [{"role": "user", "content": f"hello {seed % 5}"}]}
            if chat
            else {"prompt": f"hello {seed % 5}"}
        )
        first = whole(served, path, {**body, "outrider": {"draft_tokens": 0}})["choices"][0]
        text = first["message"]["content"] if chat else first["text"]
        readable = [i for i in range(len(text) // 3, len(text)) if text[i].isprintable()]
        body |= (
            {"stop": [text[readable[0]]], "logprobs": True, "top_logprobs": 3}
            if chat
            else {"stop": [text[readable[0]]], "logprobs": 3}
        )
        want = None
        for k in KS:
            request = {**body, "outrider": {"draft_tokens": k}}
            for answer in (whole(served, path, request), streamed(served, path, request)):
                want = want or answer
                assert answer == want, (seed, k)
        assert want is not None
        return int(want["choices"][0]["finish_reason"] == "stop")

    with ThreadPoolExecutor(4) as pool:
        stopped = sum(pool.map(one, SEEDS))
    assert stopped > 30, "the stop strings were met"


def test_one_call_ends_at_the_same_token_whatever_the_draft() -> None:
    """`parallel_tool_calls: false`: what comes with the cycle that begins a second call is neither counted nor
    reported."""
    tok = tokenizer()
    call = '<tool_call>{"name": "time", "arguments": {"zone": "%s"}}</tool_call>\n'
    tools = [{"type": "function", "function": {"name": "time", "parameters": {"type": "object"}}}]
    body: dict[str, Any] = {
        "model": "fake",
        "messages": [{"role": "user", "content": "hi"}],
        "tools": tools,
        "max_tokens": 500,
    }
    body |= {"parallel_tool_calls": False, "logprobs": True}
    with Served(FakeEngine(tok, lambda r: call % "UTC" + call % "CET"), tok) as s:
        seen = set()
        for k in (0, 1, 5, 16):
            answer = whole(s, "/v1/chat/completions", {**body, "outrider": {"draft_tokens": k}})
            choice = answer["choices"][0]
            (only,) = choice["message"]["tool_calls"]
            assert choice["finish_reason"] == "tool_calls" and json.loads(only["function"]["arguments"]) == {
                "zone": "UTC"
            }
            seen.add((answer["usage"]["completion_tokens"], len(choice["logprobs"]["content"])))
        assert len(seen) == 1
