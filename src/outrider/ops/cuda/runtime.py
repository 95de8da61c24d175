"""Runs CUDA C++ kernels: `Kernel` compiles a source with NVRTC, which comes with torch's CUDA wheels, and launches it
through the driver. So no compiler and no build step is needed, and a CUDA graph captures the launch like any other.
Compiled kernels are kept in Outrider's cache: a model's kernels take seconds, once per machine.

`missing()` returns in one line why kernels cannot be compiled here, or None. `image` alone works without a GPU.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from ..cpu.build import cache_path

FOLDER = Path(__file__).parent
Flags = Mapping[str, int | str]
ATTR_MAX_DYNAMIC_SMEM = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
CARVEOUT = 9  # CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT: percent of what a SM has for it and for L1
C_TYPES: dict[str, Any] = {"int": ctypes.c_int, "u32": ctypes.c_uint, "float": ctypes.c_float}
LAUNCH_PDL = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION: begin while the kernel ahead drains


class CudaError(RuntimeError):
    """A failed call of the compiler or the driver."""


def _library(*names: str) -> ctypes.CDLL | None:
    """The first of them that there is."""
    for name in names:
        with suppress(OSError):
            return ctypes.CDLL(name)
    return None


@lru_cache(maxsize=1)
def compiler() -> ctypes.CDLL | None:
    """NVRTC: torch's own where there is one, else the system's."""
    beside = [Path(p) / "nvidia" for p in sys.path if p]
    libraries = [
        str(f) for folder in beside if folder.is_dir() for f in sorted(folder.glob("*/lib/libnvrtc.so.1[2-9]"))
    ]
    return _library(*libraries, "libnvrtc.so.13", "libnvrtc.so.12")


@lru_cache(maxsize=1)
def driver() -> ctypes.CDLL | None:
    return _library("libcuda.so.1")


def missing() -> str | None:
    """Why nothing can be compiled and launched here."""
    if compiler() is None:
        return "no libnvrtc (pip install nvidia-cuda-nvrtc)"
    return "no CUDA driver" if driver() is None else None


@lru_cache(maxsize=1)
def headers() -> dict[str, str]:
    """The headers that a source may include."""
    return {f.name: f.read_text() for f in sorted(FOLDER.glob("*.cuh"))}


def struct(file: str, name: str) -> type[ctypes.Structure]:
    """A struct of a source of this folder, pointers as addresses."""
    body = re.search(rf"^struct {name} \{{(.*?)^\}};", (FOLDER / file).read_text(), re.DOTALL | re.MULTILINE)
    assert body is not None, f"{file} has no {name}"
    declared = re.findall(r"^    (?:const )?(\w+)(\*? [*\w, ]+);", body[1], re.MULTILINE)

    class Struct(ctypes.Structure):
        _fields_ = [
            (name, ctypes.c_void_p if "*" in names else C_TYPES[kind])
            for kind, names in declared
            for name in re.findall(r"\w+", names)
        ]

    return Struct


def image(source: str, arch: str, flags: Flags) -> bytes:
    """Machine code of a source for one architecture (90: Hopper; 90a: and no later one). It may include the headers of
    this folder."""
    library = compiler()
    if library is None:
        raise CudaError("no libnvrtc")
    program = ctypes.c_void_p()
    size = ctypes.c_size_t()
    options = [f"--gpu-architecture=sm_{arch}", "--std=c++17", *(f"-D{name}={value}" for name, value in flags.items())]
    argv = (ctypes.c_char_p * len(options))(*(o.encode() for o in options))
    names = (ctypes.c_char_p * len(headers()))(*(name.encode() for name in headers()))
    texts = (ctypes.c_char_p * len(headers()))(*(text.encode() for text in headers().values()))
    if library.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"kernel.cu", len(names), texts, names):
        raise CudaError("NVRTC takes no program")
    try:
        if library.nvrtcCompileProgram(program, len(options), argv):
            library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
            log = ctypes.create_string_buffer(size.value)
            library.nvrtcGetProgramLog(program, log)
            lines = log.value.decode(errors="replace").strip().splitlines()
            raise CudaError(next((line.strip() for line in lines if "error" in line), "NVRTC refuses the source"))
        if library.nvrtcGetCUBINSize(program, ctypes.byref(size)):
            raise CudaError("NVRTC gives no machine code")
        code = ctypes.create_string_buffer(size.value)
        library.nvrtcGetCUBIN(program, code)
        return code.raw
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def kept_image(source: str, arch: str, flags: Flags) -> bytes:
    """`image`, from the cache if it was made before. A cached file is a digest followed by the code: a damaged one is
    made again, and if nothing can be written nothing is cached."""
    library = compiler()
    major = ctypes.c_int()
    minor = ctypes.c_int()
    if library is not None:
        library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    identity = (source, sorted(headers().items()), arch, sorted(flags.items()), (major.value, minor.value))
    path = cache_path("cuda", hashlib.sha256(repr(identity).encode()).hexdigest()[:32] + ".cubin")
    with suppress(OSError):
        stored = path.read_bytes()
        if hashlib.sha256(stored[32:]).digest() == stored[:32]:
            return stored[32:]
    code = image(source, arch, flags)
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as aside:
            scratch = Path(aside) / path.name
            scratch.write_bytes(hashlib.sha256(code).digest() + code)
            os.replace(scratch, path)  # atomic, even if another process writes it too
    return code


class Attribute(ctypes.Structure):
    """CUlaunchAttribute."""

    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int), ("rest", ctypes.c_char * 60)]


class LaunchParams(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = [
        *((name, ctypes.c_uint) for name in ("gx", "gy", "gz", "bx", "by", "bz", "shared")),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("count", ctypes.c_uint),
    ]


def _done(code: int, what: str) -> None:
    if code:
        raise CudaError(f"{what}: CUDA driver error {code}")


class TensorMap(ctypes.Structure):
    """CUtensorMap: TMA's description of a matrix."""

    _fields_ = [("opaque", ctypes.c_char * 128)]


