"""Target models and MTP drafters. `build(config, weights, ops)` picks the class by the config's family.

Importing `outrider.models.config`, `.known`, `.pairing` or `.inspect` does not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from .config import DrafterConfig, ModelConfig
from .split import SOLO, Together

if TYPE_CHECKING:
    from ..ops.backend import Backend
    from ..ops.formats import Held
    from .gemma4_assistant import Gemma4Assistant
    from .layers import TextModel
    from .outrider_drafter import OutriderDrafter


def build(config: ModelConfig, weights: Mapping[str, Held], ops: Backend, together: Together = SOLO) -> TextModel:
    """A target model over loaded weights (canonical names: `outrider.weights.names`). together: it is divided over processes."""
    if config.family == "gemma4":
        from .gemma4 import Gemma4

        return Gemma4(config, weights, ops, together)
    from .llama import Llama

    return Llama(config, weights, ops, together)


def build_drafter(config: DrafterConfig, weights: Mapping[str, Held], ops: Backend, target: TextModel) -> OutriderDrafter | Gemma4Assistant:
    """An MTP drafter over its target: Google's assistants, or one that we trained."""
    if not config.gemma:
        from .outrider_drafter import OutriderDrafter

        return OutriderDrafter(config, weights, ops, target)
    from .gemma4_assistant import Gemma4Assistant

    return Gemma4Assistant(config, weights, ops, target)
