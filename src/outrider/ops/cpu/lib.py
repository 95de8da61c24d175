"""The C library's structs and signatures, read from its sources; sizes are checked at load."""

from __future__ import annotations

import ctypes
import operator
import re
from collections.abc import Iterator
from ctypes import Structure, byref, c_float, c_int, c_int32, c_int64, c_long, c_void_p
from enum import IntEnum

import torch
from torch import Tensor

from ...types import AttnSpec, BlockAttn, GroupName, KVPages, KVView
from .build import HERE, SHIPPED, SOURCES, shared_object

# how a weight is laid out, in the order of formats.h; GGUF's formats by their names
PackedKind = IntEnum("PackedKind", "DENSE Q4_1 Q4_0 Q8_0 Q5_0 Q5_1 Q4_K Q5_K Q6_K IQ4_NL IQ4_XS PARTS FILE")
DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.int8: 3}  # int8: keys and values only
GROUPS: tuple[GroupName, ...] = ("full", "sliding")  # the order of a batch's tables
# The library's sources without comments, and the numbers they declare.
C = re.sub(r"/\*.*?\*/", "", "\n".join((HERE / name).read_text() for name in SOURCES), flags=re.DOTALL)
NUMBERS: dict[str, type] = {"int": c_int, "int32_t": c_int32, "int64_t": c_int64, "long": c_long, "float": c_float}


def members(name: str, **inner: type[Structure]) -> list[tuple[str, type]]:
    """The fields of a C struct, pointers as addresses. inner: the structs that it contains."""
    body = re.search(rf"typedef struct {{([^{{}}]*)}} {name};", C)
    assert body is not None, name
    kinds, found = NUMBERS | inner, list[tuple[str, type]]()
    for kind, declared in re.findall(r"(?:const )?(\w+) ([^;]+);", body[1]):
        for star, field, count in re.findall(r"([*]?)(\w+)(?:\[(\d)\])?(?:,|$)", declared):
            item = c_void_p if star else kinds[kind]
            found.append((field, operator.mul(item, int(count)) if count else item))
    return found


def signatures() -> Iterator[tuple[str, type | None, list[type]]]:
    """Of the library's functions: name, result and arguments."""
    for result, star, name, given in re.findall(r"^(\w+) (\*?)(or_\w+)\(([^)]*)\) \{", C, re.MULTILINE):
        given = [one for one in given.split(",") if one != "void"]
        arguments = [c_void_p if "*" in one else NUMBERS[one.split()[-2]] for one in given]
        yield name, c_void_p if star else NUMBERS.get(result), arguments


class CWeight(Structure):
    _fields_ = members("Weight")


class CSpec(Structure):
    _fields_ = members("Spec")


class CBatch(Structure):
    _fields_ = members("Batch")


class CMoe(Structure):
    _fields_ = members("Moe", Weight=CWeight)


class CLayer(Structure):
    _fields_ = members("Layer", Spec=CSpec, Weight=CWeight, Moe=CMoe)


class CStack(Structure):
    _fields_ = members("Stack", Weight=CWeight)


class CLowRankPiece(Structure):
    _fields_ = members("LowRankPiece")


class CLowRank(Structure):
    _fields_ = members("LowRank", Weight=CWeight, LowRankPiece=CLowRankPiece)


class CAdapters(Structure):
    _fields_ = members("Adapters")


class CCall(Structure):
    _fields_ = members("Call", Batch=CBatch, Adapters=CAdapters)


class CDraft(Structure):
    _fields_ = members("Draft", Call=CCall, Weight=CWeight)


class CBlockNet(Structure):
    _fields_ = members("BlockNet", Call=CCall, Weight=CWeight)


class CUnread(Structure):
    _fields_ = members("Unread")


class CCycle(Structure):
    _fields_ = members("Cycle", Call=CCall, Weight=CWeight)


class CChain(Structure):
    _fields_ = members("Chain", Call=CCall, Weight=CWeight)


def load(isa: str | None = None) -> ctypes.CDLL:
    """The library, built if necessary. ctypes releases the GIL during a call."""
    path = shared_object(isa)
    try:
        lib = ctypes.CDLL(str(path))
    except OSError as error:
        damaged = any(
            words in str(error)
            for words in ("file too short", "invalid ELF header", "file data overread", "cannot read file data")
        )
        # e.g. mounted noexec: building it again would not help
        if path.is_relative_to(SHIPPED) or not damaged:
            raise
        path.unlink()
        lib = ctypes.CDLL(str(shared_object(isa)))
    for name, result, arguments in signatures():
        function = getattr(lib, name)
        function.restype, function.argtypes = result, arguments
    mirrored = (CWeight, CSpec, CBatch, CLayer, CStack, CCall, CDraft, CCycle, CMoe, CChain, CLowRank)
    sizes = [ctypes.sizeof(s) for s in (*mirrored, CBlockNet, CUnread)]
    assert sizes == [lib.or_sizes(i) for i in range(len(sizes))], "not the library of these sources"
    return lib


def c_spec(spec: AttnSpec) -> CSpec:
    assert spec.head_dim <= 1024 and spec.heads // spec.kv_heads <= 32, "beyond the kernels' buffers"
    named = {name: getattr(spec, name) for name in ("heads", "kv_heads", "kv_layer", "writes", "k_eq_v", "norm_v")}
    group, window = spec.window is not None, spec.window or 0
    return CSpec(dim=spec.head_dim, group=group, window=window, scale=spec.scale, eps=spec.eps, **named)


def c_block_spec(attn: BlockAttn) -> CSpec:
    """The store's window decides the pages; a row sees back as far as the narrower of that and the layer's own."""
    c, windows = c_spec(attn.spec), [w for w in (attn.spec.window, attn.window) if w is not None]
    c.window, c.bidirectional = min(windows, default=0), not attn.causal
    return c


def dense_weight(w: Tensor) -> CWeight:
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
            c.places, c.paths, c.path_width = *map(self.hold, (kv.kv_slots, kv.ancestors)), kv.ancestors.shape[1]
        for i, group in enumerate(GROUPS):
            table = kv.tables.get(group)
            if table is not None:
                c.tables[i], c.width[i] = self.hold(table), table.shape[1]
        self.ref = byref(c)

    def hold(self, t: Tensor | None) -> int | None:
        if t is None:
            return None
        self.keep.append(t.contiguous())
        return self.keep[-1].data_ptr()


class CPages:
    """Pointers to every layer's keys and values. Made once for a cache: its tensors never move."""

    def __init__(self, kv: KVPages):
        held = [t for t in (*kv.keys, *kv.values) if t is not None]
        dtypes = {t.dtype for t in held}
        assert len(dtypes) == 1 and all(t.is_contiguous() for t in held), (
            "keys and values must be contiguous and of one dtype"
        )
        self.dtype, self.page_size = DTYPES[dtypes.pop()], kv.page_size
        count = len(kv.keys)
        self.keys = (c_void_p * count)(*[None if t is None else t.data_ptr() for t in kv.keys])
        self.values = (c_void_p * count)(*[None if t is None else t.data_ptr() for t in kv.values])

    def bind(self, batch: CBatch) -> None:
        batch.keys, batch.values = ctypes.addressof(self.keys), ctypes.addressof(self.values)
        batch.kv_dtype, batch.page_size = self.dtype, self.page_size
