"""Conversations on the page: kept, branched, queued, found, moved between files and windows, alive after a reload."""

from __future__ import annotations

import base64
import io
import json
import re
from pathlib import Path
from typing import Any

from PIL import Image
from tests.pages import STORY, TOK, ask, expect, kinds, needs_chromium, visit
from tests.server_fakes import Served
from tests.waiting import until

pytest_plugins = ["tests.page_fixtures"]
pytestmark = needs_chromium


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


def test_copy_edit_and_retry(page: Any, site: Served) -> None:
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    ask(page, "One.")
    page.locator(".message.assistant .foot >> text=Copy").click()
    until(lambda: page.evaluate("navigator.clipboard.readText()") == STORY)
    page.locator(".message.assistant .foot >> text=Retry").click()
    page.wait_for_selector(".message.assistant .foot")
    assert page.locator(".message").count() == 2 and site.engine.seen[-1].params.seed == 1
    page.focus("#prompt")
    page.keyboard.press("ArrowUp")
    page.keyboard.type(" And two?")
    page.keyboard.press("Enter")
    page.wait_for_selector(".message.assistant .foot")
    assert page.locator(".message.user .body").all_inner_texts() == ["One. And two?"]
    prompt = TOK.decode(site.engine.seen[-1].prompt)
    assert "One. And two?" in prompt and prompt.count("user\n") == 1


def test_a_full_context_forgets_the_oldest_turns(page: Any, site: Served) -> None:
    for i in range(9):
        ask(page, f"Question {i}. " + "x" * 60)
    prompt = TOK.decode(site.engine.seen[-1].prompt)
    assert "Question 8" in prompt and "Question 0" not in prompt
    assert "no longer fit" in page.inner_text(".divider") and page.locator(".message").count() == 18
    assert not page.is_visible("#error") and page.locator(".refused").count() == 0


def test_a_refused_message_is_shown_as_refused_and_not_sent_again(page: Any, site: Served) -> None:
    site.engine.fail_steps = 1
    ask(page, "This will fail.")
    refused = page.locator(".message.user.refused")
    assert (
        "engine failed" in refused.locator(".reason").inner_text() and page.locator(".message.assistant").count() == 0
    )
    ask(page, "This works again.")
    assert "This will fail." not in TOK.decode(site.engine.seen[-1].prompt)
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


def test_stop_keeps_what_came_and_frees_the_server(page: Any, site: Served) -> None:
    site.engine.hold = 40
    try:
        page.fill("#prompt", "Something long.")
        page.keyboard.press("Enter")
        page.wait_for_selector(".message.assistant .body span")
        page.keyboard.press("Escape")
        page.wait_for_selector(".message.assistant .foot")
        assert "stopped" in page.locator(".foot .meta").last.inner_text()
        site.settle()
    finally:
        site.engine.hold = None


def begin(page: Any, text: str) -> None:
    """Ask, and come back when the first words of the answer are there."""
    page.fill("#prompt", text)
    page.keyboard.press("Enter")
    page.wait_for_selector(".message.running .body span")


def questions(page: Any) -> list[str]:
    return page.locator(".message.user .body").all_inner_texts()


def test_a_message_sent_while_an_answer_streams_waits_for_its_end(page: Any, site: Served) -> None:
    site.engine.hold = 40
    try:
        begin(page, "The first.")
        for text in ("The second.", "Never mind.", "The third."):
            page.fill("#prompt", text)
            page.keyboard.press("Enter")
        page.keyboard.press("Enter")  # nothing typed: nothing happens
        assert page.locator(".message.running").count() == 1 and page.locator("#queue li").count() == 3
        page.get_by_label("Do not send: Never mind.").click()
    finally:
        site.engine.hold = None
    expect(page.locator(".message.assistant .foot")).to_have_count(3)
    assert questions(page) == ["The first.", "The second.", "The third."] and page.is_hidden("#queue")
    assert page.locator(".message.assistant .body").all_inner_texts() == [STORY] * 3
    site.engine.hold = 40
    try:
        begin(page, "The fourth.")
        page.fill("#prompt", "The fifth.")
        page.keyboard.press("Enter")
        page.click("#stop")  # what waited is not lost, and not sent either
        expect(page.locator("#prompt")).to_have_value("The fifth.")
        assert "stopped" in page.locator(".foot .meta").last.inner_text() and page.is_hidden("#queue")
        site.settle()
    finally:
        site.engine.hold = None


