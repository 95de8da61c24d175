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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

import torch

from ..cache.store import SeqCache
from ..engine.engine import Engine
from ..engine.graphs import GraphExecutor
from ..engine.output_processor import OutputProcessor
from ..engine.step import Emitted, Executor, PendingStep, Plan, Request, ScheduledSeq, Seq, StepBatch
from ..spec.plan import CostPart
from ..types import GroupName, ImageSpan, Matcher, OutriderError, SamplingParams
from .process_group import ProcessGroup

if TYPE_CHECKING:
    from numpy import ndarray


# ---- messages
class Joined(NamedTuple):
    """A sequence that is new to the other ranks."""

    prompt: list[int]
    params: SamplingParams  # without the grammar
    grammar: bool
    images: tuple[ImageSpan, ...]  # with the soft tokens that rank 0 computed


class SeqMessage(NamedTuple):
    """A `ScheduledSeq` without its sequence, which every process has, and the sequence's new data."""

    item: ScheduledSeq
    id: str
    fresh: bool  # its cache slot has changed since the last message
    pages: Mapping[GroupName, tuple[int, list[int]]]  # new pages: index of the first, and physical pages
    tokens: list[int]  # new ones
    num_inflight_tokens: int


@dataclass(frozen=True)
class StepMessage:
    serial: int
    prompts: list[SeqMessage]
    decode: list[SeqMessage]
    trust: Mapping[str, Sequence[float]]
    joined: dict[str, Joined]
    left: list[str]


@dataclass(frozen=True)
class Order:
    """A command: "plan" or "launch" a step with an executor, "probe" or "prepare" one, or "score" a text."""

    what: str
    executor: int = 0
    step: StepMessage | None = None
    probe: tuple[CostPart, int, int, int] | None = None
    score: tuple[int, dict[GroupName, tuple[int, list[int]]], list[int], int, bool] | None = None


# ---- rank 0
@dataclass
class Known:
    """The data of a sequence that the other ranks already have."""

    seq: Seq
    cache: SeqCache | None = None
    tokens: int = 0
    pages: dict[GroupName, int] = field(default_factory=dict)


class Leader:
    """Wraps an engine's executors, so that the other ranks follow them."""

    def __init__(self, engine: Engine, team: ProcessGroup):
        self.engine, self.team = engine, team
        self._known: dict[str, Known] = {}
        self._serial = 0
        self._last: StepBatch | None = None
        team.captured += captured(engine)
        engine.runner.divided = True
        engine.executors = [BroadcastExecutor(executor, index, self) for index, executor in enumerate(engine.executors)]
        engine.runner.scored = self._score

    def tell(self, what: str, executor: int, batch: StepBatch) -> None:
        if batch is not self._last:
            self._serial, self._last = self._serial + 1, batch
        self.team.send(Order(what, executor, self.describe(batch)))

    def describe(self, batch: StepBatch) -> StepMessage:
        left = [name for name, known in self._known.items() if self.engine.running(name) is not known.seq]
        for name in left:
            del self._known[name]
        joined: dict[str, Joined] = {}
        prompts, decode = (
            [self._lane(item, joined) for item in scheduled] for scheduled in (batch.prompts, batch.decode)
        )
        return StepMessage(self._serial, prompts, decode, batch.trust, joined, left)

    def _lane(self, item: ScheduledSeq, joined: dict[str, Joined]) -> SeqMessage:
        seq = item.seq
        known = self._known.get(seq.id)
        if known is None:
            known = self._known[seq.id] = Known(seq)
            params = seq.request.params
            images = tuple(replace(span, soft_tokens=span.soft_tokens.cpu()) for span in seq.request.images)
            own = replace(params, grammar=None)
            joined[seq.id] = Joined(list(seq.request.prompt), own, params.grammar is not None, images)
            if seq.answer.matcher is not None:
                seq.answer.matcher = BroadcastMatcher(seq.answer.matcher, self.team)
        fresh = known.cache is not seq.held
        if fresh:
            known.cache, known.pages = seq.held, {}
        pages = new_pages(seq.held, known.pages)
        tokens, known.tokens = seq.tokens[known.tokens :], len(seq.tokens)
        bare = replace(item, seq=None)  # type: ignore[arg-type]
        return SeqMessage(bare, seq.id, fresh, pages, tokens, seq.num_inflight_tokens)

    def _score(self, cache: SeqCache, tokens: list[int], begin: int, logits: bool) -> None:
        self.team.send(Order("score", score=(cache.slot, new_pages(cache, {}), tokens, begin, logits)))

    @contextmanager
    def together(self) -> Iterator[None]:
        """Spans a command and its collectives: an interrupt waits for the end, and a failure ends the run."""
        waiting: list[int] = []
        main = threading.current_thread() is threading.main_thread()
        before = signal.signal(signal.SIGINT, lambda number, _: waiting.append(number)) if main else None
        try:
            yield
        except Exception as error:
            self.team.watch.lost(f"{type(error).__name__}: {error}")
            raise OutriderError(
                self.team.watch.gone or "the processes of --tensor-parallel lost one another"
            ) from error
        finally:
            if main:
                signal.signal(signal.SIGINT, before)
        if waiting:
            raise KeyboardInterrupt


def captured(engine: Engine) -> list[GraphExecutor]:
    return [executor for executor in engine.executors if isinstance(executor, GraphExecutor)]


