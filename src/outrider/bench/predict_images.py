"""Predicts the cost of an image in a prompt: its soft tokens, the arithmetic of the vision model and of the tokens, and
the time of both. Torch-free."""

from __future__ import annotations

from typing import TypedDict

from ..models.inspect import flops, model_size
from ..models.vision_config import IMAGE_TOKENS, VisionConfig
from .predict import Setup

TOWER_REACH, PROMPT_REACH = 0.35, 0.5  # of the matrix rate: towers reach 21 to 40 % on an H200 from 266 tokens on
CPU_RATE = 0.25  # of a CPU's 8-bit rate: a tower multiplies floats


class ImageCost(TypedDict):
    tokens: int
    tower_tflop: float
    tower_ms: float
    prompt_tflop: float
    prompt_ms: float


def image_costs(vision: VisionConfig, setup: Setup) -> list[ImageCost]:
    """For each budget of `--image-tokens`; Gemma 3 has one."""
    rate = setup.on.rate * 1e9  # per millisecond
    tower_rate = rate * (TOWER_REACH if setup.on.overlaps else CPU_RATE)
    size, costs = model_size(setup.target), list[ImageCost]()
    for tokens in (vision.tokens,) if vision.tokens else IMAGE_TOKENS:
        tower, prompt = vision.flops(tokens), flops(size, tokens, setup.context, 0)
        costs.append(
            {
                "tokens": tokens, "tower_tflop": tower / 1e12, "tower_ms": tower / tower_rate,
                "prompt_tflop": prompt / 1e12, "prompt_ms": prompt / (rate * PROMPT_REACH) / setup.gpus,
            }
        )  # fmt: skip
    return costs
