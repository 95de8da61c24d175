"""Kernels for NVIDIA GPUs, written in Triton. `TritonOps` implements the ops of `reference.ReferenceOps`, with
quantised weights; `DenseTritonOps` keeps all weights dense."""

from .ops import DenseTritonOps, TritonOps

__all__ = ["DenseTritonOps", "TritonOps"]
