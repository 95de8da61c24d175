"""How attention splits keys, and the tile of one program.

`ReductionSpec` belongs to a layer: it fixes the order of sums. `AttentionConfig` belongs to a pass: it follows from the
number of sequences, rows and keys, changes no bit and was measured (docs/gpu-measured.md).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton

from ...types import AttnSpec, KVView
from .fp8_kv import is_fp8
from .gemm_config import MAX_SMEM

WIDE_HEAD_SMEM = 200 << 10  # bytes of shared memory for the tiles of heads of 512
# bytes of partial sums: beyond them one program adds up its own splits, though fewer programs share the work
MAX_PARTIAL_BYTES = 1 << 30
MIN_QUERIES = 200  # rows of a sequence times the heads that share a K/V head, from which a pass is one of prompts


@dataclass(frozen=True)
class ReductionSpec:
    """How keys are split: fixes the order of sums. A function of the layer, never of the rows, the batch or the
    length."""

    bn: int  # keys per block; one block's weights are computed together
    fine: int = 64  # keys per split
    # Full layers: splits of `fine` keys up to `near`, of `mid` up to `far`, then of `coarse`. Short contexts need many
    # programs; long ones have them anyway, and the partial results must stay bounded.
    near: int = 1024
    mid: int = 128
    far: int = 8192
    coarse: int = 512


@dataclass(frozen=True)
class AttentionConfig:
    """The tile of one program of a pass; changes no bit."""

    split: bool  # splits are stored separately: a second kernel adds them up
    bq: int  # queries: rows times the heads that share a K/V head
    warps: int
    stages: int = 2
    run: int = 1  # splits per program, if they are stored separately
    parts: int = 1  # programs that share the columns of the values, if they are not


def choose_reduction(spec: AttnSpec, dtype: torch.dtype, shared: int = MAX_SMEM) -> ReductionSpec:
    """Measured on an H200 at 1, 5, 9 and 17 rows of 1k and 4k. shared: bytes a program may take; 64 keys and values of
    512 need 128 KiB."""
    if dtype == torch.float32:
        return ReductionSpec(16, 128)
    if spec.head_dim < 256:
        return ReductionSpec(32, 64 if spec.head_dim < 128 else 32)
    wide = (spec.window is not None and spec.kv_heads >= 8) or (spec.window is None and spec.heads >= 16)
    if wide and (spec.head_dim <= 256 or shared > WIDE_HEAD_SMEM):
        return ReductionSpec(64, 64, coarse=256 if spec.head_dim > 256 else 512)  # 256: what attention_wgmma takes
    return ReductionSpec(32, 32, coarse=256)


def fit_smem(shape: AttentionConfig, spec: AttnSpec, shared: int) -> AttentionConfig:
    """Adapts a shape to a card where a program may use less shared memory than on the measured one: fewer queries.
    Changes no bit."""
    if shared > WIDE_HEAD_SMEM or spec.head_dim < 256:
        return shape
    large = spec.head_dim > 256
    return replace(shape, bq=min(shape.bq, 16 if large else 32), stages=min(shape.stages, 2))


def many_seqs_config(spec: AttnSpec, cut: ReductionSpec, kv: KVView, batch: int, slots: int) -> AttentionConfig | None:
    """For E2B and E4B from 32 sequences on, whose programs are few and wait for one block after the other. Measured on
    E2B with 32 to 128 sequences of 1 and 5 rows at 1k, in whole steps with 64 and 128; K/V of eight bits with 64 at 1k
    and 3k."""
    packed = kv.max_rows * (spec.heads // spec.kv_heads)
    pairs = batch * spec.kv_heads
    if spec.head_dim < 256 or cut.bn != 32 or cut.fine != 32 or kv.ancestors is not None or slots > 64:
        return None
    eight = is_fp8(kv, spec)
    if 16 < packed <= 64 and pairs >= 32:  # a tile of 64 queries, among whose rows nothing is exchanged
        if spec.window is not None:
            return AttentionConfig(split=False, bq=64, warps=4, stages=4 if pairs <= 66 else 3, parts=2)
        if pairs * triton.cdiv(packed, 16) <= 132:
            return AttentionConfig(split=False, bq=16, warps=8, stages=3)
        return (
            AttentionConfig(False, 32, 8) if eight else AttentionConfig(split=False, bq=64, warps=8, stages=3, parts=2)
        )
    if packed <= 16 and pairs >= 48 and spec.window is None:  # two programs share a pair if each gets an SM
        few = pairs <= 66
        return AttentionConfig(
            split=False, bq=16, warps=4 if few else 8, stages=3 if eight or not few else 4, parts=2 if few else 1
        )
    return None


def prefill_config(spec: AttnSpec, cut: ReductionSpec, kv: KVView, batch: int) -> AttentionConfig:
    """For chunks. Measured on an H200 with 512 and 2,048 rows of 31B and E2B that begin at 0, 2,488 and 6,000."""
    queries = kv.max_rows * (spec.heads // spec.kv_heads)
    large = spec.head_dim > 256
    eight = is_fp8(kv, spec)
    tiles = batch * spec.kv_heads * triton.cdiv(queries, 64)
    if not large:
        return (
            AttentionConfig(split=False, bq=32, warps=4, stages=3)
            if eight and spec.window is not None
            else AttentionConfig(False, 64, 8)
        )
    if eight and cut.bn == 32:
        return AttentionConfig(False, 32, 4 if kv.max_context > 4096 and tiles > 132 else 8)
    return AttentionConfig(False, 32 if cut.bn == 64 or tiles <= 132 else 64, 8)


def choose_config(spec: AttnSpec, cut: ReductionSpec, kv: KVView, batch: int, dtype: torch.dtype) -> AttentionConfig:
    """Measured on an H200 with 1 to 64 sequences of 1, 5 and 1,024 rows at 1k, and of 1 and 5 rows at 32k; 31B's also
    at 3k and 8k, and in eight bits."""
    packed = kv.max_rows * (spec.heads // spec.kv_heads)
    slots = split_count(spec, kv, cut)
    programs = batch * spec.kv_heads * triton.cdiv(packed, 16)  # if one takes 16 queries and all their keys
    sliding = spec.window is not None
    large = spec.head_dim > 256
    eight = is_fp8(kv, spec)
    if dtype == torch.float32:
        return AttentionConfig(kv.ancestors is not None or (slots > 1 and programs < 396), 16, 8)
    many = many_seqs_config(spec, cut, kv, batch=batch, slots=slots)
    if many is not None:
        return many
    if packed > MIN_QUERIES and kv.ancestors is None:
        return prefill_config(spec, cut, kv, batch=batch)
    if sliding:
        enough = 128 if cut.bn == 64 or packed <= 16 else 64
    elif slots > 64:
        enough = 132 if cut.bn == 64 else 264
    else:
        enough = 96 if packed > 16 or cut.bn == 64 else 128
    apart = batch * kv.max_rows * spec.heads * slots * spec.head_dim * 4  # bytes of partial sums
    if kv.ancestors is None and (slots == 1 or programs >= enough or apart > MAX_PARTIAL_BYTES):
        if sliding and cut.bn == 64:
            return AttentionConfig(
                split=False, bq=16, warps=8 if programs <= 132 else 4, stages=3 if eight or programs <= 132 else 2
            )
        if sliding:
            return AttentionConfig(split=False, bq=16, warps=4, stages=3)
        if large and cut.bn == 32 and packed <= 16:
            return AttentionConfig(split=False, bq=16, warps=8, stages=3)
        if cut.bn == 64 and programs >= 132 and packed > 16:
            return AttentionConfig(False, 32, 8)
        return AttentionConfig(
            split=False, bq=16, warps=4 if cut.bn == 32 else 8, stages=3 if eight and cut.bn == 64 else 2
        )
    if kv.ancestors is not None and cut.bn == 64 and packed > 16:
        few = AttentionConfig(split=True, bq=32, warps=8, stages=1) if large else AttentionConfig(True, 32, 4)
    elif eight and kv.ancestors is None and (cut.bn == 64 or (large and packed > 16)):
        # half the bytes: two programs fit an SM
        few = AttentionConfig(True, 16, 8 if large and batch == 1 and packed <= 16 else 4)
    elif packed <= 16 or sliding or batch == 1 or kv.ancestors is not None:
        few = AttentionConfig(True, 16, 8 if (cut.bn == 64 and large) or batch == 1 else 4)
    else:
        few = AttentionConfig(True, 64 if cut.bn == 32 else 32, 8)
    programs = batch * spec.kv_heads * triton.cdiv(packed, few.bq)
    most = 1
    if slots <= 64:
        most = 8
    elif large and cut.bn == 64 and batch > 1 and kv.ancestors is None:
        most = 4
    if few.bq == 64 or (eight and cut.bn == 32 and packed > 16):
        most = 1
    run = programs * slots // (128 if large and cut.bn == 64 and few.warps == 8 else 256)
    return replace(few, run=next(r for r in (8, 4, 2, 1) if r <= max(1, min(run, most))))


def split_count(spec: AttnSpec, kv: KVView, cut: ReductionSpec) -> int:
    """Number of slots that cover every key that a row of this pass can see. Computed on the host, so that a captured
    grid stays valid."""
    length = kv.max_context
    if spec.window is not None:
        return min(triton.cdiv(length, cut.fine), (spec.window + kv.max_rows - 2) // cut.fine + 2)
    keys = (min(length, cut.near), min(length, cut.far) - cut.near, length - cut.far)
    return sum(triton.cdiv(max(0, n), size) for n, size in zip(keys, (cut.fine, cut.mid, cut.coarse)))
