"""Forecasts what a run will reach in its time; made in seconds before the run starts.

It uses measured figures of the machine under its current load (memory.MachineSpeed) and counted operations. A load
passes, so only what an idle machine could not do either is refused. One forecast decides that and gives the shortest
sufficient `--minutes`, so the two cannot contradict each other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from ..models.block_config import BlockConfig
from ..models.config import DrafterConfig, ModelConfig
from ..models.inspect import model_size
from ..types import OutriderError
from ..weights.sizes import StoredSize
from .answers import CPU_SLOTS
from .block_net import drafter_config, new_block
from .config import TrainConfig
from .design import new_drafter
from .memory import EFFICIENCY, MachineSpeed, Sizes, Work, choose_sizes, free_bytes, torch_dtype

FEWEST_STEPS, FEWEST_TOKENS = 50, 2000  # a drafter learns nothing from less
HANDFUL = 10  # steps: a timed run that made fewer has failed
SUSTAINED = 1.5  # whole runs took 1.3 to 1.7 times what their parts, timed one by one for a moment, add up to
OP_SECONDS = 1.5e-5  # that torch takes to start an operation
ANSWER_SHARE, CPU_ANSWER_SHARE = 0.4, 0.25  # of the minutes, where answer_minutes does not say: a CPU learns slowly
# of the minutes, at most; passes over the held-out answers, with a reserve of a half
FINISH_SHARE, FINISH_PASSES = 0.1, 6.0
EXPORT_SECONDS = 3.0
LOAD_RATE = 5e7  # weights per second that are read and unpacked; it happens twice, for the engine and for training
ANSWER_STEP_SECONDS = 1e-3  # of the engine's own work in a step
KMEANS_ROUNDS, KMEANS_WIDTH = 8.0, 128.0  # clustering a head: passes over the vocabulary, dimensions
# anchors that the drafter's input is fitted on at least, and tokens that the target reads for each
FIT_ROWS, FIT_TOKENS = 1024, 3.0
HELD_SHARE = 0.2  # of the answers, held out


@dataclass(frozen=True)
class RunPlan:
    """The drafter of a run, what training it costs, how fast this machine is, and the sizes that follow."""

    drafter: DrafterConfig | BlockConfig
    work: Work
    speed: MachineSpeed
    sizes: Sizes

    @staticmethod
    def of(job: TrainConfig, target: ModelConfig, tokens: int) -> RunPlan:
        """For data of `tokens` tokens."""
        drafter: DrafterConfig | BlockConfig
        if job.init is not None:
            drafter = drafter_config(job.init, target, job.kind)
        else:
            drafter = new_drafter(job, target, None) if job.kind == "mtp" else new_block(job, target)
        work = Work.of(drafter, target, job.unroll, torch_dtype(job).itemsize, job.anchor_share)
        speed = MachineSpeed.measure(job.device, torch_dtype(job), target.hidden)
        sizes = choose_sizes(job, work, target.vocab_size, speed, tokens, free_bytes(job.device))
        return RunPlan(drafter, work, speed, sizes)


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
    share: float = 1.0  # of the processor time that this process gets under the load of the moment

    @staticmethod
    def of(job: TrainConfig, made: RunPlan, target: ModelConfig, stored: StoredSize, tokens: float) -> RunCosts:
        """`stored`: the target's weights on disk; `tokens` of answers that the prompts can give. The weights of a
        target that answers are read once for all sequences of a step."""
        drafter, work, speed, sizes = made.drafter, made.work, made.speed, made.sizes
        rate, vocab = speed.rate * EFFICIENCY / SUSTAINED, target.vocab_size
        width = 0 if isinstance(drafter, BlockConfig) else drafter.backbone_hidden * (2 + len(drafter.taps))
        passes = 1 if job.kind == "dflash" else job.unroll
        operations = 3.0 * passes * (30.0 * len(drafter.layers) + 40.0)
        step = sizes.anchors * work.anchor_seconds(speed, sizes.scored or vocab, sizes.keep) + operations * OP_SECONDS
        kmeans = KMEANS_ROUNDS * 2.0 * vocab * drafter.clusters * min(KMEANS_WIDTH, target.hidden)
        fit = FIT_TOKENS * max(sizes.anchors, FIT_ROWS) * work.target * (2 if target.qkv_bias else 1) + 5.0 * width**3
        slots = job.slots or CPU_SLOTS
        answer = max(stored.token / speed.bandwidth, 2.0 * slots * model_size(target).active / rate)
        return RunCosts(
            load=2 * stored.parameters / LOAD_RATE,
            start=(kmeans + fit) / rate,
            answer=(answer + ANSWER_STEP_SECONDS) / slots,
            capture=1.5 * work.target / rate if sizes.keep else 0.0,
            step=step * SUSTAINED,
            evaluate=(work.target + 8.0 * vocab * drafter.head_hidden) / rate,
            tokens=tokens,
            share=speed.share,
        )

    @property
    def idle(self) -> RunCosts:
        """On the same machine without other processes."""
        parts = ("load", "start", "answer", "capture", "step", "evaluate")
        return replace(self, share=1.0, **{name: self.share * getattr(self, name) for name in parts})

    def seconds(self, answered: float, steps: float) -> float:
        """Seconds of a run with these answers and steps."""
        finish = FINISH_PASSES * HELD_SHARE * answered * self.evaluate + EXPORT_SECONDS
        return self.load + self.start + answered * (self.answer + self.capture) + steps * self.step + finish


@dataclass(frozen=True)
class Forecast:
    """The forecast of a run of some minutes."""

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
    """One line about what the time allows; OutriderError where it would be too little on an idle machine too. `spent`:
    seconds gone already."""
    here, idle = (Forecast.of(c, 60 * minutes - spent, share) for c in (costs, costs.idle))
    amount = "{0.answered:.0f} tokens of answers and {0.steps} steps (one takes {1:.2g} s {2})"
    if here.enough:
        return f"in {minutes:g} minutes about {amount.format(here, costs.step, 'here')}"
    calm = amount.format(idle, costs.idle.step, "here")
    if idle.enough:
        return (
            f"other processes use {1 - costs.share:.0%} of this machine: in {minutes:g} minutes about "
            f"{amount.format(here, costs.step, 'now')}, too few to learn from; without them about {calm}"
        )
    raise OutriderError(
        f"--minutes {minutes:g} is too short here: about {calm}, and a drafter learns nothing from less than "
        f"{min(costs.tokens, FEWEST_TOKENS):.0f} and {FEWEST_STEPS}; "
        f"try --minutes {least_minutes(costs.idle, spent, share):g}"
    )


def least_minutes(costs: RunCosts, spent: float, share: float = CPU_ANSWER_SHARE) -> float:
    """The shortest time that the forecast accepts, rounded up to a number that a user would type."""
    low, high = 0.0, 60.0
    while not Forecast.of(costs, high, share).enough and high < 1e9:
        low, high = high, 2 * high
    while high - low > 0.01 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if Forecast.of(costs, middle, share).enough else (middle, high)
    minutes = (1.1 * high + spent) / 60
    step = 0.1 if minutes < 1 else 0.5 if minutes < 5 else 1.0
    return round(math.ceil(minutes / step) * step, 1)
