"""All attacks at once, from several clients, beside one that behaves.

    python tests/stress/attack_server.py smollm2 --minutes 10
    python tests/stress/attack_server.py smollm2 --minutes 10 --runs 3 --each 2   # and a table, attack by attack

Starts `outrider serve` as a process of its own, measures a well-behaved client alone, then under attack: grammar bombs,
texts of 4 MB, streams that nobody reads, hundreds of silent and half-sent connections, malformed bodies of up to 4 MB,
grammars that cost while decoding, bodies of two lengths, half-closed connections, invented addresses. With a model
that sees (`random-vision --only images`): hostile image files and requests, next to a client that sends images too.
With one that hears (`random-audio --only sound`): hostile sound files, requests and transcriptions, likewise.
`--only scored`: several texts at once to embed and to score.
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
import sys
import time
from pathlib import Path

import httpx

sys.path[:0] = [str(Path(__file__).parent)]
from attackers import Attack  # noqa: E402
from server_process import Busy, Json, Target, during, percentile  # noqa: E402

HEALTH_LIMIT = 0.100
P99_FACTOR = 3.0
MEMORY_FACTOR = 1.10


# ---- the client that behaves


class Good:
    """Asks the same questions again and again; the answers it got alone are the right ones."""

    def __init__(self, port: int, tokens: int) -> None:
        self.image: str | None = None  # of some questions, as a data URL
        self.clip: str | None = None  # of some questions, in base64
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
        if self.clip is not None and seed in (2, 5):
            part = {"type": "input_audio", "input_audio": {"data": self.clip, "format": "wav"}}
            content = [part, {"type": "text", "text": question}]
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

    async def hear(self) -> None:
        """Have clips in some questions from now on; a long file first, so that the decoding process is there."""
        from hostile_sound import LARGE, fine, transcription

        self.clip = fine()
        request = transcription("", LARGE["an hour"]())
        await self.client.post(request.path, **request.options)

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
    if "sound" in kinds.split(","):
        await good.hear()
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
    """Program of the attackers' process. It has a low priority on this machine, since real attackers would have their
    own machines."""
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
        "model",
        nargs="?",
        default="smollm2",
        help="as for `outrider serve`, random-135m, random-vision or random-audio",
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
    parser.add_argument("--runs", type=int, default=1, help="of all attacks together, each with a server of its own")
    parser.add_argument("--each", type=float, default=0.0, help="minutes of each attack alone, before all together")
    parser.add_argument("--out", type=Path, help="append the result to this file")
    args = parser.parse_args()
    if args.attack is not None:
        asyncio.run(attack(args.attack, args.minutes, args.connections, args.only.split(",")))
        return
    rounds = [(kind, args.each) for kind in args.only.split(",")] if args.each else []
    rounds += [(args.only, args.minutes)] * args.runs
    results = [run_once(args, kinds, minutes) for kinds, minutes in rounds]
    if len(results) > 1:
        print(table(results), file=sys.stderr)
    # a single attack is measured too shortly for a bound
    sys.exit(0 if all(all(result["passed"].values()) for result in results[-args.runs :]) else 1)


def run_once(args: argparse.Namespace, kinds: str, minutes: float) -> Json:
    """One server, alone and under these attacks."""
    target = Target(args.model, [*args.serve.split(), "--keep-prefixes", str(args.keep)])
    try:
        measured = measure(target, minutes, args.tokens, args.connections, kinds, args.keep)
        result = {"model": args.model, "attack": kinds, **asyncio.run(measured)}
    finally:
        target.stop()
    line = json.dumps(result)
    print(line)
    print(verdict(result), file=sys.stderr)
    if args.out is not None:
        with args.out.open("a") as file:
            file.write(line + "\n")
    return result


def table(results: list[Json]) -> str:
    rows = [
        f"| {r['attack'] if ',' not in r['attack'] else 'all'} | {r['minutes']:g} | {r['requests_attacked']} "
        f"| {r['p99_alone_s']:.3f} | {r['p99_attacked_s']:.3f} | {r['p99_factor']} | {r['health_max_ms']} | {len(r['wrong'])} |"
        for r in results
    ]
    head = "| attack | minutes | requests | p99 alone, s | p99 attacked, s | times | /health, ms | wrong |"
    return "\n".join([head, "|---" + "|---:" * 7 + "|", *rows])


if __name__ == "__main__":
    main()
