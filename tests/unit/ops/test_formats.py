"""The seam of formats: cutting, joining, bytes; and a toy format added by one file and one row."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests import tiny
from tests.unit.ops.ternary import Ternary, ternary
from tests.unit.ops.test_cpu_packing import part

from outrider.engine.engine import Engine  # noqa: F401  the engine must not need to know of a format
from outrider.ops.formats import (
    BLOCKS,
    DenseFormat,
    Float8Format,
    GGUFBlockFormat,
    IntegerFormat,
    NvFp4Format,
    Weight,
    dense,
    join,
    stack,
)
from outrider.ops.formats.blocks import blocks_of
from outrider.ops.reference import ReferenceOps
from outrider.types import OutriderError
from outrider.weights.load import load_target
from outrider.weights.quant_scheme import METHODS

torch.manual_seed(0)
SAMPLES = {
    "dense": dense(torch.randn(6, 512)),
    "ternary": Ternary().quantise(torch.randn(6, 520)),
    "int4 g32": IntegerFormat(4, 32).quantise(torch.randn(6, 512)),
    "int8 channel": IntegerFormat(8, 0).quantise(torch.randn(6, 512)),
    "fp8 g128": Float8Format(128).quantise(torch.randn(6, 512)),
    "nvfp4": NvFp4Format().quantise(torch.randn(6, 512)),
    **{kind: part(kind, 6, 512) for kind in BLOCKS},
}


@pytest.mark.parametrize("name", SAMPLES)
def test_a_cut_is_the_cut_of_what_it_means(name: str) -> None:
    weight = SAMPLES[name]
    whole = weight.dense()
    assert weight.check(name) is weight and weight.format.nbytes(weight.shape) == weight.nbytes
    alignment = max(weight.format.alignment(), 5 if name == "ternary" else 1)
    lo = alignment
    hi = weight.shape[1] // alignment * alignment
    assert torch.equal(weight.rows(2, 5).check(name).dense(), whole[2:5])
    assert torch.equal(weight.columns(lo, hi).check(name).dense(), whole[:, lo:hi])
    back = join([weight.rows(0, 2), weight.rows(2, 6)])
    assert back is not None and torch.equal(back.dense(), whole)
    assert torch.equal(stack([weight, weight]).check(name).dense(), torch.stack([whole, whole]))
    if alignment > 1:
        with pytest.raises(OutriderError, match=f"only at multiples of {alignment}"):
            weight.columns(1, hi)


def test_unlike_parts_are_not_joined() -> None:
    assert join([SAMPLES["Q4_0"], SAMPLES["Q4_1"]]) is None
    assert join([SAMPLES["dense"], dense(torch.zeros(2, 512, dtype=torch.bfloat16))]) is None


def test_a_weight_that_lacks_a_tensor_is_refused_by_name() -> None:
    with pytest.raises(OutriderError, match=r"q_proj: its scale is missing \(ternary\)"):
        Weight(Ternary(), (2, 10), {"trits": torch.zeros(2, 2, dtype=torch.uint8)}).check("q_proj")
    with pytest.raises(OutriderError, match=r"its values has shape \[2, 3\], float32 asks for \[2, 4\]"):
        Weight(DenseFormat(torch.float32), (2, 4), {"values": torch.zeros(2, 3)}).check("q_proj")


def test_a_new_format_is_one_file_and_one_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A ternary Llama on disk, read through its row of the table, equals the model of the dequantised weights."""
    monkeypatch.setitem(METHODS, "ternary", ternary)
    folder = tiny.write(tiny.target("smollm2", intermediate_size=60, hidden_size=60, head_dim=10), tmp_path / "m")
    state = load_file(folder / "model.safetensors")
    left_out = "model.layers.1.mlp.down_proj"
    stored = {}
    meant = {}
    for name, values in state.items():
        module = name.removesuffix(".weight")
        if ".layers." in name and values.dim() == 2 and module != left_out:
            weight = Ternary().quantise(values)
            stored[f"{module}.trits"], stored[f"{module}.scale"] = weight.tensors["trits"], weight.tensors["scale"]
            meant[name] = weight.dense()
        else:
            stored[name] = meant[name] = values
    config = json.loads((folder / "config.json").read_text())
    save_file(meant, folder / "model.safetensors")
    _, want, _ = load_target(folder)
    save_file(stored, folder / "model.safetensors")
    (folder / "config.json").write_text(
        json.dumps(config | {"quantization_config": {"quant_method": "ternary", "ignore": [left_out]}})
    )
    _, got, _ = load_target(folder, ops=ReferenceOps())
    assert got.keys() == want.keys() and all(torch.equal(got[name], want[name]) for name in want)
    _, dummy, _ = load_target(folder, load_format="dummy")
    assert dummy.keys() == want.keys()
    del stored["model.layers.0.mlp.up_proj.scale"]
    save_file(stored, folder / "model.safetensors")
    with pytest.raises(OutriderError, match=r"model.layers.0.mlp.up_proj.scale is missing: ternary needs it"):
        load_target(folder)
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "quinary"}}))
    with pytest.raises(OutriderError, match="weights quantised by 'quinary' are not supported"):
        load_target(folder)


@pytest.mark.parametrize("bits,group,has_zero_point", [(4, 32, False), (4, 64, True), (4, 0, False), (8, 128, False)])
def test_grouped_integers_are_blocks_for_the_cpu(bits: int, group: int, has_zero_point: bool) -> None:
    quantised = IntegerFormat(bits, group).quantise(torch.randn(6, 256, generator=torch.Generator().manual_seed(4)))
    if has_zero_point:
        zero = torch.randint(0, 16, quantised.tensors["scale"].shape).to(torch.uint8)
        quantised = Weight(IntegerFormat(bits, group, True), quantised.shape, {**quantised.tensors, "zero": zero})
    blocks = blocks_of(quantised)
    assert blocks is not None and blocks.check("w").format == GGUFBlockFormat(
        "Q4_1" if has_zero_point else "Q4_0" if bits == 4 else "Q8_0"
    )
    torch.testing.assert_close(
        blocks.dense(), quantised.dense(), rtol=2e-3 if has_zero_point else 0, atol=2e-3 if has_zero_point else 0
    )


def test_what_has_no_block_form_stays() -> None:
    assert blocks_of(NvFp4Format().quantise(torch.randn(4, 64))) is None
    assert blocks_of(IntegerFormat(4, 16).quantise(torch.randn(4, 64))) is None
    tiny_scale = IntegerFormat(4, 32).quantise(torch.randn(4, 64) * 1e-7)
    assert blocks_of(tiny_scale) is None
