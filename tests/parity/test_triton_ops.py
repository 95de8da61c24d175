"""Every Triton kernel against its plain twin, on the GPU where there is one, else through Triton's interpreter.

The bugs each case is made to catch stand beside it. Shapes are small, and odd where a kernel has an edge to miss.
"""

from __future__ import annotations

import os
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

CUDA = torch.cuda.is_available()
if not CUDA:
    os.environ["TRITON_INTERPRET"] = "1"

triton = pytest.importorskip("triton")

from outrider.models.builtin_configs import BUILTIN_CONFIGS  # noqa: E402
from outrider.models.config import ModelConfig  # noqa: E402
from outrider.ops.backend import Epilogue, ExpertWeights, MoeLayer, MoeResidual  # noqa: E402
from outrider.ops.noise import gumbel  # noqa: E402
from outrider.ops.reference import ReferenceOps  # noqa: E402
from outrider.ops.registry import Registry  # noqa: E402
from outrider.ops.triton import TritonOps, choose, gemm_launch, moe, norm  # noqa: E402
from outrider.ops.triton.card import Card  # noqa: E402
from outrider.ops.triton.gemm_config import (  # noqa: E402
    GemmConfig,
    GemmPlan,
    GemmReduction,
    choose_reduction,
    triton_plan,
    wgmma_plan,
)
from outrider.ops.triton.gemm_launch import dense_gemm  # noqa: E402
from outrider.ops.triton.gemm_wgmma import WgmmaTile  # noqa: E402
from outrider.ops.triton.kernels import SIDE_STREAM_ROWS, TABLE  # noqa: E402
from outrider.ops.triton.precompile import Precompiler  # noqa: E402
from outrider.ops.triton.routing import list_pairs  # noqa: E402

DEVICE = "cuda" if CUDA else "cpu"
REF = ReferenceOps()
DTYPES = [torch.float32, torch.bfloat16] if CUDA else [torch.float32]


@pytest.fixture(scope="module")
def ops() -> TritonOps:
    return TritonOps(DEVICE, pdl=False)


def rand(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed + sum(shape))
    return (torch.randn(shape, generator=g) * scale).to(DEVICE, dtype)


def near(got: torch.Tensor, want: torch.Tensor, rel: float | None = None) -> None:
    assert got.shape == want.shape and got.dtype == want.dtype
    rel = rel or (1e-4 if want.dtype == torch.float32 else 1.5e-2)
    error = (got.double() - want.double()).norm() / want.double().norm().clamp_min(1e-30)
    assert torch.isfinite(got.double()).all() and error <= rel, f"relative error {float(error):.2e}"


def same(got: torch.Tensor, want: torch.Tensor) -> None:
    assert torch.equal(got, want)


# ---- products
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows,n,k", [(1, 48, 64), (5, 40, 96), (17, 32, 64), (40, 72, 80)])
def test_linear(ops: TritonOps, rows: int, n: int, k: int, dtype: torch.dtype) -> None:
    """Partial tiles in every direction; a bias added twice or to the wrong column."""
    x = rand(rows, k, dtype=dtype)
    w = rand(n, k, seed=1, dtype=dtype)
    bias = rand(n, seed=2, dtype=dtype)
    near(ops.linear(x, w), REF.linear(x, w))
    near(ops.linear(x, w, bias), REF.linear(x, w, bias))


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("splits", [1, 2, 3])
def test_linear_split(ops: TritonOps, splits: int, turned: bool) -> None:
    """A lost partial sum, a span that overlaps the next one, a counter that is not reset for the next call; spans in
    one program."""
    x = rand(18, 160)
    w = rand(48, 160, seed=1)
    for serial_splitk in (False, True):
        reduction = GemmReduction(16, 32, splits, 2, turned)
        config = GemmConfig(32, 16, 32, 2, swap_ab=turned, serial_splitk=serial_splitk)
        near(dense_gemm(x, w, ops.gemm, reduction=reduction, config=config), REF.linear(x, w))
        assert int(ops.semaphores.abs().sum()) == 0


