"""Measuring what cycles cost: every kind of drafter, a first and a second start."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.engines import VARIANTS, mtp_drafter, tiny_engine, tiny_model
from tests.unit.spec.test_draft_model import AuditedDraftModel

from outrider.engine import calibrate as module
from outrider.engine.calibrate import calibrate
from outrider.engine.engine import Engine
from outrider.models.config import ModelConfig
from outrider.models.decoder import TextModel
from outrider.ops.cpu.ops import CpuOps
from outrider.spec.plan import CostPart
from outrider.weights.load import dummy_weights

KEY = "machine model version"


def engine_with(kind: str) -> Engine:
    model = tiny_model("dense")
    drafter = {
        "ngram": lambda: None,
        "mtp": lambda: mtp_drafter(model, "dense"),
        "draft": lambda: AuditedDraftModel(tiny_model("llama", 3)),
    }[kind]()
    return tiny_engine("dense", drafter, model=model, k=None)


@pytest.mark.parametrize("kind", ["ngram", "mtp", "draft"])
def test_the_second_start_takes_the_stored_table(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BUDGET_S", 0.1)
    monkeypatch.setattr(module, "agrees", lambda *a, **k: module_agrees(*a, **{**k, "budget_s": 0.02}))
    path = tmp_path / "costs" / "table.json"
    for _ in range(2):
        engine = engine_with(kind)
        table = calibrate(engine, KEY, path)
        assert path.is_file() and table.key == KEY and table.verify(1, 0, 256) > 0
        engine.check()
        if isinstance(engine.drafter, AuditedDraftModel):
            engine.drafter.audit()
            assert not engine.drafter.tracks  # the scratch sequences were given back


module_agrees = module.agrees


def test_a_host_cycle_without_a_drafter_is_checked_on_the_second_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One call a cycle and nothing but n-grams: the check once had a single cell and took the logarithm of zero."""
    monkeypatch.setattr(module, "BUDGET_S", 0.1)
    shape = {**VARIANTS["llama"], "hidden_size": 128, "num_attention_heads": 4, "head_dim": 32, "intermediate_size": 64}
    config = ModelConfig.from_hf(shape)
    ops = CpuOps(1)
    runner = ops.compile(TextModel(config, dummy_weights(config, "cpu", torch.float32, ops, None, 0), ops))
    for _ in range(2):
        engine = tiny_engine(model=runner, k=None, page_size=32, prefill_chunk=32)
        assert engine.executors[0].name == "host"
        assert calibrate(engine, KEY, tmp_path / "table.json").verify(1, 4, 256) > 0


def test_a_draft_model_is_timed_with_its_keys_in_place() -> None:
    """Each probe once ran the draft model's whole prompt again, and its steps looked too dear ever to be used."""
    engine = engine_with("draft")
    assert isinstance(engine.drafter, AuditedDraftModel)
    rows: list[int] = []
    inner = engine.drafter.model.forward
    engine.drafter.model.forward = lambda ids, kv, **rest: (rows.append(len(ids)), inner(ids, kv, **rest))[1]
    for batch in (1, 3):
        for _ in range(2):
            rows.clear()
            engine.executors[-1].probe(CostPart("draft", "draft_model"), batch, 4, 256)
            assert rows == [batch] * 4
    engine.runner.close_scratch()
    engine.drafter.audit()
