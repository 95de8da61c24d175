"""Attention of the C library against the reference: heads, windows, pages, dtypes, trees."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from tests.kv import PagedKV, build_kv
from tests.parity.test_cpu_kernels import seeded
from torch import Tensor

from outrider.ops.cpu.ops import CpuOps
from outrider.ops.reference import ReferenceOps
from outrider.ops.trees import TreeRows
from outrider.types import AttnSpec, DraftTree, KVView

REF = ReferenceOps()


SPECS = {
    "gqa": AttnSpec(6, 2, 64, 0, True, scale=0.125),
    "sliding": AttnSpec(4, 4, 32, 0, True, window=21, scale=0.2),
    "k_eq_v": AttnSpec(4, 1, 128, 0, True, scale=0.1, k_eq_v=True, norm_v=True),
    "odd": AttnSpec(4, 2, 8, 0, True, window=40, scale=0.3),
    "query_only": AttnSpec(6, 2, 64, 0, False, scale=0.125),
}


class OneLayer:
    """The part of a config that build_kv reads."""

    def __init__(self, spec: AttnSpec):
        from types import SimpleNamespace

        self.layers = [SimpleNamespace(attn=replace(spec, writes=True))]


def run_attention(ops: ReferenceOps, spec: AttnSpec, kv: PagedKV, spans: list[tuple[int, int]], qkv: Tensor) -> Tensor:
    return attention_of(ops, spec, kv.view(spans), qkv)


def attention_of(ops: ReferenceOps, spec: AttnSpec, view: KVView, qkv: Tensor) -> Tensor:
    inv = 10000.0 ** -(torch.arange(0, spec.head_dim, 2).float() / spec.head_dim)
    cos, sin = ops.rope_angles(view.positions, inv)
    norm = seeded(spec.head_dim, seed=9) if spec.norm_v else None
    return ops.attend(ops.rope_write(qkv, (cos, sin), (norm, norm), spec, view), spec, view)


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("page_size", [4, 32])
def test_attention(ops: CpuOps, name: str, dtype: torch.dtype, page_size: int) -> None:
    """Two sequences, 300 positions: chunks are crossed, pages shuffled, unwritten slots hold NaN."""
    spec = SPECS[name]
    total = 300
    if dtype == torch.int8 and (page_size % 16 or spec.head_dim % 16):
        pytest.skip("8 bits lie in tiles")
    exact = torch.float32 if dtype == torch.int8 else dtype
    kvs = [build_kv(OneLayer(spec), 2, total, page_size, kind) for kind in (dtype, exact, dtype)]  # type: ignore[arg-type]
    rows = (spec.heads + 2 * spec.kv_heads) * spec.head_dim
    if not spec.writes:  # someone else's keys
        writer = AttnSpec(spec.heads, spec.kv_heads, spec.head_dim, 0, True, scale=spec.scale)
        for kv, by in zip(kvs, (ops, REF, ops), strict=True):  # each has its own way to lay keys out in a page
            run_attention(by, writer, kv, [(0, total), (0, 170)], seeded(total + 170, rows))
        qkv = seeded(total + 170, spec.qkv_rows, seed=5)
    else:
        qkv = seeded(total + 170, spec.qkv_rows)
    both = run_attention(ops, spec, kvs[0], [(0, total), (0, 170)], qkv)
    want = run_attention(REF, spec, kvs[1], [(0, total), (0, 170)], qkv)
    close = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2, torch.int8: 6e-2}[dtype]
    assert torch.allclose(both, want, atol=close, rtol=close)
    # the same rows in other company, bit for bit
    at = 0
    for count in (1, 2, 5, 9, 17, 30, 1, 64, 100, 3, 33, 1, 34):
        part = run_attention(ops, spec, kvs[2], [(at, count), (0, 0)], qkv[at : at + count])
        assert torch.equal(part, both[at : at + count]), (at, count)
        at += count
    assert at == total


@pytest.mark.parametrize("name", [name for name in SPECS if SPECS[name].writes])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("page_size", [4, 32])
def test_attention_in_trees(ops: CpuOps, name: str, dtype: torch.dtype, page_size: int) -> None:
    """A row has the bits of plain decoding whatever tree it stands in, and an accepted path's keys, once moved, are
    those of its tokens: trees that begin within a tile, at the end of one, and across a chunk; the slots behind them
    hold NaN."""
    spec = SPECS[name]
    rng = random.Random(5)
    if dtype == torch.int8 and (page_size % 16 or spec.head_dim % 16):
        pytest.skip("8 bits lie in tiles")
    for base in (29, 123):
        prompt = seeded(base, spec.qkv_rows, seed=base)  # type: ignore[arg-type]
        kv = build_kv(OneLayer(spec), 2, 160, page_size, dtype)  # type: ignore[arg-type]
        run_attention(ops, spec, kv, [(0, base), (0, 0)], prompt)
        parents = [[0, 1, 2, 0, 4, 5, 2, 0, 8, 3, 10, 6], [rng.randrange(j + 1) for j in range(14)]][base > 100]
        tree = TreeRows.of([DraftTree((), parents), DraftTree((), [])], torch.zeros(0))
        rows = seeded(len(parents) + 2, spec.qkv_rows, seed=7)
        view = kv.view([(base, len(parents) + 1), (0, 1)])
        view.kv_slots = view.positions
        view.ancestors = tree.ancestors
        view.positions = torch.cat((base + tree.depth[:-1], torch.tensor([0])))
        got = attention_of(ops, spec, view, rows)
        longest = max(range(len(parents) + 1), key=lambda j: int(tree.depth[j]))
        for row in {longest, len(parents), 5}:
            path = tree.ancestors[row, : int(tree.depth[row]) + 1].tolist()
            alone = build_kv(OneLayer(spec), 2, 160, page_size, dtype)  # type: ignore[arg-type]
            run_attention(ops, spec, alone, [(0, base), (0, 0)], prompt)
            for d, r in enumerate(path):
                want = run_attention(ops, spec, alone, [(base + d, 1), (0, 0)], rows[r : r + 1])
                assert torch.equal(got[r : r + 1], want), (base, row, r)
        path = tree.ancestors[longest, : int(tree.depth[longest]) + 1].long()
        ops.move_kv(torch.zeros_like(path), base + path, base + torch.arange(len(path)), spec, view)
        again = run_attention(ops, spec, kv, [(base + len(path) - 1, 1), (0, 0)], rows[longest : longest + 1])
        assert torch.equal(again, got[longest : longest + 1]), base
