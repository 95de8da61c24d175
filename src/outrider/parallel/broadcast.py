"""Rank 0 schedules and the other ranks follow: rank 0 broadcasts every step as plain data, and all ranks run it.

The interface is the `Executor`. Rank 0's executors are wrapped: before one runs a step it broadcasts the `StepBatch`,
the new data of its sequences (prompt, parameters, new tokens) and their new pages; the same executor then runs the same
step in every process. Each process drafts, verifies and chooses tokens itself. All get the same tokens: sums and logits
have the same bits everywhere, and noise is a function of seed and position. Only the masks of grammars, which rank 0
alone has, are broadcast during a step.
"""

from __future__ import annotations

import signal
import threading
from collections import abc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch

from ..cache.store import SeqCache
from ..engine.engine import Engine
from ..engine.output_processor import OutputProcessor
from ..engine.step import (
    Executor,
    PendingStep,
    Plan,
    Progressed,
    RemoteCopy,
    Request,
    Sequence,
    StepBatch,
    StepFeatures,
)
from ..ops.decode_io import DecodeOutputs
from ..spec.plan import CostPart
from ..types import GroupName, Matcher, OutriderError
from .process_group import ProcessGroup

if TYPE_CHECKING:
    from numpy import ndarray


# ---- messages
Pages = dict[GroupName, tuple[int, list[int]]]  # new pages by group: the index of the first, and physical pages


class SeqUpdate(NamedTuple):
    """New data of a sequence, in place of a `Sequence`, of which every process has its own."""

    id: str
    fresh: bool  # its cache slot has changed since the last message
    pages: Pages
    tokens: list[int]  # new ones
    num_inflight_tokens: int


class RemoteGrammar:
    """Stands for a grammar in a broadcast request: rank 0 has the grammar and broadcasts its masks."""

    def matcher(self) -> Matcher:
        raise NotImplementedError("a follower makes a RemoteMatcher")


class StepMessage(NamedTuple):
    batch: StepBatch  # of `SeqUpdate`s
    # sequences that are new to the other ranks, with their images' soft tokens and a `RemoteGrammar` for a grammar
    joined: list[Request]
    left: list[str]


# ---- rank 0
class Leader:
    """Wraps an engine's executors, so that the other ranks follow them."""

    def __init__(self, engine: Engine, group: ProcessGroup):
        self.engine = engine
        self.group = group
        self._joined: list[Sequence] = []  # those that the other ranks know
        self._sent: StepBatch | None = None  # the batch of the last message
        group.executors = list(engine.executors)
        engine.runner.divided = True
        engine.executors = [BroadcastExecutor(executor, index, self) for index, executor in enumerate(engine.executors)]
        engine.runner.scoring = self._scoring

    def send(self, command: str, **arguments: object) -> None:
        """command: a method of `Follower`; its arguments by name."""
        self.group.send((command, arguments))

    def message(self, batch: StepBatch) -> StepMessage | None:
        """None: the same batch as in the last message."""
        if batch is self._sent:
            return None
        self._sent = batch
        left = [seq.id for seq in self._joined if self.engine.running(seq.id) is not seq]
        self._joined = [seq for seq in self._joined if self.engine.running(seq.id) is seq]
        joined: list[Request] = []
        prompts = [chunk._replace(seq=self._update(chunk.seq, joined)) for chunk in batch.prompts]  # type: ignore[arg-type]
        decode = [row._replace(seq=self._update(row.seq, joined)) for row in batch.decode]  # type: ignore[arg-type]
        return StepMessage(StepBatch(prompts, decode, batch.trust), joined, left)

    def _update(self, seq: Sequence, joined: list[Request]) -> SeqUpdate:
        remote = seq.remote
        if remote is None:
            remote = RemoteCopy()
            seq.remote = remote
            self._joined.append(seq)
            params = seq.request.params
            spans = seq.request.spans
            spans = tuple(replace(span, soft_tokens=span.soft_tokens.cpu()) for span in spans)
            if params.grammar is not None:
                params = replace(params, grammar=RemoteGrammar())
            joined.append(Request(seq.id, list(seq.request.prompt), params, spans=spans))
            if seq.answer.matcher is not None:
                seq.answer.matcher = BroadcastMatcher(seq.answer.matcher, self.group)
        fresh = remote.cache is not seq.active_cache
        if fresh:
            remote.cache = seq.active_cache
            remote.num_pages = {}
        pages = new_pages(seq.active_cache, remote.num_pages)
        tokens = seq.tokens[remote.num_tokens :]
        remote.num_tokens = len(seq.tokens)
        return SeqUpdate(seq.id, fresh, pages, tokens=tokens, num_inflight_tokens=seq.num_inflight_tokens)

    @contextmanager
    def _scoring(self, cache: SeqCache, tokens: list[int], begin: int, logits: bool) -> Iterator[None]:
        with self.together():
            pages = new_pages(cache, {})
            self.send("score", slot=cache.slot, pages=pages, tokens=tokens, begin=begin, logits=logits)
            yield

    @contextmanager
    def together(self) -> Iterator[None]:
        """Spans a command and its collectives: an interrupt waits for the end, and a failure ends the run."""
        waiting: list[int] = []
        main = threading.current_thread() is threading.main_thread()
        before = signal.signal(signal.SIGINT, lambda number, _: waiting.append(number)) if main else None
        try:
            yield
        except Exception as error:
            self.group.watch.lost(f"{type(error).__name__}: {error}")
            lost = self.group.watch.gone or "the processes of --tensor-parallel lost one another"
            raise OutriderError(lost) from error
        finally:
            if main:
                signal.signal(signal.SIGINT, before)
        if waiting:
            raise KeyboardInterrupt


