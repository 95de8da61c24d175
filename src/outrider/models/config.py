"""Model configurations as frozen dataclasses, translated once from other projects' formats. Torch-free.

`ModelConfig.from_hf(dict)` reads a Hugging Face `config.json` (GGUF metadata is first turned into such a dict by
`weights.gguf_config`). The rest of the project sees no foreign dict.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

from ..types import AttnSpec, OutriderError

# the content of a JSON file or of GGUF metadata: any type at any depth, until it is translated here
Foreign = Mapping[str, Any]
ForeignDict = dict[str, Any]
T = TypeVar("T")
Family = Literal["llama", "gemma3", "gemma4"]

TYPES: dict[str, Family] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), "llama"),
    **dict.fromkeys(("gemma3_text", "gemma3"), "gemma3"),
    **dict.fromkeys(("gemma4_text", "gemma4", "gemma4_unified_text", "gemma4_unified"), "gemma4"),
}
ASSISTANT_TYPES = ("gemma4_assistant", "gemma4_unified_assistant")
OWN_DRAFTER_TYPES = ("outrider_drafter",)
FAMILIES = "Llama 2 and 3 (SmolLM2 too), Mistral, Qwen 2 and 3, Gemma 3 and Gemma 4"
GEMMA4_ROPE: dict[str, ForeignDict] = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
}
VOCAB: dict[Family, int] = {"gemma3": 262208, "gemma4": 262144}  # where a config.json does not say


@dataclass(frozen=True)
class RopeSpec:
    """Rotary embedding of one layer kind. Angles beyond `rotated` pairs are 0."""

    theta: float
    head_dim: int
    rotated: int  # rotated pairs, of head_dim/2
    scaling: Literal["none", "linear", "llama3"] = "none"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192


@dataclass(frozen=True)
class MoESpec:
    experts: int
    top_k: int
    intermediate: int


@dataclass(frozen=True)
class LayerSpec:
    attn: AttnSpec
    rope: RopeSpec
    intermediate: int

    @property
    def kind(self) -> str:
        return self.attn.group


@dataclass(frozen=True)
class ModelConfig:
    model_type: str
    family: Family
    vocab_size: int
    hidden: int
    layers: tuple[LayerSpec, ...]
    activation: Literal["silu", "gelu_tanh"]
    norm_eps: float
    embed_scale: float
    tied: bool  # the head is the embedding
    max_context: int
    softcap: float | None = None  # final logits: c·tanh(z/c)
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sandwich: bool = False  # norms after attention and MLP too (Gemma)
    layer_scalar: bool = False
    ple_dim: int = 0  # per-layer embeddings (Gemma 4 edge models); 0: none
    moe: MoESpec | None = None
    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None

    @property
    def kv_layers(self) -> tuple[int, ...]:
        return tuple(i for i, layer in enumerate(self.layers) if layer.attn.writes)

    def donor(self, kind: str) -> int:
        """The last layer of a kind that owns K/V, which shared layers and MTP drafters read."""
        owners = [i for i in self.kv_layers if self.layers[i].kind == kind]
        if not owners:
            raise OutriderError(f"{self.model_type}: no {kind} layer owns K/V")
        return owners[-1]

    @staticmethod
    def from_hf(raw: Foreign) -> ModelConfig:
        kind = _field(raw, "model_type", str)
        supported(kind)
        family = TYPES[kind]
        body = {"vocab_size": VOCAB.get(family), **(text_part(raw) or raw)}
        # the outer config's word counts: the head is the outer model's
        outer = ("eos_token_id", "bos_token_id", "tie_word_embeddings")
        body |= {key: raw[key] for key in outer if raw.get(key) is not None}
        for key, most in (("num_hidden_layers", 10_000), ("hidden_size", 1 << 24), ("vocab_size", 1 << 31)):
            if not 1 <= _field(body, key, int) <= most:
                bound = f"at most {most}" if body[key] > most else "at least 1"
                raise misread(f"{key!r} should be {bound}, got {body[key]}")
        hidden = _field(body, "hidden_size", int)
        gemma = family != "llama"
        if gemma and body.get("attention_bias"):  # no released text decoder has it
            raise OutriderError(f"{kind}: attention_bias is not supported")
        if gemma and body.get("use_bidirectional_attention") in (True, "all"):
            raise OutriderError(f"{kind}: bidirectional attention makes this an encoder, not a model that decodes")
        act = body.get("hidden_activation", "gelu_pytorch_tanh") if gemma else body.get("hidden_act", "silu")
        return ModelConfig(
            model_type=kind,
            family=family,
            vocab_size=_field(body, "vocab_size", int),
            hidden=hidden,
            activation=_activation(act),
            norm_eps=float(body.get("rms_norm_eps", 1e-6)),
            embed_scale=hidden**0.5 if gemma else 1.0,
            tied=bool(body.get("tie_word_embeddings", gemma)),
            max_context=int(body.get("max_position_embeddings", 131072 if gemma else 2048)),
            sandwich=gemma,
            qk_norm=gemma or kind == "qwen3",
            eos_ids=_ids(body.get("eos_token_id", 1 if gemma else None)),
            bos_id=next(iter(_ids(body.get("bos_token_id", 2 if gemma else None))), None),
            **{"llama": _llama, "gemma3": _gemma3, "gemma4": _gemma4}[family](kind, body),
        )


@dataclass(frozen=True)
class DrafterConfig:
    """An MTP drafter: query-only layers over the target's K/V. Layer i attends to that of target layer `reads[i]`;
    None (Gemma 4's assistants): to the donor of its kind (`bound_layers`)."""

    model_type: str
    backbone_hidden: int
    hidden: int
    vocab_size: int
    layers: tuple[LayerSpec, ...]
    reads: tuple[int, ...] | None
    norm_eps: float
    activation: Literal["silu", "gelu_tanh"] = "gelu_tanh"
    clusters: int = 0  # 0: full head
    cluster_top: int = 0
    position_offset: int = 2  # the constant position is L - offset (L: tokens so far, the newest not yet run)
    draft_tokens: int | None = None  # from generation_config, where the checkpoint says so
    tied_to_target: bool = False  # the head is the target's embedding, behind a projection
    taps: tuple[int, ...] = ()  # target layers whose hidden states are inputs as well as the last one
    target_hash: str | None = None  # what it was trained for (own drafters)
    gemma: bool = True  # False, style "plain" (own drafters): see models/drafter.py
    weight_bits: int | None = None  # 4: trained so that its layers may be held in 4 bits (blocks of 32)

    @property
    def head_hidden(self) -> int:
        """Input width of the head (and of the centroids)."""
        return self.backbone_hidden if self.tied_to_target else self.hidden

    @property
    def has_post(self) -> bool:
        """Whether a projection leads from the drafter's width back to the target's."""
        return self.gemma or self.hidden != self.backbone_hidden

    def read_layers(self, target: ModelConfig) -> tuple[int, ...]:
        """The target layer whose K/V each layer attends to."""
        if self.reads is not None:
            return self.reads
        return tuple(target.donor(layer.kind) for layer in self.layers)

    def misfit(self, target: ModelConfig) -> str | None:
        """None where the drafter can run on this target, else the reason why not."""
        if self.backbone_hidden != target.hidden:
            reason = f"the drafter was made for a hidden size of {self.backbone_hidden}"
            return f"{reason}, {target.model_type} has {target.hidden}"
        if self.vocab_size != target.vocab_size:
            return f"the drafter's vocabulary has {self.vocab_size} tokens, the target's {target.vocab_size}"
        if any(not 0 <= tap < len(target.layers) for tap in self.taps):
            return f"the drafter taps layers {list(self.taps)}, the target has {len(target.layers)}"
        try:
            read = self.read_layers(target)
        except OutriderError as error:  # no donor
            return str(error)
        if len(read) != len(self.layers):
            return f"the drafter has {len(self.layers)} layers but names {len(read)} layers to read"
        for i, (at, layer) in enumerate(zip(read, self.layers, strict=True)):
            if at not in target.kv_layers:
                return f"drafter layer {i} reads the K/V of target layer {at}, which owns none"
            ours = layer.attn
            theirs = target.layers[at].attn
            for what, key in (("head size", "head_dim"), ("K/V heads", "kv_heads"), ("window", "window")):
                value = getattr(ours, key)
                its = getattr(theirs, key)
                if value != its:
                    return f"drafter layer {i} expects {what} {value}, target layer {at} has {its}"
            if ours.heads % theirs.kv_heads:
                return (
                    f"drafter layer {i}: {ours.heads} heads, not a multiple of the target's {theirs.kv_heads} K/V heads"
                )
            if layer.rope != target.layers[at].rope:
                return f"drafter layer {i} rotates its queries otherwise than target layer {at} its keys (rope differs)"
        return None

    def bound_layers(self, target: ModelConfig) -> tuple[LayerSpec, ...]:
        """The layers with the K/V layer of each resolved; raises where the drafter does not fit."""
        reason = self.misfit(target)
        if reason is not None:
            raise OutriderError(f"drafter {self.model_type} does not fit the target: {reason}")
        pairs = zip(self.read_layers(target), self.layers, strict=True)
        return tuple(replace(layer, attn=replace(layer.attn, kv_layer=at)) for at, layer in pairs)

    @staticmethod
    def from_hf(raw: Foreign) -> DrafterConfig:
        kind = _field(raw, "model_type", str)
        if kind not in ASSISTANT_TYPES + OWN_DRAFTER_TYPES:
            known = ", ".join(ASSISTANT_TYPES + OWN_DRAFTER_TYPES)
            hint = f"known: {known} (a small model drafts as draft:MODEL)"
            raise OutriderError(f"model_type {kind!r} is not an MTP drafter; {hint}")
        body = text_part(raw) or raw
        style = raw.get("style", "gemma") if kind in OWN_DRAFTER_TYPES else "gemma"
        if style not in ("gemma", "plain"):
            raise misread(f"unknown drafter style {style!r}; known: gemma, plain")
        layers = _own_layers(raw) if style == "plain" else _gemma4_layers(body, drafter=True)
        clusters = int(raw.get("num_centroids", 2048)) if raw.get("use_ordered_embeddings") else 0
        vocab = _field(body, "vocab_size", int)
        if clusters and vocab % clusters:
            raise misread(f"{vocab} tokens do not divide into num_centroids = {clusters} clusters of one size")
        reads, draft_tokens, bits = (raw.get(key) for key in ("reads", "num_assistant_tokens", "weight_bits"))
        return DrafterConfig(
            model_type=kind,
            backbone_hidden=_field(raw, "backbone_hidden_size", int),
            hidden=_field(body, "hidden_size", int),
            vocab_size=vocab,
            layers=layers,
            reads=tuple(int(r) for r in reads) if reads is not None else None,
            norm_eps=float(body.get("rms_norm_eps", 1e-6)),
            activation=_activation(body.get("hidden_activation", "gelu_pytorch_tanh")),
            clusters=clusters,
            cluster_top=int(raw.get("centroid_intermediate_top_k", 32)) if clusters else 0,
            position_offset=int(raw.get("position_offset", 2)),
            draft_tokens=int(draft_tokens) if draft_tokens is not None else None,
            tied_to_target=bool(raw.get("tied_to_target", False)),
            taps=tuple(int(t) for t in raw.get("taps", ())),
            target_hash=raw.get("target_hash"),
            gemma=style == "gemma",
            weight_bits=int(bits) if bits is not None else None,
        )


# ---- reading one foreign dict -------------------------------------------------------------------------------------
def supported(kind: object) -> None:
    if kind in ASSISTANT_TYPES + OWN_DRAFTER_TYPES:
        raise OutriderError(f"model_type {kind!r} is a drafter, not a target: pass it with --drafter")
    if kind not in TYPES:
        raise OutriderError(f"unknown model_type {kind!r}: supported are {FAMILIES}")


def misread(what: str) -> OutriderError:
    return OutriderError(f"config.json: {what}")


def text_part(raw: Foreign) -> Foreign:
    """The text tower's part of a multimodal model's configuration; empty if nothing is nested."""
    text = raw.get("text_config")
    return text if isinstance(text, Mapping) else {}


def _field(raw: Foreign, key: str, kind: type[T]) -> T:
    value: T | None = raw.get(key)
    if value is None:
        raise OutriderError(f"config.json has no {key!r}")
    if (kind is int and isinstance(value, bool)) or not isinstance(value, (int, float) if kind is float else kind):
        raise misread(f"{key!r} should be {kind.__name__}, got {value!r}")
    return value


def _activation(name: object) -> Literal["silu", "gelu_tanh"]:
    if name in ("silu", "swish"):
        return "silu"
    if name in ("gelu_pytorch_tanh", "gelu_new", "gelu_tanh"):
        return "gelu_tanh"
    raise misread(f"unknown activation {name!r}; known: silu, gelu_pytorch_tanh")


def _ids(value: object) -> tuple[int, ...]:
    if value is None:
        return ()
    ids = value if isinstance(value, list | tuple) else (value,)
    wrong = [v for v in ids if not isinstance(v, int | float | str)]
    if wrong:
        raise misread(f"a token id should be a number, got {str(wrong[0])[:40]}")
    return tuple(int(v) for v in ids)


def _rope(params: Foreign | None, theta: float, head_dim: int) -> RopeSpec:
    """One rope dict of a config: transformers 5 `rope_parameters` or the older `rope_scaling`."""
    params = params or {}
    rope = RopeSpec(float(params.get("rope_theta", theta)), head_dim, head_dim // 2)
    kind = params.get("rope_type", params.get("type", "default")) or "default"
    if kind == "default":
        return rope
    if kind == "proportional":
        return replace(rope, rotated=int(float(params.get("partial_rotary_factor", 1.0)) * head_dim // 2))
    if kind == "linear":
        return replace(rope, scaling="linear", factor=float(params["factor"]))
    if kind != "llama3":
        raise misread(f"rope type {kind!r} is not supported; known: default, linear, llama3, proportional")
    factor, low, high = (float(params[key]) for key in ("factor", "low_freq_factor", "high_freq_factor"))
    original = int(params["original_max_position_embeddings"])
    return RopeSpec(
        rope.theta,
        head_dim,
        rope.rotated,
        scaling="llama3",
        factor=factor,
        low_freq_factor=low,
        high_freq_factor=high,
        original_context=original,
    )


def _every(period: int, count: int) -> list[str]:
    """Sliding layers, and a full one at the end of each period."""
    return ["sliding_attention" if (i + 1) % period else "full_attention" for i in range(count)]


def _alike_layers(raw: Foreign, kinds: Sequence[str], window: int | None) -> tuple[LayerSpec, ...]:
    """Layers of one shape with K/V of their own; "sliding_attention" has the window. A kind may have its own rope."""
    sizes = ("hidden_size", "num_attention_heads", "intermediate_size", "num_hidden_layers")
    hidden, heads, inter, count = (_field(raw, key, int) for key in sizes)
    kv_heads = int(raw.get("num_key_value_heads") or heads)
    head_dim = int(raw.get("head_dim") or hidden // heads)
    if kv_heads < 1 or heads % kv_heads:
        raise misread(f"{heads} attention heads are not a multiple of {kv_heads} K/V heads")
    eps = float(raw.get("rms_norm_eps", 1e-6))
    theta = float(raw.get("rope_theta", 10000.0))
    scale = float(raw.get("query_pre_attn_scalar") or head_dim) ** -0.5
    ropes = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    layers = []
    for i in range(count):
        kind = "sliding_attention" if kinds[i] == "sliding_attention" else "full_attention"
        near = window if kind == "sliding_attention" else None
        attn = AttnSpec(heads, kv_heads, head_dim, kv_layer=i, writes=True, window=near, scale=scale, eps=eps)
        layers.append(LayerSpec(attn, _rope(ropes.get(kind) or ropes, theta, head_dim), inter))
    return tuple(layers)


def _llama(kind: str, raw: Foreign) -> ForeignDict:
    count = _field(raw, "num_hidden_layers", int)
    qwen = kind in ("qwen2", "qwen3")
    window = raw.get("sliding_window", 4096 if kind == "mistral" else None)
    if qwen and not raw.get("use_sliding_window", False):
        window = None
    first = int(raw.get("max_window_layers", 28)) if qwen else 0
    sliding = ["sliding_attention" if window and i >= first else "full_attention" for i in range(count)]
    bias = bool(raw.get("attention_bias", False))
    return {
        "layers": _alike_layers(raw, raw.get("layer_types") or sliding, int(window) if window else None),
        "qkv_bias": bias or kind == "qwen2",
        "out_bias": bias and kind != "qwen2",
        "mlp_bias": bool(raw.get("mlp_bias", False)),
    }


def _gemma3(kind: str, raw: Foreign) -> ForeignDict:
    if raw.get("final_logit_softcapping") or raw.get("attn_logit_softcapping"):
        raise OutriderError("gemma3: soft-capped attention is Gemma 2's; this model_type does not have it")
    period = int(raw.get("sliding_window_pattern", raw.get("_sliding_window_pattern", 6)) or 6)
    kinds = raw.get("layer_types") or _every(period, _field(raw, "num_hidden_layers", int))
    rope = raw.get("rope_parameters") or {}
    full = {"rope_theta": raw.get("rope_theta", 1e6), **(rope.get("full_attention") or raw.get("rope_scaling") or {})}
    local = {"rope_theta": raw.get("rope_local_base_freq", 1e4), **(rope.get("sliding_attention") or {})}
    sizes = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "query_pre_attn_scalar": 256}
    body = {**sizes, **raw, "rope_parameters": {"full_attention": full, "sliding_attention": local}}
    return {"layers": _alike_layers(body, kinds, int(raw.get("sliding_window", 4096)))}


def _gemma4(kind: str, raw: Foreign) -> ForeignDict:
    sizes = ("num_experts", "top_k_experts", "moe_intermediate_size")
    cap = raw.get("final_logit_softcapping")
    return {
        "layers": _gemma4_layers(raw),
        "softcap": float(cap) if cap is not None else None,
        "layer_scalar": True,
        "ple_dim": int(raw.get("hidden_size_per_layer_input", 0 if "unified" in kind else 256) or 0),
        "moe": MoESpec(*(_field(raw, key, int) for key in sizes)) if raw.get("enable_moe_block") else None,
    }


def _gemma4_layers(raw: Foreign, drafter: bool = False) -> tuple[LayerSpec, ...]:
    count = _field(raw, "num_hidden_layers", int)
    heads = _field(raw, "num_attention_heads", int)
    k_eq_v = bool(raw.get("attention_k_eq_v", False))
    kinds = list(raw.get("layer_types") or _every(6, count))
    if len(kinds) != count or any(k not in ("sliding_attention", "full_attention") for k in kinds):
        raise misread(f"layer_types must name {count} layers as sliding_attention or full_attention")
    kinds[-1] = "full_attention"  # as transformers insists
    shapes = _gemma4_shapes(raw, kinds, heads, k_eq_v=k_eq_v)
    ropes = raw.get("rope_parameters") or {}
    eps = float(raw.get("rms_norm_eps", 1e-6))
    window = int(raw.get("sliding_window", 512))
    first_shared = 0 if drafter else count - int(raw.get("num_kv_shared_layers") or 0)
    wide = bool(raw.get("use_double_wide_mlp", False)) and not drafter
    owner: dict[str, int] = {}
    layers = []
    for i, (kind, (head_dim, kv_heads)) in enumerate(zip(kinds, shapes)):
        full = kind == "full_attention"
        writes = i < first_shared
        if writes:
            owner[kind] = i
        elif not drafter and kind not in owner:
            raise misread(f"layer {i} shares K/V but no {kind} layer before it owns any")
        near = None if full else window
        writer = owner.get(kind, -1)
        attn = AttnSpec(
            heads,
            kv_heads,
            head_dim,
            kv_layer=writer,
            writes=writes,
            window=near,
            scale=1.0,
            k_eq_v=k_eq_v and full,
            norm_v=True,
            eps=eps,
        )
        inter = _field(raw, "intermediate_size", int) * (2 if wide and not writes else 1)
        layers.append(LayerSpec(attn, _rope(ropes.get(kind) or GEMMA4_ROPE[kind], 1e4, head_dim), inter))
    return tuple(layers)


def _own_layers(raw: Foreign) -> tuple[LayerSpec, ...]:
    """The layers of a plain drafter: each is spelled out, because each may read a target layer of another shape."""
    listed = raw.get("layers")
    if not isinstance(listed, list) or not listed:
        raise misread("a plain drafter must list its 'layers'")
    eps = float(raw.get("rms_norm_eps", 1e-6))
    layers = []
    for one in listed:
        heads, kv, dim, inter = (_field(one, key, int) for key in ("heads", "kv_heads", "head_dim", "intermediate"))
        scale = float(_field(one, "scale", float))
        window = int(one.get("window") or 0) or None
        attn = AttnSpec(heads, kv, dim, kv_layer=-1, writes=False, window=window, scale=scale, eps=eps)
        layers.append(LayerSpec(attn, RopeSpec(**_field(one, "rope", dict)), inter))
    return tuple(layers)


def _gemma4_shapes(raw: Foreign, kinds: list[str], heads: int, k_eq_v: bool) -> list[tuple[int, int]]:
    """(head size, K/V heads) of every layer, from either spelling: `global_head_dim` and `num_global_key_value_heads`
    (which counts only with k_eq_v), or the newer `per_layer_config` with overrides by layer index."""
    head_dim = int(raw.get("head_dim", 256))
    kv = int(raw.get("num_key_value_heads", 4))
    overrides = raw.get("per_layer_config")
    if overrides is not None:
        items = overrides.items() if isinstance(overrides, Mapping) else [("", None)]
        if not all(str(i).isdigit() and isinstance(o, Mapping) for i, o in items):
            raise misread("per_layer_config must map layer numbers to overrides")
        unknown = sorted({key for o in overrides.values() for key in o} - {"head_dim", "num_key_value_heads"})
        if unknown:
            raise misread(f"per_layer_config overrides {unknown[0]!r}; known: head_dim, num_key_value_heads")
        by_layer = {int(i): o for i, o in overrides.items()}
        each = [by_layer.get(i, {}) for i in range(len(kinds))]
        shapes = [(int(o.get("head_dim", head_dim)), int(o.get("num_key_value_heads", kv))) for o in each]
    else:
        wide = (int(raw.get("global_head_dim", 512)), int((k_eq_v and raw.get("num_global_key_value_heads")) or kv))
        shapes = [wide if kind == "full_attention" else (head_dim, kv) for kind in kinds]
    for i, (_, kv_heads) in enumerate(shapes):
        if heads % kv_heads:
            raise misread(f"layer {i} has {heads} heads, not a multiple of its {kv_heads} K/V heads")
    return shapes
