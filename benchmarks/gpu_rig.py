"""Cycles on a GPU with dummy weights: a whole cycle captured as one CUDA graph, timed, and set against the memory
limit.

Speed does not depend on what the weights say, so no checkpoint is needed; acceptance does, so it is always an
assumption here and is marked as synthetic. `Rig` builds one size; `rig.graph(seqs, k, context, bound)` captures the
engine's own step.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal, TypedDict, Unpack

import torch
from torch import Tensor

from outrider.cache.store import CacheSpec, KVStore, SeqCache, last_rows
from outrider.engine.capture import Graph, GraphPool
from outrider.engine.decode import DecodeStep, Inputs, Key, Output, State
from outrider.models.block import BlockNet
from outrider.models.block_config import BlockConfig
from outrider.models.builtin_configs import BUILTIN_CONFIGS
from outrider.models.config import DrafterConfig, Foreign, ForeignDict, ModelConfig
from outrider.models.decoder import TextModel
from outrider.models.drafter import MTPNet
from outrider.models.inspect import kv_bytes
from outrider.ops.formats import DeviceWeight
from outrider.ops.reference import Backend, as_tensor
from outrider.ops.trees import TreeRows
from outrider.spec.block import BlockDrafter, own_head
from outrider.spec.mtp import MTPDrafter
from outrider.spec.slot_sampling import SlotSampling
from outrider.types import Draft, DraftTree, OutriderError, Verdict
from outrider.weights.load import dummy_weights

SIZES = {s: f"google/gemma-4-{s}-it" for s in ("31B", "12B", "26B-A4B", "E4B", "E2B")}
H200_BYTES_PER_S = 4.39e12  # read-only reduction over 8 GiB, measured
PUBLISHED = {4: 0.72, 8: 0.58, 16: 0.41}  # share of drafted tokens accepted, Google's table for Gemma 4


@dataclass
class CapturedCycle:
    """One graph, and the tensors it reads and writes."""

    graph: Graph
    state: State
    slots: Tensor  # int64 [B]
    out: Tensor  # as engine.decode.Output.packed
    k: int
    capture_s: float

    @property
    def tokens(self) -> Tensor:
        """int64 [B, K + 1]"""
        return self.out[:, : self.k + 1]

    @property
    def rows(self) -> Tensor:
        """int64 [B, K + 1]: of a tree, which of a sequence's rows chose each token."""
        return self.out[:, self.k + 1 : 2 * self.k + 2]

    @property
    def counts(self) -> Tensor:
        """int64 [B]"""
        return self.out[:, -1]

    @property
    def length(self) -> Tensor:
        """int64 [B], a copy"""
        return self.state.position.index_select(0, self.slots)

    @property
    def logits(self) -> Tensor:
        """float32 [R, V] of the last replay."""
        assert isinstance(self.graph.result, Tensor)
        return self.graph.result

    def time(self, repeats: int = 20) -> float:
        """Median milliseconds a replay."""
        return time_ms(self.graph.replay, repeats)


def time_ms(fn: Callable[[], object], repeats: int = 20, warm: int = 3) -> float:
    for _ in range(warm):
        fn()
    if not torch.cuda.is_available():  # only to try the benchmark itself
        seconds = []
        for _ in range(repeats):
            began = time.perf_counter()
            fn()
            seconds.append(time.perf_counter() - began)
        return median(seconds) * 1e3
    marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for begin, end in marks:
        begin.record()
        fn()
        end.record()
    torch.cuda.synchronize()
    return median(begin.elapsed_time(end) for begin, end in marks)


