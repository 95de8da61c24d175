"""Adapters over the Triton kernels, on the GPU where there is one, else through Triton's interpreter: small and odd
ranks are products that no model has otherwise."""

from __future__ import annotations

import os

import pytest
import torch

CUDA = torch.cuda.is_available()
if not CUDA:
    os.environ["TRITON_INTERPRET"] = "1"

pytest.importorskip("triton")

from outrider.ops.lowrank import AdaptedOps, Adapter, LowRank, row_groups  # noqa: E402
from outrider.ops.reference import ReferenceOps  # noqa: E402
from outrider.ops.triton import TritonOps  # noqa: E402

DEVICE, IN, OUT = torch.device("cuda" if CUDA else "cpu"), 64, 96


def rand(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE)


@pytest.mark.parametrize("rank", [1, 4, 16, 24])
def test_rows_have_the_reference_values_and_the_same_bits_in_any_company(rank: int) -> None:
    ops, w, x = TritonOps(DEVICE, pdl=False), rand(OUT, IN), rand(21, IN)
    adapters = [
        Adapter(name, b"", {"w": LowRank(ops.prepare(rand(r, IN)), ops.prepare(rand(OUT, r)), rand(OUT))})
        for name, r in (("a", rank), ("b", 8))
    ]
    owners, counts = [adapters[0], None, adapters[1], adapters[0]], [1, 5, 9, 6]

    def runs(base: ReferenceOps, rows: torch.Tensor, who: list[Adapter | None], how: list[int]) -> list[torch.Tensor]:
        made = AdaptedOps(base, {id(w): "w"}, row_groups(who, how, DEVICE))
        return [made.linear(rows, w), made.gated_linear(rows, w, "silu"), made.linear_act_mul(rows, w, y, "silu")]

    y = rand(21, OUT)
    got, want = runs(ops, x, list(owners), counts), runs(ReferenceOps(), x, list(owners), counts)
    for mine, theirs in zip(got, want):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-3)
    start, whole = 0, y
    for owner, count in zip(owners, counts):
        y = whole[start : start + count]
        for alone, batch in zip(runs(ops, x[start : start + count], [owner], [count]), got):
            assert torch.equal(alone, batch[start : start + count])
        start += count
