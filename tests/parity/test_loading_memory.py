"""Memory needed while loading a quantised checkpoint for a GPU: the final weights, and a few times the largest
matrix."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

pytest.importorskip("triton")

from tests import quantised, tiny

from outrider.ops.formats import base
from outrider.ops.triton import TritonOps
from outrider.ops.triton.repack import QuantWeight
from outrider.weights.load import load_target


class Peak(TorchDispatchMode):
    """The most bytes that tensors made under it took together at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.most = 0
        self.semaphores = set[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if isinstance(t, Tensor) and t.untyped_storage()._cdata not in self.semaphores:
                storage = t.untyped_storage()
                self.semaphores.add(storage._cdata)
                self.now += storage.nbytes()
                weakref.finalize(storage, self.gone, storage._cdata, storage.nbytes())
        self.most = max(self.most, self.now)
        return out

    def gone(self, which: int, nbytes: int) -> None:
        self.now -= nbytes
        self.semaphores.discard(which)


@pytest.mark.parametrize("scheme", ["ct-int4-g32", "ct-fp8-channel"])
def test_peak_while_loading(scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loader that keeps what it has read, or unpacks a checkpoint before it is held, takes twice the end's bytes or
    more."""
    monkeypatch.setattr(base, "SMALL", 0)
    monkeypatch.setattr("outrider.ops.triton.repack.SLICE", 1 << 13)
    model = tiny.target(
        "llama", hidden_size=64, intermediate_size=128, head_dim=16, num_hidden_layers=24, vocab_size=128
    )
    folder = tiny.write(model, tmp_path, tokenizer=False)
    quantised.rewrite(folder, scheme)
    ops = TritonOps("cpu", pdl=False)  # its counters are not the loader's
    with Peak() as peak:
        _, weights, _ = load_target(folder, "cpu", torch.bfloat16, ops)
    weight_bytes = sum(w.nbytes for w in weights.values())
    largest = max(w.nbytes for w in weights.values() if isinstance(w, QuantWeight))
    assert largest < 0.05 * weight_bytes and isinstance(weights["layers.3.gate_up"], QuantWeight)
    assert 0.95 * weight_bytes <= peak.now <= 1.05 * weight_bytes
    assert peak.most <= weight_bytes + 12 * largest
