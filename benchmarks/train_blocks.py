"""What `train_experiments.py block` and `trees` train: drafters that go on from a finished one, on the same data for the same time.

block: does one pass of the drafter that emits several positions at once beat steps one after another? Both go on from the same drafter.
    steps   as shipped: every guess runs through all layers, fed the guess before it and its own state
    block   one pass over K rows of the newest token, each with a learnt mark and a rotary position of its own; no guess knows another
    linked  the same pass, and then a small network beside the head which is told the guess before: as cheap as another head
trees: losses that ask for the right token in the second place where the best guess is wrong.

Everything is judged on Spec-Bench's questions, which are never trained on: tokens a cycle by K, full head (and clustered, for `trees`).
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.models.config import DrafterConfig, ModelConfig
from outrider.models.inspect import drafter_size, model_size
from outrider.models.layers import inverse_frequencies
from outrider.train import finish
from outrider.train.answers import Answering
from outrider.train.clock import Budget, Stop
from outrider.train.data import Prompt, Sequences, read_prompts
from outrider.train.evaluate import second_guesses, summary
from outrider.train.job import TrainJob
from outrider.train.losses import LossMix
from outrider.train.net import Context, DraftNet, rms
from outrider.train.parallel import Group
from outrider.train.run import Run
from outrider.train.target import Target, describe, open_target
from outrider.train.tools import answers, check_fit, load_net, spread
from outrider.train.trainer import Trainer, TrainSettings

BENCH = Path(__file__).parent / "data" / "spec_bench_question.jsonl"
SHIPPED = Path(__file__).resolve().parents[1] / "src" / "outrider" / "assets" / "drafters" / "smollm2"
DEEP = 5  # positions that are trained
SAMPLED, GREEDY = "soft=0.3,tv=1", "soft=0.5,tv=0.5,hard=0.5"  # as the shipped drafter's last run had them
TREES = {  # losses of sampled answers, of greedy ones
    "as before": (SAMPLED, GREEDY),
    "second": (SAMPLED, "soft=0.3,tv=0.5,hard=0.5,second=0.3"),
    "second, both": ("soft=0.3,tv=1,second=0.1", "soft=0.3,tv=0.5,hard=0.5,second=0.3"),
}


class BlockNet(DraftNet):
    """One pass, several positions. Row j is fed what the first step is fed and a mark; `linked`: beside the head, a network that is told
    the token before."""

    def __init__(self, config: DrafterConfig, target: ModelConfig, linked: bool):
        super().__init__(config, target)
        self.linked, wide = linked, target.hidden
        self.add("block.marks", torch.randn(DEEP, 1, wide, generator=torch.Generator().manual_seed(1)) * 0.02)
        if linked:
            self.add("block.in", torch.randn(wide, 2 * wide, generator=torch.Generator().manual_seed(2)) * (2 * wide) ** -0.5)
            self.add("block.out", torch.zeros(wide, wide))

    def add(self, name: str, value: Tensor) -> None:
        self.names[name] = name.replace(".", "_")
        self.register_parameter(self.names[name], nn.Parameter(value))

    def shifted(self, ctx: Context, by: int) -> Context:
        """The rotary positions `by` further on."""
        length, device = ctx.keys[0].shape[2], ctx.keys[0].device
        at = (torch.arange(ctx.first, length, device=device) + 2 - self.config.position_offset + by).float()
        turns = [at[:, None] * inverse_frequencies(layer.rope, device)[None, :] for layer in self.layers]
        return replace(ctx, angles=[(t.cos()[:, None], t.sin()[:, None]) for t in turns])

    def unroll(self, w: Mapping[str, Tensor], ctx: Context, embedded: Tensor, hidden: Tensor, steps: int) -> Iterator[Tensor]:
        width, eps = hidden.shape[1], self.config.norm_eps
        newest = embedded[:, 1 : 1 + width]
        for j in range(steps):
            mark = w["block.marks"][min(j, DEEP - 1)] if j else torch.zeros_like(w["block.marks"][0])
            g, _ = self.step(w, self.shifted(ctx, j), newest + mark, hidden)
            if self.linked and j:
                told = torch.cat((rms(g, None, eps), rms(embedded[:, j + 1 : j + 1 + width], None, eps)), -1)
                g = g + F.linear(F.silu(F.linear(told, w["block.in"])), w["block.out"])
            yield g


def draft_weights(net: DraftNet, k: int) -> int:
    """Weights that a draft of k tokens reads."""
    cost = drafter_size(net.config)
    if not isinstance(net, BlockNet):
        return k * cost.step
    link = sum(net.weight(n).numel() for n in ("block.in", "block.out")) if net.linked else 0
    return cost.body + k * cost.head + (k - 1) * link


# ---- data -----------------------------------------------------------------------------------------------------------------
def trained_on(args: argparse.Namespace, device: str, dtype: torch.dtype) -> Sequences:
    """RUN/data.npz, or the target's answers to --data made now, in --answer-seconds."""
    run = Path(args.run)
    run.mkdir(parents=True, exist_ok=True)
    how = Answering(max_new=args.max_new, temperature=1.0, greedy_share=0.35, seed=23)
    job = TrainJob(
        target=args.target, data=args.data, out=run, max_prompt=args.max_prompt, answering=how, minutes=60.0, heldout=0, device=device,
        dtype=dtype, answer_minutes=args.answer_seconds / 60, limit=args.limit,
    )  # fmt: skip
    known, made = describe(args.target), Run(job, Budget(60.0, time.perf_counter()), Stop(), Group(), print, None)
    made.counts = True  # nothing is refused
    data = made.data(known, made.prompts(known))
    assert data is not None
    return data


