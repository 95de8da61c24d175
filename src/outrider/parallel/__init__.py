"""One model over several processes: `team` (who they are, what they exchange), `watch` (nobody dies unseen), `lead` (rank 0 schedules,
the others follow). What is whose is said by `models.split`."""

from .lead import Leader, follow
from .team import STARTED_BY_US, Parted, Team, follow_to_the_end, is_worker, join

__all__ = ["STARTED_BY_US", "Leader", "Parted", "Team", "follow", "follow_to_the_end", "is_worker", "join"]
