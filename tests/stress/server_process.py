"""`outrider serve` in a process of its own, for the stress tests: its log, its memory, what held up its event loop."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(Path(__file__).parent)]
from random_models import model_file  # noqa: E402

Json = dict[str, Any]


def family(pid: int) -> list[int]:
    """A process and all that it has started."""
    pids = []
    todo = [pid]
    while todo:
        pids.append(todo.pop())
        for children in Path(f"/proc/{pids[-1]}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                todo += [int(c) for c in children.read_text().split()]
    return pids


def spent(pid: int) -> float:
    """Seconds of processor time of a process and of those of its children that have ended."""
    try:
        return sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:15])) / os.sysconf(
            "SC_CLK_TCK"
        )
    except OSError:
        return 0.0


def during(events: list[Json], began: float, ended: float) -> list[Json]:
    """Those that overlap a time."""
    return [e for e in events if e["at"] >= began and e["at"] - e["ms"] / 1e3 <= ended][:3]


def percentile(times: list[float], share: float) -> float:
    return sorted(times)[min(len(times) - 1, int(share * len(times)))] if times else 0.0


def shares(steps: Iterable[str], times: list[tuple[float, float]], names: dict[str, str]) -> dict[str, float]:
    """Time spent between some beginnings and ends: decoding and prompts by client, masks; `waiting` is the time outside
    of steps. steps: lines of watched_server.py."""
    total = sum(end - began for began, end in times)
    totals = Counter[str]()
    for line in steps:
        at, seconds, prompts, masks, _, decode_rows, prompt_rows = json.loads(line)
        if not any(began <= at <= end + 0.01 for began, end in times):
            continue
        totals["masks"] += masks
        for what, part, rows in (("rows", seconds - prompts - masks, decode_rows), ("prompts", prompts, prompt_rows)):
            for client, count in rows.items():
                totals[f"{what} of {names.get(client, client)}"] += part * count / sum(rows.values())
    totals["waiting"] = total - sum(totals.values())
    return {name: round(seconds / total, 2) for name, seconds in totals.most_common() if seconds > 0.005 * total}


class Busy:
    """Processors that were kept busy by others than the server, its client and its attackers: a factor measured beside
    them says little."""

    def __init__(self, target: Target) -> None:
        self._target, self._began, self._was = target, time.monotonic(), self._others(target)

    def others(self) -> float:
        return round((self._others(self._target) - self._was) / (time.monotonic() - self._began), 2)

    def _others(self, target: Target) -> float:
        fields = [int(f) for f in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
        busy = (sum(fields[:3]) + sum(fields[5:7])) / os.sysconf("SC_CLK_TCK")
        return busy - sum(map(spent, {*family(os.getpid()), *family(target.process.pid)}))


class Target:
    """The server's process. Its log is counted; what it says of the engine's failures is passed on."""

    def __init__(self, model: str, options: list[str]) -> None:
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "COLUMNS": "200"}
        self.folder = tempfile.TemporaryDirectory()
        self.events = Path(self.folder.name, "events.jsonl")
        watched = [str(Path(__file__).with_name("watched_server.py")), str(self.events)]
        served = model_file(model, Path(self.folder.name))
        command = [sys.executable, *watched, "serve", served, "--port", "0", *options]
        self.process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment, text=True
        )
        self.lines = 0
        self.last = deque[str](maxlen=40)
        self.port = self._port()
        threading.Thread(target=self._count, daemon=True).start()
        httpx.get(f"http://127.0.0.1:{self.port}/health", timeout=120)  # it listens before it is ready

    def _port(self) -> int:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            match = re.search(r"http://127\.0\.0\.1:(\d+)", line)
            if match:
                return int(match[1])
        raise SystemExit("the server did not start")

    def _count(self) -> None:
        assert self.process.stderr is not None
        traceback_lines = 0  # lines of a failure that are still to be passed on: its traceback
        for line in self.process.stderr:
            self.lines += 1
            self.last.append(line.rstrip())
            traceback_lines = (
                40 if ("engine" in line and "failed" in line) or "unexpected, in" in line else traceback_lines - 1
            )
            if traceback_lines > 0:
                print(line.rstrip(), file=sys.stderr, flush=True)

    def memory(self) -> int:
        """Resident bytes of the server and of what it has started."""
        return sum(self.memory_of().values())

    def memory_of(self) -> dict[str, int]:
        """Memory of each process."""
        totals: Counter[str] = Counter()
        for pid in family(self.process.pid):
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
                name = next(
                    (
                        w
                        for w in ("grammar_sandbox", "tokenizer_process", "chat_template", "image_processing")
                        if w in str(words)
                    ),
                    "server",
                )
                totals[name] += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096
        return dict(totals)

    def pool(self) -> int:
        """Resident bytes of its large anonymous mappings: weights, and K/V, which is taken as the prefix cache
        fills."""
        total = 0
        large = False
        for line in Path(f"/proc/{self.process.pid}/smaps").read_text().splitlines():
            head = re.match(r"([0-9a-f]+)-([0-9a-f]+) \S+ \S+ \S+ \S+ *(\S*)", line)
            if head:
                large = not head[3] and int(head[2], 16) - int(head[1], 16) >= 60 << 20
            elif large and line.startswith("Rss:"):
                total += int(line.split()[1]) << 10
        return total

    def stalls(self, since: float) -> list[Json]:
        """Stalls of the event loop since then (watched_server.py), the worst first."""
        events = [json.loads(line) for line in self.events.read_text().splitlines()]
        return sorted((e for e in events if e["at"] > since), key=lambda e: -e["net_ms"])

    def shares(self, times: list[tuple[float, float]], names: dict[str, str]) -> dict[str, float]:
        lines = Path(f"{self.events}.steps").read_text().splitlines()[:-1]  # the last may be half written
        return shares(lines, times, names)

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
