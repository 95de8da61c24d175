"""A GGUF file of this machine, named by OUTRIDER_GGUF: every tensor has the values of the `gguf` package, bit for bit, as
stored and in the layout of the CPU kernels. Any file will do; its largest tensors are compared in part."""

from __future__ import annotations

import os
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from outrider.ops.cpu.lib import FILE_TYPES
from outrider.ops.cpu.ops import CpuOps
from outrider.ops.formats import BLOCKS, GGUFBlockFormat, Weight
from outrider.weights.gguf import read

FILE = os.environ.get("OUTRIDER_GGUF", "")
MOST_WEIGHTS = 1 << 20  # of a tensor, in whole rows


@pytest.mark.slow
@pytest.mark.skipif(not FILE, reason="OUTRIDER_GGUF names a file")
def test_every_tensor_has_the_values_of_the_gguf_package() -> None:
    entries = read(Path(FILE)).tensors
    ops = CpuOps(threads=1)
    compared = set()
    for tensor in gguf.GGUFReader(FILE).tensors:
        entry = entries[tensor.name]
        if entry.kind not in BLOCKS:
            continue
        columns = entry.shape[-1]
        rows = entry.data()[: max(1, MOST_WEIGHTS // columns)]
        want = gguf.quants.dequantize(rows, tensor.tensor_type)
        weight = Weight(GGUFBlockFormat(entry.kind), want.shape, {"blocks": torch.from_numpy(rows)})
        assert (weight.dense().numpy().view(np.int32) == want.view(np.int32)).all(), tensor.name
        if entry.kind in FILE_TYPES:
            packed = ops.packer.pack([weight])
            assert packed is not None and torch.equal(ops.unpack(packed), torch.from_numpy(want)), tensor.name
        compared.add(entry.kind)
    assert compared
