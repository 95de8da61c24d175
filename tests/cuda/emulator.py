"""Kernels in CUDA C++ on a CPU: the sources of `ops/cuda`, compiled by g++ behind `emulate.h`, launched on torch
tensors.

    with Memory() as memory:  # tensors made in here end where unmapped memory begins
        kernel = memory.kernel(SOURCE.read_text(), "wna16_gemv", flags)
        kernel(blocks, threads, shared, [x.data_ptr(), ..., shape], pdl=False)

A kernel is called as `outrider.ops.cuda.runtime.Kernel` is, so what plans a launch for a GPU can plan one here. It
raises `EmulatorError`, one line that names block and thread, for what machine.cpp lists. `seed` draws the order in
which threads run; 0: one after the other.
"""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from outrider.ops.cuda.runtime import FOLDER

HERE = Path(__file__).parent
PAGE = mmap.PAGESIZE
GUARD = 0xFF  # NaN of every kind of float, -1 of every kind of integer
OPTIONS = (
    "-std=c++17",
    "-shared",
    "-fPIC",
    "-ffp-contract=off",
    "-fno-strict-aliasing",
    "-fno-exceptions",
    "-fno-rtti",
    "-U_FORTIFY_SOURCE",
    "-w",
)
OF_KERNELS = ("-O0", "-fsanitize=thread", "-nodefaultlibs")  # the machine is called at every load and store
MAKERS = (
    torch.empty,
    torch.zeros,
    torch.ones,
    torch.full,
    torch.empty_like,
    torch.zeros_like,
    Tensor.clone,
    Tensor.contiguous,
    Tensor.new_empty,
)


class EmulatorError(RuntimeError):
    """A forbidden operation of a kernel, or an error of the compiler."""


def missing() -> str | None:
    """Why nothing can be emulated here, or None."""
    return None if sys.platform == "linux" and shutil.which("g++") else "no g++ on Linux"


def compiled(source: str, name: str, flags: Mapping[str, int | str], folder: Path = FOLDER) -> ctypes.CDLL:
    """The program of a kernel. folder: of its headers."""
    ctypes.CDLL(str(_made((HERE / "machine.cpp").read_text(), ["-O3"], HERE, "*.h")), mode=ctypes.RTLD_GLOBAL)
    text = f'#include "emulate.h"\n#line 1 "{name}.cu"\n{source}\nEMULATED({name})\n'
    return ctypes.CDLL(
        str(_made(text, [*OF_KERNELS, *(f"-D{key}={value}" for key, value in flags.items())], folder, "*.cuh"))
    )


def _made(text: str, options: Sequence[str], folder: Path, headers: str) -> Path:
    """A library, in a folder of one's own among temporary files; compiled where the same was not compiled before."""
    parts = [
        text,
        *OPTIONS,
        *options,
        *(f.read_text() for f in (*sorted(HERE.glob("*.h")), *sorted(folder.glob(headers)))),
    ]
    cache = Path(tempfile.gettempdir()) / f"outrider-emulator-{os.getuid()}"
    cache.mkdir(mode=0o700, exist_ok=True)
    if cache.stat().st_uid != os.getuid():
        raise EmulatorError(f"{cache} is somebody else's")
    library = cache / (hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32] + ".so")
    if not library.exists():
        temporary = library.with_suffix(f".{os.getpid()}")
        command = [
            "g++",
            *OPTIONS,
            *options,
            f"-I{HERE}",
            f"-I{folder}",
            "-x",
            "c++",
            "-",
            "-lm",
            "-lc",
            "-o",
            str(temporary),
        ]
        done = subprocess.run(command, input=text, capture_output=True, text=True)
        if done.returncode:
            raise EmulatorError(done.stderr.strip())
        temporary.rename(library)
    return library


class Buffer(ctypes.Structure):
    """`Buffer` of interface.h."""

    _fields_ = [
        ("at", ctypes.c_void_p),
        ("bytes", ctypes.c_uint64),
        ("element", ctypes.c_uint64),
        ("ahead", ctypes.c_uint64),
    ]


