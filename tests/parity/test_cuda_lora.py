"""Adapters in the quantised products of ops/cuda (lora.cuh), on a CPU (tests/cuda): the bits of the product without
them, rounded, plus B u. Numbers are chosen so that B u is exact in any order of sums."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from tests.cuda.emulator import EmulatorError, missing
from tests.parity.test_cuda_few_rows import CASES, GELU, SILU, Case, Rig, drawn
from tests.parity.test_more_rows import sums_of_groups

from outrider.ops.adapter_slots import SlotWeight, row_ranges
from outrider.ops.backend import Epilogue
from outrider.ops.cuda.runtime import FOLDER
from outrider.ops.triton import w4a16_wgmma, wna16_gemv
from outrider.ops.triton.lowrank import Shrunk
from outrider.ops.triton.w4a16_wgmma import W4A16Wgmma, WgmmaBlock
from outrider.ops.triton.wna16_gemv import WNA16Gemv

pytestmark = pytest.mark.skipif(missing() is not None, reason=f"kernels in CUDA C++ are not emulated: {missing()}")
SLOTS = 4
NAMES = list(CASES)


@dataclass(frozen=True)
class Adapters:
    rank: int
    parts: tuple[int, ...]  # rows of the matrices that the weight is fused of
    slots: tuple[int, ...]  # of each sequence
    counts: tuple[int, ...]  # rows of each sequence


def expected(y: Tensor, of: Adapters, u: Tensor, b: Tensor, end: Epilogue) -> Tensor:
    """y [R, N]: rounded products of all matrices."""
    out = y.float()
    row = 0
    for part, rows in enumerate(of.parts):
        part_u = u[:, part * of.rank : (part + 1) * of.rank].float()
        for first, count, slot in row_ranges(of.slots, of.counts):
            if slot >= 0:
                change = part_u[first : first + count] @ b[slot, row : row + rows].float().T
                out[first : first + count, row : row + rows] += change
        row += rows
    out = out.bfloat16()
    if not end.gated:
        return out
    gate, up = out.float().chunk(2, 1)
    act = torch.nn.functional.silu(gate) if end.act == "silu" else torch.nn.functional.gelu(gate, approximate="tanh")
    return (act.bfloat16().float() * up).bfloat16()


def run(
    patch: pytest.MonkeyPatch, case: Case, of: Adapters, x_ready: bool = True, block: WgmmaBlock | None = None,
    source: Path = FOLDER, seed: int = 0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Result of a kernel, and the expected one; block: of the kernel for 9 to 40 rows. u comes from the previous
    kernel, and so does x, or (x_ready) from the one before that."""
    draw = torch.Generator().manual_seed(of.rank)
    rows = sum(of.counts)
    ranges = row_ranges(of.slots, of.counts)
    u = torch.randint(-9, 10, (rows, of.rank * len(of.parts)), generator=draw).bfloat16() / 4
    b = torch.randint(-9, 10, (SLOTS, sum(of.parts), of.rank), generator=draw).bfloat16() / 8
    for first, count, slot in ranges:
        u[first : first + count] *= slot >= 0
    plain = Rig(patch, replace(case, extras=Epilogue()))
    x = drawn(case, rows)
    y = torch.cat([plain.product(part) for part in x.split(8)])
    rig = Rig(patch, case, folder=source, seed=seed)
    kernels: WNA16Gemv | W4A16Wgmma = rig.few
    if block is not None:
        patch.setattr(w4a16_wgmma, "units_of", wna16_gemv.units_of)
        patch.setattr(w4a16_wgmma, "choose_block", lambda *_, **__: block)
        patch.setattr(w4a16_wgmma, "group_sums", sums_of_groups)
        kernels = W4A16Wgmma(torch.device("cpu"), rig.few.semaphores)
        kernels.sms = case.blocks
        kernels.source = source / w4a16_wgmma.SOURCE.name
    hold = rig.memory.hold
    x = hold(x, ahead=not x_ready)
    rig.memory.overlaps = 1 + x_ready
    change = SlotWeight(torch.empty(SLOTS, len(of.parts), of.rank, 0), hold(b), torch.ones(1), of.parts)
    lora = Shrunk(hold(u, ahead=True), change, hold(torch.tensor(ranges, dtype=torch.int32)), x, u, x_ready)
    with rig.memory:
        out = kernels.product(x, rig.weight, case.extras, True, lora)
    assert out is not None and not kernels.semaphores.any()
    return out, expected(y, of, u, b, case.extras)


