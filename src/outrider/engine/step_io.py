"""Fills the inputs of a decode step from its rows, and reads its outputs (`ops.decode_io`). Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..ops.decode_io import UNKNOWN, DecodeInputs, DecodeOutputs, Proposer
from ..spec.plan import VerifiedTree
from .step import DecodeRow, PendingStep

if TYPE_CHECKING:
    from ..ops.backend import DraftResult


def write_row(
    inputs: DecodeInputs, i: int, row: DecodeRow, *, proposer: Proposer, draft: DraftResult | None = None
) -> None:
    """Write the i-th sequence of a step. draft: of a network that has drafted before this program runs. Columns that
    the proposer does not read keep earlier values."""
    seq = row.seq
    plan = row.plan
    host_draft = row.host_draft if draft is None else draft.tokens
    num_logprobs = seq.request.params.logprobs
    inputs.slot[i] = row.slot
    inputs.last_token[i] = seq.tokens[-1]
    inputs.position[i] = row.position
    inputs.max_draft[i] = plan.k if draft is None else min(plan.k, draft.length)  # a draft may have ended itself
    inputs.max_nodes[i] = plan.nodes if proposer == Proposer.MTP else 0
    inputs.proposer[i] = proposer
    inputs.stop_below[i] = plan.stop
    inputs.drop_below[i] = plan.drop
    inputs.num_logprobs[i] = UNKNOWN if num_logprobs is None else num_logprobs
    inputs.has_prices[i] = plan.prices is not None
    if plan.prices is not None:
        inputs.prices[i] = plan.prices
    if host_draft is not None:
        num_tokens = min(len(host_draft), inputs.host_draft_width)
        inputs.num_host_draft[i] = num_tokens
        inputs.host_draft[i, :num_tokens] = host_draft[:num_tokens]
    else:
        inputs.num_host_draft[i] = 0


def write_confidence(outputs: DecodeOutputs, i: int, confidence: Sequence[float]) -> None:
    """Write the probabilities of a draft that was made before the program ran; empty: its drafter knows none."""
    if len(confidence) > 0:
        assert outputs.confidence is not None and outputs.num_confidences is not None
        outputs.confidence[i, : len(confidence)] = confidence
        outputs.num_confidences[i] = len(confidence)


def emitted_tokens(outputs: DecodeOutputs, count: int) -> list[list[int]]:
    """The tokens of the first `count` sequences."""
    tokens = outputs.tokens[:count].tolist()
    return [row[:num_tokens] for row, num_tokens in zip(tokens, outputs.num_tokens[:count].tolist())]


def draft_of(outputs: DecodeOutputs, i: int) -> list[int] | None:
    """The verified draft tokens of a sequence; None: they are not known on the host."""
    if outputs.draft is None:
        return None
    num_drafted = int(outputs.num_drafted[i])
    tokens: list[int] = outputs.draft[i, :num_drafted].tolist()
    return tokens


def confidence_of(outputs: DecodeOutputs, i: int) -> list[float] | None:
    """The drafter's probabilities of its tokens, with that of a token that ended the draft; None: it knows none."""
    if outputs.confidence is None or outputs.num_confidences is None:
        return None
    num_confidences = int(outputs.num_confidences[i])
    if num_confidences == UNKNOWN:
        return None
    confidence: list[float] = outputs.confidence[i, :num_confidences].tolist()
    return confidence


def tree_of(outputs: DecodeOutputs, i: int) -> VerifiedTree | None:
    """The verified tree of a sequence; None: its draft was a chain."""
    if outputs.is_tree is None or not outputs.is_tree[i]:
        return None
    assert outputs.parents is not None and outputs.path is not None
    parents = outputs.parents[i, : outputs.num_drafted[i]].tolist()
    path = outputs.path[i, : outputs.num_tokens[i] - 1].tolist()
    steps = None if outputs.draft_steps is None else float(outputs.draft_steps[i])
    return VerifiedTree.of(parents, path, steps, tokens=draft_of(outputs, i) or ())


def logprobs_of(outputs: DecodeOutputs, i: int, tokens: list[int], top: int) -> list[dict[int, float]]:
    """{id: logprob} of each emitted token of a sequence, itself first, then the `top` likeliest."""
    assert outputs.logprobs is not None
    return logprobs(outputs.logprobs[i, : len(tokens)].tolist(), tokens, top)


def logprobs(rows: Sequence[Sequence[float]], tokens: Sequence[int], top: int) -> list[dict[int, float]]:
    """{id: logprob} of each token, itself first, then the `top` likeliest; rows: `Backend.logprob_rows`."""
    logprobs = list[dict[int, float]]()
    for row, token in zip(rows, tokens):
        width = len(row) // 2
        values = row[1 : 1 + top]
        ids = row[1 + width : 1 + width + top]
        logprobs.append({token: row[0], **{int(id): value for id, value in zip(ids, values)}})
    return logprobs


def drafted_per_sequence(pending: PendingStep) -> float:
    """Draft tokens that were verified in a step that was read."""
    assert pending.outputs is not None
    count = len(pending.batch.decode)
    num_drafted: list[int] = pending.outputs.num_drafted[:count].tolist()
    return sum(num_drafted) / count
