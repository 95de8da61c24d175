"""`--audio`, `/audio` and their errors as a user meets them; LLM's own ways in; loading by name."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file
from tests import tiny, tiny_audio, tiny_vision
from tests.kernels import put_kernels

from outrider.cli.main import main
from outrider.llm import LLM
from outrider.types import OutriderError, SamplingParams

SMALL = ("--image-tokens", 70, "--max-context", 480, "--threads", 1, "--draft-tokens", 3)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    tiny_audio.write("gemma4_e2b", folder)
    put_kernels(folder.parent / "cache")
    tiny.write_assistant("gemma4_e2b", folder.with_name("tiny-assistant"))
    (folder.parent / "a.wav").write_bytes(tiny_audio.wav(tiny_audio.clip(1.0)))
    (folder.parent / "b.wav").write_bytes(tiny_audio.wav(tiny_audio.clip(0.5, 1), rate=44_100))
    tiny_vision.picture(60, 90, 1).save(folder.parent / "a.png")
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


def test_generate_with_two_clips_and_an_image(cli: Any, model: Path) -> None:
    folder = model.parent
    words = ("generate", model, "what?", *SMALL, "--max-tokens", 12, "--json", "--compare")
    code, out, err = cli(*words, "--audio", folder / "a.wav", "--audio", folder / "b.wav", "--image", folder / "a.png")
    assert code == 0, err
    row = json.loads(out)
    assert row["identical"] and row["stats"]["prompt_tokens"] > 25 + 5 + 50


def test_without_a_template(cli: Any, model: Path) -> None:
    words = ("generate", model, "what?", *SMALL, "--max-tokens", 2, "--json", "--raw")
    _, bare, _ = cli(*words)
    _, heard, _ = cli(*words, "--audio", model.parent / "a.wav")
    tokens = [json.loads(out)["stats"]["prompt_tokens"] for out in (bare, heard)]
    assert tokens[1] - tokens[0] == 25 + 2


def test_a_file_that_is_no_sound_is_named(cli: Any, model: Path) -> None:
    code, _, err = cli("generate", model, "what?", *SMALL, "--audio", model.parent / "a.png")
    assert code == 2 and "a.png: not a sound file" in err.replace("\n", "") and "Traceback" not in err


def test_chat_attaches_a_clip(cli: Any, model: Path) -> None:
    said = f"/audio {model.parent / 'a.wav'}\nwhat?\n/audio nowhere.wav\n/retry\n/quit\n"
    code, _, err = cli("chat", model, *SMALL, "--max-tokens", 4, stdin=said)
    assert code == 0 and "25 tokens, with the next message" in err and "cannot read the sound nowhere.wav" in err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--audio", "nowhere.wav"), "cannot read the sound nowhere.wav"),
        (("--audio", "https://example.org/a.wav"), "not fetched"),
        (("--audio", __file__), "not a sound file"),
        (("--no-audio", "--audio", "x.wav"), "--no-audio"),
        (("--max-clips", 0, "--audio", "x.wav"), "1 clip; at most 0 are allowed"),
        (("--max-clips", -1), "--max-clips must be 0 or more"),
    ],
)
def test_errors_are_one_line(cli: Any, model: Path, words: tuple[object, ...], said: str) -> None:
    code, _, err = cli("generate", model, "what?", "--max-context", 480, "--threads", 1, *words)
    assert code == 2 and said in err and "Traceback" not in err


def test_inspect_counts_the_encoder(cli: Any, model: Path) -> None:
    _, with_audio, _ = cli("inspect", model, "--json")
    _, without, _ = cli("inspect", model, "--json", "--no-audio")
    stored = load_file(model / "model.safetensors")
    values = sum(tensor.numel() for name, tensor in stored.items() if "audio" in name)
    assert json.loads(with_audio)["audio_bytes"] == 2 * values > 0 == json.loads(without)["audio_bytes"]


def test_predict_tells_the_cost_of_a_clip(cli: Any, model: Path) -> None:
    _, out, _ = cli("predict", "google/gemma-4-E4B-it", "--gpu", "h200")
    assert "sound   30 s, 750 tokens: tower 0.4" in out
    _, out, _ = cli("predict", "google/gemma-4-31B-it", "--gpu", "h200", "--json")
    assert json.loads(out)["sound"] is None


def test_every_form_of_a_clip_is_the_same(model: Path) -> None:
    llm = LLM.load(str(model), drafter="none", max_context=480, threads=1)
    samples = np.round(tiny_audio.clip(1.0) * 32_767).astype(np.int16)
    path = model.parent / "form.wav"
    path.write_bytes(tiny_audio.wav(samples.astype(np.float32) / 32_767))
    forms = [path, str(path), path.read_bytes(), (samples, 16_000), {"array": samples, "sampling_rate": 16_000}]
    encoded = [llm.sound().encode(form) for form in forms]
    assert all(np.array_equal(one.soft_tokens, encoded[0].soft_tokens) for one in encoded)
    params = SamplingParams(max_tokens=4)
    parts: Any = [{"type": "audio", "audio": path}, {"type": "text", "text": "x"}]
    turns: Any = [{"role": "user", "content": parts}, {"role": "assistant", "content": "y"}]
    again: Any = [*turns, {"role": "user", "content": parts}]
    assert llm.chat(again, params).stats.prompt_tokens > 2 * 25
    for wrong, said in (
        ({"text": "<|audio|>", "audio": [path, path]}, "2 clips for 1 places"),
        ({"text": "x", "audio": [path] * 9}, "9 clips; at most 8"),
        ({"text": "x", "audio": [3.5]}, "a clip is a path"),
        ({"text": "x", "audio": [(samples[:100], 16_000)]}, "too short"),
        ({"text": "x", "audio": [(np.zeros(480_001, np.float32), 16_000)]}, "longer than 30 s"),
        ({"text": "x", "audio": [(np.full(400, np.nan), 16_000)]}, "NaN"),
        ({"text": "x", "audio": "a.wav"}, "'audio': "),
        ({"text": "x", "sounds": []}, "nothing else"),
    ):
        with pytest.raises(OutriderError, match=said):
            llm.generate(wrong, params)
    video: Any = [{"role": "user", "content": [{"type": "video", "video": "a.mp4"}]}]
    with pytest.raises(OutriderError, match="send frames of it as images"):
        llm.chat(video)
    llm.close()


def test_missing_and_left_over_tensors_are_named(model: Path, tmp_path: Path) -> None:
    tiny_audio.write("gemma4_e2b", tmp_path)
    file = tmp_path / "model.safetensors"
    stored = load_file(file)
    name = "model.audio_tower.layers.1.self_attn.k_proj.linear.weight"
    save_file({k: v for k, v in stored.items() if k != name}, file, {"format": "pt"})
    with pytest.raises(OutriderError, match=r"layers\.1\.self_attn\.k_proj\.linear\.weight is missing"):
        LLM.load(str(tmp_path), drafter="none", max_context=64)
    save_file({**stored, "model.audio_tower.extra": stored[name].clone()}, file, {"format": "pt"})
    with pytest.raises(OutriderError, match=r"audio_tower\.extra is left over"):
        LLM.load(str(tmp_path), drafter="none", max_context=64)
    assert isinstance(LLM.load(str(tmp_path), drafter="none", max_context=64, audio=False).audio, str)


def test_a_model_that_takes_no_sound_says_so(tmp_path: Path) -> None:
    llm = LLM.load(str(tiny_vision.write("gemma4_31b", tmp_path)), drafter="none", max_context=64)
    with pytest.raises(OutriderError, match="takes no sound"):
        llm.generate({"text": "x", "audio": ["a.wav"]})
    llm.close()
