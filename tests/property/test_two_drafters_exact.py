"""An engine with two network drafters, an MTP and a block drafter: the text is that of plain decoding however cycles
switch between them, and the block drafter's context is right after cycles that it did not draft."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.block_drafters import LAYOUTS, drafter, net, tensors
from tests.engines import VARIANTS, VOCAB, mtp_drafter, request, run, run_joining, tiny_engine
from tests.property.test_block_exact import MODELS, PROMPT, Audited, audited_steps, plain
from tests.property.test_block_exact import one as asked_one
from tests.property.test_capture_blind import ShapesOnly
from tests.unit.engine.test_graphs import graphs_of

from outrider.cache.store import CacheSpec, KVStore
from outrider.config import EngineConfig, SpecConfig
from outrider.engine.decode import DecodeStep, Inputs, Key, Output, State
from outrider.engine.engine import Engine
from outrider.engine.memory import KVOptions
from outrider.models.block import BlockNet
from outrider.models.block_config import BlockConfig
from outrider.models.config import ModelConfig
from outrider.models.decoder import TextModel
from outrider.models.drafter import MTPNet
from outrider.models.names import tensor_plan
from outrider.ops.cpu.ops import CpuOps
from outrider.spec.block import BlockDrafter
from outrider.spec.controller import Controller
from outrider.spec.cost import CostTable
from outrider.spec.drafter import DrafterPair
from outrider.spec.mtp import MTPDrafter
from outrider.spec.plan import VERIFY, CostPart, CyclePlan, DraftContext
from outrider.spec.slot_sampling import SlotSampling
from outrider.train import design
from outrider.types import DraftPlan, OutriderError
from outrider.weights.load import dummy_weights, kept_dtype

WIDE = {
    "hidden_size": 64, "head_dim": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96,
    "num_hidden_layers": 3,
}  # fmt: skip


class Dice(Controller):
    """Any drafter, any K, any tree, by lot: for each sequence, or (`together`) one drafter in a cycle."""

    together = False
    branching = True

    def __init__(self, names: tuple[str, ...], seed: int):
        super().__init__(CostTable(), names)
        self.lot = random.Random(seed)

    def propose(self, seqs: Sequence[DraftContext]) -> CyclePlan:
        drafts = []
        common = self.lot.choice(self.drafters)
        for view in seqs:
            name = common if self.together else self.lot.choice(self.drafters)
            k = min(self.lot.randint(0, 5), view.drafter_available.get(name, 0))
            nodes = self.lot.randint(k + 1, k + 5) if self.branching and k and name != "ngram" else 0
            drafts.append(DraftPlan(name, k, nodes=nodes if nodes <= view.nodes else 0) if k else DraftPlan(None, 0))
        return CyclePlan(drafts)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("two")


def pair(folder: Path, layout: str, variant: str, block_first: bool = False) -> DrafterPair:
    model = MODELS[variant]
    block = Audited(drafter(folder / layout, layout, model).block)
    mtp = mtp_drafter(model, variant)
    return DrafterPair(block, mtp) if block_first else DrafterPair(mtp, block)


def switching(engine: Engine, seed: int) -> Dice:
    assert engine.drafter is not None
    dice = engine.policy.controller = Dice((*(one.name for one in engine.drafter.members), "ngram"), seed)
    return dice


def both_drafted(engine: Engine) -> None:
    assert engine.drafter is not None
    for one in engine.drafter.members:
        assert engine.metrics.drafted_by_drafter.get(one.name, 0) > 0, one.name
    assert engine.metrics.drafter_failures == 0


@settings(max_examples=5)
@given(
    st.sampled_from(["z-lab", "dspark-rnn", "speculators-eagle3"]), st.sampled_from(["dense", "edge"]),
    st.lists(asked_one, min_size=1, max_size=3), st.booleans(), st.integers(0, 1 << 30),
)  # fmt: skip
def test_any_switching_keeps_the_text(
    folder: Path, layout: str, variant: str, asked: list[Any], tight: bool, seed: int
) -> None:
    """Penalties, grammars, stops, joining, leaving, preemption, shared prefixes, trees next to chains; drafts of both
    drafters in one step."""
    block_drafter = pair(folder, layout, variant, bool(seed % 2))
    room = {"kv_tokens": 64, "max_context": 60} if tight else {}
    engine = tiny_engine(variant, block_drafter, k=None, model=MODELS[variant], max_batch=3, **room)
    switching(engine, seed)
    jobs = [(at, request(f"{i}", p, **params)) for i, (p, params, _, at) in enumerate(asked)]
    for _, job in jobs:
        job.tree = 9
    assert run_joining(engine, jobs) == plain(variant, [r for _, r in jobs])
    assert engine.metrics.drafter_failures == 0


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("layout", ["z-lab", "speculators-eagle3"])
def test_both_draft_and_the_context_is_right(folder: Path, layout: str, graphs: bool) -> None:
    """Preemption and a prompt that comes twice; greedy and drawn. In captured steps one drafter at a time."""
    block_drafter = pair(folder, layout, "dense")
    engine = tiny_engine(
        "dense", block_drafter, k=None, model=MODELS["dense"], max_batch=4, graphs=graphs, kv_tokens=80, max_context=72
    )
    dice = switching(engine, 5)
    dice.together = graphs
    prompts = [PROMPT * 2, PROMPT, PROMPT * 2]
    jobs = [request(f"{i}", p, temperature=0.8 * (i % 2), seed=i, max_tokens=14) for i, p in enumerate(prompts)]
    if graphs:
        eager = engine.executors[-1]
        eager.launch = lambda plan: pytest.fail("a step went the slow way")  # type: ignore[method-assign]
    assert run(engine, jobs) == plain("dense", jobs)
    both_drafted(engine)
    if graphs:
        names = {key.drafter for key in graphs_of(engine).decode_graphs.cache.graphs}
        assert names == {None, block_drafter.mtp.name, block_drafter.block.name}
    else:
        assert isinstance(block_drafter.block, Audited) and block_drafter.block.audits > 0


def test_captured_steps_of_a_server_and_mixed_ones(folder: Path) -> None:
    """A server's graphs exist for both drafters; a step that needs both runs eagerly."""
    block_drafter = pair(folder, "z-lab", "dense")
    engine = tiny_engine("dense", block_drafter, k=None, model=MODELS["dense"], max_batch=2, graphs=True)
    executor = graphs_of(engine)
    executor.prepare()
    assert {key.drafter for key in executor.decode_graphs.cache.graphs if key.k} == {"mtp", "dflash"}
    for name in ("mtp", "dflash"):
        executor.probe(CostPart("draft", name), 1, 4, 40)
    engine.policy.controller = Controller(CostTable(), ("mtp", "dflash", "ngram"))
    jobs = [request(name, PROMPT, k=3, drafter=name, max_tokens=12) for name in ("mtp", "dflash")]
    assert run(engine, jobs) == plain("dense", jobs)
    both_drafted(engine)


