"""One model over several processes: `team` (who they are, what they exchange), `watch` (nobody dies unseen), `lead`
(rank 0 schedules, the others follow). What is whose is said by `models.split`."""

from .broadcast import Leader, follow
from .process_group import STARTED_BY_US, PeerLost, ProcessGroup, follow_to_the_end, is_worker, join

__all__ = ["STARTED_BY_US", "Leader", "PeerLost", "ProcessGroup", "follow", "follow_to_the_end", "is_worker", "join"]
