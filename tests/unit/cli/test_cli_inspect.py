"""`outrider inspect`, as typed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from tests import tiny
from tests.block_drafters import LAYOUTS
from typer.testing import CliRunner

from outrider.bench.machines import machine
from outrider.cli.inspect import inspect, spans
from outrider.ops.formats import base
from outrider.types import OutriderError

app = typer.Typer()
app.command()(inspect)


def call(*words: str) -> str:
    done = CliRunner().invoke(app, list(words))
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done.output


def test_a_block_drafter_by_its_config_alone(tmp_path: Path) -> None:
    """Kind, layers it reads, memory and whether it fits; of one for another model the reason."""
    tiny._config("gemma4_moe").save_pretrained(tmp_path / "t")
    for name, changes in (("d", {"vocab_size": 288}), ("other", {})):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({**LAYOUTS["z-lab"], **changes}))
    data = json.loads(call(str(tmp_path / "t"), "--drafter", str(tmp_path / "d"), "--json"))["drafter"]
    assert data["fits"] and data["model_type"] == "dflash" and data["taps"] == [0, 1] and data["draft_tokens"] == 5
    assert data["kv_bytes_per_token"] == 2 * 2 * 2 * 8 * 2 and data["parameters"] > 0
    tiny.assistant("gemma4_moe", clustered=False).config.save_pretrained(tmp_path / "mtp")
    two = [word for name in ("d", "mtp") for word in ("--drafter", str(tmp_path / name))]
    both = json.loads(call(str(tmp_path / "t"), *two, "--json"))
    assert both["drafter"] == data and both["second_drafter"]["fits"] and "taps" not in both["second_drafter"]
    assert "".join(call(str(tmp_path / "t"), *two).split()).count("%ofatargetpass") == 2
    with pytest.raises(OutriderError, match="two of --drafter are an MTP and a block drafter"):
        call(str(tmp_path / "t"), *two[:2], "--drafter", str(tmp_path / "other"))
    shown = " ".join(call(str(tmp_path / "t"), "--drafter", str(tmp_path / "other")).split())
    assert "does not fit" in shown and "vocabulary has 64 tokens" in shown and "after layers 0, 1" in shown


def test_json_from_a_config_alone(tmp_path: Path) -> None:
    tiny._config("gemma4_moe").save_pretrained(tmp_path / "t")
    tiny.assistant("gemma4_moe", clustered=True).config.save_pretrained(tmp_path / "d")
    data = json.loads(call(str(tmp_path / "t"), "--drafter", str(tmp_path / "d"), "--json"))
    assert data["model_type"] == "gemma4_text" and data["parameters"] > data["active_parameters"] > 0
    assert data["bytes_per_token"] > 0 and data["kv_bytes_per_token"] > 0
    assert set(data["intensity"]) == {"prefill", "decode_1", "decode_5", "decode_9"}
    assert [row["type"] for row in data["layers"]] == ["sliding", "sliding", "full"] * 2
    assert data["layers"][0]["experts"] == 8 and data["layers"][2]["k_eq_v"]
    assert data["drafter"]["fits"] and data["drafter"]["reason"] is None and data["drafter"]["bytes_per_step"] > 0


def test_a_drafter_of_another_target_and_why() -> None:
    data = json.loads(call("google/gemma-4-31B-it", "--drafter", "google/gemma-4-E2B-it-assistant", "--json"))
    assert (
        data["drafter"]["fits"] is False and "1536" in data["drafter"]["reason"] and "5376" in data["drafter"]["reason"]
    )
    assert "does not fit" in call("google/gemma-4-31B-it", "--drafter", "google/gemma-4-E2B-it-assistant")


def test_the_table_says_who_owns_kv() -> None:
    shown = call("google/gemma-4-E2B-it", "--drafter", "google/gemma-4-E2B-it-assistant")
    assert "of layer 13" in shown and "fits" in shown and "32 of 2048 clusters" in " ".join(shown.split())


def test_layers_of_one_kind_are_one_row() -> None:
    """31B's 60 layers took 20 rows, of two kinds."""
    assert spans([0, 1, 2, 6]) == "0–2, 6" and spans([0, 1, 3, 4, 6, 7, 9]) == "0–1, … 9"
    shown = call("google/gemma-4-31B-it").splitlines()
    rows = [line.split() for line in shown if " own" in line]
    assert [row[:4] for row in rows] == [["0–4,", "…", "54–58", "sliding"], ["5,", "…", "59", "full"]]


