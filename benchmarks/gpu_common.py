"""Code shared by the GPU scripts: lines with the time, results in one file, jobs of which one may fail, tables of
kernels."""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "src"), str(Path(__file__).resolve().parents[1])]

import torch

from gpu_rig import collect, time_ms

RESULTS: dict[str, Any] = {}
FAILED: list[str] = []  # checks and jobs, by name
BEGAN = time.perf_counter()


def say(*parts: object) -> None:
    print(f"[{time.perf_counter() - BEGAN:6.1f}]", *parts, flush=True)


def verdict(name: str, ok: bool, note: str = "") -> None:
    """A line for a check, remembered where it fails."""
    if not ok:
        FAILED.append(name)
    say(f"  {'ok  ' if ok else 'FAIL'} {name}{note and ': '}{note}")


def attempt(name: str, job: Callable[..., Any], *args: Any) -> Any:
    """The job's result, or None if it fails; the failure is reported and the next job can run."""
    try:
        with torch.inference_mode():
            return job(*args)
    except Exception:
        traceback.print_exc()
        FAILED.append(name)
        RESULTS.setdefault("failed", []).append({"job": name, "error": traceback.format_exc()})
        return None
    finally:
        collect()


def finish(path: Path) -> None:
    path.write_text(json.dumps(RESULTS, indent=1, default=str))
    say("FAILED:" if FAILED else "all checks passed", *FAILED)


def kernels(call: Callable[[], Any], out: Path) -> list[dict[str, Any]]:
    """The kernels of a call, in order, as the profiler saw them."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as prof:
        call()
        torch.cuda.synchronize()
    trace = out / "trace.json"
    prof.export_chrome_trace(str(trace))
    events = [e for e in json.loads(trace.read_text())["traceEvents"] if e.get("cat") == "kernel"]
    trace.unlink()
    return sorted(events, key=lambda e: e["ts"])


def kernel_table(events: list[dict[str, Any]], title: str) -> None:
    """The longest first."""
    rows: dict[str, list[float]] = defaultdict(list)
    for e in events:
        args = e["args"]
        shape = f"grid {args.get('grid')} x{args.get('block', ['?'])[0]} regs {args.get('registers per thread')}"
        rows[f"{e['name'][:44]} {shape}"].append(e["dur"])
    total = sum(sum(v) for v in rows.values())
    wall = max(e["ts"] + e["dur"] for e in events) - events[0]["ts"] if events else 0.0
    say(f"{title}: {len(events)} kernels, {total:.1f} us in kernels, {wall:.0f} us from first to last")
    ranked = sorted(rows.items(), key=lambda r: -sum(r[1]))
    for name, each in ranked[:22]:
        print(f"    {sum(each):8.1f} us {len(each):4d} x {sum(each) / len(each):7.2f}  {name}")
    RESULTS.setdefault("kernels", {})[title] = [(n, len(d), sum(d)) for n, d in ranked]


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    if not torch.isfinite(got.float()).all():
        return float("nan")
    return float((got.double() - want.double()).norm() / want.double().norm())


def graph_us(fn: Any, count: int, replays: int = 5) -> float:
    """Microseconds a call, `count` calls in one graph (fn takes the call's index). Without a GPU, to try a script: of
    one call."""
    if not torch.cuda.is_available():
        return time_ms(lambda: fn(0), 1, 0) * 1000
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        fn(0)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(count):
            fn(i)
    return time_ms(graph.replay, replays, 1) * 1000 / count
