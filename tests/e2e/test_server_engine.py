"""The server on the real engine with a tiny Gemma 4 and its drafter: what must hold when requests share batches and
drafts.

Catches: JSON corrupted under concurrent speculation (vLLM #44993), a text that depends on who else is in the batch,
pages kept by a client that left, a drafter's failure reaching the answer, a long prompt that stalls running streams.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import openai
import pytest
from tests import tiny
from tests.server_fakes import Served
from tests.waiting import PATIENCE

from outrider.config import EngineConfig
from outrider.engine.step import Request
from outrider.llm import LLM
from outrider.types import SamplingParams

SCHEMA = {
    "type": "object",
    "properties": {
        "colour": {"enum": ["red", "green", "blue"]},
        "size": {"type": "integer", "minimum": 0, "maximum": 999},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 3}, "minItems": 1, "maxItems": 2},
        "nested": {
            "type": "object",
            "properties": {"ok": {"type": "boolean"}},
            "required": ["ok"],
            "additionalProperties": False,
        },
    },
    "required": ["colour", "size", "tags", "nested"],
    "additionalProperties": False,
}
FORM: Any = {"type": "json_schema", "json_schema": {"name": "thing", "strict": True, "schema": SCHEMA}}
SERVE = "import typer; from outrider.cli.serve import serve; typer.run(serve)"
EXAMPLE = '{"colour": "red", "size": 12, "tags": ["a", "b"], "nested": {"ok": true}}'


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    tiny.write_target("gemma4_e2b", path / "target")
    tiny.write_assistant("gemma4_e2b", path / "drafter", clustered=True)
    return path


def serve(folder: Path, drafter: str, **engine: Any) -> Served:
    config = EngineConfig(**{"max_batch": 8, "max_context": 512, "prefill_chunk": 32, **engine})
    llm = LLM.load(str(folder / "target"), drafter=drafter, draft_tokens=3, threads=1, engine=config)
    assert llm.tokenizer is not None
    return Served(
        llm.engine, llm.tokenizer, llm.engine.max_context, llm.config.vocab_size, max_concurrent=8, max_queued=64
    )


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[Served]:
    with serve(folder, str(folder / "drafter")) as s:
        yield s


@pytest.fixture(scope="module")
def by_ngram(folder: Path) -> Iterator[Served]:
    with serve(folder, "ngram") as s:
        yield s


def no_page_leaked(s: Served) -> None:
    """Idle again, the audit passes, and everything that isn't kept for prefix reuse is free."""
    s.settle()
    s.engine.check()
    assert not s.engine.scheduler.running and not s.engine.scheduler.waiting


def chat(s: Served, text: str, **options: Any) -> Any:
    return s.client().chat.completions.create(model="fake", messages=[{"role": "user", "content": text}], **options)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafting_never_changes_the_text(served: Served, temperature: float) -> None:
    options = dict(temperature=temperature, seed=11, max_tokens=40, extra_headers={"X-Outrider-Stats": "1"})
    answers = [chat(served, "hello", **options, extra_body={"outrider": {"draft_tokens": k}}) for k in (0, 1, 5)]
    assert len({a.choices[0].message.content for a in answers}) == 1
    assert answers[0].model_dump()["outrider"]["drafted"] == 0 < answers[2].model_dump()["outrider"]["drafted"]


@pytest.mark.parametrize("concurrency", [8, 16, 32])
def test_json_is_valid_at_any_concurrency(served: Served, by_ngram: Served, concurrency: int) -> None:
    def one(i: int) -> tuple[str, dict[str, Any]]:
        s = (served, by_ngram)[i % 2]
        prompt = f"Example {i}: {EXAMPLE}"
        answer = chat(
            s,
            prompt,
            seed=i,
            temperature=i % 3 / 2,
            response_format=FORM,
            max_tokens=300,
            extra_headers={"X-Outrider-Stats": "1"},
        )
        assert answer.choices[0].finish_reason == "stop"
        return answer.choices[0].message.content, answer.model_dump()["outrider"]

    with ThreadPoolExecutor(concurrency) as pool:
        answers = list(pool.map(one, range(concurrency)))
    for text, _ in answers:
        jsonschema.validate(json.loads(text), SCHEMA)
    assert sum(stats["drafted"] for _, stats in answers) > 0 and sum(stats["accepted"] for _, stats in answers) > 0
    again, _ = one(3)
    assert again == answers[3][0]  # alone it gives the same text
    no_page_leaked(served)
    no_page_leaked(by_ngram)


def test_joins_leaves_and_bad_requests_disturb_nobody(served: Served) -> None:
    rng = random.Random(5)
    plans = [
        (f"prompt number {i} " * rng.randint(1, 6), rng.randint(5, 60), rng.choice(["whole", "stream", "leave", "bad"]))
        for i in range(40)
    ]

    def one(i: int) -> str | None:
        text, most, way = plans[i]
        options: dict[str, Any] = dict(seed=i, temperature=0.8, max_tokens=most)
        if way == "bad":
            with pytest.raises(openai.BadRequestError):
                chat(served, text, **options, extra_body={"nonsense": 1})
            return None
        if way == "whole":
            return chat(served, text, **options).choices[0].message.content
        stream = chat(served, text, **options, stream=True)
        got = ""
        for n, chunk in enumerate(stream):
            got += chunk.choices[0].delta.content or ""
            if way == "leave" and n == 2:
                stream.close()
                return None
        return got

    with ThreadPoolExecutor(16) as pool:
        together = list(pool.map(one, range(len(plans))))
    no_page_leaked(served)
    for i, text in enumerate(together):
        if text is not None and i % 3 == 0:
            assert one(i) == text, f"request {i} alone gives another text"
    no_page_leaked(served)


