"""The C kernels at every level that this machine can run: what their tests mean by `ops` unless they say otherwise."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from outrider.ops.cpu import build as build_module
from outrider.ops.cpu.build import runnable
from outrider.ops.cpu.ops import CpuOps

# The code for AVX-VNNI, with AVX-512's encoding of its one instruction: for machines that have the latter only.
TWIN = "avxvnni twin"
TWIN_FLAGS = f"{build_module.AVX2} -mavx512vl -mavx512vnni -DISA_TWIN"
RUNNABLE = [*runnable(), *([TWIN] if "avx512" in runnable() and "avxvnni" not in runnable() else [])]


@pytest.fixture(scope="module", params=RUNNABLE)
def ops(request: pytest.FixtureRequest) -> Iterator[CpuOps]:
    with pytest.MonkeyPatch.context() as patch:
        if request.param == TWIN:
            patch.setitem(build_module.FLAGS, "avxvnni", TWIN_FLAGS)
            patch.setitem(build_module.NEEDS, "avxvnni", build_module.NEEDS["avx512"])
        yield CpuOps(threads=2, isa=request.param.removesuffix(" twin"))
