"""Block drafters as trainable networks: DFlash and EAGLE-3 from many anchors of whole sequences at once.

The network is `models/block.py`'s over dense ops, so that what is trained is what runs. An anchor a is a position that
the target has seen. DFlash drafts tokens a + 2, a + 3, … in one pass over a block at positions a + 1, a + 2, …: the
token a + 1 and mask tokens. EAGLE-3 takes one step after another, fed the true next token. All anchors of a sequence
attend to one set of context keys, each up to its own position, and to the rows of their own block.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from ..models.block import Angles, BlockNet, DraftLayer
from ..models.block_config import BlockConfig, Kind, is_block
from ..models.config import LayerSpec, ModelConfig
from ..models.decoder import TextModel
from ..models.inspect import DrafterSize
from ..ops.reference import as_tensor, rotate
from ..spec.block_load import block_plan, draft_size, load_block
from ..types import AttnSpec, BlockRows, KVView, OutriderError
from ..weights import hub
from ..weights.load import translate
from .capture import CapturedStates, capture
from .config import Say, TrainConfig
from .data import Sequences, TrainBatch, make_batch, plan_epoch
from .design import spread_reads
from .net import TrainNet, rms
from .shards import dense as held_dense
from .target import TrainTarget

Keys = tuple[Tensor, Tensor]  # [B, kv_heads, N, D] each
TAPS = {"dflash": 5, "eagle3": 3}
START_ROWS = 1024  # anchors that scales are measured on
GEMMA_MASK = 4  # Gemma's own <mask>


def new_block(job: TrainConfig, target: ModelConfig, mask_id: int = 0) -> BlockConfig:
    """The drafter that is made where none is given to start from: layers like the target's last full one, with norms of
    queries and keys, as the public layouts have them."""
    kind: Kind = "eagle3" if job.kind == "eagle3" else "dflash"
    count, depth = 1 if kind == "eagle3" else job.layers, len(target.layers)
    like = next((layer for layer in reversed(target.layers) if layer.attn.window is None), target.layers[-1])
    a, rope = like.attn, replace(like.rope, rotated=like.attn.head_dim // 2)
    spec = AttnSpec(a.heads, a.kv_heads, a.head_dim, 0, True, scale=a.head_dim**-0.5, eps=target.norm_eps)
    if job.hidden_size is not None and job.hidden_size != target.hidden:
        raise OutriderError(f"hidden_size: a {kind} drafter has the width of its target ({target.hidden})")
    inter = job.intermediate_size or like.intermediate
    return BlockConfig(
        kind=kind,
        layout="speculators",
        hidden=target.hidden,
        target_hidden=target.hidden,
        vocab_size=target.vocab_size,
        draft_vocab=target.vocab_size,
        layers=tuple(LayerSpec(replace(spec, kv_layer=i), rope, inter) for i in range(count)),
        causal=(kind == "eagle3",) * count,
        taps=tuple(sorted(set(job.taps))) or spread_taps(depth, TAPS[kind]),
        block=job.unroll + 1,
        mask_id=-1 if kind == "eagle3" else mask_id,
        from_anchor=kind == "eagle3",
        norm_eps=target.norm_eps,
        qk_norm=kind == "dflash",
    ).bound(target)


def spread_taps(depth: int, count: int) -> tuple[int, ...]:
    """Layers evenly from the first quarter to the last but one: engines differ in what they show after the last."""
    low, high = depth // 4, max(0, depth - 2)
    return tuple(sorted({low + round((high - low) * i / max(1, count - 1)) for i in range(count)}))


def unused_token(data: Sequences, target: ModelConfig) -> int:
    """The token of the masked slots: Gemma's own, else the last one that no sequence has."""
    if target.family in ("gemma3", "gemma4"):
        return GEMMA_MASK
    seen = np.zeros(target.vocab_size, bool)
    seen[data.tokens.astype(np.int64)] = True
    free = np.nonzero(~seen)[0]
    return int(free[-1]) if len(free) else target.vocab_size - 1


def block_config(name: str, target: ModelConfig) -> BlockConfig:
    """Of a drafter on disk, bound to this target."""
    files = hub.resolve(name, kind="drafter")
    if not is_block(files.config):
        raise OutriderError(f"{name} is no block drafter: --kind mtp")
    return translate(BlockConfig.from_hf, files).bound(target)


def load_block_weights(name: str, target: TrainTarget) -> tuple[BlockConfig, dict[str, Tensor]]:
    """Dense, in float32."""
    config = block_config(name, target.config)
    if config.kind not in TAPS or not config.tied_to_target:
        raise OutriderError(f"{name}: a {config.kind} drafter, or one with a head of its own, cannot be trained on")
    net = load_block(hub.resolve(name, kind="drafter"), target.model, torch.float32)
    return config, {k: as_tensor(w).float() for k, w in net.weights.items()}


