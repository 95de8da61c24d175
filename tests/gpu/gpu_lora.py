"""Adapters on a GPU: mixed batches against each request alone, on the kernels' real shapes, and what a step costs.

    PYTHONPATH=src:.:benchmarks python3 tests/gpu/gpu_lora.py [SIZE...]

Sizes are Gemma 4's, with few layers and random weights. Tokens and log-probabilities must be equal to the last bit.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
from tests.engines import run_joining
from tests.gpu.engines import engine_of
from tests.lora import write_adapter

from gpu_rig import Rig
from outrider.engine.adapters import AdapterPool
from outrider.engine.step import Request
from outrider.types import SamplingParams
from outrider.weights.adapter import load_adapter

LAYERS = {"E2B": 10, "31B": 6, "26B-A4B": 6, "12B": 6}
NAMES = ("a", "b", "c", "d")


def adapters(rig: Rig) -> AdapterPool:
    to, folder = (rig.config, rig.ops, rig.model.dtype, rig.device), Path(mkdtemp())
    pool = AdapterPool(rig.model, lambda name, path: load_adapter(name, path, *to))
    for i, name in enumerate(NAMES):
        pool.add(name, str(write_adapter(rig.config, folder / name, seed=i, rank=(16, 8, 4, 64)[i], size=0.1)))
    return pool


def request(i: int, vocab: int, k: int, tree: int | None = None) -> Request:
    prompt = torch.randint(3, vocab, (9 + 23 * i,), generator=torch.Generator().manual_seed(i)).tolist()
    params = SamplingParams(max_tokens=24, ignore_eos=True, logprobs=1, temperature=0.9 * (i % 2), seed=i)
    name = (None, *NAMES)[i % 5]
    return Request(str(i), prompt, params, k, bool(k), tree=tree, adapter=name)


def check(size: str) -> None:
    with Rig.of(size, LAYERS[size], slots=9, context=1024) as rig:
        pool, vocab, told = adapters(rig), rig.config.vocab_size, dict[str, list[Any]]()
        alone: dict[str, list[int]] = {}
        for i in range(8):
            engine = engine_of(None, rig)
            engine.runner.adapters = pool
            alone |= run_joining(engine, [(0, request(i, vocab, 0))], logprobs=told)
        wrong = []
        for k, tree in ((0, None), (1, None), (4, None), (8, None), (4, 8)):
            engine, mixed = engine_of(None, rig), dict[str, list[Any]]()
            engine.runner.adapters = pool
            got = run_joining(engine, [(i % 3, request(i, vocab, k, tree)) for i in range(8)], logprobs=mixed)
            same = [got[r] == alone[r] and mixed[r] == told[r] for r in alone]
            wrong += [(k, tree, i) for i, ok in enumerate(same) if not ok]
            torch.cuda.synchronize()
        print(f"{size}: {'equal to the last bit' if not wrong else f'WRONG {wrong}'}", flush=True)


def main() -> None:
    began = time.perf_counter()
    for size in sys.argv[1:] or LAYERS:
        try:
            check(size)
        except Exception as error:  # the next size is tried all the same
            import traceback

            traceback.print_exc()
            print(f"{size}: {type(error).__name__}: {error}", flush=True)
    print(f"{time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
