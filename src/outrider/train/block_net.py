"""Block drafters as trainable networks: DFlash and EAGLE-3 from many anchors of whole sequences at once.

The network is that of `models/block.py` over dense ops, so training and inference run the same code. An anchor a is a
position that the target has seen. DFlash drafts tokens a + 2, a + 3, … in one pass over a block at positions a + 1,
a + 2, …: the token a + 1 and mask tokens. EAGLE-3 runs step by step, fed the true next token. All anchors of a
sequence attend to one set of context keys, each up to its own position, and to the rows of their own block.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..models.block import BlockNet, DraftLayer, Rotations
from ..models.block_config import BlockConfig, Kind, is_block
from ..models.config import DrafterConfig, LayerSpec, ModelConfig
from ..models.decoder import TextModel
from ..ops.formats import DeviceWeight
from ..ops.reference import as_tensor
from ..spec.block import load_block
from ..types import AttnSpec, BlockRows, KVView, OutriderError, require
from ..weights import hub
from ..weights.load import load_drafter, translate
from .config import Say, TrainConfig
from .data import Sequences, TrainBatch, make_batch, plan_epoch
from .design import START_ROWS, spread_reads
from .net import Drafted, DrafterModule, TrainNet, Weights
from .target import CapturedStates, Layers, TrainTarget, capture

Keys = tuple[Tensor, Tensor]
GROUP = 16  # maximum anchors of a sequence whose blocks attend together
TAPS = {"dflash": 5, "eagle3": 3}
GEMMA_MASK = 4  # Gemma's own <mask>


def new_block(job: TrainConfig, target: ModelConfig, mask_id: int = 0) -> BlockConfig:
    """The default drafter: layers like the target's last full one, with norms as in the public layouts."""
    kind: Kind = "eagle3" if job.kind == "eagle3" else "dflash"
    count = 1 if kind == "eagle3" else job.layers
    depth = len(target.layers)
    like = next((layer for layer in reversed(target.layers) if layer.attn.window is None), target.layers[-1])
    a = like.attn
    rope = replace(like.rope, rotated=like.attn.head_dim // 2)
    spec = AttnSpec(
        a.heads, a.kv_heads, head_dim=a.head_dim, kv_layer=0, writes=True, scale=a.head_dim**-0.5, eps=target.norm_eps
    )
    same = job.hidden_size in (None, target.hidden)
    require(same, f"hidden_size: a {kind} drafter has the width of its target ({target.hidden})")
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


def spread_taps(depth: int, count: int) -> Layers:
    """Layers spread evenly from the first quarter to the last but one: engines differ in what they expose after the
    last."""
    low = depth // 4
    high = max(0, depth - 2)
    return tuple(sorted({low + round((high - low) * i / max(1, count - 1)) for i in range(count)}))


def unused_token(data: Sequences, target: ModelConfig) -> int:
    """Token of the masked slots: Gemma's <mask>, else the last one that no sequence contains."""
    if target.family in ("gemma3", "gemma4"):
        return GEMMA_MASK
    seen = np.zeros(target.vocab_size, bool)
    seen[data.tokens.astype(np.int64)] = True
    free = np.nonzero(~seen)[0]
    return int(free[-1]) if len(free) else target.vocab_size - 1


class GroupedBlock(BlockNet):
    """M anchors for each of B sequences: rows come as [B·M, S, …], the context once for each sequence. Attention is
    one library call for each layer: `group` anchors of a sequence are one batch entry, and the query heads that share
    a K/V head are further queries of it."""

    def begin(self, start: Tensor, context: Tensor, group: int) -> None:
        """start [B, M]: first position of each block, M a multiple of `group`; context [B, T, H']: what layers read at
        every position."""
        size, length, width = context.shape
        flat = context.reshape(size * length, width)
        at = torch.arange(length, device=start.device)
        angles = self.angles(at.repeat(size))
        # [B·M/group, group]
        self.start = start.view(-1, group)
        self.past = dict[int, Keys]()
        self.shared = dict[int, Keys]()
        self.masks = dict[tuple[int | None, bool, int, int], Tensor]()
        copies = start.shape[1] // group
        for layer in self.layers:
            k, v = (t.view(size, 1, length, *t.shape[1:]) for t in self.project(layer, flat, angles))
            grouped = (t.expand(-1, copies, -1, -1, -1).transpose(2, 3) for t in (k, v))
            # [B, M/group, heads, T, D]
            self.shared[layer.attn.spec.kv_layer] = tuple(grouped)  # type: ignore[assignment]

    def project(self, layer: DraftLayer, x: Tensor, angles: Rotations) -> Keys:
        """K and V [R, kv_heads, D] of rows x."""
        projected = self.ops.linear(x, layer.kv, layer.kv_bias)
        attn = layer.attn
        return self.ops.keys_values(projected, angles[layer.rope], k_norm=attn.k_norm, spec=attn.spec)

    def rows(self, layer: DraftLayer, like: Tensor, end: Tensor, count: int) -> BlockRows:
        return BlockRows(like, like, end)  # gradients flow through `past` instead

    def mask(self, layer: DraftLayer, length: int, first: int, slots: int, dtype: torch.dtype) -> Tensor:
        """0 or -inf [groups, 1, heads per K/V head · group · slots, T + group · (first + slots)]: slots from `first`
        on, against the context before their block and the rows of that block."""
        key = (layer.attn.window, layer.attn.causal, first, slots)
        device = self.start.device
        if key not in self.masks:
            most = self.start.shape[1]
            spec = layer.attn.spec
            place = torch.arange(first, first + slots, device=device)
            block_slots = torch.arange(first + slots, device=device)
            behind_far = (self.start[..., None] + place)[..., None] - torch.arange(length, device=device)
            behind_near = place[:, None] - block_slots  # [S, P]
            far = behind_far > place[:, None]
            near = (behind_near >= 0) | (not layer.attn.causal)
            if layer.attn.window is not None:
                far = far & (behind_far < layer.attn.window)
                near = near & (behind_near.abs() < layer.attn.window)
            same = torch.eye(most, dtype=torch.bool, device=device)[:, None, :, None] & near[None, :, None]
            seen = torch.cat((far, same.flatten(2).expand(len(far), -1, -1, -1)), -1)  # [groups, group, S, T + …]
            bias = torch.zeros(seen.shape, dtype=dtype, device=device).masked_fill_(~seen, float("-inf"))
            self.masks[key] = bias.flatten(1, 2).repeat(1, spec.heads // spec.kv_heads, 1)[:, None]
        return self.masks[key]

    def attend(
        self, layer: DraftLayer, x: Tensor, angles: Rotations, kv: KVView, block: BlockRows, first: int
    ) -> Tensor:
        spec = layer.attn.spec
        groups, most = self.start.shape
        here = layer.attn.spec.kv_layer
        slots = len(x) // self.start.numel()
        dim = spec.head_dim
        q = self.ops.linear(x, layer.q, layer.q_bias).view(len(x), spec.heads, dim)
        q = q if layer.attn.q_norm is None else self.ops.rms_norm(q, layer.attn.q_norm, spec.eps)
        q = self.ops.rotate(q, *angles[layer.rope]).view(groups, most * slots, spec.kv_heads, -1, dim)
        fresh = tuple(t.view(groups, most, slots, spec.kv_heads, dim) for t in self.project(layer, x, angles))
        if first:
            fresh = tuple(torch.cat(pair, 2) for pair in zip(self.past[here], fresh, strict=True))
        self.past[here] = fresh  # type: ignore[assignment]  # a pair
        keys, values = (
            torch.cat((far, near.flatten(1, 2).transpose(1, 2).unflatten(0, far.shape[:2])), 3).flatten(0, 1)
            for far, near in zip(self.shared[here], fresh, strict=True)
        )
        bias = self.mask(layer, self.shared[here][0].shape[3], first=first, slots=slots, dtype=x.dtype)
        queries = q.permute(0, 2, 3, 1, 4).flatten(2, 3)  # [groups, kv_heads, heads per K/V head · group · S, D]
        mixed = F.scaled_dot_product_attention(queries, keys, values, attn_mask=bias, scale=spec.scale)
        return mixed.unflatten(2, (-1, most * slots)).permute(0, 3, 1, 2, 4).reshape(len(x), -1)


class BlockModule(TrainNet):
    config: BlockConfig

    def unroll(self, w: Weights, model: TextModel, seen: CapturedStates, batch: TrainBatch, steps: int) -> Drafted:
        """Inputs of the head for steps 1..steps (DFlash: at most a block), at the anchors of step 1."""
        config = self.config
        rows = batch.anchors[0]
        size, length = batch.ids.shape
        line, at = batch.where(rows)
        first = torch.searchsorted(line, torch.arange(size, device=line.device))
        group = -(-batch.most // -(-batch.most // GROUP))
        most = -(-batch.most // group) * group
        cell = line * most + torch.arange(len(rows), device=line.device) - first[line]
        # unused places draft from position 0
        anchor = at.new_zeros(size * most).index_copy(0, cell, at).view(size, most)
        net = GroupedBlock(config, w, model.ops, target=model)
        streams = net.context([t.flatten(0, 1) for t in seen.taps])

        def token(j: int) -> Tensor:
            """The token j positions after each anchor [B·M]."""
            return batch.ids.gather(1, (anchor + j).clamp(max=length - 1)).reshape(-1)

        wide = batch.ids.shape[1] - batch.first
        no_kv = KVView(
            page_size=1,
            keys=(),
            values=(),
            tables={},
            positions=at,
            row_seq=at,
            row_start=at,
            max_rows=0,
            max_context=0,
        )

        def spread(h: Tensor) -> Tensor:  # [B·M, H] -> [B, Tq, H]
            return h.new_zeros((size * wide, h.shape[-1])).index_copy(0, rows, h[cell]).view(size, wide, -1)

        if config.kind == "dflash":
            net.begin(anchor + 1, streams.view(size, length, -1), group)
            ids = anchor.new_full((anchor.numel(), config.block), config.mask_id)
            ids[:, 0] = token(1)
            hidden = net.backbone(ids, no_kv, (anchor + 1).reshape(-1))
            for j in range(1, min(steps, config.block - 1) + 1):
                yield spread(hidden[:, j])
            return
        (layer,) = net.layers
        following = torch.cat((batch.ids[:, 1:], batch.ids[:, -1:]), 1).reshape(-1)
        context, _ = net.feature_input(layer, following, streams)
        net.begin(anchor, context.view(size, length, -1), group)
        flat = (torch.arange(size, device=line.device)[:, None] * length + anchor).reshape(-1)
        feature = streams[flat]
        block_rows = BlockRows(flat, flat, anchor.reshape(-1))
        for j in range(steps):
            h, feature = net.feature_step(token(j + 1), feature, kv=no_kv, own=block_rows, step=j)
            yield spread(h)


@torch.no_grad()
def start_from_layers(net: BlockModule, model: TextModel, batch: TrainBatch, reads: Layers) -> None:
    """Initialises layers with target layers of the same shape: attention, MLP, norms; norms of queries and keys at the
    scale that they have there. The context starts as the stream after the last tap, which enters those layers."""
    config = net.config
    target = model.config
    seen = capture(model, batch.ids, tuple(max(0, r - 1) for r in reads))
    for i, (layer, r) in enumerate(zip(config.layers, reads, strict=True)):
        block = model.blocks[r]
        theirs = target.layers[r].attn
        at = f"layers.{i}."
        same = all(getattr(theirs, size) == getattr(layer.attn, size) for size in ("heads", "kv_heads", "head_dim"))
        if not same or theirs.k_eq_v or target.layers[r].intermediate != layer.intermediate or block.gate_up is None:
            continue
        for name in ("out", "gate_up", "down", "attn_norm", "mlp_norm"):
            net.weight(at + name).copy_(as_tensor(getattr(block, name)))
        qkv = as_tensor(block.qkv)
        rows = theirs.heads * theirs.head_dim
        net.weight(at + "q").copy_(qkv[:rows])
        net.weight(at + "kv").copy_(qkv[rows:])
        h = model.ops.rms_norm(seen.taps[i].flatten(0, 1).float(), block.attn_norm.float(), config.norm_eps)
        q, k = (h @ w.float().T for w in (qkv[:rows], qkv[rows : rows + theirs.kv_heads * theirs.head_dim]))
        q_size, k_size = (t.unflatten(-1, (-1, theirs.head_dim)).pow(2).mean(-1).sqrt().mean() for t in (q, k))
        net.weight(at + "q_norm").fill_(float(q_size) * theirs.scale * theirs.head_dim**0.5)
        net.weight(at + "k_norm").fill_(float(k_size))
    fc = net.weight("fc")
    width = target.hidden
    fc.mul_(0.1)
    fc[:, -width:] += torch.eye(config.hidden, device=fc.device)
    net.weight("hidden_norm").copy_(model.blocks[reads[-1]].attn_norm)
    net.weight("norm").copy_(model.blocks[-1].next_norm)


def drafter_config(name: str, target: ModelConfig, kind: str | None = None) -> DrafterConfig | BlockConfig:
    """Reads the configuration of a drafter on disk.

    Raises OutriderError if it is damaged, does not fit the target or is not of this --kind.
    """
    files = hub.resolve(name, kind="drafter")
    block = is_block(files.config)
    if kind is not None and block == (kind == "mtp"):
        raise OutriderError(f"{name} is {'a block drafter: not' if block else 'no block drafter:'} --kind mtp")
    if block:
        return translate(BlockConfig.from_hf, files).bound(target)
    config = load_drafter(files)[0]
    config.bound_layers(target)
    return config


def load_net(name: str, target: TrainTarget, seed: int = 0) -> TrainNet:
    """Loads a drafter from disk."""
    config = drafter_config(name, target.config)
    if isinstance(config, DrafterConfig):
        net: TrainNet = DrafterModule(replace(config, target_hash=target.hash), target.config, seed)
        weights: Mapping[str, DeviceWeight] = load_drafter(name)[1]
    else:
        good = config.kind in TAPS and config.tied_to_target
        other = "or one with a head of its own"
        require(good, f"{name}: a {config.kind} drafter, {other}, cannot be trained on")
        net = BlockModule(config, seed)
        weights = load_block(hub.resolve(name, kind="drafter"), target.model, torch.float32).weights
    net.load({key: as_tensor(weight) for key, weight in weights.items()})
    return net.to(target.model.device)


def start_block(job: TrainConfig, target: TrainTarget, data: Sequences, say: Say) -> BlockModule:
    """The drafter of a run with its initial weights."""
    model = target.model
    config = new_block(job, target.config, unused_token(data, target.config))
    net = BlockModule(config, job.seed).to(model.device)
    if (job.out / "checkpoint.pt").exists() or target.config.family != "llama" or config.kind != "dflash":
        return net  # weights come from the checkpoint, or start at random
    reads = spread_reads(target.config, len(config.layers))
    some = make_batch(data, plan_epoch(data, START_ROWS, tokens=4 * START_ROWS, seed=job.seed, epoch=0)[0], 1).to(
        model.device
    )
    start_from_layers(net, model, batch=some, reads=reads)
    say(f"drafter starts from target layers {reads} and reads the streams after layers {config.taps}")
    return net
