"""Sizes of GGUF's block formats. Torch-free: headers of files are checked with them."""

from __future__ import annotations

BLOCKS = {  # weights in a block, bytes of a block
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q8_0": (32, 34),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
    "IQ4_NL": (32, 18),
    "IQ4_XS": (256, 136),
}
