"""The decode step as one CUDA graph: draft K, verify K + 1, choose, accept and the next inputs in a single launch.

What the next cycle starts from (newest token, length, features) stays on the device, one row a cache slot, so a cycle can be
launched before the host has seen the tokens of the one before. Tokens leave by an asynchronous copy into pinned memory.
The host runs one cycle behind: it reserves pages for the cycle in flight and the next one, and drops what a sequence that
has ended produced since. There is one graph per (batch, K, context bound, kind of choosing, where drafts come from),
captured when it is first needed; a batch is filled up with rows on the scratch page.

On a device without graphs the captured function itself runs: the same code is tested on the CPU.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from ..cache.store import KVStore, upload
from ..spec.choose import COLD, OFF, SamplingBatch
from ..spec.drafter import DraftBatch
from ..spec.mtp import MTPDrafter
from ..types import MAX_DRAFT, Draft, KVView, SamplingParams, Verdict
from .cycle import CycleInput, Rows, cycle, verify_coupled
from .scheduler import DecodeRow

log = logging.getLogger("outrider")
BATCHES = (1, 2, 4, 8, 16)
WIDTHS = (0, 1, 2, 3, 4, 6, 8, 12, 16)  # the K that have a graph; a row that drafts less has a limit
CONTEXT = 512  # the smallest context bound; bounds double
Choosing = Literal["greedy", "hot", "head 64", "head 1024", "sort"]
Override = Callable[[Verdict, Draft, Tensor], Verdict]  # (verdict, draft, length): only benchmarks have one


class Pool:
    """Memory that graphs share. Holds a graph of its own: a pool whose last graph is gone must not be captured into again."""

    def __init__(self, device: torch.device):
        self.device = device
        self.anchor: torch.cuda.CUDAGraph | None = None

    def handle(self) -> Any:
        if self.anchor is None:
            self._handle, self.anchor = torch.cuda.graph_pool_handle(), torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.anchor, pool=self._handle, capture_error_mode="thread_local"):
                self.mark = torch.zeros(1, device=self.device)
        return self._handle


class Graph:
    """A captured function of no arguments. `result` is what it returned: on a GPU the same tensors after every replay."""

    def __init__(self, fn: Callable[[], Any], device: torch.device, pool: Pool | None = None, warm: int = 1):
        """Runs fn `warm` times (kernels are compiled, caches filled) before it is captured. pool: graphs that never run at the
        same time may share their memory."""
        self.fn, self.graph, self.result = fn, None, None
        if device.type != "cuda":
            return
        side = torch.cuda.Stream(device)
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            for _ in range(warm):
                fn()
        torch.cuda.current_stream(device).wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, pool=pool.handle() if pool is not None else None, capture_error_mode="thread_local"):
            self.result = fn()

    def replay(self) -> None:
        if self.graph is None:
            self.result = self.fn()
        else:
            self.graph.replay()


@dataclass(frozen=True)
class Key:
    """What a graph is captured for."""

    batch: int
    k: int
    context: int  # no position of a replay may reach it
    choosing: Choosing
    source: Literal["drafter", "host"] | None  # where drafts come from; None: K = 0
    part: Literal["cycle", "draft"] = "cycle"  # draft: only the guess, for timing


@dataclass
class State:
    """Where each slot's sequence stands, on the device. The last row is that of the rows that fill up a batch."""

    last: Tensor  # int64 [S + 1] the newest token
    length: Tensor  # int64 [S + 1] its position
    features: Tensor  # [S + 1, H·(1 + taps)]

    @staticmethod
    def of(features: Tensor) -> State:
        rows, device = features.shape[0], features.device
        return State(torch.zeros(rows, dtype=torch.int64, device=device), torch.ones(rows, dtype=torch.int64, device=device), features)


