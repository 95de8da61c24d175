"""`outrider train` from end to end: prompts -> the target's answers -> an unrolled training run -> a drafter on disk.

Everything lives in one folder and every stage continues where it stopped:

    OUT/run.json         whose run this is: the target's hash and the settings it was begun with
    OUT/forecast.json    what the minutes were expected to bring, and the costs behind it
    OUT/prompts.npz      encoded prompts
    OUT/answers.jsonl    the target's answers, appended as they end
    OUT/data.npz         prompts with answers, once answering is over
    OUT/sizes.json       sizes that were chosen by memory and speed; OUT/spent.json the seconds used so far
    OUT/judged.json      how many held-out answers are evaluated
    OUT/checkpoint.pt    the run; OUT/best.pt the weights of its best evaluation
    OUT/log.jsonl        learning curve and evaluations; OUT/curve.svg
    OUT/drafter/         the result: weights, card, acceptance.json, provenance.json, log and curve
    OUT/last/            the last weights as a drafter, where an earlier evaluation was better
"""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import numpy as np

from ..models.decoder import TextModel
from ..models.inspect import drafter_size, model_size
from ..prompts import read_prompts
from ..types import OutriderError, bad_input, require
from ..weights.sizes import stored_size
from . import answers, design, finish, forecast
from .block_net import load_net, start_block
from .clock import Budget, Stop, listening
from .config import CHANGEABLE, Say, TrainConfig
from .data import Sequences, file_hash, make_batch, plan_epoch
from .export import read_json, write_json
from .gain import measure_gain
from .net import DrafterModule, TrainNet
from .seen_prompts import prompt_digest
from .target import Described, TrainTarget, describe, encode, open_target
from .trainer import Hooks, Row, Trainer, append_row, read_rows

Progress = Callable[[str, float, float, str], None]  # stage, done, in all, a line about it
PROBE_ANSWERS = 32  # answers evaluated on a GPU to time it
WORTH_KEEPING = ("answers.jsonl", "data.npz", "checkpoint.pt", "drafter")  # files of a run that has begun
SPEND_SECONDS = 5.0  # between two records of the time used


def train(job: TrainConfig, say: Say = print, progress: Progress | None = None, *, measures_gain: bool = True) -> Row:
    """Runs the whole command. Returns the final evaluation; under "stopped", the signal that ended the run after
    saving. measures_gain: measure the drafter's gain on this machine at the end."""
    absent = [folder for folder in (job.out, *job.out.parents) if not folder.exists()]
    with bad_input(OSError, lambda error: f"--out {job.out}: {error.strerror}"):
        job.out.mkdir(parents=True, exist_ok=True)
    before = set(job.out.iterdir())
    seconds = read_json(job.out / "spent.json").get("seconds", 0.0)
    with listening() as stop:
        budget = Budget(job.minutes, time.perf_counter() - seconds)
        run = TrainRun(job.resolved(), budget, stop, say=say, progress=progress, measures_gain=measures_gain)
        try:
            result = run.whole()
        except OutriderError:
            if not any((job.out / name).exists() for name in WORTH_KEEPING):
                run.counts = False
                remove_traces(job.out, before, absent)
            raise
        finally:
            run.spend(0.0)
    return result


def remove_traces(out: Path, before: set[Path], absent: list[Path]) -> None:
    """Removes the files of a run that was refused before it made anything, and folders that it created: otherwise the
    next run with other settings would be refused."""
    for path in set(out.iterdir()) - before:
        if path.is_file():
            path.unlink()
    for folder in absent:
        with suppress(OSError):  # not empty
            folder.rmdir()


