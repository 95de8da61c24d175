"""The walk over an answer, the summary, and the K it suggests."""

from __future__ import annotations

import numpy as np
import pytest

from outrider.train.evaluate import best_k, cycle_costs, summary, walk


@pytest.mark.parametrize("k", [1, 3, 5])
def test_the_walk_visits_what_decoding_would(k: int) -> None:
    right = np.random.default_rng(k).integers(0, 7, 60)
    for i in range(60):  # no more matches than tokens that are left
        right[i] = min(right[i], 59 - i)
    at = cycles = 0
    reached = np.zeros(k, dtype=int)
    while at < 60:
        accepted = min(right[at], k)
        reached[:accepted] += 1
        cycles = cycles + 1
        at = at + accepted + 1
    tokens, walked, by_position = walk(right, k)
    assert (tokens, walked) == (60, cycles) and by_position.tolist() == reached.tolist()


def test_summary_weighs_tokens_and_categories() -> None:
    perfect = np.array([4, 3, 2, 1, 0])
    hopeless = np.zeros(5, dtype=int)
    result = summary([perfect, hopeless], ["a", "b"], most=6)
    assert result["by_category"] == {"a": 5.0, "b": 1.0}
    assert result["tokens_per_cycle"][4] == round(10 / 6, 4) and result["tokens_per_cycle"][1] == round(10 / 8, 4)
    assert result["acceptance_by_position"][:4] == [round(1 / 6, 4)] * 4 and len(result["acceptance_by_position"]) == 6
    assert result["first_position_all_anchors"] == 0.4


def test_dear_drafts_mean_short_drafts() -> None:
    per = {k: 1 + sum(0.7**i for i in range(1, k + 1)) for k in range(1, 17)}
    ks = [best_k(per, cycle_costs(cost)) for cost in (0.0, 0.05, 0.2, 0.6)]
    assert ks == sorted(ks, reverse=True) and ks[0] > ks[-1] == 1


def test_plain_decoding_is_one_of_the_choices() -> None:
    """A drafter that is never right, or a machine on which rows are dear, was told to draft one token."""
    per = {k: 1 + sum(0.5**i for i in range(1, k + 1)) for k in range(1, 17)}
    assert best_k(per, cycle_costs(0.6)) == 0
    assert best_k(dict.fromkeys(per, 1.0), cycle_costs(0.0)) == 0
    measured = [1.0, 1.1, 1.2, 1.9, *(2.0 + k for k in range(13))]  # three rows are nearly free, four are not
    assert best_k({k: 1 + sum(0.8**i for i in range(1, k + 1)) for k in range(1, 17)}, measured) == 2