class GroupedBlock(BlockNet):
    """M anchors for each of B sequences: rows come as [B·M, S, …], the context once for each sequence."""

    def begin(self, start: Tensor, context: Tensor) -> None:
        """start [B, M]: the first position of each block; context [B, T, H'] what layers read of every position."""
        size, length, width = context.shape
        flat, at = context.reshape(size * length, width), torch.arange(length, device=start.device)
        angles = self.angles(at.repeat(size))
        self.start, self.past = start, dict[int, Keys]()
        self.shared = dict[int, Keys]()
        for layer in self.layers:
            k, v = (t.view(size, length, *t.shape[1:]).transpose(1, 2) for t in self.project(layer, flat, angles))
            self.shared[layer.attn.spec.kv_layer] = (k, v)

    def project(self, layer: DraftLayer, x: Tensor, angles: Angles) -> Keys:
        """K and V [R, kv_heads, D] of rows x."""
        spec, ops = layer.attn.spec, self.ops
        made = ops.linear(x, layer.kv, layer.kv_bias).view(len(x), -1, spec.head_dim)
        k, v = made[:, : spec.kv_heads], made[:, 0 if spec.k_eq_v else spec.kv_heads :]
        k = k if layer.attn.k_norm is None else ops.rms_norm(k, layer.attn.k_norm, spec.eps)
        return rotate(k, *angles[layer.rope]), ops.rms_norm(v, None, spec.eps) if spec.norm_v else v

    def rows(self, layer: DraftLayer, like: Tensor, end: Tensor, count: int) -> BlockRows:
        return BlockRows(like, like, end)  # gradients flow through `past` instead

    def attend(self, layer: DraftLayer, x: Tensor, angles: Angles, kv: KVView, own: BlockRows, first: int) -> Tensor:
        spec, (size, most), here = layer.attn.spec, self.start.shape, layer.attn.spec.kv_layer
        rows, slots = size * most, len(x) // (size * most)
        q = self.ops.linear(x, layer.q, layer.q_bias).view(rows * slots, spec.heads, spec.head_dim)
        q = q if layer.attn.q_norm is None else self.ops.rms_norm(q, layer.attn.q_norm, spec.eps)
        q = rotate(q, *angles[layer.rope])
        fresh = [t.view(rows, slots, spec.kv_heads, -1).transpose(1, 2) for t in self.project(layer, x, angles)]
        keys, values = fresh if not first else (torch.cat(pair, 2) for pair in zip(self.past[here], fresh, strict=True))
        self.past[here] = (keys, values)
        q = q.view(size, most, slots, spec.kv_heads, -1, spec.head_dim).permute(0, 3, 4, 1, 2, 5)
        shared, stored = self.shared[here]
        length, place = shared.shape[2], torch.arange(first, first + slots, device=x.device)
        far = (q.flatten(2, 4) @ shared.transpose(-1, -2)).view(*q.shape[:-1], length)
        grid = lambda t: t.view(size, most, *t.shape[1:])  # noqa: E731
        near = torch.einsum("bhgmsd,bmhpd->bhgmsp", q, grid(keys))
        positions = self.start[..., None] + place  # [B, M, S]
        behind_far = positions[..., None] - torch.arange(length, device=x.device)  # [B, M, S, T]
        behind_near = (place[:, None] - torch.arange(first + slots, device=x.device)).expand(size, most, -1, -1)
        seen = torch.cat((behind_far > place[:, None], (behind_near >= 0) | (not layer.attn.causal)), -1)
        if layer.attn.window is not None:
            seen = seen & (torch.cat((behind_far, behind_near), -1).abs() < layer.attn.window)
        score = (torch.cat((far, near), -1) * spec.scale).float().masked_fill(~seen[:, None, None], float("-inf"))
        share = score.softmax(-1).to(x.dtype)
        mixed = (share[..., :length].flatten(2, 4) @ stored).view(q.shape)
        mixed = mixed + torch.einsum("bhgmsp,bmhpd->bhgmsd", share[..., length:], grid(values))
        return mixed.permute(0, 3, 4, 1, 2, 5).reshape(rows * slots, -1)


