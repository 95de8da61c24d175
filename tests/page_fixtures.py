"""Fixtures of the page's tests: one browser and one server for a module, a page for a test."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from tests.pages import CHROMIUM, FLAGS, TOK, open_page, say, sync_api
from tests.server_fakes import FakeEngine, Served


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as p:
        browser = p.chromium.launch(executable_path=CHROMIUM, headless=True, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def site() -> Iterator[Served]:
    with Served(FakeEngine(TOK, say, delay=0.004), TOK) as s:
        yield s


@pytest.fixture
def page(browser: Any, site: Served) -> Iterator[Any]:
    yield from open_page(browser, site.url)
