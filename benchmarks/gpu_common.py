"""What the GPU scripts share: lines with the time, results in one file, jobs of which one may fail, cycles, tables of
kernels, inputs."""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "src"), str(Path(__file__).resolve().parents[1])]

import torch
import triton

from gpu_rig import Rig, collect, time_ms
from outrider.models.builtin_configs import BUILTIN_CONFIGS
from outrider.models.config import DrafterConfig, ModelConfig
from outrider.spec.mtp import MTPDrafter
from outrider.types import AttnSpec, KVView
from outrider.weights.names import tensor_plan

BF16 = torch.bfloat16

RESULTS: dict[str, Any] = {}
FAILED: list[str] = []  # checks and jobs, by name
BEGAN = time.perf_counter()


def say(*parts: object) -> None:
    print(f"[{time.perf_counter() - BEGAN:6.1f}]", *parts, flush=True)


def late(seconds: float) -> bool:
    return time.perf_counter() - BEGAN > seconds


def verdict(name: str, ok: bool, note: str = "") -> None:
    """A line for a check, remembered where it fails."""
    if not ok:
        FAILED.append(name)
    say(f"  {'ok  ' if ok else 'FAIL'} {name}{note and ': '}{note}")


def differs(got: torch.Tensor, want: torch.Tensor, what: str) -> str:
    """A note for a result that has not the bits it should have; nothing where it has."""
    if torch.equal(got, want):
        return ""
    FAILED.append(what)
    return f" OTHER BITS {int((got != want).sum())}/{want.numel()}"


def begin(folder: str) -> Path:
    out = Path(folder)
    out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    say(torch.cuda.get_device_name(), "torch", torch.__version__, "triton", triton.__version__)
    return out


def attempt(name: str, job: Callable[..., Any], *args: Any) -> Any:
    """What the job gives, or None where it fails: that is said, and the next one can run."""
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


def save(path: Path) -> None:
    path.write_text(json.dumps(RESULTS, indent=1, default=str))


def finish(path: Path) -> None:
    save(path)
    say("FAILED:" if FAILED else "all checks passed", *FAILED)


def sections(names: list[str], jobs: Mapping[str, Callable[[], Any]], results: Path) -> None:
    """These jobs one after the other, whether or not one fails; then the results."""
    for name in names:
        say(f"== {name}")
        attempt(name, jobs[name])
    finish(results)


def cycles(size: str, others: Callable[[Any], dict[str, Any]]) -> None:
    """The full model: its plain step, and cycles over it with the drafter as it is and with what `others` makes of
    it."""
    with Rig.of(size, slots=1, context=2048) as rig:
        assert rig.drafter is not None
        seqs, old = rig.open(1, 1024, 128), rig.drafter.model
        row: dict[str, Any] = {"ar": rig.graph(seqs, 0, 1024, 1280).time()}
        for name, drafter in {"old": old, **others(old)}.items():
            rig.drafter = MTPDrafter(drafter, rig.model)
            for k in (4, 8, 16):
                row[f"{name} {k}"] = rig.graph(seqs, k, 1024, 1280).time() / row["ar"]
        RESULTS[f"cycles {size}"] = row
        say(f"{size} cycle / AR at 1k:", {n: round(v, 3) for n, v in row.items()})


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


# ---- inputs and times
def rand(*shape: int, dtype: torch.dtype = BF16, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(shape, device="cuda") * scale).to(dtype)


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    if not torch.isfinite(got.float()).all():
        return float("nan")
    return float((got.double() - want.double()).norm() / want.double().norm())


def weight_shapes() -> dict[tuple[int, int, bool], str]:
    """(N, K, gated) -> where it occurs. Expert tensors aside."""
    shapes: dict[tuple[int, int, bool], str] = {}
    for name, raw in BUILTIN_CONFIGS.items():
        config = (DrafterConfig if "assistant" in name else ModelConfig).from_hf(raw)
        for weight, plan in tensor_plan(config).items():
            part = weight.rpartition(".")[2]
            if plan.role not in ("matrix", "embedding") or len(plan.shape) != 2 or part == "ple_embed":
                continue
            if part == "embed" and "assistant" in name and config.clusters:
                continue
            gated = part == "gate_up"
            key = (plan.shape[0] // 2 if gated else plan.shape[0], plan.shape[1], gated)
            shapes.setdefault(key, f"{name.removeprefix('google/gemma-4-').replace('-it', '')} {part}")
    return shapes


def view(spec: AttnSpec, spans: list[tuple[int, int]], page: int = 16, bound: int | None = None) -> KVView:
    top = max(s + c for s, c in spans)
    per = -(-top // page)
    table = (1 + torch.randperm(len(spans) * per, device="cuda")).view(len(spans), per).to(torch.int32)
    shape = (1 + len(spans) * per, spec.kv_heads, page, spec.head_dim)
    counts = [c for _, c in spans]
    return KVView(
        page, [rand(*shape)], [rand(*shape)], {"full": table, "sliding": table},
        torch.cat([torch.arange(s, s + c) for s, c in spans]).cuda(),
        torch.repeat_interleave(torch.arange(len(spans)), torch.tensor(counts)).cuda(),
        torch.tensor([0, *counts]).cumsum(0).to(torch.int32).cuda(), max(counts), bound or top,
    )  # fmt: skip


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
