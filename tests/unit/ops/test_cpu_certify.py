"""Certification of the CPU's levels: a level with other bits never serves, an unknown processor serves what passed."""

from __future__ import annotations

import ctypes
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.ops.backend import EVERY_ROW
from outrider.ops.cpu import build, certify
from outrider.ops.cpu.ops import CpuOps

BEST = build.best_isa()


class Broken:
    """A library whose products of six rows and more have one other bit in the last row."""

    def __init__(self, lib: ctypes.CDLL, level: str):
        self.lib = lib
        self._name = f"/nowhere/kernels-{level}-broken.so"

    def __getattr__(self, name: str) -> Any:
        return getattr(self.lib, name)

    def or_linear(self, pool: int, w: Any, x: int, rows: int, bias: int | None, out: int) -> None:
        self.lib.or_linear(pool, w, x, rows, bias, out)
        if rows >= 6:
            last = (ctypes.c_int32 * (rows * w.n)).from_address(out)
            last[rows * w.n - 1] ^= 1


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Certifications of this test alone; libraries where they are."""
    monkeypatch.setattr(certify, "cache_path", lambda *parts: tmp_path.joinpath(*parts))
    monkeypatch.delenv("OUTRIDER_CPU_ISA", raising=False)
    certify.certification_of.cache_clear()


def break_level(monkeypatch: pytest.MonkeyPatch, level: str, levels: tuple[str, ...]) -> None:
    """Let this machine run `levels`, of which `level` is broken."""
    load = certify.load
    monkeypatch.setattr(certify, "runnable", lambda: levels)
    monkeypatch.setattr(certify, "load", lambda isa: Broken(load(BEST), level) if isa == level else load(isa))


def test_a_level_broken_on_purpose_is_rejected_at_start(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    break_level(monkeypatch, "amx", ("amx", BEST))
    with caplog.at_level(logging.WARNING, "outrider"):
        ops = CpuOps(threads=1)
    assert f"-{BEST}-" in ops.version
    (line,) = caplog.messages
    assert "kernel amx is not used" in line and "row 5 has other bits than alone" in line


def test_an_explicit_level_is_refused_if_it_was_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    break_level(monkeypatch, "amx", ("amx", BEST))
    with pytest.raises(build.BuildError, match=r"level amx is not used on this machine: .* row 5 has other bits"):
        CpuOps(threads=1, isa="amx")


def test_the_last_level_serves_as_many_rows_as_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own bits define the order: where they change, fewer rows are promised to be independent."""
    break_level(monkeypatch, "generic", ("generic",))
    assert CpuOps(threads=1).capabilities.independent_rows == 5


def test_an_unknown_processor_serves_what_it_certified(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(certify, "processor_name", lambda: "Unheard-of 9000")
    ops = CpuOps(threads=1)
    assert ops.capabilities.independent_rows == EVERY_ROW and f"-{BEST}-" in ops.version
    (path,) = (tmp_path / "certified").glob("*.json")
    stored = json.loads(path.read_text())
    assert stored["machine"] == f"Unheard-of 9000, {ops.version}"
    assert all(result["complete"] for result in stored["results"])
    assert {result["kernel"] for result in stored["results"]} == {BEST}


def test_a_stored_certification_is_read_and_not_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    CpuOps(threads=1)
    certify.certification_of.cache_clear()
    monkeypatch.setattr(certify.Problems, "probes", lambda self: pytest.fail("the problems are run again"))
    CpuOps(threads=1)
    monkeypatch.setattr(certify, "processor_name", lambda: "another")
    certify.certification_of.cache_clear()
    with pytest.raises(pytest.fail.Exception, match="run again"):
        CpuOps(threads=1)


def test_every_format_and_every_number_of_rows_is_a_problem() -> None:
    lib = certify.load(BEST)
    with certify.single_thread(lib) as pool:
        names = [probe.name for probe in certify.Problems(lib, pool).probes()]
    assert names == [*certify.FORMATS, "float32", "float16", "bfloat16", "gate and up", "experts"]
    assert set(range(1, 18)) < set(certify.ROWS)


def test_the_table_lists_every_level() -> None:
    assert [kernel.name for kernel in certify.TABLE] == list(build.FLAGS)
    assert certify.SERVES_WHEN.keys() == certify.SOURCES.keys() == build.FLAGS.keys()
    for kernel in certify.TABLE:
        assert (build.HERE.parents[1] / kernel.source).is_file()


def test_doctor_tells_date_and_result(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {row.kernel: row.here for row in certify.level_rows()}
    assert rows[BEST].startswith("serves; certified 2") and f"1 to {certify.ROWS[-1]} rows" in rows[BEST]
    monkeypatch.setattr(
        certify, "missing", lambda level: {"permission for tiles (arch_prctl: no)"} if level == "amx" else set()
    )
    refused = {row.kernel: row.here for row in certify.level_rows()}
    if "amx" in refused:
        assert refused["amx"] == "no: this machine lacks permission for tiles (arch_prctl: no)"


def test_products_are_what_they_were_for_one_row() -> None:
    """The probes' own products are the library's."""
    ops = CpuOps(threads=1)
    problems = certify.Problems(ops.lib, ops.pool)
    weight = problems.weight("Q4_0", 40, 96)
    x = torch.randn(3, 96)
    assert torch.equal(problems.product(weight, x), ops.linear(x, weight))
