"""Sizes by what is free, forecasts before anything long begins, and recipes."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests import tiny
from tests.engines import LLAMA
from tests.unit.train.test_trainer import made as made_trainer
from torch.utils.flop_counter import FlopCounterMode
from typer.main import get_command

from outrider.cli.main import app
from outrider.models.config import DrafterConfig, ModelConfig
from outrider.train import finish, forecast, target
from outrider.train.clock import Budget, Stop
from outrider.train.config import TrainConfig
from outrider.train.data import Sequences, make_batch
from outrider.train.design import default_clusters, plain, spread_reads
from outrider.train.forecast import (
    CPU_SCORED,
    EFFICIENCY,
    FEWEST_ANCHORS,
    FEWEST_STEPS,
    FEWEST_TOKENS,
    GPU_ANCHORS,
    SUSTAINED,
    Forecast,
    MachineSpeed,
    RunCosts,
    RunPlan,
    Sizes,
    Work,
    check,
    choose_sizes,
    free_bytes,
    least_minutes,
    timed,
)
from outrider.train.recipes import Recipe, read_recipe
from outrider.train.run import TrainRun, some_of_each_kind
from outrider.types import OutriderError
from outrider.weights.hub import ASSETS
from outrider.weights.sizes import StoredSize

# keys of the shipped drafter's provenance, which is older than their names now
RENAMED = {
    "survival": "survival_weight", "four_bits_from": "qat_start", "warmup": "warmup_steps", "hold": "lr_hold",
    "final": "lr_final", "clip": "grad_clip", "decay": "step_decay",
    "cluster_pull": "cluster_grad_share",
}  # fmt: skip
# Qwen2.5-0.5B's shape
HALF = ModelConfig.from_hf({
    **LLAMA, "model_type": "qwen2", "hidden_size": 896, "num_attention_heads": 14, "num_key_value_heads": 2,
    "num_hidden_layers": 24,
    "intermediate_size": 4864, "vocab_size": 151936, "tie_word_embeddings": True,
})  # fmt: skip


def drafter(target: ModelConfig = HALF) -> DrafterConfig:
    return replace(plain(target, spread_reads(target, 6)), clusters=default_clusters(target.vocab_size), cluster_top=32)


HALF_JOB = TrainConfig("", Path(), Path(), dtype="bfloat16")


def sizes(free: int, cuda: bool = False, rate: float = 1e11, tokens: int = 40_000, anchors: int | None = None) -> Sizes:
    work = Work.of(drafter(), HALF, 5, 2)
    speed = MachineSpeed(rate / EFFICIENCY, 1e10)
    job = replace(HALF_JOB, device="cuda" if cuda else "cpu", batch_anchors=anchors)
    return choose_sizes(job, work, HALF.vocab_size, speed, tokens, free)


def test_a_batch_fits_what_is_free_and_lasts_seconds() -> None:
    """Half a billion weights on two cores: 16,384 anchors over the whole vocabulary took 22 GB and minutes a step."""
    work = Work.of(drafter(), HALF, 5, 2)
    small = sizes(20 << 30)
    assert small.scored == CPU_SCORED and small.keep and FEWEST_ANCHORS <= small.anchors <= 2048
    assert small.anchors * work.anchor_bytes(small.scored, 2) < 2 << 30
    assert 0.5 < small.anchors * work.anchor(small.scored, True) / 1e11 < 2.5
    assert (
        sizes(20 << 30, anchors=10**6).anchors * work.anchor_bytes(CPU_SCORED, 2) < 8 << 30
    )  # what is asked for must fit too
    assert sizes(1 << 29, rate=1e13).anchors < sizes(1 << 34, rate=1e13).anchors and not sizes(1 << 28).keep
    assert not sizes(20 << 30, tokens=10**8).keep
    large = sizes(130 << 30, cuda=True)
    assert large == Sizes(GPU_ANCHORS, 0, False) and sizes(10 << 30, cuda=True).anchors < GPU_ANCHORS


def test_what_is_free_is_known() -> None:
    assert 1 << 26 <= free_bytes("cpu") < 1 << 44


def test_clusters_divide_the_vocabulary() -> None:
    assert [default_clusters(v) for v in (49152, 262144, 151936, 32000)] == [1024, 2048, 1187, 800]
    assert default_clusters(7919) == 0 and default_clusters(151937) == 0  # a prime, and only far divisors


def test_the_upper_layers_are_read() -> None:
    assert spread_reads(HALF, 6) == (12, 14, 16, 19, 21, 23) and spread_reads(HALF, 24) == tuple(range(24))
    with pytest.raises(OutriderError, match="the target has 24"):
        spread_reads(HALF, 25)


def costs(rate: float = 1e11, pair: float = 0.0) -> RunCosts:
    speed = MachineSpeed(rate, 1e10, pair)
    work = Work.of(drafter(), HALF, 5, 2)
    chosen = RunPlan(drafter(), work, speed, sizes(20 << 30, rate=EFFICIENCY * rate))
    stored = StoredSize(parameters=500_000_000, total=5e8, token=5e8)
    return RunCosts.of(job(unroll=5, device="cpu"), chosen, HALF, stored, 10_000)


def test_what_the_loss_does_beside_products_is_foreseen() -> None:
    """Catches: fast products and a forecast of seven times the steps, since the loss's passes over the vocabulary were
    not counted; they make batches smaller, too."""
    fast = costs(1e12)
    here = costs(1e12, pair=2e-8)
    chosen = sizes(20 << 30, rate=EFFICIENCY * 1e12)
    assert here.step - fast.step == pytest.approx(SUSTAINED * chosen.anchors * 5 * CPU_SCORED * 2e-8)
    work = Work.of(drafter(), HALF, 5, 2)
    speed = MachineSpeed(1e12, 1e10, 2e-8)
    less = choose_sizes(HALF_JOB, work, HALF.vocab_size, speed, 40_000, 20 << 30)
    assert less.anchors < chosen.anchors


class Machine:
    """A clock of its own: work takes 10 ms of processor time, the first time 500 more, and others use the processor
    for 1 / share - 1 of that in between."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, share: float):
        self.share = share
        self.used = 0.0
        self.calls = 0
        monkeypatch.setattr(time, "perf_counter", lambda: self.used / share)
        monkeypatch.setattr(time, "process_time", lambda: torch.get_num_threads() * self.used)

    def work(self) -> None:
        self.used += 0.01 if self.calls else 0.51
        self.calls += 1


