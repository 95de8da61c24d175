"""Adapters on a GPU: mixed batches in captured steps against each request alone, and what a step costs.

    PYTHONPATH=src:.:benchmarks python3 tests/gpu/gpu_lora.py check [SIZE...]       # few layers, random weights
    PYTHONPATH=src:.:benchmarks python3 tests/gpu/gpu_lora.py check SIZE/3 ...      # one of CHECKED: processes may share
    PYTHONPATH=src:.:benchmarks python3 tests/gpu/gpu_lora.py cost 31B:int4 [--cycles 1x0,8x4]
    PYTHONPATH=src:.:benchmarks python3 tests/gpu/gpu_lora.py plan                  # without a GPU: what would run

Sizes are Gemma 4's; SIZE:int4 has 4-bit weights. Tokens and log-probabilities must be equal to the last bit. Cost: rank
16 on all linear modules, as many adapters as sequences, median milliseconds of a captured step without and with them
(all layers, graphs alone). Several sizes at once, each in a process: set OMP_NUM_THREADS, as their threads would wait
for each other.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
from tests.engines import run_joining
from tests.gpu.engines import engine_of
from tests.lora import write_adapter

from gpu_rig import SIZES, Rig, shallow
from outrider.engine.adapters import AdapterPool
from outrider.engine.engine import Engine
from outrider.engine.graphs import GraphExecutor
from outrider.engine.step import Request
from outrider.models.builtin_configs import BUILTIN_CONFIGS
from outrider.models.config import ModelConfig
from outrider.models.names import tensor_plan
from outrider.ops.adapter_slots import row_ranges
from outrider.ops.lowrank import Adapter, LowRank
from outrider.ops.triton import TritonOps
from outrider.types import SamplingParams
from outrider.weights.adapter import ADAPTABLE, load_adapter
from outrider.weights.load import dummy_weights

BEGAN = time.perf_counter()
LAYERS = {"E2B": 10, "31B": 6, "26B-A4B": 6, "12B": 6, "31B:int4": 6}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAMES = ("a", "b", "c", "d")
CYCLES = ((1, 0), (8, 0), (1, 4), (8, 4))  # sequences, K
CHECKED = ((0, None), (1, None), (4, None), (8, None), (16, None), (5, 16))  # K, tree


def rig_of(size: str, layers: int | None, slots: int, context: int) -> Rig:
    name, _, mode = size.partition(":")
    raw = dict(BUILTIN_CONFIGS[SIZES[name]])
    ops = TritonOps("cuda")
    raw = raw if layers is None else shallow(raw, layers)
    weights = dummy_weights(ModelConfig.from_hf(raw), torch.device("cuda"), torch.bfloat16, ops, mode or None, 0)
    drafter = BUILTIN_CONFIGS[SIZES[name] + "-assistant"]
    return Rig(raw, drafter, ops, slots=slots, context=context, weights=weights, compiled=True)


def adapters(rig: Rig) -> AdapterPool:
    """Four of them, and two slots: they must be taken over, and then made."""
    to = (rig.config, rig.ops, rig.model.dtype, rig.device)
    folder = Path(mkdtemp())
    pool = AdapterPool(rig.model, lambda name, path: load_adapter(name, path, *to), 2)
    for i, name in enumerate(NAMES):
        pool.add(name, str(write_adapter(rig.config, folder / name, seed=i, rank=(16, 8, 4, 64)[i], size=0.1)))
    return pool


def request(i: int, vocab: int, k: int, tree: int | None = None) -> Request:
    prompt = torch.randint(3, vocab, (9 + 23 * i,), generator=torch.Generator().manual_seed(i)).tolist()
    params = SamplingParams(max_tokens=24, ignore_eos=True, logprobs=1, temperature=0.9 * (i % 2), seed=i)
    name = (None, *NAMES)[i % 5]
    return Request(str(i), prompt, params, k, bool(k), tree=tree, adapter=name)


def engine(rig: Rig, pool: AdapterPool | None, graphs: bool) -> Engine:
    result = engine_of(graphs, rig)
    result.runner.adapters = pool
    return result


def check(size: str) -> None:
    """Eager and alone, without adapters in the engine where the request has none, against graphs."""
    size, _, only = size.partition("/")
    with rig_of(size, LAYERS[size], slots=9, context=1024) as rig:
        pool = adapters(rig)
        vocab = rig.config.vocab_size
        events = dict[str, list[Any]]()
        alone: dict[str, list[int]] = {}
        for i in range(8):
            one = request(i, vocab, 0)
            alone |= run_joining(engine(rig, pool if one.adapter else None, False), [(0, one)], logprobs=events)
        print(f"{size}: alone after {time.perf_counter() - BEGAN:.0f} s", flush=True)
        wrong: list[object] = []
        for k, tree in CHECKED if not only else [CHECKED[int(only)]]:
            candidate = engine(rig, pool, True)
            mixed = dict[str, list[Any]]()
            got = run_joining(candidate, [(i % 3, request(i, vocab, k, tree)) for i in range(8)], logprobs=mixed)
            wrong += [(k, tree, r) for r in alone if got[r] != alone[r] or mixed[r] != events[r]]
            executor = candidate.executors[0]
            assert isinstance(executor, GraphExecutor), executor
            graphs = executor.decode_graphs
            assert graphs.broken is None, graphs.broken
            assert any(key.adapted for key in graphs.cache.graphs), "no adapted step was captured"
            torch.cuda.synchronize()
            executor.close()
            print(f"{size}: K = {k}, tree {tree} after {time.perf_counter() - BEGAN:.0f} s", flush=True)
        wrong += replaced(rig, pool, alone) if only in ("", "2") else []
        print(f"{size} {only}: {'equal to the last bit' if not wrong else f'WRONG {wrong}'}", flush=True)


def replaced(rig: Rig, pool: AdapterPool, alone: dict[str, list[int]]) -> list[str]:
    """One slot for two running requests of one name: the adapter is replaced while the first one runs."""
    vocab = rig.config.vocab_size
    small = AdapterPool(rig.model, pool.load, 1)
    small.add("a", pool.paths["a"])
    candidate = engine(rig, small, True)
    got = {"1": list[int](), "2": list[int]()}
    candidate.submit(request(1, vocab, 4))
    for step in range(200):
        if step == 4:
            small.remove("a")
            small.add("a", pool.paths["b"])
            candidate.submit(replace(request(2, vocab, 4), adapter="a"))
        for event in candidate.step():
            got[event.id] += event.tokens
        if step > 4 and not candidate.busy:
            break
    torch.cuda.synchronize()
    return [f"replaced {r}" for r in got if got[r] != alone[r]]


def random_adapters(rig: Rig) -> AdapterPool:
    """One of rank 16 on all linear modules, in 8 slots that all hold the same."""
    pool = AdapterPool(rig.model, lambda name, path: None, 8)  # type: ignore[arg-type, return-value]
    parts = {}  # type: ignore[arg-type, return-value]
    for name, plan in tensor_plan(rig.config).items():
        if ADAPTABLE.fullmatch(name):
            nothing = torch.zeros(1, 1)
            rows = [n for n, _ in plan.source_shapes]
            a = nothing.expand(16 * len(rows), plan.shape[1])
            parts[name] = LowRank(a, nothing, nothing, tuple((n, 16) for n in rows))
    assert pool.slots is not None
    pool.slots.reserve(Adapter("random", b"", parts))
    for weight in pool.slots.weights.values():
        weight.a.normal_(0.0, 0.02)
        weight.b.normal_(0.0, 0.02)
        weight.scale.fill_(1.0)
    return pool


def cost(size: str, cycles: list[tuple[int, int]]) -> None:
    rig = rig_of(size, None, slots=8, context=1280)
    pool = random_adapters(rig)
    assert pool.slots is not None
    print(f"{size}: {pool.nbytes / 8e6:.0f} MB an adapter, {len(pool.slots.weights)} weights", flush=True)
    seqs = rig.open(8, 1024, 128)
    for batch, k in cycles:
        ranges = torch.tensor(row_ranges(range(batch), [k + 1] * batch), dtype=torch.int32, device=DEVICE)
        bare = rig.graph(seqs[:batch], k, 1024, 1152)
        adapted = rig.graph(seqs[:batch], k, 1024, 1152, model=pool.slot_model(ranges))
        times = [(bare.time(12), adapted.time(12)) for _ in range(3)]
        without, using = (sorted(t)[1] for t in zip(*times))
        ratio = using / without
        print(f"{size} {batch} x K={k}: {without:.3f} -> {using:.3f} ms, {ratio:.3f}", flush=True)
        print(json.dumps({"size": size, "batch": batch, "k": k, "ms": [without, using], "ratio": ratio}), flush=True)
        del bare, adapted


def main() -> None:
    began = time.perf_counter()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["check", "cost", "plan"])
    parser.add_argument("sizes", nargs="*", default=list(LAYERS))
    parser.add_argument("--cycles", default=",".join(f"{batch}x{k}" for batch, k in CYCLES))
    args = parser.parse_args()
    cycles = [(int(batch), int(k)) for batch, _, k in (cycle.partition("x") for cycle in args.cycles.split(","))]
    if args.what == "plan":
        print(f"sizes {args.sizes}, cycles {cycles}")
        return
    for size in args.sizes:
        try:
            check(size) if args.what == "check" else cost(size, cycles)
        except Exception as error:  # the next size is tried all the same
            import traceback

            traceback.print_exc()
            print(f"{size}: {type(error).__name__}: {error}", flush=True)
    print(f"{time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
