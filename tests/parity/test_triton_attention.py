"""The Triton kernels around K/V (rotation and writing, attention of few rows, of prompts and of trees) against their
plain twins."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

triton = pytest.importorskip("triton")

from tests import interpreter  # noqa: E402
from tests.parity.test_triton_ops import CUDA, DEVICE, DTYPES, REF, near, rand, same  # noqa: E402

from outrider.ops.trees import TreeRows  # noqa: E402
from outrider.ops.triton import TritonOps, prefill_attention, rope  # noqa: E402
from outrider.ops.triton.attention import attend  # noqa: E402
from outrider.ops.triton.attention_config import (  # noqa: E402
    AttentionConfig,
    ReductionSpec,
    choose_config,
    choose_reduction,
    split_count,
)
from outrider.ops.triton.card import Card  # noqa: E402
from outrider.ops.triton.common import Launch  # noqa: E402
from outrider.ops.triton.gemm_config import MAX_SMEM  # noqa: E402
from outrider.types import AttnSpec, DraftTree, KVView  # noqa: E402


@pytest.fixture(scope="module")
def ops() -> TritonOps:
    return TritonOps(DEVICE, pdl=False)


def test_what_is_compiled_ahead_is_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of one and of five rows, a pass of a prompt: nothing is left to compile, and nothing is launched."""
    card = replace(Card.of(torch.device("cpu")), capability=(8, 0), cuda=False)
    ops = TritonOps(DEVICE, pdl=False, card=card)
    spec = AttnSpec(4, 2, 32, 0, True)
    sliding = replace(spec, window=8)
    views = [cache(spec, spans, 4) for spans in ([(9, 1)], [(30, 5), (2, 5)], [(0, 40)])]
    run, compiled = set(), set()
    monkeypatch.setattr(Launch, "run", lambda launch: run.add(launch.variant))
    monkeypatch.setattr(Launch, "compile", lambda launch: compiled.add(launch.variant))
    counts: list[tuple[int, int]] = []
    count = ops.compile_attention([spec, sliding], views, torch.float32, lambda *done: counts.append(done))
    assert not run and count == len(compiled) == len(counts) and counts[-1] == (count, count)
    for kv in views:
        for kind in (spec, sliding):
            ops.attend(rand(len(kv.positions), 4 * 32), kind, kv)
    assert run == compiled


