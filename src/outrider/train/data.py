"""Training data: token sequences on disk, batches out.

A dataset is one file of token ids (`data.npz`): small, because no hidden states are stored. It needs numpy and the
standard library only; batches hold torch tensors.
"""

from __future__ import annotations

import hashlib
import zlib
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar
from zipfile import BadZipFile

import numpy as np
import torch
from torch import Tensor

from ..types import bad_input, require

T = TypeVar("T")
DAMAGED = (OSError, KeyError, ValueError, EOFError, BadZipFile, zlib.error)  # errors of reading a broken file


def file_hash(path: str | Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# ---- token sequences ------------------------------------------------------------------------------------------------
@dataclass
class Sequences:
    """N token sequences, flat. The first `prompts[i]` tokens of sequence i were given, the rest is the answer."""

    tokens: np.ndarray  # uint16 or uint32 [total]
    lengths: np.ndarray  # int32 [N]
    prompts: np.ndarray  # int32 [N]
    index: np.ndarray  # int32 [N] the line of the prompt file it came from
    greedy: np.ndarray  # bool [N]
    seeds: np.ndarray  # int64 [N] of the engine's noise in a sampled answer

    def __len__(self) -> int:
        return len(self.prompts)

    def __getitem__(self, i: int) -> np.ndarray:
        return self.tokens[self.starts[i] : self.starts[i + 1]]

    @cached_property
    def starts(self) -> np.ndarray:  # int64 [N + 1]
        return np.concatenate([[0], self.lengths.cumsum()])

    @property
    def answer_tokens(self) -> int:
        return int(self.lengths.sum() - self.prompts.sum())

    @staticmethod
    def of(
        rows: Iterable[np.ndarray],
        prompts: Iterable[int],
        index: Iterable[int],
        greedy: Iterable[bool],
        vocab: int,
        seeds: Iterable[int] | None = None,
    ) -> Sequences:
        listed = list(rows)
        tokens = np.concatenate(listed).astype(np.uint16 if vocab <= 1 << 16 else np.uint32)
        noise = np.zeros(len(listed), np.int64) if seeds is None else np.fromiter(seeds, np.int64)
        lengths, prompt_lengths, lines = (np.fromiter(each, np.int32) for each in (map(len, listed), prompts, index))
        return Sequences(
            tokens, lengths, prompts=prompt_lengths, index=lines, greedy=np.fromiter(greedy, bool), seeds=noise
        )

    def select(self, which: np.ndarray) -> Sequences:
        """which: indices, or a mask [N]."""
        tokens = np.concatenate([self.tokens[:0], *(self[i] for i in np.arange(len(self))[which])])
        return Sequences(tokens, *(getattr(self, f.name)[which] for f in fields(self)[1:]))

    @staticmethod
    def join(parts: list[Sequences]) -> Sequences:
        return Sequences(*(np.concatenate([getattr(p, f.name) for p in parts]) for f in fields(Sequences)))

    def save(self, path: Path) -> None:
        """Atomic: the file is whole or absent."""
        part = path.with_suffix(".part")
        with open(part, "wb") as file:
            np.savez_compressed(file, **{f.name: getattr(self, f.name) for f in fields(self)})
        part.replace(path)

    @staticmethod
    def load(path: Path) -> Sequences:
        what = "not a file of token sequences"
        advice = "delete it, or choose another --out"
        with bad_input(DAMAGED, lambda e: f"{path}: {what} ({e}): {advice}"), np.load(path) as file:
            return Sequences(*(file[f.name] for f in fields(Sequences)))


# ---- batches --------------------------------------------------------------------------------------------------------
@dataclass
class TrainBatch:
    """B sequences padded on the right to T, and which rows count. Queries are positions first..T-1 (Tq of them)."""

    ids: Tensor  # int64 [B, T]
    teacher: Tensor  # int64 [N] rows of [B·T] whose next-token distribution is needed
    greedy: Tensor  # int64 [B] 1: a greedy answer
    first: int
    anchors: list[Tensor]  # per step j = 1..K: int64 [A_j] rows of [B·Tq]
    targets: list[Tensor]  # per step: int64 [A_j] which of the N teacher rows each anchor is compared with
    which: np.ndarray  # int64 [B] index of each sequence in the data
    most: int  # maximum anchors of one sequence

    def where(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Sequence and position of each of these rows of [B·Tq]."""
        width = self.ids.shape[1] - self.first
        return rows // width, rows % width + self.first

    def to(self, device: torch.device) -> TrainBatch:
        def move(x: Tensor) -> Tensor:
            return x.pin_memory().to(device, non_blocking=True)

        if device.type != "cuda":
            return self
        single: dict[str, Any] = {name: move(getattr(self, name)) for name in ("ids", "teacher", "greedy")}
        return replace(self, **single, anchors=[*map(move, self.anchors)], targets=[*map(move, self.targets)])


def make_batch(
    data: Sequences, which: np.ndarray, steps: int, multiple: int = 8, share: float = 1.0, seed: tuple[int, ...] = ()
) -> TrainBatch:
    """Anchors a of a sequence with p given tokens out of n: p-1 <= a, and step j is judged at position a+j <= n-2.
    share: fraction of each sequence's anchors, drawn by the seed."""
    lengths = data.lengths[which]
    prompt_lengths = data.prompts[which].astype(np.int64)
    width = -(-int(lengths.max()) // multiple) * multiple
    ids = np.zeros((len(which), width), dtype=np.int64)
    for row, i in enumerate(which):
        ids[row, : lengths[row]] = data[i]
    first = int(prompt_lengths.min()) - 1
    at = np.arange(width)[None, :]
    judged = (at >= prompt_lengths[:, None]) & (at <= lengths[:, None] - 2)  # [B, T]
    number = np.cumsum(judged.reshape(-1)).reshape(judged.shape) - 1
    anchors = []
    targets = []
    drawn = (at >= prompt_lengths[:, None] - 1) & (at <= lengths[:, None] - 3)  # [B, T]
    if share < 1.0:
        rank = np.where(drawn, np.random.default_rng(seed).random(drawn.shape), 2.0).argsort(1).argsort(1)
        drawn &= rank < np.ceil(share * drawn.sum(1, keepdims=True))
    for j in range(1, steps + 1):
        rows, columns = np.nonzero(drawn & (at <= lengths[:, None] - 2 - j))
        anchors.append(torch.from_numpy(rows * (width - first) + columns - first))
        targets.append(torch.from_numpy(number[rows, columns + j]))
    judged_rows = np.nonzero(judged.reshape(-1))[0]
    cold = data.greedy[which].astype(np.int64)
    padded, teacher, greedy = (torch.from_numpy(x) for x in (ids, judged_rows, cold))
    return TrainBatch(
        padded,
        teacher,
        greedy=greedy,
        first=first,
        anchors=anchors,
        targets=targets,
        which=which,
        most=int(drawn.sum(1).max()),
    )


def plan_epoch(data: Sequences, anchors: int, tokens: int, seed: int, epoch: int) -> list[np.ndarray]:
    """Batches of sequences of similar shape (little padding), cut at `anchors` query rows or `tokens` tokens. Their
    order and composition depend on (seed, epoch) alone."""
    rng = np.random.default_rng((seed, epoch))
    lengths = data.lengths
    prompt_lengths = data.prompts
    usable = np.nonzero(lengths - prompt_lengths >= 2)[0]
    require(len(usable) > 0, "no sequence has two answer tokens: nothing to learn from")
    noise = rng.random(len(usable))
    # buckets of prompt length grow with the length; inside a bucket by answer length, up in one and down in the next,
    # so that a batch which spans two of them holds answers of like length; blurred so that epochs differ
    bucket = np.floor(np.log2(np.maximum(prompt_lengths[usable], 16)) * 8 + noise * 0.5)
    answer = (lengths - prompt_lengths)[usable] + rng.random(len(usable)) * 12
    order = usable[np.lexsort((np.where(bucket % 2, -answer, answer), bucket))]
    batches: list[np.ndarray] = []
    lo = 0
    longest = 0
    shortest = 1 << 30
    for hi, i in enumerate(order):
        longest_ = max(longest, int(lengths[i]))
        shortest_ = min(shortest, int(prompt_lengths[i]) - 1)
        size = hi - lo + 1
        if hi > lo and (size * (longest_ - shortest_) > anchors or size * longest_ > tokens):
            batches.append(order[lo:hi])
            lo = hi
            longest_ = int(lengths[i])
            shortest_ = int(prompt_lengths[i]) - 1
        longest = longest_
        shortest = shortest_
    batches.append(order[lo:])
    rng.shuffle(batches)  # type: ignore[arg-type]
    return batches


def prefetch(items: Iterator[T], depth: int = 4) -> Iterator[T]:
    """Makes items (none of them None) in a thread ahead of their use; errors are raised here."""
    pool = ThreadPoolExecutor(1)
    try:
        ahead = deque(pool.submit(next, items, None) for _ in range(depth))
        item = ahead.popleft().result()
        while item is not None:
            ahead.append(pool.submit(next, items, None))
            yield item
            item = ahead.popleft().result()
    finally:
        # wait for it: a thread inside torch would abort the process when the interpreter ends
        pool.shutdown(cancel_futures=True)
