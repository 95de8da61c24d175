"""Predicts memory, ms per token and the best K from config.json and a table of machines, before any download.

A step over R rows (sequences × (K + 1)) takes the longer of moving the bytes and doing the arithmetic (on a CPU: their
sum), plus a fixed overhead per kernel, plus a cost per further row and layer:

    step(R) = max(bytes(R) / (bandwidth · reach), flops(R) / (matrix rate · reach))
              + kernels · overhead + layers · (R - 1) · row

`bytes` counts each weight once for all rows (in a mixture of experts: the experts that R tokens are expected to
choose), and the K/V of each sequence. On an H200 the constants are fitted to our engine's measured steps
(docs/benchmarks.md says which); elsewhere bandwidth and rate are the vendors' and the other constants are those of the
H200. Torch-free.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from itertools import pairwise

from ..models.audio_config import MAX_SECONDS, SAMPLE_RATE, AudioConfig
from ..models.config import DrafterConfig, ForeignDict, ModelConfig
from ..models.inspect import drafter_size, flops, kv_bytes, model_size
from ..models.vision_config import IMAGE_TOKENS, VisionConfig
from ..types import MAX_DRAFT, OutriderError, bad_input

# launched a layer, counted: four products, attention and its combine, two norms with their residuals, rope and
# write
KERNELS = 9
PLE_KERNELS = 3  # more where a layer has its own embeddings, counted
MOE_KERNELS = 10  # more of them in a layer of experts, as time: fitted to one size
HEAD_KERNELS = 21  # and whatever else is outside the layers, counted
DRAFTER_KERNELS = 5  # as time: fitted, like the next
DRAFTER_HEAD_KERNELS = 6


@dataclass(frozen=True)
class Hardware:
    """Vendor figures: bandwidth in GB/s, dense matrix rate in TFLOP/s (bf16; CPUs: 8-bit integer), memory in GB."""

    label: str
    bandwidth: float
    rate: float
    memory: float
    kernel_us: float = 2.4  # in a CUDA graph, launched ahead of their inputs
    reach: float = 0.915  # of the bandwidth: 4.39 TB/s of an H200's 4.8
    rate_reach: float = 0.6
    row_us: float = 1.0  # per layer and row beyond the first: wider tiles, more queries
    overlaps: bool = True  # a GPU moves bytes while it multiplies; a CPU core does one after the other, nearly


CPU = partial(Hardware, kernel_us=2.0, reach=0.75, row_us=0.0, overlaps=False)
# rate_reach 0.15: what the decode kernels reach with 40 to 80 rows on a Hopper; elsewhere not measured
MACHINES: Mapping[str, Hardware] = {
    "b200": Hardware("NVIDIA B200", 8000, 2250, 180),
    "h200": Hardware("NVIDIA H200", 4800, 989, 141, rate_reach=0.15),
    "h100": Hardware("NVIDIA H100 SXM", 3350, 989, 80, rate_reach=0.15),
    "h100-pcie": Hardware("NVIDIA H100 PCIe", 2000, 756, 80, rate_reach=0.15),
    "a100": Hardware("NVIDIA A100 80GB SXM", 2039, 312, 80),
    "a100-40": Hardware("NVIDIA A100 40GB", 1555, 312, 40),
    "l40s": Hardware("NVIDIA L40S", 864, 362, 48),
    "l4": Hardware("NVIDIA L4", 300, 121, 24),
    "rtx-pro-6000": Hardware("NVIDIA RTX PRO 6000 Blackwell", 1792, 504, 96),
    "rtx5090": Hardware("NVIDIA RTX 5090", 1792, 210, 32),
    "rtx4090": Hardware("NVIDIA RTX 4090", 1008, 165, 24),
    "rtx3090": Hardware("NVIDIA RTX 3090", 936, 71, 24),
    "rtx5070ti": Hardware("NVIDIA RTX 5070 Ti", 896, 88, 16),
    "dgx-spark": Hardware("NVIDIA DGX Spark (GB10)", 273, 125, 128),
    "m3-max": Hardware("Apple M3 Max (40-core GPU)", 400, 28, 128, kernel_us=6.0),
    "m3-ultra": Hardware("Apple M3 Ultra (80-core GPU)", 819, 57, 512, kernel_us=6.0),
    "m4-max": Hardware("Apple M4 Max (40-core GPU)", 546, 34, 128, kernel_us=6.0),
    "strix-halo": Hardware("AMD Strix Halo", 256, 59, 128, kernel_us=6.0),
    "mi300x": Hardware("AMD MI300X", 5300, 1307, 192, reach=0.75),
    "desktop-ddr5": CPU("Desktop CPU, 8 cores, dual-channel DDR5-5600", 90, 1.6, 64),
    "server-ddr5": CPU("Server CPU, 32 cores, 8-channel DDR5-4800 with AMX", 307, 20, 512, kernel_us=3.0),
    "cpu-2-cores": CPU("Two x86-64 cores with AVX2", 20.7, 0.28, 16, reach=0.95, rate_reach=1.0),  # measured
}


def machine(name: str) -> Hardware:
    by_name = {known.replace("-", ""): on for known, on in MACHINES.items()}
    found = by_name.get(re.sub("[ _-]", "", name.lower()))
    if found is None:
        near = get_close_matches(name.lower(), MACHINES, 1)
        raise OutriderError(
            f"unknown machine {name!r}{f' (did you mean {near[0]}?)' if near else ''}; known: {', '.join(MACHINES)}"
        )
    return found


# ---- acceptance
@dataclass(frozen=True)
class Acceptance:
    """`survive[j]`: the probability that the first j + 1 drafted tokens are all right."""

    survive: tuple[float, ...]
    said: str

    def tokens(self, k: int) -> float:
        """Expected tokens per cycle."""
        return 1.0 + sum(self.survive[:k])

    @staticmethod
    def parse(text: str) -> Acceptance:
        """'0.72' or '0.72@4': the share of drafted tokens accepted at K = 4 (as engines report it), converted to one
        probability per token. '0.84,0.60,0.39': the probability that the first 1, 2, 3 … tokens are right."""
        rule = "give a share such as 0.72 or 0.58@8, or falling chances by position 0.84,0.60,0.39"
        with bad_input(ValueError, lambda _: f"--accept {text!r}: {rule}"):
            if "," in text:
                values = [float(v) for v in text.split(",")]
                if any(not 0.0 <= v <= 1.0 for v in values) or any(a < b for a, b in pairwise(values)):
                    raise ValueError
                return Acceptance.by_position(values, f"by position {text}")
            share, _, at = text.partition("@")
            return Acceptance.of_share(float(share), int(at or 4))

    @staticmethod
    def by_position(values: Sequence[float], said: str) -> Acceptance:
        """The probabilities that the first 1, 2, 3 … tokens are right; beyond the last they fall at the same rate."""
        out = list(values)
        ratio = out[-1] / out[-2] if len(out) > 1 and out[-2] > 0 else 0.0
        while len(out) < MAX_DRAFT:
            out.append(out[-1] * ratio)
        return Acceptance(tuple(out[:MAX_DRAFT]), said)

    @staticmethod
    def of_share(share: float, k: int) -> Acceptance:
        each = chance(share, k)
        said = f"{share:.0%} of drafts at K={k} ({each:.3f} a token)"
        return Acceptance(tuple(each**j for j in range(1, MAX_DRAFT + 1)), said)


def chance(share: float, k: int) -> float:
    """The probability that a drafted token is right, given those before it were: one for all positions, such that
    `share` of k tokens is accepted."""
    if not 0.0 <= share <= 1.0 or not 1 <= k <= MAX_DRAFT:
        raise ValueError(share)
    low = 0.0
    high = 1.0
    for _ in range(60):
        a = (low + high) / 2
        low, high = (a, high) if sum(a**j for j in range(1, k + 1)) < share * k else (low, a)
    return high


# ---- a step
@dataclass(frozen=True)
class Setup:
    target: ModelConfig
    drafter: DrafterConfig | None
    on: Hardware
    batch: int = 1
    context: int = 1024
    weight_bytes: float = 2.0  # of a weight that a token reads, on average
    stored: float | None = None  # bytes of all weights, where they are not of one size


def verify_parts(setup: Setup, k: int) -> tuple[float, float, float]:
    """Seconds of moving bytes, of arithmetic, and of fixed kernel time, including that of further rows."""
    rows = setup.batch * (k + 1)
    config = setup.target
    on = setup.on
    size = model_size(config)
    moved = size.streamed(rows) * setup.weight_bytes + rows * kv_bytes(config, 1)
    moved += setup.batch * kv_bytes(config, setup.context, read=True)
    work = setup.batch * flops(size, k + 1, setup.context, k + 1)
    layers = len(config.layers)
    each = KERNELS + (MOE_KERNELS if config.moe else 0) + (PLE_KERNELS if config.ple_dim else 0)
    launched = layers * each + HEAD_KERNELS
    own = 1e-6 * (launched * on.kernel_us + layers * (rows - 1) * on.row_us)
    return moved / (on.bandwidth * 1e9 * on.reach), work / (on.rate * 1e12 * on.rate_reach), own


def verify_seconds(setup: Setup, k: int) -> float:
    moving, working, own = verify_parts(setup, k)
    return _together(setup.on, moving, working) + own


def _together(on: Hardware, moving: float, working: float) -> float:
    return max(moving, working) if on.overlaps else moving + working


def draft_seconds(setup: Setup, k: int) -> float:
    """k steps of the MTP drafter, one after the other. Without one: n-gram matches, which take no time."""
    if setup.drafter is None or k == 0:
        return 0.0
    on = setup.on
    config = setup.drafter
    size = drafter_size(config)
    read = setup.batch * kv_bytes(config, setup.context, read=True)
    narrow = not config.clusters and on.overlaps  # on GPUs a drafter's large head and layers are held in 8 bits
    moved = size.step * (min(1.0, setup.weight_bytes) if narrow else setup.weight_bytes) + read
    work = 2.0 * setup.batch * size.step
    launched = len(config.layers) * DRAFTER_KERNELS + DRAFTER_HEAD_KERNELS
    busy = _together(on, moved / (on.bandwidth * 1e9 * on.reach), work / (on.rate * 1e12 * on.rate_reach))
    return k * (busy + launched * on.kernel_us * 1e-6)


@dataclass(frozen=True)
class Point:
    k: int
    cycle_ms: float
    tokens: float  # a cycle and sequence
    ms_per_token: float  # of one sequence
    speedup: float


def sweep(setup: Setup, accept: Acceptance) -> list[Point]:
    plain = verify_seconds(setup, 0)
    out = []
    for k in range(MAX_DRAFT + 1):
        seconds = draft_seconds(setup, k) + verify_seconds(setup, k)
        tokens = accept.tokens(k)
        out.append(Point(k, 1e3 * seconds, tokens, 1e3 * seconds / tokens, plain * tokens / seconds))
    return out


def memory_bytes(setup: Setup) -> dict[str, float]:
    weights = model_size(setup.target).total * setup.weight_bytes if setup.stored is None else setup.stored
    drafter = drafter_size(setup.drafter).total * setup.weight_bytes if setup.drafter is not None else 0.0
    cache = setup.batch * kv_bytes(setup.target, setup.context)
    return {"weights": weights, "drafter": drafter, "kv": float(cache), "total": weights + drafter + cache}


def predict(setup: Setup, accept: Acceptance) -> ForeignDict:
    """Everything `outrider predict` shows, as plain data."""
    points = sweep(setup, accept)
    best = max(points, key=lambda p: p.speedup)
    need = memory_bytes(setup)
    moving = verify_parts(setup, 0)
    return {
        "machine": setup.on.label,
        "drafter": None if setup.drafter is None else setup.drafter.model_type,
        "batch": setup.batch,
        "context": setup.context,
        "memory_gb": {k: v / 1e9 for k, v in need.items()},
        "fits": need["total"] * 1.05 < setup.on.memory * 1e9,
        "acceptance": accept.said,
        "plain_ms": points[0].cycle_ms,
        "plain_parts_ms": {"bytes": 1e3 * moving[0], "arithmetic": 1e3 * moving[1], "kernels": 1e3 * moving[2]},
        "best_k": best.k,
        "best_ms": best.ms_per_token,
        "speedup": best.speedup,
        "tokens_per_second": 1e3 * setup.batch / best.ms_per_token,
        "points": [vars(p) for p in points],
        "why": explain(setup, accept, best),
    }


# ---- images and sound
# of the matrix rate: towers reach 21 to 40 % on an H200 from 266 tokens on
TOWER_REACH = 0.35
PROMPT_REACH = 0.5
CPU_RATE = 0.25  # of a CPU's 8-bit rate: a tower multiplies floats


@dataclass(frozen=True)
class SoftCost:
    """Cost of an image or a clip in a prompt: its soft tokens, the arithmetic of its tower and of the tokens, their
    time."""

    tokens: int
    tower_tflop: float
    tower_ms: float
    prompt_tflop: float
    prompt_ms: float


def image_costs(vision: VisionConfig, setup: Setup) -> list[SoftCost]:
    """One for each budget of `--image-tokens`; Gemma 3 has one."""
    budgets = (vision.tokens,) if vision.tokens else IMAGE_TOKENS
    return [soft_cost(tokens, vision.flops(tokens), setup) for tokens in budgets]


def audio_cost(audio: AudioConfig, setup: Setup) -> SoftCost:
    """Cost of the longest clip."""
    tokens = audio.num_tokens(round(MAX_SECONDS * SAMPLE_RATE))
    return soft_cost(tokens, audio.flops(tokens), setup)


def soft_cost(tokens: int, tower_flops: float, setup: Setup) -> SoftCost:
    rate = setup.on.rate * 1e9  # per millisecond
    tower_rate = rate * (TOWER_REACH if setup.on.overlaps else CPU_RATE)
    prompt_flops = flops(model_size(setup.target), tokens, setup.context, 0)
    return SoftCost(
        tokens=tokens,
        tower_tflop=tower_flops / 1e12,
        tower_ms=tower_flops / tower_rate,
        prompt_tflop=prompt_flops / 1e12,
        prompt_ms=prompt_flops / (rate * PROMPT_REACH),
    )


def explain(setup: Setup, accept: Acceptance, best: Point) -> list[str]:
    """Why speculation pays little or not at all here; empty where it does."""
    if best.speedup >= 1.3:
        return []
    out = []
    moving, working, own = verify_parts(setup, 4)
    plain = verify_seconds(setup, 0)
    ratio = (verify_seconds(setup, 4) + draft_seconds(setup, 4)) / plain
    if working > moving:
        bound = "is bound by arithmetic: a drafted token costs nearly as much as a decoded one"
        out.append(f"checking {5 * setup.batch} rows {bound}")
    if setup.target.moe is not None and verify_parts(setup, 4)[0] > 1.5 * verify_parts(setup, 0)[0]:
        size = model_size(setup.target)
        more = size.streamed(5 * setup.batch) / size.streamed(setup.batch)
        out.append(f"five tokens ask for {more:.1f} times the experts of one: a larger batch shares them")
    if draft_seconds(setup, 4) > 0.35 * plain:
        out.append(f"four drafter steps take {draft_seconds(setup, 4) / plain:.0%} of a plain step")
    if accept.tokens(4) < 2.0:
        out.append(f"only {accept.tokens(4):.2f} tokens per cycle at K=4; {ratio:.2f} would be needed to break even")
    if own > 0.5 * plain:
        out.append("kernel overhead is most of a step: a CUDA graph and fused kernels matter more than drafting")
    return out or [f"a K=4 cycle costs {ratio:.2f} plain steps and yields {accept.tokens(4):.2f} tokens"]
