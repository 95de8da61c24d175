"""Adapters in slots over the Triton kernels, on the GPU where there is one, else through Triton's interpreter, against
their definition in plain torch."""

from __future__ import annotations

import os

import pytest
import torch

CUDA = torch.cuda.is_available()
if not CUDA:
    os.environ["TRITON_INTERPRET"] = "1"

pytest.importorskip("triton")

from outrider.ops.adapter_slots import AdapterSlots, SlotOps, SlotWeight, row_ranges  # noqa: E402
from outrider.ops.lowrank import Adapter, LowRank  # noqa: E402
from outrider.ops.reference import ReferenceOps  # noqa: E402
from outrider.ops.triton import TritonOps, lowrank  # noqa: E402

# two spans, the second one shorter
DEVICE = torch.device("cuda" if CUDA else "cpu")
IN = 456
# the last takes two ranges
OWNERS = ("a", None, "b", "a")
COUNTS = (1, 5, 9, 19)


def rand(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def adapter(name: str, rank: int, rows: tuple[int, ...], leave: int | None = None) -> Adapter:
    """An adapter of one weight fused of matrices with these numbers of rows; leave: a matrix that it does not
    change."""
    pieces = tuple((n, 0 if i == leave else rank + i) for i, n in enumerate(rows))
    b = torch.zeros(sum(rows), sum(r for _, r in pieces))
    scale = torch.zeros(sum(rows))
    row = 0
    first = 0
    for n, r in pieces:
        b[row : row + n, first : first + r] = rand(n, r)
        scale[row : row + n] = 0.5 + rank if r else 0.0
        row = row + n
        first = first + r
    return Adapter(name, name.encode(), {"w": LowRank(rand(first, IN) / 32, b, scale, pieces)})


@pytest.mark.parametrize(
    ("rank", "rows"), [(1, (96,)), (136, (96,)), (16, (64, 32, 32)), (24, (64, 32, 32)), (24, (48, 48))]
)
def test_rows_have_the_reference_values_and_the_same_bits_in_any_company(rank: int, rows: tuple[int, ...]) -> None:
    """Three fused matrices of which an adapter leaves one alone, gate and up, ranks with and without padding."""
    ops = TritonOps(DEVICE, pdl=False)
    n = sum(rows)
    total = sum(COUNTS)
    w = rand(n, IN).to(DEVICE) / 8
    x = rand(total, IN).to(DEVICE)
    side = rand(total, n).to(DEVICE)
    adapters = {"a": adapter("a", rank, rows, leave=1), "b": adapter("b", 8, rows)}

    def runs(base: ReferenceOps, first: int, who: tuple[str | None, ...], how: tuple[int, ...]) -> list[torch.Tensor]:
        slots = AdapterSlots(2, torch.float32, DEVICE)
        placed = slots.place([adapters[name] if name else None for name in who])
        here = slice(first, first + sum(how))
        ranges = torch.tensor(row_ranges(placed, how), dtype=torch.int32, device=DEVICE)
        adapted = SlotOps(base, {id(w): "w"}, slots, ranges)
        out = [adapted.linear(x[here], w), adapted.linear_act_mul(x[here], w, side[here], "silu")]
        return [*out, adapted.gated_linear(x[here], w, "gelu_tanh")] if len(rows) == 2 else out

    got = runs(ops, 0, OWNERS, COUNTS)
    want = runs(ReferenceOps(), 0, OWNERS, COUNTS)
    for ours, theirs in zip(got, want):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)
    start = 0
    for owner, count in zip(OWNERS, COUNTS):
        for alone, batch in zip(runs(ops, start, (owner,), (count,)), got):
            assert torch.equal(alone, batch[start : start + count]), owner
        start += count
    assert not ops.lora_counters.any(), "the next launch finds no spans done"
    bare = slice(COUNTS[0], COUNTS[0] + COUNTS[1])
    plain = [ops.linear(x, w), ops.linear_act_mul(x, w, side, "silu")]
    plain += [ops.gated_linear(x, w, "gelu_tanh")] if len(rows) == 2 else []
    for base, batch in zip(plain, got):
        assert torch.equal(base[bare], batch[bare]), "a row without an adapter takes no addition"
        assert not torch.equal(base[:1], batch[:1])
    if len(rows) == 3:
        assert torch.equal(plain[0][:1, 64:96], got[0][:1, 64:96]), "the second matrix is left alone"


@pytest.mark.parametrize("width", [64, 456, 1544])  # a part of a fetch; two spans; five, the last one short
def test_shrink_adds_every_column_once(width: int) -> None:
    """Whole numbers, whose sums are exact in any order: 16 rows of one adapter, 5 without, 20 of another."""
    change = SlotWeight(
        rand(2, 2, 32, width).round().to(DEVICE), torch.zeros(2, 8, 32, device=DEVICE),
        torch.tensor([[1.0, 0.5], [2.0, 0.0]], device=DEVICE), (4, 4),
    )  # fmt: skip
    x = rand(41, width).round().to(DEVICE)
    ranges = torch.tensor(row_ranges([1, -1, 0], [16, 5, 20]), dtype=torch.int32, device=DEVICE)
    counters = torch.zeros(1 << 16, dtype=torch.int32, device=DEVICE)
    u = lowrank.shrink(x, change, ranges, counters).u.view(41, 2, 32)
    want = torch.zeros_like(u)
    for slot, rows in ((1, slice(0, 16)), (0, slice(21, 41))):
        want[rows] = torch.einsum("rk,pnk->rpn", x[rows], change.a[slot]) * change.scale[slot][None, :, None]
    assert torch.equal(u, want) and not counters.any()


def test_a_slot_changes_its_content_and_grows() -> None:
    """More adapters than slots, a larger rank, a replaced adapter: each has the values that it has alone."""
    ops = TritonOps(DEVICE, pdl=False)
    w = rand(96, IN).to(DEVICE)
    x = rand(3, IN).to(DEVICE)
    adapters = [adapter(str(i), (4, 8, 40, 2)[i], (96,)) for i in range(4)]
    slots = AdapterSlots(1, torch.float32, DEVICE)
    seen = set()

    def run(who: list[Adapter | None], slots: AdapterSlots) -> torch.Tensor:
        ranges = torch.tensor(row_ranges(slots.place(who), [1] * len(who)), dtype=torch.int32, device=DEVICE)
        return SlotOps(ops, {id(w): "w"}, slots, ranges).linear(x[: len(who)], w)

    def alone(who: list[Adapter | None]) -> torch.Tensor:
        return run(who, AdapterSlots(len(who), torch.float32, DEVICE))

    for who in (
        [adapters[0]],
        [adapters[1]],
        [adapters[0], adapters[1], None],
        [adapters[2], adapters[0]],
        [adapters[3], adapters[2], adapters[1]],
    ):
        assert torch.equal(run(list(who), slots), alone(list(who)))
        seen.add((slots.count, slots.version))
    assert slots.count == 4 and len(seen) == 4, "the second pass reuses the only slot, the others make new tensors"
