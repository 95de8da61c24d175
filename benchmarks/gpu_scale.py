"""Many sequences through the whole engine on this GPU, part by part:

    PYTHONPATH=src python3 benchmarks/gpu_scale.py [--parts host long moe] [--seconds 150]

host   E2B, 64 and 128 sequences, plain and K = 4: a step, its graph replayed alone, the host's work by part, the share that hides.
long   E2B over 32,768 positions, 1 and 8 sequences, plain and K = 4: graphs beside the bytes they must read.
moe    26B-A4B, 64 sequences: the engine's step beside the floor of even routing.

A line of JSON for each figure. On a machine without a GPU the parts run on tiny models, to see that they run.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "src"), str(Path(__file__).resolve().parents[1])]

import torch  # noqa: E402
from tests.gpu.place import HERE  # noqa: E402

from outrider.bench import gpu_engine  # noqa: E402
from outrider.bench.gpu import H200_BYTES_PER_S, Rig, collect  # noqa: E402

BEGAN = time.perf_counter()


def say(**figures: Any) -> None:
    rounded = {name: round(value, 3) if isinstance(value, float) else value for name, value in figures.items()}
    print(json.dumps({"t": round(time.perf_counter() - BEGAN, 1), **rounded}), flush=True)


def rig_of(size: str, slots: int, context: int) -> Rig:
    return Rig(HERE.raw(size, 0), HERE.assistant(size), HERE.ops(), HERE.device, HERE.dtype, slots=slots, context=context, compiled=True)


def engine_rows(part: str, size: str, batches: tuple[int, ...], k: int, floor: Callable[[int], float] | None = None) -> None:
    context = 1024 if HERE.gpu else 24
    for f in gpu_engine.measure(size if HERE.gpu else small(size), batches, k, context, HERE.device):
        more = {} if floor is None else {"floor_ms": floor(f.batch), "share_of_floor": floor(f.batch) / f.step_ms}
        more |= {f"{name}_ms": ms for name, ms in f.host_ms.items()}
        say(
            part=part, size=size, k=k, batch=f.batch, prompts_s=f.prompts_s, step_ms=f.step_ms, graph_ms=f.graph_ms,
            steps_x_batch_s=f.batch / f.step_ms * 1e3, host_busy_ms=f.busy_ms, hidden=f.hidden, **more,
        )  # fmt: skip


def small(size: str) -> str:
    """A folder with the configuration of a tiny model of this kind, for machines without a GPU."""
    import tempfile

    folder = Path(tempfile.mkdtemp()) / size
    for name, raw in ((f"gemma-4-{size}-it", HERE.raw(size)), (f"gemma-4-{size}-it-assistant", HERE.assistant(size))):
        (folder / name).mkdir(parents=True)
        (folder / name / "config.json").write_text(json.dumps(raw))
    return str(folder / f"gemma-4-{size}-it")


def host() -> None:
    for k in (0, 4):
        engine_rows("host", "E2B", (64, 128) if HERE.gpu else (4,), k)


@torch.inference_mode()
def long() -> None:
    context = 32768 if HERE.gpu else 200
    with rig_of("E2B", 8, context + 64) as rig:
        for batch in (1, 8):
            seqs = rig.open(batch, context, 32)
            plain = rig.graph(seqs, 0, context, context + 64).time(12)
            cycle = rig.graph(seqs, 4, context, context + 64).time(12)
            floor = (rig.weight_bytes(batch) + batch * rig.kv_bytes(context)) / H200_BYTES_PER_S * 1e3
            figures = dict(batch=batch, context=context, plain_ms=plain, floor_ms=floor, cycle_ms=cycle, cycle_over_plain=cycle / plain)
            say(part="long", size="E2B", **figures)
            rig.close(seqs)


def moe() -> None:
    rig = rig_of("26B-A4B", 1, 64)
    kv = 1024 if HERE.gpu else 24
    floors = {batch: (rig.weight_bytes(batch) + batch * rig.kv_bytes(kv)) / H200_BYTES_PER_S * 1e3 for batch in (32, 64)}
    rig.free()
    engine_rows("moe", "26B-A4B", (32, 64) if HERE.gpu else (32,), 0, floors.__getitem__)


def main() -> None:
    parts: dict[str, Callable[[], None]] = {"host": host, "long": long, "moe": moe}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", default=list(parts), choices=list(parts))
    parser.add_argument("--seconds", type=float, default=1e9, help="no part is begun after so many")
    args = parser.parse_args()
    for part in args.parts:
        if time.perf_counter() - BEGAN > args.seconds:
            say(part=part, left_out="out of time")
            continue
        try:
            parts[part]()
        except Exception as error:  # the other parts are still worth having
            say(part=part, error=f"{type(error).__name__}: {error}"[:400])
        collect()


if __name__ == "__main__":
    main()
