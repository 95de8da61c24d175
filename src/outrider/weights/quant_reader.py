"""How a container keeps a quantised matrix: the seam between a checkpoint's tensors and a `Weight`, and what its
readers share."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from torch import Tensor

from ..ops.formats import Format, Weight
from ..types import OutriderError
from .names import normalise

Settings = Mapping[str, object]  # a configuration's `quantization_config`


class QuantReader(Protocol):
    """How a container keeps one matrix."""

    @property
    def scheme(self) -> str:
        """The container's own name for it, for messages."""
        ...

    @property
    def format(self) -> Format:
        """What it becomes, as far as the configuration alone can tell."""
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


# by a module's name (`model.layers.0.mlp.down_proj`); None: it is dense
QuantScheme = Callable[[str], QuantReader | None]
NOT_LINEAR = ("embed_tokens", "embed_tokens_per_layer")  # modules with a matrix that "Linear" does not mean
# weights only: activations stay as they are
ACTIVATION_SCALES = "input_scale", "input_global_scale", "input_zero_point", "output_scale"


def linear(module: str) -> bool:
    return module.rpartition(".")[2] not in NOT_LINEAR


def matches(module: str, targets: Sequence[str], contained: bool = False) -> bool:
    """Whether a module is meant by a list of names and `re:` patterns, whatever wraps the text tower in the
    checkpoint's own names. contained: a plain name is meant wherever it occurs, as AWQ's tools take it."""
    names = [module]
    if module.startswith("model."):
        names += [f"model.language_model.{module[6:]}", f"language_model.{module}"]
    for target in targets:
        if target.startswith("re:"):
            if any(re.match(target[3:], name) for name in names):
                return True
        elif normalise(target) == module or (contained and target in module):
            return True
    return False


def all_but(dense: Sequence[str], stored: QuantReader) -> QuantScheme:
    """Every linear module is stored so, except those whose names hold one of these."""
    return lambda module: stored if linear(module) and not matches(module, dense, contained=True) else None


def strings(settings: Settings, *keys: str) -> list[str]:
    """The first of these keys that holds a list of names; [] where none does."""
    for key in keys:
        value = settings.get(key)
        if isinstance(value, (list, tuple)):
            return [str(v) for v in value]
    return []


def whole(settings: Settings, key: str, default: int | None, scheme: str) -> int:
    value = settings.get(key, default)
    if type(value) is not int:
        raise OutriderError(f"quantization_config ({scheme}): {key} should be a whole number, got {str(value)[:40]}")
    return value


def expect(where: str, name: str, tensor: Tensor, shape: tuple[int, ...], kinds: str) -> Tensor:
    """A tensor of exactly this shape; `kinds`: the dtypes that its name in torch may begin with."""
    kind = str(tensor.dtype).removeprefix("torch.")
    if tuple(tensor.shape) != shape or not kind.startswith(tuple(kinds.split())):
        raise OutriderError(f"{where}: its {name} is {kind} {list(tensor.shape)}, not {kinds.split()[0]} {list(shape)}")
    return tensor
