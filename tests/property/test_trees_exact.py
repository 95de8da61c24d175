"""Drafts that branch change nothing: whatever tree stands in a step, the tokens are those of plain decoding, and a
row's logits on the CPU are those of plain decoding to the bit."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.engines import VARIANTS, VOCAB, mtp_drafter, request, run, run_joining, tiny_engine, tiny_model
from tests.unit.engine.test_graphs import Thirds

from outrider.ops.trees import TreeRows
from outrider.spec.drafter import DraftBatch, Drafter
from outrider.spec.mtp import MTPDrafter
from outrider.types import Draft, DraftTree

MODELS = {name: tiny_model(name) for name in VARIANTS}
PROMPT = [3, 5, 7, 9, 11, 3, 5, 7, 9, 13, 2, 40, 41, 3, 5]
HOT = {
    "temperature": 1.3,
    "seed": 11,
    "top_p": 0.9,
    "repetition_penalty": 1.2,
    "frequency_penalty": 0.2,
    "logit_bias": {4: 1.5, 9: -2.0},
}
PARAMS: dict[str, dict[str, Any]] = {
    "greedy": {}, "T0.7": {"temperature": 0.7, "seed": 5},
    "T1.3+all": {**HOT, "bad_words": ((5, 7), (12,)), "min_p": 0.02},
    "grammar": {"temperature": 0.7, "grammar": Thirds()}, "logprobs": {"logprobs": 2, "temperature": 1.3, "top_k": 9},
}  # fmt: skip


class Wood(Drafter):
    """Random trees; where `truth` is known, the right tokens stand somewhere in them, on branches that are never the
    first."""

    name = "wood"
    taps = ()

    def __init__(self, seed: int, truth: dict[str, list[int]] | None = None):
        self.rng = random.Random(seed)
        self.truth = truth or {}

    def propose(self, batch: DraftBatch, k: int) -> Draft:
        nodes = max(p.max_drafted for p in batch.plans) if batch.branches else k
        rows = []
        above = []
        for id, known in zip(batch.tracks, batch.tokens):
            truth = self.truth.get(id, [])[len(known) :]
            tokens = []
            parents = []
            # where the true path has got to
            tip = 0
            right = 0
            for j in range(nodes):
                if right < min(len(truth), k) and (self.rng.random() < 0.5 or nodes - j <= k - right):
                    tokens.append(truth[right])
                    parents.append(tip)
                    tip = j + 1
                    right = right + 1
                else:
                    tokens.append(self.rng.randrange(VOCAB))
                    parents.append(self.rng.randrange(j + 1))
            rows.append(tokens)
            above.append(parents)
        lengths = torch.tensor([self.rng.randrange(nodes // 2, nodes + 1) for _ in rows])
        trees = list(map(DraftTree, rows, above)) if batch.branches else None
        return Draft(torch.tensor(rows), lengths, trees=trees)

    def new_track(self, request_id: str) -> str:
        return request_id


def tree_request(id: str, prompt: list[int], k: int, tree: int, **params: Any) -> Any:
    result = request(id, prompt, k=k, **params)
    result.tree = tree
    return result


def plain(variant: str, prompt: list[int], params: dict[str, Any]) -> list[int]:
    return run(tiny_engine(variant, model=MODELS[variant]), [request("plain", prompt, drafter=False, **params)])[
        "plain"
    ]


@pytest.mark.parametrize("variant", VARIANTS)
def test_random_trees_change_nothing(variant: str) -> None:
    for i, (name, params) in enumerate(PARAMS.items()):
        want = plain(variant, PROMPT, params)
        engine = tiny_engine(variant, Wood(i, {"a": PROMPT + want}), names=(), model=MODELS[variant])
        assert run(engine, [tree_request("a", PROMPT, 4, 9, **params)])["a"] == want, (variant, name)
        m = engine.metrics
        assert m.trees > 0 and m.branched > 0 and m.drafter_failures == 0 and m.accepted > m.trees / 2, (
            "branches are taken"
        )


@pytest.mark.parametrize("variant", ["dense", "edge", "moe"])
@pytest.mark.parametrize("clustered", [False, True])
def test_a_drafter_s_own_trees_change_nothing(variant: str, clustered: bool) -> None:
    for params in (PARAMS["greedy"], PARAMS["T0.7"], PARAMS["T1.3+all"]):
        want = plain(variant, PROMPT, params)
        engine = tiny_engine(variant, mtp_drafter(MODELS[variant], variant, clustered), model=MODELS[variant])
        assert run(engine, [tree_request("a", PROMPT, 3, 7, **params)])["a"] == want
        assert engine.metrics.trees > 0 and engine.metrics.drafter_failures == 0
        assert engine.metrics.drafted > 3 * engine.metrics.trees, "more tokens than a line of three"


@pytest.mark.parametrize("graphs", [False, True])
def test_joining_and_leaving(graphs: bool) -> None:
    """Trees beside lines, copies and plain decoding; sequences come and go, and are pre-empted."""
    rng = random.Random(8)
    kinds = list(PARAMS.values())
    engine = tiny_engine(
        "dense",
        mtp_drafter(MODELS["dense"], "dense", True),
        model=MODELS["dense"],
        max_batch=4,
        kv_tokens=160,
        graphs=graphs,
    )
    jobs = []
    for i in range(10):
        prompt = [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 24))]
        params = {**kinds[i % len(kinds)], "seed": i, "max_tokens": rng.randrange(2, 16)}
        jobs.append(
            (
                rng.randrange(5),
                tree_request(str(i), prompt, rng.choice([1, 2, 4]), rng.choice([0, 8, 12, 16, 16, 16]), **params),
            )
        )
    got = run_joining(engine, jobs, 400)
    assert engine.metrics.trees > 0
    for _, r in jobs:
        alone = tiny_engine("dense", model=MODELS["dense"])
        r.draft_tokens = 0
        r.drafter = False
        r.tree = 0
        assert got[r.id] == run(alone, [r])[r.id], r


def test_a_tree_whose_tokens_do_not_follow_one_another_is_refused() -> None:
    class Broken(Wood):
        def propose(self, batch: DraftBatch, k: int) -> Draft:
            draft = super().propose(batch, k)
            wrong = [DraftTree(row, [7] * len(row)) for row in draft.tokens.tolist()]
            return Draft(draft.tokens, draft.lengths, trees=wrong)

    engine = tiny_engine("llama", Broken(1), names=(), model=MODELS["llama"])
    assert run(engine, [tree_request("a", PROMPT, 4, 9)])["a"] == plain("llama", PROMPT, {})
    assert engine.metrics.drafter_failures == 1


@pytest.mark.parametrize("variant,clustered", [("dense", True), ("edge", False), ("moe", True)])
def test_captured_trees_change_nothing(variant: str, clustered: bool) -> None:
    """The captured function itself, run as a function. Filters go with trees; histories, masks and logprobs with
    lines."""
    for name, params in {**PARAMS, "T1.3+filters": {"temperature": 1.3, "seed": 3, "top_k": 20, "top_p": 0.9}}.items():
        want = plain(variant, PROMPT, params)
        engine = tiny_engine(
            variant, mtp_drafter(MODELS[variant], variant, clustered), model=MODELS[variant], graphs=True
        )
        assert run(engine, [tree_request("a", PROMPT, 3, 7, **params)])["a"] == want, (variant, name)
        m = engine.metrics
        lines = name in ("T1.3+all", "grammar", "logprobs")
        assert m.drafter_failures == 0 and m.drafted > 0 and (m.trees == 0) == lines
        assert lines or m.drafted > 6 * m.trees, "more tokens than a line of three"


class Planter(MTPDrafter):
    """Trees of fixed size inside a captured step, the right tokens somewhere in them."""

    def __init__(self, of: MTPDrafter, truth: list[int]):
        super().__init__(of.model, of.target)
        self.truth = truth
        self.rng = random.Random(3)

    def build_fixed_tree(self, batch: DraftBatch, depth: int, nodes: int) -> TreeRows:
        rows = []
        above = []
        for at in batch.position.tolist():
            # where the true path has got to
            tokens = []
            parents = []
            tips = [0]
            for j in range(nodes):
                deep = [0]
                for parent in parents:
                    deep.append(deep[parent] + 1)
                if len(tips) <= depth and (self.rng.random() < 0.4 or nodes - j <= depth):
                    parents.append(tips[-1])
                    tokens.append((self.truth[at + len(tips) :] or [0])[0])
                    tips.append(j + 1)
                else:
                    parents.append(self.rng.choice([i for i, d in enumerate(deep) if d < depth]))
                    tokens.append(self.rng.randrange(VOCAB))
            rows.append(tokens)
            above.append(parents)
        tree = TreeRows.of(list(map(DraftTree, rows, above)), torch.tensor(rows))
        paths = torch.cat((tree.ancestors, tree.ancestors[:, -1:].expand(-1, depth + 1 - tree.ancestors.shape[1])), 1)
        return replace(tree, ancestors=paths)


@pytest.mark.parametrize("variant", ["dense", "edge", "moe"])
def test_captured_branches_are_taken(variant: str) -> None:
    """VerifiedTree are accepted, moved into place and read again, by the target and by what is decoded behind them."""
    for params in (PARAMS["greedy"], PARAMS["T0.7"], {**PARAMS["T0.7"], "temperature": 1.3}):
        want = plain(variant, PROMPT, params)
        model = MODELS[variant]
        engine = tiny_engine(variant, Planter(mtp_drafter(model, variant), PROMPT + want), model=model, graphs=True)
        assert run(engine, [tree_request("a", PROMPT, 4, 8, **params)])["a"] == want
        assert engine.metrics.trees > 0 and engine.metrics.branched > engine.metrics.trees / 2
