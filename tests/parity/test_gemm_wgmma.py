"""Dense products of many rows in CUDA C++: what the kernel takes, and its numbers on a CPU (tests/cuda)."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from tests.cuda.emulator import Emulated, EmulatorError, Memory, missing
from tests.kernels import fields

from outrider.ops.backend import Epilogue
from outrider.ops.cuda.runtime import TensorMap
from outrider.ops.triton import gemm_wgmma
from outrider.ops.triton.gemm_config import GemmReduction
from outrider.ops.triton.gemm_wgmma import SOURCE, GemmWgmma, Problem, WgmmaTile, suits
from outrider.ops.triton.nvrtc_kernels import Flags

emulated = pytest.mark.skipif(missing() is not None, reason=f"kernels in CUDA C++ are not emulated: {missing()}")


class Matrix(ctypes.Structure):
    """`Matrix` of tests/cuda/interface.h."""

    _fields_ = [(name, ctypes.c_int64) for name in ("at", "rows", "columns", "stride", "tile_rows", "paired")]


def emulated_map(address: int, rows: int, columns: int, stride: int, tile_rows: int, paired: bool) -> TensorMap:
    matrix = Matrix(address, rows, columns, stride, tile_rows, paired)
    return TensorMap.from_buffer_copy(bytes(matrix) + bytes(128 - ctypes.sizeof(Matrix)))


class Emulator(GemmWgmma):
    """On a card with four SMs."""

    def __init__(self, memory: Memory, seed: int = 0, source: Path = SOURCE):
        super().__init__(torch.device("cpu"), memory.hold(torch.zeros(64, dtype=torch.int32)))
        self.memory = memory
        self.seed = seed
        self.source = source
        self.sms = 4

    def kernel(self, name: str, flags: Flags) -> Emulated:  # type: ignore[override]
        return self.memory.kernel(self.source.read_text(), name, dict(flags), seed=self.seed)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    """Numbers whose sums of 17 are exact in float64 and rounded in float32."""
    rng = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=rng) * 2.0 ** torch.randint(-4, 4, shape, generator=rng)).bfloat16()


def chains(x: Tensor, w: Tensor, span: int) -> Tensor:
    """Spans of columns in order, 16 columns at a time."""
    total = torch.zeros((len(x), len(w)))
    for first in range(0, x.shape[1], span):
        sums = torch.zeros_like(total)
        for k in range(first, min(first + span, x.shape[1]), 16):
            sums = (sums.double() + x[:, k : k + 16].double() @ w[:, k : k + 16].double().T).float()
        total = total + sums
    return total


def product(x: Tensor, w: Tensor, end: Epilogue, tile: WgmmaTile, splits: int = 1, **rig: object) -> Tensor:
    cut = GemmReduction(64, 64, splits, 4)
    with pytest.MonkeyPatch.context() as patch, Memory() as memory:
        patch.setattr(gemm_wgmma, "tensor_map", emulated_map)
        epilogue = end if end.bias is None else replace(end, bias=memory.hold(end.bias))
        kernels = Emulator(memory, **rig)  # type: ignore[arg-type]
        out = kernels.product(memory.hold(x), memory.hold(w), epilogue, False, cut, tile)
        assert out is not None and not kernels.semaphores.any()  # the next launch finds no sums
        return out.clone()


@emulated
@pytest.mark.parametrize(
    "rows,n,k,tile,splits,seed",
    [
        (300, 520, 192, WgmmaTile(256), 1, 0),  # rows, columns that end inside a tile, two rounds
        (130, 264, 264, WgmmaTile(192), 1, 1),  # columns of the sum that end inside a step
        (257, 200, 320, WgmmaTile(192), 3, 0),  # spans, the last one short
        (170, 264, 264, WgmmaTile(160, True), 1, 0),
        (170, 264, 192, WgmmaTile(160, True), 2, 1),
        (300, 520, 192, WgmmaTile(256, cut=True), 1, 1),  # six tiles for two clusters come out even
        (130, 504, 448, WgmmaTile(192, cut=True), 1, 1),  # three do not
        (300, 960, 320, WgmmaTile(192, cut=True), 2, 0),  # parts of spans, and whole tiles after them
        (330, 712, 192, WgmmaTile(160, True, cut=True), 2, 1),
    ],
)
def test_sums_are_chains_of_16_columns(rows: int, n: int, k: int, tile: WgmmaTile, splits: int, seed: int) -> None:
    """A product that adds in another order; a row, a column or a step at an end that is left out."""
    x = drawn(rows, k)
    w = drawn(n, k, seed=1)
    steps = -(-k // 64)
    want = chains(x, w, -(-steps // splits) * 64)
    assert torch.equal(product(x, w, Epilogue(), tile, splits, seed=seed), want.bfloat16())


@emulated
@pytest.mark.parametrize(
    "tile,gated",
    [
        (WgmmaTile(256), True),
        (WgmmaTile(192), True),
        (WgmmaTile(192), False),
        (WgmmaTile(160, True), True),
        (WgmmaTile(160, True), False),
    ],
)
def test_epilogues(tile: WgmmaTile, gated: bool) -> None:
    """A gate that meets another column's partner; a bias of another column."""
    x = drawn(140, 64)
    w = drawn(400, 64, seed=1)
    bias = drawn(400, seed=2)
    sums = chains(x, w, 64) + bias.float()
    act = torch.nn.functional.silu
    if gated:
        end = Epilogue(bias, act="silu")
        want = act(sums[:, :200].bfloat16().float()).bfloat16().float() * sums[:, 200:].bfloat16().float()
    else:
        end = Epilogue(bias.float())
        want = sums
    torch.testing.assert_close(product(x, w, end, tile).float(), want, rtol=2**-6, atol=1e-6)


