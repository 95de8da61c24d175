"""Weight formats, one per file. The interface is in `base`: `Weight`, `Format`, and `DeviceWeight`, a weight packed by
a backend."""

# ruff: noqa: F401
from .base import DeviceWeight, Format, Packed, Unit, Weight, join, stack, stays_dense
from .dense import DenseFormat, dense
from .fp8 import Float8Format
from .gguf import BLOCKS, GGUFBlockFormat
from .integer import IntegerFormat
from .nvfp4 import NvFp4Format, scaled_nvfp4
from .rounded import MODES, rounded_to
