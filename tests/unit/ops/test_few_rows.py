"""Few tokens times quantised weights in CUDA C++: what is dealt out to whom, what the kernel takes, and what happens
where there is none. The numbers themselves need a GPU: tests/parity/test_triton_quant.py."""

from __future__ import annotations

import logging
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from tests.kernels import fields, no_kernel

from outrider.models.builtin_configs import BUILTIN_CONFIGS
from outrider.models.config import ModelConfig
from outrider.models.names import tensor_plan
from outrider.ops.backend import Epilogue
from outrider.ops.formats import BLOCKS, Float8Format, GGUFBlockFormat, IntegerFormat, NvFp4Format, Weight
from outrider.ops.registry import Unavailable
from outrider.ops.triton import card, nvrtc_kernels
from outrider.ops.triton.lowrank import Lora
from outrider.ops.triton.quant_config import choose_quant_tile
from outrider.ops.triton.repack import Codes, QuantWeight, repack
from outrider.ops.triton.wna16_gemv import (
    Shape,
    WeightChunk,
    Weights,
    WNA16Gemv,
    WorkUnits,
    choose_block,
    supports,
    weights_of,
)

ROOM = 226 << 10
BLOCK_KINDS = ("Q4_0", "Q4_1", "Q4_K", "Q5_0", "Q5_1", "Q5_K", "Q6_K", "Q8_0")
CHUNKS = {
    "int4": WeightChunk(256, 8, 2304, False), "Q4_K": WeightChunk(256, 8, 2560, True),
    "fp8": WeightChunk(128, 0, 2048, False),
    "int8 g32": WeightChunk(128, 4, 2176, False), "Q6_K": WeightChunk(128, 8, 1792, False),
    "nvfp4": WeightChunk(128, 8, 1280, False),
}  # fmt: skip


def weight(n: int = 128, k: int = 512, group: int = 32) -> QuantWeight:
    return held(IntegerFormat(4, group).quantise(torch.randn(n, k, generator=torch.Generator().manual_seed(0))))


def held(weight: Weight) -> QuantWeight:
    packed = repack(weight)
    assert packed is not None
    return packed