def test_a_reload_in_mid_stream_loses_neither_question_nor_answer(page: Any, site: Served) -> None:
    site.engine.hold = 40
    try:
        begin(page, "Tell me.")
        page.fill("#prompt", "And then?")
        page.keyboard.press("Enter")
        page.fill("#prompt", "half a thought")
        expect(page.locator(".message.assistant .body")).to_contain_text(STORY[:40])
        page.reload()
        assert (
            page.locator(".message.assistant .body").inner_text().startswith(STORY[:40])
        )  # before the server said a word
        assert page.input_value("#prompt") == "half a thought"
    finally:
        site.engine.hold = None
    expect(page.locator(".message.assistant .foot")).to_have_count(2)
    assert questions(page) == ["Tell me.", "And then?"]
    assert page.locator(".message.assistant .body").all_inner_texts() == [STORY, STORY]
    page.reload()
    assert page.locator(".message.assistant .body").all_inner_texts() == [STORY, STORY]
    page.evaluate(  # as a window leaves it that was closed in mid-stream
        """() => {
        const key = Object.keys(localStorage).filter((k) => k.includes("/")).sort().at(-1);
        const kept = JSON.parse(localStorage.getItem(key));
        const left = { content: kept.content.slice(0, 30), done: false, window: "gone", beat: 0, marks: "" };
        localStorage.setItem(key, JSON.stringify({ ...kept, ...left }));
    }"""
    )
    page.reload()
    assert page.locator(".message.assistant .body").last.inner_text() == STORY[:30].strip()
    page.get_by_label("Resume").click()
    expect(page.locator(".message.assistant .body").last).to_have_text(STORY)


def test_two_windows_show_the_same_and_lose_no_turn(page: Any, site: Served) -> None:
    ask(page, "One.")
    other = page.context.new_page()
    visit(other, site.url)
    assert questions(other) == ["One."]
    ask(other, "Two, in the other window.")
    expect(page.locator(".message.assistant .foot")).to_have_count(2)  # it follows
    assert questions(page) == ["One.", "Two, in the other window."]
    site.engine.hold = 40
    try:
        begin(page, "Three, here.")
        expect(other.locator(".message.running .body")).to_contain_text(STORY[:40])
        other.fill("#prompt", "DraftRequest it, from there.")  # waits for the answer that streams here
        other.keyboard.press("Enter")
        expect(other.locator("#queue li")).to_have_count(1)
        other.get_by_label("Do not send").click()
        other.click("#new-chat")
        begin(other, "Four, meanwhile elsewhere.")
    finally:
        site.engine.hold = None
    expect(page.locator(".message.assistant .foot")).to_have_count(3)
    expect(other.locator(".message.assistant .foot")).to_have_count(1)
    for window in (page, other):
        window.reload()
        expect(window.locator("#conversations .open")).to_have_count(2)
    assert questions(page) == ["One.", "Two, in the other window.", "Three, here."] and questions(other) == [
        "Four, meanwhile elsewhere."
    ]
    # both go on from the same turn at once, and neither has heard of the other yet: two branches of one conversation
    stored = page.evaluate(
        """async () => {
        const { load } = await import("./page/store.js"), id = sessionStorage.getItem("outrider.current");
        const copies = [load(id), load(id)], { leaf } = copies[0];
        ["Left?", "Right?"].forEach((content, i) => copies[i].keep(copies[i].add({ role: "user", content })));
        return load(id).children(leaf).map((m) => m.content);
    }"""
    )
    assert stored == ["Left?", "Right?"]
    other.click("#conversations .open >> text=One.")
    expect(other.locator(".branches")).to_have_text(re.compile("2/2"))
    page.on("dialog", lambda d: d.accept())
    page.locator("#conversations li").filter(has_text="One.").get_by_label("Delete").click()
    expect(other.locator(".message")).to_have_count(0)  # gone there too


def test_retries_and_edits_are_branches(page: Any, site: Served) -> None:
    old = site.engine.say
    site.engine.say = lambda r: f"Seed {r.params.seed}."
    try:
        ask(page, "First.")
        page.locator(".message.assistant .foot >> text=Retry").click()
        expect(page.locator(".message.assistant .body")).to_have_text("Seed 1.")
        expect(page.locator(".branches")).to_have_text("‹2/2›")
        ask(page, "DraftRequest the second.")
        page.get_by_label("Previous version").click()
        assert page.locator(".message.assistant .body").all_inner_texts() == ["Seed 0."]
        ask(page, "DraftRequest the first.")
        assert "Seed 1." not in TOK.decode(site.engine.seen[-1].prompt)
        page.reload()
        assert questions(page) == ["First.", "DraftRequest the first."]
        page.get_by_label("Next version").click()
        assert questions(page) == ["First.", "DraftRequest the second."]
        page.locator(".message.user").last.get_by_label("Edit").click()
        page.keyboard.type(" Edited.")
        page.keyboard.press("Enter")
        page.wait_for_selector(".message.assistant:last-child .foot")
        assert (
            questions(page) == ["First.", "DraftRequest the second. Edited."] and page.locator(".branches").count() == 2
        )
        page.locator(".message.user").last.get_by_label("Previous version").click()
        assert questions(page) == ["First.", "DraftRequest the second."]
    finally:
        site.engine.say = old


