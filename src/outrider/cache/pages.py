"""Page allocation and reference counts of one cache group. Torch-free.

A sequence's K/V of a group lives in pages of `page_size` positions, indexed by absolute page number (`position //
page_size`). Full layers keep every page; sliding layers release those wholly before the window of the *committed*
length. A rejected draft needs no cleanup: its positions are overwritten. Page 0, the scratch page, is never allocated.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


class PagePool:
    """Reference-counted pages 1..count-1."""

    def __init__(self, count: int):
        self.count = count
        self.refs = [0] * count
        self.num_releases = 0  # how often a page was released: while it stands still, no page can have become free
        # the last one is allocated next; fresh ones are in ascending order
        self._free = list(range(count - 1, 0, -1))

    @property
    def free(self) -> int:
        return len(self._free)

    def alloc(self) -> int:
        """A free page. The caller has ensured that there is one."""
        page = self._free.pop()
        self.refs[page] = 1
        return page

    def in_order(self) -> list[int]:
        """The free pages, ascending; from now on they are allocated in this order."""
        self._free.sort(reverse=True)
        return self._free[::-1]

    def retain(self, page: int) -> None:
        assert self.refs[page] > 0, f"page {page} is not held"
        self.refs[page] += 1

    def release(self, page: int) -> None:
        assert self.refs[page] > 0, f"page {page} released twice"
        self.refs[page] -= 1
        self.num_releases += 1
        if self.refs[page] == 0:
            self._free.append(page)

    def check(self, holders: list[list[int]]) -> None:
        """Audit: `holders` lists every reference that exists; counts must agree and nothing may leak."""
        seen = Counter(page for pages in holders for page in pages)
        wrong = {page: (seen[page], counted) for page, counted in enumerate(self.refs) if seen[page] != counted}
        if wrong:
            raise AssertionError(f"pages (held, counted): {wrong}")
        if sorted(self._free) != [p for p in range(1, self.count) if self.refs[p] == 0]:
            raise AssertionError("the free list does not match the reference counts")


@dataclass
class SeqPages:
    """The pages of one sequence in one group: absolute page number -> page; 0 where released or not yet allocated."""

    pages: list[int] = field(default_factory=list)
    first: int = 0  # pages before this one have been released

    def held(self) -> list[int]:
        return [p for p in self.pages[self.first :] if p]


class PageGroup:
    """One cache group: a pool, a page size and (sliding) a window."""

    def __init__(self, count: int, page_size: int, window: int | None):
        self.pool = PagePool(count)
        self.page_size = page_size
        self.window = window

    def need(self, seq: SeqPages, positions: int) -> int:
        """Number of new pages needed to hold positions 0..positions-1."""
        return max(0, -(-positions // self.page_size) - len(seq.pages))

    def reserve(self, seq: SeqPages, positions: int) -> list[int]:
        """Grow to hold `positions`; returns the absolute page numbers added. That many pages must be free."""
        added = range(len(seq.pages), len(seq.pages) + self.need(seq, positions))
        seq.pages.extend(self.pool.alloc() for _ in added)
        return list(added)

    def adopt(self, seq: SeqPages, pages: list[int]) -> None:
        """Start a sequence on shared pages (0: not there, only allowed before the window)."""
        assert not seq.pages
        for page in pages:
            if page:
                self.pool.retain(page)
        seq.pages.extend(pages)
        seq.first = next((i for i, p in enumerate(pages) if p), len(pages))

    def slide(self, seq: SeqPages, committed: int) -> None:
        """Release pages that will not be read again: targets query from `committed` on, drafters from one before it."""
        if self.window is None:
            return
        keep = max(0, committed - self.window) // self.page_size
        for i in range(seq.first, min(keep, len(seq.pages))):
            if seq.pages[i]:
                self.pool.release(seq.pages[i])
                seq.pages[i] = 0
        seq.first = max(seq.first, min(keep, len(seq.pages)))

    def free(self, seq: SeqPages) -> None:
        for page in seq.held():
            self.pool.release(page)
        seq.pages.clear()
        seq.first = 0
