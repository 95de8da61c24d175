"""Prompts with sound against transformers on tiny random models: logits within 1e-4 in float32."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tests import tiny, tiny_audio, tiny_vision
from tests.parity.test_vision import images_of, masks, same_logprobs
from transformers import PreTrainedModel

from outrider import LLM, SamplingParams

ONE_TOKEN = SamplingParams(max_tokens=1, logprobs=20)


class Heard:
    """A tiny model here and in transformers."""

    def __init__(self, kind: str, folder: Path, **settings: object) -> None:
        self.kind = kind
        self.model: PreTrainedModel = tiny_audio.target(kind)
        self.llm = LLM.load(
            str(tiny_audio.write(kind, folder)), ops="reference", drafter="none", image_tokens=70, dtype="float32",
            max_context=480, **settings,
        )  # fmt: skip
        self.audio = self.llm.sound().config
        self.vision = self.llm.images().config

    def clip(self, num_tokens: int) -> np.ndarray:
        """A clip that ends inside of its last token."""
        samples = 640 if self.audio.kind == "conformer" else self.audio.hidden
        return tiny_audio.samples(num_tokens * samples - 7, seed=num_tokens)

    def logprobs(self, ids: list[int], clips: list[np.ndarray], images: list | None = None) -> torch.Tensor:
        """transformers', of the token behind `ids`."""
        prompt = torch.tensor([ids])
        types = (prompt == tiny_vision.IMAGE).long() + 3 * (prompt == tiny_audio.AUDIO)
        inputs = tiny_audio.model_input(self.audio, clips) if clips else {}
        if images:
            inputs |= images_of(self.vision, [tiny_vision.decoded(self.vision, image, 70) for image in images])
        if self.kind == "gemma4_12b":  # see test_vision.py
            inputs["attention_mask"] = masks(prompt, tiny.WINDOW)
        with torch.no_grad():
            out = self.model(input_ids=prompt, mm_token_type_ids=types, **inputs)
        return torch.log_softmax(out.logits[0, -1].float(), -1)

    def soft_ids(self, clip: np.ndarray) -> list[int]:
        return [tiny_audio.BOA, *[tiny_audio.AUDIO] * self.audio.num_tokens(len(clip)), tiny_audio.EOA]


@pytest.fixture(params=tiny_audio.ALL_KINDS)
def heard(request: pytest.FixtureRequest, tmp_path: Path) -> Heard:
    return Heard(request.param, tmp_path)


def test_the_next_token_after_clips_of_several_lengths(heard: Heard) -> None:
    """One clip, and two of different lengths, which transformers pads to the longer one."""
    clips = [heard.clip(count) for count in (1, 2, 11, 12, 13, 40)]
    for chosen in ([clips[0]], [clips[2]], [clips[3]], [clips[4], clips[1]], [clips[5], clips[0]]):
        text = [2, 50, 51, 52]
        ids = list(text)
        for i, clip in enumerate(chosen):
            text += [tiny_audio.AUDIO, 60 + i, 61]
            ids += [*heard.soft_ids(clip), 60 + i, 61]
        text += [70, 71, 72]
        ids += [70, 71, 72]
        prompt = {"text": text, "audio": [(clip, tiny_audio.RATE) for clip in chosen]}
        answer = heard.llm.generate(prompt, ONE_TOKEN)[0]
        same_logprobs(answer, heard.logprobs(ids, chosen), len(ids))


def test_a_batch(heard: Heard) -> None:
    clips = [heard.clip(count) for count in (3, 25)]
    prompts = [{"text": [2, 50, tiny_audio.AUDIO, 60, 61], "audio": [(clip, tiny_audio.RATE)]} for clip in clips]
    answers = heard.llm.generate([*prompts, [2, 50, 60, 61]], ONE_TOKEN)
    for clip, answer in zip(clips, answers):
        ids = [2, 50, *heard.soft_ids(clip), 60, 61]
        same_logprobs(answer, heard.logprobs(ids, [clip]), len(ids))
    same_logprobs(answers[2], heard.logprobs([2, 50, 60, 61], []), 4)


def test_beside_an_image(heard: Heard) -> None:
    """In either order; what was put into the prompt first moves what follows."""
    image = tiny_vision.picture(64, 48, 2)
    clip = heard.clip(30)
    count = heard.llm.images().encode(image).soft_tokens.shape[0]
    seen = [tiny_vision.BOI, *[tiny_vision.IMAGE] * count, tiny_vision.EOI]
    for first, second in ((tiny_audio.AUDIO, tiny_vision.IMAGE), (tiny_vision.IMAGE, tiny_audio.AUDIO)):
        text = [2, 50, first, 60, second, 61, 62]
        ids = [
            part
            for token in text
            for part in {tiny_audio.AUDIO: heard.soft_ids(clip), tiny_vision.IMAGE: seen}.get(token, [token])
        ]
        prompt = {"text": text, "images": [image], "audio": [(clip, tiny_audio.RATE)]}
        answer = heard.llm.generate(prompt, ONE_TOKEN)[0]
        same_logprobs(answer, heard.logprobs(ids, [clip], [image]), len(ids))


@pytest.mark.parametrize("kind", tiny_audio.ALL_KINDS)
def test_a_clip_in_a_second_turn(kind: str, tmp_path: Path) -> None:
    """The ids are those of the text in which every clip is spelled out; the first turn comes from the cache, and
    chunks of 8 rows cut the clips."""
    heard = Heard(kind, tmp_path, page_size=8, prefill_chunk=8)
    clips = [heard.clip(25), heard.clip(13)]
    parts = [{"type": "audio", "audio": (clip, tiny_audio.RATE)} for clip in clips]
    turns = [{"role": "user", "content": [parts[0], {"type": "text", "text": "What is said?"}]}]
    heard.llm.chat(turns, ONE_TOKEN)
    turns += [{"role": "assistant", "content": "A word."}]
    turns += [{"role": "user", "content": [{"type": "text", "text": "And"}, parts[1], {"type": "text", "text": "?"}]}]
    answer = heard.llm.chat(turns, ONE_TOKEN)
    spelled = [f"<|audio>{'<|audio|>' * heard.audio.num_tokens(len(clip))}<audio|>" for clip in clips]
    text = (
        f"<bos><|im_start|>user\n{spelled[0]}What is said?<|im_end|>\n<|im_start|>assistant\nA word.<|im_end|>\n"
        f"<|im_start|>user\nAnd{spelled[1]}?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert heard.llm.tokenizer is not None
    ids = heard.llm.tokenizer.encode(text)
    assert heard.llm.chat_prompt(turns) == ids and answer.stats.cached_tokens
    same_logprobs(answer, heard.logprobs(ids, clips), len(ids))
