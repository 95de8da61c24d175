"""The GPU benchmark: what is measured of each size, in which order, and how it is written down.

Every size is built, measured and freed before the next. A cell that does not fit the device says so and costs nothing
else. Whatever rests on assumed acceptance carries "synthetic" in its name, in the table, in the JSON and in the plots.
"""

from __future__ import annotations

import json
import math
import platform
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NotRequired, TypedDict

import torch

import gpu_peer
from gpu_rig import H200_BYTES_PER_S, PUBLISHED, SIZES, Rig, Synthetic, collect, plain_run, speculative_run, time_ms
from outrider.bench.predict import chance
from outrider.cache.store import SeqCache
from outrider.engine.graph_dispatch import bound_of
from outrider.models.builtin_configs import BUILTIN_CONFIGS
from outrider.ops.backend import Capabilities
from outrider.types import MAX_DRAFT, OutriderError

Say = Callable[[str], None]
CYCLES = 40  # of a synthetic run
# of the prefill measurement
PROMPT = 4096
CHUNK = 1024
BF16_FLOPS = 989e12  # an H200's dense bf16 rate, as published
# ms per token, cycle / AR at K = 4, 8, 16, and how many times faster than transformers' plain and assisted steps
TARGETS: Mapping[str, tuple[float, Mapping[int, float], float | None, float | None]] = {
    "31B": (16.0, {4: 1.10, 8: 1.18, 16: 1.35}, 6.0, 7.0),
    "12B": (7.5, {4: 1.15, 8: 1.25, 16: 1.45}, None, None),
    "26B-A4B": (3.5, {}, 25.0, None),
    "E4B": (3.5, {4: 1.25, 8: 1.45, 16: 1.8}, 25.0, None),
    "E2B": (2.2, {4: 1.25, 8: 1.45, 16: 1.8}, 30.0, None),
}
SPEEDUPS = {"31B": {4: 3.5, 8: 4.7, 16: 5.6}}  # over our own plain decoding, at the published acceptance


class Cycle(TypedDict):
    ms: float
    over_ar: float
    floor_ms: float


class PeerRow(gpu_peer.Timed):
    """transformers at the same batch and context."""

    ar_ms: float | None


class Record(TypedDict):
    """One (size, batch, context). With `error` the figures are missing; a size that could not be built has no batch
    either."""

    size: str
    batch: NotRequired[int]
    context: NotRequired[int]
    error: NotRequired[str]
    first_capture_s: NotRequired[float]
    ar_ms: NotRequired[float]
    floor_ms: NotRequired[float]
    bytes: NotRequired[int]
    tb_per_s: NotRequired[float]
    share_of_floor: NotRequired[float]
    tokens_per_s: NotRequired[float]
    cycles: NotRequired[dict[int, Cycle]]  # by K
    synthetic: NotRequired[dict[int, dict[str, float]]]  # by K, at assumed acceptance
    equal: NotRequired[dict[int, bool]]  # by K: bitwise, to plain decoding
    memory_beside_gib: NotRequired[float]
    prefill: NotRequired[dict[str, float]]
    hf: NotRequired[PeerRow]


@dataclass(frozen=True)
class GpuBenchSettings:
    sizes: tuple[str, ...] = ("E2B", "E4B", "12B", "26B-A4B", "31B")
    ks: tuple[int, ...] = (0, 1, 2, 4, 8, 16)
    batches: tuple[int, ...] = (1, 2, 4, 8, 16)
    contexts: tuple[int, ...] = (256, 4096, 32768)
    accept: tuple[float, ...] | None = None  # None: as published; one: the share accepted; more: chances by position
    against_hf: bool = False
    equal_tokens: int = 32  # compared bit for bit at full depth; 0: none
    prefill: bool = False
    quick: bool = False
    repeats: int = 20

    def __post_init__(self) -> None:
        for size in self.sizes:
            if size not in SIZES:
                raise OutriderError(f"unknown size {size!r}; known: {', '.join(SIZES)}")
        if any(not 0 <= k <= MAX_DRAFT for k in self.ks):
            raise OutriderError(f"--k takes numbers in 0..{MAX_DRAFT}, got {list(self.ks)}")
        most = Capabilities().graph_batches[-1]
        if any(not 1 <= b <= most for b in self.batches):
            raise OutriderError(f"--batch takes numbers in 1..{most}, got {list(self.batches)}")
        if any(c < 2 for c in self.contexts):
            raise OutriderError("--context takes numbers from 2 on")
        if self.accept is not None and any(not 0.0 <= a <= 1.0 for a in self.accept):
            raise OutriderError(f"--accept takes shares in 0..1, got {list(self.accept)}")

    def chances(self, k: int) -> list[float] | None:
        """By position, of k drafted tokens; None: nothing is assumed for this k."""
        if self.accept is None:
            return [chance(PUBLISHED[k], k)] * k if k in PUBLISHED else None
        return [chance(self.accept[0], k)] * k if len(self.accept) == 1 else [*self.accept, *[self.accept[-1]] * k][:k]


