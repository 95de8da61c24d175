"""One model over several processes: `process_group` (who they are, what they exchange), `watch` (lost peers are
noticed), `broadcast` (rank 0 schedules, the others follow). `models.split` says which part is whose."""

from .broadcast import Leader, follow
from .process_group import STARTED_BY_US, PeerLost, ProcessGroup, follow_to_the_end, is_worker, join

__all__ = ["STARTED_BY_US", "Leader", "PeerLost", "ProcessGroup", "follow", "follow_to_the_end", "is_worker", "join"]
