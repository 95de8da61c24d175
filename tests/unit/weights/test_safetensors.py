"""Safetensors folders: what is read, what is skipped, and what is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests import tiny
from torch import Tensor

from outrider.models.config import ModelConfig
from outrider.models.names import ignored, tensor_plan
from outrider.ops.backend import Capabilities
from outrider.ops.reference import ReferenceOps
from outrider.types import OutriderError
from outrider.weights import hub
from outrider.weights.files import fingerprint
from outrider.weights.load import SLICE, dummy_weights, load_drafter, load_target

FILE = "model.safetensors"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Tiny checkpoints, written once each."""
    root = tmp_path_factory.mktemp("made")
    done = {}

    def get(name: str) -> Path:
        if name not in done:
            done[name] = tiny.write_target(name, root / name)
        return done[name]

    return get


def copy(folder: Path, to: Path, change: Callable[[dict[str, Tensor]], Any] = lambda _: None) -> Path:
    to.mkdir()
    for file in folder.iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    tensors = load_file(to / FILE)
    change(tensors)
    save_file(tensors, to / FILE, metadata={"format": "pt"})
    return to


def refused(folder: Path, match: str) -> None:
    with pytest.raises(OutriderError, match=match) as caught:
        load_target(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", tiny.TARGETS)
def test_plan_and_checkpoint_agree_for_every_kind(name: str, made: Callable[[str], Path]) -> None:
    config, weights, _ = load_target(made(name))
    plans = tensor_plan(config)
    assert weights.keys() == plans.keys()
    for key, plan in plans.items():
        assert tuple(weights[key].shape) == plan.shape, key
        assert sum(plan.parts) == plan.shape[0] or len(plan.sources) == 1


def test_fused_rows_stand_in_the_order_q_k_v_and_gate_up(made: Callable[[str], Path]) -> None:
    stored = load_file(made("llama") / FILE)
    _, weights, _ = load_target(made("llama"))
    there = "model.layers.1.self_attn."
    assert torch.equal(weights["layers.1.qkv"], torch.cat([stored[f"{there}{w}_proj.weight"] for w in "qkv"]))
    assert torch.equal(
        weights["layers.1.gate_up"], torch.cat([stored[f"model.layers.1.mlp.{w}_proj.weight"] for w in ("gate", "up")])
    )


def test_gemma3_norms_contain_their_one_and_stay_float32(made: Callable[[str], Path]) -> None:
    stored = load_file(made("gemma3") / FILE)
    _, weights, _ = load_target(made("gemma3"), dtype=torch.bfloat16)
    assert torch.equal(weights["layers.0.q_norm"], stored["model.layers.0.self_attn.q_norm.weight"] + 1)
    assert weights["norm"].dtype == torch.float32 and weights["embed"].dtype == torch.bfloat16


def test_multimodal_files_give_the_text_tower_only(made: Callable[[str], Path]) -> None:
    names = load_file(made("gemma4_e2b") / FILE).keys()
    assert any("vision" in n for n in names) and any("audio" in n for n in names)  # else this tests nothing
    config, weights, _ = load_target(made("gemma4_e2b"))
    assert len(weights) == len(tensor_plan(config))


def test_kv_of_shared_layers_and_a_second_tied_head_are_tolerated(made: Callable[[str], Path], tmp_path: Path) -> None:
    def add(tensors: dict[str, Tensor]) -> None:
        for w in ("k_proj", "v_proj", "k_norm"):
            tensors[f"model.layers.5.self_attn.{w}.weight"] = torch.ones(4, 4)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    load_target(copy(made("gemma4_e4b"), tmp_path / "more", add))
    config = ModelConfig.from_hf(hub.resolve(made("gemma4_e4b")).config)
    assert not ignored("model.layers.0.self_attn.k_proj.weight", config)  # layer 0 owns its K/V


def test_missing_left_over_and_wrongly_shaped_tensors_are_named(made: Callable[[str], Path], tmp_path: Path) -> None:
    name = "model.layers.2.mlp.up_proj.weight"
    extra = "model.layers.3.extra.weight"

    def changed(to: str, **changes: Tensor | None) -> Path:
        def change(tensors: dict[str, Tensor]) -> None:
            for key, value in changes.items():
                tensors.update({key: value}) if value is not None else tensors.pop(key)

        return copy(made("llama"), tmp_path / to, change)

    refused(changed("a", **{name: None}), f"tensor {name} is missing")
    refused(changed("b", **{extra: torch.ones(2)}), f"tensor {extra} is left over")
    refused(changed("c", **{name: torch.ones(47, 32)}), rf"tensor {name} has shape \[47, 32\].*\[48, 32\]")
    refused(changed("d", **{name: torch.ones(48, 32, dtype=torch.int32)}), f"{name} is stored as I32")
    refused(changed("e", **{"lm_head.weight": None}), "lm_head.weight is missing")  # not tied


def test_shards_give_the_same_weights_and_a_missing_one_is_named(tmp_path: Path) -> None:
    model = tiny.target("qwen2")
    whole = tiny.write(model, tmp_path / "whole")
    parts = tiny.write(model, tmp_path / "parts", max_shard_size="20KB")
    shards = sorted(parts.glob("model-*.safetensors"))
    assert len(shards) > 2
    _, a, _ = load_target(whole)
    _, b, _ = load_target(parts)
    assert all(torch.equal(a[k], b[k]) for k in a)
    assert fingerprint(hub.resolve(whole)) == fingerprint(hub.resolve(parts))
    shards[1].unlink()
    refused(parts, f"shard {shards[1].name} is missing")
    index = json.loads((parts / "model.safetensors.index.json").read_text())
    index["weight_map"]["model.norm.weight"] = "../../etc/passwd"
    (parts / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(parts, "not a file of this folder")


def test_damaged_files_are_refused_in_one_line(made: Callable[[str], Path], tmp_path: Path) -> None:
    folder = copy(made("llama"), tmp_path / "x")
    sound = (folder / FILE).read_bytes()
    length = int.from_bytes(sound[:8], "little")
    header = json.loads(sound[8 : 8 + length])

    def with_header(value: Any) -> bytes:
        text = json.dumps(value).encode()
        return len(text).to_bytes(8, "little") + text + sound[8 + length :]

    name = "model.norm.weight"
    for data, match in (
        (b"", "shorter than a header"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "`git lfs pull` fetches it"),
        (sound[: 8 + length // 2], "truncated"),
        (sound[:-9], "runs past the end"),
        (b"\xff" * 8 + sound[8:], "truncated"),
        (sound[:8] + b"!" + sound[9:], "not JSON"),
        (with_header([1]), "not a JSON object"),
        (with_header(header | {name: 7}), "malformed"),
        (with_header(header | {name: header[name] | {"shape": [-1]}}), "malformed"),
        (with_header(header | {name: header[name] | {"shape": [33]}}), "which is not F32"),
        (with_header(header | {name: header[name] | {"data_offsets": [5, 4]}}), "runs past"),
    ):
        (folder / FILE).write_bytes(data)
        refused(folder, match)


def test_tensors_at_odd_offsets_are_read(made: Callable[[str], Path], tmp_path: Path) -> None:
    folder = copy(made("llama"), tmp_path / "odd")
    data = (folder / FILE).read_bytes()
    length = int.from_bytes(data[:8], "little")
    (folder / FILE).write_bytes((length + 1).to_bytes(8, "little") + data[8 : 8 + length] + b" " + data[8 + length :])
    _, a, _ = load_target(folder)
    _, b, _ = load_target(made("llama"))
    assert all(torch.equal(a[k], b[k]) for k in a)


def test_slices_cover_tensors_larger_than_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny.write_target("llama", tmp_path / "m")
    _, whole, _ = load_target(folder)
    assert SLICE > 1 << 20
    monkeypatch.setattr("outrider.weights.load.SLICE", 300)  # two rows at a time
    _, pieces, _ = load_target(folder)
    assert all(torch.equal(whole[k], pieces[k]) for k in whole)


def test_drafters_load_and_a_target_is_not_one(tmp_path: Path) -> None:
    folder = tiny.write_assistant("gemma4_e2b", tmp_path / "a", clustered=True)
    config, weights = load_drafter(folder)
    assert config.clusters == tiny.CLUSTERS and weights["token_ordering"].dtype == torch.int64
    assert weights["layers.0.qkv"].shape == (config.layers[0].attn.heads * 16, 24)
    with pytest.raises(OutriderError, match="is a drafter, not a target"):
        load_target(folder)
    with pytest.raises(OutriderError, match="is not an MTP drafter"):
        load_drafter(tiny.write_target("llama", tmp_path / "t"))


def test_unknown_model_type_and_broken_config_are_refused(made: Callable[[str], Path], tmp_path: Path) -> None:
    folder = copy(made("llama"), tmp_path / "x")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "mamba"}))
    refused(folder, "unknown model_type 'mamba'")
    (folder / "config.json").write_text(json.dumps(config | {"rms_norm_eps": "much", "layer_types": 7}))
    refused(folder, "configuration makes no sense")
    (folder / "config.json").write_text(json.dumps(config | {"bos_token_id": {}}))
    refused(folder, "a token id should be a number")
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1 << 70}))
    refused(folder, "'num_hidden_layers' should be at most 10000")
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 0}))
    refused(folder, "'vocab_size' should be at least 1")
    (folder / "config.json").write_text(json.dumps(config | {"bos_token_id": [5, 6]}))
    assert load_target(folder)[0].bos_id == 5
    (folder / "chat_template.jinja").write_bytes(b"\xff")
    refused(folder, "chat_template.jinja is not UTF-8")
    (folder / "config.json").write_text("{")
    refused(folder, "config.json is not valid JSON")
    (folder / "config.json").unlink()
    refused(folder, "has no config.json")


