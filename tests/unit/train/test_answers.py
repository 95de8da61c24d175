"""Answers through the engine: on disk as they end, cut short and taken up again without a token's difference."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.engines import request, tiny_engine
from tests.engines import run as run_engine

from outrider.config import EngineConfig, LoadSettings
from outrider.models.inspect import kv_bytes
from outrider.train import answers
from outrider.train.answers import (
    RecordedAnswer,
    Task,
    answer_tasks,
    append_answers,
    heldout_prompts,
    plan_tasks,
    read_answers,
)
from outrider.train.clock import Stop
from outrider.train.config import TrainConfig
from outrider.train.data import Sequences
from outrider.train.target import Described
from outrider.types import OutriderError


def prompts(count: int = 11, vocab: int = 64) -> Sequences:
    rng = np.random.default_rng(0)
    rows = [rng.integers(2, vocab, size=n) for n in rng.integers(2, 40, size=count)]
    return Sequences.of(rows, map(len, rows), range(count), [False] * count, vocab)


def how(**change: Any) -> TrainConfig:
    return replace(TrainConfig("", Path(), Path(), answer_seed=0), **change)


def plan(count: int = 11) -> list[Task]:
    return plan_tasks(count, heldout_prompts(prompts(count), 2), how(max_new=20, temperature=1.0))


@pytest.fixture(scope="module")
def whole() -> dict[tuple[int, int], list[int]]:
    """Answers of an undisturbed engine."""
    rows = prompts()
    requests = [
        request(
            f"{t.prompt}.{t.draw}",
            rows[t.prompt].tolist(),
            max_tokens=20,
            temperature=t.temperature,
            seed=t.seed,
            ignore_eos=False,
        )
        for t in plan()
    ]
    said = run_engine(tiny_engine(), requests)
    return {t.key: said[f"{t.prompt}.{t.draw}"] for t in plan()}


def test_every_beginning_of_the_plan_is_a_fair_sample() -> None:
    config = how(greedy_share=0.5, temperature=0.7, answers_per_prompt=2.0, answer_seed=3)
    heldout = heldout_prompts(prompts(200), 30)
    tasks = plan_tasks(200, heldout, config)
    assert (
        len(heldout) == 30 and tasks == plan_tasks(200, heldout, config) and len({t.key for t in tasks}) == len(tasks)
    )
    for count in (40, 100, 300):
        some = tasks[:count]
        aside = [t for t in some if t.prompt in heldout]
        assert 0 < len(aside) <= count / 5 and 0.1 < np.mean([t.temperature == 0 for t in some]) < 0.6
    assert {t.temperature for t in tasks if t.prompt in heldout} == {0.0, 0.7}
    assert all(t.temperature == 0.7 for t in tasks if t.draw > 0)
    assert len(heldout_prompts(prompts(4), 30)) == 0 and {
        t.temperature for t in plan_tasks(9, heldout[:0], how(greedy_share=1.0))
    } == {0.0}


def test_a_longer_file_keeps_no_prompt_that_a_run_with_the_shorter_one_learnt_from() -> None:
    short = prompts(100)
    others = prompts(160, vocab=63)
    both = Sequences.join([short, others])
    order = np.random.default_rng(1).permutation(len(both))
    heldout = {short[i].tobytes() for i in heldout_prompts(short, 15)}
    learnt = {short[i].tobytes() for i in range(100)} - heldout
    mixed = both.select(order)
    for count in (5, 15, 40):
        remaining = [mixed[i].tobytes() for i in heldout_prompts(mixed, count)]
        assert len(remaining) == count and (count > 15 or not learnt.intersection(remaining))


def test_a_prompt_that_stands_there_twice_is_kept_or_learnt_from_as_a_whole() -> None:
    some = prompts(40)
    twice = Sequences.join([some, some, some.select(np.array([7] * 60))])
    heldout = heldout_prompts(twice, 9)
    assert 0 < len(heldout) <= 9 and 7 not in heldout
    assert all(np.isin([i, i + 40], heldout).all() for i in heldout if i < 40)


def test_prompts_of_another_file_are_kept_with_those_that_say_the_same() -> None:
    some = prompts(40)
    some.index[:] = np.arange(40)
    both = Sequences.join([some, some.select(np.array([3, 9]))])
    both.index[40:] = [40, 41]
    assert heldout_prompts(both, 8, lines=40).tolist() == [3, 9, 40, 41]


def test_answers_are_the_engines(whole: dict[tuple[int, int], list[int]]) -> None:
    answers = list(answer_tasks(tiny_engine(max_batch=4), prompts(), plan(), 20))
    assert {(a.prompt, a.draw): a.tokens for a in answers} == whole and all(a.done for a in answers)


@pytest.mark.parametrize("cut", ["stop", "deadline", "killed"])
def test_answering_goes_on_where_it_was(
    tmp_path: Path, whole: dict[tuple[int, int], list[int]], cut: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C and the clock keep half an answer too; a crash keeps what was written, minus a torn last line."""
    path = tmp_path / "answers.jsonl"
    stop = Stop()
    engine = tiny_engine(max_batch=4)
    tasks = plan()
    real = engine.step
    steps = 0
    now = [0.0]
    monkeypatch.setattr("outrider.train.answers.time", SimpleNamespace(perf_counter=lambda: now[0]))

    def step():  # type: ignore[no-untyped-def]
        nonlocal steps
        steps += 1
        if steps == 17:
            stop.signal = 2 if cut == "stop" else 0
            if cut == "deadline":
                now[0] = 1.0
            if cut == "killed":
                raise RuntimeError
        return real()

    engine.step = step  # type: ignore[method-assign]
    try:
        append_answers(path, answer_tasks(engine, prompts(), tasks, 20, halt=lambda: stop.asked or now[0] >= 1.0))
    except RuntimeError:
        with open(path, "a") as file:
            file.write('{"prompt": 3, "dra')
    before = read_answers(path)
    assert 0 < len(before) < len(tasks) and all(whole[k][: len(a.tokens)] == a.tokens for k, a in before.items())
    assert any(not a.done for a in before.values()) == (cut != "killed")
    submitted: list[int] = []
    again = tiny_engine(max_batch=4)
    submit = again.submit
    again.submit = lambda r: (submitted.append(len(r.prompt)), submit(r))[1]  # type: ignore[method-assign]
    append_answers(path, answer_tasks(again, prompts(), tasks, 20, read_answers(path)))
    after = read_answers(path)
    assert {k: a.tokens for k, a in after.items()} == whole and all(a.done for a in after.values())
    assert len(submitted) == len(tasks) - sum(a.done for a in before.values())


