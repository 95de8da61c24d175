"""Sound over HTTP: the same clip gives the same answer as from Python, and what cannot be read is refused in one
line."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests import hostile_audio, tiny, tiny_audio, tiny_vision
from tests.e2e.test_server_images import URL as PICTURE_URL
from tests.server_fakes import FakeEngine, Served, tokenizer

from outrider.llm import LLM
from outrider.types import SamplingParams

WAV = tiny_audio.wav(tiny_audio.clip(1.0))
DATA = base64.b64encode(WAV).decode()
URL = f"data:audio/wav;base64,{DATA}"
INPUT_AUDIO = {"type": "input_audio", "input_audio": {"data": DATA, "format": "wav"}}
TEXT = {"type": "text", "text": "listen"}


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    where = tmp_path_factory.mktemp("audio")
    tiny_audio.write("gemma4_e2b", where / "target", seed=4)
    tiny.write_assistant("gemma4_e2b", where / "drafter")
    llm = LLM.load(
        str(where / "target"), drafter=str(where / "drafter"), draft_tokens=3, threads=1, max_context=960,
        image_tokens=70, max_clips=2, max_batch=4,
    )  # fmt: skip
    yield llm
    llm.close()


@pytest.fixture(scope="module")
def served(llm: LLM) -> Iterator[Served]:
    assert llm.tokenizer is not None
    media = {"vision": llm.vision, "audio": llm.audio}
    with Served(
        llm.engine, llm.tokenizer, llm.engine.max_context, llm.config.vocab_size, max_concurrent=4, **media
    ) as s:
        yield s


@pytest.fixture(scope="module")
def expected(llm: LLM) -> tuple[str, int]:
    """The text after a clip and "listen", and the tokens of that prompt."""
    parts: Any = [{"type": "audio", "audio": WAV}, {"type": "text", "text": "listen"}]
    answer = llm.chat([{"role": "user", "content": parts}], SamplingParams(max_tokens=8))
    return answer.text, answer.stats.prompt_tokens


def chat(served: Served, parts: Any, **more: Any) -> Any:
    body = {"temperature": 0, "max_tokens": 8, "messages": [{"role": "user", "content": parts}], **more}
    return served.http.post("/v1/chat/completions", json=body)


def message(answer: Any) -> str:
    return str(answer.json()["error"]["message"])


@pytest.mark.parametrize(
    "part",
    [
        INPUT_AUDIO,
        {"type": "input_audio", "input_audio": {"data": URL, "format": "wav"}},
        {"type": "input_audio", "input_audio": {"data": DATA}},
        {"type": "audio_url", "audio_url": {"url": URL}},
        {"type": "audio_url", "audio_url": URL},
    ],
)
def test_openai_and_vllm(served: Served, expected: tuple[str, int], part: Any) -> None:
    answer = chat(served, [part, TEXT]).json()
    assert answer["choices"][0]["message"]["content"] == expected[0]
    assert answer["usage"]["prompt_tokens"] == expected[1] > 25


def test_responses(served: Served, expected: tuple[str, int]) -> None:
    content = [INPUT_AUDIO, {"type": "input_text", "text": "listen"}]
    body = {"temperature": 0, "max_output_tokens": 8, "input": [{"role": "user", "content": content}]}
    answer = served.http.post("/v1/responses", json=body).json()
    assert answer["usage"]["input_tokens"] == expected[1], answer
    assert "".join(part["text"] for item in answer["output"] for part in item["content"]) == expected[0]
    more = {**body, "input": "and then?", "previous_response_id": answer["id"]}
    assert served.http.post("/v1/responses", json=more).json()["usage"]["input_tokens"] > expected[1]
    counted = served.http.post("/v1/responses/input_tokens", json={"input": body["input"]}).json()
    assert counted["input_tokens"] == expected[1]


def test_ollama_has_clips_among_its_images(served: Served, expected: tuple[str, int]) -> None:
    body: Any = {"stream": False, "options": {"temperature": 0, "num_predict": 8}}
    said = {"role": "user", "content": "listen", "images": [DATA]}
    answer = served.http.post("/api/chat", json={**body, "messages": [said]}).json()
    assert answer["message"]["content"] == expected[0] and answer["prompt_eval_count"] == expected[1]
    for kind, data in hostile_audio.valid().items():
        images = [base64.b64encode(data).decode()]
        counted = served.http.post("/api/generate", json={**body, "prompt": "listen", "images": images})
        assert counted.status_code == 200, (kind, counted.text)


def test_a_stream_says_the_same(served: Served, expected: tuple[str, int]) -> None:
    lines = chat(served, [INPUT_AUDIO, TEXT], stream=True).text.splitlines()
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks) == expected[0]


def test_sound_beside_images_and_a_second_turn(served: Served, llm: LLM) -> None:
    image = {"type": "image_url", "image_url": {"url": PICTURE_URL}}
    picture = tiny_vision.picture(90, 120, 1)
    parts: Any = [{"type": "audio", "audio": WAV}, {"type": "image", "image": picture}, TEXT]
    turns: Any = [
        {"role": "user", "content": parts},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": [{"type": "audio", "audio": WAV}, TEXT]},
    ]
    plain = llm.chat(turns, SamplingParams(max_tokens=8), drafter=False)
    sent = [{**turns[0], "content": [INPUT_AUDIO, image, TEXT]}, turns[1], {**turns[2], "content": [INPUT_AUDIO, TEXT]}]
    answer = served.http.post("/v1/chat/completions", json={"temperature": 0, "max_tokens": 8, "messages": sent})
    assert answer.json()["choices"][0]["message"]["content"] == plain.text
    assert answer.json()["usage"]["prompt_tokens"] == plain.stats.prompt_tokens


def test_what_the_model_takes_is_told(served: Served) -> None:
    assert served.http.get("/props").json()["modalities"] == {"vision": True, "audio": True}
    assert "audio" in served.http.post("/api/show", json={"model": "fake"}).json()["capabilities"]


def test_text_that_spells_a_placeholder_is_text(served: Served) -> None:
    answer = chat(served, "<|audio|> <|audio> <audio|>")
    assert answer.status_code == 200 and answer.json()["usage"]["prompt_tokens"] < 60
    assert chat(served, [INPUT_AUDIO, {"type": "text", "text": "<|audio|>"}]).status_code == 200


def test_a_model_of_texts_says_what_it_does_not_take() -> None:
    tok = tokenizer()
    with Served(FakeEngine(tok), tok) as s:
        for part in (INPUT_AUDIO, {"type": "audio_url", "audio_url": URL}):
            answer = chat(s, [part, TEXT])
            assert answer.status_code == 400 and message(answer) == "This model takes no sound."
        image = {"type": "image_url", "image_url": {"url": PICTURE_URL}}
        assert message(chat(s, [image])) == "This model takes no images."
        assert s.http.get("/props").json()["modalities"] == {"vision": False, "audio": False}


def test_batches_of_clips_are_exact(served: Served, llm: LLM) -> None:
    """Eight callers at once get what each would get alone."""
    clips = [base64.b64encode(tiny_audio.wav(tiny_audio.clip(0.4 * i, i))).decode() for i in range(1, 5)]

    def ask(data: str) -> str:
        part = {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}
        return str(chat(served, [part, TEXT]).json()["choices"][0]["message"]["content"])

    alone = [ask(data) for data in clips]
    llm.engine.store.prefix.clear()
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask, clips * 2)) == alone * 2


def test_texts_do_not_wait_while_sound_is_decoded(served: Served, llm: LLM) -> None:
    clip = base64.b64encode(tiny_audio.wav(tiny_audio.clip(0.7, 9))).decode()
    part = {"type": "input_audio", "input_audio": {"data": clip}}
    with ThreadPoolExecutor(3) as pool:
        with llm.sound().decoder._short._lock:
            waiting = [pool.submit(chat, served, [part]) for _ in range(3)]
            assert chat(served, "see").status_code == 200
            assert not any(task.done() for task in waiting)
        assert [task.result().status_code for task in waiting] == [200] * 3


def test_batch_files_hold_clips(served: Served, expected: tuple[str, int], tmp_path: Path) -> None:
    body = {"messages": [{"role": "user", "content": [INPUT_AUDIO, TEXT]}], "temperature": 0, "max_tokens": 8}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
    client = served.client()
    file = client.files.create(file=("in.jsonl", json.dumps(line).encode()), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
    while batch.status not in ("completed", "failed"):
        batch = client.batches.retrieve(batch.id)
    row = json.loads(client.files.content(batch.output_file_id).text)
    assert row["response"]["body"]["choices"][0]["message"]["content"] == expected[0]


# ---- what is refused


@pytest.mark.parametrize(
    ("part", "said"),
    [
        ({"type": "audio_url", "audio_url": "https://example.org/a.wav"}, "sound is not fetched from the network"),
        ({"type": "audio_url", "audio_url": "file:///etc/passwd"}, "sound is not fetched from such an address"),
        ({"type": "audio_url", "audio_url": "data:audio/wav,abc"}, "the data URL of the sound must be data:audio"),
        ({"type": "input_audio", "input_audio": {"data": "!!!", "format": "wav"}}, "not valid base64"),
        ({"type": "input_audio", "input_audio": {"format": "wav"}}, "input_audio needs data"),
        ({"type": "input_audio", "input_audio": {"data": base64.b64encode(b"no sound at all").decode()}},
         "not a sound file"),
        ({"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}}, "send frames of it as images"),
        ({"type": "input_video", "input_video": "x"}, "send frames of it as images"),
        ({"type": "file", "file": {"file_id": "x"}}, "only text, images and sound"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_refused(served: Served, part: Any, said: str) -> None:
    answer = chat(served, [part, TEXT])
    assert answer.status_code == 400 and said in message(answer), answer.text


def test_too_many_and_fields_that_exclude_sound(served: Served) -> None:
    assert "3 clips; at most 2" in message(chat(served, [INPUT_AUDIO] * 3))
    for more in ({"prompt_logprobs": 1}, {"truncate_prompt_tokens": 5}):
        assert "can't be combined with sound" in message(chat(served, [INPUT_AUDIO], **more))
    long = base64.b64encode(tiny_audio.wav(tiny_audio.clip(31.0))).decode()
    part = {"type": "input_audio", "input_audio": {"data": long, "format": "wav"}}
    answer = chat(served, [part])
    assert "longer than 30 s" in message(answer) and answer.json()["error"]["code"] == "invalid_media"


HOSTILE: list[Any] = [
    None, 5, [], {}, "", "x", True, {"data": None}, {"data": 5}, {"data": []}, {"data": {}}, {"data": ""},
    {"data": "="}, {"data": "A"}, {"data": "AAAA"}, {"data": "%%%%"}, {"data": "\x00"}, {"data": "data:"},
    {"data": "data:,"}, {"data": "data:audio/wav;base64,"}, {"data": "DATA:audio/wav;base64,%%"},
    {"data": "data:text/html;base64,PGI+"}, {"data": "UklGR" + "A" * 100_000}, {"data": DATA[:60]},
    {"data": DATA[4:]}, {"data": "SUQz" + "/" * 4_000}, {"data": "ZkxhQw=="}, {"data": "T2dnUw=="},
    {"data": "/etc/passwd"}, {"data": "file:///etc/passwd"}, {"data": "http://127.0.0.1/"}, {"data": "é"},
    {"format": "wav"}, {"url": URL}, {"data": "x" * 5_000}, {"data": "\n" * 5_000}, {"data": " "},
    {"data": base64.b64encode(hostile_audio.wav(channels=255)).decode()},
    {"data": base64.b64encode(hostile_audio.wav(rate=1)).decode(), "format": "wav"},
    {"data": base64.b64encode(hostile_audio.wav(b"")).decode(), "format": 7},
    {"data": base64.b64encode(b"\xff\xfb\x90\x00" * 64).decode(), "format": "mp3"},
]  # fmt: skip
HOSTILE_URLS: list[Any] = [
    None, 5, [], {}, {"url": None}, {"url": ["a"]}, "", "data:", "data:,", "data:audio/wav;base64,", "ftp://a/b.wav",
    "javascript:alert(1)", "http://127.0.0.1/a.wav", "https://[::1]/a.wav", "http://169.254.169.254/latest",
    "C:\\a.wav", "\x00", "data:" + "x" * 5_000, {"url": "file:///dev/zero"}, "/dev/zero",
]  # fmt: skip


@pytest.mark.parametrize("protocol", ["openai", "responses"])
def test_hostile_requests_are_refused(served: Served, llm: LLM, expected: tuple[str, int], protocol: str) -> None:
    """60 bodies each: a 4xx in the protocol's form, nothing is left running, and the next request is answered."""
    parts = [{"type": "input_audio", "input_audio": content} for content in HOSTILE]
    parts += [{"type": "audio_url", "audio_url": content} for content in HOSTILE_URLS]
    for part in parts:
        messages = [{"role": "user", "content": [part]}]
        if protocol == "openai":
            answer = served.http.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 2})
        else:
            answer = served.http.post("/v1/responses", json={"input": messages, "max_output_tokens": 2})
        assert 400 <= answer.status_code < 500 and answer.json().get("error"), (part, answer.status_code, answer.text)
    assert not llm.engine.progress()
    good = chat(served, [INPUT_AUDIO, TEXT]).json()
    assert good["choices"][0]["message"]["content"] == expected[0]


def test_hostile_files_are_refused_beside_others(served: Served, llm: LLM, expected: tuple[str, int]) -> None:
    """Over 150 files: each is answered or refused with a 4xx in one line, and a client beside them is answered."""
    refused = [data for _, data in hostile_audio.refused() if len(data) < 1 << 20]
    files = refused + [data for _, data in hostile_audio.tolerated()]
    assert len(files) > 150

    def send(data: bytes) -> Any:
        part = {"type": "input_audio", "input_audio": {"data": base64.b64encode(data).decode(), "format": "wav"}}
        return chat(served, [part], max_tokens=1)

    with ThreadPoolExecutor(3) as pool:
        answers = [pool.submit(send, data) for data in files]
        beside = [chat(served, [INPUT_AUDIO, TEXT]).json() for _ in range(8)]
        for i, task in enumerate(answers):
            answer = task.result()
            fine = answer.status_code == 400 and "\n" not in message(answer)
            assert fine or (i >= len(refused) and answer.status_code == 200), (i, answer.text)
    assert {answer["choices"][0]["message"]["content"] for answer in beside} == {expected[0]}
    assert not llm.engine.progress()
