"""The measured tables in the docs are those that benchmarks/history gives."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def tables() -> ModuleType:
    spec = importlib.util.spec_from_file_location("history_tables", ROOT / "tools" / "history_tables.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_pages_hold_what_the_history_gives(tables: ModuleType) -> None:
    """A figure edited by hand, or a new line in the history without the page, fails here."""
    num_tables = 0
    for page in (ROOT / "docs").rglob("*.md"):
        text = page.read_text(encoding="utf-8")
        num_tables += len(tables.PLACE.findall(text))
        assert tables.filled(text) == text, f"{page.name}: run python tools/history_tables.py"
    assert num_tables >= len(tables.TABLES)


def test_numbers_are_written_one_way(tables: ModuleType) -> None:
    assert [tables.number(v) for v in (1346, 65.1, [1251, 1346], None)] == ["1,346", "65.1", "1,251–1,346", "–"]