@dataclass
class Inputs:
    """What the host tells a cycle, by batch row. Uploaded only when it changes."""

    slots: Tensor  # int64 [16]
    limit: Tensor  # int64 [16] the K of the row
    cap: Tensor  # int64 [16] where its length stops growing: 1 for rows that fill up
    drafts: Tensor  # int64 [16, MAX_DRAFT] guesses of the host
    temperature: Tensor  # float32 [16], and so on as in SamplingBatch
    hot: Tensor
    seed: Tensor
    top_k: Tensor
    top_p: Tensor
    min_logp: Tensor

    @staticmethod
    def of(device: torch.device, idle: int) -> Inputs:
        n = BATCHES[-1]
        full = lambda value, dtype: torch.full((n,), value, dtype=dtype, device=device)  # noqa: E731
        return Inputs(
            full(idle, torch.int64), full(0, torch.int64), full(1, torch.int64),
            torch.zeros((n, MAX_DRAFT), dtype=torch.int64, device=device), full(1.0, torch.float32), full(False, torch.bool),
            full(0, torch.int64), full(OFF, torch.int64), full(1.0, torch.float64), full(float("-inf"), torch.float32),
        )  # fmt: skip

    def sampling(self, batch: int, choosing: Choosing) -> SamplingBatch:
        """The rows' parameters as views: what is uploaded later is seen. A filter that a row does not ask for is off in its values."""
        filters = choosing not in ("greedy", "hot")
        heads = {"head 64": 64, "head 1024": 1024, "sort": None}
        return SamplingBatch(
            temperature=self.temperature[:batch], hot=self.hot[:batch], seed=self.seed[:batch], out_len=torch.zeros_like(self.seed[:batch]),
            top_k=self.top_k[:batch], top_p=self.top_p[:batch], min_logp=self.min_logp[:batch],
            plain_greedy=choosing == "greedy", any_hot=choosing != "greedy", any_filter=filters, any_top_k=filters, any_top_p=filters,
            head=heads.get(choosing, 1), any_grammar=False, max_logprobs=None, penalties=None, bias=None, bad_words=None, stops=None,
            min_tokens=None,
        )  # fmt: skip


