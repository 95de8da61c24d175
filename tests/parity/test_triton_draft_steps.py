"""A large drafter's round in short kernels against the plain drafter, on the GPU or in Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton")

from tests.draft_rig import DEVICE, HIDDEN, batch_of, draft_rig  # noqa: E402

from gpu_rig import Rig  # noqa: E402
from outrider.ops.reference import ReferenceOps  # noqa: E402
from outrider.ops.triton import TritonOps  # noqa: E402
from outrider.ops.triton.draft_steps import SteppedDrafter, StepTiles, rounded, unsupported  # noqa: E402
from outrider.spec.mtp import MTPDrafter  # noqa: E402
from outrider.types import SamplingParams  # noqa: E402

REF = ReferenceOps()
# Both kinds of product over many columns leave their sums in parts; the head has more tiles than programs.
SMALL = StepTiles(
    q=(32, 4), out=(512, 2, 4), down=(512, 2, 4), pre=(32, 4), head=(32, 4, 1), attend=(8, 4, 32), chunk=32
)


def near(dense: Tensor) -> Tensor:
    words, factors = rounded(dense.contiguous())
    return words.view(torch.int8).float() * factors[:, None]


def round_weights(model: Any) -> None:
    """Give the plain drafter the weights that the kernels multiply."""
    model.blocks = [
        replace(b, qkv=near(b.qkv), out=near(b.out), gate_up=near(b.gate_up), down=near(b.down)) for b in model.blocks
    ]
    model.pre = torch.cat([near(model.pre[:, i:j]) for i, j in ((0, 32), (32, 48), (48, 80), (80, 96))], 1)
    model.head = near(model.head)


def rounded_rig() -> Rig:
    rig = draft_rig(1, use_ordered_embeddings=False)
    assert rig.drafter is not None
    round_weights(rig.drafter.model)
    return rig


@torch.inference_mode()
def test_round() -> None:
    """Beyond the window, greedy; and fewer keys than splits, with noise. A state that is not fed back, or a stale
    buffer, gives other tokens from the second step on."""
    rig = rounded_rig()
    assert rig.drafter is not None and unsupported(rig.drafter.model) is None
    seqs = rig.open(2, 61, 16)
    hot = SamplingParams(temperature=0.9, seed=7)
    assert isinstance(TritonOps(DEVICE, pdl=True).compile_drafter(rig.drafter.model), SteppedDrafter)
    seen: set[int] = set()
    for params, length in ((SamplingParams(), 61), (hot, 9)):
        stepped = SteppedDrafter(rig.drafter.model, SMALL, sms=4)
        batch = batch_of(rig, seqs, length, [params])
        want = rig.drafter.propose(batch, 3).tokens
        seen |= set(want.flatten().tolist())
        assert torch.equal(MTPDrafter(stepped, rig.model).propose(batch, 3).tokens, want)
        nodes = REF.chain_with_runner_ups(*stepped.runner_ups(3))
        assert torch.equal(nodes.tokens[:, ::4], want), "the line, and beside each of its tokens others"
        assert bool((nodes.chance.view(3, 4).diff(dim=1) <= 0).all()) and len(set(nodes.tokens[0, :4].tolist())) > 1
    assert len(seen) > 3
    pair = batch_of(rig, seqs, [40, 30], [SamplingParams(), hot])
    assert torch.equal(MTPDrafter(stepped, rig.model).propose(pair, 2).tokens, rig.drafter.propose(pair, 2).tokens), (
        "step by step"
    )


@torch.inference_mode()
def test_round_over_keys_in_eight_bits() -> None:
    rig = rounded_rig()
    assert rig.drafter is not None
    seqs = rig.open(1, 61, 16)
    for side in (rig.store.keys, rig.store.values):
        side[:] = [t if t is None else t.to(torch.float8_e4m3fn) for t in side]
    stepped = SteppedDrafter(rig.drafter.model, SMALL, sms=4)
    batch = batch_of(rig, seqs, 61, [SamplingParams()])
    assert torch.equal(MTPDrafter(stepped, rig.model).propose(batch, 3).tokens, rig.drafter.propose(batch, 3).tokens)


@torch.inference_mode()
def test_narrow() -> None:
    """int8 with a factor a row: the state is that of the rounded weights, and near that of the weights themselves."""
    rig = draft_rig(1, use_ordered_embeddings=False)
    assert rig.drafter is not None
    model: Any = rig.drafter.model
    batch = batch_of(rig, rig.open(1, 61, 16), 61, [SamplingParams()])

    stepped = SteppedDrafter(model, SMALL, sms=3)
    drafter = MTPDrafter(stepped, rig.model)
    tokens = drafter.propose(batch, 1).tokens
    first = stepped.g[None].clone()
    state = model.start(batch.kv, batch.features)
    assert error(first, model.step(rig.model.embed(batch.last), batch.features, state)[0]) < 0.05
    assert torch.equal(drafter.propose(batch, 2).tokens[:, :1], tokens)
    second = stepped.g[None].clone()

    mix = near(model.pre[:, HIDDEN:] @ model.post)  # what is fed back, in the drafter's own width
    round_weights(model)
    g, _ = model.step(rig.model.embed(batch.last), batch.features, state)
    assert error(first, g) < 1e-3
    assert torch.equal(tokens[:, 0], (model.head @ first.T).argmax(0))
    hidden = (torch.linalg.pinv(model.pre[:, HIDDEN:]) @ mix @ g.T).T  # a hidden state that brings just that
    assert error(second, model.step(rig.model.embed(tokens[:, 0]), hidden, state)[0]) < 2e-3


def error(got: Tensor, want: Tensor) -> float:
    return float((got - want).norm() / want.norm())
