"""Coding agents' first prompts against a large model: the first turn, and the first token after a second start.

    python tests/stress/agent_prompts.py --agents codex --tokens 8368 --minutes 20

For each agent a server is started with an empty `--prefix-store` and gets what the unmodified client sends: Claude Code
(Messages; a title, then the conversation), Codex (Responses), opencode (chat completions; a title, then the
conversation), streamed, with the fields of recorded requests (tests/conformance_clients.py) and a system prompt of
--tokens tokens; then the second turn. A second server with the same store gets the first turn again. A file that
`outrider serve --record-prompt` has written takes the place of the made-up prompt (--recorded). Fails (exit code 1)
when a request is refused, nothing is heard for --silence seconds (clients give up at 300), the second server answers
otherwise, or its first token takes longer than --limit seconds. One JSON object is printed at the end.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).resolve().parents[2])]
from random_models import model_file  # noqa: E402
from server_process import Target  # noqa: E402
from tests.conformance_clients import CLAUDE, CODEX, TOOL  # noqa: E402

TOKENS = {"claude": 18_833, "codex": 8_368, "opencode": 10_000}
# where the words of a stream are; of a model with random weights any part of an answer
WORDS = ("content_block_delta", "output_text.delta", "reasoning_text.delta", '"delta":{"content"', "output_item.added")
Body = dict[str, Any]


def said(words: str) -> list[Body]:
    return [{"role": "user", "content": words}]


def traffic(agent: str, system: str, answer: str = "") -> tuple[str, list[Body]]:
    """Path and bodies of a turn; with the answer of the first turn the second one."""
    talk = said("Explain this repository.")
    if answer:
        talk += [{"role": "assistant", "content": answer}, *said("Shorter.")]
    if agent == "claude":
        main = {**CLAUDE, "system": [{"type": "text", "text": system}], "stop_sequences": [], "messages": talk}
        title = {**main, "system": "Write a title.", "tools": [], "max_tokens": 8}
        return "/v1/messages?beta=true", [title, {**main, "max_tokens": 8}]
    if agent == "codex":
        return "/v1/responses", [{**CODEX, "instructions": system, "input": talk}]
    head = {"stream_options": {"include_usage": True}, "temperature": 0, "max_tokens": 8}
    title = {**head, "messages": [{"role": "system", "content": "Write a title."}, *talk]}
    main = {**head, "messages": [{"role": "system", "content": system}, *talk], "tools": [TOOL], "tool_choice": "auto"}
    return "/v1/chat/completions", [title, main]


def ask(port: int, path: str, body: Body, patience: float) -> Body:
    """What a client sees of a streamed answer: status, seconds to the first token and in all, the longest silence."""
    began = last = time.monotonic()
    first, silence, lines = None, 0.0, list[str]()
    with httpx.stream(
        "POST", f"http://127.0.0.1:{port}{path}", json={**body, "stream": True}, timeout=patience
    ) as answer:
        status = answer.status_code
        for line in answer.iter_lines():
            now = time.monotonic()
            silence, last = max(silence, now - last), now
            if line.startswith("data: "):
                lines.append(line[6:])
            if first is None and any(word in line for word in WORDS):
                first = now - began
    took = time.monotonic() - began
    told = {"status": status, "first_token_s": round(took if first is None else first, 2), "seconds": round(took, 2)}
    return told | {"silence_s": round(silence, 2), "text": text_of(lines), "input_tokens": tokens_of(lines)}


def parts(lines: list[str]) -> Iterator[Body]:
    yield from (json.loads(line) for line in lines if line.startswith("{"))


def text_of(lines: list[str]) -> str:
    out = ""
    for part in parts(lines):
        delta = part.get("delta")
        choices = part.get("choices") or [{}]
        found = (delta.get("text") or delta.get("thinking")) if isinstance(delta, dict) else delta
        out += found or (choices[0].get("delta") or {}).get("content") or ""
    return out


def tokens_of(lines: list[str]) -> int:
    """Of the prompt, those that were found in the prefix cache included."""
    most = 0
    for part in parts(lines):
        for holder in (part, part.get("message") or {}, part.get("response") or {}):
            usage = holder.get("usage") or {}
            given = usage.get("input_tokens") or usage.get("prompt_tokens") or 0
            most = max(most, given + (usage.get("cache_read_input_tokens") or 0))
    return most


@contextmanager
def serving(model: str, store: Path, options: list[str]) -> Iterator[tuple[int, float]]:
    """A server's port, and the seconds that it took to start."""
    began = time.monotonic()
    target = Target(model, ["--prefix-store", str(store), *options])
    try:
        yield target.port, time.monotonic() - began
    finally:
        target.stop()


