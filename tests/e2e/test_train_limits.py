"""A first day of training must not run past its time, lose everything at Ctrl-C, or be unable to make the shipped
drafter."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests import tiny
from tests.e2e.test_train import job, prompts, quiet, settings
from tests.waiting import PATIENCE, until

from outrider.cli.main import main
from outrider.llm import LLM
from outrider.ops.reference import as_tensor
from outrider.train import answers, forecast, run
from outrider.train.answers import read_answers
from outrider.train.data import Sequences
from outrider.train.evaluate import Judge
from outrider.train.recipes import Phase, Recipe, train_recipe
from outrider.train.trainer import Trainer
from outrider.types import OutriderError, SamplingParams
from outrider.weights.load import load_drafter

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("limits")
    return tiny.write_target("smollm2", folder / "target"), prompts(folder / "prompts.jsonl")


@pytest.fixture
def own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock is the processor time of this process: what others do on the machine is not counted against anybody."""
    monkeypatch.setattr(time, "perf_counter", time.process_time)


def endless(target: Path, data: Path, out: Path, *more: str, **keys: object) -> list[str]:
    """A run without end, its settings in a recipe next to the data."""
    values = {"unroll": 2, "layers": 2, "batch_anchors": 256, "heldout": 8, "eval_every": 0, "dtype": "float32", **keys}
    recipe = out.parent / f"{out.name}.toml"
    recipe.write_text("".join(f"{k} = {json.dumps(v)}\n" for k, v in values.items()))
    command = [
        sys.executable,
        "-m",
        "outrider.cli.main",
        "train",
        "--target",
        str(target),
        "--data",
        str(data),
        "--out",
        str(out),
    ]
    return [*command, *f"--recipe {recipe} --steps 1000000 --max-new 16 --device cpu".split(), *more]


