"""The C library's structs and signatures. They must match the headers; sizes are checked at load."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, byref, c_float, c_int, c_int32, c_int64, c_long, c_void_p
from enum import IntEnum

import torch
from torch import Tensor

from ...types import AttnSpec, GroupName, KVPages, KVView
from .build import SHIPPED, shared_object

# how a weight is laid out, in the order of formats.h; GGUF's formats by their names
PackedKind = IntEnum("PackedKind", "DENSE Q4_1 Q4_0 Q8_0 Q5_0 Q5_1 Q4_K Q5_K Q6_K IQ4_NL IQ4_XS PARTS FILE")
DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.int8: 3}  # int8: keys and values only
GROUPS: tuple[GroupName, ...] = ("full", "sliding")  # the order of a batch's tables


def fields(kind: type, names: str) -> list[tuple[str, type]]:
    """Fields of one type, in the order of the C struct."""
    return [(name, kind) for name in names.split()]


class CWeight(Structure):
    _fields_ = [*fields(c_int32, "kind n k dtype"), *fields(c_void_p, "data scale")]


class CSpec(Structure):
    _fields_ = [
        *fields(c_int32, "heads kv_heads dim kv_layer writes group window k_eq_v norm_v"),
        *fields(c_float, "scale eps"),
    ]


class CBatch(Structure):
    _fields_ = [
        *fields(c_int32, "rows seqs page_size kv_dtype rope_shift"),
        *fields(c_void_p, "ids positions row_seq row_start"),
        ("tables", c_void_p * 2),
        ("width", c_int32 * 2),
        *fields(c_void_p, "keys values places paths"),
        ("path_width", c_int64),
    ]


class CMoe(Structure):
    _fields_ = [
        *fields(CWeight, "router gate_up down"),
        *fields(c_void_p, "router_norm norm expert_scale post_norm post_dense_norm"),
        *fields(c_int32, "experts top"),
    ]


class CLayer(Structure):
    _fields_ = [
        ("attn", CSpec),
        *fields(c_int32, "rope inter"),
        *fields(CWeight, "qkv out gate_up down ple_gate ple_out"),
        ("moe", CMoe),
        *fields(c_void_p, "attn_norm qkv_bias q_norm k_norm out_bias post_attn_norm"),
        *fields(c_void_p, "mlp_norm gate_up_bias down_bias post_mlp_norm scalar next_norm ple_post_norm"),
    ]


class CStack(Structure):
    _fields_ = [
        *fields(c_int32, "layers hidden act ropes ple"),
        *fields(c_float, "eps embed_scale ple_token_scale ple_proj_scale"),
        ("layer", POINTER(CLayer)),
        *fields(CWeight, "embed pre post ple_embed ple_proj"),
        ("ple_norm", c_void_p),
        ("inv_freq", POINTER(c_void_p)),
        ("rope_half", POINTER(c_int32)),
    ]


class CLowRankPiece(Structure):
    _fields_ = [*fields(c_int32, "end first rank spare"), ("at", c_int64)]


class CLowRank(Structure):
    _fields_ = [("a", CWeight), *fields(c_void_p, "b next"), ("lines", c_int64), ("piece", CLowRankPiece * 3)]


class CAdapters(Structure):
    _fields_ = [*fields(c_void_p, "table of"), ("count", c_int64)]


class CCall(Structure):
    _fields_ = [
        ("stack", POINTER(CStack)),
        ("batch", CBatch),
        *fields(c_void_p, "features hidden fed_back taps wanted"),
        ("few", CBatch),
        ("narrow", c_int32),
        ("adapters", CAdapters),
    ]


class CDraft(Structure):
    _fields_ = [
        ("call", CCall),
        *fields(CWeight, "table head centroids"),
        ("table_scale", c_float),
        *fields(c_int32, "steps unit tied clusters top size"),
        *fields(c_void_p, "cluster_ids hashes last start taps temperature sampled seed position out"),
        *fields(c_void_p, "confidence lengths stop drop trust rivals rival_confidence state top_k top_p min_logp"),
    ]


class CCycle(Structure):
    _fields_ = [
        ("call", CCall),
        ("head", CWeight),
        *fields(c_void_p, "draft taps features z asked drafts confidence parents path prices"),
        *fields(c_void_p, "temperature sampled seed top_k top_p min_logp trust chosen logprobs"),
        *fields(c_int32, "seqs most streams shift"),
        ("cap", c_float),
        ("likely", c_int32),
    ]


class CChain(Structure):
    _fields_ = [
        ("call", CCall),
        *fields(CWeight, "head all"),
        *fields(c_void_p, "listed seen seen_start"),
        ("cap", c_float),
        ("steps", c_int32),
        *fields(c_void_p, "temperature sampled seed position out confidence lengths stop drop trust"),
    ]


P, I, F, L, I64 = c_void_p, c_int, c_float, c_long, c_int64
CType = type[c_void_p] | type[c_int] | type[c_float] | type[c_long] | type[c_int64]
SIGNATURES: dict[str, tuple[CType | None, list[CType]]] = {
    "or_isa": (I, []),
    "or_sizes": (I, [I]),
    "or_team_new": (P, [I]),
    "or_team_free": (None, [P]),
    "or_team_size": (I, [P]),
    "or_packed_bytes": (I64, [I, I, I, I]),
    "or_pack": (None, [P, P, I, P, I64, I]),
    "or_take": (None, [P, P, P]),
    "or_coarse": (I, [P, P, P]),
    "or_linear": (None, [P, P, P, I, P, P]),
    "or_gated_linear": (None, [P, P, P, I, I, P]),
    "or_logits": (None, [P, P, P, I, F, P]),
    "or_lowrank": (I, [P, P, P, I, I, P]),
    "or_rows": (None, [P, P, I, F, P]),
    "or_cluster_lean": (None, [P, P, I, I, I, P, P, P, P, P]),
    "or_clustered": (None, [P, P, P, I, P, I, I, I, P, P]),
    "or_rms_norm": (None, [P, I, I, P, F, P]),
    "or_residual_norm": (None, [P, P, I, I, P, P, P, F, P, P, P]),
    "or_act_mul": (None, [P, L, P, L, I, I, I, P]),
    "or_angles": (None, [P, I, P, I, P, P]),
    "or_choose": (None, [P, P, I, I, P, P, P, P, P]),
    "or_logprobs": (None, [P, P, I, I, P, I, P]),
    "or_filter": (I, [P, P, I, I, P, P, P]),
    "or_moe": (I, [P, P, P, P, I, I, P]),
    "or_rope_write": (None, [P, P, P, P, P, P, P, P]),
    "or_attend": (I, [P, P, P, P, L, P]),
    "or_move_kv": (None, [P, P, P, P, P, I]),
    "or_forward": (I, [P, P]),
    "or_draft": (I, [P, P]),
    "or_decode_step": (I, [P, P]),
    "or_draft_model_steps": (I, [P, P]),
}


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
    for name, (result, arguments) in SIGNATURES.items():
        function = getattr(lib, name)
        function.restype, function.argtypes = result, arguments
    mirrored = (CWeight, CSpec, CBatch, CLayer, CStack, CCall, CDraft, CCycle, CMoe, CChain, CLowRank)
    sizes = [ctypes.sizeof(s) for s in mirrored]
    assert sizes == [lib.or_sizes(i) for i in range(len(sizes))], "lib.py and the headers disagree"
    return lib


def c_spec(spec: AttnSpec) -> CSpec:
    assert spec.head_dim <= 1024 and spec.heads // spec.kv_heads <= 32, "beyond the kernels' buffers"
    named = {name: getattr(spec, name) for name in ("heads", "kv_heads", "kv_layer", "writes", "k_eq_v", "norm_v")}
    group, window = spec.window is not None, spec.window or 0
    return CSpec(dim=spec.head_dim, group=group, window=window, scale=spec.scale, eps=spec.eps, **named)


def dense_weight(w: Tensor) -> CWeight:
    """[..., K] of any float type, read in place."""
    return CWeight(PackedKind.DENSE, w.numel() // w.shape[-1], w.shape[-1], DTYPES[w.dtype], w.data_ptr(), None)


class CBatchBuffers:
    """A KVView as a C struct; keeps the memory behind its pointers alive."""

    def __init__(self, kv: KVView, pages: CPages, ids: Tensor | None = None):
        self.keep: list[Tensor] = []
        assert kv.positions.dtype == kv.row_seq.dtype == torch.int64 and kv.row_start.dtype == torch.int32
        c = self.c = CBatch(kv.positions.shape[0], kv.row_start.shape[0] - 1)
        pages.bind(c)
        c.ids, c.positions, c.row_seq, c.row_start = map(self.hold, (ids, kv.positions, kv.row_seq, kv.row_start))
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
