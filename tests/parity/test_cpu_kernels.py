"""C kernels against the torch reference, on every instruction set that this machine can run; and row invariance, bit
for bit.

Names what it catches: a wrong lane or nibble, a saturating 16-bit sum, a missing zero-point correction, a mask off by
one, a page table ignored, a tile that rounds differently from another.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.dummy_checkpoint import HALVES, set_half, write_gguf
from tests.engines import request, run
from tests.kv import build_kv
from tests.unit.engine.test_host_cycle import engines
from tests.unit.ops.test_cpu_packing import part
from tests.unit.weights.test_gguf_load import EDGE, MOE, QWEN
from torch import Tensor

from outrider.models.config import DrafterConfig, ModelConfig
from outrider.models.decoder import TextModel
from outrider.models.drafter import MTPNet
from outrider.ops.backend import ExpertWeights
from outrider.ops.cpu.forward import CompiledDrafter, CompiledModel
from outrider.ops.cpu.lib import FILE_TYPES, PackedKind
from outrider.ops.cpu.ops import CpuOps
from outrider.ops.cpu.packing import PackedWeight, c_weight
from outrider.ops.formats import BLOCKS
from outrider.ops.noise import gumbel
from outrider.ops.reference import ReferenceOps
from outrider.spec.slot_sampling import sampling_batch
from outrider.train import design
from outrider.types import DraftNoise, SamplingParams
from outrider.weights.load import dummy_weights, load_target

KINDS = (*FILE_TYPES, "mixed", "float32", "bfloat16", "float16")
REF = ReferenceOps()


def seeded(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def weight(ops: CpuOps, kind: str, n: int, k: int) -> PackedWeight | Tensor:
    if kind.startswith(("float", "bfloat")):
        return ops.prepare((seeded(n, k, seed=1) * 0.05).to(getattr(torch, kind)))
    if kind == "mixed":
        packed = ops.packer.pack([part("Q4_K", 16, k), part("Q6_K", 16, k, 1), part("Q5_0", n - 32, k, 2)])
    else:
        packed = ops.packer.pack([part(kind, n, k)])
    assert packed is not None
    return packed


def whole(rows: int, k: int) -> Tensor:
    """Activations that int8 blocks hold exactly: whole numbers with a 127 in every block."""
    x = torch.randint(-127, 128, (rows, k), generator=torch.Generator().manual_seed(2)).float()
    x[:, ::32] = 127.0
    return x


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "k"), [(48, 96), (40, 288), (40, 512)])
def test_linear_is_exact_on_whole_numbers(ops: CpuOps, kind: str, n: int, k: int) -> None:
    if k % 256 and (kind == "mixed" or (kind in BLOCKS and BLOCKS[kind][0] == 256)):
        k = 256
    w = weight(ops, kind, n, k)
    x = whole(11, k)
    bias = seeded(n)
    want = x.double() @ ops.unpack(w).double().T + bias
    reach = x.abs().double() @ ops.unpack(w).abs().double().T
    assert ((ops.linear(x, w, bias) - want).abs() <= 2e-6 * reach + 1e-6).all()


def test_extremes_do_not_saturate(ops: CpuOps) -> None:
    """All weights and activations at their ends: 16-bit sums would overflow."""
    for kind in FILE_TYPES:
        p = part(kind, 16, 256)
        blocks = p.tensors["blocks"].numpy().reshape(-1, BLOCKS[kind][1])
        for fill in (0xFF, 0x80, 0x00):
            blocks[:] = fill
            if kind == "Q6_K":
                blocks[:, 192:208] = 0x7F
            for at, value in zip(HALVES.get(kind, (0,)), (0.5, -1.0), strict=False):
                set_half(kind, blocks, at, np.full(len(blocks), abs(value) if kind == "MXFP4" else value))
            w = ops.packer.pack([p])
            assert torch.equal(ops.unpack(w), p.dense())
            for sign in (1.0, -1.0):
                x = torch.full((3, 256), 127.0 * sign)
                want = x.double() @ ops.unpack(w).double().T
                assert torch.allclose(ops.linear(x, w).double(), want, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_products_are_row_invariant(ops: CpuOps, kind: str) -> None:
    w = weight(ops, kind, 80, 256)
    x = seeded(150, 256)
    alone = torch.cat([ops.linear(x[i : i + 1], w) for i in range(150)])
    for m in (*range(1, 33), 150):
        assert torch.equal(ops.linear(x[:m], w), alone[:m]), m
        assert torch.equal(ops.linear(x[150 - m :], w), alone[150 - m :]), m


@pytest.mark.parametrize("act", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("inter", [64, 40])
def test_gated_linear(ops: CpuOps, act: str, inter: int) -> None:
    x = seeded(9, 96)
    dense = seeded(2 * inter, 96) * 0.2
    assert torch.allclose(ops.gated_linear(x, dense, act), REF.gated_linear(x, dense, act), atol=2e-5, rtol=1e-5)
    packed = ops.quantize(dense, "int8")
    gate, up = ops.linear(x, packed).chunk(2, -1)
    assert torch.equal(ops.gated_linear(x, packed, act), ops.act_mul(gate, up, act))


def test_row_ops(ops: CpuOps) -> None:
    for n in (64, 40, 7):
        x = seeded(5, n)
        y = seeded(5, n, seed=1)
        w = seeded(n, seed=2)
        post = seeded(n, seed=3)
        scale = torch.tensor([0.7])
        assert torch.allclose(ops.rms_norm(x, w, 1e-5), REF.rms_norm(x, w, 1e-5), atol=1e-6)
        assert torch.allclose(ops.rms_norm(x, None, 1e-5), REF.rms_norm(x, None, 1e-5), atol=1e-6)
        for args in ((None, None, w), (post, scale, w), (post, None, None), (None, scale, None)):
            for got, want in zip(
                ops.residual_norm(x, y, *args, 1e-6), REF.residual_norm(x, y, *args, 1e-6), strict=True
            ):
                assert torch.allclose(got, want, atol=2e-6)
    big = torch.tensor([[-200.0, -100.0, -20.0, -1.0, 0.0, 1.0, 20.0, 100.0, 200.0]])
    for act in ("silu", "gelu_tanh"):
        assert torch.allclose(
            ops.act_mul(big, torch.ones_like(big), act), REF.act_mul(big, torch.ones_like(big), act), atol=1e-6
        )


def test_logits_and_embedding(ops: CpuOps) -> None:
    table = ops.packer.pack([part("Q8_0", 100, 64)])
    dense = ops.unpack(table)
    h = whole(4, 64)
    assert torch.allclose(ops.logits(h, table, None), h @ dense.T, rtol=1e-5, atol=1e-4)
    assert torch.allclose(ops.logits(h, table, 30.0), torch.tanh(h @ dense.T / 30.0) * 30.0, atol=1e-4)
    ids = torch.tensor([3, 99, 0, 3])
    assert torch.equal(ops.embed(ids, table, 8.0), dense[ids] * 8.0)
    bf16 = dense.bfloat16()
    assert torch.equal(ops.embed(ids, bf16, 7.9), bf16[ids].float() * float(torch.tensor(7.9, dtype=torch.bfloat16)))


def test_clustered_logits(ops: CpuOps) -> None:
    # 24 rows a cluster: groups straddle clusters
    g = whole(3, 64)
    centroids = seeded(20, 64)
    rows = seeded(20 * 24, 64)
    for packed in (rows.view(20, 24, 64), ops.quantize(rows, "int8").view(20, 24, 64)):
        best, z = ops.clustered_logits(g, centroids, packed, 5)
        want_best, want = REF.clustered_logits(g, centroids, ops.unpack(packed).view(20, 24, 64), 5)
        assert torch.equal(best, want_best) and torch.allclose(z, want, rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize(("clusters", "size"), [(20, 9), (64, 48), (7, 33)])  # neither need divide into sixteens
def test_cluster_lean(ops: CpuOps, clusters: int, size: int) -> None:
    tokens = torch.randperm(clusters * size, generator=torch.Generator().manual_seed(1)).view(clusters, size)
    seed = torch.tensor([1, -(1 << 40) - 3, 1 << 62, 5])
    position = torch.tensor([0, 123456, 7, 8])
    temperature = torch.tensor([1.0, 0.3, 1.7, 1.0])
    sampled = torch.tensor([True, True, True, False])
    cluster_bonus = ops.cluster_bonus(tokens, seed, position, temperature, sampled)
    assert torch.allclose(
        cluster_bonus, REF.cluster_bonus(tokens, seed, position, temperature, sampled), rtol=1e-5, atol=1e-6
    )
    assert not cluster_bonus[3].any() and torch.equal(
        ops.cluster_bonus(tokens, seed[1:2], position[1:2], temperature[1:2], sampled[1:2]), cluster_bonus[1:2]
    )

    g = whole(4, 64)
    centroids = seeded(clusters, 64) * 1e-3
    rows = seeded(clusters * size, 64).view(clusters, size, 64)
    best, _ = ops.clustered_logits(g, centroids, rows, 5, cluster_bonus)
    assert torch.equal(best, REF.clustered_logits(g, centroids, rows, 5, cluster_bonus)[0])
    assert not torch.equal(best[:3], ops.clustered_logits(g, centroids, rows, 5)[0][:3])


def test_choose(ops: CpuOps) -> None:
    rows = 40
    n = 1003
    z = seeded(rows, n) * 3
    z[10:20] *= 0.01  # any column may win,
    z[20:25] *= 10.0  # few may,
    z[25:30] += 10000.0  # sums are rounded,
    z[30:33] = 1.0  # and noise alone decides
    z[:, 7] = float("-inf")
    seed = torch.arange(rows) * 7919 - 11
    position = torch.arange(rows) + 5
    sampled = torch.arange(rows) % 3 != 0
    tokens = torch.stack([torch.randperm(50000)[:n] for _ in range(rows)])
    for ids in (None, tokens):
        got = ops.gumbel_argmax(z, seed, position, ids, sampled)
        noisy = z + gumbel(seed[:, None], position[:, None], torch.arange(n) if ids is None else ids) * sampled[:, None]
        # logarithms differ in the last bit: the choice must be the best but for that
        assert (noisy.gather(1, got[:, None])[:, 0] >= noisy.amax(-1) - (1e-5 + 2e-7 * z.amax(-1).abs())).all()

        def one(i):
            return [None if t is None else t[i : i + 1] for t in (z, seed, position, ids, sampled)]

        assert torch.equal(got, torch.cat([ops.gumbel_argmax(*one(i)) for i in range(rows)]))
    assert torch.equal(ops.gumbel_argmax(z, seed, position, None, ~sampled)[sampled], z[sampled].argmax(-1))


def test_logprobs(ops: CpuOps) -> None:
    """Those of the definition, a row's the same bits beside any others; catches: a tail that is no whole vector, equals
    out of order."""
    gen = torch.Generator().manual_seed(5)
    z = torch.randn(5, 5003, generator=gen) * 4
    z[1, 40] = z[1, 4999] = z[1].max() + 1.0
    z[2] -= 200.0
    tokens = torch.tensor([0, 5002, 17, 4096, 31])
    got = ops.logprob_rows(z, tokens, 20)
    want = REF.logprob_rows(z, tokens, 20)
    assert torch.allclose(got[:, :21], want[:, :21], atol=3e-6, rtol=1e-6) and got[1, 21:23].tolist() == [40.0, 4999.0]
    assert torch.equal(got[[0, 2, 3, 4], 21:], want[[0, 2, 3, 4], 21:])
    for i in range(5):
        alone = ops.logprob_rows(z[i : i + 1], tokens[i : i + 1], 3)[0]
        assert torch.equal(alone, torch.cat((got[i, :4], got[i, 21:24])))
    assert torch.equal(ops.logprob_rows(z, tokens, 0), got[:, :1])


# ---- whole models -------------------------------------------------------------------------------------------------
BASE = dict(
    vocab_size=96,
    hidden_size=64,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=96,
    head_dim=32,
)
GEMMA4 = BASE | dict(
    model_type="gemma4_text", num_hidden_layers=4, global_head_dim=64, num_global_key_value_heads=1, sliding_window=24,
    final_logit_softcapping=30.0, hidden_size_per_layer_input=0,
    layer_types=["sliding_attention", "full_attention"] * 2,
)  # fmt: skip
MODELS = {
    "llama": BASE | dict(model_type="llama", mlp_bias=True, attention_bias=True),
    "mistral": BASE | dict(model_type="mistral", sliding_window=24),
    "qwen2": BASE | dict(model_type="qwen2"),
    "qwen3": BASE | dict(model_type="qwen3"),
    "gemma3": BASE | dict(model_type="gemma3_text", sliding_window=24, sliding_window_pattern=2),
    "gemma4_dense": GEMMA4 | dict(attention_k_eq_v=True),
    "gemma4_moe": GEMMA4 | dict(enable_moe_block=True, num_experts=6, top_k_experts=2, moe_intermediate_size=32),
    "gemma4_edge": GEMMA4 | dict(num_kv_shared_layers=2, hidden_size_per_layer_input=32, num_global_key_value_heads=2),
}


@pytest.mark.parametrize("quantize", ["int4", None])
@pytest.mark.parametrize("name", MODELS)
def test_compiled_models(ops: CpuOps, name: str, quantize: str | None) -> None:
    """One call gives the bits of the single operations, whatever the chunks; and both agree with the reference."""
    config = ModelConfig.from_hf(MODELS[name])
    weights = dummy_weights(config, "cpu", torch.float32, ops, quantize, seed=3)
    model = TextModel(config, weights, ops)
    compiled = ops.compile(model)
    assert isinstance(compiled, CompiledModel)
    ids = torch.randint(0, 96, (150,), generator=torch.Generator().manual_seed(0))
    taps = (0, 2)
    kv = [build_kv(config, 2, 160, 16, torch.float32) for _ in range(4)]
    spans = [(0, 100), (0, 50)]
    want = model.forward(ids, kv[0].view(spans), taps)
    got = compiled.forward(ids, kv[1].view(spans), taps)
    assert torch.equal(got.hidden, want.hidden)
    assert all(torch.equal(a, b) for a, b in zip(got.streams, want.streams, strict=True))
    at = 0
    for count in (1, 3, 4, 5, 9, 17, 1, 60):
        part = compiled.forward(ids[at : at + count], kv[2].view([(at, count), (0, 0)])).hidden
        assert torch.equal(part, want.hidden[at : at + count]), count
        at += count
    dense = {k: ops.unpack(w) if isinstance(w, PackedWeight) else w for k, w in weights.items()}
    reference = TextModel(config, dense, REF).forward(ids, kv[3].view(spans)).hidden
    error = (got.hidden - reference).norm() / reference.norm()
    sharp = name.startswith(
        "gemma4"
    )  # unscaled scores of random weights: the int8 rounding of activations moves the softmax
    routed = name == "gemma4_moe"  # and may choose another expert
    assert error < (1e-5 if quantize is None else 0.5 if routed else 0.2 if sharp else 0.03)


def test_tokens_drawn_while_the_head_is_read(ops: CpuOps) -> None:
    """A cycle keeps no logits: it draws as it goes, beside greedy neighbours. Catches: a winner passed over for its
    noise's bits, equals out of order, another temperature's or position's noise, a tail of no whole vector."""
    one, many = engines("capped", ops=ops)
    heats = (
        {"temperature": 1.0, "seed": 5},
        {"temperature": 0.02, "seed": 6},
        {},
        {"temperature": 9.0, "seed": -(1 << 40)},
    )
    params = [
        request(f"{i}", [t % 90 for t in range(5, 305, 17)][i:], k=4 * (i % 2), **h, max_tokens=40)
        for i, h in enumerate(heats)
    ]
    got = run(one, params)
    assert got == run(many, params) and len({token for tokens in got.values() for token in tokens}) > 60
    assert [e.name for e in one.executors] == ["host", "eager"]


