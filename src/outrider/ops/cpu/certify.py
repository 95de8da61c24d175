"""The levels of the CPU library as a table of kernels, and their certification on the machine at hand.

A level serves if rows that it computes together have the bits of each row alone, for every format and the numbers of
rows at which another tile takes over. A level whose bits differ is rejected, and the next one serves. The results are
stored once per library and processor; `outrider doctor --kernels` prints them.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...platforms.processor import machine, processor_name
from .. import registry
from ..backend import ExpertWeights
from ..formats import BLOCKS, GGUFBlockFormat, Weight
from ..registry import Certification, Kernel, KernelRow, Probe, Registry
from .build import FLAGS, WHEEL_LEVELS, BuildError, CompilerRefused, cache_path, found, missing, runnable
from .lib import ACTIVATIONS, at, load
from .memory import Arena
from .packing import PackedWeight, Packer, c_moe, c_weight

LIBRARY = "CPU products"
ORDER = "blocks of 32 columns in order"
# One register tile and two, heights of Intel's tiles from 13 to 16, and blocks of rows that are cut into several.
ROWS = (*range(1, 18), 33, 49, 55, 64, 128, 129)
# A format of files for every layout of the kernels: where a block's float16 numbers are.
FORMATS = {
    **dict.fromkeys(("Q4_0", "Q8_0", "Q5_0", "IQ4_NL", "IQ4_XS", "IQ2_XXS"), (0,)),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    "Q6_K": (208,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "MXFP4": (),
}
SERVES_WHEN = {
    "amx": "Intel's tiles from 49 rows on; fewer rows and attention as avx512bf16",
    "avx512bf16": "nine rows in a tile; attention in pairs of bfloat16",
    "avx512": "nine rows in a tile",
    "avxvnni": "five rows in a tile, products of bytes",
    "avx2": "five rows in a tile",
    "i8mm": "four rows in a tile",
    "dotprod": "four rows in a tile",
    "generic": "the compiler's own vectors",
}
SOURCES = {
    "amx": "tile_amx.h",
    **dict.fromkeys(("avx512bf16", "avx512"), "tile_avx512.h"),
    **dict.fromkeys(("avxvnni", "avx2"), "tile_avx2.h"),
    **dict.fromkeys(("i8mm", "dotprod"), "tile_neon.h"),
    "generic": "tile_portable.h",
}


@dataclass(frozen=True)
class Processor:
    """The processor as the table sees it: a name, and the levels that it and its system support."""

    name: str
    levels: tuple[str, ...]

    @classmethod
    def here(cls) -> Processor:
        return cls(processor_name(), runnable())

    @property
    def identity(self) -> str:
        return self.name


def serves_every_shape(shape: Any, machine: Processor) -> bool:
    return True


def level_kernel(level: str) -> Kernel:
    """A level as a row of the table. Launched, it loads the library, which is compiled if necessary."""

    def launch(call: object) -> ctypes.CDLL:
        return load(level)

    def runs_on(machine: Processor) -> bool:
        return level in machine.levels

    return Kernel(
        name=level,
        op=LIBRARY,
        order=ORDER,
        source=f"ops/cpu/{SOURCES[level]}",
        when=SERVES_WHEN[level],
        serves=serves_every_shape,
        launch=launch,
        runs_on=runs_on,
    )


TABLE = tuple(map(level_kernel, FLAGS))


# ---- probes ---------------------------------------------------------------------------------------------------------
@dataclass
class RowsAlone:
    """Compares the rows of one call with calls of one row each."""

    run: Callable[[Tensor], Tensor]
    x: Tensor
    alone: Tensor | None = field(default=None, init=False)

    def __call__(self, kernel: Kernel, rows: int) -> str | None:
        if self.alone is None:
            self.alone = torch.cat([self.run(row) for row in self.x.split(1)])
        together = self.run(self.x[:rows])
        differs = (together.view(torch.int32) != self.alone[:rows].view(torch.int32)).any(dim=1)
        if not differs.any():
            return None
        return f"row {int(differs.nonzero()[0])} has other bits than alone"


class Problems:
    """Small products on a library. Formats with blocks of 32 get an odd number of them, more than fit one piece of the
    tiles' buffer."""

    def __init__(self, lib: ctypes.CDLL, pool: int):
        self.lib = lib
        self.pool = pool
        self.packer = Packer(lib, pool, Arena())
        self.random = np.random.default_rng(0)  # a quick start (cli/quick.py) has no torch.Generator

    def weight(self, kind: str, rows: int, columns: int) -> PackedWeight:
        """Random blocks with finite scales."""
        size, nbytes = BLOCKS[kind]
        shape = (rows * columns // size, nbytes)
        blocks = torch.from_numpy(self.random.integers(0, 256, shape, dtype=np.uint8))
        for place in FORMATS[kind]:
            scales = torch.from_numpy(self.random.random((len(blocks), 1), dtype=np.float32)) * 0.02 + 0.001
            blocks[:, place : place + 2] = scales.half().view(torch.uint8)
        if kind == "MXFP4":
            blocks[:, 0] = 120  # its scale is an exponent
        tensors = {"blocks": blocks.view(rows, -1)}
        packed = self.packer.pack([Weight(GGUFBlockFormat(kind), (rows, columns), tensors)])
        assert packed is not None
        return packed

    def inputs(self, columns: int) -> Tensor:
        return self.normal(ROWS[-1], columns)

    def normal(self, *shape: int) -> Tensor:
        return torch.from_numpy(self.random.standard_normal(shape, dtype=np.float32))

    def product(self, weight: PackedWeight | Tensor, x: Tensor) -> Tensor:
        c = c_weight(weight)
        out = torch.empty((x.shape[0], c.n))
        self.lib.or_linear(self.pool, c, x.data_ptr(), x.shape[0], None, out.data_ptr())
        return out

    def gated(self, weight: PackedWeight, x: Tensor) -> Tensor:
        c = c_weight(weight)
        out = torch.empty((x.shape[0], c.n // 2))
        act = ACTIVATIONS["silu"]
        self.lib.or_gated_linear(self.pool, c, x.data_ptr(), x.shape[0], act, out.data_ptr())
        return out

    def experts(self, weights: ExpertWeights, x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        act = ACTIVATIONS[weights.act]
        self.lib.or_moe(self.pool, c_moe(weights), at(x), at(x), x.shape[0], act, at(out))
        return out

    def probes(self) -> Iterator[Probe]:
        for kind in FORMATS:
            columns = 1280 if BLOCKS[kind][0] == 256 else 1120
            yield self.probe(kind, partial(self.product, self.weight(kind, 40, columns)), columns)
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            dense = self.normal(40, 104).to(dtype)
            yield self.probe(str(dtype).removeprefix("torch."), partial(self.product, dense), 104)
        yield self.probe("gate and up", partial(self.gated, self.weight("Q4_K", 128, 256)), 256)
        weights = ExpertWeights(
            router=self.normal(5, 256) * 0.1,
            expert_scale=torch.ones(5),
            gate_up=self.weight("Q4_0", 5 * 512, 256).view(5, 512, 256),
            down=self.weight("Q6_K", 5 * 256, 256).view(5, 256, 256),
            top_k=2,
            act="gelu_tanh",
        )
        yield self.probe("experts", partial(self.experts, weights), 256)

    def probe(self, name: str, run: Callable[[Tensor], Tensor], columns: int) -> Probe:
        return Probe(
            name=name,
            order=ORDER,
            serves=serves_every_rows,
            check=RowsAlone(run, self.inputs(columns)),
            max_rows=ROWS[-1],
        )


def serves_every_rows(kernel: Kernel, rows: int) -> bool:
    return True


@contextmanager
def single_thread(lib: ctypes.CDLL) -> Iterator[int]:
    """A pool for the probes: which thread computes an output changes nothing."""
    pool = lib.or_pool_new(1)
    try:
        yield pool
    finally:
        lib.or_pool_free(pool)


# ---- choosing a level -----------------------------------------------------------------------------------------------
def stored_at(lib: ctypes.CDLL) -> Path:
    return cache_path("certified", f"{Path(lib._name).stem}.json")


def identity(lib: ctypes.CDLL) -> str:
    """The key of a library's bits: the processor, and the library's name, which hashes sources, flags and compiler."""
    return f"{processor_name()}, {Path(lib._name).stem}"


@functools.lru_cache(64)
def certification_of(level: str, lib: ctypes.CDLL) -> Certification:
    """The stored certification of a level's library; without one the probes run now, for about a tenth of a second."""
    path = stored_at(lib)
    stored = registry.load(path, identity(lib))
    if stored.results:
        return stored
    table = Registry(TABLE, Processor.here())
    with single_thread(lib) as pool:
        results = registry.certify(table, Problems(lib, pool).probes(), ROWS, only=(level,))
    done = stored.with_results(results)
    registry.save(done, path)
    return done


def certified_library(isa: str | None = None) -> tuple[ctypes.CDLL, Certification]:
    """The best level's library that compiles and is not rejected here. An explicit level, by argument or by
    OUTRIDER_CPU_ISA, is used or refused."""
    isa = isa or os.environ.get("OUTRIDER_CPU_ISA") or None
    if isa is not None:
        lib = load(isa)
        certification = certification_of(isa, lib)
        if isa in certification.rejected:
            raise BuildError(f"level {isa} is not used on this machine: {certification.rejected[isa]}")
        return lib, certification
    table = Registry(TABLE, Processor.here())
    failed: BuildError | None = None
    for kernel in table.candidates(LIBRARY, None):
        try:
            lib = kernel.launch(None)
        except CompilerRefused as error:
            failed = error
            continue
        certification = certification_of(kernel.name, lib)
        table.apply(certification)
        if kernel.name not in table.rejected:
            return lib, certification
        failed = BuildError(f"level {kernel.name} is not used on this machine: {table.rejected[kernel.name]}")
    raise failed or BuildError("no level runs on this machine")


def level_rows() -> list[KernelRow]:
    """The CPU's rows of `outrider doctor --kernels`: every level of this architecture, and what was certified."""
    table = {kernel.name: kernel for kernel in TABLE}
    serving, certification = certified_library()
    rows = []
    for level in WHEEL_LEVELS.get(machine(), ("generic",)):
        lacks = missing(level)
        if lacks:
            here = f"no: this machine lacks {', '.join(sorted(lacks))}"
        elif Path(serving._name).name.startswith(f"kernels-{level}-"):
            here = f"serves; {outcome(certification)}"
        else:
            here = stored_outcome(level)
        kernel = table[level]
        rows.append(KernelRow(kernel.op, kernel.when, kernel.name, source=kernel.source, here=here))
    return rows


def outcome(certification: Certification) -> str:
    """The date and the result of a certification."""
    if certification.rejected:
        reason = next(iter(certification.rejected.values()))
        return f"rejected {certification.date}: {reason}"
    limits = [result.note for result in certification.results if not result.complete]
    if limits:
        return f"certified {certification.date} up to {certification.independent_rows(ROWS[-1])} rows: {limits[0]}"
    return f"certified {certification.date}: {len(certification.results)} problems, 1 to {ROWS[-1]} rows"


def stored_outcome(level: str) -> str:
    """The result of a level that does not serve now, if its library was certified before."""
    path = found(level)
    if path is not None:
        stored = registry.load(cache_path("certified", f"{path.stem}.json"), f"{processor_name()}, {path.stem}")
        if stored.results:
            return outcome(stored)
    return f"yes, certified at its first use (--ops cpu:{level})"
