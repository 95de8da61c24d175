"""A progress bar on stderr, shown only where stderr is a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress(label: str, total: int) -> Iterator[Callable[[int], None]]:
    """Yields `advance(bytes)`. Silent when stderr is not a terminal."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import DownloadColumn, Progress

    columns = *Progress.get_default_columns(), DownloadColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=total)
        yield lambda count: bar.advance(task, count)