def quick(against_hf: bool = True) -> GpuBenchSettings:
    """The published cells: batch 1 at 1k for every size, and batches for the mixture of experts."""
    return GpuBenchSettings(
        ks=(0, 4, 8, 16), batches=(1,), contexts=(1024,), against_hf=against_hf, prefill=True, quick=True, repeats=12
    )


# ---- measuring
def run(
    settings: GpuBenchSettings,
    say: Say,
    make: Callable[..., Rig] = Rig.of,
    save: Callable[[list[Record]], None] | None = None,
) -> list[Record]:
    """A record for each (size, batch, context), in order. `save` is called after every size with all so far."""
    records: list[Record] = []
    for size in settings.sizes:
        try:
            found = measure_size(size, settings, say, make)
        except Exception as error:  # the other sizes are still worth having
            found = [
                {
                    "size": size,
                    "error": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:300],
                }
            ]
            say(f"{size}: {found[0]['error']}")
        collect()
        records += found
        if settings.against_hf and found and "error" not in found[0]:
            batches = tuple(sorted({r["batch"] for r in found}))
            context = found[0]["context"]
            peer = gpu_peer.measure(
                BUILTIN_CONFIGS[SIZES[size]], BUILTIN_CONFIGS[SIZES[size] + "-assistant"], context, batches
            )
            say(f"{size} transformers: {peer}")
            for record in found:
                if record["context"] == context:
                    mtp = peer["mtp_ms"] if record["batch"] == 1 else None
                    record["hf"] = {**peer, "ar_ms": peer["ar_ms"].get(record["batch"]), "mtp_ms": mtp}
        if save is not None:
            save(records)
    return records


@torch.inference_mode()
def measure_size(size: str, settings: GpuBenchSettings, say: Say, make: Callable[..., Rig]) -> list[Record]:
    began = time.perf_counter()
    batches = (1, 4, 8) if settings.quick and size == "26B-A4B" else settings.batches
    longest = max(settings.contexts)
    room = CYCLES * (MAX_DRAFT + 1) + 64
    records = []
    with make(size, slots=1, context=longest + room, tokens=2 * PROMPT, compiled=True) as rig:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        say(f"{size}: built in {time.perf_counter() - began:.1f} s, {allocated() / 2**30:.1f} GiB")
        for context in settings.contexts:
            for batch in batches:
                record: Record = {"size": size, "batch": batch, "context": context}
                records.append(record)
                try:
                    prompt = settings.prefill and batch == 1
                    slots = batch + prompt
                    rig.resize(
                        slots, max(context, PROMPT) + room, slots * (context + room + 64) + (PROMPT if prompt else 0)
                    )
                    measure_cell(rig, record, settings, say)
                    if prompt:
                        record["prefill"] = measure_prefill(rig)
                        say(f"{size} prefill: {record['prefill']}")
                except torch.OutOfMemoryError:
                    record["error"] = "does not fit the device"
                    say(f"{size} batch {batch} context {context}: {record['error']}")
    return records


