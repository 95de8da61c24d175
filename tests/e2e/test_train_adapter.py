"""`train --adapter`: a drafter for an adapted model, from its answers to where `auto` finds it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from tests import tiny
from tests.e2e.test_train import job, prompts, quiet
from tests.lora import peft_model, write_adapter

from outrider import LLM, SamplingParams
from outrider.prompts import read_prompts
from outrider.train import run
from outrider.train.answers import read_answers
from outrider.train.target import capture, describe, encode, open_target
from outrider.types import OutriderError

torch.set_num_threads(1)


def test_the_target_is_the_adapted_model(tmp_path: Path) -> None:
    """Its states are peft's, and its hash is another than the base's and another adapter's."""
    reference = tiny.target("qwen3")
    base = tiny.write(reference, tmp_path / "base")
    ids = torch.randint(6, 262, (1, 21), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        theirs = peft_model(reference, tmp_path / "a", rank_pattern={"q_proj": 2})(ids).logits[0]
    opened = open_target(describe(str(base), str(tmp_path / "a")), "cpu", torch.float32)
    ours = opened.model.logits(capture(opened.model, ids).hidden[0])
    assert (ours - theirs).abs().max().item() <= 1e-4
    write_adapter(opened.config, tmp_path / "b")
    hashes = {describe(str(base), adapter).hash for adapter in (None, str(tmp_path / "a"), str(tmp_path / "b"))}
    assert len(hashes) == 3 and opened.hash in hashes


def test_from_answers_to_the_adapters_own_drafter(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tiny.write_target("smollm2", tmp_path / "target")
    data = prompts(tmp_path / "p.jsonl", 16)
    known = describe(str(target))
    for i, name in enumerate("ab"):
        write_adapter(known.config, tmp_path / name, seed=i, size=0.05)
    out = tmp_path / "run"
    adapter = str(tmp_path / "a")
    run.train(job(target, data, out, adapter=adapter, steps=8, eval_every=0), quiet)
    llm = LLM.load(str(target), drafter="none", device="cpu", adapters={"a": adapter})
    encoded = encode(read_prompts(data), known.text, known.config.vocab_size, max_tokens=64)
    cold = [a for a in read_answers(out / "answers.jsonl").values() if a.temperature == 0]
    assert cold, "no greedy answer to compare"
    for answer in cold:
        ids = encoded[answer.prompt].tolist()
        params = SamplingParams(max_tokens=32)
        assert llm.generate([ids], params, adapter="a")[0].token_ids == answer.tokens
    assert any(llm.generate([encoded[a.prompt].tolist()], SamplingParams(max_tokens=32))[0].token_ids != a.tokens
               for a in cold), "the base answers alike"  # fmt: skip
    config = json.loads((out / "drafter" / "config.json").read_text())
    assert config["target_hash"] == describe(str(target), adapter).hash

    with pytest.raises(OutriderError, match="another model"):
        run.train(job(target, data, out, adapter=str(tmp_path / "b"), steps=9, eval_every=0), quiet)

    shutil.copytree(out / "drafter", tmp_path / "a" / "drafter")
    said: list[str] = []
    model = LLM.load(str(target), device="cpu", adapters={"a": adapter}, say=said.append)
    assert "found in the adapter's folder" in model.drafter_note and "other weights" not in model.drafter_note
    assert not any("another adapter" in line for line in said)
    both = {"a": adapter, "b": str(tmp_path / "b")}
    assert "adapter's folder" not in LLM.load(str(target), device="cpu", adapters=both).drafter_note
    LLM.load(
        str(target), device="cpu", drafter=str(out / "drafter"), adapters={"b": both["b"]}, say=said.append
    )  # fmt: skip
    assert any("trained for another adapter" in line for line in said)
