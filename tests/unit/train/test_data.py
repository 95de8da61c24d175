"""Prompt files, files of sequences, and batches: which anchors count and what they are compared with."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

from outrider.train.data import Sequences, make_batch, plan_epoch, prefetch
from outrider.train.run import trim_log
from outrider.types import OutriderError


def some(count: int = 40, seed: int = 0) -> Sequences:
    rng = np.random.default_rng(seed)
    num_given = rng.integers(1, 30, count)
    num_answered = rng.integers(0, 20, count)
    return Sequences.of(
        [rng.integers(0, 200, a + b) for a, b in zip(num_given, num_answered, strict=True)],
        num_given,
        range(count),
        num_answered > 9,
        200,
    )


def test_a_file_that_was_cut_off_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "data.npz"
    some().save(path)
    whole = path.read_bytes()
    for size in (0, 40, len(whole) // 2, len(whole) - 3):
        path.write_bytes(whole[:size])
        with pytest.raises(OutriderError, match="not a file of token sequences"):
            Sequences.load(path)


def test_a_log_that_was_cut_off_is_continued(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text('{"step": 1}\n{"step": 5}\n{"step": 3}\n{"step": 2, "lo')
    trim_log(path, 3)
    assert path.read_text() == '{"step": 1}\n{"step": 3}\n'
    trim_log(tmp_path / "none", 3)


def test_sequences_come_back_whole(tmp_path: Path) -> None:
    data = some()
    data.seeds = np.arange(len(data)) * 7
    order = np.random.default_rng(1).permutation(len(data))
    Sequences.join([data.select(order[:25]), data.select(order[25:])]).save(tmp_path / "data.npz")
    back = Sequences.load(tmp_path / "data.npz")
    assert not list(tmp_path.glob("*.part")) and back.answer_tokens == data.answer_tokens
    for row, i in enumerate(order):
        assert np.array_equal(back[row], data[i]) and back.seeds[row] == 7 * i
        assert (back.prompts[row], back.index[row], back.greedy[row]) == (
            data.prompts[i],
            data.index[i],
            data.greedy[i],
        )
    (tmp_path / "data.npz").write_bytes(b"half a file")
    with pytest.raises(OutriderError, match=r"data\.npz: not a file of token sequences"):
        Sequences.load(tmp_path / "data.npz")


def test_anchors_and_what_they_are_compared_with() -> None:
    """By the definition: from anchor a, step j is fed token a + j and judged by the target's distribution there."""
    data = some(12)
    steps = 3
    which = np.nonzero(data.lengths - data.prompts >= 2)[0]
    batch = make_batch(data, which, steps)
    width = batch.ids.shape[1]
    queries = width - batch.first
    assert batch.first == min(int(data.prompts[i]) for i in which) - 1
    for j in range(1, steps + 1):
        want = [
            (row, a, row * width + a + j)
            for row, i in enumerate(which)
            for a in range(int(data.prompts[i]) - 1, len(data[i]) - 1 - j)
        ]
        got = [
            (int(r) // queries, int(r) % queries + batch.first, int(batch.teacher[t]))
            for r, t in zip(batch.anchors[j - 1], batch.targets[j - 1], strict=True)
        ]
        assert got == want
    for row, i in enumerate(which):
        assert np.array_equal(batch.ids[row, : len(data[i])].numpy(), data[i])


def test_an_epoch_takes_every_sequence_once() -> None:
    data = some(200)
    usable = set(np.nonzero(data.lengths - data.prompts >= 2)[0].tolist())
    plan = plan_epoch(data, 300, 900, seed=3, epoch=0)
    assert sorted(int(i) for b in plan for i in b) == sorted(usable) and len(plan) > 5
    for b in plan:
        longest = int(data.lengths[b].max())
        shortest = int(data.prompts[b].min()) - 1
        assert len(b) == 1 or (len(b) * (longest - shortest) <= 300 and len(b) * longest <= 900)
    again = plan_epoch(data, 300, 900, 3, 0)
    other = plan_epoch(data, 300, 900, 3, 1)
    assert all(np.array_equal(a, b) for a, b in zip(plan, again, strict=True))
    assert [b.tolist() for b in other] != [b.tolist() for b in plan]
    with pytest.raises(OutriderError, match="nothing to learn from"):
        plan_epoch(data.select(np.nonzero(data.lengths - data.prompts < 2)[0]), 300, 900, 0, 0)


def test_prefetch_that_is_left_early_leaves_no_thread() -> None:
    before = set(threading.enumerate())
    items = prefetch(iter(range(1000)), 2)
    assert next(items) == 0 and set(threading.enumerate()) > before
    items.close()  # type: ignore[attr-defined]
    assert set(threading.enumerate()) <= before  # others may have ended meanwhile


def test_prefetch_keeps_the_order_and_the_error() -> None:
    assert list(prefetch(iter(range(20)), 3)) == list(range(20))

    def broken():
        yield 1
        raise ValueError("in the thread")

    items = prefetch(broken())
    assert next(items) == 1
    with pytest.raises(ValueError, match="in the thread"):
        next(items)


def test_batches_are_mostly_answers() -> None:
    """Catches: an order in which a batch that spans two lengths of prompts holds the longest and the shortest answers
    together."""
    rng = np.random.default_rng(0)
    prompt_lengths = np.exp(rng.normal(5, 0.8, 4000)).astype(int).clip(20, 1000)
    answer_lengths = np.where(rng.random(4000) < 0.5, 256, rng.integers(4, 256, 4000))
    data = Sequences.of(
        [np.zeros(n, int) for n in prompt_lengths + answer_lengths],
        prompt_lengths,
        range(4000),
        answer_lengths > 9,
        200,
    )
    queries = sum(
        len(b) * (data.lengths[b].max() - data.prompts[b].min() + 1) for b in plan_epoch(data, 4096, 16384, 0, 0)
    )
    assert (answer_lengths - 1).sum() > 0.8 * queries  # 0.78 where answers rise in every bucket
