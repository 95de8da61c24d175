"""Block drafters change no text, and their context is right. The first: plain = drafted = in a batch, whatever the
temperature, penalties, stops, joins, preemptions and shared prefixes. The second: whenever a draft starts, its
K/V at every committed position is what one pass over the whole text would give, so that a rejected row, a page handed
to another sequence, or a prefix computed for another request would show.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.block_drafters import LAYOUTS, audit_pages, drafter, net, tensors
from tests.engines import VARIANTS, VOCAB, request, run, run_joining, tiny_engine, tiny_model
from tests.unit.engine.test_graphs import Thirds

from outrider.cache.store import CacheSpec, KVStore
from outrider.engine.engine import Engine, Event
from outrider.engine.host import HostExecutor
from outrider.engine.step import Request
from outrider.models.block import BlockNet
from outrider.models.config import ModelConfig
from outrider.models.decoder import TextModel
from outrider.ops.attention import block_context
from outrider.ops.cpu.ops import CpuOps
from outrider.ops.decode_io import Proposer
from outrider.spec.block import BlockDrafter
from outrider.spec.drafter import DraftBatch
from outrider.spec.plan import VERIFY, CostPart
from outrider.types import Draft, DraftPlan
from outrider.weights.load import dummy_weights

MODELS = {name: tiny_model(name) for name in ("llama", "mistral", "dense", "edge")}
PROMPT = [3, 5, 7, 9, 11, 3, 5, 7, 9, 13, 2, 40, 41, 3, 5, 8, 8, 9, 21]
HOT = {
    "temperature": 1.3, "top_p": 0.9, "repetition_penalty": 1.2, "frequency_penalty": 0.2, "logit_bias": {4: 1.5},
    "seed": 11,
}  # fmt: skip
CLOSE = {"atol": 1e-3, "rtol": 1e-3}
KINDS = ("z-lab", "dflash2", "dspark-rnn", "speculators-eagle3")


class Audited(BlockDrafter):
    """Before every third draft it computes its context anew, from the tokens alone."""

    rounds = audits = 0

    def propose(self, batch: DraftBatch, k: int) -> Draft:
        target = self.block.target
        block = self.block
        self.rounds += 1
        if self.rounds % 3 or not batch.tokens[0]:  # a captured step knows none
            return super().propose(batch, k)
        for b, tokens in enumerate(batch.tokens):
            known = len(tokens) - 1
            store = KVStore(target.config, CacheSpec(1, 256, 4, 256, 256), torch.float32, "cpu", self.kv_specs)
            cache, _ = store.open()
            store.reserve(cache, known)
            at = torch.arange(known)
            start = torch.tensor([0, known], dtype=torch.int32)
            store.flush()
            kv = store.view(torch.tensor([cache.slot]), at, torch.zeros_like(at), start, known, known)
            block.write_context(
                target.forward(torch.tensor(tokens[:-1]), kv, self.taps).streams, kv, torch.tensor(tokens[1:])
            )
            for layer in block.layers:
                want = block_context(layer.attn, kv, torch.tensor([known]))
                got = block_context(layer.attn, batch.kv, batch.position)
                there = got[2][b] >= 0
                wanted = want[2][0] >= 0
                windows = [w - 1 for w in (layer.attn.window, layer.attn.spec.window) if w is not None]
                assert int(there.sum()) == min([known, *windows])
                assert got[2][b][there].tolist() == want[2][0][wanted].tolist()
                for ours, theirs in zip(got[:2], want[:2]):
                    torch.testing.assert_close(ours[b][:, there].float(), theirs[0][:, wanted].float(), **CLOSE)
            self.audits += 1
        return super().propose(batch, k)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("block")


def audited(folder: Path, layout: str, variant: str) -> Audited:
    return Audited(drafter(folder / layout, layout, MODELS[variant]).block)


def plain(variant: str, requests: list[Request]) -> dict[str, list[int]]:
    """Each alone, without a draft."""
    engine = tiny_engine(variant, model=MODELS[variant])
    return {r.id: run(engine, [Request(r.id, r.prompt, r.params, 0, False)])[r.id] for r in requests}


PARAMS: dict[str, dict[str, Any]] = {"greedy": {}, "T0.7": {"temperature": 0.7, "seed": 5}, "T1.3+all": HOT}


def three(params: str) -> list[Request]:
    return [request(f"{k}", PROMPT[k:], k=k, **{**PARAMS[params], "max_tokens": 12}) for k in (1, 3, 16)]


@cache
def wanted(variant: str, params: str) -> dict[str, list[int]]:
    return plain(variant, three(params))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("params", PARAMS)
def test_every_layout(folder: Path, layout: str, params: str) -> None:
    variant = "dense" if "gemma" in layout else "llama"
    block_drafter = audited(folder, layout, variant)
    engine = tiny_engine(variant, block_drafter, names=(), model=MODELS[variant])
    assert run(engine, three(params)) == wanted(variant, params)
    assert block_drafter.audits and engine.metrics.drafted > 0 and engine.metrics.drafter_failures == 0
    assert engine.executors[0].name == "eager"


@pytest.mark.parametrize("variant", ["mistral", "dense"])
@pytest.mark.parametrize("layout", KINDS)
def test_windows_preemption_and_prefixes(folder: Path, layout: str, variant: str) -> None:
    """Few pages: sequences are preempted and computed again; the same prompt twice: pages are shared."""
    block_drafter = audited(folder, layout, variant)
    engine = tiny_engine(
        variant, block_drafter, names=(), model=MODELS[variant], max_batch=4, kv_tokens=80, max_context=72
    )
    prompts = [PROMPT * 2, PROMPT, PROMPT * 2, [7, 9, *PROMPT]]
    jobs = [request(f"{i}", p, k=4, temperature=0.8, seed=i, max_tokens=16) for i, p in enumerate(prompts)]
    assert run(engine, jobs) == plain(variant, jobs)
    assert block_drafter.audits > 5 and engine.metrics.drafter_failures == 0
    assert engine.scheduler.preemptions > 0 or variant == "mistral"  # it has windows only, which never fill
    engine = tiny_engine(variant, block_drafter, names=(), model=MODELS[variant], max_batch=4)
    for name in "ab":
        jobs = [request(f"{name}{i}", p, k=3, max_tokens=8) for i, p in enumerate(prompts[:2])]
        assert run(engine, jobs) == plain(variant, jobs)
    assert engine.metrics.cached_tokens > 0 and engine.metrics.drafter_failures == 0


one = st.tuples(
    st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=30),
    st.fixed_dictionaries(
        {
            "temperature": st.sampled_from([0.0, 0.7, 1.3]),
            "seed": st.integers(0, 2**40),
            "top_p": st.sampled_from([1.0, 0.8]),
            "repetition_penalty": st.sampled_from([1.0, 1.3]),
            "stop_token_ids": st.sampled_from([(), (5, 9, 33)]),
            "max_tokens": st.integers(1, 14),
            "grammar": st.sampled_from([None, None, Thirds()]),
        }
    ),
    st.sampled_from([None, 0, 1, 2, 5, 16]),
    st.integers(0, 6),
)


@settings(max_examples=8)
@given(st.sampled_from(KINDS), st.sampled_from(sorted(MODELS)), st.lists(one, min_size=1, max_size=5), st.booleans())
def test_joining_and_leaving(folder: Path, layout: str, variant: str, asked: list[Any], tight: bool) -> None:
    block_drafter = audited(folder, layout, variant)
    room = {"kv_tokens": 64, "max_context": 60} if tight else {}
    engine = tiny_engine(variant, block_drafter, names=("ngram",), k=None, model=MODELS[variant], max_batch=3, **room)
    jobs = [(at, request(f"{i}", p, k=k, **params)) for i, (p, params, k, at) in enumerate(asked)]
    assert run_joining(engine, jobs) == plain(variant, [r for _, r in jobs])
    assert engine.metrics.drafter_failures == 0


@pytest.mark.parametrize("layout", KINDS)
def test_confidence_ends_drafts(folder: Path, layout: str) -> None:
    """Trust in no confidence: a token that falls below `drop` is left out, one below `stop` is the last; trust in all:
    drafts go on to the end."""

    class Ended(BlockDrafter):
        trusted = 0.0
        plan = DraftPlan("", 4)
        lengths: ClassVar = set[int]()

        def propose(self, batch: DraftBatch, k: int) -> Draft:
            batch.plans = [self.plan] * len(batch.tokens)
            batch.trust = [self.trusted] * 16
            draft = super().propose(batch, k)
            self.lengths.update(draft.lengths.tolist())
            assert bool(((draft.confidence >= 0) & (draft.confidence <= 1)).all())
            return draft

    want = plain("llama", [request("a", PROMPT, max_tokens=8)])
    for trusted, plan, length in (
        (0.1, DraftPlan("", 4, drop=0.5), 0),
        (0.1, DraftPlan("", 4, stop=0.5), 1),
        (1.0, DraftPlan("", 4, stop=0.5, drop=0.2), 4),
    ):
        draft = Ended(drafter(folder / layout, layout, MODELS["llama"]).block)
        draft.trusted = trusted
        draft.plan = plan
        draft.lengths = set()
        engine = tiny_engine("llama", draft, names=(), model=MODELS["llama"])
        assert run(engine, [request("a", PROMPT, k=4, max_tokens=8)]) == want
        assert engine.metrics.drafter_failures == 0 and max(draft.lengths) == length


def test_a_drafter_that_foresees_is_accepted(folder: Path) -> None:
    """A DSpark head that adds a large bonus to the right next token, known from a text that was run before: every draft
    is accepted, at temperature 0 and above. Catches tokens drafted for a slot that is off by one."""
    model = MODELS["llama"]
    for params in ({}, {"temperature": 1.0, "seed": 4}):
        want = plain("llama", [request("a", PROMPT, max_tokens=20, **params)])["a"]
        made = audited(folder, "dspark", "llama")
        text = [*PROMPT, *want]
        real = made.block.markov

        def foresees(previous, hidden, state, text=text, real=real):  # type: ignore[no-untyped-def]
            bias, state, e = real(previous, hidden, state)
            j = foresees.at  # type: ignore[attr-defined]
            foresees.at += 1  # type: ignore[attr-defined]
            bias = torch.full_like(bias, -1e9)
            bias[0, text[j]] = 1e9
            return bias, state, e

        def propose(batch: DraftBatch, k: int, made: Audited = made) -> Draft:
            foresees.at = len(batch.tokens[0])  # type: ignore[attr-defined]
            return Audited.propose(made, batch, k)

        made.block.markov = foresees  # type: ignore[method-assign]
        made.propose = propose  # type: ignore[method-assign]
        engine = tiny_engine("llama", made, names=(), model=model)
        assert run(engine, [request("a", PROMPT, k=4, max_tokens=20, **params)])["a"] == want
        assert engine.metrics.accepted == engine.metrics.drafted > 10


def audited_steps(engine: Engine, block: BlockNet, every: int = 3) -> list[int]:
    """From now on the block drafter's pages are audited after every third step, or another; how many sequences each
    time. An audit reads what is unread."""
    step = engine.step
    audits = list[int]()
    count = itertools.count()

    def audited_step() -> list[Event]:
        events = step()
        if next(count) % every == every - 1:
            audits.append(audit_pages(engine, block))
        return events

    engine.step = audited_step  # type: ignore[method-assign]
    return audits


WIDE = {"hidden_size": 64, "head_dim": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96}


@cache
def compiled(variant: str = "llama", window: int = 0) -> TextModel:
    ops = CpuOps(threads=2)
    sliding = {"sliding_window": window, "global_head_dim": 64} if window else {}
    config = ModelConfig.from_hf({**VARIANTS[variant], **WIDE, **sliding})
    return ops.compile(TextModel(config, dummy_weights(config, "cpu", torch.float32, ops, None, 3), ops))


def wide_drafter(folder: Path, layout: str, model: TextModel, **other: Any) -> BlockDrafter:
    body = {key: {**raw, **WIDE} if key == "transformer_layer_config" else raw for key, raw in LAYOUTS[layout].items()}
    raw = {**(body if "transformer_layer_config" in body else {**body, **WIDE}), **other}
    return BlockDrafter(net(folder / f"{layout}-wide", raw, tensors(raw, 4, 1.0), model))


@pytest.mark.parametrize("layout", [*KINDS, "dspark"])
@pytest.mark.parametrize("params", [{}, {"temperature": 0.9, "seed": 7}], ids=["greedy", "T0.9"])
def test_one_call_of_the_library(folder: Path, layout: str, params: dict[str, Any]) -> None:
    """On a CPU a step is one call, with the drafter's tokens handed in where they depend on each other: texts, features,
    drafts and context are those of the single operations. Catches streams read from other rows than were run, and rows
    that are read late, twice, or into the pages of another sequence."""
    model = compiled()
    drafters = [wide_drafter(folder, layout, model) for _ in range(2)]
    one, many = (tiny_engine("llama", d, model=model, max_batch=4, page_size=16) for d in drafters)
    assert [e.name for e in one.executors] == ["host", "eager"]
    assert isinstance(one.executors[0], HostExecutor)
    proposer = Proposer.BLOCK if layout == "z-lab" else Proposer.HOST
    assert one.executors[0].proposers[drafters[0].name] == proposer
    many.executors = many.executors[1:]
    audits = audited_steps(one, drafters[0].block), audited_steps(many, drafters[1].block)
    jobs = [
        request("a", PROMPT, k=3, drafter=drafters[0].name, **params),
        request("b", PROMPT[2:], k=5, drafter="ngram", **params),
        request("c", PROMPT[4:], drafter=False, **params),
        request("d", PROMPT[1:], k=1, **{**params, "max_tokens": 9}),
        request("e", PROMPT[3:], k=4, **{**params, "presence_penalty": 0.5}),  # no part of the call
    ]
    got = run(one, jobs)
    want = run(many, jobs)
    assert got == want
    assert one.metrics.drafted == many.metrics.drafted > 0 and one.metrics.accepted == many.metrics.accepted
    assert torch.equal(one.runner.features, many.runner.features)
    assert min(map(sum, audits)) > 3 and one.metrics.drafter_failures == many.metrics.drafter_failures == 0
    for part in (VERIFY, CostPart("draft", drafters[0].name)):
        assert one.executors[0].can_probe(part)
        one.executors[0].probe(part, 2, 3, 40)


@settings(max_examples=12)
@given(st.sampled_from(KINDS), st.lists(one, min_size=1, max_size=5), st.booleans())
def test_joining_and_leaving_one_call(folder: Path, layout: str, asked: list[Any], tight: bool) -> None:
    """Steps in one call and step by step (penalties, grammars) in turn, rejected drafts, pages handed on, prefixes taken
    over, answers longer than what is kept unread."""
    block_drafter = wide_drafter(folder, layout, compiled())
    room = {"kv_tokens": 96, "max_context": 80} if tight else {}
    engine = tiny_engine(
        "llama", block_drafter, names=("ngram",), k=None, model=compiled(), max_batch=3, page_size=16, **room
    )
    audited_steps(engine, block_drafter.block)
    jobs = [
        (at, request(f"{i}", p, k=k, **{**params, "max_tokens": 4 * params["max_tokens"]}))
        for i, (p, params, k, at) in enumerate(asked)
    ]
    alone = tiny_engine("llama", model=compiled(), page_size=16, **room)
    want = {r.id: run(alone, [Request(r.id, r.prompt, r.params, 0, False)])[r.id] for _, r in jobs}
    assert run_joining(engine, jobs) == want
    assert run_joining(engine, [(at, replace(r, id=f"{r.id} again")) for at, r in jobs]) == {
        f"{id} again": text for id, text in want.items()
    }
    assert engine.metrics.drafter_failures == 0


@pytest.mark.parametrize("layout", KINDS)
@pytest.mark.parametrize(("variant", "window"), [("dense", 48), ("mistral", 33)])
@pytest.mark.parametrize("tight", [False, True])
def test_windows_in_one_call(folder: Path, layout: str, variant: str, window: int, tight: bool) -> None:
    """Pages before the target's window are given back while rows are unread, and sequences are preempted. Catches rows
    that are read late into pages of others."""
    model = compiled(variant, window)
    body = {"sliding_window": 20} if layout == "z-lab" else {}
    block_drafter = wide_drafter(folder, layout, model, **body)
    room = {"kv_tokens": 160, "max_context": 140} if tight else {}
    engine = tiny_engine("llama", block_drafter, names=(), k=None, model=model, max_batch=3, page_size=16, **room)
    assert isinstance(engine.executors[0], HostExecutor)
    audits = audited_steps(engine, block_drafter.block, 59)
    jobs = [
        (7 * i, request(f"{i}", [i, *PROMPT], k=k, temperature=0.8, seed=i, max_tokens=90))
        for i, k in enumerate([0, 0, 2, 0, 0])
    ]
    alone = tiny_engine("llama", model=model, page_size=16, **room)
    want = {r.id: run(alone, [Request(r.id, r.prompt, r.params, 0, False)])[r.id] for _, r in jobs}
    step = engine.step
    unread = engine.runner.unread
    assert unread is not None

    def held_step() -> list[Event]:
        events = step()
        for seq in engine.scheduler.running:
            first, count = unread.span[seq.active_cache.slot].tolist()
            if count and first + count == seq.computed:
                assert all(first >= 16 * pages.first for pages in seq.active_cache.pages.values())
        return events

    engine.step = held_step  # type: ignore[method-assign]
    assert run_joining(engine, jobs) == want
    assert sum(audits) > 2 and engine.metrics.drafted > 0 and engine.metrics.drafter_failures == 0
    assert engine.scheduler.preemptions > 0 or not tight or variant == "mistral"  # it has windows only


def test_steps_without_a_draft_only_keep_what_is_read_later(folder: Path) -> None:
    """Rows are read when as many are kept as fit, or before a draft; never one by one, which would cost every plain
    step the weights of the projections."""
    block_drafter = wide_drafter(folder, "z-lab", compiled())
    engine = tiny_engine("llama", block_drafter, names=(), k=None, model=compiled(), page_size=16)
    unread = engine.runner.unread
    assert unread is not None
    engine.submit(request("a", PROMPT, k=0, max_tokens=70))
    positions = []
    while engine.busy:
        engine.step()
        if engine.scheduler.running:
            positions.append(int(unread.span[engine.scheduler.running[0].active_cache.slot, 1]))
    rows = [count for count in positions if count]  # before the first step there are none
    assert rows == [1 + i % 32 for i in range(69)]
    engine.submit(request("b", PROMPT, k=4, max_tokens=30))
    while engine.busy:
        engine.step()
        if engine.scheduler.running:
            assert int(unread.span[engine.scheduler.running[0].active_cache.slot, 1]) <= 5
    assert engine.metrics.drafted > 0


def test_a_block_drafts_no_more_than_it_predicts(folder: Path) -> None:
    """The cost of a draft is timed at K = 4, also of a block of three. Catches rows read behind a block's last one."""
    settings = {**LAYOUTS["z-lab"]["dflash_config"], "block_size": 3}
    block_drafter = wide_drafter(folder, "z-lab", compiled(), dflash_config=settings)
    engine = tiny_engine("llama", block_drafter, names=(), k=None, model=compiled(), page_size=16)
    host = engine.executors[0]
    assert isinstance(host, HostExecutor) and block_drafter.max_tokens == 2
    host.probe(CostPart("draft", block_drafter.name), 2, 4, 40)
    assert host.cycle.outputs.num_drafted[:2].tolist() == [2, 2]


