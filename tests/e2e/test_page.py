"""The page in a real browser: type, stream, toggle, race, metrics, keys and error states.

Needs Debian's or any other system Chromium (CHROMIUM names another one); skipped, and saying so, where there is none.
OUTRIDER_SCREENSHOTS=folder writes the pictures of docs/server.md there.
"""

from __future__ import annotations

import gzip
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.server_fakes import VOCAB, FakeEngine, Served, tokenizer
from tests.waiting import PATIENCE, until

from outrider.engine.step import Request
from outrider.server.main import HttpServer
from outrider.server.model_pool import ModelPool, PoolSlot
from outrider.server.prepare import ServedModel
from outrider.server.settings import ServerSettings

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install playwright")
expect = sync_api.expect
expect.set_options(timeout=1000 * PATIENCE)  # five seconds else: too few where other tests have the processors
CHROMIUM = (
    os.environ.get("CHROMIUM")
    or shutil.which("chromium")
    or shutil.which("chromium-browser")
    or shutil.which("google-chrome")
)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium found: apt-get install chromium, or set CHROMIUM")
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]  # fmt: skip
STORY = (
    "A fox lived at the edge of the wood and could not count. One evening she found three eggs, and then she found two more. "
    "She laid them in a row and touched each with her nose: one, two, three, four, five. From then on she counted everything."
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
    context.set_default_timeout(1000 * PATIENCE)
    page = context.new_page()
    problems: list[str] = []
    page.on("pageerror", lambda e: problems.append(str(e)))
    page.on("request", lambda r: problems.append(r.url) if not r.url.startswith((url, "data:")) else None)
    page.goto(url)
    expect(page.locator("#model:not(:empty), #error:not([hidden])")).to_have_count(1)
    yield page
    context.close()
    assert not problems


def test_one_of_several_models_is_chosen(browser: Any) -> None:
    def slot(name: str) -> PoolSlot:
        backend = ServedModel(FakeEngine(TOK, lambda _: f"I am {name}."), TOK, VOCAB, 2048, "drafter: fake")
        return PoolSlot(name, lambda: backend, note=backend.note)

    settings = ServerSettings("fox", port=0)
    with HttpServer(ModelPool([slot("fox"), slot("owl")], None, settings), settings).running() as url:
        for page in open_page(browser, url):
            ask(page, "who?")
            expect(page.locator(".message.assistant").last).to_contain_text("I am fox.")
            page.focus("#model-choice")
            expect(page.locator("#model-choice option")).to_have_text(["fox", "owl (loads when asked)"])
            page.select_option("#model-choice", "owl")
            ask(page, "and you?")
            expect(page.locator(".message.assistant").last).to_contain_text("I am owl.")


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


def test_type_stream_and_read_the_statistics(page: Any) -> None:
    ask(page, "Tell me about the fox.")
    answer = page.locator(".message.assistant").last
    assert answer.locator(".body").inner_text() == STORY
    assert {"accepted", "corrected", "bonus"} <= kinds(answer)
    assert float(page.inner_text("#s-tps")) > 0 and page.inner_text("#s-ttft").endswith("ms")
    assert 1 < float(page.inner_text("#s-cycle")) <= 4
    assert page.locator("#positions div").count() == 3
    shoot(page, "chat")


def test_marks_toggle_without_losing_the_text_and_are_not_colour_alone(page: Any) -> None:
    ask(page, "Again.")
    styles = {}
    for kind in ("accepted", "corrected", "bonus"):
        span = page.locator(f".message.assistant .{kind}").first
        styles[kind] = span.evaluate(
            "n => getComputedStyle(n).textDecorationStyle + getComputedStyle(n).textDecorationLine"
        )
    assert len(set(styles.values())) == 3  # three kinds of line
    coloured = span.evaluate("n => getComputedStyle(n).backgroundColor")
    page.uncheck("#colour")
    assert span.evaluate("n => getComputedStyle(n).backgroundColor") != coloured
    assert page.locator(".message.assistant .body").last.inner_text() == STORY


def test_drafts_that_branch_are_drawn_with_the_way_that_was_taken(page: Any, served: Served) -> None:
    ask(page, "A line.")
    assert page.is_hidden("#branches")
    served.engine.branching = True
    try:
        ask(page, "And a tree.")
    finally:
        served.engine.branching = False
    assert page.is_visible("#branches")
    left, taken = page.locator("#tree .left"), page.locator("#tree .taken")
    assert left.count() == 1 and taken.count() >= 1 and "came from a branch" in page.inner_text("#branched")
    corner = "n => [getComputedStyle(n).gridRowStart, getComputedStyle(n).gridColumnStart].map(Number)"
    assert left.evaluate(corner) == [1, 1]  # the first guess, which was wrong
    assert [node.evaluate(corner) for node in taken.all()] == [[2, i + 1] for i in range(taken.count())]
    look = "n => getComputedStyle(n).borderTopStyle + getComputedStyle(n).fontWeight"
    assert left.evaluate(look) != taken.first.evaluate(look)  # not by colour alone
    assert "The model took" in page.get_attribute("#tree", "aria-label")
    ask(page, "A line again.")
    served.engine.draft, drafts = 0, served.engine.draft
    try:
        ask(page, "And none.")
    finally:
        served.engine.draft = drafts
    assert page.is_hidden("#branches")


def test_trees_are_laid_out_by_what_follows_what(page: Any) -> None:
    tree = {"tokens": ["a", "b", "c", "B", "A"], "parents": [0, 1, 2, 1, 0], "path": [1, 4]}
    found = page.evaluate("async tree => (await import('./page/branches.js')).layout(tree)", tree)
    places = {node["text"]: (node["row"], node["column"], node["taken"]) for node in found}
    taken = {"a", "B"}
    where = {"a": (0, 0), "b": (0, 1), "c": (0, 2), "B": (1, 1), "A": (2, 0)}
    assert places == {name: (*at, name in taken) for name, at in where.items()}
    assert page.evaluate("async tree => (await import('./page/branches.js')).helped(tree)", tree)


def test_answers_are_text_not_markup(page: Any) -> None:
    ask(page, "Give me markup <img src=x onerror=alert(1)>")
    assert page.locator(".message b, .message img").count() == 0
    assert "<b>not markup</b>" in page.locator(".message.assistant").last.inner_text()


def test_markdown_is_rendered_and_safe(page: Any) -> None:
    page.locator("#max-tokens").fill("512")
    ask(page, "Give me a list of code.")
    body = page.locator(".message.assistant .body").last
    assert body.locator("h4").inner_text() == "Reversing" and body.locator("strong").inner_text() == "two"
    assert body.locator("ol > li").count() == 2 and body.locator("ol ul li").inner_text() == "in place"
    code = body.locator(".code pre code")
    assert code.inner_text() == "def back(xs):\n    return xs[::-1]  # **not bold**\n"
    assert "mono" in code.evaluate("n => getComputedStyle(n).fontFamily").lower()
    assert body.locator("td").all_inner_texts() == ["a", "1"]
    assert body.locator("a").evaluate_all("n => n.map(x => x.href)") == ["https://example.org/x_(y)"]
    assert "javascript:alert(1)" in body.inner_text() and "```" not in body.inner_text()
    assert {"accepted", "corrected"} <= kinds(page.locator(".message.assistant").last)
    page.reload()  # kept in the browser, marks too
    page.wait_for_selector(".message.assistant .foot")
    assert page.locator(".code pre code").inner_text() == code.inner_text()
    assert {"accepted", "corrected"} <= kinds(page.locator(".message.assistant").last)


def test_markdown_in_any_pieces_ends_the_same(page: Any) -> None:
    """What streams in by pieces must end as what is rendered at once, and no prefix may throw."""
    once, pieces = page.evaluate(
        """async (source) => {
        const { Document } = await import("./page/markdown.js");
        const leaf = (text) => document.createTextNode(text);
        const a = document.createElement("div"), b = document.createElement("div");
        new Document(a, leaf).show(source);
        const grown = new Document(b, leaf);
        for (let i = 1; i <= source.length; i += 1) grown.show(source.slice(0, i));
        return [a.innerHTML, b.innerHTML];
    }""",
        MARKDOWN
        + "\n\n> quote\n> more\n\n- a\n- b\n\n***\n*em* _em_ snake_case_name 2 * 3 * 4 `` a`b `` ~~del~~ \\*no\\*\n```\nopen",
    )
    assert once == pieces
    assert "<em>em</em> <em>em</em> snake_case_name 2 * 3 * 4 <code> a`b </code> <del>del</del> *no*" in once


def test_sliders_and_system_prompt_go_into_the_request(page: Any, served: Served) -> None:
    page.locator("#k").fill("0")
    page.locator("#temperature").fill("0.7")
    page.locator("#seed").fill("42")
    page.fill("#system", "Be brief.")
    ask(page, "With settings.")
    request = served.engine.seen[-1]
    assert (request.draft_tokens, request.params.temperature, request.params.seed) == (0, 0.7, 42)
    assert "system\nBe brief." in TOK.decode(request.prompt)
    assert page.inner_text("#k-out") == "0 (plain)"
    assert kinds(page.locator(".message.assistant").last) == {"plain"}
    assert "plain" in page.inner_text("#against").lower()  # an answer without drafts is a measurement


def test_conversations_are_kept_opened_and_deleted(page: Any) -> None:
    ask(page, "The first question.")
    page.click("#new-chat")
    assert page.locator(".message").count() == 0
    ask(page, "The second question.")
    assert page.locator("#conversations .open").all_inner_texts() == ["The second question.", "The first question."]
    page.reload()
    expect(page.locator(".message.user .body")).to_have_text(["The second question."])
    page.click("#conversations .open >> text=The first")
    expect(page.locator(".message.user .body")).to_have_text(["The first question."])
    page.on("dialog", lambda d: d.accept())
    page.locator("#conversations li").filter(has_text="The first").get_by_label("Delete").click()
    expect(page.locator("#conversations .open")).to_have_text(["The second question."])
    assert page.locator(".message").count() == 0


def test_copy_edit_and_retry(page: Any, served: Served) -> None:
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    ask(page, "One.")
    page.locator(".message.assistant .foot >> text=Copy").click()
    until(lambda: page.evaluate("navigator.clipboard.readText()") == STORY)
    page.locator(".message.assistant .foot >> text=Retry").click()
    page.wait_for_selector(".message.assistant .foot")
    assert page.locator(".message").count() == 2 and served.engine.seen[-1].params.seed == 1
    page.focus("#prompt")
    page.keyboard.press("ArrowUp")
    page.keyboard.type(" And two?")
    page.keyboard.press("Enter")
    page.wait_for_selector(".message.assistant .foot")
    assert page.locator(".message.user .body").all_inner_texts() == ["One. And two?"]
    prompt = TOK.decode(served.engine.seen[-1].prompt)
    assert "One. And two?" in prompt and prompt.count("user\n") == 1


def test_a_full_context_forgets_the_oldest_turns(page: Any, served: Served) -> None:
    for i in range(9):
        ask(page, f"Question {i}. " + "x" * 60)
    prompt = TOK.decode(served.engine.seen[-1].prompt)
    assert "Question 8" in prompt and "Question 0" not in prompt
    assert "no longer fit" in page.inner_text(".divider") and page.locator(".message").count() == 18
    assert not page.is_visible("#error") and page.locator(".refused").count() == 0


def test_a_reader_who_scrolled_up_stays_there(page: Any, served: Served) -> None:
    for i in range(3):
        ask(page, f"Fill the page {i}, list of code.")
    served.engine.hold = 40
    try:
        page.fill("#prompt", "More.")
        page.keyboard.press("Enter")
        page.wait_for_selector(".message.running span")
        page.evaluate("document.getElementById('log').scrollTop = 40")
        served.engine.hold = None
        page.wait_for_selector(".message:last-child .foot")
        assert page.evaluate("document.getElementById('log').scrollTop") == 40
        page.click("#latest")
        assert page.locator("#log").evaluate("n => n.scrollHeight - n.scrollTop - n.clientHeight") < 2
    finally:
        served.engine.hold = None


def test_text_areas_grow(page: Any) -> None:
    before = page.locator("#prompt").bounding_box()["height"]
    page.fill("#prompt", "a\nb\nc\nd\ne")
    assert page.locator("#prompt").bounding_box()["height"] > 2.5 * before


def test_screen_readers_get_sentences(page: Any) -> None:
    page.evaluate("window.heard = []; new MutationObserver(m => m.forEach(r => r.addedNodes.forEach(n => heard.push(n.textContent))))"
                  ".observe(document.getElementById('announce'), {childList: true})")  # fmt: skip
    ask(page, "Tell me about the fox.")
    heard = page.evaluate("heard")
    assert heard[-1].startswith("The answer is complete: ")
    assert all(h[-1] in ".!?" for h in heard) and " ".join(heard[:-1]) == STORY
    assert page.locator("#log[aria-live], #log [aria-live]").count() == 0


def test_speed_against_plain(page: Any) -> None:
    page.evaluate("localStorage.clear()")
    page.reload()
    ask(page, "Tell me about the fox.")
    assert "not measured" in page.inner_text("#against")
    page.click("#measure")
    expect(page.locator("#against")).to_contain_text("× plain")
    assert page.locator("#speed path.line-1").get_attribute("d").startswith("M")
    assert "tokens/s" in page.locator("#speed svg").get_attribute("aria-label")


def test_stop_keeps_what_came_and_frees_the_server(page: Any, served: Served) -> None:
    served.engine.hold = 40
    try:
        page.fill("#prompt", "Something long.")
        page.keyboard.press("Enter")
        page.wait_for_selector(".message.assistant .body span")
        page.keyboard.press("Escape")
        page.wait_for_selector(".message.assistant .foot")
        assert "stopped" in page.locator(".foot .meta").last.inner_text()
        served.settle()
    finally:
        served.engine.hold = None


def test_race_ends_identical(page: Any, served: Served) -> None:
    page.click("#tab-race")
    page.fill("#race-prompt", "Tell me about the fox.")
    page.click("#race-go")
    expect(page.locator("#verdict")).to_contain_text("identical")
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


def test_server_figures_and_keyboard(page: Any) -> None:
    expect(page.locator("#model")).to_contain_text("fake")
    ask(page, "Make some figures.")
    page.focus("#tab-chat")
    page.keyboard.press("ArrowLeft")  # round to the last tab
    assert page.is_visible("#charts") and not page.is_visible("#log")
    expect(page.locator("#charts .chart").first.locator("path")).to_have_attribute("d", re.compile(r"M\S+ \S+L"))
    chart = page.locator("#charts .chart").first
    ticks = chart.locator("text").all_text_contents()
    assert "now" in ticks and "0" in ticks and any(t.endswith(" s") for t in ticks)  # both axes, with the span
    assert "tokens/s" in chart.locator("figcaption").inner_text() and "highest" in chart.locator("svg").get_attribute(
        "aria-label"
    )
    assert "requests" in page.inner_text("#totals")
    shoot(page, "server")
    page.keyboard.press("Home")
    page.keyboard.press("n")
    assert page.evaluate("document.activeElement.id") == "prompt"


def test_phone_sized_and_light(browser: Any, served: Served) -> None:
    pages = open_page(browser, served.url, viewport={"width": 390, "height": 844}, color_scheme="light")
    page = next(pages)
    ask(page, "Tell me about the fox.")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert page.evaluate("document.documentElement.dataset.theme") == "light"
    shoot(page, "phone")
    page.click("#list-toggle")
    assert page.is_visible("#new-chat") and page.evaluate("document.activeElement.id") == "new-chat"
    page.mouse.click(380, 400)
    assert not page.is_visible("#new-chat")
    page.click("#theme")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    next(pages, None)


def test_a_refused_message_is_shown_as_refused_and_not_sent_again(page: Any, served: Served) -> None:
    served.engine.fail_steps = 1
    ask(page, "This will fail.")
    refused = page.locator(".message.user.refused")
    assert (
        "engine failed" in refused.locator(".reason").inner_text() and page.locator(".message.assistant").count() == 0
    )
    ask(page, "This works again.")
    assert "This will fail." not in TOK.decode(served.engine.seen[-1].prompt)
    refused.locator("text=Retry").click()
    page.wait_for_selector(".message.assistant:last-child .foot")
    assert (
        page.locator(".message.refused").count() == 0
        and page.locator(".message.user .body").last.inner_text() == "This will fail."
    )


def test_refusals_by_name(page: Any) -> None:
    ask(page, "y" * 2100)
    assert "2048" in page.inner_text(".message.refused .reason") or "tokens" in page.inner_text(
        ".message.refused .reason"
    )
    page.locator(".message.refused >> text=Remove").click()
    assert page.locator(".message").count() == 0
    page.locator("#max-tokens").evaluate("n => { n.max = 9999; n.value = 9999; n.dispatchEvent(new Event('input')); }")
    ask(page, "A limit beyond the context is lowered to it.")
    assert page.locator(".message.assistant .body").inner_text() == STORY


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
    ask(page, "Anyone there?")
    assert "can't be reached" in page.inner_text(".message.refused .reason")
    next(pages, None)


def test_several_models_can_be_chosen(browser: Any, served: Served) -> None:
    pages = open_page(browser, served.url)
    page = next(pages)
    card = {"id": "fake", "outrider": {"max_context": 2048, "drafter": "drafter: fake"}}
    page.route("**/v1/models", lambda route: route.fulfill(json={"data": [card, {**card, "id": "other"}]}))
    page.reload()
    page.select_option("#model-choice", "other")
    with page.expect_request("**/v1/chat/completions") as sent:
        ask(page, "Hello.")
    assert sent.value.post_data_json["model"] == "other"
    next(pages, None)


@pytest.mark.parametrize("scheme", ["dark", "light"])
def test_axe_finds_nothing_serious(browser: Any, served: Served, scheme: str) -> None:
    """axe-core over every view. See tests/data/axe/README.md for the file's origin."""
    file = Path(__file__).parents[1] / "data" / "axe" / "axe.min.js.gz"
    axe = gzip.decompress(file.read_bytes()).decode()
    pages = open_page(browser, served.url, color_scheme=scheme)
    page = next(pages)
    page.emulate_media(reduced_motion="reduce")  # no half-faded colours
    served.engine.branching = True
    try:
        ask(page, "Give me a list of code.")
    finally:
        served.engine.branching = False
    served.engine.fail_steps = 1
    ask(page, "Refuse this.")
    for view in ("chat", "race", "server"):
        page.click(f"#tab-{view}")
        page.evaluate(axe + ";0")
        found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")["violations"]
        serious = [
            f"{v['id']}: {v['nodes'][0]['html'][:200]} {v['nodes'][0]['failureSummary']}"
            for v in found
            if v["impact"] in ("serious", "critical")
        ]
        assert not serious, f"{view}, {scheme}:\n" + "\n".join(serious)
    next(pages, None)
