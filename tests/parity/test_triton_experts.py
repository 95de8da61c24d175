"""Quantised experts against their formats' definitions, on the GPU where there is one, else through Triton's
interpreter."""

from __future__ import annotations

import os

import pytest
import torch

CUDA = torch.cuda.is_available()
if not CUDA:
    os.environ["TRITON_INTERPRET"] = "1"

pytest.importorskip("triton")

from tests.engines import VARIANTS, request, run, tiny_engine  # noqa: E402
from tests.kv import build_kv  # noqa: E402
from tests.parity.test_triton_quant import DEVICE, DTYPE, REF, WEIGHTS, near, product_error, rand  # noqa: E402

from outrider.models.config import ModelConfig  # noqa: E402
from outrider.models.decoder import TextModel  # noqa: E402
from outrider.ops.backend import ExpertWeights, MoeLayer, MoeResidual  # noqa: E402
from outrider.ops.formats import MODES, DeviceWeight, IntegerFormat, Weight, stack  # noqa: E402
from outrider.ops.reference import ReferenceOps, as_tensor  # noqa: E402
from outrider.ops.triton import TritonOps, moe  # noqa: E402
from outrider.ops.triton.quant_moe import ExpertTile, QuantExperts, hold_experts  # noqa: E402
from outrider.ops.triton.repack import repack  # noqa: E402
from outrider.ops.triton.routing import list_pairs  # noqa: E402
from outrider.weights.load import dummy_weights  # noqa: E402

EXPERTS = 5
TOP = 2


def experts(name: str, n: int, k: int) -> Weight:
    """Unlike experts: a format's matrix of EXPERTS · n rows, cut."""
    whole = WEIGHTS[name](EXPERTS * n, k)
    return stack([whole.rows(e * n, (e + 1) * n) for e in range(EXPERTS)]).to(DEVICE)


