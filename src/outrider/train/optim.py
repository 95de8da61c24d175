"""Muon for matrices, AdamW for the rest.

Muon (Jordan et al. 2024) replaces a matrix's momentum by the nearest orthogonal matrix (Newton-Schulz iteration), so
all directions learn at one rate; scaled as in Moonlight (0.2·√max(rows, columns)), so that one learning rate serves
both optimizers. Matrices of one shape are iterated together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn


def orthogonalize(m: Tensor, steps: int = 5) -> Tensor:
    """[N, rows, columns] -> the same with singular values near 1. A quintic iteration in bf16 on the GPU."""
    x = m.bfloat16() if m.is_cuda else m.float()
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        a = x @ x.mT
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * (a @ a)) @ x
    return (x.mT if tall else x).to(m.dtype)


class Muon(torch.optim.Optimizer):
    def __init__(self, params: Iterable[nn.Parameter], lr: float, momentum: float = 0.95, weight_decay: float = 0.01):
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            shapes: dict[torch.Size, list[Tensor]] = defaultdict(list)
            for p in group["params"]:
                if p.grad is not None:
                    shapes[p.shape].append(p)
            for shape, params in shapes.items():
                grads = [p.grad for p in params if p.grad is not None]
                momenta = [self.state[p].setdefault("momentum", torch.zeros_like(p)) for p in params]
                torch._foreach_lerp_(momenta, grads, 1 - group["momentum"])
                nesterov = torch._foreach_lerp(grads, momenta, group["momentum"])
                update = orthogonalize(torch.stack(nesterov))
                torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
                torch._foreach_add_(params, list(update.unbind(0)), alpha=-group["lr"] * 0.2 * max(shape) ** 0.5)


def make_optimizers(
    params: dict[str, nn.Parameter], lr: float, weight_decay: float, muon: bool
) -> list[torch.optim.Optimizer]:
    """By canonical name: matrices of the network to Muon; heads, centroids, norms and scalars to AdamW."""
    matrices = [p for n, p in params.items() if muon and p.ndim == 2 and n not in ("embed", "centroids")]
    chosen = {id(p) for p in matrices}
    rest = [p for p in params.values() if id(p) not in chosen]
    fused = bool(rest) and rest[0].is_cuda
    made: list[torch.optim.Optimizer] = []
    if matrices:
        made.append(Muon(matrices, lr, weight_decay=weight_decay))
    if rest:
        groups = [
            {"params": [p for p in rest if p.ndim >= 2], "weight_decay": weight_decay},
            {"params": [p for p in rest if p.ndim < 2], "weight_decay": 0.0},
        ]
        made.append(
            torch.optim.AdamW([g for g in groups if g["params"]], lr=lr, betas=(0.9, 0.95), eps=1e-8, fused=fused)
        )
    return made
