"""The interface of backends: arguments and results of ops, and a backend's capabilities.

The ops themselves are the methods of `Backend` (ops.reference). What a backend can do is in its `Capabilities`: limits
that follow from kernels are stated only there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from ..types import KVView
from .formats import DeviceWeight

M = TypeVar("M")
MlpWeights = tuple[DeviceWeight, DeviceWeight]  # gate_up [2·I, H], down [H, I]
Norms = tuple[Tensor, Tensor, Tensor]  # weights of three norms of the same rows
Angles = tuple[Tensor, Tensor]  # cos, sin [R, D/2] float32
HeadNorms = tuple[Tensor | None, Tensor | None]  # weights of the norms of q and k
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
    """Steps after a product y = x · wᵀ: + bias, then act(y) * mul, or with `act` alone act(gate) * up; softcap."""

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
    """Steps after experts and dense MLP: a norm of each, and the residual step of their sum (`residual_norm`)."""

    dense_norm: Tensor
    routed_norm: Tensor
    post_norm: Tensor | None
    scale: Tensor | None
    next_norm: Tensor | None
    eps: float


@dataclass(frozen=True)
class MoeLayer:
    """A layer's routed experts, the dense MLP next to them, and what follows both."""

    experts: ExpertWeights
    mlp: MlpWeights
    end: MoeResidual


@dataclass(frozen=True)
class Capabilities:
    """Guarantees of a backend. The defaults guarantee nothing."""

    # A pass of at most this many rows is row-invariant: the bits of a row do not depend on the others or their number.
    # 0: never promised. The engine keeps decode steps within it (where it is not 0), and packs prompts up to it.
    independent_rows: int = 0
    # A prompt leaves the same bits in the cache wherever it is cut into chunks: then any full page may be shared.
    prompts_independent: bool = False
    # After a preemption, decoded tokens are recomputed in chunks of at most this many rows: the same kernels run again.
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
    # Prompt tokens of one sequence in a server's step without decoding sequences: a request may wait. 0: a chunk.
    prefill_idle: int = 0
    quantizes: tuple[str, ...] = ()  # formats that `quantize` supports
    # Dense 16-bit matrices are multiplied as they are stored, with the bits that the same values in float32 would give.
    holds_halves: bool = False
    quantizes_tables: bool = False  # embeddings and head too; otherwise these stay dense, as GPU checkpoints keep them
    # The format of an MTP drafter's matrices: a draft need not be exact, only fast. None: as stored.
    draft_format: str | None = None
    # Adapters are kept in slots (ops.adapter_slots), so that captured steps can use them.
    adapter_slots: bool = False
    # A draft model's head is read row by row, so it pays to score a shortlist of tokens only (spec.draft_model).
    shortlists: bool = False
    # K/V of a block drafter's own rows is written into the sequence's pages, behind the committed positions.
    blocks_in_pages: bool = False

    def bucket(self, batch: int) -> int:
        """The batch size of the captured step for this number of sequences."""
        return next((size for size in self.graph_batches if size >= batch), batch)

    def widest(self, batch: int, graphs: bool) -> int:
        """Maximum K of a step with this number of sequences, so that its rows stay independent (and fit a graph)."""
        rows = self.independent_rows or EVERY_ROW
        if not graphs:
            return rows // batch - 1
        most = min(rows, self.graph_rows) // self.bucket(batch) - 1
        return max((k for k in self.graph_widths if k <= most), default=0)


# what the Triton backend promises; stated here, so that memory on a GPU can be planned where Triton is not installed
GPU_CAPABILITIES = Capabilities(
    independent_rows=8192,
    prompts_independent=True,
    trees=True,
    graphs=True,
    sequences=256,
    prompt_chunk=1024,
    packed_rows=8192,
    adapter_slots=True,
    quantizes=("int4", "int8", "fp8"),
    prefill_with_decodes=512,
    prefill_flops_with_decodes=1.5e12,  # three milliseconds on an H200
)


class BlockCall(Protocol):
    """A block drafter's passes in one call each, as models.block.BlockNet defines them."""

    one_pass: bool  # `backbone` works

    def write_context(self, streams: Sequence[Tensor], kv: KVView, following: Tensor) -> None: ...

    def backbone(self, ids: Tensor, kv: KVView, end: Tensor) -> Tensor: ...


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
