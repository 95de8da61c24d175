# ruff: noqa: E501, B023
"""The target's pass on this GPU: tiles and cuts for 1 to 17 rows, then whole plain and verify passes before and after, in one run.

    python benchmarks/gpu_target.py [--out FOLDER] [--sections tiles cuts models] [--sizes 31B 12B E2B E4B 26B-A4B] [--seconds 80] [--old]

tiles: for every weight shape the best cut at one row, and for each the best wide one at 17 rows that adds in the same order: the one
in tiles.py against turned ones (--old: unturned ones too). cuts: the same for attention at 1, 5, 9 and 17 rows. Whatever is chosen
must give a row the same bits in any company. models: plain and verify passes with the tables as they are and with what was found here.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import torch
import triton
from gpu_common import RESULTS, attempt, begin, finish, kernel_table, kernels, late, save, say
from gpu_smoke import BF16, check, error, fixed, graph_us, rand, same, view, weight_shapes

from outrider.bench.gpu import H200_BYTES_PER_S, SIZES, Rig, collect
from outrider.models.config import ModelConfig
from outrider.models.known import KNOWN
from outrider.ops.triton import TritonOps, attention, linear
from outrider.ops.triton.attention import Cut
from outrider.ops.triton.linear import SHARED, Tile, skinny
from outrider.types import AttnSpec

Shape = tuple[int, int, bool]
LAYERS = {"E2B": 10, "E4B": 12, "12B": 6, "26B-A4B": 6, "31B": 6}
OLD = [False]


def pooled(jobs: list[Callable[[], Any]]) -> None:
    """Compile in parallel: the compiler is mostly outside Python. What fails here fails again, and is said, when it is timed."""
    with ThreadPoolExecutor(15) as pool:
        for future in [pool.submit(job) for job in jobs]:
            future.exception()
    torch.cuda.synchronize()


# ---- tiles ----------------------------------------------------------------------------------------------------------------
def stages_for(rows: int, columns: int, chunk: int, programs: int, k: int) -> int:
    """Buffers that fill the shared memory of so many programs a multiprocessor."""
    return max(2, min(8, SHARED // programs // ((rows + columns) * chunk * 2) + 1, triton.cdiv(k, chunk) + 1))


def turned(n: int, k: int, gated: bool) -> list[Tile]:
    """64 or 128 rows of weights a program; as many spans as fill the multiprocessors."""
    out, sides = [], 2 if gated else 1
    for bn, bk in ((64, 64), (64, 128), (128, 64)):
        for splits in (1,) if gated else (1, 2, 3, 4, 6, 8):
            programs = triton.cdiv(n, bn) * splits
            if k >= splits * 256 and (84 <= programs <= 450 or (splits == 1 and programs > 450)) and (bn == 64 or n >= 8192):
                each = 1 if programs <= 132 else 2
                stages = min(8, SHARED // each // ((16 + bn * sides) * bk * 2), triton.cdiv(k, splits * bk))
                if stages >= 2:
                    out.append(Tile(bn, bk, splits, stages, 4, 0))
    return out


def one_row(n: int, k: int, gated: bool, old: bool) -> list[Tile]:
    """What came out best before, turned tiles, and with `old` other numbers of spans."""
    now = linear.choose_tile(n, k, gated, 2)
    tiles = {now, *turned(n, k, gated)}
    if not old:
        return sorted(tiles, key=lambda t: astuple(replace(t, many=None)))
    if gated:
        tiles |= (
            {Tile(32, 128, 1, 3), Tile(32, 128, 1, 4), Tile(64, 64, 1, 4), Tile(64, 128, 1, 2), Tile(64, 128, 1, 3)} if n > 4096 else set()
        )
        return sorted(tiles, key=lambda t: astuple(replace(t, many=None)))
    if n >= 8192:
        tiles |= {Tile(32, 128, 1, 6), Tile(64, 128, 1, 4), Tile(128, 64, 1, 5)}
    for bn, bk in ((32, 128), (16, 128), (64, 64)):
        for splits in (1, 2, 3, 4, 6, 8, 12):
            programs = triton.cdiv(n, bn) * splits
            if k >= splits * 256 and 90 <= programs <= 450:
                tiles.add(Tile(bn, bk, splits, 6 if bn < 64 else 5))
    for bn in (16, 32, 64):
        for splits in (1, 2, 4):
            programs = triton.cdiv(n, bn) * splits
            if k >= splits * 512 and (90 <= programs <= 450 or (splits == 1 and n <= 4096 and bn < 64)):
                each = min(3, triton.cdiv(programs, 132))
                tiles.add(Tile(bn, 64, splits, max(3, stages_for(16, bn, 256, each, k // splits)), 4, 4))
    return sorted(tiles, key=lambda t: astuple(replace(t, many=None)))


def many_rows(n: int, k: int, gated: bool, base: Tile) -> list[Tile]:
    """Other cuts of the same sum for 17..32 rows: unsliced all but the spans is free, sliced only the width."""
    sides, out = 2 if gated else 1, [base]
    span = triton.cdiv(k, base.splits)
    if base.slices == 0:
        for bn, bk in ((64, 64), (64, 128), (128, 64), (128, 128)):
            for programs in (1, 2):
                st = min(8, SHARED // programs // ((32 + bn * sides) * bk * 2), triton.cdiv(span, bk))
                if st >= 2 and triton.cdiv(n, bn) * base.splits >= 60 * programs:
                    out.append(replace(base, many=(bn, bk, st, 8 if bn * sides > 128 else 4)))
    elif base.many is not None and not OLD[0]:
        pass
    elif base.slices > 1:
        for bn in (16, 32, 64):
            for programs in (1, 2, 3):
                st = stages_for(32, bn * sides, base.bk * base.slices, programs, span)
                if st >= 3 and bn * sides <= 64 and triton.cdiv(n, bn) * base.splits >= 40 * programs:
                    out.append(replace(base, many=(bn, base.bk, st, base.warps)))
    else:
        for bn in (16, 32, 64, 128):
            for bk in (64, 128):
                for programs in (1, 2, 3):
                    warps = 8 if bn * sides >= 128 and programs == 1 else 4
                    st = stages_for(32, bn * sides, bk, programs, span)
                    count = triton.cdiv(n, bn) * base.splits
                    if st >= 3 and bn * sides <= 256 and count >= 60 * programs and (bk == 128 or bn >= 32) and not (bn == 16 and n > 8192):
                        out.append(replace(base, many=(bn, bk, st, warps)))
    kept: dict[Any, Tile] = {t.many: t for t in out}
    return list(kept.values())


def tiles(drafters: bool) -> None:
    shapes = {s: where for s, where in weight_shapes().items() if drafters or "assistant" not in where}
    ops = TritonOps("cuda")
    extra = lambda g, t: dict(gated=g, act="gelu_tanh" if g else "", pdl=True, tile=t)  # noqa: E731

    def compile_all(jobs: list[tuple[int, int, int, bool, Tile]]) -> None:
        wanted: dict[Any, Any] = {}
        for rows, n, k, gated, tile in jobs:
            bm, cut = linear.for_rows(tile, n, rows, gated)
            chunk, first = cut.bk * max(1, cut.slices), tile.bk * max(1, tile.slices)
            span = triton.cdiv(triton.cdiv(k, tile.splits), first) * first
            even, big = k % chunk == 0 and span % chunk == 0, n * k * (4 if gated else 2) >= linear.LATE_BYTES
            wanted.setdefault((bm, replace(cut, splits=triton.cdiv(k, span), many=None), gated, even, big), (rows, n, k, gated, tile))
        say(f"compiling {len(wanted)} tiles")

        def one(rows: int, n: int, k: int, gated: bool, tile: Tile) -> None:
            w = torch.empty((n * (2 if gated else 1), k), dtype=BF16, device="cuda")
            skinny(torch.zeros((rows, k), dtype=BF16, device="cuda"), w, ops.seen, **extra(gated, tile))

        pooled([lambda j=j: one(*j) for j in wanted.values()])

    def weights(n: int, k: int, gated: bool) -> list[torch.Tensor]:
        size = n * k * 2 * (2 if gated else 1)
        return [
            torch.empty((n * (2 if gated else 1), k), dtype=BF16, device="cuda").normal_(0, k**-0.5)
            for _ in range(max(2, min(24, int(400e6 // size))))
        ]

    def us(x: torch.Tensor, ws: list[torch.Tensor], gated: bool, tile: Tile) -> float:
        try:
            return graph_us(lambda i: skinny(x, ws[i % len(ws)], ops.seen, **extra(gated, tile)), max(8, len(ws)), 4)
        except Exception as e:
            say(f"  {tile}: {type(e).__name__}: {str(e)[:100]}")
            return float("inf")

    compile_all([(1, *s, t) for s in shapes for t in one_row(*s, OLD[0])])
    first: dict[Shape, list[tuple[float, Tile]]] = {}
    for shape in shapes:
        ws = weights(*shape)
        x = rand(1, shape[1])
        ranked = sorted(((us(x, ws, shape[2], t), t) for t in one_row(*shape, OLD[0])), key=lambda r: r[0])
        now = next(r for r in ranked if r[1] == linear.choose_tile(*shape, 2))
        first[shape] = [r for r in ranked if r[0] <= ranked[0][0] * 1.04][:3]
        first[shape] += [now] if now not in first[shape] else []
        del ws
    compile_all([(17, *s, m) for s in shapes for _, t in first[s] for m in many_rows(*s, t)])
    compile_all([(r, *s, t) for s in shapes for _, t in first[s][:1] for r in (40, 72)])
    found: dict[Shape, Tile] = {}
    wrong: list[Any] = []
    say("shape, floor us | table: 1 row, 17 rows | chosen: 1, 5, 17 rows, tile (bn, bk, splits, stages, warps, slices; many)")
    for shape, where in shapes.items():
        n, k, gated = shape
        ws = weights(*shape)
        x = rand(17, k)
        rows = []
        for u1, t in first[shape]:
            wide, best = min(((us(x, ws, gated, m), m) for m in many_rows(n, k, gated, t)), key=lambda r: r[0])
            rows.append((u1 + 0.3 * wide, u1, wide, best))
        now = linear.choose_tile(n, k, gated, 2)
        u_now, wide_now = next(u for u, t in first[shape] if t == now), us(x, ws, gated, now)
        _, u1, wide, best = min(rows, key=lambda r: r[0])
        u5 = us(x[:5], ws, gated, best)
        found[shape] = best
        tall = rand(136, k)
        u72 = [us(tall[:72], ws, gated, t) for t in (now, best)] if n < 100000 else [0.0, 0.0]
        full = skinny(tall, ws[0], ops.seen, **extra(gated, best))
        bad = [
            m
            for m in (1, 5, 9, 16, 17, 40, 72)
            if not torch.equal(skinny(tall[136 - m :], ws[0], ops.seen, **extra(gated, best)), full[136 - m :])
        ]
        if bad:  # said below, and not used
            wrong += [(where, astuple(best), m) for m in bad]
            found[shape] = now
        floor = n * k * (4 if gated else 2) / H200_BYTES_PER_S * 1e6
        say(
            f"{where:20s} {n:6d}x{k:5d}{'g' if gated else ' '} {floor:6.1f} | {u_now:6.2f} {wide_now:6.2f} | {u1:6.2f} {u5:6.2f} {wide:6.2f} | 72 rows {u72[0]:6.1f} {u72[1]:6.1f} {astuple(best)}"
        )
        RESULTS.setdefault("tiles", []).append(
            dict(where=where, n=n, k=k, gated=gated, now=[u_now, wide_now], us=[u1, u5, wide], us72=u72, best=astuple(best),
                 all=[(round(a, 2), round(b, 2), round(c, 2), astuple(t)) for a, b, c, t in rows])
        )  # fmt: skip
        del ws
    same(f"tiles of {len(found)} shapes: rows stand alone {wrong or ''}", not wrong)
    RESULTS["found_tiles"] = len(found)
    FOUND["tiles"] = found


# ---- attention cuts -------------------------------------------------------------------------------------------------------
FOUND: dict[str, Any] = {"tiles": {}, "cuts": {}}


def kinds(sizes: list[str]) -> dict[AttnSpec, str]:
    out: dict[AttnSpec, str] = {}
    for size in sizes:
        for layer in ModelConfig.from_hf(KNOWN[SIZES[size]]).layers:
            a = layer.attn
            out.setdefault(
                AttnSpec(a.heads, a.kv_heads, a.head_dim, 0, True, window=a.window), f"{size} {'full' if a.window is None else 'sliding'}"
            )
    return out


def queries(packed: int, dim: int) -> list[tuple[int, int]]:
    """(BQ, warps) worth trying for so many queries a K/V head; what spills is left out."""
    if packed <= 16:
        return [(16, 4)] if dim <= 256 else [(16, 8)]
    return [(16, 4), (32, 4)] if dim <= 256 else [(16, 4), (32, 8)]


def options(spec: AttnSpec) -> list[Cut]:
    """The cut in use and other unsliced ones; a split that is one block needs no loop, and half the registers."""
    now = replace(attention.choose_cut(spec, BF16), queries=())
    return list(dict.fromkeys((now, *(replace(now, bn=bn, fine=fine) for bn, fine in ((32, 32), (32, 64), (64, 64))))))


def cuts(sizes: list[str]) -> None:
    rows_of, contexts, specs = (1, 5, 9, 17), (1024, 4096), kinds(sizes)
    views = {s: {(r, c): view(s, [(c - r, r)], bound=c + 256) for r in rows_of for c in contexts} for s in specs}
    qs = {s: {r: rand(r, s.heads * s.head_dim) for r in rows_of} for s in specs}
    tries = [
        (s, replace(cut, queries=((999, bq, w),)), r)
        for s in specs for cut in options(s) for r in rows_of for bq, w in queries(r * s.heads // s.kv_heads, s.head_dim)
    ]  # fmt: skip
    wanted = {(s, c): r for s, c, r in tries}
    say(f"compiling {len(wanted)} cuts")
    pooled([lambda s=s, c=c, r=r: attention.attend(qs[s][r], s, views[s][r, 1024], True, c) for (s, c), r in wanted.items()])
    say("kind | cut (bn, fine, warps, stages, slices) | us at rows 1, 5, 9, 17 @1k then @4k | queries")
    for spec, label in specs.items():
        results = []
        for cut in options(spec):
            us: dict[tuple[int, int], float] = {}
            chosen = []
            for r in rows_of:
                packed = r * spec.heads // spec.kv_heads
                ranked = []
                for bq, w in queries(packed, spec.head_dim):
                    c = replace(cut, queries=((999, bq, w),))
                    try:
                        ranked.append(
                            (
                                [
                                    graph_us(lambda i: attention.attend(qs[spec][r], spec, views[spec][r, ctx], True, c), 16, 3)
                                    for ctx in contexts
                                ],
                                bq,
                                w,
                            )
                        )
                    except Exception as e:
                        say(f"  {label} {c}: {type(e).__name__}: {str(e)[:100]}")
                if not ranked:
                    break
                times, bq, w = min(ranked, key=lambda t: t[0][0] + 0.3 * t[0][1])
                us[r, 1024], us[r, 4096] = times
                chosen.append((packed, bq, w))
            if len(chosen) < len(rows_of):
                continue
            cut = replace(cut, queries=tuple(chosen))
            score = sum(weight * (us[r, 1024] + 0.15 * us[r, 4096]) for r, weight in ((1, 1.0), (5, 0.4), (9, 0.3), (17, 0.3)))
            results.append((score, cut, us))
        now = attention.choose_cut(spec, BF16)
        old = [graph_us(lambda i: attention.attend(qs[spec][r], spec, views[spec][r, 1024], True, now), 16, 3) for r in rows_of]
        say(f"{label:16s} now {astuple(now)[:5]} {' '.join(f'{u:6.2f}' for u in old)}")
        results.sort(key=lambda r: r[0])
        for _, cut, us in results[:3]:
            say(
                f"{label:16s} {astuple(cut)[:5]} {' '.join(f'{us[r, 1024]:6.2f}' for r in rows_of)} | {' '.join(f'{us[r, 4096]:6.2f}' for r in rows_of)} | {cut.queries}"
            )
        best = results[0][1]
        FOUND["cuts"][spec.heads, spec.kv_heads, spec.head_dim, spec.window] = best
        bad = []
        for ctx in contexts:
            kv = views[spec][17, ctx]
            full = attention.attend(qs[spec][17], spec, kv, True, best)
            check(f"{label}: against the cut in use", error(full, attention.attend(qs[spec][17], spec, kv, True, now)), 1e-2)
            for r in (1, 2, 5, 9, 16):
                part = replace(kv, positions=kv.positions[:r], row_seq=kv.row_seq[:r], row_start=kv.row_start.clamp(max=r), max_rows=r)
                if not torch.equal(attention.attend(qs[spec][17][:r], spec, part, True, best), full[:r]):
                    bad.append((ctx, r))
        same(f"{label}: rows stand alone {bad or ''}", not bad)
        if bad:
            del FOUND["cuts"][spec.heads, spec.kv_heads, spec.head_dim, spec.window]
        RESULTS.setdefault("cuts", {})[label] = dict(
            key=[spec.heads, spec.kv_heads, spec.head_dim, spec.window],
            ok=not bad,
            now=old,
            results=[dict(cut=astuple(c), us={f"{r}@{n}": round(u, 2) for (r, n), u in us.items()}) for _, c, us in results],
        )


# ---- models ---------------------------------------------------------------------------------------------------------------
def use(tiles_too: bool, cuts_too: bool, saved: tuple[Any, Any]) -> None:
    rule, cut_rule = saved
    linear.choose_tile, attention.choose_cut = rule, cut_rule
    if tiles_too:
        linear.choose_tile = lambda n, k, g, b: (FOUND["tiles"].get((n, k, bool(g))) if b == 2 else None) or rule(n, k, g, b)
    if cuts_too:
        known = FOUND["cuts"]
        attention.choose_cut = lambda s, d: (
            (known.get((s.heads, s.kv_heads, s.head_dim, s.window)) if d == BF16 else None) or cut_rule(s, d)
        )


def models(sizes: list[str], out: Path, seconds: float) -> None:
    saved = (linear.choose_tile, attention.choose_cut)

    def warm(size: str) -> None:
        with torch.inference_mode():
            rig = Rig.of(size, LAYERS[size], slots=8, context=1400)
            seqs = rig.open(8, 1024, 64)
            for batch, k in ((1, 0), (1, 4), (1, 8), (1, 16), *(((8, 4), (8, 8)) if size == "31B" else ())):
                rig.graph(seqs[:batch], k, 1024, 1280, propose=lambda last, length, k=k: fixed(last, k), eager=True).graph.replay()
            torch.cuda.synchronize()
            rig.free()

    found_tiles, found_cuts = bool(FOUND["tiles"]), bool(FOUND["cuts"])
    plans = {"before": (False, False)}
    if found_tiles and found_cuts:
        plans |= {"cuts": (False, True), "tiles": (True, False)}
    if found_tiles or found_cuts:
        plans["after"] = (found_tiles, found_cuts)
    for plan in dict.fromkeys((plans["before"], plans.get("after", plans["before"]))):
        use(*plan, saved)
        pooled([lambda s=s: warm(s) for s in sizes])
    collect()
    say("compiled the models' kernels")
    for size in sizes:
        if late(seconds):
            say(f"{size}: no time left")
            continue
        use(False, False, saved)
        rig = Rig.of(size, slots=8, context=1400)
        eight = rig.open(8, 1024, 128)
        seqs = eight[:1]
        floor = (rig.weight_bytes() + rig.kv_bytes(1024)) / H200_BYTES_PER_S * 1e3
        row: dict[str, Any] = {"floor": floor}
        RESULTS.setdefault("models", {})[size] = row

        def ms(k: int) -> float:
            return rig.graph(seqs, k, 1024, 1280, propose=lambda last, length: fixed(last, k)).time(10, 3)

        for title, plan in plans.items():
            use(*plan, saved)
            times = {k: ms(k) for k in ((0, 4, 8, 16) if title in ("before", "after") else (0, 16))}
            row[title] = times
            say(
                f"{size} floor {floor:.3f} {title:6s} AR {times[0]:.3f}, verify {'/'.join(str(k + 1) for k in times if k)} rows",
                " ".join(f"{t:.3f} (+{(t / times[0] - 1) * 100:.1f} %)" for k, t in times.items() if k),
            )
        for title in ("before", "after") if size == "31B" else ():
            if title not in plans:
                continue
            use(*plans[title], saved)
            wide = {k: rig.graph(eight, k, 1024, 1280, propose=lambda last, length: fixed(last, k)).time(4, 2) for k in (4, 8)}
            row[f"{title} batch 8"] = wide
            say(f"{size} {title} batch 8: 40 rows {wide[4]:.2f} ms, 72 rows {wide[8]:.2f} ms")
        plain = rig.graph(seqs, 0, 1024, 1280)
        plain.graph.replay()
        first = plain.logits.clone()
        for k in (4, 8, 16):
            run = rig.graph(seqs, k, 1024, 1280, propose=lambda last, length: fixed(last, k))
            run.graph.replay()
            torch.cuda.synchronize()
            same(f"{size} logits of the first row of {k + 1} against alone", torch.equal(run.logits[0], first[0]))
            del run
        if size == "31B":
            rig.ops.pdl = False
            for k in (16,):
                run = rig.graph(seqs, k, 1024, 1280, propose=lambda last, length: fixed(last, k))
                kernel_table(kernels(run.graph.replay, out), f"{size}, {k + 1} rows, without PDL")
                del run
        del plain
        rig.free()
        save(out / "target.json")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", default="runs/gpu_target")
    parser.add_argument("--sections", nargs="+", default=["tiles", "cuts", "models"])
    parser.add_argument("--sizes", nargs="+", default=["31B", "12B", "E2B", "E4B", "26B-A4B"])
    parser.add_argument("--drafters", action="store_true", help="tiles for the drafters' shapes too")
    parser.add_argument("--seconds", type=float, default=80.0)
    parser.add_argument("--old", action="store_true", help="search unturned tiles as well")
    args = parser.parse_args()
    OLD[0] = args.old
    out = begin(args.out)
    jobs = {
        "tiles": lambda: tiles(args.drafters),
        "cuts": lambda: cuts(args.sizes),
        "models": lambda: models(args.sizes, out, args.seconds),
    }
    for section in args.sections:
        say(f"== {section}")
        attempt(section, jobs[section])
        save(out / "target.json")
    finish(out / "target.json")


if __name__ == "__main__":
    main()
