"""A batch file over workers that die: each line exactly once."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from outrider.cluster.pool import MOST_DEATHS, WorkerLost, WorkerPool
from outrider.server.batch import BatchLine, BatchProgress, Json, keep_books, read_lines, salt_of
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
    """Answers in a random order and dies by chance, or whenever it sees `poison`."""

    def __init__(self, rng: random.Random, dies: float, poison: str = "") -> None:
        self._rng, self._dies, self._poison = rng, dies, poison

    def answer(self, lines: Sequence[BatchLine]) -> Iterator[list[Json]]:
        todo = list(lines)
        self._rng.shuffle(todo)
        for line in todo:
            name = json.loads(line.text)["custom_id"]
            if self._rng.random() < self._dies or name == self._poison:
                raise WorkerLost
            body = {"usage": {"completion_tokens": 1}, "text": f"answer to {name}"}
            yield [{"id": line.id, "custom_id": name, "response": {"status_code": 200, "body": body}, "error": None}]


def run(source: Path, out: Path, pool: WorkerPool) -> tuple[BatchProgress, list[Json]]:
    progress = keep_books(source, out, salt_of("m", 0), pool.rows, lambda _: None)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert sorted(r["id"] for r in rows) == sorted(
        line.id for line in read_lines(source, salt_of("m", 0))
    )  # each line once
    return progress, rows


@pytest.mark.parametrize("seed", range(5))
def test_every_line_once_whoever_dies(tmp_path: Path, seed: int) -> None:
    """The first worker dies at once and the fourth soon; no more, or a line could be under way in three deaths."""
    rng, lock, chances = random.Random(seed), threading.Lock(), iter([1.0, 0.0, 0.0, 0.3])

    def make() -> Flaky:
        with lock:
            return Flaky(random.Random(rng.random()), next(chances, 0.0))

    pool = WorkerPool(make, workers=3, share=7)
    progress, rows = run(written(tmp_path, 120), tmp_path / "out.jsonl", pool)
    good = {r["custom_id"]: r for r in rows if r["response"] and r["response"]["status_code"] == 200}  # type: ignore[index]
    assert progress.done == 122 and progress.failed == 2 and len(good) == 120 and pool.lost in (1, 2)
    assert all(r["response"]["body"]["text"] == f"answer to {name}" for name, r in good.items())  # type: ignore[index]
    assert {r["error"]["code"] for r in rows if r["error"]} == {"invalid_json", "duplicate_custom_id"}  # type: ignore[index]


def test_a_line_that_kills_gets_a_result_and_the_others_theirs(tmp_path: Path) -> None:
    pool = WorkerPool(lambda: Flaky(random.Random(1), 0.0, "r40"), workers=2, share=1)
    progress, rows = run(written(tmp_path, 60), tmp_path / "out.jsonl", pool)
    assert pool.lost == MOST_DEATHS and progress.failed == 3
    [told] = [r for r in rows if r["custom_id"] == "r40"]
    assert told["response"]["status_code"] == 500 and "3 workers were lost" in json.dumps(told)  # type: ignore[index]


def test_it_goes_on_where_a_local_run_was_stopped(tmp_path: Path) -> None:
    source, out = written(tmp_path, 30), tmp_path / "out.jsonl"
    run(source, out, WorkerPool(lambda: Flaky(random.Random(2), 0.0), workers=1, share=8))
    kept = out.read_text().splitlines()[:17]
    out.write_text("\n".join(kept) + '\n{"id": "torn')
    progress, _ = run(source, out, WorkerPool(lambda: Flaky(random.Random(3), 0.0), workers=2, share=8))
    assert progress.resumed == 17 and out.read_text().splitlines()[:17] == kept


def test_a_worker_that_cannot_be_made_ends_the_run(tmp_path: Path) -> None:
    def make() -> Flaky:
        raise OutriderError("no such model")

    with pytest.raises(OutriderError, match="no such model"):
        run(written(tmp_path, 5), tmp_path / "out.jsonl", WorkerPool(make, workers=2, share=2))


def test_a_worker_lost_while_it_loads_blames_no_line(tmp_path: Path) -> None:
    """Two losses while loading, one with the lines in hand: the line at hand has one death, not three."""
    made = 0

    def make() -> Flaky:
        nonlocal made
        made += 1
        if made in (1, 2, 4, 5):
            raise WorkerLost
        return Flaky(random.Random(4), float(made == 3))

    pool = WorkerPool(make, workers=1, share=4)
    progress, rows = run(written(tmp_path, 12), tmp_path / "out.jsonl", pool)
    assert progress.done == 14 and progress.failed == 2 and pool.lost == 5
    assert sum(r["error"] is None and r["response"]["status_code"] == 200 for r in rows) == 12  # type: ignore[index]


def test_workers_that_are_all_lost_while_loading_end_the_run_and_results_stay(tmp_path: Path) -> None:
    source, out, made = written(tmp_path, 12), tmp_path / "out.jsonl", 0

    class Brief(Flaky):
        """Two answers, then it is gone."""

        def answer(self, lines: Sequence[BatchLine]) -> Iterator[list[Json]]:
            yield from super().answer(lines[:2])
            raise WorkerLost

    def make() -> Flaky:
        nonlocal made
        made += 1
        if made > 1:
            raise WorkerLost
        return Brief(random.Random(5), 0.0)

    with pytest.raises(OutriderError, match=f"{MOST_DEATHS} workers in a row were lost while loading"):
        run(source, out, WorkerPool(make, workers=1, share=3))
    assert made == 1 + MOST_DEATHS
    kept = [json.loads(line) for line in out.read_text().splitlines()]
    assert [r["response"]["status_code"] for r in kept if not r["error"]] == [200, 200]
