"""Compiles grammars for requests, within limits: each is tried in a sandbox process first (grammar_sandbox.py) and
cached for repeated requests.

A trial over its limits is a 400 that names the field; when a client disconnects, its trial is cancelled. Clients take
turns. The cache holds at most `KEEP` bytes of compiled grammars; it evicts those of the client with the most first.
Refusals are cached, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import sys
from collections import Counter, OrderedDict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from ..engine.child_process import ChildLost, ChildProcess
from ..engine.grammar import CompiledGrammar, GrammarCompiler
from ..engine.text import Tokenizer
from ..types import OutriderError
from .errors import ApiError, bad
from .fair import FairGate
from .grammar_source import MAX_CHARS, GrammarSource

log = logging.getLogger("outrider")
SANDBOX = "outrider.server.grammar_sandbox"
# of one trial: processor time, bytes, and seconds by the clock
SECONDS = 1.0
MEMORY = 192 << 20
PATIENCE = 4.0
# bytes of all together; and what a refusal counts for
KEEP = 32 << 20
REFUSAL = 32 << 10
# trials; and of one client behind them
AT_ONCE = 2
WAITING = 8


@dataclass(frozen=True)
class _Kept:
    grammar: CompiledGrammar | str  # or why it is refused
    bytes: int
    client: str  # the client that sent it


def stand_back() -> None:
    """This thread leaves most of the processor to others; on Linux threads have priorities of their own."""
    if sys.platform == "linux":
        os.nice(10)  # of this thread


class Grammars:
    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab = vocab_size
        self._gate = FairGate(AT_ONCE, WAITING, "a grammar")
        self._kept: OrderedDict[bytes, _Kept] = OrderedDict()  # by the source's digest, the latest asked for last
        self._sandbox = ChildProcess(SANDBOX, self._setup)
        # The compiler releases the GIL while it works, and leaves most of the processor to decoding.
        self._thread = ThreadPoolExecutor(1, "outrider-grammar", initializer=stand_back)

    async def get(self, source: GrammarSource, client: str) -> CompiledGrammar:
        """The grammar, or an ApiError. Cancel it, and what it has set going ends."""
        if len(source.payload) > MAX_CHARS:
            message = f"{source.field}: at most {MAX_CHARS} characters can be turned into a grammar."
            raise bad(message, source.field, "grammar_too_complex")
        if (known := self._known(source)) is not None:
            return known
        async with self._gate.enter(client):
            if (known := self._known(source)) is not None:  # another request has compiled the same in the meantime
                return known
            said = await self._trial(source)
            if "error" in said:
                self._keep(source, _Kept(said["error"], REFUSAL, client))
                raise _refusal(source, said["error"])
            return await self._compile(source, said, client)

    @cached_property
    def _compiler(self) -> GrammarCompiler:
        return GrammarCompiler(self._tokenizer.json, self._vocab, sorted(self._tokenizer.eos_ids))

    def start(self) -> None:
        """Make the compiler now, before connections come: it holds the interpreter for 0.2 s with 49k tokens."""
        with contextlib.suppress(OutriderError):  # told with the first grammar
            _ = self._compiler

    def _setup(self) -> bytes:
        known = {"tokenizer": self._tokenizer.json, "vocab": self._vocab, "eos": sorted(self._tokenizer.eos_ids)}
        return json.dumps({**known, "seconds": SECONDS, "memory": MEMORY}).encode()

    def close(self) -> None:
        self._sandbox.close()
        self._thread.shutdown(wait=False)

    def _known(self, source: GrammarSource) -> CompiledGrammar | None:
        if source.digest not in self._kept:
            return None
        self._kept.move_to_end(source.digest)
        known = self._kept[source.digest].grammar
        if isinstance(known, str):
            raise _refusal(source, known)
        return known

    async def _compile(self, source: GrammarSource, said: dict[str, Any], client: str) -> CompiledGrammar:
        text = said["text"]
        try:
            loop = asyncio.get_running_loop()
            grammar = await loop.run_in_executor(self._thread, lambda: self._compiler.compile(text))
        except OutriderError as e:
            raise _refusal(source, str(e)) from e
        if said["unenforced"]:
            log.warning("%s: schema keywords that are not enforced: %s", source.field, said["unenforced"])
            grammar = replace(grammar, unenforced=said["unenforced"])
        self._keep(source, _Kept(grammar, said["bytes"] + len(text), client))
        return grammar

    def _keep(self, source: GrammarSource, made: _Kept) -> None:
        """A client with a thousand grammars must not evict another client's grammar."""
        self._kept[source.digest] = made
        while sum(k.bytes for k in self._kept.values()) > KEEP:
            of: Counter[str] = Counter()
            for kept in self._kept.values():
                of[kept.client] += kept.bytes
            most = of.most_common(1)[0][0]
            del self._kept[next(digest for digest, kept in self._kept.items() if kept.client == most)]

    async def _trial(self, source: GrammarSource) -> dict[str, Any]:
        """The sandbox's answer, through a connection of its own: closed, it ends what it has set going."""
        try:
            mine = await asyncio.to_thread(self._sandbox.connect)
            reader, writer = await asyncio.open_unix_connection(sock=mine)
            try:
                writer.write(json.dumps([source.kind, source.payload, source.field]).encode() + b"\n")
                await reader.readexactly(1)  # it begins
                async with asyncio.timeout(PATIENCE):
                    answer: dict[str, Any] = json.loads(await reader.read())
                return answer
            finally:
                writer.transport.abort()
        except TimeoutError:
            message = f"{source.field}: the server is too busy to try a grammar as large as this; try again."
            raise ApiError(503, message, source.field, "busy", retry_after=5) from None
        except (ChildLost, OSError, EOFError, ValueError):
            raise ApiError(503, "The process that tries grammars has ended; try again.", retry_after=1) from None


def _refusal(source: GrammarSource, why: str) -> ApiError:
    return bad(f"{source.field}: {why}.", source.field, "invalid_grammar")
