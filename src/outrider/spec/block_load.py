"""Loads a block drafter's checkpoint: which tensors its configuration requires, and how they are read.

Names differ by author (a prefix, `midlayer`, un-nested heads); `renamed` maps them to one spelling. A missing, extra or
misshapen tensor is an error that names it, raised from the files' headers before any weight is read.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from math import prod

import torch
from torch import Tensor

from ..config import LoadFormat
from ..models.block import BlockNet
from ..models.block_config import BlockConfig
from ..models.config import LayerSpec
from ..models.decoder import TextModel
from ..models.inspect import DrafterSize
from ..models.names import PlanBuilder, TensorPlan
from ..ops.formats import DeviceWeight
from ..ops.reference import Backend, as_tensor
from ..types import OutriderError, require
from ..weights.files import Files, open_source
from ..weights.load import check, dense, kept_dtype, packed, transform, translate
from ..weights.quant_scheme import recipe
from ..weights.sizes import item_bytes
from ..weights.source import TensorSource

ALIASES = (
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
UNUSED = ("t2d", "verifier_norm.weight", "verifier_lm_head.weight", "rotary_emb.inv_freq")  # of training


def load_block(
    files: Files,
    target: TextModel,
    dtype: torch.dtype,
    load_format: LoadFormat = "auto",
    seed: int = 0,
    quantize: str | None = None,
) -> BlockNet:
    """quantize: the format of dense matrices; then also a copy of the target's head, if the drafter shares it."""
    config = translate(BlockConfig.from_hf, files).bound(target.config)
    if load_format == "dummy":
        return BlockNet(config, dummy_block(config, target, dtype, seed, quantize), target.ops, target).compiled()
    if (files.path / "mask_embedding.pt").is_file():
        raise OutriderError(f"{files.name}: a mask embedding in a file of its own (mask_embedding.pt) is not supported")
    source, how, ops = renamed(open_source(files)), recipe(files.config, files.name), target.ops
    plans = block_plan(config, source.entries)
    pieces = check(source, plans, target.config, how)
    mode = quantize or ops.capabilities.draft_format
    weights: dict[str, DeviceWeight] = {}
    for name, plan in plans.items():
        parts = [piece.read() for piece in pieces[name]]
        weight = packed(plan, parts, ops, target.device, False, False)
        if weight is None:
            weight = rounded(name, plan, dense(plan, parts, target.device, dtype, False), ops, mode)
        for piece in pieces[name]:
            piece.release()
        weights[name] = weight
    if "d2t" in weights:
        order = torch.arange(config.draft_vocab, device=target.device)
        if files.gguf is not None:  # the ids themselves there, not offsets
            weights["d2t"] = as_tensor(weights["d2t"]) - order
        ids = order + as_tensor(weights["d2t"])
        if bool(((ids < 0) | (ids >= config.vocab_size)).any()):
            raise OutriderError(
                f"{source.where}: tensor d2t names tokens outside the vocabulary of {config.vocab_size}"
            )
    return BlockNet(config, own_head(weights, target, quantize), ops, target).compiled()


def rounded(name: str, plan: TensorPlan, tensor: Tensor, ops: Backend, quantize: str | None) -> DeviceWeight:
    """A draft need not be exact: every matrix is quantised, and embeddings if the ops look up in quantised ones."""
    tables = plan.role == "embedding" and ops.capabilities.quantizes_tables
    if quantize is not None and (tables or plan.role == "matrix"):
        return ops.quantize(tensor, quantize)
    return transform(name, plan, tensor, ops, None)


def own_head(weights: dict[str, DeviceWeight], target: TextModel, quantize: str | None) -> dict[str, DeviceWeight]:
    """Adds a quantised copy of the target's head if the drafter has none of its own: a draft reads it once per pass."""
    whole = isinstance(target.head, Tensor) and target.together.tp.world == 1
    if quantize is not None and "head" not in weights and whole:
        weights["head"] = target.ops.quantize(as_tensor(target.head), quantize)
    return weights


def renamed(source: TensorSource) -> TensorSource:
    entries = {}
    for name, entry in source.entries.items():
        for old, new in ALIASES:
            if name.startswith(old):
                name = new + name[len(old) :]
        if name.endswith("_codebook"):  # DFlash 2's are stored without the suffix
            name += ".weight"
        require(name not in entries, f"{source.where}: tensor {name} is there twice, in two spellings")
        if not name.endswith(UNUSED):
            entries[name] = entry
    return replace(source, entries=entries)


