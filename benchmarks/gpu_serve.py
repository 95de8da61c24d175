"""HTTP beside the engine alone, with dummy weights: throughput at 64 streams, and the time between tokens while long
prompts arrive.

    PYTHONPATH=src[:FOLDER_WITH_FASTAPI] python3 benchmarks/gpu_serve.py [--size E2B] [--streams 64] [--tokens 512]
    [--long 8192] [--k 0]

The same answers are made three times: by the engine driven directly, through HTTP from other processes
(`/v1/completions`, streamed), and through HTTP while a prompt of --long tokens arrives every --every seconds. Every
token's text begins with " w" (a vocabulary of such words), so clients count tokens in what arrives. A line of JSON for
each, with the processor time of the server's threads.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import random
import re
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]
PROCESSES = 8  # of clients


# ---- a client process: plain sockets, as little work as can be
def client() -> None:
    """On stdin {port, streams: [{at, body}]}; prints for each stream [[seconds since the epoch, tokens], ...], or an
    error."""
    import selectors

    job = json.load(sys.stdin)
    waiting = sorted(enumerate(job["streams"]), key=lambda pair: pair[1]["at"])
    seen: list[Any] = [[] for _ in waiting]
    word = re.compile(rb" w\d")
    chosen = selectors.DefaultSelector()
    rest = {}
    open_ones = 0
    while waiting or open_ones:
        while waiting and waiting[0][1]["at"] <= time.time():
            i, stream = waiting.pop(0)
            body = json.dumps(stream["body"]).encode()
            sock = socket.create_connection(("127.0.0.1", job["port"]))
            lines = (
                "POST /v1/completions HTTP/1.1",
                "Host: 127.0.0.1",
                "Content-Type: application/json",
                "Connection: close",
            )
            sock.sendall("\r\n".join((*lines, f"Content-Length: {len(body)}", "", "")).encode() + body)
            chosen.register(sock, selectors.EVENT_READ, i)
            rest[i] = b""
            open_ones = open_ones + 1
        pause = 0.05 if not waiting else min(0.05, max(0.0, waiting[0][1]["at"] - time.time()))
        for key, _ in chosen.select(pause):
            assert isinstance(key.fileobj, socket.socket)
            data = key.fileobj.recv(1 << 18)
            now = time.time()
            i = key.data
            if not data:
                chosen.unregister(key.fileobj)
                key.fileobj.close()
                open_ones -= 1
                continue
            text = rest[i] + data
            end = text.rfind(b"\n\n") + 2
            rest[i] = text[end:] if end > 1 else text
            count = len(word.findall(text[:end])) if end > 1 else 0
            if b'"error"' in text[:end] or (
                not seen[i] and text.startswith(b"HTTP/1.1") and b"200 OK" not in text[:20]
            ):
                seen[i].append([now, -1, text[:300].decode(errors="replace")])
            elif count:
                seen[i].append([now, count])
    json.dump(seen, sys.stdout)


# ---- the server's side
@dataclass(frozen=True)
class Load:
    """Streams that decode, and long prompts that arrive meanwhile."""

    streams: int
    prompt: int
    tokens: int
    k: int
    vocab: int
    long: int = 0  # tokens of each
    arrivals: int = 0
    every: float = 0.5

    def bodies(self, seed: int) -> list[tuple[float, dict[str, Any]]]:
        """(seconds from the start, the request)."""
        rng = random.Random(seed)

        def ids(n):
            return [rng.randrange(8, self.vocab) for _ in range(n)]

        common = dict(model="dummy", stream=True, temperature=0, ignore_eos=True, outrider={"draft_tokens": self.k})
        out = [(0.0, {**common, "prompt": ids(self.prompt), "max_tokens": self.tokens}) for _ in range(self.streams)]
        return out + [
            (0.3 + self.every * i, {**common, "prompt": ids(self.long), "max_tokens": 4}) for i in range(self.arrivals)
        ]


def through_http(port: int, load: Load, seed: int, core: int | None) -> tuple[list[Any], float]:
    """Arrivals of each stream, and the time when all were sent."""
    start = time.time() + 1.5  # so that every process has started
    jobs = load.bodies(seed)
    groups: list[list[int]] = [list(range(i, load.streams, PROCESSES)) for i in range(PROCESSES)] + [
        list(range(load.streams, len(jobs)))
    ]
    running = []
    for group in groups:
        if group:
            pinned = [] if core is None else ["taskset", "-c", str(core)]
            process = subprocess.Popen(
                [*pinned, sys.executable, __file__, "--client"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
            assert process.stdin is not None
            streams = [{"at": start + jobs[i][0], "body": jobs[i][1]} for i in group]
            process.stdin.write(json.dumps({"port": port, "streams": streams}).encode())
            process.stdin.close()
            running.append((group, process))
    seen: list[Any] = [None] * len(jobs)
    for group, process in running:
        assert process.stdout is not None
        for i, found in zip(group, json.loads(process.stdout.read())):
            seen[i] = found
        process.wait()
    return seen, start


def directly(engine: Any, load: Load, seed: int) -> float:
    """Seconds that the engine takes for the same, driven by this thread."""
    from outrider.engine.step import Request
    from outrider.types import SamplingParams

    for i, (_, body) in enumerate(load.bodies(seed)):
        engine.submit(
            Request(str(i), body["prompt"], SamplingParams(max_tokens=body["max_tokens"], ignore_eos=True), load.k)
        )
    began = time.perf_counter()
    while engine.busy:
        engine.step()
    return time.perf_counter() - began


def words(vocab: int) -> Any:
    """A tokenizer in which id i is the word " wi"."""
    from tokenizers import Tokenizer, decoders, models

    from outrider.engine.text import Tokenizer as Ours
    from outrider.types import TextFiles

    def build() -> Any:
        tokenizer = Tokenizer(models.WordLevel({f"▁w{i}": i for i in range(vocab)}, unk_token="▁w0"))
        tokenizer.decoder = decoders.Metaspace(prepend_scheme="never")
        return tokenizer

    return Ours(TextFiles("words", build))


def gaps(seen: list[Any], begin: float, end: float) -> dict[str, float]:
    """Milliseconds between tokens (a chunk of m tokens after g is m times g/m), and between chunks, of what arrived in
    this time."""
    tokens = []
    chunks = []
    for stream in seen:
        for (before, *_), (at, count, *_) in itertools.pairwise(stream):
            if begin <= before and at <= end and count > 0:
                chunks.append((at - before) * 1e3)
                tokens += [(at - before) * 1e3 / count] * count

    def at(values, q):
        return sorted(values)[min(len(values) - 1, int(q * len(values)))] if values else 0.0

    durations = {}
    for name, values in (("token", tokens), ("chunk", chunks)):
        for label, q in (("p50", 0.5), ("p99", 0.99), ("max", 1.0)):
            durations[f"{name}_{label}_ms"] = at(values, q)
        durations[f"{name}_p99_over_p50"] = durations[f"{name}_p99_ms"] / max(1e-9, durations[f"{name}_p50_ms"])
    return durations


def threads() -> dict[str, float]:
    """Seconds of processor time of this process's threads so far, by their names."""
    names = {str(t.native_id): t.name for t in threading.enumerate()}
    tasks = (task for task in Path("/proc/self/task").iterdir() if task.name in names)
    return {names[task.name]: int((task / "schedstat").read_text().split()[0]) / 1e9 for task in tasks}