@dataclass
class Pages:
    """The page tables of the batch, gathered once a cycle; drafter and target look through them at different positions."""

    store: KVStore
    tables: dict[Any, Tensor]

    @staticmethod
    def of(store: KVStore, slots: Tensor, context: int) -> Pages:
        width = -(-context // store.spec.page_size)
        return Pages(store, {name: table[:, :width].index_select(0, slots) for name, table in store.tables.items()})

    def view(self, slots: Tensor, positions: Tensor, row_seq: Tensor, row_start: Tensor, max_rows: int, max_context: int) -> KVView:
        s = self.store
        return KVView(s.spec.page_size, s.keys, s.values, self.tables, positions, row_seq, row_start, max_rows, max_context)


def decode_step(
    model: Any, store: KVStore, drafter: MTPDrafter | None, state: State, inputs: Inputs, key: Key, out: Tensor,
    override: Override | None = None, propose: Callable[[Tensor, Tensor], Draft] | None = None, advance: bool = True,
) -> Callable[[], Tensor | None]:  # fmt: skip
    """The function that is captured. Leaves [tokens | count] of every row in `out` [B, K + 2] and the next inputs in `state`
    (advance=False: the state stays, every run does the same work); returns the logits [R, V]. propose: a stand-in drafter."""
    b, k, device = key.batch, key.k, out.device
    rows, slots, limit, cap = Rows.of((k,) * b, device), inputs.slots[:b], inputs.limit[:b], inputs.cap[:b]
    sampling = inputs.sampling(b, key.choosing)
    each, each_start = torch.arange(b, device=device), torch.arange(b + 1, dtype=torch.int32, device=device)
    taps = drafter.taps if drafter is not None else ()
    ids, nothing = [""] * b, [[]] * b  # type: ignore[var-annotated]

    def guess(last: Tensor, length: Tensor, pages: Pages) -> Draft:
        if propose is not None:
            return propose(last, length)
        if key.source == "host":
            return Draft(inputs.drafts[:b, :k], limit)
        assert drafter is not None
        kv = pages.view(slots, length - 1, each, each_start, 1, key.context)
        features = state.features.index_select(0, slots)
        seen = DraftBatch(ids, nothing, last, length, features, kv, sampling, False, model.ops, model.config.vocab_size)
        return Draft(drafter.propose(seen, k).tokens, limit)

    def once() -> Tensor | None:
        last, length = state.last.index_select(0, slots), state.length.index_select(0, slots)
        pages = Pages.of(store, slots, key.context)
        if key.part == "draft":
            out[:, :k].copy_(guess(last, length, pages).tokens)
            return None
        x = CycleInput(rows, slots, last, length, sampling, model.ops, key.context)
        done = cycle(model, pages, (lambda: guess(last, length, pages)) if k else None, verify_coupled, taps, x, override)
        verdict = done.verdict
        torch.cat((verdict.tokens, verdict.counts[:, None]), 1, out=out)
        if advance:
            newest = verdict.tokens.gather(1, verdict.accepted[:, None])[:, 0] if k else verdict.tokens[:, 0]
            state.last.index_copy_(0, slots, newest)
            state.length.index_copy_(0, slots, torch.minimum(length + verdict.counts, cap))
            if drafter is not None:
                state.features.index_copy_(0, slots, done.features)
        return done.logits

    return once


@dataclass
class Captured:
    graph: Graph
    out: Tensor  # int64 [B, K + 2] on the device
    hosts: list[Tensor]  # two copies of it in pinned memory, used in turn


@dataclass
class Flight:
    """A cycle that was launched and not yet read."""

    rows: list[DecodeRow]
    caches: list[Any]  # who held the slots: a sequence that has left since is not the one this was run for
    key: Key
    host: Tensor
    event: Any
    began: float
    pure: bool  # no prompt was run before it in the same step: its time is that of a cycle


def plain(p: SamplingParams) -> bool:
    """Nothing but temperature, top-k, top-p, min-p and seed: what a graph can choose by."""
    return not (
        p.repetition_penalty != 1.0 or p.presence_penalty or p.frequency_penalty or p.logit_bias or p.bad_words
        or p.min_tokens or p.logprobs is not None or p.grammar is not None
    )  # fmt: skip


def choosing_of(params: Sequence[SamplingParams]) -> Choosing:
    hot = [p for p in params if p.temperature >= COLD]
    filtered = [p for p in hot if p.top_k or p.top_p < 1.0 or p.min_p > 0.0]
    if not filtered:
        return "hot" if hot else "greedy"
    if any(p.top_p < 1.0 and not p.top_k for p in filtered):
        return "sort"
    most = max(p.top_k for p in filtered)
    return "head 64" if most <= 64 else "head 1024" if most <= 1024 else "sort"


class GraphRunner:
    """Captures, launches and reads decode cycles. Knows rows of the scheduler, nothing of requests' ends."""

    def __init__(self, model: Any, store: KVStore, drafter: MTPDrafter | None, features: Tensor):
        """features: [slots + 1, …], shared with the eager path."""
        self.model, self.store, self.drafter, self.device = model, store, drafter, model.device
        self.idle = store.spec.slots  # the table row that is all scratch page
        self.state, self.inputs = State.of(features), Inputs.of(self.device, self.idle)
        self.pool = Pool(self.device)
        self.broken: str | None = None
        self._graphs: dict[Key, Captured] = {}
        self._owners: dict[int, Any] = {}  # slot -> the cache whose sequence `state` holds
        self._uploaded: dict[str, tuple[Any, ...]] = {}
        self._furthest = next(iter(store.tables.values())).shape[1] * store.spec.page_size - MAX_DRAFT - 1

    # ---- what it takes ------------------------------------------------------------------------------------------------
    def key(self, rows: list[DecodeRow]) -> Key | None:
        """The graph these rows run in; None: they need the eager cycle."""
        sources = {r.drafter for r in rows if r.k}
        if self.broken is not None or len(rows) > BATCHES[-1] or len(sources) > 1 or not all(plain(r.seq.request.params) for r in rows):
            return None
        k = next(w for w in WIDTHS if w >= max(r.k for r in rows))
        name = next(iter(sources), None)
        if k and name != "ngram" and (self.drafter is None or name != self.drafter.name):
            return None
        bound = max(len(r.seq.tokens) + r.seq.ahead for r in rows) + k
        batch = next(b for b in BATCHES if b >= len(rows))
        choosing = choosing_of([r.seq.request.params for r in rows])
        return Key(batch, k, self.bound(bound), choosing, None if not k else "host" if name == "ngram" else "drafter")

    @staticmethod
    def bound(positions: int) -> int:
        bound = CONTEXT
        while bound < positions:
            bound *= 2
        return bound

    def ready(self, key: Key) -> bool:
        """Capture it if that has not been done. A failure ends the use of graphs, with one line."""
        if key in self._graphs:
            return True
        for name, value in (("slots", self.idle), ("limit", 0), ("cap", 1)):  # warm-up runs on the scratch page alone
            getattr(self.inputs, name).fill_(value)
        self._uploaded.clear()
        shape = (key.batch, key.k + 2)
        out = torch.zeros(shape, dtype=torch.int64, device=self.device)
        step = decode_step(self.model, self.store, self.drafter, self.state, self.inputs, key, out)

        def once() -> None:
            step()

        try:
            graph = Graph(once, self.device, self.pool)
        except Exception as error:
            if self.device.type != "cuda":
                raise
            self.broken = f"{type(error).__name__}: {error}".splitlines()[0]
            log.warning("CUDA graphs are off: capturing %s failed (%s)", key, self.broken)
            return False
        pinned = self.device.type == "cuda"
        self._graphs[key] = Captured(graph, out, [torch.empty(shape, dtype=torch.int64, pin_memory=pinned) for _ in range(2)])
        return True

    # ---- one cycle ----------------------------------------------------------------------------------------------------
    def launch(self, rows: list[DecodeRow], key: Key, now: float, pure: bool) -> Flight:
        """Start the cycle and return at once. `ready(key)` must have been asked."""
        captured = self._graphs[key]
        self._upload(rows, key)
        captured.graph.replay()
        captured.hosts.reverse()
        host = captured.hosts[0]
        host.copy_(captured.out, non_blocking=True)
        event = None
        if self.device.type == "cuda":
            event = torch.cuda.Event()
            event.record()
        return Flight(rows, [r.seq.cache for r in rows], key, host, event, now, pure)

    def read(self, flight: Flight) -> list[list[int]]:
        """The tokens each row emitted: waits until this cycle (not a later one) is done."""
        if flight.event is not None:
            flight.event.synchronize()
        return [line[: line[-1]] for line in flight.host[: len(flight.rows)].tolist()]

    def forget(self) -> None:
        """An eager cycle moved the sequences on: what `state` holds is old."""
        self._owners.clear()

    def _upload(self, rows: list[DecodeRow], key: Key) -> None:
        slots = [r.seq.cache.slot for r in rows]
        fresh = [r.seq for r in rows if self._owners.get(r.seq.cache.slot) is not r.seq.cache]
        if fresh:
            assert not any(s.ahead for s in fresh), "a sequence in flight has its state on the device"
            where = upload([s.cache.slot for s in fresh], torch.int64, self.device)
            self.state.last.index_copy_(0, where, upload([s.tokens[-1] for s in fresh], torch.int64, self.device))
            self.state.length.index_copy_(0, where, upload([len(s.tokens) - 1 for s in fresh], torch.int64, self.device))
            for s in fresh:
                self._owners[s.cache.slot] = s.cache
        fill = key.batch - len(rows)
        self._put("slots", [*slots, *[self.idle] * fill])
        self._put("cap", [*[self._furthest] * len(rows), *[1] * fill])
        self._put("limit", [*[r.k for r in rows], *[0] * fill])
        if key.source == "host":
            self._put_drafts(rows, key)
        if key.choosing != "greedy":
            params = [r.seq.request.params for r in rows] + [SamplingParams()] * fill
            line = tuple((p.temperature, p.seed, p.top_k, p.top_p, p.min_p) for p in params)
            if self._uploaded.get("sampling") != line:
                batch = SamplingBatch.build(params, [[]] * key.batch, [[]] * key.batch, self.model.config.vocab_size, "cpu")
                for name in ("temperature", "hot", "seed", "top_k", "top_p", "min_logp"):
                    value: Tensor = getattr(batch, name)
                    getattr(self.inputs, name)[: key.batch].copy_(upload(value.tolist(), value.dtype, self.device))
                self._uploaded["sampling"] = line

    def _put(self, name: str, values: list[int]) -> None:
        """Rows past the batch are not read, so a shorter line that begins alike still holds."""
        if self._uploaded.get(name, ())[: len(values)] != tuple(values):
            getattr(self.inputs, name)[: len(values)].copy_(upload(values, torch.int64, self.device))
            self._uploaded[name] = tuple(values)

    def _put_drafts(self, rows: list[DecodeRow], key: Key) -> None:
        limits, lines = [0] * key.batch, [[0] * key.k for _ in range(key.batch)]
        for i, row in enumerate(rows):
            if row.k:
                tokens, _ = row.seq.extra.ngram.propose(row.k)
                limits[i] = len(tokens)
                lines[i][: len(tokens)] = tokens
        self._put("limit", limits)
        self.inputs.drafts[: key.batch, : key.k].copy_(upload(lines, torch.int64, self.device))

    # ---- timing -------------------------------------------------------------------------------------------------------
    def probe(self, part: Literal["verify", "draft"], batch: int, k: int, context: int) -> None:
        """One verify pass of drafts from the host, or one draft, to its end, on the scratch page: for calibration."""
        width = next(w for w in WIDTHS if w >= k)
        rows = next(b for b in BATCHES if b >= min(batch, BATCHES[-1]))
        source: Any = "drafter" if part == "draft" else "host" if width else None
        key = Key(rows, width, self.bound(context + width + 1), "greedy", source, "draft" if part == "draft" else "cycle")
        if not self.ready(key):
            return
        self._put("slots", [self.idle] * rows)
        self._put("cap", [context] * rows)
        self.state.length[self.idle].fill_(context)
        captured = self._graphs[key]
        captured.graph.replay()
        captured.hosts[0].copy_(captured.out)
        self.state.length[self.idle].fill_(1)

    def release(self) -> None:
        """Drop the graphs and their memory."""
        self._graphs.clear()
        self._owners.clear()
