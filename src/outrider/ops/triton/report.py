"""The rows of `outrider doctor --kernels`."""

from __future__ import annotations

import torch

from ..registry import KernelRow
from .card import Card
from .kernels import TABLE


def kernel_rows() -> tuple[list[KernelRow], str]:
    """The table, and the card that it is about."""
    card = Card.of(torch.device("cuda", 0)) if torch.cuda.is_available() else None
    rows = []
    for kernel in TABLE:
        here = "–"
        if card is not None:
            here = "yes" if kernel.runs_on(card) else "no"
        rows.append(
            KernelRow(operation=kernel.op, when=kernel.when, kernel=kernel.name, source=kernel.source, here=here)
        )
    return rows, "no GPU here" if card is None else card.identity