@pytest.mark.parametrize(
    "words, message",
    [
        (["google/gemma-4-E2B-it-assistant"], "--drafter"),
        (["google/gemma-4-E2B-it", "--drafter", "google/gemma-4-E4B-it"], "not an MTP drafter"),
        (["google/gemma-4-E2B-it", "--context", "0"], "--context"),
        (["google/gemma-4-E2B-it", "--quantize", "fp8"], "int8 or int4 without --gpu"),
        (["google/gemma-4-E2B-it", "--gpu", "h100", "--quantize", "int3"], "unknown --quantize 'int3'"),
        (["google/gemma-4-31B-it-qat-w4a16-ct", "--gpu", "h100", "--quantize", "int4"], "quantised already (int4 g32)"),
        (["./no/such/folder"], "does not exist"),
    ],
)
def test_bad_input_is_one_line(words: list[str], message: str) -> None:
    with pytest.raises(OutriderError) as caught:
        call(*words)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_a_draft_model(tmp_path: Path) -> None:
    """Covers a vocabulary of another size by padding, and another tokenizer."""
    target = tiny.write(tiny.target("llama"), tmp_path / "t")
    small = tiny.write(tiny.target("llama", vocab_size=304), tmp_path / "s")
    data = json.loads(call(str(target), "--drafter", f"draft:{small}", "--gpu", "h200", "--json"))["drafter"]
    assert data["fits"] and data["bytes_per_step"] > 0 and 0.9 < data["share_of_target"] < 1.1
    assert "fits" in call(str(target), "--drafter", f"draft:{small}")
    (small / "tokenizer.json").unlink()
    data = json.loads(call(str(target), "--drafter", f"draft:{small}", "--json"))["drafter"]
    assert not data["fits"] and "vocabularies of 304 and 288 tokens" in data["reason"]


