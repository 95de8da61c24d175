"""Unrolled training over all anchors, exactly as at inference.

One batch: the target's forward (no gradient) gives hidden states, K/V and its own next-token distributions; the drafter
then takes `unroll` steps from every anchor in parallel, fed the true next token and its own hidden state. A draft step
only counts if those before it were right, hence the true token; K/V, mask and position stay those of the anchor.

Runs are reproducible: batches depend on (seed, epoch), and a run resumed from a checkpoint repeats what an
uninterrupted one would have done, bit for bit on the CPU.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import reduce
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..models.decoder import TextModel
from ..ops.reference import as_tensor
from ..types import OutriderError, require
from .clock import Halted
from .clusters import cluster_loss, cluster_of
from .config import TrainConfig
from .data import Sequences, TrainBatch, make_batch, plan_epoch, prefetch
from .export import Json
from .forecast import GPU_ANCHORS, Sizes
from .losses import LossMix, Scored, Teacher, drawn, head_loss
from .net import HEADS, TrainNet
from .target import Recorder

Row = Json  # of the log
GRAD_CLIP = 1.0
WEIGHT_DECAY = 0.01


@dataclass(frozen=True)
class Hooks:
    """Actions of a run besides training."""

    evaluate: Callable[[], Row] | None = None  # must contain "score": larger is better
    log: Callable[[Row], None] = lambda row: None
    export: Callable[[], None] = lambda: None  # writes the drafter, after each best evaluation so far
    progress: Callable[[float, str], None] = lambda share, line: None  # share of the run that is done, and a line
    stop: Callable[[], bool] = lambda: False  # asked before each step


@dataclass
class TrainProgress:
    step: int = 0
    epoch: int = 0
    taken: int = 0  # batches of this epoch already used
    seconds: float = 0.0
    best: float = -math.inf


class Trainer:
    def __init__(
        self,
        model: TextModel,
        net: TrainNet,
        data: Sequences,
        config: TrainConfig,
        sizes: Sizes = Sizes(GPU_ANCHORS, 0, False),
        hooks: Hooks = Hooks(),
    ):
        self.model = model
        self.net = net
        self.data = data
        self.config = config
        self.sizes = sizes
        self.hooks = hooks
        # duration instead of config.steps; the learning rate then follows the clock
        self.minutes: float | None = None
        self.device = model.device
        self.dtype = model.dtype
        self.target = Recorder(model, data, reads=net.reads, taps=net.taps, keep=sizes.keep)
        params = {n: net.weight(n) for n in net.names}
        self.params = {n: p for n, p in params.items() if isinstance(p, torch.nn.Parameter)}
        self.optimizers = make_optimizers(
            self.params, config.lr, weight_decay=WEIGHT_DECAY, muon=config.optimizer == "muon"
        )
        self.progress = TrainProgress()
        mixes = [LossMix.parse(text) for text in (config.loss, config.greedy_loss or config.loss)]
        self.mixes = torch.cat([m.rows(1, self.device) for m in mixes])  # [2, 3] by TrainBatch.greedy
        self.bits: int | None = None

    # ---- one batch -------------------------------------------------------------------------------------------------
    def loss(self, batch: TrainBatch) -> tuple[Tensor, Tensor]:
        """-> loss (a mean over weighted rows), and statistics [3, unroll]: hits, alpha, rows of each step."""
        s = self.config
        model = self.model
        net = self.net
        w = net.cast(self.dtype, self.bits)
        of = cluster_of(w["token_ordering"], net.config.clusters) if net.config.clusters else None
        seen = self.target.take(batch)
        scored = Scored()
        said = batch.ids[:, batch.first :].reshape(-1)
        if self.sizes.scored:
            likely = self.target.likely(batch, seen)
            seed = (s.seed, self.progress.step)
            scored = Scored.choose(likely, said, self.sizes.scored, vocab=net.config.vocab_size, seed=seed)
        head = scored.rows(as_tensor(model.head) if net.config.tied_to_target else w["embed"])
        teacher = Teacher.of(model, seen.hidden.flatten(0, 1)[batch.teacher], self.dtype, scored=scored)
        total = torch.zeros((), device=self.device)
        weights = 0.0
        stats = []
        chance = torch.ones(said.numel(), device=self.device)  # probability that the steps so far are accepted
        for j, g in enumerate(net.unroll(w, model, seen, batch=batch, steps=s.unroll), 1):
            rows = batch.anchors[j - 1]
            target = batch.targets[j - 1]
            decay = s.step_decay ** (j - 1)
            weight = decay * (1.0 - s.survival_weight + s.survival_weight * chance[rows])
            scale = None  # number of rows that each represents
            whole = rows
            weights = weights + decay * rows.numel()
            if s.loss_row_share < 1.0 and j > 1 and rows.numel():
                luck = np.random.default_rng((s.seed, self.progress.step, j)).random()
                some, scale = drawn(weight, math.ceil(s.loss_row_share ** (j - 1) * rows.numel()), luck)
                rows = rows[some]
                target = target[some]
                weight = weight[some] * scale
            picked = g.flatten(0, 1).index_select(0, rows)  # index_select's gradient is an index_add, without a sort
            line, at = batch.where(rows)
            mix = self.mixes[batch.greedy[line]]
            part, alpha, hit = head_loss(
                picked, head, teacher=teacher, rows=target, weight=weight, mix=mix, bias=scored.bias
            )
            total = total + part
            if of is not None:
                label = of[batch.ids[line, at + j + 1]]
                total = total + decay * cluster_loss(
                    picked, w["centroids"], label=label, pull=s.cluster_grad_share, weight=scale
                )
            stands = torch.ones_like(alpha) if scale is None else scale
            sums = torch.stack((hit * stands, alpha * stands, stands)).sum(1)
            if s.survival_weight:
                # rows that were not drawn get the mean of those that were
                others = chance if scale is None else chance.index_copy(0, whole, chance[whole] * (sums[1] / sums[2]))
                chance = others.index_copy(0, rows, chance[rows] * alpha)
            stats.append(sums)
        return total / max(weights, 1.0), torch.stack(stats, 1).detach()

    def batches(self) -> Iterator[tuple[TrainBatch, int, int]]:
        """Batches from the current progress on, each with its epoch and the batches used after it."""
        s = self.config
        epoch = self.progress.epoch
        num_used = self.progress.taken
        while True:
            plan = plan_epoch(self.data, self.sizes.anchors, tokens=4 * self.sizes.anchors, seed=s.seed, epoch=epoch)
            while num_used < len(plan):
                which = plan[num_used]
                num_used = num_used + 1
                drawn = (s.seed, epoch, num_used)
                yield make_batch(self.data, which, s.unroll, share=s.anchor_share or 1.0, seed=drawn), epoch, num_used
            epoch = epoch + 1
            num_used = 0

    def share(self, passed: float) -> float:
        """The completed share of the run."""
        return passed / (60 * self.minutes) if self.minutes is not None else self.progress.step / self.config.steps

    def rate(self, passed: float) -> float:
        """Factor of the learning rate now: warm-up, then constant, then linear decay."""
        s = self.config
        fallen = max(0.0, self.share(passed) - s.lr_hold) / max(1 - s.lr_hold, 1e-9)
        decay = s.lr_final + (1 - s.lr_final) * max(0.0, 1 - fallen) if fallen else 1.0
        return min(1.0, (self.progress.step + 1) / max(1, s.warmup_steps)) * decay

    # ---- the loop --------------------------------------------------------------------------------------------------
    def run(self) -> None:
        """Trains until the steps or minutes are done or a stop is requested. Saves at the end and along the way, always
        after a report, which refuses a loss that is NaN."""
        s = self.config
        p = self.progress
        began = time.perf_counter() - p.seconds
        reported_at = saved = time.perf_counter()
        results: list[tuple[Tensor, Tensor]] = []  # of the batches since the last report
        batches = prefetch(self.batches()) if self.device.type == "cuda" else self.batches()
        slowest = 0.0  # longest step in seconds: no step begins that would end too late
        for batch, epoch, num_used in batches:
            passed = time.perf_counter() - began
            if self.share(passed + slowest) >= 1.0 or self.hooks.stop():
                break
            lr = s.lr * self.rate(passed)
            self.bits = 4 if self.share(passed) >= s.qat_start else None
            loss, stat = self.loss(batch.to(self.device))
            loss.backward()
            results.append((loss.detach(), stat))
            p.epoch = epoch
            p.taken = num_used
            self.update(lr)
            p.step += 1
            p.seconds = time.perf_counter() - began
            slowest = max(0.9 * slowest, p.seconds - passed)
            due = time.perf_counter() - saved >= 60 * s.save_minutes
            if p.step % s.log_every == 0 or p.step == 1 or due:
                self.report(results, time.perf_counter() - reported_at, lr)
                results = []
                reported_at = time.perf_counter()
            if due:
                self.save()
                saved = time.perf_counter()
            if self.device.type == "cpu":
                self.hooks.progress(self.share(p.seconds), f"step {p.step}, loss {float(loss.detach()):.3f}")
            if s.eval_every and p.step % s.eval_every == 0:
                self.judge()
        if results:
            self.report(results, time.perf_counter() - reported_at, 0.0)
        self.save()

    def update(self, lr: float) -> None:
        torch.nn.utils.clip_grad_norm_(list(self.params.values()), GRAD_CLIP)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def report(self, results: list[tuple[Tensor, Tensor]], seconds: float, lr: float) -> None:
        """results: of every batch in these seconds, as returned by `loss`."""
        losses, stats = (reduce(torch.add, each) for each in zip(*results))
        value = float(losses / len(results))
        p = self.progress
        seconds = max(seconds, 1e-9)
        hits, alpha, rows = stats.cpu()
        hit, accepted = ([round(float(v), 4) for v in share / rows.clamp_min(1)] for share in (hits, alpha))
        advice = "stopped; the last checkpoint is good; try a smaller --lr"
        require(math.isfinite(value), f"the loss is {value} at step {p.step}: {advice}")
        line = f"step {p.step}, loss {value:.3f}, first draft right {hit[0]:.0%}"
        self.hooks.progress(self.share(p.seconds), line)
        row = {"step": p.step, "epoch": p.epoch, "loss": round(value, 5), "lr": lr, "seconds": round(p.seconds, 2)}
        row |= {"steps_per_s": round(len(results) / seconds, 2), "anchors_per_s": round(float(rows[0]) / seconds)}
        self.hooks.log({**row, "hit": hit, "alpha": accepted})

    def judge(self, ties: bool = False) -> bool | None:
        """Evaluates. Stores the best weights (`ties`: also equally good ones) next to the checkpoint and as a drafter.
        Returns True if these are the best; None: no evaluation, or it was given up."""
        p = self.progress
        if self.hooks.evaluate is None:
            return None
        try:
            result = self.hooks.evaluate()
        except Halted:
            return None  # the run ends before its next step
        self.hooks.log({"step": p.step, "seconds": round(p.seconds, 2), "eval": result})
        if result["score"] < p.best or (result["score"] == p.best and not ties):
            return False
        p.best = result["score"]
        write(self.config.out / "best.pt", {"net": self.net.state_dict(), "step": p.step, "score": p.best})
        self.hooks.export()
        return True

    # ---- checkpoints -----------------------------------------------------------------------------------------------
    def save(self) -> None:
        state = {"net": self.net.state_dict(), "optimizers": [o.state_dict() for o in self.optimizers]}
        write(self.config.out / "checkpoint.pt", {**state, "progress": asdict(self.progress)})

    def resume(self) -> bool:
        path = self.config.out / "checkpoint.pt"
        if not path.exists():
            return False
        try:
            checkpoint = torch.load(path, map_location="cpu", weights_only=True)
            self.net.load_state_dict(checkpoint["net"])
            for optimizer, state in zip(self.optimizers, checkpoint["optimizers"], strict=True):
                optimizer.load_state_dict(state)
            self.progress = TrainProgress(**checkpoint["progress"])
            path = path.with_name("best.pt")
            best = torch.load(path, map_location="cpu", weights_only=True)["score"] if path.exists() else -math.inf
            # a better evaluation after the checkpoint must not be replaced by a worse one
            self.progress.best = max(best, self.progress.best)
        except (RuntimeError, KeyError, ValueError, TypeError) as error:
            why = "its drafter is built otherwise" if "state_dict" in str(error) else str(error).splitlines()[0]
            advice = "choose another --out or the same settings"
            raise OutriderError(f"{path}: does not fit this run ({why}): {advice}") from None
        return True


def make_optimizers(
    params: dict[str, torch.nn.Parameter], lr: float, weight_decay: float, muon: bool
) -> list[torch.optim.Optimizer]:
    """By canonical name: matrices of the network to Muon (Jordan et al. 2024), with a step scaled to AdamW's (as in
    Moonlight), so that one learning rate serves both; heads, centroids, norms and scalars to AdamW."""
    matrices = {n: p for n, p in params.items() if muon and p.ndim == 2 and n not in HEADS}
    others = [p for n, p in params.items() if n not in matrices]
    optimizers: list[torch.optim.Optimizer] = []
    if matrices:
        optimizers.append(torch.optim.Muon(matrices.values(), lr, weight_decay, adjust_lr_fn="match_rms_adamw"))
    if others:
        sides = [p for p in others if p.ndim >= 2], [p for p in others if p.ndim < 2]
        groups = [{"params": p, "weight_decay": d} for p, d in zip(sides, (weight_decay, 0.0)) if p]
        optimizers.append(torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), eps=1e-8, fused=others[0].is_cuda))
    return optimizers


def write(path: Path, content: Row) -> None:
    """Writes atomically: a full disk leaves the previous file."""
    part = path.with_suffix(".part")
    try:
        with open(part, "wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except (OSError, RuntimeError) as error:
        part.unlink(missing_ok=True)
        advice = "the last checkpoint is kept: free some space and run the command again"
        raise OutriderError(f"{path}: cannot be written ({error}); {advice}") from None


def append_row(path: Path, row: Row) -> None:
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def read_rows(path: Path) -> list[Row]:
    """Rows of a log (none if there is no file), without an incomplete last one."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        with suppress(ValueError):
            rows.append(json.loads(line))
    return rows
