"""Triton's interpreter for tests: `tl.dot` adds along k in one fixed order, for each output element alone.

The interpreter's own dot is numpy's matmul. Its BLAS picks a kernel, and with it the order of summation, by processor
and by the number of rows, so a bitwise test would show a property of BLAS. Here each term is one elementwise product
and one elementwise addition: the same bits on every machine and in every shape.

A device function that a kernel calls finds the language patched already; the interpreter would search all of it again
at every call, which is a quarter of the time of a launch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

Dot = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]


def dot(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """c + a [..., m, k] @ b [..., k, n], added to c from k = 0: a dot in two parts is a dot in one. Integers are exact
    in any order."""
    if a.dtype.kind != "f":
        return np.matmul(a, b) + c
    out = np.array(np.broadcast_to(c, (*a.shape[:-1], b.shape[-1])))
    term = np.empty_like(out)
    for k in range(a.shape[-1]):
        np.multiply(a[..., k, None], b[..., None, k, :], out=term)
        out += term
    return out


def row_dependent(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Imitates a BLAS: tiles of more than 16 rows add k from its other end. The suite must fail with it."""
    return dot(a, b, c) if a.shape[-2] <= 16 else dot(a[..., ::-1], b[..., ::-1, :], c)


def install(product: Dot = dot) -> Callable[[], None]:
    """Give the interpreter this dot; returns what restores the one it had."""
    from triton import language as tl
    from triton.runtime import interpreter

    builder: Any = interpreter.InterpreterBuilder
    before = builder.create_dot

    def widen(x: Any, dtype: np.dtype) -> np.ndarray:
        data = x.data
        if x.dtype.primitive_bitwidth == 8 and x.dtype.is_floating():
            data = interpreter._convert_float(data, x.dtype, tl.float16, None).view(np.float16)
        return data.astype(dtype)

    def create_dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
        dtype = d.data.dtype
        return interpreter.TensorHandle(product(widen(a, dtype), widen(b, dtype), d.data), d.dtype.scalar)

    builder.create_dot = create_dot
    patch_lang = interpreter._patch_lang
    if not hasattr(patch_lang, "once"):
        interpreter._patch_lang = patched_once(patch_lang, interpreter._LangPatchScope)
    return lambda: setattr(builder, "create_dot", before)


def patched_once(patch_lang: Callable[[Any], Any], nothing: Callable[[], Any]) -> Callable[[Any], Any]:
    """`_patch_lang` that does nothing where the modules of the language that a function sees are patched: no member is
    a builtin then."""
    from triton import language as tl

    def patch(fn: Any) -> Any:
        seen = [lang for lang in (tl, tl.core) if any(value is lang for value in fn.__globals__.values())]
        return nothing() if seen and not any(tl.core.is_builtin(lang.load) for lang in seen) else patch_lang(fn)

    patch.once = True  # type: ignore[attr-defined]
    return patch
