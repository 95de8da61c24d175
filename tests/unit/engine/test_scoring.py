"""Texts that are scored or embedded, up to the longest that the engine takes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tests import tiny
from tests.engines import VOCAB, request, tiny_engine, tiny_model
from tests.kv import build_kv

from outrider.bench.prove import block_logits
from outrider.bench.rounding import forced
from outrider.engine.engine import Engine
from outrider.engine.scoring import Embedder, Scorer, ScoringJob
from outrider.models.decoder import TextModel
from outrider.ops.reference import ReferenceOps
from outrider.types import OutriderError
from outrider.weights.load import load_target

CONTEXT = 512


def text(length: int) -> list[int]:
    return [2 + 7 * i % (VOCAB - 2) for i in range(length)]


def finish(job: ScoringJob, engine: Engine) -> None:
    while job.step(engine):
        engine.check()
    engine.check()


# The sliding groups of one slot hold two times window + chunk: 66 positions of "mistral", 72 of "dense".
@pytest.mark.parametrize("variant", ["llama", "mistral", "dense"])
@pytest.mark.parametrize("length", [2, 17, 18, 66, 73, CONTEXT - 1])
def test_a_text_longer_than_sliding_windows_is_scored(variant: str, length: int) -> None:
    """All positions were reserved at once in sliding groups too, which hold a window and a chunk."""
    engine = tiny_engine(variant, max_batch=1, max_context=CONTEXT)
    scorer = Scorer(text(length), 0)
    finish(scorer, engine)
    assert engine.store.free_slots == 1
    with torch.inference_mode():
        kv = build_kv(engine.model.config, 1, length).view([(0, length)])
        logits = engine.model.logits(engine.model.forward(torch.tensor(text(length)), kv).hidden)
    truth = torch.log_softmax(logits, -1)
    assert scorer.entries[0] is None and len(scorer.entries) == length
    for i, entry in enumerate(scorer.entries[1:]):
        token = text(length)[i + 1]
        assert entry is not None and entry[token] == pytest.approx(float(truth[i, token]), abs=1e-4)


def test_an_embedding_of_a_long_text_is_its_mean() -> None:
    engine = tiny_engine("mistral", max_batch=1, max_context=CONTEXT)
    embedder = Embedder(text(300))
    finish(embedder, engine)
    with torch.inference_mode():
        kv = build_kv(engine.model.config, 1, 300).view([(0, 300)])
        mean = engine.model.forward(torch.tensor(text(300)), kv).hidden.double().mean(0)
    assert embedder.vector() == pytest.approx((mean / mean.norm()).tolist(), abs=1e-4)


def test_a_text_waits_for_its_share_of_full_layers_at_the_start() -> None:
    """Pages of full layers are reserved before the first pass: a text is not refused after most of the work."""
    engine = tiny_engine("dense", max_batch=2, max_context=CONTEXT, kv_tokens=CONTEXT + 4)
    engine.submit(request("running", text(200), max_tokens=100))
    for _ in range(18):
        engine.step()
    with pytest.raises(OutriderError, match="no room in the cache to score 511 tokens now"):
        Scorer(text(511), 0).step(engine)
    engine.check()
    while engine.busy:
        engine.step()
    finish(Scorer(text(511), 0), engine)


@pytest.mark.parametrize("variant", ["mistral", "dense"])
def test_row_invariance_is_proved_on_prompts_longer_than_windows(variant: str) -> None:
    """`prove` reserved whole prompts too."""
    engine = tiny_engine(variant, max_batch=1, max_context=CONTEXT)
    llm = SimpleNamespace(engine=engine, adapters=None, adapter=None)
    logits = block_logits(llm, [text(320)], [300], 17)  # type: ignore[arg-type]
    assert logits.shape == (1, 17, VOCAB)
    engine.check()
    with torch.inference_mode():
        kv = build_kv(engine.model.config, 1, 320).view([(0, 316)])
        hidden = tiny_model(variant).forward(torch.tensor(text(316)), kv).hidden
        assert torch.allclose(logits[0], engine.model.logits(hidden[299:316]), atol=1e-4)


def test_the_sample_of_quality_figures_is_longer_than_windows(tmp_path: Path) -> None:
    """A failed reservation was ignored: positions beyond two windows then shared the scratch page."""
    folder = tiny.write_target("mistral", tmp_path)
    logits, ids = forced(str(folder), ReferenceOps(), None)
    config, weights, _ = load_target(str(folder), "cpu", torch.float32, ReferenceOps())
    model = TextModel(config, weights, ReferenceOps())
    with torch.inference_mode():
        kv = build_kv(config, 1, len(ids)).view([(0, len(ids) - 1)])
        truth = model.logits(model.forward(ids[:-1], kv).hidden)
    assert len(ids) > 150 and torch.allclose(logits, truth, atol=1e-4)


@pytest.mark.parametrize("variant", ["llama", "dense"])
def test_a_text_keeps_the_pages_that_it_has_reserved(variant: str) -> None:
    """Only the pages of the first pass were taken: sequences that came later took the others, and a text was refused
    in the middle."""
    engine = tiny_engine(variant, max_batch=3, max_context=CONTEXT, kv_tokens=CONTEXT + 64)
    scorer = Scorer(text(450), 0)
    assert scorer.step(engine)
    for name in ("a", "b"):
        engine.submit(request(name, text(200)[::-1], max_tokens=60))
    for _ in range(20):
        engine.step()
    finish(scorer, engine)
    assert len(scorer.entries) == 450
    while engine.busy:
        engine.step()
    assert engine.metrics.finished["length"] == 2
    engine.check()


def test_a_paused_request_gives_way_to_a_text() -> None:
    """A client that did not read its answer held the pages, and texts of others were refused."""
    engine = tiny_engine("dense", max_batch=2, max_context=CONTEXT, kv_tokens=CONTEXT + 4)
    engine.submit(request("unread", text(200), max_tokens=100))
    for _ in range(18):
        engine.step()
    engine.pause("unread", True)
    finish(Scorer(text(511), 0), engine)
    engine.pause("unread", False)
    while engine.busy:
        engine.step()
    assert engine.metrics.finished["length"] == 1