def host_engine(folder: Path, layout: str, taps: tuple[int, ...], mtp_first: bool = True) -> Engine:
    ops = CpuOps(threads=1)
    config = ModelConfig.from_hf({**VARIANTS["llama"], **WIDE})
    model = ops.compile(TextModel(config, dummy_weights(config, "cpu", torch.float32, ops, None, 3), ops))
    drafter_config = design.plain(config, reads=(0, 2), intermediate=64, taps=taps)
    mtp = MTPDrafter(
        ops.compile_drafter(
            MTPNet(drafter_config, dummy_weights(drafter_config, "cpu", torch.float32, ops, None, seed=4), ops, model)
        ),
        model,
    )
    width = {key: value for key, value in WIDE.items() if key != "num_hidden_layers"}
    body = {key: {**raw, **width} if key == "transformer_layer_config" else raw for key, raw in LAYOUTS[layout].items()}
    raw = body if "transformer_layer_config" in body else {**body, **width}
    block = BlockDrafter(net(folder / f"{layout}-wide", raw, tensors(raw, 4, 1.0), model))
    pair = DrafterPair(mtp, block) if mtp_first else DrafterPair(block, mtp)
    controller = Controller(CostTable(), (*(one.name for one in pair.members), "ngram"))
    room = EngineConfig(max_batch=4, max_context=256, page_size=16, prefill_chunk=32)
    return Engine(model, None, room, SpecConfig(None), pair, controller, KVOptions(torch.float32))


