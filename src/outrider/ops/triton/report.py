"""The rows of `outrider doctor --kernels`."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .card import Card
from .kernels import TABLE


@dataclass(frozen=True)
class KernelRow:
    operation: str
    when: str
    kernel: str
    source: str
    here: str  # whether it runs on this machine's card


def kernel_rows() -> tuple[list[KernelRow], str]:
    """The table, and the card that it is about."""
    card = Card.of(torch.device("cuda", 0)) if torch.cuda.is_available() else None
    rows = []
    for kernel in TABLE:
        here = "–" if card is None else "yes" if kernel.runs_on(card) else "no"
        rows.append(KernelRow(kernel.op, kernel.when, kernel.name, kernel.source, here))
    return rows, "no GPU here" if card is None else card.identity
