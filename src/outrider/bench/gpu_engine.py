"""Steps of the engine itself on dummy weights, the host included: what a server gets, beside what a graph takes alone.

All sequences get their prompts first; then only steps in which every one of them decodes are timed. `wait` is the host's idle time: as long
as there is some, the rest of its work is hidden behind the device.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from ..config import EngineConfig
from ..engine.engine import Engine
from ..engine.step import Request
from ..llm import LLM
from ..types import MAX_DRAFT, SamplingParams
from .gpu import SIZES, collect

STEPS = 48  # timed, after as many warm ones


@dataclass(frozen=True)
class Figures:
    size: str
    batch: int
    k: int
    context: int
    prompts_s: float  # until every sequence has its first token
    step_ms: float
    host_ms: dict[str, float]  # a step, by part (Engine.host_times)

    @property
    def hidden(self) -> float:
        """Share of the host's work that the device does not wait for: all of it while the host itself waits."""
        busy = sum(ms for part, ms in self.host_ms.items() if part != "wait")
        late = max(0.0, self.step_ms - busy - self.host_ms["wait"])
        return 1.0 if self.host_ms["wait"] > 0.02 * self.step_ms else max(0.0, 1.0 - late / max(1e-9, busy))


def measure(size: str, batches: Sequence[int], k: int, context: int, device: str = "cuda") -> Iterator[Figures]:
    """Plain decoding (k = 0), or drafts of the size's own assistant, which dummy weights never accept: a step is a token."""
    most = max(batches)
    room = context + 4 * STEPS + MAX_DRAFT + 32
    settings = EngineConfig(most, room, kv_tokens=most * (room + 32), prefix_cache=False)
    llm = LLM.load(
        SIZES[size], "auto" if k else "none", k, device=device, load_format="dummy", engine=settings, say=lambda _: None
    )  # fmt: skip
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
        for i in range(batch):
            engine.abort(f"{turn}.{i}")
        while engine.busy:
            engine.step()
    host = {part: spent / STEPS * 1e3 for part, spent in engine.host_times.items()}
    return Figures(size, batch, k, context, prompts, seconds / STEPS * 1e3, host)


def table(found: Sequence[Figures]) -> list[list[str]]:
    rows = [["size", "batch", "K", "context", "prompts s", "step ms", "steps x batch / s", "plan", "launch", "wait", "commit ms", "hidden"]]
    for f in found:
        host = [f"{f.host_ms[part]:.2f}" for part in ("plan", "launch", "wait", "commit")]
        rate = f.batch / f.step_ms * 1e3
        rows.append(
            [f.size, str(f.batch), str(f.k), str(f.context), f"{f.prompts_s:.3f}", f"{f.step_ms:.2f}", f"{rate:.0f}", *host]
            + [f"{f.hidden:.0%}"]
        )  # fmt: skip
    return rows
