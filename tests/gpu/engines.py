"""The engine on a GPU: requests of every kind, joining and leaving, against each alone; one launch a cycle."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
from tests.engines import run_joining
from tests.gpu.place import HERE

from gpu_rig import Rig
from outrider.config import EngineConfig, SpecConfig
from outrider.engine.decode import Key
from outrider.engine.engine import Engine
from outrider.engine.graphs import GraphExecutor
from outrider.engine.step import Request
from outrider.spec.controller import Controller
from outrider.spec.cost import CostTable
from outrider.types import SamplingParams


def engine_of(graphs: bool | None, rig: Rig, names: tuple[str, ...] = ("mtp", "ngram"), batch: int = 8) -> Engine:
    config = EngineConfig(
        batch, 1024, page_size=32, prefill_chunk=128, kv_tokens=max(8, batch // 2) * 1024, graphs=graphs
    )
    drafter = rig.drafter if "mtp" in names else None
    return Engine(rig.model, None, config, SpecConfig(4), drafter, Controller(CostTable(), names))


class Odd:
    """A grammar: odd ids only. What it masks is uploaded before every step."""

    def __init__(self, vocab: int) -> None:
        self.vocab = vocab
        self.failed: str | None = None

    def matcher(self) -> Odd:
        return self

    def masks(self, drafts: Any) -> tuple[np.ndarray, int]:
        return np.tile(np.arange(self.vocab) % 2 == 1, (len(drafts) + 1, 1)), 0

    def bits(self, drafts: Any) -> np.ndarray:
        return np.full((len(drafts) + 1, -(-self.vocab // 32)), 0xAAAAAAAA, dtype=np.uint32).view(np.int32)

    def advance(self, tokens: Any) -> None:
        assert all(t % 2 for t in tokens), "a token outside the grammar was emitted"


PARAMS: tuple[dict[str, Any], ...] = (
    {}, {"temperature": 0.8, "seed": 3}, {"temperature": 1.0, "top_k": 40, "top_p": 0.9, "seed": 4}, {},
    {"temperature": 0.6, "top_p": 0.8, "seed": 5},
    {"temperature": 0.9, "min_p": 0.02, "seed": 6}, {}, {"temperature": 0.7, "repetition_penalty": 1.2, "seed": 8},
    {"presence_penalty": 0.5, "frequency_penalty": 0.5, "temperature": 1.0, "seed": 9},
    {"logit_bias": {5: 2.0, 9: -3.0}, "logprobs": 3},
    {"bad_words": ((5, 9), (12,)), "min_tokens": 5, "temperature": 0.9, "seed": 10},
    {"grammar": Odd, "temperature": 0.9, "seed": 11},
)  # fmt: skip


def requests(vocab: int, count: int = len(PARAMS)) -> list[tuple[int, Request]]:
    """(the step at which it joins, the request): other lengths, K, drafters and ends; some repeat themselves."""
    rng = torch.Generator().manual_seed(5)
    out = []
    for i in range(count):
        params = PARAMS[i % len(PARAMS)]
        prompt = torch.randint(3, vocab, (5 + 37 * (i % len(PARAMS)),), generator=rng).tolist()
        prompt = (prompt[:9] * 8)[: len(prompt) + 20] if i % 3 == 0 else prompt
        drafter: bool | str = "ngram" if i == 3 else True
        options = {**params, "grammar": Odd(vocab)} if "grammar" in params else params
        sampling = SamplingParams(max_tokens=24 + 5 * (i % 8), ignore_eos=True, **options)
        joins = 25 if i == 7 else 3 * (i % 4)  # the first with a history comes when others are under way
        out.append((joins, Request(str(i), prompt, sampling, (4, 2, 7, 3, 1, 16, 0, 4)[i % 8], drafter)))
    return out


def captured(engine: Engine, refused: bool = True) -> list[Key]:
    """Keys of the engine's captured graphs, which are then dropped. refused: some steps may have had none."""
    executor = engine.executors[0]
    assert isinstance(executor, GraphExecutor), f"no graphs: {executor}"
    graphs = executor.decode_graphs
    assert graphs.broken is None and (refused or not graphs.cache.refused), f"no graphs: {graphs.broken}"
    keys = list(graphs.cache.graphs)
    executor.close()
    return keys


def engine_tokens(size: str = "E2B") -> str:
    """Graphs one cycle behind, eager cycles, and plain decoding alone: the same tokens, whoever joins and leaves."""
    p = HERE
    with Rig(p.raw(size), p.assistant(size), p.ops(), p.device, p.dtype, slots=1, context=64, compiled=True) as rig:
        jobs = requests(rig.config.vocab_size)
        plain: dict[str, list[int]] = {}
        for _, r in jobs:
            alone = engine_of(False, rig, ())
            plain |= run_joining(alone, [(0, Request(r.id, r.prompt, r.params, 0, False))])
            del alone
        seconds = {}
        for label, graphs in (("eager", False), ("graphs", True)):
            engine = engine_of(graphs, rig)
            began = time.perf_counter()
            got = run_joining(engine, jobs)
            seconds[label] = time.perf_counter() - began
            for _, r in jobs:
                assert got[r.id] == plain[r.id], (
                    f"{label}: request {r.id} ({r.params}) differs from plain decoding alone"
                )
            if graphs:
                num_graphs = len(captured(engine))
            del engine
        return f"{len(jobs)} requests; eager {seconds['eager']:.1f} s, graphs {seconds['graphs']:.1f} s with {num_graphs} captures"


