"""Vision against transformers on tiny random models: pixels bit for bit, soft tokens and logits within 1e-4."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tests import tiny, tiny_vision

from outrider import LLM, Completion, SamplingParams
from outrider.models.image_processing import pixels, target_size
from outrider.models.vision import VisionModel, patches, unit_range
from outrider.models.vision_config import VisionConfig
from outrider.weights import hub
from outrider.weights.vision import load_vision

SIZES = [(1000, 1000), (1080, 1920), (20, 4000), (31, 17), (768, 768), (640, 427)]


@pytest.mark.parametrize("budget", [70, 280, 1120])
@pytest.mark.parametrize("size", SIZES)
def test_pixels_are_those_of_the_pil_processor(size: tuple[int, int], budget: int) -> None:
    from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

    image = tiny_vision.picture(*size)
    theirs = Gemma4ImageProcessorPil(max_soft_tokens=budget)(image, return_tensors="pt")
    decoded = pixels(image, budget, 48)
    assert decoded.shape[:2] == target_size(*size, budget, 48)
    ours, positions = patches(unit_range(torch.from_numpy(decoded.copy())), 16)
    count = ours.shape[0]
    assert torch.equal(theirs["pixel_values"][0, :count], ours)
    assert torch.equal(theirs["image_position_ids"][0, :count], positions)
    assert int(theirs["num_soft_tokens_per_image"][0]) == count // 9


@pytest.mark.parametrize("size", SIZES)
def test_gemma3_pixels_are_those_of_the_pil_processor(size: tuple[int, int]) -> None:
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    image = tiny_vision.picture(*size)
    theirs = Gemma3ImageProcessorPil(size={"height": 896, "width": 896})(image, return_tensors="pt")["pixel_values"]
    ours = (unit_range(torch.from_numpy(pixels(image, 0, 896).copy())) - 0.5) / 0.5
    assert theirs.shape == (1, 3, 896, 896) and float((theirs[0] - ours.permute(2, 0, 1)).abs().max()) < 1e-6


@pytest.mark.parametrize("kind", tiny_vision.KINDS)
def test_soft_tokens_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    files = hub.resolve(str(tiny_vision.write(kind, tmp_path)))
    model = tiny_vision.target(kind)
    config = VisionConfig.from_hf(files.config)
    assert config is not None
    ours = VisionModel(config, load_vision(files, config, "cpu", torch.float32))
    for budget, size in ((70, (300, 200)), (16, (100, 400)), (16, (64, 64))):
        image = tiny_vision.decoded(config, tiny_vision.picture(*size), budget)
        theirs = tiny_vision.soft_tokens(model, config, image)
        got = ours.encode(torch.from_numpy(image.copy()))
        assert got.shape == theirs.shape and float((got - theirs).abs().max()) < 1e-4, (kind, budget, size)


def prompt_ids(counts: list[int]) -> list[int]:
    """Text, images, text: as the engine expands them."""
    ids = [2, 50, 51, 52]
    for i, count in enumerate(counts):
        ids += [tiny_vision.BOI, *[tiny_vision.IMAGE] * count, tiny_vision.EOI, 60 + i, 61]
    return [*ids, 70, 71, 72]


def masks(ids: torch.Tensor, window: int) -> dict[str, torch.Tensor]:
    """Full layers are causal; on sliding ones an image sees itself, within the window of the past."""
    image = ids[0] == tiny_vision.IMAGE
    block = torch.cumsum(~image, 0)
    at = torch.arange(ids.shape[1])
    causal = at[:, None] >= at[None]
    same = image[:, None] & image[None] & (block[:, None] == block[None])
    sliding = (causal | same) & (at[None] > at[:, None] - window)
    low = torch.finfo(torch.float32).min
    return {
        "full_attention": torch.where(causal, 0.0, low)[None, None],
        "sliding_attention": torch.where(sliding, 0.0, low)[None, None],
    }


def images_of(config: VisionConfig, made: list[np.ndarray]) -> dict[str, torch.Tensor]:
    """Several images as transformers' model takes them: padded to the longest, or of one size."""
    inputs = [tiny_vision.model_input(config, each) for each in made]
    if config.kind == "siglip":
        return {"pixel_values": torch.cat([values for values, _ in inputs])}
    most = max(values.shape[1] for values, _ in inputs)
    pad = torch.nn.functional.pad
    return {
        "pixel_values": torch.cat([pad(v, (0, 0, 0, most - v.shape[1])) for v, _ in inputs]),
        "image_position_ids": torch.cat([pad(p, (0, 0, 0, most - p.shape[1]), value=-1) for _, p in inputs]),
    }


