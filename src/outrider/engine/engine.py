"""The engine: schedule -> run -> commit, one step at a time, in one thread.

`submit` takes a request, `step` runs one step and returns what happened, `abort` drops a request. Token ids inside;
text only in the events' deltas. Whatever the drafter does, the target's choices are what is emitted.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ..cache.store import CacheSpec, KVStore, upload
from ..config import EngineConfig, SpecConfig
from ..spec.choose import SamplingBatch
from ..spec.controller import Controller
from ..spec.drafter import Drafter
from ..spec.mtp import MTPDrafter
from ..spec.ngram import NgramIndex
from ..spec.plan import PLAIN, Choice, SeqView
from ..types import MAX_DRAFT, Draft, OutriderError, RequestStats
from .answer import Answer
from .cycle import CycleInput, Rows, cut, cycle, forward, grammar_masks, logprobs, verify_coupled
from .graphs import Flight, GraphRunner, Key, plain
from .metrics import Metrics
from .propose import Proposer
from .room import free_bytes, room
from .scheduler import Chunk, DecodeRow, Request, Scheduler, Seq
from .text import Detokenizer, Tokenizer
from .verify import verify_block_rows, verify_rejection_rows

log = logging.getLogger("outrider")
VERIFY = {"coupled": verify_coupled, "rejection": verify_rejection_rows, "block": verify_block_rows}


@dataclass
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

    @property
    def text(self) -> str:
        return "".join(self.texts)


@dataclass
class Working:
    """What the engine keeps beside a sequence."""

    answer: Answer
    ngram: NgramIndex | None


class Engine:
    def __init__(
        self,
        model: Any,
        tokenizer: Tokenizer | None,
        config: EngineConfig,
        spec: SpecConfig,
        drafter: Drafter | None,
        controller: Controller,
        kv_dtype: torch.dtype | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self.model, self.tokenizer, self.config, self.spec = model, tokenizer, config, spec
        self.drafter, self.controller, self.clock = drafter, controller, clock
        self.device = model.device
        ops = model.ops
        exact = ops.capabilities.prompts_independent
        dtype = kv_dtype or model.dtype
        space = room(config, model.config, dtype, free_bytes(self.device))
        self.store = KVStore(
            model.config,
            CacheSpec(config.max_batch, space.max_context, config.page_size, max(config.prefill_chunk, MAX_DRAFT + 1), space.tokens),
            dtype,
            self.device,
        )
        self.max_context = min(space.max_context, space.tokens - config.page_size)  # one sequence must be able to finish alone
        self.scheduler = Scheduler(
            self.store, config.max_batch, config.prefill_chunk,
            config.page_size if exact else config.prefill_chunk, ops.capabilities.replay_rows, config.prefix_cache,
        )  # fmt: skip
        self.share_answers = exact
        self.metrics = Metrics()
        self.taps = drafter.taps if drafter is not None else ()
        width = model.config.hidden * (1 + len(self.taps))
        self.features = torch.zeros((config.max_batch + 1, width), dtype=model.dtype, device=self.device)  # the last row: padding
        self.verify = VERIFY[spec.verify]
        self.graphs: GraphRunner | None = None
        wanted = ops.capabilities.graphs if config.graphs is None else config.graphs
        if wanted and spec.verify == "coupled" and (drafter is None or isinstance(drafter, MTPDrafter)):
            self.graphs = GraphRunner(model, self.store, drafter, self.features)
        self.proposer = Proposer(model, self.store, drafter, self.features, spec.verify != "coupled", self.metrics)
        self.host: Any = None  # runs whole cycles in one call, where the ops can
        if spec.verify == "coupled":
            mtp = drafter.model if isinstance(drafter, MTPDrafter) else None
            self.host = ops.host_cycle(model, mtp, self.store.pages(), self.features, self.taps)
        self.by_host = (None, "ngram") + (("mtp",) if self.host is not None and self.host.drafts else ())
        self._flight: Flight | None = None  # the cycle that was launched and not yet read
        self._landed = 0.0
        self._timed: list[Seq] = []  # the batch whose last cycle was timed
        self._warned = 0  # how many of the controller's warnings were passed on
        self._sampling: tuple[list[Request], SamplingBatch, bool] | None = None
        self._seqs: dict[str, Seq] = {}
        self._events: list[Event] = []
        self.eos = frozenset(tokenizer.eos_ids if tokenizer is not None else model.config.eos_ids)

    # ---- requests -----------------------------------------------------------------------------------------------
    def validate(self, request: Request) -> None:
        """Raises OutriderError when this request can never run."""
        vocab, prompt = self.model.config.vocab_size, request.prompt
        if not prompt:
            raise OutriderError("the prompt is empty: give at least one token")
        for token in prompt:
            if not 0 <= token < vocab:
                raise OutriderError(f"prompt token id {token} is outside the vocabulary (0..{vocab - 1})")
        if len(prompt) >= self.max_context:
            most = self.model.config.max_context
            mend = "shorten it" if self.max_context >= most - 1 else f"shorten it or raise --max-context (the model knows up to {most})"
            raise OutriderError(f"prompt has {len(prompt)} tokens; the context holds {self.max_context}: {mend}")
        if request.draft_tokens is not None and not 0 <= request.draft_tokens <= MAX_DRAFT:
            raise OutriderError(f"draft tokens must be in 0..{MAX_DRAFT} or 'auto', got {request.draft_tokens}")
        if request.id in self._seqs:
            raise OutriderError(f"request id {request.id!r} is already running")
        if self.tokenizer is None and request.params.stop:
            raise OutriderError("stop strings need a tokenizer; use stop_token_ids")
        request.params.validate(vocab)

    def submit(self, request: Request) -> None:
        self.validate(request)
        seq = Seq(request, self.clock(), list(request.prompt))
        seq.stats.prompt_tokens = seq.prompt_len
        wants_ngram = "ngram" in self.controller.drafters and request.drafter
        index = NgramIndex() if wants_ngram else None
        if index is not None:
            index.extend(request.prompt)
        grammar = request.params.grammar
        detok = Detokenizer(self.tokenizer, request.prompt, request.params.keep_special) if self.tokenizer is not None else None
        matcher = grammar.matcher() if grammar is not None else None  # type: ignore[attr-defined]
        seq.extra = Working(Answer(request.params, self.eos, detok, matcher), index)
        self._seqs[request.id] = seq
        self.scheduler.add(seq)
        self.metrics.requests += 1
        self.metrics.prompt_tokens += seq.prompt_len

    def abort(self, request_id: str, reason: str = "abort") -> None:
        seq = self._seqs.get(request_id)
        if seq is not None:
            self._events.append(self._finish(seq, Event(request_id, [], [], []), reason))

    @property
    def busy(self) -> bool:
        return bool(self._seqs) or bool(self._events)

    # ---- one step -----------------------------------------------------------------------------------------------
    def step(self) -> list[Event]:
        """Between two passes over the weights every line here runs on cold caches. So the way of a host cycle is kept short, and
        tensor operations (and the 40 µs of entering inference mode) to the steps that need them."""
        began = self.clock()
        lag = self.graphs is not None and all(self._can_lag(s) for s in self.scheduler.running)
        if not lag and self._flight is not None:
            self._land()
        for seq in (
            self.scheduler.running if self.graphs is not None else ()
        ):  # what is in flight may end it, or fill its context: wait and see
            seq.hold = seq.ahead > 0 and (seq.remaining <= 1 or len(seq.tokens) + seq.ahead >= self.max_context)
        plan = self.scheduler.plan(self._choose_drafts)
        for chunk in plan.prefill:
            self._prefill(chunk)
        if plan.prefill:
            self.metrics.prefill_seconds += self.clock() - began
        self._decode(plan.decode, lag, not plan.prefill)
        events, self._events = self._events, []
        if len(self.controller.warnings) > self._warned:
            for warning in self.controller.warnings[self._warned :]:
                log.warning(warning)
            self._warned = len(self.controller.warnings)
        m = self.metrics
        m.steps += 1
        m.step_seconds += self.clock() - began
        m.preemptions = self.scheduler.preemptions
        m.running, m.waiting = len(self.scheduler.running), len(self.scheduler.waiting)
        m.free_pages = {name: group.pool.free for name, group in self.store.groups.items()}
        return events

    def _choose_drafts(self, ready: list[Seq]) -> list[Choice]:
        """Drafter and K of each decoding sequence: the K that was asked for, else the controller's."""
        asked = [self._asked(seq) for seq in ready]
        undecided = [seq for seq, k in zip(ready, asked) if k is None]
        planned: Iterator[Choice] = iter(())
        if undecided:
            again = self.controller.again([seq.id for seq in undecided])
            if again is not None:
                planned = (c if c.k <= self._room(s) else PLAIN for c, s in zip(again, undecided))
            else:
                views = [SeqView(s.id, *self._offers(s), s.remaining, len(s.tokens)) for s in undecided]
                planned = iter(self.controller.plan(views))
        return [next(planned) if k is None else self._fixed(seq, k) for seq, k in zip(ready, asked)]

    def _asked(self, seq: Seq) -> int | None:
        """The K this request shall have; None: whatever is fastest."""
        if not seq.request.drafter:
            return 0
        return seq.request.draft_tokens if seq.request.draft_tokens is not None else self.spec.draft_tokens

    def _fixed(self, seq: Seq, k: int) -> Choice:
        if k == 0:
            return PLAIN
        offers, _ = self._offers(seq)
        name = next((n for n in self.controller.drafters if offers.get(n)), None)
        return Choice(name, min(k, offers[name])) if name is not None else PLAIN

    def _offers(self, seq: Seq) -> tuple[dict[str, int], int]:
        """How many tokens each drafter could guess for this sequence now, and how long a suffix the n-gram index found again."""
        offers: dict[str, int] = {}
        work: Working = seq.extra
        room = self._room(seq)
        match, asked = 0, seq.request.drafter
        if asked and room > 0:
            if self.drafter is not None and seq.has_features and not seq.drafter_off and asked in (True, self.drafter.name):
                offers[self.drafter.name] = room
            if work.ngram is not None and self._by_ngram(seq):
                match = work.ngram.match()
                if match:
                    offers["ngram"] = room
        return offers, match

    def _room(self, seq: Seq) -> int:
        """Most tokens a draft may have: what may be emitted and what the context holds."""
        return min(seq.remaining - 1 - (seq.ahead > 0), self.max_context - len(seq.tokens) - seq.ahead - 1, MAX_DRAFT)

    def _by_ngram(self, seq: Seq) -> bool:
        """May the n-gram index guess? It needs the newest tokens on the host: beside a drafter that runs inside the graph, one
        cycle ahead of the host, only when it was asked for by name."""
        if seq.extra.ngram is None or seq.request.drafter not in (True, "ngram"):
            return False
        return self.graphs is None or self.drafter is None or seq.request.drafter == "ngram" or not plain(seq.request.params)

    def _can_lag(self, seq: Seq) -> bool:
        """May its next cycle be launched before this one was read?"""
        return plain(seq.request.params) and not self._by_ngram(seq)

    @torch.inference_mode()
    def _prefill(self, chunk: Chunk) -> None:
        seq, began = chunk.seq, self.clock()
        end = chunk.start + chunk.count
        ids = upload(seq.tokens[chunk.start : end], torch.int64, self.device)
        positions = torch.arange(chunk.start, end, device=self.device)
        row_seq = torch.zeros_like(ids)
        row_start = upload([0, chunk.count], torch.int32, self.device)
        slots = upload([seq.cache.slot], torch.int64, self.device)
        kv = self.store.view(slots, positions, row_seq, row_start, chunk.count, end)
        _, features = forward(self.model, ids, kv, self.taps)
        seq.computed = end
        self.store.commit(seq.cache, end)
        if self.config.prefix_cache and (self.share_answers or end <= seq.prompt_len - 1):
            whole = end - end % self.scheduler.granularity
            self.store.share(seq.cache, seq.tokens, whole)
        if end == len(seq.tokens) - 1:
            self.features[seq.cache.slot] = features[-1]
            seq.has_features = True
        seq.stats.prefill_s += self.clock() - began

    def _decode(self, rows: list[DecodeRow], lag: bool, pure: bool) -> None:
        """One cycle of these rows: launched as a graph and read at the next step (lag) or now; else eagerly."""
        key = self.graphs.key(rows) if self.graphs is not None and rows else None
        if key is not None and self.graphs is not None and self.graphs.ready(key):
            self._launch(rows, key, pure)
            if not lag:
                self._land()
        elif self._flight is not None:
            self._land()  # the rows were planned without knowing what it brings: plan anew
        elif rows:
            sampling, bare = self._sampling_batch([row.seq for row in rows])
            if bare and self.host is not None and all(row.drafter in self.by_host for row in rows):
                self._decode_host(rows, sampling)
            else:
                if self.graphs is not None:
                    self.graphs.forget()
                self._decode_eager(rows, sampling)

    @torch.inference_mode()
    def _launch(self, rows: list[DecodeRow], key: Key, pure: bool) -> None:
        assert self.graphs is not None
        flight = self.graphs.launch(rows, key, self.clock(), pure)
        for row in rows:
            row.seq.ahead += row.k + 1
        self._land()
        self._flight = flight

    @torch.inference_mode()
    def _land(self) -> None:
        """Read the cycle in flight and commit it. Sequences that have ended or were pre-empted since get nothing."""
        flight, self._flight = self._flight, None
        if flight is None or self.graphs is None:
            return
        tokens, now = self.graphs.read(flight), self.clock()
        for i, row in enumerate(flight.rows):
            if row.seq.cache is flight.caches[i]:
                row.seq.ahead -= row.k + 1
                self._commit(row, tokens[i], now, None)
        drafter = next((r.drafter for r in flight.rows if r.drafter), None)
        seconds, self._landed = now - max(flight.began, self._landed), now
        if flight.pure:
            self.controller.observe_step(len(flight.rows), flight.key.k, flight.key.context, seconds, drafter)

    def _decode_host(self, rows: list[DecodeRow], sampling: SamplingBatch) -> None:
        """The cycle as one call of the library (ops.cpu.cycle): the same tokens as `_decode_eager` gives."""
        began = self.clock()
        asked = []
        for row in rows:
            tokens = row.seq.tokens
            guess = row.seq.extra.ngram.propose(row.k)[0] if row.drafter == "ngram" else None
            k = row.k if guess is None else len(guess)
            asked.append((row.seq.cache.slot, tokens[-1], len(tokens) - 1, k, guess, row.stop, row.drop))
        told = self.host.run(asked, sampling, self._trust(rows))
        now = self.clock()
        for row, (k, tokens, sure) in zip(rows, told):
            row.k = k
            self._commit(row, tokens, now, None, sure)
        self._observe_step(rows, began)

    @torch.inference_mode()
    def _decode_eager(self, rows: list[DecodeRow], sampling: SamplingBatch) -> None:
        began = self.clock()
        seqs = [r.seq for r in rows]
        as_long = lambda values: torch.tensor(values, dtype=torch.int64, device=self.device)  # noqa: E731
        slots = as_long([s.cache.slot for s in seqs])
        x = CycleInput(
            rows=Rows.of(tuple(r.k for r in rows), self.device),
            slots=slots,
            last=as_long([s.tokens[-1] for s in seqs]),
            length=as_long([len(s.tokens) - 1 for s in seqs]),
            sampling=sampling,
            ops=self.model.ops,
            max_context=max(len(s.tokens) + r.k for s, r in zip(seqs, rows)),
        )
        draft: Draft | None = None
        if x.rows.k:
            draft = self.proposer.propose(rows, x, self._trust(rows))
            if self.device.type == "cpu":  # reading the lengths is free here: verify no more rows than were drafted
                for row, k in zip(rows, draft.lengths.tolist()):
                    row.k = k
                x.rows = Rows.of(tuple(r.k for r in rows), self.device)
                draft = cut(draft, x.rows.k)
        if any(s.extra.answer.matcher for s in seqs):
            matchers, ks = [s.extra.answer.matcher for s in seqs], [r.k for r in rows]
            x.masks = lambda drafts: grammar_masks(matchers, ks, drafts, self.model.config.vocab_size)
        out = cycle(self.model, self.store, (lambda: draft) if draft is not None and x.rows.k else None, self.verify, self.taps, x)
        self.features.index_copy_(0, slots, out.features)
        x.sampling.commit(out.verdict.tokens, out.verdict.counts)
        tokens, counts = out.verdict.tokens.tolist(), out.verdict.counts.tolist()  # the only wait of a cycle
        now = self.clock()
        asked = [s.request.params.logprobs for s in seqs]
        top = logprobs(asked, x.rows, out.logits, tokens) if any(n is not None for n in asked) else None
        sure = draft.confidence.tolist() if draft is not None and draft.confidence is not None else None
        for i, row in enumerate(rows):
            by_drafter = sure[i][: row.k + 1] if sure is not None and row.drafter not in (None, "ngram") else None
            self._commit(row, tokens[i][: counts[i]], now, top[i] if top is not None else None, by_drafter)
        self._observe_step(rows, began)

    def _trust(self, rows: list[DecodeRow]) -> list[float] | None:
        """Acceptance by the drafter's confidence, if a draft may end itself."""
        if self.drafter is None or not any(row.stop or row.drop for row in rows):
            return None
        return self.controller.trust(self.drafter.name)

    def _observe_step(self, rows: list[DecodeRow], began: float) -> None:
        """Tell what the cycle took; not of the first of a batch, which finds caches cold and buffers untouched."""
        before, self._timed = self._timed, [row.seq for row in rows]
        if before != self._timed:
            return
        drafter = next((r.drafter for r in rows if r.drafter), None)
        width, context = sum(r.k for r in rows) / len(rows), sum(len(r.seq.tokens) for r in rows) // len(rows)
        self.controller.observe_step(len(rows), width, context, self.clock() - began, drafter)

    def _sampling_batch(self, seqs: list[Seq]) -> tuple[SamplingBatch, bool]:
        """With whether it is `bare`. Rebuilt only when the batch has changed: `commit` keeps it up to date in between."""
        key = [s.request for s in seqs]
        if self._sampling is None or self._sampling[0] != key:
            batch = SamplingBatch.build(
                [s.request.params for s in seqs], [s.request.prompt for s in seqs], [s.tokens[s.prompt_len :] for s in seqs],
                self.model.config.vocab_size, self.device, sorted(self.eos),
            )  # fmt: skip
            self._sampling = (key, batch, batch.bare)
        return self._sampling[1:]

    # ---- commit ---------------------------------------------------------------------------------------------------
    def _commit(
        self, row: DecodeRow, tokens: list[int], now: float, logprobs: list[dict[int, float]] | None, sure: list[float] | None = None
    ) -> None:
        """Take the verdict into the sequence, cut at the end of the answer, and say what happened."""
        seq, work = row.seq, row.seq.extra
        accepted = len(tokens) - 1
        kinds = ["accepted"] * accepted + ["plain" if not row.k else ("bonus" if accepted == row.k else "corrected")]
        taken = work.answer.take(tokens, min(seq.remaining, self.max_context - len(seq.tokens)))
        n = len(taken.texts)
        tokens = tokens[:n]
        self._count(seq, row, accepted, n, now, sure)
        seq.tokens.extend(tokens)
        seq.computed = len(seq.tokens) - 1
        seq.has_features = True
        if work.ngram is not None:
            work.ngram.extend(tokens)
        event = Event(seq.id, tokens, kinds[:n], taken.texts, logprobs[:n] if logprobs is not None else None, error=taken.error)
        if taken.finish is not None:
            self._events.append(self._finish(seq, event, taken.finish))
        else:
            self.store.commit(seq.cache, seq.computed)
            self._events.append(event)

    def _count(self, seq: Seq, row: DecodeRow, accepted: int, emitted: int, now: float, sure: list[float] | None) -> None:
        s, m = seq.stats, self.metrics
        if seq.first_token_at is None:
            seq.first_token_at = now
            s.ttft_s = now - seq.arrived
        s.decode_s = now - seq.first_token_at
        s.new_tokens += emitted
        s.first_emitted = s.first_emitted or emitted
        m.new_tokens += emitted
        for c in (s, m):
            c.cycles += 1
            c.drafted += row.k
            c.accepted += accepted
            for j in range(row.k):
                c.drafted_by_position[j] += 1
                c.accepted_by_position[j] += j < accepted
        self.controller.observe(seq.id, row.drafter, row.k, accepted, sure)

    def _finish(self, seq: Seq, event: Event, reason: str) -> Event:
        event.finish_reason, event.stats = reason, seq.stats
        if seq.cache is not None and self.config.prefix_cache and self.share_answers:
            self.store.share(seq.cache, seq.tokens, seq.computed - seq.computed % self.config.page_size)
        self.scheduler.remove(seq)
        if self.drafter is not None:
            self.drafter.forget(seq.id)
        self.controller.finish(seq.id)
        self._sampling = None  # an id may come again with other parameters
        del self._seqs[seq.id]
        self.metrics.cached_tokens += seq.stats.cached_tokens
        self.metrics.finished[reason] = self.metrics.finished.get(reason, 0) + 1
        return event

    def check(self) -> None:
        """Audit: no page leaks, every running sequence has its slot."""
        self.store.check()
        for seq in self.scheduler.running:
            assert seq.cache is not None, f"{seq.id} runs without a slot"
