"""The batched answerer says what the engine says: greedily and with the engine's noise, whatever shares the batch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tests import tiny
from tests.engines import request, tiny_engine, tiny_model
from tests.engines import run as run_engine

from outrider.models import build
from outrider.train.capture import DenseOps
from outrider.train.data import load_folder
from outrider.train.generate import Answerer, Answering, answer_all
from outrider.train.parallel import Group
from outrider.types import OutriderError
from outrider.weights.load import load_target


def prompts(count: int = 11, vocab: int = 64) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.integers(2, vocab, size=n) for n in rng.integers(2, 40, size=count)]


@pytest.mark.parametrize("variant", ["llama", "mistral", "gemma3"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_answers_are_the_engines(variant: str, temperature: float) -> None:
    """Eleven prompts through four slots: refills in the middle, unlike lengths side by side."""
    engine = tiny_engine(variant)
    rows, seeds = prompts(), [100 + i for i in range(11)]
    said = run_engine(
        engine,
        [request(str(i), r.tolist(), max_tokens=20, temperature=temperature, seed=seeds[i], ignore_eos=False) for i, r in enumerate(rows)],
    )
    model = tiny_model(variant)  # the same weights, with the arithmetic of training
    model.ops = DenseOps()
    hot = temperature > 0
    how = Answering(20, temperature or 1.0, 4, 0.0 if hot else 1.0, coupled=hot)
    machine = Answerer(model, how, 40, tuple(sorted(engine.eos)))
    made = {n: (greedy, answer.tolist()) for n, greedy, answer in machine.answer(rows, seeds)}
    assert {n: a for n, (_, a) in made.items()} == {i: said[str(i)] for i in range(11)}
    assert all(greedy != hot for greedy, _ in made.values())


def test_shards_shares_and_resume(tmp_path: Path) -> None:
    config, weights, _ = load_target(str(tiny.write_target("smollm2", tmp_path / "t")), "cpu", torch.float32)
    model, rows, how = build(config, weights, DenseOps()), prompts(10), Answering(6, slots=4, greedy_share=0.5)
    answer_all(model, rows, how, tmp_path / "a", config.eos_ids, shard=3)
    names = sorted(p.name for p in (tmp_path / "a").iterdir())
    assert names == [f"data-{i:05d}.npz" for i in range(4)]
    whole = load_folder(tmp_path / "a")
    (tmp_path / "a" / names[1]).unlink()
    (tmp_path / "a" / "data-00009.part").write_bytes(b"half")
    answer_all(model, rows, how, tmp_path / "a", config.eos_ids, shard=3)
    again = load_folder(tmp_path / "a")
    assert sorted(again.index.tolist()) == list(range(10)) == sorted(whole.index.tolist())
    assert not list((tmp_path / "a").glob("*.part")) and 0 < whole.greedy.sum() < 10
    for rank in (0, 1):  # two processes, one folder
        answer_all(model, rows, how, tmp_path / "b", config.eos_ids, group=Group(rank, 2))
    both = load_folder(tmp_path / "b")
    assert sorted(both.index.tolist()) == list(range(10))
    assert {p.name for p in (tmp_path / "b").iterdir()} == {"data-0-00000.npz", "data-1-00000.npz"}


def test_a_prompt_beyond_the_context_is_refused(tmp_path: Path) -> None:
    config, weights, _ = load_target(str(tiny.write_target("smollm2", tmp_path)), "cpu", torch.float32)
    with pytest.raises(OutriderError, match="do not fit 512 positions"):
        Answerer(build(config, weights, DenseOps()), Answering(64, slots=2), 600, (1,))
