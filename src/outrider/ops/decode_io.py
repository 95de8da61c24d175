"""The step boundary: fixed arrays in and out of a decode step, one row per sequence. Torch-free.

Every program of a decode step takes `DecodeInputs` and fills `DecodeOutputs`: the C cycle by pointer (cycle.h has
structs with the same field names), CUDA graphs by uploading columns and copying one packed array back, the eager
program directly. Arrays are allocated once. The engine fills and reads them (`engine.step_io`).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy import ndarray

from ..types import MAX_DRAFT

# the host's tokens for one sequence: a draft, and before it as many tokens as the step in flight may add
HOST_DRAFT = 2 * MAX_DRAFT + 1
UNKNOWN = -1  # in `num_confidences`


class Proposer(IntEnum):
    """Who proposes a sequence's draft, as the C cycle numbers them."""

    HOST = 0  # `host_draft`; also for sequences without a draft
    MTP = 1
    BLOCK = 2


class DecodeInputs:
    """Instructions to a decode step, one row per sequence."""

    host_draft_width = HOST_DRAFT

    def __init__(self, rows: int):
        def column(dtype: type = np.int64, width: int = 0) -> ndarray:
            return np.zeros((rows, width) if width > 0 else rows, dtype)

        self.slot = column()  # in the K/V store
        self.last_token = column()
        self.position = column()  # of the newest token
        self.max_draft = column()  # tokens to draft; of a tree its depth
        self.max_nodes = column()  # tokens of a tree; 0: a chain
        self.proposer = column()
        self.num_host_draft = column()
        self.host_draft = column(width=HOST_DRAFT)
        self.stop_below = column(np.float64)  # a draft ends after a token of this probability (`DraftPlan.stop`)
        self.drop_below = column(np.float64)  # or before it
        self.has_prices = column()
        self.prices = column(np.float64, MAX_DRAFT + 1)  # of verifying n rows, in tokens
        self.adapter = column()  # index among the adapters of the step; -1: none
        self.num_logprobs = column()  # likeliest tokens to report beside the chosen one; -1: no logprobs


@dataclass
class DecodeOutputs:
    """The results of a decode step, with one row per sequence. Valid until the step after the next one begins."""

    tokens: ndarray  # int64 [B, K + 1] emitted: the accepted draft tokens, then the target's next one
    num_tokens: ndarray  # int64 [B]
    num_drafted: ndarray  # int64 [B] draft tokens that were verified
    draft: ndarray | None = None  # int64 [B, N] those tokens; None: they stay on the device
    parents: ndarray | None = None  # int64 [B, N] the row that each token of a tree follows; 0: the newest token
    path: ndarray | None = None  # int64 [B, K] rows of a tree that were accepted
    is_tree: ndarray | None = None  # bool [B]; None: all are chains
    draft_steps: ndarray | None = None  # float64 [B] how often a tree's drafter ran; None: as deep as the tree
    confidence: ndarray | None = None  # float32 [B, N] the drafter's probabilities of its tokens
    num_confidences: ndarray | None = None  # int64 [B]; UNKNOWN: the drafter knows none
    logprobs: ndarray | None = None  # float32 [B, K + 1, 1 + 2n]: as `Backend.logprob_rows`, by emitted token

    @staticmethod
    def allocate(rows: int, width: int = MAX_DRAFT) -> DecodeOutputs:
        """All columns but `logprobs`, for drafts of up to `width` tokens."""
        return DecodeOutputs(
            tokens=np.zeros((rows, width + 1), np.int64),
            num_tokens=np.zeros(rows, np.int64),
            num_drafted=np.zeros(rows, np.int64),
            draft=np.zeros((rows, width), np.int64),
            parents=np.zeros((rows, width), np.int64),
            path=np.zeros((rows, width), np.int64),
            is_tree=np.zeros(rows, np.bool_),
            draft_steps=np.zeros(rows, np.float64),
            confidence=np.zeros((rows, width), np.float32),
            num_confidences=np.full(rows, UNKNOWN, np.int64),
        )
