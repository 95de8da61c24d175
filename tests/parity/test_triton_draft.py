"""A drafter's round in one launch against the same round step by step, on the GPU or phase by phase in Triton's interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")

from outrider.bench.gpu import Rig  # noqa: E402
from outrider.ops.reference import ReferenceOps  # noqa: E402
from outrider.ops.triton.draft import FusedDrafter, unsupported  # noqa: E402
from outrider.spec.choose import SamplingBatch  # noqa: E402
from outrider.spec.drafter import DraftBatch  # noqa: E402
from outrider.spec.mtp import MTPDrafter  # noqa: E402
from outrider.types import SamplingParams  # noqa: E402

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
KINDS = ["sliding_attention", "sliding_attention", "full_attention"]
TEXT = dict(
    vocab_size=256, hidden_size=48, num_hidden_layers=3, layer_types=KINDS, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
    global_head_dim=64, intermediate_size=64, sliding_window=24, max_position_embeddings=512, final_logit_softcapping=30.0,
    num_kv_shared_layers=0, tie_word_embeddings=True, hidden_size_per_layer_input=0,
)  # fmt: skip
DRAFT = {**TEXT, "hidden_size": 32, "num_kv_shared_layers": 3, "final_logit_softcapping": None}


def rig_of(clustered: bool) -> Rig:
    assistant = {
        "model_type": "gemma4_assistant", "text_config": DRAFT, "backbone_hidden_size": 48, "use_ordered_embeddings": clustered,
        "num_centroids": 16, "centroid_intermediate_top_k": 3,
    }  # fmt: skip
    rig = Rig({"model_type": "gemma4", "text_config": TEXT}, assistant, ReferenceOps(), DEVICE, torch.float32, slots=3, context=128)
    assert rig.drafter is not None
    for name, w in rig.drafter_weights.items():  # not all alike: a forgotten factor shows
        if name.endswith("scalar"):
            w.fill_(0.7)
        elif w.dim() == 2:
            w.mul_(8.0)
    return rig


def batch_of(rig: Rig, params: list[SamplingParams], lengths: list[int]) -> DraftBatch:
    n = len(params)
    seqs = rig.open(n, max(lengths), 16)
    last = torch.arange(5, 5 + n, device=DEVICE) * 17
    length = torch.tensor(lengths, device=DEVICE)
    each = torch.arange(n, device=DEVICE)
    slots = torch.tensor([s.slot for s in seqs], device=DEVICE)
    kv = rig.store.view(slots, length - 1, each, torch.arange(n + 1, dtype=torch.int32, device=DEVICE), 1, 128)
    g = torch.Generator().manual_seed(3)
    features = torch.randn((n, 48), generator=g).to(DEVICE)
    sampling = SamplingBatch.build(params, [[]] * n, [[]] * n, 256, DEVICE)
    return DraftBatch([""] * n, [[]] * n, last, length, features, kv, sampling, False, rig.ops, 256)


@torch.inference_mode()
def test_round() -> None:
    """Two sequences of unlike length (one beyond the window, one with fewer keys than splits), greedy and with noise; windowed
    layers cut the keys, the full one walks over several blocks. A state that is not fed back, or a stale scratch, gives other
    tokens from the second step on."""
    rig = rig_of(True)
    assert rig.drafter is not None and unsupported(rig.drafter.model) is None
    batch = batch_of(rig, [SamplingParams(), SamplingParams(temperature=0.9, seed=7)], [61, 9])
    want = rig.drafter.propose(batch, 3).tokens
    assert len(set(want.flatten().tolist())) > 3
    size: dict[str, Any] = {} if CUDA else dict(programs=5, splits=(2, 1))
    fused = FusedDrafter(rig.drafter.model, most=2, **size)
    drafter = MTPDrafter(fused, rig.model)
    draft = drafter.propose(batch, 3)
    assert torch.equal(draft.tokens, want) and draft.lengths.tolist() == [3, 3]
    fused.scratch.fill_(float("nan"))  # every phase writes what the next ones read
    assert torch.equal(drafter.propose(batch, 3).tokens, want), "a second round finds what the first left"
    fused.most = 1
    assert torch.equal(drafter.propose(batch, 3).tokens, want), "beyond `most` sequences: step by step"
    assert not fused.alarmed


def test_unsupported() -> None:
    rig = rig_of(False)
    assert rig.drafter is not None and "clustered" in str(unsupported(rig.drafter.model))
