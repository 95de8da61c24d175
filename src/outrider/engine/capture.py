"""CUDA graphs: `Graph` is a captured function, `GraphPool` the memory that several graphs share, and `GraphCache` the
captured graphs by key.

`Graph` runs its function once and captures it; `replay` runs the captured kernels again on the same tensors. On a
device without graphs `replay` calls the function itself, so the same code is tested on the CPU.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

import torch
from torch import Tensor

# torch captures one graph at a time in a process, and another model may be loading in another thread
CAPTURE_LOCK = threading.Lock()
KeyT = TypeVar("KeyT", bound=Hashable)
GraphT = TypeVar("GraphT")


class GraphPool:
    """Memory that graphs share. It owns a graph: a pool must not be captured into after its last graph is gone."""

    def __init__(self, device: torch.device):
        self.device = device
        self.anchor: torch.cuda.CUDAGraph | None = None

    def handle(self) -> torch.cuda._POOL_HANDLE:
        if self.anchor is None:
            self._handle = torch.cuda.graph_pool_handle()
            self.anchor = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.anchor, pool=self._handle, capture_error_mode="thread_local"):
                self.mark = torch.zeros(1, device=self.device)
        return self._handle


class Graph:
    """A captured function of no arguments. `result`: what it returned, on a GPU always the same tensor."""

    def __init__(self, fn: Callable[[], Tensor | None], device: torch.device, pool: GraphPool | None = None):
        """Runs fn once before it is captured. pool: graphs that never run at the same time may share memory."""
        self.fn = fn
        self.graph: torch.cuda.CUDAGraph | None = None
        self.result: Tensor | None = None
        if device.type == "cuda":
            with CAPTURE_LOCK:
                self._capture(device, pool)

    def _capture(self, device: torch.device, pool: GraphPool | None) -> None:
        side = torch.cuda.Stream(device)
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            self.fn()
        torch.cuda.current_stream(device).wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(
            self.graph, pool=pool.handle() if pool is not None else None, capture_error_mode="thread_local"
        ):
            self.result = self.fn()

    def replay(self) -> None:
        if self.graph is None:
            self.result = self.fn()
        else:
            self.graph.replay()


class GraphCache(Generic[KeyT, GraphT]):
    """Graphs by key, all in one pool of memory, and the keys that could not be captured, which are not tried again."""

    def __init__(self, device: torch.device, pool: GraphPool):
        self.device = device
        self.pool = pool
        self.graphs: dict[KeyT, GraphT] = {}
        self.num_captures = 0
        self.refused: set[KeyT] = set()

    def capture(self, key: KeyT, fn: Callable[[], Tensor | None], strict: bool) -> Graph | str:
        """The function as a graph, or why it cannot be captured (raised if strict, or on a device without graphs)."""
        self.num_captures += 1
        try:
            with torch.inference_mode():
                return Graph(fn, self.device, self.pool)
        except Exception as error:
            if self.device.type != "cuda" or strict:
                raise
            self.refused.add(key)
            return f"{type(error).__name__}: {error}".splitlines()[0]
