"""`ops/cuda/few_queries.cu` on a CPU (tests/cuda): its numbers against the definition, rows alone and in company, and what is found in it
when it is broken."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from tests.cuda.emulator import EmulatorError, Memory, missing
from tests.parity.test_triton_attention import cache
from tests.parity.test_triton_ops import REF, rand

from outrider.ops.triton import few_queries
from outrider.ops.triton.attention_shapes import Cut
from outrider.ops.triton.few_queries import FewQueries, gains, turns
from outrider.types import AttnSpec, KVView

pytestmark = pytest.mark.skipif(missing() is not None, reason=f"kernels in CUDA C++ are not emulated: {missing()}")

BF16, SPANS = torch.bfloat16, [(125, 5), (0, 1), (30, 2)]
WIDE = AttnSpec(4, 2, 256, 0, True, window=100, scale=0.3)  # splits of 64 keys
NARROW = AttnSpec(8, 1, 256, 0, True, window=50, scale=0.3)  # of 32; five rows are more than a tile
CUTS = {WIDE.kv_heads: Cut(64, 64), NARROW.kv_heads: Cut(32, 32)}


class Emulated(FewQueries):
    """Kernels that run on the CPU. edit: a text of the source, and what stands there instead."""

    def __init__(self, memory: Memory, seed: int = 0, edit: tuple[str, str] = ("", "")):
        super().__init__(torch.device("cpu"))
        self.memory, self.seed = memory, seed
        text = self.source.read_text()
        assert edit[0] in text
        self.text = text.replace(*edit) if edit[0] else text

    def kernel(self, name, flags):  # type: ignore[no-untyped-def]
        return self.memory.kernel(self.text, name, dict(flags), seed=self.seed)


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(few_queries, "choose_cut", lambda spec, dtype, room: CUTS[spec.kv_heads])
    monkeypatch.setattr(few_queries, "combine", added_up)
    monkeypatch.setattr(few_queries, "turns", lambda turn, spec, kv: True)
    monkeypatch.setattr(few_queries, "gains", lambda spec, kv: True)


def added_up(part: Tensor, part_ml: Tensor, out: Tensor, spec: AttnSpec, kv: KVView, cut: Cut, pdl: bool) -> None:
    """What the second kernel does. Splits that a row does not see hold NaN."""
    assert spec.window is not None
    for row, at in enumerate(kv.positions.tolist()):
        origin = max(int(kv.positions[kv.row_start[kv.row_seq[row]]]) - spec.window + 1, 0) // cut.fine
        seen = slice(max(at - spec.window + 1, 0) // cut.fine - origin, at // cut.fine + 1 - origin)
        tops, mass = part_ml[row, :, seen].unbind(-1)  # [heads, splits]
        weight = torch.exp2(tops - tops.amax(1, keepdim=True))
        out[row] = ((part[row, :, seen] * weight[:, :, None]).sum(1) / (mass * weight).sum(1, keepdim=True)).flatten().to(out.dtype)


def held(memory: Memory, kv: KVView) -> KVView:
    return replace(
        kv, keys=[memory.hold(t) for t in kv.keys if t is not None], values=[memory.hold(t) for t in kv.values if t is not None],
        tables={g: memory.hold(t) for g, t in kv.tables.items()}, positions=memory.hold(kv.positions), row_seq=memory.hold(kv.row_seq),
        row_start=memory.hold(kv.row_start),
    )  # fmt: skip


def floats(kv: KVView) -> KVView:
    return replace(kv, keys=[t.float() for t in kv.keys if t is not None], values=[t.float() for t in kv.values if t is not None])


def near(got: Tensor, want: Tensor) -> None:
    assert float((got.float() - want.float()).abs().max()) < 0.03 * float(want.float().abs().max())


def run(spec: AttnSpec, spans: list[tuple[int, int]], q: Tensor, seed: int = 0, edit: tuple[str, str] = ("", "")) -> tuple[Tensor, Tensor]:
    """What the kernel gives, and the definition."""
    with Memory() as memory:
        kv = held(memory, poisoned(cache(spec, spans, 16, BF16), spec, spans))
        got = Emulated(memory, seed, edit).attend(memory.hold(q), spec, kv, False)
        assert got is not None
        return got.clone(), REF.attend(q.float(), spec, floats(cache(spec, spans, 16, BF16))).to(BF16)


def poisoned(kv: KVView, spec: AttnSpec, spans: list[tuple[int, int]]) -> KVView:
    """Entries of pages that no row of a sequence sees lead out of the cache; so do some beyond its last."""
    assert spec.window is not None
    table = torch.full((len(spans), kv.tables["full"].shape[1] + 4), 1 << 24, dtype=torch.int32)
    for b, (first, count) in enumerate(spans):
        seen = slice(max(0, first - spec.window + 1) // 16, (first + count - 1) // 16 + 1)
        table[b, seen] = kv.tables["full"][b, seen]
    return replace(kv, tables={"full": table, "sliding": table}, max_context=kv.max_context + 64)


def drawn(spec: AttnSpec, rows: int) -> Tensor:
    return rand(rows, spec.heads * spec.head_dim, seed=4, dtype=BF16)


@pytest.mark.parametrize("spec", [WIDE, NARROW], ids=["wide", "narrow"])
def test_numbers_and_rows_alone(spec: AttnSpec) -> None:
    """A window that begins inside a split, rows that see none of a split, a sequence of one row at 0, more queries than a tile has, rows of
    this pass on both sides of a split's border; a row has the bits that it has alone, in whatever order threads run."""
    q = drawn(spec, 8)
    together, want = run(spec, SPANS, q)
    near(together, want)
    assert torch.equal(run(spec, SPANS, q, seed=3)[0], together)
    for row in (0, 4):  # the first sequence's; what was written is the same
        assert torch.equal(run(spec, [(125 + row, 1)], q[row : row + 1])[0], together[row : row + 1])