def test_linear_strided(ops: TritonOps) -> None:
    """A view of a wider tensor: the row stride is not the width."""
    x = rand(3, 128)[:, 32:96]
    w = rand(32, 64, seed=1)
    near(ops.linear(x, w), REF.linear(x, w))


@pytest.mark.parametrize("act", ["silu", "gelu_tanh"])
def test_gated(ops: TritonOps, act: str) -> None:
    """Gate and up swapped, or read from the wrong rows; the activation's tails."""
    x = rand(3, 64, scale=3.0)
    w = rand(96, 64, seed=1)
    near(ops.gated_linear(x, w, act), REF.gated_linear(x, w, act))
    for tile in (
        GemmReduction(16, 16, 1, 2, swap_ab=True),
        GemmReduction(32, 16, 2, 2),
        GemmReduction(8, 16, 2, 2, swap_ab=True),
    ):
        near(dense_gemm(x, w, ops.gemm, end=Epilogue(act=act), reduction=tile), REF.gated_linear(x, w, act))
    y = rand(3, 4, 48, seed=2)[:, 1]
    near(ops.linear_act_mul(x, w[:48], y, act), REF.linear_act_mul(x, w[:48], y, act))
    near(ops.act_mul(x[:, :48], y, act), REF.act_mul(x[:, :48], y, act))


def test_logits(ops: TritonOps) -> None:
    x = rand(2, 64)
    w = rand(100, 64, seed=1, scale=5.0)
    near(ops.logits(x, w, 30.0), REF.logits(x, w, 30.0))
    near(ops.logits(x, w, None), REF.logits(x, w, None))


@pytest.mark.parametrize("rows", [1, 17, 70])
def test_rows_do_not_depend_on_their_number(ops: TritonOps, rows: int) -> None:
    """The guarantee behind 'lossless': a row's bits are the same in any company, and in any shape of tile."""
    x = rand(136, 96)
    w = rand(64, 96, seed=1)
    for gated in (False, True):
        tile = GemmReduction(16, 32, 3, 2, swap_ab=True)
        end = Epilogue(act="silu" if gated else "")

        def run(a, shape=None):
            return dense_gemm(a, w, ops.gemm, end=end, reduction=tile, config=shape)

        whole = run(x)
        same(run(x[:rows]), whole[:rows])
        for shape in (GemmConfig(64, 32, 32, 2, serial_splitk=True), GemmConfig(32, 16, 32, 2, swap_ab=False)):
            same(run(x, shape), whole)


def test_rows_beside_a_power_of_two(ops: TritonOps) -> None:
    """A program that takes 64 + 16 rows: rows given twice or to nobody; the last program's partly filled halves."""
    x = rand(200, 80)
    w = rand(64, 80, seed=1)
    for rows in (70, 150):
        for gated in (False, True):
            for splits in (1, 2):
                shape = GemmConfig(64, 16, 32, 2, bm2=16)
                end = Epilogue(act="silu" if gated else "")
                got = dense_gemm(
                    x[:rows], w, ops.gemm, end=end, reduction=GemmReduction(16, 32, splits, 2), config=shape
                )
                near(got, REF.gated_linear(x[:rows], w, "silu") if gated else REF.linear(x[:rows], w))
    assert int(ops.semaphores.abs().sum()) == 0


