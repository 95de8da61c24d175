"""Adapter files: 40 ways to be damaged or unsupported, one line each that names what is wrong; GGUF adapters."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.engines import VARIANTS
from tests.lora import write_adapter

from outrider.models.config import ModelConfig
from outrider.types import OutriderError
from outrider.weights.adapter import LoraUpdate, read_adapter

ROOT = Path(__file__).resolve().parents[3]
LLAMA = ModelConfig.from_hf(VARIANTS["llama"])
MOE = ModelConfig.from_hf(VARIANTS["moe"])
Q0 = "base_model.model.model.layers.0.self_attn.q_proj"
Damage = Callable[[Path], object]


def setting(**changes: Any) -> Damage:
    def damage(folder: Path) -> None:
        path = folder / "adapter_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return damage


def tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Damage:
    def damage(folder: Path) -> None:
        path = folder / "adapter_model.safetensors"
        stored = load_file(path)
        change(stored)
        save_file({name: value.contiguous() for name, value in stored.items()}, path)

    return damage


def rename(old: str, new: str) -> Damage:
    return tensors(lambda t: [t.update({k.replace(old, new): t.pop(k)}) for k in list(t) if old in k])


def replaced(name: str, value: torch.Tensor) -> Damage:
    return tensors(lambda t: t.update({name: value}))


def cut(count: int) -> Damage:
    def damage(folder: Path) -> None:
        path = folder / "adapter_model.safetensors"
        path.write_bytes(path.read_bytes()[:count])

    return damage


def write(name: str, data: bytes) -> Damage:
    return lambda folder: (folder / name).write_bytes(data)


DAMAGES: dict[str, tuple[Damage, str]] = {
    "no config": (lambda f: (f / "adapter_config.json").unlink(), "has no adapter_config.json"),
    "no tensors": (lambda f: (f / "adapter_model.safetensors").unlink(), "has no adapter_model.safetensors"),
    "pickle": (
        lambda f: (f / "adapter_model.safetensors").rename(f / "adapter_model.bin"),
        "save the adapter as safetensors",
    ),
    "config no json": (write("adapter_config.json", b"{"), "is not valid JSON"),
    "config a list": (write("adapter_config.json", b"[]"), "should hold a JSON object"),
    "empty file": (cut(0), "shorter than a header"),
    "cut header": (cut(40), "past the end"),
    "cut data": (cut(-9), "past the end"),
    "garbage": (write("adapter_model.safetensors", b"garbage" * 99), "not a sound safetensors file"),
    "lfs pointer": (write("adapter_model.safetensors", b"version https://git-lfs.github.com/spec/v1\n"), "Git LFS"),
    "no peft type": (setting(peft_type=None), "peft_type 'None' is not supported"),
    "ia3": (setting(peft_type="IA3"), "peft_type 'IA3' is not supported"),
    "dora": (setting(use_dora=True), "use_dora is not supported"),
    "dora tensor": (replaced(Q0 + ".lora_magnitude_vector", torch.ones(32)), "is no LoRA matrix"),
    "lora bias": (setting(lora_bias=True), "lora_bias"),
    "bias": (setting(bias="all"), "bias 'all'"),
    "bias tensor": (replaced(Q0 + ".lora_B.bias", torch.ones(32)), "is no LoRA matrix"),
    "modules to save": (setting(modules_to_save=["lm_head"]), "modules_to_save is not supported"),
    "saved tensor": (replaced("base_model.model.lm_head.weight", torch.ones(64, 32)), "is no LoRA matrix"),
    "target parameters": (setting(target_parameters=["experts.down_proj"]), "target_parameters is not supported"),
    "fan in fan out": (setting(fan_in_fan_out=True), "fan_in_fan_out"),
    "replication": (setting(layer_replication=[[0, 2]]), "layer_replication"),
    "alora": (setting(alora_invocation_tokens=[3]), "alora_invocation_tokens"),
    "qalora": (setting(use_qalora=True), "use_qalora"),
    "pissa": (setting(init_lora_weights="pissa_niter_4"), "changed the base weights"),
    "rank text": (setting(r="four"), "r should be a positive number"),
    "rank zero": (setting(r=0), "r should be a positive number"),
    "rank of another": (setting(r=8), "lora_A.weight has rank 4, adapter_config.json says 8"),
    "rank half": (setting(r=4.5), "rank 4.5 is outside"),
    "alpha nothing": (setting(lora_alpha=None), "lora_alpha should be a positive number"),
    "pattern list": (setting(rank_pattern=[1]), "rank_pattern should be an object"),
    "pattern broken": (setting(alpha_pattern={"(": 3}), "alpha_pattern '(' is not a regular expression"),
    "pattern deep": (setting(rank_pattern={"(" * 5000 + ")" * 5000: 3}), "its settings make no sense"),
    "embedding": (replaced("base_model.model.model.embed_tokens.lora_embedding_A", torch.ones(4, 64)), "embedding"),
    "head": (rename("model.layers.0.self_attn.q_proj", "lm_head"), "adapters of lm_head are not supported"),
    "no partner": (tensors(lambda t: t.pop(Q0 + ".lora_B.weight")), "has no partner lora_B"),
    "unknown module": (rename("0.self_attn.q_proj", "0.self_attn.z_proj"), "has no module model.layers.0.self_attn.z"),
    "more layers": (rename("layers.1.", "layers.7."), "has no module model.layers.7"),
    "fewer layers": (tensors(lambda t: [t.pop(k) for k in list(t) if "layers.1." in k]), "holds nothing for model.lay"),
    "other width": (replaced(Q0 + ".lora_A.weight", torch.ones(4, 48)), "has shape [4, 48]"),
    "other height": (replaced(Q0 + ".lora_B.weight", torch.ones(48, 4)), "has shape [48, 4]"),
    "a vector": (replaced(Q0 + ".lora_A.weight", torch.ones(4)), "has shape [4]"),
    "integers": (replaced(Q0 + ".lora_A.weight", torch.ones(4, 32, dtype=torch.int32)), "is stored as I32"),
    "not finite": (replaced(Q0 + ".lora_A.weight", torch.full((4, 32), torch.nan)), "not finite"),
    "nothing": (lambda f: save_file({}, f / "adapter_model.safetensors"), "holds nothing for"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_folders(name: str, tmp_path: Path) -> None:
    folder = write_adapter(LLAMA, tmp_path / "adapter")
    assert len(read_adapter(folder, LLAMA).updates) == 14
    damage, said = DAMAGES[name]
    damage(folder)
    with pytest.raises(OutriderError) as error:
        read_adapter(folder, LLAMA)
    assert said in str(error.value) and "\n" not in str(error.value)


def test_experts_and_routers_are_refused_by_name(tmp_path: Path) -> None:
    folder = write_adapter(MOE, tmp_path / "a")
    rename("layers.0.self_attn.q_proj", "layers.0.router.proj")(folder)
    with pytest.raises(OutriderError, match=r"adapters of model\.layers\.0\.router\.proj are not supported"):
        read_adapter(folder, MOE)
    rename("layers.0.router.proj", "layers.0.experts.base_layer")(folder)
    with pytest.raises(OutriderError, match=r"adapters of model\.layers\.0\.experts\.base_layer are not supported"):
        read_adapter(folder, MOE)


def test_what_is_no_adapter(tmp_path: Path) -> None:
    (tmp_path / "file.bin").write_bytes(b"x")
    for path, said in ((tmp_path / "none", "does not exist"), (tmp_path / "file.bin", "neither a PEFT folder")):
        with pytest.raises(OutriderError, match=said):
            read_adapter(path, LLAMA)


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def write_gguf(path: Path, meta: dict[str, str | float], stored: dict[str, torch.Tensor]) -> None:
    out = b"GGUF" + struct.pack("<IQQ", 3, len(stored), len(meta))
    for key, value in meta.items():
        out += text(key)
        out += struct.pack("<I", 8) + text(value) if isinstance(value, str) else struct.pack("<If", 6, value)
    offset = 0
    for name, t in stored.items():
        out += text(name) + struct.pack("<IQQIQ", 2, t.shape[1], t.shape[0], 0, offset)
        offset += -(-t.numel() * 4 // 32) * 32
    out += b"\0" * (-len(out) % 32)
    for t in stored.values():
        out += t.float().numpy().tobytes()
        out += b"\0" * (-len(out) % 32)
    path.write_bytes(out)


META: dict[str, str | float] = {
    "general.type": "adapter",
    "adapter.type": "lora",
    "general.architecture": "llama",
    "adapter.lora.alpha": 8.0,
}


def gguf_tensors(updates: Mapping[str, LoraUpdate]) -> dict[str, torch.Tensor]:
    """Rows of q and k are permuted, as llama.cpp's converter writes them."""
    parts = {"q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output", "up_proj": "ffn_up"}
    parts |= {"gate_proj": "ffn_gate", "down_proj": "ffn_down"}
    stored = {}
    for source, update in updates.items():
        _, _, layer, _, module, _ = source.split(".")
        b = update.b
        if module in ("q_proj", "k_proj"):
            heads = 4 if module == "q_proj" else 2
            b = b.view(heads, 2, -1, b.shape[1]).swapaxes(1, 2).reshape(b.shape)
        stored[f"blk.{layer}.{parts[module]}.weight.lora_a"] = update.a
        stored[f"blk.{layer}.{parts[module]}.weight.lora_b"] = b
    return stored


