"""A tiny Gemma 4 with its drafter in a rig: what the parity tests of whole draft rounds run on."""

from __future__ import annotations

from typing import Any

import torch

from gpu_rig import Rig
from outrider.cache.store import SeqCache
from outrider.ops.reference import ReferenceOps
from outrider.spec.drafter import DraftBatch
from outrider.spec.slot_sampling import sampling_batch
from outrider.types import SamplingParams

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HIDDEN = 48  # of the target; the drafter's is 32


def draft_rig(sliding: int, **assistant: Any) -> Rig:
    """sliding: windowed layers before the full one."""
    kinds = ["sliding_attention"] * sliding + ["full_attention"]
    text = dict(
        vocab_size=256, hidden_size=HIDDEN, num_hidden_layers=len(kinds), layer_types=kinds, num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32, global_head_dim=64, intermediate_size=64, sliding_window=24, max_position_embeddings=512,
        final_logit_softcapping=30.0,
        num_kv_shared_layers=0, tie_word_embeddings=True, hidden_size_per_layer_input=0,
    )  # fmt: skip
    draft = {**text, "hidden_size": 32, "num_kv_shared_layers": len(kinds), "final_logit_softcapping": None}
    drafter = {"model_type": "gemma4_assistant", "text_config": draft, "backbone_hidden_size": HIDDEN, **assistant}
    rig = Rig(
        {"model_type": "gemma4", "text_config": text},
        drafter,
        ReferenceOps(),
        DEVICE,
        torch.float32,
        slots=4,
        context=128,
    )
    assert rig.drafter is not None
    g = torch.Generator().manual_seed(5)
    for name, w in rig.drafter_weights.items():  # not all alike: a forgotten factor or norm shows
        if name.endswith("scalar"):
            w.fill_(0.7)
        elif name.endswith("norm"):
            w.copy_((0.25 if name.endswith("q_norm") else 1.0) * (1.0 + 0.3 * torch.randn(w.shape, generator=g)))
        elif w.dim() == 2:
            w.mul_(8.0)
    return rig


def batch_of(rig: Rig, seqs: list[SeqCache], contexts: int | list[int], params: list[SamplingParams]) -> DraftBatch:
    """The first sequences, one for each of `params`, at one context or at one each."""
    n = len(params)
    device = rig.device
    lengths = [contexts] * n if isinstance(contexts, int) else contexts
    slots = torch.tensor([s.slot for s in seqs[:n]], device=device)
    length = torch.tensor(lengths, device=device)
    each = torch.arange(n, device=device)
    start = torch.arange(n + 1, dtype=torch.int32, device=device)
    kv = rig.store.view(slots, length - 1, each, start, 1, max(lengths) + 64)
    rng = torch.Generator(device=device).manual_seed(lengths[0] + n)
    features = torch.randn((n, rig.config.hidden), device=device, generator=rng).to(rig.model.dtype)
    sampling = sampling_batch(params, [[]] * n, [[]] * n, rig.config.vocab_size, device)
    last = (each * 7919 + 11) % rig.config.vocab_size
    return DraftBatch([""] * n, [[]] * n, sampling, last, length, features, kv, rig.ops)
