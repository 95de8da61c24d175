"""Who gets a request: the replica that has seen the beginning of its prompt, unless that one is busy; else the least
loaded.

A prompt's beginning is known by its bytes alone: the body from the first key that holds a prompt, cut into blocks, each
named by a hash of itself and everything before it. No text is parsed and nothing is tokenised; what differs in blanks
or in the order of keys is routed as another prompt, which costs a prefill and never an answer. The map is a guess about
caches that others own: a replica that has forgotten a prefix computes it again.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from typing import Generic, TypeVar

BLOCK = 128  # bytes: about 30 tokens of English, two pages of K/V
BLOCKS = 128  # of a prompt's beginning are looked at
MOST = 200_000  # blocks remembered
PROMPT_KEYS = (b'"messages"', b'"prompt"', b'"input"', b'"system"', b'"instructions"', b'"tools"')
R = TypeVar("R", bound=Hashable)


def prefix_keys(body: bytes) -> tuple[bytes, ...]:
    """The names of a prompt's blocks, longest last; none of a body too short to be worth a preference."""
    starts = [at for at in (body.find(key) for key in PROMPT_KEYS) if at >= 0]
    if not starts:
        return ()
    begin = min(starts)
    keys, chain = [], b""
    for at in range(begin, min(len(body), begin + BLOCK * BLOCKS) - BLOCK + 1, BLOCK):
        chain = hashlib.blake2b(chain + body[at : at + BLOCK], digest_size=8).digest()
        keys.append(chain)
    return tuple(keys)


class PrefixMap(Generic[R]):
    """Which replicas were sent which beginnings; the least recently used are forgotten."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._seen: OrderedDict[bytes, dict[R, None]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._seen)

    def sent(self, keys: Sequence[bytes], replica: R) -> None:
        for key in reversed(keys):  # so that what is forgotten first are the ends
            self._seen.setdefault(key, {})[replica] = None
            self._seen.move_to_end(key)
        while len(self._seen) > self._most:
            self._seen.popitem(last=False)

    def holders(self, keys: Sequence[bytes], alive: Mapping[R, int]) -> list[R]:
        """Of the replicas that are alive those with the longest beginning of this prompt."""
        for key in reversed(keys):
            found = [r for r in self._seen.get(key, ()) if r in alive]
            if found:
                return found
        return []

    def gone(self, replica: R) -> None:
        """A replica has died, and its cache with it."""
        for key in [key for key, seen in self._seen.items() if replica in seen]:
            del self._seen[key][replica]
            if not self._seen[key]:
                del self._seen[key]


def rank(loads: Mapping[R, int], holders: Sequence[R], slack: int) -> list[list[R]]:
    """Replicas by preference, in ranks. Within a rank the least loaded is taken.

    `loads`: requests each replica has. A holder is preferred while it has at most `slack` more than the least loaded:
    waiting behind more than that costs more than computing the prefix again.
    """
    if not loads:
        return []
    least = min(loads.values())
    near = [r for r in holders if loads[r] <= least + slack]
    if not near:
        return [list(loads)]
    others = [r for r in loads if r not in near]
    return [near, others] if others else [near]