def shallow(raw: Foreign, layers: int) -> ForeignDict:
    """A copy of the model with its first layers only, for comparisons that need no depth."""
    text = dict(raw["text_config"])
    shared = text["num_kv_shared_layers"]
    text["num_hidden_layers"], text["layer_types"] = layers, text["layer_types"][:layers]
    text["num_kv_shared_layers"] = 0 if not shared else max(1, layers // 6)
    if len(set(text["layer_types"][: layers - text["num_kv_shared_layers"]])) < 2:
        raise OutriderError(f"{layers} layers do not hold both kinds of attention with K/V of their own: take more")
    return {**raw, "text_config": text}


class GpuMemory(TypedDict, total=False):
    """Memory that a rig of a known size may use."""

    slots: int
    context: int
    tokens: int | None
    compiled: bool
    kv: str


class Rig:
    """One model with dummy weights on the GPU, its drafter, and room for some sequences."""

    def __init__(
        self, raw: Foreign, drafter: Foreign | None, ops: Backend, device: torch.device | str = "cuda",
        dtype: torch.dtype = torch.bfloat16, slots: int = 16, context: int = 2048, tokens: int | None = None,
        weights: dict[str, DeviceWeight] | None = None, compiled: bool = False, kv: str = "auto",
    ):  # fmt: skip
        """raw, drafter: config.json contents; context, tokens: what the K/V cache holds per sequence and in all;
        weights: given ones instead of dummies; compiled: the drafter as `LLM` has it, whole rounds at once where the
        ops can; kv: what K/V is held as."""
        self.kv = kv
        self.raw = raw
        self.ops = ops
        self.device = torch.device(device)
        self.config = ModelConfig.from_hf(raw)
        self.weights = weights if weights is not None else dummy_weights(self.config, self.device, dtype, ops, None, 0)
        self.model = TextModel(self.config, self.weights, ops)
        self.drafter: MTPDrafter | BlockDrafter | None = None
        self.draft_narrow = False  # the drafter's matrices are read as bytes
        self.drafter_weights: dict[str, Tensor] = {}
        if drafter is not None:
            config = DrafterConfig.from_hf(drafter)
            made = dummy_weights(config, self.device, dtype, ops, None, 1)
            self.drafter_weights = {name: as_tensor(weight) for name, weight in made.items()}
            assistant = MTPNet(config, self.drafter_weights, ops, self.model)
            if compiled:
                assistant = ops.compile_drafter(assistant)
                self.draft_narrow = bool(vars(assistant).get("narrow"))
            self.drafter = MTPDrafter(assistant, self.model)
        self.pool = GraphPool(self.device)
        self.store = self._cache(slots, context, tokens)

    def resize(self, slots: int, context: int, tokens: int | None = None) -> None:
        """Another cache for the same weights. Graphs of the old one must be gone."""
        del self.store  # before the next is made: there may be no room for both
        collect()
        self.store = self._cache(slots, context, tokens)

    def _cache(self, slots: int, context: int, tokens: int | None) -> KVStore:
        spec = CacheSpec(slots, context, 16, 1024, tokens or slots * context)
        drafter_specs = self.drafter.kv_specs if self.drafter is not None else ()
        return KVStore(self.config, spec, self.ops.kv_dtype(self.model.dtype, self.kv), self.device, drafter_specs)

    def take_block(self, raw: Foreign, quantize: str | None, slots: int, context: int) -> None:
        """A block drafter with dummy weights in place of the one that was there, and a cache that holds its K/V."""
        self.drafter = None
        self.drafter_weights = {}
        collect()
        config = BlockConfig.from_hf(raw).bound(self.config)
        made = dummy_weights(config, self.device, self.model.dtype, self.ops, quantize, seed=1)
        weights = own_head(made, self.model, quantize)
        self.drafter = BlockDrafter(BlockNet(config, weights, self.ops, self.model))
        self.resize(slots, context)

    def __enter__(self) -> Rig:
        return self

    def __exit__(self, *_: object) -> None:
        self.free()

    def free(self) -> None:
        """Give everything back: the next model needs the room. Graphs of this rig must not be replayed any more."""
        self.weights.clear()
        self.drafter_weights.clear()
        del self.model, self.drafter, self.store, self.pool
        collect()

    @staticmethod
    def of(size: str, layers: int | None = None, **rest: Unpack[GpuMemory]) -> Rig:
        """A Gemma 4 size by name, with its own drafter; layers: only so many of them."""
        if size not in SIZES:
            raise OutriderError(f"unknown size {size!r}; known: {', '.join(SIZES)}")
        from outrider.ops.triton import TritonOps  # here: not everybody who imports this module has a GPU

        raw = dict(BUILTIN_CONFIGS[SIZES[size]])
        return Rig(
            raw if layers is None else shallow(raw, layers),
            BUILTIN_CONFIGS[SIZES[size] + "-assistant"],
            TritonOps("cuda"),
            **rest,
        )

    # ---- what must be read
    def weight_bytes(self, rows: int = 1) -> int:
        """Weights one pass must read: all but the embedding rows that are not looked up; of the experts as many as
        `rows` rows choose among (8 of 128 for one row; for more, what even routing gives on average)."""
        total = 0.0
        moe = self.config.moe
        for name, w in self.weights.items():
            if name == "ple_embed" or (name == "embed" and not self.config.tied):
                continue
            size = float(w.nbytes)
            if moe is not None and ".experts_" in name:
                size *= 1.0 - (1.0 - moe.top_k / moe.experts) ** rows
            total += size
        return round(total)

    def draft_bytes(self) -> int:
        """Weights one draft step must read: of a clustered head the best clusters."""
        if not isinstance(self.drafter, MTPDrafter):
            return 0
        config = self.drafter.model.config
        total = 0.0
        for name, w in self.drafter_weights.items():
            size = float(w.numel() * (1 if self.draft_narrow and w.ndim == 2 else w.element_size()))
            if name == "token_ordering":
                continue
            if name == "embed" and config.clusters:
                size *= config.cluster_top / config.clusters
            total += size
        return round(total)

    def kv_bytes(self, context: int) -> int:
        item = next(keys.element_size() for keys in self.store.keys if keys is not None)
        return kv_bytes(self.config, context, item, read=True)

    # ---- sequences
    def open(self, batch: int, context: int, room: int) -> list[SeqCache]:
        """`batch` sequences with `context` random positions in the cache and room for `room` more."""
        g = torch.Generator(device=self.device)
        for layer, both in enumerate(zip(self.store.keys, self.store.values, strict=True)):
            g.manual_seed(7 + layer)  # the same whatever layers stand behind
            for tensor in both:
                if tensor is not None:  # through the dtype of activations: torch draws no eight-bit numbers
                    copy = torch.empty(tensor.shape, dtype=self.model.dtype, device=self.device)
                    tensor.copy_(copy.normal_(0.0, 1.0, generator=g))
        seqs = []
        chunk = self.store.spec.chunk
        for _ in range(batch):
            seq, _ = self.store.open()
            # in chunks: sliding pages are given back on the way
            for end in (*range(chunk, context, chunk), context, context + room):
                if not self.store.reserve(seq, end):
                    raise OutriderError(f"no room for {batch} sequences of {context + room} positions")
                self.store.commit(seq, min(end, context))
            seqs.append(seq)
        self.store.flush()
        return seqs

    def close(self, seqs: list[SeqCache]) -> None:
        for seq in seqs:
            self.store.close(seq)

    def prefill(self, seq: SeqCache, ids: Tensor, start: int = 0, last: bool = False) -> Tensor:
        """One chunk of one sequence; hidden [count, H], or of the last row alone [1, H]."""
        count = ids.shape[0]
        at = torch.arange(start, start + count, device=self.device)
        rows = torch.tensor([0, count], dtype=torch.int32, device=self.device)
        kv = self.store.view(
            torch.tensor([seq.slot], device=self.device), at, torch.zeros_like(at), rows, count, start + count
        )
        return self.model.forward(ids, kv, wanted=last_rows(kv, [0]) if last else None).hidden

    # ---- a cycle as one graph
    @torch.inference_mode()
    def graph(
        self, seqs: list[SeqCache], k: int, context: int, bound: int, *, advance: bool = False,
        propose: Callable[[Tensor, Tensor], Draft | TreeRows] | None = None, assumed: Synthetic | None = None,
        eager: bool = False,
        nodes: int = 0,
        part: Literal["cycle", "draft"] = "cycle", model: TextModel | None = None,
    ) -> CapturedCycle:  # fmt: skip
        """Capture the engine's own decode step. advance: the committed length and the newest token move with every
        replay; otherwise every replay does the same work at the same length. propose(last, length) replaces the MTP
        drafter; assumed: synthetic acceptance. bound: a context that no replay may pass. eager: not captured, a replay
        is a call. nodes: tokens of a tree, k deep. part: the whole cycle, or the draft alone. model: with adapters,
        instead of the rig's own."""
        batch = len(seqs)
        idle = self.store.spec.slots
        slots = torch.tensor([s.slot for s in seqs], device=self.device)
        rng = torch.Generator(device=self.device).manual_seed(2)
        wide = self.config.hidden * (1 + len(self.drafter.taps if self.drafter is not None else ()))
        features = torch.randn((idle + 1, wide), device=self.device, generator=rng).to(self.model.dtype)
        sampling = SlotSampling(idle + 1, self.config.vocab_size, (), self.device)
        state = State.of(features, sampling)
        inputs = Inputs.of(self.device, idle, batch)
        state.last[slots] = (slots * 7919 + 11) % self.config.vocab_size  # a sequence starts alike in any batch
        state.position[slots] = context
        inputs.slots[:batch] = slots
        inputs.limit.fill_(k)
        inputs.cap.fill_(bound - max(k, nodes) - 1)  # a sequence that is done waits there for the others
        key = Key(batch, k, bound, "greedy", "drafter" if k else None, part, nodes=nodes)
        out = Output.of(key, self.device)
        target = model or self.model
        hooks = (None, assumed, propose, advance)
        once = DecodeStep(target, self.store, self.drafter, state, inputs, key, out, *hooks)
        began = time.perf_counter()
        keep = [t.clone() for t in (state.last, state.position, state.features)]
        graph = Graph(once, torch.device("cpu") if eager else self.device, self.pool)
        for tensor, value in zip((state.last, state.position, state.features), keep):
            tensor.copy_(value)
        return CapturedCycle(graph, state, slots, out.packed, k, time.perf_counter() - began)


def collect() -> None:
    """Memory that nothing refers to goes back to the device."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# ---- assumed acceptance
class Synthetic:
    """SYNTHETIC acceptance: the drafter and the target run for real, then the verdict is replaced. Dummy weights guess
    nothing right; what a cycle costs does not depend on it. `chances[j]`: position j is right, given those before it
    were.

    Counter-based and even: the n-th cycle's number is n times the golden ratio, so few cycles already have the right
    mean."""

    def __init__(self, chances: Sequence[float], batch: int, device: torch.device):
        reach = [math.prod(chances[: j + 1]) for j in range(len(chances))]
        self.expected = 1.0 + sum(reach)  # tokens per cycle
        self.reach = torch.tensor([round(r * 2**32) for r in reach], dtype=torch.int64, device=device)  # falling
        self.counter = (torch.arange(batch, device=device) * 0x85EBCA6B) & 0xFFFFFFFF

    def __call__(self, verdict: Verdict, draft: Draft, length: Tensor) -> Verdict:
        self.counter.add_(0x9E3779B9).bitwise_and_(0xFFFFFFFF)
        accepted = (self.counter[:, None] < self.reach).sum(1)
        return Verdict(accepted, verdict.tokens, accepted + 1)


# ---- bitwise equality
@dataclass
class Equality:
    """Result of comparing a speculative run with the plain one."""

    k: int
    batch: int
    tokens: int  # compared, per sequence
    cycles: int
    accepted: float  # mean drafted tokens accepted a cycle
    equal_tokens: bool
    equal_logits: bool
    first_difference: int | None


@torch.inference_mode()
def plain_run(rig: Rig, seqs: list[SeqCache], context: int, steps: int) -> tuple[Tensor, Tensor]:
    """Plain decoding of the sequences together, from a fixed start: tokens [B, steps], logits [B, steps, V]."""
    tokens = torch.empty((len(seqs), steps), dtype=torch.int64, device=rig.device)
    logits = torch.empty((len(seqs), steps, rig.config.vocab_size), dtype=torch.float32, device=rig.device)
    run = rig.graph(seqs, 0, context, context + steps + 64, advance=True)
    for i in range(steps):
        run.graph.replay()
        tokens[:, i] = run.tokens[:, 0]
        logits[:, i] = run.logits
    return tokens, logits


@torch.inference_mode()
def speculative_run(rig: Rig, seqs: list[SeqCache], context: int, k: int, tokens: Tensor, logits: Tensor) -> Equality:
    """A run with k drafted tokens per cycle, by a drafter that knows the answer and is wrong about every fourth
    time."""
    batch, steps = tokens.shape
    device = rig.device
    padded = torch.cat((tokens, tokens.new_zeros((batch, k + 2))), 1)
    offset = torch.arange(k + 1, device=device)
    each = torch.arange(batch, device=device)[:, None]

    def propose(last: Tensor, length: Tensor) -> Draft:
        # row j of a cycle chooses token length - context + j
        at = (length[:, None] - context + offset[:k]).clamp(max=steps + k)
        right = padded.gather(1, at)
        wrong = (at * 2654435761 + each * 40503) % 4 == 0
        return Draft(torch.where(wrong, (right + 1) % rig.config.vocab_size, right), torch.full_like(length, k))

    run = rig.graph(seqs, k, context, context + steps + 64, advance=True, propose=propose)
    return compared(run, context, tokens, logits, offset.expand(batch, k + 1))


@torch.inference_mode()
def tree_run(
    rig: Rig, seqs: list[SeqCache], context: int, parents: list[int], tokens: Tensor, logits: Tensor
) -> Equality:
    """A run with a tree per cycle, always of one shape (types.DraftTree). The path to its last deepest node knows the
    answer and is wrong about every fourth time; all others are wrong. Compares the rows on the accepted paths."""
    batch, steps = tokens.shape
    device = rig.device
    vocab = rig.config.vocab_size
    nodes = len(parents)
    blank = torch.zeros((batch, nodes), dtype=torch.int64, device=device)
    tree = TreeRows.of([DraftTree((), parents)] * batch, blank)
    k = tree.deepest
    depth = tree.depth[1 : nodes + 1]
    leaf = int((tree.depth[: nodes + 1] == k).nonzero()[-1])
    known = torch.isin(torch.arange(1, nodes + 1, device=device), tree.ancestors[leaf])
    padded = torch.cat((tokens, tokens.new_zeros((batch, k + 2))), 1)
    each = torch.arange(batch, device=device)[:, None]
    other = 1 + torch.arange(nodes, device=device)

    def propose(last: Tensor, length: Tensor) -> TreeRows:
        # a node of depth 1 guesses what the newest token's row chooses
        at = (length[:, None] - context + depth - 1).clamp(max=steps + k)
        right = padded.gather(1, at)
        wrong = ~known | ((at * 2654435761 + each * 40503) % 4 == 0)
        return TreeRows(
            torch.where(wrong, (right + other) % vocab, right), tree.depth, tree.ancestors, tree.parent_rows
        )

    run = rig.graph(seqs, k, context, context + steps + 64, advance=True, propose=propose, nodes=nodes)
    return compared(run, context, tokens, logits, run.rows)


def compared(run: CapturedCycle, context: int, tokens: Tensor, logits: Tensor, rows: Tensor) -> Equality:
    """Cycles until every sequence has its tokens [B, steps], each held against them and their logits [B, steps, V].
    rows [B, K + 1]: which of a sequence's rows chose each token. Compared on the device: the host looks every 16 cycles
    whether all are done."""
    batch, steps = tokens.shape
    device = tokens.device
    k = run.k
    offset = torch.arange(k + 1, device=device)
    each = torch.arange(batch, device=device)[:, None]
    bad_tokens, bad_logits, taken, made = (torch.zeros((), dtype=torch.int64, device=device) for _ in range(4))
    first = torch.full((), steps, dtype=torch.int64, device=device)
    cycles = 0
    # every cycle emits at least one token
    while cycles < steps and (cycles % 16 or int(run.length.min()) < context + steps):
        at = run.length[:, None] - context + offset  # [B, K + 1]
        run.graph.replay()
        cycles += 1
        seen = (offset < run.counts[:, None]) & (at < steps)
        at = at.clamp(max=steps - 1)
        other_token = seen & (run.tokens != tokens.gather(1, at))
        other_logit = seen & (run.logits.view(batch, -1, logits.shape[2])[each, rows] != logits[each, at]).any(-1)
        bad_tokens += other_token.sum()
        bad_logits += other_logit.sum()
        first = torch.minimum(first, torch.where(other_token | other_logit, at, steps).min())
        taken += torch.where(seen[:, 0], run.counts - 1, 0).sum()
        made += seen[:, 0].sum()
    if int(run.length.min()) < context + steps:
        raise OutriderError(f"K={k}: {steps} cycles did not give {steps} tokens")
    wrong_at = int(first)
    return Equality(
        k, batch, steps, cycles, int(taken) / max(1, int(made)), not int(bad_tokens), not int(bad_logits),
        wrong_at if wrong_at < steps else None,
    )  # fmt: skip
