"""The C library's structs and signatures, read from its sources; sizes are checked at load."""

from __future__ import annotations

import ctypes
import operator
import re
from ctypes import POINTER, Structure, c_float, c_int, c_int32, c_int64, c_void_p
from enum import IntEnum
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ...types import AttnSpec, BlockAttn, GroupName, KVPages, KVView
from ..formats.gguf_grids import points
from .build import HERE, SHIPPED, SOURCES, shared_object

# how a weight is laid out, in the order of formats.h
PackedKind = IntEnum(
    "PackedKind", "DENSE Q4_1 Q4_0 Q8_0 Q5_0 Q5_1 Q4_K Q5_K Q6_K IQ4_NL TABLE4 Q2_K TABLE3 TABLE3_16 FLOAT4 PARTS FILE"
)
# GGUF's types that the library reads, in the order of formats.h
FILE_TYPES = (
    "Q4_1", "Q4_0", "Q8_0", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "Q2_K", "Q3_K", "IQ1_S",
    "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "TQ1_0", "TQ2_0", "MXFP4",
)  # fmt: skip
GRIDS = tuple(map(points, ("IQ1", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S")))  # in the order of formats.h
DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.int8: 3}  # int8: keys and values only
ACTIVATIONS = {"silu": 0, "gelu_tanh": 1}
GROUPS: tuple[GroupName, ...] = ("full", "sliding")  # the order of a batch's tables
# The library's sources without comments, and the numbers they declare.
C = re.sub(r"/\*.*?\*/", "", "\n".join((HERE / name).read_text(encoding="utf-8") for name in SOURCES), flags=re.DOTALL)
NUMBERS: dict[str, type] = {"int": c_int, "int32_t": c_int32, "int64_t": c_int64, "float": c_float}
STRUCTS: dict[str, type[Structure]] = {}


def struct(name: str) -> type[Structure]:
    """A struct by its C declaration, with addresses for pointers; it may contain those that were made before."""
    body = re.search(rf"typedef struct {{([^{{}}]*)}} {name};", C)
    assert body is not None, name
    kinds = NUMBERS | STRUCTS
    fields = list[tuple[str, type]]()
    for kind, declared in re.findall(r"(?:const )?(\w+) ([^;]+);", body[1]):
        for star, field, count in re.findall(r"([*]?)(\w+)(?:\[(\d)\])?(?:,|$)", declared):
            item = c_void_p if star else kinds[kind]
            fields.append((field, operator.mul(item, int(count)) if count else item))
    STRUCTS[name] = type(name, (Structure,), {"_fields_": fields})
    return STRUCTS[name]


CWeight = struct("Weight")
CSpec = struct("Spec")
CBatch = struct("Batch")
CMoe = struct("Moe")
CLayer = struct("Layer")
CStack = struct("Stack")
struct("LowRankPiece")
CLowRank = struct("LowRank")
CAdapters = struct("Adapters")
CCall = struct("Call")
CDraft = struct("Draft")
CBlockNet = struct("BlockNet")
CUnread = struct("Unread")
CDecodeInputs = struct("DecodeInputs")
CDecodeOutputs = struct("DecodeOutputs")
CCycle = struct("Cycle")
CChain = struct("Chain")
# in the order of or_sizes
CHECKED = (
    *(CWeight, CSpec, CBatch, CLayer, CStack, CCall, CDraft, CCycle, CMoe, CChain, CLowRank, CBlockNet, CUnread),
    *(CDecodeInputs, CDecodeOutputs),
)


def at(x: Any) -> int | None:
    """The address of a tensor, a ctypes array or a struct; of None there is none."""
    if isinstance(x, Tensor):
        return x.data_ptr()
    return None if x is None else ctypes.addressof(x)


def ptrs(*tensors: Tensor | None) -> list[int | None]:
    return [None if t is None else t.data_ptr() for t in tensors]


def raise_on_failure(result: int, function: Any, _: object) -> None:
    if result:
        raise MemoryError(f"scratch of {function.__name__}")


def raise_on_null(result: int | None, function: Any, _: object) -> int:
    if result is None:
        raise MemoryError(f"result of {function.__name__}")
    return result


def declare(lib: ctypes.CDLL) -> None:
    """Declares the functions' signatures: structs are passed as they are, other pointers as addresses. Functions that
    take a ThreadPool and return an int return nonzero on allocation failure; functions that return a pointer, NULL."""
    structs = {f"{name} *": POINTER(struct) for name, struct in STRUCTS.items()}
    for result, star, name, parameters in re.findall(r"^(\w+) (\*?)(or_\w+)\(([^)]*)\) \{", C, re.MULTILINE):
        parameters = [one for one in parameters.split(",") if one != "void"]
        function = getattr(lib, name)
        function.restype = c_void_p if star else NUMBERS.get(result)
        kinds = [re.sub(r"^const |\w+$", "", one.strip()).strip() for one in parameters]
        function.argtypes = [structs.get(kind, c_void_p) if "*" in kind else NUMBERS[kind] for kind in kinds]
        if result == "int" and parameters and parameters[0].startswith("ThreadPool *"):
            function.errcheck = raise_on_failure
        elif star:
            function.errcheck = raise_on_null


DAMAGED = "file too short", "invalid ELF header", "file data overread", "cannot read file data"


def load(isa: str | None = None) -> ctypes.CDLL:
    """The library, built if necessary. ctypes releases the GIL during a call."""
    path = shared_object(isa)
    try:
        lib = ctypes.CDLL(str(path))
    except OSError as error:
        # otherwise, e.g. mounted noexec, building it again would not help
        if path.is_relative_to(SHIPPED) or not any(words in str(error) for words in DAMAGED):
            raise
        path.unlink()
        lib = ctypes.CDLL(str(shared_object(isa)))
    declare(lib)
    lib.or_grids((c_void_p * len(GRIDS))(*[grid.ctypes.data for grid in GRIDS]))
    assert [*map(ctypes.sizeof, CHECKED)] == [*map(lib.or_sizes, range(len(CHECKED)))], "another library's structs"
    return lib


def floats(x: Tensor) -> Tensor:
    """float32, contiguous; the tensor itself where it is."""
    return x if x.dtype == torch.float32 and x.is_contiguous() else x.float().contiguous()


@lru_cache(256)
def c_spec(spec: AttnSpec) -> Structure:
    assert spec.head_dim <= 1024 and spec.heads // spec.kv_heads <= 32, "beyond the kernels' buffers"
    named = {name: getattr(spec, name) for name in ("heads", "kv_heads", "kv_layer", "writes", "k_eq_v", "norm_v")}
    group = spec.window is not None
    window = spec.window or 0
    return CSpec(dim=spec.head_dim, group=group, window=window, scale=spec.scale, eps=spec.eps, **named)


def c_block_spec(attn: BlockAttn) -> Structure:
    """The store's window decides the pages; a row sees back as far as the narrower of that and the layer's own."""
    windows = [w for w in (attn.spec.window, attn.window) if w is not None]
    c = CSpec.from_buffer_copy(c_spec(attn.spec))
    c.window = min(windows, default=0)
    c.bidirectional = not attn.causal
    return c


def dense_weight(w: Tensor) -> Structure:
    """[..., K] of any float type, read in place."""
    return CWeight(PackedKind.DENSE, w.numel() // w.shape[-1], w.shape[-1], DTYPES[w.dtype], w.data_ptr(), None)


class CBatchBuffers:
    """A KVView as a C struct; keeps the memory behind its pointers alive."""

    def __init__(self, kv: KVView, pages: CPages, ids: Tensor | None = None, ends: Tensor | None = None):
        self.keep: list[Tensor] = []
        assert kv.positions.dtype == kv.row_seq.dtype == torch.int64 and kv.row_start.dtype == torch.int32
        c = self.c = CBatch(kv.positions.shape[0], kv.row_start.shape[0] - 1)
        pages.bind(c)
        c.ids, c.positions, c.row_seq, c.row_start = map(self.hold, (ids, kv.positions, kv.row_seq, kv.row_start))
        c.ends = self.hold(ends)
        if kv.ancestors is not None and kv.kv_slots is not None:
            assert kv.kv_slots.dtype == torch.int64 and kv.ancestors.dtype == torch.int32
            c.places = self.hold(kv.kv_slots)
            c.paths = self.hold(kv.ancestors)
            c.path_width = kv.ancestors.shape[1]
        for i, group in enumerate(GROUPS):
            table = kv.tables.get(group)
            if table is not None:
                c.tables[i] = self.hold(table)
                c.width[i] = table.shape[1]

    def hold(self, t: Tensor | None) -> int | None:
        if t is None:
            return None
        self.keep.append(t.contiguous())
        return self.keep[-1].data_ptr()


class CPages:
    """Pointers to every layer's keys and values. Made once for a cache: its tensors never move."""

    def __init__(self, kv: KVPages):
        tensors = [t for t in (*kv.keys, *kv.values) if t is not None]
        dtypes = {t.dtype for t in tensors}
        assert len(dtypes) == 1 and all(t.is_contiguous() for t in tensors), "keys and values of one dtype, contiguous"
        self.dtype = DTYPES[dtypes.pop()]
        self.page_size = kv.page_size
        count = len(kv.keys)
        self.keys = (c_void_p * count)(*map(at, kv.keys))
        self.values = (c_void_p * count)(*map(at, kv.values))

    def bind(self, batch: Structure) -> None:
        batch.keys = at(self.keys)
        batch.values = at(self.values)
        batch.kv_dtype = self.dtype
        batch.page_size = self.page_size
