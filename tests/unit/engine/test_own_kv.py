"""A drafter with K/V of its own in the target's store (`Drafter.kv_specs`): its context follows the text."""

from __future__ import annotations

import random

import torch
from tests.engines import VOCAB, run, tiny_engine, tiny_model
from torch import Tensor

from outrider.cache.store import CacheSpec, KVStore
from outrider.engine.step import Request
from outrider.models.decoder import TextModel
from outrider.spec.drafter import DraftBatch, Drafter
from outrider.types import AttnSpec, Draft, KVView, SamplingParams

TAP = 1


class Context(Drafter):
    """Stores the tapped stream of every position as its keys and checks them before each draft of random tokens."""

    name = "context"
    taps = (TAP,)

    def __init__(self, model: TextModel):
        hidden = model.config.hidden
        self.layer = len(model.config.layers)
        self.kv_specs = (AttnSpec(1, 1, hidden, self.layer, True),)
        self.model = model
        self.rng = random.Random(1)
        self.checked = 0

    def at(self, kv: KVView, row_seq: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        return kv.tables["full"][row_seq, positions // kv.page_size].long(), positions % kv.page_size

    def extend(self, streams: tuple[Tensor, ...], kv: KVView, following: Tensor) -> None:
        page, slot = self.at(kv, kv.row_seq, kv.positions)
        kv.keys[self.layer][page, 0, slot] = streams[0]

    def propose(self, batch: DraftBatch, k: int) -> Draft:
        for b, tokens in enumerate(batch.tokens):
            ids = torch.tensor(tokens[:-1])
            positions = torch.arange(len(ids))
            page, slot = self.at(batch.kv, torch.full_like(ids, b), positions)
            store = KVStore(self.model.config, CacheSpec(1, 256, 16, 256, 512), torch.float32, "cpu")
            seq, _ = store.open()
            store.reserve(seq, len(ids))
            store.flush()
            start = torch.tensor([0, len(ids)], dtype=torch.int32)
            view = store.view(torch.tensor([seq.slot]), positions, torch.zeros_like(ids), start, len(ids), len(ids))
            want = self.model.forward(ids, view, (TAP,)).streams[0]
            torch.testing.assert_close(batch.kv.keys[self.layer][page, 0, slot], want, rtol=1e-4, atol=1e-5)
            self.checked += 1
        guess = [[self.rng.randrange(VOCAB) for _ in range(k)] for _ in batch.tokens]
        return Draft(torch.tensor(guess), torch.full_like(batch.last, k))


def test_the_context_follows_prompts_rejections_and_shared_prefixes() -> None:
    model = tiny_model("llama")
    drafter = Context(model)
    engine = tiny_engine("llama", drafter, names=(), model=model, k=3)
    prompt = [5 + i % 40 for i in range(50)]
    jobs = [Request(f"{i}", [*prompt, 7 + i], SamplingParams(max_tokens=12)) for i in range(3)]
    got = run(engine, jobs)
    again = run(engine, [Request("again", [*prompt, 7], SamplingParams(max_tokens=12))])
    assert engine.metrics.drafter_failures == 0 and drafter.checked > 20
    assert engine.metrics.cached_tokens > 0, "a shared prefix brings its draft context"
    plain = run(tiny_engine("llama", model=model, k=0), jobs)
    assert got == plain and again["again"] == plain["0"]
