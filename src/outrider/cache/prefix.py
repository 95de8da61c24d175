"""Prefix cache: a full page of K/V is identified by the hash of all tokens up to its end. Torch-free.

Pages form chains (each entry names its parent). A lookup follows the chain from the first page; a hit at n pages needs
every full-attention page and those sliding pages that the window before the hit can still see. Leaves are evicted
first, oldest first, so chains never have holes.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from ..types import GroupName
from .pages import PageGroup, SeqPages

ROOT = b""
Unbroken = Callable[[int], bool]  # no cached prefix may end at this position


def chain(root: bytes, tokens: Sequence[int], pages: int, page_size: int) -> Iterator[bytes]:
    """The chain hashes of the first pages of a text, of 128 bits: a collision would be a wrong answer. root: a
    namespace; texts of two namespaces share no page."""
    key = root
    for start in range(0, pages * page_size, page_size):
        own = b",".join(str(t).encode() for t in tokens[start : start + page_size])
        key = hashlib.blake2b(key + own, digest_size=16).digest()
        yield key


@dataclass
class PrefixEntry:
    parent: bytes
    pages: dict[GroupName, int]  # 0: dropped
    children: int = 0
    used: float = 0.0  # seconds. A hit uses all pages before it too: none is older than its successors


class PrefixCache:
    def __init__(self, groups: dict[GroupName, PageGroup], page_size: int):
        self.groups = groups
        self.page_size = page_size
        self.seconds = time.monotonic
        self.entries: dict[bytes, PrefixEntry] = {}

    def match(
        self, tokens: Sequence[int], limit: int, granularity: int, root: bytes = ROOT, unbroken: Unbroken | None = None
    ) -> tuple[int, dict[GroupName, list[int]]]:
        """The longest usable prefix of `tokens[:limit]`, a multiple of `granularity` long, and its pages per group."""
        found = self.use(chain(root, tokens, limit // self.page_size, self.page_size))
        for count in range(len(found), 0, -1):
            if (count * self.page_size) % granularity or (unbroken is not None and unbroken(count * self.page_size)):
                continue
            first = {name: self.first_page(name, count) for name in self.groups}
            pages = {name: [0] * first[name] + [e.pages[name] for e in found[first[name] : count]] for name in first}
            if all(all(held[first[name] :]) for name, held in pages.items()):
                return count * self.page_size, pages
        return 0, {name: [] for name in self.groups}

    def use(self, keys: Iterable[bytes]) -> list[PrefixEntry]:
        """The cached entries of a chain, marked as used now."""
        found = []
        now = self.seconds()
        for key in keys:
            entry = self.entries.get(key)
            if entry is None or ("full" in entry.pages and not entry.pages["full"]):
                break
            entry.used = now
            found.append(entry)
        return found

    def first_page(self, name: GroupName, count: int) -> int:
        """The first page of a group that is still visible to a sequence continuing after `count` pages."""
        window = self.groups[name].window
        return 0 if window is None else max(0, count * self.page_size - window + 1) // self.page_size

    def page(self, key: bytes, name: GroupName) -> int:
        entry = self.entries.get(key)
        return entry.pages[name] if entry is not None else 0

    def adopt(self, parent: bytes, key: bytes, pages: dict[GroupName, int]) -> None:
        """Take over pages that the caller has filled."""
        self._entry(parent, key, self.seconds()).pages.update(pages)

    def _entry(self, parent: bytes, key: bytes, now: float) -> PrefixEntry:
        entry = self.entries.get(key)
        if entry is None:
            entry = self.entries[key] = PrefixEntry(parent, dict.fromkeys(self.groups, 0))
            if parent in self.entries:
                self.entries[parent].children += 1
        entry.used = now
        return entry

    def insert(
        self, tokens: Sequence[int], count: int, seqs: dict[GroupName, SeqPages], root: bytes = ROOT
    ) -> tuple[list[bytes], int]:
        """Share the first `count` positions (whole pages only). Returns their keys, and how many were there already."""
        keys = list(chain(root, tokens, count // self.page_size, self.page_size))
        known = 0
        parent = root
        now = self.seconds()
        for i, key in enumerate(keys):
            known += key in self.entries
            entry = self._entry(parent, key, now)
            for name, group in self.groups.items():
                page = seqs[name].pages[i]
                if not entry.pages[name] and page:
                    group.pool.retain(page)
                    entry.pages[name] = page
            parent = key
        return keys, known

    def evict(self, name: GroupName, pages: int) -> None:
        """Evict pages until `pages` more are free in a group or nothing is left to evict."""
        pool = self.groups[name].pool
        enough = pool.free + pages
        if self.groups[name].window is not None:  # a sliding page may go alone: the chain stays walkable
            for entry in sorted(self.entries.values(), key=lambda e: e.used):
                if pool.free >= enough:
                    return
                if entry.pages[name]:
                    pool.release(entry.pages[name])
                    entry.pages[name] = 0
            return
        while leaves := sorted((e.used, k) for k, e in self.entries.items() if not e.children):
            for _, key in leaves:
                if pool.free >= enough:
                    return
                self._drop(key)

    def drop_unused(self, seconds: float) -> None:
        """Evict the pages that no request has used for the given number of seconds."""
        since = self.seconds() - seconds
        for key in [k for k, e in self.entries.items() if e.used <= since]:
            self._drop(key)

    def _drop(self, key: bytes) -> None:
        entry = self.entries.pop(key)
        if entry.parent in self.entries:
            self.entries[entry.parent].children -= 1
        for name, page in entry.pages.items():
            if page:
                self.groups[name].pool.release(page)

    def held(self, name: GroupName) -> list[int]:
        return [e.pages[name] for e in self.entries.values() if e.pages[name]]

    def clear(self) -> None:
        self.drop_unused(-math.inf)
