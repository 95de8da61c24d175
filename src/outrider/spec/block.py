"""Block and feature drafters: DFlash, DFlash 2, DSpark and EAGLE-3 on the target's hidden states.

The drafter's own K/V at committed positions is written by `extend`; that of the block itself is never stored. Tokens
are chosen with the target's noise (`draft_round`), so drafts agree at any temperature. A tree (except of EAGLE-3)
needs one pass too: slot j scores the tokens after every node at depth j. `load_block` reads a checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Unpack

import torch
from torch import Tensor

from ..models.block import BlockNet
from ..models.block_config import BlockConfig
from ..models.decoder import TextModel
from ..ops.decode_io import Proposer
from ..ops.formats import DeviceWeight
from ..ops.reference import as_tensor
from ..ops.trees import WIDTH, Frontier, TreeRows, max_nodes
from ..types import Draft, KVView, OutriderError
from ..weights.files import Files
from ..weights.load import LoadOptions, load, translate
from .acceptance import BINS, AcceptanceProfile
from .drafter import DraftBatch, Drafter, DrafterOrigin, Score, confident_round, draft_round, padded
from .tree import build_fixed_tree, build_tree

if TYPE_CHECKING:
    from ..ops.cpu.cycle import CpuCycle

ALL_SEQUENCES = slice(None)  # sequence
# spec.tree.Step, or of all sequences of a batch in their order
SlotStep = Callable[[int, Tensor | slice, Tensor, Tensor | slice], tuple[Tensor | None, Tensor]]


class BlockDrafter(Drafter):
    in_graph = True
    # A confidence counts as the acceptance until measured; acceptance by position is that of the papers' chat tasks.
    profile = AcceptanceProfile("", (0.72, 0.7, 0.7, 0.7), tuple((i + 0.5) / BINS for i in range(BINS)), judged=0)

    def __init__(
        self, block: BlockNet, *, origin: DrafterOrigin = DrafterOrigin(), profile: AcceptanceProfile | None = None
    ):
        """profile: as measured in training; None: that of the papers."""
        config = block.config
        assert config.taps is not None, "bound to a target"
        self.block = block
        self.config = config
        self.origin = origin
        self.profile = profile or self.profile
        self.name = config.kind
        self.taps = config.taps
        self.max_tokens = config.max_tokens
        self.kv_specs = block.kv_specs
        self.one_pass = config.kind != "eagle3"
        self.block_call = block.call
        if block.ops.capabilities.blocks_in_pages and not all(config.causal):
            self.block_rows = config.block

    # ---- context --------------------------------------------------------------------------------------------------
    def extend(self, streams: tuple[Tensor, ...], kv: KVView, following: Tensor) -> None:
        self.block.write_context(streams, kv, following)

    def proposers_in(self, cycle: CpuCycle) -> dict[str, Proposer]:
        return {self.name: Proposer.BLOCK if cycle.drafts_blocks else Proposer.HOST}

    # ---- drafting -------------------------------------------------------------------------------------------------
    def propose(self, batch: DraftBatch, k: int) -> Draft:
        """If the confidence is not needed (`DraftBatch.plans`), no value is read, so a captured step can call it."""
        num_tokens = min(k, self.max_tokens)
        heads: list[Tensor] = []  # outputs of the confidence head, by step
        if batch.branches and self.one_pass:
            return build_tree(batch, num_tokens, self._by_slot(batch, num_tokens, heads), heads=heads)
        if batch.plans is None:
            draft = self._drafted(batch, num_tokens)
        else:
            draft = confident_round(batch, num_tokens, self._score(batch, num_tokens, heads), heads=heads)
        return draft if draft.tokens.shape[1] == k else padded(draft, k)

    def max_nodes(self, depth: int) -> int:
        return max_nodes(depth) if self.one_pass and depth <= self.max_tokens else 0

    def build_fixed_tree(self, batch: DraftBatch, depth: int, nodes: int) -> TreeRows:
        """Built from the logits of one pass: each level reads its slot, after WIDTH tokens of each sequence."""
        step = self._by_slot(batch, depth, None)
        seq = batch.kv.row_seq.repeat_interleave(WIDTH)

        def score(level: int, front: Frontier) -> tuple[Tensor | None, Tensor]:
            return step(level, seq, front.tokens, front.before)

        return build_fixed_tree(batch, depth, nodes, score=score)

    def _drafted(self, batch: DraftBatch, num_tokens: int) -> Draft:
        """All tokens of a draft; independent ones are chosen at once."""
        if self.config.kind in ("eagle3", "dflash2") or self.config.markov_rank:
            return draft_round(batch, num_tokens, self._score(batch, num_tokens, None))
        size = batch.last.shape[0]
        sampling = batch.sampling
        device = batch.last.device
        hidden = self._slots(batch, num_tokens)
        ids, z = self._named(self.block.logits(hidden.reshape(size * num_tokens, -1)))
        if sampling.any_sampled:
            sampling = sampling.select(torch.arange(size, device=device).repeat_interleave(num_tokens))
        at = (batch.position[:, None] + torch.arange(1, num_tokens + 1, device=device)).reshape(-1)
        return Draft(
            sampling.guess(z, at, batch.ops, token_ids=ids).view(size, num_tokens),
            torch.full_like(batch.position, num_tokens),
        )

    def _named(self, z: Tensor, columns: Tensor | None = None) -> tuple[Tensor | None, Tensor]:
        """Logits [B, N] and the target's ids of their columns; columns [B, N]: draft ids."""
        ids = self.block.ids
        if columns is not None:
            return columns if ids is None else ids[columns], z
        return None if ids is None else ids.expand(z.shape[0], -1), z

    def _slots(self, batch: DraftBatch, num_tokens: int) -> Tensor:
        """One pass over the block: the head's inputs at the predicting slots [B, K, H], without unseen ones."""
        config = self.config
        size = batch.last.shape[0]
        before = 0 if self.config.from_anchor else 1
        count = num_tokens + before if all(config.causal) else config.block
        masks = batch.last.new_full((size, count - 1), config.mask_id)
        ids = torch.cat((batch.last[:, None], masks), 1)
        return self.block.backbone(ids, batch.kv, batch.position)[:, before : before + num_tokens]

    def _score(self, batch: DraftBatch, num_tokens: int, sure: list[Tensor] | None) -> Score:
        """sure: receives the confidence head's output of each step; None: not needed."""
        if self.config.kind == "eagle3":
            return self._by_step(batch, num_tokens)
        step = self._by_slot(batch, num_tokens, sure)

        def score(j: int, token: Tensor, cluster_bonus: Tensor | None) -> tuple[Tensor | None, Tensor]:
            return step(j, ALL_SEQUENCES, token, ALL_SEQUENCES)

        return score

    def _by_slot(self, batch: DraftBatch, num_tokens: int, sure: list[Tensor] | None) -> SlotStep:
        """Slots are read from left to right; in a tree, after several tokens at once."""
        block = self.block
        config = self.config
        size = batch.last.shape[0]
        hidden = self._slots(batch, num_tokens)
        base = block.logits(hidden.reshape(size * num_tokens, -1)).view(size, num_tokens, -1)
        best = base.topk(config.selector_top, dim=-1) if config.kind == "dflash2" else None
        state: Tensor | None = None

        def step(j: int, seq: Tensor | slice, token: Tensor, before: Tensor | slice) -> tuple[Tensor | None, Tensor]:
            nonlocal state
            h = hidden[seq, j].contiguous()
            e = None
            if best is not None:
                columns = best.indices[seq, j]
                return self._named(block.select(h, best.values[seq, j], columns, previous=token), columns)
            z = base[seq, j]
            if config.markov_rank:
                bias, state, e = block.markov(token, h, None if state is None else state[before])
                z = z + bias
            if config.confidence and sure is not None:
                sure.append(block.confidence(h, e if config.confidence_reads_markov else None))
            return self._named(z)

        return step

    def _by_step(self, batch: DraftBatch, num_tokens: int) -> Score:
        """EAGLE-3: each step feeds its output back. The first starts from the last committed row, computed again."""
        block = self.block
        hidden = self.block.target.config.hidden
        feature = block.context(batch.features[:, hidden:].split(hidden, -1))
        block_rows = block.rows(block.layers[0], feature, batch.position - 1, count=num_tokens)

        def step(j: int, token: Tensor, cluster_bonus: Tensor | None) -> tuple[Tensor | None, Tensor]:
            nonlocal feature
            h, feature = block.feature_step(token, feature, batch.kv, own=block_rows, step=j)
            return self._named(block.logits(h))

        return step


