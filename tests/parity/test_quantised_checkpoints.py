"""Quantised checkpoints of every container against the values that they stand for, and against transformers with those
values."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests import quantised, tiny
from tests.kv import build_kv
from torch.func import functional_call
from transformers import PreTrainedModel

from outrider.models.decoder import TextModel
from outrider.models.names import normalise, tensor_plan
from outrider.ops.reference import ReferenceOps, as_tensor
from outrider.types import OutriderError
from outrider.weights.load import load_target

SIZES = {
    "llama": dict(hidden_size=128, intermediate_size=128, head_dim=32, num_hidden_layers=2),
    "gemma4_31b": dict(hidden_size=128, intermediate_size=128, head_dim=32),
    "gemma4_e2b": dict(hidden_size=128, intermediate_size=128, head_dim=32, hidden_size_per_layer_input=32),
}
CASES = [(name, scheme) for name in ("llama", "gemma4_31b") for scheme in quantised.SCHEMES]
CASES += [("gemma4_e2b", scheme) for scheme in ("ct-fp8-channel", "ct-nvfp4", "awq")]


@cache
def target(name: str) -> PreTrainedModel:
    return tiny.target(name, **SIZES[name])


def made(name: str, folder: Path) -> Path:
    return tiny.write(tiny.target(name, **SIZES[name]), folder, tokenizer=False)


@pytest.mark.parametrize("name,scheme", CASES)
def test_every_scheme_means_what_its_container_says(name: str, scheme: str, tmp_path: Path) -> None:
    """A nibble, a zero, a scale or a column out of place; a fused tensor joined in the wrong order; a matrix under
    another's name. Weights are the values meant, and logits those of transformers with these values."""
    model = target(name)
    folder = tiny.write(model, tmp_path, tokenizer=False)
    meant = quantised.rewrite(
        folder, scheme, dense=lambda n: "per_layer_" in n and scheme != "awq"
    )  # rows of 32 are no groups of 128
    config, weights, _ = load_target(folder)
    by_name = {normalise(key): values for key, values in meant.items()}
    for key, plan in tensor_plan(config).items():
        values = torch.cat([by_name[source].float() for source in plan.sources])
        torch.testing.assert_close(as_tensor(weights[key]), values, rtol=1e-6, atol=1e-9, msg=key)
    ours = TextModel(config, weights, ReferenceOps())
    ids = torch.arange(7, 31)
    hidden = ours.forward(ids, build_kv(config, 1, len(ids)).view([(0, len(ids))])).hidden
    assert isinstance(hidden, torch.Tensor)
    want = functional_call(model, meant, (ids[None],)).logits[0]
    torch.testing.assert_close(ours.logits(hidden), want, rtol=2e-3, atol=2e-3)


def edit(folder: Path, change: object) -> None:
    state = load_file(folder / "model.safetensors")
    change(state)  # type: ignore[operator]
    save_file(state, folder / "model.safetensors")


