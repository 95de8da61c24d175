"""Formats of weights, one a file. The seam is in `base`: `Weight`, `Format`, and what a backend makes of them, `Held`."""

from .base import Format, Held, Packed, Unit, Weight, join, stack, stays_dense
from .dense import Dense, dense
from .fp8 import Float8
from .gguf import BLOCKS, Block, QuantPart
from .integer import Integer
from .nvfp4 import NvFp4
from .rounded import MODES, rounded_to

__all__ = [
    "BLOCKS", "MODES", "Block", "Dense", "Float8", "Format", "Held", "Integer", "NvFp4", "Packed", "QuantPart", "Unit", "Weight", "dense",
    "join", "rounded_to", "stack", "stays_dense",
]  # fmt: skip