@pytest.mark.parametrize("share", [1.0, 0.5, 0.08])
def test_a_load_is_counted_once_and_the_first_call_is_not(monkeypatch: pytest.MonkeyPatch, share: float) -> None:
    machine = Machine(monkeypatch, share)
    assert timed(machine.work) == pytest.approx((0.01 / share, 0.01))


def test_a_busy_machine_is_slower_in_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: a forecast that took the quickest moment of a loaded machine for its speed, and one that took the load
    into account twice in what the loss costs."""
    monkeypatch.setattr(forecast, "timed", lambda work: (0.01, 0.01))
    idle = MachineSpeed.measure(torch.float32, 64)
    monkeypatch.setattr(forecast, "timed", lambda work: (0.04, 0.01))
    busy = MachineSpeed.measure(torch.float32, 64)
    assert (busy.rate, busy.bandwidth, busy.pair) == pytest.approx((idle.rate / 4, idle.bandwidth / 4, idle.pair * 4))
    assert (idle.share, busy.share) == pytest.approx((1.0, 0.25))


def test_a_run_that_a_load_makes_too_short_is_refused_with_both_ways_out() -> None:
    """Catches: a forecast of 8 steps that went on and wrote a drafter that had learnt nothing."""
    idle = costs(1e11)
    parts = {name: getattr(idle, name) / 0.05 for name in ("load", "start", "answer", "capture", "step", "evaluate")}
    busy = replace(idle, **parts, share=0.05)
    minutes = least_minutes(idle, 0.0)
    assert busy.idle.step == pytest.approx(idle.step)
    longer = least_minutes(busy, 0.0)
    ways = (
        f"other processes use 95% of this machine: try --minutes {longer:g}, or the same command when they have ended"
    )
    with pytest.raises(OutriderError, match=f"too short here.*{ways}$"):
        check(busy, minutes, 0.0)
    needed = rf"a drafter needs at least \d+ tokens and {FEWEST_STEPS} steps"
    with pytest.raises(OutriderError, match=f"too short here.*; {needed}; try --minutes {longer:g}$"):
        check(busy, minutes / 3, 0.0)
    assert check(busy, longer, 0.0).startswith(f"in {longer:g} minutes about")


def test_an_evaluation_is_given_up_when_the_time_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenth of the time is allowed for an evaluation that takes longer than planned; without --minutes there is no
    end but a signal."""
    clock = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    stop = Stop()
    timed_run, free = (
        TrainRun(TrainConfig("t", tmp_path, tmp_path), Budget(minutes, 0.0), stop, say=print, progress=None)
        for minutes in (10.0, None)
    )
    for clock[0], over in ((599.0, False), (650.0, False), (661.0, True)):
        assert timed_run.halted() == over and not free.halted()
    stop.signal = 15
    assert free.halted()


