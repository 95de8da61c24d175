"""A drafter's round in one launch against the same round step by step, on the GPU or phase by phase in Triton's
interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")

from tests.draft_rig import draft_rig  # noqa: E402
from tests.rounds import batch_of  # noqa: E402

from outrider.ops.reference import ReferenceOps  # noqa: E402
from outrider.ops.trees import BRANCH, max_nodes  # noqa: E402
from outrider.ops.triton.draft import FusedDrafter, unsupported  # noqa: E402
from outrider.spec.drafter import draft_round  # noqa: E402
from outrider.spec.mtp import MTPDrafter  # noqa: E402
from outrider.types import SamplingParams  # noqa: E402

REF = ReferenceOps()
CLUSTERED = dict(use_ordered_embeddings=True, num_centroids=16, centroid_intermediate_top_k=3)


@torch.inference_mode()
def test_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sequences of unlike length (one beyond the window, one with fewer keys than splits), greedy and with noise;
    windowed layers cut the keys, the full one walks over several blocks. A state that is not fed back, or a stale
    scratch, gives other tokens from the second step on."""
    rig = draft_rig(2, **CLUSTERED)
    assert rig.drafter is not None and unsupported(rig.drafter.model) is None
    batch = batch_of(rig, rig.open(2, 61, 16), [61, 9], [SamplingParams(), SamplingParams(temperature=0.9, seed=7)])
    want = rig.drafter.propose(batch, 3).tokens
    assert len(set(want.flatten().tolist())) > 3
    size: dict[str, Any] = {} if torch.cuda.is_available() else dict(programs=5, splits=(2, 1))
    fused = FusedDrafter(rig.drafter.model, most=2, **size)
    drafter = MTPDrafter(fused, rig.model)
    draft = drafter.propose(batch, 3)
    assert torch.equal(draft.tokens, want) and draft.lengths.tolist() == [3, 3]
    scores, tokens = fused.runner_ups(3)
    nodes = REF.chain_with_runner_ups(scores, tokens)
    best = nodes.tokens.view(2, 3, BRANCH)
    assert torch.equal(best[:, :, 0], want), "the line is the best of all"
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    step = rig.drafter.score(batch)

    def told(
        j: int, token: torch.Tensor, cluster_bonus: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        ids, logits = step(j, token, cluster_bonus)
        assert ids is not None
        seen.append((ids, batch.sampling.scores(logits.float(), batch.position + 1 + j, ids)))
        return ids, logits

    draft_round(batch, 3, told, rig.drafter.model.cluster_ids)
    for j, (ids, z) in enumerate(seen):
        second = ids.gather(1, z.topk(2).indices)[:, 1]
        assert torch.equal(best[:, j, 1], second), "and the second is the best of the others: no program hides two"
        assert not bool((scores[:, j].topk(4).values > z.topk(4).values + 1e-3).any())
    fused.scratch.fill_(float("nan"))  # every phase writes what the next ones read
    assert torch.equal(drafter.propose(batch, 3).tokens, want), "a second round finds what the first left"
    fused.most = 1
    assert torch.equal(drafter.propose(batch, 3).tokens, want), "beyond `most` sequences: step by step"
    assert drafter.alarm is not None and not int(drafter.alarm)
    fused.most = 2
    drafter.use_steps()
    monkeypatch.setattr(fused, "draft", lambda *_: pytest.fail("a round in one launch"))
    assert torch.equal(drafter.propose(batch, 3).tokens, want) and drafter.max_nodes(2) == max_nodes(2)


def test_unsupported() -> None:
    rig = draft_rig(2, use_ordered_embeddings=False)
    assert rig.drafter is not None and "clustered" in str(unsupported(rig.drafter.model))
