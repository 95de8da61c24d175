"""`outrider list`, `pull`, `rm`, `show`, and the user's file of aliases and defaults."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from huggingface_hub import constants
from tests import tiny
from tests.unit.weights import ggufs

from outrider.cli import common, main, store
from outrider.config import model_of

Called = tuple[int, str, str]


class Shell:
    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], home: Path):
        self.patch = monkeypatch
        self.capsys = capsys
        self.home = home

    def __call__(self, *words: object) -> Called:
        self.patch.setattr("sys.argv", ["outrider", *map(str, words)])
        code = main.run()
        done = self.capsys.readouterr()
        return code, done.out, done.err

    def config(self, text: str) -> None:
        (self.home / "config" / "outrider").mkdir(parents=True, exist_ok=True)
        (self.home / "config" / "outrider" / "config.toml").write_text(text)


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Shell:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.utils._cache_manager.HF_HUB_CACHE", str(tmp_path / "hub"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return Shell(monkeypatch, capsys, tmp_path)


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = tiny.target("llama")
    return ggufs.write(tmp_path_factory.mktemp("gguf") / "m-F32.gguf", "llama", model.config, model.state_dict())


def cached(shell: Shell, gguf: Path) -> Path:
    """org/m:Q8_0 as the hub's cache keeps it."""
    repo = shell.home / "hub" / "models--org--m"
    for folder in ("refs", "blobs", "snapshots/c0ffee"):
        (repo / folder).mkdir(parents=True)
    (repo / "refs" / "main").write_text("c0ffee")
    blob = Path(shutil.copyfile(gguf, repo / "blobs" / "b10b"))
    (repo / "snapshots" / "c0ffee" / "m-Q8_0.gguf").symlink_to(blob)
    return blob


def test_what_is_at_hand_is_listed_with_what_it_was_used_with(shell: Shell, gguf: Path) -> None:
    blob = cached(shell, gguf)
    shutil.copyfile(gguf, "own.gguf")
    shutil.copyfile(gguf, "mmproj-own.gguf")
    folder = tiny.write_target("llama", shell.home / "folder")
    store.note_use(str(folder), "drafter: ngram (suffix matches)")
    store.note_use("org/m:Q8_0", "drafter: mtp there (as asked)")
    code, out, _ = shell("list", "--json")
    rows = {row["name"]: row for row in json.loads(out)}
    assert (
        code == 0
        and rows["org/m:Q8_0"]["bytes"] == blob.stat().st_size
        and rows["org/m:Q8_0"]["drafter"] == "mtp there"
    )
    assert rows["own.gguf"]["kind"] == "model" and rows["mmproj-own.gguf"]["kind"] == "mmproj"
    assert rows[str(folder)]["drafter"] == "ngram" and rows[str(folder)]["used"]
    assert "org/m:Q8_0" in shell("list")[1]
    code, out, _ = shell("show", "org/m:Q8_0", "--json")
    data = json.loads(out)
    assert (
        code == 0
        and data["quantisation"] == "Q8_0"
        and data["last_drafter"] == "mtp there"
        and data["bytes"] == blob.stat().st_size
    )
    assert json.loads(shell("show", "own.gguf", "--json")[1])["mmproj"] == "mmproj-own.gguf"
    assert "mmproj-own.gguf" in shell("inspect", "own.gguf")[1]
    assert common.model_names("o") == ["org/m:Q8_0", "own.gguf"] and "smollm2" in common.model_names("")


@pytest.mark.parametrize("package", [None, "outrider"])  # started as a script, or with python -m
def test_a_shell_completes_names_of_models(shell: Shell, gguf: Path, package: str | None) -> None:
    shell.patch.setattr("__main__.__package__", package)
    shutil.copyfile(gguf, "own.gguf")
    shell.patch.setenv("_OUTRIDER_COMPLETE", "complete_bash")
    shell.patch.setenv("COMP_WORDS", "outrider generate ow")
    shell.patch.setenv("COMP_CWORD", "2")
    code, out, _ = shell()
    assert code == 0 and out.split() == ["own.gguf"]


