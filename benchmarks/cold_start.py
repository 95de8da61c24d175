"""Cold start: from the command's start to its first token, each time in a new process, as a user waits for it.

    python benchmarks/cold_start.py smollm2 --runs 5
    python benchmarks/cold_start.py smollm2 --imports       # where the time of the imports goes

`outrider generate MODEL "Why is the sky blue?"` is started and the clock stopped at the first byte on its standard output. Beside the
median of that stand the parts, from runs of their own: interpreter and command line, engine, loading, first token. Files are in the page
cache after the first run, which is not counted; costs are measured once for a machine and kept (`OUTRIDER_CACHE`), as for any user after
the first day.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

QUESTION = "Why is the sky blue?"
CHILD = """
import sys, time
began = float(sys.argv[1])
from outrider.cli import common, generate, main
shell = time.time()
with common.quick_start(None):
    from outrider.llm import LLM
    from outrider.types import SamplingParams
    imported = time.time()
    llm = LLM.load(sys.argv[2], drafter=sys.argv[3])
    loaded = time.time()
for event in llm.stream(llm.asked(sys.argv[4]), SamplingParams(max_tokens=8)):
    first = time.time()
    break
import json
print(json.dumps({"command line": shell - began, "engine": imported - shell, "load": loaded - imported, "first token": first - loaded}))
"""


def parts(model: str, drafter: str) -> dict[str, float]:
    """The same way as the command goes, with a clock at its corners."""
    command = [sys.executable, "-c", CHILD, repr(time.time()), model, drafter, QUESTION]
    done = subprocess.run(command, capture_output=True, text=True, env=environment())
    if done.returncode:
        raise SystemExit(done.stderr)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def once(model: str, drafter: str) -> float:
    """Seconds from the start of the command to its first byte."""
    command = [sys.executable, "-m", "outrider.cli.main", "generate", model, QUESTION, "--max-tokens", "8", "--drafter", drafter]
    began = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment()) as process:
        assert process.stdout is not None
        first = process.stdout.read(1)
        took = time.perf_counter() - began
        process.stdout.read()
    if process.returncode or not first:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")
    return took


def environment() -> dict[str, str]:
    """This checkout, with its bytecode kept as an installation keeps it: an environment that forbids that compiles every file anew."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"} | {"PYTHONPATH": str(ROOT / "src")}


def imports(lines: int) -> None:
    """The slowest modules by their own time."""
    code = "from outrider.cli import common, generate, main\nwith common.quick_start(None): import outrider.llm"
    done = subprocess.run([sys.executable, "-X", "importtime", "-c", code], capture_output=True, text=True, env=environment())
    rows = []
    for line in done.stderr.splitlines():
        if line.startswith("import time:") and "self" not in line:
            own, total, name = line.removeprefix("import time:").split("|")
            rows.append((int(total), int(own), name.rstrip()))
    for total, own, name in sorted(rows, reverse=True)[:lines]:
        print(f"{total / 1e3:9.1f} ms {own / 1e3:9.1f} ms own {name}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--drafter", default="auto")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--bound", type=float, default=1.5, help="seconds; exit code 1 where the median is over it")
    parser.add_argument("--imports", action="store_true", help="show what the imports take instead")
    args = parser.parse_args()
    if args.imports:
        imports(40)
        return 0
    once(args.model, args.drafter)
    times = [once(args.model, args.drafter) for _ in range(args.runs)]
    rows = [parts(args.model, args.drafter) for _ in range(3)]
    print(", ".join(f"{name} {statistics.median(r[name] for r in rows):.2f} s" for name in rows[0]))
    middle = statistics.median(times)
    print(f"cold start to first token: median {middle:.2f} s of {args.runs} ({min(times):.2f} to {max(times):.2f})")
    return 0 if middle <= args.bound else 1


if __name__ == "__main__":
    raise SystemExit(main())
