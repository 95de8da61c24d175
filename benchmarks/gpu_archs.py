"""Compile the kernels for cards that are not here, with Triton's own assembler, and show what each takes.

    python benchmarks/gpu_archs.py [--all] [--model google/gemma-4-E2B-it] [--rows 1 17 512] [--only 89 120]

For each architecture: shared memory must stay within what its programs may take, and the stack (spilled registers)
below SPILLS bytes. Prints one JSON line a kernel; `tests/parity/test_triton_archs.py` runs the short list. --all: every
format and number of rows.
--model: every kernel of a model and its drafter instead, in bfloat16; the model runs on tensors that have shapes only.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

os.environ.pop("TRITON_INTERPRET", None)
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from outrider.models.builtin_configs import BUILTIN_CONFIGS
from outrider.models.config import DrafterConfig, ModelConfig
from outrider.models.decoder import TextModel
from outrider.models.drafter import MTPNet
from outrider.models.names import tensor_plan
from outrider.ops.adapter_slots import SlotWeight
from outrider.ops.backend import Epilogue
from outrider.ops.trees import WIDTH, Frontier, Nodes
from outrider.ops.triton import TritonOps, attention, moe, quant
from outrider.ops.triton.card import Card
from outrider.ops.triton.gemm_config import MAX_SMEM
from outrider.ops.triton.lowrank import expand, shrink
from outrider.ops.triton.quant import quant_linear
from outrider.ops.triton.quant_moe import QuantExperts
from outrider.ops.triton.repack import Codes, QuantWeight
from outrider.ops.triton.routing import list_pairs
from outrider.types import DraftNoise, KVView

SHARED = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}  # KiB a program may take
# bytes of stack a thread; 544 for heads of 512 on sm_100, which has the tiles measured on the H200
SPILLS = 256
ATTENTION_SPILLS = 768
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
# kind: (codes, planes of a group, columns of a plane, offset, whole-row factor)
FORMATS = {
    "int4 g32": (Codes.INT4, 1, 32, False, False),
    "fp8": (Codes.FP8, 0, 32, False, True),
    "Q4_K": (Codes.UINT4, 1, 32, True, False),
    "int4 g128": (Codes.INT4, 4, 32, False, False),
    "int8 g128": (Codes.INT8, 4, 32, False, False),
    "nvfp4": (Codes.FP4, 1, 16, False, True),
    "Q5_K": (Codes.UINT5, 1, 32, True, False),
    "Q5_0": (Codes.INT5, 1, 32, False, False),
    "Q6_K": (Codes.INT6, 1, 16, False, False),
}
DENSE = {
    "out of E2B": (1536, 2048, False),
    "gate_up of 31B": (21504, 5376, True),
    "embed of 12B": (262144, 3840, False),
}  # N, K, gated
ATTENTION = "full attention of 31B"
EIGHT_BITS = "sliding attention of E2B, K/V in fp8"
ADAPTERS = "adapters of 31B"
EXPERTS = "experts of 26B-A4B in "  # and a format
SHORT = [
    ("int4 g32", 1), ("int4 g32", 64), ("fp8", 16), ("out of E2B", 1), ("gate_up of 31B", 160), ("gate_up of 31B", 512),
    (ATTENTION, 512), (EXPERTS + "int8 g128", 512), (EIGHT_BITS, 1), (ADAPTERS, 1),
]  # fmt: skip
CONSTANTS = ("BM", "BN", "BK", "BQ", "D", "GATED", "SPLIT", "WINDOW", "num_warps", "num_stages")


class Stub:
    """The part of a driver that compiling needs."""

    target = GPUTarget("cuda", 90, 32)
    shared = MAX_SMEM

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return self.target.arch

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("meta")

    def get_benchmarker(self) -> None:
        return None


def shell(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def weight(kind: str, n: int, k: int) -> QuantWeight:
    codes, per, plane, lifted, whole = FORMATS[kind]
    planes = 32 // codes.bits
    chunks = -(-k // (planes * plane))
    tiles = n // 64
    pairs = (planes // per + 1) // 2 if per else 0
    numbers = shell(tiles, chunks, 64, pairs, dtype=torch.int32) if per else None
    return QuantWeight(
        (n, k), codes, plane, per, shell(tiles, chunks, 64, plane, dtype=torch.int32), numbers,
        numbers if lifted else None,
        shell(n, dtype=torch.float32) if whole else None, half=lifted or codes.above > 0,
        high=shell(tiles, chunks, 64, plane, dtype=torch.uint8 if codes.above == 1 else torch.int16)
        if codes.above else None,
    )  # fmt: skip


def backend(pdl: bool) -> TritonOps:
    card = replace(Card.of(torch.device("meta")), shared=Stub.shared, hopper=Stub.target.arch == 90)
    return TritonOps("meta", pdl=pdl, card=card)


def product(kind: str, rows: int, pdl: bool) -> None:
    """A quantised gate_up of 31B, one of the dense products, attention, or a layer of quantised experts."""
    seen = shell(1 << 16, dtype=torch.int32)
    if kind in FORMATS:
        gated = Epilogue(act="gelu_tanh") if rows == 1 else Epilogue()
        quant_linear(shell(rows, 5376), weight(kind, 21504, 5376), seen, gated, pdl=pdl)
    elif kind.startswith(EXPERTS):
        count = 128
        hidden = 2816
        inner = 704
        format = kind.removeprefix(EXPERTS)
        each = [
            QuantExperts((count, n, k), weight(format, count * n, k)) for n, k in ((2 * inner, hidden), (hidden, inner))
        ]
        z = shell(rows, count, dtype=torch.float32)
        scale = shell(count, dtype=torch.float32)
        moe.experts(list_pairs(z, scale, 8, pdl), shell(rows, hidden), each[0], each[1], "gelu_tanh", pdl)
    elif kind == ADAPTERS:
        ranges = shell(rows, 3, dtype=torch.int32)
        mul = shell(rows, 256)
        ops = backend(pdl)
        for rank, parts, end in (
            (16, (21504, 21504), Epilogue(act="gelu_tanh")),
            (64, (8192, 4096, 4096), Epilogue()),
            (16, (256,), Epilogue(act="gelu_tanh", mul=mul)),
        ):
            a = shell(8, len(parts), rank, 5376)
            b = shell(8, sum(parts), rank)
            scale = shell(8, len(parts), dtype=torch.float32)
            stacked = SlotWeight(a, b, scale, parts)
            x = shell(rows, 5376)
            w = shell(sum(parts), 5376)
            ops.adapted_linear(x, w, stacked, ranges, end)
            shrunk = shrink(x, stacked, ranges, ops.semaphores, pdl)
            expand(shell(rows, sum(parts)), shrunk, end.act, end.mul, pdl)
    elif kind in (ATTENTION, EIGHT_BITS):  # heads of 512 are what takes most shared memory
        config = ModelConfig.from_hf(BUILTIN_CONFIGS[f"google/gemma-4-{'31B' if kind == ATTENTION else 'E2B'}-it"])
        spec = next(layer.attn for layer in config.layers if (layer.attn.window is None) == (kind == ATTENTION))
        kv = view(config, rows, dtype=torch.bfloat16 if kind == ATTENTION else torch.float8_e4m3fn)
        attention.attend(shell(rows, spec.heads * spec.head_dim), spec, kv, pdl)
    else:
        n, k, both = DENSE[kind]
        end = Epilogue(act="gelu_tanh" if both else "")
        backend(pdl).product(shell(rows, k), shell(n * (1 + both), k), end)


def view(
    config: ModelConfig, count: int, context: int = 1024, page: int = 16, dtype: torch.dtype = torch.bfloat16
) -> KVView:
    kv = [
        shell(context // page, s.attn.kv_heads, page, s.attn.head_dim, dtype=dtype) if s.attn.writes else None
        for s in config.layers
    ]
    tables = {g: shell(1, context // page, dtype=torch.int32) for g in ("full", "sliding")}
    at = shell(count, dtype=torch.int64)
    return KVView(page, kv, kv, tables, at, at, shell(2, dtype=torch.int32), count, context)


def tree_step(config: ModelConfig, ops: TritonOps, nodes: int = 16, depth: int = 5) -> None:
    """Additional kernels of a captured step with a tree: growing it, attention along paths, the walk, and moving K/V
    into line."""
    at = shell(1, dtype=torch.int64)
    count = nodes + 1
    vocab = config.vocab_size
    front = Frontier.root(at)
    found = Nodes.of(1, depth, torch.device("meta"))
    noise = DraftNoise(shell(1, dtype=torch.float32), shell(1, dtype=torch.bool), at, at)
    front = ops.branch(shell(WIDTH, vocab, dtype=torch.float32), None, noise, front, found, 0)
    ops.branch(shell(WIDTH, 4096, dtype=torch.float32), shell(WIDTH, 4096, dtype=torch.int64), None, front, found, 1)
    ops.build_fixed_tree(
        ops.chain_with_runner_ups(shell(1, depth, 528, dtype=torch.float32), shell(1, depth, 528, dtype=torch.int32)),
        nodes,
        depth,
    )
    planted = ops.build_fixed_tree(found, nodes, depth)
    kv = view(config, count)
    kv.kv_slots = kv.positions
    kv.ancestors = planted.ancestors
    for spec in {
        (s.group, s.heads, s.kv_heads, s.head_dim): s for s in (layer.attn for layer in config.layers)
    }.values():
        ops.attend(shell(count, spec.heads * spec.head_dim), spec, kv)
    _, _, rows = ops.accept_path(kv.positions, kv.positions, planted, kv.row_start, at)
    ops.compact_kv(rows, at, at, [config.layers[i].attn for i in config.kv_layers], kv)


def whole_model(name: str, rows: list[int], pdl: bool) -> None:
    """A pass of every number of rows, logits and choice, and a draft step."""
    ops = backend(pdl)

    def shapes(config: ModelConfig | DrafterConfig) -> dict[str, torch.Tensor]:
        kinds = {"matrix": torch.bfloat16, "embedding": torch.bfloat16, "index": torch.int64}
        return {n: shell(*p.shape, dtype=kinds.get(p.role, torch.float32)) for n, p in tensor_plan(config).items()}

    config = ModelConfig.from_hf(BUILTIN_CONFIGS[name])
    draft = DrafterConfig.from_hf(BUILTIN_CONFIGS[name + "-assistant"])
    model = TextModel(config, shapes(config), ops)
    for count in rows:
        kv = view(config, count)
        logits = model.logits(model.forward(shell(count, dtype=torch.int64), kv).hidden[: min(count, 17)])
        at = kv.positions[: len(logits)]
        ops.gumbel_argmax(logits, at, at, None, shell(len(logits), dtype=torch.bool))
    tree_step(config, ops)
    assistant = MTPNet(draft, shapes(draft), ops, model)
    hidden = shell(1, config.hidden)
    assistant.candidates(assistant.step(hidden, hidden, assistant.start(view(config, 1), hidden))[0])


def resources(kernel: object) -> tuple[int, int]:
    """Registers and stack bytes of a thread."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])  # type: ignore[attr-defined]
        file.flush()
        text = subprocess.run([CUOBJDUMP, "--dump-resource-usage", file.name], capture_output=True, text=True).stdout
    line = next(x for x in text.splitlines() if "REG:" in x)
    fields = dict(part.split(":") for part in line.split() if part.count(":") == 1)
    return int(fields["REG"]), int(fields["STACK"])


