"""Which matrices of a checkpoint are quantised, and how its container keeps them.

A configuration's `quantization_config` names a method; the method's row in `METHODS` reads the rest of it into a `Recipe`: a
function from a module's name (`model.layers.0.mlp.down_proj`) to how that module's matrix is `Stored`, or None where it is dense.
A new container is one file and one row; a GGUF file needs none, each of its tensors says what it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from torch import Tensor

from ..ops.formats import Format, Weight
from ..types import OutriderError

Settings = Mapping[str, object]


class Stored(Protocol):
    """How a container keeps one matrix."""

    @property
    def scheme(self) -> str:
        """The container's own name for it, for messages."""
        ...

    @property
    def format(self) -> Format:
        """What it becomes."""
        ...

    @property
    def suffixes(self) -> tuple[str, ...]:
        """The tensors it needs, by what follows the module's name: `weight_packed`, `weight_scale`."""
        ...

    @property
    def optional(self) -> tuple[str, ...]:
        """Tensors that may be there beside them, whether they are used or not."""
        ...

    def read(self, where: str, shape: tuple[int, ...], tensors: Mapping[str, Tensor]) -> Weight:
        """The weight; `where` names the matrix in errors."""
        ...


Recipe = Callable[[str], Stored | None]
METHODS: dict[str, Callable[[Settings], Recipe]] = {}


def recipe(config: Settings, where: str) -> Recipe | None:
    """What a checkpoint's configuration says about its quantised matrices; None: it has none."""
    text = config.get("text_config")
    found = config.get("quantization_config") or (text.get("quantization_config") if isinstance(text, dict) else None)
    if not found:
        return None
    method = found.get("quant_method") if isinstance(found, dict) else None
    if not isinstance(found, dict) or method not in METHODS:
        raise OutriderError(f"{where}: weights quantised by {method!r} are not supported; known: {', '.join(sorted(METHODS)) or 'none'}")
    return METHODS[str(method)](found)
