"""llama.cpp's cases of the Messages API; see tests/peer_suites.py."""

from __future__ import annotations

from typing import Any

from tests.conformance import HI, Api
from tests.peer_suites import PARTS, SAID, L, add, must

LOOKED_UP = [
    {"role": "user", "content": "weather?"},
    {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "get", "input": {"location": "Paris"}}]},
]


def claude(api: Api, messages: Any = HI, status: int = 200, **body: Any) -> Any:
    return api.post("/v1/messages", {"model": "test", "max_tokens": 12, "messages": messages, **body}, status)


def claude_basic(api: Api) -> None:
    answer = claude(api)
    assert answer["type"] == "message" and answer["role"] == "assistant" and answer["content"][0]["type"] == "text"
    assert answer["stop_reason"] in ("end_turn", "max_tokens") and "timings" not in answer
    assert all(
        isinstance(answer["usage"][k], int) for k in ("cache_read_input_tokens", "input_tokens", "output_tokens")
    )


def claude_stream(api: Api, **body: Any) -> list[Any]:
    events = api.lines("/v1/messages", {"model": "m", "max_tokens": 12, "messages": HI, "stream": True, **body})
    kinds = [e["type"] for e in events]
    assert kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"]
    starts, stops = ([e["index"] for e in events if e["type"] == f"content_block_{k}"] for k in ("start", "stop"))
    assert starts == list(range(len(starts))) == stops
    return events


def claude_counts(api: Api, **body: Any) -> None:
    answer = api.post("/v1/messages/count_tokens", {"model": "test", "messages": HI, **body})
    assert answer["input_tokens"] > 0 and "output_tokens" not in answer


def result(*more: Any, **fields: Any) -> list[Any]:
    return [
        *LOOKED_UP,
        {
            "role": "user",
            "content": [*more, {"type": "tool_result", "tool_use_id": "t1", "content": "sunny", **fields}],
        },
    ]


PIXEL = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}}
CLAUDE_TOOL = {
    "name": "get",
    "description": "d",
    "input_schema": {"type": "object", "properties": {"x": {"enum": ["a"]}}, "required": ["x"]},
}
# one call, and room for the whole of it
CLAUDE_CALL: Any = {
    "tools": [CLAUDE_TOOL],
    "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
    "max_tokens": 300,
}
add(L, "test_compat_anthropic", {
    "messages_basic": claude_basic, "messages_with_system": lambda api: claude(api, system="You help."),
    "messages_multipart_content": lambda api: claude(api, [{"role": "user", "content": PARTS}]),
    "messages_conversation": lambda api: claude(api, [*SAID, HI[0]]), "messages_streaming": claude_stream,
    "count_tokens": claude_counts, "count_tokens_with_system": lambda api: claude_counts(api, system="You help."),
    "count_tokens_no_max_tokens": claude_counts,
    "tool_use_basic": lambda api: must(claude(api, **CLAUDE_CALL)["content"][-1]["input"] == {"x": "a"}),
    "tool_result": lambda api: claude(api, result()), "tool_result_with_text": lambda api: claude(api, result(PARTS[0])),
    "tool_result_error": lambda api: claude(api, result(is_error=True)),
    "tool_streaming": lambda api: must(any(e.get("content_block", {}).get("type") == "tool_use" for e in claude_stream(api, **CLAUDE_CALL))),
    "vision_format_accepted": lambda api: must("image" in claude(api, [{"role": "user", "content": [PIXEL, PARTS[0]]}], 400)["error"]["message"]),
    "stop_sequences": lambda api: claude(api, stop_sequences=["\n", "END"]), "temperature": lambda api: claude(api, temperature=0.5),
    "top_p": lambda api: claude(api, top_p=0.9), "top_k": lambda api: claude(api, top_k=40),
    "missing_messages": lambda api: api.post("/v1/messages", {"model": "m", "max_tokens": 5}, 400),
    "streaming_content_block_indices": claude_stream,
    "thinking": lambda api: claude(api, thinking={"type": "enabled", "budget_tokens": 1024}, max_tokens=1100),
    "metadata": lambda api: claude(api, metadata={"user_id": "u"}),
    "vs_openai_different_response_format": lambda api: must("choices" not in claude(api) and "choices" in api.chat()),
})  # fmt: skip
add(
    L,
    "test_compat_anthropic",
    {"empty_messages": lambda api: claude(api, [], 400)},
    "an empty text to embed, no messages",
)