# ---- attention
def cache(spec: AttnSpec, spans: list[tuple[int, int]], page: int, dtype: torch.dtype = torch.float32) -> KVView:
    """Shuffled pages; positions before a span hold random K/V, those after it NaN: reading too far shows."""
    top = max(start + count for start, count in spans)
    per = -(-top // page)
    order = 1 + torch.randperm(len(spans) * per, generator=torch.Generator().manual_seed(3))
    shape = (1 + len(spans) * per, spec.kv_heads, page, spec.head_dim)
    keys = torch.full(shape, float("nan"))
    values = torch.full(shape, float("nan"))
    table = order.view(len(spans), per)
    for b, (begin, count) in enumerate(spans):
        for p in range(begin + count):
            keys[table[b, p // page], :, p % page] = rand(spec.kv_heads, spec.head_dim, seed=7 * p + b).cpu()
            values[table[b, p // page], :, p % page] = rand(spec.kv_heads, spec.head_dim, seed=7 * p + b + 5000).cpu()
    counts = [count for _, count in spans]
    return KVView(
        page, [keys.to(DEVICE, dtype)], [values.to(DEVICE, dtype)],
        {"full": table.to(DEVICE, torch.int32), "sliding": table.to(DEVICE, torch.int32)},
        torch.cat([torch.arange(s, s + c) for s, c in spans]).to(DEVICE),
        torch.repeat_interleave(torch.arange(len(spans)), torch.tensor(counts)).to(DEVICE),
        torch.tensor([0, *counts]).cumsum(0).to(DEVICE, torch.int32), max(counts), top,
    )  # fmt: skip


@pytest.mark.parametrize(
    "writes,k_eq_v,norm_v", [(True, False, True), (True, True, True), (True, False, False), (False, False, True)]
)
def test_rope_write(ops: TritonOps, writes: bool, k_eq_v: bool, norm_v: bool) -> None:
    """v taken after k's norm or rotation; a write to the logical page; q and k norms swapped."""
    spec = AttnSpec(4, 2, 24, 0, writes, k_eq_v=k_eq_v, norm_v=norm_v)
    ours, theirs = (cache(spec, [(5, 3), (0, 2)], 4) for _ in range(2))
    qkv = rand(5, spec.qkv_rows)
    q_norm = rand(24, seed=1)
    k_norm = rand(24, seed=2)
    freq = torch.tensor([1.0, 0.5, 0.2, 0.1, 0.05, 0.02, 0.01, 0.005, 0.001, 0.0, 0.0, 0.0], device=DEVICE)
    cos, sin = ops.rope_angles(ours.positions * 100, freq)
    for got, want in zip((cos, sin), REF.rope_angles(ours.positions * 100, freq)):
        near(got, want)
    near(
        ops.rope_write(qkv, (cos, sin), (q_norm, k_norm), spec, ours),
        REF.rope_write(qkv, (cos, sin), (q_norm, k_norm), spec, theirs),
    )
    for got, want in ((ours.keys[0], theirs.keys[0]), (ours.values[0], theirs.values[0])):
        assert got is not None and want is not None
        assert torch.equal(got.isnan(), want.isnan())
        near(got.nan_to_num(0.0), want.nan_to_num(0.0))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "heads,kv_heads,dim,window,spans",
    [
        (4, 2, 16, None, [(0, 1), (150, 5), (30, 2)]),  # ragged batch, several splits, GQA
        (8, 1, 32, 40, [(300, 17), (3, 4), (127, 3)]),  # window: starts inside a split, splits before it are skipped
        (2, 2, 24, None, [(261, 2)]),  # a head size that is no power of two
        (2, 1, 16, 130, [(255, 3)]),  # rows of one sequence whose first visible split differs
        (4, 2, 16, None, [(0, 70)]),  # a prompt chunk
        (4, 2, 16, 20, [(40, 66), (0, 3)]),  # a prompt chunk under a window
    ],
)
def test_attend(
    ops: TritonOps, heads: int, kv_heads: int, dim: int, window: int | None, spans: list, dtype: torch.dtype
) -> None:
    spec = AttnSpec(heads, kv_heads, dim, 0, True, window=window, scale=0.3)
    kv = cache(spec, spans, 16, dtype)
    q = rand(kv.positions.shape[0], heads * dim, seed=4, dtype=dtype)
    near(ops.attend(q, spec, kv), REF.attend(q, spec, kv))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads,kv_heads,dim,window,span", [(4, 2, 16, 40, (70, 50)), (4, 2, 24, None, (37, 60))])
def test_rows_of_an_image_see_each_other(
    ops: TritonOps, heads: int, kv_heads: int, dim: int, window: int | None, span: tuple[int, int], dtype: torch.dtype
) -> None:
    """The causal bound left in, the window moved with the bound, or keys behind the image read (they are NaN)."""
    spec = AttnSpec(heads, kv_heads, dim, 0, True, window=window, scale=0.3)
    kv = cache(spec, [span], 16, dtype)
    q = rand(span[1], heads * dim, seed=4, dtype=dtype)
    want = REF.attend_span(q, spec, kv, sum(span))
    near(ops.attend_span(q, spec, kv, sum(span)), want)
    assert not torch.equal(want, REF.attend(q, spec, kv))


@pytest.mark.parametrize("window", [None, 48])
def test_tiles_of_prompts_take_images(window: int | None) -> None:
    """The kernel for prompts agrees with the test above, to the bit."""
    spec = AttnSpec(4, 2, 64, 0, True, window=window, scale=0.3)
    dtype = torch.bfloat16 if CUDA else torch.float32
    kv = cache(spec, [(41, 104)], 16, dtype)
    cut = ReductionSpec(16, 16)
    q = rand(104, 256, seed=4, dtype=dtype)
    shape = AttentionConfig(False, 64, 4, 2)
    got = prefill_attention.attend(q, spec, kv, False, cut, shape, span_end=145)
    near(got, REF.attend_span(q, spec, kv, 145))
    same(got, attend(q, spec, kv, False, cut, AttentionConfig(False, 16, 4), span_end=145))


@pytest.mark.parametrize("window", [None, 40])
def test_keys_and_values_in_eight_bits(ops: TritonOps, window: int | None) -> None:
    """Rounded as the definition does, the largest kept finite; read exactly, by one program or many, in bits that
    do not depend on the rows beside; moved as they are."""
    fp8 = torch.float8_e4m3fn
    spec = AttnSpec(4, 2, 24, 0, True, window=window, scale=0.3)
    ours, theirs = (cache(spec, [(150, 5), (3, 2)], 16, fp8) for _ in range(2))
    qkv = rand(7, spec.qkv_rows)
    k_norm = rand(24, seed=2)
    qkv[:, -1] = 1e4
    freq = torch.tensor([1.0, 0.5, 0.2, 0.1, 0.05, 0.02, 0.01, 0.005, 0.001, 0.0, 0.0, 0.0], device=DEVICE)
    cos, sin = REF.rope_angles(ours.positions, freq)
    q = ops.rope_write(qkv, (cos, sin), (None, k_norm), spec, ours)
    REF.rope_write(qkv, (cos, sin), (None, k_norm), spec, theirs)
    for got, want in ((ours.keys[0], theirs.keys[0]), (ours.values[0], theirs.values[0])):
        assert got is not None and want is not None and torch.equal(got.float().isnan(), want.float().isnan())
        apart = (got.float() - want.float()).nan_to_num(0.0).abs()  # norms differ in the last bit, which may be a step
        assert (
            float(apart.div(want.float().nan_to_num(0.0).abs() + 0.02).max()) <= 0.13
            and float((apart > 0).float().mean()) < 0.001
        )
    assert float(theirs.values[0].float().nan_to_num(0.0).max()) == 448.0  # type: ignore[union-attr]
    apart = attend(q, spec, ours, False, shape=AttentionConfig(True, 16, 4))
    near(apart, REF.attend(q, spec, ours))
    assert torch.equal(attend(q, spec, ours, False, shape=AttentionConfig(False, 16, 4)), apart)
    at = torch.tensor([[0, 2], [0, 1]], device=DEVICE)
    ops.compact_kv(at, torch.tensor([1, 1], device=DEVICE), torch.tensor([150, 3], device=DEVICE), [spec], ours)
    assert ours.keys[0] is not None
    where = ours.tables["full"][0, 151 // 16], ours.tables["full"][0, 152 // 16]
    assert torch.equal(ours.keys[0][where[0], :, 151 % 16].float(), ours.keys[0][where[1], :, 152 % 16].float())


def test_attend_long() -> None:
    """Past the fine splits: an off-by-one where longer ones begin; more splits than one combine block."""
    cut = ReductionSpec(16, 32, near=128, mid=64, far=512, coarse=128)
    spec = AttnSpec(2, 1, 64, 0, True, scale=0.5)
    for spans in ([(127, 1)], [(126, 4)], [(510, 3)], [(1200, 2)]):
        kv = cache(spec, spans, 16)
        q = rand(kv.positions.shape[0], 128, seed=4)
        near(attend(q, spec, kv, False, cut), REF.attend(q, spec, kv))


@pytest.mark.parametrize("window,bn", [(None, 16), (200, 32)])
def test_attend_in_one_program_or_many(window: int | None, bn: int) -> None:
    """Splits added up by the program that walks them, or by a second kernel: the same bits, and the right ones. Splits
    of one block and of several, their borders, rows that see none of a split, maxima that rise and fall from split to
    split."""
    cut = ReductionSpec(bn, 32, near=64, mid=64, far=256, coarse=128)
    spec = AttnSpec(4, 2, 24, 0, True, window=window, scale=2.5)
    for spans in ([(126, 4)], [(290, 3), (0, 1), (31, 2)]):
        kv = cache(spec, spans, 16)
        q = rand(kv.positions.shape[0], 96, seed=4)
        apart = attend(q, spec, kv, False, cut, AttentionConfig(True, 16, 4))
        near(apart, REF.attend(q, spec, kv))
        assert torch.equal(attend(q, spec, kv, False, cut, AttentionConfig(False, 16, 4)), apart)
        assert torch.equal(attend(q, spec, kv, False, cut, AttentionConfig(True, 16, 4, run=3)), apart)
        assert torch.equal(attend(q, spec, kv, False, cut, AttentionConfig(False, 16, 4, parts=2)), apart)
        same(attend(q, spec, kv, False, cut, AttentionConfig(False, 64, 4)), apart)


def test_partial_sums_stay_bounded() -> None:
    """Eight sequences of 256k with 17 rows each would leave 5 GiB for the second kernel: more than a graph may take on
    the side."""
    nothing = torch.empty(0)
    for spec in (
        AttnSpec(32, 4, 512, 0, True),
        AttnSpec(32, 16, 256, 0, True, window=1024),
        AttnSpec(8, 1, 512, 0, True),
    ):
        cut = choose_reduction(spec, torch.bfloat16)
        for batch in (1, 8, 64, 256):
            for rows in (1, 5, 17):
                for context in (1024, 32768, 262144):
                    kv = KVView(16, [], [], {}, nothing, nothing, nothing, rows, context)
                    shape = choose_config(spec, cut, kv, batch, torch.bfloat16)
                    partial = batch * rows * spec.heads * split_count(spec, kv, cut) * spec.head_dim * 4
                    assert not shape.split or partial <= 1 << 30


@pytest.mark.parametrize("window", [None, 60])
def test_prompt_chunks_packed(ops: TritonOps, window: int | None) -> None:
    """Chunks of several prompts, one with earlier context, beside a verify pass of three rows: as if each came by
    itself."""
    spec = AttnSpec(4, 2, 16, 0, True, window=window, scale=0.3)
    spans = [(0, 40), (66, 20), (100, 3), (5, 1)]
    kv = cache(spec, spans, 16)
    q = rand(kv.positions.shape[0], 64, seed=4)
    together = ops.attend(q, spec, kv)
    near(together, REF.attend(q, spec, kv))
    for b, (first, count) in enumerate(spans):
        span = slice(int(kv.row_start[b]), int(kv.row_start[b + 1]))
        one = KVView(
            16, kv.keys, kv.values, {g: t[b : b + 1] for g, t in kv.tables.items()}, kv.positions[span],
            kv.row_seq[span] * 0,
            torch.tensor([0, count], dtype=torch.int32, device=DEVICE), count, first + count,
        )  # fmt: skip
        same(ops.attend(q[span], spec, one), together[span])


def test_tiles_of_prompts_are_for_bfloat16() -> None:
    """In float16 a split's factor, put into its weights, would make small ones nothing."""
    spec = AttnSpec(4, 2, 256, 0, True, window=512)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        kv = cache(spec, [(0, 300)], 16, dtype)
        assert prefill_attention.supports(spec, kv, dtype, MAX_SMEM) == (dtype == torch.bfloat16)


@pytest.mark.parametrize("window", [None, 60])
def test_tiles_of_prompts_add_in_the_same_order(window: int | None) -> None:
    """Chunks that begin and end inside a tile and inside a block, sequences of one row and of none, blocks that need no
    mask: the bits of the kernel that takes few queries."""
    cut = ReductionSpec(16, 16)
    spec = AttnSpec(4, 2, 64, 0, True, window=window, scale=0.3)
    kv = cache(spec, [(0, 40), (66, 21), (5, 1), (9, 0), (100, 9)], 16, torch.bfloat16 if CUDA else torch.float32)
    q = rand(kv.positions.shape[0], 256, seed=4, dtype=torch.bfloat16 if CUDA else torch.float32)
    want = attend(q, spec, kv, False, cut, AttentionConfig(False, 16, 4))
    near(want, REF.attend(q, spec, kv))
    for bq in (16, 64):
        same(prefill_attention.attend(q, spec, kv, False, cut, AttentionConfig(False, bq, 4, 2)), want)
    assert kv.keys[0] is not None and kv.values[0] is not None


def in_eight_bits(kv: KVView) -> KVView:
    """A copy with K/V in eight bits."""
    return replace(
        kv,
        **{
            side: [t.to(torch.float8_e4m3fn) for t in getattr(kv, side) if t is not None] for side in ("keys", "values")
        },
    )


@pytest.mark.parametrize("window,dim", [(None, 64), (60, 512 if CUDA else 128)])
def test_every_kernel_takes_eight_bits_in_the_same_order(window: int | None, dim: int) -> None:
    """Few queries, splits apart and added up, programs that share columns, prompts: the same bits, and the right ones.
    Odd columns in the place of even ones, queries sorted once too often, a prompt's result before its queries were
    read."""
    kind = torch.bfloat16 if CUDA else torch.float32
    spec = AttnSpec(4, 2, dim, 0, True, window=window, scale=0.1)
    kv = in_eight_bits(cache(spec, [(0, 20), (166, 5), (5, 1), (9, 0), (100, 3)], 16, kind))
    q = rand(kv.positions.shape[0], 4 * dim, seed=4, dtype=kind)
    cut = ReductionSpec(32, 32, near=256, mid=64, far=512, coarse=128)
    want = attend(q, spec, kv, False, cut, AttentionConfig(True, 16, 4))
    near(want, REF.attend(q, spec, kv))
    for shape in (
        AttentionConfig(True, 16, 4, run=2),
        AttentionConfig(False, 16, 4),
        AttentionConfig(False, 32, 4, parts=2),
    ):
        same(attend(q, spec, kv, False, cut, shape), want)
    same(prefill_attention.attend(q, spec, kv, False, cut, AttentionConfig(False, 64, 4, 1)), want)

    def sort(x):
        return x.unflatten(-1, (-1, dim // 2, 2)).transpose(-1, -2).flatten(-3).contiguous()

    wide = replace(
        kv,
        keys=[sort(t.to(kind)) for t in kv.keys if t is not None],
        values=[t.to(kind) for t in kv.values if t is not None],
    )
    same(attend(sort(q), spec, wide, False, cut, AttentionConfig(False, 16, 4)), want)


def test_prompts_of_few_tiles_take_small_ones_in_eight_bits() -> None:
    """E2B's 512 rows fill 32 of the large tiles, which was slower than bfloat16; 2,048 rows fill 128."""
    spec = AttnSpec(8, 1, 256, 0, True, window=512)
    for rows, eight, want in ((512, True, False), (2048, True, True), (512, False, True)):
        keys = torch.empty((1, 1, 16, 256), dtype=torch.float8_e4m3fn if eight else torch.bfloat16)
        kv = KVView(16, [keys], [keys], {}, torch.empty(rows), keys, torch.empty(2), rows, 4096)
        assert prefill_attention.supports(spec, kv, torch.bfloat16, MAX_SMEM) == want
        shape = choose_config(spec, choose_reduction(spec, torch.bfloat16), kv, 1, torch.bfloat16)
        assert want or shape == AttentionConfig(False, 32, 4, 3)


@pytest.mark.parametrize("heads,kv_heads,k_eq_v", [(8, 4, False), (4, 1, True), (12, 6, False)])
def test_heads_of_a_program_rotate_alike(
    ops: TritonOps, heads: int, kv_heads: int, k_eq_v: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heads written to a neighbour's place or with its norm; programs with fewer heads than warps."""
    spec = AttnSpec(heads, kv_heads, 16, 0, True, k_eq_v=k_eq_v, norm_v=True)
    qkv = rand(5, spec.qkv_rows)
    norms = (rand(16, seed=1), rand(16, seed=2))
    results = []
    monkeypatch.setattr(rope, "FEW_ROWS", ())
    for rows in (6, 1):  # from which a program takes several heads: one head each, then four
        monkeypatch.setattr(rope, "PROMPT", rows)
        kv = cache(spec, [(5, 3), (0, 2)], 4)
        q = ops.rope_write(qkv, ops.rope_angles(kv.positions, rand(8, seed=3)), norms, spec, kv)
        assert kv.keys[0] is not None and kv.values[0] is not None
        results.append(torch.cat([t.nan_to_num(0.0).flatten() for t in (q, kv.keys[0], kv.values[0])]))
    assert torch.equal(*results)


@pytest.mark.parametrize("window", [None, 50])
def test_attend_rows_stand_alone(ops: TritonOps, window: int | None) -> None:
    """One row at a time, or with others of its sequence and beside a longer sequence: the same bits."""
    spec = AttnSpec(4, 2, 16, 0, True, window=window, scale=0.3)
    kv = cache(spec, [(130, 6), (400, 2)], 16)
    q = rand(8, 64, seed=4)
    together = ops.attend(q, spec, kv)
    for r in range(6):
        one = KVView(
            16, kv.keys, kv.values, kv.tables, kv.positions[r : r + 1], kv.row_seq[r : r + 1],
            torch.tensor([0, 1], dtype=torch.int32, device=DEVICE), 1, 130 + r + 1,
        )  # fmt: skip
        assert torch.equal(ops.attend(q[r : r + 1], spec, one), together[r : r + 1])


@pytest.mark.skipif(CUDA, reason="the interpreter's dot")
def test_a_dot_that_depends_on_rows_is_found() -> None:
    """Bitwise comparisons of shapes fail if the order of summation of a dot depends on the number of rows, as in a
    BLAS."""
    cut = ReductionSpec(16, 32, near=64, mid=64, far=256, coarse=128)
    spec = AttnSpec(4, 2, 24, 0, True, scale=2.5)
    kv = cache(spec, [(40, 4)], 16)
    q = rand(4, 96, seed=4)

    def alike() -> bool:
        return torch.equal(
            attend(q, spec, kv, False, cut, AttentionConfig(True, 16, 4)),
            attend(q, spec, kv, False, cut, AttentionConfig(False, 64, 4)),
        )

    assert alike()
    restore = interpreter.install(interpreter.row_dependent)
    try:
        assert not alike()
    finally:
        restore()
    assert alike()


@pytest.mark.parametrize("heads,kv_heads,window", [(9, 3, None), (32, 1, 20)])
def test_attend_to_a_path(heads: int, kv_heads: int, window: int | None) -> None:
    """Rows of trees, whose keys lie in the order of rows: each has the bits of a row alone in a line, whose keys lie in
    the order of positions. A row that sees its neighbours' branches, a path across two splits, heads that fill a tile
    and more, a tree at position 0."""
    parents = [[0, 1, 2, 0, 1], [0, 0], []]
    bases = [30, 0, 5]
    cut = ReductionSpec(16, 32, near=64, mid=64, far=256, coarse=128)
    tree = TreeRows.of([DraftTree((), line) for line in parents], torch.zeros(0, device=DEVICE))
    spec = AttnSpec(heads, kv_heads, 16, 0, True, window=window, scale=0.3)
    kv = cache(spec, [(base, len(line) + 1) for base, line in zip(bases, parents)], 16)
    first = torch.tensor(bases, device=DEVICE)[kv.row_seq]
    kv.kv_slots = kv.positions
    kv.ancestors = tree.ancestors
    kv.positions = first + tree.depth
    q = rand(len(first), heads * 16, seed=4)
    together = attend(q, spec, kv, False, cut)
    near(together, REF.attend(q, spec, kv))
    assert torch.equal(attend(q, spec, kv, False, cut, AttentionConfig(True, 16, 8, run=2)), together)
    for row in (3, 5, 8):
        b, base, depth = (int(t[row]) for t in (kv.row_seq, first, tree.depth))
        keys, values = (side[0].clone() for side in (kv.keys, kv.values) if side[0] is not None)
        line = KVView(
            16, [keys], [values], {g: t[b : b + 1] for g, t in kv.tables.items()}, kv.positions[row : row + 1],
            kv.row_seq[:1] * 0,
            torch.tensor([0, 1], dtype=torch.int32, device=DEVICE), 1, base + depth + 1,
        )  # fmt: skip
        at = torch.arange(depth + 1, device=DEVICE)
        REF.move_kv(at * 0, base + tree.ancestors[row, : depth + 1].long(), base + at, spec, line)
        assert torch.equal(
            attend(q[row : row + 1], spec, line, False, cut, AttentionConfig(True, 16, 8)), together[row : row + 1]
        ), row
