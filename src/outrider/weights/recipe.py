"""Which matrices of a checkpoint are quantised: the table of containers.

A configuration's `quantization_config` names a method; the method's row in `METHODS` reads the rest of it into a `Recipe`, a
function from a module's name to how its matrix is stored. A new container is one file and one row here; a GGUF file needs none,
each of its tensors says what it is.
"""

from __future__ import annotations

from collections.abc import Callable

from ..types import OutriderError
from .awq import awq
from .compressed import compressed_tensors
from .fp8 import fp8
from .gptq import gptq
from .modelopt import modelopt
from .stored import Recipe, Settings

METHODS: dict[str, Callable[[Settings], Recipe]] = {
    "compressed-tensors": compressed_tensors,
    "awq": awq,
    "gptq": gptq,
    "fp8": fp8,
    "modelopt": modelopt,
    "modelopt_fp4": modelopt,
}


def recipe(config: Settings, where: str) -> Recipe | None:
    """What a checkpoint's configuration says about its quantised matrices; None: it has none."""
    text = config.get("text_config")
    found = config.get("quantization_config") or (text.get("quantization_config") if isinstance(text, dict) else None)
    if not found:
        return None
    method = found.get("quant_method") if isinstance(found, dict) else None
    if not isinstance(found, dict) or method not in METHODS:
        raise OutriderError(f"{where}: weights quantised by {str(method)[:40]!r} are not supported; known: {', '.join(METHODS)}")
    try:
        return METHODS[str(method)](found)
    except OutriderError as error:
        raise OutriderError(f"{where}: {error}") from None
