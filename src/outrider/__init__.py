"""Outrider: lossless speculative decoding with multi-token-prediction drafters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .types import OutriderError, SamplingParams

if TYPE_CHECKING:
    from .llm import LLM, Completion

__version__ = "0.1.0"
__all__ = ["LLM", "Completion", "OutriderError", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    """LLM pulls in torch: only for those who ask for it."""
    if name in ("LLM", "Completion"):
        from . import llm

        return getattr(llm, name)
    raise AttributeError(name)
