"""One table of kernels per backend, and the proof on this machine that kernels of one order of sums agree bit for bit.

A `Kernel` says which operation it computes, in which order it adds, which shapes it serves on which machine and how
long it takes. Dispatch asks `Registry.choose`; `doctor --kernels`, precompilation and parity tests read the same table.

`certify` runs small problems (`Probe`) on every kernel of an order and compares the bits with those of the order's
definition, its last kernel in the table. A kernel whose bits differ, or that fails, is rejected: it never serves. A
definition whose own bits change from some number of rows on limits the rows that the backend promises to be
independent instead. The result is a `Certification`, stored once per machine, compiler and sources. Without torch.
"""

from __future__ import annotations

import datetime
import json
import logging
import os
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

log = logging.getLogger("outrider")
# Every limit of a dispatch rule lies between two of these numbers, so each kernel and each tile is run.
ROWS = (1, 2, 5, 9, 17, 33, 41, 65, 129, 641, 2048, 8192)


class Unavailable(Exception):
    """A kernel that cannot be compiled or loaded here."""


class Hardware(Protocol):
    """A graphics card, or a processor with its instruction set."""

    @property
    def identity(self) -> str:
        """Name of everything that a kernel's bits may depend on, except its source and its compiler."""


def everywhere(machine: Any) -> bool:
    return True


def no_estimate(shape: Any, machine: Any) -> float:
    return 0.0


@dataclass(frozen=True)
class Kernel:
    """A row of the table. Shapes, machines and calls are the backend's own types."""

    name: str
    op: str
    # Kernels of one order must agree bit for bit. None: results may round differently, as a draft's may.
    order: str | None
    source: str  # of the code, for people
    when: str  # the shapes that it serves, for people
    serves: Callable[[Any, Any], bool]  # (shape, machine)
    launch: Callable[[Any], Any]  # call -> result; None: it does not take this call. May raise Unavailable
    runs_on: Callable[[Any], bool] = everywhere  # machine
    micros: Callable[[Any, Any], float] = no_estimate  # (shape, machine) -> microseconds
    compile: Callable[[Any], None] | None = None  # compiles what `launch` would run of this call, and launches nothing


@dataclass(frozen=True)
class Probe:
    """A small problem of one order. `check` returns None if the kernel's bits equal the definition's, else how they
    differ."""

    name: str
    order: str
    serves: Callable[[Kernel, int], bool]  # (kernel, rows)
    check: Callable[[Kernel, int], str | None]  # (kernel, rows)
    max_rows: int = ROWS[-1]


@dataclass(frozen=True)
class Result:
    """A kernel's result in one probe."""

    kernel: str
    order: str
    probe: str
    defines: bool  # the order
    complete: bool  # the bits agree at every number of rows that was run
    rows: int  # the largest number of rows up to which they agree
    note: str = ""


@dataclass(frozen=True)
class Certification:
    """Results of the checks that were run on a machine."""

    machine: str
    date: str
    results: tuple[Result, ...] = ()

    @property
    def rejected(self) -> dict[str, str]:
        """Reasons by kernel. Definitions stay: their limit is `independent_rows`."""
        return {r.kernel: r.note for r in reversed(self.results) if not r.complete and not r.defines}

    @property
    def probes(self) -> frozenset[str]:
        return frozenset(result.probe for result in self.results)

    def independent_rows(self, promised: int) -> int:
        """The number of rows up to which every definition keeps its bits, and at most the promised one."""
        limits = [r.rows for r in self.results if r.defines and not r.complete]
        return min([promised, *limits])

    def with_results(self, results: Iterable[Result]) -> Certification:
        """A copy with newer results, which replace older ones of their probes."""
        newer = tuple(results)
        replaced = {result.probe for result in newer}
        older = tuple(result for result in self.results if result.probe not in replaced)
        return Certification(self.machine, today(), older + newer)


@dataclass(frozen=True)
class KernelRow:
    """A row of `outrider doctor --kernels`."""

    operation: str
    when: str
    kernel: str
    source: str
    here: str  # whether it runs on this machine


def today() -> str:
    return datetime.date.today().isoformat()


