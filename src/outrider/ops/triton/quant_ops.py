"""TritonOps with quantised weights: the dense ops, for matrices that stay in 4 or 8 bits.

A matrix is a `QuantWeight` (rows of one format), `Parts` (rows of several) or a dense tensor, which uses the dense
kernels; experts are `QuantExperts` or dense.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from ...types import OutriderError
from ..backend import NO_EPILOGUE, Epilogue, MoeLayer
from ..formats import MODES, DeviceWeight, Weight, join, rounded_to, stays_dense
from . import moe
from .moe_gemv_int8 import MAX_MOE_GEMV_ROWS, MoeGemvInt8
from .ops import TritonOps
from .quant import quant_linear
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
        kind = torch.bfloat16 if self.semaphores.is_cuda else torch.float32  # the interpreter has no bfloat16
        one = torch.eye(weight.shape[1], dtype=kind, device=self.semaphores.device)
        return self.linear(one, weight).t().to(torch.bfloat16).contiguous()

    def gate_and_up(self, x: Tensor, w: DeviceWeight) -> Tensor:
        return super().gate_and_up(x, w) if isinstance(w, Tensor) else self.product(x, w, NO_EPILOGUE)

    def product(self, x: Tensor, w: DeviceWeight, end: Epilogue) -> Tensor:
        if isinstance(w, QuantWeight):
            return self.multiply(x, w, end)
        if not isinstance(w, Parts):
            return super().product(x, w, end)
        if end.act:
            made = self.product(x, w, replace(end, mul=None, act=""))
            gate, up = made.chunk(2, dim=-1) if end.mul is None else (made, end.mul)
            return self.act_mul(gate, up, end.act)
        outs, at = [], 0
        for part in w.parts:
            rows = slice(at, at + part.shape[0])
            outs.append(self.multiply(x, part, replace(end, bias=None if end.bias is None else end.bias[rows])))
            at = rows.stop
        return torch.cat(outs, dim=-1)

    @cached_property
    def few(self) -> WNA16Gemv | None:
        """Kernels for few tokens, created with the first quantised product."""
        return WNA16Gemv.of(self.semaphores.device, self.semaphores)

    @cached_property
    def more(self) -> W4A16Wgmma | None:
        """The same for more of them."""
        return None if self.few is None else W4A16Wgmma(self.semaphores.device, self.semaphores)

    @cached_property
    def moe_gemv_int8(self) -> MoeGemvInt8 | None:
        """Kernels for the experts of few tokens, created at first use."""
        return MoeGemvInt8.of(self.semaphores.device, self.semaphores)

    def moe_with_shared_mlp(
        self, router_in: Tensor, x: Tensor, h: Tensor, stream: Tensor, layer: MoeLayer
    ) -> tuple[Tensor, Tensor]:
        experts = layer.experts
        few = self.moe_gemv_int8 if len(x) <= MAX_MOE_GEMV_ROWS and isinstance(experts.down, QuantExperts) else None
        held = None if few is None else few.layer(x, experts, layer.mlp)
        if few is None or held is None:
            return super().moe_with_shared_mlp(router_in, x, h, stream, layer)
        dense, join = self.dense_mlp(h, layer.mlp, experts.act) if held.mlp is None else (None, lambda: self.pdl)
        z = few.logits(held, router_in, self.pdl)
        made = few.answers(held, z, x, h, self.pdl)
        return moe.mix(made.pairs, made.weight, made.dense if dense is None else dense, stream, layer.end, join())

    def multiply(self, x: Tensor, w: QuantWeight, extras: Epilogue) -> Tensor:
        """By whichever kernel takes it: the bits are the same."""
        kernels = self.few if x.shape[0] <= MAX_GEMV_TOKENS else self.more
        out = kernels.product(x, w, extras, self.pdl) if kernels is not None else None
        return quant_linear(x, w, self.semaphores, extras, self.pdl) if out is None else out
