"""What a cycle costs here: times the engine's own parts on scratch sequences, for the controller's cost table.

The table is kept beside the model cache, keyed by machine, model and version, so that only a first start measures; later
ones check it in passing, and measure again where it is off.
"""

from __future__ import annotations

from pathlib import Path

import torch

from ..cache.store import SeqCache
from ..spec.choose import SamplingBatch
from ..spec.cost import CostKey, CostTable, agrees, measure
from ..spec.draft_model import DraftModel
from ..spec.drafter import DraftBatch
from ..types import Draft, SamplingParams
from .cycle import CycleInput, Rows, cycle, verify_coupled
from .engine import Engine

BUDGET_S = 3.0


def calibrate(engine: Engine, key: CostKey, path: Path | None) -> CostTable:
    """The stored table of this key if it is still true, or a fresh one (at most three seconds), stored for the next start."""
    found = CostTable.load(path, key) if path is not None else None
    if found is not None and engine.graphs is not None:
        return found  # a device of our own, and checking would capture graphs
    name = engine.drafter.name if engine.drafter is not None else None
    contexts = [c for c in (256, 2048) if c + 32 < engine.max_context] or [max(1, engine.max_context // 2)]
    whole = name is not None and engine.host is not None and name in engine.by_host  # a draft runs within its cycle, and is timed there
    scratch = Scratch(engine)
    try:
        if found is not None and agrees(found, scratch.run, name, contexts[0], whole=whole):
            return found
        table = measure(
            scratch.run,
            drafters=(name,) if name is not None else (),
            batches=[b for b in (1, 2, 4, 8, 16) if b <= engine.config.max_batch],
            contexts=contexts,
            budget_s=BUDGET_S,
            key=key,
            whole=whole,
        )
    finally:
        scratch.close()
    if path is not None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            table.save(path)
        except OSError:
            pass  # a cache that cannot be written is measured again next time
    return table


class Scratch:
    """Sequences that nobody asked for, filled with whatever the cache holds."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self.caches: list[SeqCache] = []
        self.sampling: dict[int, SamplingBatch] = {}
        self.names = [f"scratch {i}" for i in range(engine.config.max_batch)]

    def close(self) -> None:
        if self.engine.drafter is not None:
            for name in self.names:
                self.engine.drafter.forget(name)
        for cache in self.caches:
            self.engine.store.close(cache)
        self.caches.clear()

    @torch.inference_mode()
    def run(self, part: str, batch: int, k: int, context: int) -> None:
        """One verify pass, or one draft (where cycles run as one call: one cycle with it), to its end. Sequences that do not fit
        the cache stand on the scratch page."""
        engine, device = self.engine, self.engine.device
        if engine.graphs is not None and engine.graphs.broken is None:
            engine.graphs.probe("verify" if part == "verify" else "draft", batch, k, context)
            return
        while len(self.caches) < batch:
            self.caches.append(engine.store.open([0], engine.store.spec.page_size, reuse=False)[0])
        for cache in self.caches[:batch]:
            engine.store.reserve(cache, context + k + 1)
        slots = torch.tensor([c.slot for c in self.caches[:batch]], device=device)
        length = torch.full((batch,), context, dtype=torch.int64, device=device)
        sampling = self.sampling.get(batch)  # the engine too builds it once for a batch, not once a cycle
        if sampling is None:
            vocab = engine.model.config.vocab_size
            sampling = SamplingBatch.build([SamplingParams()] * batch, [[0]] * batch, [[]] * batch, vocab, device, sorted(engine.eos))
            self.sampling[batch] = sampling
        last = torch.zeros_like(length)
        if engine.host is not None and (part == "verify" or part in engine.by_host):
            guess = [0] * k if part == "verify" else None
            engine.host.run([(c.slot, 0, context, k, guess, 0.0, 0.0) for c in self.caches[:batch]], sampling, None)
            return
        if part == "verify":
            x = CycleInput(Rows.of((k,) * batch, device), slots, last, length, sampling, engine.model.ops, context + k + 1)
            draft = Draft(torch.zeros((batch, k), dtype=torch.int64, device=device), torch.full_like(length, k))
            out = cycle(engine.model, engine.store, (lambda: draft) if k else None, verify_coupled, engine.taps, x)
            out.verdict.tokens.tolist()  # waits for the device
            return
        assert engine.drafter is not None
        rows = torch.arange(batch, device=device)
        start = torch.arange(batch + 1, dtype=torch.int32, device=device)
        view = engine.store.view(slots, length - 1, rows, start, 1, context + k + 1)
        features = engine.features[slots]
        ids = self.names[:batch]
        if isinstance(engine.drafter, DraftModel):  # it keeps K/V of its own: time its steps, not the prompt it never runs again
            for name in ids:
                engine.drafter.assume(name, [0] * context)
        tokens = [[0] * (context + 1)] * batch
        ops, vocab = engine.model.ops, engine.model.config.vocab_size
        engine.drafter.propose(DraftBatch(ids, tokens, last, length, features, view, sampling, False, ops, vocab), k).tokens.tolist()
