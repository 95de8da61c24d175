"""The drafter protocol, and the shared loop of draft steps (`draft_round`), whose step is `guess_next`;
train/evaluate.py runs that from all positions of whole answers at once. A draft never changes the output: one that
raises, or has ids outside the vocabulary, is switched off for the requests concerned (`engine.eager`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ..models.drafter import MTPNet
from ..ops.backend import BlockCall, DraftResult
from ..ops.decode_io import Proposer
from ..ops.reference import Backend
from ..ops.trees import TreeRows
from ..types import MAX_DRAFT, AttnSpec, Draft, DraftPlan, KVView, OutriderError
from .acceptance import AcceptanceProfile
from .choose import SamplingBatch

if TYPE_CHECKING:
    from ..ops.cpu.cycle import CpuCycle

# (j, the token before, cluster_bonus) -> candidates for the j-th guess: their ids [B, N] (None: the whole vocabulary)
# and float32 logits [B, N]. cluster_bonus [B, C]: what sampling adds to the scores of a clustered head's clusters.
Score = Callable[[int, Tensor, Tensor | None], tuple[Tensor | None, Tensor]]


@dataclass
class DraftTexts:
    """The sequences of a draft as the host knows them."""

    tracks: Sequence[Any]  # what the drafter keeps per sequence (`Drafter.new_track`)
    tokens: Sequence[Sequence[int]]  # all L tokens of each sequence
    sampling: SamplingBatch  # temperature and noise, to guess as the target will choose
    # [B] where a draft may end itself and how it may branch; None: k tokens each, as a chain. A drafter that does not
    # know its confidence ignores the thresholds, one that knows no trees the nodes.
    plans: Sequence[DraftPlan] | None = field(default=None, kw_only=True)
    # [16] acceptance by confidence; None: drafts go on to the end
    trust: Sequence[float] | None = field(default=None, kw_only=True)

    @property
    def branches(self) -> bool:
        return self.plans is not None and any(plan.nodes for plan in self.plans)


@dataclass
class DraftBatch(DraftTexts):
    """A drafter's view of B sequences of L tokens each, the newest not yet run through the target."""

    last: Tensor  # int64 [B] the newest token
    position: Tensor  # int64 [B] its position: L - 1, which is also how many positions of K/V are committed
    features: Tensor  # [B, H·(1 + taps)] the target's hidden state at position L - 2, then the tapped streams
    kv: KVView  # one row per sequence at position L - 2, the last one the target has seen
    ops: Backend


@dataclass(frozen=True)
class DrafterOrigin:
    """The checkpoint of a drafter, by which measurements and stored K/V are found again."""

    source: str = ""  # the name or path that it was loaded from
    trained_for: str | None = None  # fingerprint of the target that it was trained for
    content: str = ""  # of one with its own K/V: what that depends on besides the target


