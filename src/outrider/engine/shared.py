"""Shares one engine among several concurrent callers: threads, or streams that are read in turn.

A waiting caller runs the next step for all callers; those that submit requests go first. A caller that stops reading
aborts its requests. If a step fails, all requests end with an error.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Generator, Sequence
from contextlib import suppress

from ..types import OutriderError
from .engine import Engine, Event
from .step import Request

Box = deque[Event | OutriderError]


class SharedEngine:
    def __init__(self, engine: Engine):
        self.engine = engine
        self._lock = threading.RLock()
        self._turns = threading.Condition(self._lock)
        self._stepping = False  # one of the callers runs a step
        self._joining = 0  # callers that wait to submit requests
        self._waiting = 0  # callers that wait for another caller's step
        self._boxes: dict[str, Box] = {}  # by request: the queue that its caller reads
        self._left: deque[str] = deque()  # requests whose callers are gone

    def run(self, requests: Sequence[Request]) -> Generator[Event, None, None]:
        """Events of these requests until all have ended. If one of them can never run, none starts."""
        box: Box = deque()
        self._join(requests, box)
        going = {request.id for request in requests}
        try:
            while going:
                while not box:
                    self._wait_or_step(box)
                event = box.popleft()
                if isinstance(event, OutriderError):
                    raise event
                if event.finish_reason is not None:
                    going.discard(event.id)
                yield event
        finally:
            there = [request.id for request in requests if self._boxes.pop(request.id, None) is not None]
            self._left.extend(id for id in there if id in going)
            # An iterator may be collected in the middle of a step, even in the thread that runs it: then the next step
            # aborts its requests.
            if self._left:
                with self._lock:
                    free = not self._stepping and not self._joining
                    self._stepping = self._stepping or free
                if free:
                    self._step()

    def _join(self, requests: Sequence[Request], box: Box) -> None:
        with self._lock:
            self._joining += 1
            try:
                self._turns.wait_for(lambda: not self._stepping)
                for request in requests:
                    self.engine.validate(request)
                try:
                    for request in requests:
                        self.engine.submit(request)
                        self._boxes[request.id] = box
                except BaseException:
                    for request in requests:
                        if self._boxes.get(request.id) is box:
                            del self._boxes[request.id]
                            self.engine.abort(request.id)
                    raise
            finally:
                self._joining -= 1
                self._turns.notify_all()

    def _wait_or_step(self, box: Box) -> None:
        with self._lock:
            while not box and (self._stepping or self._joining):
                self._waiting += 1
                self._turns.wait()
                self._waiting -= 1
            if box:
                return  # another caller's step has produced it
            self._stepping = True
        self._step()

    def _step(self) -> None:
        """Called by the caller that holds the turn; releases it."""
        try:
            while self._left:
                self.engine.abort(self._left.popleft())
            for event in self.engine.step():
                box = self._boxes.get(event.id)
                if box is not None:
                    box.append(event)
        except BaseException as error:
            self._fail(error)
            raise
        finally:
            with self._lock:
                self._stepping = False
                if self._waiting or self._joining:
                    self._turns.notify_all()

    def _fail(self, error: BaseException) -> None:
        boxes = self._boxes
        self._boxes = {}
        failure = OutriderError(f"a step that ran for several callers failed in one of them: {type(error).__name__}")
        for id, box in boxes.items():
            with suppress(Exception):
                self.engine.abort(id)
            box.append(failure)
