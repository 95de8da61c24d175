"""Checkpoints with random weights, of any size: sound files without a download.

`write_gguf` makes a file that llama.cpp can also read (if it supports the architecture), with the mix of formats its
own quantiser would choose; `write_folder` makes a Hugging Face folder in bfloat16. Weights repeat a few megabytes of
random blocks of about the usual spread, so that logits are finite.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from outrider.models.config import DrafterConfig, Foreign, ModelConfig
from outrider.models.names import Role, tensor_plan
from outrider.ops.formats import BLOCKS, GGUFBlockFormat, Weight
from outrider.weights.gguf import SCALARS, STRING, TENSOR_TYPES, Value
from outrider.weights.gguf_config import ARCHITECTURES, LAYER, TOP, WHOLE
from outrider.weights.mapped import ITEM_BYTES

FORMATS = ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q4_k_m", "q6_k", "bf16", "f16")
FREQS = "rope_freqs.weight"
ALIGN = 32
CHUNK = 4 << 20
SPREAD = 0.02
DRAFTER_CONTEXT = 131072
Written = Value | list[bool] | list[int]  # an entry of GGUF metadata
CODES = {name: code for code, name in TENSOR_TYPES.items()}
ARCH_OF = {model.removesuffix("_text"): arch for arch, model in ARCHITECTURES.items()} | {
    "gemma4_unified": "gemma4",
    "mistral": "llama",
}
TO_GGUF = {hf: stem for stem, hf in (*TOP.items(), *LAYER.items())}
WHOLE_TO_GGUF = {hf: name for name, hf in (*WHOLE.items(), (FREQS, FREQS))}
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)


@dataclass(frozen=True)
class Tensor:
    name: str  # Hugging Face's
    shape: tuple[int, ...]
    role: Role
    kind: str


def tensors(config: ModelConfig | DrafterConfig, fmt: str) -> list[Tensor]:
    out = []
    head = "lm_head.weight" if isinstance(config, ModelConfig) and not config.tied else "model.embed_tokens.weight"
    for plan in tensor_plan(config).values():
        for name, shape in zip(plan.sources, plan.source_shapes, strict=True):
            out.append(Tensor(name, shape, plan.role, kind_of(name, shape, plan.role, fmt, len(config.layers), head)))
    return out


def kind_of(name: str, shape: tuple[int, ...], role: Role, fmt: str, layers: int, head: str) -> str:
    """The format of one tensor, as llama.cpp's quantiser chooses it: 6 bits for the head and, in Q4_K_M, for the value
    and down projections of some layers; rows that are not whole super-blocks take the next wider format with small
    blocks."""
    if role in ("norm", "vector", "bias", "index") or "router.proj" in name:
        return {"index": "I64"}.get(role, "F32")
    if fmt in ("bf16", "f16"):
        return fmt.upper()
    kind = "Q4_K" if fmt == "q4_k_m" else fmt.upper()
    if "embed_tokens_per_layer" in name:
        kind = "Q8_0"
    elif "per_layer_model_projection" in name:
        kind = "F16"
    elif fmt != "q8_0" and name == head:
        kind = "Q6_K"
    elif fmt == "q4_k_m" and ("v_proj" in name or "down_proj" in name):
        i = int(name.split(".")[2])
        if i < layers // 8 or i >= 7 * layers // 8 or (i - layers // 8) % 3 == 2:
            kind = "Q6_K"
    size = BLOCKS[kind][0] if kind in BLOCKS else 1
    if shape[-1] % size:
        kind = {"Q4_K": "Q5_0", "Q6_K": "Q8_0"}.get(kind, "F16")
    return kind if shape[-1] % 32 == 0 else "F16"


def nbytes(t: Tensor) -> int:
    size, width = BLOCKS.get(t.kind) or (1, ITEM_BYTES[t.kind])
    return prod(t.shape) // size * width


# ---- content --------------------------------------------------------------------------------------------------------
HALVES = {  # where the float16 numbers of a block are
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    "Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,), "TQ1_0": (52,), "TQ2_0": (64,),
}  # fmt: skip
EVEN_LEVELS = {"Q4_0": 16, "Q4_1": 16, "Q5_0": 32, "Q5_1": 32, "Q8_0": 256, "Q4_K": 16, "Q5_K": 32, "Q6_K": 64}
MIN_NVFP4_SCALE = 2.0**-6  # the smallest normal number of its scales


def set_half(kind: str, blocks: np.ndarray, at: int, values: np.ndarray) -> None:
    """Writes the float16 number at byte `at` of every block, or what the format has instead."""
    words = values.astype(np.float16)[:, None].view(np.uint16)
    if kind == "MXFP4":
        blocks[:, 0] = 127 + np.log2(values).round()
    elif kind == "NVFP4":
        blocks[:, :4] = (8 * (7 + np.log2(values).clip(-7, 8).round()))[:, None]
    elif kind == "IQ1_M":
        nibbles = (words >> np.array([0, 4, 8, 12], np.uint16)) & 15
        blocks[:, 49:56:2] = blocks[:, 49:56:2] & 15 | (nibbles << 4).astype(np.uint8)
    else:
        blocks[:, at : at + 2] = words.view(np.uint8)


def scaled_blocks(kind: str, rng: np.random.Generator) -> bytes:
    """About CHUNK bytes of random blocks, whose scales are set so that the weights have about the spread SPREAD."""
    size, width = BLOCKS[kind]
    count = CHUNK // width
    b = rng.integers(0, 256, (count, width), dtype=np.uint8)

    def set_scales(scale: float) -> None:
        for at in HALVES.get(kind, (0,)):
            set_half(kind, b, at, np.full(count, scale))

    set_scales(1.0)
    sample = torch.from_numpy(b[:512].reshape(1, -1).copy())
    spread = float(Weight(GGUFBlockFormat(kind), (1, 512 * size), {"blocks": sample}).dense().std())
    set_scales(max(SPREAD / spread, MIN_NVFP4_SCALE if kind == "NVFP4" else 0.0))
    return b.tobytes()


def blocks(kind: str, rng: np.random.Generator) -> bytes:
    """About CHUNK bytes of random blocks whose weights have about the spread SPREAD."""
    if kind in ("F32", "F16", "BF16"):
        values = rng.normal(0, SPREAD, CHUNK // ITEM_BYTES[kind]).astype(np.float32)
        if kind == "BF16":
            return (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()
        return values.astype(np.float16 if kind == "F16" else np.float32).tobytes()
    if kind not in EVEN_LEVELS:
        return scaled_blocks(kind, rng)
    width = BLOCKS[kind][1]
    b = rng.integers(0, 256, (CHUNK // width, width), dtype=np.uint8)

    def half(at: int, value: float) -> None:
        b[:, at : at + 2] = np.array([value], np.float16).view(np.uint8)

    levels = EVEN_LEVELS[kind]
    step = SPREAD * 12**0.5 / levels  # of evenly spread codes
    if kind in ("Q4_K", "Q5_K"):  # every scale and minimum 32
        half(0, step / 32)
        half(2, step / 32 * (levels - 1) / 2)
        b[:, 4:12], b[:, 12:16] = 0xA0, 0
    elif kind == "Q6_K":
        half(208, step / 32)
        b[:, 192:208] = 32
    else:
        half(0, step)
        if kind in ("Q4_1", "Q5_1"):
            half(2, -step * (levels - 1) / 2)
    return b.tobytes()


class Contents:
    """Random bytes of tensors, repeated from one chunk of each kind."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.chunks: dict[str, bytes] = {}

    def of(self, t: Tensor) -> bytes:
        if t.role in ("norm", "vector", "bias", "index"):
            return self.small(t)
        if t.kind not in self.chunks:
            self.chunks[t.kind] = blocks(t.kind, self.rng)
        chunk = self.chunks[t.kind]
        size = nbytes(t)
        width = BLOCKS[t.kind][1] if t.kind in BLOCKS else ITEM_BYTES[t.kind]
        start = int(self.rng.integers(len(chunk) // width)) * width  # tensors differ
        return ((chunk[start:] + chunk[:start]) * (size // len(chunk) + 1))[:size]

    def small(self, t: Tensor) -> bytes:
        if t.role == "index":
            return self.rng.permutation(t.shape[0]).astype(np.int64).tobytes()
        if t.name == FREQS:  # a quarter of the head is rotated
            return np.where(np.arange(t.shape[0]) < t.shape[0] // 4, 1.0, 1e30).astype(np.float32).tobytes()
        middle, spread = {"norm": (1.0, 0.05), "vector": (1.0, 0.0)}.get(t.role, (0.0, 0.002))
        return self.rng.normal(middle, spread, prod(t.shape)).astype(np.float32).tobytes()


# ---- GGUF -----------------------------------------------------------------------------------------------------------
def gguf_name(name: str, arch: str) -> str:
    """The inverse of gguf_config.hf_name."""
    if name in WHOLE_TO_GGUF:
        return WHOLE_TO_GGUF[name]
    if not name.startswith("model.layers."):
        stem, _, tail = name.rpartition(".")
        return f"{TO_GGUF[stem]}.{tail}"
    _, _, index, suffix = name.split(".", 3)
    if suffix in WHOLE_TO_GGUF:
        return f"blk.{index}.{WHOLE_TO_GGUF[suffix]}"
    stem, _, tail = suffix.rpartition(".")
    norm = "pre_feedforward_layernorm" if arch.startswith("gemma") else "post_attention_layernorm"
    return f"blk.{index}.{'ffn_norm' if stem == norm else TO_GGUF[stem]}.{tail}"


def metadata(config: ModelConfig | DrafterConfig, arch: str, tokenizer: Path | None) -> dict[str, Written]:
    """Keys in the order written. An int is a u32, a float an f32, a list an array. A drafter uses its target's
    tokenizer."""
    first = config.layers[0]
    layers = config.layers
    keys: dict[str, Written] = {
        "context_length": config.max_context if isinstance(config, ModelConfig) else DRAFTER_CONTEXT,
        "embedding_length": config.hidden,
        "block_count": len(layers),
        "attention.head_count": first.attn.heads,
        "attention.layer_norm_rms_epsilon": config.norm_eps,
    }
    if arch.startswith("gemma4"):
        full, sliding = (next(l for l in layers if (l.attn.window is None) == whole) for whole in (True, False))
        keys |= {
            "attention.head_count_kv": [layer.attn.kv_heads for layer in layers],
            "feed_forward_length": [layer.intermediate for layer in layers],
            "attention.sliding_window": sliding.attn.window or 0,
            "attention.sliding_window_pattern": [layer.attn.window is not None for layer in layers],
            "attention.shared_kv_layers": sum(not layer.attn.writes for layer in layers),
        }
        for end, layer in (("", full), ("_swa", sliding)):
            sized = ("attention.key_length", "attention.value_length", "rope.dimension_count")
            keys |= {f"{key}{end}": layer.attn.head_dim for key in sized}
            keys[f"rope.freq_base{end}"] = layer.rope.theta
        if isinstance(config, DrafterConfig):
            keys |= {"embedding_length_out": config.backbone_hidden, "nextn_predict_layers": len(layers)}
        else:
            keys |= {
                "embedding_length_per_layer_input": config.ple_dim,
                "final_logit_softcapping": config.softcap or 0.0,
            }
        if isinstance(config, ModelConfig) and config.moe is not None:
            keys |= {
                "expert_count": config.moe.experts,
                "expert_used_count": config.moe.top_k,
                "expert_feed_forward_length": config.moe.intermediate,
            }
    else:
        keys |= {
            "attention.head_count_kv": first.attn.kv_heads,
            "feed_forward_length": first.intermediate,
            "rope.freq_base": first.rope.theta,
        }
        if arch != "qwen2":
            keys |= {"attention.key_length": first.attn.head_dim, "attention.value_length": first.attn.head_dim}
        if arch == "gemma3":
            window = next(layer.attn.window for layer in layers if layer.attn.window is not None)
            keys |= {
                "attention.sliding_window": window,
                "attention.sliding_window_pattern": [layer.attn.window is not None for layer in layers],
            }
    head: dict[str, Written] = {
        "general.architecture": arch,
        "general.name": "dummy weights",
        **{f"{arch}.{key}": value for key, value in keys.items()},
    }
    if isinstance(config, DrafterConfig):
        return head
    return head | tokenizer_keys(config.vocab_size, tokenizer)


def tokenizer_keys(size: int, folder: Path | None) -> dict[str, Written]:
    """A byte-level tokenizer: every text can be encoded; the rest of the vocabulary is filled up. With a folder (as
    Hugging Face's of Qwen2.5) the tokenizer and chat template in it."""
    from tokenizers import pre_tokenizers

    if folder is None:
        special = ["<pad>", "<eos>", "<bos>", "<|im_start|>", "<|im_end|>"]
        tokens = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet()), "Ġt", "he", "Ġthe"]
        kinds = dict.fromkeys(special, 3)
        merges = ["Ġ t", "h e", "Ġt he"]
        bos = 2
        eos = 1
        template = TEMPLATE
    else:
        record, report = (
            json.loads((folder / f"{name}.json").read_text()) for name in ("tokenizer", "tokenizer_config")
        )
        kinds = {token["content"]: 3 if token["special"] else 4 for token in record["added_tokens"]}
        tokens = [*record["model"]["vocab"], *kinds]
        merges = record["model"]["merges"]
        template = report["chat_template"]
        bos = eos = tokens.index(report["eos_token"])
    assert size >= len(tokens), "too small for the tokenizer"
    types = [kinds.get(token, 1) for token in tokens] + [5] * (size - len(tokens))
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": tokens + [f"[PAD{i}]" for i in range(len(tokens), size)],
        "tokenizer.ggml.token_type": np.array(types, np.int32),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": bos,
        "tokenizer.ggml.eos_token_id": eos,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": template,
    }


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _value(value: Written) -> bytes:
    """Type and value of a metadata entry."""
    kinds = {form: code for code, form in SCALARS.items()}
    if isinstance(value, bool):
        return struct.pack("<I?", kinds["<?"], value)
    if isinstance(value, int):
        return struct.pack("<II", kinds["<I"], value)
    if isinstance(value, float):
        return struct.pack("<If", kinds["<f"], value)
    if isinstance(value, str):
        return struct.pack("<I", STRING) + _string(value)
    if isinstance(value, np.ndarray):
        return struct.pack("<IIQ", 9, kinds["<i"], len(value)) + value.astype("<i4").tobytes()
    if isinstance(value[0], str):
        return struct.pack("<IIQ", 9, STRING, len(value)) + b"".join(map(_string, value))
    kind, form = (kinds["<?"], "?") if isinstance(value[0], bool) else (kinds["<I"], "I")
    return struct.pack("<IIQ", 9, kind, len(value)) + struct.pack(f"<{len(value)}{form}", *value)


def write_gguf(
    path: Path, config: ModelConfig | DrafterConfig, fmt: str, seed: int = 0, tokenizer: Path | None = None
) -> None:
    kind = config.model_type.removesuffix("_text").replace("unified_assistant", "assistant")
    arch = ARCH_OF[kind]
    arrays = tensors(config, fmt)
    contents = Contents(seed)
    if arch.startswith("gemma4"):  # llama.cpp wants the angles of full attention spelt out; our reader knows them
        full = next(layer for layer in config.layers if layer.attn.window is None)
        arrays.append(Tensor(FREQS, (full.attn.head_dim // 2,), "vector", "F32"))
    keys = metadata(config, arch, tokenizer)
    with path.open("wb") as file:
        file.write(gguf_header(keys, arrays, arch))
        for t in arrays:
            data = contents.of(t)
            if tokenizer is not None and t.name in ("lm_head.weight", "model.embed_tokens.weight"):
                data = ending(data, t, keys["tokenizer.ggml.eos_token_id"])
            file.write(data + b"\0" * (-nbytes(t) % ALIGN))


def ending(data: bytes, t: Tensor, row: object) -> bytes:
    """The head with larger weights for the token that ends an answer: random ones would never say it, now it is every
    third or fourth."""
    rows = np.frombuffer(bytearray(data), np.uint8).reshape(t.shape[0], -1, BLOCKS[t.kind][1])
    at = 208 if t.kind == "Q6_K" else 0
    scale = rows[row, :, at : at + 2].copy().view(np.float16) * np.float16(16 / (SPREAD * t.shape[1] ** 0.5))
    rows[row, :, at : at + 2] = scale.view(np.uint8)
    return rows.tobytes()


def gguf_header(keys: dict[str, Written], held: list[Tensor], arch: str) -> bytes:
    """Everything before the tensors' data, which follow in this order, each aligned to ALIGN."""
    head = b"GGUF" + struct.pack("<IQQ", 3, len(held), len(keys))
    head += b"".join(_string(k) + _value(v) for k, v in keys.items())
    at = 0
    for t in held:
        dims = struct.pack(f"<I{len(t.shape)}QIQ", len(t.shape), *t.shape[::-1], CODES[t.kind], at)
        head += _string(gguf_name(t.name, arch)) + dims
        at += -(-nbytes(t) // ALIGN) * ALIGN
    return head.ljust(-(-len(head) // ALIGN) * ALIGN, b"\0")


# ---- safetensors ----------------------------------------------------------------------------------------------------
def write_folder(path: Path, raw: Foreign, config: ModelConfig | DrafterConfig, seed: int = 0) -> None:
    """config.json and model.safetensors; a target gets a byte-level tokenizer."""
    contents = Contents(seed)
    state = {}
    for t in tensors(config, "bf16"):
        dtype = {"I64": torch.int64, "F32": torch.float32, "BF16": torch.bfloat16}[t.kind]
        values = torch.frombuffer(bytearray(contents.of(t)), dtype=dtype).view(t.shape)
        state[t.name] = values if t.kind == "I64" else values.bfloat16()
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(raw, indent=1))
    save_file(state, path / "model.safetensors")
    if isinstance(config, ModelConfig):
        from tests.tiny import write_tokenizer

        write_tokenizer(path)