class Drafter:
    """The base class of all drafters. The engine reads these attributes and never tests for a class.

    A block drafter (DFlash, DSpark, EAGLE-3) has K/V of its own: further layers of the target's `KVStore` over the same
    pages (`kv_layer` counts on from the target's), written by `extend` at all positions of each target pass. Rejected
    rows are overwritten by the next pass."""

    name: str
    taps: tuple[int, ...] = ()  # target layers whose residual streams it reads
    max_tokens: int = MAX_DRAFT  # maximum tokens of one draft
    one_pass: bool = False  # one pass drafts all tokens, so a longer draft takes no more time
    starts_from: Literal["hidden", "tokens"] = "hidden"  # a draft needs the target's states, or only the text
    kv_specs: tuple[AttnSpec, ...] = ()  # its own K/V layers in the target's store
    block_rows: int = 0  # positions from the newest token on that a draft writes K/V at, if more than its tokens
    block_call: BlockCall | None = None  # a network that reads all rows, which a backend may run inside its own step
    net: MTPNet | None = None  # a network that a backend may run inside its own decode step
    in_graph: bool = False  # `propose` never looks at a value, so it can be captured in a CUDA graph
    host_rounds: bool = False  # `draft_on_host` works: a round in one call, ahead of the decode step
    profile: AcceptanceProfile | None = None  # how often it is right, before anything was observed
    origin = DrafterOrigin()

    @property
    def members(self) -> tuple[Drafter, ...]:
        """The drafters that a plan may name: this one, or of a pair both."""
        return (self,)

    def member(self, name: str | None) -> Drafter:
        return self

    def features_of(self, drafter: Drafter, features: Tensor) -> Tensor:
        """A member's own part of features [B, H·(1 + taps)]."""
        return features

    def proposers_in(self, cycle: CpuCycle) -> dict[str, Proposer]:
        """Who drafts for its members, by name, in steps that run as one call; others' steps do not."""
        return {}

    def propose(self, batch: DraftBatch, k: int) -> Draft:
        """Draft at most k >= 1 tokens for every sequence, or a tree of depth k (`DraftBatch.plans`, spec.tree)."""
        raise NotImplementedError

    def draft_on_host(self, texts: DraftTexts, k: int, alone: bool) -> list[DraftResult]:
        """Up to k tokens for each sequence in one call (`host_rounds`), by temperature and seed alone. alone: the step
        has one sequence, so that no other waits while a long text is read."""
        raise NotImplementedError(f"{self.name} has no rounds in one call")

    def max_nodes(self, depth: int) -> int:
        """The most tokens that a tree of this depth can have in a captured step; 0: it builds none there."""
        return 0

    def build_fixed_tree(self, batch: DraftBatch, depth: int, nodes: int) -> TreeRows:
        raise NotImplementedError(f"{self.name} builds no trees in captured steps")

    def new_track(self, request_id: str) -> Any:
        """State for a new sequence, which owns it; `release` ends it. Most drafters keep nothing."""
        return None

    def unread(self, track: Any, tokens: Sequence[int]) -> int:
        """How many tokens of the text it must read itself before it can draft."""
        return 0

    def assume(self, track: Any, tokens: Sequence[int]) -> None:
        """Treat `tokens` as read, for timing a round after a long text without running it."""

    def extend(self, streams: tuple[Tensor, ...], kv: KVView, following: Tensor) -> None:
        """Write its own K/V of a target pass. streams [R, H] each: tapped layers; following [R]: next tokens."""
        raise NotImplementedError(f"{self.name} keeps no K/V")

    def release(self, track: Any) -> None:
        """The sequence has ended: free what its track holds."""


