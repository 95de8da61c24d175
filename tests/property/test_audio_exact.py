"""A request with sound gives the same tokens alone and in a batch, with and without drafts, cut and pre-empted."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from tests import block_drafters, lora, quantised, tiny, tiny_audio, tiny_vision

from outrider import LLM, SamplingParams
from outrider.models.config import ModelConfig
from outrider.weights import hub


@pytest.fixture(scope="module", params=tiny_audio.ALL_KINDS)
def folders(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    where = tmp_path_factory.mktemp("audio")
    tiny_audio.write(request.param, where / "target")
    tiny.write_assistant(request.param, where / "drafter")
    return str(where / "target"), str(where / "drafter")


def load(folders: tuple[str, str], ops: str = "cpu", **changes: object) -> LLM:
    settings: dict[str, object] = dict(
        image_tokens=70, max_context=480, dtype="float32", threads=1, max_batch=4, page_size=16
    )
    return LLM.load(folders[0], drafter=folders[1], ops=ops, **settings | changes)


def sound(num_samples: int, seed: int) -> tuple[object, int]:
    return tiny_audio.samples(num_samples, seed), tiny_audio.RATE


def prompts(kind_samples: int = 640) -> list[object]:
    """Clips of 1, 25, 61 and 70 soft tokens of a conformer, beside a text and beside an image. The tiny 12B's frames
    are 40 samples, so its clips are shorter."""
    first, second, third = (sound(count * kind_samples, count) for count in (25, 61, 1))
    image = tiny_vision.picture(64, 48, 2)
    return [
        {"text": "What is said first: <|audio|> and then <|audio|> here?", "audio": [first, second]},
        "only text stands here, and it goes on for a while",
        {
            "text": "see <|image|> and hear <|audio|> together",
            "images": [image],
            "audio": [sound(70 * kind_samples, 70)],
        },
        {"text": "What is said first: <|audio|> and then <|audio|> here?", "audio": [first, third]},
    ]


def prompts_of(llm: LLM) -> list[object]:
    config = llm.sound().config
    return prompts(640 if config.kind == "conformer" else config.hidden)


def params(temperature: float, max_tokens: int = 16) -> SamplingParams:
    return SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=5, ignore_eos=True)


def plain(llm: LLM, sampling: SamplingParams, **options: object) -> list[list[int]]:
    """The tokens of each prompt alone, without drafts and without an earlier prompt's prefix."""
    tokens = []
    for prompt in prompts_of(llm):
        llm.engine.store.prefix.clear()
        tokens.append(llm.generate(prompt, sampling, drafter=False, **options)[0].token_ids)  # type: ignore[arg-type]
    llm.engine.store.prefix.clear()
    return tokens


def texts(answers: list) -> list[list[int]]:
    return [answer.token_ids for answer in answers]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_alone_in_a_batch_and_with_drafts(folders: tuple[str, str], temperature: float) -> None:
    llm = load(folders)
    sampling = params(temperature)
    alone = plain(llm, sampling)
    for options in ({"draft_tokens": 1}, {"draft_tokens": 4}, {"draft_tokens": 8}, {"draft_tokens": 16},
                    {"draft_tokens": 4, "tree": 8}, {"draft_tokens": 8, "tree": 16}):  # fmt: skip
        llm.engine.store.prefix.clear()
        batch = llm.generate(prompts_of(llm), sampling, **options)
        assert texts(batch) == alone, options
        assert sum(answer.stats.drafted for answer in batch), options
        cached = llm.generate(prompts_of(llm), sampling, **options)  # now with prefixes from the cache
        assert texts(cached) == alone, options
        assert sum(answer.stats.cached_tokens for answer in cached), options
    llm.engine.check()
    llm.close()


def test_the_definition_says_the_same(folders: tuple[str, str]) -> None:
    """Plain torch, where products may round otherwise for another number of rows: one request at a time."""
    llm = load(folders, "reference")
    sampling = params(0.9, 8)
    alone = plain(llm, sampling)
    for prompt, tokens in zip(prompts_of(llm), alone):
        assert llm.generate(prompt, sampling, draft_tokens=4)[0].token_ids == tokens
    llm.close()


def test_captured_steps_read_one_behind(folders: tuple[str, str]) -> None:
    """Decoding as graphs (on a CPU the captured function itself): prompts of clips run in passes of their own."""
    llm = load(folders)
    alone = plain(llm, params(0.9))
    llm.close()
    captured = load(folders, graphs=True, draft_tokens=4)
    assert texts(captured.generate(prompts_of(captured), params(0.9))) == alone
    captured.engine.check()
    captured.close()


