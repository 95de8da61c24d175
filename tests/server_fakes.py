"""A server without a model: a byte-level tokenizer with Gemma 4's control tokens, and an engine that says what a script
says.

The fake engine keeps the engine's contract (submit, abort, step, busy, check, metrics): tokens come several a step with
their kinds, stop strings and limits cut, grammars mask. So the HTTP side is tested without torch in its way.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any
from unittest.mock import patch

import numpy as np
from tests.running import running
from tests.waiting import PATIENCE, until
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as ServedModel

from outrider.engine.engine import Event
from outrider.engine.grammar import unpacked
from outrider.engine.metrics import Metrics
from outrider.engine.output_processor import OutputProcessor
from outrider.engine.step import Progress, Request
from outrider.engine.text import Detokenizer, Tokenizer
from outrider.spec.plan import VerifiedTree
from outrider.types import Matcher, OutriderError, RequestStats, TextFiles

SPECIAL = ("<pad>", "<eos>", "<bos>", "<|im_start|>", "<|im_end|>")
GEMMA = ("<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>", "<channel|>", "<|tool_response>")
TEMPLATE = (
    "{% for m in messages %}{% if m['content'] == 'refuse' %}{{ raise_exception('no system messages') }}{% endif %}"
    "<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
GEMMA_TEMPLATE = "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}" + TEMPLATE
VOCAB = 288


def tokenizer(gemma: bool = False, texts: Sequence[str] = ()) -> Tokenizer:
    """`texts`: their words are tokens, as a model's would be; without them every byte is one."""
    names = SPECIAL + (GEMMA if gemma else ())

    def build() -> ServedModel:
        vocab = {t: i for i, t in enumerate((*names, *sorted(pre_tokenizers.ByteLevel.alphabet())))}
        backend = ServedModel(models.BPE(vocab=vocab, merges=[]))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        if texts:
            alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
            backend.train_from_iterator(
                [*texts] * 2, trainers.BpeTrainer(vocab_size=4000, special_tokens=[*names], initial_alphabet=alphabet)
            )
        backend.add_special_tokens([AddedToken(t, special=True) for t in names])
        return backend

    template = GEMMA_TEMPLATE if gemma else TEMPLATE
    return Tokenizer(TextFiles("fake", build, template, {"bos_token": "<bos>", "eos_token": "<eos>"}, 2, (1, 4), False))


@dataclass
class _Running:
    request: Request
    answer: OutputProcessor
    script: list[int] | None
    rng: random.Random
    out: list[int] = field(default_factory=list)
    stats: RequestStats = field(default_factory=RequestStats)
    arrived: float = field(default_factory=time.perf_counter)
    paused: bool = False
    read: int = 0  # tokens of the prompt


def masks(matcher: Matcher, drafts: Sequence[int]) -> tuple[np.ndarray, int]:
    """Tokens that a grammar allows along a draft, bool [len(drafts) + 1, VOCAB], and the number of drafted tokens
    inside the grammar."""
    rows = unpacked(matcher.bits(drafts), VOCAB)
    return rows, next((i for i, token in enumerate(drafts) if not rows[i, token]), len(drafts))