def system_prompt(port: int, tokens: int) -> str:
    rules = "".join(f"Rule {i}: read a file before you change it, and say why.\n" for i in range(tokens))
    sample = httpx.post(f"http://127.0.0.1:{port}/tokenize", json={"content": rules[:4000]}, timeout=60).json()
    return rules[: tokens * 4000 // len(sample["tokens"])]


def run(agent: str, args: argparse.Namespace, model: str, until: float) -> Body:
    out: Body = {"agent": agent}
    options = ["--timeout", str(60 * args.minutes), "--log-level", "warning", *args.serve.split()]
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder, "store")
        with serving(model, store, options) as (port, start):
            tokens = args.tokens or TOKENS[agent]
            system = system_prompt(port, tokens) if args.recorded is None else recorded_system(args.recorded)
            path, bodies = traffic(agent, system)
            asked = [ask(port, path, body, max(1.0, until - time.monotonic())) for body in bodies]
            _, again = traffic(agent, system, asked[-1]["text"] or "Yes.")
            second = ask(port, path, again[-1], max(1.0, until - time.monotonic()))
        with serving(model, store, options) as (port, restart):
            after = ask(port, path, bodies[-1], max(1.0, until - time.monotonic()))
            metrics = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=60).text
            out["pages_read"] = int(float(re.findall(r"\noutrider_prefix_pages_read_total ([0-9].*)", metrics)[0]))
    every = [*asked, second, after]
    out |= {"prompt_tokens": asked[-1]["input_tokens"], "start_s": round(start, 1), "second_start_s": round(restart, 1)}
    out |= {"first_turn_s": asked[-1]["seconds"], "first_token_s": asked[-1]["first_token_s"]}
    out |= {"second_turn_s": second["seconds"], "first_token_after_restart_s": after["first_token_s"]}
    out["silence_s"] = max(each["silence_s"] for each in every)
    out["passed"] = {
        "answered": all(each["status"] == 200 for each in every), "same_text": after["text"] == asked[-1]["text"],
        "heard": out["silence_s"] < args.silence,
        "restart": not args.limit or after["first_token_s"] <= args.limit,
    }  # fmt: skip
    return out


def recorded_system(file: Path) -> str:
    """The system prompt of a file of `--record-prompt`."""
    body = json.loads(file.read_text())["body"]
    given = body.get("system") or body.get("instructions") or body["messages"][0]["content"]
    return given if isinstance(given, str) else "\n".join(part["text"] for part in given)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "model", nargs="?", default="random-1.5b", help="as for `outrider serve`, random or random-1.5b"
    )
    parser.add_argument("--agents", default=",".join(TOKENS), help="%(default)s")
    parser.add_argument("--tokens", type=int, help=f"of the system prompt; default: {TOKENS}")
    parser.add_argument("--recorded", type=Path, help="a file of `outrider serve --record-prompt`")
    parser.add_argument("--minutes", type=float, default=30.0, help="for each agent")
    parser.add_argument("--limit", type=float, default=3.0, help="seconds to the first token of a second start; 0: any")
    parser.add_argument("--silence", type=float, default=60.0, help="seconds")
    parser.add_argument("--serve", default="--drafter none", help="more options for `outrider serve`")
    args = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory() as folder:
        model = model_file(args.model, Path(folder))
        for agent in args.agents.split(","):
            results.append(run(agent, args, model, time.monotonic() + 60 * args.minutes))
            print(results[-1], file=sys.stderr, flush=True)
    print(json.dumps({"model": args.model, "agents": results}))
    sys.exit(0 if all(all(each["passed"].values()) for each in results) else 1)


if __name__ == "__main__":
    main()
