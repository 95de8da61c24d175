"""Foreign configurations: what they turn into, and what is refused with one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests import tiny

from outrider.models.builtin_configs import BUILTIN_CONFIGS
from outrider.models.config import DrafterConfig, ModelConfig
from outrider.types import OutriderError


def gemma4(**changes: Any) -> dict[str, Any]:
    body: dict[str, Any] = dict(
        model_type="gemma4_text", hidden_size=32, num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=48, head_dim=16, hidden_size_per_layer_input=0,
    )  # fmt: skip
    return body | changes


def refused(raw: dict[str, Any], kind: type = ModelConfig) -> str:
    with pytest.raises(OutriderError) as caught:
        kind.from_hf(raw)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_unknown_model_type_names_the_known_ones() -> None:
    message = refused({"model_type": "mamba", "hidden_size": 8})
    assert "'mamba'" in message and "Gemma 4" in message and "Llama" in message


def test_a_config_without_model_type() -> None:
    assert "model_type" in refused({"hidden_size": 8})


def test_a_drafter_is_not_a_target_and_a_target_is_not_a_drafter() -> None:
    assert "--drafter" in refused(dict(BUILTIN_CONFIGS["google/gemma-4-E2B-it-assistant"]))
    assert "not an MTP drafter" in refused(dict(BUILTIN_CONFIGS["google/gemma-4-E2B-it"]), DrafterConfig)


@pytest.mark.parametrize(
    "changes, word",
    [
        ({"hidden_size": None}, "hidden_size"),
        ({"num_hidden_layers": "six"}, "num_hidden_layers"),
        ({"num_attention_heads": True}, "num_attention_heads"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"layer_types": ["linear_attention"] * 6}, "layer_types"),
        ({"hidden_activation": "relu"}, "relu"),
        ({"rope_parameters": {"full_attention": {"rope_type": "yarn", "rope_theta": 1e4}}}, "yarn"),
        ({"per_layer_config": {"5": {"intermediate_size": 3}}}, "intermediate_size"),
        ({"per_layer_config": ["x"]}, "per_layer_config"),
        ({"num_key_value_heads": 3}, "multiple"),
        ({"num_kv_shared_layers": 5}, "shares K/V"),
        ({"attention_bias": True}, "attention_bias"),
        ({"use_bidirectional_attention": "all"}, "bidirectional"),
        ({"enable_moe_block": True, "num_experts": 4, "moe_intermediate_size": 8}, "top_k_experts"),
    ],
)
def test_what_gemma4_refuses(changes: dict[str, Any], word: str) -> None:
    assert word in refused(gemma4(**changes))


def test_clusters_must_divide_the_vocabulary() -> None:
    raw = dict(BUILTIN_CONFIGS["google/gemma-4-E2B-it-assistant"], num_centroids=1000)
    assert "num_centroids" in refused(raw, DrafterConfig)


def test_both_spellings_of_the_full_layers_shape_agree() -> None:
    old = ModelConfig.from_hf(gemma4(global_head_dim=32, num_global_key_value_heads=1, attention_k_eq_v=True))
    new = ModelConfig.from_hf(
        gemma4(per_layer_config={"5": {"head_dim": 32, "num_key_value_heads": 1}}, attention_k_eq_v=True)
    )
    assert old == new
    full = new.layers[5].attn
    assert (full.head_dim, full.kv_heads, full.k_eq_v, full.window) == (32, 1, True, None)
    assert (new.layers[0].attn.head_dim, new.layers[0].attn.kv_heads, new.layers[0].attn.k_eq_v) == (16, 2, False)


def test_global_kv_heads_count_only_with_k_eq_v() -> None:
    assert ModelConfig.from_hf(gemma4(num_global_key_value_heads=1)).layers[5].attn.kv_heads == 2


def test_shared_layers_read_the_last_owner_of_their_kind() -> None:
    kinds = ["sliding_attention", "sliding_attention", "full_attention"] * 2
    config = ModelConfig.from_hf(gemma4(layer_types=kinds, num_kv_shared_layers=3, use_double_wide_mlp=True))
    assert [layer.attn.kv_layer for layer in config.layers] == [0, 1, 2, 1, 1, 2]
    assert [layer.attn.writes for layer in config.layers] == [True] * 3 + [False] * 3
    assert [layer.intermediate for layer in config.layers] == [48] * 3 + [96] * 3
    assert config.kv_layers == (0, 1, 2) and (config.donor("sliding"), config.donor("full")) == (1, 2)


def test_the_outer_config_decides_about_stop_tokens_and_the_head() -> None:
    raw = {
        "model_type": "gemma4",
        "text_config": gemma4(eos_token_id=1),
        "eos_token_id": [1, 106],
        "tie_word_embeddings": False,
    }
    config = ModelConfig.from_hf(raw)
    assert config.eos_ids == (1, 106) and not config.tied


def test_sliding_windows_of_the_llama_family() -> None:
    body = dict(hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=48, vocab_size=96)
    assert [
        x.attn.window for x in ModelConfig.from_hf({"model_type": "mistral", "sliding_window": 8, **body}).layers
    ] == [8, 8, 8]
    assert [
        x.attn.window for x in ModelConfig.from_hf({"model_type": "mistral", "sliding_window": None, **body}).layers
    ] == [None] * 3
    qwen = {"model_type": "qwen2", "sliding_window": 8, "max_window_layers": 2, **body}
    assert [x.attn.window for x in ModelConfig.from_hf(qwen).layers] == [None] * 3
    assert [x.attn.window for x in ModelConfig.from_hf(qwen | {"use_sliding_window": True}).layers] == [None, None, 8]


@pytest.mark.parametrize("name", tiny.TARGETS)
def test_a_saved_config_survives_the_file(name: str, tmp_path: Path) -> None:
    """A config.json written by transformers reads the same as its dict: keys that turn into strings, dropped
    defaults."""
    theirs = tiny._config(name)
    theirs.save_pretrained(tmp_path)
    assert ModelConfig.from_hf(json.loads((tmp_path / "config.json").read_text())) == ModelConfig.from_hf(
        theirs.to_dict()
    )