@pytest.mark.parametrize("fmt", ["q4_0", "q5_1", "q4_k_m", "q6_k", "q8_0"])
@pytest.mark.parametrize("raw", [QWEN, EDGE, MOE], ids=["qwen2", "edge", "moe"])
def test_files_in_every_format(ops: CpuOps, raw: dict[str, object], fmt: str, tmp_path: Path) -> None:
    """A whole model from a file of mixed formats: one call, the single operations, and 1 to 17 rows at once give the
    same bits."""
    write_gguf(tmp_path / "m.gguf", ModelConfig.from_hf(raw), fmt)
    config, weights, _ = load_target(tmp_path / "m.gguf", "cpu", torch.float32, ops)
    model = TextModel(config, weights, ops)
    compiled = ops.compile(model)
    assert isinstance(compiled, CompiledModel)
    ids = torch.randint(0, config.vocab_size, (40,), generator=torch.Generator().manual_seed(0))
    kv = [build_kv(config, 1, 64, 16) for _ in range(3)]
    want = model.forward(ids, kv[0].view([(0, 40)])).hidden
    assert torch.equal(compiled.forward(ids, kv[1].view([(0, 40)])).hidden, want)
    at = 0
    for count in (1, 2, 5, 6, 9, 17):
        assert torch.equal(
            compiled.forward(ids[at : at + count], kv[2].view([(at, count)])).hidden, want[at : at + count]
        ), count
        at += count
    assert at == 40


