"""Tiny engines on seeded random weights: every model variant, no files, reference ops."""

from __future__ import annotations

from typing import Any

import torch

from outrider.config import EngineConfig, SpecConfig
from outrider.engine.engine import Engine
from outrider.engine.memory import KVOptions
from outrider.engine.step import Request
from outrider.models.config import DrafterConfig, ModelConfig
from outrider.models.decoder import TextModel
from outrider.models.drafter import MTPNet
from outrider.ops.reference import ReferenceOps
from outrider.spec.controller import Controller
from outrider.spec.cost import CostTable
from outrider.spec.mtp import MTPDrafter
from outrider.types import NO_DRAFT, DraftPlan, SamplingParams
from outrider.weights.load import dummy_weights

VOCAB = 64
LLAMA = {
    "model_type": "llama", "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "intermediate_size": 48, "vocab_size": VOCAB, "max_position_embeddings": 16384, "tie_word_embeddings": False,
    "eos_token_id": 1,
}  # fmt: skip
GEMMA4 = {
    "model_type": "gemma4_text", "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "global_head_dim": 16, "num_global_key_value_heads": 1, "num_hidden_layers": 4, "intermediate_size": 48,
    "vocab_size": VOCAB,
    "layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 12, "attention_k_eq_v": True,
    "final_logit_softcapping": 30.0, "max_position_embeddings": 16384, "eos_token_id": 1,
}  # fmt: skip
VARIANTS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "qwen2": {**LLAMA, "model_type": "qwen2"},
    "qwen3": {**LLAMA, "model_type": "qwen3", "head_dim": 8},
    "mistral": {**LLAMA, "model_type": "mistral", "sliding_window": 9},
    "gemma3": {
        "model_type": "gemma3_text", "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 8,
        "num_hidden_layers": 3, "intermediate_size": 48, "vocab_size": VOCAB, "sliding_window": 12,
        "sliding_window_pattern": 3,
        "tie_word_embeddings": False,
    },
    "dense": GEMMA4,
    "edge": {
        **GEMMA4, "attention_k_eq_v": False, "num_kv_shared_layers": 2, "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCAB, "num_global_key_value_heads": None,
    },
    "moe": {**GEMMA4, "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16},
}  # fmt: skip


def assistant(target: dict[str, Any], clustered: bool) -> dict[str, Any]:
    text = {
        "hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": target["num_key_value_heads"],
        "head_dim": 8,
        "global_head_dim": 16, "num_global_key_value_heads": target.get("num_global_key_value_heads"),
        "num_hidden_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"], "intermediate_size": 24, "vocab_size": VOCAB,
        "num_kv_shared_layers": 2, "sliding_window": target["sliding_window"],
        "attention_k_eq_v": target["attention_k_eq_v"],
    }  # fmt: skip
    return {
        "model_type": "gemma4_assistant", "backbone_hidden_size": target["hidden_size"], "text_config": text,
        "use_ordered_embeddings": clustered, "num_centroids": 8, "centroid_intermediate_top_k": 3,
    }  # fmt: skip


class FixedDrafts:
    """In place of a `DraftPolicy`: every sequence of a scheduler under test has the same plan."""

    def __init__(self, plan: DraftPlan = NO_DRAFT):
        self.plan = plan

    def choose(self, ready: list[Any]) -> tuple[list[DraftPlan], None]:
        return [self.plan] * len(ready), None

    def host_draft(self, seq: Any, plan: DraftPlan) -> None:
        return None

    def positions(self, plan: DraftPlan) -> int:
        return plan.max_drafted


def tiny_model(variant: str, seed: int = 0, ops: Any = None) -> Any:
    config = ModelConfig.from_hf(VARIANTS[variant])
    ops = ops or ReferenceOps()
    weights = dummy_weights(config, "cpu", torch.float32, ops, None, seed)
    for weight in weights.values():
        if weight.ndim >= 2:
            weight *= 12.0  # far from uniform, so that texts differ
    return TextModel(config, weights, ops)


def mtp_drafter(model: Any, variant: str, clustered: bool = False, seed: int = 1) -> MTPDrafter:
    config = DrafterConfig.from_hf(assistant(VARIANTS[variant], clustered))
    weights = dummy_weights(config, "cpu", torch.float32, model.ops, None, seed)
    return MTPDrafter(MTPNet(config, weights, model.ops, model), model)


def tiny_engine(
    variant: str = "llama", drafter: Any = None, names: tuple[str, ...] = ("ngram",), k: int | None = 4,
    model: Any = None, kv: torch.dtype = torch.float32, **config: Any,
) -> Engine:  # fmt: skip
    model = model or tiny_model(variant)
    settings = EngineConfig(**{"max_batch": 8, "max_context": 512, "page_size": 4, "prefill_chunk": 16, **config})
    names = (drafter.name, *names) if drafter is not None else names
    engine = Engine(model, None, settings, SpecConfig(k), drafter, Controller(CostTable(), names), KVOptions(kv))
    engine.prefill.choices = ()  # else what steps take would decide how many a prompt takes
    return engine


def run_joining(
    engine: Engine,
    jobs: list[tuple[int, Request]],
    steps: int = 2000,
    audited: bool = True,
    logprobs: dict[str, list[Any]] | None = None,
) -> dict[str, list[int]]:
    """Each request joins at its step; audited after every one, or at the end. Tokens by request id; what was told of
    them in `logprobs`."""
    got: dict[str, list[int]] = {r.id: [] for _, r in jobs}
    for step in range(steps):
        for at, r in jobs:
            if at == step:
                engine.submit(r)
        if step > max(at for at, _ in jobs) and not engine.busy:
            break
        for event in engine.step():
            assert event.error is None, event.error
            got[event.id] += event.tokens
            if logprobs is not None:
                logprobs.setdefault(event.id, []).extend(event.logprobs or ())
        if audited:
            engine.check()
    assert not engine.busy
    engine.check()
    return got


def run(engine: Engine, requests: list[Request], steps: int = 5000) -> dict[str, list[int]]:
    """Submit, run to the end, audit; tokens by request id."""
    for request in requests:
        engine.submit(request)
    out: dict[str, list[int]] = {r.id: [] for r in requests}
    for _ in range(steps):
        if not engine.busy:
            break
        for event in engine.step():
            assert event.error is None
            out[event.id] += event.tokens
    assert not engine.busy, "the engine did not finish"
    engine.check()
    return out


def request(id: str, prompt: list[int], k: int | None = None, drafter: bool | str = True, **params: Any) -> Request:
    return Request(id, prompt, SamplingParams(**{"max_tokens": 24, "ignore_eos": True, **params}), k, drafter)
