"""A request with images gives the same tokens alone and in a batch, with and without drafts, cut and pre-empted."""

from __future__ import annotations

import pytest
from tests import tiny, tiny_vision

from outrider import LLM, SamplingParams


@pytest.fixture(scope="module", params=tiny_vision.KINDS)
def folders(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    where = tmp_path_factory.mktemp("vision")
    tiny_vision.write(request.param, where / "target")
    if request.param not in tiny_vision.GEMMA4:  # it has no MTP drafter: a small model drafts
        tiny.write_target("gemma3", where / "drafter", seed=0)
        return str(where / "target"), f"draft:{where / 'drafter'}"
    tiny.write_assistant(request.param, where / "drafter")
    return str(where / "target"), str(where / "drafter")


def load(folders: tuple[str, str], ops: str, **more: object) -> LLM:
    options = dict(image_tokens=70, max_context=480, dtype="float32", threads=1, max_batch=4, page_size=16) | more
    return LLM.load(folders[0], drafter=folders[1], ops=ops, **options)


def prompts() -> list[object]:
    """Gemma 3's placeholder is another: there the images stand in front."""
    images = [tiny_vision.picture(90, 200, 1), tiny_vision.picture(64, 48, 2), tiny_vision.picture(40, 300, 3)]
    return [
        {"text": "What is this that we see: <|image|> next to <|image|> here?", "images": images[:2]},
        "only text stands here, and it goes on for a while",
        {"text": "again <|image|> and nothing else", "images": images[2:]},
        {"text": "What is this that we see: <|image|> next to <|image|> here?", "images": [images[0], images[2]]},
    ]


@pytest.mark.parametrize(("ops", "temperature"), [("reference", 0.9), ("cpu", 0.0), ("cpu", 0.9)])
def test_alone_in_a_batch_and_with_drafts(folders: tuple[str, str], ops: str, temperature: float) -> None:
    llm = load(folders, ops)
    params = SamplingParams(temperature=temperature, max_tokens=16, seed=5, ignore_eos=True)
    alone = []
    for prompt in prompts():
        llm.engine.store.prefix.clear()
        alone.append(llm.generate(prompt, params, drafter=False)[0].token_ids)
    for k in (1, 8) if ops == "cpu" else (4,):
        llm.engine.store.prefix.clear()
        if ops == "cpu":  # torch's products may round otherwise for another number of rows
            batch = llm.generate(prompts(), params, draft_tokens=k)
            assert [answer.token_ids for answer in batch] == alone
            assert sum(answer.stats.drafted for answer in batch)
            cached = llm.generate(prompts(), params, draft_tokens=k)  # now with prefixes from the cache
            assert [answer.token_ids for answer in cached] == alone
            assert sum(answer.stats.cached_tokens for answer in cached)
        else:
            for prompt, tokens in zip(prompts(), alone):
                assert llm.generate(prompt, params, draft_tokens=k)[0].token_ids == tokens
    llm.engine.check()
    llm.close()


def test_captured_steps_read_one_behind(folders: tuple[str, str]) -> None:
    """Decoding as graphs (on a CPU the captured function itself): prompts of images run in passes of their own."""
    params = SamplingParams(temperature=0.9, max_tokens=16, seed=5, ignore_eos=True)
    plain = load(folders, "cpu")
    alone = [plain.generate(prompt, params, drafter=False)[0].token_ids for prompt in prompts()]
    plain.close()
    if folders[1].startswith("draft:"):  # a draft model's rounds are not captured
        folders = (folders[0], "ngram")
    captured = load(folders, "cpu", graphs=True, draft_tokens=4)
    assert captured.engine.executors[0].name == "graphs"
    assert [answer.token_ids for answer in captured.generate(prompts(), params)] == alone
    captured.engine.check()
    captured.close()


def test_preempted_and_cut(folders: tuple[str, str]) -> None:
    """Sequences run out of pages, give theirs up and are computed again; an image is longer than a small chunk."""
    params = SamplingParams(max_tokens=48, seed=3, ignore_eos=True)
    plain = load(folders, "cpu")
    completion = [plain.generate(prompt, params, drafter=False)[0] for prompt in prompts()]
    alone = [answer.token_ids for answer in completion]
    plain.close()
    longest = max(answer.stats.prompt_tokens for answer in completion) + params.max_tokens
    few = -(-longest // 64) * 64 + 64  # one sequence and a bit
    tight = load(folders, "cpu", max_context=256, kv_tokens=few, prefill_chunk=32)
    answers = tight.generate(prompts(), params)
    assert [answer.token_ids for answer in answers] == alone
    assert tight.engine.scheduler.preemptions
    tight.engine.check()
    tight.close()


def test_the_same_ids_with_another_image_are_another_prefix(folders: tuple[str, str]) -> None:
    llm = load(folders, "cpu")
    params = SamplingParams(max_tokens=8, ignore_eos=True, logprobs=1)
    first = tiny_vision.picture(64, 64, 7)
    second = tiny_vision.picture(64, 64, 8)
    one, again, other = (
        llm.generate({"text": "a <|image|> b", "images": [i]}, params)[0] for i in (first, first, second)
    )
    assert one.token_ids == again.token_ids and one.logprobs == again.logprobs
    assert other.stats.cached_tokens == 0 and other.logprobs != one.logprobs, "an image changes nothing"
    llm.close()
