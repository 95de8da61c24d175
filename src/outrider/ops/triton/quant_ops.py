"""TritonOps with quantised weights: what the dense kernels do, for matrices that stay in 4 or 8 bits.

A matrix is a `QuantWeight` (rows of one format), `Parts` (rows of several) or a dense tensor, which goes the dense way;
experts are `QuantExperts` or dense.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from ...types import OutriderError
from ..formats import MODES, DeviceWeight, Weight, join, rounded_to, stays_dense
from . import moe
from .moe_gemv_int8 import MAX_MOE_GEMV_ROWS, MoeGemvInt8, SharedMLP
from .ops import TritonOps
from .quant import Extras, quant_linear
from .quant_moe import QuantExperts, hold_experts, round_experts
from .repack import Parts, QuantWeight, repack
from .w4a16_wgmma import W4A16Wgmma
from .wna16_gemv import MAX_GEMV_TOKENS, WNA16Gemv


class QuantTritonOps(TritonOps):
    capabilities = replace(TritonOps.capabilities, quantizes=tuple(MODES))

    def pack_weights(self, parts: Sequence[Weight], device: torch.device | str) -> DeviceWeight | None:
        if stays_dense((sum(p.shape[0] for p in parts), *parts[0].shape[1:])):
            return None
        here = [p.to(device) for p in parts]
        whole = join(here)
        if whole is not None:
            return repack(whole) if len(whole.shape) == 2 else hold_experts(whole)
        made = [repack(p) for p in here]
        held = tuple(m for m in made if m is not None)
        return Parts((sum(p.shape[0] for p in parts), parts[0].shape[1]), held) if len(held) == len(made) else None

    def quantize(self, dense: Tensor, mode: str) -> DeviceWeight:
        if mode not in MODES:
            raise OutriderError(f"--quantize {mode}: the GPU holds {', '.join(MODES)}")
        format = rounded_to(mode, dense.shape)
        if format is None:
            return self.prepare(dense)
        made = repack(format.quantise(dense)) if dense.dim() == 2 else round_experts(dense, format)
        return made or self.prepare(dense)

    def take_rows(self, weight: DeviceWeight, order: Tensor) -> DeviceWeight:
        return super().take_rows(self.unpack(weight), order)

    def unpack(self, weight: DeviceWeight) -> Tensor:
        """Dense, in bfloat16: the weight times the columns of the identity."""
        if isinstance(weight, Tensor):
            return weight
        kind = torch.bfloat16 if self.semaphores.is_cuda else torch.float32  # the interpreter knows no bfloat16
        one = torch.eye(weight.shape[1], dtype=kind, device=self.semaphores.device)
        return self.linear(one, weight).t().to(torch.bfloat16).contiguous()

    def linear(self, x: Tensor, w: DeviceWeight, bias: Tensor | None = None) -> Tensor:
        return super().linear(x, w, bias) if isinstance(w, Tensor) else self._product(x, w, Extras(bias=bias))

    def gated_linear(self, x: Tensor, w: DeviceWeight, act: str) -> Tensor:
        if isinstance(w, Tensor):
            return super().gated_linear(x, w, act)
        if isinstance(w, QuantWeight):
            return self._product(x, w, Extras(act=act, gated=True))
        gate, up = self._product(x, w, Extras()).chunk(2, dim=-1)
        return self.act_mul(gate, up, act)

    def gate_and_up(self, x: Tensor, w: DeviceWeight) -> Tensor:
        return super().gate_and_up(x, w) if isinstance(w, Tensor) else self._product(x, w, Extras())

    def linear_act_mul(self, x: Tensor, w: DeviceWeight, y: Tensor, act: str) -> Tensor:
        if isinstance(w, QuantWeight):
            return self._product(x, w, Extras(mul=y, act=act))
        return (
            super().linear_act_mul(x, w, y, act) if isinstance(w, Tensor) else self.act_mul(self.linear(x, w), y, act)
        )

    def logits(self, h: Tensor, w: DeviceWeight, softcap: float | None) -> Tensor:
        if isinstance(w, Tensor):
            return super().logits(h, w, softcap)
        return self._product(h, w, Extras(softcap=softcap, out_dtype=torch.float32))

    def _product(self, x: Tensor, w: DeviceWeight, extras: Extras) -> Tensor:
        if isinstance(w, QuantWeight):
            return self.multiply(x, w, extras)
        assert isinstance(w, Parts)
        outs, at = [], 0
        for part in w.parts:
            rows = slice(at, at + part.shape[0])
            outs.append(
                self.multiply(x, part, replace(extras, bias=None if extras.bias is None else extras.bias[rows]))
            )
            at = rows.stop
        return torch.cat(outs, dim=-1)

    @cached_property
    def few(self) -> WNA16Gemv | None:
        """Kernels for few tokens, asked for with the first quantised product."""
        return WNA16Gemv.of(self.semaphores.device, self.semaphores)

    @cached_property
    def more(self) -> W4A16Wgmma | None:
        """The same for more of them."""
        return None if self.few is None else W4A16Wgmma(self.semaphores.device, self.semaphores)

    @cached_property
    def moe_gemv_int8(self) -> MoeGemvInt8 | None:
        """Kernels for the experts of few tokens, asked for with the first of them."""
        return MoeGemvInt8.of(self.semaphores.device)

    def moe_with_shared_mlp(
        self, router_in: Tensor, x: Tensor, router: DeviceWeight, expert_scale: Tensor, gate_up: DeviceWeight,
        down: DeviceWeight, top_k: int, act: str,
        h: Tensor, mlp_gate_up: DeviceWeight, mlp_down: DeviceWeight, dense_w: Tensor, post_w: Tensor,
        stream: Tensor, out_w: Tensor | None, scale: Tensor | None, next_w: Tensor | None, eps: float,
    ) -> tuple[Tensor, Tensor]:
        rest = (dense_w, post_w, stream, out_w, scale, next_w, eps)
        if (
            x.shape[0] <= MAX_MOE_GEMV_ROWS
            and isinstance(router, Tensor)
            and isinstance(gate_up, QuantExperts)
            and isinstance(down, QuantExperts)
        ):
            beside, few = SharedMLP.of(mlp_gate_up, mlp_down, x.shape[1], down.matrix.chunks), self.moe_gemv_int8
            plan = None if few is None else few.plan(x, router, gate_up, down, top_k, beside)
            kernels = None if few is None or plan is None else few.kernels(plan, act)
            if few is not None and plan is not None and kernels is not None:
                alone = self.dense_mlp(h, mlp_gate_up, mlp_down, act) if beside is None else None
                z = few.logits(kernels, plan, router_in, router, self.pdl)
                made = few.answers(kernels, plan, z, expert_scale, x, gate_up, down, h, beside, self.pdl)
                if alone is not None:
                    return moe.mix(made.pairs, made.weight, moe.MoeEpilogue(alone[0], *rest), alone[1]())
                return moe.mix(
                    made.pairs, made.weight, moe.MoeEpilogue(made.dense, *rest, parts=len(made.dense)), self.pdl
                )
        return super().moe_with_shared_mlp(
            router_in, x, router, expert_scale, gate_up, down, top_k, act, h, mlp_gate_up, mlp_down, *rest
        )

    def multiply(self, x: Tensor, w: QuantWeight, extras: Extras) -> Tensor:
        """By whichever kernel takes it: the bits are the same."""
        kernels = self.few if x.shape[0] <= MAX_GEMV_TOKENS else self.more
        out = kernels.product(x, w, extras, self.pdl) if kernels is not None else None
        return quant_linear(x, w, self.semaphores, extras, self.pdl) if out is None else out