@lru_cache(maxsize=4096)
def tensor_map(address: int, rows: int, columns: int, stride: int, tile_rows: int, paired: bool) -> TensorMap:
    """A bfloat16 matrix that TMA fetches by tiles of 64 columns, swizzled by 128 bytes as wgmma reads them. paired:
    rows of a tile are eight of its upper and eight of its lower half in turns."""
    cuda = driver()
    assert cuda is not None, "`missing` was not asked"
    sizes = [columns, rows]
    strides = [2 * stride]
    box = [64, tile_rows]
    if paired:
        sizes = [columns, 8, 2, rows // 16]
        box = [64, 8, 2, tile_rows // 16]
        strides = [2 * stride, rows * stride, 16 * stride]
    room = (ctypes.c_char * 192)()
    at = ctypes.addressof(room) + -ctypes.addressof(room) % 64
    bfloat16 = 9
    no_interleave = 0
    swizzle_128 = 3
    promote_256 = 3
    zeros = 0
    dims = len(sizes)
    longs = ctypes.c_uint64 * dims
    ints = ctypes.c_uint32 * dims
    shape = (longs(*sizes), longs(*strides), ints(*box), ints(*[1] * dims))
    matrix = (ctypes.c_void_p(at), bfloat16, dims, ctypes.c_void_p(address), *shape)
    code = cuda.cuTensorMapEncodeTiled(*matrix, no_interleave, swizzle_128, promote_256, zeros)
    _done(code, f"tensor map of {rows} x {columns}")
    return TensorMap.from_buffer_copy(ctypes.string_at(at, 128))


class Kernel:
    """A function of a source, loaded on one device."""

    def __init__(self, source: str, name: str, flags: Flags, device: torch.device, shared: int, own: bool = False):
        """shared: the maximum bytes of shared memory of a launch; own: it uses instructions of this architecture
        alone."""
        cuda = driver()
        assert cuda is not None, "`missing` was not asked"
        self.cuda = cuda
        self.device = device
        major, minor = torch.cuda.get_device_capability(device)
        code = kept_image(source, f"{major}{minor}{'a' if own else ''}", flags)
        self.module = ctypes.c_void_p()
        self.function = ctypes.c_void_p()
        with torch.cuda.device(device):
            torch.cuda.current_stream(device).query()  # a context for this thread
            _done(cuda.cuModuleLoadData(ctypes.byref(self.module), code), f"loading {name}")
            _done(cuda.cuModuleGetFunction(ctypes.byref(self.function), self.module, name.encode()), f"finding {name}")
            for attribute, value in ((ATTR_MAX_DYNAMIC_SMEM, shared), (CARVEOUT, 100)):
                failed = cuda.cuFuncSetAttribute(self.function, attribute, value)
                _done(failed, f"{name}: {shared} bytes of shared memory")

    def __call__(
        self, blocks: int, threads: int, shared: int, values: Sequence[int | ctypes.Structure], pdl: bool
    ) -> None:
        """values: addresses, and structures by value. On the device's current stream. pdl: it may start while the
        previous kernel drains."""
        arguments = [ctypes.c_void_p(v) if isinstance(v, int) else v for v in values]
        addresses = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(v) for v in arguments))
        attribute = Attribute(LAUNCH_PDL, 0, 1)
        stream = torch.cuda.current_stream(self.device).cuda_stream
        launch = LaunchParams(blocks, 1, 1, threads, 1, 1, shared, stream, ctypes.addressof(attribute), int(pdl))
        with torch.cuda.device(self.device):
            _done(self.cuda.cuLaunchKernelEx(ctypes.byref(launch), self.function, addresses, None), "launch")
