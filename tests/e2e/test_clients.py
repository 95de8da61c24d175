"""Well-known clients as they are, against one server with a tiny model: chat, stream, tools, structured output, history
round trip.

`openai` is always here; the others are skipped where they are not installed (`pip install 'outrider[clients]'`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from tests import tiny
from tests.server_fakes import Served

from outrider.config import EngineConfig
from outrider.llm import LLM

HI: list[Any] = [{"role": "user", "content": "hello"}]
PARAMETERS = {"type": "object", "properties": {"zone": {"enum": ["UTC", "CET"]}}, "required": ["zone"]}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "time", "description": "the time", "parameters": PARAMETERS}}
]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    path = tmp_path_factory.mktemp("clients")
    tiny.write_target("llama", path / "target")
    config = path / "target" / "config.json"  # a token is a byte here: tools need room
    config.write_text(config.read_text().replace('"max_position_embeddings": 512', '"max_position_embeddings": 2048'))
    llm = LLM.load(
        str(path / "target"),
        drafter="ngram",
        draft_tokens=2,
        threads=1,
        engine=EngineConfig(max_batch=10, max_context=2048),
    )
    assert llm.tokenizer is not None
    with Served(llm.engine, llm.tokenizer, llm.engine.max_context, llm.config.vocab_size, max_concurrent=8) as s:
        yield s


def test_openai_chat_with_history(served: Served) -> None:
    client = served.client()
    ask: dict[str, Any] = dict(model="fake", seed=1, max_tokens=200, tools=TOOLS)
    first = client.chat.completions.create(
        messages=HI, tool_choice="required", parallel_tool_calls=False, store=False, **ask
    )
    message = first.choices[0].message
    (call,) = message.tool_calls
    assert json.loads(call.function.arguments)["zone"] in ("UTC", "CET")
    result: Any = {"role": "tool", "tool_call_id": call.id, "content": "12:00"}
    for said in (message, message.model_dump(), message.model_dump(exclude_none=True)):
        again = client.chat.completions.create(messages=[*HI, said, result], **{**ask, "max_tokens": 4})
        assert again.choices[0].message.role == "assistant"


def test_openai_structured_and_stream(served: Served) -> None:
    from pydantic import BaseModel

    class Answer(BaseModel):
        zone: Literal["UTC", "CET"]
        sure: bool

    parsed = served.client().chat.completions.parse(model="fake", messages=HI, response_format=Answer, max_tokens=200)
    assert isinstance(parsed.choices[0].message.parsed, Answer)
    ask: dict[str, Any] = dict(model="fake", messages=HI, seed=3, max_tokens=12)
    stream = served.client().chat.completions.create(stream=True, stream_options={"include_usage": True}, **ask)
    text = "".join(c.choices[0].delta.content or "" for c in stream if c.choices)
    assert text == served.client().chat.completions.create(**ask).choices[0].message.content


def test_openai_responses(served: Served) -> None:
    client = served.client()
    whole = client.responses.create(model="fake", input="hello", max_output_tokens=8, extra_body={"seed": 3})
    assert whole.output_text
    with client.responses.stream(model="fake", input="hello", max_output_tokens=8, extra_body={"seed": 3}) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
    assert text == whole.output_text
    tools: list[Any] = [{"type": "function", "name": "time", "parameters": PARAMETERS, "strict": False}]
    called = client.responses.create(
        model="fake",
        input="hello",
        tools=tools,
        tool_choice="required",
        parallel_tool_calls=False,
        max_output_tokens=200,
    )
    call = next(item for item in called.output if item.type == "function_call")
    history: list[Any] = [
        *HI,
        *called.output,
        {"type": "function_call_output", "call_id": call.call_id, "output": "12:00"},
    ]
    client.responses.create(model="fake", input=history, tools=tools, max_output_tokens=4)


def test_openai_errors(served: Served) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature"):
        served.client().chat.completions.create(model="fake", messages=HI, temperature=9)
    with pytest.raises(openai.NotFoundError):
        served.client().models.retrieve("other")


def test_anthropic(served: Served) -> None:
    anthropic = pytest.importorskip("anthropic")
    client = anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0)
    whole = client.messages.create(model="fake", max_tokens=8, messages=HI, system="be brief")
    assert whole.content[0].text and whole.stop_reason == "max_tokens" and whole.usage.output_tokens == 8
    with client.messages.stream(model="fake", max_tokens=8, messages=HI, system="be brief") as stream:
        assert "".join(stream.text_stream)
        assert stream.get_final_message().usage.output_tokens == 8
    tools = [{"name": "time", "description": "the time", "input_schema": PARAMETERS}]
    called = client.messages.create(
        model="fake",
        max_tokens=200,
        messages=HI,
        tools=tools,
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
    )
    use = next(b for b in called.content if b.type == "tool_use")
    results = [
        {"type": "tool_result", "tool_use_id": b.id, "content": "12:00"} for b in called.content if b.type == "tool_use"
    ]
    assert use.input["zone"] in ("UTC", "CET")
    talk = [*HI, {"role": "assistant", "content": called.content}, {"role": "user", "content": results}]
    client.messages.create(model="fake", max_tokens=4, messages=talk, tools=tools)
    with client.messages.stream(
        model="fake",
        max_tokens=200,
        messages=HI,
        tools=tools,
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
    ) as stream:
        final = stream.get_final_message()
    assert any(b.type == "tool_use" and b.input["zone"] in ("UTC", "CET") for b in final.content)
    with pytest.raises(anthropic.BadRequestError):
        client.messages.create(model="fake", max_tokens=8, messages=[])


def test_ollama(served: Served) -> None:
    ollama = pytest.importorskip("ollama")
    client = ollama.Client(host=served.url)
    options = {"num_predict": 8, "seed": 1, "temperature": 0}
    whole = client.chat(model="fake", messages=HI, options=options)
    assert whole.message.content and whole.done_reason == "length"
    assert (
        "".join(part.message.content for part in client.chat(model="fake", messages=HI, options=options, stream=True))
        == whole.message.content
    )
    assert client.generate(model="fake", prompt="hello", options=options).response
    shaped = client.chat(model="fake", messages=HI, format=PARAMETERS, options={**options, "num_predict": 60})
    assert json.loads(shaped.message.content)["zone"] in ("UTC", "CET")
    assert client.list().models[0].model == "fake" and client.show("fake").modelinfo
    client.chat(model="fake", messages=[*HI, whole.message, *HI], options=options, tools=TOOLS)


def test_litellm(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # no other host is asked
    litellm = pytest.importorskip("litellm")
    ask: dict[str, Any] = dict(
        model="openai/fake", api_base=f"{served.url}/v1", api_key="none", max_tokens=200, seed=1, tools=TOOLS
    )
    first = litellm.completion(messages=HI, tool_choice="required", parallel_tool_calls=False, **ask)
    message = first.choices[0].message
    results = [{"role": "tool", "tool_call_id": c.id, "content": "12:00"} for c in message.tool_calls]
    litellm.completion(messages=[*HI, message, *results], **{**ask, "max_tokens": 4})
    litellm.completion(messages=[*HI, message.model_dump(), *results], **{**ask, "max_tokens": 4})
    assert list(litellm.completion(messages=HI, stream=True, **{**ask, "max_tokens": 4}))
    long = [{"role": "user", "content": "x" * 5000}]
    del ask["tools"]
    for more in ({}, {"stream": True}, {"model": "anthropic/fake", "api_base": served.url, "seed": None}):
        with pytest.raises(litellm.exceptions.ContextWindowExceededError):
            litellm.completion(messages=long, **{**ask, **more})


def test_langchain(served: Served) -> None:
    chat = pytest.importorskip("langchain_openai").ChatOpenAI(
        model="fake", base_url=f"{served.url}/v1", api_key="none", max_tokens=200, seed=1, max_retries=0
    )
    bound = chat.bind_tools(TOOLS, tool_choice="required", parallel_tool_calls=False)
    message = bound.invoke([("user", "hello")])
    assert message.tool_calls[0]["name"] == "time"
    results = [{"role": "tool", "tool_call_id": c["id"], "content": "12:00"} for c in message.tool_calls]
    chat.invoke([{"role": "user", "content": "hello"}, message, *results])
    assert list(chat.stream("hello"))


def test_instructor(served: Served) -> None:
    instructor = pytest.importorskip("instructor")
    from pydantic import BaseModel

    class Zone(BaseModel):
        zone: Literal["UTC", "CET"]

    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        client = instructor.from_openai(served.client(), mode=mode)
        assert client.chat.completions.create(model="fake", messages=HI, response_model=Zone, max_tokens=200).zone in (
            "UTC",
            "CET",
        )
