"""Stored answers of the Responses API, which later requests may fetch or continue. They are in memory, limited in
number and bytes (LRU), and end with the server. A client finds only its own answers.

They are kept as JSON text: as objects, 64 MB of it could be a gigabyte, which every full garbage collection walks."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from dataclasses import dataclass

from .answer import Json
from .errors import ApiError

MOST_RESPONSES = 1024
MOST_BYTES = 64 << 20


@dataclass(frozen=True)
class Stored:
    messages: list[Json]  # of the conversation, without instructions, up to and with the answer
    items: list[Json]  # what was sent as input
    response: Json


class ResponseStore:
    """Bodies are read in other threads than answers are written in: hence the lock."""

    def __init__(self, most: int = MOST_RESPONSES, most_bytes: int = MOST_BYTES) -> None:
        self._most, self._most_bytes = most, most_bytes
        self._of: OrderedDict[tuple[str, str], str] = OrderedDict()
        self._lock = threading.Lock()
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._of)

    def put(self, client: str, messages: list[Json], items: list[Json], response: Json) -> None:
        text = json.dumps([messages, items, response])
        if len(text) > self._most_bytes:
            return
        with self._lock:
            self._of[client, str(response["id"])] = text
            self.bytes += len(text)
            while len(self._of) > self._most or self.bytes > self._most_bytes:
                self.bytes -= len(self._of.popitem(last=False)[1])

    def get(self, client: str, id: str, param: str | None = None) -> Stored:
        """param: the field of a request that names it, which is then the one at fault."""
        with self._lock:
            found = self._of.get((client, id))
            if found is not None:
                self._of.move_to_end((client, id))
        if found is not None:
            return Stored(*json.loads(found))
        if param is None:
            raise ApiError(404, f"There is no response '{id[:100]}' here: it was not stored, or made room for others.")
        message = f"Previous response with id '{id[:100]}' not found: it was not stored, or made room for others."
        raise ApiError(400, message, param, "previous_response_not_found")

    def items(self, client: str, id: str) -> Json:
        return {"object": "list", "data": self.get(client, id).items, "has_more": False}

    def delete(self, client: str, id: str) -> Json:
        self.get(client, id)
        with self._lock:
            self.bytes -= len(self._of.pop((client, id), ""))
        return {"id": id, "object": "response", "deleted": True}
