"""`outrider launch` with agents that are scripts on the PATH: they read the settings they were given and send what the
real ones send."""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests import tiny
from tests.conformance_clients import CLAUDE, CODEX
from tests.server_fakes import FakeEngine, Served, tokenizer

from outrider.ops.cpu.build import cache_path

TOK = tokenizer()
SYSTEM = "You are a coding agent. " + " ".join(f"Rule {i}: be exact." for i in range(300))
FAKE = """#!{python}
import json, os, sys, tomllib, urllib.request
traffic = json.load(open(os.environ["FAKE_TRAFFIC"]))
name, argv, env = os.path.basename(sys.argv[0]), sys.argv[1:], os.environ
if name == "claude":
    url, key, model = env["ANTHROPIC_BASE_URL"], env["ANTHROPIC_AUTH_TOKEN"], env["ANTHROPIC_MODEL"]
elif name == "codex":
    given = tomllib.loads("\\n".join(argv[i + 1] for i, a in enumerate(argv) if a == "-c"))
    provider = given["model_providers"][given["model_provider"]]
    assert provider["wire_api"] == "responses"
    url, key, model = provider["base_url"].removesuffix("/v1"), env[provider["env_key"]], given["model"]
elif name == "opencode":
    config = json.loads(env["OPENCODE_CONFIG_CONTENT"])
    provider, _, model = config["model"].partition("/")
    options = config["provider"][provider]["options"]
    assert model in config["provider"][provider]["models"]
    url, key = options["baseURL"].removesuffix("/v1"), options["apiKey"]
elif name == "aider":
    url, key, model = env["OPENAI_API_BASE"].removesuffix("/v1"), env["OPENAI_API_KEY"], argv[1].removeprefix("openai/")
else:
    url, key, model = env["OPENAI_HOST"], env["OPENAI_API_KEY"], env["GOOSE_MODEL"]
headers = {{"Authorization": "Bearer " + key, "Content-Type": "application/json"}}
def ask(path, body=None):
    data = None if body is None else json.dumps({{**body, "model": model}}).encode()
    return urllib.request.urlopen(urllib.request.Request(url + path, data, headers), timeout=300).read().decode()
answers = [ask(path, body) for path, body in traffic]
json.dump({{"argv": argv, "env": dict(env), "answers": answers, "metrics": ask("/metrics")}}, open(os.environ["FAKE_OUT"], "w"))
sys.exit(7)
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("launch")
    (folder / "bin").mkdir()
    (folder / "cache").mkdir()
    (folder / "cache" / "kernels").symlink_to(cache_path("kernels"))  # compiled once
    for name in ("claude", "codex", "opencode", "aider", "goose"):
        script = folder / "bin" / name
        script.write_text(FAKE.format(python=sys.executable))
        script.chmod(0o755)
    return folder


def launch(
    place: Path, *arguments: str, traffic: Sequence[Any] = (), **env: str
) -> tuple[subprocess.CompletedProcess[str], Any]:
    (place / "traffic.json").write_text(json.dumps(traffic))
    record_path = place / "out.json"
    record_path.unlink(missing_ok=True)
    environment = {
        **{k: v for k, v in os.environ.items() if k != "OUTRIDER_API_KEY"},
        "PATH": f"{place / 'bin'}:{os.environ['PATH']}",
        "OUTRIDER_CACHE": str(place / "cache"),
        "FAKE_TRAFFIC": str(place / "traffic.json"),
        "FAKE_OUT": str(record_path),
        "ANTHROPIC_API_KEY": "of another server",
        "http_proxy": "http://127.0.0.1:9",
        "no_proxy": "",
        **env,
    }
    command = [sys.executable, "-m", "outrider", "launch", *arguments]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    return ran, json.loads(record_path.read_text()) if record_path.exists() else None


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with Served(FakeEngine(TOK, say=lambda _: "Z"), TOK, api_keys=("secret",)) as s:
        yield s


CHAT = {"messages": [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hi"}], "max_tokens": 4}
TRAFFIC: dict[str, list[Any]] = {
    "claude": [("/v1/messages?beta=true", CLAUDE), ("/v1/messages?beta=true", {**CLAUDE, "stream": True})],
    "codex": [("/v1/responses", {**CODEX, "stream": True})],
    "opencode": [("/v1/chat/completions", {**CHAT, "stream": True, "stream_options": {"include_usage": True}})],
    "aider": [("/v1/chat/completions", {**CHAT, "stream": True, "temperature": 0})],
    "goose": [("/v1/chat/completions", CHAT)],
}


@pytest.mark.parametrize("agent", TRAFFIC)
def test_an_agent_finds_a_server_that_runs(served: Served, place: Path, agent: str) -> None:
    arguments = (agent, "--url", served.url, "--", "exec", "it")  # without a MODEL
    ran, record = launch(place, *arguments, traffic=TRAFFIC[agent], OUTRIDER_API_KEY="secret", no_proxy="127.0.0.1")
    assert ran.returncode == 7, ran.stderr  # the agent's own
    assert len(record["answers"]) == len(TRAFFIC[agent]) and all('"Z' in answer for answer in record["answers"])
    assert record["argv"][-2:] == ["exec", "it"]
    if agent == "claude":
        assert "ANTHROPIC_API_KEY" not in record["env"]
        assert record["env"]["CLAUDE_STREAM_IDLE_TIMEOUT_MS"] == "3600000", "it asks again after five minutes of pings"
    assert served.http.get("/health").status_code == 200, "it goes on"


@pytest.mark.parametrize("agent", TRAFFIC)
def test_print_runs_nothing(place: Path, agent: str) -> None:
    ran, record = launch(place, agent, "smollm2", "--print", "--max-context", "4096", "--prefix-store", "/x y", PATH="")
    assert ran.returncode == 0 and record is None and not ran.stderr
    first, *_, last = ran.stdout.splitlines()
    assert "serve smollm2 --port 0 --prefix-store '/x y' --record-prompt" in first and first.endswith(
        "--max-context 4096"
    )
    assert last.split()[0] == agent and "smollm2" in ran.stdout


def test_what_is_wrong_is_one_line(place: Path, served: Served) -> None:
    for arguments, message in (
        (("emacs",), "unknown agent 'emacs'; known: claude"),
        (("codex", "--url", "http://127.0.0.1:9"), "no server answers at http://127.0.0.1:9"),
        (("codex", "other", "--url", served.url), f"the server at {served.url} has fake, not other"),
        (("codex", str(place / "no-such-model")), "did not start"),
    ):
        ran, _ = launch(place, *arguments, OUTRIDER_API_KEY="secret")
        assert ran.returncode == 2 and message in ran.stderr and "Traceback" not in ran.stderr, ran.stderr
        assert len([line for line in ran.stderr.splitlines() if line.startswith("outrider: ")]) == 1
    ran, _ = launch(place, "codex", "smollm2", PATH="/nowhere")
    assert (ran.returncode, ran.stderr) == (2, "outrider: codex is not on the PATH: npm install -g @openai/codex\n")


def test_the_second_start_reads_the_prompt_from_disk(place: Path) -> None:
    """A real server each time: what Claude Code sends first (a title, then 7,000 characters of system prompt) is read
    once."""
    model = tiny.write(tiny.target("llama"), place / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 16384}))
    title = {**CLAUDE, "max_tokens": 8, "system": "Write a title.", "tools": []}
    main = {**CLAUDE, "max_tokens": 8, "system": [{"type": "text", "text": SYSTEM}], "temperature": 0, "stream": True}
    traffic = [("/v1/messages?beta=true", body) for body in (title, main)]
    counts = []
    texts = []
    for _ in range(2):
        ran, seen = launch(
            place, "claude", str(model), "--threads", "1", "--drafter", "none", traffic=traffic, no_proxy="127.0.0.1"
        )
        assert ran.returncode == 7, ran.stderr + (place / "cache" / "launch" / "serve.log").read_text()
        counts.append(
            {k: float(v) for k, v in re.findall(r"outrider_prefix_pages_(\w+)_total ([0-9].*)", seen["metrics"])}
        )
        texts.append(re.findall(r'"text":"([^"]*)"', seen["answers"][1]))
    assert counts[0]["read"] == 0 and counts[0]["written"] > 100
    assert counts[1]["read"] > 100 and counts[1]["written"] < 20
    assert texts[0] == texts[1] and texts[0]
    recorded = place / "cache" / "launch" / "claude.json"
    record = json.loads(recorded.read_text())
    assert record["path"] == "/v1/messages" and record["body"]["system"] == main["system"]
    assert record["body"]["messages"] == [{"role": "user", "content": "."}], "nothing of what the user said"
    for path in (recorded, place / "cache" / "launch" / "serve.log"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize("agent", ["claude", "codex", "opencode"])
def test_an_agent_is_answered_and_a_second_start_reads_its_prompt_from_disk(tmp_path: Path, agent: str) -> None:
    """The script for models of full size, on a small one, with a recorded request."""
    path, body = TRAFFIC[agent][-1]
    long: dict[str, Any] = {
        "claude": {"system": SYSTEM, "max_tokens": 8},
        "codex": {"instructions": SYSTEM},
        "opencode": {"messages": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "Hi"}]},
    }[agent]
    (tmp_path / "request.json").write_text(json.dumps({"path": path, "body": {**body, **long}}))
    script = Path(__file__).parents[1] / "stress" / "agent_prompts.py"
    command = [sys.executable, str(script), "random", "--request", str(tmp_path / "request.json"), "--limit", "0"]
    ran = subprocess.run(
        [*command, "--silence", "300", "--serve", "--drafter none --threads 1"],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    record = json.loads(ran.stdout.splitlines()[-1])
    assert record["first"]["prompt_tokens"] == record["second"]["prompt_tokens"] > 4000
    assert record["second"]["pages_read"] > 100, "the second server computed the prompt again"
