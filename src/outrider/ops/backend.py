"""The backend interface: the ops that models call, the larger parts a backend may run as a whole, and its capabilities.

`Backend` separates the engine from the kernels. `ReferenceOps` defines every op in plain torch and declines the
optional parts; other backends override what they do better. Callers never use `hasattr`: what a backend can do is in
its `Capabilities`, a frozen record that the engine, the loader and the benchmarks read. Limits that follow from kernels
are stated only there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from ..types import AttnSpec, BlockAttn, BlockRows, DraftPlan, KVPages, KVView
from .formats import DeviceWeight, Weight
from .trees import Frontier, Nodes, Noise, TreeRows

if TYPE_CHECKING:
    from .adapter_slots import SlotWeight
    from .lowrank import Adapter, LowRank

M = TypeVar("M")
MlpWeights = tuple[DeviceWeight, DeviceWeight]  # gate_up [2·I, H], down [H, I]
Norms = tuple[Tensor, Tensor, Tensor]  # weights of three norms of the same rows
EVERY_ROW = 1 << 30  # "unlimited" as a number of rows


@dataclass(frozen=True)
class Pass:
    """The outputs of a target's forward pass, for the W requested rows (default: all)."""

    hidden: Tensor  # [W, H] after the final norm
    streams: tuple[Tensor, ...] = ()  # [W, H] each: the residual stream after every tapped layer

    @property
    def features(self) -> Tensor:
        """[W, H·(1 + taps)]: the drafter's inputs."""
        return torch.cat((self.hidden, *self.streams), dim=-1) if self.streams else self.hidden


@dataclass(frozen=True)
class Epilogue:
    """What follows a product y = x · wᵀ: + bias, then act(y) * mul, or with `act` alone act(gate) * up; softcap."""

    bias: Tensor | None = None
    mul: Tensor | None = None
    act: str = ""
    softcap: float | None = None
    out_dtype: torch.dtype | None = None  # None: that of x

    @property
    def gated(self) -> bool:
        return bool(self.act) and self.mul is None


NO_EPILOGUE = Epilogue()


@dataclass(frozen=True)
class ExpertWeights:
    """One layer's routed experts and their router."""

    router: DeviceWeight  # [E, H]
    expert_scale: Tensor  # [E] float32
    gate_up: DeviceWeight  # [E, 2·I, H]
    down: DeviceWeight  # [E, H, I]
    top_k: int
    act: str


@dataclass(frozen=True)
class MoeResidual:
    """What follows the experts and the dense MLP next to them: a norm of each, and the residual step of their sum, as
    in `residual_norm`."""

    dense_norm: Tensor
    routed_norm: Tensor
    post_norm: Tensor | None
    scale: Tensor | None
    next_norm: Tensor | None
    eps: float