def block(kind: str, n: int = 128, k: int = 512) -> QuantWeight:
    columns, nbytes = BLOCKS[kind]
    return held(
        Weight(GGUFBlockFormat(kind), (n, k), {"blocks": torch.zeros((n, k // columns * nbytes), dtype=torch.uint8)})
    )


def every_code() -> dict[str, QuantWeight]:
    values = torch.randn(128, 512, generator=torch.Generator().manual_seed(0))
    formats = [
        IntegerFormat(4, 32),
        IntegerFormat(4, 128),
        IntegerFormat(8, 0),
        IntegerFormat(8, 128),
        Float8Format(),
        Float8Format(128),
        NvFp4Format(),
    ]
    return {f.name: held(f.quantise(values)) for f in formats} | {
        kind: block(kind) for kind in BLOCKS if kind in BLOCK_KINDS
    }


@pytest.mark.parametrize(
    ("tiles", "chunks", "span"), [(336, 84, 10), (2688, 21, 21), (1024, 21, 7), (7, 9, 4), (2, 1, 1)]
)
@pytest.mark.parametrize("blocks", [132, 5, 1])
def test_every_unit_is_dealt_out_once_and_evenly(tiles: int, chunks: int, span: int, blocks: int) -> None:
    units = WorkUnits(tiles, chunks, span)
    assert units.longs + units.shorts == tiles * units.splits and units.rest + (units.splits - 1) * span == chunks
    for edges, all_of_them in zip(units.edges(blocks), (units.longs, units.shorts), strict=True):
        counts = [hi - lo for lo, hi in pairwise(edges)]
        assert edges[0] == 0 and edges[-1] == all_of_them and max(counts) - min(counts) <= 1
    magic = -(-(1 << 32) // tiles)
    assert all(u * magic >> 32 == u // tiles for u in range(units.longs))  # how the kernel divides
    assert units.widest(blocks) <= chunks + span


def test_the_kernel_is_told_what_it_reads() -> None:
    """Fields by their order: one that is missing shifts all behind it."""
    numbers = "m n k chunks span splits tiles x_stride magic:uint longs more_longs shorts more_shorts rest"
    assert fields(Shape) == numbers
    both = [name for one in ("words", "scales", "lifts", "above", "factors") for name in (one, f"{one}_high")]
    assert fields(Weights) == " ".join(f"{name}:void_p" for name in both)
    assert fields(Lora) == "u:void_p b:void_p ranges:void_p count parts end_0 end_1 x_ready"


@pytest.mark.parametrize("kind", CHUNKS)
def test_matrices_of_gemma_fit_with_all_warps(kind: str) -> None:
    chunk = CHUNKS[kind]
    bits = 8 if kind in ("fp8", "int8 g32") else 4
    for name, raw in BUILTIN_CONFIGS.items():
        if "assistant" in name:
            continue
        for n, k in {
            plan.shape
            for plan in tensor_plan(ModelConfig.from_hf(raw)).values()
            if plan.role == "matrix" and len(plan.shape) == 2
        }:
            if n % 64 or k % 256:
                continue
            chunks = k // chunk.columns
            units = WorkUnits(n // 16, chunks, -(-chunks // choose_quant_tile(n, k, bits).splits))
            for tokens in range(1, 9):
                block = choose_block(units, chunk, tokens, 132, ROOM)
                assert block is not None and block[0] == 24 and block[1] <= ROOM, (name, n, k, tokens)


def test_what_does_not_fit_has_fewer_warps_or_goes_to_triton() -> None:
    int4 = CHUNKS["int4"]
    wide = WorkUnits(16, 128, 128)
    # that goes to Triton
    assert choose_block(wide, int4, 1, 132, ROOM) is not None and choose_block(wide, int4, 8, 132, ROOM) is None
    assert choose_block(WorkUnits(4096, 32, 32), int4, 8, 132, ROOM) == (16, 16 * 2 * 2304 + 8 * (32 * 512 + 64))


def test_what_the_kernel_takes() -> None:
    w = weight()
    gated = Epilogue(act="gelu_tanh")
    x = torch.zeros((8, 512), dtype=torch.bfloat16)
    assert supports(x, w, Epilogue()) and supports(x[:1], w, gated) and supports(x, weight(group=128), Epilogue())
    not_these = [
        (x.repeat(2, 1), w, Epilogue()), (x[:0], w, Epilogue()), (x.float(), w, Epilogue()), (x, weight(group=16), Epilogue()),
        (x, replace(w, codes=Codes.FP4), Epilogue()), (x, weight(n=72), Epilogue()),
        (x, weight(n=192), gated), (x, w, Epilogue(softcap=3.0)), (x, w, Epilogue(bias=torch.ones(128))),
        (x, w, Epilogue(mul=x, act="gelu_tanh")), (x, w, Epilogue(out_dtype=torch.float32)),
    ]  # fmt: skip
    assert not any(supports(*case) for case in not_these)
    codes = every_code()
    assert {name: WeightChunk.of(codes[name]) for name in ("Q4_K", "fp8", "Q6_K", "nvfp4")}.items() <= CHUNKS.items()
    for name, other in codes.items():
        assert supports(x, other, Epilogue()) and supports(x[:5], other, gated), name


def test_where_the_halves_of_a_tile_begin() -> None:
    """The upper 8 rows of 16, or, of a gate, as many of up: 64 rows of a chunk lie together."""
    w = block("Q6_K")
    assert w.high is not None and w.scale is not None
    for gated, lines in ((False, 8), (True, w.chunks * 64)):
        at = weights_of(w, gated)
        assert (at.words, at.above, at.scales) == (w.words.data_ptr(), w.high.data_ptr(), w.scale.data_ptr())
        assert (at.words_high - at.words, at.above_high - at.above, at.scales_high - at.scales) == (
            64 * lines,
            32 * lines,
            16 * lines,
        )
        assert at.lifts is None and at.factors is None
    w = held(Float8Format().quantise(torch.randn(128, 512, generator=torch.Generator().manual_seed(0))))
    for gated, rows in ((False, 8), (True, 64)):
        at = weights_of(w, gated)
        assert at.scales is None and at.factors_high - at.factors == 4 * rows


def test_without_nvrtc_one_line_says_so(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    about = SimpleNamespace(name="NVIDIA H200", multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: about)
    monkeypatch.setattr(card, "max_smem", lambda device: 226 << 10)
    monkeypatch.setattr(card, "sm_count", lambda device: 132)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(card, "missing", lambda: "no libnvrtc")
    with caplog.at_level(logging.WARNING, logger="outrider"):
        assert not card.Card.of(torch.device("cuda", 0)).cuda
    assert len(caplog.records) == 1 and "no libnvrtc" in caplog.text
    caplog.clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    assert not card.Card.of(torch.device("cuda", 0)).cuda and not caplog.records  # no bits were compared there
    assert not card.Card.of(torch.device("cpu")).cuda


def test_a_compiler_that_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc_kernels, "Kernel", no_kernel)
    few = WNA16Gemv(torch.device("cpu"), torch.zeros(8, dtype=torch.int32))
    x = torch.zeros((2, 512), dtype=torch.bfloat16)
    with pytest.raises(Unavailable, match=r"wna16_gemv\.cu: .*no machine code"):
        few.product(x, weight(), Epilogue(), False)
