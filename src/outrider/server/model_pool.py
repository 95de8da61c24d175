"""The models of one server, an LRU pool: loaded on request, unloaded when another model needs the memory.

A call acquires its model and releases it at its end. A model without calls may be unloaded, the least recently used
first. A request for a model that is not loaded waits in a queue. Once the head of the queue has waited longer than
`PATIENCE_S`, new requests for a model in its way queue behind it, so that no model stays loaded for ever because of its
own callers. One model is loaded or unloaded at a time, off the event loop; everything else here runs on the loop. The
end of the file reads a command line's models, `MODEL` or `name=MODEL`.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import logging
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Literal

import torch

from ..config import EngineConfig
from ..engine.adapters import AdapterPool
from ..engine.chat_template import TemplateProcess
from ..engine.memory import free_bytes, plan_kv_memory
from ..engine.metrics import Metrics
from ..llm import LLM
from ..types import OutriderError
from ..weights import hub
from ..weights.files import model_config
from ..weights.sizes import stored_size
from .errors import ApiError, shutting_down, where
from .fair import SPARE, TurnQueue
from .grammars import Grammars
from .model_info import UNKNOWN, ModelInfo, ServedModel
from .prepare import Preparer
from .runner import Runner
from .settings import ServerSettings, public_name, without_paths
from .standing import Standing
from .tokenizer_process import TokenizerProcess
from .trim import trim

log = logging.getLogger("outrider.server")
PATIENCE_S = 2.0
ALIAS = re.compile(r"([A-Za-z0-9][\w.:-]*)=(.+)")
SHARE = 0.8  # default share of the memory free at the start


class LoadedModel:
    """A loaded model with everything that answers for it. Constructed off the event loop, since that asks the
    tokenizer; `stop` is called on the loop."""

    def __init__(self, name: str, backend: ServedModel, settings: ServerSettings, standing: Standing) -> None:
        self.name = name
        self.backend = backend
        unused_s = 60.0 * settings.keep_prefixes
        self.runner = Runner(backend.engine, unused_s, settings.finish_prompts, background=standing.background)
        self.turns = TurnQueue(backend.places or settings.max_concurrent)
        self.grammars = Grammars(backend.tokenizer, backend.vocab_size)
        self.tokenizer_process = TokenizerProcess(lambda: backend.tokenizer.json, backend.tokenizer.ids_here)
        backend.tokenizer.elsewhere = self.tokenizer_process.ids
        self.template = TemplateProcess(backend.tokenizer.files.chat_template or "")
        backend.tokenizer.render_elsewhere = self.template.render
        self.prepare = Preparer(backend, replace(settings, model_name=name))

    async def stop(self) -> None:
        """Ends everything that runs. May be called twice."""
        await self.runner.stop()
        self.grammars.close()
        self.backend.tokenizer.elsewhere = None
        self.tokenizer_process.close()
        self.backend.tokenizer.render_elsewhere = None
        self.template.close()
        for encoder in (self.backend.vision, self.backend.audio):
            if not isinstance(encoder, str):
                encoder.close()


@dataclass(eq=False)
class PoolSlot:
    """A model's place in the pool: its name, how to load it, and its known properties."""

    name: str
    load: Callable[[], ServedModel]  # slow; called off the event loop
    size: int = 0  # bytes of weights and K/V; estimated until it was loaded once
    max_context: int = 0  # 0: unknown yet
    note: str = ""
    info: ModelInfo = UNKNOWN
    model: LoadedModel | None = None
    loading: bool = False
    users: int = 0
    used: int = 0  # number of the last acquisition, for LRU
    loads: int = 0
    evictions: int = 0

    @property
    def state(self) -> Literal["loaded", "loading", "unloaded"]:
        if self.loading:
            return "loading"
        return "unloaded" if self.model is None else "loaded"

    @property
    def adapters(self) -> AdapterPool | None:
        return self.model.backend.adapters if self.model is not None else None

    def adapter(self, name: str | None) -> str | None:
        """The adapter that a model name asks for: BASE:NAME, or NAME alone. Refuses a name with this base and an
        unknown adapter, so that the base never answers in an adapter's place."""
        names = self.adapters.paths if self.adapters is not None else {}
        if name is None or name == self.name or not names:
            return None
        adapter = name.removeprefix(self.name + ":")
        if adapter in names:
            return adapter
        if adapter != name and adapter != "latest":
            there = ", ".join(f"'{self.name}:{known}'" for known in names)
            message = f"The model '{name[:100]}' does not exist; this server has '{self.name}' and {there}."
            raise ApiError(404, message, "model", code="model_not_found")
        return None

    def take(self, model: LoadedModel) -> None:
        backend = model.backend
        self.model = model
        self.size = backend.nbytes or self.size
        self.max_context = backend.max_context
        self.note = backend.note
        self.info = backend.info if backend.info.family else self.info
        self.loads += 1


@dataclass(eq=False)
class _WaitingLoad:
    slot: PoolSlot
    turn: asyncio.Future[LoadedModel]
    since: float


