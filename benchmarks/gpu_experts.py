"""Quantised experts of 26B-A4B on a GPU: bits and errors, tiles, and whole plain steps.

    python benchmarks/gpu_experts.py [--parts bits tiles few steps] [--modes bf16 int8 experts-int8 int4] [--rows 1 8 40 64]

bits: one layer's experts for 1 to 320 rows against the rows of a larger batch, and against the dequantised weights in float32. tiles:
microseconds of a layer (routing, both products, the sum) in a CUDA graph, one product's tile at a time beside the rule's; every call has
other experts, so little comes from the L2 cache. few: the same from the router's input to the residual norm, dense MLP included, in int8 at
1 to 8 rows: bits against rows of a larger batch, microseconds of the kernels for few tokens and of Triton's. steps: `gpu_quant.steps` for every
mode (experts-int8: everything but the experts in bf16). Without a GPU: a tiny layer.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple
from pathlib import Path

import torch

CUDA = torch.cuda.is_available()
if not CUDA:
    os.environ["TRITON_INTERPRET"] = "1"
sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "src"), str(Path(__file__).resolve().parent)]

from gpu_common import graph_us  # noqa: E402
from gpu_quant import steps  # noqa: E402

from outrider.ops.formats import Held  # noqa: E402
from outrider.ops.triton import TritonOps, moe  # noqa: E402
from outrider.ops.triton.quant_moe import ExpertTile, QuantExperts, choose_tile  # noqa: E402
from outrider.ops.triton.quantised import MODES  # noqa: E402
from outrider.ops.triton.routing import list_pairs  # noqa: E402

E, H, I, TOP = (128, 2816, 704, 8) if CUDA else (8, 128, 64, 2)
DEVICE, DTYPE = ("cuda", torch.bfloat16) if CUDA else ("cpu", torch.float32)
BANDWIDTH = 4.39e12
BEGAN = time.perf_counter()
FEW = {
    8: [(8, 64, 4, 4), (8, 64, 6, 4), (8, 32, 4, 2), (8, 32, 6, 2), (8, 64, 4, 2), (8, 128, 4, 4), (16, 64, 4, 4), (16, 64, 6, 4)],
    4: [(8, 64, 3, 2, 160), (8, 64, 4, 4), (8, 64, 6, 4), (8, 32, 4, 2), (8, 32, 6, 2), (8, 32, 4, 1), (16, 64, 4, 4), (16, 64, 6, 4)],
}  # by bits


def say(**row: object) -> None:
    print(json.dumps(dict(t=round(time.perf_counter() - BEGAN, 1), **row)), flush=True)


class Layer:
    """One layer's experts, rounded, and as many inputs as are ever asked for."""

    def __init__(self, mode: str, rows: int):
        torch.manual_seed(0)
        ops = TritonOps(DEVICE, pdl=CUDA)
        shapes = {"gate_up": (E, 2 * I, H), "down": (E, H, I)}
        dense = {k: torch.randn(s, device=DEVICE, dtype=DTYPE) * (0.02 if k == "gate_up" else 0.04) for k, s in shapes.items()}
        held = {k: ops.quantize(t, mode) for k, t in dense.items()}
        self.gate_up, self.down, self.mode = held["gate_up"], held["down"], mode
        self.dense = dense
        self.z = torch.randn((rows, E), device=DEVICE)
        self.x, self.scale = torch.randn((rows, H), device=DEVICE, dtype=DTYPE), torch.rand(E, device=DEVICE) + 0.5

    def run(self, rows: int, at: int = 0, cut: tuple[moe.Cut, moe.Cut] | None = None) -> torch.Tensor:
        z, x = self.z[at * rows : (at + 1) * rows], self.x[at * rows : (at + 1) * rows]
        return moe.experts(list_pairs(z, self.scale, TOP, CUDA), x, self.gate_up, self.down, "gelu_tanh", CUDA, cut=cut)

    def meant(self, rows: int) -> torch.Tensor:
        """The dequantised weights, in float32, expert by expert."""
        p = self.z[:rows].softmax(-1)
        weight, chosen = p.topk(TOP, dim=-1)
        weight = weight / weight.sum(-1, keepdim=True) * self.scale[chosen]
        out = torch.zeros((rows, H), device=DEVICE)
        formats = {k: next(f for f in MODES[self.mode] if f.border() <= 1 or t.shape[-1] % f.border() == 0) for k, t in self.dense.items()}
        for e in chosen.unique().tolist():
            row, slot = (chosen == e).nonzero(as_tuple=True)
            gate_up, down = (formats[k].quantise(t[e]).dense() for k, t in self.dense.items())
            gate, up = (self.x[row].float() @ gate_up.T).chunk(2, dim=-1)
            h = (torch.nn.functional.gelu(gate, approximate="tanh") * up) @ down.T
            out.index_add_(0, row, h * weight[row, slot, None])
        return out


def bits(layer: Layer) -> None:
    most = 320 if CUDA else 12
    whole = layer.run(most)
    counts = (1, 2, 5, 8, 40, 320, 1024) if CUDA else (1, 2, 5)
    other = [m for m in counts[:-1] if m < most and not torch.equal(layer.run(m), whole[:m])]
    larger = torch.equal(layer.run(counts[-1])[:most], whole) if CUDA else True
    rows = 16 if CUDA else 4
    want = layer.meant(rows)
    error = float((whole[:rows].float() - want).norm() / want.norm())
    say(bits=layer.mode, other_bits_at=other, in_a_larger_batch=larger, error=round(error, 5))


def timed(layer: Layer, rows: int, cut: tuple[moe.Cut, moe.Cut] | None) -> float:
    """Microseconds a layer."""
    return graph_us(lambda at: layer.run(rows, at, cut), 8, 6)


