"""Outrider: lossless speculative decoding with multi-token-prediction drafters."""

from __future__ import annotations

TYPE_CHECKING = False  # typing takes milliseconds, in which Ctrl-C would not be the command line's yet
if TYPE_CHECKING:
    from typing import Any

    from .llm import LLM, Completion
    from .types import OutriderError, SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "Completion", "OutriderError", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    """LLM imports torch, and the command line sets its handler of Ctrl-C before anything else is imported: so both wait
    until asked for."""
    if name in ("LLM", "Completion"):
        from . import llm

        return getattr(llm, name)
    if name in ("OutriderError", "SamplingParams"):
        from . import types

        return getattr(types, name)
    raise AttributeError(name)