@dataclass(frozen=True)
class Capabilities:
    """What a backend guarantees. The defaults guarantee nothing."""

    # A pass of at most this many rows is row-invariant: the bits of a row do not depend on the others or their number.
    # 0: never promised. The engine keeps decode steps within it (where it is not 0), and packs prompts up to it.
    independent_rows: int = 0
    # A prompt leaves the same bits in the cache wherever it is cut into chunks: then any full page may be shared.
    prompts_independent: bool = False
    # After a preemption, decoded tokens are recomputed in chunks of at most this many rows per sequence, so that the
    # same kernels run again; wider passes take kernels that round differently.
    replay_rows: int = EVERY_ROW
    # A row has the same bits in a draft tree as in a chain. False: drafts stay chains.
    trees: bool = False
    # Decode steps are captured as CUDA graphs unless the configuration says otherwise. A step has one of these numbers
    # of sequences (padded with idle ones) and at most `graph_rows` rows.
    graphs: bool = False
    graph_batches: tuple[int, ...] = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
    # the K of a graph's sequences; a limit masks the tokens of a shorter draft
    graph_widths: tuple[int, ...] = 0, 1, 2, 3, 4, 6, 8, 12, 16
    graph_rows: int = 2048
    sequences: int = 8  # default maximum batch
    # Default prompt tokens of one sequence in one pass; and of all in one step, while most wait for prefill.
    prompt_chunk: int = 512
    packed_rows: int = 0
    # Prompt tokens in a step with decoding sequences, while few sequences wait for prefill. 0: a chunk and a quarter.
    prefill_with_decodes: int = 0
    # The same for small models: twice as many, and again, as long as their operations stay below this.
    prefill_flops_with_decodes: float = 0.0
    # Prompt tokens of one sequence in a step of a server without decoding sequences: a new request would wait for them.
    # 0: a chunk.
    prefill_idle: int = 0
    quantizes: tuple[str, ...] = ()  # formats that `quantize` supports
    # Dense matrices in float16 or bfloat16 are multiplied as they are stored, with the bits that the same values in
    # float32 would give.
    holds_halves: bool = False
    quantizes_tables: bool = False  # embeddings and head too; otherwise these stay dense, as GPU checkpoints keep them
    # The format of an MTP drafter's matrices: a draft need not be exact, only fast. None: as stored.
    draft_format: str | None = None
    # Adapters are kept in slots (ops.adapter_slots), so that captured steps can use them.
    adapter_slots: bool = False
    # A draft model's head is read row by row, so it pays to score a shortlist of tokens only (spec.draft_model).
    shortlists: bool = False

    def bucket(self, batch: int) -> int:
        """The batch size of the captured step for this number of sequences."""
        return next((size for size in self.graph_batches if size >= batch), batch)

    def widest(self, batch: int, graphs: bool) -> int:
        """Maximum drafted tokens per sequence in a step with this number of sequences, such that its rows stay
        independent (and it fits a graph)."""
        rows = self.independent_rows or EVERY_ROW
        if not graphs:
            return rows // batch - 1
        most = min(rows, self.graph_rows) // self.bucket(batch) - 1
        return max((k for k in self.graph_widths if k <= most), default=0)


class CycleRequest(NamedTuple):
    """One sequence of a host cycle."""

    slot: int
    last: int  # the newest token
    position: int  # its position
    plan: DraftPlan
    guess: Sequence[int] | None = None  # plan.k given draft tokens; None: the drafter's
    likely: int | None = None  # logprobs of the chosen tokens and of this many likeliest ones; None: none
    adapter: Adapter | None = None


class CycleResult(NamedTuple):
    """The result of one sequence."""

    k: int  # tokens drafted and verified
    tokens: list[int]  # emitted: those accepted and the target's next
    confidence: list[float] | None  # of the drafter's tokens
    tree: tuple[list[int], list[int], float, list[int]] | None = (
        None  # the row each token follows, rows accepted, drafter's steps, tokens
    )
    logprobs: list[list[float]] | None = None  # a row of `Backend.logprob_rows` for each emitted token
    drafts: list[int] | None = None  # the tokens drafted


class HostFilters(Protocol):
    top_k: Tensor  # int64 [B]
    top_p: Tensor  # float64 [B]
    min_logp: Tensor  # float32 [B]


class HostSampling(Protocol):
    """The part of spec.choose.SamplingBatch that a host cycle reads."""

    temperature: Tensor  # float32 [B]
    sampled: Tensor  # bool [B]
    seed: Tensor  # int64 [B]

    @property
    def cut(self) -> HostFilters | None: ...


class HostCycle(Protocol):
    """Draft, verify, choose and accept in one call, for requests that are greedy or use temperature and filters
    alone."""

    drafts: bool  # whether the drafter's rounds are part of the call; otherwise it takes only given drafts

    def takes(self, adapter: Adapter) -> bool:
        """May sequences use this adapter?"""
        ...

    def run(
        self, asked: Sequence[CycleRequest], sampling: HostSampling, trust: Sequence[float] | None
    ) -> list[CycleResult]:
        """`trust`: acceptance by confidence, if drafts may end themselves; a list that does not change."""
        ...

    def last_pass(self, rows: int) -> tuple[tuple[Tensor, ...], Tensor]:
        """For the first rows of the last run: the tapped streams [rows, H], and the target's choices [rows]. Valid
        until the next run."""
        ...


