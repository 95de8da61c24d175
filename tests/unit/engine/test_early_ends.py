"""Drafts that end themselves: no text changes, and no more rows are verified than were drafted."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tests.engines import VOCAB, request, run, tiny_engine, tiny_model

from outrider.config import EngineConfig, SpecConfig
from outrider.engine.engine import Engine
from outrider.engine.memory import KVOptions
from outrider.models.config import ModelConfig
from outrider.models.decoder import TextModel
from outrider.models.drafter import MTPNet
from outrider.ops.cpu.ops import CpuOps
from outrider.spec.controller import Controller
from outrider.spec.cost import CostTable
from outrider.spec.drafter import DraftBatch, Drafter
from outrider.spec.mtp import MTPDrafter
from outrider.spec.plan import CyclePlan, DraftContext, StepTiming
from outrider.train import design
from outrider.types import Draft, DraftPlan
from outrider.weights.load import dummy_weights

PROMPT = [3, 5, 7, 9, 11, 3, 5, 7, 9, 13, 2, 40]
MODEL = tiny_model("llama")
EVEN = {  # sizes that the kernels run in one call
    "model_type": "llama", "vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 96, "head_dim": 32, "eos_token_id": 1,
}  # fmt: skip


class Told(Controller):
    """Plans what a test wants; keeps what it was told."""

    def __init__(self, name: str, stop: float, drop: float):
        super().__init__(CostTable(), (name,))
        self.name = name
        self.stop = stop
        self.drop = drop
        self.observed: list[tuple[int, int, Sequence[float] | None]] = []
        self.widths: list[float] = []
        self.planned = True  # steps are reported to it from the first one on

    def propose(self, seqs: Sequence[DraftContext]) -> CyclePlan:
        lengths = [min(6, view.drafter_available.get(self.name, 0)) for view in seqs]
        return CyclePlan([DraftPlan(self.name, k, self.stop, self.drop) for k in lengths])

    def observe(
        self,
        state: object,
        drafter: str | None,
        drafted: int,
        accepted: int,
        confidence: Sequence[float] | None = None,
        tree: object = None,
    ) -> None:
        self.observed.append((drafted, accepted, confidence))

    def observe_step(self, timing: StepTiming) -> None:
        self.widths.append(timing.k)


class Knows(Drafter):
    """Right with a chance of 3 in 4, ends where it likes, and says how sure it is."""

    name = "knows"
    taps: tuple[int, ...] = ()

    def __init__(self, answers: dict[str, list[int]]):
        self.answers = answers
        self.random = random.Random(3)
        self.lengths: list[list[int]] = []

    def propose(self, batch: DraftBatch, k: int) -> Draft:
        assert batch.trust is not None and len(batch.trust) == 16 and len(batch.plans or ()) == len(batch.tracks)
        tokens = torch.zeros((len(batch.tracks), k), dtype=torch.int64)
        for b, (id, seen) in enumerate(zip(batch.tracks, batch.tokens)):
            for j, token in enumerate(self.answers[id][len(seen) - len(PROMPT) :][:k]):
                tokens[b, j] = token if self.random.random() < 0.75 else (token + 1) % VOCAB
        self.lengths.append([self.random.randint(0, k) for _ in batch.tracks])
        return Draft(tokens, torch.tensor(self.lengths[-1]), confidence=torch.full((len(batch.tracks), k), 0.5))

    def new_track(self, request_id: str) -> str:
        return request_id


@pytest.mark.parametrize("params", [{}, {"temperature": 0.8, "seed": 7}], ids=["greedy", "T0.8"])
def test_rows_are_cut_to_what_was_drafted(params: dict[str, Any]) -> None:
    ids = ["a", "b", "c"]
    requests = [request(i, PROMPT[n:] + PROMPT[:n], **params) for n, i in enumerate(ids)]
    want = run(tiny_engine(model=MODEL, names=()), requests)
    drafter = Knows(want)
    controller = Told("knows", 0.4, 0.3)
    engine = tiny_engine(drafter=drafter, model=MODEL, names=(), k=None)
    engine.policy.controller = controller
    rows: list[int] = []
    logits = engine.model.logits
    engine.model.logits = lambda hidden: (rows.append(hidden.shape[0]), logits(hidden))[1]
    try:
        assert run(engine, requests) == want
    finally:
        engine.model.logits = logits
    drafted = [k for k, _, _ in controller.observed]
    assert engine.metrics.drafted == sum(drafted) and 0 < engine.metrics.accepted < engine.metrics.drafted
    assert sum(rows) == sum(drafted) + len(drafted), "one row a verified token and one more a sequence"
    assert min(drafted) == 0 and max(drafted) > 3 and any(k % 1 for k in controller.widths), (
        "ragged, and the mean is told"
    )
    assert all(sure is None or len(sure) >= k for k, _, sure in controller.observed)


class Whole(Knows):
    """Never ends a draft."""

    def propose(self, batch: DraftBatch, k: int) -> Draft:
        draft = super().propose(batch, k)
        return Draft(draft.tokens, torch.full_like(draft.lengths, k), confidence=draft.confidence)


class Beside(Told):
    """One sequence copies up to six tokens while the network drafts two for the other."""

    def __init__(self, name: str):
        super().__init__(name, 0.4, 0.3)
        self.drafters = (name, "ngram")
        self.copies = 0

    def propose(self, seqs: Sequence[DraftContext]) -> CyclePlan:
        out = []
        for i, v in enumerate(seqs):
            name, most = ("ngram", 6) if i == 0 and len(seqs) > 1 else (self.name, 2)
            k = min(most, v.drafter_available.get(name, 0))
            self.copies += name == "ngram" and k > 2 and len(seqs) > 1
            out.append(DraftPlan(name, k, self.stop, self.drop) if k else DraftPlan(None, 0))
        return CyclePlan(out)


def test_beside_a_longer_copy_nothing_is_said_of_tokens_that_were_not_drafted() -> None:
    """The row of confidences is as long as the longest draft of the step; what lies behind a shorter one is no token
    left out."""
    requests = [request("a", [3, 5] * 6), request("b", PROMPT)]
    want = run(tiny_engine(model=MODEL, names=()), requests)
    controller = Beside("knows")
    engine = tiny_engine(drafter=Whole(want), model=MODEL, k=None)
    engine.policy.controller = controller
    assert run(engine, requests) == want and engine.metrics.drafter_failures == 0
    confidences = [sure for _, _, sure in controller.observed if sure is not None]
    assert controller.copies and max(map(len, confidences)) == 2 and all(p == 0.5 for sure in confidences for p in sure)


@pytest.mark.parametrize("params", [{}, {"temperature": 0.8, "seed": 7}], ids=["greedy", "T0.8"])
def test_the_compiled_drafter_ends_early_and_changes_nothing(params: dict[str, Any]) -> None:
    ops = CpuOps(threads=1)
    config = ModelConfig.from_hf(EVEN)
    model = ops.compile(TextModel(config, dummy_weights(config, "cpu", torch.float32, ops, None, seed=3), ops))
    drafter_config = design.plain(config, reads=(0, 2), intermediate=64)
    compiled = ops.compile_drafter(
        MTPNet(drafter_config, dummy_weights(drafter_config, "cpu", torch.float32, ops, None, seed=4), ops, model)
    )
    requests = [request(i, PROMPT[n:] + PROMPT[:n], **params) for n, i in enumerate("ab")]
    texts = []
    mean = []
    for stop, drop in ((0.0, 0.0), (0.02, 0.0), (0.0, 0.02), (1.0, 0.0), (1.0, 1.0)):
        controller = Told("mtp", stop, drop)
        settings = EngineConfig(max_batch=4, max_context=256, page_size=16, prefill_chunk=32)
        engine = Engine(
            model, None, settings, SpecConfig(None), MTPDrafter(compiled, model), controller, KVOptions(torch.float16)
        )
        texts.append(run(engine, requests))
        confidences = [(k, sure) for k, _, sure in controller.observed if sure is not None]
        assert confidences and engine.metrics.drafter_failures == 0
        assert all(0.0 <= p <= 1.0 for _, sure in confidences for p in sure)
        mean.append(sum(k for k, _ in confidences) / len(confidences))
    assert all(text == texts[0] for text in texts)
    assert mean[0] > mean[1] > mean[2] and mean[3:] == [1.0, 0.0], (
        "off; each token rated below 1; the last is kept by stop alone"
    )
