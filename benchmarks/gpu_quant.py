"""Quantised weights on a GPU: products against their definition and the bandwidth, and whole steps through the engine
on dummy weights.

    python benchmarks/gpu_quant.py products [--formats int4 fp8 Q4_0]        # 31B's four shapes, 1 to 320 rows
    python benchmarks/gpu_quant.py steps 31B --quantize int4 [--k 4] [--batch 1 8] [--kv fp8]
    python benchmarks/gpu_quant.py graphs 31B --formats int4 fp8 Q4_K_M --cycles 1x0 1x4 8x4 [--tables]
    python benchmarks/gpu_quant.py same E2B --quantize int4 --kv fp8         # tokens with drafts are those without

Products: the time in a CUDA graph over copies larger than the L2 cache, beside the bytes at 4.39 TB/s, and of up to 8
rows what Triton's kernel takes; every row must have the same bits alone and in company. Steps: milliseconds a cycle are
(16 + n tokens) - (16 tokens), best of two; K = 4 counts 3.88 tokens per cycle. Graphs: a cycle of BATCHxK as the engine
captures it, without the engine.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import random
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import torch

from gpu_common import graph_us, kernel_table, kernels
from gpu_rig import SIZES, Rig
from outrider import LLM, SamplingParams
from outrider.config import EngineConfig
from outrider.models.builtin_configs import BUILTIN_CONFIGS
from outrider.models.config import ModelConfig
from outrider.ops.backend import Epilogue
from outrider.ops.formats import (
    BLOCKS,
    MODES,
    DeviceWeight,
    Float8Format,
    GGUFBlockFormat,
    IntegerFormat,
    NvFp4Format,
    Weight,
    stays_dense,
)
from outrider.ops.triton import TritonOps
from outrider.ops.triton.quant import quant_linear
from outrider.ops.triton.repack import repack
from outrider.weights.load import dummy_weights

BANDWIDTH = 4.39e12
SHAPES = {"gate_up": (43008, 5376), "down": (5376, 21504), "qkv": (16384, 5376), "out": (5376, 8192)}


def made(name: str, n: int, k: int, device: str = "cuda") -> Weight:
    """Random weights as this format holds them."""
    formats = {
        "int4": IntegerFormat(4, 32),
        "int4-g128": IntegerFormat(4, 128),
        "int8": IntegerFormat(8, 128),
        "fp8": Float8Format(),
        "nvfp4": NvFp4Format(),
    }
    if name in formats:
        return formats[name].quantise(torch.randn((n, k), device=device, dtype=torch.bfloat16) * 0.02)
    size, nbytes = BLOCKS[name]
    blocks = torch.randint(0, 256, (n, k // size, nbytes), dtype=torch.uint8, device=device)
    half = torch.tensor([1e-5 if name == "Q6_K" else 5e-4], dtype=torch.float16, device=device).view(torch.uint8)
    for at in (
        (208,) if name == "Q6_K" else (0, 2) if name in ("Q4_1", "Q5_1", "Q4_K", "Q5_K") else (0,)
    ):  # factors and offsets
        blocks[:, :, at : at + 2] = half
    return Weight(GGUFBlockFormat(name), (n, k), {"blocks": blocks.view(n, -1)})


def products(formats: list[str], shapes: list[str]) -> None:
    ops = TritonOps("cuda")
    seen = ops.semaphores
    for shape in shapes:
        n, k = SHAPES[shape]
        extras = Epilogue(act="gelu_tanh") if shape == "gate_up" else Epilogue()
        for name in formats:
            weight = made(name, n, k)
            packed = repack(weight)
            assert packed is not None
            x = torch.randn((320, k), device="cuda", dtype=torch.bfloat16)
            want = (x.float() @ weight.dense().T)[:, : n // 2] if extras.gated else x.float() @ weight.dense().T
            got = quant_linear(x, packed, seen, Epilogue(), True)[:, : want.shape[1]]
            error = float((got.float() - want).norm() / want.norm())
            together = quant_linear(x, packed, seen, extras, True)
            alone = all(
                torch.equal(ops.multiply(x[:r], packed, extras), together[:r])
                for r in (*range(1, 9), 16, 17, 33, 64, 65)
            )
            many = [packed] + [
                dataclasses.replace(packed, words=packed.words.clone()) for _ in range(max(3, int(5e8 / packed.nbytes)))
            ]
            times = {}
            triton = {}
            for rows in (1, 5, 8, 16, 40, 64, 320):

                def call(i, x=x[:rows], many=many, extras=extras):
                    return ops.multiply(x, many[i], extras)

                times[rows] = round(graph_us(call, len(many), 6), 1)
                if rows <= 8:

                    def call(i, x=x[:rows], many=many, extras=extras):
                        return quant_linear(x, many[i], seen, extras, True)

                    triton[rows] = round(graph_us(call, len(many), 6), 1)
            floor = round(packed.nbytes / BANDWIDTH * 1e6, 1)
            row = dict(
                shape=shape,
                format=name,
                floor_us=floor,
                us=times,
                triton_us=triton,
                error=round(error, 5),
                prefill_idle=alone,
            )
            print(json.dumps(row), flush=True)


def loaded(size: str, quantize: str | None, k: int, most: int, length: int, kv: str) -> LLM:
    """Dummy weights, and room for so many sequences of that length."""
    engine = EngineConfig(
        max_batch=most, max_context=length + 128, kv_tokens=most * (length + 160), kv_dtype=kv, prefix_cache=False
    )
    drafter = f"{SIZES[size]}-assistant" if k else "none"
    return LLM.load(
        SIZES[size],
        drafter=drafter,
        draft_tokens=k,
        device="cuda:0",
        load_format="dummy",
        quantize=quantize,
        engine=engine,
        say=print,
    )


class RecipeOps(TritonOps):
    """Matrices in the formats of a recipe, whatever `quantize` is asked for: a GGUF kind (Q4_K_M: every second down
    projection in Q6_K, all else in Q4_K), `experts-int8`, or a mode of --quantize."""

    recipe = "int4"
    downs = 0

    def quantize(self, dense: torch.Tensor, mode: str) -> DeviceWeight:
        if self.recipe in MODES:
            return super().quantize(dense, self.recipe)
        if self.recipe == "experts-int8":
            return super().quantize(dense, "int8") if dense.dim() == 3 else self.prepare(dense)
        n, k = dense.shape
        self.downs += k > 2 * n  # a down projection
        kind = ("Q6_K" if k > 2 * n and self.downs % 2 else "Q4_K") if self.recipe == "Q4_K_M" else self.recipe
        packed = None if stays_dense(dense.shape) else repack(made(kind, n, k))
        return dense if packed is None else packed


@torch.inference_mode()
def graphs(size: str, recipes: list[str], cycles: list[str], context: int, kv: str, tables: bool) -> None:
    """Cycles BATCHxK as the engine captures them, alone; tables: their kernels too, the longest first."""
    raw = dict(BUILTIN_CONFIGS[SIZES[size]])
    pairs = [(int(b), int(k)) for b, k in (c.split("x") for c in cycles)]
    for recipe in recipes:
        ops = RecipeOps("cuda")
        ops.recipe = recipe
        mode = None if recipe == "bf16" else "int8"
        weights = dummy_weights(ModelConfig.from_hf(raw), torch.device("cuda"), torch.bfloat16, ops, mode, 0)
        drafter = BUILTIN_CONFIGS[SIZES[size] + "-assistant"] if any(k for _, k in pairs) else None
        most = max(b for b, _ in pairs)
        rig = Rig(raw, drafter, ops, slots=most, context=context + 256, weights=weights, compiled=True, kv=kv)
        seqs = rig.open(most, context, 128)
        for batch, k in pairs:
            run = rig.graph(seqs[:batch], k, context, context + 128)
            times = sorted(run.time(8) for _ in range(3))
            rate = round((3.88 if k == 4 else 1.0) * batch / times[1] * 1e3)
            row = dict(
                size=size,
                recipe=recipe,
                kv=kv,
                batch=batch,
                k=k,
                context=context,
                ms=[round(t, 3) for t in times],
                tokens_s=rate,
            )
            print(json.dumps({**row, "weights_gb": round(rig.weight_bytes() / 1e9, 2)}), flush=True)
            if tables:
                kernel_table(kernels(run.graph.replay, Path("/tmp")), f"{size} {recipe} {batch}x{k}")
            del run
        rig.free()
        weights.clear()
        del rig, weights, seqs
        gc.collect()
        torch.cuda.empty_cache()


def same(size: str, quantize: str | None, kv: str) -> None:
    """Prompts of 3 to 300 tokens in one batch: every token as plainly, whatever K."""
    rng = random.Random(2)
    prompts = [[rng.randrange(5, 200000) for _ in range(n)] for n in (3, 40, 300, 7, 129, 64, 17, 90)]
    ask = SamplingParams(temperature=0.0, max_tokens=96, ignore_eos=True)
    want: list[list[int]] = []
    for k in (0, 4, 16):
        llm = loaded(size, quantize, k, 8, 512, kv)
        got = [c.token_ids for c in llm.generate(prompts, ask)]
        want = want or got
        alone = [c.token_ids for c in llm.generate(prompts[2:3], ask)]
        print(
            json.dumps(dict(size=size, quantize=quantize, kv=kv, k=k, same=got == want, alone=alone == want[2:3])),
            flush=True,
        )
        del llm
        gc.collect()
        torch.cuda.empty_cache()


def steps(
    size: str, quantize: str | None, k: int, batches: list[int], tokens: int, context: int, kv: str = "auto"
) -> None:
    torch.cuda.reset_peak_memory_stats()
    llm = loaded(size, quantize, k, max(batches), context + tokens, kv)
    peak = round(torch.cuda.max_memory_allocated() / 2**30, 2)  # while it was loaded; K/V included
    rng = random.Random(1)
    for batch in batches:
        prompts = [[rng.randrange(5, 200000) for _ in range(context)] for _ in range(batch)]

        def run(count: int, prompts: list[list[int]] = prompts, batch: int = batch) -> tuple[float, float]:
            began = time.perf_counter()
            done = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True))
            return time.perf_counter() - began, sum(c.stats.cycles for c in done) / batch

        run(8)
        short = min(run(16) for _ in range(2))
        long = min(run(16 + tokens) for _ in range(2))
        cycle = (long[0] - short[0]) / (long[1] - short[1])
        rate = (3.88 if k == 4 else 1.0) * batch / cycle
        allocated_gib = round(torch.cuda.memory_allocated() / 2**30, 2)
        row = dict(
            size=size,
            quantize=quantize,
            kv=kv,
            k=k,
            batch=batch,
            context=context,
            ms=round(cycle * 1e3, 3),
            tokens_s=round(rate),
            gib=allocated_gib,
            peak=peak,
        )
        print(json.dumps(row), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["products", "steps", "graphs", "same"])
    parser.add_argument("size", nargs="?", default="31B")
    parser.add_argument("--formats", nargs="+", default=["int4", "fp8", "Q4_0", "Q4_K", "int8", "nvfp4"])
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--quantize", default=None)
    parser.add_argument("--k", type=int, default=0)
    parser.add_argument("--batch", type=int, nargs="+", default=[1])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--kv", default="auto")
    parser.add_argument("--cycles", nargs="+", default=["1x0"], metavar="BATCHxK")
    parser.add_argument("--tables", action="store_true")
    args = parser.parse_args()
    if args.what == "products":
        products(args.formats, args.shapes)
    elif args.what == "graphs":
        graphs(args.size, args.formats, args.cycles, args.context, args.kv, args.tables)
    elif args.what == "same":
        same(args.size, args.quantize, args.kv)
    else:
        steps(args.size, args.quantize, args.k, args.batch, args.tokens, args.context, args.kv)


if __name__ == "__main__":
    main()