@pytest.mark.parametrize("rate", [1e9, 3e10, 1e11, 3e12])
@pytest.mark.parametrize("spent", [0.0, 40.0])
def test_refusal_admission_and_advice_are_one_forecast(rate: float, spent: float) -> None:
    """Catches: a run that was admitted although its own forecast was eleven steps, and advice that is refused."""
    here = costs(rate)
    with pytest.raises(OutriderError, match=r"--minutes 0.2 is too short here.*try --minutes ") as refused:
        check(here, 0.2, spent)
    advised = float(str(refused.value).split("try --minutes ")[1])
    for minutes in (0.3, 1, 2, 5, 10, 60, 600, advised):
        foreseen = Forecast.of(here, 60 * minutes - spent)
        assert foreseen.enough == (foreseen.steps >= FEWEST_STEPS and foreseen.answered >= FEWEST_TOKENS)
        if foreseen.enough:
            assert f"{foreseen.steps} steps" in check(here, minutes, spent)
        else:
            with pytest.raises(OutriderError, match=f"{foreseen.steps} steps.*try --minutes {advised:g}$"):
                check(here, minutes, spent)
    assert Forecast.of(here, 60 * advised - spent).enough and not Forecast.of(here, 60 * advised / 2.5 - spent).enough


def test_the_forecast_counts_the_operations_of_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted by torch, so that neither the machine nor its load matters; within a factor of 1.6 either way."""
    train = made_trainer(tmp_path)
    batch = make_batch(train.data, np.arange(4), 3)
    monkeypatch.setattr(
        target, "causal_attention", lambda q, k, v, **_: (q @ k.mT).softmax(-1) @ v
    )  # torch's own cannot be counted
    with FlopCounterMode(display=False) as counter:
        train.loss(batch)[0].backward()
    work = Work.of(train.net.config, train.model.config, 3, 4)
    foreseen = batch.anchors[0].numel() * work.anchor(tiny.VOCAB, False)
    assert 1 / 1.6 < foreseen / counter.get_total_flops() < 1.6


def job(**change: Any) -> TrainConfig:
    return replace(TrainConfig("t", Path("d"), Path("o"), device="cuda"), **change)


def phases(name: str) -> list[TrainConfig]:
    """Settings of each phase of a shipped recipe."""
    recipe = read_recipe(name)
    return [job().with_values(recipe.values, name).with_values(p.values, name).resolved() for p in recipe.phases]


def test_the_shipped_recipe_is_how_the_shipped_drafter_was_made() -> None:
    """Every setting that the drafter's provenance states, and the shape that its configuration has."""
    jobs = phases("shipped")
    assert [(p.name, p.minutes) for p in read_recipe("shipped").phases] == [
        ("first", 9.0),
        ("second", 10.0),
        ("third", 23.0),
    ]
    runs = json.loads((ASSETS / "smollm2" / "provenance.json").read_text())["runs"]
    free = {
        "steps",
        "minutes",
        "log_every",
        "save_every",
        "anchors",
        "tokens",
    }  # by the clock, of the log, or by what fits
    for made, run in zip(jobs, runs, strict=True):
        recorded = {RENAMED.get(k, k): v for k, v in run["settings"].items() if k not in free}
        current = {**vars(made), "muon": made.optimizer == "muon"}
        assert recorded.keys() - current.keys() <= {
            "average",
            "accumulate",
            "patience",
            "scored",
            "keep",
            "grad_clip",
            "weight_decay",
            "position_offset",
            "offset",
        }  # nothing was made of the first three; then sizes, and what no recipe ever set otherwise
        assert {k: str(current[k]) for k in recorded.keys() & current.keys()} == {
            k: str(v) for k, v in recorded.items() if k in current
        }
        assert made.recluster == run.get("reclustered", False)
    assert jobs[2].batch_anchors == runs[2]["settings"]["anchors"]
    assert [(j.answer_seed, j.max_new, j.temperature, j.answer_minutes) for j in jobs] == [
        (1, 192, 0.8, 2.5),
        (7, 192, 1.0, 2.5),
        (17, 256, 1.0, 4.5),
    ]
    assert [(j.greedy_share, j.answers_per_prompt, j.carry_share, j.heldout, j.max_prompt) for j in jobs] == [
        (0.5, 1.0, 1.0, 512, 1024),
        (0.28, 1.0, 0.15, 512, 1024),
        (0.24, 1.7, 0.15, 512, 1024),
    ]
    drafter = DrafterConfig.from_hf(json.loads((ASSETS / "smollm2" / "config.json").read_text()))
    assert (jobs[0].kv_layers, jobs[0].taps, jobs[0].clusters) == (drafter.reads, drafter.taps, drafter.clusters)
    assert (
        jobs[0].intermediate_size == drafter.layers[0].intermediate
        and drafter.weight_bits == 4
        and jobs[2].categories["rag"] == 2.0
    )


