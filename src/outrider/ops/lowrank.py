"""Low-rank adapters (LoRA): y = W x + scale · B (A x), for the rows that use one.

`AdaptedOps` replaces the backend during a pass whose rows use adapters. A row's bits do not depend on the other rows:
all three products run through `linear`, whose order of sums is fixed by the weight's shape. A row without an adapter
runs through the same operations as in a pass without adapters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .backend import Epilogue, MoeLayer
from .formats import DeviceWeight

if TYPE_CHECKING:
    from .reference import Backend


@dataclass(frozen=True)
class LowRank:
    """The change of one weight. For a weight fused of several matrices (q, k and v; gate and up), A holds their rows
    one below the other and B is block-structured."""

    a: DeviceWeight  # [r, in]
    b: DeviceWeight  # [out, r], or the backend's layout
    scale: Tensor  # float32 [out]
    pieces: tuple[tuple[int, int], ...] = ()  # (outputs, rank) of the matrices that the weight is fused of

    @property
    def nbytes(self) -> int:
        return self.a.nbytes + self.b.nbytes + self.scale.nbytes


@dataclass(frozen=True, eq=False)
class Adapter:
    """All changes of one adapter by canonical weight name. K/V depends on them: `digest` is part of prefix keys."""

    name: str
    digest: bytes
    parts: Mapping[str, LowRank]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts.values())


RowGroups = Mapping[Adapter, Tensor | None]  # rows of a pass by adapter: int64; None: all


def row_groups(adapters: Sequence[Adapter | None], counts: Sequence[int], device: torch.device) -> RowGroups:
    """Row groups of a pass in which sequence i has `counts[i]` rows, one sequence after the other."""
    rows: dict[Adapter, list[int]] = {}
    start = 0
    for adapter, count in zip(adapters, counts, strict=True):
        if adapter is not None and count:
            rows.setdefault(adapter, []).extend(range(start, start + count))
        start += count
    as_tensor = partial(torch.tensor, dtype=torch.int64, device=device)
    return {adapter: None if len(which) == start else as_tensor(which) for adapter, which in rows.items()}


class AdaptedOps:
    """The backend `base` with the adapters of `groups` applied in every product that they change. names: canonical name
    of a weight by its `id`."""

    def __init__(self, base: Backend, names: Mapping[int, str], groups: RowGroups):
        self.base = base
        self.names = names
        self.groups = groups

    def __getattr__(self, name: str) -> object:
        return getattr(self.base, name)

    def changes(self, w: DeviceWeight) -> list[tuple[Tensor | None, LowRank]]:
        name = self.names.get(id(w), "")
        return [(rows, adapter.parts[name]) for adapter, rows in self.groups.items() if name in adapter.parts]

    def product(self, x: Tensor, w: DeviceWeight, end: Epilogue) -> Tensor | None:
        """x · wᵀ with the adapters' additions, followed by the epilogue `end`; None: no adapter changes w."""
        changes = self.changes(w)
        if not changes:
            return None
        y = self.base.linear(x, w, end.bias)
        for which, part in changes:
            y = self.base.add_lowrank(y, x, part, rows=which)
        if not end.act:
            return y
        rows = self.touched(x, w)
        a, b = y.chunk(2, dim=-1) if end.mul is None else (y, end.mul)
        if rows is None or rows.shape[0] == x.shape[0]:
            return self.base.act_mul(a, b, end.act)
        # unchanged rows keep the bits of the fused product
        out = (
            self.base.gated_linear(x, w, end.act) if end.mul is None else self.base.linear_act_mul(x, w, b, act=end.act)
        )
        out[rows] = self.base.act_mul(a[rows], b[rows], end.act)
        return out

    def linear(self, x: Tensor, w: DeviceWeight, bias: Tensor | None = None) -> Tensor:
        result = self.product(x, w, Epilogue(bias))
        return self.base.linear(x, w, bias) if result is None else result

    def gated_linear(self, x: Tensor, w: DeviceWeight, act: str) -> Tensor:
        result = self.product(x, w, Epilogue(act=act))
        return self.base.gated_linear(x, w, act) if result is None else result

    def linear_act_mul(self, x: Tensor, w: DeviceWeight, y: Tensor, act: str) -> Tensor:
        result = self.product(x, w, Epilogue(act=act, mul=y))
        return self.base.linear_act_mul(x, w, y, act=act) if result is None else result

    def moe_with_shared_mlp(
        self, router_in: Tensor, x: Tensor, h: Tensor, stream: Tensor, layer: MoeLayer
    ) -> tuple[Tensor, Tensor]:
        """Runs the backend's operation for rows whose dense MLP is unchanged, and its parts one by one for the
        others."""
        base = self.base
        gate_up, down = layer.mlp
        rows = self.touched(h, *layer.mlp)
        if rows is None:
            return base.moe_with_shared_mlp(router_in, x, h, stream=stream, layer=layer)
        dense = self.linear(self.gated_linear(h, gate_up, layer.experts.act), down)
        out = base.moe_next_to(dense, router_in, x, stream=stream, layer=layer)
        if rows.shape[0] < x.shape[0]:
            unchanged = torch.ones(x.shape[0], dtype=torch.bool, device=x.device)
            unchanged[rows] = False
            few = base.moe_with_shared_mlp(
                router_in[unchanged], x[unchanged], h[unchanged], stream=stream[unchanged], layer=layer
            )
            for whole, part in zip(out, few):
                whole[unchanged] = part
        return out

    def touched(self, x: Tensor, *weights: DeviceWeight) -> Tensor | None:
        """Rows of x for which one of the weights is changed; None if there are none."""
        ranges = [rows for w in weights for rows, _ in self.changes(w)]
        if not ranges:
            return None
        if any(rows is None for rows in ranges):
            return torch.arange(x.shape[0], device=x.device)
        return torch.cat([rows for rows in ranges if rows is not None]).unique()