class ModelPool:
    def __init__(self, slots: Sequence[PoolSlot], limit: int | None, settings: ServerSettings) -> None:
        """`limit`: maximum bytes of all loaded models together (a single one may exceed it); None: no limit."""
        self.slots = {slot.name: slot for slot in slots}
        self.limit = limit
        self._settings = settings
        self.standing = Standing()
        self._waiting: list[_WaitingLoad] = []
        self._swap: asyncio.Task[None] | None = None
        self._count = itertools.count(1)
        self._gone = Metrics()  # counters of unloaded engines

    @classmethod
    def of(cls, backend: ServedModel, settings: ServerSettings) -> ModelPool:
        """A pool of one model that is already loaded and stays."""
        pool = cls([PoolSlot(settings.model_name, lambda: backend)], None, settings)
        pool.load_first()
        return pool

    @classmethod
    def listed(
        cls,
        models: Mapping[str, str],
        load: Callable[[str], LLM],
        engine: EngineConfig,
        limit: int | None,
        settings: ServerSettings,
        cuda: bool,
    ) -> ModelPool:
        """A pool of models of which none is loaded yet. models: {name: what is loaded}. limit: bytes; None: a share of
        the free memory, and on a GPU one model at a time."""

        def slot(name: str, model: str) -> PoolSlot:
            def loaded() -> ServedModel:
                llm = load(model)
                return replace(ServedModel.of(llm), places=max(1, llm.engine.max_batch - SPARE))

            size, context, info = estimate(model, engine)
            return PoolSlot(name, loaded, size, max_context=context, info=info)

        if limit is None:
            limit = 0 if cuda else int(SHARE * free_bytes(torch.device("cpu")))
        return cls([slot(*one) for one in models.items()], limit, settings)

    # ---- lookup

    @property
    def first(self) -> PoolSlot:
        return next(iter(self.slots.values()))

    @property
    def loaded(self) -> list[LoadedModel]:
        return [slot.model for slot in self.slots.values() if slot.model is not None]

    @property
    def healthy(self) -> bool:
        return all(model.runner.healthy for model in self.loaded)

    def resolve(self, name: str | None) -> tuple[PoolSlot, str | None]:
        """The model that answers a request for `name`, and notes for the client. Without a name, the first model; a
        server's only model also answers to other names, as llama.cpp's does."""
        if name is not None and name not in self.slots:
            adapted = [slot for slot in self.slots.values() if slot.adapter(name) is not None]
            if adapted:
                return adapted[0], None
        if name is None or name in self.slots or len(self.slots) > 1:
            return self.find(name), None
        shown = "".join(c if c.isascii() and c.isprintable() else "?" for c in name[:100])
        return self.first, f"the model '{shown}' is not served here; '{self.first.name}' answered"

    def find(self, name: str | None) -> PoolSlot:
        """The model of this exact name; the first if `name` is empty."""
        if name is None:
            return self.first
        if name not in self.slots:
            there = ", ".join(f"'{known}'" for known in self.slots)
            message = f"The model '{name[:100]}' does not exist; this server has {there}."
            raise ApiError(404, message, "model", code="model_not_found")
        return self.slots[name]

    @property
    def metrics(self) -> Metrics:
        """Sums all engines' counters. They are plain integers of other threads, so no lock is needed."""
        return total([self._gone, *(m.backend.engine.metrics for m in self.loaded)])

    def load_first(self) -> None:
        """Loads the first model in this thread, before the server starts."""
        slot = self.first
        slot.take(LoadedModel(slot.name, slot.load(), self._settings, standing=self.standing))

    # ---- borrowing

    def start(self) -> None:
        """Must be called on the event loop that will serve."""
        for model in self.loaded:
            model.runner.start()

    def ready(self, slot: PoolSlot) -> bool:
        """True if the model can be acquired at once: it is loaded, and no other model has waited long for its
        memory."""
        head = self._waiting[0] if self._waiting else None
        late = head is not None and time.monotonic() - head.since > PATIENCE_S and slot in self._in_the_way(head.slot)
        return slot.model is not None and not late

    async def acquire(self, slot: PoolSlot) -> LoadedModel:
        """Returns the model, loaded. It stays loaded until released."""
        if slot.model is not None and self.ready(slot):
            return self._lend(slot, slot.model)
        waiting = _WaitingLoad(slot, asyncio.get_running_loop().create_future(), time.monotonic())
        self._waiting.append(waiting)
        self._tend()
        try:
            return await waiting.turn
        except asyncio.CancelledError:
            if waiting.turn.done() and not waiting.turn.cancelled() and waiting.turn.exception() is None:
                self.release(slot)
            elif waiting in self._waiting:
                self._waiting.remove(waiting)
                self._tend()  # others may have queued behind it
            raise

    def release(self, slot: PoolSlot) -> None:
        slot.users -= 1
        self._tend()

    async def stop(self) -> None:
        """Stops all models. May be called twice."""
        for waiting in self._waiting:
            if not waiting.turn.done():
                waiting.turn.set_exception(shutting_down())
        self._waiting = []
        if self._swap is not None:
            await asyncio.gather(self._swap, return_exceptions=True)
        for model in self.loaded:
            await model.stop()

    # ---- room

    def _lend(self, slot: PoolSlot, model: LoadedModel) -> LoadedModel:
        slot.users += 1
        slot.used = next(self._count)
        return model

    def _in_the_way(self, wanted: PoolSlot) -> list[PoolSlot]:
        """Loaded models that must go before this one fits: idle ones first, then the least recently used."""
        if self.limit is None:
            return []
        there = [s for s in self.slots.values() if s.model is not None and s is not wanted]
        there.sort(key=lambda s: (s.users > 0, s.used))
        over = sum(s.size for s in there) + wanted.size - self.limit
        out: list[PoolSlot] = []
        while over > 0 and there:
            out.append(there.pop(0))
            over -= out[-1].size
        return out

    def _tend(self) -> None:
        """Serves the queue as far as possible. Called after every change."""
        while self._waiting and self._swap is None:
            slot = self._waiting[0].slot
            if slot.model is not None:
                for turn in self._turns(slot):
                    turn.set_result(self._lend(slot, slot.model))
                continue
            leaving = self._in_the_way(slot)
            if any(s.users for s in leaving):
                return  # continued when its calls release it
            models = [(s, s.model) for s in leaving if s.model is not None]
            for s in leaving:
                s.model = None  # first of all, so that no call acquires it
            self._swap = asyncio.get_running_loop().create_task(self._load(slot, models))

    async def _load(self, slot: PoolSlot, leaving: list[tuple[PoolSlot, LoadedModel]]) -> None:
        slot.loading = True
        try:
            while leaving:
                await self._unload(*leaving.pop())
            began = time.monotonic()
            model = await asyncio.to_thread(
                lambda: LoadedModel(slot.name, slot.load(), self._settings, standing=self.standing)
            )
            model.runner.start()
            slot.take(model)
            log.info("loaded %s in %.1f s, %.2f GiB", slot.name, time.monotonic() - began, slot.size / 2**30)
        except Exception as e:
            why = without_paths(str(e)) if isinstance(e, OutriderError) else "see the server's log"
            log.error("could not load %s: %s", slot.name, e if isinstance(e, OutriderError) else where(e))
            message = f"The model '{slot.name}' could not be loaded: {why}."
            for turn in self._turns(slot):
                turn.set_exception(ApiError(503, message, "model", code="model_not_loaded"))
        finally:
            slot.loading = False
            self._swap = None
            self._tend()

    def _turns(self, slot: PoolSlot) -> list[asyncio.Future[LoadedModel]]:
        """Removes and returns the waiting turns of calls for this model."""
        turns = [w.turn for w in self._waiting if w.slot is slot and not w.turn.done()]
        self._waiting = [w for w in self._waiting if w.slot is not slot]
        return turns

    async def _unload(self, slot: PoolSlot, model: LoadedModel) -> None:
        await model.stop()
        counted = total([self._gone, model.backend.engine.metrics])
        self._gone = replace(counted, running=0, waiting=0, kv_bytes=0, free_pages={})
        slot.evictions += 1
        log.info("unloaded %s", slot.name)
        del model
        await asyncio.to_thread(_free)


