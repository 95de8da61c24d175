"""LoRA adapters against peft on tiny random checkpoints, through files and our loader, in float32.

A batch holds an adapted sequence and one of the base model: the first must have peft's logits, the second the base's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests import tiny
from tests.kv import build_kv
from tests.lora import peft_model
from torch import Tensor

from outrider.engine.adapters import weight_names
from outrider.models.decoder import TextModel
from outrider.models.names import tensor_plan
from outrider.ops.cpu.ops import CpuOps
from outrider.ops.lowrank import AdaptedOps, row_groups
from outrider.ops.reference import Backend, ReferenceOps
from outrider.weights.adapter import ADAPTABLE, load_adapter, read_adapter
from outrider.weights.load import load_target

LENGTHS = (19, 11)
IDS = [torch.randint(6, 262, (n,), generator=torch.Generator().manual_seed(n)) for n in LENGTHS]
CASES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"use_rslora": True},
    "qwen3": {"rank_pattern": {"q_proj": 2, r"layers\.1\.mlp\.up_proj": 6}},
    "gemma3": {"alpha_pattern": {"down_proj": 3, "self_attn.o_proj": 16}},
    "gemma3_4b": {},
    "gemma4_31b": {},
    "gemma4_e2b": {},
    "gemma4_moe": {"use_rslora": True, "alpha_pattern": {"k_proj": 5}},
    "gemma4_12b": {},
}


def tolerance(name: str) -> float:
    return 5e-4 if name == "gemma4_moe" else 1e-4


def logits_of(model: TextModel, adapters: list[Any]) -> list[Tensor]:
    kv = build_kv(model.config, batch=len(adapters), max_len=max(LENGTHS))
    groups = row_groups(adapters, LENGTHS, model.device)
    adapted = model.with_ops(AdaptedOps(model.ops, weight_names(model), groups))
    out = adapted.forward(torch.cat(IDS), kv.view([(0, n) for n in LENGTHS]))
    return list(adapted.logits(out.hidden).split(list(LENGTHS)))


def loaded(folder: Path, ops: Backend) -> TextModel:
    config, weights, _ = load_target(folder, ops=ops)
    return TextModel(config, weights, ops)


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_peft(name: str, tmp_path: Path) -> None:
    reference = tiny.target(name)
    model = loaded(tiny.write(reference, tmp_path / "base", tokenizer=False), ReferenceOps())
    with torch.no_grad():
        plain = reference(IDS[1][None]).logits[0]
        theirs = peft_model(reference, tmp_path / "adapter", **CASES[name])(IDS[0][None]).logits[0]
    adapter = load_adapter("a", tmp_path / "adapter", model.config, model.ops, model.dtype, model.device)
    ours, base = logits_of(model, [adapter, None])
    unadapted = logits_of(model, [None, None])[0]
    assert (ours - theirs).abs().max().item() <= tolerance(name)
    assert (base - plain).abs().max().item() <= tolerance(name)
    assert (ours - unadapted).abs().max().item() > 0.1, "the adapter changes nothing"
    every = {name for name in tensor_plan(model.config) if ADAPTABLE.fullmatch(name)}
    assert set(adapter.parts) == every, "a linear module was not adapted"


@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_a_quantised_base_gets_the_same_change(quantize: str, tmp_path: Path) -> None:
    """In every product of a quantised model the adapter adds what it adds to the dequantised one."""
    reference = tiny.target("llama", hidden_size=64, intermediate_size=96)
    ops = CpuOps(threads=1)
    folder = tiny.write(reference, tmp_path / "base", tokenizer=False)
    peft_model(reference, tmp_path / "adapter")
    config, weights, _ = load_target(folder, ops=ops, quantize=quantize)
    model = TextModel(config, weights, ops)
    adapter = load_adapter("a", tmp_path / "adapter", config, ops, model.dtype, model.device)
    updates = read_adapter(tmp_path / "adapter", config).updates
    adapted = AdaptedOps(ops, weight_names(model), row_groups([None, adapter], [1, 3], model.device))
    changed = 0
    for name, plan in tensor_plan(config).items():
        if name in adapter.parts:
            x = torch.randn((4, plan.shape[1]), generator=torch.Generator().manual_seed(changed))
            delta = torch.cat([updates[source].delta() for source in plan.sources])
            want = ops.linear(x, weights[name])
            assert torch.equal(adapted.linear(x, weights[name])[0], want[0])
            want[1:] += x[1:] @ delta.T
            assert (adapted.linear(x, weights[name]) - want).abs().max().item() <= 1e-4
            changed += len(plan.sources)
    assert changed == len(updates) == 7 * len(config.layers)


def test_modules_of_a_vision_tower_are_left_out_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An adapter of all linear modules holds the towers' too: text has peft's logits without them."""
    reference = tiny.target("gemma3_4b")
    model = loaded(tiny.write(reference, tmp_path / "base", tokenizer=False), ReferenceOps())
    adapted = peft_model(reference, tmp_path / "adapter", target_modules=r".*\.[qkv]_proj")
    with torch.no_grad():
        theirs = adapted(IDS[0][None]).logits[0]
    adapter = load_adapter("a", tmp_path / "adapter", model.config, model.ops, model.dtype, model.device)
    assert "ignored 3 modules of the vision or audio tower" in caplog.text
    assert (logits_of(model, [adapter, None])[0] - theirs).abs().max().item() <= 1e-4
