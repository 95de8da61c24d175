"""Forecasts of a run on this machine: the sizes of its batches, and the steps that fit into its minutes.

The expensive parts are, per anchor, the teacher's distribution and the activations of all unrolled steps, and on a CPU
every row of the head. So a CPU scores a few thousand tokens per batch instead of the whole vocabulary (losses.py), runs
the target once per sequence and keeps its outputs if they fit (target.py), and takes batches of about two seconds. The
choices are written to OUT/sizes.json: a resumed run keeps them, whatever is free then.

A forecast is made in seconds before the run starts, from measured figures of the machine under its current load
(MachineSpeed) and counted operations. A run that is forecast too short to learn anything is refused, also if only the
load of other processes makes it so. One forecast decides that and gives the shortest sufficient `--minutes`, so the two
cannot contradict each other.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from ..engine import memory
from ..models.block_config import BlockConfig
from ..models.config import DrafterConfig, ModelConfig
from ..models.inspect import drafter_size, model_size
from ..types import OutriderError
from ..weights.sizes import StoredSize
from .block_net import drafter_config, new_block
from .config import CPU_SLOTS, TrainConfig
from .design import START_ROWS, new_drafter
from .losses import CPU_LOSS_ROWS, LossMix, row_terms

GPU_ANCHORS = 16384
FEWEST_ANCHORS = 256
CPU_SCORED = 8192  # vocabulary tokens in a batch's loss on a CPU
CPU_STEP_SECONDS = 2.0  # intended time of a batch on a CPU
USUAL_LENGTH = 512  # assumed tokens of a sequence, for memory
SHARE = 0.4  # share of the free memory that a batch may take; as much is left to others
KEEP_SHARE = 0.25  # share of the free memory that captured states may take
EFFICIENCY = 0.45  # rate of a training step's products, relative to one large matrix product
TIMED_SECONDS = 0.2  # length of a measurement; ten times as long on a busy machine, whose rate fluctuates
BUSY = 0.75  # with at most this share of the processor time, the machine is busy
# a drafter learns nothing from less
FEWEST_STEPS = 50
FEWEST_TOKENS = 2000
HANDFUL = 10  # steps: a timed run that made fewer has failed
SUSTAINED = 1.5  # whole runs took 1.3 to 1.7 times what their parts, timed one by one for a moment, add up to
OP_SECONDS = 1.5e-5  # torch's overhead per operation
# default share of the minutes for answering: a CPU learns slowly
ANSWER_SHARE = 0.4
CPU_ANSWER_SHARE = 0.25
# maximum share of the minutes; passes over the held-out answers, with a reserve of one half
FINISH_SHARE = 0.1
FINISH_PASSES = 6.0
EXPORT_SECONDS = 3.0
# maximum time of measuring the gain, and maximum share of the minutes
GAIN_SECONDS = 30.0
GAIN_SHARE = 0.03
LOAD_RATE = 5e7  # weights read and unpacked per second
ANSWER_STEP_SECONDS = 1e-3  # overhead of an engine step
# clustering a head: passes over the vocabulary, dimensions
KMEANS_ROUNDS = 8.0
KMEANS_WIDTH = 128.0
FIT_TOKENS = 3.0  # tokens that the target reads per anchor when the drafter's input is fitted
HELD_SHARE = 0.2  # share of the answers that is held out


# ---- sizes -----------------------------------------------------------------------------------------------------------
def free_bytes(device: str) -> int:
    """Free memory for this process; 8 GiB if unknown."""
    free = memory.free_bytes(torch.device(device))
    return 8 << 30 if free == memory.UNKNOWN else max(free, 1 << 26)


@dataclass(frozen=True)
class Sizes:
    """Sizes of a run's batches and chunks."""

    anchors: int  # query rows per batch
    scored: int  # tokens of the vocabulary in the loss; 0: all of it
    keep: bool  # captured states are kept: the target runs once per sequence, not per epoch


