"""How many prompt tokens a step may have. Torch-free.

Next to decoding sequences, prompt tokens may make a step at most `MAX_SLOWDOWN` times as long (on a CPU up to 16 of
them `MAX_SLOWDOWN_FEW_ROWS` times), by the measured time of a step and of a prompt row (`observe`). If many sequences
wait for prefill, or none decodes, whole prefill passes run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..models.inspect import flops, model_size, row_numbers

if TYPE_CHECKING:
    from ..models.config import ModelConfig
    from ..ops.backend import Capabilities

# times a step without prompts; streams notice three
MAX_SLOWDOWN = 2.3
MAX_SLOWDOWN_FEW_ROWS = 3.0
FEW_ROWS = 64  # rows: a smaller pass is bound by reading the weights, so it does not show the cost of a row
EARLIER_WEIGHT = 0.85  # decay of earlier measurements
BUDGET_MULTIPLE = (
    256  # budgets are multiples of this if many sequences wait: few numbers of rows to compile kernels for
)
# operations of a prefill pass, a quarter of a second on an H200: the longest delay of running streams
MAX_PASS_FLOPS = 1.25e14
MIN_PASS_ROWS = 2048  # minimum rows of such a pass: with fewer the tensor cores would wait for memory
# rows of captured prefill passes: from 256 on at most a fifth is padding
CAPTURED_ROWS = (16, 64, 128, 256, 320, 384, 448, 512, 640, 768, 896, 1024, 1280, 1536, 1792, 2048)
LAUNCH_FLOPS = 1.6e13  # operations in 30 ms on an H200, the host's minimum time to launch a pass kernel by kernel
HIDDEN_LAUNCHES = 3  # times that work, and the host is far enough ahead for launches to cost nothing
MAX_STREAMING_CLIENTS = 3  # clients with streams among which a step's time is divided on a CPU; more count as this many
WARMUP_ROWS = (64, 128, 256, 512, 768, 1024, 1536, 2048)  # those that a server captures before its first request


@dataclass
class PrefillBudget:
    chunk: int  # of one sequence
    batched: int = 0  # of all, if many wait for prefill; 0: never more than a chunk and a quarter
    idle: int = 0  # of all, if no sequence decodes, or at least a fifth of all sequences wait for prefill
    with_decodes: int = 0  # of all in a step with decoding sequences, until prompts may be packed; 0: a chunk
    choices: Sequence[int] = ()  # possible values of `with_decodes`; none: it stays
    _least: int = field(init=False)  # `with_decodes` never falls below a quarter of what it was
    _few: int = field(init=False)  # on a CPU: what it was; 0: on a GPU
    _plain: float = 0.0  # seconds of a step without prompts
    _row: float = 0.0  # seconds of a row

    def __post_init__(self) -> None:
        self.idle = max(self.idle, self.batched)
        rows = self.with_decodes
        self._least = rows // 4
        self._few = rows if rows <= FEW_ROWS else 0

    @classmethod
    def of(cls, model: ModelConfig, can: Capabilities, chunk: int, spare: int) -> PrefillBudget:
        """spare: bytes of a GPU outside the share granted to weights, K/V and activations."""
        batched = max_batched_prefill(model, can.packed_rows)
        beside = prefill_with_decodes(model, can.prefill_with_decodes, can.prefill_flops_with_decodes, most=chunk)
        few = (beside // 4, beside // 2, *range(beside, chunk + 1, max(1, beside)))
        choices = WARMUP_ROWS if beside > FEW_ROWS else few
        return cls(chunk, batched, prefill_idle(model, batched, can.packed_rows, spare=spare), beside, choices)

    def tokens(self, decoding: int, waiting: int) -> tuple[int, bool]:
        """Prompt tokens of a step, and whether decoding sequences limit them."""
        if waiting and 4 * waiting >= decoding:
            crowd = self.idle
        else:  # fewer, the smaller the share of sequences that wait for prefill
            share = self.batched * (5 * waiting) ** 2 // max(1, decoding) ** 2
            crowd = min(self.batched, share // BUDGET_MULTIPLE * BUDGET_MULTIPLE)
        if decoding and 0 < self.with_decodes >= crowd:
            return self.with_decodes, True
        return max(self.chunk + self.chunk // 4, crowd), False  # a quarter: short prompts ride along with a long one

    @property
    def rows_are_dear(self) -> bool:
        """True on a CPU: each row, of a prompt or of a sequence that decodes, makes a step longer."""
        return self._few > 0

    def charge(self, rows: int, num_streaming: int, num_prompting: int) -> float:
        """Steps without its prompts that a client owes for these rows, next to other clients' streams. On a CPU the
        prompts of all clients (`num_prompting`) together have as much time as one stream."""
        if not self.rows_are_dear:
            return 0.0
        if self._row > 0.0 and self._plain > 0.0:
            return self.charge_seconds(rows * self._row, num_streaming, num_prompting)
        return rows / self.with_decodes * min(num_streaming, MAX_STREAMING_CLIENTS) * num_prompting

    def charge_seconds(self, seconds: float, num_streaming: int, num_prompting: int) -> float:
        """Steps that a client owes for other work that took so long, next to other clients' streams."""
        if not self.rows_are_dear:
            return 0.0
        steps = seconds / self._plain if self._plain > 0.0 else 1.0
        return steps * min(num_streaming, MAX_STREAMING_CLIENTS) * num_prompting

    def observe(self, rows: int, seconds: float) -> None:
        """Report the time of a step with this many prompt rows (with padding). An outlier counts little."""
        if not self.with_decodes or not self.choices:
            return
        if not rows:
            self._plain = _mixed(self._plain, seconds)
        elif self._plain and rows >= (self.with_decodes // 2 if self._few else FEW_ROWS):
            self._row = _mixed(self._row, max(0.0, seconds - self._plain) / rows)
            if self._row > 0.0:
                fit = [n for n in self.choices if n >= self._least and self._fits(n)]
                self.with_decodes = max(fit, default=self._least)

    def _fits(self, rows: int) -> bool:
        """True if a step with so many prompt rows is not too long for the streams."""
        slowdown = MAX_SLOWDOWN_FEW_ROWS if rows <= self._few else MAX_SLOWDOWN
        return rows * self._row <= (slowdown - 1) * self._plain


def _mixed(before: float, now: float) -> float:
    return EARLIER_WEIGHT * before + (1 - EARLIER_WEIGHT) * min(now, 3 * before) if before else now


def max_batched_prefill(model: ModelConfig, most: int) -> int:
    """Prompt tokens of all sequences in one pass; more for a small model, whose passes are short."""
    rows = most
    size = model_size(model)
    while rows > MIN_PASS_ROWS and flops(size, rows, 0, head_rows=0) > MAX_PASS_FLOPS:
        rows //= 2
    return rows


def prefill_with_decodes(model: ModelConfig, rows: int, work: float, most: int) -> int:
    """Prompt tokens next to decoding: `rows`, or up to `most` if these take at most `work` operations."""
    size = model_size(model)
    while rows and 2 * rows <= most and flops(size, 2 * rows, 0, head_rows=0) <= work:
        rows *= 2
    return rows


def prefill_idle(model: ModelConfig, rows: int, most: int, spare: int) -> int:
    """Prompt tokens while none decodes: `rows` to `most`, their activations at most a quarter of `spare` bytes."""
    while most > rows and 2 * most * row_numbers(model) > spare // 4:
        most //= 2
    return max(rows, most)


def max_prefill_rows(model: ModelConfig, can: Capabilities) -> int:
    """Rows of the largest captured pass: the device runs it in no more time than the host needs to launch it."""
    work = model_size(model)
    fit = [n for n in CAPTURED_ROWS if n <= can.independent_rows and flops(work, n, 0, head_rows=0) <= LAUNCH_FLOPS]
    return max(fit, default=0) if can.prompts_independent else 0


def max_packed_rows(model: ModelConfig, can: Capabilities, captured: int, spare: int) -> int:
    """Rows of several chunks in one pass: as many as are captured, or more, kernel by kernel, if the host's launches
    are hidden and memory allows. A mixture reads all its experts in every pass, so it gains most."""
    if flops(model_size(model), can.independent_rows, 0, head_rows=0) <= HIDDEN_LAUNCHES * LAUNCH_FLOPS:
        return captured
    return prefill_idle(model, MIN_PASS_ROWS, can.independent_rows, spare=spare)
