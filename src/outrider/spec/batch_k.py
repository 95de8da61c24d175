"""Chooses K for each sequence of a batch, given the expected tokens and the cost of every K. Pure, torch-free."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..types import MAX_DRAFT

PLANNING = 2e-4  # seconds per step for planning a batch that drafts
Array = NDArray[np.float64]


def choose_k(
    tokens: Array, dear: NDArray[np.bool_], verify: Array, drafting: Array, fill: float
) -> tuple[float, list[int]]:
    """The best rate in tokens per second, and the K of each sequence that reaches it. tokens [B, 17]: expected tokens
    of a cycle by K; dear [B]: sequences whose drafts take time, `drafting` [17] seconds by K, of which a share `fill`
    is verified; verify [17]: seconds of the target's step by the mean K."""
    size, steps = len(tokens), np.arange(MAX_DRAFT + 1)
    filled = np.where(dear, fill, 1.0)[:, None]
    rate, ks = 0.0, [0] * size
    worth = size / verify[0]
    for _ in range(2):
        price = worth * (verify[-1] - verify[0]) / MAX_DRAFT / size
        net = np.where(tokens > 0.0, tokens - price * steps * filled, -1.0)
        top = np.maximum.accumulate(net, axis=1)
        chosen = np.maximum.accumulate(np.where(net >= top, steps, 0), axis=1)  # [B, 17]: K by widest K allowed
        made = np.take_along_axis(tokens, chosen, axis=1).sum(axis=0)  # [17]
        width = (chosen * filled).mean(axis=0)
        depth = np.where(dear[:, None], chosen, 0).max(axis=0)
        rates = made / (np.interp(width, steps, verify) + drafting[depth] + PLANNING)
        at = int(rates.argmax())
        if rates[at] > rate:
            rate, ks = float(rates[at]), [int(k) for k in chosen[:, at]]
        worth = rate
    return rate, ks
