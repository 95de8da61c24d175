"""What stands between two attentions is one op for plain layers: with the bits of the separate ones, whoever wants what of a pass."""

from __future__ import annotations

import copy

import pytest
import torch
from tests.kv import build_kv
from tests.parity.test_cpu_kernels import MODELS

from outrider.cache.store import last_rows
from outrider.models.config import ModelConfig
from outrider.models.decoder import TextModel
from outrider.ops.reference import ReferenceOps
from outrider.weights.load import dummy_weights


def made(name: str) -> TextModel:
    config, ops = ModelConfig.from_hf(MODELS[name]), ReferenceOps()
    return TextModel(config, dummy_weights(config, "cpu", torch.float32, ops, None, seed=3), ops)


@pytest.mark.parametrize("name", ["mistral", "gemma3", "gemma4_dense"])
@pytest.mark.parametrize("narrow", [False, True])
def test_between_is_the_separate_ops(name: str, narrow: bool) -> None:
    joined = made(name)
    apart = copy.copy(joined)
    assert joined.stretches is not None and [s.next_qkv is None for s in joined.stretches] == [False] * (len(joined.blocks) - 1) + [True]
    apart.stretches = None
    ids, answers = torch.arange(9) % 7, []
    for model in (joined, apart):
        kv = build_kv(model.config, 2, 16).view([(0, 5), (0, 4)])
        out = model.forward(ids, kv, (0, 1), last_rows(kv, [1]) if narrow else None)
        answers.append([out.hidden, *out.streams])
    assert all(torch.equal(a, b) for a, b in zip(*answers, strict=True))


@pytest.mark.parametrize("name", ["qwen2", "gemma4_edge", "gemma4_moe"])
def test_layers_with_more_parts_go_op_by_op(name: str) -> None:
    """Biases, per-layer embeddings and experts are not among the weights of a stretch: a kernel that reads those would leave them out."""
    assert made(name).stretches is None
