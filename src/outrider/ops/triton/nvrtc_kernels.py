"""CUDA C++ alternatives to Triton kernels with the same bits, compiled at first use. They are for Hopper, where their
bits were compared (`Card.cuda`). If one cannot be compiled, the registry rejects it and the next one serves."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from ..cuda.runtime import CudaError, Flags, Kernel
from ..registry import Unavailable
from .quant_config import max_smem, sm_count


class NvrtcKernels:
    """The kernels of one source on one device."""

    source: Path
    arch_specific = False  # uses instructions of one architecture only

    def __init__(self, device: torch.device, semaphores: Tensor):
        """semaphores: counters that every launch leaves at 0."""
        self.device = device
        self.semaphores = semaphores
        self.sms = sm_count(device)
        self.room = max_smem(device)
        self.compiled: dict[tuple[object, ...], Kernel] = {}

    def kernel(self, name: str, flags: Flags) -> Kernel:
        """A function of the source, compiled with these flags."""
        key = (name, *flags.items())
        if key not in self.compiled:
            try:
                source = self.source.read_text()
                self.compiled[key] = Kernel(
                    source, name, flags, device=self.device, shared=self.room, own=self.arch_specific
                )
            except CudaError as error:  # a toolchain may be broken in many ways
                raise Unavailable(f"{self.source.name}: {error}") from error
        return self.compiled[key]
