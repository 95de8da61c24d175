"""A million requests of mixed kinds against one server, each answer compared with the one it got alone.

    python tests/stress/soak_million.py --state soak.json

Starts `outrider serve` as a process of its own. 384 different requests (chat, completions, Messages, Responses,
Ollama, embeddings, tokens; streamed or not; with JSON schemas, logprobs, several answers, stop strings; refused ones) are
asked one by one first; then all at random from several connections, some of which hang up in the middle. Fails (exit
code 1) when an answer differs, a request gets none, or the server's resident size still grows: by more than
--growth MB from the middle third of the run to its last. Ctrl-C or the end of --minutes leaves --state behind, from which
the same command goes on (with a new server). One JSON object is printed at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent)]
from server_process import Target

DIFFERENT = 384
# ids, times, and what depends on the prefix cache: the Messages API tells `input_tokens` without what it had
VOLATILE = {
    "id", "created", "created_at", "completed_at", "item_id", "outrider", "cached_tokens", "cache_read_input_tokens",
    "input_tokens", "prompt_tokens_details", "input_tokens_details", "previous_response_id",
}  # fmt: skip
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 99}, "b": {"type": "boolean"}},
          "required": ["n", "b"], "additionalProperties": False}  # fmt: skip
BAD = [("/v1/chat/completions", {"messages": []}), ("/v1/completions", {"prompt": "x", "foo": 1}), ("/v1/nothing", {}),
       ("/v1/messages", {"messages": [{"role": "x"}]}), ("/api/chat", {"messages": 7}), ("/detokenize", {"tokens": [-1]}),
       ("/v1/embeddings", {"input": []}), ("/v1/completions", {"prompt": "x", "temperature": 9})]  # fmt: skip


def request(number: int) -> tuple[str, dict[str, Any]]:
    """The request of a number."""
    rng = random.Random(number)
    words = " ".join(
        rng.choice(["sea", "key", "bread", "moon", "train", "fox", "map"]) for _ in range(rng.choice([1, 4, 30]))
    )
    few = rng.randint(1, 12)
    seed = rng.randrange(1000)
    heat = rng.choice([0.0, 0.7, 1.0])
    said = [{"role": "user", "content": f"Write about {words}."}]
    sampled: dict[str, Any] = {"seed": seed, "temperature": heat, "top_p": rng.choice([1.0, 0.9])}
    stream = rng.random() < 0.4
    kind = number % 12
    if kind in (0, 1):
        return "/v1/chat/completions", {"messages": said, "max_tokens": few, "stream": stream, **sampled}
    if kind == 2:
        form = {"type": "json_schema", "json_schema": {"name": "t", "schema": SCHEMA}}
        return "/v1/chat/completions", {"messages": said, "max_tokens": 40, "response_format": form, **sampled}
    if kind == 3:
        body = {
            "messages": said,
            "max_tokens": few,
            "logprobs": True,
            "top_logprobs": rng.randint(0, 5),
            "n": rng.randint(1, 3),
        }
        return "/v1/chat/completions", {**body, "outrider": {"draft_tokens": rng.choice([0, 2, "auto"])}, **sampled}
    if kind in (4, 5):
        body = {"prompt": words, "max_tokens": few, "stop": ["e", "\n"] if rng.random() < 0.5 else [], "stream": stream}
        return "/v1/completions", {**body, "echo": not stream, **sampled}
    if kind == 6:
        return "/v1/messages", {"model": "m", "max_tokens": few, "messages": said, "stream": stream, "temperature": 0.0}
    if kind == 7:
        return "/v1/responses", {
            "model": "m",
            "input": words,
            "max_output_tokens": few,
            "temperature": 0.0,
            "store": False,
        }
    if kind == 8:
        options = {"seed": seed, "num_predict": few, "temperature": heat}
        return "/api/chat", {"model": "m", "messages": said, "stream": stream, "options": options}
    if kind == 9:
        return "/v1/embeddings", {"model": "m", "input": [words, "x"]}
    if kind == 10:
        return rng.choice([("/tokenize", {"content": words}), ("/apply-template", {"messages": said})])
    return rng.choice(BAD)


class Connection:
    """One connection that is kept; as little work as possible for a request."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._writer: asyncio.StreamWriter | None = None
        self._reader: asyncio.StreamReader

    async def ask(self, path: str, body: dict[str, Any], leave: bool = False) -> tuple[int, bytes]:
        """Status and body. leave: hang up in the middle."""
        if self._writer is None:
            self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port, limit=1 << 24)
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        self._writer.write(head.encode() + data)
        if leave:
            await asyncio.sleep(0.01)
            self.close()
            return 0, b""
        headers = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
        length = next((int(h[15:]) for h in headers.split("\r\n") if h.startswith("content-length:")), None)
        out = await self._reader.readexactly(length) if length is not None else await self._chunks()
        if "connection: close" in headers:
            self.close()
        return int(headers[9:12]), out

    async def _chunks(self) -> bytes:
        out = b""
        while size := int(await self._reader.readuntil(b"\r\n"), 16):
            out += (await self._reader.readexactly(size + 2))[:-2]
        await self._reader.readexactly(2)
        return out

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def steady(value: Any) -> Any:
    """Without what differs from call to call."""
    if isinstance(value, dict):
        return {k: steady(v) for k, v in value.items() if k not in VOLATILE and not k.endswith("_duration")}
    return [steady(v) for v in value] if isinstance(value, list) else value