class FakeEngine:
    def __init__(
        self,
        tok: Tokenizer,
        say: Callable[[Request], str] | None = None,
        draft: int = 3,
        delay: float = 0.0,
        batch: int = 8,
        hold: int | None = None,
    ) -> None:
        """`hold`: after so many tokens an answer waits for `go`, so that what is shown of a running answer is shown on
        any machine."""
        self.tokenizer = tok
        self.say = say or self.babble
        self.draft = draft
        self.delay = delay
        self.batch = batch
        self.hold = hold
        self.go = threading.Event()
        self.metrics = Metrics()
        self.meanwhile: Callable[[], None] = lambda: None
        self.running: dict[str, _Running] = {}
        self.seen: list[Request] = []
        self.fail_steps = 0  # this many steps raise
        self.branching = False  # drafts are trees whose first guess is wrong
        self.aborted: list[str] = []
        self.prompt_step = 0  # tokens of a prompt that are read per step; 0: all at once
        self.may_read = threading.Event()  # prompts longer than a step wait for it
        self.cached: set[tuple[int, ...]] = set()  # prompts that were read
        self.max_context = 2048
        self._events: list[Event] = []

    def babble(self, request: Request) -> str:
        rng = random.Random(f"{request.params.seed}-{len(request.prompt)}")
        return " ".join(rng.choice(["fox", "jumps", "über", "naïve", "日本", "🦊🚀", "dog."]) for _ in range(12))

    def submit(self, request: Request) -> None:
        if len(request.prompt) >= self.max_context:
            raise OutriderError(f"the prompt has {len(request.prompt)} tokens; the context holds {self.max_context}")
        self.seen.append(request)
        p = request.params
        script = None if p.grammar is not None else [*self.tokenizer.encode(self.say(request)), 1]
        matcher = p.grammar.matcher() if p.grammar is not None else None  # type: ignore[attr-defined]
        detok = Detokenizer(self.tokenizer, request.prompt, p.keep_special)
        answer = OutputProcessor(p, self.tokenizer.eos_ids, detok, matcher)
        self.running[request.id] = _Running(request, answer, script, random.Random(p.seed))
        self.running[request.id].stats.prompt_tokens = len(request.prompt)
        self.metrics.requests += 1

    def abort(self, id: str) -> None:
        run = self.running.pop(id, None)
        if run is not None:
            self.aborted.append(id)
            self._events.append(Event(id, [], [], [], finish_reason="abort", stats=run.stats))

    def pause(self, id: str, on: bool) -> None:
        if id in self.running:
            self.running[id].paused = on

    @property
    def busy(self) -> bool:
        return any(not run.paused for run in self.running.values()) or bool(self._events)

    def step(self) -> list[Event]:
        if self.delay:
            time.sleep(self.delay)
        if self.fail_steps:
            self.fail_steps -= 1
            raise RuntimeError(
                f"made to fail on {[self.tokenizer.decode(r.request.prompt) for r in self.running.values()]}"
            )
        events = self._events
        self._events = []
        ready = [r for r in self.running.values() if not r.paused and not self._held(r)]
        if not ready and not events:
            time.sleep(0.005)
        for run in ready[: self.batch]:
            prompt = tuple(run.request.prompt)
            if self.prompt_step and run.read < len(prompt) - 1 and prompt not in self.cached:
                if run.read == 0 or self.may_read.is_set():
                    run.read = min(run.read + self.prompt_step, len(prompt) - 1)
                    if run.read == len(prompt) - 1:
                        self.cached.add(prompt)
                else:
                    time.sleep(0.002)
                continue
            run.read = len(prompt)
            events.append(self._advance(run))
            if events[-1].finish_reason:
                reason = events[-1].finish_reason
                self.metrics.finished[reason] = self.metrics.finished.get(reason, 0) + 1
                del self.running[run.request.id]
        self.metrics.steps += 1
        return events

    def _held(self, run: _Running) -> bool:
        return self.hold is not None and len(run.out) >= self.hold and not self.go.is_set()

    def check(self) -> None:
        pass

    def progress(self) -> dict[str, Progress]:
        return {id: Progress(r.request, r.read, len(r.out)) for id, r in list(self.running.items())}

    def tidy(self, unused_s: float) -> int:
        return 0

    def serve(self, say: Any = None) -> None:
        pass

    def _advance(self, run: _Running) -> Event:
        p = run.request.params
        k = self.draft if run.request.draft_tokens is None else run.request.draft_tokens
        tokens, accepted = self._tokens(run, k)
        cut = run.answer.take(tokens, p.max_tokens - len(run.out))
        n = len(cut.texts)
        last = "plain" if k == 0 else "bonus" if accepted == k else "corrected"
        kinds = (["accepted"] * accepted + [last])[:n]
        run.out += tokens[:n]
        self._count(run, k, accepted, n)
        tables = [{t: -0.5, 7: -1.5, 8: -2.5} for t in tokens[:n]] if p.logprobs is not None else None
        stats = run.stats if cut.finish else None
        tree = None
        if self.branching and k:
            run.stats.trees = run.stats.trees + 1
            run.stats.branched = run.stats.branched + accepted
            guesses = [self.tokenizer.encode("owl")[0], *tokens[:accepted]]
            tree = VerifiedTree.of(
                [0, 0, *range(2, accepted + 1)][: len(guesses)], list(range(2, accepted + 2)), tokens=guesses
            )
        other = run.script or self.tokenizer.encode(
            "owl"
        )  # what a wrong draft says: words of the answer, from elsewhere
        wrong = [other[(7 * len(run.out) + j) % len(other)] for j in range(k - accepted)]
        outcome = (cut.finish, stats, cut.error, tree, cut.stopped_by, [*tokens[:accepted], *wrong])
        return Event(run.request.id, tokens[:n], kinds, cut.texts, tables, *outcome)

    def _tokens(self, run: _Running, k: int) -> tuple[list[int], int]:
        """(tokens of this cycle, how many of them were drafted)"""
        if run.script is not None:
            accepted = run.rng.randint(0, k)
            at = len(run.out)
            tokens = run.script[at : at + accepted + 1]
            return tokens, min(accepted, len(tokens))
        assert run.answer.matcher is not None
        # under a grammar: random drafts, and at each position a seeded choice among what the mask allows
        drafts = [run.rng.randrange(VOCAB) for _ in range(k)]
        for j in range(k):  # make some drafts legal, so that accepted ones occur
            rows, n = masks(run.answer.matcher, drafts[:j])
            if n == j and run.rng.random() < 0.8:
                drafts[j] = self._choose(run, rows[j], len(run.out) + j)
        rows, _ = masks(run.answer.matcher, drafts)
        tokens: list[int] = []
        for j in range(k + 1):
            tokens.append(self._choose(run, rows[j], len(run.out) + j))
            if tokens[-1] in self.tokenizer.eos_ids or j == k or tokens[-1] != drafts[j]:
                break
        return tokens, len(tokens) - 1

    def _choose(self, run: _Running, mask: Any, position: int) -> int:
        allowed = [i for i in range(VOCAB) if mask[i]]
        assert allowed, "a mask that allows nothing"
        return random.Random(f"{run.request.params.seed}-{position}").choice(allowed)

    def _count(self, run: _Running, k: int, accepted: int, emitted: int) -> None:
        now = time.perf_counter()
        for c in (run.stats, self.metrics):
            c.cycles += 1
            c.drafted += k
            c.accepted += accepted
            c.new_tokens += emitted
            if k:
                c.cycles_by_drafted[k] += 1
                c.cycles_by_accepted[accepted] += 1
        s = run.stats
        s.ttft_s = s.ttft_s or now - run.arrived
        s.first_emitted = s.first_emitted or emitted
        s.decode_s = now - run.arrived - s.ttft_s