def test_the_recipe_that_goes_on_leaves_a_draft_step_as_dear_as_it_was() -> None:
    """The shipped drafter is where it starts, and as many clusters are scored: 8 % of a target step is the bound, 7.84
    are used."""
    (made,) = phases("further")
    drafter = DrafterConfig.from_hf(json.loads((ASSETS / "smollm2" / "config.json").read_text()))
    assert (made.init, made.cluster_top, made.recluster) == ("smollm2", drafter.cluster_top, False)
    assert (made.qat_start, made.loss_row_share, made.batch_anchors) == (0.0, 0.65, 28672)
    (phase,) = read_recipe("further").phases
    assert job(init="other").with_values(phase.values, "further", frozenset({"init"})).init == "other"


def test_the_command_line_wins_over_a_recipe_and_unknown_keys_are_named(tmp_path: Path) -> None:
    values = {"lr": 0.5, "max_new": 7, "kv_layers": [1, 2]}
    config = job(lr=0.1).with_values(values, "r", frozenset({"lr"}))
    assert config.lr == 0.1 and config.max_new == 7 and config.kv_layers == (1, 2)
    for bad, message in (
        ({"lrr": 1}, "unknown key 'lrr'"),
        ({"loss_rowshare": 0.5}, "did you mean loss_row_share"),
        ({"out": "x"}, "unknown key 'out'"),
        ({"lr_hold": 2.0}, r"lr_hold \(a key of the recipe\) must be in \[0, 1\], got 2.0"),
        ({"steps": "many"}, "--steps must be a whole number of at least 1, got 'many'"),
        ({"heldout": float("inf")}, r"heldout \(a key of the recipe\) must be a whole number of at least 0, got inf"),
        ({"optimizer": "sgd"}, "must be adamw, muon, got 'sgd'"),
    ):
        with pytest.raises(OutriderError, match=message):
            job().with_values(bad, "r")
    with pytest.raises(OutriderError, match="no such file; shipped recipes"):
        read_recipe("nothing")
    for text, message in (("", "no settings"), ("x = ", "not TOML"), ("[[phase]]\nlr = 1", "phase 1 needs 'minutes'")):
        (tmp_path / "r.toml").write_text(text)
        with pytest.raises(OutriderError, match=message):
            read_recipe(str(tmp_path / "r.toml"))
    (tmp_path / "r.toml").write_text("layers = 2\nunroll = 2\n")
    assert read_recipe(str(tmp_path / "r.toml")) == Recipe(str(tmp_path / "r.toml"), {"layers": 2, "unroll": 2})


