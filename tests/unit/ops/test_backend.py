"""Promises of the backends, and that backends implement their interface."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from tests.unit.engine.test_host_cycle import SHAPES

import outrider.ops.triton
from outrider import ops
from outrider.cache.store import CacheSpec, KVStore
from outrider.models.config import ModelConfig
from outrider.models.decoder import TextModel
from outrider.ops.backend import Capabilities
from outrider.ops.cpu.ops import CpuOps
from outrider.ops.formats import IntegerFormat
from outrider.ops.reference import ReferenceOps
from outrider.weights.load import dummy_weights


def test_nothing_is_promised_by_default() -> None:
    assert ReferenceOps.capabilities == replace(Capabilities(), trees=True)  # it attends to each row of a tree alone
    assert not Capabilities().independent_rows and not Capabilities().graphs and not Capabilities().prompts_independent


def test_kernels_are_built_for_the_device_that_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """`--device cuda:1` used to get the counters of cuda:0."""
    built: list[str] = []
    monkeypatch.setattr(outrider.ops.triton, "TritonOps", lambda device="cuda": built.append(str(device)))
    ops.choose(torch.device("cuda:1"))
    assert built == ["cuda:1"]


def test_dense_kernels_hold_nothing_quantised(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a file holds is then dequantised; the usual kernels keep it as it is."""
    monkeypatch.setattr("outrider.ops.formats.base.SMALL", 0)
    weight = IntegerFormat(4, 32).quantise(torch.randn(64, 64))
    usual = ops.choose("cpu", "triton")
    dense = ops.choose("cpu", "triton:dense")
    assert usual.pack_weights([weight], "cpu") is not None and dense.pack_weights([weight], "cpu") is None


@pytest.mark.parametrize("shape", ["llama", "sliding"])
@torch.inference_mode()
def test_prompts_of_the_cpu_do_not_hang_on_where_they_are_cut(shape: str) -> None:
    backend = CpuOps(threads=2)
    assert backend.capabilities.prompts_independent
    config = ModelConfig.from_hf(SHAPES[shape])
    model = backend.compile(
        TextModel(config, dummy_weights(config, "cpu", torch.float32, backend, None, seed=3), backend)
    )
    rng = random.Random(4)
    ids = torch.tensor([rng.randrange(config.vocab_size) for _ in range(300)])
    store = KVStore(config, CacheSpec(4, 320, 16, 320, 1280), torch.float16, "cpu")
    left = []
    for cut in (lambda: 512, lambda: 64, lambda: 1, lambda: rng.randrange(1, 90)):
        seq, _ = store.open()
        assert store.reserve(seq, len(ids))
        at = 0
        hidden = []
        while at < len(ids):
            end = min(len(ids), at + cut())
            where = torch.arange(at, end)
            start = torch.tensor([0, end - at], dtype=torch.int32)
            kv = store.view(torch.tensor([seq.slot]), where, torch.zeros_like(where), start, end - at, end)
            hidden.append(model.forward(ids[at:end], kv).hidden)
            at = end
        left.append(torch.cat(hidden))
    assert all(torch.equal(left[0], other) for other in left[1:])
