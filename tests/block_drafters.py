"""Tiny block drafters of every layout, as folders with config.json and model.safetensors, for the targets of
`tests.engines` (hidden size 32, 64 tokens)."""

from __future__ import annotations

import json
import sys
import types
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from outrider.cache.store import CacheSpec, KVStore
from outrider.engine.engine import Engine
from outrider.models.block import BlockNet
from outrider.models.block_config import BlockConfig
from outrider.models.names import tensor_plan
from outrider.spec.block import BlockDrafter, load_block
from outrider.types import AttnSpec, KVView
from outrider.weights.files import from_folder

VOCAB = 64
QWEN: dict[str, Any] = {
    "model_type": "qwen3", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": VOCAB,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
}  # fmt: skip
MIXED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5, "use_sliding_window": True}
DFLASH = {"mask_token_id": 4, "target_layer_ids": [0, 1], "block_size": 6}
DFLASH2 = {**DFLASH, "conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 6, "selector_top_k": 8}
SPARK = {
    "target_layer_ids": [0, 1], "mask_token_id": 4, "block_size": 5, "markov_rank": 6, "markov_head_type": "vanilla",
    "enable_confidence_head": True, "confidence_head_with_markov": True,
}  # fmt: skip
GEMMA = {
    **QWEN, "model_type": "gemma4_text", "global_head_dim": 16, "num_global_key_value_heads": 1, "head_dim": 8,
    "attention_k_eq_v": True, "hidden_activation": "gelu_pytorch_tanh", "final_logit_softcapping": 30.0,
    "hidden_size_per_layer_input": 0,
}  # fmt: skip
SPECULATORS = {"transformer_layer_config": QWEN, "mask_token_id": 4, "block_size": 6, "draft_vocab_size": VOCAB}
AUX = {"aux_hidden_state_layer_ids": [1, 2]}
ONE = {**QWEN, "num_hidden_layers": 1}
LAYOUTS: dict[str, dict[str, Any]] = {
    "z-lab": {**QWEN, **MIXED, "architectures": ["DFlashDraftModel"], "dflash_config": DFLASH},
    "z-lab-old": {
        **QWEN, **MIXED, "use_sliding_window": False, "architectures": ["DFlashDraftModel"], "block_size": 6,
        "dflash_config": {"mask_token_id": 4, "target_layer_ids": [0, 1]},
    },
    "dflash2": {
        **QWEN, **MIXED, "architectures": ["DFlash2DraftModel"], "is_causal": False,
        "dflash_config": {**DFLASH2, "output_multiplier": 0.2, "final_logit_softcapping": 20.0},
    },
    "dspark": {**QWEN, **SPARK, "architectures": ["Qwen3DSparkModel"]},
    "dspark-gated": {**QWEN, **SPARK, "architectures": ["Qwen3DSparkModel"], "markov_head_type": "gated"},
    "dspark-rnn": {**QWEN, **SPARK, "architectures": ["Qwen3DSparkModel"], "markov_head_type": "rnn"},
    "deepseek-dflash": {
        **QWEN, **SPARK, "architectures": ["Qwen3DSparkModel"], "markov_rank": 0, "enable_confidence_head": False,
    },
    "specforge-dspark": {**QWEN, **SPARK, "architectures": ["DSparkDraftModel"]},
    "modelopt-dspark": {
        **QWEN, "architectures": ["DFlashDraftModel"],
        "dflash_config": {**DFLASH, "projector_type": "dspark", "markov_rank": 6},
    },
    "gemma-dspark": {**GEMMA, **SPARK, "architectures": ["Gemma4DSparkModel"]},
    "speculators-dflash": {**SPECULATORS, **AUX, "speculators_model_type": "dflash", "draft_vocab_size": 40},
    "speculators-dflash2": {
        **SPECULATORS, **AUX, "speculators_model_type": "dflash2", "conv_group_size": 8, "selector_rank": 6,
        "selector_top_k": 8,
    },
    "speculators-dspark": {**SPECULATORS, **AUX, "speculators_model_type": "dspark", "markov_rank": 6},
    "speculators-eagle3": {
        **SPECULATORS, "transformer_layer_config": ONE, "speculators_model_type": "eagle3", "draft_vocab_size": 40,
        "norm_before_residual": True, "eagle_aux_hidden_state_layer_ids": [1, 2],
    },
    "eagle3": {
        **ONE, "model_type": "llama", "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 40,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1]},
    },
    "eagle3-qwen": {
        **ONE, "architectures": ["Eagle3Qwen3ForCausalLM"], "draft_vocab_size": 40, "norm_before_fc": True,
        "eagle_aux_hidden_state_layer_ids": [1, 2],
    },
    "eagle3.1": {
        **ONE, "architectures": ["Eagle3LlamaForCausalLM"], "model_type": "llama", "draft_vocab_size": 40,
        "fc_norm": True, "norm_output": True, "eagle_aux_hidden_state_layer_ids": [1, 2],
    },
    "deepseek-eagle3": {**ONE, "architectures": ["Qwen3Eagle3Model"], "target_layer_ids": [0, 1]},
    "gemma-eagle3": {
        **GEMMA, "num_hidden_layers": 1, "architectures": ["Gemma4Eagle3Model"], "target_layer_ids": [0, 1],
    },
}  # fmt: skip


def tensors(raw: dict[str, Any], seed: int = 0, spread: float = 0.25) -> dict[str, Tensor]:
    """Random tensors that such a checkpoint holds, by their names on disk."""
    config = BlockConfig.from_hf(raw)
    generator = torch.Generator().manual_seed(seed)
    tensors_by_name = {}
    for plan in tensor_plan(config).values():
        for name, shape in zip(plan.sources, plan.source_shapes, strict=True):
            if plan.role == "index":  # offsets: draft id d is the target's id d + 20 from the 10th on
                tensors_by_name[name] = torch.where(torch.arange(shape[0]) < 10, 0, 20)
                continue
            values = torch.randn(shape, generator=generator)
            tensors_by_name[name] = (
                1.0 + 0.1 * values if plan.role == "norm" or name.endswith("layer_scalar") else spread * values
            )
    return {
        name.removesuffix(".weight") if "codebook" in name else name: value for name, value in tensors_by_name.items()
    }


def write(folder: Path, raw: dict[str, Any], state: dict[str, Tensor]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    save_file({name: value.contiguous() for name, value in state.items()}, folder / "model.safetensors")
    return folder


def net(folder: Path, raw: dict[str, Any], state: dict[str, Tensor], target: Any) -> BlockNet:
    return load_block(from_folder(write(folder, raw, state), "tiny"), target, torch.float32)


def drafter(folder: Path, layout: str, target: Any, seed: int = 0) -> BlockDrafter:
    raw = LAYOUTS[layout]
    return BlockDrafter(net(folder, raw, tensors(raw, seed, 1.0), target))


def context_of(block: BlockNet, streams: list[Tensor], following: Tensor | None = None) -> KVView:
    """One sequence whose positions 0, 1, … have these streams, with the drafter's K/V of them in a store of its own."""
    count = len(streams[0])
    store = KVStore(block.target.config, CacheSpec(1, 64, 4, 64, 64), torch.float32, "cpu", block.kv_specs)
    cache, _ = store.open()
    store.reserve(cache, max(count, 1))
    at = torch.arange(count)
    start = torch.tensor([0, count], dtype=torch.int32)
    kv = store.view(torch.tensor([cache.slot]), at, torch.zeros_like(at), start, count, max(count, 1))
    if count:
        block.write_context(streams, kv, torch.zeros_like(at) if following is None else following)
    return kv


def audit_pages(engine: Engine, block: BlockNet) -> int:
    """Checks sequences that decode in a C engine with pages of 16 in float32: after the drafter has caught up, its K/V
    is that of one pass over the whole text, bit for bit. Returns the number of sequences."""
    seqs = [seq for seq in engine.scheduler.running if seq.has_features and seq.computed == len(seq.tokens) - 1]
    engine.runner.catch_up(seqs)
    for seq in seqs:
        known = seq.computed
        store = KVStore(block.target.config, CacheSpec(1, 512, 16, 512, 512), torch.float32, "cpu", block.kv_specs)
        cache, _ = store.open()
        store.reserve(cache, known)
        at = torch.arange(known)
        start = torch.tensor([0, known], dtype=torch.int32)
        kv = store.view(torch.tensor([cache.slot]), at, torch.zeros_like(at), start, known, known)
        out = block.target.forward(torch.tensor(seq.tokens[:-1]), kv, block.config.taps or ())
        block.write_context(out.streams, kv, torch.tensor(seq.tokens[1:]))
        for spec in block.kv_specs:
            first = 0 if spec.window is None else max(0, known - spec.window + 1)  # pages before it are given back
            cached = kept(engine.store, seq.active_cache.slot, spec, known)
            fresh = kept(store, cache.slot, spec, known)
            for a, b in zip(cached, fresh, strict=True):
                assert torch.equal(a[:, first:], b[:, first:]), (seq.id, known)
    return len(seqs)


def kept(store: KVStore, slot: int, spec: AttnSpec, count: int) -> list[Tensor]:
    """K and V [heads, positions, D] of a layer, from tiles as the C library lays them out."""
    positions = []
    for pages, transposed in ((store.keys[spec.kv_layer], True), (store.values[spec.kv_layer], False)):
        assert pages is not None and pages.dtype == torch.float32
        rows = pages[store.tables[spec.group][slot, : -(-count // 16)].long()]  # [P, heads, 16, D]
        if transposed:
            rows = rows.view(*rows.shape[:2], spec.head_dim, 16).transpose(2, 3)
        positions.append(rows.transpose(0, 1).flatten(1, 2)[:, :count])
    return positions


def speculators(name: str) -> Any:
    """A module of the package, or the test is skipped."""
    if find_spec("speculators") is None:
        pytest.skip("speculators is not installed")
    absents: list[str] = []
    for absent in ("datasets", "hs_connectors"):  # for training: the models need none of it
        if find_spec(absent) is None:
            fake = types.ModuleType(absent)
            fake.__getattr__ = lambda name: object  # type: ignore[method-assign]
            fake.__spec__ = ModuleSpec(absent, None)
            sys.modules[absent] = fake
            absents.append(absent)
    try:
        return import_module(name)
    finally:
        for absent in absents:
            del sys.modules[absent]
