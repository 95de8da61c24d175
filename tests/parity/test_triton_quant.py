"""Quantised products against their formats' definitions, on the GPU where there is one, else through Triton's
interpreter."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

CUDA = torch.cuda.is_available()
if not CUDA:
    os.environ["TRITON_INTERPRET"] = "1"

triton = pytest.importorskip("triton")

from tests import quantised, tiny  # noqa: E402
from tests.unit.ops.test_cpu_packing import part  # noqa: E402

from outrider.ops.backend import Epilogue  # noqa: E402
from outrider.ops.formats import Float8Format, IntegerFormat, NvFp4Format, Weight, base  # noqa: E402
from outrider.ops.reference import ReferenceOps  # noqa: E402
from outrider.ops.triton import TritonOps  # noqa: E402
from outrider.ops.triton.quant import quant_linear  # noqa: E402
from outrider.ops.triton.quant_config import QuantTile, fit  # noqa: E402
from outrider.ops.triton.repack import GGUF_CODES, Codes, Parts, QuantWeight, repack  # noqa: E402
from outrider.ops.triton.wna16_gemv import WNA16Gemv  # noqa: E402
from outrider.weights.load import load_target  # noqa: E402

DEVICE = "cuda" if CUDA else "cpu"
DTYPE = torch.bfloat16 if CUDA else torch.float32
REF = ReferenceOps()


@pytest.fixture(autouse=True)
def small_ones_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "SMALL", 0)  # matrices of a test are all so small that a GPU would keep them dense


def asymmetric(n: int, k: int, bits: int, group: int, kind: torch.dtype) -> Weight:
    quantised = IntegerFormat(bits, group, scale=kind).quantise(rand(n, k, seed=5))
    zero = torch.randint(
        1, (1 << bits) - 1, quantised.tensors["scale"].shape, generator=torch.Generator().manual_seed(2)
    ).to(torch.uint8)
    return Weight(IntegerFormat(bits, group, True, scale=kind), (n, k), {**quantised.tensors, "zero": zero})


def ordered(n: int, k: int) -> Weight:
    quantised = IntegerFormat(4, 32).quantise(rand(n, k, seed=5))
    order = torch.randperm(k, generator=torch.Generator().manual_seed(1)).int()
    return Weight(IntegerFormat(4, 32, ordered=True), (n, k), {**quantised.tensors, "order": order})


def rand(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))) * scale


WEIGHTS = {
    "int4 g32": lambda n, k: IntegerFormat(4, 32).quantise(rand(n, k, seed=1)),
    "int4 g128": lambda n, k: IntegerFormat(4, 128).quantise(rand(n, k, seed=1)),
    "int4 g16": lambda n, k: IntegerFormat(4, 16).quantise(rand(n, k, seed=1)),
    "int4 channel": lambda n, k: IntegerFormat(4, 0).quantise(rand(n, k, seed=1)),
    "int4 asymmetric": lambda n, k: asymmetric(n, k, 4, 64, torch.bfloat16),
    "int4 ordered": ordered,
    "int8 g32": lambda n, k: IntegerFormat(8, 32).quantise(rand(n, k, seed=1)),
    "int8 channel": lambda n, k: IntegerFormat(8, 0, scale=torch.float32).quantise(rand(n, k, seed=1)),
    "int8 asymmetric channel": lambda n, k: asymmetric(n, k, 8, 0, torch.float16),
    "fp8": lambda n, k: Float8Format().quantise(rand(n, k, seed=1)),
    "fp8 g128": lambda n, k: Float8Format(128).quantise(rand(n, k, seed=1)),
    "nvfp4": lambda n, k: NvFp4Format().quantise(rand(n, k, seed=1)),
    **{kind: lambda n, k, kind=kind: part(kind, n, k) for kind in GGUF_CODES},
}


def product_error(name: str) -> float:
    """Largest relative error of a product with a weight of this format."""
    if CUDA:
        return 1e-2
    rounded = name.endswith(("_K", "fp8 g128", "asymmetric")) or name.startswith(("IQ", "int8 asymmetric"))
    return 5e-4 if rounded else 1e-5  # factors or offsets are rounded to float16


def near(got: torch.Tensor, want: torch.Tensor, rel: float) -> None:
    assert got.shape == want.shape
    error = (got.double() - want.double()).norm() / want.double().norm()
    assert torch.isfinite(got.double()).all() and error <= rel, f"relative error {float(error):.2e}"


@pytest.mark.parametrize("name", WEIGHTS)
def test_product_is_its_definition(name: str) -> None:
    """A plane, a pair or a half in the wrong place; a factor of another group; an edge of rows or columns that is read
    or stored."""
    n = 72
    k = 512
    weight = WEIGHTS[name](n, k).to(DEVICE)
    dense = weight.dense()
    packed = repack(weight)
    assert packed is not None and packed.shape == (n, k)
    seen = torch.zeros(64, dtype=torch.int32, device=DEVICE)
    x = rand(3, k).to(DEVICE, DTYPE)
    limit = product_error(name)
    near(quant_linear(x, packed, seen, Epilogue(), False), REF.linear(x.float(), dense), limit)
    near(quant_linear(x, packed, seen, Epilogue(), False, QuantTile(64, 2, 2)), REF.linear(x.float(), dense), limit)
    assert int(seen.abs().sum()) == 0


def test_columns_that_fill_no_chunk() -> None:
    weight = IntegerFormat(4, 32).quantise(rand(64, 352, seed=1)).to(DEVICE)
    packed = repack(weight)
    assert packed is not None and packed.chunks == 2
    x = rand(2, 352).to(DEVICE, DTYPE)
    near(
        quant_linear(x, packed, torch.zeros(8, dtype=torch.int32, device=DEVICE), Epilogue(), False),
        REF.linear(x.float(), weight.dense()),
        1e-2,
    )


def test_gated_bias_and_multiplied() -> None:
    weight = IntegerFormat(4, 32).quantise(rand(144, 256, seed=1, scale=0.1)).to(DEVICE)
    packed = repack(weight)
    dense = weight.dense().to(DTYPE)
    assert packed is not None
    seen = torch.zeros(8, dtype=torch.int32, device=DEVICE)
    x, y, bias = (rand(*s).to(DEVICE, DTYPE) for s in ((2, 256), (2, 144), (144,)))
    near(quant_linear(x, packed, seen, Epilogue(act="silu"), False), REF.gated_linear(x, dense, "silu"), 1e-2)
    near(quant_linear(x, packed, seen, Epilogue(bias=bias), False), REF.linear(x, dense, bias), 1e-2)
    near(
        quant_linear(x, packed, seen, Epilogue(mul=y, act="gelu_tanh"), False),
        REF.linear_act_mul(x, dense, y, "gelu_tanh"),
        1e-2,
    )
    near(
        quant_linear(x, packed, seen, Epilogue(softcap=3.0, out_dtype=torch.float32), False),
        REF.logits(x, dense, 3.0),
        1e-2,
    )


@pytest.mark.parametrize("name", list(WEIGHTS) if CUDA else ["int4 g32"])
def test_rows_stand_alone(name: str) -> None:
    """A row's bits do not depend on the rows beside it: tiles of 8, 16, 32 and 64 tokens, with and without spans."""
    weight = WEIGHTS[name](64, 2048 if CUDA else 256).to(DEVICE)
    packed = repack(weight)
    assert packed is not None
    seen = torch.zeros(64, dtype=torch.int32, device=DEVICE)
    x = rand(130 if CUDA else 40, weight.shape[1]).to(DEVICE, DTYPE)
    some = [0, 1, 2, 37]  # 40 tokens are 32 and 8
    for tile, gated in ((None, False), (None, True), (QuantTile(64, 2, 2), False)):
        spans = tile and fit(tile, 40, packed, 226 << 10)
        extras = Epilogue(act="silu" if gated else "")
        alone = torch.cat([quant_linear(x[i : i + 1], packed, seen, extras, False, tile) for i in some])
        for count in (5, 17, 40, 130) if tile is None else (40,):
            bm, cut = spans or (None, None)
            together = quant_linear(x[:count], packed, seen, extras, False, cut, bm)[
                [i for i in some if i < min(count, len(x))]
            ]
            assert (
                torch.equal(together, alone[: len(together)])
                if CUDA
                else torch.allclose(together, alone[: len(together)], rtol=1e-5, atol=1e-5)
            )