def test_preempted_and_cut(folders: tuple[str, str]) -> None:
    """Sequences run out of pages, give theirs up and are computed again; clips are longer than a chunk, which cuts
    them."""
    sampling = params(0.0, 48)
    whole = load(folders)
    answers = [whole.generate(prompt, sampling, drafter=False)[0] for prompt in prompts_of(whole)]
    whole.close()
    longest = max(answer.stats.prompt_tokens for answer in answers) + sampling.max_tokens
    few = -(-longest // 64) * 64 + 64  # one sequence and a bit
    tight = load(folders, max_context=256, kv_tokens=few, prefill_chunk=32)
    assert texts(tight.generate(prompts_of(tight), sampling)) == texts(answers)
    assert tight.engine.scheduler.preemptions
    tight.engine.check()
    tight.close()


def test_a_clip_is_encoded_once_and_known_by_its_content(folders: tuple[str, str]) -> None:
    llm = load(folders)
    encoder = llm.sound()
    model = encoder.model
    calls = []
    encode = model.encode
    model.encode = lambda samples: calls.append(len(samples)) or encode(samples)  # type: ignore[method-assign,func-returns-value]
    sampling = SamplingParams(max_tokens=8, ignore_eos=True, logprobs=1)
    first, second = sound(4_000, 7), sound(4_000, 8)
    one, again, other = (
        llm.generate({"text": "a <|audio|> b", "audio": [clip]}, sampling)[0] for clip in (first, first, second)
    )
    assert len(calls) == 2
    assert one.token_ids == again.token_ids and one.logprobs == again.logprobs
    assert other.stats.cached_tokens == 0 and other.logprobs != one.logprobs, "the ids are equal, the sound is not"
    llm.close()


def test_an_adapter_and_a_block_drafter(folders: tuple[str, str], tmp_path: Path) -> None:
    """A block drafter keeps K/V of its own, of the rows of clips as of all others."""
    raw = {**block_drafters.LAYOUTS["z-lab"], "vocab_size": tiny.VOCAB}
    block_drafters.write(tmp_path / "block", raw, block_drafters.tensors(raw))
    lora.write_adapter(ModelConfig.from_hf(hub.resolve(folders[0]).config), tmp_path / "adapter", size=0.2)
    for drafter, adapter in ((str(tmp_path / "block"), None), (folders[1], "tuned")):
        adapters = {} if adapter is None else {adapter: str(tmp_path / "adapter")}
        llm = load((folders[0], drafter), adapters=adapters)
        alone = plain(llm, params(0.9), adapter=adapter)
        answers = llm.generate(prompts_of(llm), params(0.9), draft_tokens=4, adapter=adapter)
        assert texts(answers) == alone
        assert sum(answer.stats.drafted for answer in answers)
        assert not any(answer.stats.drafter_off for answer in answers)
        llm.close()


@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_quantised_targets(folders: tuple[str, str], quantize: str) -> None:
    llm = load(folders, quantize=quantize, dtype="bfloat16" if quantize == "int4" else "float32")
    alone = plain(llm, params(0.9))
    assert texts(llm.generate(prompts_of(llm), params(0.9), draft_tokens=4)) == alone
    llm.close()


@pytest.mark.parametrize("scheme", ["ct-int4-channel", "ct-fp8-dynamic"])
def test_quantised_checkpoints(folders: tuple[str, str], tmp_path: Path, scheme: str) -> None:
    """Their audio weights stay in 16 bits, so the soft tokens are those of the checkpoint they were made of."""
    shutil.copytree(folders[0], tmp_path / "target")
    quantised.rewrite(tmp_path / "target", scheme)
    llm = load((str(tmp_path / "target"), folders[1]), dtype="bfloat16")
    alone = plain(llm, params(0.9))
    assert texts(llm.generate(prompts_of(llm), params(0.9), draft_tokens=4)) == alone
    dense = load(folders, dtype="bfloat16")
    soft_tokens = [model.sound().encode(sound(4_000, 3)).soft_tokens for model in (llm, dense)]
    assert torch.equal(*soft_tokens)
    dense.close()
    llm.close()


def test_prefixes_with_clips_come_back_from_disk(folders: tuple[str, str], tmp_path: Path) -> None:
    """Files are named by the clip's content: another clip in the same place finds nothing."""
    sampling = params(0.9)
    first, second = sound(16_000, 7), sound(16_000, 8)
    answers = []
    for clip in (first, first, second):
        llm = load(folders, prefix_store=str(tmp_path))
        prompt = {"text": "a <|audio|> and what follows it here", "audio": [clip]}
        answers.append(llm.generate(prompt, sampling, draft_tokens=4)[0])
        llm.close()
    assert answers[0].token_ids == answers[1].token_ids
    assert [answer.stats.cached_tokens > 0 for answer in answers] == [False, True, False]
