"""Passes by context on the CPU, with K/V as the kernels keep it and in 8 bits: decoding at 1k to 32k tokens, and a prompt of 8k.

    python benchmarks/cpu_contexts.py MODEL.gguf [--prompt 8192] [--contexts 1024,8192,16384,32768]

K/V is filled with numbers, not with a prompt: a pass takes as long. The two kinds of K/V take turns; medians.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import torch
from cpu_kernels import read_speed

from outrider.cache.store import CacheSpec, KVStore
from outrider.models.decoder import TextModel
from outrider.ops.cpu.ops import CpuOps
from outrider.types import KVView
from outrider.weights.load import load_target

ROWS, CHUNK = (1, 5), 512


class Cache:
    def __init__(self, config, dtype: torch.dtype, most: int):
        self.store = KVStore(config, CacheSpec(1, most, 32, CHUNK, most + CHUNK), dtype, "cpu")
        for t in (*self.store.keys, *self.store.values):
            if t is not None:
                t.fill_(60 if dtype == torch.int8 else 0.7)  # four bytes of 60 are a factor of 0.011
        self.seq, _ = self.store.open([0] * 64, 32, reuse=False)
        self.store.reserve(self.seq, most)

    def view(self, start: int, rows: int) -> KVView:
        return self.store.view(
            torch.tensor([self.seq.slot]), torch.arange(start, start + rows), torch.zeros(rows, dtype=torch.int64),
            torch.tensor([0, rows], dtype=torch.int32), rows, start + rows,
        )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--prompt", type=int, default=8192)
    parser.add_argument("--contexts", default="1024,8192,16384,32768")
    parser.add_argument("--repeat", type=int, default=7)
    args = parser.parse_args()
    torch.set_num_threads(1)
    ops = CpuOps()
    config, weights, _ = load_target(args.model, ops=ops)
    model = ops.compile(TextModel(config, weights, ops))
    contexts = [int(c) for c in args.contexts.split(",")]
    most = max(*contexts, args.prompt) + 32
    ids = torch.arange(CHUNK) % config.vocab_size
    caches = {kind: Cache(config, ops.kv_dtype(torch.float32, kind), most) for kind in ("auto", "int8")}
    for kind, cache in caches.items():
        print(f"K/V {kind}: {cache.store.bytes() / most / 1024:.1f} KiB a token")
    print(f"{ops.threads} threads read {read_speed(ops.threads) / 1e9:.1f} GB/s")
    times: dict[tuple[str, int, int], list[float]] = {}
    for context in contexts:
        for rows in ROWS:
            for i in range(args.repeat + 1):
                for kind, cache in caches.items():
                    began = time.perf_counter()
                    model.logits(model.forward(ids[:rows], cache.view(context, rows)).hidden)
                    if i:
                        times.setdefault((kind, context, rows), []).append(1e3 * (time.perf_counter() - began))
    for context in contexts:
        told = [f"{kind} {rows} rows {statistics.median(times[kind, context, rows]):.1f} ms" for kind in caches for rows in ROWS]
        print(f"  at {context:6d} tokens: {', '.join(told)}", flush=True)
    for kind, cache in caches.items():
        began = time.perf_counter()
        for at in range(0, args.prompt, CHUNK):
            model.forward(ids, cache.view(at, CHUNK))
        print(f"  a prompt of {args.prompt}, K/V {kind}: {args.prompt / (time.perf_counter() - began):.0f} tokens a second", flush=True)


if __name__ == "__main__":
    main()
