"""The page in a real browser: type, stream, race, figures, keys and error states."""

from __future__ import annotations

import gzip
import re
from pathlib import Path
from typing import Any

import pytest
from tests.pages import STORY, TOK, ask, expect, kinds, needs_chromium, open_page, say, shoot, visit
from tests.running import running
from tests.server_fakes import VOCAB, FakeEngine, Served
from tests.waiting import until

from outrider.server.main import HttpServer
from outrider.server.model_info import ServedModel
from outrider.server.model_pool import ModelPool, PoolSlot
from outrider.server.settings import ServerSettings

pytest_plugins = ["tests.page_fixtures"]
pytestmark = needs_chromium


def test_one_of_several_models_is_chosen(browser: Any) -> None:
    def slot(name: str) -> PoolSlot:
        backend = ServedModel(FakeEngine(TOK, lambda _: f"I am {name}."), TOK, VOCAB, 2048, "drafter: fake")
        return PoolSlot(name, lambda: backend, note=backend.note)

    settings = ServerSettings("fox", port=0)
    with running(HttpServer(ModelPool([slot("fox"), slot("owl")], None, settings), settings)) as url:
        for page in open_page(browser, url):
            ask(page, "who?")
            expect(page.locator(".message.assistant").last).to_contain_text("I am fox.")
            page.focus("#model-choice")
            expect(page.locator("#model-choice option")).to_have_text(["fox", "owl (loads when asked)"])
            page.select_option("#model-choice", "owl")
            ask(page, "and you?")
            expect(page.locator(".message.assistant").last).to_contain_text("I am owl.")


def test_type_stream_and_read_the_statistics(page: Any) -> None:
    ask(page, "Tell me about the fox.")
    answer = page.locator(".message.assistant").last
    assert answer.locator(".body").inner_text() == STORY
    assert {"accepted", "corrected", "bonus"} <= kinds(answer)
    assert float(page.inner_text("#s-tps")) > 0 and page.inner_text("#s-ttft").endswith("ms")
    assert 1 < float(page.inner_text("#s-cycle")) <= 4
    assert page.locator("#positions div").count() == 3
    shoot(page, "chat")


def test_trees_are_laid_out_by_what_follows_what(page: Any) -> None:
    tree = {"tokens": ["a", "b", "c", "B", "A"], "parents": [0, 1, 2, 1, 0], "path": [1, 4]}
    layout = page.evaluate("async tree => (await import('./page/cycles.js')).layout(tree)", tree)
    places = {node["text"]: (node["row"], node["column"], node["taken"]) for node in layout}
    path = {"a", "B"}
    where = {"a": (0, 0), "b": (0, 1), "c": (0, 2), "B": (1, 1), "A": (2, 0)}
    assert places == {name: (*at, name in path) for name, at in where.items()}
    assert page.evaluate("async tree => (await import('./page/cycles.js')).helped(tree)", tree)


def test_sliders_and_system_prompt_go_into_the_request(page: Any, site: Served) -> None:
    page.locator("#k").fill("0")
    page.locator("#temperature").fill("0.7")
    page.locator("#top-p").fill("0.9")
    page.locator("#top-k").fill("20")
    page.locator("#seed").fill("42")
    page.fill("#system", "Be brief.")
    ask(page, "With settings.")
    request = site.engine.seen[-1]
    assert (request.draft_tokens, request.params.temperature, request.params.seed) == (0, 0.7, 42)
    assert (request.params.top_p, request.params.top_k) == (0.9, 20)
    assert "system\nBe brief." in TOK.decode(request.prompt)
    assert page.inner_text("#k-out") == "0 (plain)"
    assert kinds(page.locator(".message.assistant").last) == {"plain"}
    assert "plain" in page.inner_text("#against").lower()  # an answer without drafts is a measurement


def test_a_reader_who_scrolled_up_stays_there(page: Any, site: Served) -> None:
    for i in range(3):
        ask(page, f"Fill the page {i}, list of code.")
    site.engine.hold = 40
    try:
        page.fill("#prompt", "More.")
        page.keyboard.press("Enter")
        page.wait_for_selector(".message.running span")
        page.evaluate("document.getElementById('log').scrollTop = 40")
        site.engine.hold = None
        page.wait_for_selector(".message:last-child .foot")
        assert page.evaluate("document.getElementById('log').scrollTop") == 40
        page.click("#latest")
        assert page.locator("#log").evaluate("n => n.scrollHeight - n.scrollTop - n.clientHeight") < 2
    finally:
        site.engine.hold = None


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


