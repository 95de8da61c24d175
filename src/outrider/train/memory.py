"""Chooses the sizes of a run by the free memory and the speed of the device.

The expensive parts are, per anchor, the teacher's distribution and the activations of all unrolled steps, and on a CPU
every row of the head. So a CPU scores a few thousand tokens per batch instead of the whole vocabulary (losses.py), runs
the target once per sequence and keeps its outputs if they fit (capture.py), and takes batches of about two seconds. The
choices are written to OUT/sizes.json: a resumed run keeps them, whatever is free then.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..engine import memory
from ..models.block_config import BlockConfig
from ..models.config import DrafterConfig, ModelConfig
from ..models.inspect import drafter_size, model_size
from .config import TrainConfig
from .losses import CPU_LOSS_ROWS, LossMix, row_terms

GPU_ANCHORS, FEWEST_ANCHORS = 16384, 256
CPU_SCORED = 8192  # vocabulary tokens in a batch's loss on a CPU
CPU_STEP_SECONDS = 2.0  # that a batch shall take on a CPU
USUAL_LENGTH = 512  # tokens of a sequence, where memory depends on it
SHARE = 0.4  # of the free memory that a batch may take; the same again is left to others
KEEP_SHARE = 0.25  # of the free memory that captured states may take
EFFICIENCY = 0.45  # of the rate of one large matrix product that a training step's products reach
TIMED_SECONDS = 0.2  # of each measurement; ten times as long on a busy machine, whose momentary rate says little
BUSY = 0.75  # share of the processor time that a process gets on a busy machine, at most


def free_bytes(device: str) -> int:
    """Free memory for this process; 8 GiB if the system does not report it."""
    free = memory.free_bytes(torch.device(device))
    return 8 << 30 if free == memory.UNKNOWN else max(free, 1 << 26)


@dataclass(frozen=True)
class Sizes:
    """The sizes of a run's batches and chunks."""

    anchors: int  # query rows per batch
    scored: int  # tokens of the vocabulary in the loss; 0: all of it
    keep: bool  # captured states are kept: the target runs once per sequence, not per epoch


@dataclass(frozen=True)
class MachineSpeed:
    """By the clock, so under the load of the moment."""

    rate: float  # operations per second of large matrix products
    bandwidth: float  # bytes per second
    pair: float = 0.0  # seconds of a row and a scored token in the loss, products apart
    share: float = 1.0  # of the processor time that this process got; 1 on an idle machine

    @staticmethod
    def measure(device: str, dtype: torch.dtype, width: int) -> MachineSpeed:
        """Takes less than a second, several if other processes use the machine too."""
        a, b = (torch.ones((n, width), dtype=dtype, device=device) for n in (512, 2048))
        block, cuda = torch.ones(1 << 24), device.startswith("cuda")
        product, used = timed(lambda: (a @ b.T)[0, 0].item())  # waits for a GPU
        moved, used_moving = timed(block.sum)
        rate, bandwidth = 2.0 * 512 * 2048 * width / product, block.nbytes / moved
        if cuda:
            return MachineSpeed(rate, bandwidth)
        z, best = torch.zeros(CPU_LOSS_ROWS, CPU_SCORED), torch.zeros(CPU_LOSS_ROWS, dtype=torch.int64)
        mix = LossMix().rows(len(z), z.device)
        terms, used_terms = timed(lambda: row_terms(z, z, best, z[:, 0], mix))
        share = (used / product + used_moving / moved + used_terms / terms) / 3
        return MachineSpeed(rate, bandwidth, terms / z.numel(), share)


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """Mean seconds of `work` by the clock, and by the processor time of each thread: what it would take on an idle
    machine. The first call, in which memory is mapped and kernels are chosen, is not counted."""
    work()
    began, used, count, threads = time.perf_counter(), time.process_time(), 0, torch.get_num_threads()
    while True:
        work()
        passed, count = time.perf_counter() - began, count + 1
        busy = min(passed, (time.process_time() - used) / threads)
        if passed >= (TIMED_SECONDS if busy > BUSY * passed else 10 * TIMED_SECONDS):
            return passed / count, busy / count


