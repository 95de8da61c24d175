"""A fresh paged cache for a model, allocated directly: lets a model be tested without the engine."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.cache.store import row_width
from outrider.models.config import ModelConfig
from outrider.types import GroupName, KVView


@dataclass
class PagedKV:
    """Every sequence owns `max_len` positions; its pages are shuffled, so that an op that ignores the table fails."""

    page_size: int
    keys: list[Tensor | None]
    values: list[Tensor | None]
    tables: dict[GroupName, Tensor]  # int32 [B, pages]
    device: torch.device

    def view(self, spans: list[tuple[int, int]]) -> KVView:
        """Rows start .. start+count-1 of every sequence, in order: spans[b] = (start, count)."""
        counts = [count for _, count in spans]
        positions = torch.cat([torch.arange(start, start + count) for start, count in spans])
        row_seq = torch.repeat_interleave(torch.arange(len(spans)), torch.tensor(counts))
        row_start = torch.tensor([0, *counts]).cumsum(0).to(torch.int32)
        return KVView(
            self.page_size, self.keys, self.values, self.tables, positions.to(self.device), row_seq.to(self.device),
            row_start.to(self.device), max_rows=max(counts), max_context=max(start + count for start, count in spans),
        )  # fmt: skip

    def read(self, layer: int, group: GroupName, seq: int, count: int) -> tuple[Tensor, Tensor]:
        """K and V of positions 0..count-1: [kv_heads, count, D]."""
        pages = self.tables[group][seq].long()
        keys = self.keys[layer]
        values = self.values[layer]
        assert keys is not None and values is not None
        k, v = (x[pages].transpose(0, 1).flatten(1, 2)[:, :count] for x in (keys, values))
        return k, v


def build_kv(
    config: ModelConfig, batch: int, max_len: int, page_size: int = 4, dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
) -> PagedKV:  # fmt: skip
    """A cache filled with NaN: reading a position that was never written shows. Page 0 is the scratch page."""
    per_seq = -(-max_len // page_size)
    pages = 1 + batch * per_seq
    keys: list[Tensor | None] = []
    values: list[Tensor | None] = []
    for layer in config.layers:
        spec = layer.attn
        shape = (pages, spec.kv_heads, page_size, row_width(spec.head_dim, dtype))
        nothing = float("nan") if dtype.is_floating_point else 127  # huge factors
        keys.append(torch.full(shape, nothing, dtype=dtype, device=device) if spec.writes else None)
        values.append(torch.full(shape, nothing, dtype=dtype, device=device) if spec.writes else None)
    order = torch.Generator().manual_seed(pages)
    groups: tuple[GroupName, GroupName] = ("full", "sliding")
    tables = {
        group: (1 + torch.randperm(pages - 1, generator=order)).view(batch, per_seq).to(torch.int32).to(device)
        for group in groups
    }
    return PagedKV(page_size, keys, values, tables, torch.device(device))
