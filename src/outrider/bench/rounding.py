"""Measures the loss from quantised weights: perplexity and logit error against float32 on a short text.

The text is teacher-forced through the model with the weights of the CPU kernels (`--quantize`, or a GGUF file's own
formats), or as a GPU would round them, and through the torch reference with every weight in float32, one after the
other, so that only one model is in memory.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib import resources
from math import exp

import torch
from torch import Tensor

from .. import ops as ops_module
from ..cache.store import CacheSpec, KVStore
from ..engine.text import Tokenizer
from ..models.decoder import TextModel
from ..ops.formats import MODES, DeviceWeight, rounded_to
from ..ops.reference import Backend, ReferenceOps
from ..types import OutriderError, require
from ..weights.load import load_target

MOST = 512  # maximum tokens of the sample


@dataclass(frozen=True)
class Rounding:
    tokens: int
    perplexity: float
    float32: float  # perplexity with float32 weights
    logit_error: float  # root mean square over that of the float32 logits' spread around each row's mean
    same_best: float  # share of positions with the same most likely token

    def line(self) -> str:
        change = 100 * (self.perplexity / self.float32 - 1)
        return (
            f"perplexity {self.perplexity:.3f}, in float32 {self.float32:.3f} ({change:+.2f} %); "
            f"logit error {100 * self.logit_error:.2f} %; same best token at {100 * self.same_best:.1f} % of "
            f"{self.tokens} positions"
        )


class AsOnGpu(ReferenceOps):
    """The reference with matrices rounded as on a GPU, multiplied in float32; the rounding of bfloat16 products is not
    included."""

    capabilities = replace(ReferenceOps.capabilities, quantizes=tuple(MODES))

    def quantize(self, dense: Tensor, mode: str) -> DeviceWeight:
        format = rounded_to(mode, dense.shape)
        return dense if format is None else format.quantise(dense).dense()


def measure(model: str, quantize: str | None, kv_dtype: str = "auto", gpu: bool = False) -> Rounding:
    """Measures on the package's sample text. gpu: weights rounded as on a GPU, instead of as by the CPU kernels."""
    kernels = "reference" if kv_dtype == "fp8" else "cpu"
    backend = AsOnGpu() if gpu else ops_module.choose("cpu", kernels)
    rounded, ids = forced(model, backend, quantize=quantize, kv_dtype=kv_dtype)
    logits, _ = forced(model, ops_module.choose("cpu", "reference"), None)
    targets = ids[1:, None]
    perplexity = [exp(-float(torch.log_softmax(z, -1).gather(1, targets).double().mean())) for z in (rounded, logits)]
    spread = logits - logits.mean(-1, keepdim=True)
    error = float((rounded - logits).norm() / spread.norm())
    same = float((rounded.argmax(-1) == logits.argmax(-1)).float().mean())
    return Rounding(len(targets), perplexity[0], float32=perplexity[1], logit_error=error, same_best=same)


def forced(model: str, ops: Backend, quantize: str | None, kv_dtype: str = "auto") -> tuple[Tensor, Tensor]:
    """Logits [T - 1, V] that predict the text's tokens [T], in passes of 64 tokens."""
    config, weights, files = load_target(model, "cpu", dtype=torch.float32, ops=ops, quantize=quantize)
    text = resources.files("outrider").joinpath("assets/bench/sample.txt").read_text(encoding="utf-8")
    ids = torch.tensor(Tokenizer(files).encode(text, bos=True)[: min(MOST, config.max_context)])
    require(len(ids) >= 2, "a context of at least two tokens is needed to measure perplexity")
    runner = ops.compile(TextModel(config, weights, ops))
    rows = len(ids) - 1
    store = KVStore(
        config,
        CacheSpec(1, rows, page_size=32, chunk=64, tokens=rows + 64),
        dtype=ops.kv_dtype(torch.float32, kv_dtype),
        device="cpu",
    )
    seq, _ = store.open()
    slot = torch.tensor([seq.slot])
    out = []
    for lo in range(0, rows, 64):
        n = min(64, rows - lo)
        if not store.reserve(seq, lo + n):
            raise OutriderError(f"no room in the cache for {lo + n} positions")
        view = store.view(
            slot,
            positions=torch.arange(lo, lo + n),
            row_seq=torch.zeros(n, dtype=torch.int64),
            row_start=torch.tensor([0, n], dtype=torch.int32),
            max_rows=n,
            max_context=lo + n,
        )
        out.append(runner.logits(runner.forward(ids[lo : lo + n], view).hidden))
        store.commit(seq, lo + n)
    return torch.cat(out), ids
