"""`ops/cuda/wna16_gemv.cu` on a CPU (tests/cuda): its numbers, its rows alone and in company, and what is found in it
when it is broken."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from tests.cuda.emulator import EmulatorError, Memory, missing
from tests.unit.ops.test_cpu_packing import part

from outrider.ops.backend import Epilogue
from outrider.ops.cuda.runtime import FOLDER
from outrider.ops.formats import Float8Format, IntegerFormat, NvFp4Format, Weight
from outrider.ops.triton import nvrtc_kernels, wna16_gemv
from outrider.ops.triton.repack import ROWS, Codes, QuantWeight, repack
from outrider.ops.triton.wna16_gemv import SOURCE, WeightChunk, WNA16Gemv, WorkUnits

pytestmark = pytest.mark.skipif(missing() is not None, reason=f"kernels in CUDA C++ are not emulated: {missing()}")

PLANE = 32
PLANES = 8
TENSORS = ("words", "high", "scale", "zero_point", "factor")
PLAIN = Epilogue()
GELU = Epilogue(act="gelu_tanh")
SILU = Epilogue(act="silu")


@dataclass(frozen=True)
class Case:
    """A weight [n, k], how it is cut and who takes it."""

    n: int
    k: int
    span: int  # chunks of 256 columns
    blocks: int
    warps: int
    per: int = 1  # planes of 32 columns that share a factor
    half: bool = False
    has_zero_point: bool = False
    codes: Codes = Codes.INT4
    extras: Epilogue = PLAIN


CASES = {
    "several units a warp, a block without any": Case(128, 512, 2, 9, 1),
    "a short last span, a last chunk that is not whole": Case(
        192, 5 * 256 - 48, 2, 4, 2, half=True, has_zero_point=True, codes=Codes.UINT4
    ),
    "gelu, pairs of planes": Case(256, 768, 2, 3, 3, per=2, has_zero_point=True, extras=GELU),
    "silu, fours of planes": Case(128, 512, 1, 2, 4, per=4, half=True, extras=SILU),
    "a factor for a chunk": Case(144, 3 * 256, 3, 2, 2, per=8, has_zero_point=True),
}


def made(case: Case) -> QuantWeight:
    """Any words are weights; factors of about a fifteenth."""
    draw = torch.Generator().manual_seed(case.n + case.k)
    chunks = -(-case.k // 256)
    tiles = -(-case.n // ROWS)
    words = torch.randint(-(1 << 31), 1 << 31, (tiles, chunks, ROWS, PLANE), generator=draw, dtype=torch.int64).int()
    pairs = (PLANES // case.per + 1) // 2

    def numbers() -> Tensor:
        kind = torch.float16 if case.half else torch.bfloat16
        return (torch.randn((tiles, chunks, ROWS, 2 * pairs), generator=draw) / 15).to(kind).view(torch.int32)

    zero_point = numbers() if case.has_zero_point else None
    return QuantWeight((case.n, case.k), case.codes, PLANE, case.per, words, numbers(), zero_point, None, case.half)


def dequantised(w: QuantWeight) -> Tensor:
    """The definition (ops/triton/quant.py): float64 [N, K]."""
    tiles, chunks = w.words.shape[:2]
    by_pair = w.words.view(tiles, chunks, ROWS, PLANE // 2, 2)
    q = torch.stack([torch.stack([by_pair >> (4 * p + 16 * h) & 15 for h in range(2)], -1) for p in range(4)], -1)
    q = q.permute(0, 2, 1, 4, 6, 3, 5).reshape(
        tiles * ROWS, chunks * 256
    )  # half of the planes, plane in it, pair, column of the pair

    def by_column(words: Tensor) -> Tensor:
        groups = PLANES // w.per
        numbers = words.view(torch.float16 if w.half else torch.bfloat16)[..., :groups].double()
        return numbers.transpose(1, 2).reshape(tiles * ROWS, chunks * groups).repeat_interleave(w.per * PLANE, 1)

    assert w.scale is not None
    values = (q - (8 if w.codes is Codes.INT4 else 0)) * by_column(w.scale)
    return (values if w.zero_point is None else values + by_column(w.zero_point))[: w.shape[0], : w.shape[1]]


class Rig:
    """The product of a case, planned as on a GPU, launched on the emulator."""

    def __init__(
        self,
        patch: pytest.MonkeyPatch,
        case: Case,
        seed: int = 0,
        folder: Path = FOLDER,
        weight: QuantWeight | None = None,
    ):
        self.case = case
        self.memory = Memory()
        bare = weight or made(case)
        tensors = {name: self.memory.hold(t) for name in TENSORS if (t := getattr(bare, name)) is not None}
        self.weight = replace(bare, **tensors)
        patch.setattr(
            nvrtc_kernels,
            "Kernel",
            lambda source, name, flags, **_: self.memory.kernel(source, name, flags, folder, seed),
        )
        patch.setattr(wna16_gemv, "units_of", lambda w: WorkUnits(case.n // 16, w.chunks, case.span))
        patch.setattr(
            wna16_gemv,
            "choose_block",
            lambda units, chunk, tokens, **_: (case.warps, shared_bytes(case, units, chunk, tokens)),
        )
        self.few = WNA16Gemv(torch.device("cpu"), self.memory.hold(torch.zeros(case.n // 16, dtype=torch.int32)))
        self.few.sms = case.blocks
        self.few.source = folder / SOURCE.name

    def product(self, x: Tensor) -> Tensor:
        x = self.memory.hold(x, ahead=True)
        with self.memory:
            out = self.few.product(x, self.weight, self.case.extras, True)
        assert out is not None and not self.few.semaphores.any()  # the next launch finds no spans done
        return out


def shared_bytes(case: Case, units: WorkUnits, chunk: WeightChunk, tokens: int) -> int:
    """No byte more than the kernel needs."""
    return case.warps * 2 * chunk.stage + chunk.room_of_x(units.widest(case.blocks), tokens)


def drawn(case: Case, rows: int = 8) -> Tensor:
    return torch.randn((rows, case.k), generator=torch.Generator().manual_seed(1)).bfloat16()


def of(case: Case, w: QuantWeight, x: Tensor) -> tuple[Tensor, Tensor]:
    """The definition in float64, and how far a kernel may be from it: K roundings of float32, each at most 2^-24 of the
    sum of all magnitudes, then the roundings to bfloat16 that the definition names, 2^-8 of a number each as either
    side of a tie may be taken. Neither activation is steeper than 1.13; a power of 2 and a quotient add 2^-20."""
    d = dequantised(w)
    y = x.double() @ d.T
    far = case.k * 2**-24 * (x.double().abs() @ dequantised_magnitude(w).T)
    far = far + 2**-8 * y.abs()
    if not case.extras.gated:
        return y, far
    gate, up = y.chunk(2, 1)
    far_gate, far_up = far.chunk(2, 1)
    act = (
        torch.nn.functional.gelu(gate, approximate="tanh")
        if case.extras.act == "gelu_tanh"
        else torch.nn.functional.silu(gate)
    )
    far_act = 1.13 * far_gate + 2**-8 * act.abs() + 2**-20
    return act * up, far_act * (up.abs() + far_up) + act.abs() * far_up + 2**-8 * (act * up).abs()


def dequantised_magnitude(w: QuantWeight) -> Tensor:
    """Magnitudes of what is added: products with codes, and with offsets."""
    assert w.scale is not None
    plain = dequantised(replace(w, zero_point=None)).abs()
    return plain if w.zero_point is None else plain + (dequantised(w) - dequantised(replace(w, zero_point=None))).abs()


@pytest.mark.parametrize("name", CASES)
def test_numbers_of_the_definition_and_rows_that_do_not_know_of_each_other(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES[name]
    rig = Rig(monkeypatch, case)
    x = drawn(case)
    together = rig.product(x)
    wanted, far = of(case, rig.weight, x)
    assert bool(((together.double() - wanted).abs() <= far).all())
    for rows in (1, 3, 4, 5, 7):
        assert torch.equal(rig.product(x[:rows]), together[:rows]), f"{rows} rows"
    assert torch.equal(rig.product(x.flip(0)), together.flip(0))
    assert torch.equal(rig.product(x[6:7]), together[6:7])


FORMATS = {
    f.name: lambda n, k, f=f: f.quantise(torch.randn((n, k), generator=torch.Generator().manual_seed(n + k)))
    for f in (
        IntegerFormat(4, 0),
        IntegerFormat(8, 0),
        IntegerFormat(8, 32),
        Float8Format(),
        Float8Format(128),
        NvFp4Format(),
    )
} | {kind: lambda n, k, kind=kind: part(kind, n, k) for kind in ("Q4_K", "Q5_0", "Q5_K", "Q6_K")}


@pytest.mark.parametrize("name", FORMATS)
def test_every_code(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plane, a pair or a bit above it in the wrong place, a factor of another group or row."""
    for case, most, fewer in ((Case(128, 512, 1, 3, 2), 8, 5), (Case(128, 768, 4, 2, 2, extras=GELU), 3, 1)):
        weight: Weight = FORMATS[name](case.n, case.k)
        packed = repack(weight)
        assert packed is not None
        rig = Rig(monkeypatch, case, weight=packed)
        x = drawn(case, most)
        together = rig.product(x)
        y = x.double() @ weight.dense().double().T
        if case.extras.gated:
            gate, up = y.bfloat16().double().chunk(2, 1)
            y = torch.nn.functional.gelu(gate, approximate="tanh") * up
        assert float((together.double() - y).norm() / y.norm()) < 4e-3
        assert torch.equal(rig.product(x[:fewer]), together[:fewer])


