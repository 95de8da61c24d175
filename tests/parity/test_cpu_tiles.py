"""Products on Intel's tiles: the bits of one row alone, which AVX-512 computes, for every format and number of rows.

Tiles are emulated in C (emulated_tiles.h) on processors that have AVX-512 alone; a processor with tiles runs both. Names
what it catches: a tile beyond its rows, a code with the wrong sign, a block under its neighbour's scale, a sum that
begins again between two pieces of a row, a tile left configured for another shape.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.kv import build_kv
from tests.parity.test_cpu_kernels import KINDS, MODELS, seeded, weight

from outrider.cache.store import last_rows
from outrider.models.config import ModelConfig
from outrider.models.decoder import TextModel
from outrider.ops.backend import ExpertWeights
from outrider.ops.cpu import build
from outrider.ops.cpu.lib import FILE_TYPES
from outrider.ops.cpu.ops import CpuOps
from outrider.ops.formats import BLOCKS
from outrider.weights.load import dummy_weights

EMULATION = Path(__file__).with_name("emulated_tiles.h")
LEVELS = (*(["amx"] if "amx" in build.runnable() else []), *(["emulated"] if "avx512bf16" in build.runnable() else []))
# More columns than are decoded at a time (1024), for formats with blocks of 32 also an odd number of blocks.
COLUMNS = {kind: 1280 if block == 256 else 1120 for kind, (block, _) in BLOCKS.items()}


@pytest.fixture(scope="module", params=LEVELS or [pytest.param("", marks=pytest.mark.skip("AVX-512 with BF16 alone"))])
def tiles(request: pytest.FixtureRequest) -> Iterator[CpuOps]:
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "emulated":
            digest = hashlib.sha256(EMULATION.read_bytes()).hexdigest()[:8]
            flags = f"{build.FLAGS['avx512bf16']} -include {EMULATION} -DEMULATION_{digest} -DAMX_ROWS=6"
            patch.setitem(build.FLAGS, "amx", flags)
            patch.setitem(build.NEEDS, "amx", build.NEEDS["avx512bf16"])
            patch.setattr(build, "request_tiles", lambda: None)
        yield CpuOps(threads=2, isa="amx")


@pytest.mark.parametrize("kind", KINDS)
def test_any_number_of_rows_has_the_bits_of_one(tiles: CpuOps, kind: str) -> None:
    k = COLUMNS.get(kind, 1280)
    w = weight(tiles, kind, 72, k)
    x = seeded(64, k)
    alone = torch.cat([tiles.linear(x[i : i + 1], w) for i in range(64)])
    for rows in range(1, 65):
        assert torch.equal(tiles.linear(x[:rows], w), alone[:rows]), rows
    many = seeded(300, k, seed=1)  # blocks of 128 rows, and some of a third
    some = [0, 1, 127, 128, 140, 255, 256, 291, 299]
    assert torch.equal(tiles.linear(many, w)[some], torch.cat([tiles.linear(many[i : i + 1], w) for i in some]))


@pytest.mark.parametrize("kind", FILE_TYPES)
def test_every_level_with_the_same_lanes_has_the_same_bits(tiles: CpuOps, kind: str) -> None:
    k = COLUMNS[kind]
    plain = CpuOps(threads=2, isa="avx512bf16")
    x = seeded(33, k)
    answers = [ops.linear(x, weight(ops, kind, 40, k)) for ops in (tiles, plain)]
    assert torch.equal(*answers)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_K", "Q6_K", "Q8_0"])
def test_gates_are_rounded_as_one_row_is(tiles: CpuOps, kind: str) -> None:
    """Two products of a unit share one configuration, and their answers one buffer each."""
    w = weight(tiles, kind, 128, 256)
    x = seeded(140, 256)
    together = tiles.gated_linear(x, w, "silu")
    for rows in (1, 7, 17, 130):
        assert torch.equal(tiles.gated_linear(x[:rows], w, "silu"), together[:rows]), rows


@pytest.mark.parametrize("kinds", [("Q4_0", "Q4_0"), ("Q4_K", "Q6_K"), ("Q8_0", "IQ4_XS")])
def test_experts_of_many_rows(tiles: CpuOps, kinds: tuple[str, str]) -> None:
    """Experts with few and with many rows in one pass: each configures its own number."""
    experts = ExpertWeights(
        seeded(5, 256, seed=4) * 0.1,
        seeded(5, seed=5).abs() + 0.5,
        weight(tiles, kinds[0], 5 * 2 * 256, 256).view(5, 2 * 256, 256),
        weight(tiles, kinds[1], 5 * 256, 256).view(5, 256, 256),
        2,
        "gelu_tanh",
    )
    x = seeded(90, 256)
    together = tiles.moe(x * 0.5, x, experts)
    for rows in (1, 6, 30):
        assert torch.equal(tiles.moe(x[:rows] * 0.5, x[:rows], experts), together[:rows]), rows


def test_adapters_of_many_rows(tiles: CpuOps) -> None:
    """Their products begin at any row of a tile."""
    base = tiles.quantize(seeded(32, 64), "int8")
    part = tiles.lowrank(seeded(6, 64, seed=1), seeded(32, 6, seed=2), torch.ones(32), [(32, 6)], base)
    x = seeded(70, 64, seed=3)
    together = tiles.add_lowrank(torch.zeros(70, 32), x, part, None)
    alone = [tiles.add_lowrank(torch.zeros(1, 32), row, part, None) for row in x.split(1)]
    assert torch.equal(together, torch.cat(alone))


@pytest.mark.parametrize("name", MODELS)
def test_a_whole_prompt(tiles: CpuOps, name: str) -> None:
    """Every product of a pass, with rows that stop early: then fewer rows than the first layers had."""
    config = ModelConfig.from_hf(MODELS[name])
    counts = [23, 4, 30]
    ids = torch.randint(0, 96, (sum(counts),), generator=torch.Generator().manual_seed(0))
    outputs = []
    for ops in (tiles, CpuOps(threads=2, isa="avx512bf16")):
        model = ops.compile(TextModel(config, dummy_weights(config, "cpu", torch.float32, ops, "int4", seed=3), ops))
        for wanted in (None, [0, 2], list(range(3))):
            view = build_kv(config, len(counts), 64, 16, torch.float32).view([(0, n) for n in counts])
            rows = None if wanted is None else last_rows(view, wanted)
            outputs.append(model.forward(ids, view, (), rows).hidden)
    for mine, plain in zip(outputs[:3], outputs[3:]):
        assert torch.equal(mine, plain)


def test_keys_and_values_stay_bfloat16(tiles: CpuOps) -> None:
    """A comparison with the one level that had pairs of bfloat16 would give float16 here, and other answers."""
    assert tiles.kv_dtype(torch.float32) == torch.bfloat16 == CpuOps(isa="avx512bf16").kv_dtype(torch.float32)
