"""The controller's input (`DraftContext`) and state (`ControllerState`) per sequence; its proposal (`CyclePlan`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from ..types import DraftPlan, DraftTree
from .acceptance import CycleStats, PositionStats, Source

DEEPEST = 8  # levels of a tree of a fixed size (ops.trees)
TIMED = 15  # tokens of the trees of a fixed size whose cycles a cost table has (CostPart)
READING = 48  # unread tokens of the round by which reading is timed


class ControllerState:
    """The controller's knowledge of one sequence."""

    def __init__(self, wait: int) -> None:
        self.arms: dict[Source, PositionStats] = {}  # acceptance in this request, by source of drafts
        # tokens per cycle for K = 0..16, by source; forgotten when one is observed
        self.expected: dict[Source, list[float]] = {}
        self.yields: dict[str, CycleStats] = {}  # by drafter: statistics of drafts that end themselves in this request
        self.loss_budget = 0.0  # plain steps that drafting has won in this request so far (below 0: lost)
        self.tokens = 0  # emitted so far
        self.interval = wait  # cycles between two probes; doubles while they find nothing
        self.wait = wait  # cycles until the next probe
        self.probing = False  # the cycle under way is a probe
        # Of the cycle under way:
        self.source = Source("")  # the source whose statistics it updates
        self.curve: Sequence[float] = (1.0,)  # its seconds by K; in a batch one entry, whatever K
        self.step = 1.0  # seconds of a plain cycle in its place
        self.plain = 0.0  # this sequence's share of those
        self.planned = 0  # its K as planned; a draft that ends itself may be shorter
        self.fixed = False  # the request gives its K: nothing is learnt from it
        self.committed = False  # some cycle of it was planned and run


class DraftContext(NamedTuple):
    """One sequence before a cycle."""

    state: ControllerState
    drafter_available: Mapping[str, int]  # maximum tokens each could draft now (an n-gram drafter: 0 without a match)
    match_len: int  # length of the suffix that the n-gram drafter found again
    remaining: int  # tokens that may still be emitted
    context: int
    # Its K is given by the request, so no drafter is offered for it here. Its rows still count in the batch's cost.
    # Nothing is learnt from it.
    fixed: bool = False
    nodes: int = 0  # maximum tokens of a draft tree; 0: only chains
    unread: int = 0  # tokens of its text that a draft model would have to read first
    adapter: str = ""  # the target's adapter; acceptance is learnt per adapter


class Candidate(NamedTuple):
    rate: float  # tokens per second
    plans: list[DraftPlan]


class DraftOutcome(NamedTuple):
    """The result of verifying one sequence's draft."""

    state: ControllerState
    drafter: str | None
    drafted: int  # tokens verified; of a tree all of them
    accepted: int
    confidence: Sequence[float] | None
    tree: VerifiedTree | None

    @property
    def num_drafter_steps(self) -> float:
        """How often the drafter ran: tokens that it drafted and left out count as well."""
        if self.tree is not None:
            return self.tree.steps
        return self.drafted if self.confidence is None else len(self.confidence)

    @property
    def is_fixed_tree(self) -> bool:
        """A tree of a fixed size, whose cost follows its depth, not its tokens."""
        return self.tree is not None and self.confidence is None


class StepTiming(NamedTuple):
    """The wall time of one cycle without prompt rows."""

    batch: int
    k: float  # drafted tokens per sequence; of trees of a fixed size, their depth
    context: int  # mean length of the sequences
    seconds: float
    drafter: str | None = None
    tree: bool = False  # its drafts are trees of a fixed size


class CostPart(NamedTuple):
    """A part of a cycle whose time is measured: a verify pass; a drafter's draft; a cycle with a tree of a fixed size,
    by its depth; a draft of one token with READING tokens unread, for drafters that read texts themselves."""

    kind: Literal["verify", "draft", "tree", "reading"]
    drafter: str | None = None


VERIFY = CostPart("verify")


@dataclass(frozen=True)
class VerifiedTree(DraftTree):
    path: Sequence[int]  # the rows that were accepted, in order
    steps: float  # of the drafter: how often it ran, a further row in a step counted as a part of one

    @staticmethod
    def of(
        parents: Sequence[int], path: Sequence[int], steps: float | None = None, tokens: Sequence[int] = ()
    ) -> VerifiedTree:
        return VerifiedTree(tokens, parents, path, steps=DraftTree(tokens, parents).deepest if steps is None else steps)

    def judged(self) -> list[tuple[int, bool]]:
        """For the tokens off the main chain that follow accepted ones: index and whether it was right."""
        on_path = {0, *self.path}
        return [(j, j + 1 in on_path) for j in range(self.chain, len(self.parents)) if self.parents[j] in on_path]

    @property
    def chain_accepted(self) -> int:
        """How many tokens of the main chain were accepted: what a chain would have gained."""
        return next((i for i, row in enumerate(self.path) if row != i + 1), len(self.path))


@dataclass
class CycleBookings:
    """Changes of the controller's accounts that a proposal causes if its cycle runs (`Controller.commit`)."""

    views: Sequence[DraftContext]
    context: int  # their mean length
    waited: list[ControllerState] = field(default_factory=list)  # one cycle less until their next probe
    probing: ControllerState | None = None  # this sequence's draft is a probe
    drafting_alone: bool = False  # a single sequence drafts: its probes start again from short intervals
    network_drafter: str | None = None  # of two, the one that is better now
    compares: bool = False  # the other one drafts in this cycle, to learn about it
    comparison_loss: float = 0.0  # seconds that this is expected to cost


@dataclass
class CyclePlan:
    """The controller's proposal for one cycle. A proposal that is not committed changes nothing."""

    plans: list[DraftPlan]
    bookings: CycleBookings | None = None
    reused: bool = False  # an earlier cycle's proposal, run once more
