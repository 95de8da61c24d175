"""What `outrider train` is asked to do, as plain data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import torch

from ..models.config import DrafterConfig, ModelConfig
from ..types import OutriderError
from . import design
from .answers import Answering
from .losses import LossMix
from .trainer import TrainSettings

Say = Callable[[str], None]
# Where and how long a run goes on may change freely. Of the rest, these may change and are reported; all others make
# another run.
FREE = {"target", "data", "judge", "out", "carry", "minutes", "answer_minutes", "slots", "processes", "device", "dtype", "command"} | {
    "shard_target", "save_minutes", "save_every", "log_every", "tokens", "scored", "keep",
}  # fmt: skip
CHANGEABLE = {"steps", "lr", "warmup", "hold", "final", "weight_decay", "clip", "accumulate", "unroll", "decay", "survival", "thin"} | {
    "loss", "greedy_loss", "cluster_pull", "eval_every", "patience", "recall", "top",
}  # fmt: skip


@dataclass(frozen=True)
class TrainJob:
    target: str
    data: Path
    out: Path
    texts: bool = False  # plain text instead of prompts to answer
    init: str | None = None  # a drafter to start from
    style: Literal["auto", "plain", "gemma"] = "auto"
    layers: int = 6
    reads: tuple[int, ...] = ()  # plain style; empty: spread evenly
    hidden: int | None = None
    intermediate: int | None = None
    taps: tuple[int, ...] = ()
    position_offset: int = 2  # plain style: the constant position is L - offset
    clusters: int | None = None  # None: chosen by the vocabulary; 0: no clustered head
    recluster: bool = False  # with init: the vocabulary is clustered anew, by what is likely together
    recall: float = 0.99  # the clustered head's top is the cheapest that finds the full head's token this often
    top: int | None = None  # clusters scored a step instead, whatever they find
    max_prompt: int = 512
    answering: Answering = field(default_factory=Answering)
    minutes: float | None = None  # of everything together, over all runs that continue one another
    answer_minutes: float | None = None  # of these, most for answering
    categories: dict[str, float] = field(
        default_factory=dict
    )  # answers that a prompt of a category gets beside others' 1
    carry: tuple[Path, ...] = ()  # data of earlier runs to learn from too
    carry_sampled: float = 1.0  # share of their sampled answers that is taken
    limit: int | None = None  # prompts
    heldout: int = 256
    judge: Path | None = None  # prompts that are kept for evaluation instead
    anchors: int | None = None  # query rows a batch; None: what fits
    settings: TrainSettings = field(default_factory=TrainSettings)
    shard_target: bool = False  # the target is divided over the processes of torchrun (shards.py)
    device: str = "cpu"
    dtype: torch.dtype = torch.float32
    command: str = ""

    def drafter_config(self, target: ModelConfig, target_hash: str | None) -> DrafterConfig:
        """The drafter that is made where none is given to start from."""
        clusters = design.default_clusters(target.vocab_size) if self.clusters is None else self.clusters
        top = max(1, clusters // 16)
        style = ("gemma" if target.family in ("gemma3", "gemma4") else "plain") if self.style == "auto" else self.style
        if style == "gemma":
            if self.hidden is not None and self.hidden > target.hidden:  # its head is the target's, in fewer directions
                raise OutriderError(
                    f"--hidden {self.hidden} is wider than the target ({target.hidden}): give less, or --style plain"
                )
            return design.gemma(
                target, hidden=self.hidden or min(256, target.hidden), intermediate=self.intermediate,
                clusters=clusters, cluster_top=top,
                target_hash=target_hash,
            )  # fmt: skip
        reads = self.reads or design.spread_reads(target, min(self.layers, len(target.kv_layers)))
        return design.plain(
            target, reads=reads, hidden=self.hidden, intermediate=self.intermediate, taps=self.taps, clusters=clusters,
            cluster_top=top,
            position_offset=self.position_offset, target_hash=target_hash,
        )  # fmt: skip

    def identity(self) -> dict[str, Any]:
        """The settings that a run must keep, or report a change of, as JSON holds them."""
        parts = (("", self), ("answer_", self.answering), ("", self.settings))
        found = {
            (prefix if f.name == "seed" else "") + f.name: getattr(part, f.name)
            for prefix, part in parts
            for f in fields(part)
            if f.name not in FREE | {"answering", "settings"}
        }
        found["anchors"] = self.anchors
        return {
            k: str(v) if isinstance(v, LossMix) else list(v) if isinstance(v, tuple) else v for k, v in found.items()
        }
