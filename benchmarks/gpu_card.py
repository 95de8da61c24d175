"""One call of the card: the parts below one after the other, each in processes of its own with a time limit.

    PYTHONPATH=src:.:benchmarks python3 benchmarks/gpu_card.py --out DIR [--together] [--seconds 390] [--dry]
        [--parts checks,kernels,lora,formats,exact,first,sound,cells,adapters,smollm2]

The first five time nothing, and with --together all parts named run side by side.

- checks: the checks of gpu_suite.py in three processes, without the warm-up, which takes 110 GB.
- kernels: gpu_certify.py. lora: tests/gpu/gpu_lora.py check of five sizes. formats: gpu_formats.py.
- exact: gpu_sound.py's encoder and bits. sound: what a clip costs.
- first: gpu_first.py, 12B in bf16 and int4, with whatever is compiled so far and once more.
- cells: engine_throughput.py. adapters: tests/gpu/gpu_lora.py cost 31B:int4.
- smollm2: the two checks that need its file (OUTRIDER_SMOLLM2).

Everything that a process prints goes to the screen and to DIR/log.txt with the time; its JSON lines and verdicts go to
DIR/results.jsonl at once, so a run that is cut short leaves what it had. --dry: without a GPU, tiny models, to find
typing errors before they cost time of the card. A process past its limit is killed, and the next part runs. Failing is
not the end: the last line says what failed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BEGAN = time.perf_counter()
LOCK = threading.Lock()
UNTIMED = ("checks", "kernels", "lora", "formats", "exact")  # their processes share the card in any case
PARTS = (*UNTIMED, "first", "sound", "cells", "adapters", "smollm2")
SIZES = ("E2B", "31B", "26B-A4B", "12B", "31B:int4")


@dataclass(frozen=True)
class Job:
    part: str
    name: str
    command: list[str]  # after the interpreter
    seconds: float  # limit
    needs: float = 0.0  # seconds that must be left, or it is not begun
    niceness: int = 0


class Log:
    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.text = (folder / "log.txt").open("a", encoding="utf-8")
        self.results = (folder / "results.jsonl").open("a", encoding="utf-8")
        self.failed: list[str] = []

    def line(self, job: str, text: str) -> None:
        now = time.perf_counter() - BEGAN
        with LOCK:
            shown = f"[{now:6.1f}] {job}: {text}"
            print(shown[:600], flush=True)
            print(shown, file=self.text, flush=True)

    def result(self, job: Job, record: dict[str, object]) -> None:
        with LOCK:
            print(json.dumps({"part": job.part, "job": job.name, **record}), file=self.results, flush=True)


def suite(name: str, match: str, seconds: float, dry: bool) -> Job:
    command = ["benchmarks/gpu_suite.py", "--only", "checks", "--match", match, "--out", mkdtemp()]
    return Job("checks", name, [*command, "--seconds", str(0 if dry and name == "parity" else seconds)], seconds + 25)


def check_jobs(dry: bool) -> list[Job]:
    """Run side by side. The order within a process is the suite's own."""
    sizes = ("E2B", "E4B", "12B", "26B-A4B", "31B")
    rows = ",".join(f"rows alone {size}" for size in sizes)
    if dry:
        return [suite("engine", "one launch", 60, dry), suite("rows", "rows alone E2B", 60, dry)]
    return [
        suite("engine", "one launch,engine tokens,64 mixed,preemption,memory", 260, dry),
        suite("rows", f"{rows},crowd,batches", 260, dry),
        suite("parity", "equality,parity", 260, dry),
    ]


def first_jobs(dry: bool) -> list[Job]:
    jobs = []
    for mode in ("bf16", "int4"):
        quantize = [] if mode == "bf16" else ["--quantize", mode]
        dry_flag = ["--dry"] if dry else []
        for turn in ("first start", "second start"):
            limit = 150 if turn == "first start" else 45
            command = ["benchmarks/gpu_first.py", "12B", *([] if dry else quantize), "--seconds", str(limit - 10)]
            jobs.append(Job("first", f"12B {mode}, {turn}", command + dry_flag, limit, 20))
    return jobs[:1] if dry else jobs