class TrainRun:
    """One invocation of the command."""

    def __init__(
        self,
        job: TrainConfig,
        budget: Budget,
        stop: Stop,
        *,
        say: Say,
        progress: Progress | None,
        measures_gain: bool = True,
    ):
        self.job = job
        self.measures_gain = measures_gain
        self.budget = budget
        self.stop = stop
        self.say = say
        self.counts = False  # a refused run has spent nothing
        self.shown: Progress = progress or (lambda *_: None)
        self.load_seconds = 0.0  # time of loading the engine, which is repeated to measure the gain
        self.noted = budget.spent  # seconds spent when last recorded

    def progress(self, stage: str, done: float, total: float, line: str) -> None:
        self.spend()
        self.shown(stage, done, total, line)

    def halted(self) -> bool:
        """True if an evaluation must be given up."""
        return self.stop.asked or self.budget.overdrawn

    def spend(self, every: float = SPEND_SECONDS) -> None:
        """Records the time used so far at intervals, so that it counts even if the run is killed."""
        if self.counts and self.budget.spent >= self.noted + every:
            self.noted = self.budget.spent
            write_json(self.job.out / "spent.json", {"seconds": round(self.noted, 2)})

    def whole(self) -> Row:
        job = self.job
        self.progress("reading prompts", done=0, total=1, line="")
        known = describe(job.target, job.adapter)
        self.check_folder(known)
        prompts = self.prompts(known)
        self.foresee(known, prompts)
        whole = self.data(known, prompts)
        if whole is None:
            answers_path = job.out / "answers.jsonl"
            self.say(
                f"stopped while answering; the answers so far are in {answers_path}: run the same command to continue"
            )
            return {"stopped": self.stop.signal}
        gc.collect()  # frees the engine's weights before the dense ones are loaded
        self.progress("loading the target", done=0, total=1, line="")
        target = open_target(known, job.device, forecast.torch_dtype(job))
        out = np.isin(whole.index, prompts.index[self.held(prompts)])
        advice = "more prompts, more time, or a smaller heldout"
        require(not out.all(), f"every answer belongs to a held-out prompt: {advice}")
        data = whole.select(~out)
        aside = whole.select(out)
        trained = f"training on {len(data)} answers with {data.answer_tokens} tokens"
        self.say(f"{trained}; {len(aside)} answers to held-out prompts measure it")
        result = self.drafter(target, data, aside)
        del target
        gc.collect()
        if "stopped" not in result and "too_few_steps" not in result:
            result |= self.gain(known, prompts)
        return result

    def gain(self, known: Described, prompts: Sequences) -> Row:
        """The drafter's speed-up on held-out prompts on this machine."""
        heldout = prompts.select(self.held(prompts))
        if not self.measures_gain or not len(heldout):
            return {}
        self.progress("measuring the gain", done=0, total=1, line="")
        measured = measure_gain(
            known,
            self.job.out / "drafter",
            heldout,
            device=self.job.device,
            max_new=self.job.max_new,
            seconds=forecast.gain_seconds(self.budget.seconds),
            halt=self.halted,
        )
        if measured is None:
            return {}
        self.say(measured.line())
        return {"gain": measured.to_json()}

    def check_folder(self, known: Described) -> None:
        """Refuses a folder with another model's run or drafter, or a run whose changed settings cannot change; reports
        permitted changes."""
        out = self.job.out
        now = self.job.identity()
        begun = read_json(out / "run.json")
        before = begun.get("settings", {})
        why = ""
        changed = {k: f"{k} {before[k]} -> {v}" for k, v in now.items() if before.get(k, v) != v}
        fixed = [line for name, line in changed.items() if name not in CHANGEABLE]
        if not begun and any((out / name).exists() for name in ("prompts.npz", "checkpoint.pt", "drafter")):
            why = "holds a drafter or a run of unknown origin"
        elif begun and begun.get("target_hash") != known.hash:
            why = f"holds a run for another model ({begun.get('target')}, other weights than {known.name})"
        elif fixed:
            why = f"this run was begun with other settings ({', '.join(fixed)})"
        require(not why, f"--out {out}: {why}: choose another --out")
        if changed:
            self.say(f"this run goes on with other settings: {', '.join(changed.values())}")
        write_json(out / "run.json", {"target": known.name, "target_hash": known.hash, "settings": now})
        self.counts = (out / "spent.json").exists()

    # ---- data ------------------------------------------------------------------------------------------------------
    def held(self, prompts: Sequences) -> np.ndarray:
        """Indices of the held-out prompts."""
        return answers.heldout_prompts(prompts, self.job.heldout, read_json(self.job.out / "prompts.json").get("lines"))

    def prompts(self, known: Described) -> Sequences:
        job = self.job
        prompts_path = self.job.out / "prompts.npz"
        files = {"data": job.data, "eval_data": job.eval_data}
        room = known.config.max_context
        most = min(job.max_prompt, room - job.max_new)
        require(most >= 1, f"--max-new {job.max_new} leaves no room for a prompt in {room} positions")
        before = read_json(job.out / "prompts.json") if prompts_path.exists() else {}
        if before:
            for name, path in files.items():  # a resumed run has its prompts already; their file may be gone
                was = before.get(f"{name}_sha256")
                option = "--" + name.replace("_", "-")
                now = None
                if path is not None:
                    now = file_hash(path) if path.is_file() else was or "gone"
                begun = f"{job.out}: this run was begun with other prompts ({before.get(name, f'without {option}')})"
                require(now == was, f"{begun}: give the same {option}, or another --out")
        else:
            listed = read_prompts(job.data, job.limit)
            apart = [] if job.eval_data is None else read_prompts(job.eval_data)
            encode([*listed, *apart], known.text, known.config.vocab_size, max_tokens=most).save(prompts_path)
            given_files = {name: path for name, path in files.items() if path is not None}
            source: Row = {name: path.name for name, path in given_files.items()}
            source |= {f"{name}_sha256": file_hash(path) for name, path in given_files.items()}
            source |= {"lines": len(listed)} if apart else {}
            every = [*listed, *apart]
            about = {"categories": [p.category for p in every], "digests": [prompt_digest(p) for p in every]}
            write_json(job.out / "prompts.json", source | about)
        prompts = Sequences.load(prompts_path)
        self.say(self.prompts_line(prompts))
        return prompts

    def prompts_line(self, prompts: Sequences) -> str:
        """Describes the number of prompts and of answers to make."""
        num_heldout = len(self.held(prompts))
        num_tasks = len(self.tasks(prompts))
        kinds = "a greedy and a sampled answer" if self.job.greedy_share < 1.0 else "an answer"
        aside = f"{num_heldout} of them are held out to measure the drafter ({kinds} each)"
        num_long = len(read_json(self.job.out / "prompts.json").get("digests", prompts)) - len(prompts)
        longer = f" ({num_long} longer than {self.job.max_prompt} left out: max_prompt in a recipe)" if num_long else ""
        tokens = f"{int(prompts.lengths.sum())} tokens{longer}"
        return f"{len(prompts)} prompts, {tokens}; {aside}: {num_tasks} answers to make"

    def data(self, known: Described, prompts: Sequences) -> Sequences | None:
        """The training sequences, stored or made now. None: a stop was requested before all were made."""
        job = self.job
        data_path = self.job.out / "data.npz"
        if not data_path.exists():
            self.answer(known, prompts)
            if self.stop.asked:
                return None
            heldout_lines = prompts.index[self.held(prompts)]
            recorded = list(answers.read_answers(job.out / "answers.jsonl").values())
            sequences = answers.as_sequences(prompts, recorded, known.config.vocab_size)
            Sequences.join([sequences, *(carried(p, job, heldout_lines) for p in job.carry)]).save(data_path)
        return Sequences.load(data_path)

    def answer(self, known: Described, prompts: Sequences) -> None:
        """Writes the target's answers to a file."""
        job = self.job
        tasks = self.tasks(prompts)
        path = self.job.out / "answers.jsonl"
        longest = int(prompts.lengths.max()) + job.max_new
        summary = ""

        def report(done: int, count: int, tokens: int, seconds: float) -> None:
            nonlocal summary
            summary = f"{tokens} tokens in {seconds:.0f} s, {tokens / max(seconds, 1e-9):.0f} tok/s"
            self.progress("answering", done, count, line=summary)

        self.progress("loading the engine", done=0, total=1, line="")
        began = time.perf_counter()
        dtype = forecast.torch_dtype(job)
        with answers.answering_engine(known, job.device, dtype, slots=job.slots, longest=longest) as engine:
            self.load_seconds = time.perf_counter() - began
            ends = time.perf_counter() + min(self.answer_seconds, self.budget.left)

            def halt() -> bool:
                return self.stop.asked or time.perf_counter() >= ends

            had = answers.read_answers(path)
            new_answers = answers.answer_tasks(
                engine, prompts, tasks, max_new=job.max_new, had=had, report=report, halt=halt
            )
            answers.append_answers(path, new_answers)
        self.say(f"answered {summary}")

    def tasks(self, prompts: Sequences) -> list[answers.Task]:
        """All requested answers."""
        kinds = read_json(self.job.out / "prompts.json")["categories"]
        weights = np.array([self.job.categories.get(kinds[i], 1.0) for i in prompts.index])
        return answers.plan_tasks(len(prompts), self.held(prompts), config=self.job, weights=weights)

    @property
    def answer_seconds(self) -> float:
        """The maximum time for answering."""
        if self.job.answer_minutes is not None:
            return 60 * self.job.answer_minutes
        return self.budget.seconds * (forecast.ANSWER_SHARE if self.job.cuda else forecast.CPU_ANSWER_SHARE)

    def foresee(self, known: Described, prompts: Sequences) -> None:
        """Reports what the time allows, and refuses too short a time before anything is loaded. Skipped on a GPU, which
        is fast enough, and for a resumed run, which has reported it."""
        job = self.job
        if not self.counts and not job.cuda:
            tokens = float(len(self.tasks(prompts)) * job.max_new)
            chosen = forecast.RunPlan.of(job, known.config, int(tokens + prompts.lengths.sum()))
            stored = stored_size(known.files, known.config)
            costs = forecast.RunCosts.of(job, chosen, known.config, stored=stored, tokens=tokens)
            if job.minutes is not None:
                share = min(1.0, self.answer_seconds / self.budget.seconds)
                prediction = forecast.Forecast.of(costs, self.budget.left, share)
                write_json(job.out / "forecast.json", {**asdict(prediction), "costs": asdict(costs)})
                self.say(forecast.check(costs, job.minutes, self.budget.spent, share=share))
            else:
                minutes = (costs.without_steps(tokens) + job.steps * costs.step) / 60
                advice = "--minutes N ends it in time, Ctrl-C saves it at any moment"
                duration = f"{minutes:.0f} minutes" if minutes >= 1.5 else "a minute"
                self.say(f"this will take about {duration} here; {advice}")
        self.counts = True

    # ---- the drafter -----------------------------------------------------------------------------------------------
    def drafter(self, target: TrainTarget, data: Sequences, aside: Sequences) -> Row:
        """Trains, evaluates and writes the drafter. Returns the evaluation."""
        sizes = self.sizes(target, data)
        self.progress("starting the drafter", done=0, total=1, line="")
        net = self.start(target, data, sizes.anchors)
        if isinstance(net, DrafterModule):
            self.configure(net)
        self.say(self.cost_line(net, target, sizes.anchors))
        aside, reserve = self.reserve(target.model, net, aside)
        trainer = self.trainer(target, net, data=data, aside=aside, sizes=sizes)
        resumed = trainer.resume()
        if resumed:
            self.say(f"continuing from step {trainer.progress.step}")
        trim_log(self.job.out / "log.jsonl", trainer.progress.step if resumed else -1)
        if self.job.init is not None and not resumed:
            trainer.judge()  # the score to beat
        if self.job.minutes is not None:
            trainer.minutes = max(1.0, trainer.progress.seconds + self.budget.left - reserve) / 60
        trainer.run()
        self.say(f"{trainer.progress.step} steps, {trainer.progress.seconds:.0f} s of training")
        self.progress("evaluating", done=0, total=1, line="")
        result = finish.finish(trainer, target.hash, aside, halt=self.halted)
        return self.concluded(result, trainer.progress.step, evaluable=len(aside) > 0)

    def configure(self, net: DrafterModule) -> None:
        """Applies the job's settings of weights in 4 bits and of clusters scored per step."""
        if self.job.qat_start < 1:
            net.config = replace(net.config, weight_bits=4)
        if self.job.cluster_top is not None and net.config.clusters:
            net.config = replace(net.config, cluster_top=self.job.cluster_top)

    def cost_line(self, net: TrainNet, target: TrainTarget, anchors: int) -> str:
        cost = drafter_size(net.config)
        unit = "pass" if self.job.kind == "dflash" else "step"
        share = f"{cost.step / model_size(target.config).active:.1%} of a target step"
        head = f"{cost.head / 1e6:.2f} M of them in the head; {anchors} anchors a batch"
        return f"a draft {unit} reads {cost.step / 1e6:.2f} M weights ({share}), {head}"

    def trainer(
        self, target: TrainTarget, net: TrainNet, *, data: Sequences, aside: Sequences, sizes: forecast.Sizes
    ) -> Trainer:
        """The trainer, with the actions of this run."""

        def evaluate() -> Row:
            return finish.judge(target.model, net, aside, temperature=self.job.temperature, halt=self.halted)

        def export() -> None:
            # without measurements: a killed run leaves its best drafter
            finish.write_drafter(trainer, target.hash, result={}, runs=[])

        def progress(done: float, line: str) -> None:
            self.progress("training", min(done, 1.0), total=1.0, line=line)

        hooks = Hooks(
            evaluate=evaluate if len(aside) > 0 else None,
            log=partial(append_row, self.job.out / "log.jsonl"),
            export=export,
            progress=progress,
            stop=lambda: self.stop.asked,
        )
        trainer = Trainer(target.model, net, data=data, config=self.job, sizes=sizes, hooks=hooks)
        return trainer

    def concluded(self, result: Row, step: int, evaluable: bool) -> Row:
        """Reports how the training ended, and adds that to the result. evaluable: there are held-out answers."""
        drafter_path = self.job.out / "drafter"
        if self.stop.asked:
            self.say(f"stopped at step {step}; {drafter_path} can be used, the same command goes on from here")
            return {**result, "stopped": self.stop.signal}
        result["steps"] = step
        if evaluable and "full" not in result:
            self.say("not evaluated: the time was over")
        if self.job.minutes is not None and step < forecast.HANDFUL:
            result["too_few_steps"] = True
            self.say(f"only {step} steps in the time there was: this drafter has learnt nothing; allow more --minutes")
        elif result["step"] < step:
            best = f"step {result['step']}" if result["step"] or self.job.init is None else self.job.init
            last = f"{self.job.out / 'last'} holds the last ones"
            self.say(f"no evaluation beat {best}, so {drafter_path} holds those weights; {last}")
        else:
            self.say(f"drafter written to {drafter_path}")
        return result

    def sizes(self, target: TrainTarget, data: Sequences) -> forecast.Sizes:
        """The sizes, chosen once per run: a resumed run must make the same batches."""
        path = self.job.out / "sizes.json"
        if not path.exists():
            write_json(path, asdict(forecast.RunPlan.of(self.job, target.config, int(data.lengths.sum())).sizes))
        with bad_input(TypeError, lambda _: f"{path}: not the sizes of a run: delete it, or choose another --out"):
            return forecast.Sizes(**read_json(path))

    def start(self, target: TrainTarget, data: Sequences, anchors: int) -> TrainNet:
        job = self.job
        model = target.model
        if job.init is not None:
            warm = load_net(job.init, target, job.seed)
            new = job.recluster and warm.config.clusters and not (job.out / "checkpoint.pt").exists()
            if isinstance(warm, DrafterModule) and new:
                some = data.select(np.random.default_rng(3).permutation(len(data))[:2500])
                self.say(f"vocabulary clustered anew from {design.cluster_by_use(warm, model, some)} states")
            return warm
        if job.kind != "mtp":
            return start_block(job, target, data=data, say=self.say)
        config = design.new_drafter(job, target.config, target.hash)
        net = DrafterModule(config, target.config, job.seed).to(model.device)
        if (job.out / "checkpoint.pt").exists():
            return net  # its weights come from the checkpoint
        rows = max(anchors, design.START_ROWS)  # enough to fit the input projection
        few = [
            make_batch(data, b, 1).to(model.device)
            for b in plan_epoch(data, rows, tokens=4 * rows, seed=job.seed, epoch=0)[:2]
        ]
        if config.tied_to_target and config.hidden == config.backbone_hidden:
            design.start_from_target(net, model)
            design.fold_biases(net, model, few)
            fitted = design.fit_inputs(net, model, few)
            explained = f"its input explains {fitted:.0%} of the residual stream there"
            self.say(f"drafter starts from target layers {config.reads}; {explained}")
        if config.gemma:
            design.start_gemma(net, model, few[0])
        if config.clusters:
            design.start_clusters(net, model, job.seed)
        return net

    def reserve(self, model: TextModel, net: TrainNet, aside: Sequences) -> tuple[Sequences, float]:
        """Number of held-out answers that can be evaluated in the time reserved for it, and those seconds. Both stay
        the same once there is a best evaluation: scores over other answers would not be comparable."""
        ending = forecast.EXPORT_SECONDS + forecast.gain_seconds(self.budget.seconds) + self.load_seconds
        if not len(aside):
            return aside, ending
        path = self.job.out / "judged.json"
        count = len(aside)
        token = 0.0
        if self.job.minutes is not None:
            few = 1
            if self.job.cuda:  # a GPU's first evaluation compiles kernels, so it is not timed
                few = PROBE_ANSWERS
                finish.judge(model, net, aside.select(np.arange(1)), temperature=self.job.temperature)
            usual = np.argsort(np.abs(aside.lengths - np.median(aside.lengths)), kind="stable")[:few]
            tried = aside.select(usual)
            began = time.perf_counter()
            finish.judge(model, net, tried, temperature=self.job.temperature)
            token = finish.PASSES * (time.perf_counter() - began) / max(1, tried.answer_tokens)  # seconds per token
            allowed = forecast.FINISH_SHARE * self.budget.seconds / token
            total = np.cumsum(aside.lengths - aside.prompts)
            count = max(1, int(np.searchsorted(total, allowed, side="right")))
        if (self.job.out / "best.pt").exists():
            count = read_json(path).get("answers") or count
        write_json(path, {"answers": count})
        chosen = aside.select(some_of_each_kind(aside.greedy, count))
        return chosen, 1.5 * token * chosen.answer_tokens + ending


def some_of_each_kind(greedy: np.ndarray, count: int) -> np.ndarray:
    """Indices of `count` answers, spread over all, with greedy and sampled ones in their original proportion. (A prompt
    has one of each, side by side: every other answer would be of one kind.)"""
    by_kind = np.argsort(~greedy, kind="stable")
    count = min(count, len(greedy))
    return np.sort(by_kind[(np.arange(count) * (len(greedy) / count)).astype(np.int64)])


def carried(path: Path, job: TrainConfig, heldout_lines: np.ndarray) -> Sequences:
    """Every greedy answer and a share of the sampled ones from an earlier run's data, without held-out prompts, which
    are answered again."""
    data = Sequences.load(path)
    luck = np.random.default_rng((job.seed, 5)).random(len(data))
    return data.select((data.greedy | (luck < job.carry_share)) & ~np.isin(data.index, heldout_lines))


def trim_log(path: Path, step: int) -> None:
    """Removes rows after the checkpoint, which will be made again."""
    if path.exists():
        path.write_text(
            "".join(json.dumps(row) + "\n" for row in read_rows(path) if row["step"] <= step), encoding="utf-8"
        )
