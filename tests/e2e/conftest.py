"""A server on an engine that says what a script says, for test files that have no server of their own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.server_fakes import FakeEngine, Served, tokenizer


@pytest.fixture(scope="module")
def scripted() -> Iterator[Served]:
    tok = tokenizer()
    with Served(FakeEngine(tok), tok) as s:
        yield s


@pytest.fixture
def served(scripted: Served) -> Iterator[Served]:
    """After every test nothing is left running."""
    yield scripted
    scripted.settle()
