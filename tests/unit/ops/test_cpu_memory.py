"""Memory that is taken ahead of need: it is there, and what was in it stays."""

from __future__ import annotations

import mmap
import struct
import sys
import threading
from pathlib import Path

import pytest
import torch
from tests.unit.engine.test_host_cycle import SHAPES
from torch import Tensor

from outrider.cache.store import CacheSpec, KVStore
from outrider.models.config import ModelConfig
from outrider.ops.cpu import memory
from outrider.ops.cpu.memory import HUGE, Ahead, Arena

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
    monkeypatch.setattr(Ahead, "REST_S", 0.0)
    arena = Arena()
    tensors = [arena.empty((10 * 512, HUGE // 512), torch.uint8) for _ in range(2)]  # ten huge pages each
    tensors[0][700] = 7
    ahead = Ahead(tensors)
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
    ahead = Ahead([Arena().empty((100, 64), torch.uint8)])
    ahead.need(99)
    assert not any(thread.name == "outrider-ahead" for thread in threading.enumerate())


def test_a_store_says_how_far_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int]] = []
    monkeypatch.setattr(Ahead, "need", lambda self, row: seen.append((len(self._tensors), row)))
    config = ModelConfig.from_hf(SHAPES["sliding"])
    store = KVStore(config, CacheSpec(4, 320, 16, 320, 1280), torch.float16, "cpu")
    seq, _ = store.open([1, 2, 3], 16)
    store.reserve(seq, 40)
    assert not seen
    store.take_ahead()
    store.reserve(seq, 100)
    assert {row for _, row in seen} == {7} and sum(n for n, _ in seen) == 2 * len(config.kv_layers)
