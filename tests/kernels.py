"""Compiled kernels in tests. Those of the CPU are built once for all: in a cache of its own a test would have them
compiled anew, for half a minute or longer."""

from __future__ import annotations

import shutil
from pathlib import Path

from outrider.ops.cpu import build
from outrider.ops.cuda import runtime


def put_kernels(cache: Path) -> Path:
    """Into this cache, where a first start would have put them."""
    home = cache / "kernels"
    home.mkdir(parents=True)
    shutil.copy(build.shared_object(), home)
    return cache


def no_kernel(*_: object) -> None:
    """In place of `nvrtc_kernels.Kernel`: a compiler that fails."""
    raise runtime.CudaError("NVRTC gives no machine code")
