"""Stores for clients: /v1/files, the input and output files of batches, in a temporary folder, and the answers of
the Responses API, which later requests may fetch or continue, in memory. Both are limited in number and bytes and end
with the server. A client sees only its own, and cannot take or evict what belongs to others: one client has at most
seven eighths of the files, and the oldest response of the client with the most is evicted."""

from __future__ import annotations

import json
import re
import tempfile
import threading
import time
import uuid
from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from .answer import Json
from .errors import ApiError, bad
from .multipart import FormPart

MAX_FILES = 256
MAX_FILE_BYTES = 256 << 20
MAX_RESPONSES = 1024
MAX_RESPONSE_BYTES = 64 << 20


TAGGED_ID = re.compile(r"(?:file-|batch_|resp_)([0-9a-f]{8})-[0-9a-f]+")


def share_of_client(limit: int) -> int:
    """How much of a limit one client may have, so that it alone never shuts out the others."""
    return limit - limit // 8


def largest_holder(holdings: Iterable[tuple[str, int]]) -> str:
    """The client with the most. `holdings`: client and amount of every object."""
    amounts: Counter[str] = Counter()
    for client, amount in holdings:
        amounts[client] += amount
    return amounts.most_common(1)[0][0]


def stored_id(prefix: str, tag: str, unique: str | None = None) -> str:
    """A new id. `tag`: the replica that stores the object, in a cluster."""
    unique = uuid.uuid4().hex if unique is None else unique
    return f"{prefix}{tag}-{unique}" if tag else f"{prefix}{unique}"


def absent(id: str, tag: str) -> str:
    """The error for an id that is not stored here."""
    match = TAGGED_ID.fullmatch(id)
    if tag and match is not None and match[1] != tag:
        return "it was stored by a replica that is gone"
    return "it was not stored, or was deleted or evicted"


@dataclass
class StoredFile:
    client: str
    name: str
    purpose: str  # batch | batch_output
    path: Path
    id: str
    size: int = 0
    created: int = field(default_factory=lambda: int(time.time()))

    def told(self) -> Json:
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.size,
            "created_at": self.created,
            "filename": self.name,
            "purpose": self.purpose,
            "status": "processed",
            "expires_at": None,
        }


class Owned(Protocol):
    client: str

    def told(self) -> Json: ...


T = TypeVar("T", bound=Owned)


class ClientStore(Generic[T]):
    """Stored objects by id. A client sees only its own."""

    def __init__(self, what: str, tag: str = "") -> None:
        """`tag`: the replica that stores them, in a cluster."""
        self.tag = tag
        self._what = what
        self._of = dict[str, T]()

    def get(self, client: str, id: str) -> T:
        stored = self._of.get(id)
        if stored is None or stored.client != client:
            message = f"There is no {self._what} '{id[:100]}' here: {absent(id, self.tag)}."
            raise ApiError(404, message, f"{self._what}_id")
        return stored

    def listed(self, client: str) -> Json:
        data = [one.told() for one in reversed(self._of.values()) if one.client == client]
        return {"object": "list", "data": data, "has_more": False}