def test_chats_are_searched_renamed_exported_and_imported(page: Any, tmp_path: Path) -> None:
    ask(page, "About owls.")
    page.click("#new-chat")
    ask(page, "About foxes.")
    titles = page.locator("#conversations .open")
    page.fill("#search", "owls EGGS")  # one word of the question, one of the answer
    expect(titles).to_have_text(["About owls."])
    page.fill("#search", "badger")
    expect(titles).to_have_count(0)
    assert page.inner_text("#found") == "0 found"
    page.fill("#search", "")
    page.get_by_label("Rename the conversation About owls.").click()
    page.keyboard.type("Birds")
    page.keyboard.press("Enter")
    expect(titles).to_have_text(["About foxes.", "Birds"])
    with page.expect_download() as download:
        page.click("#export")
    file = tmp_path / "chats.json"
    download.value.save_as(file)
    page.evaluate(
        "for (const k of Object.keys(localStorage)) if (k.startsWith('outrider.chat.')) localStorage.removeItem(k)"
    )
    page.reload()
    assert titles.count() == 0
    page.set_input_files("#import-file", file)
    expect(titles).to_have_count(2)
    assert sorted(titles.all_inner_texts()) == ["About foxes.", "Birds"]
    page.set_input_files("#import-file", file)  # again: nothing is doubled
    page.click("#conversations .open >> text=Birds")
    expect(page.locator(".message.assistant .body")).to_have_text([STORY])
    assert titles.count() == 2
    for bad, why in (("no json", "not JSON"), (json.dumps({"outrider": 1, "conversations": 3}), "no conversations")):
        file.write_text(bad)
        page.set_input_files("#import-file", file)
        expect(page.locator("#error-text")).to_contain_text(why)
    odd = {
        "id": "odd",
        "role": "assistant",
        "content": "odd",
        "marks": {},
        "note": 3,
        "images": [{"url": "http://example.org/i.png"}, 7],
    }
    looped = [
        odd,
        {"id": "a", "parent": "b", "role": "user", "content": "x"},
        {"id": "b", "parent": "a", "role": "user", "content": "y"},
    ]
    file.write_text(
        json.dumps({"outrider": 1, "conversations": [{"id": "loop", "title": "Loop", "leaf": "a", "messages": looped}]})
    )
    page.set_input_files("#import-file", file)
    page.click("#conversations .open >> text=Loop")
    expect(page.locator("#conversations [aria-current]")).to_have_text("Loop")


def test_conversations_of_earlier_versions_are_taken_over(page: Any) -> None:
    messages = [
        {"role": "user", "content": "Old question."},
        {"role": "assistant", "content": "Old answer.", "done": True, "note": "2 tokens"},
    ]
    old = {"id": "old1", "title": "Old question.", "system": "", "updated": 5, "from": 0, "messages": messages}
    page.evaluate("old => localStorage.setItem('outrider.chat.old1', JSON.stringify(old))", old)
    page.reload()
    page.click("#conversations .open >> text=Old question.")
    assert page.locator(".message .body").all_inner_texts() == ["Old question.", "Old answer."]
    page.reload()
    assert page.locator(".message .body").all_inner_texts() == ["Old question.", "Old answer."]


