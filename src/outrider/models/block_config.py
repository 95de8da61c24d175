"""Block and feature drafters (DFlash, DFlash 2, DSpark, EAGLE-3), recognised by config.json alone. Torch-free.

`BlockConfig.from_hf` translates the layouts of z-lab (SpecForge, NVIDIA, ModelOpt), deepseek-ai, speculators (Red Hat)
and EAGLE-3. `taps` are target layers whose output is read, as `target_layer_ids` and ModelOpt's `eagle_config`;
`aux_hidden_state_layer_ids` of vLLM and speculators name the next layer: one more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from ..types import MAX_DRAFT, AttnSpec, OutriderError
from .config import (
    Foreign,
    ForeignDict,
    LayerSpec,
    ModelConfig,
    _activation,
    _alike_layers,
    _field,
    _gemma4_layers,
    misread,
)

Kind = Literal["dflash", "dflash2", "dspark", "eagle3"]
KINDS: tuple[Kind, ...] = ("dflash", "dflash2", "dspark", "eagle3")
Layout = Literal["z-lab", "deepseek", "speculators", "eagle3"]
ARCHITECTURES: dict[str, tuple[Kind, Layout]] = {
    "DFlashDraftModel": ("dflash", "z-lab"),
    "DFlash2DraftModel": ("dflash2", "z-lab"),
    "DSparkDraftModel": ("dspark", "z-lab"),
    "Qwen3DSparkModel": ("dspark", "deepseek"),
    "Gemma4DSparkModel": ("dspark", "deepseek"),
    "LlamaForCausalLMEagle3": ("eagle3", "eagle3"),
    "Eagle3LlamaForCausalLM": ("eagle3", "eagle3"),
    "Eagle3Qwen3ForCausalLM": ("eagle3", "eagle3"),
    "Eagle3Speculator": ("eagle3", "speculators"),
    "Qwen3Eagle3Model": ("eagle3", "deepseek"),
    "Gemma4Eagle3Model": ("eagle3", "deepseek"),
}
# Kinds that speculators writes and that are refused by name.
REFUSED = {"peagle": "P-EAGLE (speculators)", "mtp": "speculators' MTP layout", "xpress": "Xpress"}


@dataclass(frozen=True)
class BlockConfig:
    """One drafter. Layers own K/V of the drafter; `attn.kv_layer` counts from 0 and is bound to the store later."""

    kind: Kind
    layout: Layout
    hidden: int
    target_hidden: int  # width of a tapped stream
    vocab_size: int  # of the target
    draft_vocab: int  # rows of the head
    layers: tuple[LayerSpec, ...]
    causal: tuple[bool, ...]  # by layer: a slot of the block sees only slots before it
    taps: tuple[int, ...] | None  # None: EAGLE-3's default, which follows from the target's depth
    block: int  # tokens of a query block; EAGLE-3: maximum steps
    mask_id: int = -1  # token of the slots after the anchor; EAGLE-3 has none
    from_anchor: bool = False  # slot k predicts the token at position n + k + 1, so the anchor's slot predicts as well
    norm_eps: float = 1e-6
    activation: Literal["silu", "gelu_tanh"] = "silu"
    gemma: bool = False  # sandwich norms, a scalar for each layer
    qk_norm: bool = True
    qkv_bias: bool = False
    out_bias: bool = False
    target_layers: int | None = None  # depth of the target it was made for, where the file says
    needs_own: bool = False  # the checkpoint must hold its own embedding and head
    embed_scale: float | None = None  # of the embedding rows; None: as the target scales its own
    output_scale: float = 1.0  # of logits, before the soft cap
    softcap: float | None = None
    conv_taps: int = 0  # DFlash 2
    conv_group: int = 0
    selector_rank: int = 0
    selector_top: int = 0
    markov_rank: int = 0  # DSpark; 0: no sequential head
    markov: Literal["vanilla", "gated", "rnn"] = "vanilla"
    confidence: bool = False
    confidence_reads_markov: bool = False
    norm_before_residual: bool = False  # EAGLE-3
    norm_before_fc: bool = False
    fc_norms: bool = False
    norm_output: bool = False
    # Fields of an MTP drafter's configuration that training reads, and that a block drafter never has.
    clusters: ClassVar[int] = 0
    cluster_top: ClassVar[int] = 0
    weight_bits: ClassVar[int | None] = None

    @property
    def tied_to_target(self) -> bool:
        return not self.needs_own and self.draft_vocab == self.vocab_size and self.hidden == self.target_hidden

    @property
    def head_hidden(self) -> int:
        return self.hidden

    @property
    def max_tokens(self) -> int:
        return min(MAX_DRAFT, self.block if self.from_anchor else self.block - 1)

    @staticmethod
    def from_hf(raw: Foreign) -> BlockConfig:
        kind, layout = recognise(raw)
        body, extra = _parts(raw, layout)
        eagle = kind == "eagle3"
        gemma = _arch(raw) in ("Gemma4DSparkModel", "Gemma4Eagle3Model")
        layers, sliding = _gemma_layers(body) if gemma else _plain_layers(body, extra)
        vocab = _field(body, "vocab_size", int)
        hidden = _field(body, "hidden_size", int)
        default_act = "gelu_pytorch_tanh" if gemma else "silu"
        cap = extra.get("final_logit_softcapping")
        bias = bool(body.get("attention_bias", False))
        config = BlockConfig(
            kind=kind,
            layout=layout,
            hidden=hidden,
            target_hidden=int(raw.get("target_hidden_size") or hidden),
            vocab_size=vocab,
            draft_vocab=vocab if raw.get("draft_vocab_size") is None else _field(raw, "draft_vocab_size", int),
            layers=layers,
            taps=_taps(extra, layout),
            norm_eps=float(body.get("rms_norm_eps", 1e-6)),
            activation=_activation(body.get("hidden_activation") or body.get("hidden_act") or default_act),
            gemma=gemma,
            qkv_bias=bias,
            out_bias=bias,
            needs_own=layout == "deepseek",
            softcap=None if eagle and not gemma else max(0.0, float(cap or 0.0)) or None,
            **(_eagle3(raw, body, layers) if eagle else _block(kind, layout, sliding, raw=raw, extra=extra)),
        )
        if config.taps is None and not eagle:
            key = "aux_hidden_state_layer_ids" if layout == "speculators" else "target_layer_ids"
            raise OutriderError(f"config.json has no {key!r}: which target layers the drafter reads")
        if not 2 <= config.block <= 256:
            raise misread(f"block_size should be in 2..256, got {config.block}")
        if not eagle and not 0 <= config.mask_id < vocab:
            raise misread(f"mask_token_id {config.mask_id} is outside the vocabulary (0..{vocab - 1})")
        if not 1 <= config.draft_vocab <= vocab:
            raise misread(f"draft_vocab_size {config.draft_vocab} is not in 1..{vocab} (vocab_size)")
        return _with_heads(config, extra)

    def bound(self, target: ModelConfig) -> BlockConfig:
        """Fills in the taps that this target's depth implies; raises if the drafter does not fit."""
        reason = self.misfit(target)
        if reason is not None:
            raise OutriderError(f"this {self.kind} drafter does not fit {target.model_type}: {reason}")
        return replace(self, taps=self.tapped(target))

    def tapped(self, target: ModelConfig) -> tuple[int, ...]:
        count = len(target.layers)
        return (1, count // 2 - 1, count - 4) if self.taps is None else self.taps

    def stored(self, target: ModelConfig) -> tuple[AttnSpec, ...]:
        """K/V specs of the drafter's layers.

        A layer is stored with the target's full layers, or with its sliding ones if its window is not longer than
        theirs. A target without full layers keeps its window's positions of every layer.
        """
        windows = {target.layers[i].attn.window for i in target.kv_layers}
        sliding = next((w for w in windows if w is not None), None)
        specs = []
        for i, layer in enumerate(self.layers):
            window = layer.attn.window
            fits = sliding is not None and (None not in windows or (window is not None and window <= sliding))
            specs.append(replace(layer.attn, kv_layer=len(target.layers) + i, window=sliding if fits else None))
        return tuple(specs)

    def misfit(self, target: ModelConfig) -> str | None:
        """None where the drafter can run on this target, else the reason why not."""
        count = len(target.layers)
        if self.target_hidden != target.hidden:
            return f"it was made for a hidden size of {self.target_hidden}, the target has {target.hidden}"
        if self.vocab_size != target.vocab_size:
            return f"its vocabulary has {self.vocab_size} tokens, the target's {target.vocab_size}"
        if self.target_layers is not None and self.target_layers != count:
            return f"it was made for a target of {self.target_layers} layers, this one has {count}"
        taps = self.tapped(target)
        if any(not 0 <= tap < count for tap in taps) or len(set(taps)) != len(taps):
            return f"it reads the target layers {list(taps)}, the target has {count} layers"
        return None


def recognise(raw: Foreign) -> tuple[Kind, Layout]:
    """The kind of drafter and its layout. Raises if neither is known."""
    spoken = raw.get("speculators_model_type")
    if spoken is not None:
        if spoken not in KINDS:
            named = REFUSED.get(str(spoken), repr(spoken))
            raise misread(f"{named} drafters are not supported; known: {', '.join(KINDS)}")
        return spoken, "speculators"
    arch = _arch(raw)
    nested = raw.get("dflash_config")
    known = ARCHITECTURES.get(arch, ("dflash", "z-lab") if isinstance(nested, Mapping) else None)
    if known is None:
        raise misread(f"{arch or 'no architecture'} is not a block drafter ({', '.join(KINDS)})")
    if isinstance(nested, Mapping) and known[0] == "dflash":
        projector = nested.get("projector_type", "dflash")
        if projector not in ("dflash", "dspark"):
            raise misread(f"projector_type {projector!r} is not supported; known: dflash, dspark")
        return ("dspark" if projector == "dspark" else "dflash"), known[1]
    return known


def _arch(raw: Foreign) -> str:
    names = raw.get("architectures")
    return str(names[0]) if isinstance(names, list | tuple) and names else ""


def is_block(raw: Foreign) -> bool:
    """Whether a configuration describes a block or feature drafter, supported or not."""
    nested = isinstance(raw.get("dflash_config"), Mapping)
    return "speculators_model_type" in raw or _arch(raw) in ARCHITECTURES or nested


# ---- reading one foreign dict ---------------------------------------------------------------------------------------
def _parts(raw: Foreign, layout: Layout) -> tuple[Foreign, Foreign]:
    """The dict with the dimensions of the layers, and the one with the drafter's own settings."""
    if layout == "speculators":
        body = raw.get("transformer_layer_config")
        if not isinstance(body, Mapping):
            raise OutriderError("config.json has no 'transformer_layer_config'")
        return body, raw
    nested = raw.get("dflash_config")
    if nested is not None and not isinstance(nested, Mapping):
        raise misread("'dflash_config' should be an object")
    return raw, {**raw, **(nested or {})}


def _ints(value: object, name: str) -> tuple[int, ...]:
    if not isinstance(value, (list, tuple)) or not value or any(type(v) is not int for v in value):
        raise misread(f"{name} should be a list of layer numbers, got {str(value)[:40]}")
    return tuple(sorted(set(value)))


def _taps(extra: Foreign, layout: Layout) -> tuple[int, ...] | None:
    """Indices of streams after a layer, ascending; None where the file names none."""
    eagle = extra.get("eagle_config")
    if isinstance(eagle, Mapping) and eagle.get("eagle_aux_hidden_state_layer_ids"):
        return _ints(eagle["eagle_aux_hidden_state_layer_ids"], "eagle_aux_hidden_state_layer_ids")
    if extra.get("target_layer_ids") is not None and layout != "speculators":
        return _ints(extra["target_layer_ids"], "target_layer_ids")
    for key in ("aux_hidden_state_layer_ids", "eagle_aux_hidden_state_layer_ids"):
        if extra.get(key) is not None:
            return tuple(j - 1 for j in _ints(extra[key], key))
    return None


def _mask(extra: Foreign) -> int:
    for key in ("mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id"):
        if extra.get(key) is not None:
            return _field(extra, key, int)
    raise OutriderError("config.json has no 'mask_token_id'")


def _plain_layers(body: Foreign, extra: Foreign) -> tuple[tuple[LayerSpec, ...], tuple[bool, ...]]:
    """The layers, and which of them are called sliding: Qwen's have a window only with `use_sliding_window`."""
    count = _field(body, "num_hidden_layers", int)
    if not 1 <= count <= 64:
        raise misread(f"'num_hidden_layers' should be in 1..64, got {count}")
    kinds = body.get("layer_types") or ["full_attention"] * count
    window = body.get("sliding_window")
    if extra.get("use_swa"):
        kinds = ["sliding_attention"] * count
        window = extra.get("swa_window_size", window)
    known = ("sliding_attention", "full_attention")
    if not isinstance(kinds, (list, tuple)) or len(kinds) != count or any(k not in known for k in kinds):
        raise misread(f"layer_types must name {count} layers as {' or '.join(known)}")
    if not extra.get("use_swa") and body.get("model_type") in ("qwen2", "qwen3") and not body.get("use_sliding_window"):
        window = None
    elif "sliding_attention" in kinds and (type(window) is not int or window < 1):
        raise misread(f"sliding layers need a 'sliding_window', got {window!r}")
    return _alike_layers(body, kinds, window), tuple(k == "sliding_attention" for k in kinds)


def _gemma_layers(body: Foreign) -> tuple[tuple[LayerSpec, ...], tuple[bool, ...]]:
    """deepseek-ai's Gemma 4 drafters: layers of Gemma 4's full attention, without a window."""
    if body.get("enable_moe_block") or body.get("hidden_size_per_layer_input"):
        raise misread("a Gemma 4 drafter with experts or per-layer embeddings is not supported")
    count = _field(body, "num_hidden_layers", int)
    alike = {"layer_types": ["full_attention"] * count, "num_kv_shared_layers": 0, "per_layer_config": None}
    return _gemma4_layers({**body, **alike}), (False,) * count


def _causal(kind: Kind, layout: Layout, sliding: tuple[bool, ...], raw: Foreign, extra: Foreign) -> tuple[bool, ...]:
    """Whether each layer is causal: `is_causal`, then `dflash_config.causal`, else sliding layers are and full ones are
    not. speculators' `sliding_window_non_causal` is about sliding layers; deepseek-ai's layers are never causal."""
    if layout == "speculators":
        open_window = bool(raw.get("sliding_window_non_causal", kind == "dflash2"))
        return tuple(near and not open_window for near in sliding)
    causal = raw.get("is_causal") if raw.get("is_causal") is not None else extra.get("causal")
    if causal is not None:
        return (bool(causal),) * len(sliding)
    return (False,) * len(sliding) if kind == "dspark" else sliding


def _block(kind: Kind, layout: Layout, sliding: tuple[bool, ...], raw: Foreign, extra: Foreign) -> ForeignDict:
    depth = raw.get("num_target_layers")
    scale = None
    if extra.get("input_embedding_scale") is not None:
        scale = _field(extra, "input_embedding_scale", float)
    elif _arch(raw) == "Gemma4DSparkModel":
        scale = float(raw["hidden_size"]) ** 0.5
    return {
        "causal": _causal(kind, layout, sliding, raw=raw, extra=extra),
        "block": int(extra.get("block_size", 8 if layout == "speculators" else 16)),
        "mask_id": _mask(extra),
        "from_anchor": bool(extra.get("sample_from_anchor", kind == "dspark")),
        "target_layers": int(depth) if depth is not None else None,
        "embed_scale": scale,
        "output_scale": float(extra.get("output_multiplier", 1.0)),
    }


def _with_heads(config: BlockConfig, extra: Foreign) -> BlockConfig:
    """DFlash 2's convolutions and selector, DSpark's sequential and confidence heads."""
    if config.kind == "dflash2":
        defaults = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 256, "selector_top_k": 16}
        sizes = {key: int(extra.get(key, default)) for key, default in defaults.items()}
        taps, group, rank, top = sizes.values()
        if config.draft_vocab != config.vocab_size:
            raise misread("DFlash 2 with a reduced draft vocabulary is not supported")
        if min(sizes.values()) < 1 or config.hidden % group or taps > config.block or top > config.draft_vocab:
            raise misread(f"{sizes} do not fit a hidden size of {config.hidden}")
        return replace(config, conv_taps=taps, conv_group=group, selector_rank=rank, selector_top=top)
    if config.kind != "dspark":
        return config
    rank = int(extra.get("markov_rank", 256))
    head: Any = extra.get("markov_head_type") or "vanilla"
    if rank < 0 or head not in ("vanilla", "gated", "rnn"):
        raise misread(f"markov_rank {rank} with markov_head_type {head!r} is not supported")
    sure = bool(extra.get("enable_confidence_head", config.layout != "deepseek"))
    reads = bool(extra.get("confidence_head_with_markov", rank > 0))
    if sure and reads and not rank:
        raise misread("confidence_head_with_markov needs a markov_rank above 0")
    return replace(config, markov_rank=rank, markov=head, confidence=sure, confidence_reads_markov=sure and reads)


def _eagle3(raw: Foreign, body: Foreign, layers: tuple[LayerSpec, ...]) -> ForeignDict:
    if len(layers) != 1:
        raise misread(f"an EAGLE-3 drafter of {len(layers)} layers is not supported; known: one layer")
    if raw.get("norm_before_fc") and raw.get("fc_norm"):
        raise misread("norm_before_fc and fc_norm exclude one another")
    normed = ("Gemma4Eagle3Model", "Eagle3Qwen3ForCausalLM", "Qwen3Eagle3Model")
    return {
        "causal": (True,),
        "block": MAX_DRAFT,
        "from_anchor": True,
        "qk_norm": _arch(raw) in normed or body.get("model_type") == "qwen3",
        "fc_norms": bool(raw.get("fc_norm", False)),
        **{key: bool(raw.get(key, False)) for key in ("norm_before_residual", "norm_before_fc", "norm_output")},
    }
