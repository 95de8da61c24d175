"""Every source of `ops/cuda/` goes through NVIDIA's compiler, which a pip package brings (`nvidia-cuda-nvrtc`): no GPU
is needed."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from tests import sass
from tests.parity import test_cuda_experts as experts
from tests.unit.ops.test_few_rows import ROOM, every_code, weight

from outrider.ops.backend import Epilogue
from outrider.ops.cuda import runtime
from outrider.ops.triton import attention_wgmma, gemm_wgmma, moe_gemv_int8, w4a16_gemm, w4a16_wgmma, wna16_gemv

pytestmark = pytest.mark.skipif(runtime.compiler() is None, reason="no libnvrtc: pip install nvidia-cuda-nvrtc")


def compiles(source: str, arch: str, flags: object) -> bool:
    code = runtime.image(source, arch, dict(flags))  # type: ignore[call-overload]
    text = sass.text_of(code)
    for change in ("DEALLOC", "TRY_ALLOC") if "give_registers" in source else ():
        used, left = sass.registers_after(text, change)
        assert used <= left, f"{change}: {used} of {left} registers"
    return code.startswith(b"\x7fELF") and not sass.odd_policies(text)


@pytest.mark.parametrize("name", every_code())
def test_few_rows(name: str) -> None:
    """And a chunk takes as much of shared memory there as is asked for here. One and eight rows, gated and not, take
    turns, and so do adapters of no, small and large rank."""
    w = every_code()[name]
    index = list(every_code()).index(name)
    gated = index % 2 == 0
    flags = wna16_gemv.flags_of(w, Epilogue(act="silu" if gated else ""), 1 if gated else 8, 24)
    flags = {**flags, "RANK": (0, 16, 64)[index % 3]}
    chunk = wna16_gemv.WeightChunk.of(w)
    code = "Coded<VALUES, HALF, PER, ZERO_POINT, FACTOR>"
    check = f"static_assert({code}::STAGE == {chunk.stage} && {code}::COLUMNS == {chunk.columns});"
    assert compiles(f"{wna16_gemv.SOURCE.read_text()}\n{check}\n", "90", flags)


@pytest.mark.parametrize("rows,form", [(9, "group 32"), (24, "group 128"), (40, "Q4_K")])
def test_more_rows(rows: int, form: str) -> None:
    """And a block takes as much of shared memory there as is asked for here."""
    w = {"group 32": weight, "group 128": lambda: weight(group=128), "Q4_K": lambda: every_code()["Q4_K"]}[form]()
    groups = 8 // w.per
    has_zero_point = w.zero_point is not None
    block = w4a16_wgmma.choose_block(rows, groups, has_zero_point, ROOM)
    assert block is not None
    check = f"static_assert(STAGES * STAGE == {block.shared(groups, has_zero_point)});"
    flags = {**w4a16_wgmma.flags_of(w, Epilogue(act="silu"), block), "RANK": {9: 0, 24: 64, 40: 16}[rows]}
    assert compiles(f"{w4a16_wgmma.SOURCE.read_text()}\n{check}\n", "90a", flags)


@pytest.mark.parametrize(
    "tile,form,act",
    [
        (w4a16_gemm.W4A16Tile(10, w4a16_gemm.ONE_SPAN, 6, 3), "group 32", "gelu_tanh"),
        (w4a16_gemm.W4A16Tile(8, w4a16_gemm.SERIAL, 4, 2), "Q4_K", ""),
        (w4a16_gemm.W4A16Tile(4, w4a16_gemm.PARALLEL, 6, 3), "group 128", ""),
    ],
)
def test_prompts_with_4_bit_weights(tile: w4a16_gemm.W4A16Tile, form: str, act: str) -> None:
    """And a block takes as much of shared memory there as is asked for here."""
    w = {"group 32": weight, "group 128": lambda: weight(group=128), "Q4_K": lambda: every_code()["Q4_K"]}[form]()
    shared = tile.shared(8 // w.per, w.zero_point is not None)
    flags = w4a16_gemm.flags_of(w, Epilogue(act=act), tile)
    assert compiles(f"{w4a16_gemm.SOURCE.read_text()}\nstatic_assert(SHARED == {shared});\n", "90a", flags)
    assert shared <= ROOM


@pytest.mark.parametrize("rows", [1, 5])
def test_experts(rows: int) -> None:
    packed = experts.weights(*experts.shells(128, 2816, 704))
    plan = moe_gemv_int8.MoeGemvPlan.of(rows, packed, None, 132, experts.ROOM)
    assert plan is not None and compiles(
        moe_gemv_int8.SOURCE.read_text(), "90", moe_gemv_int8.flags_of(plan, "gelu_tanh")
    )


@pytest.mark.parametrize(
    "tile,splits,end",
    [
        (gemm_wgmma.WgmmaTile(256), 1, Epilogue(act="gelu_tanh")),
        (gemm_wgmma.WgmmaTile(192), 3, Epilogue()),
        (gemm_wgmma.WgmmaTile(160, True), 1, Epilogue(act="silu")),
        (gemm_wgmma.WgmmaTile(256), 1, Epilogue(softcap=30.0, out_dtype=torch.float32)),
    ],
)
def test_many_rows(tile: gemm_wgmma.WgmmaTile, splits: int, end: Epilogue) -> None:
    """And the stages take as much of shared memory there as is asked for here."""
    check = f"static_assert(STAGES * (STAGE + 16) + 1024 == {tile.shared()});"
    flags = gemm_wgmma.flags_of(end, tile, splits > 1)
    assert compiles(f"{gemm_wgmma.SOURCE.read_text()}\n{check}\n", "90a", flags)
    assert tile.shared() <= ROOM


@pytest.mark.parametrize("page", [16, 32])
def test_attention_of_wide_heads(page: int) -> None:
    """And a block takes as much of shared memory there as is asked for here."""
    check = "static_assert(D / 64 * PANEL + BLOCKS * PANEL + STAGES * (STAGE + 16) + (BLOCKS + 2) * BQ * 4 == SHARED);"
    flags = {"PAGE": page, "SHARED": attention_wgmma.SHARED}
    assert compiles(f"{attention_wgmma.SOURCE.read_text()}\n{check}\n", "90a", flags)
    assert attention_wgmma.SHARED <= ROOM


def test_code_that_does_not_run_is_found() -> None:
    lines = """
        /*0000*/  @!P1 BRA `(.L_x_1) ;
        /*0010*/  USETMAXREG.TRY_ALLOC.CTAPOOL UP0, 0xf0 ;
        /*0020*/  MOV R239, RZ ;
        /*0030*/  EXIT ;
.L_x_1:
        /*0040*/  USETMAXREG.DEALLOC.CTAPOOL 0x18 ;
        /*0050*/  @P0 BRA `(.L_x_2) ;
        /*0060*/  EXIT ;
.L_x_2:
        /*0070*/  IADD3 R3, R24, 0x1, RZ ;
        /*0080*/  EXIT ;
"""
    assert sass.registers_after(lines, "DEALLOC") == (25, 24) and sass.registers_after(lines, "TRY_ALLOC") == (240, 240)
    copy = "LDGSTS.E.BYPASS.LTC128B.128 [R23+UR{}+0x21440], desc[UR{}][R16.64] ;"
    assert sass.odd_policies(copy.format(0, 1)) and not sass.odd_policies(copy.format(4, 18))


def test_what_does_not_compile_is_said() -> None:
    with pytest.raises(runtime.CudaError, match="error"):
        runtime.image("not a kernel", "90", {})
