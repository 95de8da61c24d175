"""Passes of Qwen2.5-1.5B (Q4_K_M) and Gemma 4 E2B (Q4_0) with random weights by number of threads: `amx` beside
`avx512bf16`, and where the time of one row goes. No download, nothing else than a C compiler.

    python benchmarks/cpu_scaling.py [--threads 1,2,4,8,16] [--seconds 190] [--only qwen] [--out FOLDER]

What is measured, one JSON line each (also into FOLDER/cpu_scaling.jsonl):
  machine    processor, cores, pages, compiler
  read       GB/s of plain reading by the same threads: without software prefetch and with, huge and small pages
  barrier    microseconds of one
  compute    nanoseconds per unit (16 outputs x 32 columns, all rows) of weights that lie in the second-level cache
  bits       do `amx` and `avx512bf16` agree, every format, 1 to 64 rows
  pass       ms of a pass with all rows' logits, levels in turn
  cycle      ms of a pass as the engine runs it: a cycle in C that keeps no logits; given drafts
  prefill    ms and tokens/s of 512
  products   ms of all products of a pass: members that never wait, a barrier behind each, the next fetched before it
  one row    ms with variants of the prefetch in the loop (bytes ahead, cache level) and before barriers, and pinned
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import mmap
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

import torch
from benchmarks.cpu_kernels import Given
from tests.dummy_checkpoint import write_gguf
from tests.stress.random_models import RANDOM

from outrider.cache.store import CacheSpec, KVStore, last_rows
from outrider.models.builtin_configs import BUILTIN_CONFIGS
from outrider.models.config import ModelConfig
from outrider.models.decoder import TextModel
from outrider.ops.cpu import build
from outrider.ops.cpu import ops as cpu_ops
from outrider.ops.cpu.certify import FORMATS, Problems
from outrider.ops.cpu.lib import GRIDS, declare
from outrider.ops.cpu.ops import CpuOps
from outrider.ops.cpu.packing import PackedWeight, c_weight
from outrider.ops.formats import BLOCKS
from outrider.ops.registry import Certification
from outrider.platforms.processor import processor_name
from outrider.weights.load import load_target

PROBE = Path(__file__).with_name("cpu_probe.c")
BF16 = "avx512bf16"
CONTEXT = 200
PREFILL = 512
ROWS = (1, 5, 9, 17, 64)
NO_HINT = 9

# Variants: name -> (level, definitions)
VARIANTS: dict[str, tuple[str, str]] = {
    BF16: (BF16, ""),
    "amx": ("amx", ""),
    "tiles": ("amx", "-DAMX_ROWS=9"),
    "few 4k": (BF16, "-DFEW_ROWS_AHEAD=4096"),
    "few 8k": (BF16, "-DFEW_ROWS_AHEAD=8192"),
    "few and more 4k": (BF16, "-DFEW_ROWS_AHEAD=4096 -DMORE_ROWS_AHEAD=4096"),
    "few and more 8k": (BF16, "-DFEW_ROWS_AHEAD=8192 -DMORE_ROWS_AHEAD=8192"),
}
ONE_ROW = tuple(name for name, (level, _) in VARIANTS.items() if level == BF16)


class Report:
    def __init__(self, folder: str | None, seconds: float):
        self.began = time.perf_counter()
        self.seconds = seconds
        self.file = None
        if folder:
            Path(folder).mkdir(parents=True, exist_ok=True)
            self.file = (Path(folder) / "cpu_scaling.jsonl").open("w")

    def __call__(self, what: str, **fields: Any) -> None:
        line = json.dumps({"what": what, **fields})
        print(line, flush=True)
        if self.file is not None:
            self.file.write(line + "\n")
            self.file.flush()

    @property
    def elapsed(self) -> float:
        return time.perf_counter() - self.began

    def late(self, section: str) -> bool:
        """True if the time is up: the section is left out, which a line says."""
        if self.elapsed < self.seconds:
            return False
        self("left out", section=section, elapsed_s=round(self.elapsed))
        return True


def first_line(command: Sequence[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True).stdout.splitlines()[0]
    except (OSError, IndexError):
        return ""


def content(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def machine(report: Report) -> None:
    flags = build.cpu_flags()
    siblings = {content(f"/sys/devices/system/cpu/cpu{i}/topology/thread_siblings_list") for i in range(64)} - {""}
    report(
        "machine",
        processor=processor_name(),
        cores=cpu_ops.default_threads(),
        siblings=sorted(siblings)[:8],
        caches=[content(f"/sys/devices/system/cpu/cpu0/cache/index{i}/size") for i in range(4)],
        huge_pages=content("/sys/kernel/mm/transparent_hugepage/enabled"),
        kernel=content("/proc/sys/kernel/osrelease"),
        compiler=first_line([build.compiler(), "--version"]),
        features=sorted(f for f in flags if f.startswith(("amx", "avx512_", "avx_vnni"))),
        runs=build.runnable(),
        amx_lacks=sorted(build.missing("amx")),
        torch=torch.__version__,
    )


def huge_bytes() -> int:
    """Bytes in huge pages of this process."""
    lines = content("/proc/self/smaps_rollup").splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("AnonHugePages"))


# ---- libraries ------------------------------------------------------------------------------------------------------
class Libraries:
    """Compiles the variants in parallel; `chunks.c` once."""

    def __init__(self, folder: Path, names: Sequence[str], attention: str = "-O3"):
        """attention: how it is optimised, which takes most of the time."""
        self.folder = folder
        self.pool = ThreadPoolExecutor(32)
        common = [*build.COMMON.split(), f"-I{build.HERE}"]
        chunks = self.compiled(build.HERE / "chunks.c", [*common, *build.FLAGS[BF16].split(), attention], "chunks")
        self.paths: dict[str, Future[Path]] = {}
        for i, name in enumerate(names):
            level, definitions = VARIANTS[name]
            flags = [*common, *build.FLAGS[level].split(), *definitions.split()]
            probe = self.compiled(PROBE, flags, f"probe-{i}")
            tiles = self.compiled(build.HERE / "tiles.c", flags, f"tiles-{i}")
            self.paths[name] = self.pool.submit(self.linked, f"lib{i}.so", (chunks, probe, tiles))
        self.loaded: dict[str, ctypes.CDLL] = {}

    def compiled(self, source: Path, flags: Sequence[str], name: str) -> Future[Path]:
        out = self.folder / f"{name}.o"
        command = [build.compiler(), *flags, "-c", str(source), "-o", str(out)]

        def work() -> Path:
            if not out.exists():
                subprocess.run(command, check=True)
            return out

        return self.pool.submit(work)

    def linked(self, name: str, objects: Sequence[Future[Path]]) -> Path:
        out = self.folder / name
        inputs = [str(each.result()) for each in objects]
        subprocess.run([build.compiler(), "-shared", "-pthread", *inputs, "-o", str(out), "-lm"], check=True)
        return out

    def ops(self, name: str, threads: int) -> CpuOps:
        if name not in self.loaded:
            lib = ctypes.CDLL(str(self.paths[name].result()))
            declare(lib)
            lib.or_grids((ctypes.c_void_p * len(GRIDS))(*[grid.ctypes.data for grid in GRIDS]))
            pointer = ctypes.c_void_p
            lib.probe_read.argtypes = [pointer, pointer, ctypes.c_int64, ctypes.c_int, ctypes.c_int64]
            lib.probe_barriers.argtypes = [pointer, ctypes.c_int]
            lib.probe_products.argtypes = [pointer, pointer, *[ctypes.c_int] * 3, pointer, pointer]
            for function in (lib.probe_read, lib.probe_barriers, lib.probe_products):
                function.restype = None
            self.loaded[name] = lib
        original = cpu_ops.certified_library
        cpu_ops.certified_library = lambda isa: (self.loaded[name], Certification("", ""))
        try:
            return CpuOps(threads)
        finally:
            cpu_ops.certified_library = original


def fetch_before_barriers(ops: CpuOps, size: int) -> None:
    ctypes.c_int.in_dll(ops.lib, "probe_phase_ahead").value = size


# ---- timing ---------------------------------------------------------------------------------------------------------
def in_turn(work: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Milliseconds of each, turn about, after one run that is not counted."""
    times: dict[str, list[float]] = {name: [] for name in work}
    for turn in range(rounds):
        for name, run in work.items():
            time.sleep(0.004)  # until the threads that ran before sleep
            run()
            for _ in range(2 if turn else 1):
                start = time.perf_counter()
                run()
                times[name].append((time.perf_counter() - start) * 1e3)
    return times