def new_pages(cache: SeqCache, num_sent: dict[GroupName, int]) -> Pages:
    """The pages of a sequence that were not broadcast yet; `num_sent` then counts them as broadcast."""
    new = {}
    for name, pages in cache.pages.items():
        first = num_sent.get(name, 0)
        if len(pages.pages) > first:
            new[name] = (first, pages.pages[first:])
            num_sent[name] = len(pages.pages)
    return new


class BroadcastExecutor:
    """An executor of rank 0 that broadcasts its steps to the other ranks."""

    def __init__(self, inner: Executor, index: int, leader: Leader):
        self.inner = inner
        self.index = index
        self.leader = leader
        self.name = inner.name
        self.async_results = inner.async_results
        self.trees = inner.trees
        self.probes_whole_cycles = inner.probes_whole_cycles

    @property
    def num_captures(self) -> int:
        return self.inner.num_captures

    def supports(self, features: StepFeatures) -> bool:
        return self.inner.supports(features)

    def plan(self, batch: StepBatch) -> Plan | None:
        if not self.async_results or not batch.decode:
            return self.inner.plan(batch)
        with self.leader.together():  # capturing runs the step
            self.leader.send("plan", executor=self.index, step=self.leader.message(batch))
            return self.inner.plan(batch)

    def launch(self, plan: Plan) -> PendingStep:
        with self.leader.together():
            self.leader.send("launch", executor=self.index, step=self.leader.message(plan.batch))
            return self.inner.launch(plan)

    def read(self, pending: PendingStep) -> DecodeOutputs | None:
        return self.inner.read(pending)

    def probe(self, part: CostPart, batch: int, k: int, context: int) -> None:
        with self.leader.together():
            self.leader.send("probe", executor=self.index, part=part, batch=batch, k=k, context=context)
            self.inner.probe(part, batch, k, context=context)

    def prepare(self, served: bool = True, progress: Progressed = lambda what, done, total: None) -> str:
        with self.leader.together():
            self.leader.send("prepare", executor=self.index, served=served)
            return self.inner.prepare(served, progress)

    def can_probe(self, part: CostPart) -> bool:
        return self.inner.can_probe(part)

    def close(self) -> None:
        self.inner.close()


