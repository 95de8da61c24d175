"""LoRA adapters of one engine: their names and paths, the loaded ones, and the model that applies them.

One more than `max_adapters` evicts the least recently used, which is loaded again when needed. A request holds its
adapter until it ends, whatever is evicted or replaced.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..cache.store import upload
from ..models.adapted import AdaptedModel, weight_names
from ..models.decoder import TextModel
from ..ops.adapter_slots import AdapterSlots, SlotOps, row_ranges
from ..ops.lowrank import AdaptedOps, Adapter, row_groups
from ..types import OutriderError, require

log = logging.getLogger("outrider")
NAME = re.compile(r"[A-Za-z0-9][\w.\-]{0,99}")


class AdapterPool:
    """Thread-safe: a server loads an adapter while its engine runs."""

    def __init__(self, model: TextModel, load: Callable[[str, str], Adapter], max_adapters: int = 8):
        """load(name, path): reads an adapter for this model."""
        self.model, self.load, self.max_adapters = model, load, max_adapters
        self.paths: dict[str, str] = {}
        self._loaded: dict[str, Adapter] = {}  # least recently used first
        self._names = weight_names(model)
        self.slots: AdapterSlots | None = None  # adapters in use, at the addresses that captured steps read
        if model.ops.capabilities.adapter_slots:
            self.slots = AdapterSlots(max_adapters, model.dtype, model.device)
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """Bytes on the compute device."""
        if self.slots is not None:
            return self.slots.nbytes
        return sum(adapter.nbytes for adapter in list(self._loaded.values()))

    def add(self, name: str, path: str) -> Adapter:
        if not NAME.fullmatch(name):
            raise OutriderError(f"adapter name {name[:60]!r}: letters, digits, '.', '_' and '-' only")
        require(name not in self.paths, f"adapter {name!r} is loaded already: unload it first")
        adapter = self.load(name, path)
        with self._lock:
            require(name not in self.paths, f"adapter {name!r} is loaded already: unload it first")
            self.paths[name] = path
            self._keep(name, adapter)
        log.info("adapter %s: %.1f MiB, %d weights", name, adapter.nbytes / 2**20, len(adapter.parts))
        return adapter

    def remove(self, name: str) -> None:
        """Running requests keep it until they end."""
        with self._lock:
            if self.paths.pop(name, None) is None:
                raise OutriderError(self._unknown(name))
            self._loaded.pop(name, None)

    def get(self, name: str) -> Adapter:
        with self._lock:
            path, adapter = self.paths.get(name), self._loaded.get(name)
        if path is None:
            raise OutriderError(self._unknown(name))
        if adapter is None:
            adapter = self.load(name, path)
        with self._lock:
            if self.paths.get(name) == path:
                self._keep(name, adapter)
        return adapter

    def model_for(self, adapters: Sequence[Adapter | None], counts: Sequence[int]) -> AdaptedModel:
        """The model for a pass in which sequence i has `counts[i]` rows and uses `adapters[i]`."""
        if self.slots is None:
            groups = row_groups(adapters, counts, self.model.device)
            return AdaptedModel(self.model, AdaptedOps(self.model.ops, self._names, groups))
        ranges = row_ranges(self.slots.place(adapters), counts)
        return self.slot_model(upload(ranges, torch.int32, self.model.device))

    def slot_model(self, ranges: Tensor) -> AdaptedModel:
        """The model for passes whose rows use the slots that `ranges` (ops.adapter_slots) names when they run."""
        assert self.slots is not None
        return AdaptedModel(self.model, SlotOps(self.model.ops, self._names, self.slots, ranges))

    def _keep(self, name: str, adapter: Adapter) -> None:
        self._loaded.pop(name, None)
        self._loaded[name] = adapter
        while len(self._loaded) > self.max_adapters:
            oldest = next(iter(self._loaded))
            del self._loaded[oldest]
            log.info("adapter %s leaves memory: more than %d are in use", oldest, self.max_adapters)

    def _unknown(self, name: str) -> str:
        known = ", ".join(self.paths) or "none"
        return f"there is no adapter {str(name)[:60]!r}; loaded: {known}"
