"""Keys and values in eight bits on a GPU: every row has the bits it has alone, in bfloat16 (the control) and in fp8.

    PYTHONPATH=src python3 benchmarks/gpu_kv.py [--seconds 150] [--dry]

attention: one query alone against the same query among 1 to 40 rows, in a batch, in a tree and in a prompt, and fp8 against bfloat16 of
the same numbers in the order in which fp8 is summed (even columns of a head before odd ones). written: K/V as passes of 1 to 512 rows store it. model: logits and tokens of plain decoding against those with 1 to 16
drafts. Each runs in a process of its own, since compiling takes most of the time; then, alone, `times`: microseconds of attention.
`--job times` and `--job steps` (milliseconds of E2B's steps at 3,000) by themselves.
--dry: on a CPU with tiny shapes (set TRITON_INTERPRET=1), to try the script itself.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import triton
from gpu_common import FAILED, Rig, collect, graph_us, say, verdict

from outrider.bench.gpu import plain_run, speculative_run, tree_run
from outrider.ops.reference import ReferenceOps
from outrider.ops.triton import TritonOps, rope
from outrider.types import AttnSpec, KVView

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
SPECS = {
    "E2B sliding": AttnSpec(8, 1, 256, 0, True, window=512, scale=1.0),
    "E2B full": AttnSpec(8, 1, 512, 0, True, scale=1.0),
    "31B sliding": AttnSpec(32, 16, 256, 0, True, window=1024, scale=1.0),
    "31B full": AttnSpec(32, 4, 512, 0, True, k_eq_v=True, scale=1.0),
    "smollm2": AttnSpec(9, 3, 64, 0, True, scale=0.125),
}
TREE = [0, 1, 2, 3, 4, 0, 1, 6, 2, 8, 0, 11, 12, 13, 14, 3]


@dataclass(frozen=True)
class Size:
    """How large the check is."""

    device: str = "cuda"
    contexts: tuple[int, ...] = (100, 520, 1000, 1500, 3000)
    rows: tuple[int, ...] = (2, 5, 9, 17, 40)
    batch: int = 8
    prompt: int = 512
    context: int = 1000  # of models
    steps: int = 48
    timed: tuple[int, ...] = (1, 8, 16, 64)  # sequences
    far: tuple[int, ...] = (1019, 8100)  # their positions
    chunks: tuple[tuple[int, int], ...] = ((512, 0), (512, 2488), (2048, 0), (2048, 6000))  # rows of a prompt, and where they begin


DRY = Size("cpu", (20, 70), (2, 5), 2, 60, 100, 12, (1, 2), (20, 70), ((60, 0),))


def first_place(got: torch.Tensor, want: torch.Tensor) -> str:
    """'' where they are equal, else how many differ and where the first does."""
    other = (got.reshape(got.shape[0], -1) != want.reshape(got.shape[0], -1)).nonzero()
    return "" if not len(other) else f"{len(other)} of {got.numel()} differ, the first in row {int(other[0, 0])}, column {int(other[0, 1])}"


# ---- attention ------------------------------------------------------------------------------------------------------------------
def in_order(x: torch.Tensor, dim: int) -> torch.Tensor:
    """The columns of every head as fp8 K/V is summed: even ones before odd ones."""
    return x.unflatten(-1, (-1, dim // 2, 2)).transpose(-1, -2).flatten(-3).contiguous()


class Texts:
    """K/V and queries of some sequences at every position, once as fp8 and once as the bfloat16 numbers that these are."""

    def __init__(self, spec: AttnSpec, size: Size, page: int = 16):
        g = torch.Generator(device=size.device).manual_seed(5)
        made = lambda *shape: torch.randn(shape, generator=g, device=size.device)  # noqa: E731
        self.spec, self.size, self.page, self.ops = spec, size, page, TritonOps(size.device)
        length = max(size.contexts) + 64
        per = -(-length // page)
        self.table = (1 + torch.randperm(size.batch * per, generator=g, device=size.device)).view(size.batch, per).to(torch.int32)
        eight = [made(1 + size.batch * per, spec.kv_heads, page, spec.head_dim).to(FP8) for _ in range(2)]
        self.held = {FP8: eight, BF16: [in_order(eight[0].to(BF16), spec.head_dim), eight[1].to(BF16)]}
        scale = 0.5 if spec.head_dim >= 256 else 2.0
        self.queries = (made(size.batch, 256, spec.heads * spec.head_dim) * scale).to(BF16)  # by position modulo 256

    def asked(self, dtype: torch.dtype, spans: dict[int, tuple[int, int]], bound: int, tree: bool = False) -> tuple[torch.Tensor, KVView]:
        """Queries and K/V of a pass. spans: sequence -> (first position, rows)."""
        dev, counts = self.size.device, [c for _, c in spans.values()]
        at = torch.cat([torch.arange(s, s + c) for s, c in spans.values()]).to(dev)
        seq = torch.repeat_interleave(torch.arange(len(spans)), torch.tensor(counts)).to(dev)
        q = self.queries[torch.tensor(list(spans), device=dev)[seq], at % 256]
        start = torch.tensor([0, *counts]).cumsum(0).to(dev, torch.int32)
        table = self.table[torch.tensor(list(spans), device=dev)]
        keys, values = self.held[dtype]
        q = in_order(q, self.spec.head_dim) if dtype == BF16 else q
        kv = KVView(self.page, [keys], [values], {self.spec.group: table}, at, seq, start, max(counts), bound)
        if tree:  # rows one behind the other, said as paths
            row = torch.cat([torch.arange(c) for c in counts])[:, None]
            kv.paths = torch.minimum(row, torch.arange(max(counts))[None, :]).to(dev, torch.int32)
        return q, kv

    def run(self, dtype: torch.dtype, spans: dict[int, tuple[int, int]], bound: int, tree: bool = False) -> torch.Tensor:
        """[rows, heads * dim], as the ops choose their kernels."""
        q, kv = self.asked(dtype, spans, bound, tree)
        return self.ops.attend(q, self.spec, kv)


def attention_bits(name: str, size: Size) -> None:
    spec = SPECS[name] if size.device == "cuda" else AttnSpec(4, 1, 32, 0, True, window=SPECS[name].window and 40, scale=0.3)
    texts, last = Texts(spec, size), max(size.contexts) + 64
    starts = {b: size.contexts[b % len(size.contexts)] + 3 * (b // len(size.contexts)) for b in range(size.batch)}

    def spans(rows: int, back: bool, batch: int) -> dict[int, tuple[int, int]]:
        return {b: (max(0, starts[b] - rows + 1) if back else starts[b], rows) for b in range(batch)}

    Way = tuple[str, dict[int, tuple[int, int]], int, bool]
    ways: list[Way] = []
    for batch in (1, size.batch):
        for rows in (1, *size.rows):
            top = max(starts[b] for b in range(batch)) + rows
            ways += [(f"{rows} rows, batch {batch}", spans(rows, False, batch), top, False)]
            ways += [(f"{rows} rows before, batch {batch}", spans(rows, True, batch), last, False)] if rows > 1 else []
        deep = min(16, max(size.rows))
        ways += [(f"tree of {deep} rows, batch {batch}", spans(deep, False, batch), max(starts.values()) + deep, True)]
        far = {b: (max(0, starts[b] - size.prompt + 1), min(size.prompt, starts[b] + 1)) for b in range(batch)}
        ways += [(f"prompt of {size.prompt}, batch {batch}", far, max(starts.values()) + 1, False)]
    for b in range(1, size.batch):  # the other lengths, by themselves
        chunk = (max(0, starts[b] - size.prompt + 1), min(size.prompt, starts[b] + 1))
        ways += [(f"prompt at {starts[b]}", {b: chunk}, starts[b] + 1, False)]
    got: dict[tuple[torch.dtype, str], torch.Tensor] = {}
    for dtype in (BF16, FP8):
        alone: dict[tuple[int, int], torch.Tensor] = {}
        apart = []
        for name_of, span, bound, tree in ways:
            out = got[dtype, name_of] = texts.run(dtype, span, bound, tree)
            at = 0
            for b, (first, count) in span.items():
                for p in range(max(first, first + count - 48), first + count):
                    if (b, p) not in alone:
                        alone[b, p] = texts.run(dtype, {b: (p, 1)}, last)
                    other = first_place(out[at + p - first][None], alone[b, p])
                    if other:
                        apart.append(f"{name_of}: sequence {b}, position {p}: {other}")
                        break
                at += count
        kind = str(dtype).removeprefix("torch.")
        verdict(f"attention, {name}, {kind}: {len(ways)} passes, {len(alone)} rows as alone", not apart, "; ".join(apart[:6]))
    apart = [f"{way}: {first_place(got[FP8, way], got[BF16, way])}" for _, way in got if not torch.equal(got[FP8, way], got[BF16, way])]
    verdict(f"attention, {name}: fp8 = bfloat16 of the same numbers", not apart, "; ".join(apart[:4]))
    if size.device == "cuda" and not torch.isfinite(got[FP8, ways[0][0]].float()).all():
        FAILED.append("not finite")


def written_bits(size: Size) -> None:
    """What a pass of many rows stores is what each of them stores alone."""
    dev, page, rows = size.device, 16, 512 if size.device == "cuda" else 20
    pdl = TritonOps(dev).pdl
    for name, given in SPECS.items():
        spec = replace(given, norm_v=True) if dev == "cuda" else AttnSpec(4, 2, 32, 0, True, scale=0.3)
        g = torch.Generator(device=dev).manual_seed(6)
        qkv = (torch.randn((rows, spec.qkv_rows), generator=g, device=dev) * 3).to(BF16)
        norm = torch.rand(spec.head_dim, generator=g, device=dev) + 0.5
        at = torch.arange(rows, device=dev)
        cos, sin = rope.rope_angles(at + 700, torch.rand(spec.head_dim // 2, generator=g, device=dev), pdl)

        def stored(each: int, dtype: torch.dtype, spec=spec, qkv=qkv, norm=norm, at=at, cos=cos, sin=sin) -> torch.Tensor:
            shape = (rows // page + 1, spec.kv_heads, page, spec.head_dim)
            keys, values = (torch.zeros(shape, dtype=dtype, device=dev) for _ in range(2))
            table = torch.arange(shape[0], dtype=torch.int32, device=dev)[None]
            for i in range(0, rows, each):
                some = slice(i, min(i + each, rows))
                n = some.stop - i
                start = torch.tensor([0, n], dtype=torch.int32, device=dev)
                kv = KVView(page, [keys], [values], {spec.group: table}, at[some], torch.zeros_like(at[:n]), start, n, rows)
                rope.rope_write(qkv[some], cos[some], sin[some], norm, norm, spec, kv, pdl)
            return torch.cat([t.transpose(1, 2).float().reshape(-1, spec.kv_heads * spec.head_dim) for t in (keys, values)])

        for dtype in (BF16, FP8):
            alone = stored(1, dtype)
            notes = {each: first_place(stored(each, dtype), alone) for each in (5, 17, 40, 256, rows)}
            bad = "; ".join(f"{each} rows: {note}" for each, note in notes.items() if note)
            verdict(f"written, {name}, {str(dtype).removeprefix('torch.')}, passes of {', '.join(map(str, notes))} rows", not bad, bad)


# ---- models -----------------------------------------------------------------------------------------------------------------------
def model_bits(name: str, k: int, size: Size) -> None:
    for kv in ("auto", "fp8"):
        if size.device == "cuda":
            rig = Rig.of(name, 12 if name == "E2B" else 6, slots=size.batch, context=1280, compiled=True, kv=kv)
        else:
            from tests.engines import VARIANTS, assistant  # tiny shapes

            raw = VARIANTS["edge" if name == "E2B" else "dense"]
            rig = Rig(raw, assistant(raw, name == "E2B"), ReferenceOps(), "cpu", torch.float32, slots=size.batch, context=512, kv=kv)
        seqs = rig.open(size.batch, size.context, 160)
        alone: tuple[torch.Tensor, torch.Tensor] | None = None
        for batch in (1, size.batch):
            tokens, logits = plain_run(rig, seqs[:batch], size.context, size.steps)
            what = f"{name}, K/V {kv}, batch {batch}"
            if alone is None:
                alone = tokens, logits
            else:
                note = first_place(logits[0], alone[1][0])
                verdict(f"{what}: the first sequence as alone, plain", not note or size.device == "cpu", note)
            got = speculative_run(rig, seqs[:batch], size.context, k, tokens, logits)
            ok = got.equal_tokens and (got.equal_logits or size.device == "cpu")  # torch's own products round by the number of rows
            verdict(f"{what}, K = {k} = plain", ok, f"{got.accepted:.2f} accepted a cycle, first difference {got.first_difference}")
            if k == 16 and batch == 1:
                got = tree_run(rig, seqs[:1], size.context, TREE, tokens, logits)
                ok = got.equal_tokens and (got.equal_logits or size.device == "cpu")
                verdict(f"{what}, tree = plain", ok, f"{got.accepted:.2f} accepted a cycle, first difference {got.first_difference}")
            if k == 4:  # the drafter itself reads this K/V
                ms = rig.graph(seqs[:batch], k, size.context, size.context + 128, eager=size.device == "cpu")
                ms.graph.replay()
                say(f"  ..   {what}: the drafter guesses {ms.tokens[0].tolist()[:6]}")
        rig.close(seqs)
        rig.free()
        collect()


# ---- times ------------------------------------------------------------------------------------------------------------------------
def times(size: Size) -> None:
    """Sequences in turn, so that K/V comes from memory."""
    cases = {f"{n} x {rows} at {far}": (n, far, rows) for far in size.far for n in size.timed for rows in (1, 5)}
    cases |= {f"{rows} rows at {first}": (1, first, rows) for rows, first in size.chunks}
    calls: dict[tuple[str, str, str], Callable[[int], torch.Tensor]] = {}
    most = max(size.timed)
    for name in ("E2B sliding", "E2B full", "31B sliding", "31B full"):
        spec = SPECS[name] if size.device == "cuda" else AttnSpec(4, 1, 32, 0, True, scale=0.3)
        texts = Texts(spec, replace(size, batch=most, contexts=(max(*size.far, *(sum(chunk) for chunk in size.chunks)),)))
        for what, (count, first, rows) in cases.items():
            turns = [{b + i * count: (first, rows) for b in range(count)} for i in range(min(8, most // count))]
            for kind, dtype in (("bf16", BF16), ("fp8", FP8)):
                given = [texts.asked(dtype, spans, first + rows) for spans in turns]
                calls[name, what, kind] = lambda i, given=given, spec=spec, ops=texts.ops: ops.attend(
                    given[i % len(given)][0], spec, given[i % len(given)][1]
                )

    def compiled(call: Callable[[int], torch.Tensor]) -> bool:
        try:
            call(0)
        except triton.runtime.OutOfResources:
            return False
        return True

    with ThreadPoolExecutor(16 if size.device == "cuda" else 1) as pool:
        fits = dict(zip(calls, pool.map(compiled, calls.values())))
    say(f"  {len(calls)} kernels compiled")
    for name, what in dict.fromkeys((n, w) for n, w, _ in calls):
        mine = {kind: call for (n, w, kind), call in calls.items() if (n, w) == (name, what)}
        line = [f"{kind} {graph_us(c, 8, 4):.1f}" if fits[name, what, kind] else f"{kind} does not fit" for kind, c in mine.items()]
        say(f"  {name}, {what}, us: " + "; ".join(line))


def steps(size: Size) -> None:
    """Milliseconds of whole steps of E2B, plain and with four drafts, by K/V."""
    for kv in ("auto", "fp8"):
        rig = Rig.of("E2B", slots=8 * size.batch, context=3 * 1024 + 256, compiled=True, kv=kv)
        seqs = rig.open(8 * size.batch, 3000, 64)
        for batch, k in ((1, 0), (size.batch, 0), (size.batch, 4), (8 * size.batch, 0), (8 * size.batch, 4)):
            ms = rig.graph(seqs[:batch], k, 3000, 3100).time(10)
            say(f"  E2B, K/V {kv}, {rig.store.bytes() / 2**30:.2f} GiB for {8 * size.batch} x 3,328: batch {batch}, K = {k}: {ms:.3f} ms")
        rig.close(seqs)
        rig.free()


def jobs() -> dict[str, Callable[[Size], None]]:
    out: dict[str, Callable[[Size], None]] = {f"attention:{name}": lambda size, name=name: attention_bits(name, size) for name in SPECS}
    out["written"] = written_bits
    for name in ("E2B", "31B"):
        for k in (16, 8, 4, 1):
            out[f"model:{name}:{k}"] = lambda size, name=name, k=k: model_bits(name, k, size)
    return out | {"times": times, "steps": steps}


def parent(seconds: float, dry: bool) -> None:
    """All jobs beside each other, the times behind them; what is late is ended and named."""
    began, bad, lock = time.perf_counter(), [], threading.Lock()

    def one(job: str, left: float) -> None:
        command = [sys.executable, str(Path(__file__)), "--job", job, *(["--dry"] if dry else [])]
        done = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
        timer = threading.Timer(left, done.kill)
        timer.start()
        assert done.stdout is not None
        tail: list[str] = []
        for line in done.stdout:
            tail.append(line)
            if line.startswith("["):
                print(f"{time.perf_counter() - began:6.1f} {line.split(']', 1)[1].rstrip()}", flush=True)
        code = done.wait()
        timer.cancel()
        if code:
            with lock:
                bad.append(job)
            print(f"{time.perf_counter() - began:6.1f} {job}: exit code {code}\n{''.join(tail[-12:])}", flush=True)

    names = [name for name in jobs() if name not in ("times", "steps")]
    threads = [threading.Thread(target=one, args=(name, seconds)) for name in names]
    if dry:  # two cores
        for thread in threads:
            thread.start()
            thread.join()
    else:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        one("times", max(20.0, seconds - (time.perf_counter() - began)))
    print("FAILED: " + ", ".join(bad) if bad else "all equal", f"({time.perf_counter() - began:.0f} s)", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--job", choices=list(jobs()))
    parser.add_argument("--seconds", type=float, default=150.0)
    parser.add_argument("--dry", action="store_true")
    args = parser.parse_args()
    if args.job is None:
        parent(args.seconds, args.dry)
        return
    with torch.inference_mode():
        jobs()[args.job](DRY if args.dry else Size())
    sys.exit(1 if FAILED else 0)


if __name__ == "__main__":
    main()
