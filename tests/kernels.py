"""Compiled kernels in tests. Those of the CPU are built once for all: in a cache of its own a test would have them
compiled anew, for half a minute or longer."""

from __future__ import annotations

import ctypes
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


def fields(struct: type[ctypes.Structure]) -> str:
    """Its fields in order, and their types unless they are int."""
    names = [(name, kind.__name__.removeprefix("c_")) for name, kind, *_ in struct._fields_]
    return " ".join(name if kind == "int" else f"{name}:{kind}" for name, kind in names)


def no_kernel(*_: object, **__: object) -> None:
    """In place of `nvrtc_kernels.Kernel`: a compiler that fails."""
    raise runtime.CudaError("NVRTC gives no machine code")
