"""The counts of `outrider inspect` against transformers, and against what is published."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import transformers

from outrider.models.builtin_configs import BUILTIN_CONFIGS
from outrider.models.config import DrafterConfig, ModelConfig
from outrider.models.inspect import drafter_size, flops, kv_bytes, model_size, report

TARGETS = [name for name in BUILTIN_CONFIGS if not name.endswith("-assistant")]


@pytest.mark.parametrize(
    "name, total, active",
    [
        ("google/gemma-4-E2B-it", 4.63e9, 2.28e9),  # 5.1 B with its vision and audio towers; "effective 2.3 B"
        ("google/gemma-4-E4B-it", 7.46e9, 4.64e9),  # 8 B with its towers; "effective 4.5 B"
        ("google/gemma-4-12B-it", 11.9e9, 11.9e9),
        ("google/gemma-4-26B-A4B-it", 25.2e9, 3.82e9),
        ("google/gemma-4-31B-it", 30.7e9, 30.7e9),
    ],
)
def test_known_models_have_the_published_size(name: str, total: float, active: float) -> None:
    config = ModelConfig.from_hf(BUILTIN_CONFIGS[name])
    size = model_size(config)
    assert size.total == pytest.approx(total, rel=0.005) and size.active == pytest.approx(active, rel=0.005)
    assert size.active <= size.total


@pytest.mark.parametrize("name", list(BUILTIN_CONFIGS))
def test_transformers_builds_the_same_number_of_parameters(name: str) -> None:
    raw = strip(BUILTIN_CONFIGS[name])
    auto: Any = transformers.AutoConfig.for_model(**raw)
    helper = name.endswith("-assistant")
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(auto if helper else auto.get_text_config())
    theirs = sum(p.numel() for p in model.parameters())
    scalars = sum(b.numel() for n, b in model.named_buffers() if n.endswith("layer_scalar"))
    ours = (
        drafter_size(DrafterConfig.from_hf(BUILTIN_CONFIGS[name])).total
        if helper
        else model_size(ModelConfig.from_hf(BUILTIN_CONFIGS[name])).total
    )
    assert ours == theirs + scalars
    if not helper:  # and it reads the same shapes out of it
        assert ModelConfig.from_hf(auto.to_dict()).layers == ModelConfig.from_hf(BUILTIN_CONFIGS[name]).layers


def strip(raw: Mapping[str, Any]) -> dict[str, Any]:
    """transformers' strict classes refuse fields of the other Gemma 4 kind."""
    text = dict(raw["text_config"])
    if "unified" in raw["model_type"]:
        for key in ("hidden_size_per_layer_input", "enable_moe_block"):
            text.pop(key)
    elif "assistant" in raw["model_type"]:
        text["vocab_size_per_layer_input"] = 0
    return {**raw, "text_config": text}


def test_a_step_with_clusters_reads_a_sliver_of_the_head() -> None:
    small = drafter_size(DrafterConfig.from_hf(BUILTIN_CONFIGS["google/gemma-4-E2B-it-assistant"]))
    head = 262144 * 256
    assert small.total - small.step == head - head * 32 // 2048
    big = drafter_size(DrafterConfig.from_hf(BUILTIN_CONFIGS["google/gemma-4-31B-it-assistant"]))
    assert big.total == big.step


def test_kv_of_sliding_layers_stops_at_the_window() -> None:
    config = ModelConfig.from_hf(BUILTIN_CONFIGS["google/gemma-4-E2B-it"])
    # 12 sliding layers that own K/V with one head of 256, 3 full ones with one of 512; K and V, two bytes each
    assert report(config)["kv_bytes_per_token"] == (12 * 256 + 3 * 512) * 4
    assert kv_bytes(config, 100_000) == 12 * 256 * 4 * 512 + 3 * 512 * 4 * 100_000
    assert kv_bytes(config, 512) == 512 * report(config)["kv_bytes_per_token"]


def test_prompts_go_as_far_as_their_kv() -> None:
    """Only 15 of E2B's 35 layers write K/V, and the others have MLPs of twice the width: a quarter of the work is
    left."""
    size = model_size(ModelConfig.from_hf(BUILTIN_CONFIGS["google/gemma-4-E2B-it"]))
    assert 3.0 < (flops(size, 1024, 0, 1024) - 2.0 * 1024 * size.embedding) / flops(size, 1024, 0, 0) < 4.0
    assert flops(size, 1, 500, 1) == flops(size, 2, 499.5, 2) / 2, "decoding rows are all wanted"


@pytest.mark.parametrize("name", TARGETS)
def test_checking_several_tokens_costs_little_more_than_one(name: str) -> None:
    each = report(ModelConfig.from_hf(BUILTIN_CONFIGS[name]))["intensity"]
    assert 0.9 < each["decode_1"] < 1.1  # two operations for every two-byte weight
    assert each["decode_1"] < each["decode_5"] < each["decode_9"] < each["prefill"]
    dense = "A4B" not in name
    assert (each["decode_5"] / each["decode_1"] > 4.8) == dense  # more tokens wake more experts


def test_bits_scale_the_bytes() -> None:
    config = ModelConfig.from_hf(BUILTIN_CONFIGS["google/gemma-4-12B-it"])
    assert report(config, weight_bytes=0.5)["bytes_per_token"] * 4 == pytest.approx(report(config)["bytes_per_token"])


def test_it_all_works_without_torch() -> None:
    names = "config, inspect, builtin_configs"
    code = f"import sys; from outrider.models import {names}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": "src"}).returncode == 0
