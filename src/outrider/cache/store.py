"""The K/V tensors, and the page tables as tensors.

There is one tensor `[pages, kv_heads, page_size, head_dim]` per layer that owns K/V. `KVStore` owns the pools, the
prefix cache and one table row per slot (one slot per running sequence).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

import torch
from torch import Tensor

from ..models.config import ModelConfig
from ..ops.cpu.memory import Arena, HugePageWarmer, runs
from ..types import AttnSpec, GroupName, KVPages, KVView, OutputRows, OutriderError
from .pages import PageGroup, PagePool, SeqPages
from .prefix import PrefixCache, PrefixChain, Unbroken
from .prefix_store import PrefixStore, StoredPage


def upload(
    values: Sequence[int] | Sequence[float] | Sequence[Sequence[int]], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """A small tensor on the device, without waiting for what runs there."""
    if device.type != "cuda":
        return torch.tensor(values, dtype=dtype, device=device)
    return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)


def row_width(head_dim: int, dtype: torch.dtype) -> int:
    """Elements of a head's key or value at one position: int8 ones are followed by a float32 scale."""
    return head_dim + 4 if dtype == torch.int8 else head_dim


def ragged(spans: Sequence[tuple[int, int]]) -> tuple[list[int], list[int], list[int]]:
    """The rows of a pass over (first position, count) of each sequence: every row's position and sequence; then where
    each sequence's rows begin, and where the last one's end."""
    positions = [p for start, count in spans for p in range(start, start + count)]
    owners = [i for i, (_, count) in enumerate(spans) for _ in range(count)]
    return positions, owners, [0, *accumulate(count for _, count in spans)]


def last_rows(kv: KVView, seqs: Sequence[int]) -> OutputRows:
    """The last row of some sequences of a pass. For chains, not trees."""
    device = kv.positions.device
    count = len(seqs)
    if not count:
        return OutputRows(kv.positions[:0], kv)
    which = upload(seqs, torch.int64, device)
    start = torch.arange(count + 1, dtype=torch.int32, device=device)
    rows = kv.row_start.index_select(0, which + 1).long() - 1
    tables = {name: table.index_select(0, which) for name, table in kv.tables.items()}
    seen = replace(kv, tables=tables, positions=kv.positions[rows], row_seq=start[:-1].long())
    return OutputRows(rows, replace(seen, row_start=start, max_rows=1))


@dataclass(frozen=True)
class CacheSpec:
    """Cache size. `tokens`: total positions of full-attention K/V; sliding groups follow from the window."""

    slots: int
    max_context: int
    page_size: int
    chunk: int  # maximum positions written ahead of the committed length in one pass (prefill chunk or K + 1)
    tokens: int
    # positions of sliding K/V in all; None: what all slots can hold at once, and as much for prefixes
    window_tokens: int | None = None


@dataclass(eq=False)
class SeqCache:
    """One sequence's share of the cache."""

    slot: int
    pages: dict[GroupName, SeqPages] = field(default_factory=dict)
    room: int = 0  # positions that are reserved
    slid: int = -1  # the page of the committed length when sliding pages were last freed
    sampling_joined: bool = False  # its slot's sampling state is this sequence's (`ModelRunner.join`)
    unread_joined: bool = False  # likewise the rows that its drafter has not read yet (`ModelRunner.join_unread`)