def test_race_says_when_texts_differ(page: Any, site: Served) -> None:
    old = site.engine.say
    site.engine.say = lambda r: "plain side" if r.draft_tokens == 0 else "other side"
    try:
        page.click("#tab-race")
        page.click("#race-go")
        expect(page.locator("#verdict")).to_contain_text("the texts differ")
    finally:
        site.engine.say = old


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


def test_figures_of_a_restarted_server_are_not_negative(page: Any, site: Served) -> None:
    readings = [(100, 1000), (100, 1400), (200, 30), (200, 60)]  # when the process started, its tokens since
    answered: list[int] = []

    def answer(route: Any) -> None:
        start, tokens = readings[min(len(answered), len(readings) - 1)]
        answered.append(tokens)
        text = f"process_start_time_seconds {start}.0\noutrider_new_tokens_total {tokens}.0\n"
        route.fulfill(body=text, content_type="text/plain")

    page.route("**/metrics", answer)
    page.clock.install()
    visit(page, site.url)
    page.click("#tab-server")
    until(lambda: len(answered) >= 6 or page.clock.run_for(2000))
    spoken = page.locator("#charts .chart svg").first
    expect(spoken).to_have_attribute("aria-label", re.compile(r"now \d"))
    label = spoken.get_attribute("aria-label")
    assert "-" not in label and float(re.findall(r"highest ([0-9.]+)", label)[0]) > 100, label


def test_sampling_begins_as_the_model_has_it(page: Any, site: Served) -> None:
    """At temperature 0 small models repeat themselves. What was chosen here holds, also where it is "off"."""
    assert page.inner_text("#temperature-out") == "0.7"
    defaults = {"temperature": 0.55, "top_p": 0.9, "top_k": 40}
    page.route("**/props", lambda route: route.fulfill(json={"default_generation_settings": {"params": defaults}}))
    for value in ("5", "0"):
        page.locator("#top-k").fill(value)
        page.locator("#top-k").blur()
    page.reload()
    expect(page.locator("#temperature-out")).to_have_text("0.55")
    ask(page, "Hello.")
    params = site.engine.seen[-1].params
    assert (params.temperature, params.top_p, params.top_k) == (0.55, 0.9, 0)
    page.locator("#temperature").fill("0")
    page.reload()
    expect(page.locator("#top-p-out")).to_have_text("0.90")
    assert page.inner_text("#temperature-out") == "0"


def test_answers_may_be_as_long_as_the_context(page: Any, site: Served) -> None:
    page.fill("#max-tokens", "99999")
    page.locator("#max-tokens").blur()
    assert page.input_value("#max-tokens") == "2048"
    ask(page, "Hello.")
    assert site.engine.seen[-1].params.max_tokens > 1900


def test_single_key_shortcuts_can_be_turned_off(page: Any) -> None:
    page.get_by_label("Single-key shortcuts").uncheck()
    page.reload()
    page.focus("#log")
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.id") == "log" and page.locator("kbd.single-key").is_hidden()
    page.get_by_label("Single-key shortcuts").check()
    page.focus("#log")
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.id") == "prompt"


def test_fingers_find_targets_of_40_pixels(browser: Any, site: Served) -> None:
    for page in open_page(
        browser, site.url, viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True, device_scale_factor=2
    ):
        ask(page, "Tell me about the fox.")
        small = page.evaluate(
            """() => [...document.querySelectorAll("button, select, input, textarea, summary")]
                .filter((n) => n.checkVisibility() && n.type !== "checkbox")
                .map((n) => [n.id || n.textContent, n.getBoundingClientRect()])
                .filter(([, box]) => box.width > 1 && (box.height < 39.5 || box.width < 39.5))
                .map(([name, box]) => `${name}: ${box.width} x ${box.height}`)"""
        )
        assert small == []
        assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_phone_sized_and_light(browser: Any, site: Served) -> None:
    pages = open_page(browser, site.url, viewport={"width": 390, "height": 844}, color_scheme="light")
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


def test_api_key_is_asked_for(browser: Any) -> None:
    with Served(FakeEngine(TOK, say), TOK, api_keys=("sesame",)) as site:
        pages = open_page(browser, site.url)
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
    with Served(FakeEngine(TOK, say), TOK) as site:
        pages = open_page(browser, site.url)
        page = next(pages)
    ask(page, "Anyone there?")
    assert "can't be reached" in page.inner_text(".message.refused .reason")
    next(pages, None)