@dataclass(frozen=True)
class MachineSpeed:
    """Measured speed of this machine under its current load."""

    rate: float  # operations per second of large matrix products
    bandwidth: float  # bytes per second
    pair: float = 0.0  # seconds of the loss per row and scored token, products excluded
    share: float = 1.0  # of the processor time that this process got; 1 on an idle machine

    @staticmethod
    def measure(dtype: torch.dtype, width: int) -> MachineSpeed:
        """Measures the processor. Takes less than a second; several if other processes use the machine."""
        a, b = (torch.ones((n, width), dtype=dtype) for n in (512, 2048))
        z = torch.zeros(CPU_LOSS_ROWS, CPU_SCORED)
        best = torch.zeros(CPU_LOSS_ROWS, dtype=torch.int64)
        block = torch.ones(1 << 24)
        mix = LossMix().rows(len(z), z.device)
        timings = [
            timed(lambda: a @ b.T),
            timed(block.sum),
            timed(lambda: row_terms(z, z, best=best, weight=z[:, 0], mix=mix)),
        ]
        product, moved, terms = (passed for passed, _ in timings)
        share = sum(used / passed for passed, used in timings) / 3
        rate = 2.0 * 512 * 2048 * width / product
        bandwidth = block.nbytes / moved
        return MachineSpeed(rate, bandwidth, pair=terms / z.numel(), share=share)


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """Mean seconds of `work` by the clock, and by the threads' processor time, which is what it would take on an idle
    machine. The first call, which maps memory and chooses kernels, is not counted."""
    work()
    began = time.perf_counter()
    used = time.process_time()
    count = 0
    threads = torch.get_num_threads()
    while True:
        work()
        passed = time.perf_counter() - began
        count = count + 1
        busy = min(passed, (time.process_time() - used) / threads)
        if passed >= (TIMED_SECONDS if busy > BUSY * passed else 10 * TIMED_SECONDS):
            return passed / count, busy / count


