"""Prefix cache: a full page of K/V is identified by the hash of all tokens up to its end. Torch-free.

A hit at n pages needs every page of full layers and those of sliding layers that the window before the hit can still
see. With full layers the entries form trees without holes: each names its parent, and only leaves are evicted, least
recently used first. Without full layers any entry may go, and an entry without pages is dropped.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..types import GroupName
from .pages import PageGroup, SeqPages

ROOT = b""
Unbroken = Callable[[int], bool]  # no cached prefix may end at this position


class PrefixChain:
    """The keys of a growing text's pages: each the hash of all tokens up to the page's end, computed once.

    Keys have 128 bits: a collision would be a wrong answer. root: a namespace; texts of two namespaces share no page.
    """

    def __init__(self, page_size: int, root: bytes = ROOT):
        self.page_size = page_size
        self.root = root
        self.keys: list[bytes] = []
        self.num_shared = 0  # the first pages, which are in the cache unless they were evicted since
        self.files_used_at = 0.0  # the timestamp of its files on disk

    def extend(self, tokens: Sequence[int], count: int) -> None:
        """Compute the keys of the whole pages among the first `count` tokens. tokens: the text, which only grows."""
        key = self.keys[-1] if self.keys else self.root
        for start in range(len(self.keys) * self.page_size, count - self.page_size + 1, self.page_size):
            page = b",".join(str(token).encode() for token in tokens[start : start + self.page_size])
            key = hashlib.blake2b(key + page, digest_size=16).digest()
            self.keys.append(key)

    def parent(self, number: int) -> bytes:
        """The key before that of page `number`."""
        return self.keys[number - 1] if number > 0 else self.root


@dataclass
class PrefixEntry:
    parent: bytes
    pages: dict[GroupName, int]  # 0: dropped
    children: int = 0
    used: float = 0.0  # seconds


class PrefixCache:
    def __init__(self, groups: dict[GroupName, PageGroup], page_size: int):
        self.groups = groups
        self.page_size = page_size
        self.seconds = time.monotonic
        # least recently used first; of the pages that one call has used, the last of the text first
        self.entries: OrderedDict[bytes, PrefixEntry] = OrderedDict()
        self.has_full = any(group.window is None for group in groups.values())
        # the entries with a page in a sliding group, least recently used first; of one text the first page first,
        # because the longest hits need the last ones
        self._sliding: dict[GroupName, OrderedDict[bytes, None]] = {
            name: OrderedDict() for name, group in groups.items() if group.window is not None
        }

    def match(
        self, chain: PrefixChain, limit: int, granularity: int, unbroken: Unbroken | None = None
    ) -> tuple[int, dict[GroupName, list[int]]]:
        """The longest usable prefix of at most `limit` positions, a multiple of `granularity`, and its pages."""
        entries = self.use(chain.keys[: max(0, limit) // self.page_size])
        runs = {name: self._runs(entries, name) for name in self.groups}
        for count in range(len(entries), 0, -1):
            position = count * self.page_size
            if position % granularity or (unbroken is not None and unbroken(position)):
                continue
            first = {name: self.first_page(name, count) for name in self.groups}
            if any(runs[name][count - 1] < count - first[name] for name in self.groups):
                continue
            pages: dict[GroupName, list[int]] = {}
            for name in self.groups:
                visible = [entry.pages[name] for entry in entries[first[name] : count] if entry is not None]
                pages[name] = [0] * first[name] + visible
            return position, pages
        return 0, {name: [] for name in self.groups}

    @staticmethod
    def _runs(entries: Sequence[PrefixEntry | None], name: GroupName) -> list[int]:
        """For each entry, how many entries up to it have a page in this group without a gap."""
        runs: list[int] = []
        run = 0
        for entry in entries:
            run = run + 1 if entry is not None and entry.pages[name] else 0
            runs.append(run)
        return runs

    def use(self, keys: Sequence[bytes]) -> list[PrefixEntry | None]:
        """The entries of a chain from its first page on, marked as used now. With full layers it ends at the first that
        is not there; without, None stands for it."""
        entries: list[PrefixEntry | None] = []
        for key in keys:
            entry = self.entries.get(key)
            if entry is None and self.has_full:
                break
            entries.append(entry)
        self._mark_used(keys[: len(entries)])
        return entries

    def _mark_used(self, keys: Sequence[bytes]) -> None:
        now = self.seconds()
        for key in reversed(keys):
            entry = self.entries.get(key)
            if entry is not None:
                entry.used = now
                self.entries.move_to_end(key)
        for order in self._sliding.values():
            for key in keys:
                if key in order:
                    order.move_to_end(key)

    def first_page(self, name: GroupName, count: int) -> int:
        """The first page of a group that is still visible to a sequence continuing after `count` pages."""
        window = self.groups[name].window
        return 0 if window is None else max(0, count * self.page_size - window + 1) // self.page_size

    def page(self, key: bytes, name: GroupName) -> int:
        entry = self.entries.get(key)
        return entry.pages[name] if entry is not None else 0

    def adopt(self, parent: bytes, key: bytes, pages: dict[GroupName, int]) -> None:
        """Take over pages that the caller has filled."""
        if pages or self.has_full:
            entry = self._entry(parent, key)
            for name, page in pages.items():
                self._add_page(key, entry, name, page=page)

    def _entry(self, parent: bytes, key: bytes) -> PrefixEntry:
        entry = self.entries.get(key)
        if entry is None:
            entry = PrefixEntry(parent, dict.fromkeys(self.groups, 0))
            self.entries[key] = entry
            if self.has_full and parent in self.entries:
                self.entries[parent].children += 1
        entry.used = self.seconds()
        return entry

    def _add_page(self, key: bytes, entry: PrefixEntry, name: GroupName, page: int) -> None:
        entry.pages[name] = page
        if name in self._sliding:
            self._sliding[name][key] = None

    def insert(self, chain: PrefixChain, count: int, seqs: dict[GroupName, SeqPages]) -> list[int]:
        """Share the whole pages among the first `count` positions of a sequence, from those on that it has not shared
        yet. Returns the numbers of the pages that are new to the cache."""
        end = count // self.page_size
        start = chain.num_shared
        if self.has_full and start and chain.keys[start - 1] not in self.entries:
            start = 0  # evicted while the sequence runs
        new: list[int] = []
        for number in range(start, end):
            key = chain.keys[number]
            pages = {name: seqs[name].pages[number] for name in self.groups if seqs[name].pages[number]}
            if key not in self.entries:
                if not pages:
                    continue  # wholly before every window
                new.append(number)
            entry = self._entry(chain.parent(number), key)
            for name, page in pages.items():
                if not entry.pages[name]:
                    self.groups[name].pool.retain(page)
                    self._add_page(key, entry, name, page=page)
        chain.num_shared = max(start, end)
        self._mark_used(chain.keys[start:end])
        return new

    def evict(self, name: GroupName, pages: int) -> None:
        """Evict pages until `pages` more are free in a group or nothing is left to evict."""
        pool = self.groups[name].pool
        enough = pool.free + pages
        if name in self._sliding:  # a sliding page may go alone: chains stay walkable
            order = self._sliding[name]
            while pool.free < enough and order:
                key, _ = order.popitem(last=False)
                entry = self.entries[key]
                pool.release(entry.pages[name])
                entry.pages[name] = 0
                if not self.has_full and not any(entry.pages.values()):
                    del self.entries[key]
            return
        while pool.free < enough and self.entries:
            key = next(iter(self.entries))
            if self.entries[key].children:
                self.entries.move_to_end(key)  # its turn comes after its successors'
            else:
                self._drop(key)

    def drop_unused(self, seconds: float) -> None:
        """Evict the pages that no request has used for the given number of seconds."""
        since = self.seconds() - seconds
        for key in [k for k, e in self.entries.items() if e.used <= since]:
            entry = self.entries.get(key)
            while entry is not None and entry.used <= since and not entry.children:
                self._drop(key)
                key = entry.parent  # this may have been its last successor
                entry = self.entries.get(key) if self.has_full else None

    def _drop(self, key: bytes) -> None:
        entry = self.entries.pop(key)
        if self.has_full and entry.parent in self.entries:
            self.entries[entry.parent].children -= 1
        for name, page in entry.pages.items():
            if page:
                self.groups[name].pool.release(page)
                if name in self._sliding:
                    del self._sliding[name][key]

    def held(self, name: GroupName) -> list[int]:
        return [e.pages[name] for e in self.entries.values() if e.pages[name]]

    def check(self) -> None:
        """Audit: no holes, no entry without pages, and every order lists exactly the entries that have a page."""
        children: Counter[bytes] = Counter(e.parent for e in self.entries.values()) if self.has_full else Counter()
        for key, entry in self.entries.items():
            assert any(entry.pages.values()), "an entry without pages"
            assert entry.children == children[key], f"{entry.children} children counted, {children[key]} there"
            if self.has_full:
                assert all(entry.pages[n] for n, g in self.groups.items() if g.window is None), "a hole in a chain"
        for name, order in self._sliding.items():
            assert set(order) == {k for k, e in self.entries.items() if e.pages[name]}, f"the order of {name}"

    def clear(self) -> None:
        self.drop_unused(-math.inf)
