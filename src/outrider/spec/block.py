"""Block and feature drafters: DFlash, DFlash 2, DSpark and EAGLE-3 on the target's hidden states.

The drafter keeps K/V of its own at every committed position, as further layers of the target's store over the same
pages: what is shared as a prefix, swapped, pre-empted or released takes its draft context with it. `extend` writes it
from the tapped streams of each target pass; rows of rejected drafts are overwritten by the next pass. The K/V of the
block itself is never stored.

Tokens are chosen by the target's own noise at the position they will have (`draft_round`), so drafts agree at any
temperature. Nothing here can change a text: the target decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from ..models.block import BlockNet
from ..models.block_config import BlockConfig
from ..models.config import ModelConfig
from ..types import AttnSpec, Draft, KVView
from .acceptance_profile import AcceptanceProfile
from .drafter import DraftBatch, Drafter, Score, draft_round

BINS = 16  # of confidence
LARGEST = 6e4  # what 16 bits hold
Past = tuple[Tensor, Tensor, Tensor]


def kv_specs(config: BlockConfig, target: ModelConfig) -> tuple[AttnSpec, ...]:
    """Where the store keeps the drafter's layers: behind the target's, with full layers, or with sliding ones where a
    layer's window is no longer than theirs. A target without full layers keeps as much as its window of every layer."""
    windows = {target.layers[i].attn.window for i in target.kv_layers}
    sliding = next((w for w in windows if w is not None), None)
    made = []
    for i, layer in enumerate(config.layers):
        own = layer.attn.window
        fits = sliding is not None and (None not in windows or (own is not None and own <= sliding))
        made.append(replace(layer.attn, kv_layer=len(target.layers) + i, window=sliding if fits else None))
    return tuple(made)


def _encoded(x: Tensor, like: Tensor) -> Tensor:
    """Rows [R, heads, D] as the store keeps them. Eight bits: a factor in float32 behind each head's numbers."""
    if like.dtype != torch.int8:
        return x.clamp(-LARGEST, LARGEST).to(like.dtype) if like.dtype == torch.float16 else _fp8(x, like.dtype)
    x = x.float()
    factor = x.abs().amax(-1, keepdim=True).clamp(min=1e-20) / 127.0
    return torch.cat(((x / factor).round().to(torch.int8), factor.contiguous().view(torch.int8)), -1)


def _fp8(x: Tensor, dtype: torch.dtype) -> Tensor:
    most = torch.finfo(dtype).max
    return x.clamp(-most, most).to(dtype) if dtype == torch.float8_e4m3fn else x.to(dtype)


def _decoded(rows: Tensor, dim: int) -> Tensor:
    if rows.dtype == torch.int8:
        return rows[..., :dim].float() * rows[..., dim:].contiguous().view(torch.float32)
    return rows.float() if rows.dtype == torch.float8_e4m3fn else rows


