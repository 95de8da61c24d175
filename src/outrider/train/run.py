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
from ..models.inspect import model_size
from ..prompts import read_prompts
from ..types import OutriderError, bad_input, require
from ..weights.sizes import stored_size
from . import answers, design, finish, forecast
from .block_net import load_net, start_block
from .clock import Budget, Stop, listening
from .config import CHANGEABLE, Say, TrainConfig
from .data import Sequences, file_hash, make_batch, plan_epoch
from .export import read_json, write_json
from .net import DrafterModule, TrainNet
from .target import Described, TrainTarget, describe, encode, open_target
from .trainer import Hooks, Row, Trainer, append_row

Progress = Callable[[str, float, float, str], None]  # stage, done, in all, a line about it
PROBE_ANSWERS = 32  # evaluated on a GPU to see how long it takes
SPEND_SECONDS = 5.0  # between two notes of the time used
START_ROWS = 1024  # anchors that the drafter's start is fitted on, at least


def train(job: TrainConfig, say: Say = print, progress: Progress | None = None) -> Row:
    """The whole command. Returns the final evaluation; "stopped" with the number of the signal that requested a stop,
    after everything was saved."""
    with bad_input(OSError, lambda error: f"--out {job.out}: {error.strerror}"):
        job.out.mkdir(parents=True, exist_ok=True)
    before = read_json(job.out / "spent.json").get("seconds", 0.0)
    with listening() as stop:
        run = TrainRun(job.resolved(), Budget(job.minutes, time.perf_counter() - before), stop, say, progress)
        try:
            return run.whole()
        finally:
            run.spend(0.0)


