"""Transcriptions over HTTP: what the model says of a clip after the instruction, in the forms that clients read; long
files in pieces; what is not offered is refused in one line."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tests import hostile_audio, tiny, tiny_audio
from tests.e2e.test_server_audio import WAV
from tests.server_fakes import FakeEngine, Served, tokenizer

from outrider.llm import LLM
from outrider.server.languages import LANGUAGES, language_name
from outrider.server.transcription import cut_into_pieces, instruction
from outrider.types import SamplingParams

PATH = "/v1/audio/transcriptions"
RATE = tiny_audio.RATE
SHORT = {"max_completion_tokens": "8"}


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """A tiny model with room for the instruction, byte by byte, and a clip of 30 s."""
    where = tmp_path_factory.mktemp("audio")
    tiny_audio.write("gemma4_e2b", where / "target", seed=4, max_context=2_048)
    tiny.write_assistant("gemma4_e2b", where / "drafter")
    drafter = str(where / "drafter")
    llm = LLM.load(str(where / "target"), drafter=drafter, draft_tokens=3, threads=1, max_context=1_536, max_batch=4)
    yield llm
    llm.close()


@pytest.fixture(scope="module")
def served(llm: LLM) -> Iterator[Served]:
    assert llm.tokenizer is not None
    context = llm.engine.max_context
    with Served(llm.engine, llm.tokenizer, context, llm.config.vocab_size, max_concurrent=4, audio=llm.audio) as s:
        yield s


def heard(llm: LLM, sound: object, text: str, **more: Any) -> str:
    parts: Any = [{"type": "text", "text": text}, {"type": "audio", "audio": sound}]
    params = SamplingParams(max_tokens=8, **more)
    return llm.chat([{"role": "user", "content": parts}], params, drafter=False).text.strip()


@pytest.fixture(scope="module")
def expected(llm: LLM) -> str:
    return heard(llm, WAV, instruction("transcribe", "", ""))


def post(served: Served, sound: bytes = WAV, path: str = PATH, **fields: Any) -> Any:
    return served.http.post(path, data=SHORT | fields, files={"file": ("a.wav", sound, "audio/wav")})


def message(answer: Any) -> str:
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return str(error["message"])


@pytest.mark.parametrize("path", [PATH, "/audio/transcriptions"])
def test_json_and_text(served: Served, expected: str, path: str) -> None:
    answer = post(served, path=path, model="whisper-1")
    assert answer.json()["text"] == expected and answer.headers["content-type"] == "application/json"
    usage = answer.json()["usage"]
    assert usage["input_token_details"]["audio_tokens"] == 25 and usage["output_tokens"] <= 8
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    text = post(served, path=path, response_format="text")
    assert text.text == expected and text.headers["content-type"].startswith("text/plain")


def test_verbose_json_has_the_duration_and_no_times(served: Served, expected: str) -> None:
    answer = post(served, response_format="verbose_json", language="de-AT").json()
    assert answer["duration"] == 1.0 and answer["language"] == "german" and answer["task"] == "transcribe"
    assert "segments" not in answer and "words" not in answer
    assert post(served, response_format="verbose_json").json()["text"] == expected


def test_fields_reach_the_model(served: Served, llm: LLM) -> None:
    german = instruction("transcribe", "German", "Frau  Ngũgĩ\nund")
    assert "in German into German text" in german and "Frau Ngũgĩ und" in german
    answer = post(served, language="de", prompt="Frau  Ngũgĩ\nund")
    assert answer.json()["text"] == heard(llm, WAV, german)
    answer = post(served, path="/v1/audio/translations")
    assert answer.json()["text"] == heard(llm, WAV, instruction("translate", "", ""))
    answer = post(served, temperature="0.9", seed="5", top_p="1", top_k="0")
    text = instruction("transcribe", "", "")
    assert answer.json()["text"] == heard(llm, WAV, text, temperature=0.9, seed=5)


def events(body: str) -> list[dict[str, Any]]:
    lines = body.splitlines()
    assert lines[-2] == "data: [DONE]"
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


def test_a_stream(served: Served, expected: str) -> None:
    answer = post(served, stream="true")
    assert answer.headers["content-type"].startswith("text/event-stream")
    *deltas, done = events(answer.text)
    assert {event["type"] for event in deltas} == {"transcript.text.delta"}
    assert "".join(event["delta"] for event in deltas) == done["text"] == expected
    assert done["type"] == "transcript.text.done" and done["usage"]["output_tokens"] <= 8


def test_a_long_file_is_cut_where_it_is_quiet(served: Served, llm: LLM) -> None:
    samples = tiny_audio.clip(70.0, 3)
    samples[27 * RATE : 28 * RATE] *= 0.01
    samples[55 * RATE : 56 * RATE] *= 0.01
    file = tiny_audio.wav(samples)
    decoded = llm.sound().samples(file, 600.0)
    pieces = cut_into_pieces(decoded)
    assert [round(len(piece) / RATE) for piece in pieces] == [28, 28, 14] or len(pieces) == 3
    assert np.array_equal(np.concatenate(pieces), decoded)
    text = instruction("transcribe", "", "")
    said = [heard(llm, (piece, RATE), text) for piece in pieces]
    answer = post(served, file)
    assert answer.json()["text"] == " ".join(filter(None, said)), answer.text
    assert answer.json()["usage"]["input_token_details"]["audio_tokens"] >= 1750
    *deltas, done = events(post(served, file, stream="true").text)
    assert "".join(event["delta"] for event in deltas) == done["text"] == answer.json()["text"]


@pytest.mark.parametrize("seconds", [0.5, 30.0, 30.0 + 1 / RATE, 31.0, 59.9, 60.0, 61.5, 200.0])
def test_pieces(seconds: float) -> None:
    samples = tiny_audio.clip(seconds)
    pieces = cut_into_pieces(samples)
    assert np.array_equal(np.concatenate(pieces), samples)
    assert all(len(piece) <= 30 * RATE for piece in pieces)
    assert len(pieces) == 1 or min(map(len, pieces)) >= RATE


def test_a_body_of_json(served: Served, expected: str) -> None:
    body = {"model": "fake", "input_audio": {"data": base64.b64encode(WAV).decode(), "format": "wav"}}
    answer = served.http.post(PATH, json={**body, "max_completion_tokens": 8})
    assert answer.json()["text"] == expected
    assert "not valid base64" in message(served.http.post(PATH, json={"input_audio": {"data": "%%"}}))
    assert served.http.post(PATH, json={}).status_code == 400


def test_bytes_of_sound_are_not_counted_as_json(served: Served) -> None:
    """A clip of a second, and behind it three million commas and brackets."""
    assert post(served, WAV + b"{," * 1_500_000).status_code == 200


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"response_format": "srt"}, "json, text and verbose_json"),
        ({"response_format": "vtt"}, "times no words"),
        ({"response_format": "diarized_json"}, "tells no speakers apart"),
        ({"timestamp_granularities[]": "word"}, "timestamps of transcriptions are not offered"),
        ({"include[]": "logprobs"}, "log-probabilities of transcriptions are not offered"),
        ({"language": "klingon"}, "ISO 639-1"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": "3"}, "temperature"),
        ({"temperature": "nan"}, "temperature"),
        ({"stream": "perhaps"}, "stream"),
        ({"known_speaker_names[]": "x"}, "Unknown or unsupported field: 'known_speaker_names'"),
        ({"prompt": "x" * 2_001}, "prompt"),
        ({"max_completion_tokens": "0"}, "max_completion_tokens"),
        ({"chunking_strategy": "server_vad"}, "chunking_strategy"),
    ],
)
def test_what_is_not_offered(served: Served, fields: dict[str, str], said: str) -> None:
    answer = post(served, **fields)
    assert answer.status_code == 400 and said in message(answer) and "\n" not in message(answer), answer.text


def test_empty_fields_were_not_sent(served: Served, expected: str) -> None:
    answer = post(served, language="", prompt="", response_format="", temperature="", stream="")
    assert answer.json()["text"] == expected
    assert post(served, language="auto").json()["text"] == expected


def test_odd_requests(served: Served, llm: LLM, expected: str) -> None:
    """Forty bodies: a 4xx in one line each, and nothing is left running."""
    bodies: list[tuple[str, bytes]] = []
    form = "multipart/form-data; boundary=b"
    head = b'--b\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\n'
    end = b"\r\n--b--\r\n"
    sounds = [b"", b"x", b"RIFF", WAV[:20], WAV[:44], b"\xff" * 4_000, bytes(4_000), b"%PDF-1.7", b"<html>"]
    sounds += [hostile_audio.wav(channels=255), hostile_audio.wav(rate=1), hostile_audio.wav(b"")]
    sounds += [data for _, data in hostile_audio.refused() if len(data) < 1 << 16][:10]
    bodies += [(form, head + data + end) for data in sounds]
    bodies += [
        (form, b""), (form, b"--b--"), (form, head), (form, head + WAV), (form, end), (form, WAV), ("", WAV),
        ("multipart/form-data", head + WAV + end), ("multipart/form-data; boundary=", head + WAV + end),
        ("multipart/mixed; boundary=b", head + WAV + end), ("audio/wav", WAV), ("text/plain", b"hello"),
        ("application/json", b"{"), ("application/json", b"[]"), ("application/json", b'{"input_audio": 5}'),
        ("application/json", b'{"input_audio": {"data": []}}'), ("application/json", b'{"file": "a.wav"}'),
        (form, head.replace(b'"file"', b'"sound"') + WAV + end), (form, head.replace(b"name", b"nam") + WAV + end),
        (form, b'--b\r\nContent-Disposition: form-data; name="file"\r\n\r\n' + end),
        (form, b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\n\xff\xfe\r\n' + head + WAV + end),
    ]  # fmt: skip
    assert len(bodies) >= 40
    for kind, body in bodies:
        headers = {"content-type": kind} if kind else {}
        answer = served.http.post(PATH, content=body, headers=headers)
        assert 400 <= answer.status_code < 500, (kind, body[:80], answer.text)
        assert 0 < len(message(answer)) < 300 and "\n" not in message(answer), answer.text
    assert not llm.engine.progress()
    assert post(served).json()["text"] == expected


def test_a_file_longer_than_ten_minutes(served: Served) -> None:
    flac = hostile_audio.encoded(np.zeros(601 * RATE, np.int16), kind="FLAC")
    assert "longer than 600 s" in message(post(served, flac))


def test_a_model_of_texts() -> None:
    tok = tokenizer()
    with Served(FakeEngine(tok), tok) as s:
        answer = post(s)
        assert answer.status_code == 400 and message(answer) == "This model takes no sound."


def test_languages() -> None:
    assert len(LANGUAGES) > 90 and all(name.strip().istitle() for name in LANGUAGES.values())
    names = ["en", "EN", "en-US", "zh_CN", "german", "Haitian Creole", "xx", ""]
    expected = ["English", "English", "English", "Chinese", "German", "Haitian Creole", None, None]
    assert [language_name(name) for name in names] == expected
