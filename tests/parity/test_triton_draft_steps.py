"""A large drafter's round in short kernels against the plain drafter, on the GPU or in Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton")

from outrider.bench.gpu import Rig  # noqa: E402
from outrider.ops.reference import ReferenceOps  # noqa: E402
from outrider.ops.triton import TritonOps  # noqa: E402
from outrider.ops.triton.draft_steps import Cuts, SteppedDrafter, rounded, unsupported  # noqa: E402
from outrider.spec.choose import SamplingBatch  # noqa: E402
from outrider.spec.drafter import DraftBatch  # noqa: E402
from outrider.spec.mtp import MTPDrafter  # noqa: E402
from outrider.types import SamplingParams  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KINDS = ["sliding_attention", "full_attention"]
TEXT = dict(
    vocab_size=256, hidden_size=48, num_hidden_layers=2, layer_types=KINDS, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
    global_head_dim=64, intermediate_size=64, sliding_window=24, max_position_embeddings=512, final_logit_softcapping=30.0,
    num_kv_shared_layers=0, tie_word_embeddings=True, hidden_size_per_layer_input=0,
)  # fmt: skip
DRAFT = {**TEXT, "hidden_size": 32, "num_kv_shared_layers": 2, "final_logit_softcapping": None}
ASSISTANT = {"model_type": "gemma4_assistant", "text_config": DRAFT, "backbone_hidden_size": 48, "use_ordered_embeddings": False}
# Both kinds of product over many columns leave their sums in parts; the head has more tiles than programs.
SMALL = Cuts(q=(32, 4), out=(512, 2, 4), down=(512, 2, 4), pre=(32, 4), head=(32, 4, 1), attend=(8, 4, 32), chunk=32)


def rig_of() -> Rig:
    rig = Rig({"model_type": "gemma4", "text_config": TEXT}, ASSISTANT, ReferenceOps(), DEVICE, torch.float32, slots=4, context=128)
    assert rig.drafter is not None and unsupported(rig.drafter.model) is None
    g = torch.Generator().manual_seed(5)
    for name, w in rig.drafter_weights.items():  # not all alike: a forgotten factor or norm shows
        if name.endswith("scalar"):
            w.fill_(0.7)
        elif name.endswith("norm"):
            w.copy_((0.25 if name.endswith("q_norm") else 1.0) * (1.0 + 0.3 * torch.randn(w.shape, generator=g)))
        elif w.dim() == 2:
            w.mul_(8.0)
    return rig


def batch_of(rig: Rig, params: list[SamplingParams], lengths: list[int]) -> DraftBatch:
    n = len(params)
    seqs = rig.open(n, max(lengths), 16)
    length, each = torch.tensor(lengths, device=DEVICE), torch.arange(n, device=DEVICE)
    slots = torch.tensor([s.slot for s in seqs], device=DEVICE)
    kv = rig.store.view(slots, length - 1, each, torch.arange(n + 1, dtype=torch.int32, device=DEVICE), 1, 128)
    features = torch.randn((n, 48), generator=torch.Generator().manual_seed(3)).to(DEVICE)
    sampling = SamplingBatch.build(params, [[]] * n, [[]] * n, 256, DEVICE)
    last = torch.arange(5, 5 + n, device=DEVICE) * 17
    return DraftBatch([""] * n, [[]] * n, last, length, features, kv, sampling, False, rig.ops, 256)


@torch.inference_mode()
def test_round() -> None:
    """Beyond the window, greedy, with norms in launches of their own; and fewer keys than splits, with noise. A state that is not
    fed back, or a stale buffer, gives other tokens from the second step on."""
    rig = rig_of()
    assert rig.drafter is not None
    hot = SamplingParams(temperature=0.9, seed=7)
    assert isinstance(TritonOps(DEVICE, pdl=True).compile_drafter(rig.drafter.model), SteppedDrafter)
    seen: set[int] = set()
    for params, length, apart in ((SamplingParams(), 61, True), (hot, 9, False)):
        stepped = SteppedDrafter(rig.drafter.model, False, replace(SMALL, ready_q=apart, ready_gate=apart), processors=3)
        batch = batch_of(rig, [params], [length])
        want = rig.drafter.propose(batch, 3).tokens
        seen |= set(want.flatten().tolist())
        assert torch.equal(MTPDrafter(stepped, rig.model).propose(batch, 3).tokens, want)
    assert len(seen) > 3
    pair = batch_of(rig, [SamplingParams(), hot], [40, 30])
    assert torch.equal(MTPDrafter(stepped, rig.model).propose(pair, 2).tokens, rig.drafter.propose(pair, 2).tokens), "step by step"


@torch.inference_mode()
def test_narrow() -> None:
    """int8 with a factor a row: the state is that of the rounded weights, and near that of the weights themselves."""
    rig = rig_of()
    assert rig.drafter is not None
    model: Any = rig.drafter.model
    batch = batch_of(rig, [SamplingParams()], [61])

    stepped = SteppedDrafter(model, cuts=SMALL, processors=3)
    drafter = MTPDrafter(stepped, rig.model)
    tokens = drafter.propose(batch, 1).tokens
    first = stepped.g[None].clone()
    state = model.start(batch.kv, batch.features)
    assert error(first, model.step(rig.model.embed(batch.last), batch.features, state)[0]) < 0.05
    assert torch.equal(drafter.propose(batch, 2).tokens[:, :1], tokens)
    second = stepped.g[None].clone()

    def near(dense: Tensor) -> Tensor:
        words, factors = rounded(dense.contiguous())
        return words.view(torch.int8).float() * factors[:, None]

    mix = near(model.pre[:, 48:] @ model.post)  # what is fed back, in the drafter's own width
    model.blocks = [replace(b, qkv=near(b.qkv), out=near(b.out), gate_up=near(b.gate_up), down=near(b.down)) for b in model.blocks]
    model.pre = torch.cat([near(model.pre[:, i:j]) for i, j in ((0, 32), (32, 48), (48, 80), (80, 96))], 1)
    g, _ = model.step(rig.model.embed(batch.last), batch.features, state)
    assert error(first, g) < 1e-3
    assert torch.equal(tokens[:, 0], (near(model.head) @ first.T).argmax(0))
    hidden = (torch.linalg.pinv(model.pre[:, 48:]) @ mix @ g.T).T  # a hidden state that brings just that
    assert error(second, model.step(rig.model.embed(tokens[:, 0]), hidden, state)[0]) < 2e-3


def error(got: Tensor, want: Tensor) -> float:
    return float((got - want).norm() / want.norm())