def asked(args: argparse.Namespace, device: str, dtype: torch.dtype) -> tuple[list[Prompt], dict[float, Sequences]]:
    """Spec-Bench's questions and the target's answers to them, greedily and at T = 1, kept beside the run."""
    listed, found = spread(read_prompts(BENCH), args.questions), {}
    for heat in (0.0, 1.0):
        kept = Path(args.run) / f"bench-{heat:g}-{len(listed)}-{args.bench_new}.npz"
        if not kept.exists():
            answers(
                describe(args.target), listed, max_new=args.bench_new, temperature=heat, chat=True, seed=5, device=device, dtype=dtype
            ).save(kept)  # fmt: skip
        found[heat] = Sequences.load(kept)
    return listed, found


# ---- judging --------------------------------------------------------------------------------------------------------------
def second_guess(target: Target, net: DraftNet, data: Sequences, heat: float) -> float:
    weights, full, _ = finish.views(net, target)
    return second_guesses(target.model, net, weights, full.rows, data, heat, 8192 if target.model.device.type == "cuda" else 1024)


def judged(target: Target, net: DraftNet, bench: dict[float, Sequences], full: bool) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for heat, data in bench.items():
        found = finish.judged(target, net, data, most=8, full=full, temperature=heat)
        made = summary(found.right, ["all"] * len(data), 8)
        name = "T = 1" if heat else "greedy"
        row[name] = {k: made["tokens_per_cycle"][k] for k in (1, 2, 3, 4, 6, 8)}
        row[f"{name}, by position"] = made["acceptance_given_before"][:5]
    return row


def trained(
    target: Target, net: DraftNet, data: Sequences, seconds: float, loss: str, greedy_loss: str, args: argparse.Namespace
) -> dict[str, Any]:
    settings = TrainSettings(
        minutes=seconds / 60, unroll=DEEP, survival=0.7, loss=LossMix.parse(loss), greedy_loss=LossMix.parse(greedy_loss),
        cluster_pull=0.1 if net.config.clusters else 0.0, four_bits_from=0.0, lr=args.lr, warmup=args.warmup, hold=0.1, final=0.0,
        muon=True, anchors=args.anchors, tokens=4 * args.anchors, seed=31, log_every=10**9,
        scored=args.scored,
    )  # fmt: skip
    trainer = Trainer(target.model, net, data, settings)
    trainer.run()
    return {"steps": trainer.progress.step, "seconds": round(trainer.progress.seconds, 1)}


