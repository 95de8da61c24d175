"""The CUDA graph executor: draft, verify, choose, accept and the next inputs in a single launch.

The next inputs stay on the device, one row per cache slot, and tokens are copied into pinned memory, so the host runs
one step behind: it reserves pages for two steps, and drops tokens of a sequence that has ended meanwhile. The host's
own drafts (n-gram copies) are uploaded from the last position it knows; the graph uses the part from the current
position on. There is one graph per `Key`, captured when it is first needed, with idle rows up to the next batch size;
a server captures a few at the start and prefers those (graph_dispatch.py). On a device without graphs the captured
function itself runs.
"""

from __future__ import annotations

import logging
from collections import abc
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..cache.store import upload
from ..ops.adapter_slots import row_ranges
from ..ops.backend import Capabilities
from ..ops.decode_io import HOST_DRAFT, DecodeOutputs
from ..spec.plan import DEEPEST, TIMED, VERIFY, CostPart
from ..spec.slot_sampling import NO_FEATURES, SamplingFeatures
from ..types import GREEDY_EPS, MAX_DRAFT, KVView, SamplingParams
from . import graph_dispatch
from .capture import Graph, GraphCache, GraphPool
from .cycle import Rows
from .decode import Choosing, DecodeStep, DraftSource, Inputs, Key, Output, State
from .model_runner import ModelRunner
from .prefill_graphs import PrefillGraphs, PrefillKey
from .step import DecodeRows, Executor, PendingStep, Plan, Progressed, Sequence, StepBatch, StepFeatures

log = logging.getLogger("outrider")
CAPTURING_STEPS = "capturing steps and passes"
COMPILED_S = 2.0  # seconds of compiling ahead from which kernels were not on disk
# tokens of the trees that are captured: with the newest token 8 or 16 rows, which is what tiles of products hold
CAPTURED_NODES = 7, TIMED
MAX_TREE_SEQUENCES = 8  # of a step with trees
MIN_CONTEXT = 512  # the smallest bound of a graph's context; bounds double


@dataclass
class HostOutput:
    """A copy of a graph's output in pinned memory."""

    copy: Output
    outputs: DecodeOutputs  # its columns


@dataclass
class CapturedGraph:
    key: Key
    graph: Graph
    out: Output  # on the device
    hosts: list[HostOutput]  # two copies of it, used in turn: one is read while the next step fills the other


class BatchFeatures(NamedTuple):
    """The sampling features of a batch, which stay the same until the batch changes."""

    seqs: list[Sequence]
    choosing: Choosing
    asks: SamplingFeatures


class StandIn(NamedTuple):
    """The graph that steps of some key run in, and the number of such steps so far."""

    key: Key
    num_steps: int


@dataclass(frozen=True, slots=True)
class GraphPlan(Plan):
    """The graph that a step runs in; None: it has prompts only."""

    graph: CapturedGraph | None = None
    context: int = 0  # positions that the step itself needs a graph for, as the cost table counts them
    draft: CapturedGraph | None = None  # the drafts alone, which run first if a grammar's masks depend on them


def choosing_of(params: abc.Sequence[SamplingParams]) -> Choosing:
    """The cheapest method that finds the candidates of all these rows."""
    sampled = [p for p in params if p.temperature >= GREEDY_EPS]
    filtered = [p for p in sampled if p.top_k or p.top_p < 1.0 or p.min_p > 0.0]
    if not filtered:
        return "sampled" if sampled else "greedy"
    if any(p.top_p < 1.0 and not p.top_k for p in filtered):
        return "sort"
    max_k = max(p.top_k for p in filtered)
    if max_k <= 64:
        return "head 64"
    return "head 1024" if max_k <= 1024 else "sort"


def bound_of(positions: int) -> int:
    return max(MIN_CONTEXT, 1 << (positions - 1).bit_length())


