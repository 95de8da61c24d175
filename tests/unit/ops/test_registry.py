"""The table of kernels: who serves, and what certification on this machine rejects."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from outrider.ops import registry as table
from outrider.ops.registry import ROWS, Certification, Kernel, Probe, Registry, Unavailable, certify

PROMISED = 8192
Sums = Callable[[int], list[int]]  # number of rows -> a result for each


@dataclass(frozen=True)
class Card:
    name: str = "card"
    features: frozenset[str] = frozenset()

    @property
    def identity(self) -> str:
        return self.name


def exact(rows: int) -> list[int]:
    return [7] * rows


def kernel(name: str, sums: Sums = exact, **changes: Any) -> Kernel:
    row = Kernel(
        name=name,
        op="product",
        order="chains",
        source=f"{name}.cu",
        when="any",
        serves=lambda shape, card: True,
        launch=sums,
    )
    return replace(row, **changes)


def probe(name: str = "small", order: str = "chains", **changes: Any) -> Probe:
    def check(tried: Kernel, rows: int) -> str | None:
        return None if tried.launch(rows) == exact(rows) else "row 0 differs"

    row = Probe(name, order, lambda tried, rows: tried.serves(rows, None), check)
    return replace(row, **changes)


def certified(registry: Registry, *probes: Probe) -> Certification:
    return Certification("card", "2026-11-19").with_results(certify(registry, probes or [probe()]))


def test_the_lowest_estimate_serves_and_equal_ones_in_order() -> None:
    """A table read from the wrong end, or one that asks a card for a kernel that it cannot run."""
    rows = [
        kernel("hopper", runs_on=lambda card: "wgmma" in card.features),
        kernel("few", serves=lambda shape, card: shape <= 8),
        kernel("fast", serves=lambda shape, card: shape > 128, micros=lambda shape, card: 5.0),
        kernel("any", micros=lambda shape, card: 9.0 if shape > 128 else 1.0),
    ]
    registry = Registry(rows, Card())
    assert [registry.choose("product", n).name for n in (1, 8, 9, 129)] == ["few", "few", "any", "fast"]
    assert Registry(rows, Card(features=frozenset({"wgmma"}))).choose("product", 1).name == "hopper"
    with pytest.raises(LookupError, match="no kernel on card serves attention 3"):
        registry.choose("attention", 3)


def test_a_kernel_broken_on_purpose_never_serves(caplog: pytest.LogCaptureFixture) -> None:
    """A wrong sum at some number of rows that no user has compared."""
    broken = kernel("tiles", lambda rows: [7] * (rows - 1) + [8 if rows > 128 else 7], micros=lambda shape, card: -1.0)
    registry = Registry([broken, kernel("any")], Card())
    assert registry.choose("product", 641).name == "tiles"
    certification = certified(registry)
    assert certification.rejected == {"tiles": "small at 129 rows: row 0 differs"}
    with caplog.at_level(logging.WARNING, "outrider"):
        registry.apply(certification)
        registry.apply(certification)
    assert registry.choose("product", 641).name == "any"
    assert [r.message for r in caplog.records] == ["kernel tiles is not used on card: small at 129 rows: row 0 differs"]
    assert certification.independent_rows(PROMISED) == PROMISED  # the definition serves what it served


def test_a_kernel_that_fails_is_rejected_with_its_reason() -> None:
    def fails(rows: int) -> list[int]:
        raise RuntimeError("ptxas: too many registers\nand more")

    certification = certified(Registry([kernel("tiles", fails), kernel("any")], Card()))
    assert certification.rejected == {"tiles": "small at 1 rows: RuntimeError: ptxas: too many registers"}


def test_rows_of_the_definition_limit_what_is_promised() -> None:
    """A card whose tiles of more than 64 rows add in another order: 8,192 independent rows were promised there."""
    registry = Registry([kernel("any", lambda rows: [7 if rows < 65 else 8] * rows)], Card())
    certification = certified(registry)
    assert certification.rejected == {}
    assert certification.independent_rows(PROMISED) == 41
    registry.apply(certification)
    assert registry.choose("product", 2048).name == "any"


def test_only_shapes_that_a_kernel_serves_are_run() -> None:
    tried: list[tuple[str, int]] = []

    def counted(name: str) -> Sums:
        def sums(rows: int) -> list[int]:
            tried.append((name, rows))
            return exact(rows)

        return sums

    few = kernel("few", counted("few"), serves=lambda shape, card: shape <= 8)
    drafts = kernel("drafts", counted("drafts"), order=None)
    registry = Registry([few, drafts, kernel("any", counted("any"))], Card())
    certification = certified(registry, probe(max_rows=65))
    assert [rows for name, rows in tried if name == "few"] == [1, 2, 5]
    assert [rows for name, rows in tried if name == "any"] == [n for n in ROWS if n <= 65]
    assert "drafts" not in {name for name, _ in tried}
    assert certification.independent_rows(PROMISED) == PROMISED


def test_a_kernel_that_cannot_be_compiled_gives_way(caplog: pytest.LogCaptureFixture) -> None:
    """The toolchain is broken: the next kernel in the table serves, and one line says so."""

    def fails(rows: int) -> list[int]:
        raise Unavailable("no machine code")

    registry = Registry([kernel("tiles", fails), kernel("any")], Card())
    with caplog.at_level(logging.WARNING, "outrider"):
        assert registry.run("product", 3, 3) == exact(3) and registry.run("product", 3, 3) == exact(3)
    assert [r.message for r in caplog.records] == ["kernel tiles is not used on card: no machine code"]


def test_a_call_that_a_kernel_does_not_take_goes_to_the_next() -> None:
    registry = Registry([kernel("tiles", lambda rows: None), kernel("any")], Card())  # type: ignore[arg-type,return-value]
    assert registry.run("product", 3, 3) == exact(3) and registry.rejected == {}
    with pytest.raises(LookupError, match="no kernel on card serves product 3"):
        Registry([kernel("tiles", lambda rows: None)], Card()).run("product", 3, 3)  # type: ignore[arg-type,return-value]


def test_certifications_are_stored_for_their_machine(tmp_path: Path) -> None:
    """A file of another card or one that is damaged was trusted; newer results doubled older ones."""
    path = tmp_path / "kernels" / "card.json"
    broken = kernel("tiles", lambda rows: [0])
    registry = Registry([broken, kernel("any")], Card())
    certification = certified(registry, probe(), probe("second"))
    table.save(certification, path)
    assert table.load(path, "card") == certification
    assert table.load(path, "another").results == ()
    assert certification.probes == {"small", "second"}
    again = certification.with_results(certify(registry, [probe()]))
    assert sorted(map(str, again.results)) == sorted(map(str, certification.results))
    path.write_text('{"machine": "card"')
    assert table.load(path, "card").results == ()
    assert table.load(tmp_path / "none.json", "card").results == ()
