"""Cycles on a GPU with dummy weights: a whole cycle captured as one CUDA graph, timed, and set against the memory limit.

Speed does not depend on what the weights say, so no checkpoint is needed; acceptance does, so it is always an assumption
here and is marked as synthetic. `Rig` builds one size; `rig.graph(batch, k, context)` captures a cycle of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor

from ..cache.store import CacheSpec, KVStore
from ..engine.cycle import CycleInput, Rows, cycle, verify_coupled
from ..engine.graphs import Graph, memory_pool
from ..models import build
from ..models.config import DrafterConfig, ModelConfig
from ..models.gemma4_assistant import Gemma4Assistant
from ..models.known import KNOWN
from ..spec.choose import SamplingBatch
from ..spec.drafter import DraftBatch
from ..spec.mtp import MTPDrafter
from ..types import Draft, OutriderError, SamplingParams
from ..weights.load import dummy_weights

SIZES = {s: f"google/gemma-4-{s}-it" for s in ("31B", "12B", "26B-A4B", "E4B", "E2B")}
H200_BYTES_PER_S = 4.39e12  # read-only reduction over 8 GiB, measured
PUBLISHED = {4: 0.72, 8: 0.58, 16: 0.41}  # share of drafted tokens accepted, Google's table for Gemma 4


@dataclass
class Captured:
    """One graph, and the tensors it reads and writes."""

    graph: Graph
    last: Tensor  # int64 [B]
    length: Tensor  # int64 [B]
    tokens: Tensor  # int64 [B, K + 1]
    counts: Tensor  # int64 [B]
    capture_s: float

    @property
    def logits(self) -> Tensor:
        """float32 [R, V] of the last replay."""
        assert isinstance(self.graph.result, Tensor)
        return self.graph.result

    def time(self, repeats: int = 20, warm: int = 3) -> float:
        """Median milliseconds a replay."""
        return time_ms(self.graph.replay, repeats, warm)


def time_ms(fn: Callable[[], Any], repeats: int = 20, warm: int = 3) -> float:
    for _ in range(warm):
        fn()
    marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for begin, end in marks:
        begin.record()
        fn()
        end.record()
    torch.cuda.synchronize()
    return median(begin.elapsed_time(end) for begin, end in marks)


def shallow(raw: dict[str, Any], layers: int) -> dict[str, Any]:
    """The same model with its first layers only: for comparisons that need not be deep."""
    text = dict(raw["text_config"])
    shared = text["num_kv_shared_layers"]
    text["num_hidden_layers"], text["layer_types"] = layers, text["layer_types"][:layers]
    text["num_kv_shared_layers"] = 0 if not shared else max(1, layers // 6)
    if shared and len(set(text["layer_types"][: layers - text["num_kv_shared_layers"]])) < 2:
        raise OutriderError(f"{layers} layers are too few for a model that shares K/V: take more")
    return {**raw, "text_config": text}


class Rig:
    """One model with dummy weights on the GPU, its drafter, and room for some sequences."""

    def __init__(
        self, raw: Mapping[str, Any], drafter: Mapping[str, Any] | None, ops: Any, device: torch.device | str = "cuda",
        dtype: torch.dtype = torch.bfloat16, slots: int = 16, context: int = 2048, tokens: int | None = None, seed: int = 0,
        page_size: int = 16,
    ):  # fmt: skip
        """raw, drafter: config.json contents; context, tokens: what the K/V cache holds per sequence and in all."""
        self.raw, self.ops, self.device = raw, ops, torch.device(device)
        self.config = ModelConfig.from_hf(raw)
        self.weights = dummy_weights(self.config, self.device, dtype, ops, None, seed)
        self.model: Any = build(self.config, self.weights, ops)
        self.drafter: MTPDrafter | None = None
        if drafter is not None:
            config = DrafterConfig.from_hf(drafter)
            assistant = Gemma4Assistant(config, dummy_weights(config, self.device, dtype, ops, None, seed + 1), ops, self.model)
            self.drafter = MTPDrafter(assistant, self.model)
        self.store = KVStore(self.config, CacheSpec(slots, context, page_size, 1024, tokens or slots * context), dtype, self.device)
        self.pool = memory_pool(self.device)

    @staticmethod
    def of(size: str, layers: int | None = None, **rest: Any) -> Rig:
        """A Gemma 4 size by name, with its own drafter; layers: only so many of them."""
        if size not in SIZES:
            raise OutriderError(f"unknown size {size!r}; known: {', '.join(SIZES)}")
        from ..ops.triton import TritonOps  # here: not everybody who imports this module has a GPU

        raw = dict(KNOWN[SIZES[size]])
        return Rig(raw if layers is None else shallow(raw, layers), KNOWN[SIZES[size] + "-assistant"], TritonOps("cuda"), **rest)

    # ---- what must be read ---------------------------------------------------------------------------------------------
    def weight_bytes(self, rows: int = 1) -> int:
        """Weights one pass must read: all but the embedding rows that are not looked up; of the experts those that
        `rows` rows can need at least (8 of 128 for one row)."""
        total = 0
        moe = self.config.moe
        for name, w in self.weights.items():
            if name == "ple_embed" or (name == "embed" and not self.config.tied):
                continue
            size = w.numel() * w.element_size()
            if moe is not None and ".experts_" in name:
                size = size * moe.top_k // moe.experts
            total += size
        return total

    def kv_bytes(self, context: int) -> int:
        total = 0
        for layer in self.config.layers:
            seen = context if layer.attn.window is None else min(context, layer.attn.window)
            keys = self.store.keys[layer.attn.kv_layer]
            assert keys is not None
            total += 2 * seen * layer.attn.kv_heads * layer.attn.head_dim * keys.element_size()
        return total

    # ---- sequences -----------------------------------------------------------------------------------------------------
    def open(self, batch: int, context: int, room: int) -> list[Any]:
        """`batch` sequences with `context` random positions in the cache and room for `room` more."""
        g = torch.Generator(device=self.device).manual_seed(7)
        for tensor in (*self.store.keys, *self.store.values):
            if tensor is not None:
                tensor.normal_(0.0, 1.0, generator=g)
        seqs = []
        chunk = self.store.spec.chunk
        for _ in range(batch):
            seq, _ = self.store.open([0] * 8, self.store.spec.page_size, reuse=False)
            for end in [*range(chunk, context, chunk), context, context + room]:  # sliding pages are given back on the way
                if not self.store.reserve(seq, end):
                    raise OutriderError(f"no room for {batch} sequences of {context + room} positions")
                self.store.commit(seq, min(end, context))
            seqs.append(seq)
        return seqs

    def close(self, seqs: list[Any]) -> None:
        for seq in seqs:
            self.store.close(seq)

    def prefill(self, seq: Any, ids: Tensor, start: int = 0) -> Tensor:
        """One chunk of one sequence; hidden [count, H]."""
        count = ids.shape[0]
        at = torch.arange(start, start + count, device=self.device)
        rows = torch.tensor([0, count], dtype=torch.int32, device=self.device)
        kv = self.store.view(torch.tensor([seq.slot], device=self.device), at, torch.zeros_like(at), rows, count, start + count)
        return self.model.forward(ids, kv)

    # ---- a cycle as one graph --------------------------------------------------------------------------------------------
    @torch.inference_mode()
    def graph(
        self, seqs: list[Any], k: int, context: int, bound: int, *, advance: bool = False,
        propose: Callable[[Tensor, Tensor], Draft] | None = None,
    ) -> Captured:  # fmt: skip
        """Capture draft k, verify k + 1, choose, accept, next inputs. advance: the committed length and the newest token move
        with every replay; otherwise every replay does the same work at the same length. propose(last, length) replaces the
        MTP drafter. bound: a context that no replay may pass."""
        batch = len(seqs)
        rows = Rows.of((k,) * batch, self.device)
        slots = torch.tensor([s.slot for s in seqs], device=self.device)
        last = (slots * 7919 + 11) % self.config.vocab_size  # a sequence starts alike in any batch
        length = torch.full((batch,), context, dtype=torch.int64, device=self.device)
        features = torch.randn((batch, self.config.hidden), device=self.device, generator=self._rng(2)).to(self.model.dtype)
        sampling = SamplingBatch.build([SamplingParams()] * batch, [[]] * batch, [[]] * batch, self.config.vocab_size, self.device)
        tokens = torch.zeros((batch, k + 1), dtype=torch.int64, device=self.device)
        counts = torch.zeros(batch, dtype=torch.int64, device=self.device)
        each = torch.arange(batch, device=self.device)
        each_start = torch.arange(batch + 1, dtype=torch.int32, device=self.device)
        drafter = self.drafter

        def guess() -> Draft:
            if propose is not None:
                return propose(last, length)
            assert drafter is not None
            kv = self.store.view(slots, length - 1, each, each_start, 1, bound)
            seen = DraftBatch(
                ids=[""] * batch, tokens=[[]] * batch, last=last, length=length, features=features, kv=kv, sampling=sampling,
                sampled=False, ops=self.ops, vocab=self.config.vocab_size,
            )  # fmt: skip
            return drafter.propose(seen, k)

        def once() -> Tensor:
            x = CycleInput(rows, slots, last, length, sampling, self.ops, bound)
            out = cycle(self.model, self.store, guess if k else None, verify_coupled, (), x)
            tokens.copy_(out.verdict.tokens)
            counts.copy_(out.verdict.counts)
            if advance:
                last.copy_(out.verdict.tokens.gather(1, out.verdict.accepted[:, None])[:, 0])
                length.add_(out.verdict.counts).clamp_(max=bound - k - 1)  # a sequence that is done waits there for the others
                features.copy_(out.features)
            return out.logits

        began = time.perf_counter()
        keep = [t.clone() for t in (last, length, features)]
        graph = Graph(once, self.device, self.pool)
        for tensor, value in zip((last, length, features), keep):
            tensor.copy_(value)
        return Captured(graph, last, length, tokens, counts, time.perf_counter() - began)

    def _rng(self, seed: int) -> torch.Generator:
        return torch.Generator(device=self.device).manual_seed(seed)


# ---- bitwise equality ------------------------------------------------------------------------------------------------------
@dataclass
class Equality:
    """What comparing a speculative run with the plain one gave."""

    k: int
    batch: int
    tokens: int  # compared, per sequence
    cycles: int
    accepted: float  # mean drafted tokens accepted a cycle
    equal_tokens: bool
    equal_logits: bool
    first_difference: int | None


@torch.inference_mode()
def plain_run(rig: Rig, seqs: list[Any], context: int, steps: int) -> tuple[Tensor, Tensor]:
    """Plain decoding of each sequence alone, from a fixed start: tokens [B, steps], logits [B, steps, V]."""
    tokens = torch.empty((len(seqs), steps), dtype=torch.int64, device=rig.device)
    logits = torch.empty((len(seqs), steps, rig.config.vocab_size), dtype=torch.float32, device=rig.device)
    for b, seq in enumerate(seqs):
        run = rig.graph([seq], 0, context, context + steps + 64, advance=True)
        for i in range(steps):
            run.graph.replay()
            tokens[b, i], logits[b, i] = run.tokens[0, 0], run.logits[0]
    return tokens, logits


@torch.inference_mode()
def speculative_run(rig: Rig, seqs: list[Any], context: int, k: int, tokens: Tensor, logits: Tensor) -> Equality:
    """The same with k drafted tokens a cycle, by a drafter that knows the answer and is wrong about every fourth time."""
    batch, steps = tokens.shape
    padded = torch.cat((tokens, tokens.new_zeros((batch, k + 1))), 1)
    offset = torch.arange(k, device=rig.device)

    def propose(last: Tensor, length: Tensor) -> Draft:
        at = (length[:, None] - context + offset).clamp(max=steps + k)  # row j of a cycle chooses token length - context + j
        right = padded.gather(1, at)
        wrong = (at * 2654435761 + torch.arange(batch, device=rig.device)[:, None] * 40503) % 4 == 0
        return Draft(torch.where(wrong, (right + 1) % rig.config.vocab_size, right), torch.full_like(length, k))

    run = rig.graph(seqs, k, context, context + steps + 64, advance=True, propose=propose)
    done = [0] * batch
    cycles = accepted = 0
    same_tokens = same_logits = True
    first: int | None = None
    while min(done) < steps:
        run.graph.replay()
        counts, got, rows = run.counts.tolist(), run.tokens, run.logits.view(batch, k + 1, -1)
        cycles += 1
        for b, count in enumerate(counts):
            n = min(count, steps - done[b])
            accepted += count - 1
            if n <= 0:
                continue
            span = slice(done[b], done[b] + n)
            ok_tokens = torch.equal(got[b, :n], tokens[b, span])
            ok_logits = torch.equal(rows[b, :n], logits[b, span])
            if first is None and not (ok_tokens and ok_logits):
                first = done[b]
            same_tokens, same_logits = same_tokens and ok_tokens, same_logits and ok_logits
            done[b] += count
        if cycles > steps:  # every cycle emits at least one token
            break
    return Equality(k, batch, steps, cycles, accepted / max(1, cycles * batch), same_tokens, same_logits, first)
