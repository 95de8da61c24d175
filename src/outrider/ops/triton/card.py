"""The graphics card that kernels are chosen for, queried once when the ops are created."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from ..cuda.runtime import missing
from .quant_config import max_smem, sm_count

log = logging.getLogger("outrider")
HOPPER = (9, 0)


@dataclass(frozen=True)
class Card:
    """Properties of the graphics card that the choice of a kernel depends on. Without a card (the interpreter, kernels
    that are only compiled) they are those of an H200."""

    name: str
    capability: tuple[int, int]
    sms: int
    shared: int  # bytes of shared memory that a program may take
    cuda: bool  # CUDA C++ kernels compile and run; on Hopper, for which they are written, their bits equal Triton's
    hopper: bool  # tiles of prompts were measured here

    @property
    def identity(self) -> str:
        major, minor = self.capability
        return f"{self.name} (sm_{major}{minor}, {self.sms} SMs, {self.shared >> 10} KiB)"

    @property
    def real(self) -> bool:
        return self.capability != (0, 0)

    @property
    def pdl(self) -> bool:
        """True if the card has programmatic dependent launch."""
        return self.capability >= HOPPER

    @staticmethod
    def of(device: torch.device) -> Card:
        if device.type != "cuda":
            return Card("no card", (0, 0), sm_count(device), shared=max_smem(device), cuda=False, hopper=True)
        capability = torch.cuda.get_device_capability(device)
        name = torch.cuda.get_device_properties(device).name
        reason = missing() if capability == HOPPER else None
        if reason is not None:
            log.warning("Triton's kernels serve everything, slower than those in CUDA C++: %s", reason)
        return Card(
            name=name,
            capability=capability,
            sms=sm_count(device),
            shared=max_smem(device),
            cuda=capability == HOPPER and reason is None,
            hopper=capability[0] == HOPPER[0],
        )
