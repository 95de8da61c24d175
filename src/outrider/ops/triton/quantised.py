"""TritonOps with quantised weights: what the dense kernels do, for matrices that stay in 4 or 8 bits.

A matrix is a `QuantWeight` (rows of one format), `Parts` (rows of several) or a dense tensor, which goes the dense way; experts are
`QuantExperts` or dense.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from ...types import OutriderError
from ..formats import MODES, Held, Weight, join, rounded_to, stays_dense
from . import moe
from .few_experts import FASTER, Dense, FewExperts
from .few_rows import MOST_TOKENS, FewRows
from .more_rows import MoreRows
from .ops import TritonOps
from .quant import Extras, quant_linear
from .quant_moe import QuantExperts, hold_experts, round_experts
from .repack import Parts, QuantWeight, repack


class QuantTritonOps(TritonOps):
    capabilities = replace(TritonOps.capabilities, quantizes=tuple(MODES))

    def hold(self, parts: Sequence[Weight], device: torch.device | str) -> Held | None:
        if stays_dense((sum(p.shape[0] for p in parts), *parts[0].shape[1:])):
            return None
        here = [p.to(device) for p in parts]
        whole = join(here)
        if whole is not None:
            return repack(whole) if len(whole.shape) == 2 else hold_experts(whole)
        made = [repack(p) for p in here]
        held = tuple(m for m in made if m is not None)
        return Parts((sum(p.shape[0] for p in parts), parts[0].shape[1]), held) if len(held) == len(made) else None

    def quantize(self, dense: Tensor, mode: str) -> Held:
        if mode not in MODES:
            raise OutriderError(f"--quantize {mode}: the GPU holds {', '.join(MODES)}")
        format = rounded_to(mode, dense.shape)
        if format is None:
            return self.prepare(dense)
        made = repack(format.quantise(dense)) if dense.dim() == 2 else round_experts(dense, format)
        return made or self.prepare(dense)

    def take_rows(self, weight: Held, order: Tensor) -> Held:
        return super().take_rows(self.unpack(weight), order)

    def unpack(self, weight: Held) -> Tensor:
        """Dense, in bfloat16: the weight times the columns of the identity."""
        if isinstance(weight, Tensor):
            return weight
        kind = torch.bfloat16 if self.seen.is_cuda else torch.float32  # the interpreter knows no bfloat16
        one = torch.eye(weight.shape[1], dtype=kind, device=self.seen.device)
        return self.linear(one, weight).t().to(torch.bfloat16).contiguous()

    def linear(self, x: Tensor, w: Held, bias: Tensor | None = None) -> Tensor:
        return super().linear(x, w, bias) if isinstance(w, Tensor) else self._product(x, w, Extras(bias=bias))

    def gated_linear(self, x: Tensor, w: Held, act: str) -> Tensor:
        if isinstance(w, Tensor):
            return super().gated_linear(x, w, act)
        if isinstance(w, QuantWeight):
            return self._product(x, w, Extras(act=act, gated=True))
        gate, up = self._product(x, w, Extras()).chunk(2, dim=-1)
        return self.act_mul(gate, up, act)

    def linear_act_mul(self, x: Tensor, w: Held, y: Tensor, act: str) -> Tensor:
        if isinstance(w, QuantWeight):
            return self._product(x, w, Extras(mul=y, act=act))
        return super().linear_act_mul(x, w, y, act) if isinstance(w, Tensor) else self.act_mul(self.linear(x, w), y, act)

    def logits(self, h: Tensor, w: Held, softcap: float | None) -> Tensor:
        if isinstance(w, Tensor):
            return super().logits(h, w, softcap)
        return self._product(h, w, Extras(softcap=softcap, out_dtype=torch.float32))

    def _product(self, x: Tensor, w: Held, extras: Extras) -> Tensor:
        if isinstance(w, QuantWeight):
            return self.multiply(x, w, extras)
        assert isinstance(w, Parts)
        outs, at = [], 0
        for part in w.parts:
            rows = slice(at, at + part.shape[0])
            outs.append(self.multiply(x, part, replace(extras, bias=None if extras.bias is None else extras.bias[rows])))
            at = rows.stop
        return torch.cat(outs, dim=-1)

    @cached_property
    def few(self) -> FewRows | None:
        """Kernels for few tokens, asked for with the first quantised product."""
        return FewRows.of(self.seen.device, self.seen)

    @cached_property
    def more(self) -> MoreRows | None:
        """The same for more of them."""
        return None if self.few is None else MoreRows(self.seen.device, self.seen)

    @cached_property
    def few_experts(self) -> FewExperts | None:
        """Kernels for the experts of few tokens, asked for with the first of them."""
        return FewExperts.of(self.seen.device)

    def moe_beside(
        self, router_in: Tensor, x: Tensor, router: Held, expert_scale: Tensor, gate_up: Held, down: Held, top_k: int, act: str,
        h: Tensor, mlp_gate_up: Held, mlp_down: Held, dense_w: Tensor, post_w: Tensor,
        stream: Tensor, out_w: Tensor | None, scale: Tensor | None, next_w: Tensor | None, eps: float,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        rest = (dense_w, post_w, stream, out_w, scale, next_w, eps)
        if x.shape[0] <= FASTER and isinstance(router, Tensor) and isinstance(gate_up, QuantExperts) and isinstance(down, QuantExperts):
            beside, few = Dense.of(mlp_gate_up, mlp_down, x.shape[1], down.matrix.chunks), self.few_experts
            plan = None if few is None else few.plan(x, router, gate_up, down, top_k, beside)
            kernels = None if few is None or plan is None else few.kernels(plan, act)
            if few is not None and plan is not None and kernels is not None:
                alone = self.dense_mlp(h, mlp_gate_up, mlp_down, act) if beside is None else None
                z = few.logits(kernels, plan, router_in, router, self.pdl)
                made = few.answers(kernels, plan, z, expert_scale, x, gate_up, down, h, beside, self.pdl)
                if alone is not None:
                    return moe.mix(made.pairs, made.weight, moe.Beside(alone[0], *rest), alone[1]())
                return moe.mix(made.pairs, made.weight, moe.Beside(made.dense, *rest, parts=len(made.dense)), self.pdl)
        return super().moe_beside(router_in, x, router, expert_scale, gate_up, down, top_k, act, h, mlp_gate_up, mlp_down, *rest)

    def multiply(self, x: Tensor, w: QuantWeight, extras: Extras) -> Tensor:
        """By whichever kernel takes it: the bits are the same."""
        kernels = self.few if x.shape[0] <= MOST_TOKENS else self.more
        out = kernels.product(x, w, extras, self.pdl) if kernels is not None else None
        return quant_linear(x, w, self.seen, extras, self.pdl) if out is None else out