def tiny_configs() -> str:
    """A folder with tiny models' configurations, for a dry run."""
    sys.path[:0] = [str(ROOT / "src"), str(ROOT), str(ROOT / "benchmarks")]
    from tests.gpu.place import tiny

    from gpu_rig import SIZES
    from outrider.models.builtin_configs import BUILTIN_CONFIGS

    root = Path(mkdtemp())
    for name in (SIZES["E2B"], SIZES["E2B"] + "-assistant"):
        folder = root / name.rpartition("/")[2]
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(tiny(dict(BUILTIN_CONFIGS[name]))))
    return str(root)


def cell_jobs(dry: bool) -> list[Job]:
    """The cells of docs/gpu-measured.md, the most wanted first."""
    if dry:
        command = ["benchmarks/engine_throughput.py", tiny_configs(), "E2B"]
        return [Job("cells", f"E2B K={k}", [*command, str(k), "3.88", "1,4,4", "8", "40"], 90) for k in (4, 0)]
    jobs = []
    for size, k, batches, tokens, limit in (
        ("31B", 4, "1,8,32,64,64,64", 48, 210),
        ("E2B", 4, "1,8,32,64", 96, 80),
        ("31B", 0, "1,8,32,64", 48, 170),
        ("26B-A4B", 4, "1,8,32,64", 64, 120),
        ("26B-A4B", 0, "1,8,32,64", 64, 100),
        ("E2B", 0, "1,8,32,64", 96, 70),
        ("31B:int4", 4, "1,8,32", 48, 120),
        ("31B:int4", 0, "1,8,32", 48, 100),
    ):
        command = ["benchmarks/engine_throughput.py", "google", size, str(k), "3.88" if k else "1", batches]
        jobs.append(Job("cells", f"{size} K={k}", [*command, str(tokens)], limit, 25))
    return jobs


def adapter_jobs(dry: bool) -> list[Job]:
    if dry:
        return [Job("adapters", "plan", ["tests/gpu/gpu_lora.py", "plan", "31B:int4"], 60)]
    command = ["tests/gpu/gpu_lora.py", "cost", "31B:int4", "--cycles", "1x0,8x4,8x0,1x4"]
    return [Job("adapters", "cost 31B:int4", command, 110, 30)]


def lora_jobs(dry: bool) -> list[Job]:
    if dry:
        return [Job("lora", "plan", ["tests/gpu/gpu_lora.py", "plan", *SIZES], 60)]
    return [Job("lora", f"check {size}", ["tests/gpu/gpu_lora.py", "check", size], 300) for size in SIZES]


def kernel_jobs(dry: bool) -> list[Job]:
    return [Job("kernels", "certification", ["benchmarks/gpu_certify.py", *(["--dry"] if dry else [])], 300)]


def format_jobs(dry: bool) -> list[Job]:
    command = ["benchmarks/gpu_formats.py", "--jobs", "16", "--limit", "320"]
    if dry:
        command = ["benchmarks/gpu_formats.py", "--dry", "--jobs", "1", "--only", "Q4_0", "--models", "Llama"]
    return [Job("formats", "formats", command, 330, niceness=10)]


def sound_jobs(dry: bool, parts: str) -> list[Job]:
    command = ["benchmarks/gpu_sound.py", "--parts", parts]
    if dry:
        command += ["--device", "cpu", "--model", "google/gemma-4-E2B-it:7", "--tokens", "4", "--repeats", "1"]
    return [Job("sound", parts, command, 300)]


def smollm2_jobs(dry: bool) -> list[Job]:
    return [suite("smollm2", "smollm2,block drafter", 60, dry)]


