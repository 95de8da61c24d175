"""CUDA C++ alternatives to Triton kernels with the same bits, compiled at first use. They are for Hopper, where both
gave the same bits; elsewhere, and where they cannot be compiled, Triton runs everything, and a line of the log says so.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from ..cuda.runtime import CudaError, Flags, Kernel, missing
from .quant_config import max_smem, sm_count

log = logging.getLogger("outrider")


class NvrtcKernels:
    """The kernels of one source on one device. `of` returns None, and logs why, if there are none."""

    source: Path
    what: str  # runs in Triton if there are none
    arch_specific = False  # they use instructions of this architecture alone

    def __init__(self, device: torch.device, semaphores: Tensor):
        """semaphores: counters that every launch leaves at 0."""
        self.device = device
        self.semaphores = semaphores
        self.sms = sm_count(device)
        self.room = max_smem(device)
        self.made: dict[tuple[object, ...], Kernel] = {}
        self.usable = True

    @classmethod
    def of(cls, device: torch.device, semaphores: Tensor) -> Self | None:
        if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
            return None
        reason = missing()
        if reason is not None:
            cls.say(reason)
            return None
        return cls(device, semaphores)

    @classmethod
    def say(cls, reason: object) -> None:
        log.warning("%s through Triton, slower: %s", cls.what, reason)

    def kernel(self, name: str, flags: Flags) -> Kernel | None:
        """A function of the source, compiled with these flags; None: it cannot be compiled."""
        key = (name, *flags.items())
        if key not in self.made:
            try:
                source = self.source.read_text()
                self.made[key] = Kernel(source, name, flags, self.device, self.room, self.arch_specific)
            except CudaError as error:  # a toolchain may be broken in many ways; Triton's kernels are the fallback
                self.say(error)
                self.usable = False
                return None
        return self.made[key]
