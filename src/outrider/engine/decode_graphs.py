"""Decode steps as CUDA graphs: capture by `Key`, and replay with the results copied to the host.

All graphs of a model read the same buffers (`GraphInputs`, `decode.State`) and share one pool of memory. A graph that
reads tensors which have moved since is dropped. On a device without graphs the captured function itself runs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..ops.backend import Capabilities
from ..ops.decode_io import DecodeOutputs
from ..spec.slot_sampling import NO_FEATURES
from ..types import KVView
from .capture import Graph, GraphCache, GraphPool
from .cycle import Rows
from .decode import DecodeStep, Key, Output, State
from .graph_inputs import GraphInputs
from .model_runner import ModelRunner
from .step import StepBatch

log = logging.getLogger("outrider")


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


class DecodeGraphs:
    def __init__(self, runner: ModelRunner, capabilities: Capabilities, max_position: int, pool: GraphPool):
        """max_position: sequences end there."""
        self.runner = runner
        self.device = runner.device
        self.state = State.of(runner.features, runner.slot_sampling)
        self.inputs = GraphInputs(
            runner,
            self.state,
            max_batch=capabilities.graph_batches[-1],
            max_rows=capabilities.graph_rows,
            max_position=max_position,
        )
        # Refused keys use a feature that could not be captured: those steps are eager.
        self.cache: GraphCache[Key, CapturedGraph] = GraphCache(self.device, pool)
        self.broken: str | None = None  # why capturing failed: from then on steps are eager
        self.num_drops = 0  # times that graphs were dropped
        # versions of the tensors that graphs read
        self._sampling_version = 0
        self._adapters_version = 0

    def capture(self, key: Key, optional: bool = False) -> CapturedGraph | None:
        """The graph of this key, captured if necessary. A failure disables graphs, with one line in the log, unless
        the graph is optional."""
        sampling = self.state.sampling
        sampling.grow(key.asks)
        if sampling.version != self._sampling_version:
            self._drop(lambda known: known.asks == NO_FEATURES)
            self._sampling_version = sampling.version
        if key in self.cache.graphs or key in self.cache.refused:
            return self.cache.graphs.get(key)
        if key.asks.grammar:
            self.inputs.allocate_grammar_bits()
        self.inputs.write_idle()
        out = Output.of(key, self.device)
        step = self._step(key, out)

        def run_once() -> None:
            step()  # its logits are not kept: they would keep the graph's memory alive

        graph = self.cache.capture(key, run_once, self.runner.divided)
        if isinstance(graph, str):
            self._report_failure(key, graph, optional)
            return None
        copies = [Output.of(key, torch.device("cpu"), pin_memory=self.device.type == "cuda") for _ in range(2)]
        hosts = [HostOutput(copy, copy.views()) for copy in copies]
        captured = CapturedGraph(key, graph, out, hosts=hosts)
        self.cache.graphs[key] = captured
        return captured

    def _step(self, key: Key, out: Output) -> DecodeStep:
        """The function to capture."""
        runner = self.runner
        model = runner.model
        if key.adapted and runner.adapters is not None:
            model = runner.adapters.slot_model(self.inputs.write_adapter_ranges([-1] * key.batch, key))
        return DecodeStep(
            model,
            runner.store,
            runner.drafter,
            state=self.state,
            inputs=self.inputs.buffers,
            key=key,
            out=out,
            bits=self.inputs.grammar_bits if key.asks.grammar else None,
        )

    def _report_failure(self, key: Key, reason: str, optional: bool) -> None:
        if not optional and key.asks == NO_FEATURES:
            self.broken = reason
            log.warning("CUDA graphs are off: capturing %s failed (%s)", key, reason)
        elif not optional or self.cache.refused == {key}:
            log.warning("steps like %s are not captured: it failed (%s)", key, reason)

    def replay(self, captured: CapturedGraph) -> torch.cuda.Event | None:
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

    def probe(self, captured: CapturedGraph, position: int) -> None:
        """Run a graph on the scratch page to completion, with all its sequences at this position."""
        self.inputs.write_probe(captured.key.batch, position)
        captured.graph.replay()
        captured.hosts[0].copy.packed.copy_(captured.out.packed)
        self.inputs.end_probe()

    def place_adapters(self, batch: StepBatch) -> bool:
        """Put the adapters of the whole step into slots, and drop graphs that read freed tensors. False: there are no
        slots."""
        slots = self.runner.adapters.slots if self.runner.adapters is not None else None
        if slots is None:
            return False
        in_prompts = [chunk.seq.adapter for chunk in batch.prompts]
        slots.place([*in_prompts, *(row.seq.adapter for row in batch.decode)])
        if slots.version != self._adapters_version:
            self._drop(lambda key: not key.adapted)
            self._adapters_version = slots.version
        return True

    def _drop(self, keep: Callable[[Key], bool]) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # a graph that is dropped must not be running
        self.cache.graphs = {key: graph for key, graph in self.cache.graphs.items() if keep(key)}
        self.num_drops += 1

    def close(self) -> None:
        """Drop all graphs: a graph keeps the libraries of its kernels loaded, and holds collectives."""
        self._drop(lambda _: False)

    def view(self, key: Key) -> KVView:
        """The view that the target's attention has in a step of this key, on the scratch page."""
        rows = Rows.of((key.drafted,) * key.batch, self.device)
        slots = torch.full((key.batch,), self.inputs.idle, device=self.device)
        pages = self.runner.store.pages_of(slots, key.context)
        positions = rows.positions(torch.ones_like(slots))
        view = pages.view(positions, rows.seq, rows.start, max_rows=rows.k + 1, max_context=key.context)
        if key.nodes:
            view.ancestors = torch.zeros((len(positions), key.k + 1), dtype=torch.int32, device=self.device)
        return view
