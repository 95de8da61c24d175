"""GGUF repositories on the hub, by a hub that is not there; and the files that lie next to a model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants
from tests import tiny
from tests.unit.weights import ggufs

from outrider.types import OutriderError
from outrider.weights import hub, repos

FILES = [
    "README.md",
    "mmproj-F16.gguf",
    "m-Q8_0.gguf",
    "m-Q4_K_M.gguf",
    "m-assistant-Q8_0.gguf",
    "BF16/m-BF16-00001-of-00002.gguf",
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tiny.target("llama")
    return ggufs.write(tmp_path_factory.mktemp("gguf") / "m.gguf", "llama", path.config, path.state_dict())


@pytest.fixture
def fake_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: Path) -> list[str]:
    """A hub with one repository, org/m; returns what was fetched from it. What is fetched lies in the cache from
    then on."""
    fetched: list[str] = []
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    folder = tmp_path / "hub" / "models--org--m"

    def fetch(repo: str, name: str) -> str:
        assert repo == "org/m"
        fetched.append(name)
        (folder / "refs").mkdir(parents=True, exist_ok=True)
        (folder / "refs" / "main").write_text("c0ffee")
        path = folder / "snapshots" / "c0ffee" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(model, path)
        return str(path)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fetch)
    there = SimpleNamespace(siblings=[SimpleNamespace(rfilename=name) for name in FILES])
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda self, repo: there)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **_: str(tmp_path / "nothing"))
    return fetched


@pytest.mark.parametrize("name", ["org/m:Q8_0", "org/m:q8_0", "hf.co/org/m:Q8_0", "https://huggingface.co/org/m:Q8_0"])
def test_a_name_with_a_quantisation_fetches_one_file_and_its_companions_once(fake_hub: list[str], name: str) -> None:
    files = hub.resolve(name)
    assert files.gguf is not None and files.path.name == "m-Q8_0.gguf" and files.name == name
    assert fake_hub == ["m-Q8_0.gguf", "m-assistant-Q8_0.gguf", "mmproj-F16.gguf"]
    assert hub.resolve(name).path == hub.resolve(name, weights=False).path == files.path and len(fake_hub) == 3
    where, why = hub.auto_drafter(files)
    assert where is not None and where.endswith("m-assistant-Q8_0.gguf") and "beside the model" in why


def test_a_repository_of_gguf_files_alone_gives_the_usual_one(fake_hub: list[str]) -> None:
    assert hub.resolve("org/m").path.name == "m-Q4_K_M.gguf"


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("org/m:Q2_K", "org/m has no Q2_K: name one, as org/m:BF16 .there: BF16, Q4_K_M, Q8_0."),
        ("org/m:BF16", "is one part of several"),
    ],
)
def test_what_a_repository_does_not_have_is_one_line(fake_hub: list[str], name: str, told: str) -> None:
    with pytest.raises(OutriderError, match=told):
        hub.resolve(name)
    assert not fake_hub
    with pytest.raises(
        OutriderError, match="`outrider pull org/m:Q8_0` fetches it"
    ):  # inspection fetches nothing large
        hub.resolve("org/m:Q8_0", weights=False)


def test_names_tell_models_drafters_and_projectors_apart() -> None:
    assert [name for name in FILES if repos.is_model(name)] == [
        "m-Q8_0.gguf",
        "m-Q4_K_M.gguf",
        "BF16/m-BF16-00001-of-00002.gguf",
    ]
    assert repos.is_drafter("gemma-4-E2B-it-assistant.gguf") and repos.is_drafter("mtp-gemma.gguf")
    assert not repos.is_drafter("empty-mtpx.gguf")
    quants = ("x.Q4_1.gguf", "x-UD-Q4_K_XL.gguf", "x-q4_0.gguf", "x-IQ4_XS.gguf", "x-it.gguf", "qwen2.5-3b.gguf")
    assert [repos.quantisation(name) for name in quants] == ["Q4_1", "UD-Q4_K_XL", "Q4_0", "IQ4_XS", None, None]
    assert repos.parse("org/m") == ("org/m", None) and repos.parse("m") is repos.parse("no/m.gguf") is None


def test_a_drafter_and_a_projector_next_to_a_model_are_found(tmp_path: Path, model: Path) -> None:
    for name in ("a-Q8_0.gguf", "a-Q4_0.gguf", "a-assistant-Q4_0.gguf", "a-assistant-Q8_0.gguf", "mmproj-a-F16.gguf"):
        shutil.copyfile(model, tmp_path / name)
    where, _ = hub.auto_drafter(tmp_path / "a-Q8_0.gguf")
    assert where == str(tmp_path / "a-assistant-Q8_0.gguf")
    assert repos.companion(tmp_path / "a-Q4_0.gguf", "mmproj") == tmp_path / "mmproj-a-F16.gguf"
    shutil.copyfile(model, tmp_path / "b.gguf")  # of another model: nothing says that these are its own
    assert hub.auto_drafter(tmp_path / "b.gguf")[0] is None and repos.companion(tmp_path / "b.gguf", "mmproj") is None
    alone = tmp_path / "alone"
    alone.mkdir()
    for name in ("c-Q8_0.gguf", "mmproj-F16.gguf"):
        shutil.copyfile(model, alone / name)
    assert hub.resolve(alone).path == alone / "c-Q8_0.gguf"  # the folder's only model
    assert repos.companion(alone / "c-Q8_0.gguf", "mmproj") == alone / "mmproj-F16.gguf"


def test_the_shipped_drafter_is_found_for_a_copy_of_its_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: Path
) -> None:
    copy = Path(shutil.copyfile(model, tmp_path / "mine.gguf"))
    assets = tmp_path / "assets"
    (assets / "smollm2").mkdir(parents=True)
    (assets / "smollm2" / "config.json").write_text(json.dumps({"target_hash": hub.fingerprint(hub.resolve(copy))}))
    monkeypatch.setattr(hub, "ASSETS", assets)
    assert hub.auto_drafter(copy)[0] is None  # another size: its content is not looked at
    monkeypatch.setattr(hub, "SMOLLM2_BYTES", copy.stat().st_size)
    assert (
        hub.auto_drafter(copy)
        == hub.auto_drafter(hub.resolve(copy))
        == (str(assets / "smollm2"), "shipped with Outrider")
    )
    data = bytearray(copy.read_bytes())
    data[-32:] = bytes(32)
    copy.write_bytes(data)
    assert hub.auto_drafter(copy)[0] is None


@pytest.mark.parametrize("kind", ["phi3", "gpt2", "mamba"])
def test_other_families_are_refused_before_their_weights_are_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, "n_layer": 2}))

    def snapshot(name: str, allow_patterns: list[str], **_: Any) -> str:
        assert "*.safetensors" not in allow_patterns
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    with pytest.raises(
        OutriderError,
        match=f"unknown model_type '{kind}': supported are Llama 2 and 3 .*, Mistral, Qwen 2 and 3, Gemma",
    ):
        hub.resolve("org/other")