class TrainRun:
    """One invocation of the command."""

    def __init__(self, job: TrainConfig, budget: Budget, stop: Stop, say: Say, progress: Progress | None):
        self.job, self.budget, self.stop, self.say = job, budget, stop, say
        self.counts = False  # a run that was refused has spent nothing
        self.shown: Progress = progress or (lambda *_: None)
        self.noted = budget.spent  # seconds, when they were last written down

    def progress(self, stage: str, done: float, total: float, line: str) -> None:
        self.spend()
        self.shown(stage, done, total, line)

    def halted(self) -> bool:
        """Whether an evaluation is to be given up."""
        return self.stop.asked or self.budget.overdrawn

    def spend(self, every: float = SPEND_SECONDS) -> None:
        """Records the seconds used so far at intervals, so that a killed run has them counted too."""
        if self.counts and self.budget.spent >= self.noted + every:
            self.noted = self.budget.spent
            write_json(self.job.out / "spent.json", {"seconds": round(self.noted, 2)})

    def whole(self) -> Row:
        job = self.job
        self.progress("reading prompts", 0, 1, "")
        known = describe(job.target, job.adapter)
        self.check_folder(known)
        prompts = self.prompts(known)
        self.foresee(known, prompts)
        whole = self.data(known, prompts)
        if whole is None:
            self.say(
                f"stopped while answering; what there is lies in {job.out / 'answers.jsonl'}: the same command goes "
                f"on from there"
            )
            return {"stopped": self.stop.signal}
        gc.collect()  # the engine's weights, before the dense ones are loaded
        self.progress("loading the target", 0, 1, "")
        target = open_target(known, job.device, forecast.torch_dtype(job))
        data, aside = split(whole, prompts.index[self.held(prompts)])
        self.say(f"{len(data)} sequences to train on with {data.answer_tokens} answer tokens, {len(aside)} held out")
        return self.drafter(target, data, aside)

    def check_folder(self, known: Described) -> None:
        """Refuses a folder that holds another model's run or drafter, or a run with settings that cannot change on the
        way."""
        out = self.job.out
        mine: Row = {"target": known.name, "target_hash": known.hash, "settings": self.job.identity()}
        begun = read_json(out / "run.json")
        if not begun:
            if any((out / name).exists() for name in ("prompts.npz", "checkpoint.pt", "drafter")):
                raise OutriderError(f"--out {out}: holds a drafter or a run of unknown origin: choose another --out")
            write_json(out / "run.json", mine)
        elif begun.get("target_hash") != mine["target_hash"]:
            raise OutriderError(
                f"--out {out}: holds a run for another model ({begun.get('target')}, other weights than "
                f"{known.name}): choose another --out"
            )
        else:
            self.compare(begun.get("settings", {}), mine["settings"])
            write_json(out / "run.json", mine)
        self.counts = (out / "spent.json").exists()

    def compare(self, before: Row, now: Row) -> None:
        """Compares the settings of a resumed run with the original ones."""
        changed = [
            f"{name} {before[name]} -> {now[name]}" for name in now if name in before and before[name] != now[name]
        ]
        fixed = [line for line in changed if line.split()[0] not in CHANGEABLE]
        if fixed:
            raise OutriderError(
                f"--out {self.job.out}: this run was begun with other settings ({', '.join(fixed)}): choose another "
                f"--out"
            )
        if changed:
            self.say(f"this run goes on with other settings: {', '.join(changed)}")

    # ---- data ------------------------------------------------------------------------------------------------------
    def held(self, prompts: Sequences) -> np.ndarray:
        """Indices of the held-out prompts."""
        return answers.heldout_prompts(prompts, self.job.heldout, read_json(self.job.out / "prompts.json").get("lines"))

    def prompts(self, known: Described) -> Sequences:
        job, kept = self.job, self.job.out / "prompts.npz"
        most = min(job.max_prompt, known.config.max_context - job.max_new)
        if most < 1:
            raise OutriderError(
                f"--max-new {job.max_new} leaves no room for a prompt in {known.config.max_context} positions"
            )
        before = read_json(job.out / "prompts.json") if kept.exists() else {}
        if before:
            self.same_file("--data", job.data, before)
            self.same_file("--eval-data", job.eval_data, before)
        else:
            listed = read_prompts(job.data, job.limit)
            apart = [] if job.eval_data is None else read_prompts(job.eval_data)
            encode([*listed, *apart], known.text, known.config.vocab_size, max_tokens=most).save(kept)
            source: Row = {"data": job.data.name, "data_sha256": file_hash(job.data)}
            if job.eval_data is not None:
                source |= {"eval_data": job.eval_data.name, "eval_data_sha256": file_hash(job.eval_data)}
                source["lines"] = len(listed)
            write_json(job.out / "prompts.json", source | {"categories": [p.category for p in (*listed, *apart)]})
        prompts = Sequences.load(kept)
        self.say(f"{len(prompts)} prompts, {int(prompts.lengths.sum())} tokens")
        return prompts

    def same_file(self, option: str, path: Path | None, before: Row) -> None:
        """A resumed run has its prompts already: another prompt file is refused."""
        name = option.removeprefix("--").replace("-", "_")
        if (path is None) != (name not in before) or (
            path is not None and path.is_file() and file_hash(path) != before[f"{name}_sha256"]
        ):
            was = before.get(name, f"without {option}")
            raise OutriderError(
                f"{self.job.out}: this run was begun with other prompts ({was}): give the same {option}, or another "
                f"--out"
            )

    def data(self, known: Described, prompts: Sequences) -> Sequences | None:
        """The training sequences: as stored, or made now. None: a stop was requested before all were made."""
        job, kept = self.job, self.job.out / "data.npz"
        if not kept.exists():
            self.answer(known, prompts)
            if self.stop.asked:
                return None
            held = prompts.index[self.held(prompts)]
            told = list(answers.read_answers(job.out / "answers.jsonl").values())
            made = answers.as_sequences(prompts, told, known.config.vocab_size)
            Sequences.join([made, *(carried(p, job, held) for p in job.carry)]).save(kept)
        return Sequences.load(kept)

    def answer(self, known: Described, prompts: Sequences) -> None:
        """The target's answers into a file."""
        job, tasks, path = self.job, self.tasks(prompts), self.job.out / "answers.jsonl"
        longest = int(prompts.lengths.max()) + job.max_new
        made, took = 0, 1e-9

        def report(done: int, count: int, tokens: int, seconds: float) -> None:
            nonlocal made, took
            made, took = tokens, max(seconds, 1e-9)
            self.progress("answering", done, count, f"{tokens} tokens, {tokens / took:.0f} tok/s")

        self.progress("loading the engine", 0, 1, "")
        with answers.answering_engine(known, job.device, forecast.torch_dtype(job), job.slots, longest) as engine:
            ends = time.perf_counter() + self.answer_seconds
            asked = (engine, prompts, tasks, job.max_new, answers.read_answers(path))
            answers.append_answers(path, answers.answer_tasks(*asked, report=report, deadline=ends, stop=self.stop))
        self.say(f"answered {made} tokens in {took:.0f} s, {made / took:.0f} tok/s")

    def tasks(self, prompts: Sequences) -> list[answers.Task]:
        """All requested answers."""
        return answers.plan_tasks(len(prompts), self.held(prompts), self.job, category_weights(self.job, prompts))

    @property
    def answer_share(self) -> float:
        """The maximum share of the time for answering."""
        job = self.job
        if job.answer_minutes is not None and job.minutes is not None:
            return min(1.0, job.answer_minutes / job.minutes)
        return forecast.ANSWER_SHARE if job.cuda else forecast.CPU_ANSWER_SHARE

    @property
    def answer_seconds(self) -> float:
        """The maximum time left for answering."""
        asked = self.job.answer_minutes
        return min(self.answer_share * self.budget.seconds if asked is None else 60 * asked, self.budget.left)

    def foresee(self, known: Described, prompts: Sequences) -> None:
        """Reports what the time allows and refuses what it does not, before anything is loaded. A GPU is
        fast enough; a resumed run has reported it already."""
        job = self.job
        if not self.counts and not job.cuda:
            tokens = float(len(self.tasks(prompts)) * job.max_new)
            chosen = forecast.RunPlan.of(job, known.config, int(tokens + prompts.lengths.sum()))
            costs = forecast.RunCosts.of(job, chosen, known.config, stored_size(known.files, known.config), tokens)
            if job.minutes is not None:
                made = forecast.Forecast.of(costs, 60 * job.minutes - self.budget.spent, self.answer_share)
                write_json(job.out / "forecast.json", {**asdict(made), "costs": asdict(costs)})
                self.say(forecast.check(costs, job.minutes, self.budget.spent, self.answer_share))
            else:
                self.say(
                    f"this will take about {costs.seconds(tokens, job.steps) / 60:.0f} minutes here; --minutes N ends "
                    f"it in time, Ctrl-C saves it at any moment"
                )
        self.counts = True

    # ---- the drafter -----------------------------------------------------------------------------------------------
    def drafter(self, target: TrainTarget, data: Sequences, aside: Sequences) -> Row:
        job = self.job
        sizes = self.sizes(target, data)
        self.progress("starting the drafter", 0, 1, "")
        net = self.start(target, data, sizes.anchors)
        if isinstance(net, DrafterModule):
            if job.qat_start < 1:
                net.config = replace(net.config, weight_bits=4)
            if job.cluster_top is not None and net.config.clusters:
                net.config = replace(net.config, cluster_top=job.cluster_top)
        cost = net.size
        share = cost.step / model_size(target.config).active
        self.say(
            f"a draft {'pass' if job.kind == 'dflash' else 'step'} reads {cost.step / 1e6:.2f} M weights "
            f"({share:.1%} of a target step), {cost.head / 1e6:.2f} M of them in the head; {sizes.anchors} anchors a "
            f"batch"
        )
        aside, reserve = self.reserve(target.model, net, aside)
        log_path = job.out / "log.jsonl"
        scored = (lambda: finish.judge(target.model, net, aside, job.temperature, self.halted)) if len(aside) else None
        hooks = Hooks(
            evaluate=scored,
            log=partial(append_row, log_path),
            # unmeasured: a run that is killed leaves its best evaluation
            export=lambda: finish.write_drafter(trainer, target.hash, {}, []),
            progress=lambda done, line: self.progress("training", min(done, 1.0), 1.0, line),
        )
        trainer = Trainer(target.model, net, data, job, sizes, hooks, self.stop)
        resumed = trainer.resume(job.out)
        if resumed:
            self.say(f"continuing from step {trainer.progress.step}")
        trim_log(log_path, trainer.progress.step if resumed else -1)
        if job.init is not None and not resumed:
            trainer.judge(job.out)  # the score to beat
        if job.minutes is not None:
            trainer.minutes = max(1.0, trainer.progress.seconds + self.budget.left - reserve) / 60
        trainer.run(job.out)
        self.say(f"{trainer.progress.step} steps, {trainer.progress.seconds:.0f} s of training")
        self.progress("evaluating", 0, 1, "")
        result = finish.finish(trainer, target.hash, aside, self.halted)
        if self.stop.asked:
            self.say(
                f"stopped at step {trainer.progress.step}; {job.out / 'drafter'} can be used, the same command goes "
                f"on from here"
            )
            return {**result, "stopped": self.stop.signal}
        result["steps"] = trainer.progress.step
        if len(aside) and "full" not in result:
            self.say("not evaluated: the time was over")
        if job.minutes is not None and trainer.progress.step < forecast.HANDFUL:
            result["too_few_steps"] = True
            self.say(
                f"only {trainer.progress.step} steps in the time there was: this drafter has learnt nothing; allow "
                f"more --minutes"
            )
        elif result["step"] < trainer.progress.step:
            best = f"step {result['step']}" if result["step"] or job.init is None else job.init
            self.say(
                f"no evaluation beat {best}, so {job.out / 'drafter'} holds those weights; {job.out / 'last'} holds "
                f"the last ones"
            )
        else:
            self.say(f"drafter written to {job.out / 'drafter'}")
        return result

    def sizes(self, target: TrainTarget, data: Sequences) -> forecast.Sizes:
        """Chosen once per run: a resumed run must make the same batches as before."""
        path = self.job.out / "sizes.json"
        if not path.exists():
            write_json(path, asdict(forecast.RunPlan.of(self.job, target.config, int(data.lengths.sum())).sizes))
        with bad_input(TypeError, lambda _: f"{path}: not the sizes of a run: delete it, or choose another --out"):
            return forecast.Sizes(**read_json(path))

    def start(self, target: TrainTarget, data: Sequences, anchors: int) -> TrainNet:
        job, model = self.job, target.model
        if job.init is not None:
            warm = load_net(job.init, target, job.seed)
            new = job.recluster and warm.config.clusters and not (job.out / "checkpoint.pt").exists()
            if isinstance(warm, DrafterModule) and new:
                some = data.select(np.random.default_rng(3).permutation(len(data))[:2500])
                self.say(f"vocabulary clustered anew from {design.cluster_by_use(warm, model, some)} states")
            return warm
        if job.kind != "mtp":
            return start_block(job, target, data, self.say)
        net = DrafterModule(design.new_drafter(job, target.config, target.hash), target.config, job.seed).to(
            model.device
        )
        if (job.out / "checkpoint.pt").exists():
            return net  # its weights come from there
        rows = max(anchors, START_ROWS)  # enough of them to fit the input projection
        few = [make_batch(data, b, 1).to(model.device) for b in plan_epoch(data, rows, 4 * rows, job.seed, 0)[:2]]
        if net.config.tied_to_target and net.config.hidden == net.config.backbone_hidden:
            design.start_from_target(net, model)
            design.fold_biases(net, model, few)
            fitted = design.fit_inputs(net, model, few)
            self.say(
                f"drafter starts from target layers {net.config.reads}; its input explains {fitted:.0%} of the "
                f"residual stream there"
            )
        if net.config.gemma:
            design.start_gemma(net, model, few[0])
        if net.config.clusters:
            design.start_clusters(net, model, job.seed)
        return net

    def reserve(self, model: TextModel, net: TrainNet, aside: Sequences) -> tuple[Sequences, float]:
        """Held-out answers that can be evaluated in the time kept for it, and the seconds to keep. Once there is a best
        evaluation they stay the same: scores of others could not be compared with it."""
        if not len(aside):
            return aside, forecast.EXPORT_SECONDS
        path = self.job.out / "judged.json"
        kept = read_json(path).get("answers") if (self.job.out / "best.pt").exists() else None
        if self.job.minutes is None:
            return self.judged(path, aside, kept or len(aside)), forecast.EXPORT_SECONDS
        few = 1
        if self.job.cuda:  # one answer says nothing of a GPU, and kernels are compiled at the first
            few = PROBE_ANSWERS
            finish.judge(model, net, aside.select(np.arange(1)), self.job.temperature)
        usual = np.argsort(np.abs(aside.lengths - np.median(aside.lengths)), kind="stable")[:few]
        tried = aside.select(usual)
        began = time.perf_counter()
        finish.judge(model, net, tried, self.job.temperature)
        each = (time.perf_counter() - began) / max(1, tried.answer_tokens)
        allowed = forecast.FINISH_SHARE * self.budget.seconds / (finish.PASSES * each)  # answer tokens
        total = np.cumsum(aside.lengths - aside.prompts)
        chosen = self.judged(path, aside, kept or max(1, int(np.searchsorted(total, allowed, side="right"))))
        return chosen, 1.5 * finish.PASSES * each * chosen.answer_tokens + forecast.EXPORT_SECONDS

    def judged(self, path: Path, aside: Sequences, count: int) -> Sequences:
        """`count` of the held-out answers; the number is stored."""
        write_json(path, {"answers": count})
        return aside.select(some_of_each_kind(aside.greedy, count))


