"""Records what every draft would have been worth: one trace an answer, for `spec.simulate`.

The answer is decoded plainly first. Then, at each of its positions, a draft of 16 tokens is made and judged: a request
whose prompt is everything up to there, of which only the first cycle is looked at. The n-gram drafter needs no model
for that. Drafts are lines: `llm` is loaded with trees off.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from unittest.mock import patch

from ..llm import LLM
from ..prompts import Prompt
from ..spec.ngram import NgramIndex
from ..spec.plan import VerifiedTree
from ..spec.simulate import Trace
from ..types import MAX_DRAFT, SamplingParams


def record(llm: LLM, prompt: Prompt, temperature: float = 0.0, seed: int = 0) -> Trace | None:
    """None: the answer is too short to say anything. `llm` should have its prefix cache on, or this takes long."""
    ids = llm.encode_chat(prompt.text)
    params = SamplingParams(temperature=temperature, max_tokens=prompt.max_tokens, seed=seed)
    answer = llm.generate(ids, params, drafter=False)[0].token_ids
    if len(answer) < 2:
        return None
    copies, matches = copy_runs(ids, answer)
    if llm.drafter is None:
        return Trace(
            prompt.id, prompt.category, "ngram", tuple(max(0, c) for c in copies), copies, matches, (), len(ids)
        )
    runs, sure = [], []
    for position in range(len(answer)):
        left = len(answer) - position
        run, told = (
            _first_cycle(llm, llm.drafter.name, [*ids, *answer[:position]], min(left, MAX_DRAFT + 1), temperature, seed)
            if left > 1
            else (0, None)
        )
        runs.append(run)
        sure.append(tuple(round(p, 3) for p in told or ()))
    known = tuple(sure) if any(sure) else ()
    return Trace(prompt.id, prompt.category, llm.drafter.name, tuple(runs), copies, matches, known, len(ids))


def _first_cycle(
    llm: LLM, drafter: str, ids: Sequence[int], most: int, temperature: float, seed: int
) -> tuple[int, Sequence[float] | None]:
    """Tokens accepted in the first cycle of a continuation, and the drafter's probability of each token of the
    draft."""
    params = SamplingParams(temperature=temperature, max_tokens=most, seed=seed)
    heard: list[tuple[int, Sequence[float] | None]] = []
    controller = llm.engine.controller
    tell = controller.observe

    def listen(
        id: str,
        drafter: str | None,
        drafted: int,
        accepted: int,
        confidence: Sequence[float] | None = None,
        tree: VerifiedTree | None = None,
    ) -> None:
        heard.append((accepted, confidence))
        tell(id, drafter, drafted, accepted, confidence, tree)

    stream = llm.stream(list(ids), params, draft_tokens=MAX_DRAFT, drafter=drafter)
    with closing(stream), patch.object(controller, "observe", listen):
        next((event for event in stream if event.tokens), None)
    return heard[0] if heard else (0, None)


def copy_runs(prompt: Sequence[int], answer: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The n-gram drafter at every position: accepted run (-1: no match) and length of the match."""
    index = NgramIndex(prompt)
    runs, matches = [], []
    for position, token in enumerate(answer):
        guess, match = index.propose(MAX_DRAFT)
        right = 0
        while right < len(guess) and position + right < len(answer) and guess[right] == answer[position + right]:
            right += 1
        runs.append(right if guess else -1)
        matches.append(match)
        index.extend([token])
    return tuple(runs), tuple(matches)
