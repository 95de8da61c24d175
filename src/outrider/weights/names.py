"""Which tensors a model wants, and which foreign tensors they are made of. Torch-free.

`tensor_plan(config)` names every canonical weight with its shape, its role and its sources. Sources are Hugging Face
names with the text tower's prefix brought to `model.` (`normalise`); several sources are concatenated along dim 0.
`ignored(name, config)` is the explicit list of what a checkpoint may hold beside them. Anything else is an error.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..models.config import DrafterConfig, LayerSpec, ModelConfig

Role = Literal["matrix", "embedding", "bias", "norm", "vector", "index"]
Config = ModelConfig | DrafterConfig


@dataclass(frozen=True)
class TensorPlan:
    """One canonical weight. Matrices, embeddings and biases take the load dtype (the first two also a packed form),
    norms and vectors are float32, an index is int64. `plus_one`: the checkpoint stores w - 1 (Gemma 3's
    safetensors)."""

    shape: tuple[int, ...]
    sources: tuple[str, ...]
    role: Role
    plus_one: bool = False
    parts: tuple[int, ...] = ()  # rows of each source along dim 0; () when there is one source

    @property
    def source_shapes(self) -> tuple[tuple[int, ...], ...]:
        if len(self.sources) == 1:
            return (self.shape,)
        return tuple((rows, *self.shape[1:]) for rows in self.parts)


# What multimodal checkpoints carry beside the text tower: names after `normalise`.
SKIPPED_PREFIXES = (
    "model.vision_tower.",
    "model.audio_tower.",
    "model.embed_vision.",
    "model.embed_audio.",
    "model.vision_embedder.",
    "model.multi_modal_projector.",
    "vision_tower.",
    "audio_tower.",
    "embed_vision.",
    "embed_audio.",
    "multi_modal_projector.",
)
# Buffers that old exports stored, and a checkpoint's factors for K/V in 8 bits: the cache needs none (fp8) or makes its
# own (int8).
SKIPPED_SUFFIXES = (
    ".rotary_emb.inv_freq",
    ".k_scale",
    ".v_scale",
    ".q_scale",
    ".prob_scale",
    ".k_cache_scale",
    ".v_cache_scale",
)
SHARED_KV = ("k_proj", "v_proj", "k_norm", "v_norm")


def normalise(name: str) -> str:
    """The text tower's names, whatever wraps it: `model.language_model.layers.0…` -> `model.layers.0…`."""
    for prefix, to in (
        ("model.language_model.", "model."),
        ("language_model.model.", "model."),
        ("language_model.lm_head.", "lm_head."),
        ("model.lm_head.", "lm_head."),
    ):
        if name.startswith(prefix):
            return to + name[len(prefix) :]
    return name


def ignored(name: str, config: Config) -> bool:
    """True for a (normalised) tensor that a checkpoint may hold and that this model does not use."""
    if name.startswith(SKIPPED_PREFIXES) or name.endswith(SKIPPED_SUFFIXES):
        return True
    if name.startswith("lm_head."):  # the tied head, stored twice
        return config.tied if isinstance(config, ModelConfig) else True
    if name.startswith("model.layers.") and ".self_attn." in name:
        head, tail = name.split(".self_attn.", 1)
        index = head.removeprefix("model.layers.")
        if index.isdigit() and int(index) < len(config.layers):
            return tail.partition(".")[0] in SHARED_KV and not config.layers[int(index)].attn.writes
    return False


def only_looked_up(config: Config, name: str) -> bool:
    """A table that no product reads: per-layer embeddings, and the embedding of a model with a head of its own."""
    return name == "ple_embed" or (name == "embed" and isinstance(config, ModelConfig) and not config.tied)


def roundable(name: str, plan: TensorPlan) -> bool:
    """A matrix that `--quantize` rounds on a GPU: quantised checkpoints too leave embeddings, heads and routers dense
    there."""
    return (
        plan.role in ("matrix", "embedding")
        and name not in ("embed", "ple_embed", "head")
        and not name.endswith(".router")
    )