class Served:
    """The real HTTP server in a thread of its own, on a free port. `with Served(engine, tok) as s: s.client()`

    Grammars are tried with more patience than a server has: whoever runs the tests may have other work for the
    processors."""

    def __init__(
        self, engine: Any, tok: Tokenizer, max_context: int = 2048, vocab: int = VOCAB, **settings: Any
    ) -> None:
        from outrider.server.main import HttpServer
        from outrider.server.model_info import ServedModel as ServerBackend
        from outrider.server.settings import ServerSettings

        self.engine = engine
        self._clients: dict[str, Any] = {}
        vision = settings.pop("vision", "this model takes no images")
        audio = settings.pop("audio", "this model takes no sound")
        self.server = HttpServer(
            ServerBackend(engine, tok, vocab, max_context, "drafter: fake", vision=vision, audio=audio),
            ServerSettings(**{"model_name": "fake", "port": 0, **settings}),
        )
        self.state = self.server.app.state.server
        self.model = self.state.pool.loaded[0]
        self._until = ExitStack()

    def __enter__(self) -> Served:
        self._until.enter_context(patch("outrider.server.grammars.PATIENCE_S", PATIENCE))
        self.url = self._until.enter_context(running(self.server))
        self.port = int(self.url.rpartition(":")[2])
        return self

    def __exit__(self, *_: object) -> None:
        self._until.close()
        for client in self._clients.values():
            client.close()

    @cached_property
    def http(self) -> Any:
        """A connection a request, none of them kept; for those who have seconds to wait on a busy machine, not httpx's
        five."""
        import httpx

        self._clients["http"] = client = httpx.Client(
            base_url=self.url, timeout=PATIENCE, limits=httpx.Limits(max_keepalive_connections=0)
        )
        return client

    def client(self, key: str = "none") -> Any:
        """One client a key: making one costs a tenth of a second."""
        import openai

        if key not in self._clients:
            self._clients[key] = openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=PATIENCE)
        return self._clients[key]

    def settle(self) -> None:
        """Wait until nothing is in flight."""
        until(
            lambda: not (self.state.admission.in_flight or self.engine.busy),
            lambda: f"{self.state.admission.in_flight} in flight",
        )