@pytest.mark.parametrize("kinds", [("Q4_0", "Q4_0"), ("Q4_K", "Q6_K"), ("Q8_0", "IQ4_NL"), ("float32", "bfloat16")])
def test_experts(ops: CpuOps, kinds: tuple[str, str]) -> None:
    """Rows are grouped by expert: each keeps its own bits, and the answer is the reference's on the same values."""
    count = 7
    hidden = 256
    inter = 256
    top = 3
    gate_up = weight(ops, kinds[0], count * 2 * inter, hidden).view(count, 2 * inter, hidden)
    down = weight(ops, kinds[1], count * hidden, inter).view(count, hidden, inter)
    router = seeded(count, hidden, seed=4) * 0.1
    scale = seeded(count, seed=5).abs() + 0.5
    x = seeded(40, hidden)
    experts = ExpertWeights(router, scale, gate_up, down, top, "gelu_tanh")
    got = ops.moe(x * 0.5, x, experts)
    plain = (ops.unpack(w).view(w.shape) for w in (gate_up, down))
    want = REF.moe(x * 0.5, x, ExpertWeights(router, scale, *plain, top, "gelu_tanh"))
    assert (got - want).norm() < (1e-5 if kinds[0] == "float32" else 0.03) * want.norm()
    for rows in (1, 2, 5, 9, 17):
        assert torch.equal(ops.moe(x[:rows] * 0.5, x[:rows], experts), got[:rows]), rows
    several = CpuOps(threads=3, isa=ops.isa)
    assert torch.equal(several.moe(x * 0.5, x, experts), got)


