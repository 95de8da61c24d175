"""Loading GGUF files of every format: what stays in its bits, what stays in the file, drafters; and that the tests'
own files are sound."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf as reference
import pytest
import torch
from tests.dummy_checkpoint import FORMATS, nbytes, tensors, write_folder, write_gguf
from tests.kv import build_kv

from outrider.models.builtin_configs import BUILTIN_CONFIGS
from outrider.models.config import DrafterConfig, ModelConfig
from outrider.models.decoder import TextModel
from outrider.ops.cpu.forward import CompiledModel
from outrider.ops.cpu.lib import PackedKind
from outrider.ops.cpu.ops import CpuOps
from outrider.ops.cpu.packing import PackedWeight
from outrider.ops.gguf_blocks import BLOCKS
from outrider.weights.gguf import read
from outrider.weights.gguf_config import ORDERING, hf_name
from outrider.weights.hub import auto_drafter
from outrider.weights.load import load_drafter, load_target

QWEN: dict[str, Any] = dict(
    model_type="qwen2", vocab_size=320, hidden_size=256, num_hidden_layers=8, num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=512, tie_word_embeddings=False, rms_norm_eps=2**-20, max_position_embeddings=512,
)  # fmt: skip
EDGE: dict[str, Any] = dict(
    model_type="gemma4_text", vocab_size=320, hidden_size=256, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64, global_head_dim=64, num_global_key_value_heads=2, intermediate_size=256, sliding_window=24,
    num_kv_shared_layers=2,
    layer_types=["sliding_attention", "full_attention"] * 2, hidden_size_per_layer_input=64,
    final_logit_softcapping=30.0,
    rms_norm_eps=2**-20,
)  # fmt: skip
MOE = EDGE | dict(
    num_kv_shared_layers=0, hidden_size_per_layer_input=0, attention_k_eq_v=True, enable_moe_block=True, num_experts=4,
    top_k_experts=2,
    moe_intermediate_size=96,
)  # fmt: skip


@pytest.mark.parametrize("fmt", ["f16", "bf16"])
def test_matrices_in_16_bits_stay_so_and_change_no_bit(tmp_path: Path, fmt: str) -> None:
    """DeviceWeight in the file's 16 bits the CPU's answers are those of float32; a table that is only looked up stays
    in the file."""
    ops = CpuOps(threads=2)
    ids = torch.arange(7) % 5
    write_gguf(tmp_path / "d.gguf", ModelConfig.from_hf(EDGE), fmt)
    config, loaded, _ = load_target(tmp_path / "d.gguf", ops=ops)
    wide = {n: ops.unpack(w) if isinstance(w, PackedWeight) else w for n, w in loaded.items()}
    assert loaded["ple_embed"].nbytes == 0 and loaded["embed"].nbytes * 2 == wide["embed"].nbytes
    assert all(loaded[n].nbytes * 2 == wide[n].nbytes for n in ("layers.0.qkv", "layers.1.down", "ple_proj"))
    answers = []
    for weights in (loaded, wide):
        model = ops.compile(TextModel(config, weights, ops))
        assert isinstance(model, CompiledModel)
        kv = build_kv(config, 1, 16, 16)
        answers.append(model.logits(model.forward(ids, kv.view([(0, 7)])).hidden))
    assert torch.equal(*answers)
    order = torch.tensor([3, 1, 2])
    assert torch.equal(ops.unpack(ops.take_rows(loaded["embed"], order)), wide["embed"][order])


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("raw", [QWEN, EDGE, MOE], ids=["qwen2", "edge", "moe"])
def test_gguf_files_are_sound(tmp_path: Path, raw: dict[str, Any], fmt: str) -> None:
    config = ModelConfig.from_hf(raw)
    path = tmp_path / "d.gguf"
    write_gguf(path, config, fmt)
    assert len(reference.GGUFReader(path).tensors) == len(tensors(config, fmt)) + (
        raw is not QWEN
    )  # Gemma 4: and rope_freqs
    loaded, weights, text = load_target(path, "cpu", torch.float32)
    assert loaded.layers == config.layers and loaded.moe == config.moe and text.build is not None
    for tensor in weights.values():
        assert torch.isfinite(tensor).all() and tensor.float().abs().mean() < 2
    matrix = weights["layers.0.down"]
    assert abs(float(matrix.mean())) < 0.003 and 0.015 < float(matrix.std()) < 0.025


@pytest.mark.parametrize("kind", BLOCKS)
def test_a_file_is_written_in_any_type(tmp_path: Path, kind: str) -> None:
    config = ModelConfig.from_hf(QWEN | dict(hidden_size=256, intermediate_size=256, num_hidden_layers=1))
    path = tmp_path / "d.gguf"
    write_gguf(path, config, kind)
    assert read(path).tensors["blk.0.ffn_down.weight"].kind == kind
    _, weights, _ = load_target(path, "cpu", torch.float32)
    matrix = weights["layers.0.down"]
    assert torch.isfinite(matrix).all() and 0.015 < float(matrix.std()) < 0.05  # NVFP4's scales cannot be smaller


def test_a_q4_k_m_is_mixed_as_llama_cpp_mixes_it() -> None:
    large = QWEN | dict(vocab_size=151936, hidden_size=1536, num_hidden_layers=28, num_attention_heads=12)
    large |= dict(intermediate_size=8960)
    stored = tensors(ModelConfig.from_hf(large), "q4_k_m")
    kinds = {t.name: t.kind for t in stored}
    assert kinds["lm_head.weight"] == "Q6_K" and kinds["model.embed_tokens.weight"] == "Q4_K"
    assert sum(k == "Q6_K" for n, k in kinds.items() if "v_proj.weight" in n) == 14  # of 28
    assert 1.05e9 < sum(map(nbytes, stored)) < 1.15e9
    small = QWEN | dict(hidden_size=896, num_attention_heads=14)  # rows that are no whole super-blocks
    kinds = {t.name: t.kind for t in tensors(ModelConfig.from_hf(small), "q4_k_m")}
    assert kinds["model.layers.0.self_attn.q_proj.weight"] == "Q5_0" and kinds["lm_head.weight"] == "Q8_0"


def test_tables_that_are_only_looked_up_stay_in_the_file(tmp_path: Path) -> None:
    """The per-layer embeddings of an edge model, and the embedding of a model with a head of its own."""
    ops = CpuOps(threads=1)
    for raw, names in ((QWEN, {"embed"}), (EDGE, {"ple_embed"})):
        path = tmp_path / "d.gguf"
        write_gguf(path, ModelConfig.from_hf(raw), "q4_k_m")
        _, weights, _ = load_target(path, "cpu", torch.float32, ops)
        assert {
            name for name, w in weights.items() if not isinstance(w, torch.Tensor) and w.c.kind == PackedKind.FILE
        } == names
        dense = load_target(path, "cpu", torch.float32)[1]
        for name, w in weights.items():
            if not isinstance(w, torch.Tensor):
                assert torch.equal(ops.unpack(w), dense[name])
        if raw is QWEN:
            assert weights["layers.0.qkv"].c.kind == PackedKind.PARTS  # q and k in 4 bits, v in 6


@pytest.mark.parametrize("fmt", ["q4_0", "q4_k_m", "q8_0"])
def test_experts_stay_in_their_bits(tmp_path: Path, fmt: str) -> None:
    path = tmp_path / "d.gguf"
    ops = CpuOps(threads=1)
    write_gguf(path, ModelConfig.from_hf(MOE), fmt)
    config, weights, _ = load_target(path, "cpu", torch.float32, ops)
    dense = load_target(path, "cpu", torch.float32)[1]
    for name in ("layers.1.experts_gate_up", "layers.1.experts_down"):
        assert isinstance(weights[name], PackedWeight) and weights[name].shape == dense[name].shape
        assert torch.equal(ops.unpack(weights[name]), dense[name])
    assert isinstance(ops.compile(TextModel(config, weights, ops)), CompiledModel)  # the whole pass in one call


def test_drafters_go_to_a_folder(tmp_path: Path) -> None:
    raw = dict(BUILTIN_CONFIGS["google/gemma-4-E2B-it-assistant"])
    raw["text_config"] = raw["text_config"] | {"vocab_size": 4096, "hidden_size": 64, "intermediate_size": 64}
    raw |= {"backbone_hidden_size": 64, "num_centroids": 64, "centroid_intermediate_top_k": 4}
    write_folder(tmp_path / "d", raw, DrafterConfig.from_hf(raw))
    config, weights = load_drafter(tmp_path / "d", "cpu", torch.float32)
    assert config.clusters == 64 and sorted(weights["token_ordering"].tolist()) == list(range(4096))


@pytest.mark.parametrize("old", [False, True], ids=["gemma4-assistant", "gemma4_assistant"])
def test_drafters_are_read_from_gguf(tmp_path: Path, old: bool) -> None:
    """Configuration and every tensor, under llama.cpp's names and those of older files; `auto` finds the file beside
    its target."""
    raw = dict(BUILTIN_CONFIGS["google/gemma-4-E2B-it-assistant"])
    raw["text_config"] = raw["text_config"] | {
        "vocab_size": 4096,
        "hidden_size": 64,
        "intermediate_size": 64,
        "rms_norm_eps": 2**-20,
    }
    raw |= {"backbone_hidden_size": 96, "num_centroids": 64, "centroid_intermediate_top_k": 32}
    config = DrafterConfig.from_hf(raw)
    path = tmp_path / "t-assistant.gguf"
    write_gguf(path, config, "q8_0")
    names = {t.name for t in reference.GGUFReader(path).tensors}
    assert {"nextn.pre_projection.weight", "masked_embd_ordering", "blk.3.layer_output_scale.weight"} <= names
    assert not any("attn_k" in n or "attn_v" in n for n in names)
    if old:
        path.write_bytes(path.read_bytes().replace(b"gemma4-assistant", b"gemma4_assistant"))
        for was, name in (
            ("mtp.pre_projection.weight", "pre_projection.weight"),
            ("mtp.token_ordering.weight", ORDERING),
        ):
            assert hf_name(was, "gemma4_assistant") == name
    drafter, weights = load_drafter(path, "cpu", torch.float32)
    assert replace(drafter, model_type=config.model_type) == config
    assert sorted(weights["token_ordering"].tolist()) == list(range(4096)) and weights["pre"].shape == (64, 192)
    assert all(torch.isfinite(w).all() for w in weights.values() if isinstance(w, torch.Tensor))
    (tmp_path / "t.gguf").touch()
    assert auto_drafter(tmp_path / "t.gguf")[0] == str(path.resolve())
