"""A browser, a server without a model and the page that it shows: what the tests of the page share.

Needs Debian's or any other system Chromium (CHROMIUM names another one); without one tests are skipped, and say so.
OUTRIDER_SCREENSHOTS=folder writes pictures there.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.server_fakes import tokenizer
from tests.waiting import PATIENCE

from outrider.engine.step import Request

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install playwright")
expect = sync_api.expect
expect.set_options(timeout=1000 * PATIENCE)  # five seconds else: too few where other tests have the processors
CHROMIUM = (
    os.environ.get("CHROMIUM")
    or shutil.which("chromium")
    or shutil.which("chromium-browser")
    or shutil.which("google-chrome")
)
needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium found: apt-get install chromium, or set CHROMIUM"
)
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--mute-audio",
    # a microphone that beeps, and is allowed
    "--use-fake-device-for-media-stream",
    "--use-fake-ui-for-media-stream",
]
STORY = (
    "A fox lived at the edge of the wood and could not count. One evening she found three eggs, and then she "
    "found two more. She laid them in a row and touched each with her nose: one, two, three, four, five. "
    "From then on she counted everything."
)
MARKDOWN = """## Reversing

There are **two** ways:

1. a slice
2. `reverse`
   - in place

```python
def back(xs):
    return xs[::-1]  # **not bold**

```

| name | value |
|------|-------|
| a    | 1     |

See [this](https://example.org/x_(y)) or [that](javascript:alert(1)) ![picture](https://example.org/p.png)."""


def say(request: Request) -> str:
    text = TOK.decode(request.prompt)
    last = text.rsplit("user", 1)[-1]
    return "<b>not markup</b>" if "markup" in last else MARKDOWN if "code" in last else STORY


TOK = tokenizer()


def open_page(browser: Any, url: str, **options: Any) -> Iterator[Any]:
    """A page that must not log an error nor ask another host for anything."""
    context = browser.new_context(**{"color_scheme": "dark", "viewport": {"width": 1180, "height": 760}, **options})
    context.set_default_timeout(1000 * PATIENCE)
    # no request but those of the test: one test lets the page measure plain decoding by itself
    context.add_init_script("if (location.host) localStorage['outrider.auto-plain'] ??= 'no'")
    problems: list[str] = []

    def watch(page: Any) -> None:
        page.on("pageerror", lambda e: problems.append(str(e)))
        page.on("request", lambda r: problems.append(r.url) if not r.url.startswith((url, "data:", "blob:")) else None)

    context.on("page", watch)
    page = context.new_page()
    visit(page, url)
    yield page
    context.close()
    assert not problems, problems


def visit(page: Any, url: str) -> None:
    page.goto(url)
    expect(page.locator("#model:not(:empty), #error:not([hidden])")).to_have_count(1)


def shoot(page: Any, name: str) -> None:
    folder = os.environ.get("OUTRIDER_SCREENSHOTS")
    if folder:
        page.screenshot(path=str(Path(folder) / f"{name}.png"))


def ask(page: Any, text: str) -> None:
    page.fill("#prompt", text)
    page.focus("#prompt")
    page.keyboard.press("Enter")
    page.wait_for_selector(".message.assistant:last-child .foot, .message.refused:last-child .foot")


def kinds(node: Any) -> set[str]:
    return set(node.locator(".body span[class]").evaluate_all("nodes => nodes.map(n => n.className)"))
