# ruff: noqa: E501, B023, F821
"""One command that says whether the kernels are right and fast on this GPU, in a few minutes.

    python benchmarks/gpu_smoke.py [--out FOLDER] [--sections parity linear attention models] [--sizes E2B 31B 26B-A4B E4B 12B]

parity: every kernel at real shapes against float32 torch, and bitwise row invariance. linear: tiles tried for every weight
shape of the family, the best one against cuBLAS. attention: cuts tried. models: plain and verify passes, drafter steps and
cycles of whole models in one graph, with a per-kernel table. A section that fails is reported and the next one runs.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
import traceback
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import torch
import torch.nn.functional as F
import triton

from outrider.bench.gpu import H200_BYTES_PER_S, Rig, time_ms
from outrider.models.config import DrafterConfig, ModelConfig
from outrider.models.known import KNOWN
from outrider.ops.reference import ReferenceOps
from outrider.ops.triton import TritonOps, attention, linear
from outrider.ops.triton.linear import Tile, skinny
from outrider.types import AttnSpec, KVView
from outrider.weights.names import tensor_plan

BF16 = torch.bfloat16
RESULTS: dict[str, Any] = {}
BEGAN = time.perf_counter()


def say(*parts: object) -> None:
    print(f"[{time.perf_counter() - BEGAN:6.1f}]", *parts, flush=True)


def rand(*shape: int, dtype: torch.dtype = BF16, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(shape, device="cuda") * scale).to(dtype)


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    if not torch.isfinite(got.float()).all():
        return float("nan")
    return float((got.double() - want.double()).norm() / want.double().norm())


def check(name: str, value: float, limit: float) -> None:
    ok = value <= limit
    RESULTS.setdefault("parity", {})[name] = {"error": value, "limit": limit, "ok": ok}
    say(f"  {'ok  ' if ok else 'FAIL'} {name}: {value:.2e} (limit {limit:.0e})")


def same(name: str, equal: bool) -> None:
    RESULTS.setdefault("parity", {})[name] = {"ok": bool(equal)}
    say(f"  {'ok  ' if equal else 'FAIL'} {name}")


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
            (5376, 8192, False, Tile(32, 64, 2, 4, slices=4)), (1536, 2048, False, Tile(16, 64, 1, 6, slices=4)),
            (1536, 2048, False, Tile(32, 32, 2, 5, warps=8, slices=8)), (2816, 2112, False, Tile(32, 64, 2, 4, slices=4)),
            (6144, 1536, True, Tile(16, 64, 1, 4, slices=4)), (6144, 1536, True, None),
        ]  # fmt: skip
        for n, k, gated, tile in cases:
            x, w = rand(272, k), rand(n * (2 if gated else 1), k, scale=k**-0.5)
            run = lambda a: skinny(a, w, ops.seen, gated=gated, act="gelu_tanh" if gated else "", pdl=pdl, tile=tile)  # noqa: E731
            full = run(x)
            want = ref.gated_linear(x.float(), w.float(), "gelu_tanh") if gated else x.float() @ w.float().T
            label = f"{tag}linear {n}x{k}{' gated' if gated else ''} {tile or 'table'}"
            check(label, error(full, want), 1e-2)
            bad = [m for m in (1, 2, 5, 9, 16, 17, 32, 33, 64, 65, 136) if not torch.equal(run(x[:m]), full[:m])]
            bad += [r for r in (3, 40, 271) if not torch.equal(run(x[r : r + 1])[0], full[r])]
            same(f"{label}: rows stand alone {bad or ''}", not bad)
        same(f"{tag}counters are back at 0", int(ops.seen.abs().sum()) == 0)
        for heads, kv_heads, dim, window in ((32, 16, 256, 1024), (32, 4, 512, None), (8, 1, 256, 512), (8, 1, 512, None), (9, 3, 64, None)):
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


def candidates(n: int, k: int, gated: bool) -> list[Tile]:
    """The best of earlier measurements, and sliced tiles: stages fill the shared memory of as many programs as one
    multiprocessor gets."""
    tiles = [linear.choose_tile(n, k, gated, 2)]
    for bn, slices in ((16, 4), (32, 4), (64, 4), (32, 8)):
        wide, count = bn * (2 if gated else 1), triton.cdiv(n, bn)
        if wide > 64 or k < 256 or (bn == 64 and n < 4096):
            continue
        for s in (1,) if gated else (1, 2, 3, 4, 6, 8):
            if s > 1 and (k < s * 512 or not 96 <= count * s <= (660 if s < 6 else 400)):
                continue
            each = min(3, triton.cdiv(count * s, 132))
            stages = max(3, min(8, 225000 // each // ((wide + 16) * 512) + 1, triton.cdiv(k, 256 * s) + 1))
            tiles.append(Tile(bn, 256 // slices, s, stages, warps=slices, slices=slices))
    return tiles


def widths(tile: Tile, gated: bool) -> list[Tile]:
    """The same tile with other widths at 17 rows."""
    return [replace(tile, wide=w) for w in ((16, 32) if gated and tile.slices > 1 else (32, 64) if gated or tile.slices > 1 else (32, 64, 128))]


def precompile(jobs: list[tuple[int, int, int, bool, Tile]]) -> None:
    """All (rows, N, K, gated, tile) at once: the compiler is mostly outside Python."""
    from concurrent.futures import ThreadPoolExecutor

    seen = torch.zeros(1 << 16, dtype=torch.int32, device="cuda")
    wanted: dict[tuple[Any, ...], tuple[int, int, int, bool, Tile]] = {}
    for rows, n, k, gated, tile in jobs:
        bm, cut = linear.for_rows(tile, n, rows, gated)
        late = n * k * (4 if gated else 2) >= linear.LATE_BYTES
        wanted.setdefault((bm, replace(cut, splits=0, wide=0), tile.splits > 1, gated, k % (tile.bk * tile.slices) == 0, late), (rows, n, k, gated, tile))
    say(f"compiling {len(wanted)} tiles")
    with ThreadPoolExecutor(14) as pool:
        def one(job: tuple[int, int, int, bool, Tile]) -> None:
            rows, n, k, gated, tile = job
            w = torch.empty((n * (2 if gated else 1), k), dtype=BF16, device="cuda")
            skinny(torch.zeros((rows, k), dtype=BF16, device="cuda"), w, seen, gated=gated, act="gelu_tanh" if gated else "", pdl=True, tile=tile)

        failures = 0
        for future in [pool.submit(one, job) for job in wanted.values()]:
            try:
                future.result()
            except Exception as e:
                failures += 1
                say(f"  compile failed: {type(e).__name__}: {str(e)[:200]}")
    torch.cuda.synchronize()
    say(f"compiled, {failures} failures")


def tune() -> None:
    shapes = weight_shapes()
    tiles = {shape: candidates(*shape) for shape in shapes}
    jobs = [(1, *shape, t) for shape in shapes for t in tiles[shape]]
    precompile(jobs + [(17, *shape, w) for shape in shapes for t in tiles[shape] for w in widths(t, shape[2])])
    ops = TritonOps("cuda")
    table: dict[tuple[int, int, bool], Tile] = {}
    say("shape, floor us | best tile us TB/s | unsliced us | no PDL us | 17 rows us | cuBLAS us")
    for (n, k, gated), where in shapes.items():
        bytes_ = n * k * 2 * (2 if gated else 1)
        copies = max(2, min(24, int(400e6 // bytes_)))
        ws = [torch.empty((n * (2 if gated else 1), k), dtype=BF16, device="cuda").normal_(0, k**-0.5) for _ in range(copies)]
        calls = copies * max(1, 8 // copies)
        x1, x17 = rand(1, k), rand(17, k)

        def us(x: torch.Tensor, tile: Tile | None, pdl: bool = True, ahead: int = 4, ws: list = ws, gated: bool = gated) -> float:
            extra = dict(gated=gated, act="gelu_tanh" if gated else "", pdl=pdl, tile=tile, ahead=ahead)
            return graph_us(lambda i: skinny(x, ws[i % len(ws)], ops.seen, **extra), calls)

        rows = []
        for tile in candidates(n, k, gated):
            try:
                rows.append((us(x1, tile), tile))
            except Exception as e:
                say(f"  {n}x{k} {tile}: {type(e).__name__}: {str(e)[:120]}")
        rows.sort(key=lambda r: r[0])
        close = [(u, t) for u, t in rows if u <= rows[0][0] * 1.04][:2]
        options = [(u, t) for u, narrow in close for t in widths(narrow, gated)]
        wide, best_us, best = min(((us(x17, t), u, t) for u, t in options), key=lambda r: r[1] + 0.25 * r[0])
        table[n, k, gated] = best
        plain = us(x1, best, pdl=False)
        cublas = [graph_us(lambda i: F.linear(x, ws[i % copies]), calls) for x in (x1,)]
        extra = dict(gated=gated, act="gelu_tanh" if gated else "", pdl=True, tile=best)
        y17, y1 = skinny(x17, ws[0], ops.seen, **extra), skinny(x17[16:], ws[0], ops.seen, **extra)
        if not torch.equal(y17[16:], y1):
            same(f"{where} {best}: row 17 alone", False)
        if not gated and not error(y17, x17.float() @ ws[0].float().T) < 1e-2:
            same(f"{where} {best}: right", False)
        say(
            f"{where:28s} {n:6d}x{k:5d}{'g' if gated else ' '} {bytes_ / H200_BYTES_PER_S * 1e6:7.2f} | {best.bn:3d} {best.bk:3d}x{best.slices} /{best.splits:2d} "
            f"s{best.stages} w{best.wide} {best_us:7.2f} {bytes_ / best_us * 1e-6:5.2f} | {next((u for u, t in rows if t.slices == 1), 0):7.2f} | {plain:7.2f} | {wide:7.2f} | {cublas[0]:7.2f}"
        )
        RESULTS.setdefault("linear", []).append(
            dict(where=where, n=n, k=k, gated=gated, best=[best.bn, best.bk, best.splits, best.stages, best.warps, best.slices, best.wide], no_pdl_us=plain,
                 rows17_us=wide, cublas_us=cublas,
                 top=[(round(u, 2), t.bn, t.bk, t.splits, t.stages, t.warps, t.slices) for u, t in rows])
        )  # fmt: skip
        del ws
    rule_of = linear.choose_tile
    linear.choose_tile = lambda n, k, gated, b: table.get((n, k, gated)) or rule_of(n, k, gated, b) if b == 2 else rule_of(n, k, gated, b)


# ---- attention cuts -------------------------------------------------------------------------------------------------------
def attention_cuts() -> None:
    layers = {
        "31B sliding": AttnSpec(32, 16, 256, 0, True, window=1024), "31B full": AttnSpec(32, 4, 512, 0, True),
        "E2B sliding": AttnSpec(8, 1, 256, 0, True, window=512), "E2B full": AttnSpec(8, 1, 512, 0, True),
    }  # fmt: skip
    from concurrent.futures import ThreadPoolExecutor

    best: dict[tuple[bool, bool], Any] = {}
    for label, spec in layers.items():
        views = {(rows, ctx): view(spec, [(ctx, rows)]) for rows in (1, 5, 17) for ctx in (1024, 8192)}
        qs = {rows: rand(rows, spec.heads * spec.head_dim) for rows in (1, 5, 17)}
        Cut = attention.Cut
        if spec.head_dim == 512:
            cuts = [c for f in (32, 64) for c in (Cut(16, f, 8, 5, 8), Cut(32, f, 8, 2, 8), Cut(32, f, 4, 2, 4), Cut(16, f, 4, 5, 4))]
        else:
            cuts = [c for f in (32, 64, 128) for c in (Cut(32, f, 8, 2, 8), Cut(32, f, 8, 5, 8), Cut(32, f, 4, 2, 4))] + [Cut(64, 64, 8, 2, 8)]
        with ThreadPoolExecutor(14) as pool:
            jobs = [pool.submit(attention.attend, qs[r], spec, views[r, 1024], True, c) for c in cuts for r in (1, 17)]
            for job in jobs:
                job.exception()
        results = []
        for cut in cuts:
            try:
                us = {key: round(graph_us(lambda i: attention.attend(qs[key[0]], spec, views[key], True, cut), 16), 2) for key in views}
                results.append((us[1, 1024], cut, us))
            except Exception as e:
                say(f"  {label} {cut}: {type(e).__name__}: {str(e)[:120]}")
        results.sort(key=lambda r: r[0])
        for _, cut, us in results[:5]:
            say(f"{label:12s} bn {cut.bn} warps {cut.warps} stages {cut.stages} fine {cut.fine}: attend + combine us", {f"{r}@{c}": u for (r, c), u in us.items()})
        best[spec.window is None, spec.kv_heads >= 8] = min(results, key=lambda r: r[2][1, 1024] + 0.5 * r[2][5, 1024] + 0.25 * r[2][17, 1024])[1]
        RESULTS.setdefault("attention", {})[label] = [
            dict(bn=c.bn, warps=c.warps, stages=c.stages, fine=c.fine, us={f"{r}@{n}": u for (r, n), u in us.items()}) for _, c, us in results
        ]
    for label, cut in zip(layers, best.values()):
        say(f"chosen for {label}: {cut}")
    rule_of = attention.choose_cut

    def chosen(spec: AttnSpec, dtype: torch.dtype) -> Any:
        full = spec.window is None
        return rule_of(spec, dtype) if dtype != BF16 or spec.head_dim < 128 else best.get((full, spec.kv_heads >= 8)) or best[full, False]

    attention.choose_cut = chosen


# ---- models ---------------------------------------------------------------------------------------------------------------
def kernel_table(replay: Any, title: str, out: Path) -> None:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as prof:
        replay()
        torch.cuda.synchronize()
    trace = out / "trace.json"
    prof.export_chrome_trace(str(trace))
    events = [e for e in json.loads(trace.read_text())["traceEvents"] if e.get("cat") == "kernel"]
    trace.unlink()
    rows: dict[str, list[float]] = defaultdict(list)
    for e in events:
        rows[f"{e['name'][:44]} grid {e['args'].get('grid')} x{e['args'].get('block', ['?'])[0]}"].append(e["dur"])
    total = sum(sum(v) for v in rows.values())
    wall = max(e["ts"] + e["dur"] for e in events) - min(e["ts"] for e in events) if events else 0.0
    say(f"{title}: {len(events)} kernels, {total:.0f} us in kernels, {wall:.0f} us from first to last")
    ranked = sorted(rows.items(), key=lambda r: -sum(r[1]))
    for name, durations in ranked[:22]:
        print(f"    {sum(durations):8.1f} us {len(durations):4d} x {sum(durations) / len(durations):7.2f}  {name}")
    RESULTS.setdefault("kernels", {})[title] = [(n, len(d), sum(d)) for n, d in ranked]


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
            del rig
            gc.collect()
            torch.cuda.empty_cache()


def one_model(rig: Rig, size: str, full: bool, out: Path) -> None:
    seqs = rig.open(8, 1024, 128)
    need = rig.weight_bytes() + rig.kv_bytes(1024)
    row: dict[str, Any] = {"bytes": need, "floor_ms": need / H200_BYTES_PER_S * 1e3}
    RESULTS.setdefault("models", {})[size] = row
    best, default = None, (linear.LATE_BYTES, linear.AHEAD_LINES)
    for late, ahead in ((default, (0, 4), (1 << 60, 4), (default[0], 16)) if full else (default,)):
        linear.LATE_BYTES, linear.AHEAD_LINES = late, ahead
        run = rig.graph(seqs[:1], 0, 1024, 1280)
        ms = run.time()
        row[f"ar_ms late {late} ahead {ahead}"] = ms
        say(f"{size} AR {ms:.3f} ms (late from {late / 2**20:.0f} MiB, {ahead} lines ahead), floor {row['floor_ms']:.3f}, {need / ms * 1e-9:.2f} TB/s; capture {run.capture_s:.1f} s")
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
    kernel_table(plain.graph.replay, f"{size} AR without PDL", out)
    del plain
    if full:
        plain = rig.graph(seqs[:1], 4, 1024, 1280)
        kernel_table(plain.graph.replay, f"{size} K=4 without PDL", out)
        del plain
    rig.ops.pdl = True
    for k in (1, 4, 8, 16):
        run = rig.graph(seqs[:1], k, 1024, 1280)
        verify = rig.graph(seqs[:1], k, 1024, 1280, propose=lambda last, length, k=k: _fixed(last, k))
        row[f"cycle_{k}_ms"], row[f"verify_{k}_ms"] = run.time(), verify.time()
        say(f"{size} K={k}: cycle {row[f'cycle_{k}_ms']:.3f} ms ({row[f'cycle_{k}_ms'] / row['ar_ms']:.3f} x AR), verify alone {row[f'verify_{k}_ms']:.3f}")
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
    (out / "smoke.json").write_text(json.dumps(RESULTS, indent=1, default=str))
    torch.cuda.synchronize()


def _fixed(last: torch.Tensor, k: int) -> Any:
    from outrider.types import Draft

    return Draft(last[:, None].expand(-1, k) + torch.arange(k, device=last.device), torch.full_like(last, k))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", default="runs/gpu_smoke")
    parser.add_argument("--sections", nargs="+", default=["parity", "linear", "attention", "models"])
    parser.add_argument("--sizes", nargs="+", default=["E2B", "31B", "26B-A4B", "E4B", "12B"])
    args = parser.parse_args()
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    say(torch.cuda.get_device_name(), "torch", torch.__version__, "triton", triton.__version__)
    jobs = {"parity": parity, "linear": tune, "attention": attention_cuts, "models": lambda: models(args.sizes, out)}
    for section in args.sections:
        say(f"== {section}")
        try:
            with torch.inference_mode():
                jobs[section]()
        except Exception:
            traceback.print_exc()
            RESULTS.setdefault("failed", []).append({"section": section, "error": traceback.format_exc()})
            gc.collect()
            torch.cuda.empty_cache()
        (out / "smoke.json").write_text(json.dumps(RESULTS, indent=1, default=str))
    bad = [name for name, r in RESULTS.get("parity", {}).items() if not r["ok"]]
    say("FAILED:" if bad or RESULTS.get("failed") else "all checks passed", *bad, *(f["section"] for f in RESULTS.get("failed", [])))


if __name__ == "__main__":
    main()
