"""Settings, validated once, frozen. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .types import MAX_DRAFT, OutriderError

Verify = Literal["coupled", "rejection", "block"]
VERIFIERS: tuple[Verify, ...] = ("coupled", "rejection", "block")


KV_DTYPES = ("auto", "int8", "fp8")


@dataclass(frozen=True)
class EngineConfig:
    max_batch: int | None = None  # sequences that run at once; None: 256 on a GPU, else 8
    max_context: int | None = None  # prompt and answer together; None: what the model and the memory hold (engine.room)
    page_size: int = 32
    prefill_chunk: int | None = None  # prompt tokens of one sequence in one pass; None: what the backend does best
    kv_tokens: int | None = None  # positions of K/V in all; None: what the memory holds (engine.room)
    kv_dtype: str = "auto"  # auto: what the backend does best; half of that: int8 on a CPU, fp8 on a GPU
    gpu_memory: float = 0.9  # share of a GPU's memory that weights, K/V and work may take together
    swap: float = 0.0  # GiB of host memory for the K/V of sequences that are pre-empted; 0: it is computed again
    prefix_cache: bool = True
    graphs: bool | None = None  # decode cycles as one CUDA graph each, read one cycle behind; None: on a GPU

    def __post_init__(self) -> None:
        for name in ("max_batch", "max_context", "page_size", "prefill_chunk"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise OutriderError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.kv_dtype not in KV_DTYPES:
            raise OutriderError(f"unknown K/V dtype {self.kv_dtype!r}; known: {', '.join(KV_DTYPES)}")
        if not 0.0 < self.gpu_memory <= 1.0:
            raise OutriderError(f"gpu_memory must be in (0, 1], got {self.gpu_memory}")
        if not 0.0 <= self.swap < 1 << 20:
            raise OutriderError(f"swap must be 0 or more GiB of host memory, got {self.swap:g}")
        if self.prefill_chunk is not None and self.prefill_chunk % self.page_size:
            raise OutriderError(f"prefill_chunk ({self.prefill_chunk}) must be a multiple of page_size ({self.page_size})")


@dataclass(frozen=True)
class SpecConfig:
    draft_tokens: int | None = None  # None: the controller chooses K every cycle
    verify: Verify = "coupled"
    tree: int | None = None  # most tokens of a tree of drafts; 0: drafts are lines; None: where it pays (Engine._nodes)

    def __post_init__(self) -> None:
        if self.draft_tokens is not None and not 0 <= self.draft_tokens <= MAX_DRAFT:
            raise OutriderError(f"draft tokens must be in 0..{MAX_DRAFT} or 'auto', got {self.draft_tokens}")
        if self.verify not in VERIFIERS:
            raise OutriderError(f"unknown verifier {self.verify!r}; known: {', '.join(VERIFIERS)}")
        if self.tree is not None and not 0 <= self.tree <= MAX_DRAFT:
            raise OutriderError(f"tree must be 'auto', 'off' or a number of tokens in 1..{MAX_DRAFT}, got {self.tree}")
        if self.tree and self.verify != "coupled":
            raise OutriderError(f"trees are for the coupled verifier; {self.verify} keeps lines: leave --tree out")


def parse_tree(text: str | int | None) -> int | None:
    """'auto', 'off' or a number, as users write it."""
    if text is None or text == "auto":
        return None
    try:
        return SpecConfig(tree=0 if text == "off" else int(text)).tree
    except ValueError:
        raise OutriderError(f"tree must be 'auto', 'off' or a number of tokens in 1..{MAX_DRAFT}, got {text!r}") from None


def parse_draft_tokens(text: str | int | None) -> int | None:
    """'auto' or a number, as users write it."""
    if text is None or text == "auto":
        return None
    try:
        return SpecConfig(draft_tokens=int(text)).draft_tokens
    except ValueError:
        raise OutriderError(f"draft tokens must be a number in 0..{MAX_DRAFT} or 'auto', got {text!r}") from None