def write_rows(spec: AttnSpec, kv: KVView, k: Tensor, v: Tensor) -> None:
    """k, v [R, kv_heads, D] at the positions of a target pass."""
    keys, values = kv.keys[spec.kv_layer], kv.values[spec.kv_layer]
    assert keys is not None and values is not None
    page = kv.tables[spec.group][kv.row_seq, kv.positions // kv.page_size].long()
    slot = kv.positions % kv.page_size
    keys[page, :, slot] = _encoded(k, keys)
    values[page, :, slot] = _encoded(v, values)


def read_rows(spec: AttnSpec, window: int | None, kv: KVView, end: Tensor, lengths: Sequence[int]) -> Past:
    """K/V of the positions before `end` [B] (on the host: `lengths`), as far back as the store and the layer's window
    reach."""
    keys, values = kv.keys[spec.kv_layer], kv.values[spec.kv_layer]
    assert keys is not None and values is not None
    back = min((w for w in (spec.window, window) if w is not None), default=None)
    first = 0 if back is None else max(0, min(lengths) - back) // kv.page_size
    pages = kv.tables[spec.group][:, first : -(-max(lengths) // kv.page_size)].long()  # [B, P]
    at = first * kv.page_size + torch.arange(pages.shape[1] * kv.page_size, device=end.device)
    there = at < end[:, None]
    if back is not None:
        there &= at > end[:, None] - back
    rows = lambda t: _decoded(t[pages], spec.head_dim).transpose(1, 2).flatten(2, 3)  # noqa: E731
    return rows(keys), rows(values), torch.where(there, at, -1)


class BlockDrafter(Drafter):
    # A confidence is taken at its word until it was observed; acceptance by position as the papers' chat tasks have it.
    profile = AcceptanceProfile("", (0.72, 0.7, 0.7, 0.7), tuple((i + 0.5) / BINS for i in range(BINS)), 0)

    def __init__(self, block: BlockNet):
        config = block.config
        assert config.taps is not None, "bound to a target"
        self.block, self.config, self.name, self.taps = block, config, config.kind, config.taps
        self.max_tokens, self.one_pass = config.max_tokens, config.kind != "eagle3"
        self.kv_specs = kv_specs(config, block.target.config)

    # ---- context --------------------------------------------------------------------------------------------------
    def extend(self, streams: tuple[Tensor, ...], kv: KVView, following: Tensor) -> None:
        block = self.block
        x = block.context(streams)
        if self.config.kind == "eagle3":
            x, _ = block.feature_input(block.layers[0], following, x)
        for layer, spec in zip(block.layers, self.kv_specs, strict=True):
            write_rows(spec, kv, *block.project(layer, x, kv.positions))

    # ---- drafting -------------------------------------------------------------------------------------------------
    def propose(self, batch: DraftBatch, k: int) -> Draft:
        wide, size = min(k, self.max_tokens), len(batch.ids)
        sure: list[Tensor] = []  # by step, where a head says it
        score = self._by_step(batch) if self.config.kind == "eagle3" else self._by_slot(batch, wide, sure)
        ids: Tensor | None = None  # of the columns of the last logits [B, N]
        confidence = torch.zeros((size, k), device=batch.last.device)
        lengths, path, live = [wide] * size, [1.0] * size, [True] * size

        def enough(j: int, token: Tensor, logits: Tensor) -> bool:
            if sure:
                confidence[:, j] = sure[j]
            else:  # the drafter's own probability of the token it chose
                place = token if ids is None else (ids == token[:, None]).int().argmax(1)
                confidence[:, j] = batch.sampling.likely(logits, place)
            if batch.trust is None or batch.plans is None:
                return False
            for b, p in enumerate(confidence[:, j].tolist()):
                if live[b]:
                    path[b] *= batch.trust[min(BINS - 1, int(p * BINS))]
                    plan = batch.plans[b]
                    live[b] = path[b] >= max(plan.stop, plan.drop)
                    lengths[b] = wide if live[b] else j if path[b] < plan.drop else j + 1
            return not any(live)

        def scored(j: int, token: Tensor, cluster_bonus: Tensor | None) -> tuple[Tensor | None, Tensor]:
            nonlocal ids
            ids, z = score(j, token, cluster_bonus)
            return ids, z

        made = draft_round(batch, wide, scored, enough=enough)
        more = k - made.tokens.shape[1]
        q = None if made.q is None else F.pad(made.q, (0, 0, 0, more))
        return Draft(F.pad(made.tokens, (0, more)), torch.tensor(lengths, device=batch.last.device), q, confidence)

    def _named(self, z: Tensor, columns: Tensor | None = None) -> tuple[Tensor | None, Tensor]:
        """Logits [B, N] with the target's ids of their columns; columns [B, N]: draft ids."""
        ids = self.block.ids
        if columns is not None:
            return columns if ids is None else ids[columns], z
        return None if ids is None else ids.expand(z.shape[0], -1), z

    def _by_slot(self, batch: DraftBatch, wide: int, sure: list[Tensor]) -> Score:
        """One pass over the block; slots are then read from left to right."""
        block, config, size = self.block, self.config, len(batch.ids)
        lengths = [len(tokens) - 1 for tokens in batch.tokens]
        ids = batch.last.new_full((size, config.block), config.mask_id)
        ids[:, 0] = batch.last
        positions = batch.position[:, None] + torch.arange(config.block, device=ids.device)
        past = lambda i: read_rows(  # noqa: E731
            self.kv_specs[i], config.layers[i].attn.window, batch.kv, batch.position, lengths
        )
        hidden = block.backbone(ids, positions, past)[:, 0 if config.from_anchor else 1 :][:, :wide]  # [B, K, H]
        base = block.logits(hidden.reshape(size * wide, -1)).view(size, wide, -1)
        state: Tensor | None = None

        def step(j: int, token: Tensor, cluster_bonus: Tensor | None) -> tuple[Tensor | None, Tensor]:
            nonlocal state
            h, z, e = hidden[:, j].contiguous(), base[:, j], None
            if config.kind == "dflash2":
                unary, columns = z.topk(config.selector_top, dim=-1)
                return self._named(block.select(h, unary, columns, token), columns)
            if config.markov_rank:
                bias, state, e = block.markov(token, h, state)
                z = z + bias
            if config.confidence:
                sure.append(block.confidence(h, e if config.confidence_reads_markov else None))
            return self._named(z)

        return step

    def _by_step(self, batch: DraftBatch) -> Score:
        """EAGLE-3: each step feeds the last one's output back. The row of the last committed position is computed
        again: its output is where the first step starts."""
        block, wide = self.block, self.block.target.config.hidden
        streams = batch.features[:, wide:].split(wide, -1)
        feature, (spec,), (layer,) = block.context(streams), self.kv_specs, block.layers
        lengths = [max(1, len(tokens) - 2) for tokens in batch.tokens]
        past = read_rows(spec, layer.spec.attn.window, batch.kv, batch.position - 1, lengths)

        def step(j: int, token: Tensor, cluster_bonus: Tensor | None) -> tuple[Tensor | None, Tensor]:
            nonlocal feature, past
            h, feature, past = block.feature_step(token, feature, batch.position - 1 + j, past)
            return self._named(block.logits(h))

        return step
