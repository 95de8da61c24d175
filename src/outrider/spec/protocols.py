"""Protocols of the networks that engine and drafters use: `Target`, and `DraftNet`, an MTP drafter's network."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from ..models.config import DrafterConfig, ModelConfig
from ..ops.backend import Pass
from ..ops.formats import DeviceWeight
from ..ops.reference import Backend
from ..types import DraftEnd, DraftNoise, DraftRound, KVView, OutputRows


class Target(Protocol):
    config: ModelConfig
    ops: Backend
    dtype: torch.dtype
    device: torch.device
    head: DeviceWeight  # [V, H]

    def embed(self, ids: Tensor) -> Tensor:
        """[R] -> the scaled input embedding [R, H]: also an MTP drafter's input."""
        ...

    def forward(self, ids: Tensor, kv: KVView, taps: tuple[int, ...] = (), wanted: OutputRows | None = None) -> Pass:
        """ids [R] at kv.positions -> hidden states and the streams after the layers `taps`, of the rows that are wanted
        (None: all)."""
        ...

    def forward_soft(
        self, soft: Tensor, pad_id: int, kv: KVView, taps: tuple[int, ...], wanted: OutputRows | None, end: int | None
    ) -> Pass:
        """As `forward`, of rows of one image; end: see `TextModel.forward_soft`."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [R, V]"""
        ...


class DraftNet(Protocol):
    config: DrafterConfig
    cluster_ids: Tensor | None  # int64 [C, S]: the token ids of a clustered head
    most: int  # maximum batch of `draft`; 0: not supported, every round runs step by step
    has_runner_ups: bool  # its rounds return the runner-ups of their tokens
    alarm: Tensor | None  # int32 [1] on the device, not 0 once a round of `draft` has failed; None: none can fail

    def start(self, kv: KVView, features: Tensor) -> DraftRound: ...

    def step(self, token_embedding: Tensor, hidden: Tensor, state: DraftRound) -> tuple[Tensor, Tensor]:
        """The head's input, and the hidden state to feed back."""
        ...

    def candidates(self, g: Tensor, cluster_bonus: Tensor | None = None) -> tuple[Tensor | None, Tensor]:
        """Token ids [B, N] (None: the whole vocabulary) and their float32 logits [B, N]."""
        ...

    def draft(
        self, last: Tensor, features: Tensor, kv: KVView, steps: int, noise: DraftNoise, end: DraftEnd | None = None
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """A whole round in one call: tokens [B, steps], confidences or None, lengths [B]."""
        ...

    def runner_ups(self, steps: int) -> tuple[Tensor, Tensor]:
        """For the last round (`has_runner_ups`): the best scores that parts of the head found at each step [B, steps,
        P], and their tokens."""
        ...
