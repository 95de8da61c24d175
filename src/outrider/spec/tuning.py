"""All constants of the controller. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from ..types import MAX_DRAFT


@dataclass(frozen=True)
class Tuning:
    # ---- acceptance, before and while it is observed
    default_prior: tuple[float, ...] = (0.65, 0.70, 0.72, 0.74, 0.76)  # a_j without a drafter's profile
    # The same for copies of earlier text, by the length of the match (`match_range`), a little below what answers of a
    # 135M model show: the longer a copy has lasted, the surer it goes on.
    ngram_prior: tuple[tuple[float, ...], ...] = (
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
    # how many observations of a request the estimate over all requests is worth, and what one of them keeps
    request_weights: tuple[float, ...] = (8.0,) * MAX_DRAFT
    request_keep: float = 0.97
    calibrated_after: int = 16  # judged confidences before a draft may end by them, without a profile
    trust_weight: float = 24.0  # weight of a bin of the profile's trust, in judged tokens
    # what trees of a fixed size bring before any was seen, and how many tokens of a chain that guess is worth
    tree_lift: float = 1.2
    tree_lift_weight: float = 16.0
    yield_weight: float = 10.0  # weight of the yield over all requests, in cycles of a request
    broken_after: int = 12  # first positions judged,
    broken_below: float = 0.02  # and the acceptance under which a drafter is called broken
    adapters: int = 64  # maximum number of adapters with statistics

    # ---- safety
    # plain steps that a request may lose to drafting: from the start, and for each token it has emitted
    risk: tuple[float, float] = (1.0, 0.04)
    # the same while the drafter is unproven: 3 % of an output of 32 tokens
    unproven_risk: tuple[float, float] = (0.25, 0.02)
    margin: float = 0.01  # predicted gain below which a single sequence keeps decoding plainly
    batch_margin: float = 0.05  # the same for a batch, in which all pay for a wrong guess
    explore: float = 0.008  # share of all time that probing may cost
    probe_first: int = 8  # cycles between probes: doubles while they fail,
    probe_last: int = 512  # up to this
    compare_first: int = 8  # the same for cycles of the network drafter that is not in use, of two
    compare_last: int = 64

    # ---- planning
    rest: int = 15  # how many steps a plan is kept at most while a batch decodes plainly,
    hold: int = 2  # while it drafts,
    hold_many: int = 16  # (one step longer per this many sequences: planning time grows with their number)
    hold_one: int = 5  # and while a single sequence's drafts end themselves
    untold: int = 16  # maximum observations before they are applied
    horizon: int = 128  # tokens of an answer, where it may be longer, that a drafter's reading of its text must pay in
    batch_catch_up: float = 0.15  # plain time that reading may take of a sequence in a batch
    next_token: float = 0.7  # chance of a token that is not drafted yet, given that all before it are right
    # chance of each token in a stretch that the drafter is sure of: says how far a draft that ends itself may reach
    sure: float = 0.96
    rival: float = 1.02  # minimum advantage of another drafter for a sequence of a batch


def match_range(length: int) -> int:
    return 0 if length <= 2 else 1 if length <= 4 else 2 if length <= 8 else 3 if length <= 20 else 4
