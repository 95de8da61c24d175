"""Certification of the GPU's kernels: on the card at hand, rows of small products and passes against each row alone.

The definition of an order of sums, its last kernel in the table, computes single rows; every kernel of that order,
the definition included, has to give the same bits at all numbers of rows that it serves. A card on which the project
compared the kernels (`COMPARED_CARDS`) starts without; any other certifies at its first start, and `outrider doctor
--kernels` on both. The result is stored by card, sources, and versions of triton and torch.
"""

from __future__ import annotations

import hashlib
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

from ...platforms.folders import cache_root
from ...types import AttnSpec, KVView
from .. import registry
from ..backend import Epilogue
from ..formats import MODES
from ..registry import ROWS, Certification, Kernel, KernelRow, Probe, Registry
from .gemm_launch import DenseCall
from .kernels import TABLE, AttentionCall, QuantCall
from .ops import TritonOps
from .repack import QuantWeight, repack

log = logging.getLogger("outrider")
OPS = Path(__file__).resolve().parents[1]
# Cards on which tests and benchmarks compared the bits of every kernel (docs/gpu-inside.md)
COMPARED_CARDS = ("NVIDIA H200",)
CHILD_SECONDS = 600  # kernels are compiled
PAGE_SIZE = 32
# outputs, columns: small matrices of one and of several spans, and those that stream-K serves
DENSE_SHAPES = ((512, 2048), (256, 8192), (4096, 1024), (4096, 2048))
QUANTISED_SHAPE = (512, 2048)
# heads, heads of K/V, their size; the last as attention_wgmma serves it
HEADS = ((8, 2, 128), (8, 2, 256), (8, 2, 512), (16, 2, 512))
GPU_ROWS = tuple(sorted((*ROWS, 513)))  # stream-K with several spans serves some numbers of rows between 128 and 640
MAX_ATTENTION_ROWS = 2048


