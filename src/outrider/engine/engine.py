"""The engine: schedule -> launch -> read -> commit, one step at a time, in one thread.

`submit` takes a request, `step` runs one step and returns what happened, `abort` drops a request. Token ids inside;
text only in the events' deltas. Whatever the drafter does, the target's choices are what is emitted.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from ..cache.store import CacheSpec, KVStore
from ..config import EngineConfig, SpecConfig
from ..ops.lowrank import Adapter
from ..spec.controller import Controller
from ..spec.drafter import Drafter
from ..spec.ngram import NgramIndex
from ..spec.plan import VerifiedTree, branching
from ..spec.protocols import Target
from ..types import MAX_DRAFT, OutriderError, RequestStats
from .draft_policy import DraftPolicy
from .eager import EagerExecutor
from .graphs import GraphExecutor
from .host import HostExecutor
from .memory import (
    KVBudget,
    free_bytes,
    gpu_budget,
    max_batched_prefill,
    plan_kv_memory,
    prefill_idle,
    prefill_with_decodes,
    spare_bytes,
    swap_bytes,
)
from .metrics import Metrics
from .model_runner import ModelRunner
from .output_processor import OutputProcessor
from .prefill_budget import FEW, PrefillBudget
from .prefill_graphs import LIKELY, ROWS, max_prefill_rows
from .scheduler import Scheduler
from .step import Emitted, Executor, PendingStep, Progress, Request, ScheduledSeq, Seq, pick
from .text import Detokenizer, Tokenizer

log = logging.getLogger("outrider")
USUAL = 4  # the K that a server is ready for where the controller chooses


@dataclass(slots=True)
class Event:
    """What one step did for one request. `kinds` says where each token came from."""

    id: str
    tokens: list[int]
    kinds: list[str]  # accepted | corrected | bonus | plain
    texts: list[str]  # what each token lets us show
    logprobs: list[dict[int, float]] | None = None  # per token: {id: logprob}, the chosen one first
    finish_reason: str | None = None  # stop | length | abort | error
    stats: RequestStats | None = None  # with the last event
    error: str | None = None
    tree: VerifiedTree | None = None  # the draft, where it branched
    stopped_by: str | None = None  # the stop string that ended it
    drafts: list[int] | None = None  # the tokens drafted, where the executor knows them

    @property
    def text(self) -> str:
        return "".join(self.texts)


class Engine:
    def __init__(
        self,
        model: Target,
        tokenizer: Tokenizer | None,
        config: EngineConfig,
        spec: SpecConfig,
        drafter: Drafter | None,
        controller: Controller,
        kv_dtype: torch.dtype | None = None,
        agree: Callable[[KVBudget], KVBudget] = lambda budget: budget,
        image_rows: int = 0,
    ):
        """agree: several processes that share a model must have the same room. image_rows: most rows of an image."""
        self.model, self.tokenizer, self.config, self.spec = model, tokenizer, config, spec
        self.drafter, self.clock, self.device = drafter, time.perf_counter, model.device
        self.can = model.ops.capabilities
        self.max_batch = config.max_batch or self.can.sequences
        self.chunk = config.prefill_chunk or self.can.prompt_chunk
        dtype = kv_dtype or model.dtype
        budget, passes = None, max_prefill_rows(model.config, self.can)
        own = drafter.kv_specs if drafter is not None else ()
        if self.device.type == "cuda":
            rows = min(self.can.graph_rows, self.max_batch * (MAX_DRAFT + 1))
            budget = gpu_budget(config, model.config, self.device, rows, passes)
        found = plan_kv_memory(config, model.config, dtype, free_bytes(self.device), self.max_batch, budget, own)
        self.kv_budget = agree(replace(found, pass_rows=passes))
        ahead = max(self.chunk, MAX_DRAFT + 1, image_rows)
        self.image_rows = image_rows
        layout = CacheSpec(
            self.max_batch, self.kv_budget.max_context, config.page_size, ahead, self.kv_budget.tokens,
            self.kv_budget.window_tokens, swap_bytes(config)
        )  # fmt: skip
        self.store = KVStore(model.config, layout, dtype, self.device, own)
        self.max_context = min(
            self.kv_budget.max_context, self.kv_budget.tokens - config.page_size
        )  # one sequence must be able to finish alone
        exact = self.can.prompts_independent
        self.granularity = config.page_size if exact else self.chunk  # prefixes are shared in multiples of it
        self.share_answers = exact
        pack = max_batched_prefill(model.config, self.can.packed_rows)
        self.scheduler = Scheduler(
            self.store, self.max_batch, self.chunk, self.granularity, self.can.replay_rows, config.prefix_cache,
            self.max_context, pack,
            prefill_with_decodes(
                model.config, self.can.prefill_with_decodes, self.can.prefill_flops_with_decodes, self.chunk
            ),
            prefill_idle(model.config, pack, self.can.packed_rows, spare_bytes(config, self.device)),
        )  # fmt: skip
        beside = self.scheduler.prefill_with_decodes
        self.prefill_budget = PrefillBudget(
            beside, LIKELY if beside > FEW else range(beside, self.chunk + 1, max(1, beside))
        )
        self.metrics = Metrics()
        self.eos = frozenset(tokenizer.eos_ids if tokenizer is not None else model.config.eos_ids)
        width = model.config.hidden * (1 + len(drafter.taps if drafter is not None else ()))
        features = torch.zeros((self.max_batch + 1, width), dtype=model.dtype, device=self.device)
        self.runner = ModelRunner(model, self.store, drafter, features, tuple(sorted(self.eos)), self.clock)
        self.graphs = self.can.graphs if config.graphs is None else config.graphs
        if drafter is not None and drafter.kv_specs:  # it reads every pass, which captured steps do not show it
            self.graphs = False
        self.executors = self._executors()
        trees = self.executors[0].trees
        self.policy = DraftPolicy(controller, drafter, spec, self.can, self.max_context, self.graphs, trees)
        self._pending: PendingStep | None = None  # the step that was launched and not yet read
        self._last_read_at = 0.0  # when the last step was read
        self._prompted = 0.0  # seconds spent on prompts before the last step
        self._timed: list[Seq] = []  # the batch whose last step was timed
        self.host_times = dict.fromkeys(
            ("plan", "launch", "wait", "commit"), 0.0
        )  # seconds of the host by part; only `wait` is idle
        self.meanwhile: Callable[[], None] = lambda: (
            None
        )  # called when the host has nothing to do until the device is done with a step
        self._warned = 0  # how many of the controller's warnings were passed on
        self._seqs: dict[str, Seq] = {}
        self._events: list[Event] = []
        if 0 < self.can.independent_rows < self.max_batch:
            log.warning(
                "more than %d sequences at once: answers may then depend on their company", self.can.independent_rows
            )

    @property
    def controller(self) -> Controller:
        return self.policy.controller

    def _executors(self) -> list[Executor]:
        """Fastest first; the last one takes everything."""
        runner, made = self.runner, list[Executor]()
        drafter = self.drafter
        if drafter is not None and drafter.kv_specs:
            log.info("drafter %s: steps run operation by operation (eager)", drafter.name)
            return [EagerExecutor(runner, self.spec.verify, self.metrics)]
        if self.spec.verify == "coupled":
            if self.graphs and (drafter is None or drafter.in_graph):
                widths = (0, USUAL if self.spec.draft_tokens is None else self.spec.draft_tokens)
                made.append(GraphExecutor(runner, self.can, self.kv_budget.pass_rows, widths))
            net = drafter.net if drafter is not None else None
            cycle = self.model.ops.host_cycle(self.model, net, self.store.pages(), runner.features, runner.taps)
            if cycle is not None and not made:
                made.append(HostExecutor(runner, cycle, self.metrics))
        return [*made, EagerExecutor(runner, self.spec.verify, self.metrics)]

    def serve(self) -> str:
        """From now on anybody may come at any moment, and one sequence's step is everybody's: memory is taken before it
        is needed, and prompts run in pieces that nobody waits long for; on a GPU the likely steps and passes are
        captured before the first one comes. Returns a line about what was made."""
        self.store.take_ahead()
        made = self.executors[0].prepare() if self.device.type == "cuda" else ""
        if self.can.prefill_idle and self.can.prompts_independent:
            self.scheduler.chunk = min(self.scheduler.chunk, self.can.prefill_idle)
        return made

    # ---- requests -----------------------------------------------------------------------------------------------
    def validate(self, request: Request) -> None:
        """Raises OutriderError when this request can never run."""
        vocab, prompt = self.model.config.vocab_size, request.prompt
        if not prompt:
            raise OutriderError("the prompt is empty: give at least one token")
        wrong = min(prompt) if min(prompt) < 0 else max(prompt)
        if not 0 <= wrong < vocab:
            raise OutriderError(f"prompt token id {wrong} is outside the vocabulary (0..{vocab - 1})")
        if len(prompt) >= self.max_context:
            most = self.model.config.max_context
            mend = (
                "shorten it"
                if self.max_context >= most - 1
                else f"shorten it or raise --max-context (the model knows up to {most})"
            )
            raise OutriderError(f"prompt has {len(prompt)} tokens; the context holds {self.max_context}: {mend}")
        for span in request.images:
            if not 0 < span.end - span.start <= self.image_rows or span.end >= len(prompt):
                raise OutriderError(f"an image of {span.end - span.start} tokens; this engine takes {self.image_rows}")
        SpecConfig(request.draft_tokens, tree=request.tree)  # checks them
        if request.id in self._seqs:
            raise OutriderError(f"request id {request.id!r} is already running")
        if self.tokenizer is None and request.params.stop:
            raise OutriderError("stop strings need a tokenizer; use stop_token_ids")
        request.params.validate(vocab)

    def submit(self, request: Request) -> None:
        self.validate(request)
        params = request.params
        seq = Seq(request, self.clock(), list(request.prompt), adapter=self._adapter(request.adapter))
        seq.drafts_from_hidden = self.policy.drafts_from_hidden(seq)
        detok = Detokenizer(self.tokenizer, request.prompt, params.keep_special) if self.tokenizer is not None else None
        seq.answer = OutputProcessor(
            params, self.eos, detok, params.grammar.matcher() if params.grammar is not None else None
        )
        if "ngram" in self.controller.drafters and self.policy.copies(request):
            seq.ngram = NgramIndex([*request.hint, *request.prompt])
        seq.stats.prompt_tokens = seq.prompt_len
        self._seqs[request.id] = seq
        self.scheduler.add(seq)
        self.metrics.requests += 1
        self.metrics.prompt_tokens += seq.prompt_len

    def _adapter(self, name: str | None) -> Adapter | None:
        if name is None:
            return None
        if self.runner.adapters is None:
            raise OutriderError(f"there is no adapter {name[:60]!r}: this engine was loaded without adapters")
        return self.runner.adapters.get(name)

    def abort(self, request_id: str) -> None:
        seq = self._seqs.get(request_id)
        if seq is not None:
            self._events.append(self._finish(seq, Event(request_id, [], [], []), "abort"))

    def pause(self, request_id: str, on: bool) -> None:
        """A paused request keeps its place and what it has computed, and takes part in no step."""
        seq = self._seqs.get(request_id)
        if seq is not None:
            seq.paused = on

    def running(self, request_id: str) -> Seq | None:
        """The request on its way, waiting or decoding; None: it has ended."""
        return self._seqs.get(request_id)

    def progress(self) -> dict[str, Progress]:
        """How far each request is."""
        return {
            id: Progress(s.request, min(s.computed, s.prompt_len), len(s.tokens) - s.prompt_len)
            for id, s in self._seqs.items()
        }

    @property
    def busy(self) -> bool:
        if self._events or not self._seqs:
            return bool(self._events)
        room = (
            len(self.scheduler.running) < self.max_batch and self.store.free_slots > 0
        )  # else those who wait, wait for a command
        return self._pending is not None or any(
            not seq.paused and (room or seq.cache is not None) for seq in self._seqs.values()
        )

    # ---- one step -----------------------------------------------------------------------------------------------
    def step(self) -> list[Event]:
        """Schedule, launch, read, commit. Where steps are read one behind, this one runs while the one before is
        committed."""
        began, clock, spent = self.clock(), self.clock, self.host_times
        if self.device.index is not None:
            torch.cuda.set_device(self.device)  # a thread's own setting, and any thread may drive the engine
        if self._pending is not None and any(seq.answer.matcher is not None for seq in self.scheduler.running):
            self._complete()  # a grammar's next masks hang on what was emitted
        if self.store.disk is not None:
            self.store.disk.drain()
        batch = self.scheduler.plan(self.policy.plan)
        if (
            self.drafter is not None
            and batch.decode
            and any([item.plan.stop or item.plan.drop for item in batch.decode])
        ):
            batch.trust = self.controller.trust(self.drafter.name)
        planned, self._prompted = clock(), self.runner.prompt_seconds
        spent["plan"] += planned - began
        executor, plan = pick(self.executors, batch)
        if executor.async_results or self._pending is None:
            pending = executor.launch(plan) if batch else None
            if pending is not None and (batch.prompts or pending.inflight_tokens):
                self._launched(pending)
            spent["launch"] += clock() - planned
            if self._pending is not None:
                self.meanwhile()
                self._complete()
            self._pending = pending if batch.decode else None
            if not executor.async_results:
                self._complete()
        else:
            self._complete()  # it was planned without knowing what the step in flight brings: plan anew
        events, self._events = self._events, []
        self._measure(began)
        return events

    def _launched(self, pending: PendingStep) -> None:
        """Prompt chunks are as good as done: what comes later on the device comes after them."""
        for item in pending.batch.prompts:
            seq, end = item.seq, item.start + item.count
            seq.computed = end
            seq.has_features = end == len(seq.tokens) - 1
            self.store.commit(seq.held, end)
            if self.config.prefix_cache and (self.share_answers or end <= seq.prompt_len - 1):
                self.store.share(seq.held, seq.cache_keys, end - end % self.granularity, seq.prefix_root)
        for item, ahead in zip(pending.batch.decode, pending.inflight_tokens):
            item.seq.num_inflight_tokens += ahead

    def _complete(self) -> None:
        """Read the step in flight and commit it. Sequences that have ended or were pre-empted since get nothing."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        waited = self.clock()
        emitted, now = pending.executor.read(pending), self.clock()
        self.host_times["wait"] += now - waited
        for i, (item, brought) in enumerate(zip(pending.batch.decode, emitted)):
            if item.seq.cache is pending.holders[i]:
                if pending.inflight_tokens:
                    item.seq.num_inflight_tokens -= pending.inflight_tokens[i]
                self._commit(item, brought, now)
        self._observe(pending, now)
        self.host_times["commit"] += self.clock() - now

    def _observe(self, pending: PendingStep, now: float) -> None:
        """Tell the controller what the step took, and the pace of prompts. The controller not of a step that prompts
        ran in; and, where steps do not overlap, not of the first of a batch, which finds caches cold and buffers
        untouched."""
        scheduled = pending.batch.decode
        if not scheduled:
            return
        if pending.executor.async_results:
            seconds, known = now - max(pending.began, self._last_read_at), not pending.batch.prompts
            self._last_read_at = now
            if self.scheduler.prefill_with_decodes and pending.rows <= ROWS[-1]:
                self.prefill_budget.observe(pending.rows, seconds)
                self.scheduler.prefill_with_decodes = self.prefill_budget.rows
        else:
            before, self._timed = self._timed, [item.seq for item in scheduled]
            done, known = self.clock(), before == self._timed
            seconds = done - pending.began  # with reading and committing
            if self.scheduler.prefill_with_decodes:
                self.prefill_budget.observe(0, seconds)
                if rows := sum(item.count for item in pending.batch.prompts):
                    self.prefill_budget.observe(rows, seconds + self.runner.prompt_seconds - self._prompted)
                self.scheduler.prefill_with_decodes = self.prefill_budget.rows
        known = known and not pending.batch.adapted  # the cost table holds the base model's steps
        if known and not (
            pending.tree and len(scheduled) > 1
        ):  # trees are timed for one sequence: the table has no price for several
            drafter = next((item.plan.drafter for item in scheduled if item.plan.drafter), None)
            drafter = branching(drafter) if pending.tree and drafter is not None else drafter
            self.controller.observe_step(len(scheduled), pending.width, pending.context, seconds, drafter)

    def _measure(self, began: float) -> None:
        if len(self.controller.warnings) > self._warned:
            for warning in self.controller.warnings[self._warned :]:
                log.warning(warning)
            self._warned = len(self.controller.warnings)
        m = self.metrics
        m.steps += 1
        m.step_seconds += self.clock() - began
        m.prefill_seconds = self.runner.prompt_seconds
        m.preemptions, swap = self.scheduler.preemptions, self.store.swap
        m.swapped_out, m.swapped_in, m.swap_bytes = swap.outs, swap.ins, swap.used
        if self.store.disk is not None:
            m.prefix_pages_read, m.prefix_pages_written = self.store.disk.pages_read, self.store.disk.pages_written
        m.running, m.waiting = len(self.scheduler.running), len(self.scheduler.waiting)
        self._count_pages()

    def _count_pages(self) -> None:
        self.metrics.free_pages = {name: group.pool.free for name, group in self.store.groups.items()}
        self.metrics.kv_bytes = self.store.taken()

    # ---- commit ---------------------------------------------------------------------------------------------------
    def _commit(self, item: ScheduledSeq, brought: Emitted, now: float) -> None:
        """Take the verdict into the sequence, cut at the end of the answer, and say what happened."""
        seq, accepted = item.seq, len(brought.tokens) - 1
        tree = brought.branches
        whole = accepted == brought.drafted if tree is None else not tree.path or tree.path[-1] not in tree.parents
        kinds = ["accepted"] * accepted + [
            "plain" if not brought.drafted else ("bonus" if accepted and whole else "corrected")
        ]
        taken = seq.answer.take(brought.tokens, min(seq.remaining, self.max_context - len(seq.tokens)))
        n = len(taken.texts)
        tokens = brought.tokens[:n]
        self._count(item, accepted, n, now, brought)
        seq.tokens.extend(tokens)
        seq.computed = len(seq.tokens) - 1
        seq.has_features = True
        if seq.ngram is not None:
            seq.ngram.extend(tokens)
        logprobs = brought.logprobs[:n] if brought.logprobs is not None else None
        event = Event(
            seq.id, tokens, kinds[:n], taken.texts, logprobs, error=taken.error, tree=tree, stopped_by=taken.stopped_by
        )
        event.drafts = brought.drafts
        if taken.finish is not None:
            self._events.append(self._finish(seq, event, taken.finish))
        else:
            self.store.commit(seq.held, seq.computed)
            self._events.append(event)

    def _count(self, item: ScheduledSeq, accepted: int, emitted: int, now: float, brought: Emitted) -> None:
        seq, s, m = item.seq, item.seq.stats, self.metrics
        if seq.first_token_at is None:
            seq.first_token_at = now
            s.ttft_s = now - seq.arrived
        s.decode_s = now - seq.first_token_at
        s.new_tokens += emitted
        s.first_emitted = s.first_emitted or emitted
        m.new_tokens += emitted
        tree = brought.branches
        line, branched = (
            (brought.drafted, 0) if tree is None else (tree.deepest, accepted - tree.chain_accepted)
        )  # by position: how deep it went
        for c in (s, m):
            c.cycles += 1
            if not brought.drafted:
                continue
            c.drafted += brought.drafted
            c.accepted += accepted
            if tree is not None:
                c.trees += 1
                c.branched += branched
            drafted, right = c.drafted_by_position, c.accepted_by_position
            for j in range(line):
                drafted[j] += 1
            for j in range(accepted):
                right[j] += 1
        if seq.adapter is not None and brought.drafted:
            for counts, count in ((m.drafted_by_adapter, brought.drafted), (m.accepted_by_adapter, accepted)):
                counts[seq.adapter.name] = counts.get(seq.adapter.name, 0) + count
        self.controller.observe(
            seq.id, item.plan.drafter, brought.drafted, accepted, brought.confidence, brought.branches
        )

    def _finish(self, seq: Seq, event: Event, reason: str) -> Event:
        event.finish_reason, event.stats = reason, seq.stats
        if seq.cache is not None and self.config.prefix_cache and self.share_answers:
            end = seq.computed - seq.computed % self.config.page_size
            self.store.share(seq.cache, seq.cache_keys, end, seq.prefix_root)
        self.scheduler.remove(seq)
        if self.drafter is not None:
            self.drafter.forget(seq.id)
        self.controller.finish(seq.id)
        del self._seqs[seq.id]
        self.metrics.cached_tokens += seq.stats.cached_tokens
        self.metrics.finished[reason] = self.metrics.finished.get(reason, 0) + 1
        return event

    def tidy(self, unused_s: float) -> int:
        """Between two steps: memory of K/V that nobody has used for so long goes back (`KVStore.tidy`). Returns the
        bytes."""
        if self.store.disk is not None:
            self.store.disk.drain()
        given = self.store.tidy(unused_s)
        self._count_pages()
        return given

    def check(self) -> None:
        """Audit: no page leaks, every running sequence has its slot."""
        self.store.check()
        for seq in self.scheduler.running:
            assert seq.cache is not None and seq.swapped_kv is None, f"{seq.id} runs without a slot"
        kept = sum(len(seq.swapped_kv.blocks) for seq in self.scheduler.waiting if seq.swapped_kv is not None)
        assert kept * self.store.swap.block == self.store.swap.used, "blocks of host memory leak"