def measure_cell(rig: Rig, record: Record, settings: GpuBenchSettings, say: Say) -> None:
    size = record["size"]
    batch = record["batch"]
    context = record["context"]
    ks = (0, 4) if settings.quick and batch > 1 else settings.ks
    beside = allocated()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    seqs = rig.open(batch, context, CYCLES * (MAX_DRAFT + 1) + 32)
    bound = bound_of(context + MAX_DRAFT + 2)
    kv = batch * rig.kv_bytes(context)
    need = rig.weight_bytes(batch) + kv
    plain = rig.graph(seqs, 0, context, bound)
    ar = plain.time(settings.repeats)
    record |= {
        "first_capture_s": round(plain.capture_s, 2), "ar_ms": ar, "floor_ms": need / H200_BYTES_PER_S * 1e3,
        "bytes": need,
        "tb_per_s": need / ar * 1e-9, "share_of_floor": need / H200_BYTES_PER_S * 1e3 / ar,
        "tokens_per_s": batch / ar * 1e3,
        "cycles": {}, "synthetic": {},
    }  # fmt: skip
    del plain
    say(
        f"{size} batch {batch} context {context}: AR {ar:.3f} ms, floor {record['floor_ms']:.3f}, "
        f"{record['tb_per_s']:.2f} TB/s"
    )
    for k in ks:
        if not k:
            continue
        run = rig.graph(seqs, k, context, bound)
        ms = run.time(settings.repeats)
        del run
        least = rig.weight_bytes(batch * (k + 1)) + kv + k * rig.draft_bytes()
        record["cycles"][k] = {"ms": ms, "over_ar": ms / ar, "floor_ms": least / H200_BYTES_PER_S * 1e3}
        line = f"{size} batch {batch} context {context} K={k}: cycle {ms:.3f} ms = {ms / ar:.3f} x AR"
        chances = settings.chances(k)
        if chances is not None:
            record["synthetic"][k] = found = synthetic_run(rig, seqs, k, context, bound, chances, ar)
            line += (
                f"; synthetic acceptance {found['share']:.2f}: {found['tokens_per_s']:.0f} tokens/s, "
                f"{found['speedup']:.2f} x AR"
            )
        say(line)
    if torch.cuda.is_available():
        record["memory_beside_gib"] = (torch.cuda.max_memory_reserved() - beside) / 2**30
    if settings.equal_tokens and batch in (1, 8):
        tokens, logits = plain_run(rig, seqs, context, settings.equal_tokens)
        record["equal"] = {}
        for k in (k for k in ks if k):
            same = speculative_run(rig, seqs, context, k, tokens, logits)
            record["equal"][k] = same.equal_tokens and same.equal_logits
        say(
            f"{size} batch {batch}: bitwise equal to plain decoding over {settings.equal_tokens} tokens: "
            f"{record['equal']}"
        )
    rig.close(seqs)