@pytest.mark.parametrize("taps", [(), (2,), (1, 2)], ids=["none", "another layer", "one of both"])
@pytest.mark.parametrize("params", [{}, {"temperature": 0.9, "seed": 7}], ids=["greedy", "T0.9"])
def test_one_call_of_the_library(folder: Path, taps: tuple[int, ...], params: dict[str, Any]) -> None:
    """Drafts of both are made inside the call (EAGLE-3's before it), in one step too: tokens, features, counts and
    context are those of the single operations. Catches streams of the one handed to the other."""
    layout = "speculators-eagle3" if taps == (2,) else "z-lab"
    one, many = (host_engine(folder, layout, taps) for _ in range(2))
    assert [e.name for e in one.executors] == ["host", "eager"] and not one.executors[0].trees
    many.executors = many.executors[1:]
    for engine in (one, many):
        switching(engine, 3).branching = False
    block = one.drafter.block  # type: ignore[union-attr]
    audits = audited_steps(one, block.block)
    jobs = [
        *(request(f"{i}", PROMPT[i:], **{**params, "max_tokens": 16}) for i in range(3)),
        request("e", PROMPT[3:], **{**params, "presence_penalty": 0.5, "max_tokens": 8}),  # no part of the call
    ]
    got = run(one, jobs)
    want = run(many, jobs)
    assert got == want
    assert one.metrics.drafted_by_drafter == many.metrics.drafted_by_drafter
    assert one.metrics.accepted_by_drafter == many.metrics.accepted_by_drafter
    assert torch.equal(one.runner.features, many.runner.features)
    both_drafted(one)
    none = [request(r.id, r.prompt, k=0, drafter=False, **{**params, "max_tokens": len(got[r.id])}) for r in jobs[:3]]
    assert run(one, none) == {r.id: got[r.id] for r in none}
    assert sum(audits) > 3
    for part in (VERIFY, CostPart("draft", "mtp"), CostPart("draft", block.name)):
        assert one.executors[0].can_probe(part)
        one.executors[0].probe(part, 2, 3, 40)


def test_the_path_of_an_mtp_tree_is_read(folder: Path) -> None:
    """Trees of the MTP drafter stay inside the call: the block drafter reads the rows of the accepted path. Catches rows
    read in the order in which the tree was verified."""
    engine = host_engine(folder, "z-lab", ())
    audits = audited_steps(engine, engine.drafter.block.block)  # type: ignore[union-attr]
    jobs = [request(f"{i}", PROMPT[i:], k=4, drafter="mtp", temperature=0.9, seed=i, max_tokens=24) for i in range(2)]
    want = {job.id: run(engine, [request(job.id, job.prompt, k=0, drafter=False, **vars(job.params))]) for job in jobs}
    for job in jobs:
        job.tree = 9
    engine.executors = engine.executors[:1]  # no other may be needed
    assert run(engine, jobs) == {name: text[name] for name, text in want.items()}
    assert sum(audits) > 3 and engine.metrics.drafted_by_drafter["mtp"] > 0


def test_a_given_k_uses_the_first_and_a_request_may_name_one(folder: Path) -> None:
    for block_first, name in ((False, "mtp"), (True, "dflash")):
        block_drafter = pair(folder, "z-lab", "dense", block_first)
        engine = tiny_engine("dense", block_drafter, k=3, model=MODELS["dense"])
        engine.policy.controller = Controller(CostTable(), (*(one.name for one in block_drafter.members), "ngram"))
        run(engine, [request("a", PROMPT[:3], max_tokens=8)])
        assert {*engine.metrics.drafted_by_drafter} <= {name, "ngram"}
        run(engine, [request("b", PROMPT[:3], drafter="dflash", max_tokens=8)])
        assert engine.metrics.drafted_by_drafter["dflash"] > 0


