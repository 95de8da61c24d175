"""Muon for matrices, AdamW for the rest.

Muon (Jordan et al. 2024) replaces a matrix's momentum by the nearest orthogonal matrix, so all directions learn at
one rate. Its step is scaled to AdamW's (as in Moonlight), so that one learning rate serves both optimizers.
"""

from __future__ import annotations

import torch
from torch import nn


def make_optimizers(
    params: dict[str, nn.Parameter], lr: float, weight_decay: float, muon: bool
) -> list[torch.optim.Optimizer]:
    """By canonical name: matrices of the network to Muon; heads, centroids, norms and scalars to AdamW."""
    matrices = {n: p for n, p in params.items() if muon and p.ndim == 2 and n not in ("embed", "centroids")}
    rest = [p for n, p in params.items() if n not in matrices]
    made: list[torch.optim.Optimizer] = []
    if matrices:
        made.append(
            torch.optim.Muon(matrices.values(), lr=lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw")
        )
    if rest:
        groups = [
            {"params": [p for p in rest if p.ndim >= 2], "weight_decay": weight_decay},
            {"params": [p for p in rest if p.ndim < 2], "weight_decay": 0.0},
        ]
        groups = [g for g in groups if g["params"]]
        made.append(torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), eps=1e-8, fused=rest[0].is_cuda))
    return made
