"""Loading holds the weights once: file pages are given back as they are copied."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

CODE = """
import sys, torch
from outrider.weights.load import load_target
def kilobytes(key):  # VmHWM, not ru_maxrss: that one starts at the size of the parent process
    return int(next(l for l in open("/proc/self/status") if l.startswith(key)).split()[1])
base = kilobytes("VmRSS")
config, weights, _ = load_target(sys.argv[1], dtype=getattr(torch, sys.argv[2]))
print(base, kilobytes("VmHWM"), sum(w.numel() * w.element_size() for w in weights.values()) // 1024)
"""


def measure(folder: Path, dtype: str) -> float:
    env = {**os.environ, "PYTHONPATH": "src", "OMP_NUM_THREADS": "1"}
    out = subprocess.run(
        [sys.executable, "-c", CODE, str(folder), dtype], capture_output=True, text=True, env=env, check=True
    )
    base, peak, loaded = map(int, out.stdout.split())
    assert loaded > 160_000
    return (peak - base) / loaded


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_peak_memory_of_loading_is_close_to_the_loaded_size(tmp_path: Path) -> None:
    hidden = 1024
    inter = 4096
    vocab = 40000
    layers = 3
    config = dict(
        model_type="llama", vocab_size=vocab, hidden_size=hidden, intermediate_size=inter, num_hidden_layers=layers,
        num_attention_heads=16, num_key_value_heads=4, tie_word_embeddings=True,
    )  # fmt: skip
    rng = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randint(-(2**14), 2**14, shape, generator=rng, dtype=torch.int16).view(torch.bfloat16)

    tensors = {"model.embed_tokens.weight": random(vocab, hidden), "model.norm.weight": random(hidden)}
    for i in range(layers):
        there = f"model.layers.{i}."
        for name, rows, columns in (
            ("self_attn.q_proj", 1024, hidden), ("self_attn.k_proj", 256, hidden), ("self_attn.v_proj", 256, hidden),
            ("self_attn.o_proj", hidden, 1024), ("mlp.gate_proj", inter, hidden), ("mlp.up_proj", inter, hidden),
            ("mlp.down_proj", hidden, inter),
        ):  # fmt: skip
            tensors[f"{there}{name}.weight"] = random(rows, columns)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{there}{name}.weight"] = random(hidden)
    # 40000·1024 + 3·15.2M = 86 M parameters: 173 MB in bfloat16; a second head brings the file over 200 MB
    tensors["lm_head.weight"] = random(vocab // 2, hidden)
    save_file(tensors, tmp_path / "model.safetensors")
    assert (tmp_path / "model.safetensors").stat().st_size > 200_000_000
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert measure(tmp_path, "bfloat16") < 1.15
