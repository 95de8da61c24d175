"""A first start on a card that the project never compared: its certification, what then serves, and broken kernels.

    PYTHONPATH=src:.:benchmarks python3 benchmarks/gpu_certify.py
    TRITON_INTERPRET=1 PYTHONPATH=src:.:benchmarks python3 benchmarks/gpu_certify.py --dry     # without a GPU, small

The list of compared cards is emptied and the cache is an empty folder, so loading a model certifies in a process of its
own, as on an unknown card; a second start must not. Then each kernel that is not a definition is broken on purpose, by
the last bit of its last row's first number, and has to be rejected. One JSON line for each part.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "src"), str(Path(__file__).resolve().parents[1])]

import torch

from gpu_rig import SIZES
from outrider.llm import LLM
from outrider.ops import registry
from outrider.ops.registry import Certification, Registry
from outrider.ops.triton import TritonOps, certify
from outrider.ops.triton.kernels import TABLE
from outrider.types import SamplingParams

BEGAN = time.perf_counter()
SMALL = dict(
    dtype=torch.float32,
    rows=5,
    dense_shapes=((48, 64),),
    quantised_shape=(64, 128),
    heads=((8, 2, 32),),
    attention_rows=5,
)


def tell(part: str, **figures: Any) -> None:
    print(json.dumps({"part": part, "at_s": round(time.perf_counter() - BEGAN, 1), **figures}), flush=True)


def one_bit_off(launch: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def launch_and_change(call: Any) -> Any:
        result = launch(call)
        if result is not None:
            bits = torch.int16 if result.element_size() == 2 else torch.int32
            result[-1, :1].view(bits).bitwise_xor_(1)
        return result

    return launch_and_change


def broken_kernels(ops: TritonOps, dry: bool) -> bool:
    """Whether each kernel that is not a definition was rejected with one bit changed."""
    kept = []
    tried = []
    definitions = [kernels[-1].name for kernels in Registry(TABLE, ops.card).by_order().values()]
    for kernel in TABLE:
        if kernel.order is None or kernel.name in definitions or not kernel.runs_on(ops.card):
            continue
        broken = replace(kernel, launch=one_bit_off(kernel.launch))
        table = Registry([broken if other is kernel else other for other in TABLE], ops.card)
        problems = certify.Problems(ops, table, **(SMALL if dry else {}))  # type: ignore[arg-type]
        results = registry.certify(table, problems.probes(), certify.GPU_ROWS, only={kernel.name})
        if not results:
            tell("broken kernel", kernel=kernel.name, left_out="no probe runs it here")
            continue
        tried.append(kernel.name)
        rejected = Certification("", "", tuple(results)).rejected
        if kernel.name not in rejected:
            kept.append(kernel.name)
        tell("broken kernel", kernel=kernel.name, rejected=rejected.get(kernel.name))
    tell("broken kernels", tried=len(tried), kept=kept)
    return not kept


def first_start() -> None:
    """Loads a model twice, and compares plain answers with drafted ones."""
    name = SIZES["E2B"]
    for turn in ("first start", "second start"):
        began = time.perf_counter()
        llm = LLM.load(
            name, drafter=f"{name}-assistant", load_format="dummy", device="cuda", max_context=2048, max_batch=8,
            say=print,
        )  # fmt: skip
        seconds = time.perf_counter() - began
        ops = llm.engine.model.ops
        figures = {"seconds": round(seconds, 1), "independent_rows": ops.capabilities.independent_rows}
        params = SamplingParams(max_tokens=48, ignore_eos=True)
        prompts = [[5 + 7 * i + j for j in range(100 + 60 * i)] for i in range(4)]
        plain = [answer.token_ids for answer in llm.generate(prompts, params, drafter=False)]
        drafted = [answer.token_ids for answer in llm.generate(prompts, params, draft_tokens=4)]
        tell(turn, card=ops.card.identity, rejected=ops.registry.rejected, same=plain == drafted, **figures)
        llm.close()


def timed(certify_in_child: Callable[[TritonOps], None]) -> Callable[[TritonOps], None]:
    def certify_and_tell(ops: TritonOps) -> None:
        began = time.perf_counter()
        certify_in_child(ops)
        tell("certification in a process of its own", seconds=round(time.perf_counter() - began, 1))

    return certify_and_tell


def kernels_here() -> None:
    rows, machine = certify.kernel_rows()
    tell("doctor --kernels", machine=machine)
    for row in rows:
        print(f"{row.operation:24s} {row.kernel:28s} {row.here}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry", action="store_true")
    args = parser.parse_args()
    os.environ["OUTRIDER_CACHE"] = tempfile.mkdtemp()
    certify.COMPARED_CARDS = ()
    if args.dry:
        ops = TritonOps("cpu", pdl=False)
    else:
        ops = TritonOps("cuda")
        certify.certify_in_child = timed(certify.certify_in_child)
        first_start()
    kernels_here()
    raise SystemExit(0 if broken_kernels(ops, args.dry) else 1)


if __name__ == "__main__":
    main()