def test_several_models_can_be_chosen(browser: Any, site: Served) -> None:
    pages = open_page(browser, site.url)
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
def test_axe_finds_nothing_serious(browser: Any, site: Served, scheme: str) -> None:
    """axe-core over every view. See tests/data/axe/README.md for the file's origin."""
    file = Path(__file__).parents[1] / "data" / "axe" / "axe.min.js.gz"
    axe = gzip.decompress(file.read_bytes()).decode()
    pages = open_page(browser, site.url, color_scheme=scheme)
    page = next(pages)
    page.emulate_media(reduced_motion="reduce")  # no half-faded colours
    site.engine.branching = True
    try:
        ask(page, "Give me a list of code.")
    finally:
        site.engine.branching = False
    site.engine.fail_steps = 1
    ask(page, "Refuse this.")
    ask(page, "And this once more.")
    page.locator(".message.assistant:last-child .foot >> text=Retry").click()
    page.wait_for_selector(".branches")
    page.evaluate("for (const id of ['replay', 'attach', 'queue']) document.getElementById(id).hidden = false")
    page.evaluate(
        "document.body.classList.add('answering'); document.getElementById('saved').textContent = '1.00 s saved so far'"
    )
    page.evaluate("document.getElementById('queue').innerHTML = '<li><span>Waits.</span></li>'")
    page.evaluate("""document.querySelector('#lane-spec .text').innerHTML =
        '<span class="draft open"><i>ghost</i></span> <span class="draft struck"><s>wrong</s></span>'""")
    for view in ("chat", "race", "server"):
        page.click(f"#tab-{view}")
        page.evaluate(axe + ";0")
        violations = page.evaluate("axe.run(document, {resultTypes: ['violations']})")["violations"]
        serious = [
            f"{v['id']}: {v['nodes'][0]['html'][:200]} {v['nodes'][0]['failureSummary']}"
            for v in violations
            if v["impact"] in ("serious", "critical")
        ]
        assert not serious, f"{view}, {scheme}:\n" + "\n".join(serious)
    next(pages, None)


def test_a_cycle_is_drawn_with_the_way_that_was_taken(page: Any, site: Served) -> None:
    site.engine.branching = True
    try:
        ask(page, "A tree.")
    finally:
        site.engine.branching = False
    assert page.is_visible("#cycles") and "came from a branch" in page.inner_text("#branched")
    left = page.locator("#tree .left")
    path = page.locator("#tree .taken")
    corrected = page.locator("#tree .own")
    assert left.count() == 1 and path.count() >= 1
    corner = "n => [getComputedStyle(n).gridRowStart, getComputedStyle(n).gridColumnStart].map(Number)"
    assert left.evaluate(corner) == [1, 1]  # the first draft, which was wrong
    assert [node.evaluate(corner) for node in path.all()] == [[2, i + 1] for i in range(path.count())]
    if corrected.count():
        assert corrected.evaluate(corner) == [3, path.count() + 1]  # what the model added itself
    look = "n => getComputedStyle(n).borderTopStyle + getComputedStyle(n).fontWeight"
    assert left.evaluate(look) != path.first.evaluate(look)  # not by colour alone
    assert "The model took" in page.get_attribute("#tree", "aria-label")
    ask(page, "A line: any of its cycles can be looked at.")
    page.focus("#cycle")
    page.keyboard.press("End")
    count = int(page.get_attribute("#cycle", "max")) + 1
    assert page.inner_text("#cycle-out").startswith(f"{count} of {count}") and page.inner_text("#branched") == ""
    page.click("#cycle-larger")  # with the whole page for it
    page.keyboard.press("Home")
    assert (
        page.inner_text("#cycle-out").startswith("1 of ")
        and page.locator("#cycle-dialog #tree").bounding_box()["width"] > 600
    )
    page.keyboard.press("Escape")
    page.wait_for_selector("aside #tree", state="attached")  # the dialog's end is told a moment later
    page.wait_for_function("document.activeElement.id === 'cycle-larger'")
    drafts = site.engine.draft
    site.engine.draft = 0
    try:
        ask(page, "And none.")
    finally:
        site.engine.draft = drafts
    assert page.is_hidden("#cycles")


def test_race_ends_identical_and_is_replayed(page: Any, site: Served) -> None:
    page.emulate_media(reduced_motion="reduce")  # the replay waits to be started
    page.click("#tab-race")
    page.fill("#race-prompt", "Tell me about the fox.")
    page.click("#race-go")
    expect(page.locator("#verdict")).to_contain_text("identical")
    texts = ["#lane-plain .text", "#lane-spec .text"]
    assert [page.inner_text(text) for text in texts] == [STORY, STORY]
    assert [r.draft_tokens for r in site.engine.seen[-2:]] == [0, None]
    assert "×" in page.inner_text("#verdict")
    shoot(page, "race")
    page.locator("#replay-at").evaluate("n => { n.value = n.max / 4; n.dispatchEvent(new Event('input')); }")
    assert all(0 < len(page.inner_text(text)) < len(STORY) for text in texts)
    page.select_option("#replay-speed", "0.03")  # starts it, in slow motion
    expect(page.locator("#replay-play")).to_have_text("Pause")
    expect(page.locator("#lane-spec .draft")).to_have_count(1)
    page.select_option("#replay-speed", "1")
    expect(page.locator("#replay-play")).to_have_text("Play")  # the end
    assert [page.inner_text(text) for text in texts] == [STORY, STORY] and page.locator(".draft").count() == 0
    assert page.locator("#lane-spec .speed").inner_text().endswith("✓")


