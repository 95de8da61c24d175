"""Finds the owner of a stored file, batch or response: its id carries the tag of the replica that issued it.

A replica keeps clients' objects in its own memory and folder, so a request that names such an id must reach it. The tag
follows from the replica's name: ingresses need no agreement, and an id shows if its owner is gone.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

from ..server.errors import ApiError, check_size
from ..server.stores import TAGGED_ID

OWNER_FIELDS = ("previous_response_id", "input_file_id")  # fields of a body that determine its replica
LISTS = ("/v1/files", "/v1/batches")  # merged from all replicas


def replica_tag(name: str) -> str:
    return hashlib.blake2b(name.encode(), digest_size=4).hexdigest()


def owner_of(path: str, body: bytes) -> str:
    """Tag of the replica that must answer; empty if any may. Parses bodies that name an object: call it off the event
    loop for large ones."""
    in_path = TAGGED_ID.search(path)
    if in_path is not None:
        return in_path[1]
    for field in OWNER_FIELDS:
        if f'"{field}"'.encode() not in body:
            continue
        try:
            check_size(body)
            fields = json.loads(body)
        except (ApiError, ValueError, RecursionError):
            return ""  # the replica reports the error
        value = fields.get(field) if isinstance(fields, dict) else None
        in_body = TAGGED_ID.fullmatch(value) if isinstance(value, str) else None
        if in_body is not None:
            return in_body[1]
    return ""


def merged_list(answers: Sequence[bytes]) -> dict[str, object]:
    """Merges the lists of all replicas, newest first."""
    items = [item for answer in answers for item in json.loads(answer)["data"]]
    items.sort(key=lambda item: item["created_at"], reverse=True)
    return {"object": "list", "data": items, "has_more": False}