class QuantizingOps(ReferenceOps):
    capabilities = Capabilities(quantizes=("int8",), quantizes_tables=True)

    def __init__(self) -> None:
        self.seen: list[tuple[int, ...]] = []

    def quantize(self, dense: Tensor, scheme: str) -> Any:
        self.seen.append(tuple(dense.shape))
        return scheme, dense.shape


def test_quantize_goes_through_the_ops_and_needs_ops_that_can(made: Callable[[str], Path]) -> None:
    ops = QuantizingOps()
    _, weights, _ = load_target(made("smollm2"), ops=ops, quantize="int8")
    assert weights["layers.0.down"] == ("int8", (48, 48)) and weights["norm"].dtype == torch.float32
    with pytest.raises(OutriderError, match="cannot hold int4"):
        load_target(made("smollm2"), ops=ReferenceOps(), quantize="int4")


@pytest.mark.parametrize("name", tiny.TARGETS)
def test_dummy_weights_need_only_the_config_and_give_finite_logits(
    name: str, made: Callable[[str], Path], tmp_path: Path
) -> None:
    from tests.kv import build_kv

    from outrider.models.decoder import TextModel

    (tmp_path / "config.json").write_bytes((made(name) / "config.json").read_bytes())
    config, weights, _ = load_target(tmp_path, load_format="dummy", seed=4)
    again = dummy_weights(config, "cpu", torch.float32, seed=4)
    other = dummy_weights(config, "cpu", torch.float32, seed=5)
    assert torch.equal(weights["embed"], again["embed"]) and not torch.equal(weights["embed"], other["embed"])
    model = TextModel(config, weights, ReferenceOps())
    with torch.no_grad():
        logits = model.logits(model.forward(torch.arange(12), build_kv(config, 1, 12).view([(0, 12)])).hidden)
    assert logits.isfinite().all() and logits.std() > 1e-3 and len(set(logits.argmax(-1).tolist())) > 1
