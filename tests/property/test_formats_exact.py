"""Every stored format on the CPU: drafts of any length, alone or among up to eight sequences, leave the plain answer's
tokens.

The drafter knows the answer and errs at every third token, so whole drafts, halves and nothing are accepted in turn.
Threads of the pool take each other's work in varying order, and no bit may change by it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from tests.engines import LLAMA, request, run, tiny_engine
from tests.unit.ops.test_cpu_packing import part

from outrider.engine.engine import Engine
from outrider.models.config import ModelConfig
from outrider.models.decoder import TextModel
from outrider.ops.cpu.forward import CompiledModel
from outrider.ops.cpu.lib import FILE_TYPES
from outrider.ops.cpu.ops import CpuOps
from outrider.ops.formats import BLOCKS, Weight
from outrider.spec.drafter import DraftBatch, Drafter
from outrider.types import Draft
from outrider.weights.load import dummy_weights

CONFIG = ModelConfig.from_hf(
    {**LLAMA, "hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4, "vocab_size": 80}
)
PROMPTS = [[3 + i, 5, 7 * i % 61, 9] * (1 + i) for i in range(8)]
HALVES = ("float16", "bfloat16")


class Knows(Drafter):
    """Guesses the rest of the answers it was told, but every third token wrong."""

    name = "puppet"
    taps: tuple[int, ...] = ()

    def __init__(self, answers: Sequence[Sequence[int]]):
        self.texts = [[*p, *a] for p, a in zip(PROMPTS, answers, strict=True)]

    def propose(self, batch: DraftBatch, k: int) -> Draft:
        rows = []
        for seen in batch.tokens:
            text = next(t for t in self.texts if t[: len(seen)] == list(seen))
            ahead = (text[len(seen) : len(seen) + k] + [0] * k)[:k]
            rows.append([t if (len(seen) + i) % 3 else (t + 1) % CONFIG.vocab_size for i, t in enumerate(ahead)])
        return Draft(torch.tensor(rows), torch.full((len(rows),), k))


MIDDLE = {
    "Q2_K": 1.5,
    "Q4_1": -7.5,
    "Q5_1": -15.5,
    "Q4_K": 7.5,
    "Q5_K": 15.5,
}  # the offset, in steps, with which weights are about 0 on average


def balanced(kind: str, n: int, k: int, seed: int) -> Weight:
    weight = part(kind, n, k, seed)
    if kind in MIDDLE:
        blocks = weight.tensors["blocks"].numpy().reshape(-1, BLOCKS[kind][1])
        at = 80 if kind == "Q2_K" else 0
        step = np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16)
        blocks[:, at + 2 : at + 4] = (step * np.float16(MIDDLE[kind])).view(np.uint8)
    return weight


def compiled(ops: CpuOps, kind: str) -> CompiledModel:
    weights = dummy_weights(CONFIG, "cpu", torch.float32, ops, None, 3)
    for seed, (name, w) in enumerate(weights.items()):
        if isinstance(w, torch.Tensor) and w.dim() == 2:
            packed = (
                w.to(getattr(torch, kind))
                if kind in HALVES
                else ops.packer.pack([balanced(kind, w.shape[0], w.shape[1], seed)])
            )
            assert packed is not None
            weights[name] = packed
    model = ops.compile(TextModel(CONFIG, weights, ops))
    assert isinstance(model, CompiledModel)
    return model


def answers(engine: Engine, count: int, k: int, drafter: bool) -> list[list[int]]:
    requests = [
        request(str(i), p, k, drafter, temperature=0.8 * (i % 2), seed=i, max_tokens=9)
        for i, p in enumerate(PROMPTS[:count])
    ]
    done = run(engine, requests)
    return [done[str(i)] for i in range(count)]


@pytest.mark.parametrize("kind", [*FILE_TYPES, *HALVES])
def test_drafts_leave_the_plain_tokens(kind: str) -> None:
    ops = CpuOps(threads=2)
    model = compiled(ops, kind)
    plain = tiny_engine(model=model, page_size=16)
    want = [
        run(plain, [request("0", p, 0, False, temperature=0.8 * (i % 2), seed=i, max_tokens=9)])["0"]
        for i, p in enumerate(PROMPTS)
    ]
    assert len({tuple(w) for w in want}) > 4  # the texts differ
    engine = tiny_engine(drafter=Knows(want), model=model, page_size=16, k=None)
    for k, count in ((1, 2), (4, 8), (8, 5), (16, 1)):
        assert answers(engine, count, k, True) == want[:count], (k, count)
    assert 0 < engine.metrics.accepted < engine.metrics.drafted and engine.metrics.drafter_failures == 0


def test_drafts_leave_the_plain_tokens_with_8_bit_keys_and_values() -> None:
    """Plain and drafted tokens are the same within the mode, across pages, chunks of attention and many sequences."""
    model = compiled(CpuOps(threads=2), "Q8_0")
    long = [5, 6, 7, 8, 9] * 60
    plain = tiny_engine(model=model, page_size=16, kv=torch.int8)
    assert plain.store.keys[0] is not None and plain.store.keys[0].shape[-1] == 64 + 4

    def requests_with(k, drafter):
        return [request(str(i), long[: 300 - 17 * i], k, drafter, max_tokens=9) for i in range(4)]

    want = [run(plain, [one])[one.id] for one in requests_with(0, False)]
    for k in (4, 16):
        engine = tiny_engine(model=model, page_size=16, kv=torch.int8, k=None)
        done = run(engine, requests_with(k, True))
        assert [done[str(i)] for i in range(4)] == want and engine.metrics.drafted > 0


def test_drafts_leave_the_plain_tokens_with_keys_and_values_in_fp8() -> None:
    """K/V in FP8, as on a GPU, by the definition: drafts and prompts write the same values."""
    long = [5, 6, 7, 8, 9] * 20
    fp8 = torch.float8_e4m3fn

    def requests_with(k, drafter):
        return [request(str(i), long[: 90 - 17 * i], k, drafter, max_tokens=9) for i in range(3)]

    plain = tiny_engine(page_size=16, kv=fp8)
    assert plain.store.keys[0] is not None and plain.store.keys[0].dtype == fp8
    want = [run(plain, [one])[one.id] for one in requests_with(0, False)]
    engine = tiny_engine(page_size=16, kv=fp8, k=None)
    done = run(engine, requests_with(4, True))
    assert [done[str(i)] for i in range(3)] == want and engine.metrics.drafted > 0


def test_equal_logits_choose_the_first_token() -> None:
    """Whoever computes an output: of equals the first is chosen, as torch does."""
    ops = CpuOps(threads=5)
    weights = dummy_weights(CONFIG, "cpu", torch.float32, ops, None, 3)
    weights["head"] = torch.ones((CONFIG.vocab_size, CONFIG.hidden))
    weights["head"][:7] -= 2.0
    model = ops.compile(TextModel(CONFIG, weights, ops))
    engine = tiny_engine(model=model, page_size=16)
    assert set(run(engine, [request("0", PROMPTS[0], 0, False, max_tokens=12)])["0"]) <= {0, 7}
