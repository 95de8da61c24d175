"""Adapted answers do not depend on the drafter, on K, on trees, on the batch or on the adapters of other sequences.

The CPU's kernels promise independent rows, so token identity is required without exception, and log-probabilities
must be equal to the last bit.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.engines import VOCAB, mtp_drafter, run_joining, tiny_engine, tiny_model
from tests.lora import write_adapter

from outrider.engine.adapters import AdapterPool
from outrider.engine.engine import Engine
from outrider.engine.step import Request
from outrider.ops.cpu.ops import CpuOps
from outrider.types import OutriderError, SamplingParams
from outrider.weights.adapter import load_adapter

OPS = CpuOps(threads=1)
MODELS = {name: tiny_model(name, ops=OPS) for name in ("llama", "qwen3", "gemma3", "dense", "edge", "moe")}
GEMMA4 = ("dense", "edge", "moe")
ADAPTERS = ("a", "b", "c", "d")
PROMPT = [3, 5, 7, 9, 11, 3, 5, 7, 9, 13, 2, 40, 41, 3, 5]


@cache
def pool(variant: str) -> AdapterPool:
    model = MODELS[variant]
    folder = Path(mkdtemp())
    adapters = AdapterPool(
        model, lambda name, path: load_adapter(name, path, model.config, model.ops, model.dtype, model.device)
    )
    for i, name in enumerate(ADAPTERS):
        adapters.add(name, str(write_adapter(model.config, folder / name, seed=i, rank=(4, 8, 3, 16)[i])))
    return adapters


def engine_of(variant: str, drafts: bool = False, **config: Any) -> Engine:
    model = MODELS[variant]
    drafter = mtp_drafter(model, variant, True) if drafts and variant in GEMMA4 else None
    engine = tiny_engine(variant, drafter, model=model, **config)
    engine.runner.adapters = pool(variant)
    return engine


def request(
    id: str, prompt: list[int], adapter: str | None, k: int = 0, tree: int | None = None, **params: Any
) -> Request:
    wanted = SamplingParams(**{"max_tokens": 12, "ignore_eos": True, "logprobs": 2, **params})
    return Request(id, prompt, wanted, k, bool(k), tree=tree, adapter=adapter)


@cache
def plain(variant: str, prompt: tuple[int, ...], adapter: str | None, temperature: float, seed: int) -> Any:
    """Tokens and log-probabilities of a request alone, without drafts."""
    events: dict[str, list[Any]] = {}
    one = request("plain", list(prompt), adapter, temperature=temperature, seed=seed)
    return run_joining(engine_of(variant), [(0, one)], logprobs=events)["plain"], events["plain"]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("variant", MODELS)
def test_speculative_is_plain(variant: str, temperature: float) -> None:
    want = plain(variant, tuple(PROMPT), "a", temperature, 5)
    assert want != plain(variant, tuple(PROMPT), None, temperature, 5), "the adapter changes nothing"
    for k, tree in ((1, None), (4, None), (8, None), (4, 8)):
        engine = engine_of(variant, drafts=True)
        events = dict[str, list[Any]]()
        one = request("a", PROMPT, "a", k, tree, temperature=temperature, seed=5)
        assert (run_joining(engine, [(0, one)], logprobs=events)["a"], events["a"]) == want, (k, tree)
        if variant in GEMMA4:
            assert engine.metrics.drafted > 0 and engine.metrics.drafter_failures == 0


one = st.tuples(
    st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=24).map(tuple),
    st.sampled_from([None, *ADAPTERS]),
    st.sampled_from([(0, None), (1, None), (4, None), (8, None), (4, 8)]),
    st.sampled_from([0.0, 0.9]),
    st.integers(0, 5),
)


@settings(max_examples=12)
@given(st.sampled_from(sorted(MODELS)), st.lists(one, min_size=2, max_size=8), st.booleans())
def test_mixed_batches(variant: str, jobs: list[Any], tight: bool) -> None:
    """Sequences of four adapters and of none share steps, and are preempted when pages are scarce."""
    engine = engine_of(variant, True, **({"kv_tokens": 72} if tight else {}))
    events = dict[str, list[Any]]()
    requests = [
        (at, request(str(i), list(prompt), adapter, k, tree, temperature=temperature, seed=i))
        for i, (prompt, adapter, (k, tree), temperature, at) in enumerate(jobs)
    ]
    got = run_joining(engine, requests, logprobs=events)
    for i, (prompt, adapter, _, temperature, _) in enumerate(jobs):
        assert (got[str(i)], events[str(i)]) == plain(variant, prompt, adapter, temperature, i), i


def test_prefixes_are_shared_within_an_adapter_only() -> None:
    engine = engine_of("llama")
    prompt = [*PROMPT, *PROMPT]
    stats: dict[str, int] = {}
    for id, adapter in (("1", "a"), ("2", None), ("3", "b"), ("4", "a"), ("5", None)):
        engine.submit(request(id, prompt, adapter))
        while engine.busy:
            stats |= {e.id: e.stats.cached_tokens for e in engine.step() if e.stats is not None}
    assert stats["1"] == stats["2"] == stats["3"] == 0 and stats["4"] == stats["5"] > 0


def test_preempted_sequences_keep_their_adapter() -> None:
    jobs = [(0, request(str(i), PROMPT[i:], name)) for i, name in enumerate(("a", "b", None, "c"))]
    engine = engine_of("llama", kv_tokens=64)
    got = run_joining(engine, jobs)
    assert engine.metrics.preemptions > 0
    for _, each in jobs:
        assert got[each.id] == plain("llama", tuple(each.prompt), each.adapter, 0.0, 0)[0]


def test_an_adapter_that_leaves_is_read_again_and_the_least_recently_used_leaves_first() -> None:
    engine = engine_of("llama")
    full = pool("llama")
    small = engine.runner.adapters = AdapterPool(full.model, full.load, max_adapters=2)
    for name in ("a", "b"):
        small.add(name, full.paths[name])
    adapter = small.get("a")
    small.add("c", full.paths["c"])
    assert small.get("a") is adapter, "b was used least recently"
    assert small.nbytes == sum(full.get(name).nbytes for name in ("a", "c"))
    want = plain("llama", tuple(PROMPT), "b", 0.0, 0)[0]
    assert run_joining(engine, [(0, request("b", PROMPT, "b"))])["b"] == want
    small.remove("b")
    with pytest.raises(OutriderError, match="no adapter 'b'; loaded: a, c"):
        engine.submit(request("x", PROMPT, "b"))
    with pytest.raises(OutriderError, match="loaded already"):
        small.add("a", full.paths["a"])


def test_a_replaced_adapter_does_not_change_a_request_on_its_way() -> None:
    engine = engine_of("llama")
    full = pool("llama")
    replacement = engine.runner.adapters = AdapterPool(full.model, full.load)
    replacement.add("x", full.paths["a"])
    engine.submit(request("1", PROMPT, "x"))
    got: list[int] = [t for e in engine.step() for t in e.tokens]
    replacement.remove("x")
    replacement.add("x", full.paths["b"])
    while engine.busy:
        got += [t for e in engine.step() for t in e.tokens]
    assert got == plain("llama", tuple(PROMPT), "a", 0.0, 0)[0]
    assert run_joining(engine, [(0, request("2", PROMPT, "x"))])["2"] == plain("llama", tuple(PROMPT), "b", 0.0, 0)[0]