def test_a_drafter_that_fails_costs_nothing_but_speed(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    options = dict(seed=3, max_tokens=40, temperature=0.7)
    before = chat(served, "the drafter will fail", **options).choices[0].message.content
    calls = 0
    propose = served.engine.drafter.propose

    def failing(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > 2:
            raise RuntimeError("made to fail")
        return propose(*args, **kwargs)

    monkeypatch.setattr(served.engine.drafter, "propose", failing)
    stream = list(
        chat(served, "the drafter will fail", **options, stream=True, extra_headers={"X-Outrider-Stats": "1"})
    )
    assert "".join(c.choices[0].delta.content or "" for c in stream) == before
    assert "made to fail" in stream[-1].model_dump()["outrider"]["drafter_off"] and calls == 3


def test_a_long_prompt_does_not_stall_a_running_stream(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """13 chunks of prefill: the running stream must speak between them. Counted in the engine's steps, so that it
    matters to nobody when its readers get their turn; steps take a while until the long prompt is there, so that the
    stream is not over by then."""
    asked = list[str]()
    steps = list[set[str]]()
    submit = served.engine.submit
    step = served.engine.step

    def watched_submit(request: Request) -> None:
        submit(request)
        asked.append(request.id)
        steps.clear()

    def watched_step() -> Any:
        time.sleep(0.2 if len(asked) < 2 else 0.0)
        events = step()
        steps.append({event.id for event in events if event.tokens})
        return events

    monkeypatch.setattr(served.engine, "submit", watched_submit)
    monkeypatch.setattr(served.engine, "step", watched_step)
    stream = chat(
        served, "short", seed=1, temperature=1.0, max_tokens=300, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    chat(served, "x" * 400, seed=1, max_tokens=1)
    running, long = asked
    first = next(i for i, said in enumerate(steps) if long in said)
    assert sum(running in said for said in steps[:first]) >= 6
    assert "".join(c.choices[0].delta.content or "" for c in stream)
    no_page_leaked(served)


def test_a_short_prompt_does_not_wait_for_a_long_one(folder: Path) -> None:
    engine = serve(folder, "ngram").engine  # stepped by hand
    engine.submit(Request("long", [50] * 400, SamplingParams(max_tokens=1)))
    engine.submit(Request("short", [50] * 5, SamplingParams(max_tokens=1)))
    spoken = [[e.id for e in engine.step()] for _ in range(16)]
    assert spoken[1] == ["short"] and ["long"] in spoken[12:]


def test_pages_run_out_and_everybody_finishes(folder: Path) -> None:
    """Room for about three of eight sequences: the others wait or are pre-empted, and give the same texts as alone."""
    with serve(folder, "ngram", kv_tokens=640) as s:

        def ask(i):
            return chat(s, f"prompt {i}", seed=i, temperature=0.9, max_tokens=120, extra_body={"ignore_eos": True})

        with ThreadPoolExecutor(8) as pool:
            together = [a.choices[0].message.content for a in pool.map(ask, range(8))]
        assert [ask(i).choices[0].message.content for i in (0, 5)] == [together[0], together[5]]
        no_page_leaked(s)


def test_killed_and_started_again(folder: Path) -> None:
    """kill -9 in the middle of a stream: nothing to repair, the same answer afterwards. The command line is tested on
    the way."""
    config = folder / "target" / "config.json"  # an answer so long that nobody is too slow to see it killed
    config.write_text(config.read_text().replace('"max_position_embeddings": 512', '"max_position_embeddings": 8192'))
    command = [sys.executable, "-c", SERVE, str(folder / "target"), "--drafter", "ngram", "--port", "0"]
    command += ["--draft-tokens", "2", "--threads", "1", "--max-context", "8192"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    texts = []
    for last in (False, True):
        process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment, text=True
        )
        assert process.stderr is not None
        try:
            said = next((line for line in iter(process.stderr.readline, "") if "serving" in line), "")
            assert said, "the server did not start"
            url = said.split(" at ")[1].split()[0]
            client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=PATIENCE)
            ask: dict[str, Any] = dict(
                model="target", messages=[{"role": "user", "content": "hello"}], seed=4, max_tokens=30
            )
            texts.append(client.chat.completions.create(**ask).choices[0].message.content)
            if not last:
                stream = client.chat.completions.create(
                    **{**ask, "max_tokens": 8000}, stream=True, extra_body={"ignore_eos": True}
                )
                next(iter(stream))
                process.kill()
                with pytest.raises((openai.APIError, httpx.TransportError)):
                    list(stream)
            else:
                process.send_signal(signal.SIGTERM)
                assert process.wait(PATIENCE) in (0, -signal.SIGTERM)
        finally:
            process.kill()
            process.communicate()
    assert texts[0] == texts[1]
