"""Predicts memory, ms per token and the best K from config.json and a table of machines, before any download.

A step over R rows (sequences × (K + 1)) moves bytes while it multiplies (on a CPU: one after the other), and has a
fixed overhead per kernel and a cost per further row and layer:

    step(R) = norm(weights(R) / (bandwidth · reach), flops(R) / (matrix rate · reach))
              + K/V / (bandwidth · reach) + kernels · overhead + layers · (R - 1)^power · row

`weights` counts each weight once for all rows (in a mixture of experts: the experts that R tokens are expected to
choose). The constants (`bench.rates`) are fitted to our engine's measured steps on an H200 by tools/fit_predict.py;
elsewhere bandwidth and rate are the vendors' and the constants are those of the H200, and `basis` says so. Torch-free.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from ..models.audio_config import MAX_SECONDS, SAMPLE_RATE, AudioConfig
from ..models.config import DrafterConfig, ForeignDict, ModelConfig
from ..models.inspect import drafter_size, flops, kv_bytes, model_size
from ..models.vision_config import IMAGE_TOKENS, VisionConfig
from ..types import MAX_DRAFT, bad_input
from .machines import Hardware
from .rates import CELLS, CONTEXT, FEW_ROWS, PARAMETERS

# launched per layer, counted: four products, attention and its combine, two norms with their residuals, rope and write
KERNELS = 9
HEAD_KERNELS = 21  # and whatever else is outside the layers, counted


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
        probability per token. '0.84,0.60,0.39': the probabilities that the first 1, 2, 3 … tokens are right."""
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
        """Acceptance from the probabilities that the first 1, 2, 3 … tokens are right; beyond the last they fall at the
        same rate."""
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
    """The conditional probability, equal for all positions, that a drafted token is right, such that `share` of k
    tokens is accepted."""
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
    weight_bytes: float = 2.0  # average bytes per weight that a token reads
    kv_item: float = 2.0  # bytes per number of K/V
    gpus: int = 1  # cards that share the weights


@dataclass(frozen=True)
class PassWork:
    """Bytes, operations and kernels of one pass."""

    dense_bytes: float
    expert_bytes: float
    kv_bytes: float
    operations: float
    rows: int
    layers: int
    kernels: int
    ple_layers: int
    moe_layers: int
    weight_bytes: float  # per weight


def verify_work(setup: Setup, k: int) -> PassWork:
    """The work of the target's pass over K drafted tokens and one more of every sequence."""
    config = setup.target
    size = model_size(config)
    rows = setup.batch * (k + 1)
    experts = size.streamed_experts(rows)
    kv = rows * kv_bytes(config, 1, setup.kv_item)
    kv += setup.batch * kv_bytes(config, setup.context, setup.kv_item, read=True)
    layers = len(config.layers)
    return PassWork(
        dense_bytes=(size.streamed(rows) - experts) * setup.weight_bytes / setup.gpus,
        expert_bytes=experts * setup.weight_bytes / setup.gpus,
        kv_bytes=kv / setup.gpus,
        operations=setup.batch * flops(size, k + 1, setup.context, head_rows=k + 1) / setup.gpus,
        rows=rows,
        layers=layers,
        kernels=layers * KERNELS + HEAD_KERNELS,
        ple_layers=layers if config.ple_dim else 0,
        moe_layers=layers if config.moe else 0,
        weight_bytes=setup.weight_bytes,
    )


@dataclass(frozen=True)
class PassTime:
    """Seconds of one pass by cause. Moving bytes and arithmetic overlap on a GPU."""

    moving: float  # weights
    working: float
    kv: float  # reading and writing K/V
    fixed: float  # kernels, and work per row
    sharpness: float

    @property
    def total(self) -> float:
        power = self.sharpness
        return (self.moving**power + self.working**power) ** (1 / power) + self.kv + self.fixed


