"""Measures this machine's memory bandwidth and arithmetic rate with the engine's own kernels, for `outrider predict
MODEL --gpu here`.

On a CPU, a product of one row and one of many rows are timed over more weights than the caches hold, in the model's
weight format. The slope is the arithmetic per row, and the rest of the one-row time is the time to move the bytes, so
the prediction is about these very products. On a GPU, memory reads and matrix products are timed for a second.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from ..platforms.memory import total_bytes
from .machines import CPU_RATES, Hardware, cpu

# 100 million weights
SIDE = (2048, 4096)
MATRICES = 12
ROWS = 9
REPEATS = 7
MIN_SECONDS = 1.0  # of a measurement: on a busy machine the fastest of a few runs is a slow one, too
SUM_REACH = 0.915  # share of an H200's bandwidth that a sum over memory reaches
PRODUCT_REACH = 0.75  # share of its matrix rate that a large product reaches


def here(weight_bytes: float) -> Hardware:
    if torch.cuda.is_available():
        return _gpu()
    from ..ops import choose

    ops = choose("cpu")
    dense = torch.randn(SIDE, generator=torch.Generator().manual_seed(0))
    mode = None
    if weight_bytes < 1.5:
        mode = "int8" if weight_bytes >= 0.8 else "int4"
    if mode not in ops.capabilities.quantizes:
        mode = None
    weights = [ops.prepare(dense.clone()) if mode is None else ops.quantize(dense, mode) for _ in range(MATRICES)]
    if mode is None:
        weight_bytes = dense.element_size()
    x = torch.randn((ROWS, SIDE[1]), generator=torch.Generator().manual_seed(1))

    def products(rows: int) -> None:
        for weight in weights:
            ops.linear(x[:rows], weight)

    one = _best(lambda: products(1))
    many = _best(lambda: products(ROWS))
    memory = total_bytes() / 1e9
    return fitted(one, many, rows=ROWS, weights=MATRICES * SIDE[0] * SIDE[1], weight_bytes=weight_bytes, memory=memory)


def fitted(one: float, many: float, rows: int, weights: int, weight_bytes: float, memory: float) -> Hardware:
    """A machine on which a product with this many weights takes `one` seconds for one row and `many` for `rows`."""
    row = max((many - one) / (rows - 1), 0.01 * one)
    moving = max(one - row, 0.1 * one)
    bandwidth = weights * weight_bytes / moving / 1e9
    rate = 2.0 * weights / row / 1e12
    rates = CPU_RATES.scaled(reach=1.0, rate=1.0)
    return cpu("this CPU (measured)", bandwidth=bandwidth, rate=rate, memory=memory, rates=rates)


def _gpu() -> Hardware:
    big = torch.ones((2 << 30) // 4, dtype=torch.float32, device="cuda")
    side = 8192
    square = torch.ones((side, side), dtype=torch.bfloat16, device="cuda")
    bandwidth = big.numel() * 4 / _best(lambda: big.sum()) / 1e9
    rate = 2.0 * side**3 / _best(lambda: square @ square) / 1e12
    memory = torch.cuda.get_device_properties(0).total_memory / 1e9
    # rates are shares of vendors' figures; these two measurements reach the given share of them
    return Hardware(
        f"{torch.cuda.get_device_name()} (measured)", bandwidth / SUM_REACH, rate / PRODUCT_REACH, memory=memory
    )


def _best(run: Callable[[], object]) -> float:
    """Seconds of the fastest of REPEATS runs or more, for MIN_SECONDS: other load only ever adds time."""
    wait = torch.cuda.synchronize if torch.cuda.is_available() else (lambda: None)
    run()
    durations: list[float] = []
    ends = time.perf_counter() + MIN_SECONDS
    while len(durations) < REPEATS or time.perf_counter() < ends:
        wait()
        began = time.perf_counter()
        run()
        wait()
        durations.append(time.perf_counter() - began)
    return min(durations)
