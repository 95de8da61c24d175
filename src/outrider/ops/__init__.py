"""Choose the ops once: `choose(device, name)` returns the object that every model is handed."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from ..types import OutriderError

if TYPE_CHECKING:
    import torch

    from .backend import Backend

NAMES = ("auto", "reference", "cpu", "triton")
log = logging.getLogger("outrider")


def choose(device: torch.device | str, name: str = "auto", threads: int | None = None) -> Backend:
    """`auto`: Triton kernels on a GPU, C kernels on the CPU; the torch reference where these can't be had (one line says why).
    A name that was asked for is given or refused."""
    from .reference import ReferenceOps

    kind = str(device).partition(":")[0]
    if name not in NAMES:
        raise OutriderError(f"unknown ops {name!r}; known: {', '.join(NAMES)}")
    wanted = name if name != "auto" else {"cpu": "cpu", "cuda": "triton"}.get(kind, "reference")
    try:
        if wanted == "cpu":
            if kind != "cpu":
                raise OutriderError(f"--ops cpu runs on the CPU, not on {kind}")
            from .cpu.ops import CpuOps

            return CpuOps(threads)
        if wanted == "triton":
            from .triton import TritonOps

            return TritonOps(device)
    except OutriderError:
        raise
    except Exception as error:  # no compiler, no triton, a broken toolchain: anything may be missing on a user's machine
        if name != "auto":
            raise OutriderError(f"--ops {name} is not available here: {error}") from error
        log.warning("no %s kernels (%s): using the plain torch operators", wanted, error)
    return ReferenceOps()
