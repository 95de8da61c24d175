"""What a run will do in its time: one forecast, made in seconds before anything long begins.

It rests on two measured figures of the machine (operations and bytes per second) and on counted operations. The
same forecast is shown, decides whether the run begins, and gives the shortest `--minutes` that would do, so the
three cannot contradict each other.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import torch

from ..models.block_config import BlockConfig
from ..models.config import DrafterConfig, ModelConfig
from ..types import OutriderError
from .memory import Sizes, Work, product_rate

FEWEST_STEPS, FEWEST_TOKENS = 50, 2000  # a drafter learns nothing from less
HANDFUL = 10  # steps: a timed run that made fewer has failed
EFFICIENCY = 0.45  # of the rate of one large matrix product that a training step reaches
OP_SECONDS = 1.5e-5  # that torch takes to start an operation
ANSWER_SHARE, CPU_ANSWER_SHARE = 0.4, 0.25  # of the minutes, where answer_minutes does not say: a CPU learns slowly
# of the minutes, at most; passes over the held-out answers, with a reserve of a half
FINISH_SHARE, FINISH_PASSES = 0.1, 6.0
EXPORT_SECONDS = 3.0
LOAD_RATE = 5e7  # weights per second that are read and unpacked; it happens twice, for the engine and for training
ANSWER_STEP_SECONDS = 1e-3  # of the engine's own work in a step
KMEANS_ROUNDS, KMEANS_WIDTH = 8.0, 128.0  # passes over the vocabulary when a head is clustered, in so many directions
# anchors that the drafter's input is fitted on at least, and tokens that the target reads for each
FIT_ROWS, FIT_TOKENS = 1024, 3.0
HELD_SHARE = 0.2  # of the answers, held out


@dataclass(frozen=True)
class MachineSpeed:
    rate: float  # operations per second of large matrix products
    bandwidth: float  # bytes per second

    @staticmethod
    def measure(device: str, dtype: torch.dtype, width: int) -> MachineSpeed:
        """About half a second of products and of reading memory."""
        block = torch.ones(1 << 24)
        taken = []
        for _ in range(4):
            began = time.perf_counter()
            block.sum()
            taken.append(time.perf_counter() - began)
        return MachineSpeed(product_rate(device, dtype, width), block.nbytes / min(taken))


@dataclass(frozen=True)
class RunCosts:
    """Seconds that the parts of a run take here, and how much there is to do."""

    load: float  # reading the weights twice
    start: float  # clustering the head, fitting the drafter's input
    answer: float  # per token of an answer
    capture: float  # per token of an answer that the target reads for training, its share of the prompt included
    step: float  # per optimizer step
    evaluate: float  # per held-out token
    tokens: float  # of answers that the prompts can give

    @staticmethod
    def of(
        speed: MachineSpeed,
        work: Work,
        sizes: Sizes,
        drafter: DrafterConfig | BlockConfig,
        target: ModelConfig,
        *,
        unroll: int,
        accumulate: int,
    ) -> RunCosts:
        """Everything but loading and answering, which depend on the files."""
        rate = speed.rate * EFFICIENCY
        vocab = target.vocab_size
        width = 0 if isinstance(drafter, BlockConfig) else drafter.backbone_hidden * (2 + len(drafter.taps))
        passes = 1 if isinstance(drafter, BlockConfig) and drafter.kind == "dflash" else unroll
        operations = 3.0 * passes * (30.0 * len(drafter.layers) + 40.0)
        step = sizes.anchors * work.anchor(sizes.scored or vocab, sizes.keep) / rate + operations * OP_SECONDS
        kmeans = KMEANS_ROUNDS * 2.0 * vocab * drafter.clusters * min(KMEANS_WIDTH, target.hidden)
        fit = FIT_TOKENS * max(sizes.anchors, FIT_ROWS) * work.target * (2 if target.qkv_bias else 1) + 5.0 * width**3
        capture = 1.5 * work.target / rate if sizes.keep else 0.0
        evaluate = (work.target + 8.0 * vocab * drafter.head_hidden) / rate
        return RunCosts(0.0, (kmeans + fit) / rate, 0.0, capture, accumulate * step, evaluate, 0.0)

    def seconds(self, answered: float, steps: float) -> float:
        """Of a run that makes these answers and steps."""
        finish = FINISH_PASSES * HELD_SHARE * answered * self.evaluate + EXPORT_SECONDS
        return self.load + self.start + answered * (self.answer + self.capture) + steps * self.step + finish


def answer_cost(speed: MachineSpeed, *, token_bytes: float, weights: float, slots: int) -> float:
    """Seconds per token where `slots` sequences are answered at a time: the weights are read once for all of them."""
    step = max(token_bytes / speed.bandwidth, 2.0 * slots * weights / (speed.rate * EFFICIENCY))
    return (step + ANSWER_STEP_SECONDS) / slots


@dataclass(frozen=True)
class Forecast:
    """What a run of some minutes will do."""

    answered: float  # tokens
    steps: int
    enough: bool  # to learn something

    @staticmethod
    def of(costs: RunCosts, seconds: float, share: float = CPU_ANSWER_SHARE) -> Forecast:
        """`share`: of the time, at most for answering."""
        answered = min(costs.tokens, share * seconds / costs.answer)
        passes = FINISH_PASSES * HELD_SHARE * answered * costs.evaluate
        finish = min(passes, 1.5 * FINISH_SHARE * seconds) + EXPORT_SECONDS
        training = seconds - costs.load - costs.start - answered * (costs.answer + costs.capture) - finish
        steps = max(0, int(training / costs.step))
        return Forecast(answered, steps, steps >= FEWEST_STEPS and answered >= min(costs.tokens, FEWEST_TOKENS))


def check(costs: RunCosts, minutes: float, spent: float, share: float = CPU_ANSWER_SHARE) -> str:
    """One line about what the time allows; OutriderError where it is too little. `spent`: seconds gone already."""
    made = Forecast.of(costs, 60 * minutes - spent, share)
    line = f"{made.answered:.0f} tokens of answers and {made.steps} steps (one takes {costs.step:.2g} s here)"
    if made.enough:
        return f"in {minutes:g} minutes about {line}"
    raise OutriderError(
        f"--minutes {minutes:g} is too short here: about {line}, and a drafter learns nothing from less than "
        f"{min(costs.tokens, FEWEST_TOKENS):.0f} and {FEWEST_STEPS}; "
        f"try --minutes {least_minutes(costs, spent, share):g}"
    )


def least_minutes(costs: RunCosts, spent: float, share: float = CPU_ANSWER_SHARE) -> float:
    """The shortest time that the forecast calls enough, rounded up to something one would type."""
    low, high = 0.0, 60.0
    while not Forecast.of(costs, high, share).enough and high < 1e9:
        low, high = high, 2 * high
    while high - low > 0.01 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if Forecast.of(costs, middle, share).enough else (middle, high)
    minutes = (1.1 * high + spent) / 60
    step = 0.1 if minutes < 1 else 0.5 if minutes < 5 else 1.0
    return round(math.ceil(minutes / step) * step, 1)
