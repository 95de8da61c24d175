"""All attacks at once, from several clients, beside one that behaves.

    python tests/stress/attack_server.py smollm2 --minutes 10

Starts `outrider serve` as a process of its own, measures a well-behaved client alone, then under attack: grammar bombs,
texts of 4 MB, streams that nobody reads, hundreds of silent and half-sent connections, malformed bodies of up to 4 MB,
grammars that cost while decoding, bodies of two lengths, half-closed connections, invented addresses. With a model
that sees (`random-vision --only images`): hostile image files and requests, next to a client that sends images too.
Loopback addresses only; every attacker has its own (127.0.0.2 and up), so that the server can tell them apart.
Fails (exit code 1) when the client's p99 is more than three times its value alone, an answer differs, /health takes 100
ms, or the resident size is not back within 10 % of its start half a minute after prefixes that nobody uses are dropped
(`--keep` minutes, the server's `--keep-prefixes`). One JSON object is printed at the end; --out appends it to a file.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import socket
import sys
import time
from collections import Counter
from pathlib import Path

import httpx

sys.path[:0] = [str(Path(__file__).parent)]
from server_process import Busy, Json, Target, during, percentile  # noqa: E402

HEALTH_LIMIT = 0.100
P99_FACTOR = 3.0
MEMORY_FACTOR = 1.10


# ---- the client that behaves


class Good:
    """Asks the same questions again and again; the answers it got alone are the right ones."""

    def __init__(self, port: int, tokens: int) -> None:
        self.image: str | None = None  # of some questions, as a data URL
        self.client = httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=300)
        self.tokens = tokens
        self.known: dict[int, object] = {}
        self.wrong: list[str] = []
        self.parts: list[dict[str, float]] = []  # of each request: what the server says of it

    def body(self, i: int) -> Json:
        seed = i % 8
        question = (
            "Why is the sky blue?",
            "Name three rivers.",
            "Write a short poem about rain.",
            "What is 12 times 12?",
        )[seed % 4]
        content: object = question
        if self.image is not None and seed in (1, 4):
            content = [{"type": "image_url", "image_url": {"url": self.image}}, {"type": "text", "text": question}]
        body: Json = {"messages": [{"role": "user", "content": content}], "seed": seed, "temperature": seed % 3 / 2}
        body |= {"max_tokens": self.tokens, "logprobs": seed % 2 == 0, "stop": ["\n\n"]}
        schema = {
            "type": "object",
            "properties": {"answer": {"type": "string", "maxLength": 40}},
            "required": ["answer"],
        }
        return (
            body | {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}}
            if seed == 7
            else body
        )

    async def see(self) -> None:
        """Have images in some questions from now on; one is large, so that the processes for both kinds are there."""
        from hostile_images import LARGE, asked, fine, url

        self.image = fine()
        await self.client.post("/v1/chat/completions", json=asked({"url": url(LARGE["one bit"]())}))

    async def ask(self, i: int) -> float:
        began = time.monotonic()
        options = {"draft_tokens": (0, 2, "auto")[i % 3], "stats": True}
        answer = await self.client.post("/v1/chat/completions", json={**self.body(i), "outrider": options})
        took = time.monotonic() - began
        self.parts.append({})
        if answer.status_code != 200:
            self.wrong.append(f"request {i}: {answer.status_code} {answer.text[:200]}")
            return took
        whole = answer.json()
        self.parts[-1] = {part: whole["outrider"][part] for part in ("ttft_ms", "prefill_ms", "decode_ms", "cycles")}
        self.parts[-1]["at"] = round(began, 2)  # by the clock of the events of watched_server.py
        got = json.dumps([whole["choices"], whole["usage"]["completion_tokens"]])
        if self.known.setdefault(i % 8, got) != got:
            self.wrong.append(f"request {i}: another answer than before")
        return took

    async def run(self, seconds: float, least: int = 24) -> list[float]:
        """24: each question with each draft length once."""
        times = []
        until = time.monotonic() + seconds
        i = 0
        self.parts = []
        while time.monotonic() < until or i < least:
            times.append(await self.ask(i))
            i += 1
            await asyncio.sleep(0.05)
        return times


async def probe_health(port: int, stop: asyncio.Event, times: list[tuple[float, float]]) -> None:
    """times: of each answer the seconds it took, and when it came."""
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
        while not stop.is_set():
            began = time.monotonic()
            with contextlib.suppress(httpx.HTTPError):
                await client.get("/health")
            times.append((time.monotonic() - began, time.monotonic()))
            await asyncio.sleep(0.2)


# ---- the attackers


class Attack:
    """Runs until told to stop; what the server answered is counted."""

    KINDS = ("bombs", "ambiguous", "long_texts", "unread", "silent", "malformed", "wrong_lists", "odd_heads", "leavers")
    CLIENTS = {"bombs": 2, "images": 3}  # noqa: RUF012  # one of each other kind

    def __init__(self, port: int, stop: asyncio.Event, many: int, kinds: list[str]) -> None:
        self.port = port
        self.stop = stop
        self.many = many
        self.kinds = kinds
        self.counts: Counter[str] = Counter()
        self._address = 1
        self._images: tuple[list[str], ...] = ()

    def address(self) -> str:
        self._address += 1
        return f"127.0.0.{self._address}"

    def names(self) -> dict[str, str]:
        """Which attack an address belongs to: each client takes its own in this order."""
        each = (kind for kind in self.kinds for _ in range(self.CLIENTS.get(kind, 1)))
        return {"127.0.0.1": "the client"} | {f"127.0.0.{i}": kind for i, kind in enumerate(each, 2)}

    def tasks(self) -> list[asyncio.Task[None]]:
        return [asyncio.create_task(getattr(self, kind)()) for kind in list(self.names().values())[1:]]

    def client(self) -> httpx.AsyncClient:
        transport = httpx.AsyncHTTPTransport(local_address=self.address())
        return httpx.AsyncClient(base_url=f"http://127.0.0.1:{self.port}", timeout=60, transport=transport)

    async def post(self, client: httpx.AsyncClient, name: str, path: str, **how: object) -> None:
        try:
            answer = await client.post(path, **how)  # type: ignore[arg-type]
            self.counts[f"{name}: {answer.status_code}"] += 1
            if answer.status_code == 429:
                await asyncio.sleep(0.1)
        except httpx.HTTPError as e:
            self.counts[f"{name}: {type(e).__name__}"] += 1

    async def bombs(self) -> None:
        rng = random.Random(1)
        async with self.client() as client:
            while not self.stop.is_set():
                odd = rng.randrange(10**7, 10**8) | 1
                chain = {f"a{i}": {"anyOf": [{"$ref": f"#/$defs/a{i + 1}"}, {"type": "null"}]} for i in range(2000)}
                schema: Json = rng.choice(
                    [
                        {"type": "integer", "multipleOf": odd},
                        {"$defs": {**chain, "a2000": {"const": odd}}, "$ref": "#/$defs/a0"},
                        {"enum": [f"{odd} {i}" for i in range(8000)]},
                        {"type": "string", "pattern": f"^(a|b|{odd})*c(a|b){{40}}$"},
                    ]
                )
                body: Json = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
                if rng.random() < 0.5:
                    body["response_format"] = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
                else:
                    function = {"name": "f", "parameters": {"type": "object", "properties": {"x": schema}}}
                    body |= {"tools": [{"type": "function", "function": function}], "tool_choice": "required"}
                await asyncio.gather(
                    *(self.post(client, "grammar bomb", "/v1/chat/completions", json=body) for _ in range(3))
                )

    async def ambiguous(self) -> None:
        """Compiles in no time, and each mask takes longer than the one before."""
        rng = random.Random(5)
        async with self.client() as client:
            while not self.stop.is_set():
                # another each time: none is known
                grammar = f'root ::= e\ne ::= e e | [a-z ] | "" | "{rng.randrange(10**6)}"'
                body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 500, "grammar": grammar}
                await self.post(client, "ambiguous", "/v1/chat/completions", json=body)

    async def wrong_lists(self) -> None:
        """Each item is wrong, or one of very many."""
        ones = b"1," * 2_000_000 + b"1"
        keys = b",".join(b'"%x":"a"' % i for i in range(350_000))
        message = b'{"messages":[{"role":"user","content":'
        bodies = [
            ("/v1/completions", b'{"prompt":"x","stop":[' + ones + b"]}"),
            ("/v1/chat/completions", message + b"[" + ones + b"]}]}"),
        ]
        bodies += [
            ("/v1/completions", b'{"prompt":"x","logit_bias":{' + keys + b"}}"),
            ("/detokenize", b'{"tokens":["",' + ones + b"]}"),
        ]
        bodies += [("/api/show", b'{"model":[' + ones + b"]}"), ("/v1/completions", b'{"prompt":"x",' + keys + b"}")]
        async with self.client() as client:
            while not self.stop.is_set():
                for path, body in bodies:
                    await self.post(
                        client, "wrong list", path, content=body, headers={"Content-Type": "application/json"}
                    )

    async def odd_heads(self) -> None:
        """Two lengths with 4 MB behind them, one half closed, another address with each request."""
        address = self.address()
        numbers = iter(range(10**9))
        text = b'{"messages":[{"role":"user","content":"hi"}],"max_tokens":4}'
        kind = b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        two = kind + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n3d0900\r\n" + b"x" * 0x3D0900
        while not self.stop.is_set():
            forged = f"X-Forwarded-For: 10.0.{next(numbers) % 250}.1\r\nContent-Length: {len(text)}\r\n\r\n".encode()
            for name, data in (("two lengths", two), ("invented address", kind + forged + text)):
                made = await self.connect(address, data)
                if made is not None:
                    with contextlib.suppress(OSError):
                        made.shutdown(socket.SHUT_WR)
                    await asyncio.sleep(0.05)
                    made.close()
                    self.counts[name] += 1

    async def long_texts(self) -> None:
        body = {"prompt": "1" * 4_100_000, "max_tokens": 1}
        fitting = {"prompt": "1 " * 20_000, "max_tokens": 1}
        async with self.client() as client:
            while not self.stop.is_set():
                await asyncio.gather(
                    *(self.post(client, "long text", "/v1/completions", json=b) for b in [body] * 8 + [fitting] * 4)
                )
                await asyncio.sleep(0.2)

    async def unread(self) -> None:
        """Streams with everything in them, and nobody reads."""
        body = {
            "messages": [{"role": "user", "content": "Count."}],
            "n": 8,
            "stream": True,
            "max_tokens": 2000,
            "ignore_eos": True,
        }
        text = json.dumps({**body, "logprobs": True, "top_logprobs": 20}).encode()
        kind = "Host: 127.0.0.1\r\nContent-Type: application/json\r\n"
        head = f"POST /v1/chat/completions HTTP/1.1\r\n{kind}Content-Length: {len(text)}\r\n\r\n"
        address = self.address()
        while not self.stop.is_set():
            made = await self.connect(address, head.encode() + text)
            if made is not None:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self.stop.wait(), 15)
                made.close()
                self.counts["unread stream"] += 1

    async def silent(self) -> None:
        address = self.address()
        half_body = b"POST /v1/messages HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: 500\r\n\r\n{"
        kinds = [b""] * 3 + [b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127"] * 3 + [half_body]
        open_ones: list[socket.socket] = []
        while not self.stop.is_set():
            for data in kinds:
                made = await self.connect(address, data)
                if made is not None:
                    open_ones.append(made)
                    self.counts["silent connection"] += 1
            while len(open_ones) > self.many:
                open_ones.pop(0).close()
            await asyncio.sleep(0.05)
        for made in open_ones:
            made.close()

    async def connect(self, address: str, data: bytes) -> socket.socket | None:
        made = socket.socket()
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        made.setblocking(False)
        loop = asyncio.get_running_loop()
        try:
            made.bind((address, 0))
            await asyncio.wait_for(loop.sock_connect(made, ("127.0.0.1", self.port)), 10)
            await asyncio.wait_for(loop.sock_sendall(made, data), 10)
            return made
        except (OSError, TimeoutError):
            made.close()
            self.counts["connection refused or reset"] += 1
            await asyncio.sleep(0.1)
            return None

    async def malformed(self) -> None:
        bodies = [b'{"model":"\\ud800","messages":[]}', b"[" * 100_000, b"{", b'"x"', b"\xff"]
        bodies.append(b'{"messages":[{"role":"user","content":"x"}],"foo":1}')
        async with self.client() as client:
            while not self.stop.is_set():
                for body in bodies:
                    await self.post(
                        client,
                        "malformed",
                        "/v1/chat/completions",
                        content=body,
                        headers={"Content-Type": "application/json"},
                    )
                await self.post(
                    client, "malformed", "/v1/chat/completions", content="hello", headers={"Content-Type": "text/plain"}
                )
                await asyncio.sleep(0.1)

    async def images(self) -> None:
        from hostile_images import bodies, large, small

        if not self._images:
            self._images = (small(), large())
        async with self.client() as client:
            requests = bodies(random.Random(self._address), *map(list, self._images))
            while not self.stop.is_set():
                name, body = next(requests)
                await self.post(client, name, "/v1/chat/completions", json=body)

    async def leavers(self) -> None:
        """Ask for something and go."""
        rng = random.Random(3)
        async with self.client() as client:
            while not self.stop.is_set():
                body = {
                    "messages": [{"role": "user", "content": "Tell me a story."}],
                    "max_tokens": 200,
                    "stream": rng.random() < 0.5,
                }
                with contextlib.suppress(httpx.HTTPError):
                    await client.post("/v1/chat/completions", json=body, timeout=rng.choice([0.05, 0.3]))
                self.counts["left early"] += 1
                await asyncio.sleep(0.1)


# ---- the measurement


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def slowest(times: list[float], parts: list[dict[str, float]], most: int = 6) -> list[Json]:
    """Which of the eight questions, seconds, and what the engine says: in all the rest it was not there yet, or no
    longer."""
    ranked = sorted(range(len(times)), key=lambda i: -times[i])[:most]
    return [{"question": i % 8, "s": round(times[i], 3), **parts[i]} for i in ranked]


def typical(times: list[float], parts: list[dict[str, float]]) -> Json:
    """The median of each part, in milliseconds; `outside` is what the engine does not see."""
    rows = [(t, p) for t, p in zip(times, parts) if p]
    out: Json = {
        name: round(percentile([p[name] for _, p in rows], 0.5), 1) for name in ("ttft_ms", "prefill_ms", "decode_ms")
    }
    return {"outside_ms": round(percentile([1e3 * t - p["ttft_ms"] - p["decode_ms"] for t, p in rows], 0.5), 1), **out}


async def measure(target: Target, minutes: float, tokens: int, many: int, kinds: str, keep: float) -> Json:
    good = Good(target.port, tokens)
    say(f"serving on port {target.port}; warming up")
    if "images" in kinds.split(","):
        await good.see()
    await good.run(0)
    say("alone")
    busy = Busy(target)
    alone = await good.run(min(60.0, minutes * 60 / 4))
    others_alone = busy.others()
    busy = Busy(target)
    alone_parts = good.parts
    before = target.memory()
    before_of = target.memory_of()
    pool = target.pool()
    say(f"attack for {minutes:g} minutes, after {len(alone)} requests alone, p99 {percentile(alone, 0.99):.2f} s")
    began = time.monotonic()
    stop = asyncio.Event()
    probes = list[tuple[float, float]]()
    probing = asyncio.create_task(probe_health(target.port, stop, probes))
    options = {"--attack": target.port, "--minutes": minutes, "--connections": many, "--only": kinds}
    command = [sys.executable, __file__, *(str(word) for option in options.items() for word in option)]
    # in a process of their own: their work must not delay the measuring
    attackers = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    attacked = await good.run(minutes * 60, least=1)
    attacked_parts = good.parts
    others = busy.others()
    peak = target.memory()
    lines = target.lines
    say(f"the attack ends after {len(attacked)} requests, p99 {percentile(attacked, 0.99):.2f} s")
    counts = json.loads((await attackers.communicate())[0] or b"{}")
    stop.set()
    await probing
    health = [took for took, _ in probes]
    stalls = target.stalls(began)
    filled = target.pool() - pool
    ended = time.monotonic()
    while True:
        await asyncio.sleep(1)
        after = target.memory()
        waited = time.monotonic() - ended
        if after <= before * MEMORY_FACTOR or waited > 60 * keep + 30:
            break
    left = target.pool() - pool
    say(f"memory after {waited:.0f} s: {after >> 20} MB")
    afterwards = await good.run(0)
    factor = percentile(attacked, 0.99) / percentile(alone, 0.99)
    answers = sorted((t, p["at"]) for t, p in zip(attacked, attacked_parts) if p)[-max(6, len(attacked) // 50) :]
    names = Attack(0, stop, 0, kinds.split(",")).names()
    return {
        "minutes": minutes, "requests_alone": len(alone), "requests_attacked": len(attacked),
        "p50_alone_s": round(percentile(alone, 0.5), 3), "p99_alone_s": round(percentile(alone, 0.99), 3),
        "p50_attacked_s": round(percentile(attacked, 0.5), 3), "p99_attacked_s": round(percentile(attacked, 0.99), 3),
        "p99_factor": round(factor, 2), "p99_afterwards_s": round(percentile(afterwards, 0.99), 3),
        "slowest_alone": slowest(alone, alone_parts), "slowest_attacked": slowest(attacked, attacked_parts),
        "slowest_shares": target.shares([(at, at + t) for t, at in answers], names),
        "typical_alone": typical(alone, alone_parts), "typical_attacked": typical(attacked, attacked_parts),
        "health_p50_ms": round(1e3 * percentile(health, 0.5), 1),
        "health_p99_ms": round(1e3 * percentile(health, 0.99), 1),
        "health_max_ms": round(1e3 * max(health, default=0), 1),
        "slowest_health": [{"ms": round(1e3 * took, 1), "because": during(stalls, at - took, at)}
                           for took, at in sorted(probes, reverse=True)[:3]],
        "loop_max_net_ms": max((e["net_ms"] for e in stalls), default=0.0), "stalls": stalls[:8],
        "memory_before_mb": before >> 20, "memory_peak_mb": peak >> 20, "memory_after_mb": after >> 20,
        "memory_of_mb": {n: [before_of.get(n, 0) >> 20, b >> 20] for n, b in target.memory_of().items()},
        "memory_back_s": round(waited), "kv_filled_mb": filled >> 20, "kv_left_mb": left >> 20,
        "others_alone_cores": others_alone, "others_attacked_cores": others,
        "log_lines": lines, "attacks": counts, "wrong": good.wrong[:10],
        "passed": {
            "p99": factor <= P99_FACTOR, "answers": not good.wrong, "health": max(health, default=0) < HEALTH_LIMIT,
            "memory": after <= before * MEMORY_FACTOR, "alive": target.process.poll() is None,
        },
    }  # fmt: skip


def verdict(result: Json) -> str:
    """A line for each bound."""
    r = result
    passed = result["passed"]
    lines = {
        "p99": f"{r['p99_attacked_s']} s beside the attack, {r['p99_alone_s']} s alone: {r['p99_factor']} times (at most {P99_FACTOR:g}); "
        f"others kept {r['others_alone_cores']} and {r['others_attacked_cores']} cores busy meanwhile; "
        f"the time of the slowest: " + ", ".join(f"{share:.0%} {name}" for name, share in r["slowest_shares"].items()),
        "answers": f"{r['requests_attacked']} requests, {r['wrong'] or 'none'} wrong or refused",
        "health": f"/health {r['health_max_ms']} ms at the longest, p99 {r['health_p99_ms']} ms (under {1e3 * HEALTH_LIMIT:g}); "
        f"the event loop stood still for {r['loop_max_net_ms']} ms at the longest, without waits for a processor",
        "memory": f"{r['memory_before_mb']} MB before, {r['memory_peak_mb']} MB at the end of the attack, {r['memory_after_mb']} MB "
        f"{r['memory_back_s']} s later (at most {MEMORY_FACTOR:g} times); K/V had grown by {r['kv_filled_mb']} MB, then {r['kv_left_mb']}",
        "alive": "the server runs on",
    }
    return "\n".join(f"{'kept  ' if passed[name] else 'MISSED'} {name:8} {said}" for name, said in lines.items())


async def attack(port: int, minutes: float, many: int, kinds: list[str]) -> None:
    """What the process of the attackers does. It is polite to this machine only: elsewhere they would have machines of
    their own."""
    os.nice(19)
    stop = asyncio.Event()
    attackers = Attack(port, stop, many, kinds)
    tasks = attackers.tasks()
    await asyncio.sleep(minutes * 60)
    stop.set()
    await asyncio.wait(tasks, timeout=60)
    print(json.dumps(dict(sorted(attackers.counts.items()))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "model", nargs="?", default="smollm2", help="as for `outrider serve`, random-135m or random-vision"
    )
    parser.add_argument("--attack", type=int, metavar="PORT", help=argparse.SUPPRESS)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--tokens", type=int, default=32, help="of the well-behaved client's answers")
    parser.add_argument("--connections", type=int, default=700, help="silent ones, open at once")
    parser.add_argument(
        "--keep", type=float, default=1.0, help="minutes: `--keep-prefixes` of the server; memory is back after them"
    )
    parser.add_argument("--serve", default="--timeout 20", help="more options for `outrider serve`")
    parser.add_argument(
        "--only", default=",".join(Attack.KINDS), help="these attacks, to find out which of them hurts: %(default)s"
    )
    parser.add_argument("--out", type=Path, help="append the result to this file")
    args = parser.parse_args()
    if args.attack is not None:
        asyncio.run(attack(args.attack, args.minutes, args.connections, args.only.split(",")))
        return
    target = Target(args.model, [*args.serve.split(), "--keep-prefixes", str(args.keep)])
    try:
        result = asyncio.run(measure(target, args.minutes, args.tokens, args.connections, args.only, args.keep))
    finally:
        target.stop()
    line = json.dumps({"model": args.model, **result})
    print(line)
    print(verdict(result), file=sys.stderr)
    if args.out is not None:
        with args.out.open("a") as file:
            file.write(line + "\n")
    sys.exit(0 if all(result["passed"].values()) else 1)


if __name__ == "__main__":
    main()