class Launch(ctypes.Structure):
    """`Launch` of interface.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("values", "buffers", "message")),
        ("seed", ctypes.c_uint64),
        *(
            (name, ctypes.c_uint)
            for name in ("blocks", "threads", "shared", "buffer_count", "message_room", "overlaps")
        ),
    ]


class Memory(TorchFunctionMode):
    """Buffers that a kernel may touch. Each lies between two unmapped pages, its end (filled up to 16 bytes) right at
    the second one."""

    def __init__(self) -> None:
        super().__init__()
        self.overlaps = 1  # of kernels launched with pdl; 2: the kernel before the one ahead is done when they begin
        self.buffers: list[
            tuple[mmap.mmap, int, int, int, bool]
        ] = []  # the mapping, where in it the tensor begins; as `Buffer` has it

    def hold(self, tensor: Tensor, ahead: bool = False, empty: bool = False) -> Tensor:
        """A copy with the same shape and strides that kernels may touch. ahead: the kernel ahead writes it; empty:
        nothing is in it yet."""
        assert tensor.device.type == "cpu"
        size = tensor.element_size()
        count = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride())) if tensor.numel() else 0
        pages = -(-max(count * size, 1) // PAGE)
        mapping = mmap.mmap(-1, (pages + 2) * PAGE)
        mapping.write(bytes([GUARD]) * len(mapping))
        begin = (pages + 1) * PAGE - -(-count * size // 16) * 16
        self.buffers.append((mapping, begin, count * size, size, ahead))
        with torch._C.DisableTorchFunction():
            raw = torch.frombuffer(
                mapping, dtype=torch.uint8, count=max(count * size, 1), offset=begin if count else PAGE
            )
            copy = raw[: count * size].view(tensor.dtype).as_strided(tensor.shape, tensor.stride())
            if not empty:
                copy.copy_(tensor)
        libc = ctypes.CDLL(None, use_errno=True)
        whole = address_of(mapping)
        for page in (whole, whole + len(mapping) - PAGE):
            if libc.mprotect(ctypes.c_void_p(page), ctypes.c_size_t(PAGE), 0):
                raise OSError(ctypes.get_errno(), "mprotect")
        return copy

    def kernel(
        self, source: str, name: str, flags: Mapping[str, int | str], folder: Path = FOLDER, seed: int = 0
    ) -> Emulated:
        return Emulated(self, source, name, flags, folder, seed)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in MAKERS or result.device.type != "cpu":
            return result
        return self.hold(result, empty=func in (torch.empty, torch.empty_like, Tensor.new_empty))


def address_of(mapping: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(mapping))


class Emulated:
    """A kernel that touches the buffers of one memory. Called as `runtime.Kernel` is. pdl: it begins before the kernel
    ahead is done, so until it waits it writes nothing and reads nothing that was said to be of that kernel. Blocks are
    always together."""

    def __init__(self, memory: Memory, source: str, name: str, flags: Mapping[str, int | str], folder: Path, seed: int):
        self.memory = memory
        self.seed = seed
        self.launch = compiled(source, name, flags, folder).emulated_launch

    def __call__(
        self,
        blocks: int,
        threads: int,
        shared: int,
        values: Sequence[int | ctypes.Structure],
        pdl: bool = False,
        together: bool = False,
    ) -> None:
        arguments = [ctypes.c_void_p(v) if isinstance(v, int) else v for v in values]
        addresses = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(v) for v in arguments))
        known = [(address_of(mapping) + begin, *sizes) for mapping, begin, *sizes in self.memory.buffers]
        buffers = (Buffer * max(len(known), 1))(*(Buffer(*b) for b in known))
        message = ctypes.create_string_buffer(500)
        pointers = [ctypes.addressof(a) for a in (addresses, buffers, message)]
        launch = Launch(
            *pointers, self.seed, blocks, threads, shared, len(known), len(message), pdl * self.memory.overlaps
        )
        if self.launch(ctypes.byref(launch)):
            raise EmulatorError(message.value.decode())
