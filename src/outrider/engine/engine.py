"""The engine: schedule -> launch -> read -> commit, one step at a time, in one thread.

`submit` adds a request, `step` runs one step and returns its events, `abort` drops a request. The engine works on token
ids; only the events' deltas hold text. The emitted tokens are always the target's choices, whatever the drafter does.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..cache.prefix import PrefixChain
from ..cache.prefix_store import PrefixStore, PrefixStoreOptions
from ..cache.store import CacheSpec, KVStore
from ..config import EngineConfig, SpecConfig
from ..models.decoder import TextModel
from ..ops.decode_io import DecodeOutputs
from ..ops.lowrank import Adapter
from ..spec.controller import Controller
from ..spec.drafter import Drafter
from ..spec.ngram import NGRAM, NgramIndex
from ..spec.plan import VerifiedTree
from ..types import MAX_DRAFT, OutriderError, RequestStats, SamplingParams, require
from .adapters import AdapterPool
from .draft_policy import DraftPolicy
from .eager import EagerExecutor
from .graph_dispatch import SingleDrafts
from .graphs import GraphExecutor
from .host import HostExecutor
from .memory import KVBudget, KVOptions, spare_bytes
from .metrics import Metrics
from .model_runner import ModelRunner
from .output_processor import OutputProcessor
from .prefill_budget import PrefillBudget
from .scheduler import Scheduler
from .step import DecodeRow, Executor, PendingStep, Plan, Progress, Request, Sequence, pick
from .step_io import confidence_of, draft_of, emitted_tokens, logprobs_of, tree_of
from .step_timer import StepTimer
from .text import Detokenizer, Tokenizer

log = logging.getLogger("outrider")
SERVED_K = 4  # the K that a server captures if the controller chooses
# for single sequences also these: K of chains, and depths of trees
SINGLE_K = (8, 16)
TREE_DEPTHS = (6, 8)
REPORT_S = 2.0  # between two lines about the progress of a preparation


@dataclass(slots=True)
class Event:
    """The result of one step for one request. `kinds` says where each token came from."""

    id: str
    tokens: list[int]
    kinds: list[str]  # accepted | corrected | bonus | plain
    texts: list[str]  # text emitted with each token
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


class Reporter:
    """Tells the progress of a preparation in a line every few seconds."""

    def __init__(self, say: Callable[[str], None], clock: Callable[[], float]) -> None:
        self.say = say
        self.clock = clock
        self.last_line_at = clock()

    def __call__(self, what: str, done: int, total: int) -> None:
        if done < total and self.clock() - self.last_line_at >= REPORT_S:
            self.last_line_at = self.clock()
            self.say(f"{what}: {done} of {total}")


class Engine:
    def __init__(
        self,
        model: TextModel,
        tokenizer: Tokenizer | None,
        config: EngineConfig,
        spec: SpecConfig,
        drafter: Drafter | None,
        controller: Controller,
        kv: KVOptions = KVOptions(),
        *,
        adapters: AdapterPool | None = None,
        prefix_store: PrefixStoreOptions | None = None,
    ):
        self.model = model
        self.tokenizer = tokenizer
        self.config = config
        self.spec = spec
        self.drafter = drafter
        self.clock = time.perf_counter
        self.device = model.device
        self.can = model.ops.capabilities
        self.span_rows = kv.span_rows
        self.max_batch = config.max_batch or self.can.sequences
        self.chunk = config.prefill_chunk or self.can.prompt_chunk
        dtype = kv.dtype or model.dtype
        drafter_kv_specs = drafter.kv_specs if drafter is not None else ()
        budget = kv.agree(KVBudget.of(config, model, dtype, extra=drafter_kv_specs))
        self.kv_budget = budget
        # one sequence must be able to finish alone
        self.max_context = min(budget.max_context, budget.tokens - config.page_size)
        members = drafter.members if drafter is not None else ()
        block_rows: dict[str | None, int] = {one.name: one.block_rows for one in members if one.block_rows}
        cache_spec = CacheSpec(
            slots=self.max_batch,
            max_context=budget.max_context,
            page_size=config.page_size,
            chunk=max(self.chunk, MAX_DRAFT + 1, kv.span_rows, *block_rows.values()),
            tokens=budget.tokens,
            window_tokens=budget.window_tokens,
        )
        self.store = KVStore(model.config, cache_spec, dtype, device=self.device, extra=drafter_kv_specs)
        # prefixes are shared in multiples of it
        self.granularity = config.page_size if self.can.prompts_independent else self.chunk
        spare = spare_bytes(config, self.device)
        self.prefill = PrefillBudget.of(model.config, self.can, self.chunk, spare=spare)
        self._metrics = Metrics()
        self.eos = frozenset(tokenizer.eos_ids if tokenizer is not None else model.config.eos_ids)
        width = model.config.hidden * (1 + len(drafter.taps if drafter is not None else ()))
        features = torch.zeros((self.max_batch + 1, width), dtype=model.dtype, device=self.device)
        self.runner = ModelRunner(
            model=model,
            store=self.store,
            drafter=drafter,
            features=features,
            eos=tuple(sorted(self.eos)),
            clock=self.clock,
            metrics=self._metrics,
            adapters=adapters,
        )
        if prefix_store is not None:
            self.store.disk = PrefixStore(
                self.store, prefix_store.folder, prefix_store.max_bytes, identity=prefix_store.identity
            )
        self.graphs = self.can.graphs if config.graphs is None else config.graphs
        self.executors = self._executors()
        trees = any(executor.trees for executor in self.executors)
        self.policy = DraftPolicy(
            controller=controller,
            drafter=drafter,
            spec=spec,
            can=self.can,
            max_context=self.max_context,
            graphs=self.graphs,
            trees=trees,
            block_rows=block_rows,
        )
        self.scheduler = Scheduler(
            cache=self.store,
            max_batch=self.max_batch,
            prefill=self.prefill,
            granularity=self.granularity,
            replay_rows=self.can.replay_rows,
            draft_policy=self.policy,
            max_context=self.max_context,
        )
        self.timer = StepTimer(self.runner, self.prefill, self.policy)
        self._in_flight: PendingStep | None = None  # the step that was launched and not yet read
        # called when the host has nothing to do until the device is done with a step
        self.meanwhile: Callable[[], None] = lambda: None
        self._seqs: dict[str, Sequence] = {}
        self._events: list[Event] = []
        independent = self.can.independent_rows
        if 0 < independent < self.max_batch:
            log.warning("not batch-invariant beyond %d sequences: outputs may vary with the batch", independent)

    @property
    def background(self) -> frozenset[str]:
        """Clients that give way to others, where rows are dear."""
        return self.scheduler.background

    @background.setter
    def background(self, clients: frozenset[str]) -> None:
        self.scheduler.background = clients

    @property
    def controller(self) -> Controller:
        return self.policy.controller

    @property
    def metrics(self) -> Metrics:
        """The counters so far; thread-safe."""
        metrics = self._metrics
        store = self.store
        scheduler = self.scheduler
        metrics.running = len(scheduler.running)
        metrics.waiting = len(scheduler.waiting)
        metrics.preemptions = scheduler.preemptions
        metrics.prefill_seconds = self.runner.prompt_seconds
        if store.disk is not None:
            metrics.prefix_pages_read = store.disk.pages_read
            metrics.prefix_pages_written = store.disk.pages_written
        metrics.free_pages = {name: group.pool.free for name, group in store.groups.items()}
        metrics.kv_bytes = store.taken()
        return metrics

    def _executors(self) -> list[Executor]:
        """Fastest first; the last one supports everything."""
        runner = self.runner
        drafter = self.drafter
        executors = list[Executor]()
        if self.graphs and (drafter is None or drafter.in_graph):
            widths = (0, SERVED_K if self.spec.draft_tokens is None else self.spec.draft_tokens)
            single = SingleDrafts()
            if self.spec.draft_tokens is None:
                single = SingleDrafts(SINGLE_K, () if self.spec.tree == 0 else TREE_DEPTHS)
            budget = self.kv_budget
            advice: Mapping[str, Any] = self.tokenizer.files.sampling if self.tokenizer is not None else {}
            executors.append(
                GraphExecutor(
                    runner,
                    self.can,
                    pass_rows=budget.pass_rows,
                    packed_rows=budget.packed_rows,
                    widths=widths,
                    advised=SamplingParams(**advice),
                    single=single,
                )
            )
        cycle = self.model.ops.host_cycle(
            self.model,
            None if drafter is None else drafter.net,
            self.store.pages(),
            features=runner.features,
            taps=runner.taps,
            block=None if drafter is None else drafter.block_call,
        )
        has_own_kv = drafter is not None and bool(drafter.kv_specs)
        if cycle is not None and not executors and (not has_own_kv or cycle.unread is not None):
            executors.append(HostExecutor(runner, cycle))
        if drafter is not None and has_own_kv and not executors:
            log.info("drafter %s: steps run operation by operation (eager)", drafter.name)
        return [*executors, EagerExecutor(runner)]

    def warm_up(self, say: Callable[[str], None]) -> None:
        """On a GPU: capture what the first requests of a program would wait for, and tell how far that is."""
        if self.device.type == "cuda":
            say(self._prepare(served=False, say=say))

    def serve(self, say: Callable[[str], None] = lambda line: None) -> str:
        """Prepare for requests at any moment: allocate memory, shorten prompt chunks, on a GPU capture the likely
        steps and passes. Returns a line about what was prepared. say: is told how far that is, if it takes long."""
        self.store.take_ahead()
        prepared = self._prepare(served=True, say=say) if self.device.type == "cuda" else ""
        if self.can.prefill_idle and self.can.prompts_independent:
            self.prefill.chunk = min(self.prefill.chunk, self.can.prefill_idle)
        return prepared

    def _prepare(self, *, served: bool, say: Callable[[str], None]) -> str:
        progress = Reporter(say, self.clock)
        return "; ".join(filter(None, [executor.prepare(served, progress) for executor in self.executors]))

    # ---- requests -----------------------------------------------------------------------------------------------
    def validate(self, request: Request) -> None:
        vocab = self.model.config.vocab_size
        prompt = request.prompt
        require(len(prompt) > 0, "the prompt is empty: give at least one token")
        wrong = min(prompt) if min(prompt) < 0 else max(prompt)
        require(0 <= wrong < vocab, f"prompt token id {wrong} is outside the vocabulary (0..{vocab - 1})")
        size = len(prompt)
        context = self.max_context
        most = self.model.config.max_context
        more = f" or raise --max-context (the model knows up to {most})" if context < most - 1 else ""
        require(size < context, f"prompt has {size} tokens; the context holds {context}: shorten it{more}")
        for span in request.spans:
            rows = span.end - span.start
            require(rows > 0 and span.end < size, "soft tokens must lie inside of the prompt")
            fits = rows <= self.span_rows or not span.bidirectional  # others may be cut
            require(fits, f"an image of {rows} tokens; this engine takes {self.span_rows}")
        SpecConfig(request.draft_tokens, tree=request.tree)  # checks them
        require(request.id not in self._seqs, f"request id {request.id!r} is already running")
        stops = self.tokenizer is not None or not request.params.stop
        require(stops, "stop strings need a tokenizer; use stop_token_ids")
        request.params.validate(vocab)

    def submit(self, request: Request) -> None:
        self.validate(request)
        params = request.params
        seq = Sequence(request, self.clock(), list(request.prompt), adapter=self._adapter(request.adapter))
        self.policy.admit(seq)
        if self.config.prefix_cache:
            seq.prefix = PrefixChain(self.config.page_size, seq.prefix_root)
        detok = Detokenizer(self.tokenizer, request.prompt, params.keep_special) if self.tokenizer is not None else None
        matcher = params.grammar.matcher() if params.grammar is not None else None
        seq.answer = OutputProcessor(params, self.eos, detok, matcher=matcher)
        if NGRAM in self.controller.drafters and self.policy.copies(request):
            seq.ngram = NgramIndex([*request.hint, *request.prompt])
        seq.stats.prompt_tokens = seq.prompt_len
        self._seqs[request.id] = seq
        self.scheduler.add(seq)
        self._metrics.requests += 1
        self._metrics.prompt_tokens += seq.prompt_len

    def _adapter(self, name: str | None) -> Adapter | None:
        if name is None:
            return None
        pool = self.runner.adapters
        if pool is None:
            raise OutriderError(f"there is no adapter {name[:60]!r}: this engine was loaded without adapters")
        adapter = pool.get(name)
        if pool.slots is not None:
            pool.slots.reserve(adapter)  # here, so that only this request fails if memory is short
        return adapter

    def abort(self, request_id: str) -> None:
        seq = self._seqs.get(request_id)
        if seq is not None:
            self._finish(seq, Event(request_id, [], [], texts=[]), "abort")

    def pause(self, request_id: str, on: bool) -> None:
        """A paused request keeps its slot and its K/V, and takes part in no step."""
        seq = self._seqs.get(request_id)
        if seq is not None:
            seq.paused = on

    def running(self, request_id: str) -> Sequence | None:
        """The request, if it waits or decodes; None: it has ended."""
        return self._seqs.get(request_id)

    def progress(self) -> dict[str, Progress]:
        return {
            id: Progress(s.request, min(s.computed, s.prompt_len), len(s.tokens) - s.prompt_len)
            for id, s in self._seqs.items()
        }

    @property
    def busy(self) -> bool:
        """Another step has work, or results to deliver."""
        if self._events or not self._seqs:
            return bool(self._events)
        return self._in_flight is not None or self.scheduler.busy

    # ---- one step -----------------------------------------------------------------------------------------------
    def step(self) -> list[Event]:
        """Schedule, launch, read, commit. With steps that are read one behind, the previous one is committed."""
        began = self.clock()
        if self.device.index is not None:
            torch.cuda.set_device(self.device)  # a thread's own setting, and any thread may drive the engine
        self._in_flight = self._advance(self._in_flight)
        while self.policy.controller.warnings:
            log.warning(self.policy.controller.warnings.pop(0))
        self._metrics.steps += 1
        self._metrics.step_seconds += self.clock() - began
        events = self._events
        self._events = []
        return events

    def _advance(self, previous: PendingStep | None) -> PendingStep | None:
        """Launch the next step and commit the previous one, which may still run. Returns the launched step if it is
        read one step behind; None: nothing is in flight."""
        if previous is not None and any([seq.answer.matcher is not None for seq in self.scheduler.running]):
            self._complete(previous)  # a grammar's next masks depend on the emitted tokens
            previous = None
        if self.store.disk is not None:
            self.store.disk.drain()
        step_plan = self.scheduler.schedule()
        if step_plan.batch.prompts:
            self.timer.begin_prompts()
        executor, plan = pick(self.executors, step_plan.batch)
        if previous is not None and not executor.async_results:
            # planned before the previous step was read: discard the plan, the next call schedules again
            self._complete(previous)
            return None
        self.scheduler.commit_plan(step_plan)
        launched = self._launch(executor, plan)
        if previous is not None:
            self.meanwhile()
            self._complete(previous)
        if executor.async_results:
            return launched
        self._complete(launched)
        return None

    def _launch(self, executor: Executor, plan: Plan) -> PendingStep | None:
        """Start a step. Returns it if it has decode rows, which are read later."""
        batch = plan.batch
        if not batch.decode and not batch.prompts:
            return None
        launched = executor.launch(plan)
        if batch.prompts or launched.inflight_tokens:
            self._book_launch(launched)
        return launched if batch.decode else None

    def _book_launch(self, pending: PendingStep) -> None:
        """Prompt chunks count as computed: later work on the device runs after them."""
        for chunk in pending.batch.prompts:
            seq = chunk.seq
            end = chunk.start + chunk.num_tokens
            seq.computed = end
            seq.has_features = end == len(seq.tokens) - 1
            self.store.commit(seq.active_cache, end)
            if seq.prefix is not None and (self.can.prompts_independent or end <= seq.prompt_len - 1):
                self.store.share(seq.active_cache, seq.prefix, seq.cache_keys, committed=end - end % self.granularity)
        for item, ahead in zip(pending.batch.decode, pending.inflight_tokens):
            item.seq.num_inflight_tokens += ahead

    def _complete(self, pending: PendingStep | None) -> None:
        """Read a launched step, if there is one, and commit it. Sequences that have ended or were preempted since get
        nothing."""
        self._in_flight = None  # it is read once, even if reading fails
        if pending is None:
            return
        outputs = pending.executor.read(pending)
        now = self.clock()
        rows = pending.batch.decode
        if outputs is not None:
            for i, (row, tokens) in enumerate(zip(rows, emitted_tokens(outputs, len(rows)), strict=True)):
                if pending.inflight_tokens:
                    if row.seq.cache is not pending.holders[i]:
                        continue
                    row.seq.num_inflight_tokens -= pending.inflight_tokens[i]
                self._commit(row, outputs, i, tokens=tokens, now=now)
        self.timer.observe(pending, now)

    def _commit(self, row: DecodeRow, outputs: DecodeOutputs, i: int, *, tokens: list[int], now: float) -> None:
        """Append the i-th sequence's tokens to it, cut at the end of the output, and return the event."""
        seq = row.seq
        drafted = int(outputs.num_drafted[i])
        accepted = len(tokens) - 1
        tree = None
        confidence = None
        drafts = None
        if row.plan.k > 0:
            tree = tree_of(outputs, i) if row.plan.nodes > 0 else None
            confidence = confidence_of(outputs, i)
            drafts = draft_of(outputs, i)
        output = seq.answer.take(tokens, min(seq.max_total_tokens, self.max_context) - len(seq.tokens))
        emitted = len(output.texts)
        if seq.first_token_at is None:
            seq.first_token_at = now
            seq.stats.ttft_s = now - seq.arrived
            seq.stats.first_emitted = emitted
        seq.stats.decode_s = now - seq.first_token_at
        drafter = row.plan.drafter
        self._metrics.count(seq, emitted=emitted, drafted=drafted, accepted=accepted, tree=tree, drafter=drafter)
        self.policy.controller.observe(
            state=seq.controller_state,
            drafter=drafter,
            drafted=drafted,
            accepted=accepted,
            confidence=confidence,
            tree=tree,
        )
        if drafted:
            whole = accepted == drafted if tree is None else not tree.path or tree.path[-1] not in tree.parents
            kinds = ["accepted"] * accepted + ["bonus" if accepted and whole else "corrected"]
        else:
            kinds = ["plain"]
        tokens = tokens[:emitted]
        top = seq.request.params.logprobs
        logprobs = None if top is None else logprobs_of(outputs, i, tokens, top=top)
        seq.tokens += tokens
        seq.computed = len(seq.tokens) - 1
        seq.has_features = True
        if seq.ngram is not None:
            seq.ngram.extend(tokens)
        event = Event(seq.id, tokens, kinds[:emitted], texts=output.texts, logprobs=logprobs, tree=tree, drafts=drafts)
        if output.finish is not None:
            event.error = output.error
            event.stopped_by = output.stopped_by
            self._finish(seq, event, output.finish)
        else:
            self.store.commit(seq.active_cache, seq.computed)
            self._events.append(event)

    def _finish(self, seq: Sequence, event: Event, reason: str) -> None:
        event.finish_reason = reason
        event.stats = seq.stats
        if seq.cache is not None and seq.prefix is not None and self.can.prompts_independent:
            end = seq.computed - seq.computed % self.config.page_size
            try:
                self.runner.catch_up([seq])
                self.store.share(seq.cache, seq.prefix, seq.cache_keys, committed=end)
            except MemoryError as error:  # it ends all the same
                log.warning("the answer of %s is not shared: %s", seq.id, error)
        self.scheduler.remove(seq)
        if self.drafter is not None:
            self.drafter.release(seq.draft_track)
        self.controller.apply_observations()
        del self._seqs[seq.id]
        self._metrics.cached_tokens += seq.stats.cached_tokens
        self._metrics.finished[reason] += 1
        self._events.append(event)

    def tidy(self, unused_s: float) -> int:
        """Between two steps: free K/V memory unused for this long (`KVStore.tidy`); returns the bytes."""
        if self.store.disk is not None:
            self.store.disk.drain()
        return self.store.tidy(unused_s)

    def check(self) -> None:
        """Audit: no page leaks, every running sequence has its slot."""
        self.store.check()
        for seq in self.scheduler.running:
            assert seq.cache is not None, f"{seq.id} runs without a slot"
