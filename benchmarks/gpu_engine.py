"""Steps of the engine itself on dummy weights, the host included: what a server gets, beside what a graph takes alone.

All sequences get their prompts first; then only steps in which every one of them decodes are timed. Then the same graph
is replayed without a host in between: what a step takes longer than that is what the host did not hide.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from gpu_rig import SIZES, collect, time_ms
from outrider.config import EngineConfig, LoadSettings
from outrider.engine.engine import Engine
from outrider.engine.graphs import Copied, GraphExecutor
from outrider.engine.step import Request
from outrider.llm import LLM
from outrider.types import MAX_DRAFT, SamplingParams

STEPS = 48  # timed, after as many warm ones


@dataclass(frozen=True)
class Figures:
    size: str
    batch: int
    k: int
    context: int
    prompts_s: float  # until every sequence has its first token
    step_ms: float
    graph_ms: float  # the device's part of it, replayed by itself; 0: no graphs here
    host_ms: dict[str, float]  # a step, by part (Engine.host_times)

    @property
    def busy_ms(self) -> float:
        """What the host works in a step, its waiting aside."""
        return sum(ms for part, ms in self.host_ms.items() if part != "wait")

    @property
    def hidden(self) -> float:
        """Share of the host's work that the device does not wait for."""
        return max(0.0, 1.0 - max(0.0, self.step_ms - self.graph_ms) / max(1e-9, self.busy_ms))


def measure(size: str, batches: Sequence[int], k: int, context: int, device: str = "cuda") -> Iterator[Figures]:
    """Plain decoding (k = 0), or drafts of the size's own assistant, which dummy weights never accept: a step is a
    token. size: one of SIZES, or a folder with a configuration."""
    most = max(batches)
    room = context + 4 * STEPS + MAX_DRAFT + 32
    settings = EngineConfig(most, room, kv_tokens=most * (room + 32), prefix_cache=False)
    load = LoadSettings(
        drafter="auto" if k else "none", draft_tokens=k, device=device, load_format="dummy", engine=settings
    )
    llm = LLM.load(SIZES.get(size, size), load, say=lambda _: None)
    for batch in batches:
        yield of_engine(llm.engine, size, batch, k, context)
    del llm
    collect()


def of_engine(engine: Engine, size: str, batch: int, k: int, context: int) -> Figures:
    vocab, rng = engine.model.config.vocab_size, random.Random(1)
    params = SamplingParams(max_tokens=4 * STEPS, ignore_eos=True)
    for turn in range(2):  # the first time captures and compiles
        began = time.perf_counter()
        for i in range(batch):
            engine.submit(Request(f"{turn}.{i}", [rng.randrange(vocab) for _ in range(context)], params, k))
        while any(seq.first_token_at is None for seq in [*engine.scheduler.running, *engine.scheduler.waiting]):
            engine.step()
        prompts = time.perf_counter() - began
        for _ in range(STEPS if turn else 4):
            engine.step()
        if turn:
            engine.host_times.update(dict.fromkeys(engine.host_times, 0.0))
            if engine.device.type == "cuda":
                torch.cuda.synchronize(engine.device)
            began = time.perf_counter()
            for _ in range(STEPS):
                engine.step()
            seconds = time.perf_counter() - began
            host = {part: spent / STEPS * 1e3 for part, spent in engine.host_times.items()}
            graph = graph_ms(engine)
        for i in range(batch):
            engine.abort(f"{turn}.{i}")
        while engine.busy:
            engine.step()
    return Figures(size, batch, k, context, prompts, seconds / STEPS * 1e3, graph, host)


def graph_ms(engine: Engine) -> float:
    """Milliseconds of the graph that runs just now, replayed by itself. Its sequences are further on afterwards than
    the engine knows: what they write lies on pages that are theirs or on the scratch page, and they must be aborted."""
    pending = engine._pending
    if pending is None or not isinstance(pending.payload, Copied):
        return 0.0
    captured = engine.executors[0]
    assert isinstance(captured, GraphExecutor)
    return time_ms(captured.cache.graphs[pending.payload.key].graph.replay, 20)


def table(found: Sequence[Figures]) -> list[list[str]]:
    rows = [["size", "batch", "K", "context", "prompts s", "step ms", "graph ms", "steps x batch / s"]]
    rows[0] += ["plan", "launch", "wait", "commit ms", "hidden"]
    for f in found:
        host = [f"{f.host_ms[part]:.2f}" for part in ("plan", "launch", "wait", "commit")]
        times = [f"{f.prompts_s:.3f}", f"{f.step_ms:.2f}", f"{f.graph_ms:.2f}", f"{f.batch / f.step_ms * 1e3:.0f}"]
        rows.append([f.size, str(f.batch), str(f.k), str(f.context), *times, *host, f"{f.hidden:.0%}"])
    return rows
