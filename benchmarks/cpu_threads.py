"""How the CPU kernels scale with threads: passes over 1, 5 and 9 rows of a dummy model with 1, 2, 4, ... threads.

    python benchmarks/cpu_threads.py [--shape Qwen/Qwen2.5-1.5B-Instruct] [--format q4_k_m] [--threads 1,2,4,8,16] [--seconds 60]

The dummy is written to a temporary folder and packed anew for each number of threads; these take turns until the time is up. Medians; `x` is the
speed of so many threads over that of one, and beside it stands what so many threads read from memory, over what one reads.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import torch
from cpu_kernels import Ours, read_speed

from outrider.models.config import ModelConfig
from outrider.models.known import KNOWN
from outrider.ops.cpu.build import BuildError, processor
from outrider.ops.cpu.ops import default_threads
from outrider.weights.dummy_file import SHAPES, write_gguf

ROWS = (1, 5, 9)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", default="Qwen/Qwen2.5-1.5B-Instruct")
    parser.add_argument("--format", default="q4_k_m")
    parser.add_argument("--threads", default="1,2,4,8,16")
    parser.add_argument("--seconds", type=float, default=60)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{processor()}, {default_threads()} cores for this process, {platform.machine()}", flush=True)
    counts = [n for n in map(int, args.threads.split(",")) if n <= default_threads()]
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "dummy.gguf"
        write_gguf(file, ModelConfig.from_hf(SHAPES.get(args.shape) or KNOWN[args.shape]), args.format)
        print(f"dummy written in {time.perf_counter() - began:.1f} s", flush=True)
        try:
            models = {n: Ours(str(file), n, None) for n in counts}
        except BuildError as error:
            print(f"no kernels on this machine: {error}")
            return
        speeds = {n: read_speed(n) for n in counts}
        times: dict[tuple[int, int], list[float]] = {(n, rows): [] for n in counts for rows in ROWS}
        while not times[counts[-1], ROWS[-1]] or time.perf_counter() - began < args.seconds:
            for n, model in models.items():
                time.sleep(0.02)  # the team before falls asleep
                for rows in ROWS:
                    model.one_pass(rows)
                    for _ in range(3):
                        start = time.perf_counter()
                        model.one_pass(rows)
                        times[n, rows].append(1e3 * (time.perf_counter() - start))
    print("| threads | memory, GB/s | " + " | ".join(f"{rows} rows, ms" for rows in ROWS) + " | tokens a second plainly | x |")
    print("|---" * (len(ROWS) + 4) + "|")
    ms = {key: median(t) for key, t in times.items()}
    for n in counts:
        cells = " | ".join(f"{ms[n, rows]:.2f} ({min(times[n, rows]):.2f} to {max(times[n, rows]):.2f})" for rows in ROWS)
        gains = ", ".join(f"{ms[counts[0], rows] / ms[n, rows]:.2f}" for rows in ROWS)
        memory = f"{speeds[n] / 1e9:.1f} ({speeds[n] / speeds[counts[0]]:.2f} x)"
        print(f"| {n} | {memory} | {cells} | {1e3 / ms[n, 1]:.1f} | {gains} |")
    print(json.dumps({"shape": args.shape, "format": args.format, "ms": {f"{n} threads, {r} rows": round(ms[n, r], 3) for n, r in times}}))


if __name__ == "__main__":
    main()