def answer(status: int, body: bytes) -> Any:
    """The part of an answer that must be the same each time. Of a stream its text and end: where a chunk ends depends
    on the drafts."""
    if not body.startswith((b"data:", b"event:", b":")) and b"\n{" not in body:
        return [status, steady(json.loads(body))]
    text = ""
    ends = []
    for line in body.decode().splitlines():
        line = line.removeprefix("data: ")
        if not line.startswith("{"):
            continue
        part = json.loads(line)
        assert "error" not in part, part
        for choice in part.get("choices") or [part]:
            delta = choice.get("delta") or choice.get("message") or choice
            text += (
                (delta.get("content") or delta.get("text") or delta.get("response") or "")
                if isinstance(delta, dict)
                else ""
            )
            ends += [e for e in (choice.get("finish_reason"), choice.get("done_reason"), delta.get("stop_reason")) if e]
    return [status, text, ends]


class Soak:
    def __init__(self, target: Target, state: dict[str, Any], path: Path | None, goal: int) -> None:
        self.target = target
        self.state = state
        self.path = path
        self.goal = goal
        self.counts = Counter(state["counts"])
        self.alone: dict[int, str] = {}  # answers of this server on this machine, to requests asked one by one

    def save(self) -> None:
        self.state["counts"] = dict(sorted(self.counts.items()))
        if self.path is not None:
            self.path.with_suffix(".new").write_text(json.dumps(self.state))
            self.path.with_suffix(".new").replace(self.path)

    async def one(self, connection: Connection, number: int, leave: bool = False) -> None:
        path, body = request(number)
        status = 0
        try:
            async with asyncio.timeout(300):
                status, said = await connection.ask(path, body, leave)
            if not leave:
                got = json.dumps(answer(status, said))
                if (want := self.alone.setdefault(number, got)) != got:
                    self.problem(f"request {number} {path}: {got[:300]} instead of {want[:300]}")
        except Exception as e:
            connection.close()
            self.problem(f"request {number} {path}: {type(e).__name__}: {str(e)[:200]}")
        self.counts["left" if leave else f"{path} {status}" if status < 400 else f"refused {status}"] += 1
        self.state["done"] += 1

    def problem(self, text: str) -> None:
        self.state["problems"] += 1
        self.state["first_problems"] = [*self.state["first_problems"], text][:10]

    async def run(self, at_once: int, seconds: float) -> None:
        connection = Connection(self.target.port)
        for number in range(DIFFERENT):
            await self.one(connection, number)
        connection.close()
        until = time.monotonic() + seconds
        memory = self.state["memory_mb"]
        memory.append([])

        async def worker(rng: random.Random) -> None:
            connection = Connection(self.target.port)
            while self.state["done"] < self.goal and time.monotonic() < until and self.target.process.poll() is None:
                await self.one(connection, rng.randrange(DIFFERENT), rng.random() < 0.02)
            connection.close()

        async def watch() -> None:
            while True:
                memory[-1].append([self.state["done"], round(self.target.memory() / 2**20, 1)])
                self.save()
                await asyncio.sleep(10)

        watching = asyncio.create_task(watch())
        await asyncio.gather(*(worker(random.Random(f"{self.state['done']} {i}")) for i in range(at_once)))
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching


def growth(samples: list[list[float]]) -> tuple[float, float]:
    """MB from the middle third of a run to its last, by medians; the same for 100,000 requests."""
    third = len(samples) // 3
    if third < 2:
        return 0.0, 0.0
    middle, last = (
        sorted(part)[third // 2]
        for part in ([m for _, m in samples[third : 2 * third]], [m for _, m in samples[-third:]])
    )
    done = samples[-third // 2][0] - samples[third + third // 2][0]
    return last - middle, (last - middle) * 1e5 / max(1, done)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="random", help="as for `outrider serve`, or random")
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--minutes", type=float, default=720.0, help="of this run")
    parser.add_argument("--at-once", type=int, default=12, help="connections")
    parser.add_argument("--growth", type=float, default=16.0, help="MB")
    parser.add_argument("--state", type=Path, help="file to go on from")
    parser.add_argument("--serve", default="--keep-prefixes 1", help="more options for `outrider serve`")
    args = parser.parse_args()
    state: dict[str, Any] = {
        "done": 0,
        "seconds": 0.0,
        "problems": 0,
        "first_problems": [],
        "counts": {},
        "memory_mb": [],
    }
    if args.state is not None and args.state.exists():
        state = json.loads(args.state.read_text())
    target = Target(args.model, ["--log-level", "warning", *args.serve.split()])
    soak = Soak(target, state, args.state, args.requests)
    began = time.monotonic()
    before = state["seconds"]
    try:
        with contextlib.suppress(KeyboardInterrupt):
            asyncio.run(soak.run(args.at_once, 60 * args.minutes))
        if target.process.poll() is not None:
            soak.problem(f"the server ended with {target.process.poll()}")
    finally:
        target.stop()
    state["seconds"] = round(before + time.monotonic() - began)
    grown, slope = growth(state["memory_mb"][-1])
    if grown > args.growth:
        soak.problem(f"memory grew by {grown:.0f} MB")
    soak.save()
    result = {k: v for k, v in state.items() if k != "memory_mb"} | {
        "memory_mb": [m for _, m in state["memory_mb"][-1]][:: max(1, len(state["memory_mb"][-1]) // 12)],
        "grown_mb": round(grown, 1), "mb_in_100k_requests": round(slope, 2),
    }  # fmt: skip
    print(json.dumps(result))
    sys.exit(1 if state["problems"] else 0)


if __name__ == "__main__":
    main()
