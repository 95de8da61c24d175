"""Drafts that branch: how the rows of a verify pass stand to one another, and how the target's choices walk through
them.

A tree's root is the sequence's newest token; every drafted token follows another row of the sequence. A row sees the
committed text and its own ancestors, in the order of positions, so it computes what plain decoding would compute there
(SpecInfer, Miao et al. 2023, masks the same way). The target chooses at every row with noise that depends on (seed,
position) alone; the walk starts at the root and goes to the child that holds the choice, as long as there is one. Which
rows stand beside a path changes nothing on it.

Rows are written behind the committed length in the order of their numbers; those of the accepted path are then moved to
their positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..ops.backend import Backend
from ..types import Matcher, Verdict
from .grammar import unpacked


@dataclass(frozen=True)
class Tree:
    """The rows of all sequences of a pass, one sequence after the other."""

    depth: Tensor  # int64 [R] 0: the newest token
    # int32 [R, D + 1] the row (counted within the sequence) at each depth up to its own; behind that, itself
    ancestors: Tensor
    parent_rows: Tensor  # int64 [R] the parent (counted over all rows); -1 at a root
    limit: Tensor | None = None  # int64 [B] most drafted tokens that a sequence may take; None: as many as there are

    @staticmethod
    def of(parents: Sequence[Sequence[int]], device: torch.device) -> Tree:
        """`parents[b][j - 1]`: the row that row j of sequence b follows."""
        ancestors: list[list[int]] = []
        parent_rows: list[int] = []
        for line in parents:
            first = len(ancestors)
            ancestors.append([0])
            parent_rows.append(-1)
            for j, parent in enumerate(line, 1):
                ancestors.append([*ancestors[first + parent], j])
                parent_rows.append(first + parent)
        depth = [len(path) - 1 for path in ancestors]
        wide = max(depth) + 1
        filled = [path + [path[-1]] * (wide - len(path)) for path in ancestors]
        return Tree(
            torch.tensor(depth, dtype=torch.int64, device=device),
            torch.tensor(filled, dtype=torch.int32, device=device),
            torch.tensor(parent_rows, dtype=torch.int64, device=device),
        )

    @property
    def deepest(self) -> int:
        return self.ancestors.shape[1] - 1

    def lines(self, ids: Tensor, start: Tensor, seq: Tensor) -> Tensor:
        """[R, D]: the drafted tokens up to and including each row's own; `ids` [R] are the rows' tokens."""
        return ids[start[:-1][seq][:, None] + self.ancestors[:, 1:]]

    def accept_path(self, chosen: Tensor, ids: Tensor, start: Tensor, seq: Tensor, ops: Backend) -> Verdict:
        """Where the target's choices [R] lead among the rows' tokens [R]."""
        accepted, tokens, rows = ops.accept_path(chosen, ids, self.parent_rows, seq, start, self.deepest, self.limit)
        return Verdict(accepted, tokens, accepted + 1, rows)


def grammar_masks(
    matchers: Sequence[Matcher | None], parents: Sequence[Sequence[int]], drafts: Sequence[Sequence[int]], vocab: int
) -> Tensor:
    """bool [R, V]: what each row's grammar (None: anything) allows after the drafted tokens on its path."""
    parts = []
    for matcher, parent_rows, tokens in zip(matchers, parents, drafts):
        mask = torch.ones((len(parent_rows) + 1, vocab), dtype=torch.bool)
        if matcher is not None:
            leaves = set(range(1, len(parent_rows) + 1)) - set(parent_rows) or {0}
            for leaf in leaves:
                path = [leaf]
                while path[-1]:
                    path.append(parent_rows[path[-1] - 1])
                path.reverse()
                masks = unpacked(matcher.bits([tokens[row - 1] for row in path[1:]]), vocab)
                for row, allowed in zip(
                    path, torch.from_numpy(masks)
                ):  # none for rows behind a draft that left the grammar: never reached
                    mask[row] = allowed
        parts.append(mask)
    return torch.cat(parts)
