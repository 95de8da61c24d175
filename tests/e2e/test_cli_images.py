"""`--image`, `/image` and their errors as a user meets them; LLM's own ways in; loading by name."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file
from tests import tiny, tiny_vision
from tests.kernels import put_kernels

from outrider.cli.main import main
from outrider.llm import LLM
from outrider.types import OutriderError, SamplingParams

SMALL = ("--image-tokens", 70, "--max-context", 480, "--threads", 1, "--draft-tokens", 3)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    tiny_vision.write("gemma4_e2b", folder)
    put_kernels(folder.parent / "cache")
    tiny.write_assistant("gemma4_e2b", folder.with_name("tiny-assistant"))
    tiny_vision.picture(60, 90, 1).save(folder.parent / "a.png")
    tiny_vision.picture(50, 40, 2).save(folder.parent / "b.jpg")
    return folder


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], model: Path) -> Any:
    monkeypatch.setenv("OUTRIDER_CACHE", str(model.parent / "cache"))

    def call(*arguments: object, stdin: str = "") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["outrider", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        with pytest.raises(SystemExit) as exit:
            main()
            raise SystemExit(0)
        captured = capsys.readouterr()
        return (exit.value.code if isinstance(exit.value.code, int) else 0), captured.out, captured.err

    return call


def test_generate_with_two_images(cli: Any, model: Path) -> None:
    arguments = ("generate", model, "what?", *SMALL, "--max-tokens", 12, "--json", "--compare")
    code, out, err = cli(*arguments, "--image", model.parent / "a.png", "--image", model.parent / "b.jpg")
    assert code == 0, err
    row = json.loads(out)
    assert row["identical"] and row["stats"]["prompt_tokens"] > 100


def test_a_file_that_is_no_image_is_named(cli: Any, model: Path) -> None:
    bad = model.parent / "bad.png"
    bad.write_bytes((model.parent / "a.png").read_bytes()[:200])
    code, _, err = cli("generate", model, "what?", *SMALL, "--image", model.parent / "a.png", "--image", bad)
    assert code == 2 and f"{bad}: " in err.replace("\n", "") and "Traceback" not in err


def test_chat_attaches_an_image(cli: Any, model: Path) -> None:
    said = f"/image {model.parent / 'a.png'}\nwhat?\n/image nowhere.png\n/retry\n/quit\n"
    code, _, err = cli("chat", model, *SMALL, "--max-tokens", 4, stdin=said)
    assert code == 0 and "tokens, with the next message" in err and "cannot read the image nowhere.png" in err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--image", "nowhere.png"), "cannot read the image nowhere.png"),
        (("--image", "https://example.org/a.png"), "not fetched"),
        (("--image", __file__), "not an image"),
        (("--no-vision", "--image", "x.png"), "--no-vision"),
        (("--image-tokens", 100), "--image-tokens must be 70"),
    ],
)
def test_errors_are_one_line(cli: Any, model: Path, words: tuple[object, ...], said: str) -> None:
    code, _, err = cli("generate", model, "what?", "--max-context", 480, "--threads", 1, *words)
    assert code == 2 and said in err and "Traceback" not in err


def test_inspect_counts_the_tower(cli: Any, model: Path) -> None:
    _, out, _ = cli("inspect", model, "--json")
    assert json.loads(out)["vision_bytes"] > 10_000


def test_every_form_of_an_image_is_the_same(model: Path) -> None:
    llm = LLM.load(str(model), drafter="none", image_tokens=70, max_context=480, threads=1)
    image = tiny_vision.picture(60, 90, 1)
    path = model.parent / "a.png"
    forms = [image, path, str(path), path.read_bytes(), np.asarray(image)]
    encoded = [llm.images().encode(form) for form in forms]
    assert all(one is encoded[0] for one in encoded), "the same content is encoded once"
    params = SamplingParams(max_tokens=4)
    parts: Any = [{"type": "image", "image": image}, {"type": "text", "text": "x"}]
    turns: Any = [{"role": "user", "content": parts}, {"role": "assistant", "content": "y"}]
    again: Any = [*turns, {"role": "user", "content": parts}]
    assert llm.chat(again, params).stats.prompt_tokens > 2 * encoded[0].soft_tokens.shape[0]
    for wrong, said in (
        ({"text": "<|image|>", "images": [image, image]}, "2 images for 1 places"),
        ({"text": "x", "images": [image] * 17}, "at most 16"),
        ({"text": "x", "images": [3.5]}, "an image is a path"),
        ({"text": "x", "pictures": []}, "nothing else"),
    ):
        with pytest.raises(OutriderError, match=said):
            llm.generate(wrong, params)
    audio: Any = [{"role": "user", "content": [{"type": "audio", "audio": "a.wav"}]}]
    with pytest.raises(OutriderError, match="takes no sound"):
        llm.chat(audio)
    llm.close()


def test_missing_and_left_over_tensors_are_named(model: Path, tmp_path: Path) -> None:
    tiny_vision.write("gemma4_e2b", tmp_path)
    file = tmp_path / "model.safetensors"
    stored = load_file(file)
    name = "model.vision_tower.encoder.layers.1.mlp.up_proj.linear.weight"
    save_file({k: v for k, v in stored.items() if k != name}, file, {"format": "pt"})
    with pytest.raises(OutriderError, match=r"layers\.1\.mlp\.up_proj\.linear\.weight is missing"):
        LLM.load(str(tmp_path), drafter="none", max_context=64)
    save_file({**stored, "model.vision_tower.extra": stored[name].clone()}, file, {"format": "pt"})
    with pytest.raises(OutriderError, match=r"vision_tower\.extra is left over"):
        LLM.load(str(tmp_path), drafter="none", max_context=64)
    assert isinstance(LLM.load(str(tmp_path), drafter="none", max_context=64, vision=False).vision, str)
