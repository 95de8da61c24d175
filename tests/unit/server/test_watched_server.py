"""The watch of the stress tests runs on an engine of today, and tells whose rows took the time."""

from __future__ import annotations

import io
import json

import pytest
from tests.engines import request, run, tiny_engine
from tests.stress import watched_server
from tests.stress.server_process import shares

from outrider.engine import engine as engine_module
from outrider.engine.grammar import GrammarMatcher


def test_every_step_is_recorded_with_the_rows_of_each_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """It read fields that a step had no longer, so every step of a watched server failed."""
    monkeypatch.setattr(engine_module.Engine, "step", engine_module.Engine.step)  # what the watch replaces is restored
    monkeypatch.setattr(GrammarMatcher, "bits", GrammarMatcher.bits)
    monkeypatch.setattr(engine_module, "pick", engine_module.pick)
    out = io.StringIO()
    watched_server.watch_steps(out)
    requests = [request("a", [5, 6, 7, 8], k=0, max_tokens=3), request("b", [5] * 9, k=0, max_tokens=3)]
    for r in requests:
        r.client = r.id
    run(tiny_engine(drafter=None), requests)
    steps = [json.loads(line) for line in out.getvalue().splitlines()]
    decode = [decode_rows for *_, decode_rows, _ in steps]
    prompts = [prompt_rows for *_, prompt_rows in steps]
    assert sum(rows.get("a", 0) for rows in decode) == sum(rows.get("b", 0) for rows in decode) == 3
    # the last token of a prompt runs in the first decode step
    assert [sum(rows.get(client, 0) for rows in prompts) for client in "ab"] == [3, 8]
    assert [at for at, *_ in steps] == sorted(at for at, *_ in steps)


def test_shares_of_a_time() -> None:
    steps = [
        json.dumps([1.0, 0.4, 0.1, 0.1, "host", {"x": 3, "y": 1}, {"y": 8}]),
        json.dumps([9.0, 0.4, 0.0, 0.0, "host", {"x": 3}, {}]),  # outside
    ]
    by_client = shares(steps, [(0.5, 1.5)], {"x": "the client"})
    assert by_client == {
        "waiting": 0.6,
        "rows of the client": 0.15,
        "masks": 0.1,
        "prompts of y": 0.1,
        "rows of y": 0.05,
    }
