"""Tensor parallelism, one model over several processes: `process_group` (start-up and collectives), `watch` (detects
lost peers), `broadcast` (rank 0 schedules, the other ranks follow). `models.split` divides the weights."""

from .broadcast import Leader, follow
from .process_group import DEVICE_ENV, PeerLost, ProcessGroup, follow_to_the_end, is_worker, join

__all__ = ["DEVICE_ENV", "Leader", "PeerLost", "ProcessGroup", "follow", "follow_to_the_end", "is_worker", "join"]