def test_experts_of_odd_sizes_are_left_to_the_operations(ops: CpuOps) -> None:
    config = ModelConfig.from_hf(
        GEMMA4 | dict(enable_moe_block=True, num_experts=4, top_k_experts=2, moe_intermediate_size=40)
    )
    model = TextModel(config, dummy_weights(config, "cpu", torch.float32, ops, None, seed=3), ops)
    assert ops.compile(model) is model
    ids = torch.arange(20)
    whole_pass = model.forward(ids, build_kv(config, 1, 32, 16).view([(0, 20)])).hidden
    kv = build_kv(config, 1, 32, 16)
    parts = torch.cat([model.forward(ids[i : i + n], kv.view([(i, n)])).hidden for i, n in ((0, 7), (7, 1), (8, 12))])
    assert torch.equal(parts, whole_pass)


# ---- drafters -----------------------------------------------------------------------------------------------------
def drafter_configs() -> dict[str, tuple[str, DrafterConfig]]:
    llama, gemma4 = (ModelConfig.from_hf(MODELS[name]) for name in ("llama", "gemma4_edge"))
    return {
        "own": ("llama", design.plain(llama, reads=(0, 2), intermediate=64)),
        "own_taps_clusters": (
            "llama",
            replace(
                design.plain(llama, reads=(1,), hidden=32, intermediate=64, taps=(0, 1)), clusters=8, cluster_top=3
            ),
        ),
        "gemma": ("gemma4_edge", replace(design.gemma(gemma4, hidden=64, intermediate=96), clusters=8, cluster_top=2)),
    }


