"""`ops/cuda/moe_gemv_int8.cu`: what it takes, its numbers on a CPU (tests/cuda) against their definition, and the
choice of experts."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from tests.cuda.emulator import Memory, missing
from tests.kernels import fields, no_kernel

from outrider.ops.backend import ExpertWeights
from outrider.ops.formats import MODES, DeviceWeight, IntegerFormat
from outrider.ops.registry import Unavailable
from outrider.ops.triton import moe_gemv_int8, nvrtc_kernels
from outrider.ops.triton.moe_gemv_int8 import (
    SOURCE,
    Mixture,
    MoeGemvInt8,
    MoeGemvLayer,
    MoeGemvPlan,
    SharedMLP,
    units_of,
)
from outrider.ops.triton.quant_moe import QuantExperts, round_experts
from outrider.ops.triton.repack import QuantWeight, repack

ROOM = 226 << 10
ROUTER = torch.zeros((128, 2816), dtype=torch.bfloat16)
GROUPED, BY_ROW = MODES["int8"]
emulated = pytest.mark.skipif(missing() is not None, reason=f"kernels in CUDA C++ are not emulated: {missing()}")


def random(*shape: int, seed: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).to(torch.bfloat16)


def experts(count: int, n: int, k: int, seed: int) -> tuple[QuantExperts, Tensor]:
    """DeviceWeight by the GPU, and what it stands for."""
    dense = random(count, n, k, seed=seed, scale=k**-0.5)
    format = GROUPED if k % 128 == 0 else BY_ROW
    packed_experts = round_experts(dense, format)
    assert packed_experts is not None
    return packed_experts, format.quantise(dense).dense().double()


def matrix(n: int, k: int, seed: int) -> tuple[QuantWeight, Tensor]:
    weight = (GROUPED if k % 128 == 0 else BY_ROW).quantise(random(n, k, seed=seed, scale=k**-0.5))
    packed = repack(weight)
    assert packed is not None
    return packed, weight.dense().double()


def mlp(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    gate, up = (x.double() @ gate_up.T).to(torch.bfloat16).chunk(2, -1)
    h = (torch.nn.functional.gelu(gate.float(), approximate="tanh").to(torch.bfloat16) * up).double()
    return h @ down.T


@emulated
@pytest.mark.parametrize(("rows", "top", "inner", "beside"), [(1, 2, 520, True), (3, 3, 200, False)])
def test_tokens_are_their_definition(
    rows: int, top: int, inner: int, beside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiles, chunks, tokens or slots mixed up; a last chunk that is not whole; spans of the dense MLP; ties of logits;
    copies not waited for; sums that are overwritten before they were added up."""
    count = 48
    hidden = 1024
    wide = 1032
    gate_up, gate_up_d = experts(count, 2 * inner, hidden, 1)
    down, down_d = experts(count, hidden, inner, 2)
    wide_gu, wide_gu_d = matrix(2 * wide, hidden, 3)
    wide_down, wide_down_d = matrix(hidden, wide, 4)
    assert units_of(wide_gu).splits > 1 and units_of(wide_down).splits > 1
    z = torch.randn((rows, count), generator=torch.Generator().manual_seed(5))
    z[:, 9] += 2.0  # many choose it
    z[0, 30] = z[0, 7] = z.max() + 0.5  # the lower one comes first
    z[0, 20] = z[0, 33]
    scale = torch.rand(count, generator=torch.Generator().manual_seed(6)) + 0.5
    x, h, router, router_in = (random(n, hidden, seed=7 + i) for i, n in enumerate((rows, rows, count, rows)))
    memory = Memory()
    hold = memory.hold
    monkeypatch.setattr(
        nvrtc_kernels, "Kernel", lambda source, name, flags, **_: memory.kernel(source, name, flags, seed=3)
    )
    few = MoeGemvInt8(torch.device("cpu"), torch.zeros(0, dtype=torch.int32))
    few.sms = 13

    def kept(w: QuantWeight) -> QuantWeight:
        scale, factor = (None if t is None else hold(t) for t in (w.scale, w.factor))
        return replace(w, words=hold(w.words), scale=scale, factor=factor)

    gate_up = replace(gate_up, matrix=kept(gate_up.matrix))
    down = replace(down, matrix=kept(down.matrix))
    dense = SharedMLP.of(kept(wide_gu), kept(wide_down), hidden, down.matrix.chunks) if beside else None
    assert (dense is not None) == beside
    packed_experts = ExpertWeights(hold(router), hold(scale), gate_up, down, top, "gelu_tanh")
    plan = MoeGemvPlan.of(rows, packed_experts, dense, few.sms, 1 << 20)
    assert plan is not None and plan.stages == 4 and plan.router[1] > 1
    kernels = few.kernels(plan, "gelu_tanh")
    assert kernels is not None
    layer = MoeGemvLayer(packed_experts, dense, plan, kernels)
    with memory:
        logits = few.logits(layer, hold(router_in), False)
        pairs, weight, sums = few.answers(layer, hold(z), hold(x), hold(h), False)
    torch.testing.assert_close(logits, router_in.float() @ router.float().T, rtol=1e-4, atol=1e-4)
    for row in range(rows):
        order = sorted(range(count), key=lambda e: (-float(z[row, e]), e))[:top]
        p = z[row].double().softmax(0)[order]
        of = slice(row * top, row * top + top)
        torch.testing.assert_close(weight[of].double(), p / p.sum() * scale[order].double(), rtol=1e-6, atol=0)
        want = torch.stack([mlp(x[row], gate_up_d[e], down_d[e]) for e in order])
        torch.testing.assert_close(pairs[of].double(), want, rtol=2e-2, atol=2e-2)
    assert len(sums) == (units_of(wide_down).splits if beside else 0)
    if beside:
        torch.testing.assert_close(sums.double().sum(0), mlp(h, wide_gu_d, wide_down_d), rtol=2e-2, atol=2e-2)