def jobs_of(part: str, dry: bool) -> list[Job]:
    if part == "exact":
        return sound_jobs(dry, "encoder,exact")
    if part == "sound":
        return sound_jobs(dry, "cost")
    makers = {"checks": check_jobs, "kernels": kernel_jobs, "lora": lora_jobs, "formats": format_jobs}
    makers |= {"first": first_jobs, "cells": cell_jobs, "adapters": adapter_jobs, "smollm2": smollm2_jobs}
    return makers[part](dry)


def run(job: Job, log: Log, deadline: float, threads: int | None = None) -> None:
    left = deadline - time.perf_counter()
    if left < max(job.needs, 3.0):
        log.line(job.name, f"left out: {left:.0f} s left")
        log.result(job, {"left_out": True})
        return
    limit = min(job.seconds, left)
    env = {**os.environ, "PYTHONUNBUFFERED": "1"}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(ROOT), str(ROOT / "benchmarks")])
    if threads is not None:
        env["OMP_NUM_THREADS"] = str(threads)
    log.line(job.name, f"begins, at most {limit:.0f} s: {' '.join(job.command)}")
    pipes: dict[str, Any] = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    command = ["nice", "-n", str(job.niceness), sys.executable, *job.command]
    process = subprocess.Popen(command, cwd=ROOT, env=env, start_new_session=True, **pipes)

    def stop() -> None:  # its children too: they hold its output open
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

    alarm = threading.Timer(limit, stop)
    alarm.start()
    began = time.perf_counter()
    assert process.stdout is not None
    for line in process.stdout:
        line = line.rstrip()
        log.line(job.name, line)
        if line.startswith("{"):
            try:
                log.result(job, json.loads(line))
            except ValueError:
                log.line(job.name, "not JSON")
        elif "] ok  " in line or "] FAIL" in line or " -> " in line or "last bit" in line or "WRONG" in line:
            log.result(job, {"line": line})
    code = process.wait()
    alarm.cancel()
    seconds = time.perf_counter() - began
    log.line(job.name, f"ended with {code} after {seconds:.1f} s")
    log.result(job, {"exit": code, "seconds": round(seconds, 1)})
    if code:
        log.failed.append(f"{job.name} ({'killed at its limit' if code == -9 else code})")
    if "--out" in job.command:
        failures = Path(job.command[job.command.index("--out") + 1]) / "failures.txt"
        for line in failures.read_text().splitlines() if failures.exists() else ():
            log.line(job.name, line)


def run_together(jobs: list[Job], log: Log, deadline: float) -> None:
    """Each has its share of the cores. Beside others with 16 OpenMP threads each, a check of adapters took over 110 s
    for what takes 6 with two."""
    share = max(1, (os.cpu_count() or 1) // len(jobs))
    threads = [threading.Thread(target=run, args=(job, log, deadline, share)) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/gpu_card"))
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--together", action="store_true", help="all parts side by side: they must time nothing")
    parser.add_argument("--seconds", type=float, default=390)
    parser.add_argument("--dry", action="store_true")
    args = parser.parse_args()
    parts = args.parts.split(",")
    unknown = [part for part in parts if part not in PARTS]
    if unknown:
        parser.error(f"unknown parts {', '.join(unknown)}; there are {', '.join(PARTS)}")
    log = Log(args.out)
    deadline = BEGAN + args.seconds
    groups = [jobs_of(part, args.dry) for part in parts]
    if args.together:
        run_together([job for group in groups for job in group], log, deadline)
    else:
        for part, group in zip(parts, groups, strict=True):
            if part in UNTIMED:
                run_together(group, log, deadline)
            else:
                for job in group:
                    run(job, log, deadline)
    log.line("card", "FAILED: " + "; ".join(log.failed) if log.failed else "nothing failed")
    raise SystemExit(1 if log.failed else 0)


if __name__ == "__main__":
    main()
