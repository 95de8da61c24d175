"""Sound on the page: attached, recorded, played and sent as 16 kHz WAV behind the text."""

from __future__ import annotations

import base64
import io
import json
from typing import Any

import numpy as np
import soundfile
from tests.pages import expect, needs_chromium
from tests.waiting import until

from outrider.models import audio_processing

pytest_plugins = ["tests.page_fixtures"]
pytestmark = needs_chromium


def hearing(page: Any) -> list[Any]:
    """The page of a model that takes sound; bodies of the requests that it will send."""
    page.route("**/props", lambda route: route.fulfill(json={"modalities": {"vision": False, "audio": True}}))
    page.reload()
    expect(page.locator("#attach")).to_be_visible()
    bodies: list[Any] = []
    page.on(
        "request", lambda r: bodies.append(json.loads(r.post_data)) if r.url.endswith("/chat/completions") else None
    )
    return bodies


def wav(seconds: float, rate: int = 44_100) -> dict[str, Any]:
    """A file of two channels."""
    samples = (0.4 * np.sin(np.arange(round(seconds * rate)) * 2 * np.pi * 440 / rate)).astype(np.float32)
    out = io.BytesIO()
    soundfile.write(out, np.stack([samples, samples / 2], 1), rate, format="WAV")
    return {"name": "beep.wav", "mimeType": "audio/wav", "buffer": out.getvalue()}


def sent_sound(bodies: list[Any], page: Any) -> np.ndarray:
    """The samples of the clip behind the text of the last message that was sent."""
    until(lambda: bodies or page.wait_for_timeout(10))
    text, part = bodies[-1]["messages"][-1]["content"]
    assert text == {"type": "text", "text": "What is this?"} and part["type"] == "input_audio"
    return audio_processing.decode(base64.b64decode(part["input_audio"]["data"]), 30.0)


def test_sound_is_attached_and_played_where_the_model_hears(page: Any) -> None:
    bodies = hearing(page)
    page.set_input_files("#media-file", wav(2.0))
    expect(page.locator("#thumbs audio")).to_be_visible()
    page.set_input_files("#media-file", {"name": "no.wav", "mimeType": "audio/wav", "buffer": b"no sound"})
    expect(page.locator("#error-text")).to_contain_text("no.wav is no sound")
    page.set_input_files("#media-file", wav(31.0, 8_000))
    expect(page.locator("#error-text")).to_contain_text("longer than 30 seconds")
    page.fill("#prompt", "What is this?")
    page.keyboard.press("Enter")
    samples = sent_sound(bodies, page)
    assert len(samples) == 32_000 and 0.25 < np.abs(samples[8_000:24_000]).max() < 0.35, "the mean of both channels"
    player = page.locator(".message.user .media audio")
    expect(player).to_have_count(1)
    until(lambda: player.evaluate("node => node.duration") == 2.0 or page.wait_for_timeout(10))
    page.reload()
    expect(page.locator(".message.user .media audio")).to_have_count(1)


def test_a_recording_is_sent(page: Any) -> None:
    bodies = hearing(page)
    page.get_by_label("Record sound").click()
    expect(page.get_by_label("Stop the recording")).to_have_text("■ 1 s")
    page.get_by_label("Stop the recording").click()
    expect(page.locator("#thumbs audio")).to_be_visible()
    expect(page.get_by_label("Record sound")).to_be_visible()
    page.get_by_label("Remove Recording").click()
    expect(page.locator("#thumbs audio")).to_have_count(0)
    page.get_by_label("Record sound").click()
    expect(page.get_by_label("Stop the recording")).to_have_text("■ 1 s")
    page.get_by_label("Stop the recording").click()
    expect(page.locator("#thumbs audio")).to_be_visible()
    page.fill("#prompt", "What is this?")
    page.keyboard.press("Enter")
    assert 8_000 < len(sent_sound(bodies, page)) < 30 * 16_000
