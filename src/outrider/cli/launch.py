"""`outrider launch`: starts a coding agent on a local model, configured to use our server."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from ..config import OPTIONS, LoadSettings
from ..ops.cpu.build import cache_path
from ..server.settings import public_name
from ..types import OutriderError, require
from . import common
from .common import note, out

URL = "http://127.0.0.1:8000"
SERVING = re.compile(r"serving .* at (https?://\S+) \(page")
PATIENCE_S = 3600  # a first prompt takes minutes on a laptop, and agents give up after five


# ---- agents ----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Endpoint:
    """A served model as clients see it."""

    url: str
    model: str
    context: int  # tokens; 0: unknown
    key: str


INSTALL = {
    "claude": "npm install -g @anthropic-ai/claude-code",
    "codex": "npm install -g @openai/codex",
    "opencode": "npm install -g opencode-ai",
    "aider": "pip install aider-chat",
    "goose": "see its own guide",
}


def settings(agent: str, at: Endpoint) -> tuple[dict[str, str | None], list[str]]:
    """The agent's environment variables (None: must not be set) and arguments."""
    api = f"{at.url}/v1"
    patience_ms = 1000 * PATIENCE_S
    name = f"outrider/{at.model}"
    roles = ("MODEL", "SMALL_FAST_MODEL", "DEFAULT_OPUS_MODEL", "DEFAULT_SONNET_MODEL", "DEFAULT_HAIKU_MODEL")
    ours = "model_providers.outrider"
    codex: dict[str, str | int] = {
        "model": at.model,
        "model_provider": "outrider",
        f"{ours}.name": "Outrider",
        f"{ours}.base_url": api,
        f"{ours}.wire_api": "responses",
        f"{ours}.env_key": "OUTRIDER_API_KEY",
        f"{ours}.stream_idle_timeout_ms": patience_ms,
    }
    model: dict[str, object] = {"name": at.model}
    if at.context:
        codex["model_context_window"] = at.context
        model["limit"] = {"context": at.context, "output": max(1, at.context // 4)}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "Outrider",
        "options": {"baseURL": api, "apiKey": at.key, "timeout": False},
        "models": {at.model: model},
    }
    opencode = {"provider": {"outrider": provider}, "model": name, "small_model": name}
    variables: dict[str, dict[str, str | None]] = {
        "claude": {
            "ANTHROPIC_BASE_URL": at.url,
            "ANTHROPIC_AUTH_TOKEN": at.key,
            "ANTHROPIC_API_KEY": None,  # the agent would ask the user about it
            **{f"ANTHROPIC_{role}": at.model for role in roles},
            "API_TIMEOUT_MS": str(patience_ms),
            # between two events, pings excluded: by default the agent retries after five minutes
            "CLAUDE_STREAM_IDLE_TIMEOUT_MS": str(patience_ms),
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",  # changes the prompt's first line at every request
        },
        "codex": {"OUTRIDER_API_KEY": at.key},
        "opencode": {"OPENCODE_CONFIG_CONTENT": json.dumps(opencode)},
        "aider": {"OPENAI_API_BASE": api, "OPENAI_API_KEY": at.key},
        "goose": {
            "GOOSE_PROVIDER": "openai",
            "GOOSE_MODEL": at.model,
            "OPENAI_HOST": at.url,
            "OPENAI_API_KEY": at.key,
            "OPENAI_TIMEOUT": str(PATIENCE_S),
        },
    }
    arguments = {
        "codex": [word for key, value in codex.items() for word in ("-c", f"{key}={json.dumps(value)}")],
        "aider": ["--model", f"openai/{at.model}", "--timeout", str(PATIENCE_S), "--no-show-model-warnings"],
        "goose": ["session"],
    }
    return variables[agent], arguments.get(agent, [])


# ---- the command -----------------------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    agent: Annotated[str, typer.Argument(help=f"{', '.join(INSTALL)}.")]
    model: Annotated[
        str | None, typer.Argument(help="As for serve. Default: the model of the server that runs at --url.")
    ] = None
    arguments: Annotated[list[str] | None, typer.Argument(metavar="[-- ARGS...]", help="For the agent.")] = None
    url: Annotated[str | None, f"URL of a running server. Default: {URL}, if MODEL is served there."] = None
    api_key: Annotated[str, "Of that server."] = "none"
    show: Annotated[bool, typer.Option("--print", help="Print the command without running it.")] = False


@common.loading(*common.RUNNING, *common.KEEPING)
@common.taking(LaunchOptions)
def launch(asked: LaunchOptions, load: LoadSettings) -> None:
    """Start a coding agent on MODEL: claude, codex, opencode, aider or goose.

    A server is started if none runs, then the agent with its settings. The server keeps what it has read of the
    agent's prompt in a folder (--prefix-store; `off`: not at all), so that the next start has its first token soon. It
    ends with the agent; its log is launch/serve.log in Outrider's cache.

    Example: outrider launch claude Qwen/Qwen2.5-Coder-1.5B-Instruct
    """
    agent = asked.agent
    model = asked.model
    words = asked.arguments or []
    require(agent in INSTALL, f"unknown agent {agent!r}; known: {', '.join(INSTALL)}")
    behind = sys.argv[sys.argv.index("--") + 1 :] if "--" in sys.argv else []
    if model is not None and behind == [model, *words]:  # `launch codex -- exec`: no MODEL
        words = behind
        model = None
    program = shutil.which(agent)
    require(asked.show or program is not None, f"{agent} is not on the PATH: {INSTALL[agent]}")
    endpoint = find(asked.url, model, asked.api_key)
    missing_server = f"no server at {asked.url or URL}: name a MODEL to start one, or give its address with --url"
    require(endpoint is not None or model is not None, missing_server)
    recorded = cache_path("launch", f"{agent}.json")
    command = [] if endpoint is not None else server_command(str(model), load, recorded)
    if asked.show:
        if command:
            out.print(shlex.join(command))
        context = load.engine.max_context or 0
        at = endpoint or Endpoint("http://127.0.0.1:PORT", public_name(str(model)), context=context, key=asked.api_key)
        variables, arguments = settings(agent, at)
        for name, value in variables.items():
            out.print(f"unset {name}" if value is None else f"export {name}={shlex.quote(value)}")
        out.print(shlex.join([agent, *arguments, *words]))
        return
    with nullcontext(endpoint) if endpoint is not None else serving(command, str(model), asked.api_key) as at:
        threading.Thread(target=warm, args=(at, recorded), daemon=True).start()
        raise typer.Exit(run_agent(str(program), agent, at=at, given=words))


def find(url: str | None, model: str | None, key: str) -> Endpoint | None:
    """The running server at the address, if it serves this model. If the address was given explicitly, a missing server
    is an error."""
    try:
        cards = ask(f"{url or URL}/v1/models", key)["data"]
    except (OSError, ValueError, KeyError, TypeError) as e:
        if url is not None:
            raise OutriderError(f"no server answers at {url}: {getattr(e, 'reason', None) or e}") from None
        return None
    names = [str(card["id"]) for card in cards]
    wanted = names[0] if model is None else public_name(model)
    if wanted not in names:
        if url is not None:
            raise OutriderError(f"the server at {url} has {', '.join(names)}, not {wanted}")
        return None
    extra: dict[str, Any] = cards[names.index(wanted)].get("outrider") or {}
    return Endpoint((url or URL).rstrip("/"), wanted, context=int(extra.get("max_context") or 0), key=key)


def ask(url: str, key: str, body: object = None, timeout: float = 5.0) -> Any:
    data = None if body is None else json.dumps(body).encode()
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    # the system's HTTP proxy cannot reach a local server
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with direct.open(urllib.request.Request(url, data, headers), timeout=timeout) as answer:
        return json.load(answer)


def server_command(model: str, load: LoadSettings, recorded: Path) -> list[str]:
    changed = {name: value for name, value in load.options().items() if value != OPTIONS[name].default}
    folder = changed.pop("prefix_store", None) or str(cache_path("prefixes"))
    each = [(name, one) for name, value in changed.items() for one in (value if isinstance(value, tuple) else (value,))]
    options = [word for name, value in each for word in (f"--{name.replace('_', '-')}", str(value))]
    store = [] if folder == "off" else ["--prefix-store", str(folder)]
    command = [sys.executable, "-m", "outrider", "serve", model, "--port", "0", *store]
    return [*command, "--record-prompt", str(recorded), *options]


@contextmanager
def serving(command: list[str], model: str, key: str, log_name: str = "serve.log") -> Iterator[Endpoint]:
    """Runs the server as a child process until the block ends."""
    path = cache_path("launch", log_name)
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    note(f"starting a server for {model} (log: {path})")
    env = {**os.environ, "OUTRIDER_API_KEY": key} if key != "none" else None
    with open(os.open(path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600), "wb") as log:
        # in its own session: Ctrl-C is meant for the agent
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env, start_new_session=True
        )
    at = None
    try:
        while at is None:
            time.sleep(0.1)
            ended = child.poll() is not None
            said = path.read_text(encoding="utf-8", errors="replace")
            if ended:
                lines = [line for line in said.splitlines() if line.strip()] or [f"exit code {child.returncode}"]
                raise OutriderError(f"the server for {model} did not start: {lines[-1].removeprefix('outrider: ')}")
            started = SERVING.search(said)
            if started is not None:
                with suppress(OutriderError):  # it prints its address before it answers
                    at = find(started[1], None, key)
        yield at
    finally:
        child.send_signal(signal.SIGTERM)
        try:
            child.wait(30)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def warm(at: Endpoint, recorded: Path) -> None:
    """Prefills the agent's recorded system prompt while the agent starts. An earlier first request continues from
    there."""
    with suppress(OSError, ValueError, KeyError):
        recorded_prompt: Mapping[str, Any] = json.loads(recorded.read_text(encoding="utf-8"))
        ask(at.url + recorded_prompt["path"], at.key, {**recorded_prompt["body"], "model": at.model}, timeout=3600.0)


def run_agent(program: str, agent: str, at: Endpoint, given: list[str]) -> int:
    variables, arguments = settings(agent, at)
    environment = {name: value for name, value in os.environ.items() if name not in variables}
    env = {**environment, **{name: value for name, value in variables.items() if value is not None}}
    child = subprocess.Popen([program, *arguments, *given], env=env)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # the agent handles Ctrl-C
    try:
        code = child.wait()
    finally:
        signal.signal(signal.SIGINT, before)
    return code if code >= 0 else 128 - code
