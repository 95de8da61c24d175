"""Everything a GPU must show, in one command without pytest: the checks of tests/gpu, then `bench-gpu --quick`.

    PYTHONPATH=src:. python3 benchmarks/gpu_suite.py --out DIR [--only checks|bench] [--match TEXT] [--seconds 330]

Writes suite.txt, suite.json, gpu.jsonl, gpu.txt (and gpu.png) into DIR as it goes, so that a run that is cut short
leaves what it had. Nothing new is begun after --seconds.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "src"), str(Path(__file__).resolve().parents[1])]

import torch  # noqa: E402
from tests.gpu import checks  # noqa: E402

import gpu_table  # noqa: E402
from gpu_rig import collect  # noqa: E402

BEGAN = time.perf_counter()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/gpu_suite"))
    parser.add_argument("--only", choices=["checks", "bench"], default=None)
    parser.add_argument("--match", default="", help="only checks whose name holds this; comma-separated")
    parser.add_argument("--sizes", default=",".join(gpu_table.GpuBenchSettings().sizes), help="of the benchmark")
    parser.add_argument("--no-hf", action="store_true")
    parser.add_argument("--seconds", type=float, default=1e9)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    log = (args.out / "suite.txt").open("w", encoding="utf-8")

    def say(line: str) -> None:
        line = f"[{time.perf_counter() - BEGAN:6.1f}] {line}"
        print(line, flush=True)
        print(line, file=log, flush=True)

    say(f"{gpu_table.machine()}, commit {gpu_table.commit()}")
    results: list[dict[str, Any]] = []
    if args.only != "bench":
        wanted = [m for m in args.match.split(",") if m]
        for name, check in checks.all_checks():
            if wanted and not any(m in name for m in wanted):
                continue
            if time.perf_counter() - BEGAN > args.seconds:
                say(f"left out  {name}: out of time")
                continue
            began = time.perf_counter()
            try:
                ok = True
                note = check()
            except Exception as error:
                ok = False
                note = f"{type(error).__name__}: {error}"[:600]
                (args.out / "failures.txt").open("a").write(f"== {name}\n{traceback.format_exc()}\n")
            collect()
            seconds = time.perf_counter() - began
            results.append({"check": name, "ok": ok, "note": note, "seconds": seconds})
            say(f"{'ok  ' if ok else 'FAIL'} {name:28s} {seconds:6.1f} s  {note}")
            (args.out / "suite.json").write_text(json.dumps(results, indent=1))
    if args.only != "checks" and torch.cuda.is_available():
        settings = replace(gpu_table.quick(not args.no_hf), sizes=tuple(args.sizes.split(",")))
        records: list[dict[str, Any]] = []
        for size in settings.sizes:  # one by one, to stop in time
            if time.perf_counter() - BEGAN > args.seconds:
                say(f"left out  bench {size}: out of time")
                continue
            records += gpu_table.run(replace(settings, sizes=(size,)), say)
            gpu_table.write(args.out, records, "benchmarks/gpu_suite.py")
        say("\n" + gpu_table.text_table(gpu_table.table(records)))
    failed = [r["check"] for r in results if not r["ok"]]
    say(f"{len(results) - len(failed)} checks passed" + (f", FAILED: {', '.join(failed)}" if failed else ""))
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    main()