def rounded(times: Sequence[float]) -> list[float]:
    """Median and least."""
    return [round(median(times), 3), round(min(times), 3)]


@dataclass
class Model:
    """One model's weights, and the cache that all levels share."""

    name: str
    config: ModelConfig
    weights: dict[str, Any]
    bytes: float  # that one row reads
    store: KVStore

    def __post_init__(self) -> None:
        self.seqs = []
        for _ in range(8):
            seq, _ = self.store.open()
            self.store.reserve(seq, 1024)
            self.seqs.append(seq)
        self.ids = torch.randint(0, self.config.vocab_size, (PREFILL,), generator=torch.Generator().manual_seed(0))

    def compiled(self, ops: CpuOps) -> TextModel:
        return ops.compile(TextModel(self.config, self.weights, ops))

    def one_pass(self, model: TextModel, rows: int, sequences: int = 1) -> None:
        slots = torch.tensor([seq.slot for seq in self.seqs[:sequences]])
        positions = torch.arange(CONTEXT, CONTEXT + rows).repeat(sequences)
        row_seq = torch.arange(sequences).repeat_interleave(rows)
        starts = torch.arange(0, rows * sequences + 1, rows, dtype=torch.int32)
        view = self.store.view(slots, positions, row_seq, starts, rows, CONTEXT + rows)
        logits = model.logits(model.forward(self.ids[: rows * sequences], view).hidden)
        model.ops.argmax(logits)  # on all threads; torch's own took 19 of 100 ms at 64 rows

    def prefill(self, model: TextModel, whole: bool) -> None:
        slots = torch.tensor([self.seqs[0].slot])
        starts = torch.tensor([0, PREFILL], dtype=torch.int32)
        row_seq = torch.zeros(PREFILL, dtype=torch.int64)
        view = self.store.view(slots, torch.arange(PREFILL), row_seq, starts, PREFILL, PREFILL)
        model.logits(model.forward(self.ids, view, (), None if whole else last_rows(view, [0])).hidden[-1:])