@pytest.mark.parametrize("scheme", ["ct-int4-g32", "awq", "ct-fp8-channel", "modelopt-nvfp4", "gptq-int8"])
def test_a_checkpoint_stays_quantised_and_multiplies_as_it_means(scheme: str, tmp_path: Path) -> None:
    """Fused projections of one format are one weight; its products are those of the dequantised checkpoint. Embeddings
    stay dense."""
    model = tiny.target("llama", hidden_size=64, intermediate_size=128, head_dim=16, num_hidden_layers=1)
    folder = tiny.write(model, tmp_path, tokenizer=False)
    quantised.rewrite(folder, scheme)
    ops = TritonOps(DEVICE, pdl=False)
    _, weights, _ = load_target(folder, DEVICE, DTYPE, ops)
    _, dense, _ = load_target(folder, DEVICE, torch.float32)
    for key in ("layers.0.qkv", "layers.0.out", "layers.0.gate_up", "layers.0.down"):
        weight = weights[key]
        meant = dense[key]
        assert isinstance(weight, QuantWeight) and weight.shape == meant.shape
        x = rand(2, meant.shape[1]).to(DEVICE, DTYPE)
        near(ops.linear(x, weight), REF.linear(x.float(), meant), 1e-2)
    assert isinstance(weights["embed"], torch.Tensor)