class BroadcastMatcher:
    """A grammar's matcher at rank 0: broadcasts its masks to the other ranks, which ask at the same point of a step."""

    def __init__(self, matcher: Matcher, group: ProcessGroup):
        self.matcher = matcher
        self.group = group
        self.advance = matcher.advance

    @property
    def failed(self) -> str | None:
        return self.matcher.failed

    def bits(self, drafts: abc.Sequence[int]) -> ndarray:
        masks = self.matcher.bits(drafts)
        self.group.send(masks)
        return masks


# ---- the other ranks
class RemoteMatcher:
    """A grammar's matcher at the other ranks: its masks come from rank 0."""

    failed: str | None = None

    def __init__(self, group: ProcessGroup):
        self.group = group

    def bits(self, drafts: abc.Sequence[int]) -> ndarray:
        return self.group.receive()  # type: ignore[return-value]

    def advance(self, tokens: abc.Sequence[int]) -> None:
        pass


class Follower:
    """Each public method is a command of rank 0."""

    def __init__(self, engine: Engine, group: ProcessGroup):
        self.engine = engine
        self.group = group
        self._seqs: dict[str, Sequence] = {}
        self._batch = StepBatch()  # the last one that rank 0 has sent
        self._plan: Plan | None = None  # the last one that rank 0 asked for with "plan"

    def prepare(self, executor: int, served: bool) -> None:
        self.engine.executors[executor].prepare(served)

    def probe(self, executor: int, part: CostPart, batch: int, k: int, context: int) -> None:
        self.engine.executors[executor].probe(part, batch, k, context=context)

    def score(self, slot: int, pages: Pages, tokens: list[int], begin: int, logits: bool) -> None:
        self.engine.runner.close_scratch()
        self.engine.store.place(slot, True, pages)
        self.engine.runner.score(SeqCache(slot), tokens, begin, logits=logits)

    def plan(self, executor: int, step: StepMessage | None) -> None:
        self._receive(step)
        self._plan = self.engine.executors[executor].plan(self._batch)

    def launch(self, executor: int, step: StepMessage | None) -> None:
        self._receive(step)
        plan = self._plan
        chosen = self.engine.executors[executor]
        if plan is None or plan.batch is not self._batch:
            plan = chosen.plan(self._batch)
        assert plan is not None, "rank 0 could plan this step"
        chosen.launch(plan)

    def _receive(self, step: StepMessage | None) -> None:
        self.engine.runner.close_scratch()  # a probe has ended
        if step is None:
            return
        for name in step.left:
            seq = self._seqs.pop(name, None)
            if seq is not None and self.engine.drafter is not None:
                self.engine.drafter.release(seq.draft_track)
        for request in step.joined:
            seq = Sequence(request, 0.0, [])
            matcher = RemoteMatcher(self.group) if request.params.grammar is not None else None
            seq.answer = OutputProcessor(request.params, (), None, matcher=matcher)
            if self.engine.drafter is not None:
                seq.draft_track = self.engine.drafter.new_track(request.id)
            self._seqs[request.id] = seq
        prompts = step.batch.prompts
        decode = step.batch.decode
        prompts[:] = [chunk._replace(seq=self._seq(chunk.slot, chunk.seq)) for chunk in prompts]  # type: ignore[arg-type]
        decode[:] = [row._replace(seq=self._seq(row.slot, row.seq)) for row in decode]  # type: ignore[arg-type]
        self._batch = step.batch

    def _seq(self, slot: int, update: SeqUpdate) -> Sequence:
        seq = self._seqs[update.id]
        seq.tokens += update.tokens
        seq.num_inflight_tokens = update.num_inflight_tokens
        if update.fresh:
            seq.cache = SeqCache(slot)
        self.engine.store.place(slot, update.fresh, update.pages)
        return seq


def follow(engine: Engine, group: ProcessGroup) -> None:
    """Executes rank 0's commands until rank 0 ends the run."""
    follower = Follower(engine, group)
    engine.runner.divided = True
    group.executors = list(engine.executors)
    with torch.inference_mode():
        while True:
            message = group.receive()
            if message is None:
                return
            assert isinstance(message, tuple)
            command, arguments = message
            getattr(follower, command)(**arguments)