@cache
def sources() -> str:
    """Hash of the kernels' sources."""
    digest = hashlib.sha256()
    for path in sorted(OPS.glob("triton/*.py")) + sorted(OPS.glob("cuda/*.cu*")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def identity(ops: TritonOps) -> str:
    """Everything that the kernels' bits depend on."""
    return f"{ops.card.identity}, triton {triton.__version__}, torch {torch.__version__}, kernels {sources()}"


def stored_at(ops: TritonOps) -> Path:
    name = hashlib.sha256(identity(ops).encode()).hexdigest()[:16]
    return cache_root() / "certified" / f"gpu-{name}.json"


# ---- probes ---------------------------------------------------------------------------------------------------------
@dataclass
class RowsAlone:
    """Compares rows of one call with the definition's results for single rows."""

    call: Callable[[int, int], Any]  # (first row, number of rows) -> a call of the kernels
    definition: Kernel
    alone: dict[int, Tensor] = field(default_factory=dict, init=False)

    def serves(self, machine: Any, kernel: Kernel, rows: int) -> bool:
        return kernel.serves(self.call(0, rows).shape, machine)

    def row_alone(self, row: int) -> Tensor:
        if row not in self.alone:
            self.alone[row] = self.definition.launch(self.call(row, 1))[0].clone()
        return self.alone[row]

    def __call__(self, kernel: Kernel, rows: int) -> str | None:
        together = kernel.launch(self.call(0, rows))
        if together is None:  # the kernel does not take this call
            return None
        for row in sorted({0, rows // 2, rows - 1}):
            if not torch.equal(together[row], self.row_alone(row)):
                return f"row {row} has other bits than alone"
        return None


@dataclass
class Problems:
    """Random products and passes of attention."""

    ops: TritonOps
    table: Registry
    dtype: torch.dtype = torch.bfloat16
    rows: int = ROWS[-1]
    dense_shapes: Sequence[tuple[int, int]] = DENSE_SHAPES
    quantised_shape: tuple[int, int] = QUANTISED_SHAPE
    heads: Sequence[tuple[int, int, int]] = HEADS
    attention_rows: int = MAX_ATTENTION_ROWS

    @cached_property
    def random(self) -> torch.Generator:
        return torch.Generator().manual_seed(48)

    @property
    def device(self) -> torch.device:
        return self.ops.semaphores.device

    def tensor(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.random).to(self.device, self.dtype)

    def probes(self) -> Iterator[Probe]:
        for n, k in self.dense_shapes:
            yield self.probe(f"dense {n} x {k}", "dense product", self.dense(n, k), self.rows)
        n, k = self.quantised_shape
        for mode, formats in MODES.items():  # directly: a backend keeps small matrices dense
            weight = repack(formats[0].quantise(self.tensor(n, k) * 0.02))
            assert weight is not None
            yield self.probe(f"{mode} {n} x {k}", "quantised product", self.quantised(weight, k), self.rows)
        for heads, kv_heads, head_size in self.heads:
            call = self.attention(heads, kv_heads, head_size)
            yield self.probe(f"attention, {heads} heads of {head_size}", "attention", call, self.attention_rows)

    def probe(self, name: str, order: str, call: Callable[[int, int], Any], max_rows: int) -> Probe:
        definition = self.table.by_order()[order][-1]
        check = RowsAlone(call, definition)

        def serves(kernel: Kernel, rows: int) -> bool:
            return check.serves(self.table.machine, kernel, rows)

        return Probe(name=name, order=order, serves=serves, check=check, max_rows=max_rows)

    def dense(self, n: int, k: int) -> Callable[[int, int], DenseCall]:
        w = self.tensor(n, k)
        x = self.tensor(self.rows, k)

        def call(first: int, rows: int) -> DenseCall:
            return DenseCall(x[first : first + rows], w, self.ops.gemm)

        return call

    def quantised(self, weight: QuantWeight, k: int) -> Callable[[int, int], QuantCall]:
        x = self.tensor(self.rows, k)

        def call(first: int, rows: int) -> QuantCall:
            return QuantCall(self.ops, x[first : first + rows], weight, end=Epilogue())

        return call

    def attention(self, heads: int, kv_heads: int, head_size: int) -> Callable[[int, int], AttentionCall]:
        """One sequence whose cache is filled; a row's position is its index."""
        scale = head_size**-0.5
        spec = AttnSpec(heads=heads, kv_heads=kv_heads, head_dim=head_size, kv_layer=0, writes=True, scale=scale)
        pages = 1 + -(-self.attention_rows // PAGE_SIZE)
        shape = (pages, spec.kv_heads, PAGE_SIZE, head_size)
        keys = self.tensor(*shape)
        values = self.tensor(*shape)
        table = torch.arange(1, pages, dtype=torch.int32, device=self.device)[None]
        q = self.tensor(self.attention_rows, spec.heads * head_size)

        def call(first: int, rows: int) -> AttentionCall:
            positions = torch.arange(first, first + rows, device=self.device)
            kv = KVView(
                page_size=PAGE_SIZE,
                keys=[keys],
                values=[values],
                tables={"full": table, "sliding": table},
                positions=positions,
                row_seq=torch.zeros(rows, dtype=torch.int64, device=self.device),
                row_start=torch.tensor([0, rows], dtype=torch.int32, device=self.device),
                max_rows=rows,
                max_context=first + rows,
            )
            return AttentionCall(self.ops, q[first : first + rows], spec, kv=kv, span_end=0)

        return call


# ---- certification --------------------------------------------------------------------------------------------------
def certify_here(ops: TritonOps, say: Callable[[str], None] | None = None) -> Certification:
    """Runs the probes on this card and stores the result."""
    table = Registry(TABLE, ops.card)  # all kernels, also those that an earlier certification rejected
    results = registry.certify(table, Problems(ops, table).probes(), GPU_ROWS, say=say)
    done = Certification(identity(ops), registry.today()).with_results(results)
    registry.save(done, stored_at(ops))
    return done


def failure_file(ops: TritonOps) -> Path:
    """Says why this card could not be certified; without results, no later start tries again."""
    return stored_at(ops).with_suffix(".failed")


def certify_in_child(ops: TritonOps) -> None:
    """Certifies in another process, which a kernel that traps ends alone."""
    command = [sys.executable, "-m", "outrider", "doctor", "--kernels", "--json"]
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": visible_device(ops.semaphores.device.index or 0)}
    subprocess.run(
        command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, timeout=CHILD_SECONDS, check=True
    )


def visible_device(index: int) -> str:
    """The name by which another process sees this process's card alone."""
    visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return visible[index] if index < len(visible) else str(index)


def apply_certification(ops: TritonOps) -> None:
    """Rejects the kernels that failed on this card, and promises the rows that agreed. A card that was never compared
    certifies now."""
    certification = registry.load(stored_at(ops), identity(ops))
    failure = failure_file(ops)
    if not certification.results and not ops.card.name.startswith(COMPARED_CARDS) and not failure.exists():
        log.warning("comparing the bits of all kernels on this %s, once; this takes a minute or more", ops.card.name)
        try:
            certify_in_child(ops)
        except (OSError, subprocess.SubprocessError) as error:
            reason = str(error).splitlines()[0]
            log.warning(
                "the kernels' bits could not be compared on this card (%s); `outrider doctor --kernels` tries again",
                reason,
            )
            with suppress(OSError):
                failure.parent.mkdir(parents=True, exist_ok=True)
                failure.write_text(reason + "\n", encoding="utf-8")
        certification = registry.load(stored_at(ops), identity(ops))
    ops.apply(certification)


def outcome(certification: Certification, kernel: Kernel) -> str:
    """The result of one kernel."""
    results = [result for result in certification.results if result.kernel == kernel.name]
    if not results:
        return "yes, not compared"
    failed = next((result for result in results if not result.complete), None)
    if failed is None:
        return f"certified {certification.date}: {len(results)} problems, up to {max(r.rows for r in results)} rows"
    if failed.defines:
        return f"certified {certification.date} up to {failed.rows} rows: {failed.note}"
    return f"rejected {certification.date}: {failed.note}"


def kernel_rows(say: Callable[[str], None] | None = None) -> tuple[list[KernelRow], str]:
    """The GPU's rows of `outrider doctor --kernels`, and the card that they are about. On a card without a stored
    certification the probes run."""
    if not torch.cuda.is_available():
        return [row_of(kernel, "–") for kernel in TABLE], "no GPU here"
    ops = TritonOps(torch.device("cuda", 0))
    certification = registry.load(stored_at(ops), identity(ops))
    if not certification.results:
        certification = certify_here(ops, say)
    rows = [
        row_of(kernel, outcome(certification, kernel) if kernel.runs_on(ops.card) else "no: another card's")
        for kernel in TABLE
    ]
    return rows, ops.card.identity


def row_of(kernel: Kernel, here: str) -> KernelRow:
    return KernelRow(operation=kernel.op, when=kernel.when, kernel=kernel.name, source=kernel.source, here=here)
