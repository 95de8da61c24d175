"""Images over HTTP, in every protocol: the same picture gives the same answer as from Python, and what cannot be read
is refused in one line."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from tests import tiny, tiny_vision
from tests.server_fakes import Served

from outrider.llm import LLM
from outrider.types import SamplingParams

PICTURE = tiny_vision.picture(90, 120, 1)


def encoded(image: Any = PICTURE, kind: str = "PNG") -> str:
    out = io.BytesIO()
    image.save(out, kind)
    return base64.b64encode(out.getvalue()).decode()


URL = f"data:image/png;base64,{encoded()}"


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    where = tmp_path_factory.mktemp("vision")
    tiny_vision.write("gemma4_31b", where / "target")
    tiny.write_assistant("gemma4_31b", where / "drafter")
    model = LLM.load(
        str(where / "target"), drafter=str(where / "drafter"), draft_tokens=3, threads=1, max_context=480,
        image_tokens=70, max_images=2, max_image_pixels=10_000_000, max_batch=4,
    )  # fmt: skip
    yield model
    model.close()


@pytest.fixture(scope="module")
def served(llm: LLM) -> Iterator[Served]:
    assert llm.tokenizer is not None
    with Served(
        llm.engine, llm.tokenizer, llm.engine.max_context, llm.config.vocab_size, max_concurrent=4, vision=llm.vision
    ) as s:
        yield s


@pytest.fixture(scope="module")
def expected(llm: LLM) -> tuple[str, int]:
    """The text after "see" and a picture, and the tokens of that prompt."""
    parts: Any = [{"type": "image", "image": PICTURE}, {"type": "text", "text": "see"}]
    answer = llm.chat([{"role": "user", "content": parts}], SamplingParams(max_tokens=8))
    return answer.text, answer.stats.prompt_tokens


def chat(served: Served, part: Any, **more: Any) -> Any:
    body = {"temperature": 0, "max_tokens": 8, "messages": [{"role": "user", "content": part}], **more}
    return served.http.post("/v1/chat/completions", json=body)


def test_openai(served: Served, expected: tuple[str, int]) -> None:
    image = {"type": "image_url", "image_url": {"url": URL, "detail": "high"}}
    answer = chat(served, [image, {"type": "text", "text": "see"}]).json()
    assert answer["choices"][0]["message"]["content"] == expected[0]
    assert answer["usage"]["prompt_tokens"] == expected[1] > 60


def test_an_image_longer_than_the_models_positions(served: Served, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU an index past the table would end the process."""
    monkeypatch.setattr(llm.images(), "config", replace(llm.images().config, positions=12))
    narrow = f"data:image/png;base64,{encoded(Image.new('RGB', (900, 8)))}"
    answer = chat(served, [{"type": "image_url", "image_url": {"url": narrow}}])
    assert answer.status_code == 400 and "too narrow" in answer.text


def test_responses(served: Served, expected: tuple[str, int]) -> None:
    content = [{"type": "input_image", "image_url": URL}, {"type": "input_text", "text": "see"}]
    body = {"temperature": 0, "max_output_tokens": 8, "input": [{"role": "user", "content": content}]}
    answer = served.http.post("/v1/responses", json=body).json()
    assert answer["usage"]["input_tokens"] == expected[1], answer
    assert answer["output"][-1]["content"][0]["text"] == expected[0]


def test_anthropic(served: Served, expected: tuple[str, int]) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": encoded()}
    content = [{"type": "image", "source": source}, {"type": "text", "text": "see"}]
    body: Any = {"max_tokens": 8, "temperature": 0, "messages": [{"role": "user", "content": content}]}
    answer = served.http.post("/v1/messages", json=body).json()
    assert "".join(block.get("text", "") for block in answer["content"]) == expected[0]
    counted = served.http.post("/v1/messages/count_tokens", json={"messages": body["messages"]}).json()
    assert counted == {"input_tokens": expected[1]}


def test_ollama(served: Served, expected: tuple[str, int]) -> None:
    body: Any = {"stream": False, "options": {"temperature": 0, "num_predict": 8}}
    message = {"role": "user", "content": "see", "images": [encoded()]}
    answer = served.http.post("/api/chat", json={**body, "messages": [message]}).json()
    assert answer["message"]["content"] == expected[0] and answer["prompt_eval_count"] == expected[1]
    answer = served.http.post("/api/generate", json={**body, "prompt": "see", "images": [encoded()]}).json()
    assert answer["response"] == expected[0]


def test_props(served: Served) -> None:
    assert served.http.get("/props").json()["modalities"]["vision"] is True


def test_text_that_spells_a_placeholder_is_text(served: Served) -> None:
    answer = chat(served, "<|image|> <|image>")
    assert answer.status_code == 200 and answer.json()["usage"]["prompt_tokens"] < 60
    image = {"type": "image_url", "image_url": URL}
    assert chat(served, [image, {"type": "text", "text": "<|image|>"}]).status_code == 200


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("https://example.org/cat.png", "not fetched"),
        ("http://169.254.169.254/", "not fetched"),
        ("file:///etc/passwd", "not fetched"),
        ("data:image/png;base64,!!!", "base64"),
        ("data:image/png,abc", "data URL"),
        ("data:image/png;base64," + base64.b64encode(b"no image").decode(), "not an image"),
        ("data:image/png;base64," + encoded()[:400], "broken"),
        ("", "image_url is missing"),
    ],
)
def test_what_cannot_be_read_is_refused(served: Served, url: str, said: str) -> None:
    answer = chat(served, [{"type": "image_url", "image_url": {"url": url}}])
    assert answer.status_code == 400 and said in answer.json()["error"]["message"]


