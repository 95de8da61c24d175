"""What each stored format costs on the CPU beside its own values in float32: perplexity of a real model, rounded anew into every format.

    python benchmarks/cpu_formats.py MODEL.gguf [--kinds Q4_0,Q6_K]

All matrices are dequantised, rounded to the format (nearest codes, none of llama.cpp's searching: what is compared is the kernels with the
format's own meaning, not the format with the model), and the text of `outrider inspect --quality` is forced through the C kernels and
through torch in float32 over the same values. A format of super-blocks takes the matrices whose rows it divides; the rest is Q8_0 then.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import numpy as np
import torch

from outrider import ops as ops_module
from outrider.bench.rounding import MOST, SAMPLE, compared, predicted
from outrider.engine.text import Tokenizer
from outrider.ops.cpu.ops import CpuOps
from outrider.ops.cpu.packing import KINDS
from outrider.ops.formats import BLOCKS, Held, QuantPart
from outrider.weights.load import load_target, plain_all

IQ4 = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)


def halves(x: np.ndarray) -> np.ndarray:
    """[..] -> bytes [.., 2]"""
    return x.astype(np.float16)[..., None].view(np.uint8)


def divided(x: np.ndarray, by: np.ndarray) -> np.ndarray:
    return np.divide(x, by, out=np.zeros_like(x), where=by != 0)


def nibbles(q: np.ndarray) -> np.ndarray:
    """[.., 32] codes below 16 -> [.., 16]"""
    return q[..., :16] | (q[..., 16:] << 4)


def small(kind: str, b: np.ndarray) -> np.ndarray:
    """Blocks [N, 32] float32 -> bytes [N, width]."""
    if kind in ("Q4_1", "Q5_1"):
        top = 15 if kind == "Q4_1" else 31
        low = b.min(-1, keepdims=True).astype(np.float16).astype(np.float32)
        d = ((b.max(-1, keepdims=True) - low) / top).astype(np.float16).astype(np.float32)
        q = np.clip(np.rint(divided(b - low, np.broadcast_to(d, b.shape))), 0, top).astype(np.uint8)
        front = [halves(d[:, 0]), halves(low[:, 0])]
    elif kind == "IQ4_NL":
        d = (np.abs(b).max(-1, keepdims=True) / 127).astype(np.float16).astype(np.float32)
        q = np.abs(divided(b, np.broadcast_to(d, b.shape))[..., None] - IQ4).argmin(-1).astype(np.uint8)
        front = [halves(d[:, 0])]
    else:
        half = {"Q4_0": 8, "Q5_0": 16, "Q8_0": 127}[kind]
        d = (np.abs(b).max(-1, keepdims=True) / (half if kind == "Q8_0" else half - 1)).astype(np.float16).astype(np.float32)
        q = np.rint(divided(b, np.broadcast_to(d, b.shape)))
        if kind == "Q8_0":
            return np.concatenate([halves(d[:, 0]), np.clip(q, -127, 127).astype(np.int8).view(np.uint8)], 1)
        q = np.clip(q + half, 0, 2 * half - 1).astype(np.uint8)
        front = [halves(d[:, 0])]
    if kind in ("Q5_0", "Q5_1"):
        front.append(np.packbits(q >> 4, axis=1, bitorder="little"))
    return np.concatenate([*front, nibbles(q & 15)], 1)


def large(kind: str, b: np.ndarray) -> np.ndarray:
    """Super-blocks [N, 256] float32 -> bytes [N, width]."""
    n = len(b)
    if kind == "Q6_K":
        g = b.reshape(n, 16, 16)
        scale = np.abs(g).max(-1) / 31
        d = (scale.max(-1, keepdims=True) / 127).astype(np.float16).astype(np.float32)
        s = np.clip(np.rint(divided(scale, np.broadcast_to(d, scale.shape))), 0, 127)
        q = np.clip(np.rint(divided(g, np.broadcast_to((s * d)[..., None], g.shape))) + 32, 0, 63).astype(np.uint8).reshape(n, 2, 4, 32)
        low = np.stack([(q[:, :, i] & 15) | ((q[:, :, i + 2] & 15) << 4) for i in (0, 1)], 2).reshape(n, 128)
        high = sum((q[:, :, i] >> 4) << (2 * i) for i in range(4)).reshape(n, 64)  # type: ignore[union-attr]
        return np.concatenate([low, high, s.astype(np.int8).view(np.uint8), halves(d[:, 0])], 1)
    g = b.reshape(n, 8, 32)
    if kind == "IQ4_XS":
        scale = np.abs(g).max(-1) / 127
        d = (scale.max(-1, keepdims=True) / 31).astype(np.float16).astype(np.float32)
        s = np.clip(np.rint(divided(scale, np.broadcast_to(d, scale.shape))), 0, 31)
        q = np.abs(divided(g, np.broadcast_to((s * d)[..., None], g.shape))[..., None] - IQ4).argmin(-1).astype(np.uint8)
        code = (s + 32).astype(np.uint16)
        high = sum((code[:, i] >> 4) << (2 * i) for i in range(8)).astype(np.uint16)  # type: ignore[union-attr]
        low = ((code[:, 0::2] & 15) | ((code[:, 1::2] & 15) << 4)).astype(np.uint8)
        return np.concatenate([halves(d[:, 0]), high[:, None].view(np.uint8), low, nibbles(q).reshape(n, 128)], 1)
    top = 15 if kind == "Q4_K" else 31
    least = np.maximum(-g.min(-1), 0)
    scale = (g.max(-1) + least) / top
    d, m = ((x.max(-1, keepdims=True) / 63).astype(np.float16).astype(np.float32) for x in (scale, least))
    s, o = (np.clip(np.rint(divided(x, np.broadcast_to(y, x.shape))), 0, 63).astype(np.uint8) for x, y in ((scale, d), (least, m)))
    q = np.clip(np.rint(divided(g + (o * m)[..., None], np.broadcast_to((s * d)[..., None], g.shape))), 0, top).astype(np.uint8)
    packed = [s[:, :4] | ((s[:, 4:] >> 4) << 6), o[:, :4] | ((o[:, 4:] >> 4) << 6), (s[:, 4:] & 15) | ((o[:, 4:] & 15) << 4)]
    low = ((q[:, 0::2] & 15) | ((q[:, 1::2] & 15) << 4)).reshape(n, 128)
    fifth = [] if kind == "Q4_K" else [sum((q[:, i] >> 4) << i for i in range(8))]
    return np.concatenate([halves(d[:, 0]), halves(m[:, 0]), *packed, *fifth, low], 1)  # type: ignore[list-item]


def rounded(kind: str, dense: np.ndarray) -> QuantPart:
    """float32 [N, K]"""
    n, k = dense.shape
    size = BLOCKS[kind][0]
    if k % size:
        return rounded("Q8_0", dense)
    step = max(1, (4 << 20) // k)
    rows = [(small if size == 32 else large)(kind, dense[lo : lo + step].reshape(-1, size)) for lo in range(0, n, step)]
    return QuantPart(kind, (n, k), np.concatenate(rows).reshape(n, -1))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--kinds", default=",".join(KINDS))
    args = parser.parse_args()
    torch.set_num_threads(2)
    ops, exact = CpuOps(), ops_module.choose("cpu", "reference")
    print("| format | matrices in it | perplexity | its values in float32 | change | same best token |\n|---|---|---|---|---|---|")
    for kind in args.kinds.split(","):
        config, weights, files = load_target(args.model, "cpu", torch.float32, exact)
        dense, held, count, all_of = plain_all(weights), {}, 0, 0
        del weights
        ids = torch.tensor(Tokenizer(files).encode(SAMPLE, bos=True)[:MOST])
        for name, w in dense.items():
            keep: Held = w
            if w.dim() == 2 and w.shape[1] % 32 == 0:
                part = rounded(kind, w.numpy())
                all_of, count = all_of + 1, count + (part.kind == kind)
                dense[name] = torch.from_numpy(part.dense())
                packed = ops.pack([part])
                assert packed is not None
                keep = packed
            held[name] = keep
        found = compared(predicted(config, held, ops, ids), predicted(config, dense, exact, ids), ids)
        print(
            f"| {kind} | {count} of {all_of} | {found.perplexity:.3f} | {found.float32:.3f} | {100 * found.change:+.2f} % "
            f"| {100 * found.same_best:.1f} % |", flush=True,
        )  # fmt: skip


if __name__ == "__main__":
    main()