def new_pages(cache: SeqCache, told: dict[GroupName, int]) -> dict[GroupName, tuple[int, list[int]]]:
    """The pages of a sequence that were not broadcast yet; `told` then counts them as broadcast."""
    new = {}
    for name, pages in cache.pages.items():
        first = told.get(name, 0)
        if len(pages.pages) > first:
            new[name] = (first, pages.pages[first:])
            told[name] = len(pages.pages)
    return new


class BroadcastExecutor:
    """An executor of rank 0 that broadcasts its steps to the other ranks."""

    def __init__(self, inner: Executor, index: int, leader: Leader):
        self.inner, self.index, self.leader = inner, index, leader
        self.name, self.async_results, self.trees = inner.name, inner.async_results, inner.trees

    def plan(self, batch: StepBatch) -> Plan | None:
        if not self.async_results or not batch.decode:
            return self.inner.plan(batch)
        with self.leader.together():  # capturing runs the step
            self.leader.tell("plan", self.index, batch)
            return self.inner.plan(batch)

    def launch(self, plan: Plan) -> PendingStep:
        with self.leader.together():
            self.leader.tell("launch", self.index, plan.batch)
            return self.inner.launch(plan)

    def read(self, pending: PendingStep) -> list[Emitted]:
        return self.inner.read(pending)

    def probe(self, part: CostPart, batch: int, k: int, context: int) -> None:
        with self.leader.together():
            self.leader.team.send(Order("probe", self.index, probe=(part, batch, k, context)))
            self.inner.probe(part, batch, k, context)

    def prepare(self) -> str:
        with self.leader.together():
            self.leader.team.send(Order("prepare", self.index))
            return self.inner.prepare()

    def can_probe(self, part: CostPart) -> bool:
        return self.inner.can_probe(part)


class BroadcastMatcher:
    """A grammar's matcher at rank 0: broadcasts its masks to the other ranks, which ask at the same point of a step."""

    def __init__(self, matcher: Matcher, team: ProcessGroup):
        self.matcher, self.team = matcher, team

    @property
    def failed(self) -> str | None:
        return self.matcher.failed

    @failed.setter
    def failed(self, why: str | None) -> None:
        self.matcher.failed = why

    def bits(self, drafts: Sequence[int]) -> ndarray:
        found = self.matcher.bits(drafts)
        self.team.send(found)
        return found

    def advance(self, tokens: Sequence[int]) -> None:
        self.matcher.advance(tokens)


# ---- the other ranks
class RemoteMatcher:
    """A grammar's matcher at the other ranks: its masks come from rank 0."""

    failed: str | None = None

    def __init__(self, team: ProcessGroup):
        self.team = team

    def matcher(self) -> Matcher:
        return self

    def bits(self, drafts: Sequence[int]) -> ndarray:
        return self.team.receive()  # type: ignore[return-value]

    def advance(self, tokens: Sequence[int]) -> None:
        pass


class Follower:
    def __init__(self, engine: Engine, team: ProcessGroup):
        self.engine, self.team = engine, team
        self._seqs: dict[str, Seq] = {}
        self._last: tuple[int, StepBatch] = (0, StepBatch())
        self._plan: Plan | None = None  # the last one that rank 0 asked for with "plan"

    def execute(self, order: Order) -> None:
        executor, runner = self.engine.executors[order.executor], self.engine.runner
        if order.probe is not None:
            executor.probe(*order.probe)
            return
        if order.what == "prepare":
            executor.prepare()
            return
        runner.close_scratch()  # the probe has ended
        if order.score is not None:
            slot, pages, tokens, begin, logits = order.score
            self.engine.store.place(slot, True, pages)
            runner.score(SeqCache(slot), tokens, begin, logits)
            return
        assert order.step is not None
        batch = self._batch(order.step)
        if order.what == "plan":
            self._plan = executor.plan(batch)
            return
        plan = self._plan if self._plan is not None and self._plan.batch is batch else executor.plan(batch)
        assert plan is not None, "rank 0 could plan this step"
        executor.launch(plan)

    def _batch(self, told: StepMessage) -> StepBatch:
        for name in told.left:
            self._seqs.pop(name, None)
            if self.engine.drafter is not None:
                self.engine.drafter.forget(name)
        for name, who in told.joined.items():
            params = replace(who.params, grammar=RemoteMatcher(self.team)) if who.grammar else who.params
            seq = self._seqs[name] = Seq(Request(name, who.prompt, params, images=who.images), 0.0, [])
            seq.answer = OutputProcessor(
                params, (), None, params.grammar.matcher() if params.grammar is not None else None
            )
        scheduled = [[self._lane(item) for item in scheduled] for scheduled in (told.prompts, told.decode)]
        if told.serial != self._last[0]:
            self._last = (told.serial, StepBatch(scheduled[0], scheduled[1], told.trust))
        return self._last[1]

    def _lane(self, told: SeqMessage) -> ScheduledSeq:
        seq = self._seqs[told.id]
        seq.tokens += told.tokens
        seq.num_inflight_tokens = told.num_inflight_tokens
        if told.fresh:
            seq.cache = SeqCache(told.item.slot)
        self.engine.store.place(told.item.slot, told.fresh, told.pages)
        return replace(told.item, seq=seq)


def follow(engine: Engine, team: ProcessGroup) -> None:
    """Executes rank 0's commands until rank 0 ends the run."""
    follower = Follower(engine, team)
    engine.runner.divided = True
    team.captured += captured(engine)
    with torch.inference_mode():
        while True:
            order = team.receive()
            if order is None:
                return
            assert isinstance(order, Order)
            follower.execute(order)
