"""CPU kernels: products, whole passes and prefill of a GGUF model, beside llama.cpp where it is installed.

    python benchmarks/cpu_kernels.py MODEL.gguf                  # everything, two rounds interleaved with the peer
    python benchmarks/cpu_kernels.py MODEL.gguf --passes --repeat 8 --rounds 20 --seconds 60   # no single products
    python benchmarks/cpu_kernels.py MODEL.gguf --isa avx2       # another instruction set
    python benchmarks/cpu_kernels.py MODEL.gguf --adapter 16     # cycles with and without adapters, in turn

Times are medians with (least to greatest) over the repetitions; `x` columns are multiples of one row in the same run.
With --threads 1 the processor time of the thread is counted: on a busy machine others' time is not.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import numpy as np
import torch

from outrider.cache.store import CacheSpec, KVStore, last_rows
from outrider.models.decoder import TextModel
from outrider.models.names import tensor_plan
from outrider.ops.cpu.build import FLAGS
from outrider.ops.cpu.ops import CpuOps
from outrider.ops.decode_io import UNKNOWN
from outrider.ops.lowrank import Adapter
from outrider.spec.slot_sampling import sampling_batch
from outrider.types import KVView, SamplingParams
from outrider.weights.adapter import ADAPTABLE
from outrider.weights.load import load_target

PRODUCT_ROWS = (1, 2, 4, 5, 8, 9, 16)
PASS_ROWS = (1, 5, 9, 17)
CONTEXT = 200
PREFILL = 512


class Stopwatch:
    """Repetitions of named pieces of work, in milliseconds."""

    def __init__(self, now: Callable[[], float] = time.perf_counter, rest: float = 0.05) -> None:
        self.times: dict[str, list[float]] = {}
        self.now = now
        self.rest = rest

    def run(self, name: str, work: Callable[[], Any], repeat: int) -> None:
        time.sleep(self.rest)  # until the threads of the peer that ran before no longer spin
        work()
        for _ in range(repeat):
            start = self.now()
            work()
            self.times.setdefault(name, []).append((self.now() - start) * 1e3)

    def pairs(self, ours: str, work: Callable[[], Any], theirs: str, peer: Callable[[], Any], repeat: int) -> None:
        """Turn about, so that both see the same neighbours on the machine's memory."""
        for _ in range(0, repeat, 4):
            self.run(ours, work, 4)
            self.run(theirs, peer, 4)

    def faster(self, ours: str, theirs: str) -> str:
        """Medians over medians, and the median of neighbours' ratios."""
        own_times = self.times[ours]
        peer = self.times[theirs]
        pairs = [b / a for a, b in zip(own_times, peer)]
        kinds = f"pair by pair {statistics.median(pairs):.2f}, best by best {min(peer) / min(own_times):.2f}"
        return f"{self.median(theirs) / self.median(ours):.2f} x llama.cpp's speed ({kinds})"

    def median(self, name: str) -> float:
        return statistics.median(self.times[name])

    def show(self, name: str, of: str | None = None, per: int = 1) -> None:
        t = self.times[name]
        ratio = f"   {self.median(name) / self.median(of):5.2f} x" if of else ""
        rate = f"   {per / self.median(name) * 1e3:7.0f} tok/s" if per > 1 or of == name else ""
        print(f"  {name:34s} {self.median(name):8.3f} ms ({min(t):.3f} to {max(t):.3f}){ratio}{rate}")


