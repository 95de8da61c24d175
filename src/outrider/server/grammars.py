"""Compiles grammars for requests, within limits: each is tried in a sandbox process first (grammar_sandbox.py) and
cached for repeated requests.

A trial over its limits is a 400 that names the field; when a client disconnects, its trial is cancelled. A large
grammar is first tried on idle processors only: on a busy machine that may end with a 503. Sent again, the grammar gets
ordinary priority and more time, and the result is final. Clients take turns. The cache holds at most `MAX_BYTES` of
compiled grammars and evicts those of the client with the most first. Refusals are cached, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import sys
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from ..engine.child_process import ChildLost, ChildProcess
from ..engine.grammar import CompiledGrammar, GrammarCompiler
from ..engine.text import Tokenizer
from ..platforms.limits import lower_priority
from ..types import OutriderError
from .errors import ApiError, bad
from .fair import FairGate
from .grammar_source import MAX_CHARS, GrammarSource

log = logging.getLogger("outrider")
SANDBOX = "outrider.server.grammar_sandbox"
# limits of one trial: processor time, memory
CPU_SECONDS = 1.0
MEMORY = 192 << 20
# wall-clock seconds of a grammar's first trial, and of the one after a 503
PATIENCE_S = 4.0
LAST_PATIENCE_S = 20.0
CALL_SECONDS = 10.0  # wall-clock seconds of a trial without fork
RETRY_S = 5  # after a 503; until then the same grammar gets the same 503
MAX_BUSY = 256  # maximum grammars whose 503 is remembered
MAX_BYTES = 32 << 20  # maximum size of the cache
REFUSAL_BYTES = 32 << 10  # assumed size of a cached refusal
# trials at once; waiting trials of one client
AT_ONCE = 2
WAITING = 8


@dataclass(frozen=True)
class CachedGrammar:
    grammar: CompiledGrammar | str  # or the reason for its refusal
    num_bytes: int
    client: str  # the client that sent it


def lower_thread_priority() -> None:
    """Leaves most of the processor to other threads. On Linux each thread has its own priority."""
    if sys.platform == "linux":
        lower_priority(10)


class Grammars:
    def __init__(self, tokenizer: Tokenizer, vocab_size: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._tokenizer = tokenizer
        self._vocab = vocab_size
        self._clock = clock
        self._gate = FairGate(AT_ONCE, WAITING, "a grammar")
        self._cache: OrderedDict[bytes, CachedGrammar] = (
            OrderedDict()
        )  # by the source's digest, most recently used last
        self._busy: OrderedDict[bytes, float] = OrderedDict()  # when a digest got a 503
        self._sandbox = ChildProcess(SANDBOX, self._setup, CALL_SECONDS if sys.platform == "win32" else None)
        # The compiler releases the GIL while it works, and leaves most of the processor to decoding.
        self._thread = ThreadPoolExecutor(1, "outrider-grammar", initializer=lower_thread_priority)

    async def get(self, source: GrammarSource, client: str) -> CompiledGrammar:
        """The compiled grammar; raises ApiError. Cancelling the call ends its trial."""
        if len(source.payload) > MAX_CHARS:
            message = f"{source.field}: at most {MAX_CHARS} characters can be turned into a grammar."
            raise bad(message, source.field, "grammar_too_complex")
        cached = self._cached(source)
        if cached is not None:
            return cached
        async with self._gate.enter(client):
            cached = self._cached(source)  # another request may have compiled it meanwhile
            if cached is not None:
                return cached
            result = await self._try(source)
            if "error" in result:
                self._store(source, CachedGrammar(result["error"], REFUSAL_BYTES, client))
                raise _refusal(source, result["error"])
            return await self._compile(source, result, client)

    @cached_property
    def _compiler(self) -> GrammarCompiler:
        return GrammarCompiler(self._tokenizer.json, self._vocab, sorted(self._tokenizer.eos_ids))

    def start(self) -> None:
        """Makes the compiler before connections come: that holds the GIL for 0.2 s with 49k tokens."""
        with contextlib.suppress(OutriderError):  # reported with the first grammar
            _ = self._compiler

    def _setup(self) -> bytes:
        setup = {"tokenizer": self._tokenizer.json, "vocab": self._vocab, "eos": sorted(self._tokenizer.eos_ids)}
        return json.dumps({**setup, "seconds": CPU_SECONDS, "memory": MEMORY}).encode()

    def close(self) -> None:
        self._sandbox.close()
        self._thread.shutdown(wait=False)

    def _cached(self, source: GrammarSource) -> CompiledGrammar | None:
        """The cached grammar, None if there is none. Raises a cached refusal or a recent 503."""
        if source.digest in self._cache:
            self._cache.move_to_end(source.digest)
            grammar = self._cache[source.digest].grammar
            if isinstance(grammar, str):
                raise _refusal(source, grammar)
            return grammar
        busy_since = self._busy.get(source.digest)
        if busy_since is not None and self._clock() - busy_since < RETRY_S:
            raise _too_busy(source)
        return None

    async def _compile(self, source: GrammarSource, result: dict[str, Any], client: str) -> CompiledGrammar:
        text = result["text"]
        try:
            loop = asyncio.get_running_loop()
            grammar = await loop.run_in_executor(self._thread, lambda: self._compiler.compile(text))
        except OutriderError as e:
            raise _refusal(source, str(e)) from e
        if result["unenforced"]:
            log.warning("%s: schema keywords that are not enforced: %s", source.field, result["unenforced"])
            grammar = replace(grammar, unenforced=result["unenforced"])
        self._store(source, CachedGrammar(grammar, result["bytes"] + len(text), client))
        return grammar

    def _store(self, source: GrammarSource, entry: CachedGrammar) -> None:
        """Caches a result. If the cache is full, the client with the most bytes loses its oldest, so a client with a
        thousand grammars evicts only its own."""
        self._cache[source.digest] = entry
        self._busy.pop(source.digest, None)
        while sum(cached.num_bytes for cached in self._cache.values()) > MAX_BYTES:
            num_bytes: Counter[str] = Counter()  # by client
            for cached in self._cache.values():
                num_bytes[cached.client] += cached.num_bytes
            largest = num_bytes.most_common(1)[0][0]
            del self._cache[next(digest for digest, cached in self._cache.items() if cached.client == largest)]

    async def _try(self, source: GrammarSource) -> dict[str, Any]:
        """The sandbox's result. The first trial that takes too long is a 503, the next one a refusal."""
        last = source.digest in self._busy
        patience = LAST_PATIENCE_S if last else PATIENCE_S
        try:
            return await self._trial(source, yielding=not last, patience=patience)
        except TimeoutError:
            if last:
                limit = f"{CPU_SECONDS:g} s of processor time"
                return {"error": f"it can't be tried within {patience:g} s, with {limit}: make it simpler"}
            self._busy[source.digest] = self._clock()
            while len(self._busy) > MAX_BUSY:
                self._busy.popitem(last=False)
            raise _too_busy(source) from None
        except (ChildLost, OSError, EOFError, ValueError):
            raise ApiError(503, "The process that tries grammars has ended; try again.", retry_after=1) from None

    async def _trial(self, source: GrammarSource, yielding: bool, patience: float) -> dict[str, Any]:
        """Runs a trial through a connection of its own; closing that ends it. `yielding`: soon on idle processors
        only."""
        if sys.platform == "win32":
            return await self._trial_by_call(source)
        connection = await asyncio.to_thread(self._sandbox.connect)
        reader, writer = await asyncio.open_unix_connection(sock=connection)
        try:
            writer.write(json.dumps([source.kind, source.payload, source.field, yielding]).encode() + b"\n")
            await reader.readexactly(1)  # the trial begins
            async with asyncio.timeout(patience):
                answer: dict[str, Any] = json.loads(await reader.read())
            return answer
        finally:
            writer.transport.abort()

    async def _trial_by_call(self, source: GrammarSource) -> dict[str, Any]:
        """Runs a trial without a connection. A late one ends with its process; the next trial starts another."""
        call = json.dumps([source.kind, source.payload, source.field]).encode()
        try:
            answer: dict[str, Any] = json.loads(await asyncio.to_thread(self._sandbox.call, call))
        except ChildLost:
            return {"error": f"it takes more than {CALL_SECONDS:g} seconds or too much memory: make it simpler"}
        return answer


def _refusal(source: GrammarSource, why: str) -> ApiError:
    return bad(f"{source.field}: {why}.", source.field, "invalid_grammar")


def _too_busy(source: GrammarSource) -> ApiError:
    message = f"{source.field}: the server is too busy to try a grammar as large as this; try again."
    return ApiError(503, message, source.field, code="busy", retry_after=RETRY_S)
