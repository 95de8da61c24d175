"""Will it fit the time? Said before anything long begins, from how fast this machine multiplies and answers.

A drafter learns nothing in a handful of steps, so a budget that allows less than `FEWEST_STEPS` batches and
`FEWEST_TOKENS` of answers is refused, with the shortest one that would do.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..types import OutriderError
from .memory import Sizes, Work, round_minutes

FEWEST_STEPS, FEWEST_TOKENS = 50, 2000
EFFICIENCY = 0.45  # of the rate of one large matrix product that a training step reaches
ANSWER_SHARE, CPU_ANSWER_SHARE = 0.4, 0.25  # of the minutes, where --answer-minutes does not say: a CPU learns slowly
FINISH_SHARE = 0.1  # of the minutes, most for the final evaluation
EXPORT_SECONDS = 3.0


@dataclass(frozen=True)
class Forecast:
    """Seconds that the parts of a run take here."""

    load: float  # reading the weights, twice: as the engine holds them and dense
    answer: float  # a token of an answer
    capture: float  # a token that the target reads
    step: float  # a training step
    judge: float  # a held-out token

    @staticmethod
    def of(
        work: Work,
        sizes: Sizes,
        *,
        vocab: int,
        head: int,
        rate: float,
        answer_rate: float,
        load: float,
        accumulate: int,
    ) -> Forecast:
        """`rate`: operations a second of a matrix product; `answer_rate`: tokens a second; head: width of the drafter's
        head."""
        rate = rate * EFFICIENCY
        step = accumulate * sizes.anchors * work.anchor(sizes.scored or vocab, sizes.keep) / rate
        return Forecast(
            load, 1.0 / max(answer_rate, 1e-9), work.target / rate, step, (work.target + 8.0 * vocab * head) / rate
        )

    def least(self, tokens: int, heldout: int, made: int = 0) -> float:
        """Seconds of the shortest run that is worth it; `tokens` of answers at most, `made` of them already."""
        some = min(tokens, FEWEST_TOKENS)
        finish = min(heldout, some // 5) * self.judge + EXPORT_SECONDS
        return (
            self.load + max(0, some - made) * self.answer + 2 * some * self.capture + FEWEST_STEPS * self.step + finish
        )

    def whole(self, tokens: int, steps: int, heldout: int) -> float:
        """Seconds of a run of so many steps that answers everything first."""
        return (
            self.load
            + tokens * (self.answer + 2 * self.capture)
            + steps * self.step
            + heldout * self.judge
            + EXPORT_SECONDS
        )


def check(forecast: Forecast, minutes: float, tokens: int, heldout: int, spent: float, made: int = 0) -> str:
    """One line about what the time allows; OutriderError where it is too little. `spent` seconds, in which `made`
    tokens were."""
    need = spent + forecast.least(tokens, heldout, made)
    least = min(tokens, FEWEST_TOKENS)
    if need > 60 * minutes:
        raise OutriderError(
            f"--minutes {minutes:g} is too short here: {FEWEST_STEPS} steps of {forecast.step:.2g} s and {least} tokens of answers "
            f"at {1 / forecast.answer:.0f} a second are the least that a drafter learns from; try --minutes "
            f"{round_minutes(1.1 * need):g}, or a smaller drafter (--layers 2)"
        )
    seconds = 60 * minutes
    answered = min(tokens, CPU_ANSWER_SHARE * seconds / forecast.answer)
    training = seconds * (1 - FINISH_SHARE) - forecast.load - answered * (forecast.answer + 2 * forecast.capture)
    return (
        f"here: {1 / forecast.answer:.0f} tokens of answers a second, {forecast.step:.2g} s a step; "
        f"in {minutes:g} minutes about {answered:.0f} tokens of answers and "
        f"{max(0.0, training) / forecast.step:.0f} steps"
    )