def resident() -> str:
    """Resident memory of the process: its own, and pages of mapped files (which the system may evict)."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    anonymous, mapped, peak = (int(status[name].split()[0]) / 1e3 for name in ("RssAnon", "RssFile", "VmHWM"))
    return f"resident: {anonymous:.0f} MB of its own, {mapped:.0f} MB of mapped files, {peak:.0f} MB at the peak"


class OurKernels:
    def __init__(self, path: str, threads: int | None, isa: str | None):
        began = time.perf_counter()
        self.ops = CpuOps(threads, isa)
        self.config, weights, _ = load_target(path, ops=self.ops)
        self.weights = weights
        self.model = self.ops.compile(TextModel(self.config, weights, self.ops))
        print(f"{self.ops.threads} threads, {self.ops.version}, loaded in {time.perf_counter() - began:.2f} s")
        held = {name: w.nbytes for name, w in weights.items()}  # tables that stay in the file: 0
        experts = sum(size for name, size in held.items() if ".experts_" in name)
        share = self.config.moe.top_k / self.config.moe.experts if self.config.moe is not None else 0.0
        looked_up = held["embed"] if not self.config.tied else 0
        self.step_bytes = sum(held.values()) - looked_up - experts * (1 - share)
        print(f"weights in memory: {sum(held.values()) / 1e6:.0f} MB; a step reads {self.step_bytes / 1e6:.0f} MB")
        print(resident())
        self.store = KVStore(self.config, CacheSpec(16, 2048, 32, 512, 16384), self.ops.kv_dtype(torch.float32), "cpu")
        self.seq, _ = self.store.open()
        self.store.reserve(self.seq, 2048)
        self.ids = torch.randint(0, self.config.vocab_size, (PREFILL,), generator=torch.Generator().manual_seed(0))

    def view(self, start: int, rows: int) -> KVView:
        def as_long(values):
            return torch.tensor(values, dtype=torch.int64)

        return self.store.view(
            as_long([self.seq.slot]), torch.arange(start, start + rows), torch.zeros(rows, dtype=torch.int64),
            torch.tensor([0, rows], dtype=torch.int32), rows, start + rows,
        )  # fmt: skip

    def one_pass(self, rows: int) -> None:
        """One step of decoding: view, forward, logits, argmax."""
        self.model.logits(self.model.forward(self.ids[:rows], self.view(CONTEXT, rows)).hidden).argmax(-1)

    def prefill(self, whole: bool = False) -> None:
        """A prompt up to its first token; whole: all rows through all layers."""
        kv = self.view(0, PREFILL)
        self.model.logits(self.model.forward(self.ids, kv, (), None if whole else last_rows(kv, [0])).hidden[-1:])

    def gate_ups(self, x: torch.Tensor) -> None:
        for block in self.model.blocks:
            self.ops.linear(x, block.gate_up)


class Given:
    """Whole cycles without a drafter: so many rows of each sequence in one call, all but the first given guesses."""

    def __init__(self, model: TextModel, store: KVStore, count: int):
        params = [SamplingParams(temperature=0.0)] * count
        device = torch.device("cpu")
        self.sampling = sampling_batch(params, [[5]] * count, [[]] * count, model.config.vocab_size, device)
        self.slots = [store.open()[0] for _ in range(count)]
        for seq in self.slots:
            store.reserve(seq, CONTEXT + 64)
        self.features = torch.zeros((store.spec.slots, model.config.hidden))
        self.cycle = model.ops.host_cycle(model, None, store.pages(), self.features, (), None)
        assert self.cycle is not None, "the library runs no whole cycles of this model"

    def run(self, rows: int, adapters: Sequence[Adapter | None]) -> None:
        inputs = self.cycle.inputs
        count = len(self.slots)
        inputs.slot[:count] = [cache.slot for cache in self.slots]
        inputs.last_token[:count] = 5
        inputs.position[:count] = CONTEXT
        inputs.max_draft[:count] = rows - 1
        inputs.host_draft[:count, : rows - 1] = 7
        inputs.num_logprobs[:count] = UNKNOWN
        self.cycle.run(count, self.sampling, adapters=adapters)


def random_adapter(ours: OurKernels, rank: int, seed: int) -> Adapter:
    parts = {}
    rng = torch.Generator().manual_seed(seed)
    for name, plan in tensor_plan(ours.config).items():
        if ADAPTABLE.fullmatch(name):
            pieces = [(rows, rank) for rows, _ in plan.source_shapes]
            a = (rank * len(pieces), plan.shape[1])
            b = (plan.shape[0], rank * len(pieces))
            matrices = (0.02 * torch.randn(shape, generator=rng) for shape in (a, b))
            parts[name] = ours.ops.lowrank(*matrices, torch.ones(plan.shape[0]), pieces, ours.weights[name])
    return Adapter(f"random {seed}", bytes([seed]), ours.ops.pack_adapter(parts))


def adapted(ours: OurKernels, rank: int, repeat: int, rounds: int) -> None:
    """Turn about, four cycles each: ratios of neighbours, so that a busy moment meets both. One sequence, and eight
    with an adapter each."""
    adapters = [random_adapter(ours, rank, i) for i in range(8)]
    clock = Stopwatch(time.thread_time if ours.ops.threads == 1 else time.perf_counter, rest=0.0)
    print(f"adapter of rank {rank}: {adapters[0].nbytes / 1e6:.1f} MB")
    for count, sizes in ((1, PASS_ROWS), (8, (5,))):
        given = Given(ours.model, ours.store, count)
        for rows in sizes:
            one = f"{count} x {rows} rows"
            two = f"{count} x {rows} rows, rank {rank}"
            base = partial(given.run, rows, [None] * count)
            work = partial(given.run, rows, adapters[:count])
            for _ in range(rounds):
                clock.pairs(one, base, two, work, repeat)
            clock.show(one)
            clock.show(two, one)
            plain = clock.times[one]
            changed = clock.times[two]
            turns = sorted(min(changed[i : i + 4]) / min(plain[i : i + 4]) for i in range(0, len(plain), 4))
            quarter = len(turns) // 4
            middle = f"{turns[quarter]:.3f} to {turns[-1 - quarter]:.3f}"
            print(f"  turn by turn {statistics.median(turns):.3f} x ({middle})")


def read_speed(threads: int) -> float:
    """Bytes a second that so many threads read together, the best of five."""
    data = np.ones(threads << 25, np.int64)  # 256 MB each
    best = 0.0
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(5):
            began = time.perf_counter()
            list(pool.map(lambda i: int(data[i << 25 : (i + 1) << 25].max()), range(threads)))
            best = max(best, data.nbytes / (time.perf_counter() - began))
    return best


class LlamaCppKernels:
    """llama.cpp through llama-cpp-python, the same file and the same number of threads."""

    def __init__(self, path: str, threads: int, ids: list[int]):
        from llama_cpp import Llama

        self.model = Llama(
            path,
            n_ctx=1024,
            n_threads=threads,
            n_threads_batch=threads,
            n_batch=PREFILL,
            n_ubatch=PREFILL,
            verbose=False,
        )
        self.ids = ids

    def back_to(self, length: int) -> None:
        self.model.n_tokens = length
        self.model._ctx.kv_cache_seq_rm(-1, length, -1)

    def one_pass(self, rows: int) -> None:
        self.back_to(CONTEXT)
        self.model.eval(self.ids[:rows])

    def prefill(self) -> None:
        self.back_to(0)
        self.model.eval(self.ids)


def products(ours: OurKernels, clock: Stopwatch, repeat: int) -> None:
    k = ours.config.hidden
    for rows in PRODUCT_ROWS:
        x = torch.randn(rows, k, generator=torch.Generator().manual_seed(rows))
        clock.run(f"gate_up of all layers, {rows} rows", lambda x=x: ours.gate_ups(x), repeat)
        clock.run(f"head, {rows} rows", lambda x=x: ours.ops.logits(x, ours.model.head, None), repeat)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--isa", choices=FLAGS)
    parser.add_argument("--repeat", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=600, help="begin no round after so long")
    parser.add_argument("--no-peer", action="store_true")
    parser.add_argument("--passes", action="store_true")
    parser.add_argument("--adapter", type=int, metavar="RANK", help="cycles with and without an adapter of this rank")
    args = parser.parse_args()
    torch.set_num_threads(1)  # torch's own threads would spin beside ours
    ours = OurKernels(args.model, args.threads, args.isa)
    clock = Stopwatch()
    peer = None
    if args.adapter:
        adapted(ours, args.adapter, args.repeat, args.rounds)
        return
    if not args.no_peer:
        try:
            peer = LlamaCppKernels(args.model, ours.ops.threads, ours.ids.tolist())
        except ImportError:
            print("llama-cpp-python is not installed: no peer")
        except ValueError as error:
            print(f"no peer: {error}")
    speed = read_speed(ours.ops.threads)
    print(
        f"{ours.ops.threads} threads read {speed / 1e9:.1f} GB/s: a step takes {ours.step_bytes / speed * 1e3:.2f} ms "
        f"at least"
    )
    began = time.perf_counter()
    for turn in range(args.rounds):
        if turn and time.perf_counter() - began > args.seconds:
            break
        if not args.passes:
            products(ours, clock, args.repeat)
        for rows in PASS_ROWS:
            if peer is None:
                clock.run(f"pass, {rows} rows", lambda rows=rows: ours.one_pass(rows), args.repeat)
                continue
            again = args.repeat if rows == 1 else 4
            clock.pairs(
                f"pass, {rows} rows", lambda rows=rows: ours.one_pass(rows),
                f"llama.cpp, {rows} rows", lambda rows=rows: peer.one_pass(rows), again,
            )  # fmt: skip
        if turn < 2:
            clock.run(f"prefill of {PREFILL}", ours.prefill, 1)
            clock.run(f"prefill of {PREFILL}, all rows", lambda: ours.prefill(True), 1)
            if peer is not None:
                clock.run(f"llama.cpp prefill of {PREFILL}", peer.prefill, 1)
    if not args.passes:
        print("products")
        for what in ("gate_up of all layers", "head"):
            for rows in PRODUCT_ROWS:
                clock.show(f"{what}, {rows} rows", f"{what}, {PRODUCT_ROWS[0]} rows")
    print(f"one pass at {CONTEXT} tokens of context")
    for rows in PASS_ROWS:
        clock.show(f"pass, {rows} rows", f"pass, {PASS_ROWS[0]} rows", rows)
        if peer is not None:
            clock.show(f"llama.cpp, {rows} rows", f"llama.cpp, {PASS_ROWS[0]} rows", rows)
    print(
        f"  a plain pass is {ours.step_bytes / speed * 1e3 / clock.median(f'pass, {PASS_ROWS[0]} rows'):.0%} of the "
        f"memory limit"
    )
    clock.show(f"prefill of {PREFILL}", per=PREFILL)
    clock.show(f"prefill of {PREFILL}, all rows", per=PREFILL)
    if peer is not None:
        clock.show(f"llama.cpp prefill of {PREFILL}", per=PREFILL)
        one = f"{PASS_ROWS[0]} rows"
        whole = f"prefill of {PREFILL}"
        for left, theirs in ((f"pass, {one}", f"llama.cpp, {one}"), (whole, f"llama.cpp {whole}")):
            print(f"  {left}: {clock.faster(left, theirs)}")


if __name__ == "__main__":
    main()
