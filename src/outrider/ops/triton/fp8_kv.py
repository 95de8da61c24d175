"""Loads keys and values as operands of matrix products, from the compute dtype or from 8 bits.

In 8 bits, a 16-bit word holds two neighbouring columns, and a product runs over the even columns and then over the odd
ones: this is the order of its sums at every number of rows and in every kernel (queries are sorted likewise; for values
it only decides where a sum is stored). Kernels load words and get both halves as a tuple.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...types import AttnSpec, KVView
from .unpack import PAIRS, PAIRS_TO_HALVES, plain_value


def is_fp8(kv: KVView, spec: AttnSpec) -> bool:
    keys = kv.keys[spec.kv_layer] if kv.keys else None
    return keys is not None and keys.itemsize == 1


def kv_tensors(kv: KVView, spec: AttnSpec) -> tuple[Tensor, Tensor]:
    """A layer's keys and values as kernels take them: of eight bits as words of two columns."""
    keys = kv.keys[spec.kv_layer]
    values = kv.values[spec.kv_layer]
    assert keys is not None and values is not None
    return (keys.view(torch.int16), values.view(torch.int16)) if keys.itemsize == 1 else (keys, values)


@triton.jit
def widen_columns(x, KIND: tl.constexpr, ASM: tl.constexpr):
    """Keys or values as matrix products of KIND take them: a tuple of what was given; or, where words of 16 bits hold
    two neighbouring columns of eight bits, exactly, the even columns and the odd ones.

    Words, because the compiler then fetches and hands them out as it does bfloat16: a thread gets in one instruction
    what it multiplies and widens it where it is. Bytes it would give to other threads, four neighbouring columns each
    at some numbers of rows, and sums would round differently; or, not seen through, it would exchange them once more
    through shared memory, which took longer than bfloat16 takes."""
    if x.dtype == KIND:
        return (x,)
    elif ASM and tl.bfloat16 == KIND:
        return tl.inline_asm_elementwise(PAIRS, "=r,=r,r", [x], dtype=(tl.bfloat16,) * 2, is_pure=True, pack=2)
    elif ASM and tl.float16 == KIND:
        return tl.inline_asm_elementwise(PAIRS_TO_HALVES, "=r,=r,r", [x], dtype=(tl.float16,) * 2, is_pure=True, pack=2)
    else:
        bits = x.to(tl.int32)
        return plain_value(bits & 255, "fp8").to(KIND), plain_value((bits >> 8) & 255, "fp8").to(KIND)


@triton.jit
def sorted_columns(query, PLANES: tl.constexpr):
    """Queries as `_fetch` gives keys: a tuple."""
    if PLANES == 1:
        return (query,)
    else:
        return tl.split(tl.reshape(query, (query.shape[0], query.shape[1] // 2, 2)))


@triton.jit
def join_columns(acc):
    """Interleaves the sums of even and of odd columns."""
    if len(acc) == 1:
        return acc[0]
    else:
        return tl.reshape(tl.join(acc[0], acc[1]), (acc[0].shape[0], 2 * acc[0].shape[1]))


@triton.jit
def scores_of(query, kt, PREC: tl.constexpr):
    """[BQ, BN]: one chain over all columns, in K/V of eight bits over the even ones and then over the odd ones."""
    s = tl.dot(query[0], tl.trans(kt[0]), input_precision=PREC)
    if len(kt) == 2:
        s = tl.dot(query[1], tl.trans(kt[1]), s, input_precision=PREC)
    return s


@triton.jit
def zero_sums(BQ: tl.constexpr, COLS: tl.constexpr, PLANES: tl.constexpr):
    """A tile's sums of the values before the first key: a tuple, as `_fetch` gives values."""
    if PLANES == 1:
        return (tl.zeros((BQ, COLS), dtype=tl.float32),)
    else:
        return tl.zeros((BQ, COLS // 2), dtype=tl.float32), tl.zeros((BQ, COLS // 2), dtype=tl.float32)