def shells(count: int, hidden: int, inner: int) -> tuple[QuantExperts, QuantExperts]:
    """Weights of these shapes as `--quantize int8` makes them, without numbers."""

    def shell(n: int, k: int) -> QuantExperts:
        part, _ = matrix(64, k, 0)
        tiles = count * n // 64
        words = torch.empty((tiles, *part.words.shape[1:]), dtype=torch.int32, device="meta")
        return QuantExperts((count, n, k), replace(part, shape=(count * n, k), words=words))

    return shell(2 * inner, hidden), shell(hidden, inner)


def weights(gate_up: DeviceWeight, down: DeviceWeight, top: int = 8, router: Tensor = ROUTER) -> ExpertWeights:
    return ExpertWeights(router, torch.ones(len(router)), gate_up, down, top, "gelu_tanh")


def test_gemma_is_dealt_out_evenly() -> None:
    """26B-A4B: 8 experts of 704 beside an MLP of 2112, so 968 tiles of gate_up; of down a warp for each of 2,112
    units."""
    gate_up, down = shells(128, 2816, 704)
    wide = SharedMLP.of(matrix(2 * 2112, 2816, 1)[0], matrix(2816, 2112, 2)[0], 2816, down.matrix.chunks)
    assert wide is not None
    both, alone, five = (
        MoeGemvPlan.of(n, weights(gate_up, down), beside, 132, ROOM) for n, beside in ((1, wide), (1, None), (5, wide))
    )
    assert both is not None and (both.chunks, both.stages, both.down_chunks, both.down_warps) == (22, 4, 6, 16)
    assert alone is not None and (alone.chunks, alone.stages, alone.down_chunks, alone.down_warps) == (22, 4, 6, 11)
    assert five is not None and (five.chunks, five.stages, five.down_chunks, five.down_warps) == (22, 4, 6, 9)
    assert max(p for plan in (both, alone, five) for p in (plan.gate_up_shared, plan.down_shared)) <= ROOM
    assert {name: getattr(both.shape, name) for name, *_ in Mixture._fields_} == dict(
        rows=1,
        experts=128,
        top=8,
        hidden=2816,
        inner=704,
        dense=2112,
        dense_span=5,
        dense_splits=5,
        down_chunks=17,
        down_span=5,
        down_splits=4,
    )