@pytest.mark.parametrize("gated,splits", [(False, 1), (True, 1), (False, 3)])
def test_epilogues_and_misaligned_rows_of_stream_k(ops: TritonOps, gated: bool, splits: int) -> None:
    """Rows, columns and spans that end inside a tile; bias, activation and factor; rows that TMA cannot load."""
    rows = 37
    n = 40
    k = 144
    x = rand(rows, k)
    w = rand(n * (2 if gated else 1), k, seed=1)
    y = rand(rows, n, seed=2)
    bias = rand(len(w), seed=3)
    tile = GemmReduction(32, 16, splits, 2)
    fetched = GemmConfig(16, 16, 16, 2, bm2=16, tma=True)
    extra = Epilogue(act="silu") if gated else Epilogue(mul=y, act="gelu_tanh")
    for more in (extra, replace(extra, bias=bias)):
        want = dense_gemm(x, w, ops.gemm, end=more, reduction=tile)
        same(dense_gemm(x, w, ops.gemm, end=more, reduction=tile, config=fetched), want)
    strided = torch.cat((x, x), dim=1)[:, 1 : k + 1]  # rows that do not begin at whole 16 bytes take the plain loads
    near(
        dense_gemm(strided, w, ops.gemm, end=extra, reduction=tile, config=fetched),
        dense_gemm(strided.contiguous(), w, ops.gemm, end=extra, reduction=tile),
        1e-6,
    )


