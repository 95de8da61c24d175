"""Block drafters in captured steps: the function that a graph captures runs on the CPU, never looks at a value, changes
no text and drafts what the eager executor drafts, so that its context is right after rejections, joins, preemptions,
shared prefixes and captured prompts.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.block_drafters import LAYOUTS, drafter
from tests.engines import VARIANTS, VOCAB, request, run, tiny_engine, tiny_model
from tests.property.test_block_exact import HOT, KINDS, MODELS, PROMPT, plain
from tests.property.test_capture_blind import ShapesOnly
from tests.property.test_graphs_exact import check_batches, one
from tests.property.test_trees_exact import tree_request
from tests.unit.engine.test_graphs import graphs_of

from outrider.cache.store import CacheSpec, KVStore
from outrider.engine.decode import DecodeStep, Inputs, Key, Output, State
from outrider.models.block import BlockNet
from outrider.models.block_config import BlockConfig
from outrider.models.config import ModelConfig
from outrider.models.decoder import TextModel
from outrider.models.names import tensor_plan
from outrider.ops.cpu.ops import CpuOps
from outrider.spec.block import BlockDrafter
from outrider.spec.drafter import DraftBatch
from outrider.spec.slot_sampling import SlotSampling
from outrider.types import Draft
from outrider.weights.load import kept_dtype


class Recorded(BlockDrafter):
    """Remembers what it drafted behind each (position, token)."""

    def __init__(self, block: BlockNet):
        super().__init__(block)
        self.drafts: dict[tuple[int, int], set[tuple[int, ...]]] = defaultdict(set)

    def propose(self, batch: DraftBatch, k: int) -> Draft:
        draft = super().propose(batch, k)
        for at, last, tokens in zip(batch.position.tolist(), batch.last.tolist(), draft.tokens.tolist()):
            self.drafts[at, last].add(tuple(tokens[:3]))
        return draft


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("block")


def recorded(folder: Path, layout: str, model: Any) -> Recorded:
    return Recorded(drafter(folder / layout, layout, model).block)


def same_drafts(folder: Path, layout: str, variant: str, jobs: list[Any], model: Any = None, **room: Any) -> Any:
    """The graph engine; its texts are plain ones, its drafts the eager engine's."""
    model = model or MODELS[variant]
    drafts = []
    texts = []
    for graphs in (False, True):
        drafts.append(recorded(folder, layout, model))
        engine = tiny_engine(variant, drafts[-1], names=(), model=model, graphs=graphs, **room)
        texts.append(run(engine, jobs))
    assert graphs_of(engine).decode_graphs.cache.graphs and engine.metrics.drafted > 0
    assert texts[0] == texts[1]
    eager, captured = (each.drafts for each in drafts)
    for key, drafted in eager.items():  # near its end a sequence drafts less, in a graph perhaps a step later
        for tokens in drafted:
            assert any(all(a == b for a, b in zip(tokens, other)) for other in captured[key]), key
    return engine, texts[1]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("params", [{}, {"temperature": 0.7, "seed": 5}], ids=["greedy", "T0.7"])
def test_every_layout_drafts_what_eager_steps_draft(folder: Path, layout: str, params: dict[str, Any]) -> None:
    variant = "dense" if "gemma" in layout else "llama"
    jobs = [request(f"{k}", PROMPT[i:], k=k, **{**params, "max_tokens": 12}) for i, k in enumerate((3, 4))]
    assert same_drafts(folder, layout, variant, jobs)[1] == plain(variant, jobs)


@pytest.mark.parametrize("variant", ["mistral", "dense"])
@pytest.mark.parametrize("layout", KINDS)
def test_windows_preemption_and_prefixes(folder: Path, layout: str, variant: str) -> None:
    prompts = [PROMPT * 2, PROMPT, PROMPT * 2, [7, 9, *PROMPT]]
    jobs = [request(f"{i}", p, k=4, temperature=0.8 * (i % 2), seed=i, max_tokens=16) for i, p in enumerate(prompts)]
    engine, got = same_drafts(folder, layout, variant, jobs, max_batch=4, kv_tokens=80, max_context=72)
    assert got == plain(variant, jobs)
    assert engine.scheduler.preemptions > 0 or variant == "mistral"  # it has windows only, which never fill
    engine = tiny_engine(variant, engine.drafter, names=(), model=MODELS[variant], graphs=True, max_batch=4)
    for name in "ab":
        again = [request(f"{name}{r.id}", r.prompt, k=3, max_tokens=8) for r in jobs[:2]]
        assert run(engine, again) == plain(variant, again)
    assert engine.metrics.cached_tokens > 0


