"""A quick start on the CPU: imports torch without the part that only its compilers use.

Torch's import ends with shape rules in Python for two thousand operators, a quarter of its time. They serve
`torch.compile`, `torch.export`, fake and meta tensors, none of which runs a model on a CPU here. A placeholder module
takes their place and imports the rules on its first attribute access. Code that runs operators on such tensors must
trigger that (`getattr(torch._meta_registrations, "register_meta")`), as `bench` does before it imports transformers.
"""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

RULES = "torch._meta_registrations"
GPU = Path("/dev/nvidiactl")


class Later(ModuleType):
    """A placeholder that imports its module at the first attribute access."""

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):  # the import system and inspection look at every module
            raise AttributeError(name)
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(importlib.import_module(self.__name__), name)


@contextmanager
def quick_start(device: str | None) -> Iterator[None]:
    """Wraps the import of torch and the loading of a first model. If a GPU may be used, or torch is imported already,
    it is the whole of torch."""
    is_quick = "torch" not in sys.modules and (device == "cpu" or (device is None and not GPU.exists()))
    collecting = gc.isenabled()
    gc.disable()  # objects of modules and vocabularies are permanent: collections would free nothing
    try:
        if is_quick:
            sys.modules[RULES] = Later(RULES)
            allow_generators()
        yield
    finally:
        if collecting:
            gc.enable()


def allow_generators() -> None:
    """Lets `torch.Generator` be called without the rules, whose import gives it a metaclass since torch 2.13."""
    import torch

    set_metaclass = getattr(torch._C, "_set_generator_metaclass", None)
    if set_metaclass is not None:
        set_metaclass(importlib.import_module("torch._opaque_base").OpaqueBaseMeta)
