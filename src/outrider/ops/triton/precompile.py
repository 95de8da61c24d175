"""Compiles in parallel the kernels that a pass of another size will need.

A model has some ten kinds of products: compiled one after the other at their first launch they would delay running
requests by a quarter of a minute, once per machine. So the products in use are recorded, and when the first of them
comes with a new number of rows, all are compiled for it at once, one thread each. Nothing is launched, and a failure is
ignored: a kernel that was not compiled ahead is compiled when it is needed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

Asked = Any  # hashable: what a kernel is compiled for, but for the number of rows
THREADS = 8
log = logging.getLogger("outrider")


class Precompiler:
    def __init__(self, compile_one: Callable[[Asked, int], None], variant: Callable[[Asked, int], Hashable]):
        """compile_one(asked, rows): compiles, launches nothing; may fail. variant(asked, rows): numbers of rows that
        share it share the kernel."""
        self._compile, self._variant = compile_one, variant
        self._asked, self._rows = dict[Asked, None](), set[int]()
        self._made: set[tuple[Asked, Hashable]] = set()

    def before(self, asked: Asked, rows: int) -> None:
        """To be called before a launch."""
        if asked not in self._asked:
            self._asked[asked] = None
            self._made.add((asked, self._variant(asked, rows)))  # its own launch compiles it
        elif rows not in self._rows:
            self._rows.add(rows)
            missing = [one for one in self._asked if (one, self._variant(one, rows)) not in self._made]
            self._made.update((one, self._variant(one, rows)) for one in missing)
            if len(missing) > 1:
                self._side_by_side(missing, rows)

    def _side_by_side(self, missing: list[Asked], rows: int) -> None:
        with ThreadPoolExecutor(THREADS) as pool:
            for future in [pool.submit(self._compile, one, rows) for one in missing]:
                error = future.exception()
                if error is not None:
                    log.debug("not compiled ahead for %d rows: %s", rows, error)
