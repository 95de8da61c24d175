"""The sound examples of well-known clients' own docs, unchanged but for address, model and file, against a tiny model
that hears. A client that is not installed is skipped (extra `clients`)."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.test_server_audio import DATA, URL, WAV
from tests.e2e.test_transcriptions import SHORT as SHORT_FORM
from tests.e2e.test_transcriptions import expected as transcript  # noqa: F401
from tests.e2e.test_transcriptions import llm, served  # noqa: F401
from tests.server_fakes import Served

from outrider.llm import LLM
from outrider.types import SamplingParams

QUESTION = "What is in this recording?"
SHORT: dict[str, Any] = {"max_tokens": 8, "temperature": 0}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "alloy.wav"
    path.write_bytes(WAV)
    return path


def text_after(llm: LLM, *parts: Any) -> str:  # noqa: F811
    return llm.chat([{"role": "user", "content": list(parts)}], SamplingParams(max_tokens=8), drafter=False).text


@pytest.fixture(scope="module")
def answer(llm: LLM) -> str:  # noqa: F811
    """The text after the question and a clip."""
    return text_after(llm, {"type": "text", "text": QUESTION}, {"type": "audio", "audio": WAV})


@pytest.fixture(scope="module")
def listened(llm: LLM) -> str:  # noqa: F811
    """The text after a clip and one word."""
    return text_after(llm, {"type": "audio", "audio": WAV}, {"type": "text", "text": "listen"})


def messages(encoded: str) -> Any:
    """A user message as OpenAI's and litellm's guides write it."""
    return [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": QUESTION},
                {"type": "input_audio", "input_audio": {"data": encoded, "format": "wav"}},
            ],
        }
    ]


def test_openai_chat(served: Served, answer: str, file: Path) -> None:  # noqa: F811
    client = served.client()
    encoded_string = base64.b64encode(file.read_bytes()).decode("utf-8")
    completion = client.chat.completions.create(
        model="fake",
        modalities=["text", "audio"],
        audio={"voice": "alloy", "format": "wav"},
        messages=messages(encoded_string),
        **SHORT,
    )
    assert completion.choices[0].message.content == answer and completion.choices[0].message.audio is None
    spoken = client.chat.completions.with_raw_response
    with pytest.raises(pytest.importorskip("openai").BadRequestError, match='only "text" is supported'):
        spoken.create(model="fake", modalities=["audio"], messages=messages(encoded_string))


def test_openai_stream(served: Served, answer: str) -> None:  # noqa: F811
    stream = served.client().chat.completions.create(model="fake", messages=messages(DATA), stream=True, **SHORT)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices) == answer


def test_openai_transcriptions(served: Served, transcript: str, file: Path) -> None:  # noqa: F811
    client = served.client()
    short: Any = {"extra_body": SHORT_FORM}
    with file.open("rb") as audio_file:
        transcription = client.audio.transcriptions.create(model="fake", file=audio_file, **short)
    assert transcription.text == transcript
    with file.open("rb") as audio_file:
        text = client.audio.transcriptions.create(model="fake", file=audio_file, response_format="text", **short)
    assert str(text) == transcript
    with file.open("rb") as audio_file:
        stream = client.audio.transcriptions.create(model="fake", file=audio_file, stream=True, **short)
        events = list(stream)
    assert events[-1].type == "transcript.text.done" and events[-1].text == transcript
    assert "".join(event.delta for event in events[:-1]) == transcript
    with file.open("rb") as audio_file:
        assert client.audio.translations.create(model="fake", file=audio_file, **short).text


def test_litellm_chat(served: Served, answer: str, file: Path) -> None:  # noqa: F811
    litellm = pytest.importorskip("litellm")
    encoded_string = base64.b64encode(file.read_bytes()).decode("utf-8")
    at: dict[str, Any] = {"model": "openai/fake", "api_base": f"{served.url}/v1", "api_key": "none"}
    completion = litellm.completion(messages=messages(encoded_string), **at, **SHORT)
    assert completion.choices[0].message.content == answer
    spoken: dict[str, Any] = {"modalities": ["text", "audio"], "audio": {"voice": "alloy", "format": "wav"}}
    allowed: list[str] = ["modalities", "audio"]  # litellm knows them of OpenAI's own models only
    completion = litellm.completion(
        messages=messages(encoded_string), allowed_openai_params=allowed, **spoken, **at, **SHORT
    )
    assert completion.choices[0].message.content == answer


def test_litellm_transcription(served: Served, transcript: str, file: Path) -> None:  # noqa: F811
    litellm = pytest.importorskip("litellm")
    at: dict[str, Any] = {"model": "openai/fake", "api_base": f"{served.url}/v1", "api_key": "none"}
    with file.open("rb") as audio_file:
        response = litellm.transcription(file=audio_file, extra_body=SHORT_FORM, **at)
    assert response.text == transcript


@pytest.mark.parametrize(
    "part",
    [
        {"type": "input_audio", "input_audio": {"data": DATA, "format": "wav"}},
        {"type": "audio", "source_type": "base64", "data": DATA, "mime_type": "audio/wav"},
        {"type": "audio", "base64": DATA, "mime_type": "audio/wav"},
    ],
)
def test_langchain(served: Served, answer: str, part: Any) -> None:  # noqa: F811
    """OpenAI's part, and LangChain's own of both of its versions."""
    langchain = pytest.importorskip("langchain_openai")
    model = langchain.ChatOpenAI(base_url=f"{served.url}/v1", api_key="none", model="fake", **SHORT)
    message = {"role": "user", "content": [{"type": "text", "text": QUESTION}, part]}
    assert model.invoke([message]).content == answer


def test_ollama(served: Served, listened: str, file: Path) -> None:  # noqa: F811
    client = pytest.importorskip("ollama").Client(host=served.url)
    options = {"temperature": 0, "num_predict": 8}
    for clip in (str(file), file.read_bytes()):
        message = {"role": "user", "content": "listen", "images": [clip]}
        assert client.chat(model="fake", messages=[message], options=options).message.content == listened


def test_open_webui_transcription(served: Served, transcript: str, file: Path) -> None:  # noqa: F811
    """A form of model, language and file; without the language if the first is refused."""
    requests = pytest.importorskip("requests")
    for languages in ([None], ["tlh", None], ["en", None]):
        for language in languages:
            payload = {"model": "whisper-1"} | ({"language": language} if language else {})
            with file.open("rb") as audio_file:
                response = requests.post(
                    url=f"{served.url}/v1/audio/transcriptions",
                    headers={"Authorization": "Bearer none"},
                    files={"file": (file.name, audio_file)},
                    data=payload,
                )
            if response.status_code == 200:
                break
        response.raise_for_status()
        assert isinstance(response.json()["text"], str)
        if language is None:
            assert response.json()["text"].startswith(transcript)  # without a limit of eight tokens


def test_open_webui_by_way_of_mistral(served: Served, listened: str) -> None:  # noqa: F811
    """Its Mistral engine sends the file to the chat as bare base64."""
    requests = pytest.importorskip("requests")
    content = [{"type": "input_audio", "input_audio": DATA}, {"type": "text", "text": "listen"}]
    payload = {"model": "fake", "messages": [{"role": "user", "content": content}], **SHORT}
    response = requests.post(
        f"{served.url}/v1/chat/completions", json=payload, headers={"Authorization": "Bearer none"}
    )
    assert response.json()["choices"][0]["message"]["content"] == listened


def test_vllm_example(served: Served, answer: str) -> None:  # noqa: F811
    """Its guide sends a data URL in `audio_url` with `max_completion_tokens`."""
    content: Any = [{"type": "text", "text": QUESTION}, {"type": "audio_url", "audio_url": {"url": URL}}]
    completion = served.client().chat.completions.create(
        messages=[{"role": "user", "content": content}], model="fake", max_completion_tokens=8, temperature=0
    )
    assert completion.choices[0].message.content == answer