class BlockModule(TrainNet):
    config: BlockConfig

    def __init__(self, config: BlockConfig, target: ModelConfig, seed: int = 0):
        super().__init__(config, block_plan(config, ()), len(config.layers), seed)
        self.target = target
        self.taps = config.taps or ()

    @property
    def size(self) -> DrafterSize:
        return draft_size(self.config)

    def unroll(
        self, w: Mapping[str, Tensor], model: TextModel, seen: CapturedStates, batch: TrainBatch, steps: int
    ) -> Iterator[Tensor]:
        """Of steps 1..steps (DFlash: as many as a block has) what the head reads, at the anchors of step 1."""
        config, rows, (size, length) = self.config, batch.anchors[0], batch.ids.shape
        line, at = batch.where(rows)
        first = torch.searchsorted(line, torch.arange(size, device=line.device))
        cell = line * batch.most + torch.arange(len(rows), device=line.device) - first[line]
        # places that no anchor fills draft from position 0
        anchor = at.new_zeros(size * batch.most).index_copy(0, cell, at).view(size, batch.most)
        net = GroupedBlock(config, w, model.ops, model)
        streams = net.context([t.flatten(0, 1) for t in seen.taps])
        token = lambda j: batch.ids.gather(1, (anchor + j).clamp(max=length - 1)).reshape(-1)  # noqa: E731
        wide, no_kv = batch.ids.shape[1] - batch.first, KVView(1, (), (), {}, at, at, at, 0, 0)

        def spread(h: Tensor) -> Tensor:  # [B·M, H] -> [B, Tq, H]
            return h.new_zeros((size * wide, h.shape[-1])).index_copy(0, rows, h[cell]).view(size, wide, -1)

        if config.kind == "dflash":
            net.begin(anchor + 1, streams.view(size, length, -1))
            ids = anchor.new_full((anchor.numel(), config.block), config.mask_id)
            ids[:, 0] = token(1)
            hidden = net.backbone(ids, no_kv, (anchor + 1).reshape(-1))
            for j in range(1, min(steps, config.block - 1) + 1):
                yield spread(hidden[:, j])
            return
        (layer,) = net.layers
        following = torch.cat((batch.ids[:, 1:], batch.ids[:, -1:]), 1).reshape(-1)
        context, _ = net.feature_input(layer, following, streams)
        net.begin(anchor, context.view(size, length, -1))
        flat = (torch.arange(size, device=line.device)[:, None] * length + anchor).reshape(-1)
        feature, own = streams[flat], BlockRows(flat, flat, anchor.reshape(-1))
        for j in range(steps):
            h, feature = net.feature_step(token(j + 1), feature, no_kv, own, j)
            yield spread(h)


@torch.no_grad()
def start_from_layers(net: BlockModule, model: TextModel, batch: TrainBatch, reads: tuple[int, ...]) -> None:
    """Layers start as target layers of the same shape: attention, MLP, norms; the norms of queries and keys at the
    scale that these have there. The context starts as the stream after the last tap, which enters those layers."""
    config, target = net.config, model.config
    seen = capture(model, batch.ids, tuple(max(0, r - 1) for r in reads))
    for i, (layer, r) in enumerate(zip(config.layers, reads, strict=True)):
        block, theirs, at = model.blocks[r], target.layers[r].attn, f"layers.{i}."
        if (theirs.heads, theirs.kv_heads, theirs.head_dim) != (
            layer.attn.heads, layer.attn.kv_heads, layer.attn.head_dim,
        ) or theirs.k_eq_v or target.layers[r].intermediate != layer.intermediate or block.gate_up is None:  # fmt: skip
            continue
        rows = theirs.heads * theirs.head_dim
        qkv = held_dense(block.qkv)
        for name, weight in (("q", qkv[:rows]), ("kv", qkv[rows:]), ("out", held_dense(block.out))):
            net.weight(at + name).copy_(weight)
        net.weight(at + "gate_up").copy_(held_dense(block.gate_up))
        net.weight(at + "down").copy_(held_dense(block.down))
        net.weight(at + "attn_norm").copy_(block.attn_norm)
        net.weight(at + "mlp_norm").copy_(block.mlp_norm)
        h = rms(seen.taps[i].flatten(0, 1).float(), block.attn_norm.float(), config.norm_eps)
        size = lambda w: (h @ w.float().T).unflatten(-1, (-1, theirs.head_dim)).pow(2).mean(-1).sqrt().mean()  # noqa: E731, B023
        net.weight(at + "q_norm").fill_(float(size(qkv[:rows])) * theirs.scale * theirs.head_dim**0.5)
        net.weight(at + "k_norm").fill_(float(size(qkv[rows : rows + theirs.kv_heads * theirs.head_dim])))
    fc, width = net.weight("fc"), target.hidden
    fc.mul_(0.1)
    fc[:, -width:] += torch.eye(config.hidden, device=fc.device)
    net.weight("hidden_norm").copy_(model.blocks[reads[-1]].attn_norm)
    net.weight("norm").copy_(model.blocks[-1].next_norm)


def start_block(job: TrainConfig, target: TrainTarget, data: Sequences, say: Say) -> BlockModule:
    """The drafter of a run, as it begins."""
    model = target.model
    if job.init is not None:
        config, weights = load_block_weights(job.init, target)
        warm = BlockModule(config, target.config, job.seed)
        warm.load(weights)
        return warm.to(model.device)
    config = new_block(job, target.config, unused_token(data, target.config))
    net = BlockModule(config, target.config, job.seed).to(model.device)
    if (job.out / "checkpoint.pt").exists() or target.config.family != "llama" or config.kind != "dflash":
        return net  # its weights come from there, or it starts at random
    reads = spread_reads(target.config, len(config.layers))
    some = make_batch(data, plan_epoch(data, START_ROWS, 4 * START_ROWS, job.seed, 0)[0], 1).to(model.device)
    start_from_layers(net, model, some, reads)
    say(f"drafter starts from target layers {reads} and reads the streams after layers {config.taps}")
    return net
