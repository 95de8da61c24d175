"""Block drafters in GGUF files, named as llama.cpp names them (src/models/dflash.cpp, eagle3.cpp): the networks of the
same checkpoint in safetensors, dense and quantised; damaged files are one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tests.block_drafters import LAYOUTS, VOCAB, net, tensors
from tests.engines import tiny_model
from tests.unit.weights.ggufs import permute
from torch import Tensor

from outrider.models.block import BlockNet
from outrider.models.block_config import BlockConfig
from outrider.ops.reference import as_tensor
from outrider.spec.block import load_block
from outrider.types import OutriderError
from outrider.weights.files import from_gguf
from outrider.weights.sizes import stored_size

NAMES = {
    "fc": "fc", "hidden_norm": "enc.output_norm", "norm": "output_norm", "lm_head": "output", "d2t": "d2t",
    "embed_tokens": "token_embd",
    "markov_head.markov_w1": "markov_w1", "markov_head.markov_w2": "markov_w2", "confidence_head.proj": "conf_proj",
}  # fmt: skip
PARTS = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "hidden_norm": "attn_norm_2",
}  # fmt: skip


def named(name: str) -> str:
    stem, dot, tail = name.rpartition(".") if name != "d2t" else (name, "", "")
    if stem.startswith("layers."):
        _, i, part = stem.split(".", 2)
        return f"blk.{i}.{PARTS[part]}.{tail}"
    return NAMES[stem] + dot + tail


def write(path: Path, layout: str, state: dict[str, Tensor], quantise: str | None = None, **change: Any) -> Path:
    """Writes a file like llama.cpp's converter; change: metadata to add, or to leave out (None)."""
    raw = LAYOUTS[layout]
    config = BlockConfig.from_hf(raw)
    arch = "eagle3" if config.kind == "eagle3" else "dflash"
    attn = config.layers[0].attn
    taps = [tap + 1 for tap in config.taps or ()]
    meta: dict[str, Any] = {
        "block_count": len(config.layers), "embedding_length": config.hidden, "vocab_size": VOCAB,
        "feed_forward_length": config.layers[0].intermediate, "attention.head_count": attn.heads,
        "attention.head_count_kv": attn.kv_heads, "attention.key_length": attn.head_dim,
        "attention.layer_norm_rms_epsilon": config.norm_eps, "rope.freq_base": 10000.0,
    }  # fmt: skip
    if arch == "eagle3":
        meta |= {"extract_layers": taps, "target_hidden_size": config.target_hidden}
        meta |= {"norm_before_residual": config.norm_before_residual}
    else:
        meta |= {"target_layers": taps, "block_size": config.block}
        windows = [layer.attn.window for layer in config.layers]
        if any(windows):
            meta |= {"attention.sliding_window": max(w or 0 for w in windows)}
            meta |= {"attention.sliding_window_pattern": [w is not None for w in windows]}
    writer = gguf.GGUFWriter(path, arch)
    if arch == "dflash":
        writer.add_mask_token_id(config.mask_id)
    for key, value in {**meta, **change}.items():
        if value is None:
            continue
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, list: writer.add_array}
        add[type(value)](f"{arch}.{key}", value)
    for name, value in state.items():
        data = value.numpy() if name == "d2t" else value.float().numpy()
        if name == "d2t":  # absolute ids there
            data = data + np.arange(len(data))
        if arch == "eagle3" and name.endswith(("q_proj.weight", "k_proj.weight")):
            data = permute(data, attn.heads if "q_proj" in name else attn.kv_heads)
        if quantise is not None and data.ndim == 2 and "markov" not in name and "conf" not in name:
            kind = gguf.GGMLQuantizationType[quantise]
            writer.add_tensor(named(name), gguf.quants.quantize(data, kind), raw_dtype=kind)
        else:
            writer.add_tensor(named(name), np.ascontiguousarray(data))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def load(path: Path, target: Any) -> BlockNet:
    return load_block(from_gguf(path, "tiny"), target, torch.float32)