def load_block(files: Files, target: TextModel, dtype: torch.dtype, **how: Unpack[LoadOptions]) -> BlockNet:
    """quantize: the format of dense matrices; then also a copy of the target's head, if the drafter shares it."""
    config = translate(BlockConfig.from_hf, files).bound(target.config)
    if (files.path / "mask_embedding.pt").is_file():
        raise OutriderError(f"{files.name}: a mask embedding in a file of its own (mask_embedding.pt) is not supported")
    ops = target.ops
    device = target.device
    quantize = how.get("quantize")
    rounded: LoadOptions = {**how, "quantize": quantize or ops.capabilities.draft_format}
    _, weights = load(files, config, device, dtype=dtype, ops=ops, **rounded)
    if "d2t" in weights and how.get("load_format") != "dummy":
        order = torch.arange(config.draft_vocab, device=device)
        if files.gguf is not None:  # the ids themselves there, not offsets
            weights["d2t"] = as_tensor(weights["d2t"]) - order
        ids = order + as_tensor(weights["d2t"])
        if bool(((ids < 0) | (ids >= config.vocab_size)).any()):
            raise OutriderError(f"{files.path}: tensor d2t names tokens outside the vocabulary of {config.vocab_size}")
    return BlockNet(config, own_head(weights, target, quantize), ops, target=target).compiled()


def own_head(weights: dict[str, DeviceWeight], target: TextModel, quantize: str | None) -> dict[str, DeviceWeight]:
    """Adds a quantised copy of the target's head if the drafter has none of its own: a draft reads it once per pass."""
    whole = isinstance(target.head, Tensor) and target.together.tp.world == 1
    if quantize is not None and "head" not in weights and whole:
        weights["head"] = target.ops.quantize(as_tensor(target.head), quantize)
    return weights
