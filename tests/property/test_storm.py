"""A thousand random joins, cancels and pre-emptions: no page is lost, and what was answered is what the request alone
gets."""

from __future__ import annotations

import random
from typing import Any

import pytest
from tests.engines import VOCAB, mtp_drafter, request, run, tiny_engine, tiny_model

from outrider.engine.engine import Engine

MODEL = tiny_model("dense")
PARAMS: list[dict[str, Any]] = [
    {}, {}, {"temperature": 0.8}, {"temperature": 1.1, "top_k": 9, "top_p": 0.9}, {"repetition_penalty": 1.3},
    {"logprobs": 2},
    {"bad_words": ((5, 7), (12,)), "logit_bias": {4: 2.0}}, {"min_tokens": 3, "temperature": 0.5},
]  # fmt: skip


@pytest.mark.parametrize(("graphs", "most"), [(False, 400), (True, 1000)])
def test_nothing_is_lost_in_a_storm(graphs: bool, most: int) -> None:
    rng = random.Random(7)
    drafter = mtp_drafter(MODEL, "dense", clustered=True)
    engine = tiny_engine("dense", drafter, model=MODEL, max_batch=8, max_context=96, kv_tokens=128, k=2, graphs=graphs)
    prompts = [
        [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 24))] for _ in range(12)
    ]  # few: prefixes are shared
    requests: dict[str, Any] = {}
    got: dict[str, list[int]] = {}
    ended: dict[str, str] = {}
    acts = 0
    while acts < most or engine.busy:
        for _ in range(rng.randrange(10) if acts < most else 0):
            acts += 1
            running = [i for i in requests if i not in ended]
            if running and (rng.random() < 0.45 or len(running) > 40):
                engine.abort(rng.choice(running))
            else:
                params = {**rng.choice(PARAMS), "seed": acts, "max_tokens": rng.randrange(4, 40)}
                submitted = request(str(acts), rng.choice(prompts), k=rng.choice([None, 0, 1, 4]), **params)
                requests[submitted.id] = submitted
                got[submitted.id] = []
                engine.submit(submitted)
        for event in engine.step():
            assert event.id not in ended, "an event after the last one"
            got[event.id] += event.tokens
            if event.finish_reason:
                ended[event.id] = event.finish_reason
        if acts % 50 < 3:
            engine.check()
    engine.check()
    _all_free(engine)
    assert engine.scheduler.preemptions > most // 100 and len(requests) > most // 3
    answered = [i for i, why in ended.items() if why != "abort"]
    assert len(answered) > most // 40
    for i in rng.sample(answered, 10):
        alone = tiny_engine("dense", model=MODEL, max_context=96)
        assert (
            got[i]
            == run(alone, [request("alone", requests[i].prompt, k=0, drafter=False, **_of(requests[i].params))])[
                "alone"
            ]
        )


def _of(params: Any) -> dict[str, Any]:
    return dict(vars(params))


def _all_free(engine: Engine) -> None:
    engine.store.prefix.clear()
    for name, group in engine.store.groups.items():
        assert group.pool.free == group.pool.count - 1, f"{name} pages are lost"
    assert engine.store.free_slots == engine.max_batch
