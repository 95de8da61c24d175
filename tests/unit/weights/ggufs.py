"""GGUF files made with the `gguf` package from transformers' tiny models: names and layout come from its tables, not
ours."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from tests.unit.ops.test_cpu_packing import part
from torch import Tensor

BY_HAND = {
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
}  # written so by the converter


def permute(x: np.ndarray, heads: int) -> np.ndarray:
    """Permutes Llama's q and k like llama.cpp's converter."""
    return x.reshape(heads, 2, x.shape[0] // heads // 2, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)


def write(
    path: Path,
    arch: str,
    config: Any,
    state: dict[str, Tensor],
    quantise: str | None = None,
    tokenizer: bool = False,
    control: Mapping[int, str] = {},
    mix: Mapping[str, str] = {},
    scalars: Mapping[str, float] = {},
) -> Path:
    """`state` under text-only names (`model.layers…`); `quantise`: the format of every matrix; `control`: more tokens
    of the tokenizer, by id; `mix`: the types of matrices that hold random blocks instead; `scalars`: more tensors, of one number."""
    kinds = {v: k for k, v in gguf.MODEL_ARCH_NAMES.items()}
    table = gguf.get_tensor_name_map(kinds[arch], config.num_hidden_layers)
    writer = gguf.GGUFWriter(path, arch)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if arch == "gemma4":
        _gemma4(writer, config)
    else:
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_head_count_kv(config.num_key_value_heads)
        if arch != "qwen2":  # the converter leaves it out there
            writer.add_key_length(config.head_dim)
        rope = config.rope_parameters
        writer.add_rope_freq_base(
            float(rope["full_attention"]["rope_theta"] if "full_attention" in rope else rope["rope_theta"])
        )
        if arch == "gemma3":
            writer.add_sliding_window(config.sliding_window)
            writer.add_sliding_window_pattern([k == "sliding_attention" for k in config.layer_types])
    if tokenizer:
        _tokenizer(writer, config.vocab_size, control)
    for name, tensor in state.items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        data = tensor.float().numpy()
        if arch == "llama" and ".q_proj." in name:
            data = permute(data, config.num_attention_heads)
        if arch == "llama" and ".k_proj." in name:
            data = permute(data, config.num_key_value_heads)
        if arch == "gemma3" and name.endswith("norm.weight"):
            data = data + 1
        parts = name.split(".")
        if ".".join(parts[3:]) in BY_HAND:
            named = f"blk.{parts[2]}.{BY_HAND['.'.join(parts[3:])]}"
        else:
            stored_name = table.get_name(name, try_suffixes=(".weight", ".bias"))
            assert stored_name is not None, name
            named = stored_name if stored_name.endswith((".weight", ".bias")) else stored_name + ".weight"
        if name in mix:
            blocks = part(mix[name], *data.shape, seed=len(named)).tensors["blocks"].numpy()
            writer.add_tensor(named, blocks, raw_dtype=gguf.GGMLQuantizationType[mix[name]])
        elif quantise is not None and data.ndim >= 2:
            kind = gguf.GGMLQuantizationType[quantise]
            writer.add_tensor(named, gguf.quants.quantize(data, kind), raw_dtype=kind)
        else:
            writer.add_tensor(named, np.ascontiguousarray(data))
    for name, value in scalars.items():
        writer.add_tensor(name, np.array([value], np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _gemma4(writer: gguf.GGUFWriter, config: Any) -> None:
    per = config.per_layer_config
    sliding, full = (config.layer_types.index(k) for k in ("sliding_attention", "full_attention"))
    writer.add_head_count_kv([p.num_key_value_heads for p in per])
    wide = config.intermediate_size
    shared = getattr(config, "num_kv_shared_layers", 0)
    first = config.num_hidden_layers - shared
    double = 2 if getattr(config, "use_double_wide_mlp", False) else 1
    writer.add_feed_forward_length([wide * (double if i >= first else 1) for i in range(config.num_hidden_layers)])
    writer.add_key_length(per[full].head_dim)
    writer.add_uint32("gemma4.attention.key_length_swa", per[sliding].head_dim)
    writer.add_sliding_window(config.sliding_window)
    writer.add_sliding_window_pattern([k == "sliding_attention" for k in config.layer_types])
    writer.add_uint32("gemma4.attention.shared_kv_layers", shared)
    writer.add_uint32("gemma4.embedding_length_per_layer_input", getattr(config, "hidden_size_per_layer_input", 0))
    writer.add_final_logit_softcapping(config.final_logit_softcapping)
    writer.add_rope_freq_base(1e6)
    writer.add_float32("gemma4.rope.freq_base_swa", 1e4)
    if getattr(config, "enable_moe_block", False):
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.top_k_experts)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)


def _tokenizer(writer: gguf.GGUFWriter, vocab: int, control: Mapping[int, str]) -> None:
    from tokenizers import pre_tokenizers

    tokens = [
        "<pad>",
        "<eos>",
        "<bos>",
        "<|im_start|>",
        "<|im_end|>",
        *sorted(pre_tokenizers.ByteLevel.alphabet()),
        "Ġt",
        "he",
        "Ġthe",
    ]
    tokens += [f"[PAD{i}]" for i in range(len(tokens), vocab)]
    kinds = [3] * 5 + [1] * 259 + [5] * (vocab - 264)
    for i, token in control.items():
        tokens[i] = token
        kinds[i] = 3
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(["Ġ t", "h e", "Ġt he"])
    writer.add_bos_token_id(2)
    writer.add_eos_token_id(1)
    writer.add_chat_template("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}")