@pytest.mark.parametrize("kind", tiny_vision.KINDS)
def test_the_next_token_is_that_of_transformers(kind: str, tmp_path: Path) -> None:
    """Two images between texts. The 12B's mask is on sliding layers only, as vLLM, llama.cpp and transformers' own
    `create_masks_for_generate` have it, so it is handed to transformers; the others make theirs themselves."""
    folder = tiny_vision.write(kind, tmp_path)
    llm = LLM.load(str(folder), ops="reference", drafter="none", image_tokens=70, dtype="float32")
    config = llm.images().config
    model = tiny_vision.target(kind)
    images = [tiny_vision.picture(90, 200, 1), tiny_vision.picture(64, 48, 2)]
    place = config.placeholder_id
    got = llm.generate(
        {"text": [2, 50, 51, 52, place, 60, 61, place, 61, 61, 70, 71, 72], "images": images},
        SamplingParams(max_tokens=1, logprobs=20),
    )[0]
    decoded = [tiny_vision.decoded(config, image, 70) for image in images]
    soft = [tiny_vision.soft_tokens(model, config, each) for each in decoded]
    ids = torch.tensor([prompt_ids([s.shape[0] for s in soft])])
    types = "token_type_ids" if config.kind == "siglip" else "mm_token_type_ids"
    with torch.no_grad():
        out = model(
            input_ids=ids, **images_of(config, decoded), **{types: (ids == tiny_vision.IMAGE).long()},
            **(dict(attention_mask=masks(ids, tiny.WINDOW)) if kind == "gemma4_12b" else {}),
        )  # fmt: skip
    theirs = torch.log_softmax(out.logits[0, -1].float(), -1)
    same_logprobs(got, theirs, ids.shape[1])


@pytest.mark.parametrize("kind", tiny_vision.KINDS)
def test_an_image_in_a_second_turn(kind: str, tmp_path: Path) -> None:
    """The ids are those of the text in which every image is spelled out, and the first turn comes from the cache."""
    folder = tiny_vision.write(kind, tmp_path)
    llm = LLM.load(
        str(folder), ops="reference", drafter="none", image_tokens=70, dtype="float32", page_size=8, prefill_chunk=8
    )
    config = llm.images().config
    model = tiny_vision.target(kind)
    params = SamplingParams(max_tokens=1, logprobs=20)
    images = [tiny_vision.picture(90, 200, 1), tiny_vision.picture(64, 48, 2)]

    def picture(i):
        return {"type": "image", "image": images[i]}

    turns = [{"role": "user", "content": [picture(0), {"type": "text", "text": "What is it?"}]}]
    llm.chat(turns, params)
    turns += [{"role": "assistant", "content": "A cat."}]
    turns += [{"role": "user", "content": [{"type": "text", "text": "And"}, picture(1), {"type": "text", "text": "?"}]}]
    got = llm.chat(turns, params)
    decoded = [tiny_vision.decoded(config, image, 70) for image in images]
    soft = [tiny_vision.soft_tokens(model, config, each).shape[0] for each in decoded]
    begin, image, end = tiny_vision.SPELLED.get(kind, ("<|image>", "<|image|>", "<image|>"))
    line = "\n\n" if kind == "gemma3_4b" else ""
    spelled = [f"{line}{begin}{image * count}{end}{line}" for count in soft]
    text = (
        f"<bos><|im_start|>user\n{spelled[0]}What is it?<|im_end|>\n<|im_start|>assistant\nA cat.<|im_end|>\n"
        f"<|im_start|>user\nAnd{spelled[1]}?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert llm.tokenizer is not None
    ids = torch.tensor([llm.tokenizer.encode(text)])
    assert llm.chat_prompt(turns) == ids[0].tolist() and got.stats.cached_tokens
    types = "token_type_ids" if config.kind == "siglip" else "mm_token_type_ids"
    with torch.no_grad():
        out = model(
            input_ids=ids, **images_of(config, decoded), **{types: (ids == tiny_vision.IMAGE).long()},
            **(dict(attention_mask=masks(ids, tiny.WINDOW)) if kind == "gemma4_12b" else {}),
        )  # fmt: skip
    same_logprobs(got, torch.log_softmax(out.logits[0, -1].float(), -1), ids.shape[1])


def same_logprobs(got: Completion, theirs: torch.Tensor, length: int) -> None:
    assert got.logprobs is not None and got.stats.prompt_tokens == length
    for token, value in got.logprobs[0].items():
        assert abs(float(theirs[token]) - value) < 1e-4, token
