"""9 to 40 tokens times 4-bit weights in CUDA C++: who takes what, what the kernel takes, and its numbers on a CPU
(tests/cuda), bit by bit those of the kernel for few tokens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from tests.cuda.emulator import EmulatorError, missing
from tests.kernels import fields
from tests.parity.test_cuda_few_rows import CASES, Case, Rig, drawn
from tests.unit.ops.test_few_rows import ROOM, every_code, weight

from outrider.ops.backend import Epilogue
from outrider.ops.cuda import runtime
from outrider.ops.triton import w4a16_wgmma, wna16_gemv
from outrider.ops.triton.repack import Codes, QuantWeight
from outrider.ops.triton.w4a16_wgmma import SOURCE, Cut, W4A16Wgmma, WgmmaBlock, blocks_of_a_span, choose_block, suits
from outrider.ops.triton.wna16_gemv import WorkUnits

emulated = pytest.mark.skipif(missing() is not None, reason=f"kernels in CUDA C++ are not emulated: {missing()}")


@pytest.mark.parametrize(
    ("tiles", "chunks", "span", "most"), [(336, 84, 10, 23), (2688, 21, 21, 21), (1024, 21, 7, 24), (336, 32, 4, 21)]
)
def test_spans_have_blocks_by_their_length(tiles: int, chunks: int, span: int, most: int) -> None:
    """31B's four matrices: no block of 132 has more units of a whole span than warps take at once."""
    units = WorkUnits(tiles, chunks, span)
    per = blocks_of_a_span(units, 132)
    longs = units.splits - (units.rest < span)
    left = 132 - per * longs
    assert -(-tiles // per) == most <= 24
    assert units.rest == span or 0 < -(-tiles // left) * units.rest <= most * span


def test_too_few_blocks_for_a_span_each_leave_it_to_triton() -> None:
    assert blocks_of_a_span(WorkUnits(4, 90, 10), 8) == 0 and blocks_of_a_span(WorkUnits(4, 85, 10), 8) == 0
    assert blocks_of_a_span(WorkUnits(4, 85, 10), 9) == 1 == blocks_of_a_span(WorkUnits(4, 85, 84), 2)


def test_blocks_fit() -> None:
    for rows in range(9, 41):
        for groups in (1, 2, 4, 8):
            for has_zero_point in (False, True):
                block = choose_block(rows, groups, has_zero_point, ROOM)
                assert (
                    block is not None
                    and block.shared(groups, has_zero_point) <= ROOM
                    and rows <= 8 * block.eights < rows + 8
                )
    assert choose_block(40, 8, False, ROOM) == WgmmaBlock(5, 12, 2, 3) and choose_block(
        40, 8, True, ROOM
    ) == WgmmaBlock(5, 12, 2, 2)
    assert choose_block(40, 8, False, 99 << 10) is None


def test_what_the_kernel_takes() -> None:
    w = weight()
    gated = Epilogue(act="gelu_tanh")
    x = torch.zeros((40, 512), dtype=torch.bfloat16)
    assert suits(x, w, Epilogue()) and suits(x[:9], w, gated) and suits(x, weight(group=128), Epilogue())
    others = [
        (x[:8], w, Epilogue()),
        (torch.cat((x, x[:1])), w, Epilogue()),
        (x.float(), w, Epilogue()),
        (x, w, Epilogue(softcap=3.0)),
        (x, weight(n=192), gated),
    ]
    assert not any(suits(*case) for case in others)
    for name, other in every_code().items():
        assert suits(x, other, Epilogue()) == (other.codes in (Codes.INT4, Codes.UINT4)), name


def test_the_kernel_is_told_what_it_reads() -> None:
    assert fields(Cut) == "m n k chunks span splits tiles x_stride sums_stride longs per"


def sums_of_groups(x: Tensor, w: QuantWeight, tokens: int, pdl: bool) -> Tensor:
    """`group_sums`, which is Triton's, in its order: eight neighbours, then halves of a group."""
    padded = torch.nn.functional.pad(x.float(), (0, w.columns - x.shape[1]))
    by_eights = padded.view(len(x), -1, w.per * 4, 8)
    sums = by_eights[..., 0]
    for i in range(1, 8):
        sums = sums + by_eights[..., i]
    while sums.shape[-1] > 1:
        low, high = sums.chunk(2, -1)
        sums = low + high
    out = torch.empty((sums.shape[1], -(-len(x) // tokens) * tokens))
    out[:, : len(x)] = sums[..., 0].T
    return out


def both(
    patch: pytest.MonkeyPatch,
    case: Case,
    rows: int,
    block: WgmmaBlock,
    blocks: int,
    seed: int = 0,
    source: Path = SOURCE,
) -> tuple[Tensor, Tensor]:
    """A product by this kernel, and by the one for few tokens, eight at a time."""
    rig = Rig(patch, case, seed=seed, folder=runtime.FOLDER)
    x = drawn(case, rows)
    few = torch.cat([rig.product(part) for part in x.split(8)])
    patch.setattr(w4a16_wgmma, "units_of", wna16_gemv.units_of)
    patch.setattr(w4a16_wgmma, "choose_block", lambda *_, **__: block)
    patch.setattr(w4a16_wgmma, "group_sums", sums_of_groups)
    more = W4A16Wgmma(torch.device("cpu"), rig.few.semaphores)
    more.sms = blocks
    more.source = source
    x = rig.memory.hold(x)
    with rig.memory:
        out = more.product(x, rig.weight, case.extras, False)
    assert out is not None and not more.semaphores.any()  # the next launch finds no spans done
    return out, few


NAMES = list(CASES)
CUTS = {  # a case of the kernel for few tokens, rows, blocks
    "two warps are idle, a chunk that is not whole, a short last span": (
        CASES[NAMES[1]],
        40,
        WgmmaBlock(5, 4, 2, 2),
        5,
    ),
    "several passes, a block without work": (replace(CASES[NAMES[0]], n=448), 37, WgmmaBlock(5, 4, 1, 2), 3),
    "rows apart from whole eights": (CASES[NAMES[0]], 17, WgmmaBlock(3, 4, 2, 3), 2),
    "gelu, pairs of planes": (CASES[NAMES[2]], 16, WgmmaBlock(2, 4, 1, 3), 3),
    "silu, fours of planes, two groups of warps": (CASES[NAMES[3]], 33, WgmmaBlock(5, 8, 2, 2), 2),
    "a factor for a chunk": (CASES[NAMES[4]], 9, WgmmaBlock(2, 4, 2, 3), 2),
}


@emulated
@pytest.mark.parametrize("name", CUTS)
def test_the_bits_of_the_kernel_for_few_tokens(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in (0, 1):
        out, few = both(monkeypatch, *CUTS[name], seed=seed)
        assert torch.equal(out, few)


BROKEN = {
    "no wait": ("            wait_copies_but<STAGES - 2>();\n", "", "still on its way"),
    "the next chunk too early": ("wait_copies_but<STAGES - 2>", "wait_copies_but<STAGES - 1>", "still on its way"),
    "x beyond its end": ("min(tokens * 8 + t, p.m - 1)", "(tokens * 8 + t)", "behind the end of buffer"),
}


@emulated
@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_kernel_is_found(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    text, instead, message = BROKEN[name]
    whole = SOURCE.read_text()
    assert text in whole
    (tmp_path / SOURCE.name).write_text(whole.replace(text, instead))
    with pytest.raises(EmulatorError, match=message):
        both(monkeypatch, *CUTS["rows apart from whole eights"], source=tmp_path / SOURCE.name)
