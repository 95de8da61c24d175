"""More than 40 tokens times 4-bit weights in CUDA C++: what the kernel takes, how a tile is chosen, and its numbers on a
CPU (tests/cuda), bit by bit those of the kernel for few tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from tests.cuda.emulator import EmulatorError, missing
from tests.kernels import fields
from tests.parity.test_cuda_few_rows import GELU, SILU, Case, Rig, drawn
from tests.parity.test_gemm_wgmma import emulated_map
from tests.parity.test_more_rows import sums_of_groups
from tests.unit.ops.test_few_rows import ROOM, every_code, weight

from outrider.ops.backend import Epilogue
from outrider.ops.cuda import runtime
from outrider.ops.triton import w4a16_gemm, wna16_gemv
from outrider.ops.triton.repack import Codes
from outrider.ops.triton.w4a16_gemm import (
    ONE_SPAN,
    PARALLEL,
    SERIAL,
    SOURCE,
    Problem,
    W4A16Gemm,
    W4A16Shape,
    W4A16Tile,
    choose_tile,
    suits,
)
from outrider.ops.triton.wna16_gemv import WorkUnits

emulated = pytest.mark.skipif(missing() is not None, reason=f"kernels in CUDA C++ are not emulated: {missing()}")

SHAPES_31B = {  # units of 16 rows, chunks, span
    "gate_up": WorkUnits(2688, 21, 21), "down": WorkUnits(336, 84, 10), "qkv": WorkUnits(1024, 21, 7),
    "out": WorkUnits(336, 32, 4),
}  # fmt: skip


def test_tiles_fit() -> None:
    for units in SHAPES_31B.values():
        for groups, has_zero_point in ((8, False), (8, True), (2, True), (1, False)):
            for rows in (41, 48, 64, 80, 160, 320, 1024, 8192):
                tile = choose_tile(W4A16Shape(rows, units, groups, has_zero_point), 66, ROOM)
                assert tile is not None and tile.shared(groups, has_zero_point) <= ROOM
                assert (tile.spans == ONE_SPAN) == (units.splits == 1)
    assert choose_tile(W4A16Shape(160, SHAPES_31B["down"], 8, False), 66, 48 << 10) is None


def test_few_tiles_have_their_spans_in_parallel() -> None:
    """Down at 160 rows in serial: 21 clusters would work and 45 would wait."""
    for rows, spans in ((160, PARALLEL), (8192, SERIAL)):
        tile = choose_tile(W4A16Shape(rows, SHAPES_31B["down"], 8, False), 66, ROOM)
        assert tile is not None and tile.spans == spans


def test_what_the_kernel_takes() -> None:
    w = weight()
    gated = Epilogue(act="gelu_tanh")
    x = torch.zeros((300, 512), dtype=torch.bfloat16)
    assert suits(x, w, Epilogue()) and suits(x[:41], w, gated) and suits(x, weight(group=128), Epilogue())
    others = [
        (x[:40], w, Epilogue()),
        (x.float(), w, Epilogue()),
        (x, w, Epilogue(softcap=3.0)),
        (x, weight(n=192), gated),
    ]
    assert not any(suits(*case) for case in others)
    for name, other in every_code().items():
        assert suits(x, other, Epilogue()) == (other.codes in (Codes.INT4, Codes.UINT4)), name


def test_the_kernel_is_told_what_it_reads() -> None:
    assert fields(Problem) == "m n chunks span splits pairs tiles_b group tiles sums_stride"


def both(
    patch: pytest.MonkeyPatch, case: Case, rows: int, tile: W4A16Tile, sms: int, seed: int = 0, source: Path = SOURCE
) -> tuple[Tensor, Tensor]:
    """A product by this kernel, and by the one for few tokens, eight at a time."""
    rig = Rig(patch, case, seed=seed, folder=runtime.FOLDER)
    x = drawn(case, rows)
    few = torch.cat([rig.product(part) for part in x.split(8)])
    patch.setattr(w4a16_gemm, "units_of", wna16_gemv.units_of)
    patch.setattr(w4a16_gemm, "choose_tile", lambda *_: tile)
    patch.setattr(w4a16_gemm, "group_sums", sums_of_groups)
    patch.setattr(w4a16_gemm, "tensor_map", emulated_map)
    many = W4A16Gemm(torch.device("cpu"), rig.memory.hold(torch.zeros(128, dtype=torch.int32)))
    many.sms = sms
    many.source = source
    x = rig.memory.hold(x)
    with rig.memory:
        out = many.product(x, rig.weight, case.extras, False)
    assert out is not None and not many.semaphores.any()  # the next launch finds no spans done
    return out, few


CUTS = {  # a weight, rows, tile, SMs
    "one span, rows that end inside a tile, a weight that ends inside one": (
        Case(144, 512, 2, 3, 2), 50, W4A16Tile(3, ONE_SPAN, 4, 2), 4,
    ),
    "two tiles of tokens, spans in series, a short last one, a chunk that is not whole": (
        Case(192, 5 * 256 - 48, 2, 4, 2, half=True, has_zero_point=True, codes=Codes.UINT4),
        70, W4A16Tile(4, SERIAL, 4, 2), 2,
    ),
    "the same in parallel": (
        Case(192, 5 * 256 - 48, 2, 4, 2, half=True, has_zero_point=True, codes=Codes.UINT4),
        70, W4A16Tile(4, PARALLEL, 5, 3), 4,
    ),
    "gelu, pairs of planes, spans in parallel": (
        Case(256, 768, 2, 3, 3, per=2, has_zero_point=True, extras=GELU), 41, W4A16Tile(3, PARALLEL, 4, 3), 4,
    ),
    "silu, fours of planes, spans in series, 160 tokens": (
        Case(128, 512, 1, 2, 4, per=4, half=True, extras=SILU), 161, W4A16Tile(10, SERIAL, 4, 2), 2,
    ),
    "a factor for a chunk": (
        Case(272, 3 * 256, 3, 2, 2, per=8, has_zero_point=True), 80, W4A16Tile(5, ONE_SPAN, 6, 2), 2,
    ),
}  # fmt: skip


@emulated
@pytest.mark.parametrize("name", CUTS)
def test_the_bits_of_the_kernel_for_few_tokens(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plane, a row or a factor in the wrong place; spans added in another order; ends that are left out."""
    for seed in (0, 1):
        out, few = both(monkeypatch, *CUTS[name], seed=seed)
        assert torch.equal(out, few)


BROKEN = {
    "x before it is there": ("barrier_wait(rings.x.full(), rings.x.phase);", ";", "still on its way"),
    "weights before they are there": ("        barrier_wait(next.full(), next.phase);\n", "", "still on its way"),
    "weights over what is being read": ("        __syncwarp();  // all lanes", "//", "nothing says in which order"),
    "x over what is being read": ("            barrier_wait(ring.empty(), ring.phase ^ 1);\n", "", "over|many"),
}


@emulated
@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_kernel_is_found(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    text, instead, message = BROKEN[name]
    whole = SOURCE.read_text()
    assert text in whole
    (tmp_path / SOURCE.name).write_text(whole.replace(text, instead, 1))
    case = Case(128, 5 * 256, 5, 2, 2, has_zero_point=True)
    with pytest.raises(EmulatorError, match=message):
        both(monkeypatch, case, 48, W4A16Tile(3, ONE_SPAN, 4, 2), 2, source=tmp_path / SOURCE.name)
