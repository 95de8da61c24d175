"""Which matrices of a checkpoint are quantised: the table of containers.

A configuration's `quantization_config` names a method; the method's row in `METHODS` reads the rest of it into a
`QuantScheme`, a function from a module's name to how its matrix is stored. A new container is one file and one row
here; a GGUF file needs none, each of its tensors says what it is.
"""

from __future__ import annotations

from collections.abc import Callable

from ..models.config import text_part
from ..types import OutriderError
from .awq import awq
from .compressed import compressed_tensors
from .fp8 import fp8
from .gptq import gptq
from .modelopt import modelopt
from .quant_reader import QuantScheme, Settings

METHODS: dict[str, Callable[[Settings], QuantScheme]] = {
    "compressed-tensors": compressed_tensors,
    "awq": awq,
    "gptq": gptq,
    "fp8": fp8,
    "modelopt": modelopt,
    "modelopt_fp4": modelopt,
}


def settings_of(config: Settings) -> object:
    """A configuration's `quantization_config`, wherever it stands; None: there is none."""
    return config.get("quantization_config") or text_part(config).get("quantization_config")


def rounded_activations(config: Settings) -> str | None:
    """How a checkpoint would have the inputs of its products rounded (`float8 by token`); None: it does not ask for
    that. It is not done: products are those of the weights alone, and so a little closer to the model that was
    quantised."""
    found = settings_of(config)
    if not isinstance(found, dict):
        return None
    method = found.get("quant_method")
    if method == "compressed-tensors":
        groups = found.get("config_groups")
        for group in groups.values() if isinstance(groups, dict) else ():
            asked = group.get("input_activations") if isinstance(group, dict) else None
            if isinstance(asked, dict):
                return f"{asked.get('type', 'int')}{asked.get('num_bits', 8)} by {asked.get('strategy') or 'tensor'}"
    if method == "fp8" and found.get("activation_scheme"):
        return f"float8, {found['activation_scheme']}"
    if method in ("modelopt", "modelopt_fp4"):
        inner = found.get("quantization")
        algorithm = (inner if isinstance(inner, dict) else found).get("quant_algo")
        return {"NVFP4": "float4 by 16 columns", "FP8": "float8 by tensor"}.get(str(algorithm))
    return None


def recipe(config: Settings, where: str) -> QuantScheme | None:
    """What a checkpoint's configuration says about its quantised matrices; None: it has none."""
    found = settings_of(config)
    if not found:
        return None
    method = found.get("quant_method") if isinstance(found, dict) else None
    if not isinstance(found, dict) or method not in METHODS:
        raise OutriderError(
            f"{where}: weights quantised by {str(method)[:40]!r} are not supported; known: {', '.join(METHODS)}"
        )
    try:
        return METHODS[str(method)](found)
    except OutriderError as error:
        raise OutriderError(f"{where}: {error}") from None