def some_of_each_kind(greedy: np.ndarray, count: int) -> np.ndarray:
    """Indices of `count` answers, spread over all, greedy and sampled ones in their original proportion (a prompt has
    one of each, side by side: every other answer would be of one kind)."""
    by_kind = np.argsort(~greedy, kind="stable")
    return np.sort(
        by_kind[(np.arange(min(count, len(greedy))) * (len(greedy) / min(count, len(greedy)))).astype(np.int64)]
    )


def carried(path: Path, job: TrainConfig, held: np.ndarray) -> Sequences:
    """Every greedy answer and a share of the sampled ones of an earlier run's data; none of held-out prompts, which are
    answered again."""
    data = Sequences.load(path)
    luck = np.random.default_rng((job.seed, 5)).random(len(data))
    return data.select(np.nonzero((data.greedy | (luck < job.carry_share)) & ~np.isin(data.index, held))[0])


def category_weights(job: TrainConfig, prompts: Sequences) -> np.ndarray | None:
    """Relative number of answers per prompt [N], if the job sets it by category."""
    if not job.categories:
        return None
    kinds = read_json(job.out / "prompts.json")["categories"]
    return np.array([job.categories.get(kinds[i], 1.0) for i in prompts.index])


def split(data: Sequences, held: np.ndarray) -> tuple[Sequences, Sequences]:
    """Train and held out, by prompt."""
    out = np.isin(data.index, held)
    require(not out.all(), "every answer belongs to a held-out prompt: more prompts, more time, or a smaller heldout")
    return data.select(np.nonzero(~out)[0]), data.select(np.nonzero(out)[0])


def trim_log(path: Path, step: int) -> None:
    """Rows that the checkpoint does not cover will be made again; one that was cut off as its run was killed is
    dropped."""
    if not path.exists():
        return
    rows = []
    for line in path.read_text().splitlines():
        with suppress(ValueError):
            rows += [line] if json.loads(line)["step"] <= step else []
    path.write_text("".join(r + "\n" for r in rows))
