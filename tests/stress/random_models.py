"""Models with random weights for the stress tests, so that they need nothing outside of this repository.

`MODEL` of a script may be `random` (a few layers: thousands of requests per minute), `random-135m` (the shape of
SmolLM2-135M), `random-wide` (a few layers, Qwen2.5's vocabulary and context), `random-1.5b` (Qwen2.5-1.5B-Instruct,
Q4_K_M), `random-vision` (a tiny Gemma 4 that sees) or `random-audio` (one that hears): written into the script's folder
at its start.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]
from tests.dummy_checkpoint import write_gguf  # noqa: E402

from outrider.models.config import Foreign, ModelConfig  # noqa: E402

LLAMA: Foreign = dict(
    model_type="llama", rms_norm_eps=1e-5, rope_theta=1e4, hidden_act="silu", eos_token_id=1, tie_word_embeddings=True
)
RANDOM: dict[str, tuple[Foreign, str]] = {
    "random": (
        LLAMA
        | dict(vocab_size=512, hidden_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
        | dict(intermediate_size=256, max_position_embeddings=8192),
        "q8_0",
    ),
    "random-135m": (
        LLAMA
        | dict(vocab_size=49152, hidden_size=576, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3)
        | dict(intermediate_size=1536, max_position_embeddings=8192),
        "q4_1",
    ),
    "random-wide": (
        LLAMA
        | dict(vocab_size=151936, hidden_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
        | dict(intermediate_size=256, max_position_embeddings=32768),
        "q8_0",
    ),
    "random-1.5b": (
        LLAMA
        | dict(model_type="qwen2", tie_word_embeddings=False, rms_norm_eps=1e-6, rope_theta=1e6, vocab_size=151936)
        | dict(hidden_size=1536, num_hidden_layers=28, num_attention_heads=12, num_key_value_heads=2)
        | dict(intermediate_size=8960, max_position_embeddings=32768),
        "q4_k_m",
    ),
}


def model_file(name: str, folder: Path, tokenizer: Path | None = None) -> str:
    """The MODEL for `outrider serve`. A random model's file is written if it is missing, with the tokenizer of a
    folder, if given."""
    if name == "random-vision":
        from tests import tiny_vision

        return str(tiny_vision.write("gemma4_31b", folder / name))
    if name == "random-audio":
        from tests import tiny_audio

        return str(tiny_audio.write("gemma4_e2b", folder / name, max_context=1_536))
    if name not in RANDOM:
        return name
    raw, fmt = RANDOM[name]
    file = folder / f"{name}.gguf"
    if not file.exists():
        write_gguf(file, ModelConfig.from_hf(raw), fmt, tokenizer=tokenizer)
    return str(file)
