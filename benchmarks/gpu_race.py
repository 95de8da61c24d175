"""Every target kernel once on small shapes, for a sanitizer that makes each of them a hundred times slower.

    export PYTHONPATH=src; python3 benchmarks/gpu_race.py && compute-sanitizer --tool racecheck python3 benchmarks/gpu_race.py

The first run compiles (the sanitizer then finds the kernels in Triton's cache) and compares with the plain ops.
"""

from __future__ import annotations

import time
from dataclasses import replace

import torch
from gpu_smoke import BF16, error, rand, say, view

from outrider.ops.reference import ReferenceOps
from outrider.ops.triton import TritonOps, attention
from outrider.ops.triton.attention import Cut
from outrider.ops.triton.linear import Tile, skinny
from outrider.types import AttnSpec

TILES = (
    Tile(32, 128, 2, 4), Tile(64, 64, 1, 5), Tile(16, 64, 2, 4, 4, 4), Tile(64, 64, 1, 4, 4, 0), Tile(64, 128, 2, 3, 4, 0),
)  # fmt: skip


@torch.inference_mode()
def main() -> None:
    began, worst = time.perf_counter(), 0.0
    torch.manual_seed(0)
    ref, ops = ReferenceOps(), TritonOps("cuda", pdl=False)

    def near(label: str, got: torch.Tensor, want: torch.Tensor) -> None:
        nonlocal worst
        torch.cuda.synchronize()
        e = error(got, want)
        worst = max(worst, e)
        if not e < 2e-2:
            say(f"FAIL {label}: {e:.1e}")

    for tile in TILES:
        for gated in (False, True) if tile.splits == 1 else (False,):
            w = rand(128 * (2 if gated else 1), 512, scale=512**-0.5)
            for rows in (1, 17, 40, 72):
                x = rand(rows, 512)
                got = skinny(x, w, ops.seen, gated=gated, act="gelu_tanh" if gated else "", tile=tile)
                near(f"linear {tile} {rows}", got, ref.gated_linear(x, w, "gelu_tanh") if gated else ref.linear(x, w))
    for dim, window, cuts in (
        (256, 96, (Cut(32, 64, 4, 2, 1), Cut(32, 64, 4, 2, 0), Cut(32, 32, 4, 1, 0), Cut(32, 32, 4, 2, 1))),
        (512, None, (Cut(64, 64, 8, 2, 1), Cut(32, 64, 8, 2, 0))),
        (64, None, (Cut(32, 64),)),
    ):
        spec = AttnSpec(4, 2, dim, 0, True, window=window, scale=dim**-0.5)
        for rows in (1, 17):
            kv, q = view(spec, [(140 - rows, rows)]), rand(rows, 4 * dim)
            want = ref.attend(q, spec, kv)
            for cut in cuts:
                for bq in (16,) if rows == 1 else (16, 32, 64) if cut.slices == 0 else (16, 32):
                    got = attention.attend(q, spec, kv, False, replace(cut, queries=((999, bq, cut.warps),)))
                    near(f"attend {spec} {cut} {bq}", got, want)
    x, y, w, scale = rand(3, 1536), rand(3, 1536), torch.rand(1536, device="cuda"), torch.tensor([0.7], device="cuda")
    for got, want in zip(ops.residual_norm(x, y, w, scale, w, 1e-6), ref.residual_norm(x, y, w, scale, w, 1e-6)):
        near("residual norm", got, want)
    router, factor = rand(8, 256, scale=0.1), torch.rand(8, device="cuda") + 0.5
    gate_up, down = rand(8, 128, 256, scale=0.06), rand(8, 256, 64, scale=0.12)
    for rows in (1, 5):
        h = rand(rows, 256)
        args = (h, h, router, factor, gate_up, down, 2, "gelu_tanh")
        near("moe", ops.moe(*args), ref.moe(*args))
    near("argmax", ops.argmax(rand(3, 5000).float()).float() * 0, torch.zeros(3, device="cuda"))
    assert gate_up.dtype == BF16
    say(f"every kernel once in {time.perf_counter() - began:.1f} s, worst error {worst:.1e}")


if __name__ == "__main__":
    main()
