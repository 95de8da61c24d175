"""Sequences that are set back keep their K/V on the host: the same tokens, bounded memory, nothing lost."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest
import torch
from tests.engines import VOCAB, mtp_drafter, request, run, tiny_engine, tiny_model

from outrider.config import EngineConfig
from outrider.engine.engine import Engine
from outrider.llm import LLM
from outrider.types import OutriderError

MODEL = tiny_model("dense")  # sliding and full layers
MIB = 2.0**-10  # of a GiB
PARAMS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.9, "seed": 3},
    {"repetition_penalty": 1.3},
    {"temperature": 0.7, "seed": 5},
]


def crowd(swap: float, graphs: bool) -> Engine:
    """Too few pages for four."""
    drafter = mtp_drafter(MODEL, "dense", clustered=True)
    return tiny_engine(
        "dense", drafter, model=MODEL, kv_tokens=120, max_batch=4, prefix_cache=False, swap=swap, graphs=graphs
    )


def jobs() -> list[Any]:
    return [
        request(str(i), [(3 * i + j) % VOCAB for j in range(18)], k=2 * (i % 2), max_tokens=50, **p)
        for i, p in enumerate(PARAMS)
    ]


@pytest.fixture(scope="module")
def plain() -> dict[str, list[int]]:
    alone = tiny_engine("dense", model=MODEL, max_context=96)
    return {
        r.id: run(alone, [request(r.id, r.prompt, k=0, drafter=False, max_tokens=50, **p)])[r.id]
        for r, p in zip(jobs(), PARAMS)
    }


@pytest.mark.parametrize("graphs", [False, True])
def test_what_comes_back_from_the_host_goes_on_with_the_same_tokens(graphs: bool, plain: dict[str, list[int]]) -> None:
    engine = crowd(1 * MIB, graphs)
    assert run(engine, jobs()) == plain
    m, swap = engine.metrics, engine.store.swap
    assert m.preemptions == m.swapped_out == m.swapped_in > 0 and m.swap_bytes == 0
    assert 0 < swap.made * swap.block <= 2**20


def test_a_full_host_means_computing_again(plain: dict[str, list[int]]) -> None:
    engine = crowd(24 / 2**20, False)  # 24 KiB: room for one, not for two
    assert run(engine, jobs()) == plain
    m = engine.metrics
    assert 0 < m.swapped_out < m.preemptions and engine.store.swap.made <= engine.store.swap.most


def test_one_who_leaves_while_waiting_takes_what_was_kept_along() -> None:
    engine = crowd(1 * MIB, False)
    for job in jobs():
        engine.submit(job)
    while not engine.store.swap.used:
        engine.step()
    engine.check()
    for seq in list(engine.scheduler.waiting):
        engine.abort(seq.id)
    engine.step()
    assert engine.store.swap.used == 0 == engine.metrics.swap_bytes
    engine.check()


def test_pages_come_back_bit_by_bit_and_to_other_places() -> None:
    store = tiny_engine("dense", model=MODEL, max_batch=2, kv_tokens=200, swap=1 * MIB).store
    seq, _ = store.open([1] * 8, 4, reuse=False)
    assert store.reserve(seq, 60)
    store.commit(seq, 50)
    draw = torch.Generator().manual_seed(1)
    for _, tensor in store._layers:
        tensor.copy_(torch.randint(0, 256, tensor.shape, generator=draw))
    held = {name: (pages.first, pages.pages[pages.first : 13]) for name, pages in seq.pages.items()}  # of 50 positions
    assert held["sliding"][0] > 0, "pages before the window have gone"
    before = [tensor[held[group][1]].clone() for group, tensor in store._layers]
    kept = store.keep(seq, 50)
    assert kept is not None
    store.close(seq)
    other, _ = store.open([2] * 8, 4, reuse=False)
    assert store.reserve(other, 30)
    for _, tensor in store._layers:
        tensor.zero_()  # whoever had the pages meanwhile
    again = store.restore(kept, 52)
    assert again is not None and store.reserve(again, 52)
    now = {name: pages.pages[pages.first : 13] for name, pages in again.pages.items()}
    assert now != {name: pages for name, (_, pages) in held.items()}
    for (group, tensor), old in zip(store._layers, before):
        assert torch.equal(tensor[now[group]], old)
    store.check()


def test_a_long_prompt_that_was_set_back_half_way_comes_back() -> None:
    """Longer than the sliding group has pages for at once: it needs no more of them than its window and a chunk."""
    engine = tiny_engine(
        "dense", model=MODEL, max_batch=2, max_context=420, kv_tokens=900, swap=1 * MIB, prefix_cache=False
    )
    long, other = (
        request("long", [j % VOCAB for j in range(400)], k=0, max_tokens=4),
        request("other", [7] * 12, k=0, max_tokens=4),
    )
    alone = run(
        tiny_engine("dense", model=MODEL, max_context=420),
        [request("long", [j % VOCAB for j in range(400)], k=0, max_tokens=4)],
    )
    engine.submit(long)
    scheduler = engine.scheduler
    while not scheduler.running or scheduler.running[0].computed < 32:
        engine.step()
    (victim,) = scheduler.running
    assert victim.computed < 399, "in the middle of its prompt"
    scheduler.running.pop()  # as `_reserve` sets back the youngest
    victim.swapped_kv = engine.store.keep(victim.held, victim.computed)
    assert victim.swapped_kv is not None
    engine.store.close(victim.held)
    victim.cache, victim.has_features, victim.num_inflight_tokens = None, False, 0
    scheduler.waiting.appendleft(victim)
    engine.submit(other)
    got: dict[str, list[int]] = {"long": [], "other": []}
    for _ in range(500):
        for event in engine.step() if engine.busy else ():
            got[event.id] += event.tokens
    assert got["long"] == alone["long"] and len(got["other"]) == 4 and engine.store.swap.ins == 1
    engine.check()


def test_memory_that_can_not_be_had_means_computing_again(
    monkeypatch: pytest.MonkeyPatch, plain: dict[str, list[int]]
) -> None:
    engine = crowd(1 * MIB, False)
    monkeypatch.setattr("outrider.cache.swap.torch.empty", Mock(side_effect=RuntimeError("no memory to be pinned")))
    assert engine.store.swap._take(10) is None and engine.store.swap.most == 0
    monkeypatch.undo()
    assert run(engine, jobs()) == plain and engine.metrics.preemptions > 0 == engine.metrics.swapped_out


def test_it_is_refused_where_it_can_not_work() -> None:
    with pytest.raises(OutriderError, match="swap must be 0 or more GiB"):
        EngineConfig(swap=-1)
    with pytest.raises(OutriderError, match=r"--swap 900000: .* GiB of host memory are free"):
        tiny_engine("dense", model=MODEL, swap=900000)
    with pytest.raises(OutriderError, match="leave it out with tensor_parallel"):
        LLM.load("nowhere", tensor_parallel=2, engine=EngineConfig(swap=1))


def test_what_others_hold_too_is_not_copied() -> None:
    store = tiny_engine("dense", model=MODEL, max_batch=3, kv_tokens=300, swap=1 * MIB).store
    tokens = list(range(40))
    one, _ = store.open(tokens, 4)
    assert store.reserve(one, 40)
    store.prefix.insert(tokens, 40, one.pages)
    two, hit = store.open(tokens, 4)
    assert hit >= 32 and store.reserve(two, 44)
    assert store.keep(two, 42) is None, "all but the end is there when it is computed again"
    store.close(two)
    assert store.keep(one, 40) is not None, "nobody else uses it"


def test_prefixes_stay_where_giving_them_up_would_not_do() -> None:
    store = tiny_engine("dense", model=MODEL, max_batch=3, kv_tokens=120, swap=1 * MIB).store
    seq, _ = store.open([1] * 8, 4, reuse=False)
    assert store.reserve(seq, 60)
    store.commit(seq, 60)
    kept = store.keep(seq, 60)
    assert kept is not None
    store.close(seq)
    short, _ = store.open([3] * 12, 4, reuse=False)
    assert store.reserve(short, 12)
    store.prefix.insert([3] * 12, 12, short.pages)
    store.close(short)
    other, _ = store.open([2] * 8, 4, reuse=False)
    assert store.reserve(other, 80)
    before = len(store.prefix.entries)
    assert before and store.restore(kept, 60) is None and len(store.prefix.entries) == before
    store.close(other)
    assert store.restore(kept, 60) is not None
