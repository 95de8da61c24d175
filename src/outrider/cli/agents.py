"""Coding agents that `outrider launch` starts: the variables and arguments that point each agent to our server."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

PATIENCE_S = 3600  # a first prompt takes minutes on a laptop, and agents give up after five


@dataclass(frozen=True)
class Endpoint:
    """A served model as its clients see it."""

    url: str
    model: str
    context: int  # tokens; 0: not known
    key: str


@dataclass(frozen=True)
class Agent:
    program: str
    install: str
    settings: Callable[[Endpoint], tuple[dict[str, str | None], list[str]]]
    """Variables (None: must not be set) and arguments."""


def claude(at: Endpoint) -> tuple[dict[str, str | None], list[str]]:
    roles = ("MODEL", "SMALL_FAST_MODEL", "DEFAULT_OPUS_MODEL", "DEFAULT_SONNET_MODEL", "DEFAULT_HAIKU_MODEL")
    variables: dict[str, str | None] = {
        "ANTHROPIC_BASE_URL": at.url,
        "ANTHROPIC_AUTH_TOKEN": at.key,
        "ANTHROPIC_API_KEY": None,  # the agent would ask the user about it
        **{f"ANTHROPIC_{role}": at.model for role in roles},
        "API_TIMEOUT_MS": str(1000 * PATIENCE_S),
        # from event to event, and pings do not count: it would send the request again after five minutes
        "CLAUDE_STREAM_IDLE_TIMEOUT_MS": str(1000 * PATIENCE_S),
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",  # it changes the first line of the prompt from request to request
    }
    return variables, []


def codex(at: Endpoint) -> tuple[dict[str, str | None], list[str]]:
    ours = "model_providers.outrider"
    settings: dict[str, str | int] = {
        "model": at.model,
        "model_provider": "outrider",
        f"{ours}.name": "Outrider",
        f"{ours}.base_url": f"{at.url}/v1",
        f"{ours}.wire_api": "responses",
        f"{ours}.env_key": "OUTRIDER_API_KEY",
        f"{ours}.stream_idle_timeout_ms": 1000 * PATIENCE_S,
    }
    if at.context:
        settings["model_context_window"] = at.context
    return {"OUTRIDER_API_KEY": at.key}, [a for k, v in settings.items() for a in ("-c", f"{k}={json.dumps(v)}")]


def opencode(at: Endpoint) -> tuple[dict[str, str | None], list[str]]:
    model: dict[str, object] = {"name": at.model}
    if at.context:
        model["limit"] = {"context": at.context, "output": max(1, at.context // 4)}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "Outrider",
        "options": {"baseURL": f"{at.url}/v1", "apiKey": at.key, "timeout": False},
        "models": {at.model: model},
    }
    name = f"outrider/{at.model}"
    return {
        "OPENCODE_CONFIG_CONTENT": json.dumps({"provider": {"outrider": provider}, "model": name, "small_model": name})
    }, []


def aider(at: Endpoint) -> tuple[dict[str, str | None], list[str]]:
    arguments = ["--model", f"openai/{at.model}", "--timeout", str(PATIENCE_S), "--no-show-model-warnings"]
    return {"OPENAI_API_BASE": f"{at.url}/v1", "OPENAI_API_KEY": at.key}, arguments


def goose(at: Endpoint) -> tuple[dict[str, str | None], list[str]]:
    variables: dict[str, str | None] = {
        "GOOSE_PROVIDER": "openai",
        "GOOSE_MODEL": at.model,
        "OPENAI_HOST": at.url,
        "OPENAI_API_KEY": at.key,
        "OPENAI_TIMEOUT": str(PATIENCE_S),
    }
    return variables, ["session"]


AGENTS = {
    "claude": Agent("claude", "npm install -g @anthropic-ai/claude-code", claude),
    "codex": Agent("codex", "npm install -g @openai/codex", codex),
    "opencode": Agent("opencode", "npm install -g opencode-ai", opencode),
    "aider": Agent("aider", "pip install aider-chat", aider),
    "goose": Agent("goose", "see its own guide", goose),
}
