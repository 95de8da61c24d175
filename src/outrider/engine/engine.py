"""The engine: schedule -> launch -> read -> commit, one step at a time, in one thread.

`submit` takes a request, `step` runs one step and returns what happened, `abort` drops a request. Token ids inside;
text only in the events' deltas. Whatever the drafter does, the target's choices are what is emitted.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..cache.store import CacheSpec, KVStore
from ..config import EngineConfig, SpecConfig
from ..ops.lowrank import Adapter
from ..spec.controller import Controller
from ..spec.drafter import Drafter
from ..spec.ngram import NgramIndex
from ..spec.plan import VerifiedTree
from ..spec.protocols import Target
from ..types import MAX_DRAFT, OutriderError, RequestStats
from .draft_policy import DraftPolicy
from .eager import EagerExecutor
from .graphs import GraphExecutor
from .host import HostExecutor
from .memory import KVBudget, spare_bytes, swap_bytes
from .metrics import Metrics, count_cycle
from .model_runner import ModelRunner
from .output_processor import OutputProcessor
from .prefill_budget import PrefillBudget
from .scheduler import Scheduler
from .step import Emitted, Executor, PendingStep, Progress, Request, ScheduledSeq, Seq, pick
from .step_timer import StepTimer
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
        own = drafter.kv_specs if drafter is not None else ()
        self.kv_budget = agree(KVBudget.of(config, model.config, self.can, dtype, self.device, own))
        # one sequence must be able to finish alone
        self.max_context = min(self.kv_budget.max_context, self.kv_budget.tokens - config.page_size)
        self.image_rows, ahead = image_rows, max(self.chunk, MAX_DRAFT + 1, image_rows)
        layout = CacheSpec(
            self.max_batch, self.kv_budget.max_context, config.page_size, ahead, self.kv_budget.tokens,
            self.kv_budget.window_tokens, swap_bytes(config)
        )  # fmt: skip
        self.store = KVStore(model.config, layout, dtype, self.device, own)
        self.share_answers = self.can.prompts_independent
        # prefixes are shared in multiples of it
        self.granularity = config.page_size if self.can.prompts_independent else self.chunk
        self.prefill = PrefillBudget.of(model.config, self.can, self.chunk, spare_bytes(config, self.device))
        self.scheduler = Scheduler(
            self.store, self.max_batch, self.prefill, self.granularity, self.can.replay_rows, config.prefix_cache,
            self.max_context,
        )  # fmt: skip
        self.metrics = Metrics()
        self.eos = frozenset(tokenizer.eos_ids if tokenizer is not None else model.config.eos_ids)
        width = model.config.hidden * (1 + len(drafter.taps if drafter is not None else ()))
        features = torch.zeros((self.max_batch + 1, width), dtype=model.dtype, device=self.device)
        self.runner = ModelRunner(model, self.store, drafter, features, tuple(sorted(self.eos)), self.clock)
        self.graphs = self.can.graphs if config.graphs is None else config.graphs
        self.executors = self._executors()
        trees = self.executors[0].trees
        self.policy = DraftPolicy(controller, drafter, spec, self.can, self.max_context, self.graphs, trees)
        self.timer = StepTimer(self.runner, self.prefill, self.policy)
        self._pending: PendingStep | None = None  # the step that was launched and not yet read
        # seconds of the host by part; only `wait` is idle
        self.host_times = dict.fromkeys(("plan", "launch", "wait", "commit"), 0.0)
        # called when the host has nothing to do until the device is done with a step
        self.meanwhile: Callable[[], None] = lambda: None
        self._warned = 0  # how many of the controller's warnings were passed on
        self._seqs: dict[str, Seq] = {}
        self._events: list[Event] = []
        if 0 < (rows := self.can.independent_rows) < self.max_batch:
            log.warning("more than %d sequences at once: answers may then depend on their company", rows)

    @property
    def controller(self) -> Controller:
        return self.policy.controller

    def _executors(self) -> list[Executor]:
        """Fastest first; the last one takes everything."""
        runner, made = self.runner, list[Executor]()
        drafter = self.drafter
        if self.spec.verify == "coupled":
            if self.graphs and (drafter is None or drafter.in_graph):
                widths = (0, USUAL if self.spec.draft_tokens is None else self.spec.draft_tokens)
                made.append(GraphExecutor(runner, self.can, self.kv_budget.pass_rows, widths))
            net = drafter.net if drafter is not None else None
            cycle = self.model.ops.host_cycle(self.model, net, self.store.pages(), runner.features, runner.taps)
            if cycle is not None and not made:
                made.append(HostExecutor(runner, cycle, self.metrics))
        if drafter is not None and drafter.kv_specs and not made:
            log.info("drafter %s: steps run operation by operation (eager)", drafter.name)
        return [*made, EagerExecutor(runner, self.spec.verify, self.metrics)]

    def serve(self) -> str:
        """From now on anybody may come at any moment, and one sequence's step is everybody's: memory is taken before it
        is needed, and prompts run in pieces that nobody waits long for; on a GPU the likely steps and passes are
        captured before the first one comes. Returns a line about what was made."""
        self.store.take_ahead()
        made = self.executors[0].prepare() if self.device.type == "cuda" else ""
        if self.can.prefill_idle and self.can.prompts_independent:
            self.prefill.chunk = min(self.prefill.chunk, self.can.prefill_idle)
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
        adapter = self.runner.adapters.get(name)
        if self.runner.adapters.slots is not None:
            self.runner.adapters.slots.reserve(adapter)  # here, so that only this request fails where memory is short
        return adapter

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
        # else those who wait, wait for a command
        room = len(self.scheduler.running) < self.max_batch and self.store.free_slots > 0
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
        if self.drafter is not None and any([item.plan.stop or item.plan.drop for item in batch.decode]):
            batch.trust = self.policy.trust([item.seq for item in batch.decode])
        planned = clock()
        self.timer.begin()
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
        self.timer.observe(pending, now)
        self.host_times["commit"] += self.clock() - now

    def _measure(self, began: float) -> None:
        for warning in self.controller.warnings[self._warned :]:
            log.warning(warning)
        self._warned = len(self.controller.warnings)
        self.metrics.steps += 1
        self.metrics.step_seconds += self.clock() - began
        self.metrics.prefill_seconds = self.runner.prompt_seconds
        self.metrics.look(self.scheduler, self.store)

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
        self._count(seq, n, now, brought)
        self.controller.observe(seq.id, item.plan.drafter, brought.drafted, accepted, brought.confidence, tree)
        seq.tokens.extend(tokens)
        seq.computed = len(seq.tokens) - 1
        seq.has_features = True
        if seq.ngram is not None:
            seq.ngram.extend(tokens)
        logprobs = brought.logprobs[:n] if brought.logprobs is not None else None
        event = Event(
            seq.id, tokens, kinds[:n], taken.texts, logprobs, error=taken.error, tree=tree, stopped_by=taken.stopped_by,
            drafts=brought.drafts,
        )  # fmt: skip
        if taken.finish is not None:
            self._events.append(self._finish(seq, event, taken.finish))
        else:
            self.store.commit(seq.held, seq.computed)
            self._events.append(event)

    def _count(self, seq: Seq, emitted: int, now: float, brought: Emitted) -> None:
        s, m = seq.stats, self.metrics
        if seq.first_token_at is None:
            seq.first_token_at = now
            s.ttft_s = now - seq.arrived
        s.decode_s = now - seq.first_token_at
        s.first_emitted = s.first_emitted or emitted
        for counts in (s, m):
            count_cycle(counts, emitted, brought)
        accepted = len(brought.tokens) - 1
        if seq.adapter is not None and brought.drafted:
            for by_name, count in ((m.drafted_by_adapter, brought.drafted), (m.accepted_by_adapter, accepted)):
                by_name[seq.adapter.name] = by_name.get(seq.adapter.name, 0) + count

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
        self.metrics.look(self.scheduler, self.store)
        return given

    def check(self) -> None:
        """Audit: no page leaks, every running sequence has its slot."""
        self.store.check()
        for seq in self.scheduler.running:
            assert seq.cache is not None and seq.swapped_kv is None, f"{seq.id} runs without a slot"
        kept = sum(len(seq.swapped_kv.blocks) for seq in self.scheduler.waiting if seq.swapped_kv is not None)
        assert kept * self.store.swap.block == self.store.swap.used, "blocks of host memory leak"