class KVStore:
    def __init__(
        self,
        config: ModelConfig,
        spec: CacheSpec,
        dtype: torch.dtype,
        device: torch.device | str,
        extra: Sequence[AttnSpec] = (),
    ):
        """extra: further layers over the same pages, numbered on from the model's (`Drafter.kv_specs`)."""
        self.spec = spec
        self.device = torch.device(device)
        self.dtype = dtype
        ps = spec.page_size
        specs = {i: config.layers[i].attn for i in config.kv_layers}
        windows: dict[GroupName, int | None] = {attn.group: attn.window for attn in specs.values()}
        for attn in extra:
            if (windows.setdefault(attn.group, attn.window) or 0) < (attn.window or 0):
                raise OutriderError(f"a drafter's window of {attn.window} positions is wider than the target's")
            specs[attn.kv_layer] = attn
        self.groups: dict[GroupName, PageGroup] = {}
        for name, window in windows.items():
            pages = -(-spec.tokens // ps)
            if window is not None:
                bound = self._bound(window)
                sliding = spec.window_tokens
                most = spec.slots * bound * 2 if sliding is None else max(bound, -(-sliding // ps))
                pages = min(pages + spec.slots, most)
            self.groups[name] = PageGroup(pages + 1, ps, window)
        # Fresh pages are zero; huge pages save a page-table walk per 4 KiB.
        arena = Arena() if self.device.type == "cpu" else None

        def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
            return arena.empty(shape, dtype) if arena else torch.zeros(shape, dtype=dtype, device=self.device)

        self.keys: list[Tensor | None] = [None] * (len(config.layers) + len(extra))
        self.values = list(self.keys)
        # keys and values of each group's layers as bytes, [pages, ...] each: the prefix store moves them
        self.layers: dict[GroupName, list[Tensor]] = {name: [] for name in self.groups}
        for i, attn in specs.items():
            shape = (self.groups[attn.group].pool.count, attn.kv_heads, ps, row_width(attn.head_dim, dtype))
            keys = zeros(shape, dtype)
            values = zeros(shape, dtype)
            self.keys[i] = keys
            self.values[i] = values
            self.layers[attn.group] += [keys.view(torch.uint8), values.view(torch.uint8)]
        self.nbytes = sum(t.nbytes for layers in self.layers.values() for t in layers)
        self._ahead: dict[GroupName, HugePageWarmer] = {}
        width = -(-(spec.max_context + spec.chunk) // ps) + 1
        # One row more than slots: it stays on the scratch page, for padding rows of a batch.
        self.tables: dict[GroupName, Tensor] = {
            name: torch.zeros((spec.slots + 1, width), dtype=torch.int32, device=self.device) for name in self.groups
        }
        # (place in the table, page)
        self._changed: dict[GroupName, list[tuple[int, int]]] = {name: [] for name in self.groups}
        self._width = width
        self.prefix = PrefixCache(self.groups, ps)
        self._free_slots = list(range(spec.slots - 1, -1, -1))
        self._open: set[SeqCache] = set()  # of the sequences that have a slot
        self.disk: PrefixStore | None = None  # prefixes that survive a restart

    def take_ahead(self) -> None:
        """From now on allocate memory before sequences need it: in a server all requests would wait for it."""
        if self.device.type == "cpu":
            self._ahead = {name: HugePageWarmer(layers) for name, layers in self.layers.items()}

    def tidy(self, unused_s: float) -> int:
        """Frees memory that was allocated ahead: evicts prefixes that were unused for the given time and returns the
        memory of free pages to the system, except enough for the next sequences. Returns the bytes freed. Must not be
        called while a step runs."""
        if self._ahead:
            self.prefix.drop_unused(unused_s)
        return sum(ahead.give_back(self.groups[name].pool.in_order()) for name, ahead in self._ahead.items())

    def taken(self) -> int:
        """Bytes that K/V holds now, where memory is allocated ahead; elsewhere all of it counts."""
        return sum(ahead.bytes for ahead in self._ahead.values()) if self._ahead else self.nbytes

    def _bound(self, window: int) -> int:
        """Pages that a sequence can hold at once in a sliding group."""
        return -(-(window + self.spec.chunk) // self.spec.page_size) + 2

    # ---- sequences come and go ------------------------------------------------------------------------------------
    @property
    def free_slots(self) -> int:
        return len(self._free_slots)

    def open(
        self, chain: PrefixChain | None = None, limit: int = 0, granularity: int = 1, unbroken: Unbroken | None = None
    ) -> tuple[SeqCache, int]:
        """A slot for a new sequence, on the shared pages of at most its first `limit` positions, a multiple of
        `granularity`, and the number of those positions. chain: the keys of the text up to there; None: it shares
        nothing."""
        seq = SeqCache(self._free_slots.pop(), {name: SeqPages() for name in self.groups})
        hit = 0
        if chain is not None:
            hit, pages = self.prefix.match(chain, limit, granularity, unbroken=unbroken)
            chain.num_shared = hit // self.spec.page_size
            for name, group in self.groups.items():
                group.adopt(seq.pages[name], pages[name])
        self.place(seq.slot, True, {name: (0, pages.pages) for name, pages in seq.pages.items()})
        self._open.add(seq)
        return seq, hit

    def place(self, slot: int, fresh: bool, pages: Mapping[GroupName, tuple[int, Sequence[int]]]) -> None:
        """Give these pages to a slot: the first page's number, and the pages. fresh: the slot has a new sequence."""
        if fresh:
            self.flush()  # pending updates of the slot's last sequence must not be applied after this
            for table in self.tables.values():
                table[slot].zero_()
        for name, (first, where) in pages.items():
            self._changed[name] += [(slot * self._width + first + i, page) for i, page in enumerate(where)]

    def exhausted_pool(self, seq: SeqCache, positions: int) -> PagePool | None:
        """The pool that lacks pages for `positions` even if unused shared prefixes were evicted; None: they fit."""
        for name, group in self.groups.items():
            need = group.need(seq.pages[name], positions)
            pool = group.pool
            if group.window is not None:
                need = min(need, self._bound(group.window))
            if need > pool.free and need > pool.free + sum(pool.refs[p] == 1 for p in self.prefix.held(name)):
                return pool
        return None

    def _free(self, name: GroupName, pages: int) -> bool:
        """Free the given number of pages, evicting unused shared prefixes. False: there are not enough."""
        pool = self.groups[name].pool
        if pages > pool.free:
            self.prefix.evict(name, pages - pool.free)
        return pages <= pool.free

    def reserve(self, seq: SeqCache, positions: int, full_positions: int = 0) -> bool:
        """Reserve pages for positions 0..positions-1, evicting unused shared prefixes. False: not enough pages.

        Sliding groups hold a window and `CacheSpec.chunk` positions of each sequence: reserve and `commit` a longer
        text chunk by chunk. full_positions: positions that the other groups reserve already now, if more.
        """
        if positions <= seq.room:
            return True
        for name, group in self.groups.items():
            pages = seq.pages[name]
            wanted = positions if group.window is not None else max(positions, full_positions)
            need = group.need(pages, wanted)
            if not need:
                continue
            if not self._free(name, need):
                return False
            added = group.reserve(pages, wanted)
            at = seq.slot * self._width
            self._changed[name] += [(at + i, pages.pages[i]) for i in added]
            if name in self._ahead:
                self._ahead[name].need(max(pages.pages[i] for i in added))
        seq.room = -(-positions // self.spec.page_size) * self.spec.page_size
        return True

    def flush(self) -> None:
        """Update the tables: the new pages of all sequences in one upload. Must be called before a pass is launched."""
        for name, changed in self._changed.items():
            if changed:
                both = upload([*zip(*changed)], torch.int64, self.device)  # [2, n]
                self.tables[name].view(-1).index_copy_(0, both[0], both[1].to(torch.int32))
                changed.clear()

    def commit(self, seq: SeqCache, committed: int) -> None:
        """Positions below `committed` are final; sliding pages outside the window are freed."""
        page = committed // self.spec.page_size
        if page == seq.slid:
            return
        seq.slid = page
        for name, group in self.groups.items():
            group.slide(seq.pages[name], committed)

    def share(self, seq: SeqCache, chain: PrefixChain, tokens: Sequence[int], committed: int) -> None:
        """Share the whole pages of the first `committed` positions. tokens: the keys of the text's positions."""
        chain.extend(tokens, committed)
        new = self.prefix.insert(chain, committed, seq.pages)
        if self.disk is not None and new:
            self.disk.offer(chain, new)

    # ---- prefixes on disk -----------------------------------------------------------------------------------------
    @torch.inference_mode()
    def adopt(self, pages: Sequence[StoredPage]) -> bool:
        """Add these pages to the prefix cache. False: there are not enough free ones."""
        entries = self.prefix.entries
        wanted = Counter(name for _, _, data in pages for name in data)
        parents = {parent for parent, _, _ in pages} & entries.keys()
        if not all(self._free(name, count) for name, count in wanted.items()):
            return False
        if self.prefix.has_full and not parents <= entries.keys():
            return False
        new_pages: dict[GroupName, Iterator[int]] = {}
        for name, count in wanted.items():
            rows = sorted(self.groups[name].pool.alloc() for _ in range(count))
            # all at once: a copy for each layer and page would take longer than the bytes
            stored = torch.stack([data[name] for _, _, data in pages if name in data]).to(self.device)  # [count, bytes]
            for layer, part in zip(self.layers[name], stored.split([t[0].numel() for t in self.layers[name]], 1)):
                done = 0
                for first, end in runs(rows):
                    to = layer[first:end]
                    done = done + end - first
                    to.copy_(part[done - len(to) : done].view(to.shape))
            if name in self._ahead:
                self._ahead[name].need(rows[-1])
            new_pages[name] = iter(rows)
        for parent, key, data in pages:
            self.prefix.adopt(parent, key, {name: next(new_pages[name]) for name in data})
        return True

    def close(self, seq: SeqCache) -> None:
        for name, group in self.groups.items():
            group.free(seq.pages[name])
        self._open.remove(seq)
        self._free_slots.append(seq.slot)

    # ---- what a forward pass sees -----------------------------------------------------------------------------------
    def view(
        self, slots: Tensor, positions: Tensor, row_seq: Tensor, row_start: Tensor, max_rows: int, max_context: int
    ) -> KVView:
        """The view of the sequences in `slots`, after a `flush`."""
        self.flush()
        return self.pages_of(slots, max_context).view(
            positions, row_seq, row_start, max_rows=max_rows, max_context=max_context
        )

    def pages_of(self, slots: Tensor, context: int) -> KVPages:
        """The cache with one table row for each of these slots [B], up to `context` positions."""
        width = -(-context // self.spec.page_size)
        tables = {name: table[:, :width].index_select(0, slots) for name, table in self.tables.items()}
        return KVPages(self.spec.page_size, self.keys, self.values, tables=tables)

    def pages(self) -> KVPages:
        """The whole cache as kernels see it, with one table row per slot."""
        return KVPages(self.spec.page_size, self.keys, self.values, tables=self.tables)

    def check(self) -> None:
        """Audit every pool against every holder, and the tables against the page lists."""
        self.flush()
        self.prefix.check()
        for name, group in self.groups.items():
            group.pool.check([s.pages[name].held() for s in self._open] + [self.prefix.held(name)])
            for seq in self._open:
                first = seq.pages[name].first
                pages = seq.pages[name].pages
                row = self.tables[name][seq.slot, first : len(pages)].tolist()
                if row != pages[first:]:
                    raise AssertionError(f"{name} table of slot {seq.slot} from page {first} on: {row}, not {pages}")
        if len(self._open) + len(self._free_slots) != self.spec.slots:
            raise AssertionError("slots leak")
