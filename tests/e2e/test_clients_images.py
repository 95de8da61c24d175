"""The image examples of well-known clients' own docs, unchanged but for address and model, against a tiny model that
sees. A client that is not installed is skipped (extra `clients`)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.test_server_images import PICTURE as PICTURE
from tests.e2e.test_server_images import URL, encoded, expected, llm, served  # noqa: F401
from tests.server_fakes import Served

Expected = tuple[str, int]


@pytest.fixture
def file(tmp_path: Path) -> Iterator[Path]:
    PICTURE.save(tmp_path / "picture.png")
    yield tmp_path / "picture.png"


def test_openai(served: Served, expected: Expected) -> None:  # noqa: F811
    client = pytest.importorskip("openai").OpenAI(base_url=f"{served.url}/v1", api_key="none")
    parts: Any = [{"type": "image_url", "image_url": {"url": URL}}, {"type": "text", "text": "see"}]
    messages: Any = [{"role": "user", "content": parts}]
    completion = client.chat.completions.create(model="fake", messages=messages, max_tokens=8, temperature=0)
    assert completion.choices[0].message.content == expected[0] and completion.usage.prompt_tokens == expected[1]
    parts = [{"type": "input_image", "image_url": URL}, {"type": "input_text", "text": "see"}]
    conversation: Any = [{"role": "user", "content": parts}]
    answer = client.responses.create(model="fake", input=conversation, max_output_tokens=8, temperature=0)
    assert answer.output_text == expected[0]


def test_anthropic(served: Served, expected: Expected) -> None:  # noqa: F811
    client = pytest.importorskip("anthropic").Anthropic(base_url=served.url, api_key="none")
    source = {"type": "base64", "media_type": "image/png", "data": encoded()}
    content: Any = [{"type": "image", "source": source}, {"type": "text", "text": "see"}]
    message = client.messages.create(
        model="fake", max_tokens=8, messages=[{"role": "user", "content": content}], extra_body={"temperature": 0}
    )
    assert "".join(block.text for block in message.content) == expected[0]
    assert message.usage.input_tokens == expected[1]


def test_ollama(served: Served, expected: Expected, file: Path) -> None:  # noqa: F811
    client = pytest.importorskip("ollama").Client(host=served.url)
    options = {"temperature": 0, "num_predict": 8}
    for image in (str(file), file.read_bytes()):  # the client reads files and encodes bytes itself
        message = {"role": "user", "content": "see", "images": [image]}
        assert client.chat(model="fake", messages=[message], options=options).message.content == expected[0]
    answer = client.generate(model="fake", prompt="see", images=[str(file)], options=options)
    assert answer.response == expected[0]


def test_langchain(served: Served, expected: Expected) -> None:  # noqa: F811
    chat = pytest.importorskip("langchain_openai").ChatOpenAI(
        base_url=f"{served.url}/v1", api_key="none", model="fake", temperature=0, max_tokens=8
    )
    image = {"type": "image", "source_type": "base64", "data": encoded(), "mime_type": "image/png"}
    answer = chat.invoke([{"role": "user", "content": [image, {"type": "text", "text": "see"}]}])
    assert answer.content == expected[0]


def test_litellm(served: Served, expected: Expected) -> None:  # noqa: F811
    litellm = pytest.importorskip("litellm")
    parts = [{"type": "image_url", "image_url": {"url": URL}}, {"type": "text", "text": "see"}]
    answer = litellm.completion(
        model="openai/fake", api_base=f"{served.url}/v1", api_key="none", temperature=0, max_tokens=8,
        messages=[{"role": "user", "content": parts}],
    )  # fmt: skip
    assert answer.choices[0].message.content == expected[0]
