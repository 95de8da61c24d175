"""Gemma 4's larger drafters on a GPU: `SteppedDrafter` runs a round as some thirty short kernels per step
(draft_steps_kernel.py).

A step of the plain drafter is 47 kernels over a gigabyte of weights (31B). Here norms, rotation, embedding and residual
are fused into the product that needs them, scores never leave the head's kernel, and every matrix is int8 with one
scale per row: a draft need not be exact, and half the bytes take half the time. The product of `pre`'s second half with
`post` is computed once, so that the fed-back state keeps the drafter's width. One sequence only (`most`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor

from ...types import MAX_DRAFT, AttnSpec, DraftEnd, DraftNoise, KVView
from . import draft_steps_kernel as kernels
from .common import LOG2E
from .quant_config import sm_count


@dataclass(frozen=True)
class StepTiles:
    """How each product is cut. Tiles live in registers: rows times columns over 32 · warps threads."""

    q: tuple[int, int] = (16, 4)  # rows, warps
    gate: tuple[int, int] = (16, 8)
    out: tuple[int, int, int] = (32768, 2, 8)  # elements, parts of the sum (more where a row has more), warps
    down: tuple[int, int, int] = (8192, 1, 4)
    pre: tuple[int, int] = (16, 4)
    head: tuple[int, int, int] = (16, 4, 4)  # rows, warps, programs per SM
    # Of attention: programs (K/V heads times splits; half where heads are wider than 256), warps, keys per block.
    attend: tuple[int, int, int] = (256, 8, 32)
    chunk: int = 1024  # columns of the input per program


def unsupported(drafter: Any) -> str | None:
    """Why this drafter must take the plain steps."""
    config = drafter.config
    if not config.gemma or config.clusters or config.taps:
        return "not one of Gemma 4's larger drafters"
    layers = (m for b in drafter.blocks for m in (b.qkv, b.out, b.gate_up, b.down))
    if not all(isinstance(m, Tensor) for m in (drafter.pre, drafter.post, drafter.head, *layers)):
        return "packed weights"
    specs = [b.spec for b in drafter.blocks]
    numbers = [config.hidden, config.vocab_size, *(b.down.shape[1] for b in drafter.blocks)]
    numbers += [n for s in specs for n in (s.heads * s.head_dim, s.head_dim)]
    if any(n.bit_count() != 1 for n in numbers) or any(s.head_dim < 32 or s.heads // s.kv_heads > 16 for s in specs):
        return "sizes that are no powers of two"
    return None


def tile_for(k: int, h: int, cut: tuple[int, int, int]) -> tuple[int, int, int]:
    """Rows, parts and warps for a product over k columns."""
    elements, parts, warps = cut
    parts = max(parts, k // elements)
    return min(h, elements * parts // k), parts, warps


def rounded(dense: Tensor) -> tuple[Tensor, Tensor]:
    """int8 [N, K] as words [N, K / 4], and one float32 factor a row, in pieces: no float32 copy of a whole head."""
    out = dense.new_empty(dense.shape, dtype=torch.int8)
    factors = dense.new_empty(len(dense), dtype=torch.float32)
    for x, to, factor in zip(dense.split(32768), out.split(32768), factors.split(32768)):
        factor.copy_(x.float().abs().amax(1).clamp_min(1e-30) / 127.0)
        to.copy_((x.float() / factor[:, None]).round())
    return out.view(torch.int32), factors


class SteppedDrafter:
    """The drafter's own methods, and `draft` for a whole round."""

    has_runner_ups = True
    most = 1  # sequences in a round: more are faster step by step, where products share the weights among rows

    def __init__(self, drafter: Any, cuts: StepTiles = StepTiles(), pdl: bool = False, sms: int | None = None):
        """pdl: as TritonOps; sms: None asks the device."""
        config = drafter.config
        device = drafter.device
        self.drafter = drafter
        self.config = config
        self.ops = drafter.ops
        self.target = drafter.target
        self.start = drafter.start
        self.step = drafter.step
        self.candidates = drafter.candidates
        self.cluster_ids: Tensor | None = drafter.cluster_ids
        self.asm = device.type != "cpu"  # the interpreter has no inline instructions
        self.table_scale = float(torch.tensor(self.target.config.embed_scale, dtype=drafter.dtype))
        self.cuts = cuts
        tiles = config.vocab_size // cuts.head[0]
        most = (sms or sm_count(device)) * cuts.head[2]
        self.programs = triton.cdiv(tiles, triton.cdiv(tiles, most))  # as many tiles for each
        self.launch: dict[str, int] = dict(PDL=pdl, num_stages=1, launch_pdl=pdl)
        self._pack(cuts.chunk)
        self._allocate()

    def _pack(self, chunk: int) -> None:
        drafter = self.drafter
        h = self.config.hidden
        wide = self.config.backbone_hidden
        self.chunks = triton.cdiv(wide, chunk)
        pre = torch.zeros((2 * self.chunks + 1, h, chunk), dtype=drafter.dtype, device=drafter.device)
        for i in range(self.chunks):
            left = i * chunk
            right = min((i + 1) * chunk, wide)
            pre[i, :, : right - left] = drafter.pre[:, left:right]
            pre[self.chunks + i, :, : right - left] = drafter.pre[:, wide + left : wide + right]
        pre[-1, :, :h] = (drafter.pre[:, wide:].float() @ drafter.post.float()).to(drafter.dtype)
        self.pre = rounded(pre.view(-1, chunk))
        self.head = rounded(drafter.head)
        self.layers = [tuple(rounded(m) for m in (b.qkv, b.out, b.gate_up, b.down)) for b in drafter.blocks]

    def _splits(self, spec: AttnSpec) -> tuple[int, int]:
        """Splits of the keys, and keys a block: enough programs for every SM, and a block that fits their registers."""
        splits = max(1, min(64, self.cuts.attend[0] // (2 if spec.head_dim > 256 else 1) // spec.kv_heads))
        return splits, 16 if spec.kv_heads <= 2 else self.cuts.attend[2]

    def _allocate(self) -> None:
        drafter = self.drafter
        h = self.config.hidden
        specs = [b.spec for b in drafter.blocks]
        wide = max(s.heads * s.head_dim for s in specs)
        inter = max(b.down.shape[1] for b in drafter.blocks)
        self.down_parts = tile_for(inter, h, self.cuts.down)[1]
        parts = max(self.down_parts, tile_for(wide, h, self.cuts.out)[1])
        floats = partial(torch.zeros, dtype=torch.float32, device=drafter.device)
        # the stream before attention, before the MLP
        self.before = floats(h)
        self.between = floats(h)
        self.y = floats(parts, h)
        self.inputs = floats(2 * self.chunks, h)
        self.q = floats(wide)
        self.g = floats(h)
        self.part = floats(max(s.heads * self._splits(s)[0] * s.head_dim for s in specs))
        self.ml = floats(max(s.heads * self._splits(s)[0] for s in specs), 2)
        self.mixed, self.act, self.kept = (floats(size).view(torch.int32) for size in (wide, inter, h))
        line = -(-self.programs // 64) * 64  # every step begins at a line of its own
        self.best = floats(MAX_DRAFT, line)
        self.ids = floats(MAX_DRAFT, line).view(torch.int32)

    def draft(
        self, last: Tensor, features: Tensor, kv: KVView, steps: int, noise: DraftNoise, end: DraftEnd | None = None
    ) -> tuple[Tensor, None, Tensor]:
        """Tokens [B, steps] as ops.cpu's drafter guesses them; no confidence, so that drafts never end themselves."""
        out = torch.empty((1, steps), dtype=torch.int64, device=last.device)
        state = self.drafter.start(kv, features)
        noise = noise._replace(sampled=noise.sampled.view(torch.uint8))
        for step in range(steps):
            self._pre(last, features, out, step=step)
            for i in range(len(self.layers)):
                self._layer(i, state, step == 0)
            self._head(noise, step)
        kernels.finish_kernel[(1,)](
            self.best[steps - 1], self.ids[steps - 1], out, steps - 1, PROGRAMS=self.programs,
            SPACE=triton.next_power_of_2(self.programs), num_warps=4, **self.launch,
        )
        return out, None, torch.full_like(last, steps)

    def runner_ups(self, steps: int) -> tuple[Tensor, Tensor]:
        """Tokens that one program of the head scored hide each other: of several hundred programs, two of the best
        rarely share one."""
        return self.best[None, :steps, : self.programs], self.ids[None, :steps, : self.programs]

    def _pre(self, last: Tensor, features: Tensor, out: Tensor, step: int) -> None:
        h = self.config.hidden
        rows, warps = self.cuts.pre
        kernels.pre_kernel[(h // rows, 2 * self.chunks if step == 0 else self.chunks + 1)](
            *self.pre, self.target.table, features, self.g, last, self.best[max(0, step - 1)],
            self.ids[max(0, step - 1)], out, self.inputs, self.table_scale, step, H=h, HB=self.config.backbone_hidden,
            KC=self.cuts.chunk, CHUNKS=self.chunks, BN=rows, FIRST=step == 0, PROGRAMS=self.programs,
            SPACE=triton.next_power_of_2(self.programs), ASM=self.asm, num_warps=warps, **self.launch,
        )

    def _ready(self, stream: tuple[Tensor, ...], to: Tensor, last: bool, **how: int) -> None:
        """stream: what `stream_of` takes, and the norm after it."""
        kernels.ready_kernel[(1,)](
            *stream, self.kept, to, H=self.config.hidden, LAST=last, EPS=self.config.norm_eps, num_warps=4, **how,
            **self.launch,
        )

    def _rows(
        self, weights: tuple[Tensor, Tensor], stream: tuple[Tensor, ...], to: Tensor, out: Tensor, gated: bool,
        **how: int,
    ) -> None:
        """q or gate_up: of norm(stream), which is kept in `to`."""
        rows, warps = self.cuts.gate if gated else self.cuts.q
        if gated:
            self._ready(stream, to, False, **how)
        n = weights[0].shape[0] // (2 if gated else 1)
        kernels.rows_kernel[(n // rows,)](
            *weights, self.kept, *stream, to, out, H=self.config.hidden, N=n, BN=rows, GATED=gated,
            ACTIVATION=self.config.activation, EPS=self.config.norm_eps, ASM=self.asm, num_warps=warps, **how,
            **self.launch,
        )

    def _wide(self, weights: tuple[Tensor, Tensor], x: Tensor, k: int, cut: tuple[int, int, int]) -> int:
        """out or down, into `y`; in how many parts."""
        h = self.config.hidden
        rows, parts, warps = tile_for(k, h, cut)
        kernels.wide_kernel[(h // rows, parts)](
            *weights, x, self.y, H=h, K=k, BN=rows, PARTS=parts, ASM=self.asm, num_warps=warps, **self.launch
        )
        return parts

    def _layer(self, i: int, state: Any, first: bool) -> None:
        block = self.drafter.blocks[i]
        ahead = self.drafter.blocks[max(0, i - 1)]
        kv = state.kv
        qkv, out, gate_up, down = self.layers[i]
        spec: AttnSpec = block.spec
        stream = (self.between if i else self.inputs, self.y, ahead.post_mlp_norm, ahead.scalar, block.attn_norm)
        chunks = 0
        if i == 0:
            chunks = 2 * self.chunks if first else self.chunks + 1
        self._rows(qkv, stream, self.before, out=self.q, gated=False, CHUNKS=chunks, PARTS=self.down_parts, SCALED=True)
        keys = kv.keys[spec.kv_layer]
        values = kv.values[spec.kv_layer]
        table = kv.tables[spec.group]
        splits, block_keys = self._splits(spec)
        same = dict(HEADS=spec.heads, D=spec.head_dim, WINDOW=spec.window or 0, S=splits, BN=block_keys, **self.launch)
        kernels.attend_kernel[(spec.kv_heads * splits,)](
            self.q, keys, values, table, kv.positions, *state.angles[block.rope], block.q_norm, self.part, self.ml,
            keys.stride(0), SCALE=spec.scale * LOG2E, KV_HEADS=spec.kv_heads, PAGE=kv.page_size, EPS=spec.eps,
            num_warps=self.cuts.attend[1], **same,
        )
        piece = min(64, spec.head_dim)
        kernels.combine_kernel[(spec.heads, spec.head_dim // piece)](
            self.part, self.ml, kv.positions, self.mixed, BD=piece, num_warps=4, **same
        )
        parts = self._wide(out, self.mixed, spec.heads * spec.head_dim, cut=self.cuts.out)
        stream = (self.before, self.y, block.post_attn_norm, block.scalar, block.mlp_norm)
        self._rows(gate_up, stream, self.between, out=self.act, gated=True, CHUNKS=0, PARTS=parts, SCALED=False)
        self._wide(down, self.act, block.down.shape[1], cut=self.cuts.down)

    def _head(self, noise: tuple[Tensor, ...], step: int) -> None:
        block = self.drafter.blocks[-1]
        rows, warps, _ = self.cuts.head
        stream = (self.between, self.y, block.post_mlp_norm, block.scalar, block.next_norm)
        self._ready(stream, self.g, True, CHUNKS=0, PARTS=self.down_parts, SCALED=True)
        kernels.head_kernel[(self.programs,)](
            *self.head, self.kept, self.best[step], self.ids[step], *noise, step, H=self.config.hidden,
            V=self.config.vocab_size, BN=rows, PROGRAMS=self.programs, ASM=self.asm, num_warps=warps, **self.launch,
        )
