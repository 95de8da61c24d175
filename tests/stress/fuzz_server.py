"""Fuzz a server over schemas, bodies, headers and sequences of connections.

    python tests/stress/fuzz_server.py --minutes 30

Starts `outrider serve` as a process of its own on 127.0.0.1 and sends it, from several connections at once, requests
made from the routes' own JSON schemas, then broken: a value of another type, a million items, grammars and JSON schemas
at random, cut and flipped bytes, wrong lengths, odd heads, several requests in one go, a byte at a time, halves closed,
resets. Fails (exit code 1) on a 5xx that is no "try again", on an error without its JSON object, on a whole request
without an answer, when the server ends, and when its event loop stands still for longer than --stall seconds, whoever
the others on this machine are (watched_server.py). A case is its number: --seed and --first repeat it; with --state the
same command goes on where an earlier one was ended. One JSON object is printed at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import http.client
import json
import logging
import random
import socket
import struct
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "src"), str(Path(__file__).parent)]
from server_process import Target  # noqa: E402

from outrider.server import anthropic, ollama, responses, scoring, text_routes  # noqa: E402
from outrider.server.schema import ChatRequest, CompletionRequest  # noqa: E402

SHAPES = {
    "/v1/chat/completions": ChatRequest, "/v1/completions": CompletionRequest,
    "/v1/messages": anthropic.MessagesRequest,
    "/v1/messages/count_tokens": anthropic.MessagesRequest, "/v1/responses": responses.ResponsesRequest,
    "/v1/embeddings": scoring.EmbeddingsRequest, "/api/chat": ollama.ChatBody, "/api/generate": ollama.GenerateBody,
    "/api/embed": scoring.EmbedBody, "/api/show": ollama.ShowBody, "/tokenize": text_routes.TokenizeRequest,
    "/detokenize": text_routes.DetokenizeRequest, "/apply-template": ChatRequest,
}  # fmt: skip
PART = 3.0  # minutes of one server; what came of them is kept in --state
SCHEMAS = {path: shape.model_json_schema() for path, shape in SHAPES.items()}
WORDS = [
    "",
    "x",
    "user",
    "assistant",
    "hello world",
    "<|im_end|>",
    "\u0000",
    "日本🦊",
    "\ud83d",
    "a" * 5000,
    "{",
    "null",
    "-1",
    "0",
    "text",
]
ODD: list[Any] = [
    None, True, -1, 0, 2**31, 2**63, 10**40, -(2**70), 0.5, 1e308, float("nan"), float("inf"), "", "\ud800",
    "x" * 100_000, [], {}, [[]],
    [{}], [1] * 200_000, [""] * 100_000, [[1]] * 30_000, [None] * 1000, {"": 1}, {str(i): i for i in range(20_000)},
]  # fmt: skip
GRAMMARS = [
    'root ::= e\ne ::= e e | [a-z ] | ""', "root ::= root", 'root ::= "a"*', "root ::= [^a]* [a-z]{1,50}", "",
    "start: /(a|b)*c(a|b){30}/",
    'root ::= x\nx ::= x x x | "a" | ""', "root ::= (", 'root ::= a | b\na ::= "x" a | ""\nb ::= "x" b "y" | ""',
]  # fmt: skip
HEADERS = [
    "Content-Type: text/plain", "Content-Type: application/json; charset=latin-1", "Content-Encoding: gzip",
    "Expect: 100-continue",
    "Origin: http://evil.example", "Origin: null", "Authorization: Bearer x", "Authorization: \xff",
    "X-Request-Id: " + "a" * 300,
    "X-Forwarded-For: 10.1.2.3", "Connection: close", "Connection: Upgrade\r\nUpgrade: websocket",
    "Connection: Upgrade\r\nUpgrade: h2c",
    "Accept: " + "x" * 3000, "X-Outrider-Stats: 1", "Cookie: " + "a=b; " * 500, "Host: 127.0.0.1", "Content-Length: 7",
    "Content-Length: -1", "Transfer-Encoding: gzip, chunked", "Transfer-Encoding: identity", "Bad Header: x",
    "traceparent: 00-x-y-z",
]  # fmt: skip
TARGETS = [
    "http://127.0.0.1{}",
    "{}?a=b",
    "{}/",
    "/{}",
    "{}%00",
    "{}#x",
    "*",
    "http://[::1",
    "{}/../..",
    "/v1/models/{}",
]


class Case:
    """The case of one number: bytes, and a way to send them."""

    def __init__(self, seed: int, number: int) -> None:
        self.rng = rng = random.Random(f"{seed}-{number}")
        self.path = rng.choice(list(SCHEMAS))
        self.whole = rng.random() < 0.7  # a request that must be answered
        many = rng.choice([1, 1, 1, 2, 4])
        self.data = b"".join(self.request() for _ in range(many))
        self.way = rng.choice(["at once"] * 4 + ["pieces", "half close", "reset", "leave"])
        if not self.whole and self.data:
            for _ in range(rng.randint(0, 3)):
                at = rng.randrange(len(self.data))
                self.data = (
                    rng.choice([self.data[:at], self.data[:at] + bytes([rng.randrange(256)]) + self.data[at + 1 :]])
                    or b"\n"
                )

    def request(self) -> bytes:
        rng = self.rng
        body = json.dumps(self.body()).encode()
        head = [
            f"{'POST' if self.whole else rng.choice(['POST', 'GET', 'PUT', 'OPTIONS', 'HEAD', 'X'])} {self.target()} HTTP/1.1"
        ]
        head += ["Host: 127.0.0.1", "Content-Type: application/json"]
        if not self.whole:
            head += rng.sample(HEADERS, rng.randint(0, 4))
        if rng.random() < 0.2:
            cut = rng.randint(0, len(body))
            parts = [p for p in (body[:cut], body[cut:]) if p]
            body = b"".join(f"{len(p):x}\r\n".encode() + p + b"\r\n" for p in parts) + b"0\r\n\r\n"
            head.append("Transfer-Encoding: chunked")
        else:
            head.append(f"Content-Length: {len(body)}")
        return "\r\n".join([*head, "", ""]).encode("latin-1") + body

    def target(self) -> str:
        return self.rng.choice(TARGETS).format(self.path) if not self.whole and self.rng.random() < 0.3 else self.path

    def body(self) -> Any:
        rng = self.rng
        body = self.make(SCHEMAS[self.path], SCHEMAS[self.path].get("$defs", {}), 0)
        if rng.random() < 0.5:
            self.mutate(body)
        if isinstance(body, dict):
            known = SCHEMAS[self.path].get("properties", {})
            body |= {
                name: 4 for name in ("max_tokens", "max_output_tokens") if name in known
            }  # short answers, many cases
            for name in ("max_completion_tokens", *(["model"] if rng.random() < 0.9 else [])):
                body.pop(name, None)
            if self.path.startswith("/api"):
                body["options"] = {"num_predict": 4}
            if "grammar" in known and rng.random() < 0.1:
                body["grammar"] = rng.choice(GRAMMARS)
            elif "response_format" in known and rng.random() < 0.1:
                body["response_format"] = {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": self.json_schema(3)},
                }
        return body

    def make(self, schema: dict[str, Any], defs: dict[str, Any], depth: int) -> Any:
        """A value that fits the schema, more or less."""
        rng = self.rng
        if "$ref" in schema:
            schema = defs.get(schema["$ref"].rpartition("/")[2], {})
        if "anyOf" in schema:
            return self.make(rng.choice(schema["anyOf"]), defs, depth)
        if "enum" in schema or "const" in schema:
            return rng.choice(schema.get("enum") or [schema["const"]])
        kind = schema.get("type")
        if kind == "object":
            wanted = schema.get("required", ())
            fields = {
                k: v
                for k, v in schema.get("properties", {}).items()
                if k in wanted or rng.random() < 0.7 / (1 + depth) ** 2 / 2
            }
            return {k: self.make(v, defs, depth + 1) for k, v in fields.items()}
        if kind == "array":
            most = 2 if depth < 4 else 0
            return [self.make(schema.get("items", {}), defs, depth + 1) for _ in range(rng.randint(min(1, most), most))]
        low = schema.get("minimum", 0)
        high = schema.get("maximum", 3)
        values = {
            "string": rng.choice(WORDS),
            "boolean": rng.random() < 0.5,
            "null": None,
            "integer": rng.choice([low, high, 1]),
        }
        return values.get(str(kind), rng.choice(WORDS) if kind is None else rng.choice([low, high]))

    def mutate(self, body: Any) -> None:
        """One place of it becomes something else."""
        rng = self.rng
        node = body
        while isinstance(node, dict | list) and node:
            key = rng.choice(list(node)) if isinstance(node, dict) else rng.randrange(len(node))
            child = node[key]
            if not isinstance(child, dict | list) or not child or rng.random() < 0.4:
                how = rng.randrange(4)
                if how == 0 and isinstance(node, dict):
                    del node[key]
                elif how == 1 and isinstance(node, dict):
                    node[rng.choice(["foo", "self", "", "x" * 200, *WORDS])] = rng.choice(ODD)
                else:
                    node[key] = rng.choice(ODD)
                return
            node = child

    def json_schema(self, depth: int) -> Any:
        rng = self.rng
        kinds: list[Any] = [
            {"type": rng.choice(["string", "integer", "number", "boolean", "null", "x"])},
            {"const": rng.choice(ODD[:12])},
            {"enum": ["a", 1, None]},
            {"type": "string", "pattern": rng.choice(["^a+$", "(a+)+$", "[", "^(?=x)", "\\d{1,99999}"])},
            {"$ref": "#"}, {}, True, 7,
            {"type": "integer", "multipleOf": rng.randrange(1, 10**8)},
            {"type": "string", "maxLength": rng.choice([0, 3, 10**6])},
        ]  # fmt: skip
        if depth:
            inner = [self.json_schema(depth - 1) for _ in range(3)]
            kinds += [{"type": "object", "properties": dict(zip("abc", inner)), "required": ["a"]}] * 3 + [
                {"anyOf": inner},
                {"allOf": inner},
            ]
            kinds += [{"type": "array", "items": inner[0], "maxItems": rng.choice([0, 2, 10**7])}, {"not": inner[0]}]
        return rng.choice(kinds)


class Fuzzer:
    def __init__(self, target: Target, seed: int, state: dict[str, Any]) -> None:
        self.target = target
        self.port = target.port
        self.seed = seed
        self.counts: Counter[str] = Counter(state.get("answers", {}))
        self.problems: list[str] = state.get("first_problems", [])

    async def one(self, number: int) -> None:
        case = Case(self.seed, number)
        try:
            reader, writer = await asyncio.wait_for(asyncio.open_connection("127.0.0.1", self.port, limit=1 << 24), 60)
        except (OSError, TimeoutError) as e:
            self.problems.append(f"case {number}: no connection: {type(e).__name__}")
            return
        try:
            await self.send(case, reader, writer, number)
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError):
            self.counts["closed by the server"] += 1
        finally:
            writer.close()

    async def send(self, case: Case, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
        rng = case.rng
        data = case.data
        if case.way == "pieces":
            while data and len(case.data) - len(data) < 400:
                size = rng.randint(1, 60)
                writer.write(data[:size])
                data = data[size:]
                await asyncio.sleep(0.001)
        writer.write(data)
        if case.way == "reset":
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            await asyncio.sleep(rng.random() / 10)
            writer.transport.abort()
            self.counts["reset"] += 1
            return
        if case.way == "leave":
            await asyncio.sleep(rng.random() / 10)
            self.counts["left"] += 1
            return
        if case.way == "half close":
            writer.write_eof()
        try:
            async with asyncio.timeout(120):
                await self.read(case, reader, number)
        except TimeoutError:
            self.counts["no answer"] += 1
            if case.whole:
                self.problems.append(f"case {number} ({case.path}, {case.way}): no answer")

    async def read(self, case: Case, reader: asyncio.StreamReader, number: int) -> None:
        """The first answer; of the others only that nothing breaks."""
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
            status = int(head.split()[1])
            if status != 100:
                break
        self.counts[f"{status}"] += 1
        length = next(
            (int(line.partition(":")[2]) for line in head.split("\r\n") if line.startswith("content-length:")), None
        )
        if case.data.startswith(b"HEAD"):
            return
        said = await reader.readexactly(length) if length is not None else await reader.read(1 << 16)
        if status >= 500 and not (status == 503 and "retry-after" in head):
            self.problems.append(f"case {number} ({case.path}): {status} {said[:200]!r}")
        elif status >= 400 and said:
            with contextlib.suppress(ValueError):
                if "error" in json.loads(said):
                    return
            self.problems.append(f"case {number} ({case.path}): {status} without an error object: {said[:200]!r}")

    async def run(self, seconds: float, at_once: int, first: int) -> int:
        """The number of the case to go on with."""
        until = time.monotonic() + seconds
        numbers = iter(range(first, 10**12))

        async def worker() -> None:
            while time.monotonic() < until and self.target.process.poll() is None:
                await self.one(next(numbers))

        await asyncio.gather(*(worker() for _ in range(at_once)))
        return next(numbers)


def watch_health(port: int, stop: threading.Event, times: list[float]) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    while not stop.wait(0.1):
        began = time.monotonic()
        try:
            connection.request("GET", "/health")
            connection.getresponse().read()
        except (OSError, http.client.HTTPException):
            connection.close()
            times.append(float("inf"))
        times.append(time.monotonic() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="random", help="as for `outrider serve`, or random")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--at-once", type=int, default=8, help="connections")
    parser.add_argument("--stall", type=float, default=0.25, help="seconds that the event loop may stand still")
    parser.add_argument("--state", type=Path, help="file to go on from")
    parser.add_argument(
        "--serve",
        default="--timeout 60 --request-timeout 3 --max-context 512",
        help="more options for `outrider serve`",
    )
    args = parser.parse_args()
    logging.getLogger("asyncio").setLevel(
        logging.ERROR
    )  # of writes to connections that the server has closed, as it should
    state: dict[str, Any] = {"minutes": 0.0, "next_case": args.first}
    if args.state is not None and args.state.exists():
        state = json.loads(args.state.read_text()) | {"problems": 0, "first_problems": []}  # mended since
    problems = 0
    while state["minutes"] < args.minutes and not problems:
        state = part(args, state, min(PART, args.minutes - state["minutes"]))
        problems = state["problems"]
        if args.state is not None:
            args.state.write_text(json.dumps(state))
    print(json.dumps(state))
    sys.exit(1 if problems else 0)


def part(args: argparse.Namespace, state: dict[str, Any], minutes: float) -> dict[str, Any]:
    """Some minutes with a server of their own; the state with what came of them."""
    target = Target(args.model, args.serve.split())
    times: list[float] = []
    stop = threading.Event()
    watcher = threading.Thread(target=watch_health, args=(target.port, stop, times), daemon=True)
    try:
        before = target.memory()
        began = time.monotonic()
        watcher.start()
        fuzzer = Fuzzer(target, args.seed, state)
        following = asyncio.run(fuzzer.run(60 * minutes, args.at_once, state["next_case"]))
        stop.set()
        watcher.join(130)
        if target.process.poll() is not None:
            fuzzer.problems.insert(0, f"the server ended with {target.process.poll()}: {list(target.last)}")
        stalls = target.stalls(began)
        worst = max(stalls, key=still, default=None)
        if worst is not None and still(worst) > 1e3 * args.stall:
            fuzzer.problems.append(f"the event loop stood still: {worst}")
        return {
            "model": args.model, "minutes": round(state["minutes"] + minutes, 2), "next_case": following,
            "answers": dict(sorted(fuzzer.counts.items())),
            "stall_max_ms": max(state.get("stall_max_ms", 0.0), 0.0 if worst is None else still(worst)),
            "worst_stalls": sorted([*state.get("worst_stalls", []), *stalls], key=still, reverse=True)[:5],
            "health_max_ms": max(state.get("health_max_ms", 0.0), round(1e3 * max(times, default=0.0), 1)),
            "memory_mb": [*state.get("memory_mb", []), [before >> 20, target.memory() >> 20]],
            "problems": len(fuzzer.problems), "first_problems": fuzzer.problems[:10],
        }  # fmt: skip
    finally:
        target.stop()


def still(event: dict[str, Any]) -> float:
    """Milliseconds: computing, or by the clock without waits for a processor."""
    return max(event["net_ms"], event["computed_ms"])


if __name__ == "__main__":
    main()
