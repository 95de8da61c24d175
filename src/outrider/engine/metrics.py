"""What the engine counts. Torch-free; the server turns it into Prometheus text."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..types import MAX_DRAFT


@dataclass
class Metrics:
    requests: int = 0
    finished: dict[str, int] = field(default_factory=dict)  # by finish reason
    prompt_tokens: int = 0
    cached_tokens: int = 0
    new_tokens: int = 0
    steps: int = 0
    cycles: int = 0  # decode rows: one a sequence and step
    drafted: int = 0
    accepted: int = 0
    drafted_by_position: list[int] = field(default_factory=lambda: [0] * MAX_DRAFT)
    accepted_by_position: list[int] = field(default_factory=lambda: [0] * MAX_DRAFT)
    trees: int = 0  # as in RequestStats
    branched: int = 0
    drafter_failures: int = 0
    preemptions: int = 0
    step_seconds: float = 0.0
    prefill_seconds: float = 0.0
    running: int = 0
    waiting: int = 0
    free_pages: dict[str, int] = field(default_factory=dict)
