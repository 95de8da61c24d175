"""Several callers of one model at once: everybody has all tokens of its own answer, as if alone."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tests.engines import VOCAB, tiny_engine

from outrider.assemble import Assembled
from outrider.engine.engine import Event
from outrider.llm import LLM, each_prompt
from outrider.types import OutriderError, SamplingParams

PROMPTS = [[5, 9, 5, 9, 5], [7, 8, 9], [20, 21, 20, 21]]
PARAMS = SamplingParams(max_tokens=24, ignore_eos=True)


@pytest.fixture
def llm() -> LLM:
    assembled = Assembled(
        engine=tiny_engine(),
        drafter_note="",
        weight_bytes=0,
        cost_key=None,
        vision="this model takes no images",
        audio="this model takes no sound",
    )
    return LLM(assembled, "tiny")


def tokens(events: Iterable[Event]) -> list[int]:
    return [token for event in events for token in event.tokens]


def test_streams_in_turn_and_an_answer_between(llm: LLM) -> None:
    alone = [llm.generate(prompt, PARAMS)[0].token_ids for prompt in PROMPTS]
    first = llm.stream(PROMPTS[0], PARAMS)
    second = llm.stream(PROMPTS[1], PARAMS)
    got = [tokens([next(first)]), tokens([next(second)])]
    assert llm.generate(PROMPTS[2], PARAMS)[0].token_ids == alone[2]
    for a, b in zip(first, second):
        got[0] += a.tokens
        got[1] += b.tokens
    assert [got[0] + tokens(first), got[1] + tokens(second)] == alone[:2]
    llm.engine.check()


def test_threads_share_a_model(llm: LLM) -> None:
    alone = [llm.generate(prompt, PARAMS)[0].token_ids for prompt in PROMPTS]
    tokens: dict[int, list[int]] = {}

    def ask(i: int) -> None:
        tokens[i] = llm.generate(PROMPTS[i % 3], PARAMS)[0].token_ids

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert tokens == {i: alone[i % 3] for i in range(6)}
    assert not llm.engine.busy
    llm.engine.check()


def test_who_leaves_takes_its_request_along_and_nobody_elses(llm: LLM) -> None:
    alone = llm.generate(PROMPTS[0], PARAMS)[0].token_ids
    staying = llm.stream(PROMPTS[0], PARAMS)
    leaving = llm.stream(PROMPTS[1], PARAMS)
    got = tokens([next(staying)])
    next(leaving)
    leaving.close()
    assert got + tokens(staying) == alone and not llm.engine.busy


def test_who_leaves_in_the_middle_of_a_step_is_seen_to_by_the_next(llm: LLM) -> None:
    """An iterator may be collected by the thread that makes a step: it must not wait for its own turn."""
    leaving = llm.stream(PROMPTS[1], PARAMS)
    next(leaving)
    step = llm.engine.step

    def collected() -> Any:
        llm.engine.step = step  # type: ignore[method-assign]
        leaving.close()
        return step()

    llm.engine.step = collected  # type: ignore[method-assign]
    assert len(llm.generate(PROMPTS[0], PARAMS)[0].token_ids) == 24
    assert not llm.engine.busy


def test_a_step_that_fails_fails_for_everybody_and_the_next_is_whole(llm: LLM) -> None:
    alone = llm.generate(PROMPTS[2], PARAMS)[0].token_ids
    first = llm.stream(PROMPTS[0], PARAMS)
    second = llm.stream(PROMPTS[1], PARAMS)
    next(first), next(second)
    step = llm.engine.step

    def fails() -> Any:
        llm.engine.step = step  # type: ignore[method-assign]
        raise MemoryError

    llm.engine.step = fails  # type: ignore[method-assign]
    with pytest.raises(MemoryError):
        tokens(first)
    with pytest.raises(OutriderError, match="failed in one of them: MemoryError"):
        tokens(second)
    assert llm.generate(PROMPTS[2], PARAMS)[0].token_ids == alone and not llm.engine.busy
    llm.engine.check()


def test_who_comes_is_let_in_between_two_steps_of_another(llm: LLM) -> None:
    """A step after the newcomer has asked waits until it is in, however quickly the other one's steps follow each
    other."""
    asked = threading.Event()
    step = llm.engine.step
    submit = llm.engine.submit
    steps = list[str]()
    newcomer = llm.stream(PROMPTS[1], PARAMS)

    def slow() -> Any:
        steps.append("step")
        if len(steps) == 3:
            asked.set()
            for _ in range(2000):  # until it stands at the door
                if llm._shared._joining:
                    break
                time.sleep(0.005)
        return step()

    def noted(request: Any) -> None:
        steps.append("in")
        submit(request)

    other = threading.Thread(target=lambda: llm.generate(PROMPTS[0], PARAMS))
    llm.engine.step = slow  # type: ignore[method-assign]
    other.start()
    asked.wait(60)
    llm.engine.submit = noted  # type: ignore[method-assign]
    tokens(newcomer)
    other.join()
    assert steps.index("in") == 3


def test_one_request_that_cannot_run_begins_none(llm: LLM) -> None:
    with pytest.raises(OutriderError, match="outside the vocabulary"):
        llm.generate([[1, 2], [VOCAB]], PARAMS)
    assert not llm.engine.busy


def test_a_request_that_is_refused_late_leaves_no_earlier_one_running(llm: LLM) -> None:
    """An adapter is read after all requests were validated: if that fails, those submitted before must not go on."""
    submit = llm.engine.submit

    def refuses(request: Any) -> None:
        if request.prompt == PROMPTS[1]:
            raise OutriderError("memory is short")
        submit(request)

    llm.engine.submit = refuses  # type: ignore[method-assign]
    with pytest.raises(OutriderError, match="memory is short"):
        llm.generate([PROMPTS[0], PROMPTS[1], PROMPTS[2]], PARAMS)
    assert llm.engine.progress() == {} and not llm._shared._boxes
    alone = llm.generate(PROMPTS[0], PARAMS)[0].token_ids
    assert len(alone) == 24 and not llm.engine.busy
    llm.engine.check()


def test_a_chat_generates_the_one_answer_that_it_returns(llm: LLM) -> None:
    llm.chat_prompt = lambda messages, tools=None: list(PROMPTS[0])  # type: ignore[method-assign, misc]
    several = replace(PARAMS, n=4, temperature=1.0)
    answer = llm.chat([], several)
    assert llm.engine.metrics.requests == 1 and llm.engine.metrics.new_tokens == 24
    assert answer.token_ids == llm.generate(PROMPTS[0], several)[0].token_ids
    with pytest.raises(OutriderError, match="n must be"):
        llm.chat([], replace(PARAMS, n=0))


def test_prompts_as_they_come() -> None:
    ids = [1, 2, 3]
    assert (
        each_prompt("a") == ["a"]
        and each_prompt(ids) == [ids]
        and each_prompt(["a", ids]) == ["a", ids]
        and each_prompt([]) == []
    )
    assert each_prompt(text for text in "ab") == ["a", "b"]
    assert [
        len(each_prompt(array))
        for array in (np.array(ids), torch.tensor(ids), np.array([ids, ids]), torch.tensor([ids, ids]))
    ] == [1, 1, 2, 2]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("prompt", "more", "says"),
    [
        (None, {}, "prompts are texts or lists of token ids, got NoneType"),
        (b"ab", {}, "got bytes"),
        ([{"role": "user", "content": "x"}], {}, "conversations: LLM.chat"),
        ([1, 2.5], {}, "a prompt is a text or a list of token ids"),
        ([1], {"params": {"max_tokens": 4}}, "params must be SamplingParams, got {'max_tokens': 4}"),
        ([1], {"params": SamplingParams(max_tokens="4")}, "max_tokens must be a whole number, got '4'"),
        # type: ignore[arg-type]
        ([1], {"params": SamplingParams(seed=None)}, "seed must be a whole number, got None"),  # type: ignore[arg-type]
        ([1], {"params": SamplingParams(temperature="1")}, "temperature must be a number, got '1'"),
        # type: ignore[arg-type]
        ([1], {"params": SamplingParams(logit_bias={"1": 2})}, "a token id is a whole number, got '1'"),
        # type: ignore[dict-item]
        ([1], {"drafter": "mpt"}, "drafter must be True, False or one that is loaded ('ngram'), got 'mpt'"),
        ([1], {"draft_tokens": 2.5}, "draft_tokens must be a number in 0..16 or 'auto', got 2.5"),
    ],
)
def test_what_is_no_request_is_one_line(llm: LLM, prompt: Any, more: dict[str, Any], says: str) -> None:
    with pytest.raises(OutriderError) as error:
        llm.generate(prompt, **more)
    assert says in str(error.value) and "\n" not in str(error.value)


def test_a_stop_text_is_not_its_letters() -> None:
    assert SamplingParams(stop="ab").stop == ("ab",) and SamplingParams(stop=None).stop == ()  # type: ignore[arg-type]
