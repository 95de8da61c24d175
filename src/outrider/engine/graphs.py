"""The step as one CUDA graph: draft K, verify K + 1, choose, accept and the next inputs in a single launch.

What the next step starts from (newest token, length, features) stays on the device, one row a cache slot, so a step can be
launched before the host has seen the tokens of the one before. Tokens leave by an asynchronous copy into pinned memory.
The host runs one step behind: it reserves pages for the step in flight and the next one, and drops what a sequence that
has ended produced since. There is one graph for each `Key`, captured when it is first needed, all from one pool of memory;
a batch is filled up with idle rows on the scratch page to the next size that the backend captures. A server has a few graphs from the
beginning and lets steps run in one that is there rather than capture another (stock.py).

Drafts that the host knows (copies of earlier text) are one step old as well: it uploads what it expects to follow the tokens it has
seen, and the graph takes the piece that begins where the sequence really stands.

On a device without graphs the captured function itself runs: the same code is tested on the CPU.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from ..cache.store import SeqCache, upload
from ..ops.backend import Capabilities
from ..spec.choose import SamplingBatch
from ..spec.mtp import MTPDrafter
from ..spec.plan import DEEPEST, TIMED, Branches, branching
from ..types import COLD, MAX_DRAFT, SamplingParams
from . import stock
from .capture import Graph, Pool
from .cycle import logprobs
from .decode import KNOWN, Choosing, Inputs, Key, Output, Source, State, decode_step
from .history import NOTHING, Asks, History
from .machine import Machine
from .passes import Passes
from .step import Emitted, Executor, Flight, Lane, Seq, StepBatch

log = logging.getLogger("outrider")
NODES = (7, TIMED)  # tokens of the trees that are captured: with the newest token 8 or 16 rows, which is what tiles of products hold
# Most sequences of a step with trees, and most positions of them all: attention keeps sums of every row for every split of the keys.
TOGETHER, APART = 8, 1 << 18
CONTEXT = 512  # the smallest bound of a graph's context; bounds double


@dataclass
class Captured:
    key: Key
    graph: Graph
    out: Output  # on the device
    hosts: list[Output]  # two copies of it in pinned memory, used in turn


@dataclass
class Copied:
    """Where what a step emitted arrives on the host, and when."""

    key: Key
    host: Output
    event: torch.cuda.Event | None


def choosing_of(params: Sequence[SamplingParams]) -> Choosing:
    """The cheapest way to find the candidates of all these rows."""
    hot = [p for p in params if p.temperature >= COLD]
    filtered = [p for p in hot if p.top_k or p.top_p < 1.0 or p.min_p > 0.0]
    if not filtered:
        return "hot" if hot else "greedy"
    if any(p.top_p < 1.0 and not p.top_k for p in filtered):
        return "sort"
    most = max(p.top_k for p in filtered)
    return "head 64" if most <= 64 else "head 1024" if most <= 1024 else "sort"


def branched(i: int, lane: Lane, line: list[int], key: Key) -> Emitted:
    """What the i-th sequence of a step with trees brought: `line` as `Output.tokens` has it."""
    tokens, wide, count = line[: line[-1]], key.k + 1, line[-1]
    if not lane.k:
        return Emitted(tokens)
    lane.k, path = key.nodes, line[wide + 1 : wide + count]
    parents = [above - i * (key.nodes + 1) for above in line[2 * wide + 1 : -1]]
    return Emitted(tokens, branches=Branches.of(parents, path))


def bound_of(positions: int) -> int:
    """The context that a graph for so many positions is captured for."""
    bound = CONTEXT
    while bound < positions:
        bound *= 2
    return bound


class GraphExecutor(Executor):
    name = "graphs"
    behind = True

    def __init__(self, machine: Machine, capabilities: Capabilities, pass_rows: int = 0, widths: Sequence[int] = (0,)):
        """pass_rows: of the largest pass over prompts that is captured. widths: the K that a server's steps will have."""
        drafter = machine.drafter
        assert drafter is None or isinstance(drafter, MTPDrafter), "only MTP drafters run inside a graph"
        self.machine, self.device, self.drafter, self.can = machine, machine.device, drafter, capabilities
        self.trees = drafter is not None and capabilities.trees
        self.idle = machine.store.spec.slots  # the table row that is all scratch page
        self.state, self.inputs = State.of(machine.features), Inputs.of(self.device, self.idle, capabilities.graph_batches[-1])
        self.history = History(self.idle + 1, machine.vocab, machine.eos, self.device)
        self.bits: Tensor | None = None  # int32 [rows, V / 32]: masks of the rows of a step, made when the first grammar comes
        self.pool = Pool(self.device)
        self.passes = Passes(machine, pass_rows, self.pool)
        self.broken: str | None = None  # why capturing failed: from then on steps are eager
        self._refused: set[Key] = set()  # graphs with something special in them that could not be captured: those steps are eager
        self._graphs: dict[Key, Captured] = {}
        self._uploaded: dict[str, tuple[object, ...]] = {}
        self._next: tuple[StepBatch, Key | None, int] = (StepBatch(), None, 0)  # what `takes` was asked last, its graph, and its context
        self._joined: dict[int, SeqCache] = {}  # whose history a slot holds
        self._known: tuple[list[Seq], Choosing, Asks] = ([], "greedy", NOTHING)  # of the last batch
        self._furthest = self.passes.furthest - MAX_DRAFT - 1
        drafted = (next(w for w in capabilities.graph_widths if w >= k) for k in widths)
        self._widths = tuple(k for k in drafted if not k or drafter is not None)
        self._preparing = False  # what is captured is not needed for this step: if it fails, it is done without
        self.fixed = False  # somebody waits for every step: captured is only what no graph holds
        self._instead: dict[Key, tuple[Key, int]] = {}  # the graph that a step runs in, and how often one did

    # ---- what it takes ------------------------------------------------------------------------------------------------
    def takes(self, batch: StepBatch) -> bool:
        if not batch.decode:
            return self.broken is None
        wanted = self.key(batch.decode)
        key = wanted if wanted is None or not self.fixed else self._stand_in(wanted)
        self._next = (batch, key, 0 if wanted is None else wanted.context)
        return key is not None and self.ready(key)

    def _stand_in(self, wanted: Key) -> Key:
        """The graph of a server that a step runs in."""
        found, count = self._instead.get(wanted, (None, 0))
        if found is None or (count == stock.OFTEN and stock.wasteful(found, wanted)):
            roomy = stock.roomy(wanted, self._most, bound_of(self._furthest), self.can.graph_rows)
            if found is None:
                found = stock.nearest(self._graphs, wanted) or self._spare(roomy) or wanted
            else:
                found = self._spare(replace(wanted, context=roomy.context)) or found
        self._instead[wanted] = (found, count + 1)
        return found

    def _spare(self, key: Key) -> Key | None:
        """This graph, captured now; None where that fails: a step can do without it."""
        self._preparing = True
        try:
            return key if self.ready(key) else None
        finally:
            self._preparing = False

    @property
    def _most(self) -> int:
        """Sequences of the largest step that there can be."""
        return min(self.can.bucket(self.idle), self.can.graph_batches[-1])

    def key(self, lanes: Sequence[Lane]) -> Key | None:
        """The graph these lanes run in; None: they need the eager executor."""
        if self.broken is not None or len(lanes) > self.can.graph_batches[-1]:
            return None
        choosing, asks = self._asked([lane.seq for lane in lanes])
        k = next(w for w in self.can.graph_widths if w >= max(lane.k for lane in lanes))
        source: Source | None = None
        if k and asks.grammar:
            source = "drafted"
        elif k:
            source = self._source(lanes)
        furthest = max(lane.start + 1 + lane.seq.ahead for lane in lanes)
        nodes = self._nodes(lanes, k, furthest) if source == "drafter" and asks == NOTHING else 0
        # A server may run lines in a graph of more drafted tokens, which writes K/V of as many positions.
        beyond = max(MAX_DRAFT if self.fixed and k else k, nodes)
        return Key(self.can.bucket(len(lanes)), k, bound_of(furthest + beyond), choosing, source, "cycle", asks, nodes)

    def _nodes(self, lanes: Sequence[Lane], depth: int, furthest: int) -> int:
        """Tokens of each sequence's tree in this step; 0: drafts are lines, because nobody asked for trees, or they would be too deep or
        too wide. Steps with penalties, masks, logprobs or guesses of the host have lines as well: what is drafted changes no answer."""
        asked = min(lane.nodes for lane in lanes if lane.k)  # pages are reserved for so many rows of each; who drafts none keeps its root
        if self.drafter is None or not self.trees or not depth < asked or depth > DEEPEST or len(lanes) * furthest > APART:
            return 0
        nodes = min(max((n for n in NODES if n <= asked), default=0), self.drafter.most_nodes(depth))
        return nodes if nodes > depth and len(lanes) <= TOGETHER else 0

    def _asked(self, seqs: list[Seq]) -> tuple[Choosing, Asks]:
        """How these sequences choose, and what else they ask for. Kept until the batch changes."""
        if self._known[0] != seqs:
            params = [seq.request.params for seq in seqs]
            self._known = (seqs, choosing_of(params), Asks.of(params, len(self.machine.eos)))
        return self._known[1:]

    @staticmethod
    def _source(lanes: Sequence[Lane]) -> Source:
        sources: set[Source] = {"drafter" if lane.guess is None else "host" for lane in lanes if lane.k}
        return "both" if len(sources) == 2 else sources.pop()

    def ready(self, key: Key) -> bool:
        """Capture it if that has not been done. A failure ends the use of graphs, with one line."""
        if key in self._graphs:
            return True
        if key in self._refused:
            self._joined.clear()  # the eager step leaves what the slots hold of their history behind
            return False
        if self.history.grow(key.asks):
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)  # a graph that is dropped must not be running
            self._graphs = {known: made for known, made in self._graphs.items() if known.asks == NOTHING}
            self._instead.clear()
        if key.asks.grammar and self.bits is None:
            shape = (self.can.graph_rows, -(-self.machine.vocab // 32))
            self.bits = torch.full(shape, -1, dtype=torch.int32, device=self.device)
        self.inputs.slots.fill_(self.idle)  # warm-up runs on the scratch page alone
        self.inputs.limit.fill_(0)
        self.inputs.cap.fill_(1)
        self._uploaded.clear()
        out, machine = Output.of(key, self.device), self.machine
        step = decode_step(
            machine.model, machine.store, self.drafter, self.state, self.inputs, key, out,
            history=self.history if key.asks != NOTHING else None, bits=self.bits if key.asks.grammar else None,
        )  # fmt: skip

        def once() -> None:
            step()  # its logits are not kept: they would hold the graph's memory

        try:
            with torch.inference_mode():
                graph = Graph(once, self.device, self.pool)
        except Exception as error:
            if self.device.type != "cuda" or self.machine.divided:
                raise
            self._failed(key, error)
            return False
        pinned = self.device.type == "cuda"
        copy = lambda t: torch.empty(t.shape, dtype=t.dtype, pin_memory=pinned)  # noqa: E731
        hosts = [Output(copy(out.tokens), copy(out.logprobs) if out.logprobs is not None else None) for _ in range(2)]
        self._graphs[key] = Captured(key, graph, out, hosts)
        return True

    def _failed(self, key: Key, error: Exception) -> None:
        why = f"{type(error).__name__}: {error}".splitlines()[0]
        if self._preparing or key.asks != NOTHING:
            if not self._preparing or not self._refused:
                log.warning("steps like %s are not captured: it failed (%s)", key, why)
            self._refused.add(key)
        else:
            self.broken = why
            log.warning("CUDA graphs are off: capturing %s failed (%s)", key, why)

    def drop(self) -> None:
        """All graphs, at the end: what was captured holds on to the libraries whose kernels are in it."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self._graphs.clear()
        self.passes.drop()

    # ---- one step -----------------------------------------------------------------------------------------------------
    @torch.inference_mode()
    def launch(self, batch: StepBatch) -> Flight:
        """Start the step and return at once. `takes` must have been asked: it captures."""
        before = self.passes.ran
        if batch.prompts:
            self.machine.prompts(batch.prompts, self.passes.run, self.passes.pack)
        flight = Flight(self, batch, [lane.seq.held for lane in batch.decode], self.machine.clock(), self.passes.ran - before)
        if not batch.decode:
            return flight
        known, key, context = self._next
        assert known is batch and key is not None, "takes() comes first: it finds the graph"
        self.machine.store.flush()
        self._upload(batch.decode, key)
        if key.asks.grammar:
            self._mask(batch.decode, key)
        flight.payload = self._replay(self._graphs[key])
        flight.width, flight.context, flight.tree = key.k, context, key.nodes > 0
        flight.ahead = [lane.k + 1 for lane in batch.decode]
        return flight

    def _replay(self, captured: Captured) -> Copied:
        captured.graph.replay()
        captured.hosts.reverse()
        host, out = captured.hosts[0], captured.out
        host.tokens.copy_(out.tokens, non_blocking=True)
        if host.logprobs is not None and out.logprobs is not None:
            host.logprobs.copy_(out.logprobs, non_blocking=True)
        event = None
        if self.device.type == "cuda":
            event = torch.cuda.Event()
            event.record()
        return Copied(captured.key, host, event)

    def read(self, flight: Flight) -> list[Emitted]:
        copied, lanes = flight.payload, flight.batch.decode
        if not isinstance(copied, Copied):
            return []
        if copied.event is not None:
            copied.event.synchronize()
        lines = copied.host.tokens[: len(lanes)].tolist()
        if copied.key.nodes:
            return [branched(i, lane, line, copied.key) for i, (lane, line) in enumerate(zip(lanes, lines))]
        if copied.host.logprobs is None:
            return [Emitted(line[: line[-1]]) for line in lines]
        out, width, rows = [], len(lines[0]) - 1, copied.host.logprobs.tolist()
        for i, (lane, line) in enumerate(zip(lanes, lines)):
            tokens, top = line[: line[-1]], lane.seq.request.params.logprobs
            out.append(Emitted(tokens, None if top is None else logprobs(rows[i * width :], tokens, top)))
        return out

    def _mask(self, lanes: Sequence[Lane], key: Key) -> None:
        """What the grammars allow behind each drafted token. The drafts come first, from a graph of their own (or the host): masks hang
        on them. The engine has read every step before this one, since they also hang on what was emitted."""
        drafts = [list(lane.guess or ()) for lane in lanes]
        if key.k:
            source = self._source(lanes) if any(lane.k for lane in lanes) else "host"
            draft = replace(key, source=source, part="draft", asks=NOTHING)
            assert self.ready(draft), "a draft must be captured before masks can be made"
            self._upload(lanes, draft)  # capturing may have used the buffers
            copied = self._replay(self._graphs[draft])
            if copied.event is not None:
                copied.event.synchronize()
            drafts = copied.host.tokens[: len(lanes), : key.k].tolist()
        assert self.bits is not None
        width, seqs = key.k + 1, [lane.seq for lane in lanes]
        if self._uploaded.get("bits") != (width, *seqs):  # rows of sequences without a grammar allow everything
            self.bits[: key.batch * width].fill_(-1)
            self._uploaded["bits"] = (width, *seqs)
        for i, lane in enumerate(lanes):
            matcher = lane.seq.answer.matcher
            if matcher is not None:
                rows = torch.from_numpy(matcher.bits(drafts[i][: lane.k]))
                rows = rows.pin_memory() if self.device.type == "cuda" else rows
                self.bits[i * width : i * width + len(rows)].copy_(rows, non_blocking=True)

    def _upload(self, lanes: Sequence[Lane], key: Key) -> None:
        """What changed since the last step. A sequence that has nothing in flight is where the host says; the others stand on the
        device, further on than the host knows."""
        fresh = [lane for lane in lanes if not lane.seq.ahead]
        if key.asks != NOTHING:
            for lane in lanes:
                if self._joined.get(lane.slot) is not lane.seq.cache:
                    seq = lane.seq
                    assert not (seq.ahead and seq.request.params.processed), "its history joined with its first step"
                    self.history.join(lane.slot, seq.request.params, seq.request.prompt, seq.tokens[seq.prompt_len :])
                    self._joined[lane.slot] = seq.held
        if fresh:
            where = upload([lane.slot for lane in fresh], torch.int64, self.device)
            self.state.last.index_copy_(0, where, upload([lane.seq.tokens[-1] for lane in fresh], torch.int64, self.device))
            self.state.length.index_copy_(0, where, upload([lane.start for lane in fresh], torch.int64, self.device))
        fill = key.batch - len(lanes)
        self._put("slots", self.inputs.slots, [*[lane.slot for lane in lanes], *[self.idle] * fill])
        self._put("cap", self.inputs.cap, [*[self._furthest] * len(lanes), *[1] * fill])
        self._put("limit", self.inputs.limit, [*[lane.k for lane in lanes], *[0] * fill])
        if key.source in ("host", "both"):
            self._put("by_host", self.inputs.by_host, [*[lane.guess is not None for lane in lanes], *[False] * fill])
            self._put("base", self.inputs.base, [*[lane.start for lane in lanes], *[0] * fill])
            lines = [([*(lane.guess or ()), *[0] * KNOWN])[:KNOWN] for lane in lanes]
            self.inputs.guesses[: len(lanes)].copy_(upload(lines, torch.int64, self.device))
        if key.choosing != "greedy":
            params = [lane.seq.request.params for lane in lanes] + [SamplingParams()] * fill
            line = tuple((p.temperature, p.seed, p.top_k, p.top_p, p.min_p) for p in params)
            if self._uploaded.get("sampling") != line:
                s = SamplingBatch.build(params, [[]] * key.batch, [[]] * key.batch, self.machine.vocab, "cpu")
                x = self.inputs
                pairs = ((x.temperature, s.temperature), (x.hot, s.hot), (x.seed, s.seed), (x.top_k, s.top_k), (x.top_p, s.top_p))
                for to, value in (*pairs, (x.min_logp, s.min_logp)):
                    to[: key.batch].copy_(upload(value.tolist(), value.dtype, self.device))
                self._uploaded["sampling"] = line

    def _put(self, name: str, to: Tensor, values: list[int] | list[bool]) -> None:
        """Upload a value for each row of the batch, unless the device has them already. Rows past the batch are not read, so what is there
        may be longer, as long as it begins with these values."""
        if self._uploaded.get(name, ())[: len(values)] != tuple(values):
            to[: len(values)].copy_(upload(values, to.dtype, self.device))
            self._uploaded[name] = tuple(values)

    # ---- timing -------------------------------------------------------------------------------------------------------
    def times(self, part: str) -> bool:
        return self.broken is None

    def prepare(self) -> str:
        began, self._preparing = self.machine.clock(), True
        for key in stock.likely(self._most, bound_of(self._furthest), self.can.graph_rows, self._widths):
            self.ready(key)
        self._preparing, self.fixed = False, True
        if not self._graphs:
            self.broken = "no step can be captured"
        passes = self.passes.prepare()
        return f"{len(self._graphs)} steps and {passes} passes over prompts captured in {self.machine.clock() - began:.1f} s"

    @torch.inference_mode()
    def probe(self, part: str, batch: int, k: int, context: int) -> None:
        """One verify pass of drafts from the host, one draft, or a cycle with a tree so deep, to its end, on the scratch page."""
        width = next(w for w in self.can.graph_widths if w >= k)
        rows = self.can.bucket(min(batch, self.can.graph_batches[-1]))
        tree = self.drafter is not None and part == branching(self.drafter.name)
        nodes = min(TIMED, self.drafter.most_nodes(width)) if tree and self.drafter is not None else 0
        what: Literal["cycle", "draft"] = "cycle" if part == "verify" or tree else "draft"
        source: Source | None = "drafter" if what == "draft" or tree else "host" if width else None
        key = Key(rows, width, bound_of(context + max(width, nodes) + 1), "greedy", source, what, nodes=nodes)
        if not self.ready(key):
            return
        self._put("slots", self.inputs.slots, [self.idle] * rows)
        self._put("cap", self.inputs.cap, [context] * rows)
        self.state.length[self.idle].fill_(context)
        captured = self._graphs[key]
        captured.graph.replay()
        captured.hosts[0].tokens.copy_(captured.out.tokens)
        self.state.length[self.idle].fill_(1)
