"""Backend selection: `choose(device, name)` returns the ops object that is passed to every model."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

from ..types import OutriderError, require

if TYPE_CHECKING:
    import torch

    from .reference import Backend

NAMES = ("auto", "reference", "cpu", "triton")
log = logging.getLogger("outrider")


def choose(device: torch.device | str, name: str = "auto", threads: int | None = None) -> Backend:
    """`auto`: Triton kernels on a GPU, C kernels on the CPU; the torch reference if these are not available (one line
    says why). An explicit name is used or refused; `cpu:avx2` selects the C kernels of a certain level, `triton:dense`
    Triton kernels over weights in 16 bits, whatever the file holds (more memory, fewer kernels to compile)."""
    from .reference import ReferenceOps

    kind = str(device).partition(":")[0]
    plain, _, level = name.partition(":")
    if plain not in NAMES or (level and plain != "cpu" and name != "triton:dense"):
        raise OutriderError(f"unknown ops {name!r}; known: {', '.join(NAMES)}, cpu:LEVEL, triton:dense")
    wanted = plain if name != "auto" else {"cpu": "cpu", "cuda": "triton"}.get(kind, "reference")
    try:
        if wanted == "cpu":
            require(kind == "cpu", f"--ops cpu runs on the CPU, not on {kind}")
            from ..platforms.processor import usable_cores
            from .cpu.ops import CpuOps

            require(threads is None or threads >= 1, f"--threads must be at least 1, got {threads}")
            cores = usable_cores()
            if threads is not None and threads > cores:
                log.warning("--threads %d is more than the %d cores this process may use", threads, cores)
                threads = cores
            return CpuOps(threads, level or None)
        if wanted == "triton":
            if kind == "cpu" and "TRITON_INTERPRET" not in os.environ:
                raise OutriderError(f"--ops {name} runs on a GPU, not on the CPU: leave out --ops")
            from .triton import DenseTritonOps, TritonOps

            ops = DenseTritonOps(device) if level else TritonOps(device)
            if ops.card.real:
                from .triton.certify import apply_certification

                apply_certification(ops)
            return ops
    except OutriderError:
        raise
    except Exception as error:  # no compiler, no triton, a broken toolchain: anything may be missing
        if name != "auto":
            raise OutriderError(f"--ops {name} is not available here: {error}") from error
        log.warning("no %s kernels (%s): using plain torch operators, which are many times slower", wanted, error)
    return ReferenceOps()


def place(name: str | None) -> torch.device:
    """The device of that name, or the best available one."""
    import torch

    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError:
        device = torch.device("meta")
    # torch supports more of them (mps, xpu, ...), for which there are no kernels here
    require(device.type in ("cpu", "cuda"), f"unknown device {name!r}; known: cpu, cuda, cuda:N")
    if device.type == "cuda" and not (torch.cuda.is_available() and (device.index or 0) < torch.cuda.device_count()):
        have = f"{torch.cuda.device_count()} of them" if torch.cuda.is_available() else "none"
        seen = f"torch {torch.__version__} sees no such GPU here ({have})"
        raise OutriderError(f"--device {name}: {seen}: leave out --device to use the CPU")
    # setting a device requires its index
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device
