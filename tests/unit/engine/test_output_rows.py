"""Rows that nobody reads stop where their K/V is written: the same bits for everybody else, and less work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.engines import mtp_drafter, request, run, run_joining, tiny_engine, tiny_model
from tests.kv import PagedKV, build_kv
from tests.parity.test_cpu_kernels import MODELS as COMPILED
from torch import Tensor

from outrider.cache.store import last_rows
from outrider.engine.engine import Engine
from outrider.models.config import ModelConfig
from outrider.models.decoder import TextModel
from outrider.models.drafter import MTPNet
from outrider.ops.backend import Pass
from outrider.ops.cpu.forward import CompiledModel
from outrider.ops.cpu.ops import CpuOps
from outrider.spec.draft_model import DraftModel
from outrider.spec.mtp import MTPDrafter
from outrider.train import design
from outrider.types import KVView, OutputRows
from outrider.weights.load import dummy_weights

OPS = CpuOps(threads=2)  # a row has the same bits in any company, as on a GPU
MODELS = {name: tiny_model(name, ops=OPS) for name in ("edge", "dense", "moe", "llama", "gemma3")}


def same_cache(a: PagedKV, b: PagedKV) -> bool:
    tensors = zip((*a.keys, *a.values), (*b.keys, *b.values), strict=True)
    return all(x is None or torch.equal(x.nan_to_num(7.0), y.nan_to_num(7.0)) for x, y in tensors)  # type: ignore[union-attr]


shapes = st.tuples(
    st.lists(st.integers(1, 40), min_size=1, max_size=4), st.integers(0, 15), st.integers(0, 9),
    st.sampled_from([(), (0, 2), (1, 2)])
)  # fmt: skip


def only(out: Pass, wanted: OutputRows) -> Pass:
    return Pass(out.hidden[wanted.rows], tuple(stream[wanted.rows] for stream in out.streams))


def both(
    model: Any, narrowing: Any, counts: list[int], ends: int, before: int, taps: tuple[int, ...], page: int
) -> None:  # fmt: skip
    """Whatever is wanted of `narrowing`: hidden states, taps and the whole cache are bitwise those of a pass of `model`
    in which all is."""
    seqs = [b for b in range(len(counts)) if ends >> b & 1]
    caches = [build_kv(model.config, len(counts), 64, page) for _ in range(2)]
    ids = torch.randint(
        0, 64, (len(counts) * before + sum(counts),), generator=torch.Generator().manual_seed(sum(counts))
    )
    got = []
    for cache, runs in zip(caches, (model, narrowing)):
        if before:
            runs.forward(ids[: len(counts) * before], cache.view([(0, before)] * len(counts)))
        kv = cache.view([(before, n) for n in counts])
        wanted = last_rows(kv, seqs)
        out = runs.forward(ids[len(counts) * before :], kv, taps, None if runs is model and not got else wanted)
        got.append([t if got else t[wanted.rows] for t in (out.hidden, *out.streams)])
    assert all(a.shape == (len(seqs), model.config.hidden) and torch.equal(a, b) for a, b in zip(*got, strict=True))
    assert same_cache(*caches)


@settings(max_examples=30)
@given(st.sampled_from(sorted(MODELS)), shapes)
def test_wanted_rows_have_the_bits_of_all_rows(name: str, shape: Any) -> None:
    counts, ends, before, taps = shape
    both(MODELS[name], MODELS[name], counts, ends, before, tuple(t for t in taps if t < len(MODELS[name].blocks)), 4)


@pytest.mark.parametrize("quantize", ["int4", None])
@pytest.mark.parametrize("name", ["gemma4_edge", "gemma4_moe", "llama", "gemma3"])
def test_wanted_rows_in_one_call(name: str, quantize: str | None) -> None:
    """Compares a whole pass in one call of the library, with few rows (each member's own work) and many, with single
    operations."""
    config = ModelConfig.from_hf(COMPILED[name])
    model = TextModel(config, dummy_weights(config, "cpu", torch.float32, OPS, quantize, seed=3), OPS)
    compiled = OPS.compile(model)
    assert isinstance(compiled, CompiledModel)
    for counts, ends, before, taps in (
        ([3, 1, 5], 5, 9, (0, 2)),
        ([40, 17, 30], 6, 7, (1, 2)),
        ([48], 1, 0, ()),
        ([9, 2], 0, 2, (0,)),
        ([33, 50], 0, 0, ()),
    ):
        both(model, compiled, counts, ends, before, taps, 16)


# ---- the engine
class Counting:
    """A model that counts the rows of every matrix product, and may be told that everybody's output is wanted."""

    def __init__(self, name: str, whole: bool):
        ops = CpuOps(threads=1)
        self.model = tiny_model(name, ops=ops)
        self.rows = 0
        self.wanted = list[int]()
        forward = self.model.forward

        def counted(product: Callable[..., Tensor]) -> Callable[..., Tensor]:
            def run(x: Tensor, *rest: Any) -> Tensor:
                self.rows += x.shape[0]
                return product(x, *rest)

            return run

        def told(ids: Tensor, kv: KVView, taps: tuple[int, ...] = (), wanted: OutputRows | None = None) -> Pass:
            self.wanted.append(-1 if wanted is None else wanted.rows.shape[0])
            if not whole or wanted is None:
                return forward(ids, kv, taps, wanted)
            return only(forward(ids, kv, taps), wanted)

        ops.linear = counted(ops.linear)  # type: ignore[method-assign]
        ops.gated_linear = counted(ops.gated_linear)  # type: ignore[method-assign]
        self.model.forward = told


def prompts(count: int, length: int) -> list[list[int]]:
    rng = torch.Generator().manual_seed(count)
    return [torch.randint(2, 64, (length + i,), generator=rng).tolist() for i in range(count)]


def jobs(engine: Engine, settings: dict[str, Any]) -> dict[str, list[int]]:
    """Chunks, sequences that join while others decode, a beginning that two share, and (with little room)
    pre-emption."""
    engine.prefill.observe = lambda rows, seconds: None  # type: ignore[method-assign]  # its budget follows the clock
    shared = prompts(1, 40)[0]
    options = [
        request(str(i), p, k=i % 4, max_tokens=12, **settings)
        for i, p in enumerate([*prompts(4, 33), shared, [*shared, 5, 9, 3]])
    ]
    return run_joining(engine, [(i if i < 5 else 12, r) for i, r in enumerate(options)])


@pytest.mark.parametrize("room", [{}, {"kv_tokens": 132}], ids=["roomy", "crowded"])
def test_the_engine_says_the_same(room: dict[str, Any]) -> None:
    answers = []
    work = []
    metrics = []
    for whole in (True, False):
        counting = Counting("edge", whole)
        engine = tiny_engine("edge", mtp_drafter(counting.model, "edge"), model=counting.model, **room)
        answers.append(jobs(engine, {"temperature": 0.8, "seed": 3}))
        work.append(counting.rows)
        metrics.append(
            (engine.metrics.drafted, engine.metrics.accepted, engine.metrics.preemptions, engine.metrics.cached_tokens)
        )
        assert (engine.metrics.preemptions > 0) == bool(room) and (engine.metrics.cached_tokens > 0 or room)
        assert 0 in counting.wanted and any(n > 0 for n in counting.wanted)
    assert answers[0] == answers[1]
    assert metrics[0] == metrics[1], "drafts start from the same bits, so they are the same too"
    assert work[1] < work[0]


def test_prompts_go_as_far_as_their_kv() -> None:
    """An edge model, whose last two of four layers write no K/V, reads a prompt of 64 + 1 tokens in chunks of 16,
    plainly and drafted."""
    per_layer = {
        "edge": 6,
        "llama": 4,
    }  # products of a layer: qkv, out, gate_up, down; gate and out of its per-layer embedding
    for name, drafted in (("edge", False), ("edge", True), ("llama", False)):
        counting = Counting(name, False)
        drafter = mtp_drafter(counting.model, name) if drafted else None
        engine = tiny_engine(name, drafter, names=(), model=counting.model)
        engine.submit(request("a", prompts(1, 65)[0], max_tokens=4))
        for _ in range(4):
            counting.rows = 0
            engine.step()
            wanted = counting.wanted[-1]
            blocks = counting.model.blocks
            last = counting.model.last_write
            through = (
                per_layer[name] * last * 16 + 16 + (16 if name == "edge" else 0)
            )  # and qkv of the last; the per-layer projection
            after = wanted * (per_layer[name] * (len(blocks) - last) - 1)
            assert counting.rows == through + after, (name, drafted, wanted)
        assert counting.wanted == [0, 0, 0, int(drafted)]


def test_who_does_not_draft_wants_nothing() -> None:
    """Requests that ask for plain decoding, and draft models, which start from tokens: nobody reads a prompt's hidden
    states."""
    counting = Counting("edge", False)
    engine = tiny_engine("edge", mtp_drafter(counting.model, "edge"), model=counting.model)
    run(
        engine,
        [
            request("a", prompts(1, 20)[0], drafter=False, max_tokens=2),
            request("b", prompts(1, 20)[0], k=0, max_tokens=2),
        ],
    )
    assert {n for n in counting.wanted if n >= 0} == {0}
    target = Counting("llama", False)
    small = Counting("llama", False)
    engine = tiny_engine("llama", DraftModel(small.model), names=(), model=target.model)
    assert run(engine, [request("a", prompts(1, 40)[0])]) == run(
        tiny_engine("llama"), [request("a", prompts(1, 40)[0], drafter=False)]
    )
    assert {n for n in target.wanted if n >= 0} == {0} and 1 in small.wanted and engine.metrics.accepted > 0


@pytest.mark.parametrize("room", [{}, {"kv_tokens": 176}], ids=["roomy", "crowded"])
def test_the_engine_says_the_same_in_one_call(room: dict[str, Any]) -> None:
    """An edge model compiled for the CPU, whose drafter reads streams from before and after the last layer that writes
    K/V."""
    config = ModelConfig.from_hf(COMPILED["gemma4_edge"] | {"eos_token_id": 1})
    model = OPS.compile(TextModel(config, dummy_weights(config, "cpu", torch.float32, OPS, None, seed=3), OPS))
    drafter_config = design.plain(config, reads=(0, 1), intermediate=64, taps=(0, 3))
    forward = model.forward
    net = OPS.compile_drafter(
        MTPNet(drafter_config, dummy_weights(drafter_config, "cpu", torch.float32, OPS, None, seed=4), OPS, model)
    )
    answers = []
    metrics = []
    for whole in (True, False):

        def ran(
            ids: Tensor, kv: KVView, taps: tuple[int, ...] = (), wanted: OutputRows | None = None, whole: bool = whole
        ) -> Pass:
            if not whole or wanted is None:
                return forward(ids, kv, taps, wanted)
            return only(forward(ids, kv, taps), wanted)

        model.forward = ran
        engine = tiny_engine("", MTPDrafter(net, model), model=model, page_size=16, **room)
        assert engine.executors[0].name == "host"
        answers.append(jobs(engine, {}))
        metrics.append((engine.metrics.drafted, engine.metrics.accepted, engine.metrics.preemptions))
        assert (engine.metrics.preemptions > 0) == bool(room)
    assert answers[0] == answers[1] and metrics[0] == metrics[1]