def tensor_plan(config: Config) -> dict[str, TensorPlan]:
    return _target(config) if isinstance(config, ModelConfig) else _drafter(config)


def _rows(
    shape: tuple[int, ...], sources: tuple[str, ...], parts: tuple[int, ...], role: Role = "matrix"
) -> TensorPlan:
    return TensorPlan(shape, sources, role, parts=parts if len(sources) > 1 else ())


def _attention(
    plan: dict[str, TensorPlan], i: int, layer: LayerSpec, hidden: int, qkv_bias: bool, out_bias: bool
) -> None:
    attn, here, there = layer.attn, f"layers.{i}.", f"model.layers.{i}.self_attn."
    which = "q" if not attn.writes else ("qk" if attn.k_eq_v else "qkv")
    parts = tuple((attn.heads if w == "q" else attn.kv_heads) * attn.head_dim for w in which)
    plan[here + "qkv"] = _rows((attn.qkv_rows, hidden), tuple(f"{there}{w}_proj.weight" for w in which), parts)
    if qkv_bias:
        plan[here + "qkv_bias"] = _rows((attn.qkv_rows,), tuple(f"{there}{w}_proj.bias" for w in which), parts, "bias")
    plan[here + "out"] = TensorPlan((hidden, attn.heads * attn.head_dim), (there + "o_proj.weight",), "matrix")
    if out_bias:
        plan[here + "out_bias"] = TensorPlan((hidden,), (there + "o_proj.bias",), "bias")


def _mlp(plan: dict[str, TensorPlan], i: int, inter: int, hidden: int, bias: bool) -> None:
    here, there = f"layers.{i}.", f"model.layers.{i}.mlp."
    plan[here + "gate_up"] = _rows(
        (2 * inter, hidden), (there + "gate_proj.weight", there + "up_proj.weight"), (inter, inter)
    )
    plan[here + "down"] = TensorPlan((hidden, inter), (there + "down_proj.weight",), "matrix")
    if bias:
        plan[here + "gate_up_bias"] = _rows(
            (2 * inter,), (there + "gate_proj.bias", there + "up_proj.bias"), (inter, inter), "bias"
        )
        plan[here + "down_bias"] = TensorPlan((hidden,), (there + "down_proj.bias",), "bias")


def _norms(
    plan: dict[str, TensorPlan], i: int, layer: LayerSpec, hidden: int, sandwich: bool, qk_norm: bool, plus_one: bool
) -> None:
    here, there = f"layers.{i}.", f"model.layers.{i}."

    def norm(name: str, source: str, size: int = hidden) -> None:
        plan[here + name] = TensorPlan((size,), (there + source + ".weight",), "norm", plus_one)

    norm("attn_norm", "input_layernorm")
    if sandwich:
        norm("post_attn_norm", "post_attention_layernorm")
        norm("mlp_norm", "pre_feedforward_layernorm")
        norm("post_mlp_norm", "post_feedforward_layernorm")
    else:  # Llama's name for the norm before the MLP
        norm("mlp_norm", "post_attention_layernorm")
    if qk_norm:
        norm("q_norm", "self_attn.q_norm", layer.attn.head_dim)
        if layer.attn.writes:
            norm("k_norm", "self_attn.k_norm", layer.attn.head_dim)


def _moe(plan: dict[str, TensorPlan], i: int, config: ModelConfig) -> None:
    assert config.moe is not None
    here, there, hidden = f"layers.{i}.", f"model.layers.{i}.", config.hidden
    count, inter = config.moe.experts, config.moe.intermediate
    plan[here + "router"] = TensorPlan((count, hidden), (there + "router.proj.weight",), "matrix")
    plan[here + "router_scale"] = TensorPlan((hidden,), (there + "router.scale",), "vector")
    plan[here + "expert_scale"] = TensorPlan((count,), (there + "router.per_expert_scale",), "vector")
    plan[here + "experts_gate_up"] = TensorPlan((count, 2 * inter, hidden), (there + "experts.gate_up_proj",), "matrix")
    plan[here + "experts_down"] = TensorPlan((count, hidden, inter), (there + "experts.down_proj",), "matrix")
    for name, source in (
        ("post_mlp_norm_1", "post_feedforward_layernorm_1"),
        ("post_mlp_norm_2", "post_feedforward_layernorm_2"),
        ("mlp_norm_2", "pre_feedforward_layernorm_2"),
    ):
        plan[here + name] = TensorPlan((hidden,), (f"{there}{source}.weight",), "norm")


