"""A cost table by a formula."""

from __future__ import annotations

from collections.abc import Mapping

from outrider.spec.cost import CURVE_LENGTH, CostTable


def linear(base: float, per_row: float, draft: Mapping[str, float] | None = None) -> CostTable:
    """A step of R rows takes base + per_row·R; a drafter its time per token."""
    verify = {
        (b, c): [base + per_row * b * (k + 1) for k in range(CURVE_LENGTH)]
        for b in (1, 2, 4, 8, 16, 32)
        for c in (0, 8192)
    }
    return CostTable(verify, {n: {1: [t * k for k in range(CURVE_LENGTH)]} for n, t in (draft or {}).items()})
