"""LoRA adapters of one engine: their names and paths, the loaded ones, and the model that applies them.

One more than `max_adapters` evicts the least recently used, which is loaded again when needed. A request holds its
adapter until it ends, whatever is evicted or replaced.
"""

from __future__ import annotations

import itertools
import logging
import re
import threading
from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor

from ..cache.store import upload
from ..models.decoder import TextModel
from ..ops.adapter_slots import AdapterSlots, SlotOps, row_ranges
from ..ops.formats import DeviceWeight
from ..ops.lowrank import AdaptedOps, Adapter, row_groups
from ..ops.reference import Backend
from ..types import OutriderError, require

log = logging.getLogger("outrider")
ADAPTED = ("qkv", "out", "gate_up", "down")  # fields of a `Block`, and the suffixes of their canonical names
NAME = re.compile(r"[A-Za-z0-9][\w.\-]{0,99}")


def adaptable_weights(model: TextModel) -> dict[str, DeviceWeight]:
    """The weights that an adapter may change, by canonical name."""
    names = ADAPTED if model.ple_input is None else (*ADAPTED, "ple_gate", "ple_out")
    weights = {f"layers.{i}.{name}": getattr(block, name) for i, block in enumerate(model.blocks) for name in names}
    return weights if model.ple_input is None else {**weights, "ple_proj": model.ple_input.proj}


def weight_names(model: TextModel) -> dict[int, str]:  # by `id` of the weight
    return {id(weight): name for name, weight in adaptable_weights(model).items()}


class AdapterPool:
    """Thread-safe: a server loads an adapter while its engine runs."""

    def __init__(self, model: TextModel, load: Callable[[str, str], Adapter], max_adapters: int = 8):
        """load(name, path): reads an adapter for this model."""
        self.model = model
        self.load = load
        self.max_adapters = max_adapters
        self.paths: dict[str, str] = {}  # replaced, never changed: readers in other threads need no lock
        self._versions: dict[str, int] = {}  # by name; a name that is added again may have other weights
        self._num_added = itertools.count()
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

    def add(self, name: str, path: str, replace: bool = False) -> Adapter:
        """Load an adapter, then give it the name. `replace`: another adapter may have that name, and loses it.

        A failing load changes nothing. Running requests keep the adapter that they began with.
        """
        if not NAME.fullmatch(name):
            raise OutriderError(f"adapter name {name[:60]!r}: letters, digits, '.', '_' and '-' only")
        name_taken = f"adapter {name!r} is loaded already: unload it first"
        require(replace or name not in self.paths, name_taken)
        adapter = self.load(name, path)
        with self._lock:
            require(replace or name not in self.paths, name_taken)
            self.paths = {**self.paths, name: path}
            self._versions[name] = next(self._num_added)
            self._keep(name, adapter)
        log.info("adapter %s: %.1f MiB, %d weights", name, adapter.nbytes / 2**20, len(adapter.parts))
        return adapter

    def remove(self, name: str) -> None:
        """Running requests keep it until they end."""
        with self._lock:
            require(name in self.paths, self._unknown(name))
            self.paths = {other: path for other, path in self.paths.items() if other != name}
            del self._versions[name]
            self._loaded.pop(name, None)

    def get(self, name: str) -> Adapter:
        with self._lock:
            path = self.paths.get(name)
            version = self._versions.get(name)
            adapter = self._loaded.get(name)
        if path is None:
            raise OutriderError(self._unknown(name))
        if adapter is None:
            adapter = self.load(name, path)
        with self._lock:
            if self._versions.get(name) == version:  # neither removed nor replaced meanwhile
                self._keep(name, adapter)
        return adapter

    def model_for(self, adapters: Sequence[Adapter | None], counts: Sequence[int]) -> TextModel:
        """The model for a pass in which sequence i has `counts[i]` rows and uses `adapters[i]`."""
        if self.slots is None:
            groups = row_groups(adapters, counts, self.model.device)
            return self.model.with_ops(cast(Backend, AdaptedOps(self.model.ops, self._names, groups)))
        ranges = row_ranges(self.slots.place(adapters), counts)
        return self.slot_model(upload(ranges, torch.int32, self.model.device))

    def slot_model(self, ranges: Tensor) -> TextModel:
        """The model for passes whose rows use the slots that `ranges` (ops.adapter_slots) names when they run."""
        assert self.slots is not None
        return self.model.with_ops(cast(Backend, SlotOps(self.model.ops, self._names, self.slots, ranges=ranges)))

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
