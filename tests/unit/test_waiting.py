"""Whoever waits in a test says how long: the five seconds that httpx waits else are too few where other tests have the
processors."""

from __future__ import annotations

import ast
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
CALLS = {f"httpx.{name}" for name in ("get", "post", "head", "options", "stream", "request", "Client", "AsyncClient")}
CALLS |= {"openai.OpenAI", "urlopen", "urllib.request.urlopen"}


def test_calls_over_the_network_name_their_patience() -> None:
    short = []
    for path in sorted(TESTS.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if (
                isinstance(node, ast.Call)
                and ast.unparse(node.func) in CALLS
                and "timeout" not in {k.arg for k in node.keywords}
            ):
                short.append(f"{path.relative_to(TESTS)}:{node.lineno}: {ast.unparse(node.func)} without timeout=")
    assert not short, "\n".join(short)
