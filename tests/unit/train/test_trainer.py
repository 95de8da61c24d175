"""One training step: what thinning a draft step's rows leaves as it was. And what a run that goes on knows of its best
weights."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests import tiny

from outrider.models.decoder import TextModel
from outrider.train import design, finish, trainer
from outrider.train.clock import Budget, Stop
from outrider.train.config import TrainConfig
from outrider.train.data import Sequences, make_batch
from outrider.train.net import DrafterModule
from outrider.train.run import TrainRun
from outrider.train.target import DenseOps
from outrider.train.trainer import Hooks, Trainer
from outrider.types import OutriderError
from outrider.weights.load import load_target

torch.set_num_threads(1)


def made(folder: Path, out: Path | None = None, **settings: float) -> Trainer:
    config, weights, _ = load_target(str(tiny.write_target("smollm2", folder)), "cpu", torch.float32)
    rng = np.random.default_rng(0)
    rows = [rng.integers(6, tiny.VOCAB, size=n) for n in (30, 26, 31, 9)]
    data = Sequences.of(rows, (5, 4, 6, 5), range(4), [True, False] * 2, tiny.VOCAB)
    net = DrafterModule(
        replace(design.plain(config, reads=(0, 2), intermediate=20), clusters=16, cluster_top=4), config
    )
    job = TrainConfig("", folder, out or folder, unroll=3, cluster_grad_share=0.5, **settings)  # type: ignore[arg-type]
    return Trainer(TextModel(config, weights, DenseOps()), net, data, job)  # type: ignore[arg-type]


def gradients(train: Trainer) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    loss, stats = train.loss(make_batch(train.data, np.arange(4), 3))
    names = list(train.params)
    return dict(zip(names, torch.autograd.grad(loss, [train.params[n] for n in names]), strict=True)), stats


def test_thinned_steps_learn_the_same_on_average(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: rows that weigh wrongly in the loss of the head, of the clusters, or in the figures of the log."""
    want, counted = gradients(made(tmp_path))
    thin = made(tmp_path, loss_row_share=0.5)
    lucks = iter([(n + 0.5) / 60 for n in range(60) for _ in range(2)])  # two thinned steps a batch

    class Luck:
        def random(self) -> float:
            return next(lucks)

    monkeypatch.setattr(trainer.np.random, "default_rng", lambda seed: Luck())
    samples = [gradients(thin) for _ in range(60)]
    monkeypatch.undo()
    for name, grad in want.items():
        mean = torch.stack([grads[name] for grads, _ in samples]).mean(0)
        assert (mean - grad).norm() < 0.05 * grad.norm(), name
    stats = torch.stack([s for _, s in samples])
    torch.testing.assert_close(stats.mean(0), counted, rtol=0.03, atol=0.3)
    assert stats[:, :, 0].std(0).max() < 1e-4  # the first step is whole


def test_thinning_follows_the_chance_that_a_row_is_reached(tmp_path: Path) -> None:
    """Survival draws rows by weight; nothing depends on anything but seed and step."""
    first, again = (gradients(made(tmp_path, loss_row_share=0.4, survival_weight=0.7)) for _ in range(2))
    whole, counted = gradients(made(tmp_path, survival_weight=0.7))
    assert all(torch.equal(first[0][name], again[0][name]) for name in whole)
    assert all(torch.isfinite(g).all() for g in first[0].values()) and first[1][2].sum() < 1.2 * counted[2].sum()


def test_a_run_that_goes_on_knows_what_was_best_after_its_checkpoint(tmp_path: Path) -> None:
    scores = iter([{"score": 2.0}, {"score": 1.5}])
    first = made(tmp_path / "target", tmp_path)
    first.hooks = Hooks(evaluate=lambda: next(scores))
    first.save()
    first.judge()
    again = made(tmp_path / "target", tmp_path)
    again.hooks = first.hooks
    assert again.resume() and again.progress.best == 2.0
    again.judge()
    assert torch.load(tmp_path / "best.pt", weights_only=True)["score"] == 2.0


def test_an_evaluation_that_was_given_up_is_no_score(tmp_path: Path) -> None:
    """Catches: a run that a signal could not end while the drafter it starts from was evaluated, 23 minutes on a busy
    machine."""
    run = made(tmp_path / "target", tmp_path)
    stops = iter([False, True])
    run.hooks = Hooks(evaluate=lambda: finish.judge(run.model, run.net, run.data, 0.0, lambda: next(stops)))
    run.judge()  # halted at its first batch
    assert list(stops) == [] and run.progress.best == -math.inf and not (tmp_path / "best.pt").exists()


def test_a_checkpoint_of_another_drafter_says_so(tmp_path: Path) -> None:
    run = made(tmp_path / "target", tmp_path)
    run.save()
    checkpoint = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    checkpoint["net"]["one.more"] = torch.zeros(1)
    trainer.write(tmp_path / "checkpoint.pt", checkpoint)
    with pytest.raises(
        OutriderError, match=r"does not fit this run \(its drafter is built otherwise\): choose another --out"
    ):
        run.resume()


@pytest.mark.parametrize(("best", "every", "loaded"), [(0, 0, False), (0, 20, True), (0, 500, False), (20, 20, True)])
def test_a_stopped_run_takes_the_best_weights_only_where_others_were_judged(
    tmp_path: Path, best: int, every: int, loaded: bool
) -> None:
    run = made(tmp_path / "target")
    run.progress.step = 100
    net = run.net
    trainer.write(
        tmp_path / "best.pt",
        {"net": {n: torch.zeros_like(w) for n, w in net.state_dict().items()}, "step": best, "score": 1.0},
    )
    run.config = TrainConfig("", tmp_path, tmp_path, init="some", eval_every=every)
    run.hooks = Hooks(evaluate=lambda: finish.judge(run.model, net, run.data, 0.0, lambda: True))
    step = finish.load_best(run)
    assert all((w == 0).all() for w in net.state_dict().values()) == loaded
    assert step == (best if loaded else 100) and (tmp_path / "last" / "model.safetensors").exists() == loaded


def test_a_run_that_goes_on_judges_the_answers_it_judged_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = made(tmp_path / "target")
    monkeypatch.setattr(finish, "judge", lambda *_, **__: {})
    seen: Any = None

    def judged(minutes: float | None) -> list[int]:
        job = TrainConfig("", tmp_path, tmp_path, minutes=minutes)
        run = TrainRun(job, Budget(minutes, 0.0), Stop(), say=lambda _: None, progress=None)
        return [int(i) for i in run.reserve(seen, train.net, train.data)[0].index]

    few = judged(1e-12)
    assert len(few) == 1 and judged(None) == [0, 1, 2, 3]  # nothing was judged yet
    assert judged(1e-12) == few
    (tmp_path / "best.pt").touch()
    assert judged(None) == judged(1e9) == few
