"""Three ways to run the same step: whichever executor runs them, requests get the tokens that the eager one gives each
alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.engines import request, run
from tests.unit.engine.test_host_cycle import SHAPES

from outrider.config import EngineConfig, SpecConfig
from outrider.engine.engine import Engine
from outrider.engine.memory import KVOptions
from outrider.engine.step import DecodeRow, Request, Sequence, StepBatch, pick
from outrider.models.config import ModelConfig
from outrider.models.decoder import TextModel
from outrider.models.drafter import MTPNet
from outrider.ops.cpu.ops import CpuOps
from outrider.spec.controller import Controller
from outrider.spec.cost import CostTable
from outrider.spec.mtp import MTPDrafter
from outrider.train import design
from outrider.types import SamplingParams
from outrider.weights.load import dummy_weights

PROMPT = [3, 5, 7, 9, 11, 3, 5, 7, 9, 13, 2, 40, 3, 5]


def engine_of(shape: str, kind: str) -> Engine:
    ops = CpuOps(threads=1)
    config = ModelConfig.from_hf(SHAPES[shape])
    model = ops.compile(TextModel(config, dummy_weights(config, "cpu", torch.float32, ops, None, seed=3), ops))
    drafter_config = replace(design.plain(config, reads=(0, 2), intermediate=64), clusters=8, cluster_top=3)
    net = ops.compile_drafter(
        MTPNet(drafter_config, dummy_weights(drafter_config, "cpu", torch.float32, ops, None, seed=4), ops, model)
    )
    settings = EngineConfig(max_batch=6, max_context=256, page_size=16, prefill_chunk=32, graphs=kind == "graphs")
    controller = Controller(CostTable(), ("mtp", "ngram"))
    engine = Engine(
        model, None, settings, SpecConfig(None), MTPDrafter(net, model), controller, KVOptions(torch.float16)
    )
    if kind == "eager":
        engine.executors = engine.executors[-1:]
    assert engine.executors[0].name == kind
    return engine


@pytest.mark.parametrize("shape", ["llama", "sliding"])
@pytest.mark.parametrize("kind", ["eager", "host", "graphs"])
def test_every_executor_gives_the_tokens_of_each_request_alone(kind: str, shape: str) -> None:
    options: list[dict[str, Any]] = [
        {}, {"temperature": 0.9, "seed": 7}, {"temperature": 1.1, "top_k": 7, "seed": 2}, {"repetition_penalty": 1.2},
        {"logprobs": 2},
        {"temperature": 0.6, "seed": 5, "min_tokens": 6, "stop_token_ids": (9, 11)},
    ]  # fmt: skip
    ks = (3, None, 5, 0, 2, 16)
    drafters = ("mtp", True, "ngram", True, True, True)
    jobs = [
        request(str(i), PROMPT[i:] + [20 + i], k=ks[i], drafter=drafters[i], **params)
        for i, params in enumerate(options)
    ]
    got = run(engine_of(shape, kind), jobs)
    for job in jobs:
        alone = run(engine_of(shape, "eager"), [Request(job.id, job.prompt, job.params, 0, False)])
        assert got[job.id] == alone[job.id], (kind, job)


def test_who_runs_a_step_is_decided_in_one_place() -> None:
    def batch(**params: Any) -> StepBatch:
        sampling = SamplingParams(**params)
        seq = Sequence(Request("a", PROMPT, sampling), 0.0, list(PROMPT))
        return StepBatch(decode=[DecodeRow(seq, 0, len(PROMPT) - 1)])

    executors = engine_of("llama", "host").executors
    for params, name in (
        ({}, "host"), ({"temperature": 1.0}, "host"), ({"top_p": 0.5}, "host"),
        ({"temperature": 1.0, "top_p": 0.5}, "host"),
        ({"logprobs": 0}, "host"), ({"logprobs": 20, "temperature": 1.0}, "host"),
        ({"frequency_penalty": 0.1}, "eager"),
    ):  # fmt: skip
        assert pick(executors, batch(**params))[0].name == name, params
    with_graphs = engine_of("llama", "graphs").executors
    assert pick(with_graphs, batch(temperature=1.0, top_p=0.5, logprobs=1, frequency_penalty=0.1))[0].name == "graphs"
