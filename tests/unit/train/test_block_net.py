"""Block drafters: what is trained is what runs, from every anchor; where a new one starts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tests import tiny
from tests.block_drafters import context_of

from outrider.models.block import BlockNet
from outrider.models.decoder import TextModel
from outrider.train.block_net import BlockModule, new_block, spread_taps, start_from_layers, unused_token
from outrider.train.config import TrainConfig
from outrider.train.data import Sequences, make_batch
from outrider.train.target import DenseOps, capture
from outrider.types import OutriderError
from outrider.weights.load import load_target


def job(kind: str, **change: object) -> TrainConfig:
    config = TrainConfig("t", Path("d"), Path("o"), kind=kind, layers=2, unroll=4, taps=(0, 2))
    return replace(config, **change).resolved()


def model_of(tmp_path: Path, name: str = "smollm2") -> TextModel:
    config, weights, _ = load_target(str(tiny.write_target(name, tmp_path)), "cpu", torch.float32)
    return TextModel(config, weights, DenseOps())


def sequences(lengths: tuple[int, ...] = (19, 14), given: tuple[int, ...] = (5, 3)) -> Sequences:
    rng = np.random.default_rng(1)
    rows = [rng.integers(6, tiny.VOCAB, size=n) for n in lengths]
    return Sequences.of(rows, given, range(len(rows)), [True] * len(rows), tiny.VOCAB)


def random_net(config, model: TextModel) -> BlockModule:
    net = BlockModule(config, seed=2)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name in net.names:
            net.weight(name).add_(0.3 * torch.randn(net.weight(name).shape, generator=generator))
    return net


@pytest.mark.parametrize(("kind", "window"), [("dflash", None), ("dflash", 5), ("eagle3", None)])
@pytest.mark.parametrize("target", ["smollm2", "gemma3"])
def test_training_and_inference_agree(kind: str, window: int | None, target: str, tmp_path: Path) -> None:
    """Catches: anchors off by one, context beyond the anchor, slots that see other blocks, a shifted position."""
    model = model_of(tmp_path, target)
    config = new_block(job(kind), model.config, mask_id=4)
    if window is not None:
        first = replace(config.layers[0], attn=replace(config.layers[0].attn, window=window))
        config = replace(config, layers=(first, *config.layers[1:]), causal=(True, False))
    net = random_net(config, model)
    data = sequences()
    batch = make_batch(data, np.arange(2), 4, share=0.6, seed=(1,))
    seen = capture(model, batch.ids, net.taps)
    states = [g.detach() for g in net.unroll(net.cast(torch.float32), model, seen, batch, 4)]
    assert len(states) == 4
    run = BlockNet(config, {n: net.weight(n).detach() for n in net.names}, model.ops, model)
    line, at = batch.where(batch.anchors[0])
    assert len(line) == 14  # six tenths of 13 and of 10
    for b, a in zip(line.tolist(), at.tolist(), strict=True):
        streams = [t[b, : a + 1] for t in seen.taps]
        if kind == "dflash":
            ids = torch.full((1, config.block), config.mask_id)
            ids[0, 0] = batch.ids[b, a + 1]
            wanted = run.backbone(ids, context_of(run, streams), torch.tensor([a + 1]))[0, 1:]
        else:
            kv = context_of(run, [s[:a] for s in streams], batch.ids[b, 1 : a + 1])
            feature = run.context([s[a:] for s in streams])
            steps = []
            own_rows = run.rows(run.layers[0], feature, torch.tensor([a]), 4)
            for j in range(1, 5):
                token = batch.ids[b, min(a + j, batch.ids.shape[1] - 1)][None]
                h, feature = run.feature_step(token, feature, kv, own_rows, j - 1)
                steps.append(h[0])
            wanted = torch.stack(steps)
        mine = torch.stack([g[b, a - batch.first] for g in states])
        torch.testing.assert_close(mine, wanted, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("kind", ["dflash", "eagle3"])
def test_every_weight_learns(kind: str, tmp_path: Path) -> None:
    model = model_of(tmp_path)
    net = BlockModule(new_block(job(kind), model.config, mask_id=4))
    batch = make_batch(sequences(), np.arange(2), 4)
    drafts = list(net.unroll(net.cast(torch.float32), model, capture(model, batch.ids, net.taps), batch, 4))
    sum((g * torch.randn(g.shape, generator=torch.Generator().manual_seed(0))).sum() for g in drafts).backward()
    assert all(float(p.grad.abs().max()) > 0 for p in net.parameters())


def test_drawn_anchors_are_a_share_of_each_sequence() -> None:
    data = sequences((40, 12), (4, 4))
    whole, some, same, other = (
        make_batch(data, np.arange(2), 3, share=share, seed=(seed,))
        for share, seed in ((1.0, 0), (0.25, 0), (0.25, 0), (0.25, 1))
    )
    assert (whole.most, some.most) == (35, 9)
    assert torch.equal(some.anchors[0], same.anchors[0]) and not torch.equal(some.anchors[0], other.anchors[0])
    assert torch.isin(some.anchors[0], whole.anchors[0]).all() and torch.isin(some.anchors[2], some.anchors[0]).all()
    assert some.where(some.anchors[0])[0].bincount().tolist() == [9, 2]


def test_a_new_drafter_starts_from_the_target(tmp_path: Path) -> None:
    """Layers are copied, and attention has the scale that it has in the target."""
    model = model_of(tmp_path)
    net = BlockModule(new_block(job("dflash"), model.config, mask_id=4))
    start_from_layers(net, model, make_batch(sequences(), np.arange(2), 1), (0, 2))
    rows = net.config.layers[1].attn.heads * net.config.layers[1].attn.head_dim
    assert torch.equal(net.weight("layers.1.q"), model.blocks[2].qkv[:rows])
    assert torch.equal(net.weight("layers.1.down"), model.blocks[2].down)
    assert (
        torch.isfinite(net.weight("layers.0.q_norm")).all() and float(net.weight("layers.0.k_norm").min().detach()) > 0
    )


def test_taps_and_mask_token() -> None:
    assert spread_taps(30, 5) == (7, 12, 17, 23, 28) and spread_taps(3, 5) == (0, 1)
    config = type("C", (), {"family": "llama", "vocab_size": 9})()
    data = Sequences.of([np.array([1, 8, 7])], [1], [0], [True], 9)
    assert unused_token(data, config) == 6


def test_a_block_drafter_has_the_width_of_its_target(tmp_path: Path) -> None:
    with pytest.raises(OutriderError, match="width of its target"):
        new_block(job("dflash", hidden_size=8), model_of(tmp_path).config)
