"""Which drafter fits which target, and the reason given when it does not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from outrider.models.builtin_configs import BUILTIN_CONFIGS
from outrider.models.config import DrafterConfig, ModelConfig
from outrider.spec.loader import other_weights
from outrider.types import OutriderError

SIZES = ("E2B", "E4B", "12B", "26B-A4B", "31B")


def target(size: str) -> ModelConfig:
    return ModelConfig.from_hf(BUILTIN_CONFIGS[f"google/gemma-4-{size}-it"])


def drafter(size: str) -> DrafterConfig:
    return DrafterConfig.from_hf(BUILTIN_CONFIGS[f"google/gemma-4-{size}-it-assistant"])


@pytest.mark.parametrize("ours", SIZES)
@pytest.mark.parametrize("theirs", SIZES)
def test_an_assistant_fits_its_own_target_only(ours: str, theirs: str) -> None:
    reason = drafter(ours).misfit(target(theirs))
    assert (reason is None) == (ours == theirs)
    if reason is not None:
        assert "hidden size" in reason and "\n" not in reason
        with pytest.raises(OutriderError, match="does not fit"):
            drafter(ours).bound_layers(target(theirs))


@pytest.mark.parametrize(
    "size, donors", [("E2B", (13, 14)), ("E4B", (22, 23)), ("12B", (46, 47)), ("26B-A4B", (28, 29)), ("31B", (58, 59))]
)
def test_the_layers_that_an_assistant_reads(size: str, donors: tuple[int, int]) -> None:
    sliding, full = donors
    assert drafter(size).read_layers(target(size)) == (sliding, sliding, sliding, full)
    bound = drafter(size).bound_layers(target(size))
    assert [layer.attn.kv_layer for layer in bound] == [sliding, sliding, sliding, full]
    assert not any(layer.attn.writes for layer in bound)


def test_every_reason() -> None:
    t = target("E2B")
    d = drafter("E2B")

    def with_layer(i: int, **changes: object) -> DrafterConfig:
        layers = list(d.layers)
        layers[i] = replace(layers[i], attn=replace(layers[i].attn, **changes))
        return replace(d, layers=tuple(layers))

    assert "vocabulary" in str(replace(d, vocab_size=1000).misfit(t))
    assert "taps" in str(replace(d, taps=(35,)).misfit(t))
    assert "names 2 layers" in str(replace(d, reads=(13, 14)).misfit(t))
    assert "owns none" in str(replace(d, reads=(13, 13, 13, 20)).misfit(t))
    assert "head size 256, target layer 14 has 512" in str(replace(d, reads=(13, 13, 14, 14)).misfit(t))
    assert "head size" in str(with_layer(3, head_dim=256).misfit(t))
    assert "K/V heads" in str(with_layer(3, kv_heads=2).misfit(t))
    assert "window 64, target layer 13 has 512" in str(with_layer(0, window=64).misfit(t))
    assert "rope" in str(
        replace(d, layers=tuple(replace(x, rope=replace(x.rope, theta=5.0)) for x in d.layers)).misfit(t)
    )
    only_sliding = replace(t, layers=tuple(x for x in t.layers if x.kind == "sliding"))
    assert "no full layer" in str(d.misfit(only_sliding))


@pytest.mark.parametrize(
    ("target", "drafter", "trained_for", "warned"),
    [
        ("google/gemma-4-12B-it-qat-w4a16-ct", "google/gemma-4-12B-it-qat-q4_0-unquantized-assistant", None, None),
        (
            "google/gemma-4-12B-it-qat-w4a16-ct",
            "google/gemma-4-12B-it-assistant",
            None,
            "the target is quantisation-aware",
        ),
        (
            "/models/gemma-4-12B-it.gguf",
            "/models/gemma-4-12B-it_QAT-assistant.gguf",
            None,
            "the drafter is quantisation-aware",
        ),
        ("/models/gemma-4-12B-it-qat", "/models/gemma-4-12B-it-qat/assistant", None, None),
        ("smollm2", "smollm2", "abc", None),
        ("smollm2.Q8_0.gguf", "smollm2", "abd", "trained for other weights"),
    ],
)
def test_a_drafter_of_other_weights_is_warned_of(
    target: str, drafter: str, trained_for: str | None, warned: str | None
) -> None:
    said = other_weights(target, drafter, trained_for, "abc")
    assert said is None if warned is None else said is not None and said.startswith(warned)
