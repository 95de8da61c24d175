"""One CUDA graph a cycle: capture a function on static tensors once, replay it with a single launch.

What is captured must not wait for the device and must read and write the same tensors every time: inputs are copied into
place before a replay, results are read from where they stand. On a device without graphs the function itself runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class Graph:
    """A captured function of no arguments. `result` is what it returned: on a GPU the same tensors after every replay."""

    def __init__(self, fn: Callable[[], Any], device: torch.device, pool: Any = None, warm: int = 2):
        """Runs fn `warm` times (kernels are compiled, caches filled) before it is captured. pool: graphs that never run at the
        same time may share their memory (`memory_pool()`)."""
        self.fn, self.graph, self.result = fn, None, None
        if device.type != "cuda":
            return
        side = torch.cuda.Stream(device)
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            for _ in range(warm):
                fn()
        torch.cuda.current_stream(device).wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, pool=pool):
            self.result = fn()

    def replay(self) -> None:
        if self.graph is None:
            self.result = self.fn()
        else:
            self.graph.replay()


def memory_pool(device: torch.device) -> Any:
    return torch.cuda.graph_pool_handle() if device.type == "cuda" else None
