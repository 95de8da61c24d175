"""The draft model: right K/V after any mix of accepted and refused guesses, pages conserved, answers unchanged."""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.engines import VOCAB, request, run, tiny_engine, tiny_model

from outrider.spec import draft_model
from outrider.spec.draft_model import PAGE, DraftModel, Track
from outrider.spec.drafter import DraftBatch
from outrider.spec.slot_sampling import sampling_batch
from outrider.types import Draft, DraftPlan, SamplingParams


class AuditedDraftModel(DraftModel):
    """Knows all its tracks, and those of a `batch` by name."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.tracks: list[Track] = []
        self.names: dict[str, Track] = {}

    def new_track(self, request_id: str) -> Track:
        track = super().new_track(request_id)
        self.tracks.append(track)
        return track

    def named(self, name: Any) -> Track:
        if isinstance(name, Track):
            return name
        if name not in self.names:
            self.names[name] = self.new_track(name)
        return self.names[name]

    def propose(self, batch: DraftBatch, k: int) -> Draft:
        return super().propose(replace(batch, tracks=[self.named(track) for track in batch.tracks]), k)

    def release(self, track: Any) -> None:
        released = self.named(track)
        super().release(released)
        self.tracks = [other for other in self.tracks if other is not released]
        self.names = {name: other for name, other in self.names.items() if other is not released}

    def audit(self) -> None:
        self.check(self.tracks)


def batch(texts: dict[str, list[int]], params: SamplingParams = SamplingParams()) -> DraftBatch:
    tokens = list(texts.values())
    sampling = sampling_batch([params] * len(tokens), [t[:1] for t in tokens], [t[1:] for t in tokens], VOCAB, "cpu")
    return DraftBatch(
        tracks=list(texts), tokens=tokens, last=torch.tensor([t[-1] for t in tokens]),
        position=torch.tensor([len(t) - 1 for t in tokens]),
        features=None, kv=None, sampling=sampling, ops=draft_ops,
    )  # fmt: skip


draft_ops = tiny_model("llama").ops


@pytest.mark.parametrize("variant", ["llama", "mistral", "gemma3", "edge"])
def test_a_long_lived_drafter_guesses_like_a_fresh_one(variant, monkeypatch):
    """Sequences come and go, guesses are kept or refused at random, other drafters take turns: nothing stale may be
    left."""
    monkeypatch.setattr(draft_model, "CHUNK", 7)
    model = tiny_model(variant, seed=5)
    rng = random.Random(0)
    old = AuditedDraftModel(model)
    texts = {f"s{i}": [rng.randrange(VOCAB) for _ in range(rng.choice([1, 5, 20, 50]))] for i in range(3)}
    for cycle in range(12):
        k = rng.randint(1, 5)
        some = {n: t for n, t in texts.items() if rng.random() < 0.6} or texts
        got = old.propose(batch(some), k)
        fresh = AuditedDraftModel(model).propose(batch(some), k)
        assert torch.equal(got.tokens, fresh.tokens) and got.lengths.tolist() == [k] * len(some)
        for name, guess in zip(some, got.tokens.tolist()):
            texts[name] += guess[: rng.randint(0, k)] + [rng.randrange(VOCAB)]
        for name in texts.keys() - some.keys():  # another drafter's turn
            texts[name] += [rng.randrange(VOCAB) for _ in range(rng.randint(1, 4))]
        old.audit()
        if cycle == 6:
            old.release("s1")
            texts["s1"] = [3, 1, 4]
    for name in texts:
        old.release(name)
    old.audit()
    assert len(old.pages.free) == old.pages.count - 1


def test_doubtful_guesses_end_a_draft():
    """Confidence is the draft model's own probability; a guess below `drop` is left out, one below `stop` is the last,
    and what was not guessed has left nothing behind."""
    model = tiny_model("llama", seed=5)
    texts = {"a": [5, 6, 7], "b": [9] * 30, "c": [1, 2]}
    whole = AuditedDraftModel(model).propose(batch(texts), 5)
    assert whole.confidence is not None and bool(((whole.confidence > 0) & (whole.confidence <= 1)).all())
    trust = [(i + 0.5) / 16 for i in range(16)]
    path = [
        [float(p) for p in torch.tensor([trust[min(15, int(c * 16))] for c in row]).double().cumprod(0)]
        for row in whole.confidence
    ]
    old = AuditedDraftModel(model)
    some = batch(texts)
    ends = [(path[0][1] + 1e-9, 0.0), (2.0, 0.0), (0.0, path[2][2] + 1e-9)]
    some.trust = trust
    some.plans = [DraftPlan("draft_model", 5, *each) for each in ends]
    got = old.propose(some, 5)

    def first(row, below):
        return next(i for i, p in enumerate(row) if p < below)

    assert got.lengths.tolist() == [first(path[0], path[0][1] + 1e-9) + 1, 1, first(path[2], path[2][2] + 1e-9)]
    for b, n in enumerate(got.lengths.tolist()):
        assert got.tokens[b, :n].tolist() == whole.tokens[b, :n].tolist()
    texts = {name: [*t, 3] for name, t in texts.items()}
    assert torch.equal(old.propose(batch(texts), 4).tokens, AuditedDraftModel(model).propose(batch(texts), 4).tokens)


def test_the_target_as_its_own_drafter_is_always_right():
    """Coupled noise: the same logits make the same choice at any temperature; so every draft must be accepted."""
    for params in (dict(temperature=0.0), dict(temperature=1.0, seed=3), dict(temperature=0.8, top_p=0.9, seed=4)):
        model = tiny_model("dense")
        engine = tiny_engine("dense", AuditedDraftModel(model), model=model, names=(), k=4)
        plain = run(
            tiny_engine("dense", names=(), model=model, k=0),
            [request("a", [5, 6, 7], **params), request("b", [9] * 30, **params)],
        )
        requests = [request("a", [5, 6, 7], **params), request("b", [9] * 30, **params)]
        for r in requests:
            engine.submit(r)
        out = {"a": [], "b": []}
        stats = {}
        while engine.busy:
            for event in engine.step():
                out[event.id] += event.tokens
                stats[event.id] = event.stats
        assert out == plain
        assert all(s.drafted == s.accepted > 0 and s.drafter_off is None for s in stats.values())
        engine.drafter.audit()
        assert not engine.drafter.tracks


def test_another_model_as_drafter():
    target = tiny_model("llama")
    small = tiny_model("qwen3", seed=8)
    engine = tiny_engine("llama", AuditedDraftModel(small), model=target, names=())
    requests = [request(str(i), [i + 2, 7, 7], temperature=0.7 * (i % 2), seed=i, k=1 + i % 4) for i in range(6)]
    out = run(engine, requests)
    assert all(len(t) == 24 for t in out.values())
    engine.drafter.audit()
    plain = [request(r.id, r.prompt, 0, temperature=r.params.temperature, seed=r.params.seed) for r in requests]
    assert out == run(tiny_engine("llama", model=target, names=()), plain)


def test_beyond_its_context_it_stays_silent():
    model = tiny_model("llama")
    limit = model.config.max_context
    draft = AuditedDraftModel(model).propose(batch({"long": [1] * (limit - 2), "short": [1, 2]}), 4)
    assert draft.lengths.tolist() == [0, 4]
    assert AuditedDraftModel(model).propose(batch({"long": [1] * limit}), 1).lengths.tolist() == [0]


def test_pool_grows_and_keeps_what_it_held():
    drafter = AuditedDraftModel(tiny_model("llama"))
    first = batch({"a": [4, 5, 6]})
    want = drafter.propose(first, 3).tokens
    before = drafter.pages.count
    drafter.propose(batch({"b": [7] * (PAGE * before)}), 1)
    assert drafter.pages.count > before
    assert torch.equal(drafter.propose(first, 3).tokens, want)
    drafter.audit()
