"""Cold start: from the command's start to its first token, each time in a new process, as a user waits for it.

    python benchmarks/cold_start.py smollm2 --runs 5
    python benchmarks/cold_start.py smollm2 --imports       # where the time of the imports goes

Prints the median, and the parts: interpreter and imports, loading, first token. Files are in the page cache after the first run, which
is not counted; costs are measured once for a machine and kept (`OUTRIDER_CACHE`), as for any user after the first day.
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

CHILD = """
import sys, time
began = float(sys.argv[1])
from outrider.cli import main
shell = time.time()
from outrider.llm import LLM
from outrider.types import SamplingParams
imported = time.time()
llm = LLM.load(sys.argv[2], drafter=sys.argv[3])
loaded = time.time()
for event in llm.stream(llm.chat_prompt([{"role": "user", "content": "Why is the sky blue?"}]), SamplingParams(max_tokens=8)):
    first = time.time()
    break
import json
parts = {"command line": shell - began, "engine": imported - shell, "load": loaded - imported, "first token": first - loaded}
print(json.dumps({**parts, "all": first - began}))
"""


def once(model: str, drafter: str) -> dict[str, float]:
    command = [sys.executable, "-c", CHILD, repr(time.time()), model, drafter]
    done = subprocess.run(command, capture_output=True, text=True, env=environment())
    if done.returncode:
        raise SystemExit(done.stderr)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT / "src")}


def imports(lines: int) -> None:
    """The slowest modules by their own time."""
    code = "from outrider.cli import main; from outrider.llm import LLM"
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
    rows = [once(args.model, args.drafter) for _ in range(args.runs)]
    middle = {name: statistics.median(r[name] for r in rows) for name in rows[0]}
    print(", ".join(f"{name} {seconds:.2f} s" for name, seconds in middle.items()))
    spread = f"{min(r['all'] for r in rows):.2f} to {max(r['all'] for r in rows):.2f}"
    print(f"cold start to first token: median {middle['all']:.2f} s of {args.runs} ({spread})")
    return 0 if middle["all"] <= args.bound else 1


if __name__ == "__main__":
    raise SystemExit(main())
