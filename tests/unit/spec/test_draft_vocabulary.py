"""A draft model whose vocabulary has another size: taken where only padding differs, refused before weights are read
where tokens do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests import tiny

from outrider import LLM, SamplingParams, assemble
from outrider.spec import loader
from outrider.types import OutriderError

TEXT = "The quick brown fox"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """One model with vocabularies of three sizes; the tokenizer has 262 tokens."""
    folder = tmp_path_factory.mktemp("models")
    return {size: tiny.write(tiny.target("llama", vocab_size=size), folder / str(size)) for size in (272, 288, 304)}


@pytest.mark.parametrize("ops", ["cpu", "reference"])
@pytest.mark.parametrize("draft", [272, 304])
def test_padding_changes_no_answer(models: dict[int, Path], draft: int, ops: str) -> None:
    drafting = LLM.load(str(models[288]), drafter=f"draft:{models[draft]}", draft_tokens=3, device="cpu", ops=ops)
    plain = LLM.load(str(models[288]), drafter="none", device="cpu", ops=ops)
    for temperature in (0.0, 1.0):
        params = SamplingParams(max_tokens=24, temperature=temperature, ignore_eos=True, seed=3)
        got = drafting.generate(TEXT, params)[0]
        want = plain.generate(TEXT, params)[0]
        assert got.token_ids == want.token_ids and got.stats.drafted > 0
    drawn = drafting.generate(TEXT, SamplingParams(max_tokens=24, temperature=1.5, ignore_eos=True))[
        0
    ]  # ids of the padding come, too
    assert len(drawn.token_ids) == 24 and not drawn.stats.drafter_off


def test_a_text_with_an_id_that_the_draft_model_lacks_gets_no_drafts(models: dict[int, Path]) -> None:
    llm = LLM.load(str(models[288]), drafter=f"draft:{models[272]}", draft_tokens=3, device="cpu", ops="cpu")
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    got = llm.generate([7, 280, 9], params, drafter="draft_model")[0]
    assert got.stats.drafted == 0 and not got.stats.drafter_off
    assert got.token_ids == llm.generate([7, 280, 9], params, drafter=False)[0].token_ids


def test_other_tokens_are_refused_before_weights_are_read(
    models: dict[int, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tiny.write(tiny.target("llama", vocab_size=304), tmp_path / "other")
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    words = [word for word in vocab if len(word) == 1]
    tokenizer["model"]["vocab"] = vocab | dict(zip(words, (vocab[word] for word in reversed(words))))
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))

    def read(*_: Any, **__: Any) -> None:
        pytest.fail("weights were read")

    monkeypatch.setattr(assemble, "load_target", read)
    monkeypatch.setattr(loader, "load_target", read)
    with pytest.raises(
        OutriderError, match=r"other cannot draft for .*: vocabularies of 304 and 288 tokens, from two tokenizers"
    ):
        LLM.load(str(models[288]), drafter=f"draft:{other}", device="cpu")
