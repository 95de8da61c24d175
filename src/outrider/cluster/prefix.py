"""Prefix-aware routing: a request goes to the replica that has seen the beginning of its prompt, unless that replica is
busy; else to the least loaded.

A prefix is identified by bytes alone: the body from the first key that holds a prompt, cut into blocks, each named by a
hash of itself and everything before it. Nothing is parsed or tokenised, and the map only estimates the replicas'
caches: a wrong guess costs a prefill, never correctness.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from typing import Generic, TypeVar

BLOCK_BYTES = 128  # bytes: about 30 tokens of English, two pages of K/V
MAX_BLOCKS = 128  # leading blocks of a prompt that are hashed
MAX_REMEMBERED_BLOCKS = 200_000  # size of the map
PROMPT_KEYS = (b'"messages"', b'"prompt"', b'"input"', b'"system"', b'"instructions"', b'"tools"')
R = TypeVar("R", bound=Hashable)


def prefix_keys(body: bytes) -> tuple[bytes, ...]:
    """Hashes of a prompt's prefixes, the longest last; none if the body is too short to prefer a replica."""
    starts = [at for at in (body.find(key) for key in PROMPT_KEYS) if at >= 0]
    if not starts:
        return ()
    begin = min(starts)
    keys = []
    chain = b""
    for at in range(begin, min(len(body), begin + BLOCK_BYTES * MAX_BLOCKS) - BLOCK_BYTES + 1, BLOCK_BYTES):
        chain = hashlib.blake2b(chain + body[at : at + BLOCK_BYTES], digest_size=8).digest()
        keys.append(chain)
    return tuple(keys)


class PrefixMap(Generic[R]):
    """LRU map of the prefixes sent to each replica."""

    def __init__(self, most: int = MAX_REMEMBERED_BLOCKS) -> None:
        self._most = most
        self._seen: OrderedDict[bytes, dict[R, None]] = OrderedDict()

    def sent(self, keys: Sequence[bytes], replica: R) -> None:
        for key in reversed(keys):  # so that the ends of prompts are evicted first
            self._seen.setdefault(key, {})[replica] = None
            self._seen.move_to_end(key)
        while len(self._seen) > self._most:
            self._seen.popitem(last=False)

    def holders(self, keys: Sequence[bytes], alive: Mapping[R, int]) -> list[R]:
        """Live replicas with the longest prefix of this prompt."""
        for key in reversed(keys):
            replicas = [r for r in self._seen.get(key, ()) if r in alive]
            if replicas:
                return replicas
        return []

    def gone(self, replica: R) -> None:
        """Removes a dead replica: its cache is lost."""
        for key in [key for key, seen in self._seen.items() if replica in seen]:
            del self._seen[key][replica]
            if not self._seen[key]:
                del self._seen[key]


def rank(loads: Mapping[R, int], holders: Sequence[R], slack: int) -> list[list[R]]:
    """Ranks of preference; within a rank the least loaded replica is chosen. `loads`: requests per replica. A replica
    with the prefix is preferred while it has at most `slack` requests more than the least loaded: waiting behind more
    costs more than computing the prefix again."""
    if not loads:
        return []
    least = min(loads.values())
    near = [r for r in holders if loads[r] <= least + slack]
    if not near:
        return [list(loads)]
    others = [r for r in loads if r not in near]
    return [near, others] if others else [near]
