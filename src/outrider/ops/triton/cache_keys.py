"""Fixed keys of compiled kernels on disk.

Triton up to 3.6 hashes a function's constants together with those of the functions it calls only if the keys of these
were computed before. So a kernel's key depended on which kernel ran first: a start that timed steps and one that did
not shared no entries, and compiled attention again at every change. `settle_cache_keys` computes all keys in one order
before the first launch.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from functools import lru_cache

from triton.runtime.jit import JITFunction


def jit_functions() -> Iterator[JITFunction]:
    """Triton functions of this package, by module and line; none in Triton's interpreter."""
    package = importlib.import_module(__package__)
    for module in sorted(pkgutil.iter_modules(package.__path__), key=lambda module: module.name):
        name = f"{__package__}.{module.name}"
        functions = [f for f in vars(importlib.import_module(name)).values() if isinstance(f, JITFunction)]
        yield from sorted((f for f in functions if f.__module__ == name), key=lambda f: f.starting_line_number)


@lru_cache(maxsize=1)
def settle_cache_keys() -> int:
    """Computes the keys of all functions, once per process. Returns their number."""
    return len([function.cache_key for function in jit_functions()])
