"""Predicts several GPUs: tensor parallelism and replicas. Torch-free.

N GPUs divide weights, arithmetic, and K/V as far as there are K/V heads. They do not divide the kernels' fixed time or
the drafter. Communication is added: an all-reduce of [rows, hidden] after attention and after the MLP of every layer (a
third after routed experts), one for the embedding, the gathering of the logits, and for each drafted token one per
drafter layer and one for its embedding. Each takes

    link latency + (N - 1) · bytes / link bandwidth + the kernels that add the parts up

since the parts of all ranks are gathered and added in rank order (`outrider.parallel.process_group`). Link latencies
are rounded from published steps of other engines (docs/tensor-parallel.md says which), bandwidths are the vendors', one
way.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypedDict

from ..models.config import DrafterConfig, ModelConfig
from ..models.split import TPRank, split_target
from ..types import OutriderError


@dataclass(frozen=True)
class Link:
    """GB/s one way, and the latency of an exchange in µs: `us`, plus `us_each` per GPU."""

    label: str
    bandwidth: float
    us: float
    us_each: float
    most: int = 8  # GPUs that it joins


LINKS: Mapping[str, Link] = {
    "nvlink": Link("NVLink through a switch", 450, 8.0, 1.0),
    "nvlink3": Link("NVLink 3 through a switch (A100)", 300, 8.0, 1.5),
    "nvlink-bridge": Link("NVLink bridge of two cards", 56, 9.0, 1.5, most=2),
    "pcie5": Link("PCIe 5.0 x16", 50, 12.0, 6.0),
    "pcie": Link("PCIe 4.0 x16", 25, 14.0, 8.0),
    "pcie3": Link("PCIe 3.0 x16 (or 4.0 x8)", 12, 14.0, 8.0),
}
USUAL = {
    "b200": "nvlink",
    "h200": "nvlink",
    "h100": "nvlink",
    "a100": "nvlink3",
    "a100-40": "nvlink3",
    "h100-pcie": "pcie5",
    "rtx-pro-6000": "pcie5",
    "rtx5090": "pcie5",
    "rtx5070ti": "pcie5",
}


def link(name: str | None, gpu: str) -> Link:
    """By name, or the default one of that GPU. `nvlink` of a card that is joined in pairs is its bridge."""
    chosen = name or USUAL.get(gpu, "pcie")
    if chosen == "nvlink" and gpu == "rtx3090":
        chosen = "nvlink-bridge"
    if chosen not in LINKS:
        raise OutriderError(f"unknown link {name!r}; known: {', '.join(LINKS)}")
    return LINKS[chosen]


@dataclass(frozen=True)
class Several:
    """N GPUs that share a model."""

    gpus: int
    by: Link

    def __post_init__(self) -> None:
        if self.gpus > self.by.most:
            raise OutriderError(f"{self.by.label} joins {self.by.most} GPUs, not {self.gpus}: choose another --link")

    def exchange(self, nbytes: float, kernel_us: float) -> float:
        """Seconds of an all-reduce of `nbytes`."""
        # two parts are added as they are; more in float32
        adding = kernel_us * (1 if self.gpus == 2 else self.gpus + 1)
        waiting = self.by.us + self.by.us_each * self.gpus
        return 1e-6 * (waiting + adding) + (self.gpus - 1) * nbytes / (self.by.bandwidth * 1e9)

    def verify(self, config: ModelConfig, rows: int, kernel_us: float) -> float:
        """Seconds of exchange in a pass over `rows`."""
        sums = 1 + len(config.layers) * (3 if config.moe else 2)
        wide = len(config.layers) * config.ple_dim
        seconds = sums * self.exchange(2.0 * rows * config.hidden, kernel_us) + self.exchange(
            4.0 * rows * config.vocab_size / self.gpus, 0
        )
        return seconds + (self.exchange(2.0 * rows * wide, kernel_us) if wide else 0.0)

    def draft(self, config: DrafterConfig, batch: int, kernel_us: float) -> float:
        """Seconds of exchange per drafted token: one all-reduce per layer, and the embedding's."""
        layers = len(config.layers) * self.exchange(2.0 * batch * config.hidden, kernel_us)
        return layers + self.exchange(2.0 * batch * config.backbone_hidden, kernel_us)

    def part(self, config: ModelConfig) -> ModelConfig:
        """The fullest GPU's part of it."""
        return split_target(config, TPRank(0, self.gpus), lambda name: 1)[0]


# ---- layouts
class SplitLayout(TypedDict):
    """`gpus` that share a model, for a number of users each."""

    gpus: int
    fits: bool
    memory_gb: float  # of each GPU
    plain_ms: float
    best_k: int
    ms: float  # per token and user
    tokens_per_second: float  # of all users
