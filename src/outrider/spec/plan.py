"""What the controller is told of a sequence before a cycle, what it answers, and what it remembers of one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from .acceptance import Arm, Yield


class SeqView(NamedTuple):
    """What the controller may know of a sequence before its next cycle."""

    id: str
    drafter_available: Mapping[str, int]  # most tokens each drafter could offer now (an n-gram drafter: 0 without a match)
    match_len: int  # length of the suffix that the n-gram drafter found again
    remaining: int  # tokens that may still be emitted
    context: int
    fixed: int | None = None  # this request asked for a fixed K: obeyed, and kept out of what is learnt


class Choice(NamedTuple):
    """Draft up to k tokens. A drafter that knows its confidence may end earlier: with path = Π trust[confidence] over the
    tokens so far, a token that brings path below `drop` is left out (coupled verification only) and ends the draft; one that
    brings it below `stop` is kept and ends the draft. 0 turns either off. `Controller.trust` translates confidences."""

    drafter: str | None
    k: int
    stop: float = 0.0
    drop: float = 0.0


PLAIN = Choice(None, 0)


class SeqState:
    __slots__ = (
        "arms", "bank", "choice", "curve", "expected", "fixed", "hold", "interval", "key", "last", "match", "plain", "planned", "probing",
        "step", "tokens", "wait", "yields",
    )  # fmt: skip

    def __init__(self, wait: int) -> None:
        self.arms: dict[tuple[str, int], Arm] = {}
        self.expected: dict[tuple[str, int], list[float]] = {}  # E(0..16), dropped when something is observed
        self.yields: dict[str, Yield] = {}  # of drafts that end themselves
        self.last = PLAIN
        self.choice, self.match, self.hold = PLAIN, 0, 0  # the plan, the length of match (_bucket) it stands beside, and cycles it holds on
        self.bank = 0.0  # plain steps won (or lost) by drafting in this request
        self.tokens = 0
        self.interval = wait
        self.wait = wait  # cycles until the next probe
        self.probing = False
        self.key = ("", 0)  # of the cycle under way: whose statistics it belongs to,
        self.curve: Sequence[float] = (1.0,)  # its seconds by K (or whatever K, in a batch),
        self.step = 1.0  # those of a plain one,
        self.plain = 0.0  # this sequence's share of them,
        self.planned = 0  # its K,
        self.fixed = False  # and whether the user chose it
