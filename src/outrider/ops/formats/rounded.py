"""What `--quantize` makes of a dense matrix on a GPU: which format, by the matrix's shape. (CPUs have formats of their own.)"""

from __future__ import annotations

from collections.abc import Sequence

from .base import Format, stays_dense
from .fp8 import Float8
from .integer import Integer

MODES: dict[str, tuple[Format, ...]] = {  # the first whose groups divide the rows
    "int4": (Integer(4, 32), Integer(4, 16)),
    "int8": (Integer(8, 128), Integer(8, 0)),
    "fp8": (Float8(),),
}


def rounded_to(mode: str, shape: Sequence[int]) -> Format | None:
    """None: it stays dense."""
    fit = (f for f in MODES[mode] if f.border() <= 1 or shape[-1] % f.border() == 0)
    return None if stays_dense(shape) else next(fit, None)