def test_a_gguf_adapter_is_the_peft_one(tmp_path: Path) -> None:
    want = read_adapter(write_adapter(LLAMA, tmp_path / "a"), LLAMA).updates
    stored = gguf_tensors(want)
    write_gguf(tmp_path / "a.gguf", META, stored)
    got = read_adapter(tmp_path / "a.gguf", LLAMA)
    assert {name: (u.a.tolist(), u.b.tolist(), u.scale) for name, u in got.updates.items()} == {
        name: (u.a.tolist(), u.b.tolist(), u.scale) for name, u in want.items()
    }
    one = "blk.0.attn_v.weight.lora_"
    for meta, tensors, said in (
        ({**META, "general.architecture": "qwen3"}, stored, "made for a qwen3 model"),
        ({**META, "general.type": "model"}, stored, "is not a LoRA adapter"),
        ({**META, "adapter.lora.alpha": 0.0}, stored, "alpha should be a positive number"),
        (META, {k: v for k, v in stored.items() if k != one + "a"}, "has no partner lora_a"),
        (META, {**stored, "blk.9.attn_q.weight.lora_a": stored[one + "a"]}, "no module model.layers.9"),
        (META, {}, "changes nothing"),
    ):
        write_gguf(tmp_path / "b.gguf", meta, tensors)
        with pytest.raises(OutriderError, match=said):
            read_adapter(tmp_path / "b.gguf", LLAMA)


TRUNCATED = """
import os, sys
from tests.engines import VARIANTS
from outrider.models.config import ModelConfig
from outrider.types import OutriderError
from outrider.weights import adapter

path, file = sys.argv[1:]
find = adapter._matrix

def truncate(*args):
    os.truncate(file, 0)
    return find(*args)

adapter._matrix = truncate
try:
    adapter.read_adapter(path, ModelConfig.from_hf(VARIANTS["llama"]))
except OutriderError as error:
    print(error)
"""


@pytest.mark.parametrize("kind", ["peft", "gguf"])
def test_a_file_that_is_truncated_while_it_is_read_is_one_line(tmp_path: Path, kind: str) -> None:
    """It was mapped: a server that loads an adapter while a trainer writes it ended with SIGBUS."""
    path = write_adapter(LLAMA, tmp_path / "a")
    file = path / "adapter_model.safetensors"
    if kind == "gguf":
        path = file = tmp_path / "a.gguf"
        write_gguf(file, META, gguf_tensors(read_adapter(tmp_path / "a", LLAMA).updates))
    command = [sys.executable, "-c", TRUNCATED, str(path), str(file)]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert ended.returncode == 0, ended.stderr
    assert f"{file} became shorter while it was read" in ended.stdout