def test_progress_is_told_from_the_start() -> None:
    reports: list[tuple[int, int, int, float]] = []
    list(answer_tasks(tiny_engine(max_batch=4), prompts(), plan(), 20, report=lambda *row: reports.append(row)))
    assert reports[0] == (0, len(plan()), 0, 0.0) and reports[-1][0] == len(plan()) and reports[-1][2] > 0


def test_a_broken_line_is_named(tmp_path: Path) -> None:
    good = json.dumps({"prompt": 0, "draw": 0, "temperature": 0.0, "seed": 1, "tokens": [4], "done": True})
    (tmp_path / "a.jsonl").write_text(good + "\nrubbish\n" + good + "\n")
    with pytest.raises(OutriderError, match=r"a.jsonl:2: not an answer"):
        read_answers(tmp_path / "a.jsonl")
    (tmp_path / "a.jsonl").write_text(good + "\n" + good[:20])
    assert read_answers(tmp_path / "a.jsonl") == {(0, 0): RecordedAnswer(0, 0, 0.0, 1, [4], True)}


def test_an_answering_engine_takes_a_third_of_the_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_engine().model.config
    received = list[LoadSettings]()

    def load(name: str, settings: LoadSettings, **_: object) -> SimpleNamespace:
        received.append(settings)
        return SimpleNamespace(engine=SimpleNamespace())

    monkeypatch.setattr(answers.LLM, "load", load)
    page = EngineConfig().page_size  # type: ignore[arg-type]
    known = Described("tiny", None, config, None, "")  # type: ignore[arg-type]
    monkeypatch.setattr(
        answers, "free_bytes", lambda device: 3 * 12 * (100 + 1 + page) * kv_bytes(config, 1, 4)
    )  # 12 sequences in a third
    for slots in (64, 5):
        with answers.answering_engine(known, "cpu", torch.float32, slots=slots, longest=100):
            pass
    assert [s.engine.max_batch for s in received] == [12, 5]