def test_probes_read_numbers(folder: Path) -> None:
    """A probe lets the drafter read positions that were never computed. Catches fresh memory written to pages that
    others share."""
    block_drafter = wide_drafter(folder, "z-lab", compiled())
    engine = tiny_engine("llama", block_drafter, names=(), k=None, model=compiled(), page_size=16)
    assert engine.runner.unread is not None
    engine.runner.unread.states.fill_(float("nan"))
    engine.executors[0].probe(CostPart("draft", block_drafter.name), 2, 4, 40)
    for spec in block_drafter.kv_specs:
        for pages in (engine.store.keys[spec.kv_layer], engine.store.values[spec.kv_layer]):
            assert pages is not None and bool(pages.isfinite().all())


def test_a_request_ends_without_memory_to_read_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Positions that the drafter could not read are not shared, and neither slot nor pages stay behind."""
    block_drafter = wide_drafter(folder, "z-lab", compiled())
    engine = tiny_engine("llama", block_drafter, names=(), k=None, model=compiled(), page_size=16)
    engine.submit(request("a", PROMPT, k=0, max_tokens=60))
    for _ in range(20):
        engine.step()

    def read(slots: list[int]) -> None:
        raise MemoryError("scratch of a block drafter")

    monkeypatch.setattr(engine.runner.unread, "read", read)
    shared = len(engine.store.prefix.entries)
    engine.abort("a")
    assert [event.finish_reason for event in engine.step()] == ["abort"] and not engine.busy
    assert len(engine.store.prefix.entries) == shared and engine.store.free_slots == engine.max_batch
    engine.check()