def interrupted(command: list[str], number: int, ready: Path, beyond: int = 0) -> subprocess.CompletedProcess[str]:
    """The command, sent the signal once the file `ready` has more than so many bytes."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        until(lambda: process.poll() is not None or (ready.exists() and ready.stat().st_size > beyond))
        process.send_signal(number)
        out, err = process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
    return subprocess.CompletedProcess(command, process.returncode, out, err)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_a_drafter_and_a_run_to_continue(world: tuple[Path, Path], tmp_path: Path, number: int) -> None:
    target, data = world
    done = interrupted(endless(target, data, tmp_path), number, tmp_path / "log.jsonl")
    assert done.returncode == 128 + number, done.stderr[-2000:]
    assert "stopped at step" in done.stderr and "Traceback" not in done.stderr
    step = torch.load(tmp_path / "checkpoint.pt", weights_only=True)["progress"]["step"]
    assert step > 0
    llm = LLM.load(str(target), drafter=str(tmp_path / "drafter"), draft_tokens=3, device="cpu", ops="reference")
    assert llm.generate("red cat", SamplingParams(max_tokens=8))[0].token_ids
    assert "Not measured" in (tmp_path / "drafter" / "README.md").read_text()
    more = settings(steps=step + 5, unroll=2, warmup_steps=10, eval_every=0)
    said: list[str] = []
    more = job(target, data, tmp_path, layers=2, max_new=16, batch_anchors=256, **more)
    assert run.train(more, said.append)["full"]["answers"] > 0
    assert any(f"continuing from step {step}" in line for line in said)
    assert "Not measured" not in (tmp_path / "drafter" / "README.md").read_text()


def test_a_signal_while_answering_keeps_the_answers(world: tuple[Path, Path], tmp_path: Path) -> None:
    target, _ = world
    many = prompts(tmp_path / "many.jsonl", 3000)
    out = tmp_path / "out"
    done = interrupted(endless(target, many, out), signal.SIGINT, out / "answers.jsonl")
    assert done.returncode == 130 and "stopped while answering" in done.stderr and "Traceback" not in done.stderr, (
        done.stderr[-2000:]
    )
    stored_answers = read_answers(out / "answers.jsonl")
    assert 0 < len(stored_answers) < 3000 and not (out / "data.npz").exists()
    first = {k: a.tokens for k, a in stored_answers.items() if a.done}
    num_bytes = (out / "answers.jsonl").stat().st_size
    again = interrupted(
        endless(target, many, out), signal.SIGINT, out / "answers.jsonl", beyond=num_bytes
    )  # it is answering again by then
    assert again.returncode == 130, again.stderr[-2000:]
    later = read_answers(out / "answers.jsonl")
    assert len(later) >= len(stored_answers) and all(later[k].tokens == tokens for k, tokens in first.items())


def test_a_killed_warm_start_leaves_the_best_drafter_there_was(world: tuple[Path, Path], tmp_path: Path) -> None:
    """Killed without a warning while it unlearns: what it started from is what it leaves, then and where it ends in
    earnest."""
    target, data = world
    base = job(target, data, tmp_path / "base", max_new=16, batch_anchors=256)
    run.train(base, quiet)
    out = tmp_path / "out"
    spoils = ("--init", str(tmp_path / "base" / "drafter"), "--lr", "3")
    command = endless(target, data, out, *spoils, eval_every=3, warmup_steps=1)
    done = interrupted(command, signal.SIGKILL, out / "log.jsonl", beyond=20_000)  # several evaluations
    assert done.returncode == -signal.SIGKILL
    whole = (out / "log.jsonl").read_text().rpartition("\n")[0]  # without a line that was being written
    rows = [json.loads(line) for line in whole.splitlines()]
    scores = [r["eval"]["score"] for r in rows if "eval" in r]
    assert len(scores) > 1 and scores[0] == max(scores) and "sampled" in rows[0]["eval"]
    best, start = (load_drafter(str(path / "drafter"), "cpu", torch.float32)[1] for path in (tmp_path / "base", out))
    assert all(torch.equal(as_tensor(best[name]), as_tensor(start[name])) for name in best)
    more = settings(steps=2, unroll=2, warmup_steps=1, lr=3.0, eval_every=3)  # fewer than it has done: it ends at once
    same = replace(base, out=out, init=str(tmp_path / "base" / "drafter"), layers=2, **more)
    run.train(same, quiet)
    ended = load_drafter(str(out / "drafter"), "cpu", torch.float32)[1]
    assert all(torch.equal(as_tensor(best[name]), as_tensor(ended[name])) for name in best)


@pytest.mark.usefixtures("own_time")
def test_minutes_are_kept(world: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answering, training and evaluation together; what is continued has the time that was left."""
    target, data = world
    monkeypatch.setattr(forecast, "FEWEST_TOKENS", 50)  # a machine that is busy with other tests shall not be refused
    monkeypatch.setattr(forecast, "FEWEST_STEPS", 5)
    quick = job(
        target, data, tmp_path, minutes=0.25, **dict(max_new=12), **settings(steps=10**6, unroll=2, eval_every=0)
    )
    began = time.perf_counter()
    result = run.train(quick, quiet)
    took = time.perf_counter() - began
    assert result["full"]["answers"] > 0 and 8 < took < 15 * 1.1 + 20
    spent = json.loads((tmp_path / "spent.json").read_text())["seconds"]
    assert abs(spent - took) < 5
    steps = torch.load(tmp_path / "checkpoint.pt", weights_only=True)["progress"]["step"]
    began = time.perf_counter()
    run.train(quick, quiet)
    assert time.perf_counter() - began < 30
    assert torch.load(tmp_path / "checkpoint.pt", weights_only=True)["progress"]["step"] <= steps + 200


@pytest.mark.usefixtures("own_time")
def test_answering_ends_in_time_and_training_takes_what_there_is(world: tuple[Path, Path], tmp_path: Path) -> None:
    target, _ = world
    many = prompts(tmp_path / "many.jsonl", 5000)
    out = tmp_path / "out"
    run.train(job(target, many, out, answer_minutes=0.05, **settings(steps=3, unroll=2, warmup_steps=1)), quiet)
    data = Sequences.load(out / "data.npz")
    assert 0 < len(data) < 5000 and (out / "drafter" / "acceptance.json").exists()