def pass_time(work: PassWork, on: Hardware) -> PassTime:
    rates = on.rates
    reach = rates.reach16
    rate = rates.rate16
    if work.weight_bytes < 1.5:
        reach = rates.reach8 if work.weight_bytes >= 0.8 else rates.reach4
        rate = rates.narrow_rate_few if work.rows <= FEW_ROWS else rates.narrow_rate
    dense = work.dense_bytes / reach
    experts = work.expert_bytes / (reach * rates.expert_reach)
    fixed_us = work.kernels * rates.kernel_us + work.ple_layers * rates.ple_us + work.moe_layers * rates.moe_us
    fixed_us += work.layers * rates.row_us * (work.rows - 1) ** rates.row_power
    bytes_per_second = on.bandwidth * 1e9
    return PassTime(
        moving=(dense + experts) / bytes_per_second,
        working=work.operations / (on.rate * 1e12 * rate),
        kv=work.kv_bytes / rates.kv_reach / bytes_per_second,
        fixed=1e-6 * fixed_us,
        sharpness=rates.sharpness,
    )


def verify_time(setup: Setup, k: int) -> PassTime:
    return pass_time(verify_work(setup, k), setup.on)


def verify_seconds(setup: Setup, k: int) -> float:
    return verify_time(setup, k).total


@dataclass(frozen=True)
class DraftWork:
    """Bytes, operations and layers of one step of an MTP drafter."""

    weight_bytes: float
    kv_bytes: float
    operations: float
    layers: int
    rows: int


def draft_work(setup: Setup) -> DraftWork | None:
    """Work of one draft step; None without a drafter: n-gram matches take no time."""
    config = setup.drafter
    if config is None:
        return None
    size = drafter_size(config)
    narrow = not config.clusters and setup.on.narrow_drafter
    per_weight = min(1.0, setup.weight_bytes) if narrow else setup.weight_bytes
    return DraftWork(
        weight_bytes=size.step * per_weight,
        kv_bytes=setup.batch * kv_bytes(config, setup.context, setup.kv_item, read=True),
        operations=2.0 * setup.batch * size.step,
        layers=len(config.layers),
        rows=setup.batch,
    )


def draft_step_time(work: DraftWork, on: Hardware) -> PassTime:
    rates = on.rates
    bytes_per_second = on.bandwidth * 1e9
    fixed_us = work.layers * rates.draft_layer_us + rates.draft_head_us
    fixed_us += work.layers * rates.row_us * (work.rows - 1) ** rates.row_power
    return PassTime(
        moving=work.weight_bytes / rates.reach16 / bytes_per_second,
        working=work.operations / (on.rate * 1e12 * rates.rate16),
        kv=work.kv_bytes / rates.kv_reach / bytes_per_second,
        fixed=1e-6 * fixed_us,
        sharpness=rates.sharpness,
    )


def draft_seconds(setup: Setup, k: int) -> float:
    """Seconds of k steps of the drafter, one after the other."""
    work = draft_work(setup)
    return 0.0 if work is None else k * draft_step_time(work, setup.on).total


@dataclass(frozen=True)
class Point:
    k: int
    cycle_ms: float
    tokens: float  # per cycle and sequence
    ms_per_token: float  # for one sequence
    speedup: float


def sweep(setup: Setup, accept: Acceptance) -> list[Point]:
    plain = verify_seconds(setup, 0)
    out = []
    for k in range(MAX_DRAFT + 1):
        seconds = draft_seconds(setup, k) + verify_seconds(setup, k)
        tokens = accept.tokens(k)
        out.append(
            Point(
                k, 1e3 * seconds, tokens=tokens, ms_per_token=1e3 * seconds / tokens, speedup=plain * tokens / seconds
            )
        )
    return out


def basis(setup: Setup) -> str:
    """One sentence on whether this was measured, and if not, how far the prediction is from a measurement."""
    if not setup.on.measured:
        how = "bandwidth and arithmetic of this machine" if "(measured)" in setup.on.label else "vendor's figures"
        return f"not measured: {how}, with the shares of them that our kernels reach elsewhere"
    bits = 16
    if setup.weight_bytes < 1.5:
        bits = 8 if setup.weight_bytes >= 0.8 else 4
    parameters = model_size(setup.target).total
    cells = [cell for cell in CELLS if PARAMETERS[cell.size] == parameters and cell.bits == bits]
    if not cells:
        return f"not measured: no cycle of this model in {bits} bits is among the published measurements"
    batches = sorted({cell.batch for cell in cells})
    listed = f"{cells[0].size} in {bits} bits with {', '.join(map(str, batches))} sequences of {CONTEXT:,} tokens"
    if setup.batch > batches[-1] or setup.gpus > 1 or not CONTEXT / 4 <= setup.context <= CONTEXT * 4:
        return f"not measured: the published measurements are {listed}, on one card"
    return f"fitted to measurements within 15 %: {listed}"