@pytest.mark.parametrize("gated,splits", [(False, 1), (True, 1), (False, 3)])
def test_tiles_that_are_cut_among_programs(
    ops: TritonOps, gated: bool, splits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiles that two programs share, after and between whole ones: a part left out, done twice or begun from another
    tile's sums, a mark that is not taken back. The bits of one program a tile."""
    n = 104
    k = 144
    x = rand(50, k)
    w = rand(n * (2 if gated else 1), k, seed=1)
    tile = GemmReduction(16, 16, splits, 2)
    extra = Epilogue(act="silu", bias=rand(2 * n, seed=2)) if gated else Epilogue()
    monkeypatch.setattr(gemm_launch, "sm_count", lambda device: 3)
    monkeypatch.setattr(gemm_launch, "STREAMK_MAX_WHOLE_TILES", 0)
    want = dense_gemm(x, w, ops.gemm, end=extra, reduction=tile, config=GemmConfig(64, 16, 16, 2))
    for rows in (50, 30):
        for more in (16, 32):
            same(
                dense_gemm(
                    x[:rows],
                    w,
                    ops.gemm,
                    end=extra,
                    reduction=tile,
                    config=GemmConfig(16, 16, 16, 2, bm2=more, tma=True),
                ),
                want[:rows],
            )
            assert int(ops.semaphores.abs().sum()) == 0


def test_a_small_card_cuts_no_tile_that_was_measured_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut ones need more shared memory than the stages of whole ones leave: on 114 sms 31B's qkv asked for more than
    there is."""
    monkeypatch.setattr(gemm_launch, "sm_count", lambda device: 78)
    x, w, seen = (
        torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in ((160, 5376), (16384, 5376), (8,))
    )
    monkeypatch.setattr(gemm_launch, "tma_aligned", lambda t: True)
    monkeypatch.setattr(gemm_launch, "matrix_descriptor", lambda t, rows, columns: t)
    launch = gemm_launch.launch_of(x, w, gemm_launch.GemmDevice(seen), Epilogue())
    assert launch.kernel is gemm_launch.streamk_kernel and launch.grid == (128,) and launch.options["CUT"] is False


def test_the_product_before_experts_lets_nothing_in_early() -> None:
    """26B-A4B's out had a few MiB less than the limit: its experts waited on all SMs, and the MLP next to them began
    when they were done."""
    config = ModelConfig.from_hf(BUILTIN_CONFIGS["google/gemma-4-26B-A4B-it"])
    for k in {layer.attn.heads * layer.attn.head_dim for layer in config.layers}:
        x, w, seen = (
            torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in ((1, k), (config.hidden, k), (8,))
        )
        assert gemm_launch.launch_of(x, w, gemm_launch.GemmDevice(seen, pdl=True), Epilogue()).options["TRIGGER_LATE"]


@pytest.mark.parametrize(
    "n,k,gated",
    [
        (21504, 5376, True),
        (5376, 21504, False),
        (18432, 5376, False),
        (262144, 1536, False),
        (1536, 2048, False),
        (128, 2816, False),
        (576, 576, False),
    ],
)
def test_every_number_of_rows_has_a_tile(n: int, k: int, gated: bool) -> None:
    """Shapes the compiler takes: powers of two, 64 rows of weights where these are on the long side, and no more memory
    than there is."""
    tile = choose_reduction(n, k, gated, 2)
    for rows in (1, 5, 16, 17, 32, 33, 64, 65, 128, 160, 256, 272, 320, 1280, 2048):
        shape = triton_plan(tile, n, k, rows, gated).config
        wide = shape.bn * (2 if gated else 1)
        assert all(v & (v - 1) == 0 for v in (shape.bm, shape.bn, shape.bk))
        assert not shape.swap_ab or wide % 64 == 0
        assert (shape.bm + shape.bm2 + wide) * shape.bk * 2 * shape.stages <= 227 << 10
        assert not shape.bm2 or not shape.serial_splitk
        many = wgmma_plan(tile, n, k, rows, gated).config
        assert WgmmaTile(many.bn, many.swap_ab).shared() <= 227 << 10 and (many.bn < 256 or tile.splits == 1)


def test_where_wgmma_takes_no_product_triton_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """A product computed by both or by neither; one of another number of rows, or with a factor, that it is given."""
    calls: list[int] = []
    answers: list[torch.Tensor | None] = [None]

    class Kernels:
        def product(self, x: torch.Tensor, *rest: object, **settings: object) -> torch.Tensor | None:
            calls.append(len(x))
            return answers[0]

    card = replace(Card.of(torch.device(DEVICE)), cuda=True)
    ops = TritonOps(DEVICE, pdl=False, card=replace(card, cuda=False), registry=Registry(TABLE, card))
    ops.gemm = replace(ops.gemm, wgmma=Kernels())
    monkeypatch.setattr(gemm_launch, "supports_wgmma", lambda x, w, end: end.mul is None)
    monkeypatch.setattr(gemm_launch.DenseShape, "wgmma_plan", GemmPlan(-1.0, GemmConfig(16, 16, 16, 2)))
    x = rand(130, 32)
    w = rand(16, 32, seed=1)
    near(ops.linear(x, w), REF.linear(x, w))
    answers[0] = torch.zeros(1)
    assert ops.linear(x[:129], w) is answers[0] and calls == [130, 129]
    ops.linear(x[:128], w), ops.linear_act_mul(x, w, rand(130, 16), "silu")
    assert calls == [130, 129]


def test_other_numbers_of_rows_are_compiled_side_by_side() -> None:
    """Compiled twice, or never; a failure that stops the pass; what was asked for once only, before its own launch has
    compiled it."""
    compiled: list[tuple[str, int]] = []

    def compile_one(what: str, rows: int) -> None:
        compiled.append((what, rows))
        if what == "b":
            raise RuntimeError("the launch will say so")

    ahead = Precompiler(compile_one, lambda what, rows: rows // 8)
    for what, rows in [("a", 1), ("b", 1), ("b", 2), ("a", 8), ("b", 8), ("a", 9), ("c", 8), ("c", 64), ("a", 70)]:
        ahead.before(what, rows)
    assert sorted(compiled) == [("a", 8), ("a", 64), ("b", 8), ("b", 64), ("c", 64)]


# ---- rows
@pytest.mark.parametrize("dtype", DTYPES)
def test_norms(ops: TritonOps, dtype: torch.dtype) -> None:
    """A mean over the padded width; the scalar applied before the sum; x' returned un-normed where no norm follows."""
    x = rand(3, 72, dtype=dtype)
    y = rand(3, 72, seed=1, dtype=dtype)
    w = rand(72, seed=2)
    v = rand(72, seed=3)
    scale = torch.tensor([0.37], device=DEVICE)
    near(ops.rms_norm(x, w, 1e-6), REF.rms_norm(x, w, 1e-6))
    near(ops.rms_norm(x.view(3, 3, 24), None, 1e-6), REF.rms_norm(x.view(3, 3, 24), None, 1e-6))
    for post, s, following in [(w, scale, v), (None, None, v), (w, None, None), (w, scale, None)]:
        for got, want in zip(
            ops.residual_norm(x, y, post, s, following, 1e-6), REF.residual_norm(x, y, post, s, following, 1e-6)
        ):
            near(got, want)


def test_norms_of_many_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that are fetched late: the bits of those fetched early."""
    x = rand(3, 72)
    y = rand(3, 72, seed=1)
    w = [rand(72, seed=s) for s in range(2, 6)]
    some = []
    for most in (norm.PROMPT, 1):
        monkeypatch.setattr(norm, "PROMPT", most)
        some.append(norm.residual_norm(x, y, w[0], None, w[1], 1e-6, False, (w[2], w[3])))
    assert all(torch.equal(a, b) for a, b in zip(*some, strict=True))


@pytest.mark.parametrize("heads,dim", [((4, 2), 24), ((3, 3), 16)])
def test_heads_of_a_tower_are_rotated(ops: TritonOps, heads: tuple[int, int], dim: int) -> None:
    """q and k norms swapped, v rotated or scaled, pairs of neighbours rotated."""
    qkv = rand(5, (heads[0] + 2 * heads[1]) * dim)
    angle = rand(5, dim // 2, seed=3)
    arguments = ((angle.cos(), angle.sin()), (rand(dim, seed=1), rand(dim, seed=2)), heads, 1e-6)
    for got, want in zip(ops.rotate_heads(qkv, *arguments), REF.rotate_heads(qkv, *arguments)):
        near(got, want)


def test_embed(ops: TritonOps) -> None:
    ids = torch.tensor([5, 0, 9, 5], device=DEVICE)
    table = rand(10, 72)
    near(ops.embed(ids, table, 72**0.5), REF.embed(ids, table, 72**0.5), 1e-7)
    near(ops.embed(ids, table, 1.0), REF.embed(ids, table, 1.0), 1e-7)
    column = torch.stack([ids, ids.flip(0)], 1)[:, 1]  # one step of [B, K] drafts
    near(ops.embed(column, table, 1.0), REF.embed(column, table, 1.0), 1e-7)


def test_three_norms_and_per_layer(ops: TritonOps) -> None:
    """Norms swapped; a layer's part of another row or layer; the token's part scaled twice."""
    x = rand(3, 72)
    y = rand(3, 72, seed=6)
    post = rand(72, seed=7)
    norms = (rand(72, seed=1), rand(72, seed=2), rand(72, seed=8))
    for got, want in zip(
        ops.residual_norms(x, y, post, norms, 1e-6), REF.residual_norms(x, y, post, norms, 1e-6), strict=True
    ):
        near(got, want)
    ids = torch.tensor([5, 0, 9], device=DEVICE)
    table = rand(10, 4 * 24, seed=3)
    projected = rand(3, 4 * 24, seed=4)
    gain = rand(24, seed=5)
    near(
        ops.per_layer_inputs(ids, table, projected, 0.3, gain, 1e-6),
        REF.per_layer_inputs(ids, table, projected, 0.3, gain, 1e-6),
    )


@pytest.mark.parametrize("many", [(32, 64, 2, 4), (16, 16, 2, 8)])
def test_wide_tiles_add_in_the_same_order(ops: TritonOps, many: tuple[int, int, int, int]) -> None:
    """A tile for 17 rows that steps over the end of a span, or cuts the sum elsewhere than the tile for one row."""
    x = rand(20, 160)
    w = rand(48, 160, seed=1)
    tile = GemmReduction(16, 32, 2, 2, many=many)
    whole = dense_gemm(x, w, ops.gemm, reduction=tile)
    near(whole, REF.linear(x, w))
    same(dense_gemm(x[:3], w, ops.gemm, reduction=tile), whole[:3])


# ---- experts
@pytest.mark.parametrize("rows", [1, 7, 40])
def test_moe(ops: TritonOps, rows: int) -> None:
    """An expert with more rows than a tile; weights not renormalised, or scaled before that; slots mixed up."""
    x = rand(rows, 48)
    z = rand(rows, 48, seed=1)
    router = rand(6, 48, seed=2)
    scale = rand(6, seed=3).abs() + 0.5
    gate_up = rand(6, 40, 48, seed=4)
    down = rand(6, 48, 20, seed=5)
    experts = ExpertWeights(router, scale, gate_up, down, 2, "gelu_tanh")
    whole = ops.moe(z, x, experts)
    near(whole, REF.moe(z, x, experts))
    same(ops.moe(z[:1], x[:1], experts), whole[:1])
    h = rand(*x.shape, seed=9)
    stream = rand(*x.shape, seed=14)
    mlp = (rand(64, 48, seed=12), rand(48, 32, seed=13))
    norms = (rand(48, seed=10), rand(48, seed=11))
    for step in (
        (rand(48, seed=15), rand(1, seed=16), rand(48, seed=17)),
        (rand(48, seed=15), None, None),
        (None, rand(1, seed=16), None),
    ):
        layer = MoeLayer(experts, mlp, MoeResidual(*norms, *step, 1e-6))
        rows_of = (z, x, h, stream)
        both = ops.moe_with_shared_mlp(*rows_of, layer)
        for got, want in zip(both, REF.moe_with_shared_mlp(*rows_of, layer), strict=True):
            near(got, want)
        one = ops.moe_with_shared_mlp(*(t[:1] for t in rows_of), layer)
        for got, among in zip(one, both, strict=True):
            same(got, among[:1])
        if rows == 1:  # many rows take two launches
            many = ops.moe_with_shared_mlp(*(t.repeat(moe.PROMPT, 1) for t in rows_of), layer)
            for got, apart in zip(one, many, strict=True):
                same(got, apart[:1])


def test_the_mlp_beside_experts_has_a_stream_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few rows: it starts behind what its input needs, whoever reads it waits for it, and shares no counters with what
    runs meanwhile."""
    waits: list[tuple[str, str]] = []

    class Stream:
        def __init__(self, name: str):
            self.name = name

        def wait_stream(self, other: Stream) -> None:
            waits.append((self.name, other.name))

    h = rand(SIDE_STREAM_ROWS + 1, 48)
    gate_up = rand(64, 48, seed=1)
    down = rand(48, 32, seed=2)
    ops = TritonOps(DEVICE, pdl=False)
    twin = TritonOps(DEVICE, pdl=False)
    want, join = ops.dense_mlp(h, (gate_up, down), "gelu_tanh", side_stream=False)
    ops.pdl = True
    assert join() is True and not waits
    assert CUDA or "side_stream" not in vars(ops)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream("main"))
    monkeypatch.setattr(torch.cuda, "stream", lambda side: nullcontext())
    ops.__dict__["side_stream"] = twin, Stream("side")
    ops.semaphores = SimpleNamespace(device=DEVICE)  # type: ignore[assignment]  # no counters: nothing runs here
    got, join = ops.dense_mlp(h[:SIDE_STREAM_ROWS], (gate_up, down), "gelu_tanh", side_stream=True)
    assert waits == [("side", "main")]
    assert join() is False and waits == [("side", "main"), ("main", "side")]
    same(got, want[:SIDE_STREAM_ROWS])