def _target(config: ModelConfig) -> dict[str, TensorPlan]:
    hidden, vocab, plus_one = config.hidden, config.vocab_size, config.family == "gemma3"
    plan = {"embed": TensorPlan((vocab, hidden), ("model.embed_tokens.weight",), "embedding")}
    if not config.tied:
        plan["head"] = TensorPlan((vocab, hidden), ("lm_head.weight",), "matrix")
    plan["norm"] = TensorPlan((hidden,), ("model.norm.weight",), "norm", plus_one)
    if config.ple_dim:
        wide = len(config.layers) * config.ple_dim
        plan["ple_embed"] = TensorPlan((vocab, wide), ("model.embed_tokens_per_layer.weight",), "embedding")
        plan["ple_proj"] = TensorPlan((wide, hidden), ("model.per_layer_model_projection.weight",), "matrix")
        plan["ple_norm"] = TensorPlan((config.ple_dim,), ("model.per_layer_projection_norm.weight",), "norm")
    for i, layer in enumerate(config.layers):
        here, there = f"layers.{i}.", f"model.layers.{i}."
        _attention(plan, i, layer, hidden, config.qkv_bias, config.out_bias)
        _mlp(plan, i, layer.intermediate, hidden, config.mlp_bias)
        _norms(plan, i, layer, hidden, config.sandwich, config.qk_norm, plus_one)
        if config.moe is not None:
            _moe(plan, i, config)
        if config.layer_scalar:
            plan[here + "scalar"] = TensorPlan((1,), (there + "layer_scalar",), "vector")
        if config.ple_dim:
            plan[here + "ple_gate"] = TensorPlan(
                (config.ple_dim, hidden), (there + "per_layer_input_gate.weight",), "matrix"
            )
            plan[here + "ple_out"] = TensorPlan(
                (hidden, config.ple_dim), (there + "per_layer_projection.weight",), "matrix"
            )
            plan[here + "ple_post_norm"] = TensorPlan((hidden,), (there + "post_per_layer_input_norm.weight",), "norm")
    return plan


def _drafter(config: DrafterConfig) -> dict[str, TensorPlan]:
    """Gemma 4's assistants, and our own drafters: no head when it is tied to the target's embedding, inputs from
    tapped layers beside the last hidden state, and the plain style without sandwich norms, q norm and scalar."""
    hidden, wide, vocab = config.hidden, config.backbone_hidden, config.vocab_size
    plan: dict[str, TensorPlan] = {}
    if not config.tied_to_target:
        plan["embed"] = TensorPlan((vocab, hidden), ("model.embed_tokens.weight",), "embedding")
    plan["pre"] = TensorPlan((hidden, (2 + len(config.taps)) * wide), ("pre_projection.weight",), "matrix")
    if config.has_post:
        plan["post"] = TensorPlan((wide, hidden), ("post_projection.weight",), "matrix")
    plan["norm"] = TensorPlan((hidden,), ("model.norm.weight",), "norm")
    if config.clusters:
        plan["centroids"] = TensorPlan(
            (config.clusters, config.head_hidden), ("masked_embedding.centroids.weight",), "matrix"
        )
        plan["token_ordering"] = TensorPlan((vocab,), ("masked_embedding.token_ordering",), "index")
    for i, layer in enumerate(config.layers):
        _attention(plan, i, layer, hidden, qkv_bias=False, out_bias=False)
        _mlp(plan, i, layer.intermediate, hidden, bias=False)
        _norms(plan, i, layer, hidden, sandwich=config.gemma, qk_norm=config.gemma, plus_one=False)
        if config.gemma:
            plan[f"layers.{i}.scalar"] = TensorPlan((1,), (f"model.layers.{i}.layer_scalar",), "vector")
    return plan
