"""Kernels for NVIDIA GPUs, written in Triton. `TritonOps` is the twin of `reference.ReferenceOps`, with quantised weights."""

from .quantised import QuantTritonOps as TritonOps

__all__ = ["TritonOps"]