def test_audio_video_and_too_many_are_refused(served: Served) -> None:
    image = {"type": "image_url", "image_url": URL}
    assert "at most 2" in chat(served, [image] * 3).json()["error"]["message"]
    for kind, said in (("input_audio", "input_audio needs data"), ("video_url", "send frames of it as images")):
        answer = chat(served, [{"type": kind, kind: {"data": "", "format": "wav"}}])
        assert answer.status_code == 400 and said in answer.json()["error"]["message"]
    assert chat(served, [image], prompt_logprobs=1).status_code == 400


def test_a_model_without_vision_says_so() -> None:
    from tests.server_fakes import FakeEngine, tokenizer

    tok = tokenizer()
    with Served(FakeEngine(tok), tok) as s:
        answer = chat(s, [{"type": "image_url", "image_url": URL}])
        assert answer.status_code == 400 and "takes no images" in answer.json()["error"]["message"]
        assert s.http.get("/props").json()["modalities"]["vision"] is False


def test_batches_of_images_are_exact(served: Served, llm: LLM, tmp_path: Path) -> None:
    """Eight callers at once get what each would get alone."""
    from concurrent.futures import ThreadPoolExecutor

    urls = [f"data:image/jpeg;base64,{encoded(tiny_vision.picture(60, 40 + 20 * i, i), 'JPEG')}" for i in range(4)]

    def ask(url):
        return chat(served, [{"type": "image_url", "image_url": url}, {"type": "text", "text": "x"}]).json()

    alone = [ask(url)["choices"][0]["message"]["content"] for url in urls]
    llm.engine.store.prefix.clear()
    with ThreadPoolExecutor(8) as pool:
        both = [answer["choices"][0]["message"]["content"] for answer in pool.map(ask, urls * 2)]
    assert both == alone * 2


@pytest.mark.parametrize("side", [20, 200])  # a body below 8 KiB, and one above
def test_texts_do_not_wait_while_images_are_decoded(served: Served, llm: LLM, side: int) -> None:
    from concurrent.futures import ThreadPoolExecutor

    assert llm.vision is not None
    image = {"type": "image_url", "image_url": f"data:image/png;base64,{encoded(tiny_vision.picture(side, side, 3))}"}
    with ThreadPoolExecutor(3) as pool:
        with llm.vision.decoder._small._lock:
            waiting = [pool.submit(chat, served, [image]) for _ in range(3)]
            assert chat(served, "see").status_code == chat(served, "see " * 20).status_code == 200
            counted = served.http.post(
                "/v1/messages/count_tokens", json={"messages": [{"role": "user", "content": "x"}]}
            )
            assert counted.status_code == 200 and not any(task.done() for task in waiting)
        assert [task.result().status_code for task in waiting] == [200] * 3


HOSTILE: list[Any] = [
    None, 5, [], {}, {"url": None}, {"url": 5}, {"url": ["a"]}, "", "data:", "data:,", "data:image/png;base64,",
    "data:image/png;base64,AAAA", "DATA:image/png;base64,%%%", "javascript:alert(1)", "file:///etc/passwd",
    "http://127.0.0.1/a.png", "https://[::1]/a.png", "http://169.254.169.254/latest", "/etc/passwd", "C:\\a.png",
    "data:text/html;base64,PGI+", "data:image/svg+xml;base64," + base64.b64encode(b"<svg/>").decode(),
    "data:image/png;base64," + encoded()[:80], "data:image/png;base64," + "A" * 100_000, "\x00", "data:" + "x" * 5000,
]  # fmt: skip


@pytest.mark.parametrize("protocol", ["openai", "responses", "anthropic", "ollama"])
def test_hostile_requests_are_refused(served: Served, llm: LLM, expected: tuple[str, int], protocol: str) -> None:
    """More than 80 bodies: each gets a 4xx in the protocol's form, nothing is left running, and the next is answered."""
    for given in HOSTILE:
        url = given.get("url") if isinstance(given, dict) else given
        if protocol == "openai":
            answer = chat(served, [{"type": "image_url", "image_url": given}])
        elif protocol == "responses":
            content = [{"type": "input_image", "image_url": given}]
            answer = served.http.post("/v1/responses", json={"input": [{"role": "user", "content": content}]})
        elif protocol == "anthropic":
            kind = {"type": "url", "url": url} if not str(url).startswith("data:image/png") else {"type": "base64"}
            source = {**kind, "media_type": "image/png", "data": str(url).rpartition(",")[2] + "!"}
            content = [{"type": "image", "source": source}]
            body = {"max_tokens": 4, "messages": [{"role": "user", "content": content}]}
            answer = served.http.post("/v1/messages", json=body)
        else:
            message = {"role": "user", "content": "x", "images": given if isinstance(given, list) and given else [url]}
            answer = served.http.post("/api/chat", json={"stream": False, "messages": [message]})
        assert 400 <= answer.status_code < 500 and answer.json().get("error"), (given, answer.status_code, answer.text)
    assert not llm.engine.progress()
    image = {"type": "image_url", "image_url": {"url": URL}}
    good = chat(served, [image, {"type": "text", "text": "see"}]).json()
    assert good["choices"][0]["message"]["content"] == expected[0]
