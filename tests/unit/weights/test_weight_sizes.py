"""Compares the sizes that `inspect` predicts with those that loading allocates, by format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests import tiny
from tests.dummy_checkpoint import write_gguf
from tests.unit.ops.test_cpu_packing import part
from tests.unit.weights.test_gguf_load import EDGE, MOE, QWEN

from outrider.models.config import ModelConfig
from outrider.ops.cpu.ops import CpuOps
from outrider.ops.formats import BLOCKS, Float8Format, Format, IntegerFormat, NvFp4Format, Weight, base
from outrider.ops.triton import TritonOps
from outrider.ops.triton.repack import repack
from outrider.weights import hub
from outrider.weights.load import load_target
from outrider.weights.sizes import LAYOUTS, layout_of, stored_size

# rows that are no whole tiles of 64
ROWS = 200
COLUMNS = 768


@pytest.mark.parametrize("kind", sorted(LAYOUTS.keys() & BLOCKS.keys()))
def test_a_gguf_format_in_a_gpus_memory(kind: str) -> None:
    packed = repack(part(kind, ROWS, COLUMNS))
    assert packed is not None and packed.nbytes == LAYOUTS[kind].nbytes(ROWS, COLUMNS)


@pytest.mark.parametrize(
    "format",
    [
        IntegerFormat(4, 32),
        IntegerFormat(4, 128),
        IntegerFormat(4, 0),
        IntegerFormat(8, 128),
        IntegerFormat(8, 0),
        IntegerFormat(4, 64, True),
        Float8Format(),
        Float8Format(128),
        NvFp4Format(),
    ],
    ids=lambda f: f.name,
)
def test_a_format_in_a_gpus_memory(format: Format) -> None:
    quantised = format.quantise(torch.randn(ROWS, COLUMNS))
    if isinstance(format, IntegerFormat) and format.has_zero_point:
        quantised = Weight(
            format,
            quantised.shape,
            {**quantised.tensors, "zero": torch.ones_like(quantised.tensors["scale"], dtype=torch.uint8)},
        )
    packed = repack(quantised)
    layout = layout_of(format)
    assert packed is not None and layout is not None
    factors = (
        4 * 256 if isinstance(format, NvFp4Format) or format == Float8Format(128) else 0
    )  # one more for each row, which the account leaves out
    assert packed.nbytes - factors == layout.nbytes(ROWS, COLUMNS)


@pytest.mark.parametrize("fmt", ["q4_0", "q4_k_m", "q5_1"])
@pytest.mark.parametrize("raw", [QWEN, EDGE, MOE], ids=["qwen2", "edge", "moe"])
@pytest.mark.parametrize("small", [0, 1 << 16])
def test_the_account_is_what_the_loader_allocates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, raw: dict[str, Any], fmt: str, small: int
) -> None:
    """On a GPU to the last percent: tables are dense there, and so are matrices too small to gain by their bits. On a
    CPU what is stored, but for tables that stay in the file."""
    monkeypatch.setattr(base, "SMALL", small)
    path = tmp_path / "m.gguf"
    write_gguf(path, ModelConfig.from_hf(raw), fmt)
    config, weights, _ = load_target(path, "cpu", torch.bfloat16, TritonOps("cpu"))
    said = stored_size(hub.resolve(path), config)
    assert abs(said.gpu / sum(w.nbytes for w in weights.values()) - 1) < 0.01
    assert said.gpu > 1.02 * said.total  # the size of the file alone would promise too much
    assert isinstance(weights["layers.0.out"], torch.Tensor) == (small > 0)
    _, packed, _ = load_target(path, "cpu", torch.float32, CpuOps(threads=1))
    assert sum(w.nbytes for w in packed.values()) < 1.1 * said.total


@pytest.mark.parametrize("quantize", ["int4", "int8", "fp8"])
@pytest.mark.parametrize("kind", ["llama", "gemma4_moe"])
def test_the_account_of_weights_that_are_rounded_while_loading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, quantize: str
) -> None:
    monkeypatch.setattr(base, "SMALL", 1 << 11)
    folder = tiny.write_target(kind, tmp_path / "t")
    config, weights, _ = load_target(folder, "cpu", torch.bfloat16, TritonOps("cpu"), quantize=quantize)
    assert (
        abs(stored_size(hub.resolve(str(folder)), config, quantize).gpu / sum(w.nbytes for w in weights.values()) - 1)
        < 0.01
    )
    assert any(not isinstance(w, torch.Tensor) for w in weights.values())