@dataclass(frozen=True)
class Work:
    """Cost of training, in floating-point operations and bytes."""

    body: float  # operations per anchor: forward and backward of all unrolled steps without the head
    head: float  # operations per anchor and scored token
    rows: float  # rows of an anchor in the loss
    target: float  # operations per token of the target's forward
    row_bytes: float  # an anchor's activations
    token_bytes: float  # of a captured token that is kept

    @staticmethod
    def of(
        config: DrafterConfig | BlockConfig, target: ModelConfig, unroll: int, item: int, share: float = 1.0
    ) -> Work:
        """`share`: of a batch's positions that a block drafter drafts from."""
        wide = config.hidden if isinstance(config, BlockConfig) else max(config.hidden, config.backbone_hidden)
        # for the backward pass a layer keeps about eight rows of the hidden width and four of its MLP's width
        layer = sum(8 * wide + 4 * l.intermediate + 4 * l.attn.heads * l.attn.head_dim for l in config.layers)
        streams = target.hidden * (1 + len(config.taps or ()))
        if isinstance(config, BlockConfig):
            passed = share * (unroll + 1)
            scored = share * unroll
            layer += max(l.attn.heads // l.attn.kv_heads for l in config.layers) * USUAL_LENGTH  # the mask, once
            row = passed * layer + 2 * (unroll + 2) * wide + 2 * streams
            stored_values = streams
        else:
            passed = unroll
            scored = unroll
            read = (target.layers[r].attn for r in set(config.reads or target.kv_layers[-2:]))
            row = unroll * (layer + 4 * wide)
            stored_values = streams + sum(2 * a.kv_heads * a.head_dim for a in read)
        head = (4.0 * scored + 2.0) * config.head_hidden
        active = 2.0 * model_size(target).active
        return Work(
            6.0 * drafter_size(config).body * passed,
            head,
            rows=scored,
            target=active,
            row_bytes=float(item * row),
            token_bytes=float(item * stored_values + 64),
        )

    def anchor(self, scored: int, cached: bool) -> float:
        """Operations per anchor. There are 1.5 tokens per anchor, since prompts are only read."""
        return self.body + self.head * scored + (0.0 if cached else self.target * 1.5)

    def anchor_seconds(self, speed: MachineSpeed, scored: int, cached: bool) -> float:
        return self.anchor(scored, cached) / (speed.rate * EFFICIENCY) + self.rows * scored * speed.pair

    def anchor_bytes(self, scored: int, item: int) -> float:
        return self.row_bytes + 2.0 * item * scored  # activations; the teacher's distribution and a gathered copy


def choose_sizes(job: TrainConfig, work: Work, vocab: int, speed: MachineSpeed, tokens: int, free: int) -> Sizes:
    """Sizes for `tokens` tokens of data and `free` bytes. Even a requested number of anchors is cut to what fits."""
    cuda = job.cuda
    anchors = job.batch_anchors
    item = torch_dtype(job).itemsize
    scored = 0 if cuda or vocab <= 2 * CPU_SCORED else CPU_SCORED
    keep = not cuda and work.token_bytes * tokens < KEEP_SHARE * free
    room = SHARE * free - (KEEP_SHARE * free if keep else 0.0) * 0.5
    fit = int(room / max(1.0, work.anchor_bytes(scored or vocab, item)))
    if anchors is None:
        anchors = GPU_ANCHORS if cuda else int(CPU_STEP_SECONDS / work.anchor_seconds(speed, scored or vocab, keep))
        anchors = min(anchors, GPU_ANCHORS) // FEWEST_ANCHORS * FEWEST_ANCHORS
    return Sizes(max(FEWEST_ANCHORS, min(anchors, fit)), scored, keep)


def torch_dtype(config: TrainConfig) -> torch.dtype:
    """The configured type; by default bfloat16 if the device multiplies it, which is several times faster."""
    if config.dtype or config.cuda:
        return torch.float32 if config.dtype == "float32" else torch.bfloat16
    native = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.bfloat16 if native else torch.float32


# ---- the forecast ----------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class RunPlan:
    """The drafter of a run, the cost of training it, the machine's speed, and the resulting sizes."""

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
        work = Work.of(drafter, target, job.unroll, item=torch_dtype(job).itemsize, share=job.anchor_share)
        # sizes for a GPU depend on its memory alone
        speed = MachineSpeed(0.0, 0.0) if job.cuda else MachineSpeed.measure(torch_dtype(job), target.hidden)
        sizes = choose_sizes(
            job, work, vocab=target.vocab_size, speed=speed, tokens=tokens, free=free_bytes(job.device)
        )
        return RunPlan(drafter, work, speed=speed, sizes=sizes)


@dataclass(frozen=True)
class RunCosts:
    """Seconds of a run's parts on this machine, and how much there is to do."""

    load: float  # reading the weights three times: to answer, to train, to measure the gain
    start: float  # clustering the head, fitting the drafter's input
    answer: float  # per token of an answer
    capture: float  # per token of an answer that the target reads for training, its share of the prompt included
    step: float  # per optimizer step
    evaluate: float  # per held-out token
    tokens: float  # maximum tokens of answers to the prompts
    share: float = 1.0  # of the processor time that this process gets under the load of the moment

    @staticmethod
    def of(job: TrainConfig, plan: RunPlan, target: ModelConfig, stored: StoredSize, tokens: float) -> RunCosts:
        """`stored`: the target's weights on disk; `tokens` of answers that the prompts can give. The weights of a
        target that answers are read once for all sequences of a step."""
        drafter = plan.drafter
        work = plan.work
        speed = plan.speed
        sizes = plan.sizes
        rate = speed.rate * EFFICIENCY / SUSTAINED
        vocab = target.vocab_size
        width = 0 if isinstance(drafter, BlockConfig) else drafter.backbone_hidden * (2 + len(drafter.taps))
        passes = 1 if job.kind == "dflash" else job.unroll
        operations = 3.0 * passes * (30.0 * len(drafter.layers) + 40.0)
        step = sizes.anchors * work.anchor_seconds(speed, sizes.scored or vocab, sizes.keep) + operations * OP_SECONDS
        kmeans = KMEANS_ROUNDS * 2.0 * vocab * drafter.clusters * min(KMEANS_WIDTH, target.hidden)
        fit = FIT_TOKENS * max(sizes.anchors, START_ROWS) * work.target * (2 if target.qkv_bias else 1) + 5.0 * width**3
        slots = job.slots or CPU_SLOTS
        answer = max(stored.token / speed.bandwidth, 2.0 * slots * model_size(target).active / rate)
        return RunCosts(
            load=3 * stored.parameters / LOAD_RATE,
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
        """The costs on the same machine without other processes."""
        parts = ("load", "start", "answer", "capture", "step", "evaluate")
        return replace(self, share=1.0, **{name: self.share * getattr(self, name) for name in parts})

    def without_steps(self, answered: float, seconds: float = math.inf) -> float:
        """Seconds of everything but the steps, in a run with these answers; evaluations take at most a share of
        `seconds`."""
        evaluated = min(FINISH_PASSES * HELD_SHARE * answered * self.evaluate, 1.5 * FINISH_SHARE * seconds)
        ending = evaluated + EXPORT_SECONDS + gain_seconds(seconds)
        return self.load + self.start + answered * (self.answer + self.capture) + ending


def gain_seconds(seconds: float) -> float:
    """Time reserved at the end of a run for measuring the drafter's gain."""
    return min(GAIN_SECONDS, GAIN_SHARE * seconds)


@dataclass(frozen=True)
class Forecast:
    """The forecast of a run of some minutes."""

    answered: float  # tokens of answers
    steps: int
    enough: bool  # enough steps to learn something

    @staticmethod
    def of(costs: RunCosts, seconds: float, share: float = CPU_ANSWER_SHARE) -> Forecast:
        """`share`: of the time, at most for answering."""
        answered = min(costs.tokens, share * seconds / costs.answer)
        steps = max(0, int((seconds - costs.without_steps(answered, seconds)) / costs.step))
        return Forecast(answered, steps, steps >= FEWEST_STEPS and answered >= min(costs.tokens, FEWEST_TOKENS))


def check(costs: RunCosts, minutes: float, spent: float, share: float = CPU_ANSWER_SHARE) -> str:
    """Returns one line on what the time allows.

    Raises OutriderError with the minutes needed if it is too short to learn from. spent: seconds.
    """
    seconds = 60 * minutes - spent
    here = Forecast.of(costs, seconds, share)
    allowed = f"{here.answered:.0f} tokens of answers and {here.steps} steps (one takes {costs.step:.2g} s here)"
    if here.enough:
        return f"in {minutes:g} minutes about {allowed}"
    needed = f"a drafter needs at least {min(costs.tokens, FEWEST_TOKENS):.0f} tokens and {FEWEST_STEPS} steps"
    advice = f"try --minutes {least_minutes(costs, spent, share):g}"
    if Forecast.of(costs.idle, seconds, share).enough:
        busy = f"other processes use {1 - costs.share:.0%} of this machine"
        advice = f"{busy}: {advice}, or the same command when they have ended"
    raise OutriderError(f"--minutes {minutes:g} is too short here: it allows about {allowed}; {needed}; {advice}")


def least_minutes(costs: RunCosts, spent: float, share: float = CPU_ANSWER_SHARE) -> float:
    """The shortest time that the forecast accepts, rounded up to a number that a user would type."""
    seconds = bisect_left(range(1 << 40), True, key=lambda passed: Forecast.of(costs, passed, share).enough)
    minutes = (1.1 * seconds + spent) / 60
    step = 1.0
    if minutes < 5:
        step = 0.1 if minutes < 1 else 0.5
    return round(math.ceil(minutes / step) * step, 1)
