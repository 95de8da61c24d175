"""How many prompt tokens a step may have beside sequences that decode: as many as make it at most `LONGER` times as
long. Torch-free.

`PrefillBudget.observe` is told how long each step took and how many prompt rows it had (those that only filled up a
captured pass included). From that it estimates what a step without prompts takes and what a prompt row adds, so running
streams are held up by a long prompt as little on a large model as on a small one, at every batch; and a long prompt
gets about half of the time next to decode steps that take long, as those of several sequences with drafts do.
"""

from __future__ import annotations

from collections.abc import Sequence

LONGER = 2.3  # times a step without prompts; streams notice three
FEW = 64  # rows: a pass of fewer takes what reading the weights takes, which says nothing of a row
OLD = 0.85  # what the last measurement leaves of those before it


class PrefillBudget:
    def __init__(self, rows: int, choices: Sequence[int]) -> None:
        """`rows`: before anything is known. The budget never falls below a quarter of them; below all of them where
        they are few to begin with (a CPU)."""
        self.rows, self._least, self._choices = rows, rows // 4 if rows > FEW else rows, choices
        self._few = min(FEW, rows)
        self._plain = 0.0  # seconds of a step without prompts
        self._row = 0.0  # seconds of a row

    def observe(self, rows: int, seconds: float) -> None:
        """A step with so many rows of prompts took so long. What holds up a single step (another process, a first run)
        counts little."""
        if not rows:
            self._plain = self._mixed(self._plain, seconds)
        elif self._plain and rows >= self._few:
            self._row = self._mixed(self._row, max(0.0, seconds - self._plain) / rows)
            fit = (LONGER - 1) * self._plain / self._row if self._row else 0.0
            self.rows = max([n for n in self._choices if n <= fit], default=self._least) if fit else self.rows
            self.rows = max(self.rows, self._least)

    @staticmethod
    def _mixed(before: float, now: float) -> float:
        return OLD * before + (1 - OLD) * min(now, 3 * before) if before else now
