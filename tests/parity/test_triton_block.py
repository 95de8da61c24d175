"""The Triton kernels of block drafters (context K/V, attention of a block) against their plain twins."""

from __future__ import annotations

import pytest
import torch

triton = pytest.importorskip("triton")

from tests.parity.test_triton_attention import cache  # noqa: E402
from tests.parity.test_triton_ops import CUDA, DEVICE, DTYPES, REF, near, rand  # noqa: E402

from outrider.ops.triton import TritonOps, block_attention  # noqa: E402
from outrider.types import AttnSpec, BlockAttn, BlockRows  # noqa: E402

EIGHT = [torch.float8_e4m3fn]


@pytest.fixture(scope="module")
def ops() -> TritonOps:
    return TritonOps(DEVICE, pdl=False)


def angles(count: int, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    at = torch.arange(count, device=DEVICE)
    return REF.rope_angles(at * 7, 1.0 / 10.0 ** torch.linspace(0, 3, dim // 2, device=DEVICE))


# heads, kv heads, head size, the layer's window, the store's window, causal, k = v, lengths, rows of the block
CASES = [
    (8, 2, 16, None, None, False, False, [150, 3, 0], 6),  # bidirectional; a block with nothing before it
    (4, 2, 24, None, None, True, False, [70, 131], 5),  # a head size that is no power of two
    (4, 1, 16, 20, None, False, True, [90, 33], 7),  # sliding and not causal: rows of the block near its end see less
    (4, 4, 16, 40, 24, True, False, [61, 100], 4),  # the store reaches less far back than the layer's window
    (4, 1, 512, None, None, False, True, [40], 3),  # heads of 512: other tiles
    (2, 1, 16, 4, None, False, False, [30], 9),  # a window shorter than the block
]


@pytest.mark.parametrize("dtype", [*DTYPES, *EIGHT])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_attend_block(ops: TritonOps, case: tuple, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys beyond the window or behind the block's begin, rows of another sequence, a split that is lost; dtype: what
    K/V is stored as. The second time in two calls, as EAGLE-3 does: own rows of the first are seen by the second."""
    heads, kv_heads, dim, window, kept, causal, same, lengths, slots = case
    spec = AttnSpec(heads, kv_heads, dim, 0, True, window=kept, scale=0.3, k_eq_v=same, norm_v=same)
    attn = BlockAttn(spec, window, causal, rand(dim, seed=1), None if same else rand(dim, seed=2))
    kind = torch.float32 if dtype in EIGHT else dtype
    size = len(lengths)
    count = len(lengths) * slots
    kv = cache(spec, [(0, max(n, 1)) for n in lengths], 16, dtype)
    if dtype in EIGHT:  # what the store holds behind the text is finite there
        kv.keys, kv.values = ([t[0].float().nan_to_num(0.0).to(dtype)] for t in (kv.keys, kv.values))
    q, made = (rand(count, n * dim, seed=n, dtype=kind) for n in (heads, kv_heads * (1 if same else 2)))
    cos, sin = angles(count, dim)
    end = torch.tensor(lengths, device=DEVICE)

    def rows() -> BlockRows:
        k, v = (torch.full((size, kv_heads, slots + 1, dim), float("nan"), dtype=kind, device=DEVICE) for _ in "kv")
        return BlockRows(k, v, end)

    mine = rows()
    theirs = rows()
    clean = [t[0] if dtype in EIGHT else t[0].nan_to_num(0.0) for t in (kv.keys, kv.values)]
    plain = type(kv)(**{**vars(kv), "keys": [clean[0]], "values": [clean[1]]})  # torch multiplies masked keys by 0
    want = REF.attend_block(q, made, (cos, sin), attn, plain, theirs, 0)
    for programs in (1, 264):
        monkeypatch.setattr(block_attention, "PROGRAMS", programs)
        near(ops.attend_block(q, made, (cos, sin), attn, kv, mine, 0), want)
        near(mine.keys[:, :, :slots], theirs.keys[:, :, :slots])
        near(mine.values[:, :, :slots], theirs.values[:, :, :slots])
    if causal:
        mine = rows()
        parts = []

        def grid(t):
            return t.view(size, slots, -1)

        for j in range(slots):
            one = [grid(t)[:, j].contiguous() for t in (q, made, cos, sin)]
            parts.append(ops.attend_block(one[0], one[1], (one[2], one[3]), attn, kv, mine, j))
        near(torch.stack(parts, 1).reshape(count, -1), want)


@pytest.mark.parametrize("same", [False, True])
def test_write_context(ops: TritonOps, same: bool) -> None:
    """K/V written to another head, k's norm given to v, or v rotated."""
    spec = AttnSpec(4, 2, 24, 0, True, k_eq_v=same, norm_v=same)
    attn = BlockAttn(spec, None, True, None, rand(24, seed=2))
    ours, theirs = (cache(spec, [(5, 3), (0, 4)], 4) for _ in range(2))
    values = rand(7, 24 * (2 if same else 4))
    cos, sin = angles(7, 24)
    ops.write_context(values, (cos, sin), attn, ours)
    REF.write_context(values, (cos, sin), attn, theirs)
    for got, want in ((ours.keys[0], theirs.keys[0]), (ours.values[0], theirs.values[0])):
        assert got is not None and want is not None and torch.equal(got.isnan(), want.isnan())
        near(got.nan_to_num(0.0), want.nan_to_num(0.0))


@pytest.mark.skipif(not CUDA, reason="sizes of real drafters, in bfloat16")
@pytest.mark.parametrize("heads,kv_heads,dim,window", [(64, 8, 128, 2048), (16, 1, 512, None), (32, 8, 128, None)])
@pytest.mark.parametrize("length", [37, 1000, 5000])
def test_real_sizes(ops: TritonOps, heads: int, kv_heads: int, dim: int, window: int | None, length: int) -> None:
    spec = AttnSpec(heads, kv_heads, dim, 0, True, scale=dim**-0.5)
    attn = BlockAttn(spec, window, window is not None, rand(dim, seed=1), rand(dim, seed=2))
    for lengths in ([length], [length, 5, length // 2] * 3):
        size = len(lengths)
        kv = cache(spec, [(0, 1)] * size, 16, torch.bfloat16)
        per = -(-length // 16)
        pages = 1 + torch.randperm(size * per, device=DEVICE).view(size, per).to(torch.int32)
        shape = (1 + size * per, kv_heads, 16, dim)
        kv.keys, kv.values = ([torch.randn(shape, device=DEVICE, dtype=torch.bfloat16)] for _ in "kv")
        kv.tables = {"full": pages}
        kv.max_context = length + 16
        q, made = (rand(size * 16, n * dim, seed=n, dtype=torch.bfloat16) for n in (heads, 2 * kv_heads))
        cos, sin = angles(size * 16, dim)
        own = [torch.empty((size, kv_heads, 16, dim), device=DEVICE, dtype=torch.bfloat16) for _ in "kv"]
        rows = BlockRows(own[0], own[1], torch.tensor(lengths, device=DEVICE))
        near(
            ops.attend_block(q, made, (cos, sin), attn, kv, rows, 0),
            REF.attend_block(q, made, (cos, sin), attn, kv, rows, 0),
        )