class DrafterPair(Drafter):
    """An MTP and a block drafter of one target, from which each plan names one.

    The target's pass returns the streams of both. Each drafter's context stays right whichever drafted: an MTP drafter
    reads the target's K/V and last states, and the block drafter's own K/V is written after every pass (`extend`)."""

    in_graph = True

    def __init__(self, first: Drafter, second: Drafter):
        """In the order in which drafts of a given K prefer them."""
        mtp, block = (first, second) if second.kv_specs else (second, first)
        if mtp.kv_specs or mtp.net is None or not block.kv_specs:
            kinds = "an MTP and a block drafter (DFlash, DSpark, EAGLE-3)"
            got = f"{first.name} and {second.name}"
            raise OutriderError(f"two drafters are {kinds}, got {got}")
        self._members = (first, second)
        self.block = block
        self.mtp = mtp
        self.name = f"{first.name}+{second.name}"
        # the MTP drafter's first: a C step reads them from the front
        self.taps = (*mtp.taps, *(tap for tap in block.taps if tap not in mtp.taps))
        self.max_tokens = max(mtp.max_tokens, block.max_tokens)
        self.kv_specs = block.kv_specs
        self.block_rows = block.block_rows
        self.block_call = block.block_call
        self.net = mtp.net
        self.origin = DrafterOrigin(trained_for=mtp.origin.trained_for, content=block.origin.content)

    @property
    def members(self) -> tuple[Drafter, ...]:
        return self._members

    def member(self, name: str | None) -> Drafter:
        return next(drafter for drafter in self.members if drafter.name == name)

    def proposers_in(self, cycle: CpuCycle) -> dict[str, Proposer]:
        before_the_call: dict[str, Proposer] = {member.name: Proposer.HOST for member in self.members}
        return before_the_call | self.mtp.proposers_in(cycle) | self.block.proposers_in(cycle)

    def features_of(self, drafter: Drafter, features: Tensor) -> Tensor:
        streams = features.split(features.shape[1] // (1 + len(self.taps)), 1)
        return torch.cat([streams[0], *(streams[1 + self.taps.index(tap)] for tap in drafter.taps)], 1)

    def extend(self, streams: tuple[Tensor, ...], kv: KVView, following: Tensor) -> None:
        self.block.extend(tuple(streams[self.taps.index(tap)] for tap in self.block.taps), kv, following)

    def max_nodes(self, depth: int) -> int:
        return max(drafter.max_nodes(depth) for drafter in self.members)


def guess_next(
    sampling: SamplingBatch,
    at: Tensor,
    score: Callable[[Tensor | None], tuple[Tensor | None, Tensor]],
    ops: Backend,
    clusters: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """One draft step: the tokens [B] that the target will choose at positions `at` [B] if these scores are right, and
    their logits. score(cluster_bonus): as `Score`. clusters [C, S]: ids of a clustered head."""
    ids, logits = score(sampling.cluster_bonus(clusters, at, ops))
    return sampling.guess(logits, at, ops, token_ids=ids), logits


def draft_round(batch: DraftBatch, k: int, score: Score, clusters: Tensor | None = None) -> Draft:
    """k draft tokens, each chosen as the target will choose and the input of the next step. clusters [C, S]: ids of a
    clustered head."""
    token = batch.last
    guesses = list[Tensor]()
    for j in range(k):
        at = batch.position + 1 + j  # the position the guessed token will have
        token, _ = guess_next(batch.sampling, at, partial(score, j, token), ops=batch.ops, clusters=clusters)
        guesses.append(token)
    return Draft(torch.stack(guesses, 1), torch.full_like(batch.position, k))


def confident_round(batch: DraftBatch, k: int, score: Score, heads: Sequence[Tensor] = ()) -> Draft:
    """A round with confidences, which may end a draft that has a plan, and the round if no draft is worth another
    step. heads: where `score` puts a confidence head's output [B]; empty: the drafter's probability."""
    size = batch.last.shape[0]
    sampling = batch.sampling
    trust = batch.trust
    plans = batch.plans
    token = batch.last
    guesses = list[Tensor]()
    confidence = list[Tensor]()
    lengths = [k] * size
    path = [1.0] * size
    live = [True] * size
    for j in range(k):
        ids, logits = score(j, token, None)
        token = sampling.guess(logits, batch.position + 1 + j, batch.ops, token_ids=ids)
        guesses.append(token)
        if heads:
            confidence.append(heads[j].float())
        else:
            place = token if ids is None else (ids == token[:, None]).int().argmax(1)
            confidence.append(sampling.likely(logits, place))
        if trust is None or plans is None:
            continue
        for b, p in enumerate(confidence[j].tolist()):
            if not live[b]:
                continue
            path[b] *= trust[min(len(trust) - 1, int(p * len(trust)))]
            if path[b] < plans[b].drop:  # the draft ends before this token
                live[b] = False
                lengths[b] = j
            elif path[b] < plans[b].stop:  # or after it
                live[b] = False
                lengths[b] = j + 1
        if not any(live):
            break
    return Draft(torch.stack(guesses, 1), torch.tensor(lengths, device=batch.last.device), torch.stack(confidence, 1))


def padded(draft: Draft, k: int) -> Draft:
    """The draft with zeros up to k tokens."""
    padding = (0, k - draft.tokens.shape[1])
    confidence = None if draft.confidence is None else F.pad(draft.confidence, padding)
    return replace(draft, tokens=F.pad(draft.tokens, padding), confidence=confidence)