def tiles(layer: Layer, rows: int) -> None:
    gate_up, down = layer.gate_up, layer.down
    if not isinstance(gate_up, QuantExperts) or not isinstance(down, QuantExperts):
        say(rows=rows, mode="bf16", us=round(timed(layer, rows, None), 1))
        return
    pairs = list_pairs(layer.z[:rows], layer.scale, TOP, False)
    room = moe.shared_of(layer.x.device)
    one, two = choose_tile(pairs, gate_up.matrix, True, room), choose_tile(pairs, down.matrix, False, room)
    options = [ExpertTile(*t) for t in FEW[gate_up.matrix.bits] if rows > 1 or t[0] == 8]  # type: ignore[misc,arg-type]
    cuts: list[tuple[moe.Cut, moe.Cut]] = [(one, two)]
    cuts = list(dict.fromkeys([*cuts, *((t, two) for t in options), *((one, t) for t in options)]))[: None if CUDA else 3]
    with ThreadPoolExecutor(16 if CUDA else 1) as pool:  # compile side by side
        jobs = [(cut, pool.submit(layer.run, rows, 0, cut)) for cut in cuts]
        failed = {cut: job.exception() for cut, job in jobs}
    busy = int(layer.z[:rows].topk(TOP, -1).indices.unique().numel())
    floor = busy / E * (gate_up.nbytes + down.nbytes) / BANDWIDTH * 1e6
    times = {cut: timed(layer, rows, cut) for cut in cuts if failed[cut] is None}
    name = lambda t: "-".join(str(v) for v in astuple(t) if v is not None)  # noqa: E731
    firsts = sorted((round(us, 1), name(cut[0])) for cut, us in times.items() if cut[1] == two)
    seconds = sorted((round(us, 1), name(cut[1])) for cut, us in times.items() if cut[0] == one)
    say(
        rows=rows, mode=layer.mode, busy=busy, floor_us=round(floor, 1), rule=round(times[one, two], 1), rules=[name(one), name(two)],
        first=firsts, second=seconds, failed=[f"{name(c[0])} {name(c[1])}: {str(e)[:60]}" for c, e in failed.items() if e is not None],
    )  # fmt: skip


def few(width: int = 2112 if CUDA else 96) -> None:
    ops = TritonOps(DEVICE, pdl=CUDA)
    layer, most = Layer("int8", 320 if CUDA else 12), 300 if CUDA else 10
    draw = lambda *shape, scale=1.0: torch.randn(shape, device=DEVICE, dtype=DTYPE) * scale  # noqa: E731
    router, norms, (h, stream) = draw(E, H, scale=0.05), [draw(H).abs() for _ in range(4)], (draw(*layer.x.shape) for _ in range(2))
    dense = {"bf16": (draw(2 * width, H, scale=0.02), draw(H, width, scale=0.03))}
    dense["int8"] = tuple(ops.quantize(w, "int8") for w in dense["bf16"])  # type: ignore[assignment]

    def run(rows: int, at: int, mlp: str) -> tuple[torch.Tensor, torch.Tensor]:
        s = slice(at, at + rows)
        routed = (h[s], layer.x[s], router, layer.scale, layer.gate_up, layer.down, TOP, "gelu_tanh", h[s], *dense[mlp])
        return ops.moe_beside(*routed, norms[0], norms[1], stream[s], norms[2], None, norms[3], 1e-6)

    for mlp in dense:
        whole = run(most, 0, mlp)
        for rows in (1, 2, 3, 5, 8) if CUDA else (1, 2):
            same = all(
                torch.equal(a, b[at : at + rows]) for at in (0, 1, most - rows) for a, b in zip(run(rows, at, mlp), whole, strict=True)
            )
            us = graph_us(lambda i, rows=rows, mlp=mlp: run(rows, i * 11 % (most - rows), mlp), 24, 5)  # type: ignore[misc]
            kernels, ops.__dict__["few_experts"] = ops.few_experts, None
            triton = graph_us(lambda i, rows=rows, mlp=mlp: run(rows, i * 11 % (most - rows), mlp), 24, 5)  # type: ignore[misc]
            ops.__dict__["few_experts"] = kernels
            say(dense=mlp, rows=rows, same_bits=same, us=round(us, 1), triton_us=round(triton, 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", nargs="+", default=["bits", "tiles", "steps"])
    parser.add_argument("--modes", nargs="+", default=["bf16", "int8", "int4"])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 40, 64] if CUDA else [1, 3])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    args = parser.parse_args()
    modes = [m for m in args.modes if m in MODES]
    for mode in modes if {"bits", "tiles"} & set(args.parts) else ():
        layer = Layer(mode, 1024 if CUDA else 24)
        say(mode=mode, bytes=layer.gate_up.nbytes + layer.down.nbytes)
        if "bits" in args.parts:
            bits(layer)
        for rows in args.rows if "tiles" in args.parts else ():
            tiles(layer, rows)
        del layer
        if CUDA:
            torch.cuda.empty_cache()
    if "few" in args.parts:
        few()
    whole = TritonOps.quantize

    def experts_only(ops: TritonOps, dense: torch.Tensor, mode: str) -> Held:
        return whole(ops, dense, mode) if dense.dim() == 3 else ops.prepare(dense)

    for mode in args.modes if "steps" in args.parts and CUDA else ():
        TritonOps.quantize = experts_only if mode.startswith("experts-") else whole  # type: ignore[method-assign]
        print(mode)
        steps("26B-A4B", None if mode == "bf16" else mode.removeprefix("experts-"), 0, args.batch, 64, 1024)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