@pytest.mark.parametrize(
    "spec", [WIDE, replace(NARROW, k_eq_v=True, norm_v=True), replace(NARROW, writes=False)], ids=["wide", "narrow", "read"]
)
def test_turned_in_the_same_launch(spec: AttnSpec) -> None:
    """Queries of another head or row, keys that are not written or not seen, values taken after the norm of keys."""
    with Memory() as memory:
        mine, theirs = held(memory, poisoned(cache(spec, SPANS, 16, BF16), spec, SPANS)), cache(spec, SPANS, 16, BF16)
        qkv, norms = memory.hold(rand(8, spec.qkv_rows, seed=4, dtype=BF16)), [memory.hold(1 + 0.2 * rand(256, seed=i)) for i in (1, 2)]
        cos, sin = (memory.hold(t) for t in REF.rope_angles(mine.positions, torch.linspace(1, 0.01, 128)))
        got = Emulated(memory).rope_attend(qkv, cos, sin, *norms, spec, mine, False)
        assert got is not None
        q = REF.rope_write(qkv, cos, sin, *norms, spec, theirs)
        near(got, REF.attend(q.float(), spec, floats(theirs)).to(BF16))
        for a, b in ((mine.keys[0], theirs.keys[0]), (mine.values[0], theirs.values[0])):
            assert a is not None and b is not None and torch.equal(a.isnan(), b.isnan())
            near(a.nan_to_num(0.0), b.nan_to_num(0.0))


BROKEN = {
    "values not waited for": (
        "    wait_copies();\n    __syncthreads();\n\n    float acc",
        "    __syncthreads();\n\n    float acc",
        "still on its way",
    ),
    "weights not waited for": (
        "    wait_copies();\n    __syncthreads();\n\n    float acc",
        "    wait_copies();\n\n    float acc",
        "in which order|still on its way",
    ),
    "pages of keys that nobody sees": ("max(from, lowest - WINDOW + 1)", "from", "in no buffer|end of buffer"),
    "maxima not waited for": ("    __syncthreads();\n    float top[2]", "    float top[2]", "in which order"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_kernel_is_found(name: str) -> None:
    text, instead, message = BROKEN[name]
    with pytest.raises(EmulatorError, match=message):
        run(WIDE, SPANS, drawn(WIDE, 8), edit=(text, instead))


def test_what_the_kernel_takes() -> None:
    """Few rows under a window, with K/V in bfloat16; no trees, no prompts, no heads of 512, no pages that a warp's keys do not lie in."""
    spec, q = AttnSpec(32, 16, 256, 0, True, window=1024), torch.empty((1, 8192), dtype=BF16)

    def taken(
        spec: AttnSpec = spec, batch: int = 1, rows: int = 1, page: int = 16, dtype: torch.dtype = BF16, paths: Tensor | None = None
    ) -> bool:
        kv = KVView(page, [torch.empty(1, dtype=dtype)], [], {}, q, q, torch.empty(batch + 1), rows, 1280, paths=paths)
        return few_queries.suits(q, spec, kv, Cut(64, 64))

    assert taken() and taken(rows=5) and taken(batch=4)
    assert not taken(replace(spec, window=None)) and not taken(replace(spec, head_dim=512)) and not taken(paths=q) and not taken(page=4)
    assert not taken(dtype=torch.float8_e4m3fn) and not taken(rows=512)


def test_who_gains_and_who_is_turned_in_the_same_launch() -> None:
    """One row a sequence, with at most a head for each warp, and numbers as the kernel reads them."""
    spec, number = AttnSpec(32, 16, 256, 0, True, window=1024), torch.empty(256)

    def taken(spec: AttnSpec = spec, rows: int = 1, norm: Tensor = number) -> bool:
        kv = KVView(16, [], [], {}, number, number, number, rows, 1280)
        return turns((number, number, norm, None), spec, kv)

    assert taken() and taken(replace(spec, heads=8, kv_heads=1))
    one, eight = torch.empty(2), torch.empty(9)
    for kv_heads, batch, rows, want in (
        (16, one, 5, True),
        (8, eight, 5, False),
        (8, one, 1, False),
        (8, eight, 1, True),
        (1, one, 1, True),
    ):
        assert gains(replace(spec, kv_heads=kv_heads), KVView(16, [], [], {}, number, number, batch, rows, 1280)) == want
    assert not taken(rows=5) and not taken(replace(spec, kv_heads=2)) and not taken(norm=number.to(BF16))