@pytest.mark.parametrize("pairs,wide", [(16, 16), (32, 64), (128, 32)])
def test_moe_tiles(ops: TritonOps, pairs: int, wide: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts with no pair, with one tile and with several; a tile that reads another expert's pairs; more tiles than
    expected."""
    x = rand(90, 48)
    router = rand(6, 48, seed=2)
    router[2] = -router.abs().sum(0)  # seldom chosen
    z = ops.logits(rand(90, 48, seed=1).abs(), router, None)
    scale = rand(6, seed=3).abs() + 0.5
    gate_up = rand(6, 40, 48, seed=4)
    down = rand(6, 48, 20, seed=5)
    want = moe.experts(list_pairs(z, scale, 2, False), x, gate_up, down, "gelu_tanh", False)
    with monkeypatch.context() as patch:
        patch.setattr(moe, "expert_tile", lambda *_: moe.ExpertTile(pairs, wide, 2, 4))
        got = moe.experts(list_pairs(z, scale, 2, False), x, gate_up, down, "gelu_tanh", False)
    same(got, want)
    for r in range(0, 90, 9):
        alone = moe.experts(list_pairs(z[r : r + 1], scale, 2, False), x[r : r + 1], gate_up, down, "gelu_tanh", False)
        same(alone, got[r : r + 1])


# ---- choosing
def test_clusters(ops: TritonOps) -> None:
    g = rand(3, 24)
    centroids = rand(20, 24, seed=1)
    rows = rand(20, 9, 24, seed=2)
    tokens = torch.randperm(20 * 9).view(20, 9).to(DEVICE)
    seed, position = (torch.tensor(x, device=DEVICE) for x in ([1, -(1 << 40) - 3, 7], [0, 123456, 5]))
    temperature = torch.tensor([0.6, 40.0, 1.0], device=DEVICE)
    sampled = torch.tensor([True, True, False], device=DEVICE)
    cluster_bonus = REF.cluster_bonus(tokens, seed, position, temperature, sampled)
    near(ops.cluster_bonus(tokens, seed, position, temperature, sampled), cluster_bonus)
    chosen = []
    for to in (None, cluster_bonus):
        got = ops.clustered_logits(g, centroids, rows, 5, to)
        want = REF.clustered_logits(g, centroids, rows, 5, to)
        assert torch.equal(got[0], want[0])
        near(got[1], want[1])
        chosen.append(got[0])
    assert torch.equal(chosen[0][2], chosen[1][2]) and not torch.equal(chosen[0][1], chosen[1][1])


def test_clusters_that_tie(ops: TritonOps) -> None:
    """Equal scores give the lower id first, whether they stand in the same block of clusters or far apart."""
    z = rand(2, 550).repeat(1, 2)
    g = rand(2, 8)
    rows = rand(1100, 2, 8, seed=1)
    best, _ = choose.cluster_scores(z, None, g, rows, 40, False)
    assert torch.equal(best, z.sort(dim=-1, descending=True, stable=True).indices[:, :40])


def test_gumbel_argmax(ops: TritonOps) -> None:
    """Another noise than the twin's, noise on cold rows, a winner in the last partial chunk, ties."""
    z = rand(4, 5000)
    z[0, 4999] = z[0, 17] = 50.0
    seed = torch.tensor([1, 2, -(1 << 40) - 3, 1 << 62], device=DEVICE)
    position = torch.tensor([0, 5, 123456, 7], device=DEVICE)
    sampled = torch.tensor([False, True, True, True], device=DEVICE)
    assert torch.equal(ops.argmax(z), REF.argmax(z))
    got = ops.gumbel_argmax(z, seed, position, None, sampled)
    want = REF.gumbel_argmax(z, seed, position, None, sampled)
    assert int(got[0]) == 17 and torch.equal(got, want)
    tokens = torch.arange(5000, device=DEVICE).flip(0).expand(4, 5000)
    assert torch.equal(
        ops.gumbel_argmax(z, seed, position, tokens, sampled), REF.gumbel_argmax(z, seed, position, tokens, sampled)
    )
    assert not torch.equal(gumbel(seed[1:2], position[1:2], tokens[0]), gumbel(seed[2:3], position[1:2], tokens[0]))


def test_columns_are_clamped_in_place(ops: TritonOps) -> None:
    """Bounds of another column, or columns past a program's end left as they were."""
    x = rand(3, 1100, scale=3.0)
    low = rand(1100, seed=1) - 1.0
    want = x.clone().clamp_(low, low + 1.5)
    assert ops.clamp_columns(x, low, low + 1.5) is x and torch.equal(x, want)
