"""One engine and several callers at once: threads, streams that are read in turn, an answer while another is on its way.

Each caller has the events of its own requests, all of them and in order. Whoever waits for one makes the next step, which brings
everybody's on; one step runs at a time. A caller who leaves early takes its requests along.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Generator, Sequence

from .engine import Engine, Event
from .step import Request


class SharedEngine:
    def __init__(self, engine: Engine):
        self.engine = engine
        self._turn = threading.Lock()  # who has it makes the step
        self._boxes: dict[str, deque[Event]] = {}  # by request: where its caller looks
        self._left: deque[str] = deque()  # requests whose callers are gone

    def run(self, requests: Sequence[Request]) -> Generator[Event, None, None]:
        """Events of these requests until all have ended; none of them begins where one of them can never run."""
        box: deque[Event] = deque()
        with self._turn:
            for request in requests:
                self.engine.validate(request)
            for request in requests:
                self.engine.submit(request)
                self._boxes[request.id] = box
        going = {request.id for request in requests}
        try:
            while going:
                while not box:
                    with self._turn:
                        if not box:  # somebody else's step may have brought it while we waited for our turn
                            self._step()
                event = box.popleft()
                if event.finish_reason is not None:
                    going.discard(event.id)
                yield event
        finally:
            for request in requests:
                del self._boxes[request.id]
            self._left.extend(going)
            # An iterator may be collected in the middle of a step, even in the thread that makes it: then the next step sees to it.
            if going and self._turn.acquire(blocking=False):
                try:
                    self._step()
                finally:
                    self._turn.release()

    def _step(self) -> None:
        while self._left:
            self.engine.abort(self._left.popleft())
        for event in self.engine.step():
            box = self._boxes.get(event.id)
            if box is not None:
                box.append(event)