@dataclass(frozen=True)
class Work:
    """The cost of training, in floating-point operations and bytes."""

    body: float  # operations per anchor: forward and backward of all unrolled steps without the head
    head: float  # operations per anchor and scored token
    rows: float  # of an anchor in the loss
    target: float  # operations per token of the target's forward
    row_bytes: float  # an anchor's activations
    token_bytes: float  # of a captured token that is kept

    @staticmethod
    def of(
        config: DrafterConfig | BlockConfig, target: ModelConfig, unroll: int, item: int, share: float = 1.0
    ) -> Work:
        """`share`: of a batch's positions that a block drafter drafts from."""
        wide = config.hidden if isinstance(config, BlockConfig) else max(config.hidden, config.backbone_hidden)
        # a layer keeps about eight rows of the hidden width and four of its MLP's for the backward pass
        layer = sum(8 * wide + 4 * l.intermediate + 4 * l.attn.heads * l.attn.head_dim for l in config.layers)
        streams = target.hidden * (1 + len(config.taps or ()))
        if isinstance(config, BlockConfig):
            passed, scored = share * (unroll + 1), share * unroll
            layer += max(l.attn.heads // l.attn.kv_heads for l in config.layers) * USUAL_LENGTH  # the mask, once
            row, kept = passed * layer + 2 * (unroll + 2) * wide + 2 * streams, streams
        else:
            passed, scored = unroll, unroll
            read = (target.layers[r].attn for r in set(config.reads or target.kv_layers[-2:]))
            row, kept = unroll * (layer + 4 * wide), streams + sum(2 * a.kv_heads * a.head_dim for a in read)
        head = (4.0 * scored + 2.0) * config.head_hidden
        active = 2.0 * model_size(target).active
        return Work(
            6.0 * drafter_size(config).body * passed, head, scored, active, float(item * row), float(item * kept + 64)
        )

    def anchor(self, scored: int, kept: bool) -> float:
        """Operations per anchor. There are one and a half tokens per anchor: prompts are read, not drafted from."""
        return self.body + self.head * scored + (0.0 if kept else self.target * 1.5)

    def anchor_seconds(self, speed: MachineSpeed, scored: int, kept: bool) -> float:
        return self.anchor(scored, kept) / (speed.rate * EFFICIENCY) + self.rows * scored * speed.pair

    def anchor_bytes(self, scored: int, item: int) -> float:
        return self.row_bytes + 2.0 * item * scored  # activations; the teacher's distribution and a gathered copy


def choose_sizes(job: TrainConfig, work: Work, vocab: int, speed: MachineSpeed, tokens: int, free: int) -> Sizes:
    """`tokens` in the data, `free` bytes: a number of anchors that the job asks for is still cut to what fits."""
    cuda, anchors, item = job.cuda, job.batch_anchors, torch_dtype(job).itemsize
    scored = 0 if cuda or vocab <= 2 * CPU_SCORED else CPU_SCORED
    keep = not cuda and work.token_bytes * tokens < KEEP_SHARE * free
    room = SHARE * free - (KEEP_SHARE * free if keep else 0.0) * 0.5
    fit = int(room / max(1.0, work.anchor_bytes(scored or vocab, item)))
    if anchors is None:
        anchors = GPU_ANCHORS if cuda else int(CPU_STEP_SECONDS / work.anchor_seconds(speed, scored or vocab, keep))
        anchors = min(anchors, GPU_ANCHORS) // FEWEST_ANCHORS * FEWEST_ANCHORS
    return Sizes(max(FEWEST_ANCHORS, min(anchors, fit)), scored, keep)


def torch_dtype(config: TrainConfig) -> torch.dtype:
    """As configured; else bfloat16 where the device multiplies it (then several times faster), else float32."""
    if config.dtype or config.cuda:
        return torch.float32 if config.dtype == "float32" else torch.bfloat16
    native = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.bfloat16 if native else torch.float32
