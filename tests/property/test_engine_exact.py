"""The answer does not depend on the drafter, on K, on the batch, on when others join or leave.

The reference ops run in float32; the two nearest candidates of a tiny random model are far wider apart than its
rounding, so token identity is required without exception.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.engines import VARIANTS, VOCAB, mtp_drafter, request, run, run_joining, tiny_engine, tiny_model
from tests.strategies import SAMPLING
from tests.unit.engine.test_graphs import Thirds

from outrider.engine.step import Request
from outrider.spec.drafter import DraftBatch, Drafter
from outrider.types import Draft

MODELS = {name: tiny_model(name) for name in VARIANTS}
GEMMA4 = ("dense", "edge", "moe")


class Puppet(Drafter):
    """A drafter with a rule instead of a model."""

    name = "puppet"
    taps: tuple[int, ...] = ()

    def __init__(self, rule: str):
        self.rule = rule

    def propose(self, batch: DraftBatch, k: int) -> Draft:
        b = batch.last.shape[0]
        j = torch.arange(k).expand(b, k)
        tokens = {
            "same": torch.full((b, k), 3),
            "alternating": torch.where(j % 2 == 0, 5, 9),
            "copy": batch.last[:, None].expand(b, k).clone(),
            "counting": (batch.last[:, None] + 1 + j) % VOCAB,
            "outside": torch.full((b, k), VOCAB + 7),
            "negative": torch.full((b, k), -1),
        }
        if self.rule == "raises":
            raise RuntimeError("broken on purpose")
        if self.rule == "shape":
            return Draft(torch.zeros((b, k + 1), dtype=torch.int64), torch.full((b,), k))
        return Draft(tokens[self.rule], torch.full((b,), k))


def plain(variant: str, prompt: list[int], params: dict[str, Any]) -> list[int]:
    return run(tiny_engine(variant, model=MODELS[variant]), [request("plain", prompt, drafter=False, **params)])[
        "plain"
    ]


PROMPT = [3, 5, 7, 9, 11, 3, 5, 7, 9, 13, 2, 40, 41, 3, 5]
HOT = {
    "temperature": 1.3,
    "top_p": 0.9,
    "repetition_penalty": 1.2,
    "presence_penalty": 0.3,
    "frequency_penalty": 0.2,
    "logit_bias": {4: 1.5, 9: -2.0},
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(
    "params", [{}, {"temperature": 0.7, "seed": 5}, {**HOT, "seed": 11}], ids=["greedy", "T0.7", "T1.3+all"]
)
def test_every_variant_and_k(variant: str, params: dict[str, Any]) -> None:
    want = plain(variant, PROMPT, params)
    drafters = [None] + ([mtp_drafter(MODELS[variant], variant, c) for c in (False, True)] if variant in GEMMA4 else [])
    for drafter in drafters:
        for k in (1, 5, 16):  # the ends and one between; the rest is drawn in test_random_batches
            engine = tiny_engine(variant, drafter, model=MODELS[variant])
            assert run(engine, [request("a", PROMPT, k=k, **params)])["a"] == want, (variant, drafter, k)
            if drafter is not None:
                assert engine.metrics.drafted > 0 and engine.metrics.drafter_failures == 0


@pytest.mark.parametrize("rule", ["same", "alternating", "copy", "counting"])
def test_adversarial_drafters_change_nothing(rule: str) -> None:
    for params in ({}, HOT):
        want = plain("dense", PROMPT, params)
        engine = tiny_engine("dense", Puppet(rule), names=(), model=MODELS["dense"])
        assert run(engine, [request("a", PROMPT, k=7, **params)])["a"] == want
        assert engine.metrics.drafted > 0


@pytest.mark.parametrize("rule", ["outside", "negative", "raises", "shape"])
def test_broken_drafters_are_switched_off(rule: str, caplog: pytest.LogCaptureFixture) -> None:
    engine = tiny_engine("llama", Puppet(rule), names=(), model=MODELS["llama"])
    engine.submit(request("a", PROMPT, k=4))
    tokens = []
    stats = None
    while engine.busy:
        for event in engine.step():
            tokens += event.tokens
            stats = event.stats or stats
    assert tokens == plain("llama", PROMPT, {})
    assert engine.metrics.drafter_failures == 1, "it is tried once and then left alone"
    assert stats is not None and stats.drafter_off
    assert "switched off" in caplog.text


sampling = st.fixed_dictionaries(
    {
        **SAMPLING,
        "repetition_penalty": st.sampled_from([1.0, 1.3]),
        "frequency_penalty": st.sampled_from([0.0, 0.5]),
        "logit_bias": st.sampled_from([{}, {7: 3.0, 8: -3.0}]),
        "bad_words": st.sampled_from([(), ((5, 7), (12,))]),
    }
)
one = st.tuples(
    st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=40),
    sampling,
    st.sampled_from([None, 0, 1, 2, 4, 7, 16]),
    st.integers(0, 6),
)


@settings(max_examples=25)
@given(
    st.sampled_from(sorted(VARIANTS)),
    st.lists(one, min_size=1, max_size=8),
    st.integers(2, 8),
    st.booleans(),
    st.booleans(),
)
def test_random_batches(variant: str, jobs: list[Any], max_batch: int, tight: bool, reuse: bool) -> None:
    """Sequences join at random steps, run beside others with other K, are pre-empted when pages are scarce, and
    leave."""
    model = MODELS[variant]
    drafter = mtp_drafter(model, variant, clustered=True) if variant in GEMMA4 else None
    engine = tiny_engine(
        variant, drafter, model=model, max_batch=max_batch, kv_tokens=96 if tight else None, k=3, prefix_cache=reuse
    )
    waiting = [(at, request(str(i), prompt, k=k, **params)) for i, (prompt, params, k, at) in enumerate(jobs)]
    got = run_joining(engine, waiting)
    for _, r in waiting:
        assert got[r.id] == alone(variant, r), r


def alone(variant: str, r: Request) -> list[int]:
    engine = tiny_engine(variant, model=MODELS[variant])
    return run(engine, [Request("alone", r.prompt, r.params, 0, False)])["alone"]


def test_preemption_happens_and_changes_nothing() -> None:
    engine = tiny_engine("llama", model=MODELS["llama"], kv_tokens=120, max_batch=4, prefix_cache=False)
    jobs = [request(str(i), [i + 2, 5, 7] * 6, k=2, max_tokens=50) for i in range(4)]
    got = run(engine, jobs)
    assert engine.scheduler.preemptions > 0
    for job in jobs:
        assert got[job.id] == alone("llama", job)


def test_aborting_frees_pages_at_once() -> None:
    engine = tiny_engine("dense", model=MODELS["dense"], prefix_cache=False)
    free = {n: g.pool.free for n, g in engine.store.groups.items()}
    engine.submit(request("a", PROMPT, max_tokens=100))
    for _ in range(4):
        engine.step()
    engine.abort("a")
    events = engine.step()
    assert events[-1].finish_reason == "abort" and not engine.busy
    assert {n: g.pool.free for n, g in engine.store.groups.items()} == free
    engine.abort("never there")


def test_sliding_memory_stays_constant_from_2k_to_8k() -> None:
    engine = tiny_engine(
        "dense",
        model=MODELS["dense"],
        max_batch=1,
        max_context=9000,
        page_size=32,
        prefill_chunk=512,
        prefix_cache=False,
    )
    num_pages = []
    engine.submit(request("a", [i % VOCAB for i in range(8000)], max_tokens=20))
    while engine.busy:
        engine.step()
        if engine.scheduler.running and engine.scheduler.running[0].computed >= 2048:
            num_pages.append(len(engine.scheduler.running[0].cache.pages["sliding"].held()))
    bound = -(-(12 + 512) // 32) + 2
    assert num_pages and max(num_pages) <= bound


def test_prefix_hits_equal_recomputation() -> None:
    model = MODELS["dense"]
    prompt = [(7 * i) % VOCAB for i in range(70)]
    engine = tiny_engine("dense", model=model)
    first = run(engine, [request("a", prompt, temperature=0.8, seed=3)])["a"]
    engine.submit(request("b", prompt, temperature=0.8, seed=3))
    tokens = []
    stats = None
    while engine.busy:
        for event in engine.step():
            tokens = tokens + event.tokens
            stats = event.stats or stats
    assert stats is not None and stats.cached_tokens == 64
    assert tokens == first


def test_sixty_four_mixed_requests_are_those_alone() -> None:
    """Greedy, sampled, penalised, with a grammar or logprobs, joining and leaving, in steps that are read one
    behind."""
    rng = random.Random(3)
    kinds: list[dict[str, Any]] = [
        {}, {"temperature": 0.9}, {"temperature": 1.0, "top_k": 12, "top_p": 0.9},
        {"repetition_penalty": 1.3, "frequency_penalty": 0.3},
        {"grammar": Thirds()}, {"logprobs": 3, "temperature": 0.7},
        {"logit_bias": {4: 1.5, 9: -2.0}, "bad_words": ((5, 7), (12,))},
        {"min_tokens": 4, "stop_token_ids": (5, 9, 17)},
    ]  # fmt: skip
    engine = tiny_engine(
        "dense", mtp_drafter(MODELS["dense"], "dense", True), model=MODELS["dense"], max_batch=64, graphs=True, k=3
    )
    engine.executors[-1].launch = lambda plan: pytest.fail("a step went the slow way")  # type: ignore[method-assign]
    jobs = []
    for i in range(64):
        prompt = [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 30))]
        params = {**kinds[i % len(kinds)], "seed": i, "max_tokens": rng.randrange(6, 14)}
        jobs.append((rng.randrange(5), request(str(i), prompt, k=rng.choice([None, 0, 2, 5]), **params)))
    got: dict[str, list[int]] = {r.id: [] for _, r in jobs}
    for step in range(500):
        for at, r in jobs:
            if at == step:
                engine.submit(r)
        if step > 5 and not engine.busy:
            break
        for event in engine.step():
            got[event.id] += event.tokens
    assert not engine.busy
    engine.check()
    for _, r in jobs:
        assert got[r.id] == alone("dense", r), r
