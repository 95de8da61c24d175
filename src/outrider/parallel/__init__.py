"""Tensor parallelism, one model over several processes: `process_group` (start-up and collectives), `watch` (detects
lost peers), `broadcast` (rank 0 schedules, the other ranks follow). `models.split` divides the weights."""

from .broadcast import Leader, follow
from .process_group import STARTED_BY_US, PeerLost, ProcessGroup, follow_to_the_end, is_worker, join

__all__ = ["STARTED_BY_US", "Leader", "PeerLost", "ProcessGroup", "follow", "follow_to_the_end", "is_worker", "join"]