def test_the_command_has_a_dozen_options() -> None:
    (command,) = (c for c in get_command(app(("train", "chat"))).commands.values() if c.name == "train")  # type: ignore[attr-defined]
    assert len([p for p in command.params if p.param_type_name == "option"]) <= 15


def test_a_gpus_first_evaluation_is_not_what_an_evaluation_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels are compiled at the first one. A second of that for one answer once left a handful of answers to evaluate
    on."""
    rows = [np.arange(40)] * 64
    aside = Sequences.of(rows, [8] * 64, range(64), [True, False] * 32, 64)
    job = TrainConfig(target="t", data=tmp_path, out=tmp_path, minutes=1.0, device="cuda")
    run = TrainRun(job, Budget(1.0, time.perf_counter()), Stop(), say=print, progress=None)
    judged: list[int] = []

    def judge(target: object, net: object, data: Sequences, temperature: float) -> None:
        judged.append(len(data))
        time.sleep(0.3 if len(judged) == 1 else 0.0)

    monkeypatch.setattr(finish, "judge", judge)
    left, seconds = run.reserve(None, None, aside)  # type: ignore[arg-type]
    assert judged == [1, 32] and len(left) == 64 and seconds < 10


def test_the_time_that_was_used_is_noted_now_and_then(tmp_path: Path) -> None:
    """Catches: a run that is killed and then begins its minutes anew; one that writes a file at every step."""
    run = TrainRun(
        TrainConfig("t", tmp_path, tmp_path), Budget(9.0, time.perf_counter() - 100.0), Stop(), say=print, progress=None
    )
    noted = tmp_path / "spent.json"
    run.counts = False  # refused runs have used nothing
    run.spend(0.0)
    assert not noted.exists()
    run.counts = True
    run.spend(3600.0)
    assert not noted.exists()
    run.spend(0.0)
    assert 100.0 <= json.loads(noted.read_text())["seconds"] < 3600.0


def test_held_out_answers_that_there_is_time_for_are_of_both_kinds() -> None:
    """Catches: every other answer, which is a greedy one each time."""
    both = np.array([True, False] * 32)
    for count in (2, 7, 16, 32, 64, 90):
        chosen = some_of_each_kind(both, count)
        assert len(set(chosen.tolist())) == min(count, 64) and abs(int(both[chosen].sum()) - min(count, 64) / 2) <= 0.5
    assert some_of_each_kind(both[:1], 1).tolist() == [0]


def test_prompts_that_are_left_out_are_counted(tmp_path: Path) -> None:
    """40 prompts became "34 prompts" without a word."""
    prompts = Sequences.of([np.arange(9)] * 34, [9] * 34, range(34), [False] * 34, 16)
    job = TrainConfig(target="t", data=tmp_path, out=tmp_path, max_prompt=256, heldout=4)
    run = TrainRun(job, Budget(1.0, time.perf_counter()), Stop(), say=print, progress=None)
    digests = [str(number) for number in range(40)]
    (tmp_path / "prompts.json").write_text(json.dumps({"digests": digests, "categories": digests}))
    assert "34 prompts, 306 tokens (6 longer than 256 left out: max_prompt in a recipe);" in run.prompts_line(prompts)
    (tmp_path / "prompts.json").write_text(json.dumps({"digests": digests[:34], "categories": digests}))
    assert "34 prompts, 306 tokens; " in run.prompts_line(prompts)