@dataclass
class Registry:
    """The kernels that may serve on this machine."""

    table: Sequence[Kernel]
    machine: Any
    rejected: dict[str, str] = field(default_factory=dict)  # reasons by kernel

    def __post_init__(self) -> None:
        self.candidates = lru_cache(maxsize=8192)(self._candidates)

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        return tuple(k for k in self.table if k.name not in self.rejected and k.runs_on(self.machine))

    def _candidates(self, op: str, shape: Hashable) -> tuple[Kernel, ...]:
        """The kernels that serve this shape, lowest estimate first; of equal ones, the first in the table."""
        serving = [k for k in self.kernels if k.op == op and k.serves(shape, self.machine)]
        return tuple(sorted(serving, key=lambda kernel: kernel.micros(shape, self.machine)))

    def choose(self, op: str, shape: Hashable) -> Kernel:
        """The kernel that serves this shape."""
        candidates = self.candidates(op, shape)
        if not candidates:
            raise LookupError(f"no kernel on {self.machine.identity} serves {op} {shape}")
        return candidates[0]

    def run(self, op: str, shape: Hashable, call: Any) -> Any:
        """The result of the kernel that serves this shape. One that cannot be compiled after all is rejected."""
        for kernel in self.candidates(op, shape):
            try:
                result = kernel.launch(call)
            except Unavailable as error:
                self.reject(kernel.name, str(error))
                continue
            if result is not None:
                return result
        raise LookupError(f"no kernel on {self.machine.identity} serves {op} {shape}")

    def reject(self, name: str, reason: str) -> None:
        """Let a kernel never serve again. A line of the log says so, once."""
        if name in self.rejected:
            return
        self.rejected[name] = reason
        self.candidates.cache_clear()
        log.warning("kernel %s is not used on %s: %s", name, self.machine.identity, reason)

    def apply(self, certification: Certification) -> None:
        for name, reason in certification.rejected.items():
            self.reject(name, reason)

    def by_order(self) -> dict[str, list[Kernel]]:
        """The kernels of each order; its definition is the last."""
        orders: dict[str, list[Kernel]] = {}
        for kernel in self.kernels:
            if kernel.order is not None:
                orders.setdefault(kernel.order, []).append(kernel)
        return orders


def certify(
    registry: Registry,
    probes: Iterable[Probe],
    rows: Sequence[int] = ROWS,
    say: Callable[[str], None] | None = None,
    only: Collection[str] | None = None,
) -> list[Result]:
    """Run these probes on every kernel of their order (`only`: on these), at each number of rows that it serves."""
    orders = registry.by_order()
    results = []
    for probe in probes:
        kernels = orders.get(probe.order, [])
        for kernel in kernels:
            if only is not None and kernel.name not in only:
                continue
            counts = [n for n in rows if n <= probe.max_rows and probe.serves(kernel, n)]
            if not counts:
                continue
            if say is not None:
                say(f"{probe.name}: {kernel.name}")
            results.append(_result(kernel, probe, counts, defines=kernel is kernels[-1]))
    return results


def _result(kernel: Kernel, probe: Probe, counts: Sequence[int], defines: bool) -> Result:
    agreed = 0
    note = ""
    for count in counts:
        try:
            difference = probe.check(kernel, count)
        except Exception as error:  # a compiler or a driver may fail in many ways
            difference = f"{type(error).__name__}: {error}".splitlines()[0]
        if difference is not None:
            note = f"{probe.name} at {count} rows: {difference}"
            break
        agreed = count
    return Result(
        kernel=kernel.name,
        order=probe.order,
        probe=probe.name,
        defines=defines,
        complete=not note,
        rows=agreed,
        note=note,
    )


def load(path: Path, machine: str) -> Certification:
    """The stored certification of this machine, or an empty one."""
    with suppress(OSError, ValueError, TypeError, KeyError):
        stored: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if stored["machine"] == machine:
            return Certification(machine, stored["date"], tuple(Result(**result) for result in stored["results"]))
    return Certification(machine, today())


def save(certification: Certification, path: Path) -> None:
    """Write the file in one step; without a writable folder the next start certifies again."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"{path.name}.{os.getpid()}")
        partial.write_text(json.dumps(asdict(certification), indent=1))
        partial.replace(path)