def predict(setup: Setup, accept: Acceptance) -> ForeignDict:
    """The speeds that `outrider predict` prints, as plain data."""
    points = sweep(setup, accept)
    best = max(points, key=lambda p: p.speedup)
    plain = verify_time(setup, 0)
    return {
        "machine": setup.on.label,
        "drafter": None if setup.drafter is None else setup.drafter.model_type,
        "batch": setup.batch,
        "context": setup.context,
        "acceptance": accept.said,
        "basis": basis(setup),
        "plain_ms": points[0].cycle_ms,
        "plain_parts_ms": {
            "weights": 1e3 * plain.moving,
            "arithmetic": 1e3 * plain.working,
            "K/V": 1e3 * plain.kv,
            "kernels": 1e3 * plain.fixed,
        },
        "best_k": best.k,
        "best_ms": best.ms_per_token,
        "speedup": best.speedup,
        "tokens_per_second": 1e3 * setup.batch / best.ms_per_token,
        "points": [vars(p) for p in points],
        "why": explain(setup, accept, best),
    }


# ---- images and sound
# share of the matrix rate: towers reach 21 to 40 % on an H200 from 266 tokens on
TOWER_REACH = 0.35
PROMPT_REACH = 0.5
CPU_RATE = 0.25  # share of a CPU's 8-bit rate: towers multiply floats


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
    """Cost of an image at each budget of `--image-tokens`; Gemma 3 has one budget."""
    budgets = (vision.tokens,) if vision.tokens else IMAGE_TOKENS
    return [soft_cost(tokens, vision.flops(tokens), setup) for tokens in budgets]


def audio_cost(audio: AudioConfig, setup: Setup) -> SoftCost:
    """Cost of the longest clip."""
    tokens = audio.num_tokens(round(MAX_SECONDS * SAMPLE_RATE))
    return soft_cost(tokens, audio.flops(tokens), setup)


def soft_cost(tokens: int, tower_flops: float, setup: Setup) -> SoftCost:
    rate = setup.on.rate * 1e9  # per millisecond
    tower_rate = rate * (CPU_RATE if setup.on.is_cpu else TOWER_REACH)
    prompt_flops = flops(model_size(setup.target), tokens, setup.context, head_rows=0)
    return SoftCost(
        tokens=tokens,
        tower_tflop=tower_flops / 1e12,
        tower_ms=tower_flops / tower_rate,
        prompt_tflop=prompt_flops / 1e12,
        prompt_ms=prompt_flops / (rate * PROMPT_REACH),
    )


def explain(setup: Setup, accept: Acceptance, best: Point) -> list[str]:
    """Reason why speculation gains little or nothing here; empty if it pays."""
    if best.speedup >= 1.3:
        return []
    reasons = []
    plain = verify_time(setup, 0)
    wide = verify_time(setup, 4)
    drafting = draft_seconds(setup, 4)
    ratio = (wide.total + drafting) / plain.total
    if wide.working > wide.moving:
        bound = "is bound by arithmetic: a drafted token costs nearly as much as a decoded one"
        reasons.append(f"checking {5 * setup.batch} rows {bound}")
    if setup.target.moe is not None and wide.moving > 1.5 * plain.moving:
        size = model_size(setup.target)
        more = size.streamed(5 * setup.batch) / size.streamed(setup.batch)
        reasons.append(f"five tokens ask for {more:.1f} times the experts of one: a larger batch shares them")
    if drafting > 0.35 * plain.total:
        reasons.append(f"four drafter steps take {drafting / plain.total:.0%} of a plain step")
    if accept.tokens(4) < 2.0:
        reasons.append(f"only {accept.tokens(4):.2f} tokens per cycle at K=4; {ratio:.2f} are needed to break even")
    if wide.fixed > 0.5 * plain.total:
        reasons.append("kernel overhead is most of a step: a CUDA graph and fused kernels matter more than drafting")
    return reasons or [f"a K=4 cycle costs {ratio:.2f} plain steps and yields {accept.tokens(4):.2f} tokens"]
