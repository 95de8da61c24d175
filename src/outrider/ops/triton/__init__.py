"""Kernels for NVIDIA GPUs, written in Triton. `TritonOps` implements the ops of `reference.ReferenceOps`, with
quantised weights; `DenseTritonOps` keeps all weights dense."""

from .ops import TritonOps as DenseTritonOps
from .quant_ops import QuantTritonOps as TritonOps

__all__ = ["DenseTritonOps", "TritonOps"]