@pytest.mark.parametrize("layout", ["z-lab", "speculators-eagle3"])
def test_prompts_in_captured_passes(folder: Path, layout: str) -> None:
    """The CPU kernels have captured prompts. Catches context K/V of a padded row, or a token behind it that is off."""
    model = tiny_model("edge", ops=CpuOps(threads=1))
    jobs = [request(f"{i}", [*range(i, i + n)], k=4, max_tokens=6) for i, n in enumerate((40, 3, 33))]
    engine, _ = same_drafts(folder, layout, "edge", jobs, model, prefill_chunk=24)
    assert graphs_of(engine).prefill_graphs.cache.graphs


@settings(max_examples=8)
@given(
    st.sampled_from(KINDS), st.sampled_from(["dense", "edge", "llama"]), st.lists(one, min_size=1, max_size=5),
    st.integers(2, 4), st.booleans(), st.booleans(), st.booleans(),
)  # fmt: skip
def test_random_batches(
    folder: Path, layout: str, variant: str, jobs: list[Any], most: int, tight: bool, reuse: bool, served: bool
) -> None:
    """Penalties, grammars, stops, logprobs, joining, leaving, aborts, preemption: as of MTP drafters."""
    block_drafter = drafter(folder / layout, layout, MODELS[variant])
    room = {"max_batch": most, "kv_tokens": 96 if tight else None, "prefix_cache": reuse}
    engine = tiny_engine(variant, block_drafter, model=MODELS[variant], graphs=True, k=3, **room)
    check_batches(engine, variant, jobs, served)


@pytest.mark.parametrize("layout", KINDS)
@pytest.mark.parametrize("value", [float("nan"), 1e30, 0.0])
def test_adversarial_weights(folder: Path, layout: str, value: float) -> None:
    block_drafter = drafter(folder / layout, layout, MODELS["llama"])
    for name, weight in block_drafter.block.weights.items():
        if name != "d2t":
            weight.fill_(value)
    engine = tiny_engine("llama", block_drafter, names=(), model=MODELS["llama"], graphs=True)
    jobs = [request("a", PROMPT, k=5, max_tokens=10), request("b", PROMPT[3:], k=2, **{**HOT, "max_tokens": 10})]
    jobs.append(tree_request("c", PROMPT[1:], 4, 15, max_tokens=10))
    assert run(engine, jobs[:2]) | run(engine, jobs[2:]) == plain("llama", jobs)
    assert engine.metrics.drafted > 0


@pytest.mark.parametrize("layout", LAYOUTS)
@torch.inference_mode()
def test_no_value_is_looked_at(layout: str) -> None:
    """On the meta device there are none: whatever would wait for a GPU raises."""
    ops = ShapesOnly()
    variant = "dense" if "gemma" in layout else "llama"
    target = ModelConfig.from_hf(VARIANTS[variant])

    def blank(plans):
        return {n: torch.zeros(p.shape, dtype=kept_dtype(p, torch.float32), device="meta") for n, p in plans.items()}

    model = TextModel(target, blank(tensor_plan(target)), ops)
    config = BlockConfig.from_hf(LAYOUTS[layout]).bound(target)
    block_drafter = BlockDrafter(BlockNet(config, blank(tensor_plan(config)), ops, model))
    store = KVStore(target, CacheSpec(4, 128, 4, 17, 256), torch.float32, "meta", block_drafter.kv_specs)
    sampling = SlotSampling(5, VOCAB, (1,), torch.device("meta"))
    state = State.of(torch.zeros(5, 32 * (1 + len(block_drafter.taps)), device="meta"), sampling)
    inputs = Inputs.of(torch.device("meta"), 4, 2)
    chains = ((0, 0), (2, 0), (16, 0))
    tree = (4, min(15, block_drafter.max_nodes(4)))
    steps = [("sampled", *shape) for shape in (*chains, tree)] + [("greedy", *tree), ("sort", *tree)]
    for choosing, k, nodes in steps:
        key = Key(2, k, 512, choosing, "drafter" if k else None, nodes=nodes)  # type: ignore[arg-type]
        logits = DecodeStep(model, store, block_drafter, state, inputs, key, Output.of(key, torch.device("meta")))()
        assert logits is not None and logits.shape == (2 * (key.drafted + 1), VOCAB)


def test_a_block_s_own_width_has_a_graph(folder: Path) -> None:
    """A block of 6 drafts 5: K = 5 is not run in a graph of 6."""
    engine, _ = same_drafts(folder, "z-lab", "llama", [request("a", PROMPT, k=5, max_tokens=12)])
    assert {key.k for key in graphs_of(engine).decode_graphs.cache.graphs if key.k} <= {1, 2, 3, 4, 5}
    assert 5 in {key.k for key in graphs_of(engine).decode_graphs.cache.graphs}
