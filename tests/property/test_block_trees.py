"""Trees of a block's logits change no text, and leave its context right: the rows of the accepted path, not those that
stood beside it. In single operations, and in the function that a graph captures."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch
from tests.block_drafters import LAYOUTS, drafter
from tests.engines import request, run, run_joining, tiny_engine
from tests.property.test_block_exact import MODELS, PROMPT, Audited, audited, plain
from tests.property.test_trees_exact import PARAMS, tree_request
from torch import Tensor

from outrider.ops.trees import TreeRows
from outrider.spec.block import BlockDrafter
from outrider.spec.drafter import DraftBatch
from outrider.types import Draft, DraftPlan

KINDS = [name for name, raw in LAYOUTS.items() if "eagle3" not in name]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("block")


@cache
def wanted(variant: str, params: str) -> dict[str, list[int]]:
    return plain(variant, [request("a", PROMPT, **PARAMS[params])])


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "captured"])
@pytest.mark.parametrize("layout", KINDS)
def test_every_layout(folder: Path, layout: str, graphs: bool) -> None:
    variant = "dense" if "gemma" in layout else "llama"
    for name, params in PARAMS.items():
        block_drafter = audited(folder, layout, variant)
        engine = tiny_engine(variant, block_drafter, names=(), model=MODELS[variant], graphs=graphs)
        assert run(engine, [tree_request("a", PROMPT, 3, 7, **params)]) == wanted(variant, name), name
        chains = graphs and name in ("T1.3+all", "grammar", "logprobs")
        assert engine.metrics.drafter_failures == 0 and engine.metrics.drafted > 0
        assert (engine.metrics.trees == 0) == chains
        assert graphs or block_drafter.audits


def test_eagle3_keeps_to_chains(folder: Path) -> None:
    block_drafter = audited(folder, "speculators-eagle3", "llama")
    for graphs in (False, True):
        engine = tiny_engine("llama", block_drafter, names=(), model=MODELS["llama"], graphs=graphs)
        assert run(engine, [tree_request("a", PROMPT, 4, 8)]) == plain("llama", [request("a", PROMPT)])
        assert engine.metrics.drafted > 0 and engine.metrics.trees == 0 and engine.metrics.drafter_failures == 0


class Runner(Audited):
    """Knows the text; its best guess is wrong at every other position, where the second is right."""

    text: list[int]

    def _slots(self, batch: DraftBatch, wide: int) -> Tensor:
        self.at = [int(p) + 1 + j for p in batch.position.tolist() for j in range(wide)]
        return super()._slots(batch, wide)

    def foresees(self, hidden: Tensor) -> Tensor:
        z = torch.full((len(hidden), 64), -9.0)
        for row, at in enumerate(self.at[: len(hidden)]):
            right = (self.text[at:] or [0])[0]
            z[row, right] = 5.0
            z[row, (right + 1) % 64] = 5.5 if at % 2 else -9.0
        return z


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "captured"])
@pytest.mark.parametrize("variant", ["llama", "mistral", "dense"])
def test_branches_are_taken(folder: Path, variant: str, graphs: bool) -> None:
    """Catches a path that is moved to the wrong positions, and context written of rows beside it."""
    want = plain(variant, [request("a", PROMPT, max_tokens=24)])["a"]
    runner = Runner(drafter(folder / "z-lab", "z-lab", MODELS[variant]).block)
    runner.text = [*PROMPT, *want]  # type: ignore[method-assign]
    runner.block.logits = runner.foresees  # type: ignore[method-assign]
    engine = tiny_engine(variant, runner, names=(), model=MODELS[variant], graphs=graphs)
    assert run(engine, [tree_request("a", PROMPT, 4, 15, max_tokens=24)])["a"] == want
    m = engine.metrics
    assert m.trees > 0 and m.accepted > 2.5 * m.trees and m.drafter_failures == 0


@pytest.mark.parametrize("layout", ["z-lab", "dspark-rnn"])
def test_context_behind_captured_trees(folder: Path, layout: str) -> None:
    """Drafted in graphs with trees, the best first token behind every text is the one of a chain drafted eagerly."""

    class Recorded(BlockDrafter):
        def __init__(self, of: BlockDrafter):
            super().__init__(of.block)
            self.first: dict[int, int] = {}

        def propose(self, batch: DraftBatch, k: int) -> Draft:
            draft = super().propose(batch, k)
            self.first[int(batch.position)] = int(draft.tokens[0, 0])
            return draft

        def build_fixed_tree(self, batch: DraftBatch, depth: int, nodes: int) -> TreeRows:
            draft = super().build_fixed_tree(batch, depth, nodes)
            self.first[int(batch.position)] = int(draft.tokens[0, 0])
            return draft

    eager, captured = (Recorded(drafter(folder / layout, layout, MODELS["dense"])) for _ in range(2))
    engine = tiny_engine("dense", eager, names=(), model=MODELS["dense"])
    run(engine, [request("a", PROMPT, k=1, max_tokens=40)])
    engine = tiny_engine("dense", captured, names=(), model=MODELS["dense"], graphs=True)
    run(engine, [tree_request("a", PROMPT, 4, 15, max_tokens=40)])
    shared = eager.first.keys() & captured.first.keys()
    assert engine.metrics.trees > 0 and engine.metrics.accepted > 0 and len(shared) > 10
    assert all(eager.first[at] == captured.first[at] for at in shared)


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "captured"])
def test_joining_and_leaving(folder: Path, graphs: bool) -> None:
    """Trees next to chains, copies and plain decoding, in too few pages for all."""
    block_drafter = audited(folder, "dspark", "dense")
    room = {"max_batch": 4, "kv_tokens": 160, "graphs": graphs}
    engine = tiny_engine("dense", block_drafter, model=MODELS["dense"], **room)
    kinds = list(PARAMS.values())
    jobs = [
        (
            i % 5,
            tree_request(str(i), PROMPT[i:] + PROMPT, 1 + i % 4, (0, 8, 12, 16)[i % 4], **{**kinds[i % 5], "seed": i}),
        )
        for i in range(10)
    ]
    got = run_joining(engine, jobs, 400)
    assert engine.metrics.trees > 0 and engine.metrics.drafter_failures == 0
    assert got == plain("dense", [job for _, job in jobs])


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "captured"])
def test_a_long_text_beside_deep_trees(folder: Path, graphs: bool) -> None:
    """The path of another sequence may be longer than the pages that the longest text has."""
    block_drafter = audited(folder, "z-lab", "llama")
    engine = tiny_engine("llama", block_drafter, model=MODELS["llama"], graphs=graphs)
    requests = [request("long", PROMPT * 3, k=0, max_tokens=30), tree_request("deep", PROMPT, 4, 12, max_tokens=30)]
    assert run(engine, requests) == plain("llama", requests)
    assert engine.metrics.trees > 0 and engine.metrics.drafter_failures == 0


def test_a_confidence_head_shapes_the_tree(folder: Path) -> None:
    """A sure head makes the tree a chain; an unsure one puts tokens beside the best."""
    shapes: dict[float, list[int]] = {}

    class Shaped(BlockDrafter):
        def propose(self, batch: DraftBatch, k: int) -> Draft:
            batch.plans = [DraftPlan(self.name, 4, nodes=6)]
            batch.trust = None
            draft = super().propose(batch, k)
            assert draft.trees is not None
            shapes.setdefault(sure, list(draft.trees[0].parents))
            return draft

    for sure in (0.99, 0.3):
        draft = Shaped(drafter(folder / "dspark", "dspark", MODELS["llama"]).block)
        draft.block.confidence = lambda hidden, embedded: torch.full((len(hidden),), sure)  # type: ignore[method-assign] # noqa: B023
        engine = tiny_engine("llama", draft, names=(), model=MODELS["llama"])
        want = plain("llama", [request("a", PROMPT, max_tokens=6)])
        assert run(engine, [tree_request("a", PROMPT, 4, 6, max_tokens=6)]) == want
    assert shapes[0.99][:4] == [0, 1, 2, 3] and shapes[0.3].count(0) > 1


def test_all_nodes_of_a_depth_share_a_slot(folder: Path) -> None:
    """DFlash: nodes of one depth have the same children, without another pass."""
    passes = 0

    class Counted(BlockDrafter):
        def _slots(self, batch: DraftBatch, wide: int) -> Tensor:
            nonlocal passes
            passes += 1
            return super()._slots(batch, wide)

        def propose(self, batch: DraftBatch, k: int) -> Draft:
            batch.plans = [DraftPlan(self.name, 3, nodes=16)]
            batch.trust = [1.0] * 16
            draft = super().propose(batch, k)
            assert draft.trees is not None
            children: dict[int, dict[int, set[int]]] = {}
            depth = [0]
            for token, parent in zip(draft.tokens[0].tolist(), list(draft.trees[0].parents)):
                depth.append(depth[parent] + 1)
                children.setdefault(depth[-1], {}).setdefault(parent, set()).add(token)
            for level in children.values():
                whole = max(level.values(), key=len)
                assert all(some <= whole for some in level.values())
            return draft

    engine = tiny_engine(
        "llama", Counted(drafter(folder / "z-lab", "z-lab", MODELS["llama"]).block), names=(), model=MODELS["llama"]
    )
    run(engine, [tree_request("a", PROMPT, 3, 16, max_tokens=6, temperature=0.8, seed=2)])
    assert engine.metrics.drafter_failures == 0 and passes == engine.metrics.trees > 0
