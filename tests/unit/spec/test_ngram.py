"""The index against a search through the whole text."""

import random
import sys

from outrider.spec.ngram import REACH, TRIES, NgramIndex


def longest(tokens: list[int]) -> int:
    """Length of the longest end of the text (at least 2) that also occurs earlier."""
    best = 0
    for at in range(len(tokens) - 1):
        n = 0
        while n <= at and tokens[at - n] == tokens[-1 - n]:
            n += 1
        best = max(best, n)
    return min(best, REACH) if best >= 2 else 0


def test_finds_the_longest_match_at_every_step():
    rng = random.Random(0)
    for trial in range(30):
        base = [rng.randrange(50) for _ in range(40)]
        text = base + base[rng.randrange(20) :] + [rng.randrange(50) for _ in range(10)] + base[5:30]
        index = NgramIndex()
        tokens = []
        for step, token in enumerate(text):
            index.extend([token])
            tokens.append(token)
            if trial % 3 and step % trial:
                continue  # not asked at every step
            guess, length = index.propose(4)
            assert min(length, REACH) == longest(tokens)
            assert bool(guess) == (length > 0)
            if guess:
                end = tokens[-length:]
                assert any(
                    tokens[i : i + length] == end and (tokens + guess)[i + length] == guess[0]
                    for i in range(len(tokens) - length)
                )


def test_a_copied_passage_is_predicted_to_its_end():
    passage = list(range(100, 160))
    index = NgramIndex([*passage, 1, 2, 3, *passage[:3]])
    guess, length = index.propose(16)
    assert guess == passage[3:19] and length == 3
    index.extend(guess)
    assert index.propose(8) == (passage[19:27], 19)


def test_periodic_text_goes_round():
    assert NgramIndex([7, 8, 9, 7, 8, 9, 7, 8]).propose(5)[0] == [9, 7, 8, 9, 7]
    assert NgramIndex([5] * 6).propose(4)[0] == [5] * 4


def test_the_longer_match_beats_the_later_one():
    index = NgramIndex([1, 2, 3, 4, 50, 9, 9, 3, 4, 60, 9, 9, 1, 2, 3, 4])
    assert index.propose(1) == ([50], 4)


def test_no_match_no_draft():
    assert NgramIndex().propose(4) == ([], 0)
    assert NgramIndex([1]).propose(4) == ([], 0)
    assert NgramIndex(range(50)).propose(4) == ([], 0)


def test_work_per_token_is_bounded():
    """A constant text makes every chain as long as it gets: the steps of one proposal must not grow with it."""

    def steps(size: int) -> int:
        index = NgramIndex([1, 1, 2] * size + [1])
        count = 0
        index.match()  # the text so far enters the tables once
        index.extend([1])

        def trace(frame, event, arg):
            nonlocal count
            count += event == "line"
            return trace

        sys.settrace(trace)
        index.propose(4)
        sys.settrace(None)
        return count

    assert steps(2000) <= steps(200) + 5 <= 20 * TRIES * REACH
