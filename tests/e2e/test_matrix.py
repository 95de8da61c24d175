"""Every command with every kind of drafter, as on a first day: a first start, a second, a cache that cannot be written,
no compiler.

One process, tiny models. The kernels are built once and put where a first start would have built them; measuring costs
gets a tenth of a second. The model without a drafter has sizes that the C library runs in one call, as real models
have.
"""

from __future__ import annotations

import json
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest
import torch
import transformers
from tests import tiny
from tests.running import running

from outrider.cli.main import main
from outrider.engine import calibrate
from outrider.ops.cpu import build
from outrider.server.main import HttpServer
from outrider.server.model_info import ServedModel
from outrider.server.settings import ServerSettings

torch.set_num_threads(1)
KINDS = ("mtp", "none", "draft")
STATES = ("twice", "read-only cache", "no compiler")
UNWRITABLE = "/dev/null/cache"  # nobody can make a folder there, root neither


@dataclass(frozen=True)
class Place:
    """Models and prompts, made once."""

    folder: Path
    kernels: Path

    def model(self, kind: str) -> Path:
        return self.folder / ("gemma" if kind == "mtp" else "llama")

    def drafter(self, kind: str) -> str:
        return f"draft:{self.folder / 'small'}" if kind == "draft" else "auto"

    @property
    def prompts(self) -> Path:
        return self.folder / "prompts.jsonl"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    folder = tmp_path_factory.mktemp("matrix")
    tiny.write_target("gemma4_31b", folder / "gemma")
    tiny.write_assistant("gemma4_31b", folder / "gemma-assistant", clustered=True)
    for name, layers, seed in (("llama", 2, 0), ("small", 1, 1)):
        config = transformers.LlamaConfig(
            vocab_size=tiny.VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=layers,
            num_attention_heads=2, head_dim=32,
            num_key_value_heads=1, max_position_embeddings=tiny.CONTEXT, eos_token_id=tiny.EOS, bos_token_id=tiny.BOS,
        )  # fmt: skip
        model: Any = transformers.AutoModelForCausalLM.from_config(config).float()
        tiny.randomise(model, seed)
        tiny.write(model, folder / name)
    rows = [{"id": i, "prompt": f"question {i} {i % 3}", "category": "ab"[i % 2]} for i in range(12)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Place(folder, build.shared_object())


Outrider = Callable[..., tuple[int, str, str]]


@pytest.fixture
def outrider(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Outrider:
    monkeypatch.setattr(calibrate, "BUDGET_S", 0.1)

    def call(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["outrider", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            main()
            raise SystemExit(0)
        captured = capsys.readouterr()
        return (end.value.code if isinstance(end.value.code, int) else 0), captured.out, captured.err

    return call


def enter(state: str, place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the process into that state: an empty cache with the kernels in it, one that cannot be written, or no way to
    have kernels."""
    spare = tmp_path / "tmp"
    spare.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(spare))
    if state == "no compiler":
        monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(build, "compiler", no_compiler)
        return
    monkeypatch.setenv("OUTRIDER_CACHE", UNWRITABLE if state == "read-only cache" else str(tmp_path / "cache"))
    home = build.cache_path("kernels")
    assert home.is_relative_to(tmp_path)
    home.mkdir(parents=True)
    shutil.copy(place.kernels, home)


def no_compiler() -> str:
    raise build.BuildError("no C compiler (cc, gcc or clang) on the path")


# ---- what each command is asked, and how its answer is known to be one
def generate(outrider: Outrider, place: Place, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    code, out, err = outrider(
        "generate", place.model(kind), "Hi there", "--max-tokens", 8, "--json", "--compare", *use(place, kind)
    )
    assert code == 0 and json.loads(out)["identical"] is True, err
    return err


def chat(outrider: Outrider, place: Place, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    lines = iter(["Hello, here is a message of more than a page of the cache", "And another", "/stats"])
    monkeypatch.setattr("builtins.input", lambda *_: next(lines, "/quit"))
    code, _, err = outrider("chat", place.model(kind), "--max-tokens", 4, *use(place, kind))
    assert code == 0 and "turn 2" in err, err
    second = next(line for line in err.splitlines() if line.startswith("turn 2"))
    assert " 0 of" not in second or "no cpu kernels" in err, second  # the second turn stands on the first one's pages
    return err


def serve(outrider: Outrider, place: Place, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    answers: list[Any] = []

    def once(backend: ServedModel, settings: ServerSettings, listener: socket.socket) -> None:
        body = {
            "model": settings.model_name,
            "messages": [{"role": "user", "content": "<|im_end|> hi"}],
            "max_tokens": 6,
            "temperature": 0,
        }
        with running(HttpServer(backend, settings), [listener]) as url:
            ask = Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
            with urlopen(ask, timeout=120) as reply:
                answers.append(json.load(reply))

    monkeypatch.setattr("outrider.server.main.serve", once)
    code, _, err = outrider("serve", place.model(kind), "--port", 0, *use(place, kind))
    assert code == 0 and answers[0]["usage"]["completion_tokens"] > 0, err
    return err


def bench(outrider: Outrider, place: Place, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    output = Path(tempfile.mkdtemp(dir=tmp_path))
    code, out, err = outrider(
        "bench", place.model(kind), "--suite", place.prompts, "--limit", 1, "--repeats", 1, "--max-tokens", 6,
        "--draft-tokens", "0,2,auto",
        "--drafters", place.drafter(kind), "--out", output, "--json",
    )  # fmt: skip
    rows = [row for row in json.loads(out)["rows"] if row["category"] == "all"]
    assert code == 0 and len(rows) == 3 and all(row["identical"] in (None, 1.0) for row in rows), err
    return err


def prove(outrider: Outrider, place: Place, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    arguments = ["--count", 1, "--k", "2", "--max-tokens", 6, "--temperatures", "0", "--json", *use(place, kind)]
    code, out, err = outrider("prove", place.model(kind), *arguments)
    report = json.loads(out)
    assert (code == 0 and report["passed"]) or report["ops"] == "reference", (
        report
    )  # torch's own products promise no bits
    return err


def predict(outrider: Outrider, place: Place, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    code, out, err = outrider("predict", place.model(kind), "--json", *use(place, kind))
    if kind == "draft":
        return one_line(code, err)
    record = json.loads(out)
    assert code == 0 and (record["speedup"] > 1.0 if kind == "mtp" else record["speedup"] == 1.0), record
    return err


def inspect(outrider: Outrider, place: Place, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    helper = {"mtp": ["--drafter", f"{place.model(kind)}-assistant"], "none": [], "draft": use(place, kind)}[kind]
    code, out, err = outrider("inspect", place.model(kind), "--json", *helper)
    assert code == 0 and (json.loads(out)["drafter"] is not None) == (kind != "none"), err
    return err


def train(outrider: Outrider, place: Place, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('layers = 1\nunroll = 2\nheldout = 2\nslots = 4\nbatch_anchors = 64\ndtype = "float32"\n')
    code, _, err = outrider(
        *("train", "--target", place.model(kind), "--data", place.prompts, "--out", tmp_path / "run"),
        *("--steps", 2, "--max-new", 8, "--recipe", recipe, "--json"),
    )
    assert code == 0, err
    return err


def eval_drafter(outrider: Outrider, place: Place, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    helper = {
        "mtp": f"{place.model(kind)}-assistant",
        "none": str(place.folder / "gemma-assistant"),
        "draft": place.drafter(kind),
    }[kind]
    code, out, err = outrider(
        "eval-drafter", place.model(kind), helper, "--prompts", place.prompts, "--limit", 2, "--max-tokens", 6, "--json"
    )
    if kind != "mtp":
        return one_line(code, err)  # another model's drafter, or none
    assert code == 0 and json.loads(out)["tokens_per_cycle"], err
    return err


def use(place: Place, kind: str) -> list[str]:
    return ["--drafter", place.drafter(kind)] if kind == "draft" else []


def one_line(code: int, err: str) -> str:
    assert code == 2 and len([line for line in err.splitlines() if line.startswith("outrider:")]) == 1, err
    return err


COMMANDS = (generate, chat, serve, bench, prove, predict, inspect, train, eval_drafter)
# Every command with every kind of drafter, and in every state of the machine; each kind in each state with a third of
# the commands.
CASES = [
    (command, kind, state)
    for i, command in enumerate(COMMANDS)
    for j, kind in enumerate(KINDS)
    for state in STATES
    if state == "twice" or i % 3 == j
]


@pytest.mark.parametrize(
    ("command", "kind", "state"), CASES, ids=[f"{command.__name__}-{kind}-{state}" for command, kind, state in CASES]
)
def test_the_first_day(
    command: Callable[..., str],
    kind: str,
    state: str,
    outrider: Outrider,
    place: Place,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    enter(state, place, tmp_path, monkeypatch)
    for start in range(2 if state == "twice" else 1):
        err = command(outrider, place, kind, tmp_path, monkeypatch)
        assert "Traceback" not in err, err
        if start == 0 and state == "twice" and command in (generate, chat, serve):
            assert list((tmp_path / "cache" / "costs").iterdir())  # what the second start takes up