class GraphExecutor(Executor):
    name = "graphs"
    async_results = True

    def __init__(
        self,
        runner: ModelRunner,
        capabilities: Capabilities,
        pass_rows: int = 0,
        packed_rows: int = 0,
        widths: abc.Sequence[int] = (0,),
        advised: SamplingParams = SamplingParams(),
    ):
        """pass_rows, packed_rows: as `KVBudget` has them. widths: the K that a server's steps will have. advised: how
        the model's makers sample."""
        drafter = runner.drafter
        assert drafter is None or drafter.in_graph, f"{drafter.name} cannot run inside a graph"
        self.runner = runner
        self.device = runner.device
        self.drafter = drafter
        self.can = capabilities
        self.trees = drafter is not None and capabilities.trees and drafter.max_nodes(1) > 0
        self.idle = runner.store.spec.slots  # the table row that is all scratch page
        self.state = State.of(runner.features, runner.slot_sampling)
        self.inputs = Inputs.of(self.device, self.idle, capabilities.graph_batches[-1])
        # int32 [rows, V / 32]: masks of the rows of a step, allocated with the first grammar
        self.bits: Tensor | None = None
        pool = GraphPool(self.device)
        # Refused keys use a feature that could not be captured: those steps are eager.
        self.cache: GraphCache[Key, CapturedGraph] = GraphCache(self.device, pool)
        self.prefill_graphs = PrefillGraphs(runner, pass_rows, packed_rows, pool=pool)
        self.broken: str | None = None  # why capturing failed: from then on steps are eager
        self._uploaded: dict[str, tuple[object, ...]] = {}
        self._last_batch = BatchFeatures([], "greedy", NO_FEATURES)
        self._furthest = self.prefill_graphs.furthest - MAX_DRAFT - 1
        self._limits = graph_dispatch.GraphLimits(
            batch=min(capabilities.bucket(self.idle), capabilities.graph_batches[-1]),
            context=bound_of(self._furthest),
            rows=capabilities.graph_rows,
        )
        members = drafter.members if drafter is not None else ()
        longest = [member.max_tokens for member in members] or [0]  # a block of 8 drafts 7
        self.widths = tuple(sorted({*capabilities.graph_widths, *longest}))  # K of the graphs
        self._max_k = max(longest)  # of a drafter's chains
        self.names = tuple(member.name for member in members) if len(members) > 1 else (None,)  # as in `Key.drafter`
        served = [next(width for width in self.widths if width >= k) for k in widths]
        self._widths = tuple(k for k in served if k == 0 or drafter is not None)
        self._advised = choosing_of([advised])
        self._preparing = False  # this capture is optional: a failure is ignored
        # versions of the tensors that graphs read: of adapters, and of sampling
        self._slots_version = 0
        self._sampling_version = 0
        self.fixed = False  # requests are being served: capture only if no graph fits
        self._stand_ins: dict[Key, StandIn] = {}

    # ---- planning: which graph, captured if there is none
    def supports(self, features: StepFeatures) -> bool:
        slots = self.runner.adapters.slots if self.runner.adapters is not None else None
        return self.broken is None and (len(features.adapters) == 0 or slots is not None)

    def plan(self, batch: StepBatch) -> GraphPlan | None:
        if not batch.decode:
            return GraphPlan(batch) if self.broken is None else None
        if batch.adapted and not self._placed(batch):
            return None
        wanted = self.key(batch.decode)
        if wanted is None:
            return None
        key = self._stand_in(wanted) if self.fixed else wanted
        graph = self.capture(key)
        draft = None
        if key.k and key.asks.grammar:
            source = self._source(batch.decode) if any(item.plan.k for item in batch.decode) else "host"
            name = self._named(batch.decode)
            only = replace(key, source=source, part="draft", asks=NO_FEATURES, adapted=False, drafter=name)
            draft = self.capture(only)
            graph = graph if draft is not None else None
        return GraphPlan(batch, graph, wanted.context, draft=draft) if graph is not None else None

    def _placed(self, batch: StepBatch) -> bool:
        """Put the adapters of the whole step into slots, and drop graphs that read freed tensors."""
        slots = self.runner.adapters.slots if self.runner.adapters is not None else None
        if slots is None:
            return False
        in_prompts = [chunk.seq.adapter for chunk in batch.prompts]
        slots.place([*in_prompts, *(row.seq.adapter for row in batch.decode)])
        if slots.version != self._slots_version:
            self._drop(lambda key: not key.adapted)
            self._slots_version = slots.version
        return True

    def _stand_in(self, wanted: Key) -> Key:
        """The graph that a step of this key runs in while requests are served."""
        earlier = self._stand_ins.get(wanted)
        max_k = MAX_DRAFT if wanted.source == "host" else self._max_k
        if earlier is None:
            key = graph_dispatch.stand_in(self.cache.graphs, wanted)
            key = key or self._spare(graph_dispatch.padded(wanted, self._limits, max_k)) or wanted
            num_steps = 0
        else:
            key, num_steps = earlier
            if num_steps == graph_dispatch.OFTEN_STEPS and graph_dispatch.oversized(key, wanted):
                padded = graph_dispatch.padded(wanted, self._limits, max_k)
                key = self._spare(replace(wanted, context=padded.context)) or key
        self._stand_ins[wanted] = StandIn(key, num_steps + 1)
        return key

    def _spare(self, key: Key) -> Key | None:
        """This graph, captured now; None if that fails: it is optional."""
        self._preparing = True
        try:
            return key if self.capture(key) is not None else None
        finally:
            self._preparing = False

    def key(self, scheduled: DecodeRows) -> Key | None:
        """The key of the graph for these sequences; None: they need the eager executor."""
        if self.broken is not None or len(scheduled) > self.can.graph_batches[-1]:
            return None
        if len(self.names) > 1 and len(self._drafters(scheduled)) > 1:
            return None  # a graph runs one drafter
        choosing, asks = self._asked([item.seq for item in scheduled])
        k = next(w for w in self.widths if w >= max(item.plan.k for item in scheduled))
        source: DraftSource | None = None
        if k > 0:
            source = "drafted" if asks.grammar else self._source(scheduled)
        furthest = max(item.position + 1 + item.seq.num_inflight_tokens for item in scheduled)
        nodes = self._nodes(scheduled, k, furthest) if source == "drafter" and asks == NO_FEATURES else 0
        # A server may run chains in a graph of more drafted tokens, which writes K/V of as many positions.
        beyond = max(MAX_DRAFT if self.fixed and k else k, nodes)
        adapted = any([item.seq.adapter is not None for item in scheduled])
        batch = self.can.bucket(len(scheduled))
        name = self._named(scheduled) if source in ("drafter", "both") else None
        return Key(
            batch=batch,
            k=k,
            context=bound_of(furthest + beyond),
            choosing=choosing,
            source=source,
            asks=asks,
            nodes=nodes,
            adapted=adapted,
            drafter=name,
        )

    @staticmethod
    def _drafters(scheduled: DecodeRows) -> set[str | None]:
        return {item.plan.drafter for item in scheduled if item.plan.k and item.host_draft is None}

    def _named(self, scheduled: DecodeRows) -> str | None:
        return next(iter(self._drafters(scheduled)), None) if len(self.names) > 1 else None

    def _nodes(self, scheduled: DecodeRows, depth: int, furthest: int) -> int:
        """Tokens of each sequence's tree in this step; 0: chains, as no request uses trees, they would be too deep or
        too wide, or the step has penalties, masks, logprobs or drafts from the host."""
        # pages are reserved for this many rows of each; a sequence without a draft keeps its root
        max_nodes = min(item.plan.nodes for item in scheduled if item.plan.k)
        narrow = depth < max_nodes and depth <= DEEPEST and len(scheduled) * furthest <= graph_dispatch.TREE_POSITIONS
        if self.drafter is None or not self.trees or not narrow:
            return 0
        drafter = self.drafter.member(self._named(scheduled))
        nodes = min(max((n for n in CAPTURED_NODES if n <= max_nodes), default=0), drafter.max_nodes(depth))
        return nodes if nodes > depth and len(scheduled) <= MAX_TREE_SEQUENCES else 0

    def _asked(self, seqs: list[Sequence]) -> tuple[Choosing, SamplingFeatures]:
        """The sampling features of these sequences."""
        if self._last_batch.seqs != seqs:
            params = [seq.request.params for seq in seqs]
            asks = SamplingFeatures.of(params, len(self.runner.eos))
            self._last_batch = BatchFeatures(seqs, choosing_of(params), asks)
        return self._last_batch.choosing, self._last_batch.asks

    @staticmethod
    def _source(scheduled: DecodeRows) -> DraftSource:
        sources: set[DraftSource] = {
            "drafter" if item.host_draft is None else "host" for item in scheduled if item.plan.k
        }
        return "both" if len(sources) == 2 else sources.pop()

    def capture(self, key: Key) -> CapturedGraph | None:
        """The graph of this key, captured if necessary. A failure disables graphs, with one line in the log."""
        sampling = self.state.sampling
        sampling.grow(key.asks)
        if sampling.version != self._sampling_version:
            self._drop(lambda known: known.asks == NO_FEATURES)
            self._sampling_version = sampling.version
        if key in self.cache.graphs or key in self.cache.refused:
            return self.cache.graphs.get(key)
        if key.asks.grammar and self.bits is None:
            shape = (self.can.graph_rows, -(-self.runner.vocab // 32))
            self.bits = torch.full(shape, -1, dtype=torch.int32, device=self.device)
        self.inputs.slots.fill_(self.idle)  # warm-up runs on the scratch page alone
        self.inputs.limit.fill_(0)
        self.inputs.cap.fill_(1)
        self._uploaded.clear()
        out = Output.of(key, self.device)
        runner = self.runner
        model = self.runner.model
        if key.adapted and runner.adapters is not None:
            ranges = row_ranges([-1] * key.batch, [key.drafted + 1] * key.batch)
            self._put("ranges", self.inputs.ranges, ranges)
            model = runner.adapters.slot_model(self.inputs.ranges[: len(ranges)])
        bits = self.bits if key.asks.grammar else None
        step = DecodeStep(
            model, runner.store, self.drafter, state=self.state, inputs=self.inputs, key=key, out=out, bits=bits
        )

        def once() -> None:
            step()  # its logits are not kept: they would keep the graph's memory alive

        graph = self.cache.capture(key, once, self.runner.divided)
        if isinstance(graph, str):
            self._failed(key, graph)
            return None
        copies = [Output.of(key, torch.device("cpu"), pin_memory=self.device.type == "cuda") for _ in range(2)]
        hosts = [HostOutput(copy, copy.views()) for copy in copies]
        captured = CapturedGraph(key, graph, out, hosts=hosts)
        self.cache.graphs[key] = captured
        return captured

    def _failed(self, key: Key, why: str) -> None:
        if not self._preparing and key.asks == NO_FEATURES:
            self.broken = why
            log.warning("CUDA graphs are off: capturing %s failed (%s)", key, why)
        elif not self._preparing or self.cache.refused == {key}:
            log.warning("steps like %s are not captured: it failed (%s)", key, why)

    def close(self) -> None:
        """Drop all graphs: a graph keeps the libraries of its kernels loaded, and holds collectives."""
        self._drop(lambda _: False)
        self.prefill_graphs.cache.graphs.clear()

    # ---- one step
    @torch.inference_mode()
    def launch(self, plan: Plan) -> PendingStep:
        assert isinstance(plan, GraphPlan)
        batch = plan.batch
        before = self.prefill_graphs.ran
        if batch.prompts:
            self.runner.prompts(batch.prompts, self.prefill_graphs.run, self.prefill_graphs.pack)
        pending = PendingStep(self, batch, self.runner.clock(), rows=self.prefill_graphs.ran - before)
        pending.num_captures = self.num_captures
        if plan.graph is None:
            return pending
        key = plan.graph.key
        self.runner.store.flush()
        self._upload(batch.decode, key)
        if key.asks.grammar:
            self._mask(batch.decode, key, plan.draft)
        pending.arrival = self._replay(plan.graph)
        pending.outputs = plan.graph.hosts[0].outputs
        if key.nodes > 0:
            assert pending.outputs.is_tree is not None
            is_tree = [row.plan.k > 0 for row in batch.decode]
            pending.outputs.is_tree[: len(is_tree)] = is_tree
            pending.outputs.num_drafted[: len(is_tree)] = [key.nodes * has_tree for has_tree in is_tree]
        else:
            pending.outputs.num_drafted[: len(batch.decode)] = [row.plan.k for row in batch.decode]
        pending.width = key.k
        pending.context = plan.context
        pending.tree = key.nodes > 0
        pending.inflight_tokens = [item.plan.k + 1 for item in batch.decode]
        pending.holders = [item.seq.active_cache for item in batch.decode]
        return pending

    def _replay(self, captured: CapturedGraph) -> torch.cuda.Event | None:
        """Run a graph and copy its output to the first of its copies; the event signals the arrival."""
        captured.graph.replay()
        captured.hosts.reverse()
        host = captured.hosts[0].copy
        out = captured.out
        host.packed.copy_(out.packed, non_blocking=True)
        if host.logprobs is not None and out.logprobs is not None:
            host.logprobs.copy_(out.logprobs, non_blocking=True)
        if self.device.type != "cuda":
            return None
        event = torch.cuda.Event()
        event.record()
        return event

    def read(self, pending: PendingStep) -> DecodeOutputs | None:
        if pending.arrival is not None:
            pending.arrival.synchronize()
        outputs = pending.outputs
        if outputs is not None and outputs.parents is not None:  # of all rows of the step; then of each sequence's
            rows_per_sequence = outputs.parents.shape[1] + 1
            outputs.parents -= np.arange(outputs.parents.shape[0])[:, None] * rows_per_sequence
        return outputs

    def _drop(self, keep: Callable[[Key], bool]) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # a graph that is dropped must not be running
        self.cache.graphs = {key: graph for key, graph in self.cache.graphs.items() if keep(key)}
        self._stand_ins.clear()

    def _mask(self, scheduled: DecodeRows, key: Key, draft: CapturedGraph | None) -> None:
        """The grammars' masks after each drafted token; the drafts come first, from a graph or from the host."""
        drafts = [list(item.host_draft or ()) for item in scheduled]
        if draft is not None:
            self._upload(scheduled, draft.key)
            arrival = self._replay(draft)
            if arrival is not None:
                arrival.synchronize()
            drafts = draft.hosts[0].outputs.tokens[: len(scheduled), : key.k].tolist()
        assert self.bits is not None
        width = key.k + 1
        seqs = [item.seq for item in scheduled]
        if self._uploaded.get("bits") != (width, *seqs):  # rows of sequences without a grammar allow everything
            self.bits[: key.batch * width].fill_(-1)
            self._uploaded["bits"] = (width, *seqs)
        for i, item in enumerate(scheduled):
            matcher = item.seq.answer.matcher
            if matcher is not None:
                rows = torch.from_numpy(matcher.bits(drafts[i][: item.plan.k]))
                rows = rows.pin_memory() if self.device.type == "cuda" else rows
                self.bits[i * width : i * width + len(rows)].copy_(rows, non_blocking=True)

    def _upload(self, scheduled: DecodeRows, key: Key) -> None:
        """Upload what changed. A sequence with tokens in flight has its state on the device, ahead of the host."""
        fresh = [item for item in scheduled if not item.seq.num_inflight_tokens]
        self.runner.join([item.seq for item in scheduled], key.asks)
        if key.asks != NO_FEATURES:
            self.runner.batch_sampling = None
        if fresh:
            columns = (
                [item.slot for item in fresh],
                [item.seq.tokens[-1] for item in fresh],
                [item.position for item in fresh],
            )
            where, last, position = upload(columns, torch.int64, self.device)
            self.state.last.index_copy_(0, where, last)
            self.state.position.index_copy_(0, where, position)
        fill = key.batch - len(scheduled)
        inputs = self.inputs
        self._put("slots", inputs.slots, [item.slot for item in scheduled] + [self.idle] * fill)
        self._put("cap", inputs.cap, [self._furthest] * len(scheduled) + [1] * fill)
        self._put("limit", inputs.limit, [item.plan.k for item in scheduled] + [0] * fill)
        if key.adapted and self.runner.adapters is not None and self.runner.adapters.slots is not None:
            placed = self.runner.adapters.slots.place([item.seq.adapter for item in scheduled])
            ranges = row_ranges([*placed, *[-1] * fill], [key.drafted + 1] * key.batch)
            self._put("ranges", inputs.ranges, ranges)
        if key.source in ("host", "both"):
            self._put("by_host", inputs.by_host, [item.host_draft is not None for item in scheduled] + [False] * fill)
            self._put("base", inputs.base, [item.position for item in scheduled] + [0] * fill)
            guesses = [[*(item.host_draft or ()), *[0] * HOST_DRAFT][:HOST_DRAFT] for item in scheduled]
            inputs.guesses[: len(scheduled)].copy_(upload(guesses, torch.int64, self.device))

    def _put(self, name: str, to: Tensor, values: list[int] | list[bool] | list[tuple[int, int, int]]) -> None:
        """Upload one value per batch row, unless the device's values begin with these already."""
        if self._uploaded.get(name, ())[: len(values)] != tuple(values):
            to[: len(values)].copy_(upload(values, to.dtype, self.device))
            self._uploaded[name] = tuple(values)

    # ---- timing
    def can_probe(self, part: CostPart) -> bool:
        return self.broken is None

    @property
    def num_captures(self) -> int:
        """Captures so far, failed ones too: each delays what is under way."""
        return self.cache.num_captures + self.prefill_graphs.cache.num_captures

    def prepare(self, served: bool = True, progress: Progressed = lambda what, done, total: None) -> str:
        began = self.runner.clock()
        keys_of = graph_dispatch.warmup_keys if served else graph_dispatch.first_keys
        keys = keys_of(self._limits, self._widths, drafters=self.names, advised=self._advised)
        slots = self.runner.adapters.slots if self.runner.adapters is not None else None
        if slots is not None and slots.weights:
            keys = [replace(key, adapted=adapted) for key in keys for adapted in (False, True)]
        passes = self.prefill_graphs.likely(served)
        self._compile(keys, passes, progress)
        compiled_s = self.runner.clock() - began
        total = len(keys) + len(passes)
        self._preparing = True
        for i, key in enumerate(keys):
            progress(CAPTURING_STEPS, i, total)
            self.capture(key)
        self._preparing = False
        self.fixed = True
        if not self.cache.graphs:
            self.broken = "no step can be captured"
        for i, prefill_key in enumerate(passes, len(keys)):
            progress(CAPTURING_STEPS, i, total)
            self.prefill_graphs.capture(prefill_key)
        self.prefill_graphs.fixed = True
        seconds = self.runner.clock() - began
        num_passes = len(self.prefill_graphs.cache.graphs)
        line = f"{len(self.cache.graphs)} steps and {num_passes} passes over prompts captured in {seconds:.1f} s"
        return line if compiled_s < COMPILED_S else f"{line}, with kernels that later starts on this machine will find"

    def _compile(self, keys: abc.Sequence[Key], passes: abc.Sequence[PrefillKey], progress: Progressed) -> None:
        """Compile attention, the kernel that takes longest, for all these graphs in parallel; the first capture would
        compile one after the other. A failure is left to the captures."""
        model = self.runner.model
        specs = {replace(layer.attn, kv_layer=0): layer.attn for layer in model.config.layers}
        views = [*map(self._view, keys), *(view for key in passes for view in self.prefill_graphs.views(key))]
        report = partial(progress, "compiling kernels, once per machine")
        try:
            model.ops.compile_attention(list(specs.values()), views, model.dtype, progress=report)
        except Exception as error:
            log.debug("kernels are compiled as they are needed: %s", error)

    def _view(self, key: Key) -> KVView:
        """The view that the target's attention has in a step of chains, on the scratch page."""
        rows = Rows.of((key.k,) * key.batch, self.device)
        slots = torch.full((key.batch,), self.idle, device=self.device)
        pages = self.runner.store.pages_of(slots, key.context)
        positions = rows.positions(torch.ones_like(slots))
        return pages.view(positions, rows.seq, rows.start, max_rows=rows.k + 1, max_context=key.context)

    @torch.inference_mode()
    def probe(self, part: CostPart, batch: int, k: int, context: int) -> None:
        """Run on the scratch page: a verify pass, a draft, or a cycle with a tree of the given depth."""
        width = next(w for w in self.widths if w >= k)
        rows = self.can.bucket(min(batch, self.can.graph_batches[-1]))
        tree = part.kind == "tree"
        name = part.drafter if len(self.names) > 1 else None
        nodes = min(TIMED, self.drafter.member(name).max_nodes(width)) if tree and self.drafter is not None else 0
        what: Literal["cycle", "draft"] = "cycle" if part == VERIFY or tree else "draft"
        source: DraftSource | None = None
        if what == "draft" or tree:
            source = "drafter"
        elif width > 0:
            source = "host"
        bound = bound_of(context + max(width, nodes) + 1)
        captured = self.capture(
            Key(rows, width, bound, choosing="greedy", source=source, part=what, nodes=nodes, drafter=name)
        )
        if captured is None:
            return
        self._put("slots", self.inputs.slots, [self.idle] * rows)
        self._put("cap", self.inputs.cap, [context] * rows)
        self.state.position[self.idle].fill_(context)
        captured.graph.replay()
        captured.hosts[0].copy.packed.copy_(captured.out.packed)
        self.state.position[self.idle].fill_(1)
