"""Images together with adapters, block drafters, draft trees, long drafts and preemption: the same tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests import block_drafters, lora, tiny, tiny_vision
from tests.property.test_images_exact import load, prompts

from outrider import LLM, SamplingParams
from outrider.models.config import ModelConfig
from outrider.weights import hub

KINDS = ("gemma4_e2b", "gemma4_31b")  # causal; images that see themselves


@pytest.fixture(scope="module", params=KINDS)
def folders(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    where = tmp_path_factory.mktemp("vision")
    tiny_vision.write(request.param, where / "target")
    tiny.write_assistant(request.param, where / "drafter")
    return str(where / "target"), str(where / "drafter")


def params(temperature: float) -> SamplingParams:
    return SamplingParams(temperature=temperature, max_tokens=20, seed=5, ignore_eos=True)


def plain(llm: LLM, temperature: float, **more: object) -> list[list[int]]:
    llm.engine.store.prefix.clear()
    answer = [llm.generate(prompt, params(temperature), drafter=False, **more)[0].token_ids for prompt in prompts()]  # type: ignore[arg-type]
    llm.engine.store.prefix.clear()
    return answer


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_long_drafts_and_trees(folders: tuple[str, str], temperature: float) -> None:
    llm = load(folders, "cpu")
    want = plain(llm, temperature)
    for how in ({"draft_tokens": 16}, {"draft_tokens": 4, "tree": 8}):
        answers = llm.generate(prompts(), params(temperature), **how)
        assert [answer.token_ids for answer in answers] == want, how
        assert sum(answer.stats.drafted for answer in answers)
    llm.close()


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_an_adapter(folders: tuple[str, str], temperature: float, tmp_path: Path) -> None:
    """Its rows of an image run in a pass of their own too; it changes the answer's log-probabilities."""
    lora.write_adapter(ModelConfig.from_hf(hub.resolve(folders[0]).config), tmp_path / "adapter", size=0.2)
    llm = load(folders, "cpu", adapters={"tuned": str(tmp_path / "adapter")})
    want = plain(llm, temperature, adapter="tuned")
    answers = llm.generate(prompts(), params(temperature), draft_tokens=4, adapter="tuned")
    assert [answer.token_ids for answer in answers] == want
    one = SamplingParams(max_tokens=1, logprobs=1)
    tuned, bare = (llm.generate(prompts()[0], one, adapter=name)[0].logprobs for name in ("tuned", None))
    assert tuned != bare
    llm.close()


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_block_drafter_reads_images(folders: tuple[str, str], temperature: float, tmp_path: Path) -> None:
    """It keeps K/V of its own, of the rows of images as of all others."""
    raw = {**block_drafters.LAYOUTS["z-lab"], "vocab_size": tiny.VOCAB}
    block_drafters.write(tmp_path / "block", raw, block_drafters.tensors(raw))
    llm = load((folders[0], str(tmp_path / "block")), "cpu")
    want = plain(llm, temperature)
    answers = llm.generate(prompts(), params(temperature), draft_tokens=4)
    assert [answer.token_ids for answer in answers] == want
    assert sum(answer.stats.drafted for answer in answers)
    assert not any(answer.stats.drafter_off for answer in answers)
    llm.close()


def test_preemption(folders: tuple[str, str]) -> None:
    """The K/V of preempted sequences, images included, is computed again."""
    more = SamplingParams(max_tokens=48, seed=3, ignore_eos=True)
    whole = load(folders, "cpu")
    want = [whole.generate(prompt, more, drafter=False)[0].token_ids for prompt in prompts()]
    whole.close()
    tight = load(folders, "cpu", max_context=256, kv_tokens=448)
    assert [answer.token_ids for answer in tight.generate(prompts(), more)] == want
    assert tight.engine.scheduler.preemptions
    tight.engine.check()
    tight.close()