def cases(args: argparse.Namespace, pdl: bool) -> Iterator[tuple[str | None, Callable[[], None]]]:
    if args.model:
        yield None, lambda: whole_model(args.model, args.rows, pdl)
        return

    def rows_of(kind):
        return (1, 16, 32, 64, 512) if kind in FORMATS else (1, 17, 64, 128, 160, 320, 512, 2048)

    every = [(kind, rows) for kind in (*FORMATS, *DENSE, ATTENTION, EIGHT_BITS) for rows in rows_of(kind)]
    every += [(EXPERTS + kind, rows) for kind in FORMATS for rows in (1, 17, 64, 320, 1024)]
    short = (
        [*SHORT, ("Q5_K", 1)] if Stub.target.arch == 90 else SHORT
    )  # bits above nibbles are bytes: do they change how columns are paired?
    for kind, rows in every if args.all else short:
        if kind == EIGHT_BITS and Stub.target.arch < 89:  # no eight-bit floats
            continue
        yield f"{kind}, {rows} rows", lambda kind=kind, rows=rows: product(kind, rows, pdl)  # type: ignore[misc]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--model", default="")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 17])
    parser.add_argument("--only", type=int, nargs="+", default=list(SHARED))
    args = parser.parse_args()
    stub = Stub()
    compiled = {}
    driver.set_active(stub)
    run = JITFunction.run

    def warm(self: JITFunction, *a: object, grid: object, warmup: bool, **kw: object) -> object:
        kernel = run(self, *a, grid=grid, warmup=True, **kw)
        compiled[id(kernel)] = (" ".join([self.fn.__name__, *(f"{k}={kw[k]}" for k in CONSTANTS if k in kw)]), kernel)
        return kernel

    JITFunction.run = warm
    for arch in args.only:
        room = SHARED[arch]
        Stub.target = GPUTarget("cuda", arch, 32)
        Stub.shared = (room - 1) << 10
        for module in (attention, moe, quant):
            module.max_smem = lambda device, room=room: (room - 1) << 10  # type: ignore[misc]
        for title, call in cases(args, arch >= 90):
            compiled.clear()
            call()
            for name, kernel in compiled.values():
                registers, stack = resources(kernel)
                shared = kernel.metadata.shared
                most = ATTENTION_SPILLS if ATTENTION in (title or "") else SPILLS
                fits = shared <= room << 10 and stack <= most
                widths = sorted(
                    {int(n) for n in re.findall(r"kWidth = (\d+)", kernel.asm["ttgir"])}
                )  # neighbours that a thread multiplies
                row = dict(
                    sm=arch,
                    kernel=title or name,
                    registers=registers,
                    stack=stack,
                    shared=shared,
                    fits=fits,
                    widths=widths,
                )
                print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
