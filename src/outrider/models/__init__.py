"""Target models and MTP drafters. `build(config, weights, ops)` picks the target's class by the config's family.

Importing `outrider.models.config`, `.known`, `.pairing` or `.inspect` does not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from .config import ModelConfig
from .split import SOLO, Together

if TYPE_CHECKING:
    from ..ops.backend import Backend
    from ..ops.formats import Held
    from .layers import TextModel


def build(config: ModelConfig, weights: Mapping[str, Held], ops: Backend, together: Together = SOLO) -> TextModel:
    """A target model over loaded weights (canonical names: `outrider.weights.names`). together: it is divided over processes."""
    if config.family == "gemma4":
        from .gemma4 import Gemma4

        return Gemma4(config, weights, ops, together)
    from .llama import Llama

    return Llama(config, weights, ops, together)
