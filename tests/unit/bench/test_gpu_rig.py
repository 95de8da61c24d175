"""The benchmark's own cycle, run eagerly on the CPU: it must emit what plain decoding emits, or its times mean
nothing."""

from __future__ import annotations

import gc
import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

import gpu_table
from gpu_rig import PUBLISHED, Rig, Synthetic, plain_run, shallow, speculative_run, tree_run
from outrider.bench.predict import chance
from outrider.models.builtin_configs import BUILTIN_CONFIGS
from outrider.ops.reference import ReferenceOps
from outrider.types import Draft, OutriderError, Verdict

KINDS = ["sliding_attention", "sliding_attention", "full_attention"]
TEXT = dict(
    vocab_size=200, hidden_size=32, num_hidden_layers=3, layer_types=KINDS, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16,
    global_head_dim=32, intermediate_size=48, sliding_window=8, max_position_embeddings=512,
    final_logit_softcapping=30.0,
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


def test_a_tree_equals_plain(rig: Rig) -> None:
    seqs = rig.open(2, 40, 100)
    try:
        tokens, logits = plain_run(rig, seqs, 40, 24)
        result = tree_run(rig, seqs, 40, [0, 1, 0, 3, 4, 1], tokens, logits)
        assert result.k == 3 and result.equal_tokens and 1.0 < result.accepted < 3.0
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


@torch.inference_mode()
def test_a_wrong_logit_or_token_is_found(rig: Rig) -> None:
    seqs = rig.open(2, 40, 100)
    try:
        tokens, logits = plain_run(rig, seqs, 40, 20)
        changed = tokens.clone()
        changed[1, 7] = (changed[1, 7] + 1) % 200
        result = speculative_run(rig, seqs, 40, 3, changed, logits)
        assert not result.equal_tokens and result.first_difference is not None and result.first_difference <= 7
        logits[0, 5, 3] += 1e-3
        assert not speculative_run(rig, seqs, 40, 3, tokens, logits).equal_logits
    finally:
        rig.close(seqs)


@torch.inference_mode()
def test_freeing_a_rig_frees_its_weights() -> None:
    rig = Rig(TARGET, ASSISTANT, ReferenceOps(), "cpu", torch.float32, slots=1, context=64)
    watched = [weakref.ref(w) for w in (*rig.weights.values(), *rig.drafter_weights.values())]
    watched += [weakref.ref(t) for t in rig.store.keys if t is not None]
    run = rig.graph(rig.open(1, 8, 16), 2, 8, 64)
    run.graph.replay()
    del run
    rig.free()
    gc.collect()
    assert not any(w() is not None for w in watched)


@pytest.mark.parametrize("k", PUBLISHED)
def test_synthetic_acceptance_has_the_share_that_was_asked_for(k: int) -> None:
    assumed = Synthetic([chance(PUBLISHED[k], k)] * k, 3, torch.device("cpu"))
    assert assumed.expected == pytest.approx(1 + k * PUBLISHED[k], abs=1e-6)
    verdict = Verdict(
        torch.zeros(3, dtype=torch.int64), torch.zeros((3, k + 1), dtype=torch.int64), torch.ones(3, dtype=torch.int64)
    )
    draft = Draft(torch.zeros((3, k), dtype=torch.int64), torch.full((3,), k))
    counts = torch.stack([assumed(verdict, draft, verdict.counts).counts for _ in range(40)])
    assert (counts.double().mean(0) - assumed.expected).abs().max() < 0.06 * assumed.expected
    assert counts.min() >= 1 and counts.max() <= k + 1


def test_chances() -> None:
    assert chance(1.0, 4) == pytest.approx(1.0) and chance(0.0, 2) == pytest.approx(0.0, abs=1e-9)
    with pytest.raises(ValueError):
        chance(1.2, 4)


def test_every_size_has_a_shallow_form_with_both_kinds_of_attention() -> None:
    for name, layers in (("31B", 6), ("12B", 6), ("26B-A4B", 6), ("E4B", 12), ("E2B", 10)):
        text = shallow(dict(BUILTIN_CONFIGS[f"google/gemma-4-{name}-it"]), layers)["text_config"]
        assert text["layer_types"][-1] == "full_attention" and len(text["layer_types"]) == layers
    with pytest.raises(OutriderError, match="both kinds"):
        shallow(dict(BUILTIN_CONFIGS["google/gemma-4-31B-it"]), 5)


def test_the_benchmark_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it but the device: every cell, the synthetic marks, the table, the files."""
    monkeypatch.setattr(gpu_table, "PROMPT", 64)
    monkeypatch.setattr(gpu_table, "CHUNK", 32)
    monkeypatch.setattr(gpu_table, "CYCLES", 12)

    def make(size: str, **rest: Any) -> Rig:
        return Rig(TARGET, ASSISTANT, ReferenceOps(), "cpu", torch.float64, **rest)

    settings = gpu_table.GpuBenchSettings(("E2B",), (0, 4, 8), (1, 2), (24,), None, False, 8, True, repeats=2)
    said: list[str] = []
    records = gpu_table.run(settings, said.append, make)
    assert [(r["size"], r["batch"]) for r in records] == [("E2B", 1), ("E2B", 2)]
    assert not any("error" in r for r in records)
    for r in records:
        assert r["ar_ms"] > 0 and set(r["cycles"]) == {4, 8} and r["cycles"][4]["floor_ms"] > r["floor_ms"]
        assert r["synthetic"][4]["share"] == pytest.approx(0.72, abs=0.12) and r["synthetic"][4][
            "expected_share"
        ] == pytest.approx(0.72)
        assert ("prefill" in r) == (r["batch"] == 1)
    assert any("synthetic" in line for line in said)
    paths = gpu_table.write(tmp_path, records, "python benchmarks/bench_gpu.py")
    lines = [json.loads(line) for line in paths[0].read_text().splitlines()]
    assert len(lines) == 2 and set(lines[0]) == {"date", "commit", "machine", "command", "figures"}
    assert "synthetic" in paths[1].read_text()


def test_a_size_that_fails_does_not_cost_the_others() -> None:
    def make(size: str, **rest: Any) -> Rig:
        if size == "E2B":
            raise RuntimeError("no such luck")
        return Rig(TARGET, ASSISTANT, ReferenceOps(), "cpu", torch.float64, **rest)

    settings = gpu_table.GpuBenchSettings(("E2B", "E4B"), (0,), (1,), (24,), equal_tokens=0, repeats=1)
    failed, worked = gpu_table.run(settings, lambda line: None, make)
    assert failed["error"] == "RuntimeError: no such luck" and worked["ar_ms"] > 0
    assert "no such luck" in gpu_table.text_table(gpu_table.table([failed, worked]))


def test_settings_are_checked() -> None:
    for bad in ({"sizes": ("7B",)}, {"ks": (17,)}, {"batches": (0,)}, {"contexts": (1,)}, {"accept": (1.5,)}):
        with pytest.raises(OutriderError):
            gpu_table.GpuBenchSettings(**bad)
    assert gpu_table.GpuBenchSettings(accept=(0.9, 0.5)).chances(4) == [0.9, 0.5, 0.5, 0.5]
    assert gpu_table.GpuBenchSettings().chances(2) is None
    assert gpu_table.quick().against_hf


@pytest.mark.skipif(torch.cuda.is_available(), reason="it would run")
def test_the_command_says_what_it_needs() -> None:
    from bench_gpu import bench_gpu

    with pytest.raises(OutriderError, match="CUDA device"):
        bench_gpu()