Q = "model.layers.0.self_attn.q_proj"
BROKEN = {
    "no scale": (lambda s: s.pop(f"{Q}.weight_scale"), rf"{Q}.weight_scale is missing: compressed-tensors pack-quantized int4 group 32"),
    "wrong group": (
        lambda s: s.update({f"{Q}.weight_scale": s[f"{Q}.weight_scale"][:, :1].contiguous()}),
        rf"{Q} \(compressed-tensors pack-quantized int4 group 32\): its weight_scale is bfloat16 \[128, 1\], not bfloat16 \[128, 4\]",
    ),
    "short": (
        lambda s: s.update({f"{Q}.weight_packed": s[f"{Q}.weight_packed"][:9].contiguous()}),
        rf"{Q} .* its weight_packed is int32 \[9, 16\]",
    ),
    "left over": (lambda s: s.update({f"{Q}.weight_lost": torch.zeros(3)}), rf"{Q}.weight_lost is left over"),
    "gone": (lambda s: [s.pop(k) for k in list(s) if k.startswith(Q)], rf"{Q}.weight is missing from the checkpoint"),
}  # fmt: skip


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_checkpoint_is_refused_in_one_line(what: str, tmp_path: Path) -> None:
    folder = made("llama", tmp_path)
    quantised.rewrite(folder, "ct-int4-g32")
    change, line = BROKEN[what]
    edit(folder, change)
    with pytest.raises(OutriderError, match=line) as caught:
        load_target(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "settings,line",
    [
        (
            {"quant_method": "bitsandbytes"},
            "quantised by 'bitsandbytes' are not supported; known: compressed-tensors, awq",
        ),
        ({"quant_method": "gptq", "bits": 3}, r"\(gptq\): 3 bits are not supported"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "layout 'gemv'"),
        ({"quant_method": "compressed-tensors"}, "has no config_groups"),
        (
            quantised.groups("pack-quantized", [], num_bits=3, type="int", strategy="group", group_size=32),
            "pack-quantized with int3",
        ),
        (
            quantised.groups("mxfp4-pack-quantized", [], num_bits=4, type="float", strategy="group"),
            "mxfp4-pack-quantized with float4",
        ),
        ({"quant_method": "modelopt", "quant_algo": "INT3"}, "INT3 is not supported"),
        (["awq"], "quantised by 'None' are not supported"),
    ],
)
def test_an_unknown_scheme_is_refused_in_one_line(settings: object, line: str, tmp_path: Path) -> None:
    folder = made("llama", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    with pytest.raises(OutriderError, match=line):
        load_target(folder)


def test_other_bits_by_layer(tmp_path: Path) -> None:
    """A recipe with two groups: int8 for down projections by pattern, int4 for the rest; one layer left dense by
    name."""
    folder = made("llama", tmp_path / "q")
    state = load_file(folder / "model.safetensors")
    stored = {}
    meant = {}
    for name, values in state.items():
        module = name.removesuffix(".weight")
        if not quantised.linear(name, values) or module == "model.layers.1.self_attn.o_proj":
            stored[name] = meant[name] = values
            continue
        tensors, meant[name] = quantised.compressed(8 if "down_proj" in name else 4, 32, True)(values)
        stored |= {f"{module}.{suffix}": t.contiguous() for suffix, t in tensors.items()}
    save_file(stored, folder / "model.safetensors")
    settings = quantised.ct(4, 32)
    settings["config_groups"]["down"] = {
        "targets": [r"re:.*\.mlp\.down_proj$"],
        "weights": {"num_bits": 8, "type": "int", "strategy": "group", "group_size": 32},
    }  # fmt: skip
    settings["ignore"] = ["model.layers.1.self_attn.o_proj", "lm_head"]
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    _, got, _ = load_target(folder)
    torch.testing.assert_close(as_tensor(got["layers.1.down"]), meant["model.layers.1.mlp.down_proj.weight"])
    torch.testing.assert_close(as_tensor(got["layers.1.out"]), meant["model.layers.1.self_attn.o_proj.weight"])
    torch.testing.assert_close(as_tensor(got["layers.0.out"]), meant["model.layers.0.self_attn.o_proj.weight"])


def test_experts_stored_one_by_one(tmp_path: Path) -> None:
    model = tiny.target("gemma4_moe", hidden_size=32, moe_intermediate_size=32)
    folder = tiny.write(model, tmp_path, tokenizer=False)
    state = load_file(folder / "model.safetensors")
    stored = {}
    meant = {}
    for name, values in state.items():
        if ".experts.gate_up_proj" not in name and ".experts.down_proj" not in name:
            stored[name] = values
            continue
        base = name.rpartition(".")[0]
        each = []
        for e, expert in enumerate(values):
            parts = expert.chunk(2) if "gate_up" in name else (expert,)
            for part, title in zip(
                parts, ("gate_proj", "up_proj") if "gate_up" in name else ("down_proj",), strict=True
            ):
                tensors, rows = quantised.compressed(4, 32, True)(part)
                stored |= {f"{base}.{e}.{title}.{suffix}": t.contiguous() for suffix, t in tensors.items()}
                each.append(rows)
        meant[name] = torch.cat(each).view(values.shape)
    save_file(stored, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantised.ct(4, 32)}))
    _, got, _ = load_target(folder)
    assert meant
    for i in range(6):
        torch.testing.assert_close(
            as_tensor(got[f"layers.{i}.experts_gate_up"]), meant[f"model.layers.{i}.experts.gate_up_proj"]
        )
        torch.testing.assert_close(
            as_tensor(got[f"layers.{i}.experts_down"]), meant[f"model.layers.{i}.experts.down_proj"]
        )
    pytest.importorskip("triton")
    from outrider.ops.triton import TritonOps
    from outrider.ops.triton.quant_moe import QuantExperts

    _, weights, _ = load_target(folder, ops=TritonOps("cpu", pdl=False))
    for name in ("layers.0.experts_gate_up", "layers.5.experts_down"):
        assert isinstance(weights[name], QuantExperts) and weights[name].shape == as_tensor(got[name]).shape


def test_the_compressed_tensors_package_packs_the_same_words() -> None:
    helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    torch.manual_seed(1)
    q = torch.randint(-8, 8, (24, 64), dtype=torch.int8)
    assert torch.equal(helpers.pack_to_int32(q, 4), quantised.words(q.int() + 8, 4))
    zero = torch.randint(-8, 8, (20, 2), dtype=torch.int8)
    assert torch.equal(helpers.pack_to_int32(zero, 4, packed_dim=0), quantised.words((zero.int() + 8).t(), 4).t())


@pytest.mark.parametrize("scheme", ["ct-int4-g32", "awq", "ct-int8-g32"])
def test_the_cpu_kernels_hold_grouped_integers_as_they_are(scheme: str, tmp_path: Path) -> None:
    from outrider.ops.cpu.ops import CpuOps
    from outrider.ops.cpu.packing import PackedWeight

    folder = made("llama", tmp_path)
    quantised.rewrite(folder, scheme)
    ops = CpuOps(1)
    _, weights, _ = load_target(folder, ops=ops)
    _, dense, _ = load_target(folder)
    for key in ("layers.0.qkv", "layers.1.gate_up", "layers.1.down"):
        weight = weights[key]
        meant = as_tensor(dense[key])
        assert isinstance(weight, PackedWeight)
        torch.testing.assert_close(ops.unpack(weight), meant, rtol=2e-3, atol=2e-3)