def test_images_are_attached_where_the_model_sees(page: Any, site: Served) -> None:
    assert page.is_hidden("#record")  # this server's model neither sees nor hears
    expect(page.locator("#attach")).to_have_attribute(
        "title", "Attach text files (this model takes no images and no sound)"
    )
    page.route("**/props", lambda route: route.fulfill(json={"modalities": {"vision": True}}))
    page.reload()
    expect(page.locator("#attach")).to_have_attribute("aria-label", "Attach text files or images")
    png = io.BytesIO()
    Image.new("RGB", (3000, 1500), (200, 30, 30)).save(png, "PNG")
    page.set_input_files("#media-file", {"name": "red.png", "mimeType": "image/png", "buffer": png.getvalue()})
    expect(page.get_by_alt_text("red.png")).to_be_visible()
    give = """([how, bytes]) => {
        const data = new DataTransfer(), raw = Uint8Array.from(atob(bytes), (c) => c.charCodeAt(0));
        data.items.add(new File([raw], `${how}.png`, { type: "image/png" }));
        const options = { bubbles: true, cancelable: true, clipboardData: data, dataTransfer: data };
        const event = how === "paste" ? new ClipboardEvent(how, options) : new DragEvent(how, options);
        document.getElementById("prompt").dispatchEvent(event);
    }"""
    for how in ("paste", "drop"):
        page.evaluate(give, [how, base64.b64encode(png.getvalue()).decode()])
        expect(page.get_by_alt_text(f"{how}.png")).to_be_visible()
    page.get_by_label("Remove paste.png").click()
    page.set_input_files("#media-file", {"name": "no.png", "mimeType": "image/png", "buffer": b"no image"})
    expect(page.locator("#error-text")).to_contain_text("no.png is no image")
    bodies: list[Any] = []
    page.on(
        "request", lambda r: bodies.append(json.loads(r.post_data)) if r.url.endswith("/chat/completions") else None
    )
    page.fill("#prompt", "What is this?")
    page.keyboard.press("Enter")
    until(lambda: bodies or page.wait_for_timeout(10))
    *images, text = bodies[0]["messages"][-1]["content"]
    assert text == {"type": "text", "text": "What is this?"} and [part["type"] for part in images] == ["image_url"] * 2
    sent = Image.open(io.BytesIO(base64.b64decode(images[0]["image_url"]["url"].partition(",")[2])))
    assert sent.size == (1024, 512)  # made small enough to send and to keep
    assert page.locator(".message.user .media img").count() == 2 and page.is_hidden("#thumbs")


def test_an_answer_that_was_cut_goes_on(page: Any, site: Served) -> None:
    page.fill("#max-tokens", "40")
    ask(page, "Tell me about the fox.")
    answer = page.locator(".message.assistant").last
    begun = answer.locator(".body").inner_text()
    expect(answer.locator(".meta")).to_contain_text("cut at the maximum length")
    assert STORY.startswith(begun) and len(begun) == 40
    page.reload()  # what was stored can be continued, too
    page.fill("#max-tokens", "2048")
    page.get_by_role("button", name="Continue this answer").click()
    page.wait_for_selector(".message.assistant:last-child .foot")
    # the model of this test starts again wherever it is asked to go on
    expect(answer.locator(".body")).to_have_text(begun + STORY)
    assert TOK.decode(site.engine.seen[-1].prompt).endswith(begun)
    assert {"accepted", "corrected"} <= kinds(answer)
    expect(page.get_by_role("button", name="Continue this answer")).to_have_count(0)
    assert page.locator(".message.assistant").count() == 1


def test_a_text_file_goes_with_a_message(page: Any, site: Served) -> None:
    source = "def f():\n    return '```'\n"
    page.set_input_files("#media-file", {"name": "f.py", "mimeType": "text/x-python", "buffer": source.encode()})
    expect(page.locator("#thumbs summary")).to_have_text("f.py")
    ask(page, "What does it do?")
    sent = TOK.decode(site.engine.seen[-1].prompt)
    assert f"f.py:\n````\n{source}````\n\nWhat does it do?" in sent
    page.reload()
    page.locator(".message.user summary").click()
    expect(page.locator(".message.user pre")).to_have_text(source)
    for name, kind, why in (
        ("a.png", "image/png", "fake takes no images, only text files"),
        ("a.bin", "application/octet-stream", "a.bin is no text file"),
        ("a.mp4", "video/mp4", "fake takes no video"),
    ):
        page.set_input_files("#media-file", {"name": name, "mimeType": kind, "buffer": b"\x00\xff"})
        expect(page.locator("#error-text")).to_contain_text(why)
    big = {"name": "big.txt", "mimeType": "text/plain", "buffer": b"x" * (256 * 1024 + 1)}
    page.set_input_files("#media-file", big)
    expect(page.locator("#error-text")).to_contain_text("big.txt is larger than 256 KiB")
    assert page.locator("#thumbs li").count() == 0


def test_a_system_prompt_belongs_to_its_chat(page: Any, site: Served) -> None:
    page.fill("#system", "Be brief.")
    ask(page, "One.")
    page.click("#new-chat")
    assert page.input_value("#system") == ""
    ask(page, "Two.")
    assert "Be brief." not in TOK.decode(site.engine.seen[-1].prompt)
    page.get_by_role("button", name="One.", exact=True).click()
    expect(page.locator("#system")).to_have_value("Be brief.")
