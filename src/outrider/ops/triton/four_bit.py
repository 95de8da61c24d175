"""Products of up to 8 tokens with weights of four bits, in CUDA C++ (`ops/cuda/four_bit.cu`): the bits of `quant`, sooner.

`suits` is the rule, in one place: bfloat16, 4-bit integers in groups of 32 to 256 with or without offsets (int4, AWQ, GPTQ, Q4_0, Q4_1,
Q4_K), nothing done with the product but a gate; and `FourBit.of` the device: Hopper, where both were seen to give the same bits. Everything
else, and every larger number of tokens, goes to Triton; so does all where NVRTC cannot be had, which one line of the log says.
"""

from __future__ import annotations

import ctypes
import logging
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor

from ..cuda.runtime import FOLDER, CudaError, Kernel, missing
from .quant import Extras, group_sums
from .quant_tiles import choose_quant_tile, processors_of, shared_of
from .repack import ROWS, Codes, QuantWeight

log = logging.getLogger("outrider")
SOURCE = FOLDER / "four_bit.cu"
MOST_TOKENS = 8
TILE = 16  # rows of the weight that a warp takes
ACTS = {"": 0, "gelu_tanh": 1, "silu": 2}
INSTEAD = "4-bit weights at up to 8 tokens go through Triton, about a tenth slower: %s"
NUMBERS = (
    "m", "n", "k", "chunks", "span", "splits", "tiles", "x_stride", "sums_stride", "magic", "longs", "more_longs", "shorts", "more_shorts",
    "rest",
)  # fmt: skip


class Shape(ctypes.Structure):
    """What the kernel is told: `Shape` of units.cuh."""

    _fields_ = [(name, ctypes.c_uint if name == "magic" else ctypes.c_int) for name in NUMBERS]


