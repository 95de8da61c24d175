"""Everything in an answer is independent of drafting: token ids, log-probabilities, text, counts and the finish reason.

Catches: tokens behind a stop string that a long draft brought along (with their log-probabilities and their count), a
later but longer stop string found first because its tokens came in the same cycle, an error of a grammar that only a
draft ran into.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.engines import VOCAB, mtp_drafter, request, tiny_engine, tiny_model
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from outrider.engine.engine import Engine
from outrider.engine.output_processor import OutputProcessor
from outrider.engine.step import Request
from outrider.engine.text import Detokenizer, Tokenizer
from outrider.ops import choose
from outrider.types import SamplingParams, TextFiles

OPS = choose(
    torch.device("cpu"), "cpu", 1
)  # rows independent of their neighbours: log-probabilities must be the same bits
MODELS = {name: tiny_model(name, ops=OPS) for name in ("llama", "dense")}
PROMPT = [3, 5, 7, 9, 11, 3, 5, 7, 9, 13, 2, 40, 41, 3, 5]


def tokenizer() -> Tokenizer:
    """64 tokens: end, the two bytes of é apart, and one to three letters of a small alphabet, so that stop strings span
    tokens."""
    rng = random.Random(4)
    words = ["<pad>", "<eos>", "Ã", "©"]
    while len(words) < VOCAB:
        word = "".join(rng.choice("abcd") for _ in range(rng.choice((1, 1, 2, 3))))
        words.append(word if word not in words else f"{word}{len(words)}")

    def build() -> Backend:
        backend = Backend(models.BPE(vocab={w: i for i, w in enumerate(words)}, merges=[]))
        backend.decoder = decoders.ByteLevel()
        return backend

    return Tokenizer(TextFiles("tiny", build, None, {}, None, (1,), False))


TOKENIZER = tokenizer()


@dataclass
class Whole:
    tokens: list[int]
    kinds: int
    logprobs: list[dict[int, float]]
    text: str
    finish: str | None = None
    counted: int = 0


def engine(variant: str, mtp: bool, **config: Any) -> Engine:
    model = MODELS[variant]
    tested = tiny_engine(variant, mtp_drafter(model, variant, clustered=True) if mtp else None, model=model, **config)
    tested.tokenizer = TOKENIZER
    return tested


def run(engine: Engine, requests: list[Request]) -> dict[str, Whole]:
    out = {r.id: Whole([], 0, [], "") for r in requests}
    for r in requests:
        engine.submit(r)
    while engine.busy:
        for event in engine.step():
            whole = out[event.id]
            assert event.error is None and len(event.kinds) == len(event.tokens)
            assert event.logprobs is None or len(event.logprobs) == len(event.tokens)
            whole.tokens += event.tokens
            whole.kinds += len(event.kinds)
            whole.logprobs += event.logprobs or []
            assert len(event.texts) == len(event.tokens)
            whole.text += event.text
            if event.finish_reason is not None:
                assert event.stats is not None
                whole.finish = event.finish_reason
                whole.counted = event.stats.new_tokens
    engine.check()
    return out


def stops_in(text: str, rng: random.Random) -> tuple[str, ...]:
    """Up to three pieces of the text (they will be met), sometimes one inside another."""
    pieces = []
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(max(1, len(text)))
        pieces.append(text[at : at + rng.randint(1, 5)])
    return tuple(p for p in pieces if p) or ("a",)


@settings(max_examples=30)
@given(
    st.sampled_from([("llama", False), ("dense", False), ("dense", True)]),
    st.sampled_from([0.0, 0.6, 1.2]),
    st.sampled_from([None, 0, 3, 20]),
    st.sampled_from([0, 6]),
    st.integers(0, 2**32),
)
def test_every_part_of_an_answer_is_plain_decodings(
    which: tuple[str, bool], temperature: float, logprobs: int | None, min_tokens: int, seed: int
) -> None:
    rng = random.Random(seed)
    variant, mtp = which
    params: dict[str, Any] = dict(
        temperature=temperature, seed=seed, max_tokens=40, logprobs=logprobs, min_tokens=min_tokens
    )
    free = run(engine(variant, False), [request("free", PROMPT, drafter=False, **params)])["free"]
    params |= dict(
        stop=stops_in(free.text, rng),
        ignore_eos=rng.random() < 0.7,
        stop_token_ids=(free.tokens[-1],) * (rng.random() < 0.3),
    )
    want = run(engine(variant, False), [request("plain", PROMPT, drafter=False, **params)])["plain"]
    assert want.counted == len(want.tokens) == want.kinds
    together = [request(f"k{k}", PROMPT, k=k, **params) for k in (None, 0, 1, 2, 4, 16)]
    drafting = engine(variant, mtp)
    for name, got in run(drafting, together).items():
        assert got == want, name
    assert drafting.metrics.drafted > 0


def test_the_stop_that_comes_first_wins_however_many_tokens_come_at_once() -> None:
    """'abcd' is met later than 'c' although it begins earlier: plain decoding stops at the c."""
    letters = {c: next(i for i in range(VOCAB) if TOKENIZER.token_bytes(i) == c.encode()) for c in "abcd"}
    ids = [letters[c] for c in "abcdabcd"]
    for widths in ([1] * 8, [8], [3, 5], [2, 6]):
        answer = OutputProcessor(SamplingParams(stop=("abcd", "c")), (1,), Detokenizer(TOKENIZER), None)
        at = 0
        text = ""
        finish = None
        for width in widths:
            accepted = answer.take(ids[at : at + width], 100)
            at = at + len(accepted.texts)
            text = text + "".join(accepted.texts)
            finish = accepted.finish
            if finish:
                break
        assert (at, text, finish) == (3, "ab", "stop"), widths


def test_a_stop_id_before_min_tokens_stays_in_the_text() -> None:
    a, b = (next(i for i in range(VOCAB) if TOKENIZER.token_bytes(i) == c) for c in (b"a", b"b"))
    for widths in ([1] * 4, [4], [1, 3]):
        answer = OutputProcessor(SamplingParams(stop_token_ids=(a,), min_tokens=3), (1,), Detokenizer(TOKENIZER), None)
        text = ""
        at = 0
        for width in widths:
            accepted = answer.take([a, b, b, a][at : at + width], 100)
            text = text + "".join(accepted.texts)
            at = at + len(accepted.texts)
        assert (text, at, accepted.finish) == ("abb", 4, "stop")


@pytest.mark.parametrize("room", [1, 2, 3])
def test_length_and_stop_on_one_token(room: int) -> None:
    a = next(i for i in range(VOCAB) if TOKENIZER.token_bytes(i) == b"a")
    params = SamplingParams(stop=("aaa",))
    assert OutputProcessor(params, (1,), Detokenizer(TOKENIZER), None).take([a] * 5, room).finish == (
        "stop" if room == 3 else "length"
    )
    assert (
        OutputProcessor(replace(params, stop=()), (1,), Detokenizer(TOKENIZER), None).take([a] * 5, room).texts
        == ["a"] * room
    )
