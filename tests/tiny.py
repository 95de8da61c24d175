"""Tiny random checkpoints of every kind, written by transformers: what the parity, engine and end-to-end tests run on.

Every weight is distinct and random, norms and layer scalars too: a swapped or forgotten tensor shows. The sliding
window is 8, so short tests pass it. The tokenizer is byte-level: any text can be encoded with 288 tokens.

    target = tiny.target("gemma4_e2b")            # a transformers model
    folder = tiny.write(target, tmp_path / "t")   # config.json, model.safetensors, tokenizer files
    helper = tiny.assistant("gemma4_e2b", clustered=True)
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel

VOCAB = 288
HIDDEN = 32
WINDOW = 8
CONTEXT = 512
CLUSTERS = 16
CLUSTER_TOP = 4
PAD, EOS, BOS, UNK, START, END = range(6)
SPECIAL = ("<pad>", "<eos>", "<bos>", "<unk>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

LLAMAS = ("llama", "llama3", "smollm2", "mistral", "qwen2", "qwen3")
GEMMA4S = ("gemma4_31b", "gemma4_e2b", "gemma4_e4b", "gemma4_moe", "gemma4_12b")
MULTIMODAL = ("gemma3_4b", "gemma4_e2b", "gemma4_12b")  # files with vision and audio tensors beside the text tower
TARGETS = (*LLAMAS, "gemma3", "gemma3_4b", *GEMMA4S)

_COMMON = dict(
    vocab_size=VOCAB, hidden_size=HIDDEN, max_position_embeddings=CONTEXT, pad_token_id=PAD, eos_token_id=EOS,
    bos_token_id=BOS,
)  # fmt: skip
_LLAMA = _COMMON | dict(num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, intermediate_size=48)
_S = "sliding_attention"
_F = "full_attention"
_GEMMA = _COMMON | dict(
    num_attention_heads=4, num_key_value_heads=2, intermediate_size=48, head_dim=16, sliding_window=WINDOW
)
_GEMMA4 = _GEMMA | dict(
    global_head_dim=32, layer_types=[_S, _S, _F] * 2, num_hidden_layers=6, final_logit_softcapping=30.0,
    hidden_size_per_layer_input=0,
    vocab_size_per_layer_input=VOCAB,
)  # fmt: skip
_K_EQ_V = _GEMMA4 | dict(attention_k_eq_v=True, num_global_key_value_heads=1)
_EDGE = _GEMMA4 | dict(hidden_size_per_layer_input=8, num_key_value_heads=1)


def _config(name: str) -> Any:
    t = transformers
    if name == "llama":
        return t.LlamaConfig(**_LLAMA)
    if name == "llama3":  # stretched rotary frequencies, every bias
        rope = dict(
            rope_type="llama3",
            rope_theta=5e5,
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=64,
        )
        return t.LlamaConfig(**_LLAMA, rope_parameters=rope, attention_bias=True, mlp_bias=True)
    if name == "smollm2":
        return t.LlamaConfig(
            **_LLAMA | dict(hidden_size=48, num_attention_heads=6, num_key_value_heads=3), tie_word_embeddings=True
        )
    if name == "mistral":
        return t.MistralConfig(**_LLAMA, sliding_window=WINDOW)
    if name == "qwen2":
        return t.Qwen2Config(**_LLAMA, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1)
    if name == "qwen3":
        return t.Qwen3Config(**_LLAMA, head_dim=16)
    if name.startswith("gemma3"):
        text = t.Gemma3TextConfig(
            **_GEMMA, layer_types=[_S, _S, _F, _S, _S, _F], num_hidden_layers=6, query_pre_attn_scalar=24
        )
        if name == "gemma3":
            return text
        text.rope_parameters["full_attention"] |= {"rope_type": "linear", "factor": 8.0}
        vision = dict(
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            image_size=28,
            patch_size=14,
        )
        return t.Gemma3Config(text_config=text.to_dict(), vision_config=vision, mm_tokens_per_image=4)
    if name == "gemma4_31b":
        return t.Gemma4TextConfig(**_K_EQ_V)
    if name == "gemma4_e2b":
        text = t.Gemma4TextConfig(**_EDGE, num_kv_shared_layers=3, use_double_wide_mlp=True)
        vision = dict(
            hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
            head_dim=8,
            position_embedding_size=16,
        )  # fmt: skip
        audio = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, output_proj_dims=16)
        return t.Gemma4Config(text_config=text.to_dict(), vision_config=vision, audio_config=audio)
    if name == "gemma4_e4b":
        return t.Gemma4TextConfig(
            **_EDGE | dict(num_key_value_heads=2, num_kv_shared_layers=2, layer_types=[_S, _F, _S, _F, _S, _F])
        )
    if name == "gemma4_moe":
        return t.Gemma4TextConfig(
            **_K_EQ_V, enable_moe_block=True, num_experts=8, top_k_experts=2, moe_intermediate_size=24
        )
    if name == "gemma4_12b":
        text = t.Gemma4UnifiedTextConfig(
            **{k: v for k, v in _K_EQ_V.items() if "per_layer" not in k} | dict(intermediate_size=40)
        )
        vision = dict(patch_size=2, pooling_kernel_size=2, mm_embed_dim=16, mm_posemb_size=8, output_proj_dims=16)
        return t.Gemma4UnifiedConfig(
            text_config=text.to_dict(), vision_config=vision, audio_config=dict(audio_embed_dim=16)
        )
    raise ValueError(f"no tiny model is called {name!r}; there are: {', '.join(TARGETS)}")


def randomise(model: nn.Module, seed: int) -> None:
    """Distinct weights for every tensor, of a size that keeps activations near one and logits apart."""
    rng = torch.Generator().manual_seed(seed)
    stored = model.state_dict()
    for name in sorted(stored):
        x = stored[name]
        if not x.is_floating_point():
            if name.endswith("token_ordering"):
                x.copy_(torch.randperm(x.numel(), generator=rng))
            continue
        noise = torch.randn(x.shape, generator=rng)
        if name.endswith("layer_scalar"):
            x.copy_(0.8 + 0.2 * noise.tanh())
        elif name.endswith("bias"):
            x.copy_(0.2 * noise)
        elif "gemma4" in type(model).__name__.lower() and name.endswith(("q_norm.weight", "k_norm.weight")):
            x.copy_(
                0.5 + 0.1 * noise
            )  # scores are not scaled by head_dim^-0.5: weights near one would magnify rounding
        elif x.dim() < 2:  # norms and scales; Gemma 3 stores them minus one
            x.copy_(0.2 * noise if "gemma3" in type(model).__name__.lower() else 1.0 + 0.2 * noise)
        elif "embed_tokens" in name or "lm_head" in name:
            x.copy_(0.5 * noise)
        else:
            x.copy_(noise * x.shape[-1] ** -0.5)


def target(name: str, seed: int = 0, **sizes: int) -> PreTrainedModel:
    """A transformers model in float32, ready to compare with. sizes: other values for fields of its text
    configuration."""
    config = _config(name)
    for field, size in sizes.items():
        setattr(config.get_text_config(), field, size)
    auto = transformers.AutoModelForImageTextToText if name in MULTIMODAL else transformers.AutoModelForCausalLM
    return _finish(auto.from_config(config, attn_implementation="eager"), seed)


def assistant(name: str, clustered: bool, seed: int = 1) -> PreTrainedModel:
    """The MTP drafter of the Gemma 4 target of that name."""
    of = _config(name)
    text = of.get_text_config()
    unified = name == "gemma4_12b"
    sliding, full = (text.per_layer_config[text.layer_types.index(kind)] for kind in (_S, _F))
    body = _GEMMA | dict(
        hidden_size=24, intermediate_size=40, num_hidden_layers=4, layer_types=[_S, _S, _S, _F], num_kv_shared_layers=4,
        num_key_value_heads=sliding.num_key_value_heads, num_global_key_value_heads=full.num_key_value_heads,
        global_head_dim=full.head_dim,
        attention_k_eq_v=text.attention_k_eq_v,
    )  # fmt: skip
    if not unified:
        body |= dict(hidden_size_per_layer_input=0, vocab_size_per_layer_input=0)
    head = dict(use_ordered_embeddings=clustered, num_centroids=CLUSTERS, centroid_intermediate_top_k=CLUSTER_TOP)
    t = transformers
    config: Any
    if unified:
        config = t.Gemma4UnifiedAssistantConfig(
            text_config=t.Gemma4UnifiedTextConfig(**body), backbone_hidden_size=HIDDEN, **head
        )
    else:
        config = t.Gemma4AssistantConfig(text_config=t.Gemma4TextConfig(**body), backbone_hidden_size=HIDDEN, **head)
    return _finish(t.AutoModelForCausalLM.from_config(config, attn_implementation="eager"), seed)


def _finish(model: Any, seed: int) -> Any:
    model = model.float().eval()
    randomise(model, seed)
    model.tie_weights()
    return model


def write(model: PreTrainedModel, folder: Path, tokenizer: bool = True, max_shard_size: str = "5GB") -> Path:
    """save_pretrained, and a tokenizer beside it."""
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    if tokenizer:
        write_tokenizer(folder)
    return folder


def write_target(name: str, folder: Path, seed: int = 0) -> Path:
    return write(target(name, seed), folder)


def write_assistant(name: str, folder: Path, clustered: bool = False, seed: int = 1) -> Path:
    return write(assistant(name, clustered, seed), folder, tokenizer=False)


def write_tokenizer(folder: Path) -> None:
    """A byte-level tokenizer: six special tokens, 256 bytes, unused ids up to the vocabulary's size."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    vocab: Mapping[str, int] = {
        token: i for i, token in enumerate((*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())))
    }  # 262 in all
    tok = Tokenizer(models.BPE(vocab=dict(vocab), merges=[], unk_token="<unk>"))
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = decoders.ByteLevel()
    tok.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    tok.save(str(folder / "tokenizer.json"))
    settings = dict(
        tokenizer_class="PreTrainedTokenizerFast", bos_token="<bos>", eos_token="<eos>", pad_token="<pad>",
        unk_token="<unk>",
        chat_template=CHAT_TEMPLATE, model_max_length=CONTEXT,
    )  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))
