"""The target of a training run: its files and tokenizer (`describe`), dense weights (`open_target`), prompts as token
sequences (`encode`), and what a drafter may see of it (`capture`), none of which is stored on disk.

Its own model code runs over dense tensors instead of pages: `DenseOps` writes K/V as [B, kv_heads, T, D] and attends
with torch's fused kernels. Sequences are padded on the right; causality keeps the padding harmless. `Recorder` returns
the target's outputs for a batch: captured on the spot, or once per sequence and then kept in memory.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from ..engine.text import Tokenizer
from ..models.config import ModelConfig
from ..models.decoder import TextModel
from ..models.names import tensor_plan
from ..ops.formats import DeviceWeight
from ..ops.reference import ReferenceOps, as_tensor
from ..prompts import Prompt
from ..types import AttnSpec, TextFiles, require
from ..weights import hub
from ..weights.adapter import LoraFile, adapted_hash, read_adapter
from ..weights.files import Files, fingerprint, model_config, text_files
from ..weights.load import load_target
from .data import Sequences, TrainBatch
from .losses import likely_tokens

Layers = tuple[int, ...]


@dataclass(frozen=True)
class Described:
    """A target before its weights are loaded."""

    name: str
    files: Files
    config: ModelConfig
    text: TextFiles
    hash: str  # of its content and the adapter's
    adapter: str | None = None  # a LoRA adapter: a drafter is trained for the model with it


@dataclass(frozen=True)
class TrainTarget:
    model: TextModel  # over DenseOps
    config: ModelConfig
    hash: str


def describe(name: str, adapter: str | None = None) -> Described:
    files = hub.resolve(name)
    config = model_config(files)
    hash = fingerprint(files)
    if adapter is not None:
        hash = adapted_hash(hash, read_adapter(adapter, config).digest())
    return Described(name, files, config=config, text=text_files(files), hash=hash, adapter=adapter)


def open_target(name: str | Described, device: str, dtype: torch.dtype) -> TrainTarget:
    known = describe(name) if isinstance(name, str) else name
    torch.backends.cuda.enable_cudnn_sdp(False)  # it plans anew for every shape, and batches differ in shape
    config, weights, _ = load_target(known.files, device, dtype)
    if known.adapter is not None:
        add_adapter(weights, read_adapter(known.adapter, config), config)
    model = TextModel(config, weights, DenseOps())  # type: ignore[arg-type]  # its K/V is dense, not in pages
    return TrainTarget(model, config, known.hash)


def add_adapter(weights: dict[str, DeviceWeight], file: LoraFile, config: ModelConfig) -> None:
    """Adds the adapter's changes to the dense weights, summed in float32."""
    for name, plan in tensor_plan(config).items():
        row = 0
        dense = weights.get(name)
        for source, (rows, *_) in zip(plan.sources, plan.source_shapes):
            if source in file.updates:
                target_rows = as_tensor(dense)[row : row + rows]  # type: ignore[arg-type]
                target_rows.copy_(target_rows.float() + file.updates[source].delta().to(target_rows.device))
            row += rows


def encode(prompts: list[Prompt], text: TextFiles, vocab: int, *, max_tokens: int, chat: bool = True) -> Sequences:
    """Encodes prompts by the chat template; prompts that are too long are left out."""
    tokenizer = Tokenizer(text)
    rows = []
    index = []
    template = chat and tokenizer.has_chat_template
    for i, prompt in enumerate(prompts):
        said = [{"role": "user", "content": prompt.text}]
        ids = tokenizer.chat(said) if template else tokenizer.encode(prompt.text, bos=True)
        if 1 <= len(ids) <= max_tokens:
            rows.append(np.array(ids))
            index.append(i)
    require(bool(rows), f"none of the {len(prompts)} prompts fits {max_tokens} tokens (max_prompt in a recipe)")
    lengths = [len(row) for row in rows]
    return Sequences.of(rows, prompts=lengths, index=index, greedy=[False] * len(rows), vocab=vocab)


# ---- capture ---------------------------------------------------------------------------------------------------------
@dataclass
class DenseKV:
    """Whole sequences of T positions. Rows are the last Tq of each, sequence by sequence; when writing, all."""

    batch: int
    positions: Tensor  # int64 [B·Tq]
    keys: dict[int, Tensor] = field(default_factory=dict)  # by layer [B, kv_heads, T, D]
    values: dict[int, Tensor] = field(default_factory=dict)