@pytest.mark.parametrize("name", ["own", "own_taps_clusters", "gemma"])
@pytest.mark.parametrize("quantize", ["int8", None])
def test_compiled_drafters(ops: CpuOps, name: str, quantize: str | None) -> None:
    """A round in one call: the tokens that the drafter's own steps give, greedy and sampled rows side by side."""
    of, config = drafter_configs()[name]
    target_config = ModelConfig.from_hf(MODELS[of])
    target = TextModel(target_config, dummy_weights(target_config, "cpu", torch.float32, ops, quantize, seed=3), ops)
    weights = dummy_weights(config, "cpu", torch.float32, ops, quantize, seed=4)
    drafter = MTPNet(config, weights, ops, target)
    compiled = ops.compile_drafter(drafter)
    assert isinstance(compiled, CompiledDrafter)
    kv = build_kv(target_config, 3, 64, 16, torch.float16)
    ids = torch.randint(0, 96, (90,), generator=torch.Generator().manual_seed(0))
    out = target.forward(ids, kv.view([(0, 40), (0, 30), (0, 20)]), config.taps)
    rows = torch.tensor([39, 69, 89])
    features = out.features[rows]
    view = kv.view([(39, 1), (29, 1), (19, 1)])
    last = ids[rows]
    sampled = torch.tensor([False, True, True])
    seed = torch.tensor([1, 2, 3])
    position = torch.tensor([41, 31, 21])
    temperature = torch.tensor([1.0, 0.7, 1.3])

    token = last
    h = features[:, : target_config.hidden]
    want = []
    sure = []
    state = drafter.start(view, features)
    fast = compiled.start(view, features)
    for j in range(4):
        e = target.embed(token)
        again = compiled.step(e, h, fast)
        g, h = drafter.step(e, h, state)
        assert torch.equal(again[0], g) and torch.equal(again[1], h)
        ids = drafter.cluster_ids
        tokens, z = drafter.candidates(
            g, None if ids is None else ops.cluster_bonus(ids, seed, position + j, temperature, sampled)
        )
        best = ops.gumbel_argmax(z / temperature[:, None], seed, position + j, tokens, sampled)
        token = best if tokens is None else tokens.gather(1, best[:, None])[:, 0]
        want.append(token)
        sure.append(
            torch.softmax(z / torch.where(sampled, temperature, 1.0)[:, None], -1).gather(1, best[:, None])[:, 0]
        )
    noise = DraftNoise(temperature, sampled, seed, position)
    got, confidence, lengths = compiled.draft(last, features, view, 4, noise)
    assert torch.equal(got, torch.stack(want, 1)) and lengths.tolist() == [4, 4, 4]
    assert torch.allclose(confidence, torch.stack(sure, 1), rtol=1e-4) and bool(
        ((confidence >= 0) & (confidence <= 1)).all()
    )
    for b in range(3):  # alone
        one = kv.view([(39 - 10 * b, 1)] if b == 0 else [(0, 0)] * b + [(39 - 10 * b, 1)])
        row = slice(b, b + 1)
        alone, _, _ = compiled.draft(last[row], features[row], one, 4, DraftNoise(*(t[row] for t in noise)))
        assert torch.equal(alone, got[row])

    # ends: trust as drawn, thresholds around the paths, so that drafts end at every place, by `drop` and by `stop`
    draw = random.Random(5)
    reached = set()
    for trial in range(40):
        trust = [draw.uniform(0.5, 1.0) for _ in range(16)]
        stop, drop = ([draw.choice([0.0, draw.uniform(0.1, 1.0)]) for _ in range(3)] for _ in range(2))
        end = tuple(torch.tensor(t, dtype=torch.float64) for t in (stop, drop, trust))
        tokens, again, lengths = compiled.draft(last, features, view, 4, noise, end)
        expected = [ended(confidence[b].tolist(), stop[b], drop[b], trust) for b in range(3)]
        assert lengths.tolist() == [n for n, _ in expected], trial
        run = max(steps for _, steps in expected)  # until the last of them has ended
        assert torch.equal(tokens[:, :run], got[:, :run]) and torch.equal(again[:, :run], confidence[:, :run])
        assert not tokens[:, run:].any() and not again[:, run:].any()
        reached |= {(n, steps) for n, steps in expected}
    assert {(0, 1), (1, 1), (1, 2), (4, 4)} <= reached