def test_what_the_kernels_take() -> None:
    gate_up, down = shells(128, 2816, 704)

    def taken(
        first: object, second: object, rows: int = 1, top: int = 8, room: int = ROOM, router: Tensor = ROUTER
    ) -> bool:
        experts = weights(first, second, top, router)  # type: ignore[arg-type]
        return MoeGemvPlan.of(rows, experts, None, 132, room) is not None

    assert (
        taken(gate_up, down)
        and not taken(gate_up, down, router=ROUTER.float())
        and not taken(gate_up, down, router=ROUTER[:, :2560])
    )
    by_64 = repack(IntegerFormat(8, 64).quantise(random(64, 2816, seed=0)))
    assert by_64 is not None
    assert (
        not taken(torch.zeros(8, 8), down)
        and not taken(gate_up, torch.zeros(8, 8))
        and not taken(gate_up, down, room=99 << 10)
    )
    assert (
        not taken(replace(gate_up, matrix=by_64), down)
        and not taken(down, gate_up)
        and not taken(*shells(256, 2816, 704))
    )
    assert not taken(*shells(128, 5376, 704))  # 42 chunks: no warp for each
    assert not taken(*shells(128, 2816, 768))  # groups of down have factors
    few = MoeGemvInt8(torch.device("cpu"), torch.zeros(0, dtype=torch.int32))
    x = torch.zeros((2, 2816), dtype=torch.bfloat16)
    experts = weights(gate_up, down)
    assert few.plan(x, experts, None) is not None and few.plan(x.float(), experts, None) is None
    assert few.plan(x.repeat(2, 1), experts, None) is None  # Triton is faster
    assert taken(gate_up, down, 8) and not taken(gate_up, down, 9) and not taken(gate_up, down, 5, top=13)
    assert (
        SharedMLP.of(x, x, 2816, 6) is None
        and SharedMLP.of(matrix(256, 512, 1)[0], matrix(512, 128, 2)[0], 512, 6) is None
    )
    assert SharedMLP.of(matrix(2 * 1112, 512, 1)[0], matrix(512, 1112, 2)[0], 512, 4) is None  # spans of five chunks


@pytest.mark.parametrize(
    ("rows", "top", "taken"),
    [(0, 8, False), (1, 32, True), (1, 33, False), (2, 16, True), (2, 17, False), (3, 20, False)],
)
def test_how_many_experts_a_token_may_choose(rows: int, top: int, taken: bool) -> None:
    """A warp chooses them, and among several tokens a place has four bits."""
    small = torch.zeros((128, 1024), dtype=torch.bfloat16)
    plan = MoeGemvPlan.of(rows, weights(*shells(128, 1024, 600), top, small), None, 132, ROOM)
    assert (plan is not None) == taken


def test_the_kernels_are_told_what_they_read() -> None:
    """Fields by their order: one that is missing shifts all behind it."""
    order = "rows experts top hidden inner dense dense_span dense_splits down_chunks down_span down_splits"
    assert fields(Mixture) == order
    for name, value in (
        ("WORDS", moe_gemv_int8.WORDS),
        ("X_BYTES", moe_gemv_int8.X_BYTES),
        ("CHOICES", moe_gemv_int8.CHOICES),
    ):
        assert re.search(rf"#define {name} {value}\b", SOURCE.read_text())
    assert moe_gemv_int8.STAGE == moe_gemv_int8.WORDS + 64


def test_a_compiler_that_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc_kernels, "Kernel", no_kernel)
    few = MoeGemvInt8(torch.device("cpu"), torch.zeros(0, dtype=torch.int32))
    gate_up, down = shells(128, 2816, 704)
    plan = few.plan(torch.zeros((1, 2816), dtype=torch.bfloat16), weights(gate_up, down), None)
    assert plan is not None
    with pytest.raises(Unavailable, match=r"moe_gemv_int8\.cu: .*no machine code"):
        few.kernels(plan, "gelu_tanh")