def test_a_replay_shows_drafts_as_ghosts_and_counts_the_time_saved(page: Any) -> None:
    """Recordings looked at by their times: what is shown is a function of the time alone."""
    spec = [
        {"at": 1, "tokens": [["The", "plain"]]},
        {"at": 2, "tokens": [[" fox", "accepted"], [" ran", "corrected"]], "draft": [" fox", " sat"]},
        {"at": 3, "tokens": [[" off", "accepted"], [".", "bonus"]], "draft": [" off"]},
    ]
    plain = [{"at": i + 1, "tokens": [[word, "plain"]]} for i, word in enumerate(("The", " fox", " ran", " off", "."))]
    page.emulate_media(reduced_motion="reduce")
    seen = page.evaluate(
        """async ([plain, spec]) => {
        const { Lane, Replay } = await import("./page/replay.js"), get = (id) => document.getElementById(id);
        const replay = new Replay({ plain: new Lane(get("lane-plain")), spec: new Lane(get("lane-spec")) });
        const shown = (id) => [...get(id).querySelector(".text").children].map((n) => n.innerHTML).join("|");
        replay.load(plain, spec);
        const now = () => [shown("lane-plain"), shown("lane-spec"), get("saved").textContent];
        const look = (t) => { replay.seek(t); return now(); };
        return [1.1, 1.9, 2.1, 2.9, 3, 5, 1.9].map(look);
    }""",
        [plain, spec],
    )
    ghosts = "The|<i> fox</i><i> sat</i>"
    struck = "The| fox| ran|<s> sat</s>"
    whole = "The| fox| ran| off|."
    next_ghost = "The| fox| ran|<i> off</i>"
    assert [line[1] for line in seen] == ["The", ghosts, struck, next_ghost, whole, whole, ghosts]
    assert [line[0] for line in seen] == [
        "The",
        "The",
        "The| fox",
        "The| fox",
        "The| fox| ran",
        "The| fox| ran| off|.",
        "The",
    ]
    assert [line[2] for line in seen] == [
        "",
        "",
        "1.00 s saved so far",
        "1.00 s saved so far",
        *["2.00 s saved so far"] * 2,
        "",
    ]


def test_plain_is_measured_by_itself_dated_and_ages(page: Any, site: Served) -> None:
    page.evaluate(
        "localStorage.clear(); localStorage.setItem('outrider.plain.fake', '7')"
    )  # without a date, as it once was
    page.reload()
    ask(page, "Tell me about the fox.")
    assert "not measured" in page.inner_text("#against")
    page.check("#auto-plain")
    ask(page, "Again.")
    expect(page.locator("#against")).to_contain_text("× plain")
    assert site.engine.seen[-1].draft_tokens == 0 and "measured just now" in page.inner_text("#against")
    assert page.locator("#speed path.line-1").get_attribute("d").startswith("M")
    assert "tokens/s" in page.locator("#speed svg").get_attribute("aria-label")
    page.uncheck("#auto-plain")
    page.evaluate("localStorage.setItem('outrider.plain.fake', JSON.stringify({tps: 7, at: Date.now() - 7200e3}))")
    ask(page, "And later.")
    assert "measured 2 h ago, too old to compare with" in page.inner_text("#against") and "×" not in page.inner_text(
        "#against"
    )
    page.click("#measure")
    expect(page.locator("#against")).to_contain_text("just now")


def test_figures_of_the_answer_before_do_not_stay(page: Any, site: Served) -> None:
    ask(page, "Tell me about the fox.")
    assert page.locator("#positions div").count() == 3
    site.engine.hold = 0
    try:
        page.fill("#prompt", "Wait.")
        page.keyboard.press("Enter")
        page.wait_for_selector(".message.running")
        expect(page.locator("#s-tps")).to_have_text("–")
        assert [page.inner_text(f"#s-{name}") for name in ("ttft", "cycle", "accept")] == ["–"] * 3
        assert page.locator("#positions div").count() == 0 and page.is_hidden("#cycles")
    finally:
        site.engine.hold = None
    page.wait_for_selector(".message:last-child .foot")