def synthetic_run(
    rig: Rig, seqs: list[SeqCache], k: int, context: int, bound: int, chances: list[float], ar_ms: float
) -> dict[str, float]:
    """Tokens per second when the sequences really move on, at an assumed acceptance."""
    assumed = Synthetic(chances, len(seqs), rig.device)
    cycles = min(CYCLES, max(1, (bound - context) // (k + 1) - 4))
    run = rig.graph(seqs, k, context, bound, advance=True, assumed=assumed)
    for _ in range(3):
        run.graph.replay()
    start = run.length.sum()

    def on() -> None:
        for _ in range(cycles):
            run.graph.replay()

    ms = time_ms(on, 1, 0)
    tokens = int(run.length.sum() - start)
    per_cycle = tokens / cycles / len(seqs)
    rate = tokens / ms * 1e3
    return {
        "share": (per_cycle - 1) / k, "expected_share": (assumed.expected - 1) / k, "tokens_per_cycle": per_cycle,
        "cycle_ms": ms / cycles,
        "tokens_per_s": rate, "speedup": rate / (len(seqs) / ar_ms * 1e3),
        "speedup_at_expected": assumed.expected * ar_ms / (ms / cycles),
    }  # fmt: skip


def measure_prefill(rig: Rig) -> dict[str, float]:
    """A prompt of 4096 tokens in chunks of 1024, and its first cycle."""
    seq, _ = rig.store.open()
    ids = torch.randint(3, rig.config.vocab_size, (CHUNK,), device=rig.device)

    def whole() -> None:
        for start in range(0, PROMPT, CHUNK):
            rig.prefill(seq, ids, start, last=True)

    for end in range(CHUNK, PROMPT + 1, CHUNK):
        if not rig.store.reserve(seq, end):
            raise OutriderError(f"no room for a prompt of {PROMPT} tokens")
        rig.store.commit(seq, max(0, end - CHUNK))
        rig.prefill(seq, ids, end - CHUNK, last=True)  # the warm-up
    ms = time_ms(
        whole, 2, 0
    )  # early sliding pages were given back: what is written there now is nobody's, at the same cost
    rig.store.close(seq)
    moe = rig.config.moe
    params = 0.0
    last = rig.config.kv_layers[-1]
    for name, w in rig.weights.items():
        layer = int(name.split(".")[1]) if name.startswith("layers.") else -1
        through = layer < last or (
            layer == last and name.endswith(".qkv")
        )  # all rows: the rest is for the last one alone
        if len(w.shape) >= 2 and name not in ("embed", "head", "ple_embed") and through:
            params += math.prod(w.shape) * (moe.top_k / moe.experts if moe is not None and ".experts_" in name else 1.0)
    rate = 2 * params * PROMPT / ms * 1e3
    return {
        "tokens": PROMPT,
        "ms": ms,
        "tokens_per_s": PROMPT / ms * 1e3,
        "tflop_per_s": rate * 1e-12,
        "share_of_peak": rate / BF16_FLOPS,
    }


def allocated() -> int:
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else 0


# ---- writing down
def verdict(value: float, limit: float | None, least: bool = False) -> str:
    """The value, and whether the target is met."""
    if limit is None:
        return f"{value:.2f}"
    return (
        f"{value:.2f} {'ok' if (value >= limit if least else value <= limit) else 'MISSED'} "
        f"({'≥' if least else '≤'} {limit:g})"
    )


def table(records: Sequence[Record]) -> list[list[str]]:
    """Head and rows. Targets are those of batch 1 at 1k."""
    ks = sorted({k for r in records for k in r.get("cycles", {})})
    head = ["size", "batch", "context", "AR ms", "floor ms", "TB/s", "of floor", *(f"K={k} / AR" for k in ks)]
    head += [
        "synthetic speed-up (" + ", ".join(f"K={k}" for k in ks) + ")",
        "HF AR",
        "HF MTP cycle",
        "equal",
        "beside GiB",
    ]
    rows = [head]
    for r in records:
        if "ar_ms" not in r:
            rows.append(
                [
                    r["size"],
                    *(str(r.get(n, "")) for n in ("batch", "context")),
                    str(r.get("error", "")),
                    *[""] * (len(head) - 4),
                ]
            )
            continue
        aim = TARGETS.get(r["size"]) if r["batch"] == 1 and r["context"] == 1024 else None
        ups = SPEEDUPS.get(r["size"], {}) if aim else {}
        row = [
            r["size"],
            str(r["batch"]),
            str(r["context"]),
            verdict(r["ar_ms"], aim[0] if aim else None),
            f"{r['floor_ms']:.2f}",
        ]
        row += [f"{r['tb_per_s']:.2f}", f"{r['share_of_floor']:.0%}"]
        row += [
            verdict(r["cycles"][k]["over_ar"], aim[1].get(k) if aim else None) if k in r["cycles"] else "" for k in ks
        ]
        row.append(
            ", ".join(
                verdict(r["synthetic"][k]["speedup_at_expected"], ups.get(k), True) for k in ks if k in r["synthetic"]
            )
        )
        hf = r.get("hf")
        four = r["cycles"].get(4)
        pairs = (
            (hf and hf["ar_ms"], r["ar_ms"], aim and aim[2]),
            (hf and hf["mtp_ms"], four and four["ms"], aim and aim[3]),
        )
        for theirs, ours, limit in pairs:
            row.append(
                f"{theirs:.1f} ms, ours {verdict(theirs / ours, limit, True)} x faster" if theirs and ours else ""
            )
        equal = r.get("equal", {})
        row.append("" if not equal else "yes" if all(equal.values()) else f"NO {equal}")
        row.append(f"{r['memory_beside_gib']:.2f}" if "memory_beside_gib" in r else "")
        rows.append(row)
    return rows


def text_table(rows: Sequence[Sequence[str]]) -> str:
    width = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, width)).rstrip() for row in rows)


def machine() -> str:
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or platform.machine()
    return f"{name}, torch {torch.__version__}"


def commit() -> str:
    try:
        return subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def write(folder: Path, records: Sequence[Record], command: str) -> list[Path]:
    """gpu.jsonl (one line a record, as in benchmarks/history) and gpu.txt."""
    folder.mkdir(parents=True, exist_ok=True)
    stamp = {
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "commit": commit(),
        "machine": machine(),
        "command": command,
    }
    lines = folder / "gpu.jsonl"
    text = folder / "gpu.txt"
    lines.write_text("".join(json.dumps({**stamp, "figures": r}) + "\n" for r in records), encoding="utf-8")
    text.write_text(f"{stamp['machine']}, {stamp['date']}\n{text_table(table(records))}\n", encoding="utf-8")
    return [lines, text]
