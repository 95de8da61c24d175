"""The page in a real browser: type, stream, toggle, race, metrics, keys and error states.

Needs Debian's or any other system Chromium (CHROMIUM names another one); skipped, and saying so, where there is none.
OUTRIDER_SCREENSHOTS=folder writes the pictures of docs/server.md there.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.server_fakes import FakeEngine, Served, tokenizer

from outrider.engine.scheduler import Request

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install playwright")
expect = sync_api.expect
CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium found: apt-get install chromium, or set CHROMIUM")
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking", "--disable-component-update",
    "--disable-sync",
]  # fmt: skip
STORY = (
    "A fox lived at the edge of the wood and could not count. One evening she found three eggs, and then she found two more. "
    "She laid them in a row and touched each with her nose: one, two, three, four, five. From then on she counted everything."
)


def say(request: Request) -> str:
    text = TOK.decode(request.prompt)
    return "<b>not markup</b>" if "markup" in text else STORY


TOK = tokenizer()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as p:
        browser = p.chromium.launch(executable_path=CHROMIUM, headless=True, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with Served(FakeEngine(TOK, say, delay=0.004), TOK) as s:
        yield s


@pytest.fixture
def page(browser: Any, served: Served) -> Iterator[Any]:
    yield from open_page(browser, served.url)


def open_page(browser: Any, url: str, **options: Any) -> Iterator[Any]:
    """A page that must not log an error nor ask another host for anything."""
    context = browser.new_context(**{"color_scheme": "dark", "viewport": {"width": 1180, "height": 760}, **options})
    page = context.new_page()
    problems: list[str] = []
    page.on("pageerror", lambda e: problems.append(str(e)))
    page.on("request", lambda r: problems.append(r.url) if not r.url.startswith((url, "data:")) else None)
    page.goto(url)
    expect(page.locator("#model:not(:empty), #error:not([hidden])")).to_have_count(1)
    yield page
    context.close()
    assert not problems


def shoot(page: Any, name: str) -> None:
    folder = os.environ.get("OUTRIDER_SCREENSHOTS")
    if folder:
        page.screenshot(path=str(Path(folder) / f"{name}.png"))


def ask(page: Any, text: str) -> None:
    page.fill("#prompt", text)
    page.keyboard.press("Enter")
    page.wait_for_selector(".message.assistant .foot")


def test_type_stream_and_read_the_statistics(page: Any) -> None:
    ask(page, "Tell me about the fox.")
    answer = page.locator(".message.assistant").last
    assert answer.inner_text().startswith(STORY)
    kinds = set(answer.locator("span:not(.foot)").evaluate_all("nodes => nodes.map(n => n.className)"))
    assert {"accepted", "corrected", "bonus"} <= kinds
    assert float(page.inner_text("#s-tps")) > 0 and page.inner_text("#s-ttft").endswith("ms")
    assert 1 < float(page.inner_text("#s-cycle")) <= 4
    assert page.locator("#positions div").count() == 3
    shoot(page, "chat")


def test_colours_toggle_without_losing_the_text(page: Any) -> None:
    ask(page, "Again.")
    span = page.locator(".message.assistant .accepted").first
    coloured = span.evaluate("n => getComputedStyle(n).backgroundColor")
    page.uncheck("#colour")
    assert span.evaluate("n => getComputedStyle(n).backgroundColor") != coloured
    assert page.locator(".message.assistant").last.inner_text().startswith(STORY)


def test_answers_are_text_not_markup(page: Any) -> None:
    ask(page, "Give me markup <img src=x onerror=alert(1)>")
    assert page.locator(".message b, .message img").count() == 0
    assert "<b>not markup</b>" in page.locator(".message.assistant").last.inner_text()


def test_sliders_go_into_the_request(page: Any, served: Served) -> None:
    page.locator("#k").fill("0")
    page.locator("#temperature").fill("0.7")
    page.locator("#seed").fill("42")
    ask(page, "With settings.")
    request = served.engine.seen[-1]
    assert (request.draft_tokens, request.params.temperature, request.params.seed) == (0, 0.7, 42)
    assert page.inner_text("#k-out") == "0 (plain)"
    assert set(page.locator(".message.assistant span:not(.foot)").evaluate_all("n => n.map(x => x.className)")) == {"plain"}


def test_stop_keeps_what_came_and_frees_the_server(page: Any, served: Served) -> None:
    served.engine.delay = 0.08
    try:
        page.fill("#prompt", "Something long.")
        page.keyboard.press("Enter")
        page.wait_for_selector(".message.assistant span")
        page.keyboard.press("Escape")
        page.wait_for_selector(".message.assistant .foot")
        assert "stopped" in page.locator(".foot").last.inner_text()
        served.settle()
    finally:
        served.engine.delay = 0.004


def test_race_ends_identical(page: Any, served: Served) -> None:
    page.click("#tab-race")
    page.fill("#race-prompt", "Tell me about the fox.")
    page.click("#race-go")
    expect(page.locator("#verdict")).to_contain_text("identical", timeout=20_000)
    plain, spec = (page.inner_text(f"#{lane} .text") for lane in ("lane-plain", "lane-spec"))
    assert plain == spec == STORY
    assert [r.draft_tokens for r in served.engine.seen[-2:]] == [0, None]
    assert "×" in page.inner_text("#verdict")
    shoot(page, "race")


def test_race_says_when_texts_differ(page: Any, served: Served) -> None:
    served.engine.say, old = (lambda r: "plain side" if r.draft_tokens == 0 else "other side"), served.engine.say
    try:
        page.click("#tab-race")
        page.click("#race-go")
        expect(page.locator("#verdict")).to_contain_text("the texts differ")
    finally:
        served.engine.say = old


def test_server_metrics_and_keyboard(page: Any) -> None:
    ask(page, "Make some figures.")
    page.focus("#tab-chat")
    page.keyboard.press("ArrowLeft")  # round to the last tab
    assert page.is_visible("#charts") and not page.is_visible("#log")
    expect(page.locator(".chart b").filter(has_text="–")).to_have_count(0)
    expect(page.locator(".chart polyline").first).to_have_attribute("points", re.compile(r"\S+ \S+"))
    shoot(page, "server")


def test_phone_sized_and_light(browser: Any, served: Served) -> None:
    pages = open_page(browser, served.url, viewport={"width": 390, "height": 844}, color_scheme="light")
    page = next(pages)
    ask(page, "Tell me about the fox.")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert page.evaluate("document.documentElement.dataset.theme") == "light"
    shoot(page, "phone")
    page.click("#theme")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    next(pages, None)


def test_errors_are_shown_and_the_words_given_back(page: Any, served: Served) -> None:
    served.engine.fail_steps = 1
    page.fill("#prompt", "This will fail.")
    page.keyboard.press("Enter")
    page.wait_for_selector("#error:not([hidden])")
    assert "engine failed" in page.inner_text("#error-text")
    assert page.input_value("#prompt") == "This will fail." and page.locator(".message.assistant").count() == 0
    page.click("#error-close")
    ask(page, "This works again.")
    assert not page.is_visible("#error")


def test_refusals_by_name(page: Any) -> None:
    page.locator("#max-tokens").evaluate("n => { n.max = 9999; n.value = 9999; n.dispatchEvent(new Event('input')); }")
    page.fill("#prompt", "Too much.")
    page.keyboard.press("Enter")
    page.wait_for_selector("#error:not([hidden])")
    assert "context holds" in page.inner_text("#error-text")


def test_api_key_is_asked_for(browser: Any) -> None:
    with Served(FakeEngine(TOK, say), TOK, api_keys=("sesame",)) as served:
        pages = open_page(browser, served.url)
        page = next(pages)
        page.wait_for_selector("#key-form:not([hidden])")
        shoot(page, "key")
        page.fill("#key", "wrong")
        page.keyboard.press("Enter")
        page.wait_for_selector("#key-form:not([hidden])")
        page.fill("#key", "sesame")
        page.keyboard.press("Enter")
        expect(page.locator("#model")).to_contain_text("fake")
        ask(page, "Tell me about the fox.")
        next(pages, None)


def test_a_server_that_dies_is_reported(browser: Any) -> None:
    with Served(FakeEngine(TOK, say), TOK) as served:
        pages = open_page(browser, served.url)
        page = next(pages)
    page.fill("#prompt", "Anyone there?")
    page.keyboard.press("Enter")
    page.wait_for_selector("#error:not([hidden])")
    assert "can't be reached" in page.inner_text("#error-text")
    next(pages, None)
