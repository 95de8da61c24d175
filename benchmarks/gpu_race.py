"""Every kernel once, for a sanitizer that makes each of them a hundred times slower: the target's on small shapes, and a round of
each kind of drafter (E2B's in one launch, 12B's in short kernels) at its own.

    export PYTHONPATH=src PYTORCH_NO_CUDA_MEMORY_CACHING=1; python3 benchmarks/gpu_race.py [target] [draft] && \\
    compute-sanitizer --tool racecheck --kernel-name regex='^[a-z_]+_kernel$' python3 benchmarks/gpu_race.py [target] [draft]

The first run compiles (the sanitizer then finds the kernels in Triton's cache) and compares with the plain ops. The names leave out
torch's own kernels; without its cache of memory, reading beyond a tensor is reading beyond an allocation.
"""

from __future__ import annotations

import sys

import torch
from gpu_common import BF16, FAILED, attempt, error, rand, say, verdict, view
from tests.rounds import batch_of, float32_drafter, follow, gentle

from outrider.bench.gpu import Rig
from outrider.ops.reference import ReferenceOps
from outrider.ops.triton import TritonOps, attention
from outrider.ops.triton.attention import Cut, Shape
from outrider.ops.triton.draft import FusedDrafter
from outrider.ops.triton.draft_steps import SteppedDrafter
from outrider.ops.triton.linear import product
from outrider.ops.triton.tiles import Tile
from outrider.spec.mtp import MTPDrafter
from outrider.types import AttnSpec, SamplingParams

TILES = (
    Tile(32, 128, 2, 4), Tile(64, 64, 1, 5), Tile(64, 64, 1, 4, turned=True), Tile(64, 128, 2, 3, turned=True),
)  # fmt: skip


def target() -> None:
    worst = 0.0
    ref, ops = ReferenceOps(), TritonOps("cuda", pdl=False)

    def near(label: str, got: torch.Tensor, want: torch.Tensor) -> None:
        nonlocal worst
        torch.cuda.synchronize()
        e = error(got, want)
        worst = max(worst, e)
        if not e < 2e-2:
            verdict(label, False, f"{e:.1e}")

    for tile in TILES:
        for gated in (False, True) if tile.splits == 1 else (False,):
            w = rand(128 * (2 if gated else 1), 512, scale=512**-0.5)
            for rows in (1, 17, 40, 72, 320):
                x = rand(rows, 512)
                got = product(x, w, ops.seen, gated=gated, act="gelu_tanh" if gated else "", tile=tile)
                near(f"linear {tile} {rows}", got, ref.gated_linear(x, w, "gelu_tanh") if gated else ref.linear(x, w))
    for dim, window, cut in ((256, 96, Cut(32, 64)), (256, 96, Cut(32, 32)), (512, None, Cut(64, 64)), (64, None, Cut(32, 64))):
        spec = AttnSpec(4, 2, dim, 0, True, window=window, scale=dim**-0.5)
        for rows in (1, 17, 70):
            kv, q = view(spec, [(140 - rows, rows)]), rand(rows, 4 * dim)
            want = ref.attend(q, spec, kv)
            shapes = [Shape(split, bq, 8) for split in (True, False) for bq in (16, 32)] + [
                Shape(True, 16, 4, run=3),
                Shape(False, 64, 8, 1),
            ]
            for shape in shapes:
                near(f"attend {spec} {cut} {shape}", attention.attend(q, spec, kv, False, cut, shape), want)
    x, y, w, scale = rand(3, 1536), rand(3, 1536), torch.rand(1536, device="cuda"), torch.tensor([0.7], device="cuda")
    for got, want in zip(ops.residual_norm(x, y, w, scale, w, 1e-6), ref.residual_norm(x, y, w, scale, w, 1e-6)):
        near("residual norm", got, want)
    router, factor = rand(8, 256, scale=0.1), torch.rand(8, device="cuda") + 0.5
    gate_up, down = rand(8, 128, 256, scale=0.06), rand(8, 256, 64, scale=0.12)
    for rows in (1, 5, 300):
        h = rand(rows, 256)
        args = (h, h, router, factor, gate_up, down, 2, "gelu_tanh")
        near("moe", ops.moe(*args), ref.moe(*args))
    near("argmax", ops.argmax(rand(3, 5000).float()).float() * 0, torch.zeros(3, device="cuda"))
    assert gate_up.dtype == BF16
    say(f"every kernel of the target once, worst error {worst:.1e}")


def draft() -> None:
    for size, layers, kind, limit in (("E2B", 10, FusedDrafter, 0.1), ("12B", 6, SteppedDrafter, 0.4)):
        rig = Rig.of(size, layers, slots=1, context=512)
        assert rig.drafter is not None
        seqs, rig.ops.pdl = rig.open(1, 300, 32), False
        gentle(rig)
        exact, fast = float32_drafter(rig), kind(rig.drafter.model)
        batch = batch_of(rig, seqs, 300, [SamplingParams()])
        seen = follow(exact, rig, batch, MTPDrafter(fast, rig.model).propose(batch, 2).tokens)
        missed = isinstance(fast, FusedDrafter) and fast.alarmed  # at a barrier
        verdict(f"{size} {kind.__name__}", seen.short <= limit and not missed, f"short {seen.short}, missed {missed}")
        rig.free()


def main() -> None:
    torch.manual_seed(0)
    jobs = {"target": target, "draft": draft}
    for name in sys.argv[1:] or jobs:
        attempt(name, jobs[name])
    raise SystemExit(1 if FAILED else 0)


if __name__ == "__main__":
    main()