def test_unknown_model_type(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
    with pytest.raises(OutriderError, match="unknown model_type 'mamba'"):
        call(str(tmp_path))


def test_quality_of_a_quantised_checkpoint(tmp_path: Path) -> None:
    """Both perplexities, and how far the logits are apart: four bits must cost more than eight, and eight nearly
    nothing."""
    folder = tiny.write_target("llama", tmp_path / "t")  # 32 columns: one block
    record = {
        mode: json.loads(call(str(folder), "--quantize", mode, "--quality", "--json"))["rounding"]
        for mode in ("int8", "int4")
    }
    assert 0 < record["int8"]["logit_error"] < 0.05 < record["int4"]["logit_error"] < 0.5
    assert abs(record["int8"]["perplexity"] / record["int8"]["float32"] - 1) < 0.05
    assert record["int4"]["float32"] == record["int8"]["float32"] and record["int8"]["same_best"] > 0.9
    assert "perplexity" in call(str(folder), "--quantize", "int8", "--quality")
    assert "rounding" not in call(str(folder), "--quantize", "int8")
    with pytest.raises(OutriderError, match="int8, int4, fp8"):
        call(str(folder), "--quantize", "int3")


def test_a_dense_checkpoint_that_a_gpu_rounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Embeddings stay in 16 bits; a token reads the rounded weights (61.4 GB were printed)."""
    report = {
        mode: json.loads(call("google/gemma-4-31B-it", "--gpu", "rtx4090", "--quantize", mode, "--json"))
        for mode in ("int4", "fp8")
    }
    stored = json.loads(call("google/gemma-4-31B-it-qat-w4a16-ct", "--gpu", "rtx4090", "--json"))
    same = ("weights", "media", "fits", "context")
    assert [report["int4"]["gpu"][key] for key in same] == [stored["gpu"][key] for key in same]
    assert report["int4"]["bytes_per_token"] == stored["bytes_per_token"] < 20e9
    assert not report["fp8"]["gpu"]["fits"] and "rounding" not in report["int4"]
    monkeypatch.setattr(base, "SMALL", 0)
    folder = tiny.write_target("llama", tmp_path / "t")
    record = {
        mode: json.loads(call(str(folder), "--gpu", "h100", "--quantize", mode, "--quality", "--json"))
        for mode in ("int8", "fp8", "int4")
    }
    errors = [record[mode]["rounding"]["logit_error"] for mode in record]
    assert 0 < errors[0] < errors[1] < errors[2] < 0.5


def test_quantize_counts_bytes_without_weights_or_a_card() -> None:
    """A model that is not on this disk was to be fetched, to be measured."""
    rounded = json.loads(call("google/gemma-4-31B-it", "--quantize", "int4", "--drafter", "auto", "--json"))
    dense = json.loads(call("google/gemma-4-31B-it", "--json"))
    assert 0.25 < rounded["bytes_per_token"] / dense["bytes_per_token"] < 0.3
    shown = " ".join(call("google/gemma-4-31B-it", "--quantize", "int4").split())
    assert "17.3 GB at 4.5 bits" in shown and "61.4 GB" not in shown


def test_a_quantised_config_is_counted_as_it_is_stored() -> None:
    """It reported the 61.4 GB of bfloat16 for int4 in groups of 32."""
    card = ("google/gemma-4-31B-it-qat-w4a16-ct", "--gpu", "rtx4090", "--no-vision", "--json")
    data = json.loads(call(*card))
    dense = json.loads(call("google/gemma-4-31B-it", "--gpu", "rtx4090", "--json"))
    assert 19.2e9 < data["bytes"] < 19.5e9 and data["bytes_per_token"] < 19.5e9 and 61e9 < dense["bytes"] < 62e9
    assert data["formats"]["int4 g32"] > 16e9 and data["formats"]["dense"] < 3e9
    assert not data["gpu"]["fits"] and data["gpu"]["would_fit"]
    card = (*card, "--gpu", "rtx5090")
    data = json.loads(call(*card))
    assert data["gpu"]["fits"] and data["gpu"]["context"] >= 16384
    eight = json.loads(call(*card, "--kv-dtype", "fp8"))
    seeing = json.loads(call(*(word for word in card if word != "--no-vision")))
    assert seeing["vision_bytes"] > 1e9 and seeing["gpu"]["context"] < data["gpu"]["context"]
    assert (
        eight["kv_bytes_per_token"] * 2 == data["kv_bytes_per_token"]
        and eight["gpu"]["context"] > 2 * data["gpu"]["context"]
    )
    assert not dense["gpu"]["fits"] and dense["gpu"]["context"] == 0


def test_an_unknown_card_is_refused() -> None:
    with pytest.raises(
        OutriderError, match=r"unknown machine 'rtx4080' \(did you mean rtx4090\?\); known: b200, .*cpu-2-cores$"
    ):
        call("google/gemma-4-31B-it", "--gpu", "rtx4080")
    assert machine("RTX 4090") is machine("rtx-4090") is machine("rtx4090")


def test_a_quantised_folder_is_counted_by_its_recipe(tmp_path: Path) -> None:
    tiny._config("llama").save_pretrained(tmp_path)
    dense = json.loads(call(str(tmp_path), "--json"))
    config = json.loads((tmp_path / "config.json").read_text())
    settings = {"quant_method": "fp8", "modules_to_not_convert": ["down_proj", "lm_head"]}
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    data = json.loads(call(str(tmp_path), "--json"))
    assert data["bytes"] < dense["bytes"] and set(data["formats"]) == {"dense", "fp8"}
