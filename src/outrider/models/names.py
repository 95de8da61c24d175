"""Which tensors a model needs, and which tensors of a checkpoint they are made from. Torch-free.

`tensor_plan(config)` names every canonical weight with its shape, its role and its sources. Sources are Hugging Face
names with the text tower's prefix brought to `model.` (`normalise`); several sources are concatenated along dim 0.
`ignored(name, config)` is the explicit list of other tensors that a checkpoint may hold. Anything else is an error.
Authors of block drafters differ in names (a prefix, `midlayer`, un-nested heads); `block_name` has one spelling.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from ..types import AttnSpec
from .block_config import BlockConfig
from .config import DrafterConfig, ModelConfig, MoESpec

Role = Literal["matrix", "embedding", "bias", "norm", "vector", "index"]
Config = ModelConfig | DrafterConfig | BlockConfig


@dataclass(frozen=True)
class TensorPlan:
    """One canonical weight. Matrices, embeddings and biases take the load dtype, norms and vectors are float32, an
    index is int64. `plus_one`: the checkpoint stores w - 1 (Gemma 3's safetensors)."""

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


# Tensors of multimodal checkpoints outside the text tower: names after `normalise`.
TOWERS = ("vision_tower", "audio_tower", "embed_vision", "embed_audio", "vision_embedder", "multi_modal_projector")
SKIPPED_PREFIXES = tuple(f"{outer}{name}." for outer in ("", "model.") for name in TOWERS)
# Buffers of old exports, and a checkpoint's scales for 8-bit K/V: the cache needs none (fp8) or makes its own (int8).
SCALES = (".k_scale", ".v_scale", ".q_scale", ".prob_scale", ".k_cache_scale", ".v_cache_scale")
SKIPPED_SUFFIXES = (".rotary_emb.inv_freq", *SCALES)
SHARED_KV = ("k_proj", "v_proj", "k_norm", "v_norm")
# Spellings of block drafters by their authors, and ours.
BLOCK_ALIASES = (
    ("model.", ""),
    ("encoder.fc.", "fc."),
    ("encoder.output_norm_enc.", "hidden_norm."),
    ("midlayer.", "layers.0."),
    ("aux_norm_low.", "fc_norm.0."),
    ("aux_norm_mid.", "fc_norm.1."),
    ("aux_norm_high.", "fc_norm.2."),
    ("markov_w", "markov_head.markov_w"),
    ("markov_gate_proj.", "markov_head.gate_proj."),
    ("markov_joint_proj.", "markov_head.joint_proj."),
    ("confidence_proj.", "confidence_head.proj."),
)
UNUSED = ("t2d", "verifier_norm.weight", "verifier_lm_head.weight", "rotary_emb.inv_freq")  # of their training


def normalise(name: str) -> str:
    """The text tower's names without any wrapper's prefix: `model.language_model.layers.0` -> `model.layers.0`."""
    for prefix, to in (
        ("model.language_model.", "model."),
        ("language_model.model.", "model."),
        ("language_model.lm_head.", "lm_head."),
        ("model.lm_head.", "lm_head."),
    ):
        if name.startswith(prefix):
            return to + name[len(prefix) :]
    return name


def block_name(name: str) -> str:
    """A block drafter's tensor in the spelling of its plan."""
    for old, new in BLOCK_ALIASES:
        if name.startswith(old):
            name = new + name[len(old) :]
    return name + ".weight" if name.endswith("_codebook") else name  # DFlash 2's are stored without the suffix


def ignored(name: str, config: Config) -> bool:
    """True for a (normalised) tensor that a checkpoint may hold and that this model does not use."""
    if name.startswith(SKIPPED_PREFIXES) or name.endswith(SKIPPED_SUFFIXES):
        return True
    if name.startswith("lm_head."):  # the tied head, stored twice
        return config.tied if isinstance(config, ModelConfig) else isinstance(config, DrafterConfig)
    if name.startswith("model.layers.") and ".self_attn." in name:
        head, tail = name.split(".self_attn.", 1)
        index = head.removeprefix("model.layers.")
        if index.isdigit() and int(index) < len(config.layers):
            return tail.partition(".")[0] in SHARED_KV and not config.layers[int(index)].attn.writes
    return False


def only_looked_up(config: Config, name: str) -> bool:
    """A table that no matmul reads: per-layer embeddings, and the embedding of a model with a head of its own."""
    return name == "ple_embed" or (name == "embed" and isinstance(config, ModelConfig) and not config.tied)


def roundable(config: Config, name: str, plan: TensorPlan) -> bool:
    """A matrix that `--quantize` rounds on a GPU: embeddings, heads and routers stay dense. All of a block drafter's
    are rounded: a draft need not be exact."""
    if isinstance(config, BlockConfig):
        return plan.role == "matrix"
    dense = name in ("embed", "ple_embed", "head") or name.endswith(".router")
    return plan.role in ("matrix", "embedding") and not dense


def tensor_plan(config: Config, stored: Collection[str] = ()) -> dict[str, TensorPlan]:
    """Every weight, its shape and its sources. stored: the checkpoint's names, by which a block drafter has an
    embedding and a head of its own or not."""
    if isinstance(config, BlockConfig):
        return _block(config, stored)
    return _target(config) if isinstance(config, ModelConfig) else _drafter(config)


class PlanBuilder(dict[str, TensorPlan]):
    """Collects the weights of a plan. `at` and `inside`: the prefixes of our names and of the sources' names."""

    def __init__(self, hidden: int, plus_one: bool = False) -> None:
        super().__init__()
        self.hidden = hidden
        self.plus_one = plus_one
        self.at = ""
        self.inside = ""

    def layer(self, i: int, root: str = "model.") -> None:
        self.at = f"layers.{i}."
        self.inside = f"{root}layers.{i}."

    def add(self, name: str, shape: tuple[int, ...], source: str, role: Role = "matrix") -> None:
        plus_one = self.plus_one and role == "norm"
        self[self.at + name] = TensorPlan(shape, (self.inside + source,), role, plus_one=plus_one)

    def norm(self, name: str, source: str, size: int | None = None) -> None:
        self.add(name, (size or self.hidden,), source + ".weight", role="norm")

    def stack(
        self, name: str, rows: tuple[int, ...], modules: tuple[str, ...], columns: int, bias: bool = False
    ) -> None:
        """Stacks modules along their rows; with their biases, where they have them."""
        parts = rows if len(rows) > 1 else ()
        weights, biases = (tuple(f"{self.inside}{module}.{end}" for module in modules) for end in ("weight", "bias"))
        self[self.at + name] = TensorPlan((sum(rows), columns), weights, "matrix", parts=parts)
        if bias:
            self[f"{self.at}{name}_bias"] = TensorPlan((sum(rows),), biases, "bias", parts=parts)

    def attention(self, attn: AttnSpec, qkv_bias: bool, out_bias: bool, width: int = 0, apart: bool = False) -> None:
        """width: of the input, if it is not the hidden one. apart: queries and K/V are two weights."""
        which = "q" + "kv"[: attn.kv_parts]
        groups = {"q": which[:1], "kv": which[1:]} if apart else {"qkv": which}
        for name, members in groups.items():
            rows = tuple((attn.heads if w == "q" else attn.kv_heads) * attn.head_dim for w in members)
            self.stack(
                name, rows, tuple(f"self_attn.{w}_proj" for w in members), columns=width or self.hidden, bias=qkv_bias
            )
        self.stack("out", (self.hidden,), ("self_attn.o_proj",), columns=attn.heads * attn.head_dim, bias=out_bias)

    def mlp(self, inter: int, bias: bool) -> None:
        self.stack("gate_up", (inter, inter), ("mlp.gate_proj", "mlp.up_proj"), columns=self.hidden, bias=bias)
        self.stack("down", (self.hidden,), ("mlp.down_proj",), columns=inter, bias=bias)

    def norms(self, attn: AttnSpec, sandwich: bool, qk_norm: bool) -> None:
        self.norm("attn_norm", "input_layernorm")
        if sandwich:
            self.norm("post_attn_norm", "post_attention_layernorm")
            self.norm("mlp_norm", "pre_feedforward_layernorm")
            self.norm("post_mlp_norm", "post_feedforward_layernorm")
        else:  # Llama's name for the norm before the MLP
            self.norm("mlp_norm", "post_attention_layernorm")
        if qk_norm:
            self.norm("q_norm", "self_attn.q_norm", attn.head_dim)
            if attn.writes:
                self.norm("k_norm", "self_attn.k_norm", attn.head_dim)

    def experts(self, moe: MoESpec) -> None:
        self.add("router", (moe.experts, self.hidden), "router.proj.weight")
        self.add("router_scale", (self.hidden,), "router.scale", role="vector")
        self.add("expert_scale", (moe.experts,), "router.per_expert_scale", role="vector")
        self.add("experts_gate_up", (moe.experts, 2 * moe.intermediate, self.hidden), "experts.gate_up_proj")
        self.add("experts_down", (moe.experts, self.hidden, moe.intermediate), "experts.down_proj")
        self.norm("post_mlp_norm_1", "post_feedforward_layernorm_1")
        self.norm("post_mlp_norm_2", "post_feedforward_layernorm_2")
        self.norm("mlp_norm_2", "pre_feedforward_layernorm_2")


def _target(config: ModelConfig) -> dict[str, TensorPlan]:
    hidden = config.hidden
    vocab = config.vocab_size
    ple = config.ple_dim
    plan = PlanBuilder(hidden, plus_one=config.family == "gemma3")
    plan.add("embed", (vocab, hidden), "model.embed_tokens.weight", role="embedding")
    if not config.tied:
        plan.add("head", (vocab, hidden), "lm_head.weight")
    plan.norm("norm", "model.norm")
    if ple:
        wide = len(config.layers) * ple
        plan.add("ple_embed", (vocab, wide), "model.embed_tokens_per_layer.weight", role="embedding")
        plan.add("ple_proj", (wide, hidden), "model.per_layer_model_projection.weight")
        plan.norm("ple_norm", "model.per_layer_projection_norm", ple)
    for i, layer in enumerate(config.layers):
        plan.layer(i)
        plan.attention(layer.attn, config.qkv_bias, config.out_bias)
        plan.mlp(layer.intermediate, config.mlp_bias)
        plan.norms(layer.attn, config.sandwich, config.qk_norm)
        if config.moe is not None:
            plan.experts(config.moe)
        if config.layer_scalar:
            plan.add("scalar", (1,), "layer_scalar", role="vector")
        if ple:
            plan.add("ple_gate", (ple, hidden), "per_layer_input_gate.weight")
            plan.add("ple_out", (hidden, ple), "per_layer_projection.weight")
            plan.norm("ple_post_norm", "post_per_layer_input_norm")
    return plan


def _drafter(config: DrafterConfig) -> dict[str, TensorPlan]:
    """Gemma 4's assistants and our own drafters (see models/drafter.py)."""
    hidden = config.hidden
    wide = config.backbone_hidden
    vocab = config.vocab_size
    plan = PlanBuilder(hidden)
    if not config.tied_to_target:
        plan.add("embed", (vocab, hidden), "model.embed_tokens.weight", role="embedding")
    plan.add("pre", (hidden, (2 + len(config.taps)) * wide), "pre_projection.weight")
    if config.has_post:
        plan.add("post", (wide, hidden), "post_projection.weight")
    plan.norm("norm", "model.norm")
    if config.clusters:
        plan.add("centroids", (config.clusters, config.head_hidden), "masked_embedding.centroids.weight")
        plan.add("token_ordering", (vocab,), "masked_embedding.token_ordering", role="index")
    for i, layer in enumerate(config.layers):
        plan.layer(i)
        plan.attention(layer.attn, qkv_bias=False, out_bias=False)
        plan.mlp(layer.intermediate, bias=False)
        plan.norms(layer.attn, sandwich=config.gemma, qk_norm=config.gemma)
        if config.gemma:
            plan.add("scalar", (1,), "layer_scalar", role="vector")
    return plan


def _block(config: BlockConfig, stored: Collection[str]) -> dict[str, TensorPlan]:
    hidden = config.hidden
    vocab = config.vocab_size
    drafted = config.draft_vocab
    taps = len(config.taps or ())
    plan = PlanBuilder(hidden)
    eagle = config.kind == "eagle3"
    other_width = hidden != config.target_hidden
    if config.needs_own or other_width or "embed_tokens.weight" in stored:
        plan.add("embed", (vocab, hidden), "embed_tokens.weight", role="embedding")
    if config.needs_own or other_width or drafted < vocab or any(name.startswith("lm_head.weight") for name in stored):
        plan.add("head", (drafted, hidden), "lm_head.weight")
    if drafted < vocab or "d2t" in stored:
        plan.add("d2t", (drafted,), "d2t", role="index")
    plan.add("fc", (hidden, taps * config.target_hidden), "fc.weight")
    plan.norm("hidden_norm", "layers.0.hidden_norm" if eagle else "hidden_norm")
    plan.norm("norm", "norm")
    if config.norm_before_fc:
        plan.norm("input_norm", "input_norm", taps * config.target_hidden)
    for i in range(taps if config.fc_norms else 0):
        plan.norm(f"fc_norm.{i}", f"fc_norm.{i}", config.target_hidden)
    for i, layer in enumerate(config.layers):
        plan.layer(i, root="")
        plan.attention(layer.attn, config.qkv_bias, config.out_bias, width=2 * hidden if eagle else hidden, apart=True)
        if config.gemma:
            plan.add("scalar", (1,), "layer_scalar", role="vector")
        plan.norms(layer.attn, sandwich=config.gemma, qk_norm=config.qk_norm)
        plan.mlp(layer.intermediate, bias=False)
        for name, source in (("attn_conv", "attention_conv"), ("mlp_conv", "mlp_conv")) if config.conv_taps else ():
            per_group = 2 * config.conv_taps * (hidden // config.conv_group)
            plan.add(name, (2, config.conv_taps, hidden), f"{source}.base_kernel", role="vector")
            plan.add(f"{name}_projection", (per_group, hidden), f"{source}.kernel_projection.weight")
    plan.at = plan.inside = ""
    if config.kind == "dflash2":
        rank = config.selector_rank
        plan.add("predecessor", (vocab, rank), "candidate_selector.predecessor_codebook.weight", role="embedding")
        plan.add("successor", (drafted, rank), "candidate_selector.successor_codebook.weight", role="embedding")
        plan.add("selector", (rank, hidden), "candidate_selector.hidden_projection.weight")
    if config.markov_rank:
        rank = config.markov_rank
        plan.add("markov_w1", (vocab, rank), "markov_head.markov_w1.weight", role="embedding")
        plan.add("markov_w2", (drafted, rank), "markov_head.markov_w2.weight")
        wide = {"gated": ("gate_proj", rank, hidden + rank), "rnn": ("joint_proj", 3 * rank, 2 * rank + hidden)}
        if config.markov in wide:
            source, rows, columns = wide[config.markov]
            plan.stack("markov_joint", (rows,), (f"markov_head.{source}",), columns=columns, bias=True)
    if config.confidence:
        wide_input = hidden + (config.markov_rank if config.confidence_reads_markov else 0)
        plan.add("confidence", (1, wide_input), "confidence_head.proj.weight", role="vector")
        plan.add("confidence_bias", (1,), "confidence_head.proj.bias", role="vector")
    return plan