def inputs(rows: int, hidden: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Router logits, x, and the experts' own factors."""
    z = rand(rows, EXPERTS, seed=1)
    x = rand(rows, hidden, seed=2)
    scale = rand(EXPERTS, seed=3).abs() + 0.5
    return z.to(DEVICE), x.to(DEVICE, DTYPE), scale.to(DEVICE)


def defined(
    z: torch.Tensor, x: torch.Tensor, scale: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    router = torch.eye(EXPERTS, device=DEVICE)  # hands the logits on
    return REF.moe(z, x.float(), ExpertWeights(router, scale, gate_up.float(), down.float(), TOP, "gelu_tanh"))


@pytest.mark.parametrize("name", [n for n in WEIGHTS if n != "int4 ordered"])
def test_product_is_its_definition(name: str) -> None:
    """Experts that begin within a tile of 64 rows; a factor, a zero_point or a sum of another expert, pair or group; an
    edge that is stored."""
    n = 72
    k = 256
    rows = 3
    weight = experts(name, n, k)
    packed_experts = hold_experts(weight)
    assert packed_experts is not None and packed_experts.shape == (EXPERTS, n, k)
    z, x, scale = inputs(rows, k)
    pairs = list_pairs(z, scale, TOP, False)
    out = torch.full((rows * TOP, n), torch.nan, dtype=DTYPE, device=DEVICE)
    moe.grouped_gemm(x, packed_experts, out, pairs, TOP, None, False)
    chosen = z.topk(TOP, -1).indices.flatten()
    want = torch.einsum("pnk,pk->pn", weight.dense()[chosen], x.float().repeat_interleave(TOP, 0))
    near(out, want, product_error(name))


@pytest.mark.parametrize("name", ["int4 g32", "Q4_1"])
def test_a_mixture_is_its_definition_and_rows_stand_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One row, few and many an expert; gate and up mixed up; a row's bits with other rows beside it and in other
    tiles."""
    hidden, inner = (2816, 704) if CUDA else (96, 32)
    gate_up = experts(name, 2 * inner, hidden)
    down = experts(name, hidden, inner)
    first = hold_experts(gate_up)
    second = hold_experts(down)
    assert first is not None and second is not None
    z, x, scale = inputs(300 if CUDA else 24, hidden)

    def run(rows: int) -> torch.Tensor:
        return moe.experts(list_pairs(z[:rows], scale, TOP, False), x[:rows], first, second, "gelu_tanh", False)

    whole = run(len(x))
    near(whole, defined(z, x, scale, gate_up.dense(), down.dense()), 1e-2 if CUDA else 5e-4)
    few = run(1), run(3)
    small = ExpertTile(16, 32, 2, 2)
    wide = ExpertTile(32, 64, 2, 4)
    monkeypatch.setattr(moe, "choose_tile", lambda pairs, w, gated, shared: small if gated else wide)
    for got in (*few, run(len(x))):
        same = whole[: len(got)]
        if CUDA:
            assert torch.equal(got, same)
        else:  # the interpreter's products are numpy's, whose order is not ours
            near(got, same, 1e-6)


def test_one_product_quantised_and_the_other_dense() -> None:
    hidden = 64
    inner = 32
    dense = rand(EXPERTS, 2 * inner, hidden, seed=4, scale=0.1), rand(EXPERTS, hidden, inner, seed=5, scale=0.1)
    gate_up, down = (t.to(DEVICE, DTYPE) for t in dense)
    weights = [IntegerFormat(4, 32).quantise(t) for t in (gate_up, down)]
    z, x, scale = inputs(3, hidden)
    both: list[tuple[DeviceWeight | None, DeviceWeight | None]] = [
        (hold_experts(weights[0]), down),
        (gate_up, hold_experts(weights[1])),
    ]
    meant = [(weights[0].dense(), down), (gate_up, weights[1].dense())]
    for (a, b), (c, d) in zip(both, meant, strict=True):
        assert a is not None and b is not None
        near(
            moe.experts(list_pairs(z, scale, TOP, False), x, a, b, "gelu_tanh", False), defined(z, x, scale, c, d), 1e-2
        )


@pytest.mark.parametrize("dense", ["int8", "plain"])
def test_a_layer_has_the_bits_of_one_row_in_any_company(dense: str) -> None:
    """On a Hopper up to 8 rows go through `moe_gemv_int8`, a dense MLP in int8 too; 300 rows are added and normed in
    two launches."""
    count, hidden, inner, wide, top = (128, 2816, 704, 2112, 8) if CUDA else (5, 256, 48, 136, 2)
    ops = TritonOps(DEVICE, pdl=False)

    def weight(*shape: int, seed: int) -> torch.Tensor:
        return rand(*shape, seed=seed, scale=shape[-1] ** -0.5).to(DEVICE, torch.bfloat16 if CUDA else DTYPE)

    gate_up, down = (
        ops.quantize(weight(*s, seed=i), "int8")
        for i, s in enumerate(((count, 2 * inner, hidden), (count, hidden, inner)))
    )
    mlp: list[DeviceWeight] = [weight(2 * wide, hidden, seed=3), weight(hidden, wide, seed=4)]
    if dense == "int8":
        mlp = [
            m
            for m in (repack(f.quantise(as_tensor(w))) for f, w in zip(MODES["int8"], mlp, strict=True))
            if m is not None
        ]
    router = weight(count, hidden, seed=5) * 4
    scale = rand(count, seed=6).abs().to(DEVICE) + 0.5
    norms = [weight(1, hidden, seed=7 + i)[0] * 30 for i in range(4)]
    scalar = torch.full((1,), 0.7, dtype=DTYPE, device=DEVICE)
    packed_experts = ExpertWeights(router, scale, gate_up, down, top, "gelu_tanh")
    end = MoeResidual(norms[0], norms[1], norms[2], scalar, norms[3], 1e-6)
    most = 300 if CUDA else 3
    z, x, h, stream = (rand(most, hidden, seed=11 + i).to(DEVICE, DTYPE) for i in range(4))

    def run(lo: int, hi: int) -> tuple[torch.Tensor, torch.Tensor]:
        rows = (t[lo:hi] for t in (z, x, h, stream))
        return ops.moe_with_shared_mlp(*rows, MoeLayer(packed_experts, (mlp[0], mlp[1]), end))

    whole = run(0, most)
    for lo, hi in ((0, 1), (1, 2), (most - 1, most), (0, 2)) + (((0, 5), (1, 9), (3, 43)) if CUDA else ()):
        for got, want in zip(run(lo, hi), whole, strict=True):
            assert torch.equal(got, want[lo:hi])


def test_spans_of_the_dense_mlp_are_added_where_it_is_mixed() -> None:
    pairs = rand(2 * TOP, 64).to(DEVICE, DTYPE)
    weight = rand(2 * TOP, seed=1).to(DEVICE)
    x = rand(2, 64, seed=2).to(DEVICE, DTYPE)
    parts = rand(6, 64, seed=3).view(3, 2, 64).to(DEVICE)
    norms = [rand(64, seed=4 + i).to(DEVICE, DTYPE) for i in range(4)]
    end = MoeResidual(norms[0], norms[1], norms[2], None, norms[3], 1e-6)
    added = ((parts[0] + parts[1]) + parts[2]).to(DTYPE)
    whole = moe.mix(pairs, weight, added, x, end, False)
    spans = moe.mix(pairs, weight, parts, x, end, False)
    assert all(torch.equal(a, b) for a, b in zip(whole, spans, strict=True))


@pytest.mark.parametrize("rows", [1, 2])
def test_logits_that_are_no_numbers_read_no_other_memory(rows: int) -> None:
    """Ranks are then no order: the experts they would name lie far outside."""
    packed_experts = hold_experts(experts("int4 g32", 64, 64))
    assert packed_experts is not None
    z, x, scale = inputs(rows, 64)
    z[:] = torch.nan
    assert (
        moe.experts(
            list_pairs(z, scale, TOP, False), x, packed_experts, x.new_zeros(EXPERTS, 64, 32), "gelu_tanh", False
        ).shape
        == x.shape
    )


@pytest.mark.parametrize("mode", ["int4", "int8", "fp8"])
def test_dense_experts_are_rounded_when_asked(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some rows at a time, as if all were rounded at once; 704 columns are no whole groups of 128, and then rows have
    one factor."""
    from outrider.ops.formats import MODES
    from outrider.ops.triton import quant_moe

    ops = TritonOps(DEVICE, pdl=False)
    dense = rand(3, 40, 160, seed=3, scale=0.05).to(DEVICE, torch.bfloat16)
    format = next(f for f in MODES[mode] if f.alignment() <= 1 or 160 % f.alignment() == 0)
    whole = hold_experts(format.quantise(dense))
    monkeypatch.setattr(quant_moe, "SLICE", 64 * 160)
    packed = ops.quantize(dense, mode)
    assert (
        isinstance(packed, QuantExperts)
        and whole is not None
        and packed.shape == (3, 40, 160)
        and packed.nbytes == whole.nbytes
    )
    for name in ("words", "scale", "factor"):
        one = getattr(packed.matrix, name)
        other = getattr(whole.matrix, name)
        assert (one is None and other is None) or torch.equal(one, other), name


def test_experts_with_an_order_of_columns_stay_dense() -> None:
    matrices = [WEIGHTS["int4 ordered"](32, 64) for _ in range(2)]
    assert TritonOps(DEVICE, pdl=False).pack_weights([stack(matrices)], DEVICE) is None


class OnlyExperts(ReferenceOps):
    """The definition everywhere else: the interpreter would take a minute."""

    def __init__(self) -> None:
        self.fast = TritonOps(DEVICE, pdl=False)

    def moe(self, router_in: torch.Tensor, x: torch.Tensor, experts: ExpertWeights) -> torch.Tensor:
        return self.fast.moe(router_in, x, experts)


def test_a_quantised_mixture_decodes_alike_with_and_without_drafts() -> None:
    """Logits are those of the values the weights stand for; drafts, several sequences at once, leave the plain
    tokens."""
    raw = {**VARIANTS["moe"], "num_hidden_layers": 1, "layer_types": ["full_attention"], "moe_intermediate_size": 32}
    config = ModelConfig.from_hf(raw)
    ops = OnlyExperts()
    weights = dict[str, DeviceWeight]()
    meant = dict[str, DeviceWeight]()
    for name, w in dummy_weights(config, "cpu", torch.float32, None, None, 3).items():
        assert isinstance(w, torch.Tensor)
        dense = w.to(DEVICE, DTYPE if w.dim() > 1 else None) * (12.0 if w.dim() > 1 else 1.0)
        weights[name] = ops.fast.quantize(dense, "int4") if ".experts_" in name else dense
        meant[name] = IntegerFormat(4, 32).quantise(dense).dense() if ".experts_" in name else dense
    assert isinstance(weights["layers.0.experts_gate_up"], QuantExperts)
    model = TextModel(config, weights, ops)
    plain = TextModel(config, meant, ReferenceOps())
    if not CUDA:  # bfloat16 may route a row elsewhere
        ids = torch.arange(3, 9)
        views = [build_kv(config, 1, len(ids)).view([(0, len(ids))]) for _ in range(2)]
        near(model.logits(model.forward(ids, views[0]).hidden), plain.logits(plain.forward(ids, views[1]).hidden), 1e-3)
    prompts = [[3, 5, 7, 9], [4, 8, 4, 8, 4]]
    answers = []
    for k in (0, 3):
        engine = tiny_engine(model=model, k=k, graphs=False, kv=DTYPE)
        requests = [request(str(i), p, k, bool(k), max_tokens=5) for i, p in enumerate(prompts)]
        answers.append(run(engine, requests) if k else {r.id: run(engine, [r])[r.id] for r in requests})
    assert answers[0] == answers[1] and answers[0]["0"] != answers[0]["1"]