def written(name: str, folder: Path) -> Path:
    path = folder / f"{name}.gguf"
    if name == "qwen":
        raw, fmt = RANDOM["random-1.5b"]
    else:
        raw, fmt = BUILTIN_CONFIGS["google/gemma-4-E2B-it"], "q4_0"
    if not path.exists():
        write_gguf(path, ModelConfig.from_hf(raw), fmt)
    return path


def loaded(name: str, path: Path, ops: CpuOps) -> Model:
    config, weights, _ = load_target(path, ops=ops)
    looked_up = weights["embed"].nbytes if not config.tied else 0
    size = sum(w.nbytes for w in weights.values()) - looked_up
    spec = CacheSpec(slots=40, max_context=2048, page_size=16, chunk=512, tokens=16384)
    store = KVStore(config, spec, ops.kv_dtype(torch.float32), "cpu")
    return Model(name, config, weights, size, store)


# ---- sections -------------------------------------------------------------------------------------------------------
def reading(report: Report, libs: Libraries, threads: Sequence[int]) -> None:
    size = 1 << 30 if cpu_ops.default_threads() > 2 else 1 << 28
    for pages in ("huge", "small"):
        mapping = mmap.mmap(-1, size + (2 << 20), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        mapping.madvise(mmap.MADV_HUGEPAGE if pages == "huge" else mmap.MADV_NOHUGEPAGE)
        before = huge_bytes()
        data = torch.frombuffer(mapping, dtype=torch.uint8)
        data.zero_()
        start = data.data_ptr() + -data.data_ptr() % (2 << 20)
        ways = {"plain": (NO_HINT, 0), "1k L1": (3, 1024), "4k L1": (3, 4096), "4k L2": (2, 4096), "1k L0": (0, 1024)}
        if pages == "small":
            ways = {"plain": ways["plain"], "4k L2": ways["4k L2"]}
        for count in threads:
            ops = libs.ops(BF16, count)
            work = {
                name: lambda hint=hint, ahead=ahead: ops.lib.probe_read(ops.pool, start, size, hint, ahead)
                for name, (hint, ahead) in ways.items()
            }
            speeds = {name: round(size / min(t) / 1e6, 1) for name, t in in_turn(work, 2).items()}
            report("read", pages=pages, threads=count, gb_s=speeds, huge_mb=(huge_bytes() - before) >> 20)
        del data


def barriers(report: Report, libs: Libraries, threads: Sequence[int]) -> None:
    for count in threads:
        ops = libs.ops(BF16, count)
        times = in_turn({"barrier": lambda ops=ops: ops.lib.probe_barriers(ops.pool, 2000)}, 3)["barrier"]
        report("barrier", threads=count, us=[round(t / 2, 3) for t in (median(times), min(times))])


def packed(ops: CpuOps, kind: str, n: int, k: int) -> PackedWeight:
    """Random blocks with finite scales."""
    return Problems(ops.lib, ops.pool).weight(kind, n, k)


def products(ops: CpuOps, weights: Sequence[PackedWeight], rows: int, phases: int) -> Callable[[], None]:
    """All products of these weights, in one call."""
    structs = [c_weight(w) for w in weights]
    array = (ctypes.c_void_p * len(structs))(*map(ctypes.addressof, structs))
    widest = max(c.k for c in structs)
    acts = torch.zeros((rows + 16) * widest * 2 + 4096, dtype=torch.uint8)
    out = torch.zeros(rows * max(max(c.n for c in structs), widest) + 64)
    keep = (structs, array, acts, out, weights)

    def run() -> None:
        ops.lib.probe_products(ops.pool, array, len(keep[0]), rows, phases, acts.data_ptr(), out.data_ptr())

    return run


def compute(
    report: Report,
    libs: Libraries,
    levels: Sequence[str],
    kinds: Sequence[str] = ("Q4_0", "Q4_K", "Q6_K", "Q8_0"),
    row_counts: Sequence[int] = (1, 5, 9, 16, 17, 32, 64, 128),
) -> None:
    repeat = 40
    for kind in kinds:
        n, k = 256, 1536
        units = repeat * (n // 16) * (k // 32)
        for rows in row_counts:
            work = {}
            for level in levels:
                ops = libs.ops(level, 1)
                work[level] = products(ops, [packed(ops, kind, n, k)] * repeat, rows, 0)
            times = in_turn(work, 2)
            report(
                "compute", kind=kind, rows=rows, ns={name: round(min(t) * 1e6 / units, 2) for name, t in times.items()}
            )


def bits(report: Report, libs: Libraries, variant: str) -> None:
    both = [libs.ops(name, cpu_ops.default_threads()) for name in (variant, BF16)]
    wrong: dict[str, list[int]] = {}
    for kind in FORMATS:
        k = 1280 if BLOCKS[kind][0] == 256 else 1120
        x = torch.randn(300, k, generator=torch.Generator().manual_seed(0))
        weights = [packed(ops, kind, 72, k) for ops in both]
        for rows in (*range(1, 65), 127, 128, 129, 300):
            answers = [ops.linear(x[:rows], w) for ops, w in zip(both, weights)]
            if not torch.equal(*answers):
                wrong.setdefault(kind, []).append(rows)
    kv = [str(ops.kv_dtype(torch.float32)) for ops in both]
    report("bits", variant=variant, formats=list(FORMATS), equal=not wrong, wrong=wrong, kv=kv)


def fast_bits(report: Report, libs: Libraries, variants: Sequence[str]) -> None:
    """Some formats and numbers of rows, all variants against `avx512bf16`."""
    for variant in variants:
        both = [libs.ops(name, cpu_ops.default_threads()) for name in (variant, BF16)]
        wrong: dict[str, list[int]] = {}
        for kind in ("Q4_0", "Q4_1", "Q8_0", "Q5_K", "Q4_K", "Q6_K", "Q2_K", "IQ4_XS"):
            k = 1280
            x = torch.randn(300, k, generator=torch.Generator().manual_seed(0))
            weights = [packed(ops, kind, 144, k) for ops in both]
            for rows in (1, 5, 6, 9, 15, 16, 17, 33, 40, 64, 129, 300):
                if not torch.equal(*[ops.linear(x[:rows], w) for ops, w in zip(both, weights)]):
                    wrong.setdefault(kind, []).append(rows)
        report("bits", variant=variant, equal=not wrong, wrong=wrong)


def tiles_alone(report: Report, libs: Libraries, folder: Path, counts: Sequence[int], only: str) -> None:
    """A minute on a machine with tiles: variants' bits, nanoseconds of a unit, passes; a table at the end."""
    names = list(libs.paths)
    path = written(only, folder)
    report("written", elapsed_s=round(report.elapsed, 1))
    for name in names:
        libs.paths[name].result()
    report("compiled", elapsed_s=round(report.elapsed, 1))
    fast_bits(report, libs, names[1:])
    model = loaded(only, path, libs.ops(BF16, counts[0]))
    report("loaded", elapsed_s=round(report.elapsed, 1))
    table: dict[str, list[str]] = {name: [] for name in names}
    titles = list[str]()
    for count in counts:
        nets = {name: model.compiled(libs.ops(name, count)) for name in names}
        for rows in (1, 5, 9, 17, 64, PREFILL):
            if report.late(f"{count} threads, {rows} rows"):
                continue
            if rows == PREFILL:
                work = {name: lambda net=net: model.prefill(net, True) for name, net in nets.items()}
            else:
                work = {name: lambda net=net, rows=rows: model.one_pass(net, rows) for name, net in nets.items()}
            times = in_turn(work, 1 if rows == PREFILL else 3)
            ms = {name: rounded(t) for name, t in times.items()}
            report("pass", model=only, threads=count, rows=rows, ms=ms)
            titles.append(f"{count}/{rows}")
            for name, (middle, _) in ms.items():
                table[name].append(f"{middle:.1f}")
        if not report.late(f"{count} threads, cycles"):
            cycles(report, libs, model, count, names)
        if count == counts[0] and not report.late("compute"):
            compute(report, libs, names, kinds=("Q4_0", "Q4_K"), row_counts=(9, 16, 64))
    print(f"threads/rows: {' '.join(titles)}")
    for name, cells in table.items():
        print(f"{name}: {' '.join(cells)}", flush=True)


def cycles(report: Report, libs: Libraries, model: Model, count: int, levels: Sequence[str]) -> None:
    """Passes as the engine runs them: cycles in C, tokens chosen within the head's product."""
    nets = {name: model.compiled(libs.ops(name, count)) for name in levels}
    for sequences, row_counts in ((1, (1, 5, 9, 17)), (8, (1, 5))):
        given = {name: Given(net, model.store, sequences) for name, net in nets.items()}
        for rows in row_counts:
            work = {name: partial(each.run, rows, [None] * sequences) for name, each in given.items()}
            ms = {name: rounded(t) for name, t in in_turn(work, 4).items()}
            report("cycle", model=model.name, threads=count, sequences=sequences, rows=rows, ms=ms)


def passes(report: Report, libs: Libraries, model: Model, count: int, levels: Sequence[str], full: bool) -> None:
    compiled = {name: model.compiled(libs.ops(name, count)) for name in levels}
    row_counts = (1, 2, 5, 9, 12, 16, 17, 24, 32, 48, 64) if full else ROWS if count > 2 else ROWS[:-1]
    for rows in row_counts:
        work = {name: lambda net=net, rows=rows: model.one_pass(net, rows) for name, net in compiled.items()}
        times = in_turn(work, 3 if count > 2 else 1)
        report("pass", model=model.name, threads=count, rows=rows, ms={name: rounded(t) for name, t in times.items()})
    for sequences, rows in ((8, 1), (8, 5), (4, 5)) if full else ():
        work = {n: lambda net=net, r=rows, s=sequences: model.one_pass(net, r, s) for n, net in compiled.items()}
        ms = {name: rounded(t) for name, t in in_turn(work, 3).items()}
        report("pass", model=model.name, threads=count, sequences=sequences, rows=rows, ms=ms)
    for whole in (True, False) if full else (True,):
        if count < 4:
            break
        work = {name: lambda net=net, whole=whole: model.prefill(net, whole) for name, net in compiled.items()}
        times = in_turn(work, 1)
        speed = {name: round(PREFILL / min(t) * 1e3) for name, t in times.items()}
        ms = {name: rounded(t) for name, t in times.items()}
        report("prefill", model=model.name, threads=count, all_rows=whole, ms=ms, tokens_s=speed)


def split(report: Report, libs: Libraries, model: Model, count: int, levels: Sequence[str]) -> None:
    """All products of a pass by how members wait: the rest of a pass is rows, attention and barriers."""
    matrices = [
        w for name, w in model.weights.items() if isinstance(w, PackedWeight) and not name.startswith("ple_embed")
    ]
    if not model.config.tied:
        matrices = [w for name, w in model.weights.items() if isinstance(w, PackedWeight) and name != "embed"]
    for rows in (1, 17, 512):
        if rows == 512 and count < 8:
            continue
        work = {}
        for level in levels:
            ops = libs.ops(level, count)
            fetch_before_barriers(ops, 65536)
            for phases, name in ((0, "apart"), (1, "barriers"), (2, "fetched 64k")):
                if rows <= 16 or phases < 2:
                    work[f"{level}, {name}"] = products(ops, matrices, rows, phases)
        times = in_turn(work, 3 if rows < 512 else 1)
        report(
            "products", model=model.name, threads=count, rows=rows, ms={name: rounded(t) for name, t in times.items()}
        )
        for level in levels:
            fetch_before_barriers(libs.ops(level, 1), 0)


def pinned(count: int, make: Callable[[], CpuOps]) -> CpuOps:
    """Its threads each on a core of its own; the caller on the first."""
    before = {int(name) for name in os.listdir("/proc/self/task")}
    ops = make()
    cores = sorted(os.sched_getaffinity(0))
    members = [os.getpid(), *sorted({int(name) for name in os.listdir("/proc/self/task")} - before)]
    for core, member in zip(cores, members):
        os.sched_setaffinity(member, {core})
    return ops


def one_row(report: Report, libs: Libraries, model: Model, count: int, full: bool) -> None:
    names = ONE_ROW if full else (BF16, "few 4k", "few 8k")
    nets = {name: model.compiled(libs.ops(name, count)) for name in names}
    work = {name: lambda net=net: model.one_pass(net, 1) for name, net in nets.items()}
    times = in_turn(work, 6 if count >= 8 else 2 if count > 1 else 1)
    gb_s = {name: round(model.bytes / min(t) / 1e6, 1) for name, t in times.items()}
    ms = {name: rounded(t) for name, t in times.items()}
    report("one row", model=model.name, threads=count, bytes=model.bytes, ms=ms, gb_s=gb_s)
    if count == 1:
        return
    best = sorted(times, key=lambda name: median(times[name]))[:2]
    for name in dict.fromkeys((BF16, *best)):
        ops = nets[name].ops
        work = {}
        for size in (0, 8192, 32768, 131072):

            def run(net: TextModel = nets[name], size: int = size, ops: CpuOps = ops) -> None:
                fetch_before_barriers(ops, size)
                model.one_pass(net, 1)

            work[str(size)] = run
        times = in_turn(work, 6 if count >= 8 else 2 if count > 1 else 1)
        fetch_before_barriers(ops, 0)
        ms = {size: rounded(t) for size, t in times.items()}
        report("one row, fetched before barriers", model=model.name, threads=count, variant=name, bytes_ms=ms)
    if full:
        cores = os.sched_getaffinity(0)
        net = model.compiled(pinned(count, lambda: libs.ops(best[0], count)))
        work = {"pinned": lambda: model.one_pass(net, 1)}
        report(
            "one row, pinned", model=model.name, threads=count, variant=best[0], ms=rounded(in_turn(work, 6)["pinned"])
        )
        os.sched_setaffinity(0, cores)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--threads", default="16,8,1,4,2", help="in the order of measuring; most is measured at the first"
    )
    parser.add_argument("--seconds", type=float, default=170, help="begin nothing after so long")
    parser.add_argument("--skip", default="", help="of read, products")
    parser.add_argument("--only", choices=("qwen", "e2b"))
    parser.add_argument("--tiles", action="store_true", help="the variants of tiles alone, in about a minute")
    parser.add_argument("--build", metavar="FOLDER", help="keep objects and models there, and use what is there")
    parser.add_argument("--out", default=os.environ.get("OUT"))
    args = parser.parse_args()
    torch.set_num_threads(1)  # torch's own threads would spin beside ours
    report = Report(args.out, args.seconds)
    machine(report)
    lacking = build.missing("amx")
    if build.missing(BF16):
        report("absent", level=BF16, lacks=sorted(build.missing(BF16)))
        raise SystemExit(0)
    if lacking:
        report("absent", level="amx", lacks=sorted(lacking))
    levels = [BF16] if lacking else ["amx", BF16]
    tuned = levels if lacking else [*levels, *(name for name in VARIANTS if name.startswith("tiles"))]
    counts = [n for n in map(int, args.threads.split(",")) if n <= cpu_ops.default_threads()]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(args.build or scratch)
        folder.mkdir(parents=True, exist_ok=True)
        names = [name for name, (level, _) in VARIANTS.items() if level in levels]
        if args.tiles:
            libs = Libraries(folder, [name for name in names if name == BF16 or name.startswith("tiles")], "-O1")
            tiles_alone(report, libs, folder, counts, args.only or "qwen")
            report("done", elapsed_s=round(report.elapsed, 1))
            return
        libs = Libraries(folder, names)
        models = [args.only] if args.only else ["qwen", "e2b"]
        paths = {name: written(name, folder) for name in models}
        libs.paths[BF16].result()
        report("compiled", elapsed_s=round(report.elapsed, 1))
        if "read" not in args.skip:
            reading(report, libs, counts)
            barriers(report, libs, counts)
        for name in names:
            libs.paths[name].result()
        for name in [] if lacking else [name for name in tuned if name != BF16]:
            bits(report, libs, name)
        compute(report, libs, tuned)
        held = []
        for name in models:
            before = huge_bytes()
            model = loaded(name, paths[name], libs.ops(BF16, counts[0]))
            held.append(model)
            mb = round(model.bytes / 1e6)
            huge_mb = (huge_bytes() - before) >> 20
            report("loaded", model=name, mb=mb, huge_mb=huge_mb, elapsed_s=round(report.elapsed, 1))
        for count in counts:
            for model in held:
                if report.late(f"{model.name}, {count} threads"):
                    continue
                full = count == counts[0]
                one_row(report, libs, model, count, full or (model.name == "qwen" and count == 1))
                if "products" not in args.skip:
                    split(report, libs, model, count, levels)
                passes(report, libs, model, count, tuned if full else levels, full)
                gc.collect()
    report("done", elapsed_s=round(report.elapsed, 1))


if __name__ == "__main__":
    main()
