"""The CUDA graph executor: draft, verify, choose, accept and the next inputs in a single launch.

The next inputs stay on the device, one row per cache slot, and tokens are copied into pinned memory, so the host runs
one step behind: it reserves pages for two steps, and drops tokens of a sequence that has ended meanwhile. The host's
own drafts (n-gram copies) are uploaded from the last position it knows; the graph uses the part from the current
position on.

`GraphDispatcher` (graph_dispatch.py) says which graph a step runs in, `DecodeGraphs` (decode_graphs.py) captures and
replays it, `GraphInputs` (graph_inputs.py) uploads what it reads, and prompts run through `PrefillGraphs`
(prefill_graphs.py).
"""

from __future__ import annotations

import logging
from collections import abc
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from ..ops.backend import Capabilities
from ..ops.decode_io import DecodeOutputs
from ..spec.plan import CostPart
from ..types import MAX_DRAFT, SamplingParams
from .capture import GraphPool
from .decode import Key
from .decode_graphs import CapturedGraph, DecodeGraphs
from .graph_dispatch import GraphDispatcher, SingleDrafts
from .model_runner import ModelRunner
from .prefill_graphs import PrefillGraphs, PrefillKey
from .step import DecodeRows, Executor, PendingStep, Plan, Progressed, StepBatch, StepFeatures

log = logging.getLogger("outrider")
CAPTURING_STEPS = "capturing steps and passes"
COMPILED_S = 2.0  # seconds of compiling ahead from which kernels were not on disk