def test_rows_of_unlike_formats_are_multiplied_part_by_part(tmp_path: Path) -> None:
    parts = [part("Q4_K", 32, 256), part("Q6_K", 16, 256)]
    ops = TritonOps(DEVICE, pdl=False)
    packed = ops.pack_weights(parts, DEVICE)
    assert isinstance(packed, Parts) and packed.shape == (48, 256)
    x = rand(2, 256).to(DEVICE, DTYPE)
    bias = rand(48).to(DEVICE, DTYPE)
    dense = torch.cat([p.dense() for p in parts]).to(DEVICE)
    near(ops.linear(x, packed, bias), REF.linear(x.float(), dense, bias.float()), 1e-2)
    near(ops.gated_linear(x, packed, "silu"), REF.gated_linear(x.float(), dense, "silu"), 1e-2)


@pytest.mark.parametrize("mode", ["int4", "int8", "fp8"])
def test_dense_weights_are_rounded_when_asked(mode: str) -> None:
    ops = TritonOps(DEVICE, pdl=False)
    dense = rand(64, 256, seed=3, scale=0.05).to(DEVICE, DTYPE)
    packed = ops.quantize(dense, mode)
    assert (
        isinstance(packed, QuantWeight)
        and packed.nbytes < dense.nbytes * (0.6 if mode != "int4" else 0.32) * 2 / dense.element_size()
    )
    x = rand(2, 256).to(DEVICE, DTYPE)
    near(ops.linear(x, packed), REF.linear(x.float(), dense.float()), {"int4": 0.13, "int8": 0.02, "fp8": 0.05}[mode])
    near(ops.unpack(packed), dense.to(torch.bfloat16), {"int4": 0.13, "int8": 0.02, "fp8": 0.05}[mode])


