"""The benchmark's own cycle, run eagerly on the CPU: it must emit what plain decoding emits, or its times mean nothing."""

from __future__ import annotations

import pytest
import torch

from outrider.bench.gpu import Rig, plain_run, speculative_run
from outrider.ops.reference import ReferenceOps

KINDS = ["sliding_attention", "sliding_attention", "full_attention"]
TEXT = dict(
    vocab_size=200, hidden_size=32, num_hidden_layers=3, layer_types=KINDS, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
    global_head_dim=32, intermediate_size=48, sliding_window=8, max_position_embeddings=512, final_logit_softcapping=30.0,
    num_kv_shared_layers=0, tie_word_embeddings=True,
)  # fmt: skip
TARGET = {"model_type": "gemma4", "text_config": TEXT}
DRAFT_TEXT = {**TEXT, "hidden_size": 16, "num_kv_shared_layers": 3}
ASSISTANT = {"model_type": "gemma4_assistant", "text_config": DRAFT_TEXT, "backbone_hidden_size": 32}


@pytest.fixture(scope="module")
def rig() -> Rig:
    return Rig(TARGET, ASSISTANT, ReferenceOps(), "cpu", torch.float64, slots=3, context=256)


@pytest.mark.parametrize("k,batch", [(1, 1), (4, 2)])
def test_speculative_equals_plain(rig: Rig, k: int, batch: int) -> None:
    """Drafts shifted by one position are never accepted; a wrong next input changes the tokens."""
    seqs = rig.open(batch, 40, 100)
    try:
        tokens, logits = plain_run(rig, seqs, 40, 24)
        result = speculative_run(rig, seqs, 40, k, tokens, logits)
        assert result.equal_tokens and 0.4 * k < result.accepted < k
    finally:
        rig.close(seqs)


@torch.inference_mode()
def test_a_cycle_with_the_mtp_drafter(rig: Rig) -> None:
    """Without `advance` every replay does the same work at the same length."""
    seqs = rig.open(2, 40, 100)
    run = rig.graph(seqs, 3, 40, 64)
    run.graph.replay()
    first = run.tokens.clone()
    run.graph.replay()
    assert torch.equal(run.tokens, first) and run.length.tolist() == [40, 40] and run.tokens.shape == (2, 4)
    rig.close(seqs)