def block_plan(config: BlockConfig, names: Collection[str]) -> dict[str, TensorPlan]:
    """Every weight, its shape and its sources. names: of the checkpoint, where parts are optional."""
    hidden, vocab, drafted, taps = config.hidden, config.vocab_size, config.draft_vocab, len(config.taps or ())
    plan = PlanBuilder(hidden)
    eagle, apart = config.kind == "eagle3", hidden != config.target_hidden
    if config.needs_own or apart or "embed_tokens.weight" in names:
        plan.add("embed", (vocab, hidden), "embed_tokens.weight", "embedding")
    if config.needs_own or apart or drafted < vocab or "lm_head.weight" in names:
        plan.add("head", (drafted, hidden), "lm_head.weight")
    if drafted < vocab or "d2t" in names:
        plan.add("d2t", (drafted,), "d2t", "index")
    plan.add("fc", (hidden, taps * config.target_hidden), "fc.weight")
    plan.norm("hidden_norm", "layers.0.hidden_norm" if eagle else "hidden_norm")
    plan.norm("norm", "norm")
    if config.norm_before_fc:
        plan.norm("input_norm", "input_norm", taps * config.target_hidden)
    for i in range(taps if config.fc_norms else 0):
        plan.norm(f"fc_norm.{i}", f"fc_norm.{i}", config.target_hidden)
    for i, layer in enumerate(config.layers):
        plan.layer(i, root="")
        _layer(plan, layer, config)
    plan.at = plan.inside = ""
    if config.kind == "dflash2":
        rank = config.selector_rank
        plan.add("predecessor", (vocab, rank), "candidate_selector.predecessor_codebook.weight", "embedding")
        plan.add("successor", (drafted, rank), "candidate_selector.successor_codebook.weight", "embedding")
        plan.add("selector", (rank, hidden), "candidate_selector.hidden_projection.weight")
    if rank := config.markov_rank:
        plan.add("markov_w1", (vocab, rank), "markov_head.markov_w1.weight", "embedding")
        plan.add("markov_w2", (drafted, rank), "markov_head.markov_w2.weight")
        wide = {"gated": ("gate_proj", rank, hidden + rank), "rnn": ("joint_proj", 3 * rank, 2 * rank + hidden)}
        if config.markov in wide:
            source, rows, columns = wide[config.markov]
            plan.stack("markov_joint", (rows,), (f"markov_head.{source}",), columns)
            plan.stack("markov_bias", (rows,), (f"markov_head.{source}",))
    if config.confidence:
        wide_input = hidden + (config.markov_rank if config.confidence_reads_markov else 0)
        plan.add("confidence", (1, wide_input), "confidence_head.proj.weight", "vector")
        plan.add("confidence_bias", (1,), "confidence_head.proj.bias", "vector")
    return plan


def _layer(plan: PlanBuilder, layer: LayerSpec, config: BlockConfig) -> None:
    attn, hidden = layer.attn, config.hidden
    width = 2 * hidden if config.kind == "eagle3" else hidden
    rows, kv = (attn.heads * attn.head_dim,), "k" if attn.k_eq_v else "kv"
    kv_rows = (attn.kv_heads * attn.head_dim,) * len(kv)
    q_proj, kv_proj, o_proj = (tuple(f"self_attn.{which}_proj" for which in names) for names in ("q", kv, "o"))
    plan.stack("q", rows, q_proj, width)
    plan.stack("kv", kv_rows, kv_proj, width)
    if config.qkv_bias:
        plan.stack("q_bias", rows, q_proj)
        plan.stack("kv_bias", kv_rows, kv_proj)
    plan.stack("out", (hidden,), o_proj, rows[0])
    if config.out_bias:
        plan.stack("out_bias", (hidden,), o_proj)
    if config.gemma:
        plan.add("scalar", (1,), "layer_scalar", "vector")
    plan.norms(attn, sandwich=config.gemma, qk_norm=config.qk_norm)
    plan.mlp(layer.intermediate, bias=False)
    for name, source in (("attn_conv", "attention_conv"), ("mlp_conv", "mlp_conv")) if config.conv_taps else ():
        taps, groups = config.conv_taps, hidden // config.conv_group
        plan.add(name, (2, taps, hidden), f"{source}.base_kernel", "vector")
        plan.add(f"{name}_projection", (2 * taps * groups, hidden), f"{source}.kernel_projection.weight")


def dummy_block(
    config: BlockConfig, target: TextModel, dtype: torch.dtype, seed: int, quantize: str | None = None
) -> dict[str, DeviceWeight]:
    generator = torch.Generator(device=target.device)
    generator.manual_seed(seed)
    weights: dict[str, DeviceWeight] = {}
    for name, plan in block_plan(config, ()).items():
        if plan.role == "index":  # every draft id is the same target id
            weights[name] = torch.zeros(plan.shape, dtype=torch.int64, device=target.device)
            continue
        made = torch.empty(plan.shape, dtype=kept_dtype(plan, dtype), device=target.device)
        if plan.role == "norm" or name.endswith("scalar"):
            made.fill_(1.0)
        else:
            made.normal_(0.0, 0.02, generator=generator)
        weights[name] = rounded(name, plan, made, target.ops, quantize)
    return own_head(weights, target, quantize)


def draft_size(config: BlockConfig) -> DrafterSize:
    """Weights of one pass, which drafts all tokens; the head is the target's if the drafter has none."""
    plan = block_plan(config, ())
    own = sum(prod(p.shape) for name, p in plan.items() if name not in ("embed", "d2t"))
    head = config.draft_vocab * config.hidden
    body = own - (head if "head" in plan else 0)
    return DrafterSize(own, body, head)


def block_bytes(files: Files, config: BlockConfig) -> tuple[int, float]:
    how, item, total, parameters = recipe(files.config, files.name), item_bytes(files.config), 0.0, 0
    for plan in block_plan(config, ()).values():
        for source, shape in zip(plan.sources, plan.source_shapes, strict=True):
            stored = how(source.removesuffix(".weight")) if how is not None and plan.role == "matrix" else None
            total += stored.format.nbytes(shape) if stored is not None else prod(shape) * item
            parameters += prod(shape)
    return parameters, total
