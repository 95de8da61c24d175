"""Memory that is taken ahead of need is there, and what was in it stays; what nobody needs any more goes back."""

from __future__ import annotations

import mmap
import struct
import sys
import threading
from pathlib import Path

import pytest
import torch
from tests.engines import request, run
from tests.unit.engine.test_host_cycle import SHAPES, engines
from torch import Tensor

from outrider.cache.prefix import PrefixChain
from outrider.cache.store import CacheSpec, KVStore, SeqCache
from outrider.models.config import ModelConfig
from outrider.ops.cpu import memory
from outrider.ops.cpu.memory import HUGE, Arena, HugePageWarmer

pytestmark = pytest.mark.skipif(sys.platform != "linux" or memory.populate(0, 0) != 0, reason="needs Linux 5.14")


def present(tensor: Tensor, row: int) -> bool:
    """Is there memory behind the row?"""
    address = tensor[row].data_ptr()
    with Path("/proc/self/pagemap").open("rb") as file:
        file.seek(address // mmap.PAGESIZE * 8)
        return bool(struct.unpack("<Q", file.read(8))[0] >> 63)


def settle() -> None:
    for thread in threading.enumerate():
        if thread.name == "outrider-ahead":
            thread.join(60)


def test_what_lies_ahead_is_there_before_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HugePageWarmer, "REST_S", 0.0)
    arena = Arena()
    tensors = [arena.empty((10 * 512, HUGE // 512), torch.uint8) for _ in range(2)]  # ten huge pages each
    tensors[0][700] = 7
    ahead = HugePageWarmer(tensors)
    ahead.need(1)
    settle()
    assert all(present(t, 1) and present(t, 500) and not present(t, 2 * 2048) for t in tensors)
    assert tensors[0][700].eq(7).all() and not tensors[0][701].any()
    ahead.need(200)
    assert not any(thread.name == "outrider-ahead" for thread in threading.enumerate())  # it is there already
    ahead.need(5119)
    settle()
    assert all(present(t, 5119) for t in tensors)


def test_small_ones_are_left_alone() -> None:
    settle()
    ahead = HugePageWarmer([Arena().empty((100, 64), torch.uint8)])
    ahead.need(99)
    assert not any(thread.name == "outrider-ahead" for thread in threading.enumerate())


def test_a_store_says_how_far_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int]] = []
    monkeypatch.setattr(HugePageWarmer, "need", lambda self, row: seen.append((len(self._tensors), row)))
    config = ModelConfig.from_hf(SHAPES["sliding"])
    store = KVStore(config, CacheSpec(4, 320, 16, 320, 1280), torch.float16, "cpu")
    seq, _ = store.open()
    store.reserve(seq, 40)
    assert not seen
    store.take_ahead()
    store.reserve(seq, 100)
    assert {row for _, row in seen} == {7} and sum(n for n, _ in seen) == 2 * len(config.kv_layers)


def test_what_nobody_needs_goes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """All but what is in use and as much as the next ones may need at once; and it comes again before it is needed."""
    monkeypatch.setattr(HugePageWarmer, "REST_S", 0.0)
    # 512 rows are a huge page
    arena = Arena()
    a_page = HUGE // 512
    tensors = [arena.empty((10 * 512, a_page), torch.uint8) for _ in range(2)]
    ahead = HugePageWarmer(tensors)
    for row in range(0, 10 * 512, 256):
        ahead.need(row)
    settle()
    assert ahead.bytes == 2 * 10 * HUGE and present(tensors[1], 5000)
    tensors[1][3000] = 7
    used = {*range(1, 100), 3000}
    free = [row for row in range(1, 10 * 512) if row not in used]
    assert ahead.give_back(free[:-1][: ahead._rows + 5]) == 0, "too little to be worth it"
    returned = ahead.give_back(free)
    assert returned > 2 * 7 * HUGE and ahead.bytes == 2 * 10 * HUGE - returned
    assert all(not present(t, 5000) and not present(t, 2999 - 1) and present(t, 400) for t in tensors)
    assert tensors[1][3000].eq(7).all() and not tensors[1][5000].any()
    assert ahead.give_back(free) == 0, "once is enough"
    ahead.need(free[ahead._rows])
    settle()
    assert all(present(t, free[ahead._rows]) for t in tensors) and tensors[1][3000].eq(7).all()


def opened(store: KVStore, tokens: list[int]) -> tuple[SeqCache, int, PrefixChain]:
    chain = PrefixChain(16)
    chain.extend(tokens, len(tokens))
    seq, hit = store.open(chain, len(tokens), 16)
    return seq, hit, chain


def test_a_prefix_that_is_used_stays() -> None:
    """The others go after their time, and the pages that are free then are handed out from the front."""
    now = [0.0]
    config = ModelConfig.from_hf(SHAPES["sliding"])
    store = KVStore(config, CacheSpec(4, 320, 16, 320, 1280), torch.float16, "cpu")
    store.prefix.seconds = lambda: now[0]
    store.take_ahead()
    texts = {name: list(range(at, at + 64)) for name, at in (("old", 0), ("used", 100))}
    for tokens in (*texts.values(), [*texts["used"], *range(200, 264)]):
        seq, _, chain = opened(store, tokens)
        assert store.reserve(seq, len(tokens))
        store.commit(seq, len(tokens))
        store.share(seq, chain, tokens, len(tokens))
        store.close(seq)
    now[0] = 50.0
    seq, hit, _ = opened(store, texts["used"])
    assert hit == 64
    store.tidy(60.0)
    assert len(store.prefix.entries) == 12, "nothing is as old as that"
    now[0] = 70.0
    store.tidy(60.0)
    store.check()
    store.close(seq)
    assert {e.used for e in store.prefix.entries.values()} == {50.0} and len(store.prefix.entries) == 4
    fresh, hit, _ = opened(store, texts["old"])
    assert hit == 0 and store.reserve(fresh, 65)
    full = fresh.pages["full"].pages
    assert full == sorted(full) and full[0] == 1
    assert opened(store, texts["used"])[1] == 64


def test_answers_are_the_same_after_memory_went_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HugePageWarmer, "REST_S", 0.0)
    monkeypatch.setattr(memory, "HUGE", 8192)  # four pages of this model
    engine, _ = engines("llama")
    store = engine.store
    store.take_ahead()
    jobs = [request(str(i), [3 + i, 5, 7, *range(9, 70)], k=3, seed=i, temperature=0.8) for i in range(4)]
    first = run(engine, jobs)
    settle()
    assert engine.tidy(3600.0) == 0 and run(engine, jobs) == first
    assert engine.metrics.cached_tokens >= 4 * 48, "what was just used stays"
    settle()
    before = engine.metrics.kv_bytes
    used = engine.metrics.free_pages["full"]
    returned = engine.tidy(0.0)
    engine.check()
    keys = store.keys[0]
    assert keys is not None and returned > before // 2 and engine.metrics.kv_bytes == before - returned
    assert engine.metrics.free_pages["full"] > used and not store.prefix.entries
    assert [present(keys, page) for page in (1, 20)] == [True, False]
    assert run(engine, jobs) == first
