"""A cycle in one call of the library is the cycle made of single operations: the same tokens, features and counts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.engines import request, run

from outrider.config import EngineConfig, SpecConfig
from outrider.engine.engine import Engine
from outrider.engine.host import HostExecutor
from outrider.engine.memory import KVOptions
from outrider.engine.step import Request
from outrider.models.config import ModelConfig
from outrider.models.decoder import TextModel
from outrider.models.drafter import MTPNet
from outrider.ops.cpu.ops import CpuOps
from outrider.spec.controller import Controller
from outrider.spec.cost import CostTable
from outrider.spec.draft_model import DraftModel
from outrider.spec.mtp import MTPDrafter
from outrider.train import design
from outrider.weights.load import dummy_weights

SHAPES: dict[str, dict[str, Any]] = {
    "llama": {
        "model_type": "llama", "vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 96, "head_dim": 32, "eos_token_id": 1,
    },
    "sliding": {
        "model_type": "gemma3_text", "vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 96, "head_dim": 32, "sliding_window": 24,
        "sliding_window_pattern": 3,
        "eos_token_id": 1,
    },
}  # fmt: skip
SHAPES["ties"] = {
    **SHAPES["llama"],
    "vocab_size": 90,
}  # a vocabulary of no whole number of vectors, every token's logit there twice
SHAPES["capped"] = {**SHAPES["ties"], "vocab_size": 2006}
SHAPES["few"] = {**SHAPES["llama"], "vocab_size": 8}
SHAPES["few sliding"] = {**SHAPES["sliding"], "vocab_size": 8}
PROMPT = [3, 5, 7, 9, 11, 3, 5, 7, 9, 13, 2, 40, 3, 5]


def engines(
    shape: str, taps: tuple[int, ...] = (), clusters: int = 0, ops: CpuOps | None = None, max_batch: int = 4
) -> tuple[Engine, Engine]:
    """Two engines with one model and drafter; the second without the one call."""
    ops = ops or CpuOps(threads=2)
    config = ModelConfig.from_hf(SHAPES[shape])
    weights = dummy_weights(config, "cpu", torch.float32, ops, None, seed=3)
    if shape in ("ties", "capped"):
        half = weights["head"][config.vocab_size // 2 :]
        weights["head"] = torch.cat((half, half))
    if shape == "capped":
        config = replace(config, softcap=5.0)
        weights["head"] = weights["head"] * 20.0
    model = ops.compile(TextModel(config, weights, ops))
    drafter_config = design.plain(config, reads=(0, 2), intermediate=64, taps=taps)
    drafter_config = replace(drafter_config, clusters=clusters, cluster_top=3 if clusters else 0)
    drafter = ops.compile_drafter(
        MTPNet(drafter_config, dummy_weights(drafter_config, "cpu", torch.float32, ops, None, seed=4), ops, model)
    )
    settings = EngineConfig(max_batch=max_batch, max_context=256, page_size=16, prefill_chunk=32)
    pair = []
    for _ in range(2):
        controller = Controller(CostTable(), ("mtp", "ngram"))
        pair.append(
            Engine(
                model,
                None,
                settings,
                SpecConfig(None),
                MTPDrafter(drafter, model),
                controller,
                KVOptions(torch.float16),
            )
        )
    assert [e.name for e in pair[0].executors] == ["host", "eager"]
    pair[1].executors = pair[1].executors[1:]
    return pair[0], pair[1]


def cycle_of(engine: Engine) -> Any:
    executor = engine.executors[0]
    assert isinstance(executor, HostExecutor)
    return executor.cycle


def recorded_batches(engine: Engine) -> list[int]:
    """The number of sequences of every cycle from now on."""
    batches: list[int] = []
    cycle = cycle_of(engine)
    run_cycle = cycle.run

    def recorded(count: int, *arguments: Any, **options: Any) -> None:
        batches.append(count)
        run_cycle(count, *arguments, **options)

    cycle.run = recorded
    return batches


@pytest.mark.parametrize(("shape", "taps"), [("llama", ()), ("llama", (0, 1)), ("sliding", (1,)), ("ties", ())])
@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.9, "seed": 7},
        {"temperature": 0.9, "seed": 7, "top_k": 20, "top_p": 0.9},
        {"temperature": 2.0, "seed": 8, "top_p": 0.7, "min_p": 0.01},
    ],
    ids=["greedy", "T0.9", "top-k", "top-p"],
)
def test_one_call_is_the_single_operations(shape: str, taps: tuple[int, ...], params: dict[str, Any]) -> None:
    """Sequences that draft differently side by side: by the drafter, by a match, not at all; some end before others."""
    one, many = engines(shape, taps)
    requests = [
        request("a", PROMPT, k=3, drafter="mtp", **params),
        request("b", PROMPT[2:], k=5, drafter="ngram", **params),
        request("c", PROMPT[4:], drafter=False, **params),
        request("d", PROMPT[1:], k=1, **{**params, "max_tokens": 9}),
    ]
    assert run(one, requests) == run(many, requests)
    assert one.metrics.drafted == many.metrics.drafted > 0 and one.metrics.accepted == many.metrics.accepted
    assert one.metrics.accepted_by_position == many.metrics.accepted_by_position
    assert torch.equal(one.runner.features, many.runner.features)


@pytest.mark.parametrize("shape", ["llama", "ties", "few sliding"])
def test_logprobs_in_one_call(shape: str) -> None:
    """Beside others who want none, drafted for by lines, trees and copies: the bits of the single operations and of
    plain decoding."""
    one, many = engines(shape)
    prompt = [token % SHAPES[shape]["vocab_size"] for token in PROMPT]
    requests = [
        request("a", prompt, k=3, drafter="mtp", logprobs=5),
        request("b", prompt[2:], k=5, drafter="ngram", logprobs=0, temperature=0.8, seed=3, top_p=0.9),
        request("c", prompt[4:], k=4, drafter="mtp", temperature=1.3, seed=7),
        request("d", prompt[1:], k=4, drafter="mtp", logprobs=8, temperature=1.3, seed=9, max_tokens=30),
    ]
    requests[3].tree = 12

    def told(engine: Engine, jobs: list[Request]) -> dict[str, list[tuple[int, dict[int, float]]]]:
        out: dict[str, list[tuple[int, dict[int, float]]]] = {job.id: [] for job in jobs}
        for job in jobs:
            engine.submit(job)
        while engine.busy:
            for event in engine.step():
                assert (event.logprobs is None) == (event.id == "c")
                out[event.id] += zip(event.tokens, event.logprobs or [{}] * len(event.tokens))
        return out

    rows = recorded_batches(one)
    got = told(one, requests)
    assert max(rows) == 4 and one.metrics.accepted > 0, "nobody was sent the long way"
    assert got == told(many, requests)
    plain = [Request(job.id, job.prompt, job.params, 0, False) for job in requests]
    assert got == {name: line for job in plain for name, line in told(many, [job]).items()}
    assert all(next(iter(top)) == token and len(top) in (5, 6) for token, top in got["a"])


def test_what_the_call_cannot_do_goes_the_other_way() -> None:
    """Penalties, trees with filters: beside and after plain requests, with the same tokens as ever."""
    one, many = engines("llama")
    ran = recorded_batches(one)
    special = [
        request("p", PROMPT, k=2, repetition_penalty=1.3),
        request("l", PROMPT, k=2, logprobs=1, temperature=0.7, top_k=5),
    ]
    special[1].tree = 6
    assert run(one, special) == run(many, special) and not ran
    # one whose tokens are filtered here and there
    mixed = [
        request("x", PROMPT, k=2, top_p=0.8, temperature=1.0),
        request("y", PROMPT[3:], k=2, presence_penalty=0.5, max_tokens=6),
    ]
    assert run(one, mixed) == run(many, mixed) and set(ran) == {1}, "one call once the other request has ended"


def test_a_damaged_drafter_s_ids_never_reach_the_target() -> None:
    one, many = engines("llama", clusters=8)
    want = run(many, [request("a", PROMPT, drafter=False)])
    cycle_of(one).drafter.cluster_ids += 1000
    assert run(one, [request("a", PROMPT, k=4)]) == want and one.metrics.drafted == 0


@pytest.mark.parametrize(
    ("shape", "taps", "params"),
    [("llama", (), {}), ("few", (0, 1), {}), ("few sliding", (), {"temperature": 1.3, "seed": 7})],
)
def test_trees_in_one_call(shape: str, taps: tuple[int, ...], params: dict[str, Any]) -> None:
    """Trees beside lines and copies: the tokens of plain decoding, and of the single operations. With few tokens to
    choose from even a random drafter's branches are taken, so paths are moved into place and read again."""
    one, many = engines(shape, taps, clusters=8 if shape == "llama" else 0)
    prompt = [token % SHAPES[shape]["vocab_size"] for token in PROMPT]
    params = {**params, "max_tokens": 30}
    requests = [
        request("a", prompt, k=3, drafter="mtp", **params),
        request("b", prompt[2:], k=5, drafter="ngram", **params),
        request("c", prompt[4:], k=4, drafter="mtp", **params),
        request("d", prompt[1:], k=1, **{**params, "max_tokens": 9}),
    ]
    for job, nodes in zip(requests, (9, 0, 16, 5)):
        job.tree = nodes
    got = run(one, requests)
    plain = [
        request(job.id, job.prompt, drafter=False, **{**params, "max_tokens": job.params.max_tokens})
        for job in requests
    ]
    assert got == run(many, plain)
    assert run(many, requests) == got and many.metrics.trees > 0
    assert one.metrics.trees > 0 and (one.metrics.branched > 0 or not shape.startswith("few"))
    settings = replace(one.config, graphs=True)
    controller = Controller(CostTable(), ("mtp", "ngram"))
    captured = Engine(one.model, None, settings, SpecConfig(None), one.drafter, controller, KVOptions(torch.float16))
    assert (
        run(captured, [job for job in requests if job.id in "ac"]) == {"a": got["a"], "c": got["c"]}
        and captured.metrics.trees > 0
    )


def test_a_draft_model_asked_for_trees_drafts_chains() -> None:
    """Its drafts are made before the call, which accepts chains only. Catches a call without a drafter that builds a
    tree."""
    one, many = engines("llama")
    drafter = DraftModel(one.model)
    controller = Controller(CostTable(), ("draft_model",))
    settings = replace(one.config)
    engine = Engine(one.model, None, settings, SpecConfig(None), drafter, controller, KVOptions(torch.float16))
    assert isinstance(engine.executors[0], HostExecutor)
    job = request("a", PROMPT, k=4, drafter="draft_model", max_tokens=30)
    job.tree = 8
    assert run(engine, [job]) == run(many, [request("a", PROMPT, drafter=False, max_tokens=30)])
    assert engine.metrics.accepted > 0 and engine.metrics.trees == 0
