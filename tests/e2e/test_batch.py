"""`outrider batch` under SIGKILL: a thousand lines, two kills, each line exactly once and what an undisturbed run
says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tests import tiny
from tests.kernels import put_kernels

LINES = 1000


def count(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


@pytest.mark.timeout(1200)  # five starts of the program: seconds, but not on a machine that does other things
def test_killed_twice_each_line_once(tmp_path: Path) -> None:
    model = tiny.write_target("llama", tmp_path / "tiny")
    source = tmp_path / "in.jsonl"
    with source.open("w") as file:
        for i in range(LINES):
            body: dict[str, Any] = {
                "model": "tiny",
                "max_tokens": 1 + i % 4,
                "temperature": (i % 3) / 2,
                "prompt": f"Line {i % 90}",
            }
            file.write(
                json.dumps({"custom_id": f"n{i}", "method": "POST", "url": "/v1/completions", "body": body}) + "\n"
            )
    environment = os.environ | {
        "OUTRIDER_CACHE": str(put_kernels(tmp_path / "cache")),
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "OMP_NUM_THREADS": "1",
    }

    def start(out: Path) -> subprocess.Popen[bytes]:
        command = [
            sys.executable,
            "-m",
            "outrider.cli.main",
            "batch",
            str(source),
            "--out",
            str(out),
            "--model",
            str(model),
        ]
        options = ["--drafter", "ngram", "--threads", "1", "--max-context", "128", "--max-concurrent", "64"]
        return subprocess.Popen(
            [*command, *options], env=environment, stderr=subprocess.PIPE, cwd=Path(__file__).parents[2]
        )

    out = tmp_path / "killed.jsonl"
    for stop_at in (150, 500):  # far from the end: whoever counts may get a processor late
        process = start(out)
        while count(out) < stop_at:
            assert process.poll() is None, process.stderr.read().decode() if process.stderr else ""
            time.sleep(0.002)
        process.kill()
        process.communicate()
        assert stop_at <= count(out) < LINES
    undisturbed = tmp_path / "whole.jsonl"
    for path in (out, undisturbed):
        process = start(path)
        _, said = process.communicate(timeout=600)
        assert process.returncode == 0, said.decode()
        assert "0 failed" in said.decode()

    def answers(path: Path) -> dict[str, Any]:
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        assert len(rows) == LINES
        return {r["custom_id"]: (r["id"], r["response"]["body"]["choices"]) for r in rows}

    assert answers(out) == answers(undisturbed) and len(answers(out)) == LINES
