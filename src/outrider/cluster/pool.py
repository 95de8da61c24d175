"""Distributes a batch file's lines over several workers, each a remote engine. Independent of Ray.

Contract: `rows` yields one result for every line that has none, even if workers die. A worker's results count when they
have arrived; its unanswered lines go back to the head of the queue, and another worker replaces it. A line that was
running in `MOST_DEATHS` deaths gets an error result: one poisonous request must not end the run.
"""

from __future__ import annotations

import queue
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from ..server.batch import BadLine, BatchLine, Json, bad_row, claim, parse, refused_row, todo
from ..server.errors import ApiError
from ..types import OutriderError

MOST_DEATHS = 3


class WorkerLost(Exception):
    """The worker is gone."""


class Worker(Protocol):
    def answer(self, lines: Sequence[BatchLine]) -> Iterator[list[Json]]:
        """Yields results as they arrive, in any order. Raises WorkerLost if the worker dies."""
        ...


class WorkerPool:
    def __init__(self, make: Callable[[], Worker], workers: int, share: int) -> None:
        """`share`: lines per assignment to a worker."""
        self._make, self._workers, self._share = make, workers, share
        self._lock = threading.Lock()
        self._results: queue.Queue[list[Json] | Exception | None] = queue.Queue()
        self._back: deque[BatchLine] = deque()  # lines of workers that died
        self._deaths: Counter[str] = Counter()
        self._stopping = False
        self.lost = 0  # workers

    def rows(self, lines: Iterator[BatchLine], finished: set[str]) -> Iterator[list[Json]]:
        names: set[str] = set()
        fresh = todo(lines, finished, names)
        threads = [threading.Thread(target=self._work, args=(fresh, names), daemon=True) for _ in range(self._workers)]
        for thread in threads:
            thread.start()
        running = len(threads)
        try:
            while running:
                got = self._results.get()
                if got is None:
                    running -= 1
                elif isinstance(got, Exception):
                    raise got
                else:
                    yield got
            if self._back:  # the last workers died after the others had finished
                yield from self.rows(iter(()), finished)
        finally:
            self._stopping = True

    # ---- on a worker's thread

    def _work(self, fresh: Iterator[BatchLine], names: set[str]) -> None:
        worker: Worker | None = None
        unmade = 0  # in a row
        try:
            while lines := self._take(fresh, names):
                open = {line.id: line for line in lines}
                try:
                    worker = worker or self._make()
                except WorkerLost as e:  # it never had a line: none of them is to blame
                    unmade += 1
                    if unmade >= MOST_DEATHS:
                        raise OutriderError(
                            f"{unmade} workers in a row were lost while loading the model; results so far are kept"
                        ) from e
                    with self._lock:
                        self.lost += 1
                        self._back.extendleft(reversed(lines))
                    continue
                unmade = 0
                try:
                    for rows in worker.answer(lines):
                        for row in rows:
                            del open[str(row["id"])]
                        self._results.put(rows)
                    if open:
                        raise WorkerLost
                except WorkerLost:
                    worker = None
                    self._lost(list(open.values()))
            self._results.put(None)
        except Exception as e:
            self._results.put(e)

    def _take(self, fresh: Iterator[BatchLine], names: set[str]) -> list[BatchLine]:
        """The next lines; a line that is no valid request gets its result at once."""
        taken: list[BatchLine] = []
        with self._lock:
            while len(taken) < self._share and not self._stopping:
                if self._back:
                    taken.append(self._back.popleft())
                    continue
                line = next(fresh, None)
                if line is None:
                    break
                try:
                    claim(line, names)
                    taken.append(line)
                except BadLine as e:
                    self._results.put([bad_row(line, e)])
        return taken

    def _lost(self, lines: list[BatchLine]) -> None:
        with self._lock:
            self.lost += 1
            self._deaths.update(line.id for line in lines)
            given_up = [line for line in lines if self._deaths[line.id] >= MOST_DEATHS]
            self._back.extendleft(line for line in reversed(lines) if self._deaths[line.id] < MOST_DEATHS)
        if given_up:
            message = f"{MOST_DEATHS} workers were lost while they had this request."
            error = ApiError(500, message, code="engine_error")
            self._results.put([refused_row(line, parse(line)[0], error) for line in given_up])