def test_what_cannot_be_done_in_time_is_refused_before_it_begins(
    world: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, data = world
    monkeypatch.setattr(forecast, "timed", lambda work: (1e4, 1e4))  # a machine of another century
    monkeypatch.setattr(answers, "answering_engine", None)  # nothing is loaded for the forecast
    out = tmp_path / "runs" / "mine"
    with pytest.raises(OutriderError, match=r"--minutes 1 is too short here.*try --minutes"):
        run.train(job(target, data, out, minutes=1.0), quiet)
    assert not out.parent.exists()  # nothing is left that would stand in the way of other settings
    notes = tmp_path / "notes.txt"
    notes.write_text("mine")
    with pytest.raises(OutriderError, match="is too short here"):
        run.train(job(target, data, tmp_path, minutes=1.0, max_new=8), quiet)
    assert [*tmp_path.iterdir()] == [notes]


def test_a_run_that_could_not_train_says_so_and_fails(
    world: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The forecast was wrong (a machine that became busy): three steps are made in all the minutes."""
    target, data = world
    monkeypatch.setattr(forecast, "check", lambda *_, **__: "plenty of steps")
    monkeypatch.setattr(Trainer, "share", lambda self, passed: 1.0 if self.progress.step >= 3 else 0.0)
    monkeypatch.setattr(sys, "argv", ["outrider", *endless(target, data, tmp_path)[3:], "--minutes", "9"])
    with pytest.raises(SystemExit) as stop:
        main()
    text = capsys.readouterr()
    assert stop.value.code == 1 and "only 3 steps in the time there was" in text.err and "try it" not in text.out


def test_a_signal_ends_the_evaluation_before_the_first_step(
    world: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches: `--init` on a busy machine, which evaluated all held-out answers before it looked at a signal."""
    target, data = world
    base = job(target, data, tmp_path / "base", max_new=16, batch_anchors=256, **settings(steps=3, unroll=2))
    run.train(base, quiet)
    real = Judge.drafts
    done = []
    sent = iter([signal.SIGTERM])

    def drafts(self: Judge, *args: object, **keys: object) -> object:
        for number in sent:
            signal.raise_signal(number)
        done.append(real(self, *args, **keys))  # type: ignore[arg-type]
        return done[-1]

    monkeypatch.setattr(Judge, "drafts", drafts)
    result = run.train(replace(base, out=tmp_path / "out", init=str(tmp_path / "base" / "drafter")), quiet)
    assert result["stopped"] == signal.SIGTERM and not done
    assert not (tmp_path / "out" / "best.pt").exists() and (tmp_path / "out" / "drafter" / "config.json").exists()


def test_a_large_vocabulary_is_scored_in_part_and_states_are_kept(
    world: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CPU trains so for a large model; it must still learn, and a resumed run keeps its sizes."""
    target, data = world
    monkeypatch.setattr(forecast, "CPU_SCORED", 96)
    more = settings(steps=60, unroll=3, log_every=10, lr=4e-3, warmup_steps=5)
    result = run.train(job(target, data, tmp_path, **more), quiet)
    sizes = json.loads((tmp_path / "sizes.json").read_text())
    assert sizes["scored"] == 96 and sizes["keep"]
    rows = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    losses = [r["loss"] for r in rows if "loss" in r]
    assert losses[-1] < 0.8 * losses[0] and result["full"]["tokens_per_cycle"][4] > 1.5
    monkeypatch.setattr(forecast, "CPU_SCORED", 10**6)
    more = settings(steps=62, unroll=3, log_every=10, lr=4e-3, warmup_steps=5)
    run.train(job(target, data, tmp_path, **more), quiet)
    assert json.loads((tmp_path / "sizes.json").read_text()) == sizes


def test_a_recipe_gives_all_that_the_shipped_drafter_has(world: tuple[Path, Path], tmp_path: Path) -> None:
    """Phases that go on from one another: 4 bits, Muon, new clusters, T = 1; files and configuration as the shipped
    one's."""
    target, data = world
    common = {"unroll": 2, "warmup_steps": 2, "max_new": 16, "heldout": 8, "log_every": 3, "eval_every": 3}
    first = Phase(
        "first",
        1.0,
        {**common, "style": "plain", "kv_layers": [1, 2], "taps": [0], "intermediate_size": 32, "clusters": 16},
    )
    second = Phase("second", 1.0, {
        **common, "recluster": True, "temperature": 1.0, "greedy_share": 0.3, "carry_share": 0.5, "answer_seed": 9,
        "optimizer": "muon",
        "qat_start": 0.5, "cluster_grad_share": 0.1, "greedy_loss": "hard=1", "categories": {"a": 2.0},
        "cluster_top": 3,
        "loss_row_share": 0.7,
    })  # fmt: skip
    short = job(target, data, tmp_path, **settings(steps=8))
    result = train_recipe(short, Recipe("r", {}, (first, second)), quiet, keep=frozenset({"steps"}))
    shipped = Path(run.__file__).parents[1] / "assets" / "drafters" / "smollm2"
    drafter_folder = tmp_path / "drafter"
    assert {p.name for p in drafter_folder.iterdir()} == {p.name for p in shipped.iterdir()}
    record, theirs = (json.loads((folder / "config.json").read_text()) for folder in (drafter_folder, shipped))
    assert (
        record.keys() == theirs.keys()
        and record["weight_bits"] == 4
        and record["use_ordered_embeddings"]
        and record["taps"] == [0]
    )
    assert record["centroid_intermediate_top_k"] == 3
    story = json.loads((drafter_folder / "provenance.json").read_text())
    assert [r["steps"] for r in story["runs"]] == [8, 8] and story["runs"][1]["started_from"].endswith("drafter")
    assert (
        story.keys() == json.loads((shipped / "provenance.json").read_text()).keys()
        and result["sampled"]["answers"] == result["full"]["answers"] == 8
    )
    assert {json.loads(line)["run"] for line in (drafter_folder / "log.jsonl").read_text().splitlines()} == {1, 2}
    text = (drafter_folder / "README.md").read_text()
    assert "trained as 4 bits hold them" in text and "sampled, coupled" in text and text.count("steps over") == 2
    second_data = Sequences.load(tmp_path / "2-second" / "data.npz")
    assert (
        second_data.index == Sequences.load(tmp_path / "1-first" / "data.npz").index[0]
    ).sum() >= 2  # carried and new
    llm = LLM.load(str(target), drafter=str(drafter_folder), draft_tokens=3, device="cpu", ops="reference")
    assert llm.drafter is not None and llm.drafter.profile is not None  # type: ignore[attr-defined]


def test_progress_is_shown_and_bad_options_are_one_line(
    world: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target, data = world
    command = ["outrider", *endless(target, data, tmp_path)[3:], "--steps", "2"]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit) as done:
        main()
    text = capsys.readouterr()
    assert (
        not done.value.code
        and text.err.splitlines()[0] == "starting"
        and "tok/s" in text.err
        and "step 1, loss" in text.err
        and "2 steps" in text.err
    )
    assert "to try it" in text.out and ": outrider chat" in text.out
    assert "measured here on held-out prompts: " in text.out and " × plain decoding. " in text.out
    assert "(a greedy and a sampled answer each): " in text.err and " answers to make" in text.err
    for more, message in (
        (("--minutes", "0"), "--minutes must be above 0"),
        (("--recipe", "none"), "no such file"),
        (("--nothing",), "No such option: --nothing"),
        (("a word",), "Got unexpected extra argument(s) (a word)"),
    ):
        monkeypatch.setattr(sys, "argv", [*command, *more])
        with pytest.raises(SystemExit) as stop:
            main()
        assert stop.value.code == 2 and message in capsys.readouterr().err.splitlines()[-1]
