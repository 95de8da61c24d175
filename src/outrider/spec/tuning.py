"""All constants of the controller. Torch-free."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from ..types import MAX_DRAFT


@dataclass(frozen=True)
class Tuning:
    # ---- acceptance, before and while it is observed
    default_prior: tuple[float, ...] = (0.65, 0.70, 0.72, 0.74, 0.76)  # a_j without a drafter's profile
    # The same for copies of earlier text, by the length of the match (`match_range`), a little below what answers of a
    # 135M model show: the longer a copy has lasted, the surer it goes on.
    copy_prior: tuple[tuple[float, ...], ...] = (
        (0.45, 0.6, 0.7),
        (0.6, 0.72, 0.78),
        (0.75, 0.8, 0.85),
        (0.86, 0.88, 0.9),
        (0.95, 0.97),
    )
    prior_weight: float = 4.0  # maximum weight of the profile's prior, in observations
    prior_tokens: float = 8.0  # the profile's measured tokens at a position per such observation
    proven_card: int = 512  # measured tokens of a profile from which its drafter is trusted at once
    proven_accepted: int = 4  # accepted tokens after which a drafter without a profile counts as proven
    keep: float = 0.995  # decay per observation over all requests
    request_weights: tuple[float, ...] = (8.0,) * MAX_DRAFT  # weight of the estimate over all requests, in its own
    request_keep: float = 0.97  # decay per observation of a request
    calibrated_after: int = 16  # judged confidences before a draft may end by them, without a profile
    trust_weight: float = 24.0  # weight of a bin of the profile's trust, in judged tokens
    tree_lift: float = 1.2  # prior gain of trees of a fixed size over their main chain
    tree_lift_weight: float = 16.0  # its weight, in tokens of a chain
    yield_weight: float = 10.0  # weight of the yield over all requests, in cycles of a request
    broken_after: int = 12  # first positions judged before a drafter may be called broken
    broken_below: float = 0.02  # acceptance under which it is
    adapters: int = 64  # maximum number of adapters with statistics

    # ---- safety
    # plain steps that a request may lose to drafting: from the start, and for each token it has emitted
    risk: tuple[float, float] = (1.0, 0.04)
    unproven_risk: tuple[float, float] = (0.25, 0.02)  # while the drafter is unproven: 3 % of an output of 32 tokens
    margin: float = 0.01  # predicted gain below which a single sequence keeps decoding plainly
    batch_margin: float = 0.05  # the same for a batch, in which all pay for a wrong guess
    explore: float = 0.008  # share of all time that probing may cost
    probe_first: int = 8  # cycles between the first probes; doubles while they fail
    probe_last: int = 512  # maximum cycles between probes
    compare_first: int = 8  # cycles between the first in which, of two network drafters, the one not in use drafts
    compare_last: int = 64  # maximum cycles between those

    # ---- planning
    hold_plain: int = 15  # maximum steps that a plan is held while a batch decodes plainly
    hold: int = 2  # steps that it is held while the batch drafts
    hold_many: int = 16  # sequences per further step: planning time grows with their number
    hold_one: int = 5  # steps that it is held while a single sequence's drafts end themselves
    max_pending: int = 16  # observations before they are applied
    horizon: int = 128  # tokens of an answer within which a drafter's reading of its text must pay
    batch_catch_up: float = 0.15  # plain time that reading may take of a sequence in a batch
    next_token: float = 0.7  # chance of a token that is not drafted yet, given that all before it are right
    sure: float = 0.96  # assumed acceptance while a drafter is sure: limits the reach of a draft that ends itself
    rival: float = 1.02  # minimum advantage of another drafter for a sequence of a batch


MATCH_RANGES = (2, 4, 8, 20)  # the longest match of each row of `copy_prior` but the last


def match_range(length: int) -> int:
    """The row of `copy_prior` for a match of this length."""
    return bisect_left(MATCH_RANGES, length)
