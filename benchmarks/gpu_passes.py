"""Passes over prompts, launched kernel by kernel and captured: the same bits, and what host and device take.

    PYTHONPATH=src python3 benchmarks/gpu_passes.py [--size E2B]     # 20 s on an H200; without a GPU a tiny model, to see that it runs

A line of JSON for each number of rows: milliseconds until the host is done with a pass, and until the device is; then whether K/V and last
hidden states of prompts of many lengths, packed and cut, are bit for bit the same both ways.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]


def digest(tensor: Any) -> Any:
    """Two sums that other bits would change: K/V of a large model four times over would not fit beside it."""
    import torch

    bits = tensor.contiguous().view(torch.uint8).flatten().view(torch.int16).long()
    return torch.stack((bits.sum(), (bits * torch.arange(1, 2 * len(bits), 2, device=bits.device)).sum()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="E2B")
    args = parser.parse_args()
    import torch
    from tests.gpu.place import HERE

    from outrider import LLM
    from outrider.bench.gpu import SIZES
    from outrider.config import EngineConfig
    from outrider.engine.graphs import GraphExecutor
    from outrider.engine.step import Lane, Request
    from outrider.types import SamplingParams

    model = SIZES[args.size]
    if not HERE.gpu:
        from gpu_scale import small

        model = small(args.size)
    settings = EngineConfig(16, 8320, kv_tokens=16384, prefix_cache=False, graphs=True)
    llm = LLM.load(model, draft_tokens=4, device=HERE.device, load_format="dummy", engine=settings, say=print)
    engine, sync = llm.engine, torch.cuda.synchronize if HERE.gpu else lambda: None
    executor = engine.executors[0]
    assert isinstance(executor, GraphExecutor)
    began = time.perf_counter()
    free = torch.cuda.mem_get_info()[0] if HERE.gpu else 0
    ready = engine.serve()
    sync()
    taken = (free - torch.cuda.mem_get_info()[0]) >> 20 if HERE.gpu else 0
    print(json.dumps({"ready": ready, "mb": taken, "seconds": round(time.perf_counter() - began, 2)}), flush=True)

    rng, vocab = random.Random(0), llm.config.vocab_size

    def lanes(lengths: Sequence[int]) -> list[Lane]:
        """New sequences, with pages for all of their positions."""
        out = []
        for n in lengths:
            engine.submit(Request(str(rng.random()), [rng.randrange(8, vocab) for _ in range(n + 1)], SamplingParams(max_tokens=4), 4))
        engine.scheduler._admit()
        for seq in engine.scheduler.running:
            assert engine.store.reserve(seq.held, len(seq.tokens))
            out.append(Lane(seq, seq.held.slot, 0, len(seq.tokens) - 1, wanted=True))
        return out

    def over(run: Callable[[Sequence[Lane]], None], chunk: list[Lane], times: int) -> tuple[float, float]:
        sync()
        began = time.perf_counter()
        for _ in range(times):
            run(chunk)
        launched = time.perf_counter() - began
        sync()
        return launched / times * 1e3, (time.perf_counter() - began) / times * 1e3

    def end() -> None:
        for seq in list(engine.scheduler.running):
            engine.abort(seq.id)
        while engine.busy:
            engine.step()

    for rows in (64, 256, 512, 1024, 2048) if HERE.gpu else (64,):
        chunk, row = lanes([rows]), {"rows": rows}
        for title, run in (("launched", engine.machine.run), ("captured", executor.passes.run)):
            over(run, chunk, 1)
            host, device = over(run, chunk, 5)
            row |= {f"{title}_host_ms": round(host, 2), f"{title}_ms": round(device, 2)}  # type: ignore[dict-item]
        print(json.dumps(row), flush=True)
        end()

    cuts = (700, 1024) if HERE.gpu else (70, 100)
    seen: list[list[Any]] = []
    prompts = lanes([3, 1, 130, 900, 2500, 16, 61, 7000] if HERE.gpu else [3, 1, 130, 200])
    for cut, run in (
        (cuts[0], engine.machine.run),
        (cuts[1], engine.machine.run),
        (cuts[0], executor.passes.run),
        (cuts[1], executor.passes.run),
    ):
        for tensor in (*engine.store.keys, *engine.store.values, engine.machine.features):
            if tensor is not None:
                tensor.zero_()
        starts = {id(lane): 0 for lane in prompts}
        while any(starts[id(lane)] < lane.count for lane in prompts):
            some, room = [], 2048
            for lane in prompts:
                start = starts[id(lane)]
                count = min(cut, lane.count - start, room)
                if count > 0:
                    some.append(Lane(lane.seq, lane.slot, start, count, wanted=start + count == lane.count))
                    starts[id(lane)], room = start + count, room - count
            run(some)
        sync()
        seen.append([engine.machine.features[[lane.slot for lane in prompts]].clone()])
        for side in (engine.store.keys, engine.store.values):
            for layer, tensor in enumerate(side):
                if tensor is None:
                    continue
                table = engine.store.tables[llm.config.layers[layer].attn.group]
                for lane in prompts:
                    pages = tensor[table[lane.slot, : lane.count // engine.store.spec.page_size].long()]  # whole ones
                    seen[-1].append(digest(pages) if pages.numel() else None)
    for title, some in (("cut otherwise", seen[1]), ("captured", seen[2]), ("captured, cut otherwise", seen[3])):
        wrong = sum(a is not b and not torch.equal(a, b) for a, b in zip(seen[0], some))
        print(json.dumps({"what": title, "tensors": len(some), "other bits": wrong}), flush=True)


if __name__ == "__main__":
    main()