@emulated
@pytest.mark.parametrize("tile", [WgmmaTile(256), WgmmaTile(160, True)])
def test_logits_are_float32(tile: WgmmaTile) -> None:
    x = drawn(129, 64)
    w = drawn(264, 64, seed=1)
    want = torch.tanh(chains(x, w, 64) / 30) * 30
    out = product(x, w, Epilogue(softcap=30.0, out_dtype=torch.float32), tile)
    torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-5)


BROKEN = {
    "reads before the bytes are there": ("    barrier_wait(ring.full(), ring.phase);\n", "", "still on its way"),
    "fetches over what is being read": ("            barrier_wait(ring.empty(), ring.phase ^ 1);\n", "", "over|many"),
    "gives a stage back too early": (
        "        read = ring.empty();\n    }",
        "        read = ring.empty();\n        if (lane < 2) barrier_arrive(read, lane);\n    }",
        "still reads|many",
    ),
    "the other block's half is missing": ("!SWAP_AB, true>", "!SWAP_AB, false>", "waits|for ever"),
    "takes sums before they are there": ("handover.await(slot, lane);", "", "nothing says in which order"),
}


@emulated
@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_kernel_is_found(name: str, tmp_path: Path) -> None:
    text, instead, message = BROKEN[name]
    whole = SOURCE.read_text()
    assert text in whole
    (tmp_path / SOURCE.name).write_text(whole.replace(text, instead))
    with pytest.raises(EmulatorError, match=message):
        product(
            drawn(130, 640),
            drawn(456, 640, seed=1),
            Epilogue(),
            WgmmaTile(192, cut=True),
            source=tmp_path / SOURCE.name,
        )


def test_what_the_kernel_takes() -> None:
    x = torch.zeros((256, 128), dtype=torch.bfloat16)
    w = torch.zeros((64, 128), dtype=torch.bfloat16)
    gated = Epilogue(act="silu")
    logits = Epilogue(out_dtype=torch.float32)
    assert suits(x, w, Epilogue()) and suits(x, w, gated) and suits(x, w, logits) and suits(x[:, :64], w[:, :64], gated)
    others = [
        (x.float(), w, Epilogue()),
        (x, w[:60], Epilogue()),
        (x[:, 1:], w[:, 1:], Epilogue()),
        (x[:, :60].contiguous(), w[:, :60].contiguous(), Epilogue()),
        (x, w, Epilogue(act="silu", out_dtype=torch.float32)),
    ]
    assert not any(suits(*case) for case in others)


def test_the_kernel_is_told_what_it_reads() -> None:
    assert fields(Problem) == "m n steps span pairs tiles_b group cut softcap:float"