def ended(confidence: list[float], stop: float, drop: float, trust: list[float]) -> tuple[int, int]:
    """Tokens that count, and the steps that were run for them: the rule of spec.controller.Choice in plain words."""
    path = 1.0
    for j, sure in enumerate(confidence):
        path *= trust[min(15, int(sure * 16))]
        if path < drop:
            return j, j + 1
        if path < stop:
            return j + 1, j + 1
    return len(confidence), len(confidence)


def test_a_drafter_trained_for_four_bits_gets_them(ops: CpuOps) -> None:
    """Its layers only, and only where 8 were asked for: what chooses the token keeps 8."""
    config = replace(drafter_configs()["own_taps_clusters"][1], weight_bits=4)
    for quantize, layers, head in (
        ("int8", PackedKind.Q4_1, PackedKind.Q8_0),
        ("int4", PackedKind.Q4_1, PackedKind.Q4_1),
        (None, PackedKind.DENSE, PackedKind.DENSE),
    ):
        weights = dummy_weights(config, "cpu", torch.float32, ops, quantize)
        kinds = {name: c_weight(weights[name]).kind for name in ("layers.0.qkv", "layers.0.down", "pre", "centroids")}
        assert set(list(kinds.values())[:3]) == {layers} and set(list(kinds.values())[3:]) == {head}, quantize


