"""Several GPUs on paper: what is divided, what is not, and when replicas win."""

from __future__ import annotations

from dataclasses import replace

import pytest

from outrider.bench import predict as model_of
from outrider.bench.several import LINKS, Several, link
from outrider.models.builtin_configs import BUILTIN_CONFIGS
from outrider.models.config import DrafterConfig, ModelConfig
from outrider.types import OutriderError

ACCEPT = model_of.Acceptance.parse("0.72")
DENSE = model_of.Setup(
    ModelConfig.from_hf(BUILTIN_CONFIGS["google/gemma-4-31B-it"]),
    DrafterConfig.from_hf(BUILTIN_CONFIGS["google/gemma-4-31B-it-assistant"]),
    model_of.machine("a100"), context=4096,
)  # fmt: skip


def test_a_large_model_gains_from_a_fast_link_and_less_from_a_slow_one() -> None:
    fast, slow = (model_of.layouts(DENSE, ACCEPT, LINKS[name]) for name in ("nvlink3", "pcie3"))
    assert [one["gpus"] for one in fast] == [1, 2, 4, 8]
    assert fast[0]["plain_ms"] == slow[0]["plain_ms"] > fast[1]["plain_ms"] > fast[2]["plain_ms"]
    assert all(a["plain_ms"] < b["plain_ms"] for a, b in zip(fast[1:], slow[1:]))
    assert fast[1]["plain_ms"] > fast[0]["plain_ms"] / 2  # kernels and exchange are not divided
    assert not fast[0]["fits"] or fast[0]["memory_gb"] < 80
    assert fast[1]["memory_gb"] < 0.55 * fast[0]["memory_gb"]


def test_many_users_are_served_cheaper_by_replicas() -> None:
    setup = replace(DENSE, on=model_of.machine("h200"), batch=64, context=1024)
    whole = model_of.replicas(setup, ACCEPT, 2)
    shared = model_of.layouts(setup, ACCEPT, link(None, "h200"))[1]
    assert whole is not None and whole["tokens_per_second"] > shared["tokens_per_second"]
    assert model_of.replicas(replace(setup, on=model_of.machine("rtx3090")), ACCEPT, 2) is None


def test_links_are_checked() -> None:
    assert link("nvlink", "rtx3090") is LINKS["nvlink-bridge"] and link(None, "l40s") is LINKS["pcie"]
    with pytest.raises(OutriderError, match="unknown link 'wire'"):
        link("wire", "h200")
    with pytest.raises(OutriderError, match="joins 2 GPUs, not 4"):
        Several(4, LINKS["nvlink-bridge"])