def one_launch(size: str = "E2B", cycles: int = 12) -> str:
    """A decode cycle of the engine is one graph launch: no kernel launch, no synchronisation but waiting for the cycle
    before."""
    p = HERE
    with Rig(p.raw(size), p.assistant(size), p.ops(), p.device, p.dtype, slots=1, context=64, compiled=True) as rig:
        engine = engine_of(True, rig, ("mtp",))
        for i in range(2):
            engine.submit(Request(str(i), [5 + i, 9, 11] * 4, SamplingParams(max_tokens=200, ignore_eos=True), 4, True))
        for _ in range(6):  # prompts, captures
            engine.step()
        p.sync()
        if not p.gpu:
            for _ in range(cycles):
                assert engine.step()
            return "dry run"
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as prof:
            for _ in range(cycles):
                engine.step()
        counts: dict[str, int] = {}
        for event in prof.key_averages():
            if event.key.startswith(("cuda", "cu")):
                counts[event.key] = counts.get(event.key, 0) + event.count
        launches = sum(n for key, n in counts.items() if "GraphLaunch" in key)
        kernels = sum(n for key, n in counts.items() if "LaunchKernel" in key)
        waits = sum(n for key, n in counts.items() if key in ("cudaStreamSynchronize", "cudaDeviceSynchronize"))
        # Pages are reserved ahead every few cycles: a small copy into the table each time, never a wait.
        assert launches == cycles, f"{launches} graph launches in {cycles} cycles: {counts}"
        assert kernels <= cycles, f"{kernels} kernel launches beside the graphs: {counts}"
        assert waits <= 2, f"{waits} synchronisations (the profiler's own are up to two): {counts}"
        return f"{cycles} cycles: {counts}"


def mixed(size: str = "E2B", count: int = 64) -> str:
    """So many requests of every kind at once (greedy, sampled, penalties, bias, forbidden words, logprobs, grammars),
    joining and leaving, in graphs: the tokens and logprobs of each alone, decoded plainly. Once as an engine captures
    them, once as a server does, whose steps run in graphs with room to spare."""
    p = HERE
    with Rig(p.raw(size), p.assistant(size), p.ops(), p.device, p.dtype, slots=1, context=64, compiled=True) as rig:
        jobs = requests(rig.config.vocab_size, count)
        plain: dict[str, list[int]] = {}
        events: list[dict[str, list[Any]]] = [{}, {}, {}]
        began = time.perf_counter()
        alone = engine_of(True, rig, ())
        for _, r in jobs:
            plain |= run_joining(
                alone, [(0, Request(r.id, r.prompt, r.params, 0, False))], audited=False, logprobs=events[0]
            )
        seconds = [time.perf_counter() - began]
        captured(alone, refused=False)
        submitted = []
        for served in (False, True):
            engine = engine_of(True, rig, batch=count)
            began = time.perf_counter()
            if served:
                engine.executors[0].prepare()
            got = run_joining(engine, jobs, audited=False, logprobs=events[1 + served])
            seconds.append(time.perf_counter() - began)
            for _, r in jobs:
                assert got[r.id] == plain[r.id], f"request {r.id} ({r.params}) differs from plain decoding alone"
                assert events[0][r.id] == events[1 + served][r.id], (
                    f"request {r.id} ({r.params}) has other logprobs than alone"
                )
            keys = captured(engine, refused=False)
            submitted.append(len(keys))
            assert max(key.batch for key in keys) >= count or not p.gpu, "never so many at once"
        times = f"together {seconds[1]:.1f} s with {submitted[0]} captures, as a server {seconds[2]:.1f} s with {submitted[1]}"
        return f"{count} requests; alone {seconds[0]:.1f} s, {times}"


def preempted(size: str = "E2B", count: int = 16) -> str:
    """More sequences than pages, and pages for all: the same tokens."""
    p = HERE
    with Rig(p.raw(size), p.assistant(size), p.ops(), p.device, p.dtype, slots=1, context=64, compiled=True) as rig:
        rng = torch.Generator().manual_seed(9)
        long, answer = (300, 200) if p.gpu else (20, 30)
        prompts = [torch.randint(3, rig.config.vocab_size, (long + i,), generator=rng).tolist() for i in range(count)]
        params = [SamplingParams(0.8 * (i % 2), max_tokens=answer, seed=i, ignore_eos=True) for i in range(count)]
        jobs = [(0, Request(str(i), prompts[i], params[i], 2 * (i % 3))) for i in range(count)]
        got = []
        notes = []
        for label, room in (("roomy", count), ("again", count // 4)):
            tokens = room * (long + answer + 64)
            config = EngineConfig(
                count, long + answer + 64, kv_tokens=tokens, page_size=32, prefix_cache=False, graphs=True
            )
            engine = Engine(rig.model, None, config, SpecConfig(4), rig.drafter, Controller(CostTable(), ("mtp",)))
            began = time.perf_counter()
            got.append(run_joining(engine, jobs, 20000, audited=False))
            m = engine.metrics
            assert bool(m.preemptions) == (label != "roomy"), m
            notes.append(f"{label} {time.perf_counter() - began:.2f} s, {m.preemptions} set back")
            captured(engine)
        assert got[0] == got[1], "K/V computed again: other tokens"
        return "; ".join(notes)
