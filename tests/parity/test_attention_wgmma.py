"""Attention of prompts with heads of 512 in CUDA C++: what the kernel takes, and its numbers on a CPU (tests/cuda)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from tests.cuda.emulator import Emulated, EmulatorError, Memory, missing
from tests.kernels import fields
from tests.parity.test_gemm_wgmma import emulated_map

from outrider.ops.triton import attention_wgmma
from outrider.ops.triton.attention_config import ReductionSpec, choose_reduction
from outrider.ops.triton.attention_wgmma import SOURCE, AttentionWgmma, Problem, suits
from outrider.ops.triton.nvrtc_kernels import Flags
from outrider.types import AttnSpec, KVView

emulated = pytest.mark.skipif(missing() is not None, reason=f"kernels in CUDA C++ are not emulated: {missing()}")
CUT = ReductionSpec(64, 64, near=256, mid=128, far=512, coarse=256)
SPEC = AttnSpec(16, 2, 512, 0, True, scale=0.05)


class Emulator(AttentionWgmma):
    def __init__(self, memory: Memory, seed: int = 0, source: Path = SOURCE):
        super().__init__(torch.device("cpu"), torch.empty(0))
        self.memory = memory
        self.seed = seed
        self.source = source

    def kernel(self, name: str, flags: Flags) -> Emulated:  # type: ignore[override]
        return self.memory.kernel(self.source.read_text(), name, dict(flags), seed=self.seed)


def view(spec: AttnSpec, spans: list[tuple[int, int]], page: int, seen: int = 0) -> KVView:
    """Shuffled pages. Positions up to a span's end, or up to `seen`, hold K/V; all others NaN: reading too far shows."""
    rng = torch.Generator().manual_seed(3)
    per = -(-max(seen, *(begin + count for begin, count in spans)) // page)
    table = 1 + torch.randperm(len(spans) * per, generator=rng).view(len(spans), per)
    keys, values = (torch.full((1 + table.numel(), spec.kv_heads, page, spec.head_dim), float("nan")) for _ in range(2))
    for b, (begin, count) in enumerate(spans):
        at = torch.arange(seen or begin + count)
        for side in (keys, values):
            drawn = torch.randn((len(at), spec.kv_heads, spec.head_dim), generator=rng)
            side[table[b, at // page], :, at % page] = drawn * 2.0 ** torch.randint(
                -3, 2, (len(at), 1, 1), generator=rng
            )
    counts = [count for _, count in spans]
    return KVView(
        page, [keys.bfloat16()], [values.bfloat16()], {"full": table.int()},
        torch.cat([torch.arange(begin, begin + count) for begin, count in spans]),
        torch.repeat_interleave(torch.arange(len(spans)), torch.tensor(counts)),
        torch.tensor([0, *counts]).cumsum(0).int(), max(counts), seen or max(b + c for b, c in spans),
    )  # fmt: skip


def chain(sums: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """sums + a [..., K] · b [K, ...], 16 of K at a time."""
    for k in range(0, a.shape[1], 16):
        sums = (sums.double() + a[:, k : k + 16].double() @ b[k : k + 16].double()).float()
    return sums


def in_order(q: Tensor, spec: AttnSpec, kv: KVView, cut: ReductionSpec, span_end: int = 0) -> Tensor:
    """The sums of `attend_kernel`: blocks of a split are chained, splits added in order. One row of a head at a time."""
    out = torch.empty_like(q).view(-1, spec.heads, spec.head_dim)
    group = spec.heads // spec.kv_heads
    scale = torch.tensor(spec.scale * 1.4426950408889634)

    def known(top):
        return torch.where(top.isinf(), 0.0, top)

    keys, values = (side[0] for side in (kv.keys, kv.values))
    assert keys is not None and values is not None
    for row, (b, at) in enumerate(zip(kv.row_seq.tolist(), kv.positions.tolist())):
        last = span_end or at + 1
        places = torch.arange(last)
        pages = kv.tables["full"][b, places // kv.page_size].long()
        for head in range(spec.kv_heads):
            columns = slice(head * group, head * group + group)
            query = q.view(-1, spec.heads, spec.head_dim)[row, columns]
            k, v = (side[pages, head, places % kv.page_size] for side in (keys, values))
            v = torch.cat([v, torch.ones((last, 1), dtype=v.dtype)], 1)  # the sum of weights
            total = torch.zeros((group, 513))
            top = torch.full((group, 1), -float("inf"))
            first = 0
            while first < last:
                size = cut.fine if first < cut.near else cut.mid if first < cut.far else cut.coarse
                acc = torch.zeros((group, 513))
                peak = torch.full((group, 1), -float("inf"))
                for block in range(first, min(first + size, last), cut.bn):
                    some = slice(block, min(block + cut.bn, last))
                    s = chain(torch.zeros((group, some.stop - some.start)), query, k[some].T) * scale
                    new = torch.maximum(peak, s.amax(1, keepdim=True).ceil())
                    p = torch.exp2((s - known(new)).double()).float().bfloat16()
                    acc = chain(acc * torch.exp2(peak - known(new)), p, v[some])
                    peak = new
                new = torch.maximum(top, peak)
                total = total * torch.exp2(top - known(new)) + acc * torch.exp2(peak - known(new))
                first = first + size
                top = new
            out[row, columns] = (total[:, :512] / total[:, 512:]).bfloat16()
    return out.view_as(q)


def queries(kv: KVView, spec: AttnSpec = SPEC) -> Tensor:
    rng = torch.Generator().manual_seed(9)
    return torch.randn((len(kv.positions), spec.heads * spec.head_dim), generator=rng).bfloat16()


def attend(q: Tensor, spec: AttnSpec, kv: KVView, span_end: int = 0, pdl: bool = False, **rig: object) -> Tensor:
    with pytest.MonkeyPatch.context() as patch, Memory() as memory:
        patch.setattr(attention_wgmma, "tensor_map", emulated_map)
        view = replace(
            kv, keys=[memory.hold(t) for t in kv.keys], values=[memory.hold(t) for t in kv.values],
            tables={group: memory.hold(t) for group, t in kv.tables.items()}, positions=memory.hold(kv.positions),
            row_start=memory.hold(kv.row_start),
        )  # fmt: skip
        out = Emulator(memory, **rig).attend(memory.hold(q, ahead=pdl), spec, view, pdl, CUT, span_end)  # type: ignore
        assert out is not None
        return out.clone()


@emulated
@pytest.mark.parametrize(
    "spans,page,span_end,seed",
    [
        ([(0, 17)], 32, 0, 0),  # one pair, its second tile half full
        ([(250, 9)], 16, 0, 1),  # across splits of one block and of two
        ([(509, 6), (3, 0), (70, 2)], 32, 0, 0),  # across splits of two and of four; sequences of few rows and of none
        ([(700, 3)], 64, 0, 0),
        ([(290, 5)], 32, 333, 1),  # an image
    ],
)
def test_sums_are_in_the_order_of_every_kernel(spans: list, page: int, span_end: int, seed: int) -> None:
    """A split's end that is missed, a maximum that comes too early or too late, a block's weights in another's place,
    keys behind a row, pages that were never written, a sequence that reads its neighbour's."""
    kv = view(SPEC, spans, page, span_end)
    q = queries(kv)
    assert torch.equal(attend(q, SPEC, kv, span_end, pdl=True, seed=seed), in_order(q, SPEC, kv, CUT, span_end))


def test_few_rows_are_not_for_it() -> None:
    """None, so that another kernel takes them; likewise what does not fit."""
    kv = replace(view(SPEC, [(3, 26)], 16), row_seq=torch.empty(0))
    kernels = AttentionWgmma(torch.device("cpu"), torch.empty(0))
    assert kernels.attend(queries(kv), SPEC, replace(kv, max_rows=25), False) is None
    assert kernels.attend(queries(kv), replace(SPEC, heads=8, kv_heads=1), kv, False) is None  # splits of 32 keys


BROKEN = {
    "reads before the bytes are there": (
        "            barrier_wait(ring.full(), ring.phase);\n            const u64 a", "            const u64 a", "on its way",
    ),
    "fetches over what is being read": ("        barrier_wait(ring.empty(), ring.phase ^ 1);\n", "", "over|many"),
    "gives a stage back too early": (
        "wait_batches<0>(acc), release(ring.empty());", "release(ring.empty()), wait_batches<0>(acc);", "still reads|order",
    ),
    "the other block's half is missing": (
        "fetch_tile<false, true>(ring.stage() +", "fetch_tile<false, false>(ring.stage() +", "waits|for ever",
    ),
    "weights that the matrix units may not see": (
        "        show_to_matrix_units();\n        meet(1, 32 * WARPS);\n        if (group", "        meet(1, 32 * WARPS);\n        if (group",
        "fence|proxy|show",
    ),
    "weights of one warpgroup, read by the other too early": (
        "        show_to_matrix_units();\n        meet(1, 32 * WARPS);\n        if (group", "        show_to_matrix_units();\n        if (group",
        "order",
    ),
}  # fmt: skip


@emulated
@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_kernel_is_found(name: str, tmp_path: Path) -> None:
    text, instead, message = BROKEN[name]
    whole = SOURCE.read_text()
    assert whole.count(text) == 1
    (tmp_path / SOURCE.name).write_text(whole.replace(text, instead))
    kv = view(SPEC, [(290, 9)], 32)
    with pytest.raises(EmulatorError, match=message):
        attend(queries(kv), SPEC, kv, source=tmp_path / SOURCE.name)


def test_what_the_kernel_takes() -> None:
    kv = view(SPEC, [(0, 30)], 32)
    cut = choose_reduction(SPEC, torch.bfloat16)
    assert suits(SPEC, kv, torch.bfloat16, cut)
    others = [
        (replace(SPEC, window=512), kv, torch.bfloat16, cut),
        (replace(SPEC, head_dim=256), kv, torch.bfloat16, cut),
        (SPEC, kv, torch.float16, cut),
        (SPEC, replace(kv, keys=[t.to(torch.float8_e4m3fn) for t in kv.keys if t is not None]), torch.bfloat16, cut),
        (SPEC, replace(kv, ancestors=torch.zeros((30, 2))), torch.bfloat16, cut),
        (SPEC, replace(kv, page_size=4), torch.bfloat16, cut),
        (SPEC, kv, torch.bfloat16, replace(cut, coarse=512)),
        (SPEC, kv, torch.bfloat16, ReductionSpec(32, 32, coarse=256)),
    ]
    assert not any(suits(*case) for case in others)


def test_the_kernel_is_told_what_it_reads() -> None:
    assert fields(Problem) == "heads kv_heads pairs table_stride span_end near far scale:float"