def test_no_order_of_threads_and_blocks_changes_a_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES["a short last span, a last chunk that is not whole"]
    x = drawn(case)
    plain = Rig(monkeypatch, case).product(x)
    for seed in (1, 2, 3):
        assert torch.equal(Rig(monkeypatch, case, seed=seed).product(x), plain)


def test_rows_of_x_that_lie_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES["several units a warp, a block without any"]
    rig = Rig(monkeypatch, case)
    x = drawn(case)
    assert torch.equal(rig.product(torch.nn.functional.pad(x, (0, 24))[:, : case.k]), rig.product(x))


BROKEN = {
    "x before the kernel ahead has written it": (
        "wna16_gemv.cu",
        "    wait_for_x(lora);\n",
        "",
        "has waited for the kernel ahead",
    ),
    "no wait": ("units.cuh", "        wait_copies();\n", "", "still on its way"),
    "factors before the lanes that fetched them": (
        "units.cuh",
        "        __syncwarp();  // factors",
        "//",
        "shared memory, which",
    ),
    "x before other warps have laid it": (
        "wna16_gemv.cu",
        "    __syncthreads();\n",
        "",
        r"shared memory, which thread \d+ wrote",
    ),
    "counted before other lanes have stored": (
        "units.cuh",
        "    __syncwarp();\n    int done",
        "int done",
        r"of buffer \d+, which thread \d+ of block",
    ),
    "sums before a lane has seen the count": (
        "units.cuh",
        "    __syncwarp();\n    if (lane",
        "if (lane",
        r"of buffer \d+, which thread \d+ of block",
    ),
    "x beyond its end": ("units.cuh", "t < p.m && column < p.k", "column < p.k", "behind the end of buffer"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_kernel_is_found(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file, text, instead, message = BROKEN[name]
    for f in (*FOLDER.glob("*.cuh"), SOURCE):
        whole = f.read_text()
        assert f.name != file or text in whole
        (tmp_path / f.name).write_text(whole.replace(text, instead) if f.name == file else whole)
    case = replace(CASES["several units a warp, a block without any"], span=1, blocks=3, warps=2)
    with pytest.raises(EmulatorError, match=message):
        Rig(monkeypatch, case, folder=tmp_path).product(drawn(case, 3))