def total(counted: Sequence[Metrics]) -> Metrics:
    """Sums metrics field by field."""
    out = Metrics()
    for metrics in counted:
        for f in fields(Metrics):
            sum_so_far = getattr(out, f.name)
            other = getattr(metrics, f.name)
            if isinstance(sum_so_far, dict):
                for key, value in list(other.items()):
                    sum_so_far[key] = sum_so_far.get(key, 0) + value
            elif isinstance(sum_so_far, list):
                setattr(out, f.name, [a + b for a, b in zip(sum_so_far, other)])
            else:
                setattr(out, f.name, sum_so_far + other)
    return out


def _free() -> None:
    """Returns an unloaded model's memory to the system."""
    frozen = gc.get_freeze_count() > 0
    gc.unfreeze()  # main.py froze the first model's objects: without this its cycles would never be collected
    trim()
    if frozen:
        gc.freeze()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def read_names(given: Sequence[str]) -> dict[str, str]:
    """Models by name."""
    out: dict[str, str] = {}
    for text in given:
        alias = None if Path(text).exists() else ALIAS.fullmatch(text)
        name, model = (alias[1], alias[2]) if alias else (public_name(text), text)
        if name in out:
            raise OutriderError(f"two models would have the name {name!r}: rename one of them, as in other={out[name]}")
        out[name] = model
    return out


def estimate(model: str, engine: EngineConfig) -> tuple[int, int, ModelInfo]:
    """Bytes of weights and K/V, context length and description, without loading. Raises if the model cannot be
    resolved."""
    files = hub.resolve(model, weights=False)
    config = model_config(files)
    dtype = torch.float16  # type of K/V on nearly every machine
    budget = plan_kv_memory(engine, config, dtype, free=free_bytes(torch.device("cpu")))
    position = sum(2 * config.layers[i].attn.kv_heads * config.layers[i].attn.head_dim * 2 for i in config.kv_layers)
    stored = stored_size(files, config)
    return int(stored.total) + position * budget.tokens, budget.max_context, ModelInfo.of(files, config, stored)