def opened(args: argparse.Namespace) -> tuple[Target, Sequences, dict[float, Sequences], DrafterConfig, dict[str, Tensor]]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    began = time.perf_counter()
    data, (_, bench) = trained_on(args, device, dtype), asked(args, device, dtype)
    target = open_target(args.target, device, dtype)
    config, weights = check_fit(args.drafter or str(SHIPPED), target)
    note(args, {
        "answers": len(data), "tokens": data.answer_tokens, "greedy": round(float(data.greedy.mean()), 3),
        "bench tokens": {f"{k:g}": v.answer_tokens for k, v in bench.items()}, "seconds": round(time.perf_counter() - began, 1),
    })  # fmt: skip
    return target, data, bench, config, weights


def note(args: argparse.Namespace, row: dict[str, Any]) -> None:
    print(json.dumps(row), flush=True)
    for path in (Path(args.run) / "experiments.jsonl", args.out / "experiments.jsonl" if args.out else None):
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(path, "a") as file:
                file.write(json.dumps(row) + "\n")


# ---- the two experiments --------------------------------------------------------------------------------------------------
def block(args: argparse.Namespace) -> None:
    target, data, bench, config, weights = opened(args)
    whole = model_size(target.config).active
    bare = replace(config, clusters=0, weight_bits=4)  # the full head: centroids of one kind of state say nothing of another's
    head = drafter_size(replace(config, weight_bits=4)).head  # what the clustered head would read: the price of all three

    def price(net: DraftNet) -> dict[str, float]:
        cost = draft_weights(net, 4) - 4 * (drafter_size(net.config).head - head)
        return {"weights of a draft of 4, M": round(cost / 1e6, 2), "of a target step": round(cost / whole, 4)}

    start = load_net(args.drafter or str(SHIPPED), target, clustered=False)
    note(args, {"name": "steps, untrained", **judged(target, start, bench, True), **price(start)})
    for name in ("steps", "block", "linked"):
        net = DraftNet(bare, target.config) if name == "steps" else BlockNet(bare, target.config, name == "linked")
        own = {n: net.weight(n).detach().clone() for n in net.names if n.startswith("block.")}
        net.load({**weights, **own})
        net = net.to(target.model.device)
        took = trained(target, net, data, args.seconds, SAMPLED, GREEDY, args)
        note(args, {"name": name, **took, **judged(target, net, bench, True), **price(net)})
        del net
        torch.cuda.empty_cache()


def trees(args: argparse.Namespace) -> None:
    target, data, bench, config, weights = opened(args)

    def told(net: DraftNet) -> dict[str, Any]:
        second = {("T = 1" if heat else "greedy"): second_guess(target, net, part, heat) for heat, part in bench.items()}
        return {**judged(target, net, bench, False), "second guess right": second}

    start = load_net(args.drafter or str(SHIPPED), target)
    note(args, {"name": "untrained", **told(start)})
    for name, (loss, greedy_loss) in TREES.items():
        if args.only and name not in args.only.split(";"):
            continue
        net = DraftNet(replace(config, weight_bits=4), target.config)
        net.load(weights)
        net = net.to(target.model.device)
        took = trained(target, net, data, args.seconds, loss, greedy_loss, args)
        note(args, {"name": name, "loss": loss, "greedy loss": greedy_loss, **took, **told(net)})
        if args.out is not None:
            weights_path = args.out / f"{name.replace(', ', '-').replace(' ', '-')}.pt"
            torch.save({k: v.half() for k, v in net.export().items() if v.is_floating_point()}, weights_path)


def add_options(p: argparse.ArgumentParser) -> None:
    p.add_argument("--data", type=Path, help="block, trees: prompts to answer where RUN/data.npz is not there")
    p.add_argument("--seconds", type=float, default=40.0, help="block, trees: of training, each")
    p.add_argument("--answer-seconds", type=float, default=60.0)
    p.add_argument("--limit", type=int, default=None, help="block, trees: so many prompts")
    p.add_argument("--max-prompt", type=int, default=640)
    p.add_argument("--max-new", type=int, default=224)
    p.add_argument("--bench-new", type=int, default=256)
    p.add_argument("--anchors", type=int, default=28672)
    p.add_argument("--scored", type=int, default=0)
    p.add_argument("--lr", type=float, default=1.5e-3)
    p.add_argument("--warmup", type=int, default=20)
    p.add_argument("--out", type=Path, default=None, help="block, trees: a folder that gets the results too")
