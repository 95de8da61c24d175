"""Choosing on the device: nothing waits for it, a captured graph replays it, rows do not depend on the batch."""

import pytest
import torch

from outrider.ops.reference import ReferenceOps
from outrider.spec.choose import SamplingBatch, accept
from outrider.spec.slot_sampling import sampling_batch
from outrider.types import Draft, SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
OPS = ReferenceOps()
V = 5003
B = 4
K = 3
EOS = 2
PARAMS = [
    SamplingParams(),
    SamplingParams(temperature=0.7, top_p=0.9, seed=1, repetition_penalty=1.2, min_tokens=9, stop_token_ids=(7,)),
    SamplingParams(temperature=1.0, top_k=64, top_p=0.95, seed=2, logit_bias={5: 4.0}, bad_words=((3, 4), (9,))),
    SamplingParams(temperature=1.3, min_p=0.05, seed=3, presence_penalty=0.5, frequency_penalty=0.2),
]


def built(device: str) -> SamplingBatch:
    return sampling_batch(PARAMS, [[1, 3]] * B, [[3, 4, 3]] * B, V, device, [EOS])


def rows(device: str) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(B, device=device).repeat_interleave(K + 1), torch.arange(K + 1, device=device).repeat(B)


def cycle(
    batch: SamplingBatch, logits: torch.Tensor, drafts: torch.Tensor, seq: torch.Tensor, off: torch.Tensor
) -> torch.Tensor:
    z = batch.process(logits, seq, off, drafts)
    chosen = batch.choose(z, seq, off + 5, OPS).view(B, K + 1)
    batch.guess(logits[: B * (K + 1) : K + 1], off[:B] + 5, OPS)
    verdict = accept(chosen, Draft(drafts, torch.full_like(drafts[:, 0], K)))
    batch.commit(verdict.tokens, verdict.counts)
    return chosen


def inputs(device: str) -> tuple[torch.Tensor, torch.Tensor]:
    gen = torch.Generator().manual_seed(0)
    logits = torch.randn(B * (K + 1), V, generator=gen) * 3
    return logits.to(device), torch.randint(0, 12, (B, K), generator=gen).to(device)


def test_nothing_waits_for_the_device():
    batch = built("cuda")
    logits, drafts = inputs("cuda")
    seq, off = rows("cuda")
    cycle(batch, logits, drafts, seq, off)
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        cycle(batch, logits, drafts, seq, off)
        OPS.logprob_rows(logits, seq, 3)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_captured_graph_sees_the_history_grow():
    logits, drafts = inputs("cuda")
    seq, off = rows("cuda")
    eager = built("cuda")
    graphed = built("cuda")
    want = [cycle(eager, logits, drafts, seq, off) for _ in range(4)]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        cycle(built("cuda"), logits, drafts, seq, off)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = cycle(graphed, logits, drafts, seq, off)
    for tokens in want:
        graph.replay()
        assert torch.equal(out, tokens)


def test_rows_do_not_depend_on_the_batch():
    logits, drafts = inputs("cuda")
    seq, off = rows("cuda")
    z = built("cuda").process(logits, seq, off, drafts)
    for b in range(B):
        alone = sampling_batch(PARAMS[b : b + 1], [[1, 3]], [[3, 4, 3]], V, "cuda", [EOS])
        zero = torch.zeros(1, dtype=torch.int64, device="cuda")
        for j in range(K + 1):
            at = b * (K + 1) + j
            assert torch.equal(alone.process(logits[at : at + 1], zero, zero + j, drafts[b : b + 1])[0], z[at])


def test_the_same_tokens_survive_as_on_the_cpu():
    logits, drafts = inputs("cpu")
    seq, off = rows("cpu")
    here = built("cpu").process(logits, seq, off, drafts)
    there = built("cuda").process(logits.cuda(), seq.cuda(), off.cuda(), drafts.cuda()).cpu()
    assert float((here.isfinite() != there.isfinite()).sum()) <= 2  # exp may round otherwise at the very edge of top-p
    both = here.isfinite() & there.isfinite()
    torch.testing.assert_close(here[both], there[both])