class FileStore(ClientStore[StoredFile]):
    def __init__(self, tag: str = "") -> None:
        super().__init__("file", tag)

    @cached_property
    def _folder(self) -> tempfile.TemporaryDirectory[str]:
        """The folder of files, created with the first one; only its owner can read it."""
        return tempfile.TemporaryDirectory(prefix="outrider-files-")

    def new(self, client: str, name: str, purpose: str) -> StoredFile:
        num_own = sum(file.client == client for file in self._of.values())
        if len(self._of) >= MAX_FILES or num_own >= share_of_client(MAX_FILES):
            message = f"{num_own} files of this client and {len(self._of)} in all are stored here"
            limits = f"there is room for {share_of_client(MAX_FILES)} and {MAX_FILES}: delete some"
            raise ApiError(413, f"{message}; {limits}.", code="storage_full")
        path = Path(self._folder.name) / uuid.uuid4().hex
        file = StoredFile(client, name[:200], purpose, path=path, id=stored_id("file-", self.tag))
        self._of[file.id] = file
        return file

    def append(self, file: StoredFile, data: bytes) -> None:
        total = sum(one.size for one in self._of.values()) + len(data)
        of_client = sum(one.size for one in self._of.values() if one.client == file.client) + len(data)
        share = share_of_client(MAX_FILE_BYTES)
        if total > MAX_FILE_BYTES or of_client > share:
            limits = f"{MAX_FILE_BYTES >> 20} MiB together, or more than {share >> 20} MiB of one client"
            raise ApiError(413, f"The stored files would take more than {limits}: delete some.", code="storage_full")
        with file.path.open("ab") as out:
            out.write(data)
        file.size += len(data)

    def upload(self, client: str, parts: dict[str, FormPart]) -> StoredFile:
        """parts: of a form."""
        if "file" not in parts:
            raise bad("Missing part: 'file'.", "file", "missing_field")
        if "purpose" not in parts or parts["purpose"].text("purpose") != "batch":
            raise bad("purpose must be 'batch': files have no other use here.", "purpose")
        uploaded = parts["file"]
        file = self.new(client, uploaded.filename or "batch.jsonl", "batch")
        try:
            self.append(file, uploaded.content)
        except ApiError:
            self.delete(file)
            raise
        return file

    def delete(self, file: StoredFile) -> Json:
        self._of.pop(file.id, None)
        file.path.unlink(missing_ok=True)
        return {"id": file.id, "object": "file", "deleted": True}

    def close(self) -> None:
        if "_folder" in self.__dict__:
            self._folder.cleanup()


@dataclass(frozen=True)
class StoredResponse:
    messages: list[Json]  # the conversation up to and including the answer, without instructions
    items: list[Json]  # the input as sent
    response: Json


class ResponseStore:
    """Answers, of which the least recently used one of the client with the most is evicted first.

    Bodies are read in other threads than answers are written in: hence the lock. They are kept as JSON text: as
    objects, 64 MB of it could be a gigabyte, which every full garbage collection walks.
    """

    def __init__(self, tag: str = "") -> None:
        """`tag`: the replica that stores them, in a cluster."""
        self.tag = tag
        self._of: OrderedDict[tuple[str, str], str] = OrderedDict()
        self._lock = threading.Lock()
        self.bytes = 0

    def put(self, client: str, messages: list[Json], items: list[Json], response: Json) -> None:
        text = json.dumps([messages, items, response])
        if len(text) > MAX_RESPONSE_BYTES:
            return
        with self._lock:
            self._of[client, str(response["id"])] = text
            self.bytes += len(text)
            while len(self._of) > MAX_RESPONSES:
                self._evict_of(largest_holder((client, 1) for client, _ in self._of))
            while self.bytes > MAX_RESPONSE_BYTES:
                self._evict_of(largest_holder((client, len(stored)) for (client, _), stored in self._of.items()))

    def _evict_of(self, client: str) -> None:
        """Evicts the least recently used response of this client."""
        oldest = next(key for key in self._of if key[0] == client)
        self.bytes -= len(self._of.pop(oldest))

    def get(self, client: str, id: str, param: str | None = None) -> StoredResponse:
        """param: the request's field with the id, which an error names."""
        with self._lock:
            text = self._of.get((client, id))
            if text is not None:
                self._of.move_to_end((client, id))
        if text is not None:
            return StoredResponse(*json.loads(text))
        if param is None:
            raise ApiError(404, f"There is no response '{id[:100]}' here: {absent(id, self.tag)}.")
        message = f"Previous response with id '{id[:100]}' not found: {absent(id, self.tag)}."
        raise ApiError(400, message, param, code="previous_response_not_found")

    def items(self, client: str, id: str) -> Json:
        return {"object": "list", "data": self.get(client, id).items, "has_more": False}

    def delete(self, client: str, id: str) -> Json:
        self.get(client, id)
        with self._lock:
            self.bytes -= len(self._of.pop((client, id), ""))
        return {"id": id, "object": "response", "deleted": True}