def test_a_small_matrix_stays_dense_however_it_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounded to four bits E2B's small matrices made a step slower than bfloat16's."""
    monkeypatch.setattr(base, "SMALL", 64 * 256)
    ops = TritonOps(DEVICE, pdl=False)
    dense = rand(64, 256, seed=3).to(DEVICE, DTYPE)
    assert ops.quantize(dense, "int4") is dense
    assert ops.pack_weights([IntegerFormat(4, 32).quantise(dense)], DEVICE) is None
    assert isinstance(ops.quantize(rand(65, 256, seed=3).to(DEVICE, DTYPE), "int4"), QuantWeight)


@pytest.mark.parametrize("has_zero_point", [False, True])
def test_five_bits_take_no_tile_of_8_tokens_and_fit(has_zero_point: bool) -> None:
    """On an H200 such a tile gave rows other bits than larger ones, and three stages of 128 tokens asked for too much
    shared memory."""
    words = torch.zeros(1, 1, 64, 32, dtype=torch.int32)
    four = QuantWeight((64, 256), Codes.UINT4, 32, 1, words, words, words if has_zero_point else None, None, True)
    five = replace(four, codes=Codes.UINT5, high=words.to(torch.uint8))
    for rows in (1, 8, 16, 32, 40, 64, 65, 2048):
        bm, tile = fit(QuantTile(64, 1, 4), rows, five, 226 << 10)
        assert bm >= 16 and tile.more == 0 and tile.warps >= 4 and bm * 256 * 2 * tile.stages <= 160 << 10
    assert fit(QuantTile(64, 1, 4), 8, four, 226 << 10)[0] == 8


@pytest.mark.skipif(not CUDA or torch.cuda.get_device_capability() != (9, 0), reason="a Hopper GPU is needed")
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(
    "name", [name for name in WEIGHTS if name not in ("int4 g16", "int8 asymmetric channel")]
)  # these it does not take
def test_few_tokens_in_cuda_have_the_bits_of_triton(name: str, gated: bool) -> None:
    """Alone, in fours and in eights; one span, several, and a last one that is shorter."""
    few = WNA16Gemv(torch.device("cuda", 0), torch.zeros(4096, dtype=torch.int32, device=DEVICE))
    for n, k in ((128, 512), (640, 4608), (5376, 6144)):
        packed = repack(WEIGHTS[name](n, k).to(DEVICE))
        assert packed is not None
        x = rand(8, k).to(DEVICE, DTYPE)
        extras = Epilogue(act="gelu_tanh" if n > 128 else "silu") if gated else Epilogue()
        want = quant_linear(x, packed, few.semaphores, extras, True)
        for rows in range(1, 9):
            got = few.product(x[:rows], packed, extras, True)
            assert got is not None and torch.equal(got, want[:rows]), (n, k, rows)
        assert not few.semaphores.any()


@pytest.mark.skipif(not CUDA or torch.cuda.get_device_capability() != (9, 0), reason="a Hopper GPU is needed")
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("name", ["int4 g32", "int4 g128", "int4 asymmetric", "int4 ordered", "Q4_0", "Q4_1", "Q4_K"])
def test_more_tokens_in_cuda_have_the_bits_of_triton(name: str, gated: bool) -> None:
    """And a row of few tokens those of the same row among many; one span, several, and a last one that is shorter."""
    ops = TritonOps(DEVICE)
    for n, k in ((128, 512), (640, 4608), (5376, 6144)):
        packed = repack(WEIGHTS[name](n, k).to(DEVICE))
        assert packed is not None
        x = rand(40, k).to(DEVICE, DTYPE)
        extras = Epilogue(act="gelu_tanh" if n > 128 else "silu") if gated else Epilogue()
        want = quant_linear(x, packed, ops.semaphores, extras, True)
        for rows in (9, 16, 17, 25, 40):
            got = ops.w4a16_wgmma.product(x[:rows], packed, extras, True)
            assert got is not None and torch.equal(got, want[:rows]), (n, k, rows)
        few = ops.wna16_gemv.product(x[:8], packed, extras, True)
        assert few is not None and torch.equal(few, want[:8]) and not ops.semaphores.any()