FEW = {
    "one row, one adapter": (CASES[NAMES[0]], Adapters(16, (128,), (2,), (1,))),
    "each row its own, one without, three matrices, spans": (
        CASES[NAMES[1]],
        Adapters(16, (96, 48, 48), (0, -1, 3, 1, 2, 0, 3), (1,) * 7),
    ),
    "gate and up, ranks in two steps, rows apart": (
        replace(CASES[NAMES[2]], extras=GELU),
        Adapters(32, (128, 128), (3, -1, 1), (2, 1, 2)),
    ),
    "rank 64, two ranges": (CASES[NAMES[4]], Adapters(64, (144,), (1, 2), (3, 5))),
}
MORE = {
    "40 rows of eight sequences, one without": (
        CASES[NAMES[1]], Adapters(16, (96, 48, 48), (0, 1, 2, -1, 3, 2, 1, 0), (5,) * 8), WgmmaBlock(5, 4, 2, 2), 5,
    ),
    "silu, ranks in four steps, 17 rows of one": (
        replace(CASES[NAMES[3]], extras=SILU), Adapters(64, (64, 64), (2,), (17,)), WgmmaBlock(3, 8, 2, 2), 2,
    ),
    "9 rows, several passes": (
        replace(CASES[NAMES[0]], n=448), Adapters(32, (448,), (1, 3), (4, 5)), WgmmaBlock(2, 4, 1, 2), 3,
    ),
}  # fmt: skip


def same(out: Tensor, want: Tensor, end: Epilogue) -> bool:
    """To the last bit; activations here and in torch may round a tie each its own way."""
    if end.gated:
        return bool(((out.float() - want.float()).abs() <= 2**-7 * want.float().abs() + 1e-3).all())
    return torch.equal(out, want)


@pytest.mark.parametrize("name", FEW)
def test_few_rows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A range of another sequence, a part or a rank of another, a row without an adapter that is changed; x or u read
    before it is complete."""
    for x_ready in (True, False):
        out, want = run(monkeypatch, *FEW[name], x_ready, seed=int(x_ready))
        assert same(out, want, FEW[name][0].extras)


@pytest.mark.parametrize("name", MORE)
def test_more_rows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case, of, block, blocks = MORE[name]
    out, want = run(monkeypatch, replace(case, blocks=blocks), of, not case.has_zero_point, block)
    assert same(out, want, case.extras)


def test_gated_rows_without_an_adapter_keep_their_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    case, of = FEW["gate and up, ranks in two steps, rows apart"]
    out, _ = run(monkeypatch, case, of)
    plain = Rig(monkeypatch, case).product(drawn(case, 5))
    assert torch.equal(out[2], plain[2]) and not torch.equal(out[1], plain[1])


BROKEN = {
    "u before the kernel ahead has written it": ("    pdl_wait();  // for u\n", "", True),
    "x before the kernel ahead has written it": ("if (RANK == 0 || !lora.x_ready)", "if (RANK == 0)", False),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_kernel_is_found(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    text, instead, x_ready = BROKEN[name]
    for f in (*FOLDER.glob("*.cuh"), *FOLDER.glob("*.cu")):
        whole = f.read_text()
        assert f.name != "lora.cuh" or text in whole
        (tmp_path / f.name).write_text(whole.replace(text, instead) if f.name == "lora.cuh" else whole)
    with pytest.raises(EmulatorError, match="waited for the kernel ahead"):
        run(monkeypatch, *FEW["one row, one adapter"], x_ready, source=tmp_path)


def test_what_is_left_to_triton() -> None:
    """Matrices that end within a tile, ranges without rows."""
    x = torch.zeros(2, 512)
    many = torch.zeros(3, 3, dtype=torch.int32)
    for parts, ranges, takes in (((64, 64), 2, True), ((72, 56), 2, False), ((64, 64), 3, False)):
        change = SlotWeight(torch.empty(1, 2, 16, 512), torch.empty(1, 128, 16), torch.ones(1, 2), parts)
        assert wna16_gemv.whole_tiles(Shrunk(x, change, many[:ranges], x, x, True)) == takes