@dataclass(frozen=True)
class Units:
    """What is dealt out: tiles of 16 rows, each over `splits` spans of chunks, of which the last may be shorter."""

    tiles: int
    chunks: int
    span: int

    @property
    def splits(self) -> int:
        return -(-self.chunks // self.span)

    @property
    def rest(self) -> int:
        """Chunks of the last span."""
        return self.chunks - (self.splits - 1) * self.span

    @property
    def longs(self) -> int:
        return self.tiles * (self.splits if self.rest == self.span else self.splits - 1)

    @property
    def shorts(self) -> int:
        return self.tiles * self.splits - self.longs

    def edges(self, blocks: int) -> tuple[list[int], list[int]]:
        """Where each block's long units and its short ones begin, and where the last one's end: as the kernel has it. The last blocks have
        one long unit more, the first ones a short one."""
        late = blocks - self.longs % blocks
        longs = [b * (self.longs // blocks) + max(0, b - late) for b in range(blocks + 1)]
        shorts = [b * (self.shorts // blocks) + min(b, self.shorts % blocks) for b in range(blocks + 1)]
        return longs, shorts

    def widest(self, blocks: int) -> int:
        """Chunks of x that the block with most of them needs."""
        longs, shorts = (list(pairwise(e)) for e in self.edges(blocks))
        spans = [((hi - 1) // self.tiles + 1 - lo // self.tiles if hi > lo else 0) for lo, hi in longs]
        return max(s * self.span + (self.rest if hi > lo else 0) for s, (lo, hi) in zip(spans, shorts, strict=True))


@lru_cache(maxsize=4096)
def choose_block(units: Units, tokens: int, groups: int, lifted: bool, processors: int, room: int) -> tuple[int, int] | None:
    """Warps of the one block that a processor has, and bytes of its shared memory; None where x does not fit into the room that a block may
    take. groups: of a chunk."""
    columns = units.widest(processors)
    x = tokens * (columns * 512 + 64) + (columns * groups * 4 * tokens_of(tokens) if lifted else 0)
    stage = 2048 + 64 * -(-groups // 2) * (1 + lifted)
    for warps in (24, 16):
        shared = warps * 2 * stage + x
        if shared <= room:
            return warps, shared
    return None


class FourBit:
    """The kernels of one device, compiled at first need. `of` gives None, and says why, where there are none."""

    def __init__(self, device: torch.device, seen: Tensor):
        self.device, self.seen = device, seen
        self.processors, self.room = processors_of(device), shared_of(device)
        self.source = SOURCE.read_text()
        self.kernels: dict[tuple[tuple[str, int], ...], Kernel] = {}
        self.usable = True

    @staticmethod
    def of(device: torch.device, seen: Tensor) -> FourBit | None:
        if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
            return None
        reason = missing()
        if reason is not None:
            log.warning(INSTEAD, reason)
            return None
        return FourBit(device, seen)

    def product(self, x: Tensor, w: QuantWeight, extras: Extras, pdl: bool) -> Tensor | None:
        """x [R, K] · wᵀ -> [R, N], or [R, N / 2] where it is gate and up; None: not one of these."""
        if not self.usable or not suits(x, w, extras):
            return None
        rows, n, k = x.shape[0], *w.shape
        units, scale = units_of(w), w.scale
        assert scale is not None  # groups have factors
        block = choose_block(units, rows, w.planes // w.per, w.lift is not None, self.processors, self.room)
        kernel = None if block is None else self._kernel(flags_of(w, extras, rows, block[0]))
        if block is None or kernel is None:
            return None
        if w.order is not None:
            x = x[:, w.order]
        if x.stride(1) != 1 or x.stride(0) % 8 or x.data_ptr() % 16:
            x = x.clone(memory_format=torch.contiguous_format)  # also where it is contiguous, but begins between 16 bytes
        out = torch.empty((rows, n // 2 if extras.gated else n), dtype=x.dtype, device=x.device)
        part, sums, lift = out, out, scale if w.lift is None else w.lift
        if units.splits > 1:
            part = torch.empty(units.tiles * units.splits * TILE * tokens_of(rows), dtype=torch.float32, device=x.device)
        if w.lift is not None:
            sums = group_sums(x, w, MOST_TOKENS, pdl)
        blocks, warps, shared = self.processors, *block
        shape = Shape(
            rows, n, k, units.chunks, units.span, units.splits, units.tiles, x.stride(0), sums.stride(0), -(-(1 << 32) // units.tiles),
            units.longs // blocks, units.longs % blocks, units.shorts // blocks, units.shorts % blocks, units.rest,
        )  # fmt: skip
        upper = (n // 2 // ROWS) * w.chunks * ROWS if extras.gated else TILE // 2  # rows of chunks to the upper half of a tile
        both = [a for t in (w.words, scale, lift) for a in (t.data_ptr(), t.data_ptr() + upper * t.shape[-1] * 4)]
        others = [t.data_ptr() for t in (sums, out, part, self.seen)]
        kernel(blocks, 32 * warps, shared, [x.data_ptr(), *both, *others, shape], pdl)
        return out

    def _kernel(self, flags: tuple[tuple[str, int], ...]) -> Kernel | None:
        if flags not in self.kernels:
            try:
                self.kernels[flags] = Kernel(self.source, "four_bit", dict(flags), self.device, self.room)
            except CudaError as error:  # a toolchain may be broken in many ways, and Triton's kernels are there
                log.warning(INSTEAD, error)
                self.usable = False
                return None
        return self.kernels[flags]


def suits(x: Tensor, w: QuantWeight, extras: Extras) -> bool:
    """Whether the kernel knows this product; the device aside."""
    n, k = w.shape
    if extras.bias is not None or extras.mul is not None or extras.softcap is not None or extras.out_dtype not in (None, torch.bfloat16):
        return False
    known = w.codes in (Codes.INT4, Codes.UINT4) and w.plane == 32 and w.per in (1, 2, 4, 8) and w.factor is None
    whole = n % (2 * ROWS) == 0 if extras.gated else n % TILE == 0 and n > TILE
    return known and whole and k % 8 == 0 and x.dtype == torch.bfloat16 and 0 < x.shape[0] <= MOST_TOKENS


def tokens_of(rows: int) -> int:
    """Columns of sums that the kernel is compiled for."""
    return 4 if rows <= 4 else MOST_TOKENS


def units_of(w: QuantWeight) -> Units:
    """With the order of sums that the weight has in Triton."""
    span = -(-w.chunks // choose_quant_tile(w.padded, w.columns, w.bits).splits)
    return Units(w.shape[0] // TILE, w.chunks, span)


def flags_of(w: QuantWeight, extras: Extras, rows: int, warps: int) -> tuple[tuple[str, int], ...]:
    """What the source is compiled with."""
    flags = dict(
        TOKENS=tokens_of(rows), GATED=int(extras.gated), ACT=ACTS[extras.act], HALF=int(w.half), OFFSET=8 if w.codes is Codes.INT4 else 0,
        PER=w.per, LIFT=int(w.lift is not None), WARPS=warps,
    )  # fmt: skip
    return tuple(flags.items())
