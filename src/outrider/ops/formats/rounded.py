"""Formats of `--quantize` on a GPU: which format a dense matrix gets, by its shape. (CPUs use other formats.)"""

from __future__ import annotations

from collections.abc import Sequence

from .base import Format, stays_dense
from .fp8 import Float8Format
from .integer import IntegerFormat

MODES: dict[str, tuple[Format, ...]] = {  # the first whose groups divide the rows
    "int4": (IntegerFormat(4, 32), IntegerFormat(4, 16)),
    "int8": (IntegerFormat(8, 128), IntegerFormat(8, 0)),
    "fp8": (Float8Format(),),
}


def rounded_to(mode: str, shape: Sequence[int]) -> Format | None:
    """The format for a matrix of this shape; None: it stays dense."""
    fit = (f for f in MODES[mode] if f.alignment() <= 1 or shape[-1] % f.alignment() == 0)
    return None if stays_dense(shape) else next(fit, None)