def test_rows_in_another_order(ops: CpuOps) -> None:
    order = torch.randperm(40, generator=torch.Generator().manual_seed(0))
    for kind in ("Q4_1", "Q8_0", "float32"):
        w = weight(ops, kind, 40, 64)
        assert torch.equal(ops.unpack(ops.take_rows(w, order)), ops.unpack(w)[order])


@pytest.mark.parametrize("vocab", [61, 600, 20_000])
def test_filters_are_their_definition(ops: CpuOps, vocab: int) -> None:
    """Peaked and flat rows, rows with ties and masks; every filter alone and with others."""
    how = [
        {"top_k": 1}, {"top_k": 40}, {"top_p": 0.9}, {"top_p": 0.999}, {"min_p": 0.05}, {"top_k": 300, "top_p": 0.95},
        {"top_k": 50, "top_p": 0.3, "min_p": 0.02}, {},
    ]  # fmt: skip
    params = [SamplingParams(temperature=t, **one) for one in how for t in (0.3, 1.0, 3.0)]
    batch = sampling_batch(params, [[0]] * len(params), [[]] * len(params), vocab, "cpu")
    rows = torch.arange(len(params))
    none = torch.zeros(len(params), 0, dtype=torch.int64)
    for seed in range(3):
        logits = torch.randn(len(params), vocab, generator=torch.Generator().manual_seed(seed)) * 4
        if seed == 1:
            logits = (2 * logits).round() / 2
        if seed == 2:
            logits[:, 7 : vocab // 2] = -torch.inf
        want = batch.process(logits, rows, torch.zeros_like(rows), none)
        assert (want == -torch.inf).any()
        got = batch.process(logits, rows, torch.zeros_like(rows), none, ops=ops)
        assert torch.equal(got, want), [i for i in rows.tolist() if not torch.equal(got[i], want[i])]


def test_filters_of_what_is_no_number_come_to_an_end(ops: CpuOps) -> None:
    z = torch.full((2, 400), torch.nan)
    z[1, ::3] = 1.0
    how = torch.tensor([1 << 40, 500]), torch.tensor([0.9, 0.9], dtype=torch.float64), torch.zeros(2)
    assert ops.filter_logits(z, *how).shape == z.shape