class DenseOps(ReferenceOps):
    """The reference ops over DenseKV, with the library's fused norms and attention."""

    name = "dense"

    def rms_norm(self, x: Tensor, w: Tensor | None, eps: float) -> Tensor:
        if x.dtype == torch.float32:
            return super().rms_norm(x, w, eps)
        return F.rms_norm(x, (x.shape[-1],), None if w is None else w.to(x.dtype), eps)

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        if not x.is_cuda:
            return super().rotate(x, cos, sin)
        from .kernels import Rotate

        return Rotate.apply(x, cos, sin)

    def write_kv(self, k: Tensor, v: Tensor, spec: AttnSpec, kv: DenseKV) -> None:  # type: ignore[override]
        shape = (kv.batch, -1, spec.kv_heads, spec.head_dim)
        kv.keys[spec.kv_layer] = k.view(shape).transpose(1, 2)
        kv.values[spec.kv_layer] = v.reshape(shape).transpose(1, 2)

    def attend(self, q: Tensor, spec: AttnSpec, kv: DenseKV) -> Tensor:  # type: ignore[override]
        k = kv.keys[spec.kv_layer]
        v = kv.values[spec.kv_layer]
        qs = q.view(kv.batch, -1, spec.heads, spec.head_dim).transpose(1, 2)
        out = causal_attention(
            qs, spread_heads(k, spec.heads), v=spread_heads(v, spec.heads), scale=spec.scale, window=spec.window
        )
        return out.transpose(1, 2).reshape(q.shape)


def spread_heads(x: Tensor, heads: int) -> Tensor:
    """[B, kv_heads, T, D] -> [B, heads, T, D]: every K/V head repeated for the query heads that share it."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


def causal_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None = None) -> Tensor:
    """q [B, heads, Tq, D]: the last Tq of T; k, v [B, heads, T, D]. Query i sees keys <= i (in the window)."""
    ends = q.shape[2]
    length = k.shape[2]
    if window is not None and length > window:
        i = torch.arange(length - ends, length, device=q.device)[:, None]
        j = torch.arange(length, device=q.device)[None, :]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=(j <= i) & (j > i - window), scale=scale)
    if ends == length:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=causal_lower_right(ends, length), scale=scale)


@dataclass(frozen=True)
class CapturedStates:
    hidden: Tensor  # [B, T, H] after the final norm
    keys: dict[int, Tensor]  # by layer [B, kv_heads, T, D]
    values: dict[int, Tensor]
    taps: tuple[Tensor, ...]  # residual streams [B, T, H]


@torch.no_grad()
def capture(model: TextModel, ids: Tensor, taps: Layers = ()) -> CapturedStates:
    """Runs the target over ids [B, T] from position 0. `model` must be built over DenseOps."""
    batch, length = ids.shape
    kv = DenseKV(batch, torch.arange(length, device=ids.device).repeat(batch))
    out = model.forward(ids.reshape(-1), kv, taps)  # type: ignore[arg-type]
    shape = (batch, length, out.hidden.shape[-1])
    return CapturedStates(
        out.hidden.view(shape), kv.keys, values=kv.values, taps=tuple(s.view(shape) for s in out.streams)
    )


class Recorder:
    """Outputs of the target for batches of one dataset. With `keep` the target runs once per sequence, each alone, so
    that outputs do not depend on the batch; only layers that the drafter reads are kept."""

    def __init__(self, model: TextModel, data: Sequences, reads: Layers, taps: Layers, keep: bool = False):
        self.model = model
        self.data = data
        self.reads = reads
        self.taps = taps
        self.keep = keep
        self.kept: dict[int, CapturedStates] = {}  # by sequence, a batch of one
        self.ranked: dict[int, Tensor] = {}  # by sequence: int32 [judged positions, LIKELY] the likeliest tokens

    def take(self, batch: TrainBatch) -> CapturedStates:
        if not self.keep:
            return capture(self.model, batch.ids, self.taps)
        rows = [self._shown(int(i)) for i in batch.which]
        width = batch.ids.shape[1]

        def joined(parts: list[Tensor]) -> Tensor:  # [1, (kv_heads,) T, D] each, padded with zeros to the batch's width
            return torch.cat([F.pad(p, (0, 0, 0, width - p.shape[-2])) for p in parts])

        return CapturedStates(
            joined([r.hidden for r in rows]),
            {l: joined([r.keys[l] for r in rows]) for l in self.reads},
            values={l: joined([r.values[l] for r in rows]) for l in self.reads},
            taps=tuple(joined([r.taps[n] for r in rows]) for n in range(len(self.taps))),
        )

    def likely(self, batch: TrainBatch, seen: CapturedStates) -> Tensor:
        """The target's likeliest tokens [N, LIKELY] at the batch's judged positions."""
        if not self.keep:
            return likely_tokens(self.model, seen.hidden.flatten(0, 1)[batch.teacher])
        for i in map(int, batch.which):
            if i not in self.ranked:
                judged = self._shown(i).hidden[0, int(self.data.prompts[i]) : -1]
                self.ranked[i] = likely_tokens(self.model, judged).int()
        return torch.cat([self.ranked[int(i)] for i in batch.which]).long()

    def _shown(self, i: int) -> CapturedStates:
        if i not in self.kept:
            ids = torch.from_numpy(self.data[i].astype(np.int64))[None].to(self.model.device)
            seen = capture(self.model, ids, self.taps)
            keys, values = ({l: side[l].contiguous() for l in self.reads} for side in (seen.keys, seen.values))
            self.kept[i] = CapturedStates(seen.hidden, keys, values=values, taps=seen.taps)
        return self.kept[i]