@dataclass(frozen=True, slots=True)
class GraphPlan(Plan):
    """The graph that a step runs in; None: it has prompts only."""

    graph: CapturedGraph | None = None
    context: int = 0  # positions that the step itself needs a graph for, as the cost table counts them
    draft: CapturedGraph | None = None  # the drafts alone, which run first if a grammar's masks depend on them


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
        single: SingleDrafts = SingleDrafts(),
    ):
        """pass_rows, packed_rows: as `KVBudget` has them. widths: the K that a server's steps will have. advised: how
        the model's makers sample. single: drafts of one sequence that are captured ahead too."""
        self.runner = runner
        self.device = runner.device
        pool = GraphPool(self.device)
        self.prefill_graphs = PrefillGraphs(runner, pass_rows, packed_rows, pool=pool)
        max_position = self.prefill_graphs.furthest - MAX_DRAFT - 1
        self.decode_graphs = DecodeGraphs(runner, capabilities, max_position, pool=pool)
        self.dispatcher = GraphDispatcher(
            self.decode_graphs, capabilities, max_position=max_position, widths=widths, advised=advised, single=single
        )
        self.trees = self.dispatcher.trees

    # ---- planning: which graph, captured if there is none
    def supports(self, features: StepFeatures) -> bool:
        slots = self.runner.adapters.slots if self.runner.adapters is not None else None
        return self.decode_graphs.broken is None and (len(features.adapters) == 0 or slots is not None)

    def plan(self, batch: StepBatch) -> GraphPlan | None:
        graphs = self.decode_graphs
        if not batch.decode:
            return GraphPlan(batch) if graphs.broken is None else None
        if batch.adapted and not graphs.place_adapters(batch):
            return None
        wanted = self.dispatcher.key(batch.decode)
        if wanted is None:
            return None
        key = self.dispatcher.dispatch(wanted)
        graph = graphs.capture(key)
        if graph is None:
            return None
        draft_key = self.dispatcher.draft_key(key, batch.decode)
        if draft_key is None:
            return GraphPlan(batch, graph, wanted.context)
        draft = graphs.capture(draft_key)
        return GraphPlan(batch, graph, wanted.context, draft=draft) if draft is not None else None

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
        if plan.graph is not None:
            self._launch_decode(plan.graph, plan, pending)
        return pending

    def _launch_decode(self, graph: CapturedGraph, plan: GraphPlan, pending: PendingStep) -> None:
        rows = plan.batch.decode
        key = graph.key
        self.runner.store.flush()
        self.decode_graphs.inputs.write(rows, key)
        if key.asks.grammar:
            drafts = self._drafts(rows, key, plan.draft)
            self.decode_graphs.inputs.write_grammar_bits(rows, drafts, key)
        pending.arrival = self.decode_graphs.replay(graph)
        outputs = graph.hosts[0].outputs
        pending.outputs = outputs
        if key.nodes > 0:
            assert outputs.is_tree is not None
            is_tree = [row.plan.k > 0 for row in rows]
            outputs.is_tree[: len(is_tree)] = is_tree
            outputs.num_drafted[: len(is_tree)] = [key.nodes * has_tree for has_tree in is_tree]
        else:
            outputs.num_drafted[: len(rows)] = [row.plan.k for row in rows]
        pending.width = key.k
        pending.context = plan.context
        pending.tree = key.nodes > 0
        pending.inflight_tokens = [row.plan.k + 1 for row in rows]
        pending.holders = [row.seq.active_cache for row in rows]

    def _drafts(self, rows: DecodeRows, key: Key, draft: CapturedGraph | None) -> list[list[int]]:
        """The drafted tokens of each sequence, known before the step: the host's, or those of a graph that runs now."""
        if draft is None:
            return [list(row.host_draft or ()) for row in rows]
        self.decode_graphs.inputs.write(rows, draft.key)
        arrival = self.decode_graphs.replay(draft)
        if arrival is not None:
            arrival.synchronize()
        drafts: list[list[int]] = draft.hosts[0].outputs.tokens[: len(rows), : key.k].tolist()
        return drafts

    def read(self, pending: PendingStep) -> DecodeOutputs | None:
        if pending.arrival is not None:
            pending.arrival.synchronize()
        outputs = pending.outputs
        if outputs is not None and outputs.parents is not None:  # of all rows of the step; then of each sequence's
            rows_per_sequence = outputs.parents.shape[1] + 1
            outputs.parents -= np.arange(outputs.parents.shape[0])[:, None] * rows_per_sequence
        return outputs

    # ---- before the first request
    def prepare(self, served: bool = True, progress: Progressed = lambda what, done, total: None) -> str:
        began = self.runner.clock()
        graphs = self.decode_graphs
        keys = self.dispatcher.warmup_keys(served)
        passes = self.prefill_graphs.likely(served)
        self._compile(keys, passes, progress)
        compiled_s = self.runner.clock() - began
        total = len(keys) + len(passes)
        for i, key in enumerate(keys):
            progress(CAPTURING_STEPS, i, total)
            graphs.capture(key, optional=True)
        self.dispatcher.serving = True
        if not graphs.cache.graphs:
            graphs.broken = "no step can be captured"
        for i, prefill_key in enumerate(passes, len(keys)):
            progress(CAPTURING_STEPS, i, total)
            self.prefill_graphs.capture(prefill_key)
        self.prefill_graphs.fixed = True
        seconds = self.runner.clock() - began
        num_passes = len(self.prefill_graphs.cache.graphs)
        line = f"{len(graphs.cache.graphs)} steps and {num_passes} passes over prompts captured in {seconds:.1f} s"
        return line if compiled_s < COMPILED_S else f"{line}, with kernels that later starts on this machine will find"

    def _compile(self, keys: abc.Sequence[Key], passes: abc.Sequence[PrefillKey], progress: Progressed) -> None:
        """Compile attention, the kernel that takes longest, for all these graphs in parallel; the first capture would
        compile one after the other. A failure is left to the captures."""
        model = self.runner.model
        specs = {replace(layer.attn, kv_layer=0): layer.attn for layer in model.config.layers}
        views = [self.decode_graphs.view(key) for key in keys]
        for key in passes:
            views += self.prefill_graphs.views(key)
        report = partial(progress, "compiling kernels, once per machine")
        try:
            model.ops.compile_attention(list(specs.values()), views, model.dtype, progress=report)
        except Exception as error:
            log.debug("kernels are compiled as they are needed: %s", error)

    def close(self) -> None:
        self.decode_graphs.close()
        self.prefill_graphs.cache.graphs.clear()

    # ---- timing
    @property
    def num_captures(self) -> int:
        """Captures so far, failed ones too: each delays what is under way."""
        return self.decode_graphs.cache.num_captures + self.prefill_graphs.cache.num_captures

    def can_probe(self, part: CostPart) -> bool:
        return self.decode_graphs.broken is None

    @torch.inference_mode()
    def probe(self, part: CostPart, batch: int, k: int, context: int) -> None:
        """Run on the scratch page: a verify pass, a draft, or a cycle with a tree of the given depth."""
        captured = self.decode_graphs.capture(self.dispatcher.probe_key(part, batch, k, context=context))
        if captured is not None:
            self.decode_graphs.probe(captured, context)
