"""Vision against transformers on tiny random models: pixels bit for bit, soft tokens and logits within 1e-4."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests import tiny, tiny_vision

from outrider import LLM, SamplingParams
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
    made = pixels(image, budget, 48)
    assert made.shape[:2] == target_size(*size, budget, 48)
    ours, positions = patches(unit_range(torch.from_numpy(made.copy())), 16)
    count = ours.shape[0]
    assert torch.equal(theirs["pixel_values"][0, :count], ours)
    assert torch.equal(theirs["image_position_ids"][0, :count], positions)
    assert int(theirs["num_soft_tokens_per_image"][0]) == count // 9


@pytest.mark.parametrize("kind", tiny_vision.KINDS)
def test_soft_tokens_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    files = hub.resolve(str(tiny_vision.write(kind, tmp_path)))
    model, config = tiny_vision.target(kind), VisionConfig.from_hf(files.config)
    assert config is not None
    ours = VisionModel(config, load_vision(files, config, "cpu", torch.float32))
    for budget, size in ((70, (300, 200)), (16, (100, 400)), (16, (64, 64))):
        made = pixels(tiny_vision.picture(*size), budget, config.side)
        theirs = tiny_vision.soft_tokens(model, config, made)
        got = ours.encode(torch.from_numpy(made.copy()))
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


@pytest.mark.parametrize("kind", tiny_vision.KINDS)
def test_the_next_token_is_that_of_transformers(kind: str, tmp_path: Path) -> None:
    """Two images between texts. The 12B's mask is on sliding layers only, as vLLM, llama.cpp and transformers' own
    `create_masks_for_generate` have it, so it is handed to transformers; the others make theirs themselves."""
    folder = tiny_vision.write(kind, tmp_path)
    llm = LLM.load(str(folder), ops="reference", drafter="none", image_tokens=70, dtype="float32")
    config, model = llm.images().config, tiny_vision.target(kind)
    images = [tiny_vision.picture(90, 200, 1), tiny_vision.picture(64, 48, 2)]
    got = llm.generate(
        {"text": [2, 50, 51, 52, 263, 60, 61, 263, 61, 61, 70, 71, 72], "images": images},
        SamplingParams(max_tokens=1, logprobs=20),
    )[0]
    made = [pixels(image, 70, config.side) for image in images]
    soft = [tiny_vision.soft_tokens(model, config, each) for each in made]
    ids = torch.tensor([prompt_ids([s.shape[0] for s in soft])])
    with torch.no_grad():
        given = [tiny_vision.model_input(config, each) for each in made]
        most = max(values.shape[1] for values, _ in given)
        values = torch.cat([torch.nn.functional.pad(v, (0, 0, 0, most - v.shape[1])) for v, _ in given])
        places = torch.cat([torch.nn.functional.pad(p, (0, 0, 0, most - p.shape[1]), value=-1) for _, p in given])
        out = model(
            input_ids=ids, pixel_values=values, image_position_ids=places,
            mm_token_type_ids=(ids == tiny_vision.IMAGE).long(),
            **(dict(attention_mask=masks(ids, tiny.WINDOW)) if kind == "gemma4_12b" else {}),
        )  # fmt: skip
    theirs = torch.log_softmax(out.logits[0, -1].float(), -1)
    assert got.logprobs is not None and got.stats.prompt_tokens == ids.shape[1]
    for token, value in got.logprobs[0].items():
        assert abs(float(theirs[token]) - value) < 1e-4, (kind, token)
