"""The network that is trained is the drafter that runs: every style, from every anchor, over several steps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tests import tiny
from tests.kv import build_kv

from outrider.models.config import DrafterConfig
from outrider.models.decoder import TextModel
from outrider.models.drafter import MTPNet
from outrider.models.inspect import drafter_size, model_size
from outrider.ops.reference import ReferenceOps
from outrider.spec.slot_sampling import sampling_batch
from outrider.train import design
from outrider.train.data import Sequences, make_batch
from outrider.train.evaluate import Judge
from outrider.train.export import config_dict, save_drafter
from outrider.train.net import DrafterModule
from outrider.train.target import DenseOps, Recorder, capture
from outrider.types import SamplingParams
from outrider.weights.load import dummy_weights, load_target

LENGTH = 20  # beyond the tiny sliding window


def designs(config):
    if config.family == "llama":
        yield replace(design.plain(config, reads=(0, 2, 2), taps=(0, 1), intermediate=20), clusters=16, cluster_top=4)
        yield replace(design.plain(config, reads=(1,), hidden=24, intermediate=20), position_offset=1)
    else:
        yield replace(design.gemma(config, hidden=24, intermediate=20), clusters=16, cluster_top=4)
        yield design.plain(config, reads=config.kv_layers[-2:], intermediate=20)


@pytest.mark.parametrize("name", ["smollm2", "mistral", "gemma3", "gemma4_e2b", "gemma4_31b"])
def test_training_and_inference_agree(name: str, tmp_path: Path) -> None:
    """Catches: anchors off by one, another rotary position, keys beyond the anchor, windows, taps of the wrong
    position."""
    config, weights, _ = load_target(str(tiny.write_target(name, tmp_path)), "cpu", torch.float32)
    dense = TextModel(config, weights, DenseOps())
    paged = TextModel(config, weights, ReferenceOps())
    ids = torch.randint(6, tiny.VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    for drafter in designs(config):
        drafter_weights = dummy_weights(drafter, "cpu", torch.float32, seed=3)
        for key in drafter_weights:
            if drafter_weights[key].dim() == 2:
                drafter_weights[key] = drafter_weights[key] * 10
        net = DrafterModule(drafter, config)
        net.load(drafter_weights)
        seen = capture(dense, ids, drafter.taps)
        first = 7
        steps = 3
        data = Sequences.of(ids.numpy(), [first + 1] * 2, range(2), [True] * 2, tiny.VOCAB)
        batch = make_batch(data, np.arange(2), steps, multiple=1)
        assert batch.first == first
        trained = list(net.unroll(net.cast(torch.float32), dense, seen, batch, steps))

        cache = build_kv(config, 2, LENGTH)
        model = MTPNet(drafter, drafter_weights, paged.ops, paged)
        features = paged.forward(ids.reshape(-1), cache.view([(0, LENGTH)] * 2), drafter.taps).features
        torch.testing.assert_close(
            seen.hidden.reshape(2 * LENGTH, -1), features[:, : config.hidden], rtol=1e-4, atol=1e-4
        )
        for a in (first, 12, LENGTH - steps - 1):
            at = torch.tensor([a, LENGTH + a])
            state = model.start(cache.view([(a, 1)] * 2), features[at])
            hidden = features[at][:, : config.hidden]
            for j in range(1, steps + 1):
                g, hidden = model.step(paged.embed(ids[:, a + j]), hidden, state)
                torch.testing.assert_close(g, trained[j - 1][:, a - first], rtol=2e-4, atol=2e-4)
        # the head too: the tokens that training scores are those that the drafter scores
        greedy = sampling_batch([SamplingParams()] * len(g), [[]] * len(g), [[]] * len(g), config.vocab_size, "cpu")
        looked, z = model.candidates(g)
        best = z.argmax(-1) if looked is None else looked.gather(1, z.argmax(-1, keepdim=True))[:, 0]
        assert torch.equal(
            Judge(dense, net, full=False).choose(g, greedy, torch.zeros(len(g), dtype=torch.int64))[0], best
        )


def test_kept_states_are_those_of_a_fresh_capture(tmp_path: Path) -> None:
    """Kept once a sequence and padded together again: what a batch's own capture shows, at every position that is not
    padding."""
    config, weights, _ = load_target(str(tiny.write_target("smollm2", tmp_path)), "cpu", torch.float32)
    model = TextModel(config, weights, DenseOps())
    rng = np.random.default_rng(0)
    rows = [rng.integers(6, tiny.VOCAB, size=n) for n in (9, 17, 12)]
    data = Sequences.of(rows, (3, 5, 4), range(3), [True] * 3, tiny.VOCAB)
    batch = make_batch(data, np.array([2, 0, 1]), 2)
    fresh, stored = (Recorder(model, data, (0, 2), (1,), keep) for keep in (False, True))
    for _ in range(2):  # the second time from memory
        a = fresh.take(batch)
        b = stored.take(batch)
        assert fresh.likely(batch, a).equal(stored.likely(batch, b))
        for row, i in enumerate(batch.which):
            n = int(data.lengths[i])
            torch.testing.assert_close(a.hidden[row, :n], b.hidden[row, :n], rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(a.taps[0][row, :n], b.taps[0][row, :n], rtol=1e-4, atol=1e-5)
            for layer in (0, 2):
                torch.testing.assert_close(a.keys[layer][row, :, :n], b.keys[layer][row, :, :n], rtol=1e-4, atol=1e-5)
                torch.testing.assert_close(
                    a.values[layer][row, :, :n], b.values[layer][row, :, :n], rtol=1e-4, atol=1e-5
                )
    assert len(stored.kept) == 3 and not fresh.kept


@pytest.mark.parametrize("name", ["smollm2", "gemma3", "gemma4_e2b", "gemma4_31b"])
def test_config_survives_the_file(name: str, tmp_path: Path) -> None:
    config, _, _ = load_target(str(tiny.write_target(name, tmp_path)), "cpu", torch.float32)
    for drafter in designs(config):
        assert DrafterConfig.from_hf(config_dict(drafter)) == drafter


def test_a_draft_step_is_counted(tmp_path: Path) -> None:
    config, weights, _ = load_target(str(tiny.write_target("smollm2", tmp_path)), "cpu", torch.float32)
    assert model_size(config).active == sum(w.numel() for w in weights.values())
    drafter = replace(design.plain(config, reads=(0, 2), intermediate=20), clusters=16, cluster_top=4)
    drafter_weights = dummy_weights(drafter, "cpu", torch.float32)
    cost = drafter_size(drafter)
    assert cost.body == sum(w.numel() for n, w in drafter_weights.items() if n not in ("centroids", "token_ordering"))
    assert cost.head == (4 * tiny.VOCAB // 16 + 16) * config.hidden


def test_a_drafter_for_four_bits_is_written_in_their_values(tmp_path: Path) -> None:
    """Catches: a device without 4-bit kernels drafting with weights that were never trained as they are."""
    config, _, _ = load_target(str(tiny.write_target("smollm2", tmp_path)), "cpu", torch.float32)
    drafter = replace(design.plain(config, reads=(0,), hidden=64, intermediate=32), weight_bits=4)
    net = DrafterModule(drafter, config)
    weights = net.export()
    assert torch.equal(weights["norm"], net.weight("norm"))
    down = weights["layers.0.down"]  # [64, 32]: a block a row
    assert max(len(row.unique()) for row in down) <= 16 and not torch.equal(down, net.weight("layers.0.down"))
    whole = DrafterModule(replace(drafter, weight_bits=None), config)
    assert torch.equal(whole.export()["layers.0.down"], whole.weight("layers.0.down"))


def test_who_may_read_a_drafter_may_read_its_weights(tmp_path: Path) -> None:
    config, _, _ = load_target(str(tiny.write_target("smollm2", tmp_path / "m")), "cpu", torch.float32)
    drafter = design.plain(config, reads=(0,), hidden=64, intermediate=32)
    save_drafter(tmp_path / "d", drafter, DrafterModule(drafter, config).export())
    assert len({(tmp_path / "d" / name).stat().st_mode for name in ("config.json", "model.safetensors")}) == 1


def test_biases_of_the_target_go_into_the_queries(tmp_path: Path) -> None:
    """A drafter's queries have no biases. Where as few rows are looked at as a layer has inputs, what is folded in
    gives them exactly."""
    config, weights, _ = load_target(str(tiny.write_target("qwen2", tmp_path)), "cpu", torch.float32)
    model = TextModel(config, weights, DenseOps())
    net = DrafterModule(design.plain(config, reads=(1, 2), intermediate=20), config)
    design.start_from_target(net, model)
    ids = np.random.default_rng(0).integers(6, tiny.VOCAB, (1, LENGTH))
    batch = make_batch(Sequences.of(ids, [2], [0], [True], tiny.VOCAB), np.array([0]), 1)
    streams = capture(model, batch.ids, (0, 1)).taps
    at = batch.anchors[0] + batch.first
    wanted = []
    before = [net.weight(f"layers.{i}.qkv").clone() for i in range(2)]
    for i, read in enumerate((1, 2)):
        block = model.blocks[read]
        count = net.layers[i].attn.heads * net.layers[i].attn.head_dim
        x = torch.nn.functional.rms_norm(streams[i][0, at], (config.hidden,), block.attn_norm, config.norm_eps)
        assert block.qkv_bias is not None
        wanted.append((x, x @ before[i].T + block.qkv_bias[:count]))
    design.fold_biases(net, model, [batch])
    for i, (x, q) in enumerate(wanted):
        missed = (q - x @ net.weight(f"layers.{i}.qkv").T).norm()
        assert missed < 0.1 * (q - x @ before[i].T).norm()