def say(**figures: Any) -> None:
    print(json.dumps({n: round(v, 3) if isinstance(v, float) else v for n, v in figures.items()}), flush=True)


def host_times(engine: Any) -> dict[str, float]:
    """Seconds of the host from now on, by part of a step; only `wait` is idle."""
    spent = dict.fromkeys(("plan", "launch", "wait", "commit"), 0.0)

    def timed(owner: object, name: str, part: str) -> None:
        inner = getattr(owner, name)

        def run(*args: object) -> object:
            began = time.perf_counter()
            try:
                return inner(*args)
            finally:
                spent[part] += time.perf_counter() - began

        setattr(owner, name, run)

    timed(engine.scheduler, "plan", "plan")
    timed(engine, "_commit", "commit")
    for executor in engine.executors:
        timed(executor, "launch", "launch")
        timed(executor, "read", "wait")
    return spent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="E2B")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--long", type=int, default=8192)
    parser.add_argument("--every", type=float, default=0.4)
    parser.add_argument("--k", type=int, default=0)
    parser.add_argument("--cores", type=int, nargs=2, default=None, help="one for the server, one for the clients")
    args = parser.parse_args()
    if args.cores:
        os.sched_setaffinity(0, {args.cores[0]})
    import torch
    from tests.running import running

    from gpu_rig import SIZES
    from outrider import LLM
    from outrider.config import EngineConfig
    from outrider.server.main import HttpServer
    from outrider.server.model_info import ServedModel
    from outrider.server.settings import ServerSettings

    model = SIZES[args.size]
    arrivals = 6
    began = time.perf_counter()
    room = max(args.long, args.prompt + args.tokens) + 64
    tokens = args.streams * (args.prompt + args.tokens + 96) + arrivals * room
    settings = EngineConfig(args.streams + arrivals + 2, room, kv_tokens=tokens, prefix_cache=False)
    llm = LLM.load(
        model,
        drafter="auto" if args.k else "none",
        draft_tokens=args.k,
        device="cuda",
        load_format="dummy",
        engine=settings,
        say=print,
    )
    llm.tokenizer = llm.engine.tokenizer = words(llm.config.vocab_size)
    busy = Load(args.streams, args.prompt, args.tokens, args.k, llm.config.vocab_size)
    mixed = Load(args.streams, args.prompt, args.tokens, args.k, llm.config.vocab_size, args.long, arrivals, args.every)
    say(loaded_s=time.perf_counter() - began, torch=torch.__version__)
    directly(llm.engine, mixed, 1)  # compiles and captures
    say(captured_s=time.perf_counter() - began)
    host_spent = host_times(llm.engine)
    alone = directly(llm.engine, busy, 2)
    rate = args.streams * args.tokens / alone
    host = {part: round(s, 3) for part, s in host_spent.items()}
    say(what="engine", streams=args.streams, tokens=args.tokens, seconds=alone, tokens_s=rate, host_s=host)
    sys.setswitchinterval(0.0002)  # as `outrider serve` does
    gc.collect()
    gc.freeze()
    began = time.perf_counter()
    free = torch.cuda.mem_get_info()[0]
    backend = ServedModel.of(llm, print)
    used_mib = (free - torch.cuda.mem_get_info()[0]) >> 20
    say(ready_s=time.perf_counter() - began, ready_mb=used_mib)
    server = HttpServer(
        backend, ServerSettings("dummy", port=0, max_concurrent=args.streams + arrivals, log_level="warning")
    )
    with running(server) as url:
        port = int(url.rpartition(":")[2])
        runs = (
            ("http", busy, 2),
            ("http with long prompts, first time", mixed, 3),
            ("http with long prompts", mixed, 4),
        )
        for label, load, seed in runs:
            before = threads()
            before_host = dict(host_spent)
            steps = llm.engine.metrics.steps
            seen, start = through_http(port, load, seed, args.cores and args.cores[1])
            spent = {name: 1e6 * (s - before.get(name, 0.0)) for name, s in threads().items()}
            wrong = [line for stream in seen for line in stream if line[1] < 0]
            streams = seen[: load.streams]
            long = seen[load.streams :]
            tokens = sum(line[1] for stream in streams for line in stream)
            ends = [stream[-1][0] for stream in streams if stream]
            seconds = max(ends, default=start) - start
            until = min(ends, default=start)
            since = max((stream[0][0] for stream in streams if stream), default=start)
            if long:
                since = max(since, start + 0.3)
                until = min(until, max((s[0][0] for s in long if s), default=until))
            firsts = sorted(round(stream[0][0] - start, 3) for stream in streams if stream)
            host = {part: round(s - before_host[part], 3) for part, s in host_spent.items()}
            late = [round(s[0][0] - start - 0.3 - args.every * i, 3) for i, s in enumerate(long) if s]
            say(
                what=label, tokens=tokens, seconds=seconds, tokens_s=tokens / max(1e-9, seconds),
                of_engine=tokens / max(1e-9, seconds) / rate,
                chunks=sum(map(len, streams)), errors=len(wrong), first_error=wrong[0][2][:200] if wrong else None,
                long_first_token_s=late,
                first_token_s=[firsts[0], firsts[len(firsts) // 2], firsts[-1]] if firsts else [],
                host_s=host, steps=llm.engine.metrics.steps - steps,
                us_a_token={name: round(s / max(1, tokens), 1) for name, s in spent.items() if s > tokens},
                **gaps(streams, since, until),
            )  # fmt: skip


if __name__ == "__main__":
    client() if "--client" in sys.argv else main()
