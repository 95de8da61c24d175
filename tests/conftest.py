"""Without a GPU, Triton kernels run in its interpreter; the switch must be set before anything imports triton. There
`tl.dot` sums in a fixed order (tests/interpreter.py). No property is lost to a
slow machine: examples have no deadline, and nobody asks how long it took to make them."""

from __future__ import annotations

import contextlib
import gc
import os

import torch

with contextlib.suppress(ImportError):  # where only kernels are tried it need not be there
    from hypothesis import HealthCheck, settings

    settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("any machine")
os.environ["XDG_CONFIG_HOME"] = "/nonexistent"  # a developer's own config.toml changes no test
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
    with contextlib.suppress(ImportError):  # triton is not there
        from tests import interpreter

        interpreter.install()


def pytest_collection_finish() -> None:
    """Modules stay: a server that collects garbage between requests need not look at all of torch each time."""
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # bindings report objects that are alive at exit as leaks
