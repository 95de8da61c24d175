"""Without a GPU, Triton kernels run in its interpreter; the switch must be set before anything imports triton. There
`tl.dot` sums in a fixed order (tests/interpreter.py). No property is lost to a
slow machine: examples have no deadline, and nobody asks how long it took to make them. Engines of this process read a
clock of their own: step times decide how many prompt tokens and drafts a step has, so a busy machine would otherwise
schedule other steps than an idle one."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
from collections.abc import Callable

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
from outrider.engine import engine  # noqa: E402  (imports triton, see above)


class Clocks:
    """In the place of `time`: each engine gets a clock that moves by a millisecond whenever it is read."""

    @property
    def perf_counter(self) -> Callable[[], float]:
        return itertools.count(step=1e-3).__next__


engine.time = Clocks()  # type: ignore[assignment]


def pytest_collection_finish() -> None:
    """Modules stay: a server that collects garbage between requests need not look at all of torch each time."""
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # bindings report objects that are alive at exit as leaks