class DraftRequest(NamedTuple):
    """A sequence that a draft model drafts for: the unread part of its text, at least the newest token."""

    tokens: Sequence[int]
    start: int  # the position of the first of them
    pages: Sequence[int]  # pages of the draft model's own cache, for the whole text and the draft
    seen: Sequence[int]  # tokens of the text that are not on the shortlist, scored for this sequence alone
    stop: float = 0.0  # as in spec.plan.DraftPlan
    drop: float = 0.0


class DraftResult(NamedTuple):
    tokens: list[int]  # all draft tokens,
    confidence: list[float]  # their probabilities,
    length: int  # and how many of them count: fewer if the draft has ended itself


class DraftChain(Protocol):
    """A draft model's rounds in one call each, for requests that are greedy or use a temperature alone."""

    def run(
        self,
        behind: Sequence[DraftRequest],
        cache: KVPages,
        k: int,
        sampling: HostSampling,
        trust: Sequence[float] | None,
    ) -> list[DraftResult]:
        """Up to k draft tokens for each. cache: the draft model's own; its tables are not read. `sampling`, `trust`: as
        in HostCycle."""
        ...


class Backend(Protocol):
    """Rows are tokens. Activations keep the dtype of `x`; norm weights are float32; logits are float32. The meaning of
    each op is its body in `ReferenceOps`."""

    name: str
    version: str  # of the kernels: times measured with others are invalid
    capabilities: Capabilities

    def kv_dtype(self, dtype: torch.dtype, asked: str = "auto") -> torch.dtype: ...  # asked: EngineConfig.kv_dtype

    # ---- weights
    def pack_weights(self, parts: Sequence[Weight], device: torch.device | str) -> DeviceWeight | None: ...
    # a table that is only looked up by rows
    def look_up(self, table: Weight, device: torch.device | str) -> DeviceWeight | None: ...
    def prepare(self, dense: Tensor) -> DeviceWeight: ...
    def quantize(self, dense: Tensor, mode: str) -> DeviceWeight: ...
    def take_rows(self, weight: DeviceWeight, order: Tensor) -> DeviceWeight: ...
    # about four bits, for a draft model; the weight itself if that is no faster
    def coarse(self, weight: DeviceWeight) -> DeviceWeight: ...

    # ---- whole models: stand-ins with the same methods and the same bits, or the thing itself
    def compile(self, model: M) -> M: ...
    def compile_drafter(self, drafter: M) -> M: ...
    def adapted(self, model: M, adapters: Sequence[Adapter | None], counts: Sequence[int]) -> M | None: ...
    def host_cycle(
        self, model: object, drafter: object | None, cache: KVPages, features: Tensor, taps: tuple[int, ...]
    ) -> HostCycle | None: ...
    def draft_chain(self, model: object, head: DeviceWeight, listed: Tensor | None) -> DraftChain | None: ...

    # ---- dense pieces
    def embed(self, ids: Tensor, table: DeviceWeight, scale: float) -> Tensor: ...
    def linear(self, x: Tensor, w: DeviceWeight, bias: Tensor | None = None) -> Tensor: ...
    def rms_norm(self, x: Tensor, w: Tensor | None, eps: float) -> Tensor: ...
    def per_layer_inputs(
        self, ids: Tensor, table: DeviceWeight, projected: Tensor, scale: float, w: Tensor, eps: float
    ) -> Tensor: ...
    def residual_norm(
        self, x: Tensor, y: Tensor, post_w: Tensor | None, scale: Tensor | None, next_w: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor]: ...
    def residual_norms(
        self, x: Tensor, y: Tensor, post_w: Tensor | None, w: Norms, eps: float
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]: ...
    def lowrank(self, a: Tensor, b: Tensor, scale: Tensor, pieces: Sequence[tuple[int, int]]) -> LowRank: ...
    def pack_adapter(self, parts: Mapping[str, LowRank]) -> Mapping[str, LowRank]: ...
    def add_lowrank(self, y: Tensor, x: Tensor, part: LowRank, rows: Tensor | None) -> Tensor: ...
    def gated_linear(self, x: Tensor, w: DeviceWeight, act: str) -> Tensor: ...
    def adapted_linear(
        self, x: Tensor, w: DeviceWeight, change: SlotWeight, ranges: Tensor, end: Epilogue
    ) -> Tensor: ...
    def clamp_columns(self, x: Tensor, low: Tensor, high: Tensor) -> Tensor: ...
    def act_mul(self, x: Tensor, y: Tensor, act: str) -> Tensor: ...
    def linear_act_mul(self, x: Tensor, w: DeviceWeight, y: Tensor, act: str) -> Tensor: ...
    def logits(self, h: Tensor, w: DeviceWeight, softcap: float | None) -> Tensor: ...

    # ---- attention
    def rope_angles(self, positions: Tensor, inv_freq: Tensor) -> tuple[Tensor, Tensor]: ...
    def rope_write(
        self,
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        spec: AttnSpec,
        kv: KVView,
    ) -> Tensor: ...
    def attend(self, q: Tensor, spec: AttnSpec, kv: KVView) -> Tensor: ...
    def rotate_heads(
        self, qkv: Tensor, cos: Tensor, sin: Tensor, q_norm: Tensor, k_norm: Tensor, heads: tuple[int, int], eps: float
    ) -> tuple[Tensor, Tensor, Tensor]: ...
    def attend_span(self, q: Tensor, spec: AttnSpec, kv: KVView, end: int) -> Tensor: ...
    def write_context(self, made: Tensor, cos: Tensor, sin: Tensor, attn: BlockAttn, kv: KVView) -> None: ...
    def attend_block(
        self, q: Tensor, made: Tensor, cos: Tensor, sin: Tensor, attn: BlockAttn, kv: KVView, own: BlockRows, first: int
    ) -> Tensor: ...

    # ---- trees of drafts
    def branch(
        self, logits: Tensor, ids: Tensor | None, noise: Noise | None, front: Frontier, nodes: Nodes, level: int
    ) -> Frontier: ...
    def chain_with_runner_ups(self, scores: Tensor, ids: Tensor) -> Nodes: ...
    def build_fixed_tree(self, nodes: Nodes, count: int, depth: int) -> TreeRows: ...
    def accept_path(
        self,
        chosen: Tensor,
        ids: Tensor,
        parent_rows: Tensor,
        seq: Tensor,
        start: Tensor,
        deepest: int,
        limit: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]: ...
    def compact_kv(
        self, rows: Tensor, accepted: Tensor, length: Tensor, specs: Sequence[AttnSpec], kv: KVView
    ) -> None: ...

    # ---- mixture of experts
    def moe(self, router_in: Tensor, x: Tensor, experts: ExpertWeights) -> Tensor: ...
    def moe_with_shared_mlp(
        self,
        router_in: Tensor,
        x: Tensor,
        h: Tensor,
        stream: Tensor,
        experts: ExpertWeights,
        mlp: MlpWeights,
        end: MoeResidual,
    ) -> tuple[Tensor, Tensor]: ...
    def moe_next_to(
        self, dense: Tensor, router_in: Tensor, x: Tensor, stream: Tensor, experts: ExpertWeights, end: MoeResidual
    ) -> tuple[Tensor, Tensor]: ...

    # ---- drafting and choosing
    def clustered_logits(
        self, g: Tensor, centroids: DeviceWeight, rows: DeviceWeight, top: int, cluster_bonus: Tensor | None = None
    ) -> tuple[Tensor, Tensor]: ...
    def cluster_bonus(
        self, tokens: Tensor, seed: Tensor, position: Tensor, temperature: Tensor, sampled: Tensor
    ) -> Tensor: ...
    def argmax(self, z: Tensor) -> Tensor: ...
    def gumbel_argmax(
        self, z: Tensor, seed: Tensor, position: Tensor, tokens: Tensor | None, sampled: Tensor
    ) -> Tensor: ...
    def filter_logits(self, z: Tensor, top_k: Tensor, top_p: Tensor, min_logp: Tensor) -> Tensor | None:
        """Top-k, top-p and min-p of each row of z [R, V], as `SamplingBatch` defines them; None: no kernel for it."""
        ...

    def logprob_rows(self, logits: Tensor, tokens: Tensor, top: int) -> Tensor: ...
