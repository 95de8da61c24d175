"""From prompts to a drafter that pays, with a tiny target, in seconds: the command itself, resume, warm start,
export."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from tests import tiny

from outrider.cli.main import main
from outrider.llm import LLM
from outrider.models.decoder import TextModel
from outrider.prompts import read_prompts
from outrider.spec import acceptance
from outrider.train import run
from outrider.train.answers import read_answers
from outrider.train.block_net import load_net
from outrider.train.clock import Budget, Stop
from outrider.train.config import EvalConfig, TrainConfig
from outrider.train.data import Sequences
from outrider.train.evaluate import Judge, walk
from outrider.train.recipes import Phase, Recipe, train_recipe
from outrider.train.run import TrainRun
from outrider.train.target import DenseOps, describe, encode, open_target
from outrider.train.tools import answers, evaluate_drafter
from outrider.types import OutriderError, SamplingParams
from outrider.weights.load import load_target

torch.set_num_threads(1)


def quiet(_):
    return None


def prompts(path: Path, count: int = 48) -> Path:
    rng = np.random.default_rng(0)
    words = ["red", "blue", "cat", "dog", "sun", "sea", "one", "two"]
    rows = [
        {"id": i, "category": "ab"[i % 2], "prompt": " ".join(rng.choice(words, size=rng.integers(1, 5)))}
        for i in range(count)
    ]
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return path


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """A target, prompts, and a finished run."""
    folder = tmp_path_factory.mktemp("train")
    target = tiny.write_target("smollm2", folder / "target")
    data = prompts(folder / "prompts.jsonl")
    run.train(job(target, data, folder / "run"), quiet)
    return target, data, folder / "run"


def settings(**change: object) -> dict:
    """Those of a short run, evaluated at its end only."""
    return {"lr": 2e-3, "warmup_steps": 10, "log_every": 20, "eval_every": 0, **change}


def job(target: Path, data: Path, out: Path, **change) -> TrainConfig:
    usual = {"steps": 60, "unroll": 3, "log_every": 10, "lr": 4e-3, "warmup_steps": 5, "eval_every": 20}
    base = TrainConfig(
        str(target), data, out, layers=3, max_new=32, slots=16, heldout=8, batch_anchors=768, dtype="float32"
    )
    return replace(base, **{**usual, **change})


def log(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def test_loss_falls_and_the_drafter_beats_lookup(world: tuple[Path, Path, Path], tmp_path: Path) -> None:
    """And a drafter that came without a card gets one."""
    target, data, out = world
    bare = shutil.copytree(out / "drafter", tmp_path / "bare", ignore=shutil.ignore_patterns(acceptance.FILE))
    rows = [r for r in log(out) if "loss" in r]
    assert rows[-1]["loss"] < 0.75 * rows[0]["loss"]
    result = evaluate_drafter(str(target), str(bare), EvalConfig(data, max_tokens=32), card=True, say=quiet)
    print_of = json.loads((out / "drafter" / acceptance.FILE).read_text())["weights"]
    card = acceptance.read(bare, print_of)
    assert card is not None and card.judged > 100
    assert set(result["tokens_per_cycle"]) == set(range(1, 17)) and set(result["by_category"]) == {"a", "b"}
    assert result["tokens_per_cycle"][4] > lookup_tokens_per_cycle(Sequences.load(out / "data.npz"), 4) + 0.3
    assert all(
        a >= b
        for a, b in zip(result["acceptance_by_position"][:4], result["acceptance_by_position"][1:4], strict=False)
    )


def test_a_start_that_nothing_beats_is_written_and_said_and_what_was_learnt_is_kept(
    world: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    """Judged by prompts of another file; a rate that breaks the drafter."""
    target, data, out = world
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    apart = tmp_path / "apart.jsonl"
    apart.write_text(
        "".join(
            json.dumps({"prompt": text}) + "\n" for text in ("cat cat cat cat cat", "sun two red", rows[0]["prompt"])
        )
    )
    more = settings(steps=4, unroll=2, lr=3.0, warmup_steps=1, eval_every=2)
    again = job(target, data, tmp_path / "run", init=str(out / "drafter"), eval_data=apart, **more)
    said: list[str] = []
    result = run.train(again, said.append)
    same = sum(r["prompt"] == rows[0]["prompt"] for r in rows)
    assert any(f"{2 * (3 + same)} answers to held-out prompts" in line for line in said), said
    assert result["step"] == 0 and any(f"no evaluation beat {out / 'drafter'}" in line for line in said)
    best, last = ((tmp_path / "run" / name / "model.safetensors").read_bytes() for name in ("drafter", "last"))
    assert best == (out / "drafter" / "model.safetensors").read_bytes() != last
    with pytest.raises(OutriderError, match="begun with other prompts"):
        run.train(replace(again, eval_data=None), quiet)
    with pytest.raises(OutriderError, match="begun with other prompts"):
        run.train(replace(again, data=apart), quiet)


def test_a_folder_of_another_models_run_is_refused_and_keeps_its_drafter(
    world: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    """Same shapes, other weights: the folder's answers and drafter are another model's."""
    target, data, out = world
    tuned = tiny.write(fine_tune(transformers.AutoModelForCausalLM.from_pretrained(target)), tmp_path / "tuned")
    before = {p: p.read_bytes() for p in out.rglob("*") if p.is_file()}
    with pytest.raises(
        OutriderError, match=f"holds a run for another model .*other weights than {tuned}.*choose another --out"
    ):
        run.train(job(tuned, data, out), quiet)
    with pytest.raises(OutriderError, match="holds a drafter that this recipe did not make"):
        train_recipe(job(target, data, out), Recipe("r", {}, (Phase("one", 1.0, {}),)), quiet)
    foreign = tmp_path / "foreign"
    shutil.copytree(out / "drafter", foreign / "drafter")
    with pytest.raises(OutriderError, match="of unknown origin"):
        run.train(job(target, data, foreign), quiet)
    assert before == {p: p.read_bytes() for p in out.rglob("*") if p.is_file()}


def test_changed_settings_of_a_run_that_goes_on_are_refused_or_said(
    world: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    target, data, out = world
    run_folder = tmp_path / "run"
    shutil.copytree(out, run_folder)
    first = job(target, data, run_folder)
    for change, said in (
        ({"max_new": 16}, "max_new 32 -> 16"),
        ({"seed": 3, "answer_seed": 0}, "seed 0 -> 3"),
        ({"limit": 9}, "limit None -> 9"),
        ({"layers": 2}, "layers 3 -> 2"),
        ({"batch_anchors": 256}, "batch_anchors 768 -> 256"),
    ):
        with pytest.raises(OutriderError, match=rf"begun with other settings \({said}\): choose another --out"):
            run.train(replace(first, **change), quiet)
    lines: list[str] = []
    worse = replace(first, lr=3.0, steps=64, warmup_steps=1, lr_hold=1.0, eval_every=0)  # it unlearns
    result = run.train(worse, lines.append)
    assert any("goes on with other settings: " in line and "lr 0.004 -> 3.0" in line for line in lines)
    assert result["step"] <= 60 and any("no evaluation beat step" in line for line in lines)
    files = [(folder / "drafter" / "model.safetensors").read_bytes() for folder in (out, run_folder)]
    assert files[0] == files[1]


def lookup_tokens_per_cycle(data: Sequences, k: int) -> float:
    """Tokens per cycle of an n-gram drafter (longest recent match of up to 3 tokens) on the greedy answers."""
    tokens = cycles = 0
    for n in np.nonzero(data.greedy)[0]:
        ids = data[n].tolist()
        at = int(data.prompts[n]) + 1
        while at < len(ids):
            guess: list[int] = []
            for size in (3, 2, 1):
                tail = ids[at - size : at]
                match = next((i for i in range(at - size - 1, -1, -1) if ids[i : i + size] == tail), None)
                if match is not None:
                    guess = ids[match + size : min(match + size + k, at)]
                    break
            right = 0
            while right < len(guess) and at + right < len(ids) and guess[right] == ids[at + right]:
                right += 1
            step = min(right + 1, len(ids) - at)
            tokens = tokens + step
            cycles = cycles + 1
            at = at + step
    return tokens / max(1, cycles)


def test_a_killed_run_continues_bit_by_bit(
    world: tuple[Path, Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, data, out = world

    class Killed(Exception):
        pass

    from outrider.train.trainer import Trainer

    real = Trainer.update
    original_report = Trainer.report

    def update(self: Trainer, lr: float) -> None:
        if self.progress.step == 47:
            raise Killed
        real(self, lr)

    def report(self: Trainer, *what) -> None:  # checkpoints follow a report; one is due at the fourth
        original_report(self, *what)
        if self.progress.step == 40:
            self.save()

    monkeypatch.setattr(Trainer, "update", update)
    monkeypatch.setattr(Trainer, "report", report)
    with pytest.raises(Killed):
        run.train(job(target, data, tmp_path / "run"), quiet)
    monkeypatch.setattr(Trainer, "update", real)
    said: list[str] = []
    run.train(job(target, data, tmp_path / "run"), said.append)
    assert any("continuing from step 40" in line for line in said)
    keep = ("step", "loss", "hit", "alpha")
    curves = [[{k: r[k] for k in keep} for r in log(folder) if "loss" in r] for folder in (out, tmp_path / "run")]
    assert curves[0] == curves[1]
    files = [(folder / "drafter" / "model.safetensors").read_bytes() for folder in (out, tmp_path / "run")]
    assert files[0] == files[1]


def test_answers_are_kept_and_held_out_prompts_have_both_kinds(world: tuple[Path, Path, Path]) -> None:
    _, _, out = world
    data = Sequences.load(out / "data.npz")
    assert set(data.index.tolist()) == set(range(48)) and 0.2 < data.greedy.mean() < 0.8
    assert len(data) == 48 + 8 and all(a.done for a in read_answers(out / "answers.jsonl").values())


def test_the_folder_has_all_that_the_shipped_drafter_has(world: tuple[Path, Path, Path]) -> None:
    """Card and prior included; the prior is the one of these weights, and the controller starts from it."""
    target, _, out = world
    shipped = Path(run.__file__).parents[1] / "assets" / "drafters" / "smollm2"
    assert {p.name for p in (out / "drafter").iterdir()} >= {p.name for p in shipped.iterdir()}
    llm = LLM.load(str(target), drafter=str(out / "drafter"), draft_tokens=3, device="cpu", ops="reference")
    assert llm.drafter is not None and llm.drafter.profile is not None  # type: ignore[attr-defined]
    prior = llm.drafter.profile  # type: ignore[attr-defined]
    first = [r for r in log(out) if "final" in r][-1]["final"]["clustered"]["first_position_all_anchors"]
    assert prior.judged > 100 and abs(prior.accepted[0] - first) < 0.05 and len(prior.trust) == 16
    assert "tokens per cycle" in (out / "drafter" / "README.md").read_text().lower()
    other = json.loads((out / "drafter" / acceptance.FILE).read_text()) | {"weights": "of others"}
    (out / "other").mkdir()
    (out / "other" / acceptance.FILE).write_text(json.dumps(other))
    assert acceptance.read(out / "other", prior.weights) is None


def fine_tune(model: transformers.PreTrainedModel) -> transformers.PreTrainedModel:
    """A few steps of ordinary training on texts of another kind: counting up, from anywhere, in steps of one to
    three."""
    start = torch.arange(48) * 5 % 200
    step = torch.arange(48) % 3 + 1
    ids = 6 + (start[:, None] + step[:, None] * torch.arange(40)[None]) % (tiny.VOCAB - 6)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(10):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def test_warm_start_recovers_a_fine_tuned_target(world: tuple[Path, Path, Path], tmp_path: Path) -> None:
    target, data, out = world
    before = evaluate_drafter(str(target), str(out / "drafter"), EvalConfig(data, max_tokens=24, limit=12), say=quiet)[
        "tokens_per_cycle"
    ][4]
    tuned = tiny.write(fine_tune(transformers.AutoModelForCausalLM.from_pretrained(target)), tmp_path / "tuned")
    dropped = evaluate_drafter(str(tuned), str(out / "drafter"), EvalConfig(data, max_tokens=24, limit=12), say=quiet)[
        "tokens_per_cycle"
    ][4]
    run.train(job(tuned, data, tmp_path / "run", init=str(out / "drafter")), quiet)
    after = evaluate_drafter(
        str(tuned), str(tmp_path / "run" / "drafter"), EvalConfig(data, max_tokens=24, limit=12), say=quiet
    )["tokens_per_cycle"][4]
    assert dropped < before - 1 and after - dropped > 0.5 * (before - dropped)  # more than half of what was lost


def test_gemma_drafter_runs_in_transformers(tmp_path: Path) -> None:
    """The exported assistant is loaded by transformers, helps, and changes nothing."""
    target = tiny.write_target("gemma4_31b", tmp_path / "target")
    data = prompts(tmp_path / "p.jsonl", 24)
    more = settings(steps=40, unroll=2, lr=4e-3, warmup_steps=5, log_every=20)
    run.train(
        job(target, data, tmp_path / "run", hidden_size=24, intermediate_size=32, batch_anchors=512, **more), quiet
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(target).eval()
    helper = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "drafter", dtype=torch.float32).eval()
    assert type(helper).__name__ == "Gemma4AssistantForCausalLM"
    calls = []
    helper.register_forward_hook(lambda *_: calls.append(1))
    for seed in range(3):
        ids = torch.randint(6, 200, (1, 9), generator=torch.Generator().manual_seed(seed))
        plain = model.generate(ids, max_new_tokens=16, do_sample=False)
        assert torch.equal(model.generate(ids, max_new_tokens=16, do_sample=False, assistant_model=helper), plain)
    assert calls
    ours = load_target(str(target), "cpu", torch.float32)
    assert TextModel(ours[0], ours[1], DenseOps()).config.family == "gemma4"


def test_bad_input_is_one_line(world: tuple[Path, Path, Path], tmp_path: Path) -> None:
    target, data, out = world
    broken = tmp_path / "broken.jsonl"
    broken.write_text(data.read_text().splitlines()[0] + '\n{"prompt": \n')
    with pytest.raises(OutriderError, match=r"broken.jsonl:2: not JSON"):
        run.train(job(target, broken, tmp_path / "a"), quiet)
    broken.write_text('{"prompt": ""}\n')
    with pytest.raises(OutriderError, match=r"broken.jsonl:1: no text"):
        run.train(job(target, broken, tmp_path / "b"), quiet)
    broken.write_text("")
    with pytest.raises(OutriderError, match="holds no prompts"):
        run.train(job(target, broken, tmp_path / "c"), quiet)
    other = tiny.write_target("llama", tmp_path / "other")
    with pytest.raises(OutriderError, match="hidden size"):
        run.train(job(other, data, tmp_path / "d", init=str(out / "drafter")), quiet)


def test_nan_and_a_full_disk_keep_the_last_checkpoint(
    world: tuple[Path, Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from outrider.train import trainer as module

    target, data, out = world
    run_folder = tmp_path / "run"
    run_folder.mkdir()
    for name in ("run.json", "prompts.npz", "prompts.json", "data.npz"):
        (run_folder / name).write_bytes((out / name).read_bytes())
    real = module.Trainer.loss

    def poisoned(self, batch):
        loss, stats = real(self, batch)
        return (loss * float("nan") if self.progress.step >= 30 else loss), stats

    monkeypatch.setattr(module.Trainer, "loss", poisoned)
    with pytest.raises(OutriderError, match=r"nan at step 31.*last checkpoint is good"):
        run.train(job(target, data, run_folder, save_minutes=1e-9), quiet)
    monkeypatch.setattr(module.Trainer, "loss", real)
    checkpoint = torch.load(run_folder / "checkpoint.pt", weights_only=True)
    assert checkpoint["progress"]["step"] == 30 and all(
        torch.isfinite(v).all() for v in checkpoint["net"].values() if v.is_floating_point()
    )

    def full(content, file):
        file.write(b"x" * 100)
        raise OSError(28, "No space left on device")

    before = (run_folder / "checkpoint.pt").read_bytes()
    monkeypatch.setattr(module.torch, "save", full)
    with pytest.raises(OutriderError, match="last checkpoint is kept"):
        run.train(job(target, data, run_folder, save_minutes=1e-9), quiet)
    assert (run_folder / "checkpoint.pt").read_bytes() == before and not (run_folder / "checkpoint.part").exists()


def test_the_walk_is_what_the_engine_does(world: tuple[Path, Path, Path]) -> None:
    """Cycles counted over known answers against cycles that the engine really took, clustered head and all."""
    target, data, out = world
    llm = LLM.load(str(target), drafter=str(out / "drafter"), draft_tokens=3, device="cpu", ops="reference")
    opened = open_target(str(target), "cpu", torch.float32)
    net = load_net(str(out / "drafter"), opened)
    for temperature in (0.0, 1.0):
        encoded = encode(read_prompts(data, 12), describe(str(target)).text, opened.config.vocab_size, max_tokens=64)
        prompts = [encoded[i].tolist() for i in range(12)]
        seeds = list(range(12))
        plain = [  # by the same ops: other kernels round otherwise, and may draw another token
            llm.generate([p], SamplingParams(temperature=temperature, max_tokens=24, seed=s), drafter=False)[
                0
            ].token_ids
            for p, s in zip(prompts, seeds, strict=True)
        ]
        whole = [np.array(p + a) for p, a in zip(prompts, plain, strict=True)]
        answered = Sequences.of(
            whole, [len(p) for p in prompts], seeds, [not temperature] * 12, opened.config.vocab_size, seeds
        )
        right = Judge(opened.model, net, full=False).drafts(answered, 3, temperature).right
        took = []
        walked = []
        for i in range(12):
            (answer,) = llm.generate(
                [prompts[i]], SamplingParams(temperature=temperature, max_tokens=24, seed=seeds[i])
            )
            assert answer.token_ids == plain[i]
            took.append(answer.stats.cycles - 1)  # the first cycle starts inside the prompt
            walked.append(walk(right[i][answer.stats.first_emitted - 1 :], 3)[1])
        assert sum(took) > 60 and sum(a != b for a, b in zip(took, walked, strict=True)) <= 1, (took, walked)


def test_eval_drafter_prints_what_it_promises(
    world: tuple[Path, Path, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target, data, out = world
    command = [
        "outrider",
        "eval-drafter",
        str(target),
        str(out / "drafter"),
        "--prompts",
        str(data),
        "--limit",
        "9",
        "--max-tokens",
        "16",
    ]
    monkeypatch.setattr(sys, "argv", [*command, "--json"])
    with pytest.raises(SystemExit):
        main()
    row = json.loads(capsys.readouterr().out)
    assert list(row["tokens_per_cycle"]) == [str(k) for k in range(1, 17)] and len(row["acceptance_by_position"]) == 16
    assert set(row["by_category"]) == {"a", "b"} and row["answers"] == 9  # spread over the file, not its first nine
    assert 0 <= row["best_k"] <= 16 and row["draft_step_share"] > 0 and row["costs_measured"]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit):
        main()
    printed = capsys.readouterr()
    text = printed.out
    assert "predicted best K" in text and "tokens per cycle at K = 4" in text and "timed on this machine" in text
    assert "the drafter was trained on" in printed.err
    monkeypatch.setattr(sys, "argv", [*command[:2], str(target), str(target), *command[4:]])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2 and capsys.readouterr().err.count("\n") == 1


def test_prompts_of_the_training_are_named(world: tuple[Path, Path, Path], tmp_path: Path) -> None:
    """2.82 tokens per cycle on the prompts of the training, 1.39 on new ones, and nothing said so."""
    target, data, out = world
    drafter = str(out / "drafter")
    heldout = TrainRun(job(target, data, out).resolved(), Budget(None, 0.0), Stop(), say=quiet, progress=None).held(
        Sequences.load(out / "prompts.npz")
    )
    whole = evaluate_drafter(str(target), drafter, EvalConfig(data, max_tokens=12), say=quiet)
    texts = [json.loads(line)["prompt"] for line in data.read_text().splitlines()]
    learnt = {text for i, text in enumerate(texts) if i not in heldout}
    assert whole["trained_on"] == sum(text in learnt for text in texts) and whole["same_file"]
    assert whole["unseen"]["answers"] == 48 - whole["trained_on"] and set(whole["unseen"]["tokens_per_cycle"]) == set(
        range(1, 17)
    )
    fresh = tmp_path / "fresh.jsonl"
    fresh.write_text(json.dumps({"prompt": "sea sun sea sun sea sun"}) + "\n")
    other = evaluate_drafter(str(target), drafter, EvalConfig(fresh, max_tokens=12), say=quiet)
    assert other["trained_on"] == 0 and not other["same_file"] and "unseen" not in other


def test_one_prompt_can_be_answered(world: tuple[Path, Path, Path]) -> None:
    """A cache for one sequence alone: prompt, answer, and the page that the engine keeps aside."""
    target, data, _ = world
    answered = answers(describe(str(target)), read_prompts(data, 1), EvalConfig(data, max_tokens=24)).sequences
    assert len(answered) == 1 and answered.answer_tokens == 24
