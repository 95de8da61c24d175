"""A certificate of losslessness for one model and its drafters, on the machine it runs on.

1. Row invariance: the logits of a position, computed alone, in verify blocks of 2..17 rows and in a batch with 7 other
   sequences, are compared bit for bit.
2. Identity: plain decoding against every drafter and K, greedy and sampled: the same tokens or the first difference,
   with the gap between the two candidates' log-probabilities there.
3. Whole answers: log-probabilities, text, finish reason and counts of answers that end at a stop string are the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..cache.store import KVStore, SeqCache
from ..llm import LLM, Completion
from ..types import MAX_DRAFT, OutriderError, SamplingParams

BATCH = 8
Tokens = Sequence[list[int]]  # token ids of several prompts or answers
COMPARED = {
    "row invariance": "logits of a position computed alone, in blocks and in a batch, bit for bit",
    "identity": "tokens of plain decoding with those of every drafter and K",
    "whole answers": "text, log-probabilities, stop strings and counts of plain and drafted answers",
}


@dataclass(frozen=True)
class ProofResult:
    check: str
    case: str
    passed: bool
    detail: str


def prove(
    llm: LLM, prompts: Tokens, ks: Sequence[int], max_tokens: int, seed: int, temperatures: Sequence[float]
) -> Iterator[ProofResult]:
    yield from row_invariance(llm, prompts[:4])
    for temperature in temperatures:
        params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed, ignore_eos=True)
        cases = [(params, prompts)]
        if temperature > 0:  # some devices filter on a separate, slow path: fewer prompts
            cases.append((replace(params, top_p=0.95), prompts[:BATCH]))
        for params, some in cases:
            plain = [llm.generate(p, params, drafter=False)[0].token_ids for p in some]
            for drafter in llm.engine.controller.drafters:
                branches = drafter == "mtp" and llm.engine.can.trees and not llm.engine.graphs
                for k, tree in [*((k, 0) for k in ks), *([(4, MAX_DRAFT)] if branches else [])]:
                    answered = [
                        llm.generate(p, params, draft_tokens=k, drafter=drafter, tree=tree)[0].token_ids for p in some
                    ]
                    drafted = f"{drafter}, K = {k}" + (f", trees of {tree}" if tree else "")
                    yield identity(llm, some, plain, answers=answered, params=params, drafted=drafted)
            together = [c.token_ids for c in llm.generate([list(p) for p in some], params)]
            yield identity(llm, some, plain, answers=together, params=params, drafted="auto, one batch")
        yield from answers(llm, prompts[:BATCH], cases[0][0], ks=ks)


# ---- 1
def row_invariance(llm: LLM, prompts: Tokens) -> Iterator[ProofResult]:
    for i, prompt in enumerate(prompts):
        params = SamplingParams(max_tokens=MAX_DRAFT + 1, ignore_eos=True)
        answer = llm.generate(prompt, params, drafter=False)[0].token_ids
        tokens = prompt + answer
        alone = block_logits(llm, [tokens], starts=[len(prompt)], width=1)[0]  # [17, V]
        others = [prompts[j % len(prompts)] for j in range(i + 1, i + BATCH)]
        blocks = [
            block_logits(llm, [tokens], starts=[len(prompt)], width=width)[0] for width in (2, 3, 5, 9, MAX_DRAFT + 1)
        ]
        if llm.engine.max_batch >= BATCH:
            batch = [tokens, *(o + answer for o in others)]
            starts = [len(prompt), *map(len, others)]
            blocks.append(block_logits(llm, batch, starts=starts, width=MAX_DRAFT + 1)[0])
        worst = max(0.0 if torch.equal(alone, z) else max(float((alone - z).abs().max()), 1e-45) for z in blocks)
        detail = "bitwise equal" if worst == 0.0 else f"max |Δlogit| {worst:.3g}"
        yield ProofResult(
            "row invariance", f"prompt {i + 1}, {len(blocks)} layouts", passed=worst == 0.0, detail=detail
        )


@torch.inference_mode()
def block_logits(llm: LLM, sequences: Tokens, starts: Sequence[int], width: int) -> Tensor:
    """Logits [B, 17, V] of each sequence's positions from start - 1 on, computed `width` rows at a time over a fresh
    cache."""
    engine = llm.engine
    store = llm.engine.store
    begins = [start - 1 for start in starts]
    caches = []
    for tokens, begin in zip(sequences, begins):
        cache, _ = store.open()
        caches.append(cache)
        for at in range(0, begin, engine.chunk):
            count = min(engine.chunk, begin - at)
            _reserve(store, cache, at + count)
            _rows(llm, [cache], [tokens], begins=[at], count=count)
            store.commit(cache, at + count)
        _reserve(store, cache, begin + MAX_DRAFT + 1)
    out = []
    for at in range(0, MAX_DRAFT + 1, width):
        count = min(width, MAX_DRAFT + 1 - at)
        logits = engine.model.logits(_rows(llm, caches, sequences, begins=[b + at for b in begins], count=count))
        out.append(logits.reshape(len(sequences), count, -1).clone())
    for cache in caches:
        store.close(cache)
    return torch.cat(out, 1)


def _reserve(store: KVStore, cache: SeqCache, positions: int) -> None:
    if not store.reserve(cache, positions):
        raise OutriderError(f"no room in the cache to compare {positions} positions: give shorter prompts")


def _rows(llm: LLM, caches: Sequence[SeqCache], sequences: Tokens, begins: Sequence[int], count: int) -> Tensor:
    """Hidden states of `count` tokens of each sequence from these positions on, with the adapter in use."""
    engine = llm.engine
    ids = torch.tensor([t for tokens, b in zip(sequences, begins) for t in tokens[b : b + count]], device=engine.device)
    kv = engine.runner.view([cache.slot for cache in caches], [(begin, count) for begin in begins])
    adapter = llm.adapters.get(llm.adapter) if llm.adapters is not None and llm.adapter is not None else None
    model = engine.runner.model_for([adapter] * len(caches), [count] * len(caches))
    return model.forward(ids, kv).hidden


# ---- 2
def identity(
    llm: LLM, prompts: Tokens, plain: Tokens, answers: Tokens, params: SamplingParams, drafted: str
) -> ProofResult:
    """Compares answers with those of plain decoding. drafted: describes how they were drafted."""
    case = f"{sampled(params)}, {drafted}"
    for i, (want, got) in enumerate(zip(plain, answers)):
        if want != got:
            at = next((j for j, (a, b) in enumerate(zip(want, got)) if a != b), min(len(want), len(got)))
            gap = _logprob_gap(llm, prompts[i], want=want, got=got, at=at, params=params)
            texts = f"{want[at : at + 1]} against {got[at : at + 1]}, logprob gap {gap:.3g}"
            return ProofResult(
                "identity", case, passed=False, detail=f"prompt {i + 1} differs first at token {at + 1}: {texts}"
            )
    return ProofResult(
        "identity", case, passed=True, detail=f"{sum(map(len, answers))} tokens of {len(prompts)} prompts identical"
    )


def sampled(params: SamplingParams) -> str:
    filtered = f", top-p {params.top_p}" if params.top_p < 1.0 else ""
    return "greedy" if params.temperature == 0 else f"T = {params.temperature}{filtered}"


def _logprob_gap(
    llm: LLM, prompt: list[int], want: list[int], got: list[int], at: int, params: SamplingParams
) -> float:
    if at >= len(want) or at >= len(got):
        return float("nan")
    again = llm.generate(prompt, replace(params, max_tokens=at + 1, logprobs=20), drafter=False)[0]
    assert again.logprobs is not None
    table = again.logprobs[at]
    return table[want[at]] - table.get(got[at], float("-inf")) if want[at] in table else float("nan")


# ---- 3
def answers(llm: LLM, prompts: Tokens, params: SamplingParams, ks: Sequence[int]) -> Iterator[ProofResult]:
    """Compares whole answers except statistics, with log-probabilities and a stop string that occurs in them."""
    requests = []
    for prompt in prompts:
        text = llm.generate(prompt, params, drafter=False)[0].text
        middle = text[len(text) // 2 : len(text) // 2 + 3]
        requests.append(replace(params, logprobs=3, stop=(middle,) if middle and llm.tokenizer is not None else ()))
    plain = [_parts(llm.generate(p, a, drafter=False)[0]) for p, a in zip(prompts, requests)]
    for drafter in llm.engine.controller.drafters:
        for k in ks:
            case = f"{sampled(params)}, stop string, logprobs, {drafter}, K = {k}"
            got = [_parts(llm.generate(p, a, draft_tokens=k, drafter=drafter)[0]) for p, a in zip(prompts, requests)]
            wrong = [(i, name) for i in range(len(prompts)) for name in plain[i] if plain[i][name] != got[i][name]]
            detail = f"prompt {wrong[0][0] + 1}: {wrong[0][1]} differ" if wrong else f"{len(prompts)} answers identical"
            yield ProofResult("whole answers", case, passed=not wrong, detail=detail)


def _parts(answer: Completion) -> dict[str, object]:
    return {
        "token ids": answer.token_ids,
        "log-probabilities": answer.logprobs,
        "texts": answer.text,
        "finish reasons": answer.finish_reason,
        "counts": (answer.stats.new_tokens, len(answer.kinds or ())),
    }