def test_pull_says_what_there_is_and_rm_removes_it_from_the_cache_only(shell: Shell, gguf: Path) -> None:
    blob = cached(shell, gguf)
    code, out, _ = shell("pull", "hf.co/org/m:Q8_0")
    assert code == 0 and "m-Q8_0.gguf" in out and "drafter: none" in out
    shutil.copyfile(gguf, "own.gguf")
    assert shell("rm", "own.gguf")[0] == 2 and Path("own.gguf").exists()
    assert "own.gguf is a GGUF file: merge into" in shell("merge", "own.gguf", "--adapter", "a", "--out", "o")[2]
    assert "()" not in shell("inspect", "own.gguf")[1]
    assert shell("rm", "org/m:Q8_0")[0] == 0 and not blob.exists()
    for name in ("org/m:Q8_0", "org/other", "smollm2", "nonsense"):
        code, _, err = shell("rm", name)
        assert code == 2 and f"{name} is not in the cache" in err and len(err.splitlines()) == 1


def test_a_whole_repository_is_removed(shell: Shell, gguf: Path) -> None:
    blob = cached(shell, gguf)
    assert shell("rm", "org/m")[0] == 0 and not blob.exists()


def test_aliases_and_defaults_of_the_users_file(shell: Shell, gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copyfile(gguf, "own.gguf")
    shell.config(
        '\ufeff[aliases]\nmine = "own.gguf"\n[defaults]\nkv-dtype = "int8"\nseed = 3\n[inspect]\ncontext = 77\n'
    )
    data = json.loads(shell("inspect", "mine", "--json")[1])
    assert data["context"] == 77 and data["model"] == "mine" and model_of("mine") == "own.gguf"
    narrow = data["kv_bytes_per_token"]
    data = json.loads(shell("inspect", "mine", "--context", "5", "--kv-dtype", "auto", "--json")[1])
    assert data["context"] == 5 and data["kv_bytes_per_token"] > narrow  # flags win
    assert "mine" in common.model_names("m") and "mine = own.gguf" in shell("list")[1]
    shell.config("[inspect]\njson = true\n")  # by the name that --help lists
    assert json.loads(shell("inspect", "own.gguf")[1])["model"] == "own.gguf"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("seed = 3\n", "'seed' stands outside a table"),
        ("[colours]\n", "unknown table [colours]; known: aliases, defaults, generate"),
        ("[defaults]\ncolour = 1\n", "unknown option 'colour' in [defaults]"),
        ("[inspect]\ncolour = 1\n", "unknown option 'colour' in [inspect]"),
        ("[aliases]\nx = 1\n", "alias 'x' must name a model, got 1"),
        ("[inspect]\ncontext = 'many'\n", "Invalid value for '--context'"),
        ("[", "is not TOML"),
    ],
)
def test_mistakes_of_the_users_file_are_one_line(shell: Shell, text: str, told: str) -> None:
    shell.config(text)
    code, _, err = shell("inspect", "google/gemma-4-E2B-it")
    assert code == 2 and told in err and len(err.splitlines()) == 1, err


@pytest.mark.parametrize("words", [("list",), ("show", "own.gguf"), ("rm", "org/m:Q8_0")])
def test_models_on_the_disk_are_managed_without_torch(shell: Shell, gguf: Path, words: tuple[str, ...]) -> None:
    """Each imported torch for the sizes of a file's blocks: two seconds on a small machine."""
    cached(shell, gguf)
    shutil.copyfile(gguf, "own.gguf")
    program = (
        "import sys; from huggingface_hub import constants; constants.HF_HUB_CACHE = sys.argv.pop();"
        "from outrider.cli import main; code = main.run(); assert 'torch' not in sys.modules; sys.exit(code)"
    )
    words = (sys.executable, "-c", program, *words, str(shell.home / "hub"))
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_long_paths_are_listed_on_one_line(shell: Shell, gguf: Path) -> None:
    """A folded path cannot be copied."""
    folder = shell.home / ("long" * 30)
    folder.mkdir()
    shutil.copyfile(gguf, folder / "m.gguf")
    store.note_use(str(folder / "m.gguf"), "drafter: ngram (suffix matches)")
    shell.patch.setattr(common.out, "width", 60)
    assert str(folder / "m.gguf") in shell("list")[1]
    assert f"path          {folder / 'm.gguf'}\n" in shell("show", str(folder / "m.gguf"))[1]
