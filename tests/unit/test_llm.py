"""Putting the parts together: what `LLM.load` needs and does not need."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from tests.server_fakes import tokenizer

from outrider import LLM, ops
from outrider import llm as llm_module
from outrider.llm import each_prompt
from outrider.models import builtin_configs
from outrider.types import OutriderError, SamplingParams
from outrider.weights import hub


def test_a_known_gemma_on_dummy_weights_needs_no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """The configurations are in the package; loading used to ask the hub for them."""

    def refuse(*_: Any) -> None:
        raise AssertionError("the network was asked")

    monkeypatch.setattr(hub, "snapshot", refuse)
    raw = builtin_configs.BUILTIN_CONFIGS["google/gemma-4-E2B-it"]
    for name in (n for n in builtin_configs.BUILTIN_CONFIGS if n.endswith("-it")):
        assert hub.resolve(name, weights=False).config == builtin_configs.BUILTIN_CONFIGS[name]
        assert (
            hub.resolve(f"{name}-assistant", kind="drafter", weights=False).config
            == builtin_configs.BUILTIN_CONFIGS[f"{name}-assistant"]
        )
    small = dict(
        raw["text_config"], hidden_size=64, num_hidden_layers=5, layer_types=raw["text_config"]["layer_types"][:5]
    )
    small |= dict(
        num_kv_shared_layers=0,
        intermediate_size=64,
        vocab_size=128,
        vocab_size_per_layer_input=128,
        hidden_size_per_layer_input=32,
    )
    monkeypatch.setattr(hub, "BUILTIN_CONFIGS", {"google/gemma-4-E2B-it": {**raw, "text_config": small}})
    llm = LLM.load("google/gemma-4-E2B-it", drafter="none", device="cpu", ops="reference", load_format="dummy")
    done = llm.generate([3, 5, 7], SamplingParams(max_tokens=4, ignore_eos=True))
    assert len(done[0].token_ids) == 4


def test_a_loaded_model_has_captured_what_its_first_requests_need(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first requests of a program waited for captures: only a server made them ahead."""
    assembled = MagicMock(cost_key=None)
    monkeypatch.setattr(llm_module, "assemble", lambda *args: assembled)
    assert isinstance(LLM.load("m", say=print), LLM)
    assembled.engine.warm_up.assert_called_once_with(print)


def test_a_gpu_without_a_number_is_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch refuses to make "cuda" the current device: it must be told which one."""
    devices: list[Any] = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: devices.append(torch.device(device).index))
    monkeypatch.setattr(ops, "place", lambda name: torch.device(name))

    def stop(place: torch.device, *_: Any) -> None:
        raise OutriderError("far enough")

    monkeypatch.setattr(ops, "choose", stop)
    for name in ("cuda", "cuda:1", "cpu"):
        with pytest.raises(OutriderError, match="far enough"):
            LLM.load("smollm2", device=name)
    assert devices == [1]


def test_ctrl_c_while_the_processes_load_ends_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    group = SimpleNamespace(send=lambda _: done.append("send"), abandon=lambda: done.append("abandon"))
    monkeypatch.setattr(llm_module, "join", lambda *_: group)

    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(llm_module, "assemble", interrupted)
    with pytest.raises(KeyboardInterrupt):
        LLM.load("google/gemma-4-E2B-it", tensor_parallel=2, load_format="dummy")
    assert done == ["send", "abandon"]


def test_no_process_is_started_for_a_model_that_cannot_be_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm_module, "join", lambda *_: pytest.fail("processes were started"))
    with pytest.raises(OutriderError, match="too few for --tensor-parallel 1000"):
        LLM.load("google/gemma-4-E2B-it", tensor_parallel=1000, load_format="dummy")
    with pytest.raises(OutriderError, match="'nowhere' does not exist"):
        LLM.load("nowhere", tensor_parallel=2)


@pytest.mark.parametrize("device", ["mps", "meta", "tpu"])
def test_a_device_without_kernels_is_one_line(device: str) -> None:
    with pytest.raises(OutriderError, match=f"unknown device '{device}'; known: cpu, cuda, cuda:N"):
        LLM.load("smollm2", device=device)


def test_what_stood_second_once_is_told_its_name() -> None:
    old: Any = LLM.load  # a drafter was the second argument of earlier versions
    with pytest.raises(OutriderError, match="'none' by its name only"):
        old("smollm2", "none")


def test_a_conversation_may_be_an_iterator_and_may_have_tools() -> None:
    tok = tokenizer(gemma=True)
    llm: Any = SimpleNamespace(_tokenizer=lambda: tok)
    said = [{"role": "user", "content": "Hello"}]
    tool = {"type": "function", "function": {"name": "f"}}
    assert LLM.chat_prompt(llm, iter(said)) == tok.chat(said)
    assert LLM.chat_prompt(llm, said, tools=[tool]) == tok.chat(said, [tool]) != tok.chat(said)
    silent: Any = SimpleNamespace(_tokenizer=lambda: SimpleNamespace(chat=lambda *_: []))
    with pytest.raises(OutriderError, match="makes no prompt of these messages"):
        LLM.chat_prompt(silent, said)
    for wrong in ("Hello", None, 5, [5]):
        with pytest.raises(OutriderError, match="messages are a list"):
            LLM.chat_prompt(llm, wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [None, 5, b"x", bytearray(b"x"), memoryview(b"x"), np.array(3), torch.tensor(3)])
def test_what_is_no_prompt_is_refused(wrong: Any) -> None:
    with pytest.raises(OutriderError, match="prompts are texts or lists of token ids, got"):
        each_prompt(wrong)


@pytest.mark.parametrize("images", ["photo.png", b"x", 5, np.zeros((4, 4, 3), np.uint8)])
def test_images_are_a_list(images: Any) -> None:
    """A single path would be read letter by letter."""
    with pytest.raises(OutriderError, match="a prompt with images or sound is"):
        LLM._with_media(object.__new__(LLM), {"text": "x", "images": images})


def test_a_with_block_closes_the_model() -> None:
    closed: list[bool] = []
    llm = object.__new__(LLM)
    llm.close = lambda: closed.append(True)  # type: ignore[method-assign]
    with llm as same:
        assert same is llm and not closed
    assert closed


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"stop": 5}, "stop must be a string or a list of strings"),
        ({"stop": [5]}, "stop must be a string or a list of strings"),
        ({"stop": b"a"}, "stop must be a string or a list of strings"),
        ({"stop": [""]}, "stop strings must not be empty"),
        ({"logit_bias": [5]}, "logit_bias must map token ids to numbers"),
        ({"logit_bias": {5: math.nan}}, "logit_bias must map token ids to numbers"),
        ({"logit_bias": {5: "1"}}, "logit_bias must map token ids to numbers"),
        ({"bad_words": [5]}, "bad_words must be lists of token ids"),
        ({"bad_words": 5}, "bad_words must be lists of token ids"),
        ({"stop_token_ids": 5}, "stop_token_ids must be a list of token ids"),
    ],
)
def test_sampling_parameters_of_another_type_are_one_line(given: dict[str, Any], told: str) -> None:
    with pytest.raises(OutriderError, match=told):
        SamplingParams(**given).validate(vocab_size=100)
