"""Adapters through `LLM.load`, the command line and `merge`, on a model that the C library runs in one call."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests import tiny
from tests.lora import peft_model, write_adapter

from outrider import LLM
from outrider.cli.main import run
from outrider.config import EngineConfig
from outrider.models.config import ModelConfig
from outrider.types import OutriderError, SamplingParams
from outrider.weights.adapter import merge

PROMPT = [9, 30, 41, 52, 9, 30, 41, 60, 61, 62, 9, 30]
SIZES = {"hidden_size": 64, "head_dim": 32, "num_attention_heads": 2, "intermediate_size": 64}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base and two adapters."""
    folder = tmp_path_factory.mktemp("lora")
    tiny.write(tiny.target("qwen3", **SIZES), folder / "base")
    config = ModelConfig.from_hf(json.loads((folder / "base" / "config.json").read_text()))
    for i, name in enumerate(("a", "b")):
        write_adapter(config, folder / name, seed=i, size=0.3)
    return folder


@pytest.fixture(scope="module")
def llm(files: Path) -> LLM:
    return LLM.load(
        str(files / "base"), drafter="ngram", device="cpu", ops="cpu", threads=1, draft_tokens=3,
        adapters={"a": str(files / "a"), "b": str(files / "b")}, engine=EngineConfig(max_batch=4, max_context=256),
    )  # fmt: skip


def test_steps_with_and_without_adapters_keep_the_fast_path(llm: LLM) -> None:
    fast = llm.engine.executors[0]
    assert fast.name == "host"
    ran: list[str] = []
    for executor in llm.engine.executors:
        launch = executor.launch

        def record(batch: Any, launch: Any = launch, name: str = executor.name) -> Any:
            ran.append(name)
            return launch(batch)

        executor.launch = record  # type: ignore[method-assign]
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    plain = llm.generate([PROMPT], params)[0].token_ids
    assert set(ran) == {"host"}
    ran.clear()
    adapted = llm.generate([PROMPT], params, adapter="a")[0].token_ids
    assert set(ran) == {"host"} and adapted != plain
    requests = [*llm.requests(PROMPT, params), *llm.requests(PROMPT, params, adapter="a")]
    both: dict[str, list[int]] = {r.id: [] for r in requests}
    for event in llm._shared.run(requests):
        both[event.id] += event.tokens
    assert list(both.values()) == [plain, adapted]
    assert llm.generate([PROMPT], params, adapter="a", drafter=False)[0].token_ids == adapted
    assert llm.nbytes > llm._weight_bytes + llm.engine.store.nbytes


def test_unknown_names_are_refused(llm: LLM, files: Path) -> None:
    with pytest.raises(OutriderError, match="no adapter 'c'; loaded: a, b"):
        llm.generate([PROMPT], adapter="c")
    with pytest.raises(OutriderError, match="no adapter '5'; loaded: a, b"):
        llm.generate([PROMPT], adapter=5)  # type: ignore[arg-type]
    with pytest.raises(OutriderError, match="one process"):
        LLM.load(str(files / "base"), adapters={"a": "x"}, tensor_parallel=2)
    with pytest.raises(OutriderError, match="max_adapters must be at least 1"):
        LLM.load(str(files / "base"), max_adapters=0)


def test_merging_gives_pefts_weights(tmp_path: Path) -> None:
    """In float32, and once more rounded to bfloat16."""
    for dtype in (torch.float32, torch.bfloat16):
        reference = tiny.target("llama")
        folder = tmp_path / str(dtype)
        tiny.write(reference.to(dtype), folder / "base")
        adapted = peft_model(reference.float(), folder / "adapter", use_rslora=True)
        said: list[str] = []
        assert merge(str(folder / "base"), str(folder / "adapter"), folder / "out", said.append) == 21
        theirs = {k: v.to(dtype) for k, v in adapted.merge_and_unload().state_dict().items()}
        ours = load_file(folder / "out" / "model.safetensors")
        assert set(ours) == set(load_file(folder / "base" / "model.safetensors"))
        for name, value in ours.items():
            assert value.dtype == dtype
            torch.testing.assert_close(value, theirs[name], rtol=1e-6 if dtype == torch.float32 else 0.01, atol=1e-5)
        merged = LLM.load(str(folder / "out"), drafter="none", device="cpu", ops="reference", draft_tokens=0)
        assert merged.tokenizer is not None
    with pytest.raises(OutriderError, match="is not an empty folder"):
        merge(str(folder / "base"), str(folder / "adapter"), folder / "out", said.append)


def test_the_command_line(files: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def outrider(*words: object) -> int:
        monkeypatch.setattr(sys, "argv", ["outrider", *map(str, words)])
        return run()

    (files / "int4").mkdir()
    scheme = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False}
    config = json.loads((files / "base" / "config.json").read_text())
    (files / "int4" / "config.json").write_text(json.dumps({**config, "quantization_config": scheme}))
    base = files / "base"
    how = ("--raw", "--max-tokens", 6, "--json", "--device", "cpu", "--drafter", "ngram")
    texts = []
    for words in ((), ("--adapter", f"x={files / 'a'}"), ("--adapter", files / "b")):
        assert outrider("generate", base, "hello", *how, *words) == 0
        texts.append(json.loads(capsys.readouterr().out)["token_ids"])
    assert texts[0] != texts[1] != texts[2] != texts[0]
    for words, said in (
        (("generate", base, "hello", *how, "--adapter", f"x={files / 'none'}"), "does not exist"),
        (
            ("generate", base, "x", *how, "--adapter", f"a={files / 'a'}", "--adapter", f"b={files / 'b'}"),
            "one adapter",
        ),
        (
            ("generate", base, "x", *how, "--adapter", f"a={files / 'a'}", "--adapter", f"a={files / 'b'}"),
            "two adapters",
        ),
        (("generate", base, "x", *how, "--adapter", f"a b={files / 'a'}"), "letters, digits"),
        (("merge", files / "int4", "--adapter", files / "a", "--out", files / "m"), "int4 is quantised"),
    ):
        assert outrider(*words) == 2
        lines = capsys.readouterr().err.strip().splitlines()
        assert said in lines[-1] and lines[-1].startswith("outrider: ")
    assert outrider("merge", base, "--adapter", files / "a", "--out", files / "merged") == 0
    assert "21 tensors changed" in capsys.readouterr().out
