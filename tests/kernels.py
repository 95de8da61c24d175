"""The CPU kernels, built once for all tests: in a cache of its own a test would have them compiled anew, for half a
minute or longer."""

from __future__ import annotations

import shutil
from pathlib import Path

from outrider.ops.cpu import build


def put_kernels(cache: Path) -> Path:
    """Into this cache, where a first start would have put them."""
    home = cache / "kernels"
    home.mkdir(parents=True)
    shutil.copy(build.shared_object(), home)
    return cache
