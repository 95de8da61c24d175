# ruff: noqa: E501, B023
"""One command that says whether the kernels are right and fast on this GPU, in a few minutes.

    python benchmarks/gpu_smoke.py [--out FOLDER] [--sections parity models] [--sizes E2B 31B 26B-A4B E4B 12B]

parity: every kernel at real shapes against float32 torch, and bitwise row invariance. models: plain and verify passes, drafter
steps and cycles of whole models in one graph, with a per-kernel table. A section that fails is reported and the next one runs.
Tiles and shapes are tried by gpu_many.py.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from gpu_common import RESULTS, attempt, begin, finish, kernel_table, kernels, save, say, verdict

from outrider.bench.gpu import H200_BYTES_PER_S, Rig, time_ms
from outrider.models.config import DrafterConfig, ModelConfig
from outrider.models.known import KNOWN
from outrider.ops.reference import ReferenceOps
from outrider.ops.triton import TritonOps, linear
from outrider.ops.triton.linear import product
from outrider.ops.triton.tiles import Tile
from outrider.types import AttnSpec, Draft, KVView
from outrider.weights.names import tensor_plan

BF16 = torch.bfloat16


def rand(*shape: int, dtype: torch.dtype = BF16, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(shape, device="cuda") * scale).to(dtype)


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    if not torch.isfinite(got.float()).all():
        return float("nan")
    return float((got.double() - want.double()).norm() / want.double().norm())


def check(name: str, value: float, limit: float) -> None:
    ok = value <= limit
    RESULTS.setdefault("parity", {})[name] = {"error": value, "limit": limit, "ok": ok}
    verdict(name, ok, f"{value:.2e} (limit {limit:.0e})")


def same(name: str, equal: bool) -> None:
    RESULTS.setdefault("parity", {})[name] = {"ok": bool(equal)}
    verdict(name, equal)


# ---- the family's shapes --------------------------------------------------------------------------------------------------
def weight_shapes() -> dict[tuple[int, int, bool], str]:
    """(N, K, gated) -> where it occurs. Expert tensors aside."""
    shapes: dict[tuple[int, int, bool], str] = {}
    for name, raw in KNOWN.items():
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


# ---- parity ---------------------------------------------------------------------------------------------------------------
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


def parity() -> None:
    ref = ReferenceOps()
    for pdl in (True,):
        ops = TritonOps("cuda", pdl=pdl)
        tag = "pdl " if pdl else ""
        cases = [
            (5376, 8192, False, Tile(32, 64, 2, 4)), (1536, 2048, False, None), (1536, 2048, False, Tile(64, 64, 2, 5, turned=True)),
            (2816, 2112, False, Tile(32, 64, 2, 4)), (6144, 1536, True, Tile(16, 64, 1, 4)), (6144, 1536, True, None),
        ]  # fmt: skip
        for n, k, gated, tile in cases:
            x, w = rand(272, k), rand(n * (2 if gated else 1), k, scale=k**-0.5)
            run = lambda a: product(a, w, ops.seen, gated=gated, act="gelu_tanh" if gated else "", pdl=pdl, tile=tile)  # noqa: E731
            full = run(x)
            want = ref.gated_linear(x.float(), w.float(), "gelu_tanh") if gated else x.float() @ w.float().T
            label = f"{tag}linear {n}x{k}{' gated' if gated else ''} {tile or 'table'}"
            check(label, error(full, want), 1e-2)
            bad = [m for m in (1, 2, 5, 9, 16, 17, 32, 33, 64, 65, 136) if not torch.equal(run(x[:m]), full[:m])]
            bad += [r for r in (3, 40, 271) if not torch.equal(run(x[r : r + 1])[0], full[r])]
            same(f"{label}: rows stand alone {bad or ''}", not bad)
        same(f"{tag}counters are back at 0", int(ops.seen.abs().sum()) == 0)
        for heads, kv_heads, dim, window in (
            (32, 16, 256, 1024),
            (32, 4, 512, None),
            (8, 1, 256, 512),
            (8, 1, 512, None),
            (9, 3, 64, None),
        ):
            spec = AttnSpec(heads, kv_heads, dim, 0, True, window=window, scale=dim**-0.5)
            label = f"{tag}attend {heads}/{kv_heads}x{dim} window {window}"
            spans = [(1000, 17), (3000, 17), (5, 17), (9100, 17)]
            kv = view(spec, spans)
            q = rand(68, heads * dim)
            full = ops.attend(q, spec, kv)
            check(label, error(full, ref.attend(q, spec, kv)), 1e-2)
            bad = []
            for r, b in [(0, 0), (16, 0), (20, 1), (40, 2), (67, 3)]:
                one = KVView(
                    16, kv.keys, kv.values, {g: t[b : b + 1] for g, t in kv.tables.items()}, kv.positions[r : r + 1],
                    torch.zeros(1, dtype=torch.int64, device="cuda"), torch.tensor([0, 1], dtype=torch.int32, device="cuda"), 1,
                    int(kv.positions[r]) + 1,
                )  # fmt: skip
                if not torch.equal(ops.attend(q[r : r + 1], spec, one)[0], full[r]):
                    bad.append(r)
            same(f"{label}: rows stand alone {bad or ''}", not bad)
            if pdl:
                kv = view(spec, [(0, 700)])
                q = rand(700, heads * dim)
                check(f"prefill {heads}/{kv_heads}x{dim} window {window}", error(ops.attend(q, spec, kv), ref.attend(q, spec, kv)), 1e-2)
        x, z = rand(17, 2816), rand(17, 2816)
        router, factor = rand(128, 2816, scale=0.02), torch.rand(128, device="cuda") + 0.5
        args = (router, factor, rand(128, 1408, 2816, scale=0.02), rand(128, 2816, 704, scale=0.04))
        full = ops.moe(z, x, *args, 8, "gelu_tanh")
        want = ref.moe(z.float(), x.float(), args[0].float(), args[1], args[2].float(), args[3].float(), 8, "gelu_tanh")
        check(f"{tag}moe", error(full, want), 2e-2)
        same(f"{tag}moe rows stand alone", all(torch.equal(ops.moe(z[:m], x[:m], *args, 8, "gelu_tanh"), full[:m]) for m in (1, 2, 5)))
        g, centroids, rows = rand(3, 256), rand(2048, 256), rand(2048, 128, 256)
        best, scores = ops.clustered_logits(g, centroids, rows, 32)
        want_best = (g.float() @ centroids.float().T).topk(32, -1).indices
        same(f"{tag}clusters", float((best == want_best).float().mean()) > 0.9)
        check(f"{tag}cluster scores", error(scores, torch.einsum("rtsh,rh->rts", rows[best].float(), g.float())), 1e-3)
        logits = rand(5, 262144, dtype=torch.float32)
        seed, at = torch.arange(5, device="cuda") << 33, torch.arange(5, device="cuda")
        hot = torch.tensor([True, False, True, True, False], device="cuda")
        same(f"{tag}argmax", torch.equal(ops.argmax(logits), logits.argmax(-1)))
        noisy = [o.gumbel_argmax(logits, seed, at, None, hot) for o in (ops, ref)]
        same(f"{tag}gumbel argmax", torch.equal(*noisy))
        x, y, pw, nw = rand(3, 5376), rand(3, 5376), rand(5376, dtype=torch.float32), rand(5376, dtype=torch.float32)
        scale = torch.tensor([0.3], device="cuda")
        for got, expect in zip(ops.residual_norm(x, y, pw, scale, nw, 1e-6), ref.residual_norm(x, y, pw, scale, nw, 1e-6)):
            check(f"{tag}residual norm", error(got, expect), 5e-3)
        del full, want, args, x, z, rows, logits
    freq = torch.rand(256, device="cuda")
    at = torch.tensor([0, 1, 1000, 131071, 262143], device="cuda")
    for got, expect in zip(TritonOps("cuda").rope_angles(at, freq), ref.rope_angles(at, freq)):
        check("rope angles", error(got, expect), 1e-5)


# ---- tiles ----------------------------------------------------------------------------------------------------------------
def graph_us(fn: Any, count: int, replays: int = 5) -> float:
    """Microseconds a call, `count` calls in one graph (fn takes the call's index)."""
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


# ---- models ---------------------------------------------------------------------------------------------------------------
def models(sizes: list[str], out: Path) -> None:
    for size in sizes:
        began = time.perf_counter()
        rig = Rig.of(size, slots=16, context=2048)
        torch.cuda.synchronize()
        say(f"{size}: built in {time.perf_counter() - began:.1f} s, {torch.cuda.memory_allocated() / 2**30:.1f} GiB")
        try:
            one_model(rig, size, size in ("E2B", "31B"), out)
        finally:
            rig.free()
            save(out / "smoke.json")


def one_model(rig: Rig, size: str, full: bool, out: Path) -> None:
    seqs = rig.open(8, 1024, 128)
    need = rig.weight_bytes() + rig.kv_bytes(1024)
    row: dict[str, Any] = {"bytes": need, "floor_ms": need / H200_BYTES_PER_S * 1e3}
    RESULTS.setdefault("models", {})[size] = row
    best, default = None, (linear.LATE_BYTES, linear.AHEAD_LINES)
    for late, ahead in (default, (0, 4), (1 << 60, 4), (default[0], 16)) if full else (default,):
        linear.LATE_BYTES, linear.AHEAD_LINES = late, ahead
        run = rig.graph(seqs[:1], 0, 1024, 1280)
        ms = run.time()
        row[f"ar_ms late {late} ahead {ahead}"] = ms
        say(
            f"{size} AR {ms:.3f} ms (late from {late / 2**20:.0f} MiB, {ahead} lines ahead), floor {row['floor_ms']:.3f}, {need / ms * 1e-9:.2f} TB/s; capture {run.capture_s:.1f} s"
        )
        if best is None or ms < best[0]:
            best, ar = (ms, late, ahead), run
    row["ar_ms"], linear.LATE_BYTES, linear.AHEAD_LINES = best
    ar.graph.replay()
    first = ar.logits.clone()
    rig.ops.pdl = False
    plain = rig.graph(seqs[:1], 0, 1024, 1280)
    row["ar_no_pdl_ms"] = plain.time()
    plain.graph.replay()
    torch.cuda.synchronize()
    same(f"{size} logits with and without PDL", torch.equal(plain.logits, first))
    say(f"{size} AR without PDL {row['ar_no_pdl_ms']:.3f} ms")
    kernel_table(kernels(plain.graph.replay, out), f"{size} AR without PDL")
    del plain
    if full:
        plain = rig.graph(seqs[:1], 4, 1024, 1280)
        kernel_table(kernels(plain.graph.replay, out), f"{size} K=4 without PDL")
        del plain
    rig.ops.pdl = True
    for k in (1, 4, 8, 16):
        run = rig.graph(seqs[:1], k, 1024, 1280)
        verify = rig.graph(seqs[:1], k, 1024, 1280, propose=lambda last, length, k=k: fixed(last, k))
        row[f"cycle_{k}_ms"], row[f"verify_{k}_ms"] = run.time(), verify.time()
        say(
            f"{size} K={k}: cycle {row[f'cycle_{k}_ms']:.3f} ms ({row[f'cycle_{k}_ms'] / row['ar_ms']:.3f} x AR), verify alone {row[f'verify_{k}_ms']:.3f}"
        )
        del run, verify
    if full:
        batch = rig.graph(seqs, 4, 1024, 1280)
        batch0 = rig.graph(seqs, 0, 1024, 1280)
        row["batch8_cycle_4_ms"], row["batch8_ar_ms"] = batch.time(), batch0.time()
        say(f"{size} batch 8: AR {row['batch8_ar_ms']:.3f} ms, K=4 {row['batch8_cycle_4_ms']:.3f} ms")
        ar.graph.replay()
        first = ar.logits.clone()
        for label, other in (("K=4 batch 8", batch), ("batch 8", batch0)):
            other.graph.replay()
            torch.cuda.synchronize()
            same(f"{size} logits of the first row: {label} against alone", torch.equal(other.logits[0], first[0]))
        del batch, batch0
    torch.cuda.synchronize()


def fixed(last: torch.Tensor, k: int) -> Any:
    return Draft(last[:, None].expand(-1, k) + torch.arange(k, device=last.device), torch.full_like(last, k))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", default="runs/gpu_smoke")
    parser.add_argument("--sections", nargs="+", default=["parity", "models"])
    parser.add_argument("--sizes", nargs="+", default=["E2B", "31B", "26B-A4B", "E4B", "12B"])
    args = parser.parse_args()
    out = begin(args.out)
    jobs = {"parity": parity, "models": lambda: models(args.sizes, out)}
    for section in args.sections:
        say(f"== {section}")
        attempt(section, jobs[section])
    finish(out / "smoke.json")


if __name__ == "__main__":
    main()
