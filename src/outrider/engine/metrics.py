"""What the engine counts. Torch-free; the server turns it into Prometheus text."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..types import Counts


@dataclass
class Metrics(Counts):
    requests: int = 0
    finished: dict[str, int] = field(default_factory=dict)  # by finish reason
    drafted_by_adapter: dict[str, int] = field(default_factory=dict)  # only of requests with an adapter
    accepted_by_adapter: dict[str, int] = field(default_factory=dict)
    steps: int = 0
    drafter_failures: int = 0
    preemptions: int = 0
    swapped_out: int = 0  # of them, whose K/V was kept on the host,
    swapped_in: int = 0  # and brought back
    swap_bytes: int = 0  # that they take there now
    prefix_pages_read: int = 0  # pages of K/V read back from the prefix store,
    prefix_pages_written: int = 0  # and written to it
    step_seconds: float = 0.0
    prefill_seconds: float = 0.0
    running: int = 0
    waiting: int = 0
    kv_bytes: int = 0  # memory that K/V holds
    free_pages: dict[str, int] = field(default_factory=dict)
