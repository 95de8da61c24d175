"""Formats of weights, one a file. The seam is in `base`: `Weight`, `Format`, and what a backend makes of them, `Held`."""

from .base import Format, Held, Packed, Unit, Weight, join, stack
from .dense import Dense, dense
from .gguf import BLOCKS, Block, QuantPart

__all__ = ["BLOCKS", "Block", "Dense", "Format", "Held", "Packed", "QuantPart", "Unit", "Weight", "dense", "join", "stack"]
