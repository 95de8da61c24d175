"""A batch file over workers that die: each line exactly once."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path

import pytest

from outrider.server.batch import (
    MAX_DEATHS,
    BatchFile,
    BatchLine,
    BatchProgress,
    Json,
    WorkerLost,
    WorkerPool,
    read_lines,
)
from outrider.types import OutriderError


def written(folder: Path, count: int) -> Path:
    lines = [
        {"custom_id": f"r{i}", "url": "/v1/completions", "body": {"model": "m", "prompt": f"p{i}"}}
        for i in range(count)
    ]
    rows = [json.dumps(line) for line in lines]
    rows[3:3] = ["not json", rows[0]]  # a line that is none, and a custom_id for the second time
    source = folder / "in.jsonl"
    source.write_text("\n".join(rows) + "\n")
    return source


class Flaky:
    """A worker that lets others go first now and then, and dies by chance, or whenever it sees `poison`."""

    def __init__(self, rng: random.Random, dies: float, poison: str = "") -> None:
        self._rng = rng
        self._dies = dies
        self._poison = poison
        self.dead = False

    async def __call__(self, line: BatchLine, url: str, body: Json) -> tuple[int, Json]:
        for _ in range(self._rng.randrange(5)):
            await asyncio.sleep(0)
        self.dead = self.dead or self._rng.random() < self._dies or body["prompt"] == self._poison
        if self.dead:
            raise WorkerLost
        return 200, {"usage": {"completion_tokens": 1}, "text": f"answer to {body['prompt']}"}


class Makers:
    """The fate of each worker that is made: None is lost while it loads; the last one holds for all that follow."""

    def __init__(self, *each: Flaky | None) -> None:
        self._each = each
        self.made = 0

    async def __call__(self) -> Flaky:
        self.made += 1
        worker = self._each[min(self.made, len(self._each)) - 1]
        await asyncio.sleep(0)
        if worker is None:
            raise WorkerLost
        return worker


def run(source: Path, out: Path, make: Makers, workers: int, most: int) -> tuple[BatchProgress, list[Json]]:
    progress = asyncio.run(BatchFile(source, out, "m").run(WorkerPool(make, workers).answer, most))
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert sorted(r["id"] for r in rows) == sorted(line.id for line in read_lines(source, "m 0"))  # each line once
    return progress, rows


def flaky(seed: int, dies: float = 0.0, poison: str = "") -> Flaky:
    return Flaky(random.Random(seed), dies, poison)


@pytest.mark.parametrize("seed", range(5))
def test_every_line_once_whoever_dies(tmp_path: Path, seed: int) -> None:
    """Two workers die; no more, or a line could be under way in three deaths."""
    make = Makers(flaky(seed, 1.0), flaky(seed), flaky(seed, 0.05), flaky(seed))
    progress, rows = run(written(tmp_path, 120), tmp_path / "out.jsonl", make, workers=3, most=21)
    good = {r["custom_id"]: r for r in rows if r["response"] and r["response"]["status_code"] == 200}  # type: ignore[index]
    assert progress.done == 122 and progress.failed == 2 and len(good) == 120 and make.made in (4, 5)
    assert all(r["response"]["body"]["text"] == f"answer to p{name[1:]}" for name, r in good.items())  # type: ignore[index]
    assert {r["error"]["code"] for r in rows if r["error"]} == {"invalid_json", "duplicate_custom_id"}  # type: ignore[index]


def test_a_line_that_kills_gets_a_result_and_the_others_theirs(tmp_path: Path) -> None:
    make = Makers(*(flaky(i, poison="p40") for i in range(9)))
    progress, rows = run(written(tmp_path, 60), tmp_path / "out.jsonl", make, workers=2, most=1)
    assert make.made == 1 + MAX_DEATHS and progress.failed == 3
    [result] = [r for r in rows if r["custom_id"] == "r40"]
    assert result["response"]["status_code"] == 500 and "3 workers were lost" in json.dumps(result)  # type: ignore[index]


def test_it_goes_on_where_a_local_run_was_stopped(tmp_path: Path) -> None:
    source = written(tmp_path, 30)
    out = tmp_path / "out.jsonl"
    run(source, out, Makers(flaky(2)), workers=1, most=8)
    lines = out.read_text().splitlines()[:17]
    out.write_text("\n".join(lines) + '\n{"id": "torn')
    progress, _ = run(source, out, Makers(flaky(3)), workers=2, most=16)
    assert progress.resumed == 17 and out.read_text().splitlines()[:17] == lines


def test_a_worker_that_cannot_be_made_ends_the_run(tmp_path: Path) -> None:
    class Unknown(Makers):
        async def __call__(self) -> Flaky:
            raise OutriderError("no such model")

    with pytest.raises(OutriderError, match="no such model"):
        run(written(tmp_path, 5), tmp_path / "out.jsonl", Unknown(), workers=2, most=4)


def test_a_worker_lost_while_it_loads_blames_no_line(tmp_path: Path) -> None:
    """Two losses while loading, one with the lines in hand, and two more: the lines at hand have one death."""
    make = Makers(None, None, flaky(4, 1.0), None, None, flaky(4))
    progress, rows = run(written(tmp_path, 12), tmp_path / "out.jsonl", make, workers=1, most=4)
    assert progress.done == 14 and progress.failed == 2 and make.made == 6
    assert sum(r["error"] is None and r["response"]["status_code"] == 200 for r in rows) == 12  # type: ignore[index]


def test_workers_that_are_all_lost_while_loading_end_the_run_and_results_stay(tmp_path: Path) -> None:
    source = written(tmp_path, 12)
    out = tmp_path / "out.jsonl"
    make = Makers(flaky(5, poison="p2"), None)
    with pytest.raises(OutriderError, match=f"{MAX_DEATHS} workers in a row were lost while loading"):
        run(source, out, make, workers=1, most=1)
    assert make.made == 1 + MAX_DEATHS
    record = [json.loads(line) for line in out.read_text().splitlines()]
    assert [r["response"]["status_code"] for r in record if not r["error"]] == [200, 200]
