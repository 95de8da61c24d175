"""The kernels of captured trees against their plain twins: on the GPU where there is one, else through Triton's
interpreter."""

from __future__ import annotations

import os

import pytest
import torch

CUDA = torch.cuda.is_available()
if not CUDA:
    os.environ["TRITON_INTERPRET"] = "1"

pytest.importorskip("triton")

from tests.engines import VARIANTS  # noqa: E402
from tests.kv import build_kv  # noqa: E402

from outrider.models.config import ModelConfig  # noqa: E402
from outrider.ops.reference import ReferenceOps  # noqa: E402
from outrider.ops.trees import WIDTH, Frontier, Nodes, TreeRows  # noqa: E402
from outrider.ops.triton import TritonOps  # noqa: E402
from outrider.types import DraftNoise, DraftTree  # noqa: E402

DEVICE = torch.device("cuda" if CUDA else "cpu")
REF = ReferenceOps()


@pytest.fixture(scope="module")
def ops() -> TritonOps:
    return TritonOps(DEVICE, pdl=False)


@pytest.mark.parametrize("sampled,named", [(False, False), (True, True)])
def test_grown_and_planted_alike(ops: TritonOps, sampled: bool, named: bool) -> None:
    """Several chunks of scores, noise of each sequence's own, columns that are not token ids, scores that are -inf or
    NaN; trees of a few tokens and of more."""
    batch = 2
    depth = 3
    n = 2500
    g = torch.Generator().manual_seed(5)
    ids = (
        torch.stack([torch.randperm(9000, generator=g)[:n] for _ in range(batch * WIDTH)]).to(DEVICE) if named else None
    )
    grown = [Nodes.of(batch, depth, DEVICE) for _ in range(2)]
    fronts = [Frontier.root(torch.tensor([7, 8], device=DEVICE)) for _ in range(2)]
    for level in range(depth):
        logits = (3.0 * torch.randn((batch * WIDTH, n), generator=g)).to(DEVICE)
        logits[1, ::3] = float("-inf")
        if level == 1:
            logits[2] = float("nan")
        drawn = ([0.7, 1.0], [True, False], [3, 4], [10 + level, 20 + level])
        noise = DraftNoise(*(torch.tensor(t, device=DEVICE) for t in drawn)) if sampled else None
        fronts = [
            x.branch(logits, ids, noise, front, nodes, level) for x, front, nodes in zip((ops, REF), fronts, grown)
        ]
        for name in ("tokens", "before", "node", "chain"):
            got, want = (getattr(f, name).view(batch, WIDTH)[fronts[1].chance > 0] for f in fronts)
            assert torch.equal(got, want), (level, name)
        assert torch.allclose(fronts[0].chance, fronts[1].chance, rtol=1e-4, atol=1e-9)
    for count in (4, 9):
        got = ops.build_fixed_tree(grown[1], count, depth)
        want = REF.build_fixed_tree(grown[1], count, depth)
        for name in ("tokens", "depth", "ancestors", "parent_rows"):
            assert torch.equal(getattr(got, name), getattr(want, name)), (count, name)


def test_combed_alike(ops: TritonOps) -> None:
    """Steps that lie further apart than they are long; fewer parts that found something than there are rivals."""
    g = torch.Generator().manual_seed(2)
    scores = torch.randn((2, 3, 40), generator=g).to(DEVICE)
    ids = torch.randint(0, 999, (2, 3, 40), generator=g).to(DEVICE, torch.int32)
    scores[1, 1, 2:] = float("-inf")
    got, want = (x.chain_with_runner_ups(scores[:, :, :37], ids[:, :, :37]) for x in (ops, REF))
    there = want.chance > 0
    assert int((~there).sum()) == 2 and torch.equal(got.chance > 0, there)
    for name in ("tokens", "parents", "chain"):
        assert torch.equal(getattr(got, name)[there], getattr(want, name)[there]), name
    assert torch.allclose(got.chance, want.chance, rtol=1e-4)
    planted = ops.build_fixed_tree(want, 6, 3)
    assert torch.equal(planted.ancestors, REF.build_fixed_tree(want, 6, 3).ancestors) and int(planted.depth.max()) <= 3


def test_walked_alike(ops: TritonOps) -> None:
    """Ragged trees; the same token twice behind one parent; a limit that ends a walk; a sequence without drafts."""
    parents = [[0, 1, 1, 0, 4, 5], [0, 0, 0], [], [0, 1, 2]]
    tree = TreeRows.of([DraftTree((), p) for p in parents], torch.zeros(0, device=DEVICE))
    g = torch.Generator().manual_seed(1)
    counts = torch.tensor([len(p) + 1 for p in parents])
    start = torch.cat((torch.zeros(1, dtype=torch.int64), counts.cumsum(0))).to(DEVICE, torch.int32)
    for limit in (None, torch.tensor([3, 1, 2, 2], device=DEVICE)):
        for _ in range(12):
            chosen, ids = (torch.randint(0, 2, (len(tree.depth),), generator=g).to(DEVICE) for _ in range(2))
            got, want = (x.accept_path(chosen, ids, tree, start, limit) for x in (ops, REF))
            assert all(torch.equal(a, b) for a, b in zip(got, want))


def test_a_path_is_kept_alike(ops: TritonOps) -> None:
    """A move onto a place that another one reads; paths that lie in line already; places on several pages; both kinds
    of layers."""
    config = ModelConfig.from_hf(VARIANTS["edge"])
    specs = [config.layers[i].attn for i in config.kv_layers]
    caches = [build_kv(config, 2, 24, device=DEVICE) for _ in range(2)]
    for ours, theirs in zip((*caches[0].keys, *caches[0].values), (*caches[1].keys, *caches[1].values)):
        if ours is not None and theirs is not None:
            theirs.normal_()
            ours.copy_(theirs)
    rows = torch.tensor([[0, 2, 3, 5, 7], [0, 1, 2, 2, 2]], device=DEVICE)
    for x, cache in zip((ops, REF), caches):
        kv = cache.view([(9, 8), (3, 8)])
        x.compact_kv(rows, torch.tensor([4, 2], device=DEVICE), torch.tensor([9, 3], device=DEVICE), specs, kv)
    for ours, theirs in zip((*caches[0].keys, *caches[0].values), (*caches[1].keys, *caches[1].values)):
        assert ours is None or theirs is None or torch.equal(ours, theirs)
