"""Outrider: lossless speculative decoding with multi-token-prediction drafters."""

from __future__ import annotations

TYPE_CHECKING = False  # importing typing takes milliseconds, before the command line handles Ctrl-C
if TYPE_CHECKING:
    from typing import Any

    from .llm import LLM, Completion
    from .types import OutriderError, SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "Completion", "OutriderError", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    """Lazy imports: LLM imports torch, and the command line installs its Ctrl-C handler before any other import."""
    if name in ("LLM", "Completion"):
        from . import llm

        return getattr(llm, name)
    if name in ("OutriderError", "SamplingParams"):
        from . import types

        return getattr(types, name)
    raise AttributeError(name)
