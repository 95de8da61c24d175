"""Captured cycles, run eagerly on the CPU (tests/unit/engine/test_graphs.py): the texts of the eager engine at every K,
whoever joins, leaves, is pre-empted or stops while a cycle is in flight."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.engines import VOCAB, request, run
from tests.strategies import SAMPLING
from tests.unit.engine.test_graphs import MODELS, PROMPT, Thirds, alone, engines, graphs_of

from outrider.engine.engine import Engine

PARAMS = [{}, {"temperature": 0.7, "seed": 5}, {"temperature": 1.2, "top_k": 9, "top_p": 0.9, "min_p": 0.02}]


@pytest.mark.parametrize("variant", ["dense", "edge", "moe"])
@pytest.mark.parametrize("params", PARAMS, ids=str)
def test_the_same_text_at_every_k(variant: str, params: dict[str, Any]) -> None:
    want = alone(variant, request("a", PROMPT, **params))
    for k in (0, 1, 5, 16):
        engine = engines(variant)
        assert run(engine, [request("a", PROMPT, k=k, **params)])["a"] == want, k
        assert graphs_of(engine).decode_graphs.cache.graphs, "no cycle went through a graph"
        assert (engine.metrics.drafted > 0) == (k > 0)


sampling = st.fixed_dictionaries(
    {
        **SAMPLING,
        "repetition_penalty": st.sampled_from([1.0, 1.0, 1.0, 1.3]),
        "presence_penalty": st.sampled_from([0.0, 0.0, 0.4]),
        "frequency_penalty": st.sampled_from([0.0, 0.0, 0.5]),
        "logit_bias": st.sampled_from([{}, {}, {7: 3.0, 8: -3.0, 9: 1.0}, {4: 2.0}]),
        "bad_words": st.sampled_from([(), (), ((5, 7), (12,)), ((3, 5, 7, 9),)]),
        "stop_token_ids": st.sampled_from([(), (5, 9, 17)]),
        "min_tokens": st.sampled_from([0, 0, 1]),
        "logprobs": st.sampled_from([None, None, 0, 3]),
        "grammar": st.sampled_from([None, None, None, Thirds()]),
    }
)
one = st.tuples(
    st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=40), sampling, st.sampled_from([None, 0, 1, 2, 4, 7, 16]),
    st.sampled_from([True, True, True, False, "ngram"]), st.integers(0, 6), st.sampled_from([None, None, None, 8]),
)  # fmt: skip


@settings(max_examples=25)
@given(
    st.sampled_from(sorted(MODELS)),
    st.lists(one, min_size=1, max_size=8),
    st.integers(2, 8),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
def test_random_batches(variant: str, jobs: list[Any], max_batch: int, tight: bool, reuse: bool, served: bool) -> None:
    """Requests join, leave, are aborted and pre-empted while cycles are in flight. In a server steps run in graphs with
    room to spare."""
    engine = engines(variant, True, max_batch=max_batch, kv_tokens=96 if tight else None, k=3, prefix_cache=reuse)
    check_batches(engine, variant, jobs, served)


def check_batches(engine: Engine, variant: str, jobs: list[Any], served: bool) -> None:
    """Every request has the text that it has alone; no step is eager."""
    if served:
        graphs_of(engine).prepare()
    eager = engine.executors[-1]
    eager.launch = lambda plan: pytest.fail("a step went the slow way")  # type: ignore[method-assign]
    waiting = [
        (at, gone, request(str(i), prompt, k=k, drafter=d, **p)) for i, (prompt, p, k, d, at, gone) in enumerate(jobs)
    ]
    got: dict[str, list[int]] = {r.id: [] for _, _, r in waiting}
    ended: dict[str, str] = {}
    for step in range(2000):
        for at, gone, r in waiting:
            if at == step:
                engine.submit(r)
            if gone == step:
                engine.abort(r.id)
        if step > 8 and not engine.busy:
            break
        for event in engine.step():
            assert event.id not in ended, "an event after the last one"
            got[event.id] += event.tokens
            num_logprobs = next(r.params.logprobs for _, _, r in waiting if r.id == event.id)
            if event.tokens and num_logprobs is not None:
                assert event.logprobs is not None and all(
                    t in row for t, row in zip(event.tokens, event.logprobs, strict=True)
                )
                assert all(num_logprobs <= len(row) <= num_logprobs + 1 for row in event.logprobs)
            if event.finish_reason:
                ended[event.id] = event.finish_reason
        engine.check()
    assert not engine.busy
    for _, _, r in waiting:
        want = alone(variant, r)
        assert got[r.id] == (want if ended.get(r.id) != "abort" else want[: len(got[r.id])]), r