@pytest.mark.parametrize("layout", ["z-lab", "modelopt-dspark", "eagle3"])
def test_the_network_of_the_same_checkpoint(tmp_path: Path, layout: str) -> None:
    target = tiny_model("llama")
    state = tensors(LAYOUTS[layout])
    extra = {"sample_from_anchor": True} if "dspark" in layout else {}
    want = net(tmp_path / "folder", LAYOUTS[layout], state, target)
    got = load(write(tmp_path / "d.gguf", layout, state, **extra), target)
    for field in ("kind", "taps", "block", "mask_id", "causal", "from_anchor", "draft_vocab", "norm_before_residual"):
        assert getattr(got.config, field) == getattr(want.config, field), field
    said = [[(x.rope, x.attn.window, x.attn.heads, x.attn.kv_heads) for x in n.config.layers] for n in (got, want)]
    assert said[0] == said[1] and got.weights.keys() == want.weights.keys()
    for name, weight in want.weights.items():
        torch.testing.assert_close(as_tensor(got.weights[name]), as_tensor(weight), rtol=0, atol=0)


def test_a_draft_reads_one_row_of_an_embedding_of_its_own(tmp_path: Path) -> None:
    state = tensors(LAYOUTS["z-lab"])
    raw = LAYOUTS["z-lab"]
    table = torch.ones(VOCAB, raw["hidden_size"])
    sizes = []
    for name, stored in (("without", state), ("with", {**state, "embed_tokens.weight": table})):
        files = from_gguf(write(tmp_path / f"{name}.gguf", "z-lab", stored), "tiny")
        sizes.append(stored_size(files, BlockConfig.from_hf(files.config)))
    assert sizes[1].total - sizes[0].total == 4 * table.numel()
    assert sizes[1].token - sizes[0].token == 4 * raw["hidden_size"]


@pytest.mark.parametrize("quantise", ["Q8_0", "Q4_1"])
def test_quantised_files(tmp_path: Path, quantise: str) -> None:
    """Rows of 32 columns are whole blocks; what has none stays dense."""
    target = tiny_model("llama")
    state = tensors(LAYOUTS["eagle3"])
    state = {k: v for k, v in state.items() if not k.endswith("down_proj.weight")} | {
        "layers.0.mlp.down_proj.weight": torch.randn(32, 64, generator=torch.Generator().manual_seed(1)),
        "layers.0.mlp.gate_proj.weight": torch.randn(64, 32, generator=torch.Generator().manual_seed(2)),
        "layers.0.mlp.up_proj.weight": torch.randn(64, 32, generator=torch.Generator().manual_seed(3)),
    }
    path = write(tmp_path / "d.gguf", "eagle3", state, quantise, feed_forward_length=64)
    got = as_tensor(load(path, target).weights["layers.0.down"])
    assert 0 < float((got - state["layers.0.mlp.down_proj.weight"]).abs().max()) < 0.3


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"target_layers": None}, "target layers"),
        ({"vocab_size": None}, "vocabulary"),
        ({"block_size": None}, "dflash.block_size"),
        ({"target_layers": [1, 9]}, "the target has 2 layers"),
        ({"embedding_length": 64}, "hidden size of 64"),
        ({"feed_forward_length": 64}, "has shape"),
    ],
)
def test_damaged_files_are_one_line(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    path = write(tmp_path / "d.gguf", "z-lab", tensors(LAYOUTS["z-lab"]), **change)
    with pytest.raises(OutriderError, match=said) as caught:
        load(path, tiny_model("llama"))
    assert "\n" not in str(caught.value)


def test_dflash2_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "d.gguf"
    writer = gguf.GGUFWriter(path, "dflash")
    for key, value in (("block_count", 1), ("attention.head_count", 1), ("embedding_length", 32), ("vocab_size", 64)):
        writer.add_uint32(f"dflash.{key}", value)
    writer.add_uint32("dflash.feed_forward_length", 32)
    writer.add_float32("dflash.attention.layer_norm_rms_epsilon", 1e-6)
    writer.add_array("dflash.target_layers", [1])
    writer.add_tensor("selector_hidden.weight", np.zeros((4, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(OutriderError, match="DFlash 2 drafters are read from safetensors"):
        from_gguf(path, "tiny")
