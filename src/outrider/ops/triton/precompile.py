"""Compiling kernels in parallel before a pass of another size needs them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

log = logging.getLogger("outrider")
COMPILING_THREADS = 8


class Precompiler:
    """Compiles a model's kernels for a number of rows when the first of its products comes with it.

    A model has some ten kinds of products: compiled one after the other at their first launch, they would delay running
    requests by a quarter of a minute, once per machine. So the products in use are recorded, and when one of them comes
    with a new number of rows, all are compiled for it at once. Nothing is launched; a kernel that was not compiled
    ahead is compiled when it is needed.
    """

    def __init__(self, compile_one: Callable[[Any, int], None], variant: Callable[[Any, int], Hashable]):
        """compile_one(kind, rows): compiles without launching; may fail. variant(kind, rows): equal for numbers of rows
        that share a compiled kernel."""
        self._compile = compile_one
        self._variant = variant
        self._kinds = dict[Hashable, None]()  # in use, in the order in which they came
        self._rows = set[int]()
        self._compiled: set[tuple[Hashable, Hashable]] = set()  # (kind, variant)

    def before(self, kind: Hashable, rows: int) -> None:
        """Must be called before a launch."""
        if kind not in self._kinds:
            self._kinds[kind] = None
            self._compiled.add((kind, self._variant(kind, rows)))  # compiled by its own launch
        elif rows not in self._rows:
            self._rows.add(rows)
            self._compile_all(rows)

    def _compile_all(self, rows: int) -> None:
        missing = [kind for kind in self._kinds if (kind, self._variant(kind, rows)) not in self._compiled]
        self._compiled.update((kind, self._variant(kind, rows)) for kind in missing)
        if len(missing) <= 1:
            return  # its own launch compiles it
        with ThreadPoolExecutor(COMPILING_THREADS) as pool:
            for future in [pool.submit(self._compile, kind, rows) for kind in missing]:
                error = future.exception()
                if error is not None:
                    log.debug("not compiled ahead for %d rows: %s", rows, error)