def test_one_that_fails_is_switched_off(folder: Path) -> None:
    block_drafter = pair(folder, "z-lab", "dense")
    engine = tiny_engine("dense", block_drafter, k=None, model=MODELS["dense"])
    switching(engine, 1)

    def fails(*_: object) -> None:
        raise RuntimeError("no")

    block_drafter.mtp.propose = fails  # type: ignore[assignment, method-assign]
    jobs = [request(f"{i}", PROMPT[i:], max_tokens=12) for i in range(2)]
    assert run(engine, jobs) == plain("dense", jobs)
    assert engine.metrics.drafter_failures > 0


@pytest.mark.parametrize("failing", ["mtp", "dflash", "reading"])
def test_the_other_of_a_pair_drafts_on(folder: Path, failing: str) -> None:
    """A drafter of a pair that fails is switched off alone, once per request, and the statistics name it."""
    drafters = pair(folder, "z-lab", "dense")
    engine = tiny_engine("dense", drafters, k=3, model=MODELS["dense"])
    engine.policy.controller = Controller(CostTable(), ("mtp", "dflash", "ngram"))

    def fails(*_: object) -> None:
        raise RuntimeError("broken on purpose")

    broken = drafters.mtp if failing == "mtp" else drafters.block
    if failing == "reading":
        broken.extend = fails  # type: ignore[method-assign]
    else:
        broken.propose = fails  # type: ignore[assignment, method-assign]
    jobs = [request(f"{i}", PROMPT[i:], drafter=True, max_tokens=12) for i in range(2)]
    if failing == "dflash":
        for job in jobs:
            engine.submit(job)
            seq = engine.running(job.id)
            assert seq is not None
            engine.runner.switch_off("dflash", [seq], RuntimeError("broken on purpose"))
    else:
        for job in jobs:
            engine.submit(job)
    got: dict[str, list[int]] = {job.id: [] for job in jobs}
    reasons = []
    while engine.busy:
        for event in engine.step():
            got[event.id] += event.tokens
            reasons += [event.stats.drafter_off] if event.stats is not None else []
    assert got == plain("dense", jobs)
    assert reasons == [f"{broken.name}: RuntimeError: broken on purpose"] * 2
    other = drafters.block if failing == "mtp" else drafters.mtp
    assert engine.metrics.drafted_by_drafter[other.name] > 0
    assert engine.metrics.drafter_failures <= 2


def test_two_of_a_kind_are_refused(folder: Path) -> None:
    model = MODELS["dense"]
    block = drafter(folder / "z-lab", "z-lab", model)
    mtp = mtp_drafter(model, "dense")
    for first, second in ((block, block), (mtp, mtp)):
        with pytest.raises(OutriderError, match=f"an MTP and a block drafter.*got {first.name} and {second.name}"):
            DrafterPair(first, second)


@torch.inference_mode()
def test_no_value_is_looked_at() -> None:
    """A captured step with two drafters never waits for the device."""
    ops = ShapesOnly()
    target = ModelConfig.from_hf(VARIANTS["llama"])

    def blank(plans):
        return {n: torch.zeros(p.shape, dtype=kept_dtype(p, torch.float32), device="meta") for n, p in plans.items()}

    model = TextModel(target, blank(tensor_plan(target)), ops)
    config = BlockConfig.from_hf(LAYOUTS["speculators-eagle3"]).bound(target)
    block = BlockDrafter(BlockNet(config, blank(tensor_plan(config)), ops, model))
    drafter_config = design.plain(target, reads=(0, 1), intermediate=64, taps=(1,))
    pair = DrafterPair(block, MTPDrafter(MTPNet(drafter_config, blank(tensor_plan(drafter_config)), ops, model), model))
    assert pair.taps[0] == 1 and {*pair.taps} == {*block.taps, 1}
    store = KVStore(target, CacheSpec(4, 128, 4, 17, 256), torch.float32, "meta", pair.kv_specs)
    state = State.of(
        torch.zeros(5, 32 * (1 + len(pair.taps)), device="meta"), SlotSampling(5, VOCAB, (1,), torch.device("meta"))
    )
    inputs = Inputs.of(torch.device("meta"), 4, 2)
    for name in ("mtp", "eagle3"):
        key = Key(2, 3, 512, "sampled", "drafter", drafter=name)
        logits = DecodeStep(model, store, pair, state, inputs, key, Output.of(key, torch.device("meta")))()
        assert logits is not None and logits.shape == (8, VOCAB)
