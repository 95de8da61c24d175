"""A quick start on the CPU: torch without the part of it that only compilers read.

Torch ends its import with shape rules in Python for two thousand operators, a quarter of the time it takes. They serve
`torch.compile`, `torch.export`, fake and meta tensors, none of which runs a model on a CPU here. A stand-in takes their
place until an attribute of it is asked for; then the rules are imported as if nothing had been there. Code that runs
operators on such tensors must ask first (`getattr(torch._meta_registrations, "register_meta")`), as `bench` does before
it brings transformers.
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
    """Imports the module it stands for when an attribute of it is asked for."""

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):  # the import system and inspection look at every module
            raise AttributeError(name)
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(importlib.import_module(self.__name__), name)


@contextmanager
def quick_start(device: str | None) -> Iterator[None]:
    """Around imports that bring torch, and a first model. Where a GPU may be used, or torch is there, it is all of
    torch."""
    if "torch" not in sys.modules and (device == "cpu" or (device is None and not GPU.exists())):
        sys.modules[RULES] = Later(RULES)
    collecting = gc.isenabled()
    gc.disable()  # what modules and vocabularies are made of stays: going through it again and again finds nothing
    try:
        yield
    finally:
        if collecting:
            gc.enable()
