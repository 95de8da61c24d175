"""The server through the official `openai` client, on an engine that says what a script says. Real sockets, real
streaming."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from tests.server_fakes import FakeEngine, Served, tokenizer

TOK = tokenizer()
GEMMA = tokenizer(gemma=True)
HI: list[Any] = [{"role": "user", "content": "hi"}]
WEATHER: list[Any] = [
    {
        "type": "function",
        "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
    }
]


def text_of(chunks: Any) -> str:
    return "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)


# ---- answers


def test_stream_and_whole_are_the_same_text(served: Served) -> None:
    ask = dict(model="fake", messages=HI, seed=7)
    whole = served.client().chat.completions.create(**ask)
    stream = list(served.client().chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
    assert text_of(stream) == whole.choices[0].message.content and whole.choices[0].finish_reason == "stop"
    assert stream[-1].choices == [] and stream[-1].usage == whole.usage
    assert whole.usage.completion_tokens == len(TOK.encode(whole.choices[0].message.content)) + 1  # and the end token
    assert stream[0].choices[0].delta.role == "assistant"


def test_choices_have_their_own_seeds(served: Served) -> None:
    three = served.client().chat.completions.create(model="fake", messages=HI, seed=7, n=3)
    alone = [served.client().chat.completions.create(model="fake", messages=HI, seed=7 + i) for i in range(3)]
    assert [c.message.content for c in three.choices] == [a.choices[0].message.content for a in alone]
    assert len({c.message.content for c in three.choices}) == 3
    streamed = {0: "", 1: "", 2: ""}
    for chunk in served.client().chat.completions.create(model="fake", messages=HI, seed=7, n=3, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert list(streamed.values()) == [c.message.content for c in three.choices]


def test_parameters_reach_the_engine(served: Served) -> None:
    served.client().chat.completions.create(
        model="fake", messages=HI, temperature=0.3, top_p=0.9, presence_penalty=0.5, frequency_penalty=-0.5,
        max_completion_tokens=9,
        stop=["zz"],
        logit_bias={"65": 5}, seed=-1,
        extra_body={"top_k": 4, "min_p": 0.1, "repetition_penalty": 1.1, "min_tokens": 2, "ignore_eos": True,
                                                   "stop_token_ids": [9], "outrider": {"draft_tokens": 5}},
    )  # fmt: skip
    request = served.engine.seen[-1]
    p = request.params
    assert (p.temperature, p.top_p, p.presence_penalty, p.frequency_penalty, p.max_tokens, p.stop) == (
        0.3,
        0.9,
        0.5,
        -0.5,
        9,
        ("zz",),
    )
    assert (p.logit_bias, p.top_k, p.min_p, p.repetition_penalty, p.min_tokens, p.ignore_eos) == (
        {65: 5.0},
        4,
        0.1,
        1.1,
        2,
        True,
    )
    assert p.stop_token_ids == (9,) and request.draft_tokens == 5 and 0 <= p.seed < 2**63
    served.client().chat.completions.create(model="fake", messages=HI)
    assert served.engine.seen[-1].params.temperature == 0.7  # where neither the request nor the model says
    assert served.engine.seen[-1].params.max_tokens == 2048 - len(served.engine.seen[-1].prompt)


def test_stop_strings_and_limits(served: Served) -> None:
    whole = served.client().chat.completions.create(model="fake", messages=HI, seed=7).choices[0].message.content
    stop = whole[5:9]
    stopped = served.client().chat.completions.create(model="fake", messages=HI, seed=7, stop=stop)
    assert (
        stopped.choices[0].message.content == whole[: whole.index(stop)] and stopped.choices[0].finish_reason == "stop"
    )
    cut = served.client().chat.completions.create(model="fake", messages=HI, seed=7, max_tokens=3)
    assert cut.choices[0].finish_reason == "length" and cut.usage.completion_tokens == 3


def test_logprobs(served: Served) -> None:
    answer = served.client().chat.completions.create(
        model="fake", messages=HI, seed=7, logprobs=True, top_logprobs=2, max_tokens=4
    )
    content = answer.choices[0].logprobs.content
    assert len(content) == 4 and all(c.logprob == -0.5 and len(c.top_logprobs) == 2 for c in content)
    assert b"".join(bytes(c.bytes) for c in content).decode("utf-8", "replace") == answer.choices[0].message.content
    streamed = served.client().chat.completions.create(
        model="fake", messages=HI, seed=7, logprobs=True, max_tokens=4, stream=True
    )
    assert sum(len(c.choices[0].logprobs.content) for c in streamed if c.choices[0].logprobs) == 4
    legacy = served.client().completions.create(model="fake", prompt="x", logprobs=1, max_tokens=4)
    assert len(legacy.choices[0].logprobs.token_logprobs) == 4 == len(legacy.choices[0].logprobs.text_offset)


def test_completions(served: Served) -> None:
    two = served.client().completions.create(model="fake", prompt=["abc", "de"], seed=3, echo=True, max_tokens=5)
    assert (
        two.choices[0].text.startswith("abc") and two.choices[1].text.startswith("de") and two.usage.prompt_tokens == 5
    )
    ids = served.client().completions.create(model="fake", prompt=TOK.encode("abc"), seed=3, max_tokens=5)
    assert "abc" + ids.choices[0].text == two.choices[0].text
    stream = served.client().completions.create(
        model="fake", prompt="abc", seed=3, max_tokens=5, stream=True, echo=True
    )
    assert "".join(c.choices[0].text for c in stream) == two.choices[0].text


def test_statistics_only_on_request(served: Served) -> None:
    client = served.client()
    assert "outrider" not in client.chat.completions.create(model="fake", messages=HI).model_dump()
    by_header = client.chat.completions.create(
        model="fake", messages=HI, seed=7, extra_headers={"X-Outrider-Stats": "1"}
    ).model_dump()
    stats = by_header["outrider"]
    assert {"cycles", "drafted", "accepted", "by_position", "ttft_ms", "decode_tps", "tokens_per_cycle", "seed"} <= set(
        stats
    )
    assert stats["accepted"] == sum(p["accepted"] for p in stats["by_position"]) and stats["seed"] == 7
    assert stats["new_tokens"] == by_header["usage"]["completion_tokens"]
    ask = dict(
        model="fake", messages=HI, seed=7, stream=True, extra_body={"outrider": {"stats": True, "token_kinds": True}}
    )
    chunks = [c.model_dump() for c in client.chat.completions.create(**ask)]
    tokens = [t for c in chunks for t in c.get("outrider", {}).get("tokens", [])]
    assert "".join(t[0] for t in tokens) == by_header["choices"][0]["message"]["content"]
    assert len(tokens) == stats["new_tokens"] and {t[1] for t in tokens} <= {"accepted", "corrected", "bonus", "plain"}
    assert chunks[-1]["outrider"]["cycles"] == stats["cycles"]
    plain = client.chat.completions.create(
        model="fake", messages=HI, extra_body={"outrider": {"stats": True, "draft_tokens": 0}}
    ).model_dump()
    assert plain["outrider"]["drafted"] == 0


def test_routes_beside_the_answers(served: Served) -> None:
    assert served.http.post("/v1/chat/completions", json={"messages": HI, "max_tokens": 2}).status_code == 200
    assert [m.id for m in served.client().models.list()] == ["fake"]
    assert served.client().models.retrieve("fake").id == "fake"
    with pytest.raises(openai.NotFoundError):
        served.client().models.retrieve("../../etc/passwd")
    http = served.http
    assert http.get("/health").json()["status"] == "ok" and http.get("/version").json()["version"]
    metrics = http.get("/metrics").text
    assert (
        'outrider_http_requests_total{route="chat",status="200"}' in metrics and "outrider_accepted_at_total" in metrics
    )
    page = http.get("/")
    assert (
        page.status_code == 200
        and "script-src" not in page.headers["content-security-policy"]
        and "http://" not in page.text
    )
    assert http.get("/page/app.js").status_code == 200 and http.get("/page/..%2Fapp.py").status_code == 404
    assert http.get("/docs").status_code == 404 and http.get("/openapi.json").status_code == 200


# ---- structured output, tools, thoughts


def test_json_schema(served: Served) -> None:
    schema = {
        "type": "object",
        "properties": {"colour": {"enum": ["red", "blue"]}, "n": {"type": "integer", "minimum": 0, "maximum": 9}},
        "required": ["colour", "n"],
        "additionalProperties": False,
    }
    form: Any = {"type": "json_schema", "json_schema": {"name": "pick", "strict": True, "schema": schema}}
    for seed in range(5):
        answer = served.client().chat.completions.create(model="fake", messages=HI, seed=seed, response_format=form)
        value = json.loads(answer.choices[0].message.content)
        assert set(value) == {"colour", "n"} and answer.choices[0].finish_reason == "stop"
    # a tokenizer of bytes and a random choice make long objects: only their beginning is checked
    loose = served.client().chat.completions.create(
        model="fake", messages=HI, seed=1, max_tokens=64, response_format={"type": "json_object"}
    )
    assert loose.choices[0].message.content.startswith("{")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
@pytest.mark.parametrize("gemma", [False, True])
def test_forced_tool_calls(choice: Any, gemma: bool) -> None:
    tok = GEMMA if gemma else TOK
    tools: list[Any] = [
        {"type": "function", "function": {"name": "time", "parameters": {"type": "object", "additionalProperties": False}}},
        {"type": "function", "function": {"name": "weather", "parameters": {
            "type": "object", "properties": {"city": {"enum": ["Ulm", "Bonn"]}}, "required": ["city"],
            "additionalProperties": False}}},
    ]  # fmt: skip
    with Served(FakeEngine(tok), tok) as s:
        for seed in range(3):
            ask = dict(
                model="fake",
                messages=HI,
                tools=tools,
                tool_choice=choice,
                seed=seed,
                max_tokens=1000,
                parallel_tool_calls=False,
            )
            whole = s.client().chat.completions.create(**ask)
            (call,) = whole.choices[0].message.tool_calls
            assert whole.choices[0].finish_reason == "tool_calls" and whole.choices[0].message.content is None
            if call.function.name == "weather":
                assert json.loads(call.function.arguments)["city"] in ("Ulm", "Bonn")
            else:
                assert choice == "required"
            name = ""
            arguments = ""
            for chunk in s.client().chat.completions.create(**ask, stream=True):
                for delta in chunk.choices[0].delta.tool_calls or []:
                    name += delta.function.name or ""
                    arguments += delta.function.arguments or ""
            assert (name, arguments) == (call.function.name, call.function.arguments)


def test_gemma_thoughts_and_calls_from_many_tokens_at_once() -> None:
    text = '<|channel>thought\nLook it up.\n<channel|>I check.<|tool_call>call:weather{city:<|"|>Köln<|"|>}<tool_call|><|tool_response>'
    answers = []
    for draft in (0, 1, 3, 15):
        with Served(FakeEngine(GEMMA, lambda r: text, draft=draft), GEMMA) as s:
            stream = s.client().chat.completions.create(model="fake", messages=HI, tools=WEATHER, stream=True)
            parts: dict[str, str] = {"reasoning": "", "content": "", "name": "", "arguments": ""}
            for chunk in stream:
                delta = chunk.choices[0].delta
                parts["reasoning"] += getattr(delta, "reasoning_content", None) or ""
                parts["content"] += delta.content or ""
                for call in delta.tool_calls or []:
                    parts["name"] += call.function.name or ""
                    parts["arguments"] += call.function.arguments or ""
                finish = chunk.choices[0].finish_reason or ""
            answers.append((parts, finish))
    want = {"reasoning": "Look it up.", "content": "I check.", "name": "weather", "arguments": '{"city":"Köln"}'}
    assert answers == [(want, "tool_calls")] * 4


def test_a_tool_conversation_is_rendered(served: Served) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Ulm"}'}}
    messages: list[Any] = [
        *HI,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "sun"},
    ]
    served.client().chat.completions.create(model="fake", messages=messages, tools=WEATHER)
    prompt = TOK.decode(served.engine.seen[-1].prompt)
    assert '<tool_call>[{"name": "weather", "arguments": {"city": "Ulm"}}]</tool_call>' in prompt
    assert "<tool_response>sun</tool_response>" in prompt and '<tools>[{"name": "weather"' in prompt
    served.client().chat.completions.create(model="fake", messages=HI, tools=WEATHER, tool_choice="none")
    assert "<tools>" not in TOK.decode(served.engine.seen[-1].prompt)


# ---- refusals


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "fake", "messages": HI, **fields}


BAD: list[tuple[Any, int, str]] = [
    (chat(foo=1), 400, "foo"),
    (chat(modalities=["audio"]), 400, "modalities"),
    (chat(outrider={"fast": True}), 400, "outrider.fast"),
    (chat(temperature="hot"), 400, "temperature"),
    (chat(temperature=-1), 400, "temperature"),
    (chat(messages=[]), 400, "messages"),
    (chat(messages=[{"role": "<|king|>", "content": "x"}]), 400, "messages[0].role"),
    (
        chat(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]),
        400,
        "messages[0].content[0]",
    ),
    (chat(messages=[{"role": "user", "content": "refuse"}]), 400, "chat template"),
    (chat(messages=[{"role": "user"}]), 400, "content"),
    (chat(n=17), 400, "n"),
    (chat(**{"foo-bar": 1}), 400, "foo-bar"),
    (chat(tools=WEATHER, tool_choice={"type": "function", "function": {}}), 400, "tool_choice.function.name"),
    (chat(typical_p=0.5), 400, "typical_p"),
    (chat(max_tokens=0), 400, "max_tokens"),
    (chat(messages=[{"role": "user", "content": "x" * 5000}]), 400, "5"),
    (chat(logit_bias={"5": 101}), 400, "logit_bias"),
    (chat(logit_bias={"99999": 1}), 400, "99999"),
    (chat(top_logprobs=2), 400, "top_logprobs"),
    (chat(stream_options={"include_usage": True}), 400, "stream_options"),
    (
        chat(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}}),
        400,
        "response_format",
    ),
    (chat(guided_regex="a+", tools=WEATHER), 400, "guided_regex"),
    (chat(response_format={"type": "json_object"}, min_tokens=5), 400, "min_tokens"),
    (chat(tool_choice={"type": "function", "function": {"name": "nope"}}, tools=WEATHER), 400, "nope"),
    (chat(stop=["x"] * 17), 400, "stop"),
    ({"model": "fake"}, 400, "messages"),
    ([], 400, ""),
    ("text", 400, ""),
]


@pytest.mark.parametrize("i", range(len(BAD)))
def test_bad_requests_name_the_field(served: Served, i: int) -> None:
    body, status, word = BAD[i]
    answer = served.http.post("/v1/chat/completions", json=body)
    assert answer.status_code == status
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and word in f"{error['param']} {error['message']}"


@pytest.mark.parametrize("body", [b"", b"{", b"[" * 100_000, b'{"\\ud800": 1}', b"\xff", b"NaN"])
def test_broken_bodies_are_400(served: Served, body: bytes) -> None:
    answer = served.http.post("/v1/chat/completions", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400 and answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "fields, word",
    [
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [999]}, "999"),
        ({"prompt": ["a"] * 65}, "64"),
        ({"best_of": 2, "stream": True}, "best_of"),
    ],
)
def test_bad_completions(served: Served, fields: dict[str, Any], word: str) -> None:
    answer = served.http.post("/v1/completions", json={"model": "fake", "prompt": "x", **fields})
    assert answer.status_code == 400 and word in answer.text


def test_the_client_sees_its_own_exceptions(served: Served) -> None:
    with pytest.raises(openai.BadRequestError, match="Unknown or unsupported field: 'foo'"):
        served.client().chat.completions.create(model="fake", messages=HI, extra_body={"foo": 1})
    with pytest.raises(openai.NotFoundError):
        served.client().models.retrieve("gpt-4")
