"""Kernels for NVIDIA GPUs, written in Triton. `TritonOps` is the twin of `reference.ReferenceOps`."""

from .ops import TritonOps

__all__ = ["TritonOps"]
