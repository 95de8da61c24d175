"""`outrider train`: a drafter for your model in one command."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from ..config import LoadSettings
from ..types import OutriderError
from . import common
from .common import out
from .progress import StageProgress


@common.loading("device")
def train(
    ctx: typer.Context,
    target: Annotated[str, typer.Option(help="The model to draft for: smollm2, a folder, a .gguf file, or a Hugging Face id.")],
    data: Annotated[
        Path, typer.Option(help="Prompts as JSON lines ({'prompt': ...}, may be gzipped); with --texts plain text ({'text': ...}).")
    ],
    to: Annotated[Path, typer.Option("--out", help="Folder of the run; the same command continues it.")],
    recipe: Annotated[
        str | None,
        typer.Option(help="A training run written down: 'shipped' (the default model's drafter), 'further' (on from it) or a TOML file."),
    ] = None,
    texts: Annotated[bool, typer.Option("--texts", help="Train on the texts as they are instead of on the target's own answers.")] = False,
    init: Annotated[str | None, typer.Option(help="Start from this drafter (for a fine-tuned or quantised target).")] = None,
    steps: Annotated[int, typer.Option(help="Optimizer steps.")] = 2000,
    minutes: Annotated[
        float | None, typer.Option(help="Wall-clock time of everything (loading, answering, training, evaluation), instead of --steps.")
    ] = None,
    answer_minutes: Annotated[
        float | None, typer.Option(help="Of these, most for answering; then train on what there is. Default: 40 %, on a CPU 25 %.")
    ] = None,
    style: Annotated[str, typer.Option(help="auto | plain (reads any layers, head of the target) | gemma (Gemma 4's layout).")] = "auto",
    layers: Annotated[int, typer.Option(help="Plain style: how many layers.")] = 6,
    reads: Annotated[
        str, typer.Option(help="Plain style: the target layers to read, e.g. 14,17,20,23,26,29. Default: over the upper half.")
    ] = "",
    taps: Annotated[str, typer.Option(help="Plain style: target layers whose hidden state is fed too.")] = "",
    hidden: Annotated[int | None, typer.Option(help="Width. Default: the target's (plain), 256 (gemma).")] = None,
    intermediate: Annotated[int | None, typer.Option(help="Width of the MLPs.")] = None,
    position_offset: Annotated[
        int, typer.Option(help="Plain style: the constant position is L - this; 2: the last one the target has seen.")
    ] = 2,
    clusters: Annotated[int | None, typer.Option(help="Clusters of the head; 0: none. Default: by the vocabulary.")] = None,
    recall: Annotated[float, typer.Option(help="The clustered head must find the full head's token this often.")] = 0.99,
    unroll: Annotated[int | None, typer.Option(help="Draft steps a training step unrolls. Default: 5, on a CPU 3.")] = None,
    loss: Annotated[str, typer.Option(help="Weights of the terms soft, tv, hard, lk, second.")] = "soft=1,tv=0.5",
    survival: Annotated[float, typer.Option(help="0..1: weigh a step by the chance that those before it are accepted.")] = 0.0,
    thin: Annotated[
        float, typer.Option(help="0..1: a draft step's loss looks at this share of the rows of the step before; 1: at all of them.")
    ] = 1.0,
    four_bits_from: Annotated[
        float, typer.Option(help="0..1: share of the run after which the layers are trained as 4 bits hold them; 1: never.")
    ] = 1.0,
    lr: Annotated[float, typer.Option(help="Learning rate.")] = 2e-3,
    warmup: Annotated[int | None, typer.Option(help="Steps until the learning rate is reached. Default: 50, on a CPU 10.")] = None,
    hold: Annotated[float, typer.Option(help="0..1: share of the run at the full rate; then it falls linearly.")] = 0.3,
    optimizer: Annotated[str, typer.Option(help="adamw | muon.")] = "adamw",
    anchors: Annotated[int | None, typer.Option(help="Positions drafted from in a batch. Default: what memory and speed allow.")] = None,
    accumulate: Annotated[int, typer.Option(help="Batches an optimizer step.")] = 1,
    max_prompt: Annotated[int | None, typer.Option(help="Longer prompts are left out. Default: 512 tokens, on a CPU 256.")] = None,
    max_new: Annotated[int | None, typer.Option(help="Most tokens an answer. Default: 192, on a CPU 96.")] = None,
    temperature: Annotated[float, typer.Option(help="Of the sampled answers.")] = 0.8,
    greedy: Annotated[float, typer.Option(help="Share of greedy answers.")] = 0.5,
    slots: Annotated[int | None, typer.Option(help="Prompts answered at a time. Default: 8, on a GPU 256, if they fit.")] = None,
    answer_processes: Annotated[
        int, typer.Option(help="Processes that answer, each with an engine of its own: a small target keeps a GPU busy only so.")
    ] = 1,
    limit: Annotated[int | None, typer.Option(help="Use only the first prompts.")] = None,
    heldout: Annotated[int, typer.Option(help="Prompts kept for evaluation, a fifth of all at most.")] = 256,
    judge: Annotated[
        Path | None,
        typer.Option(help="Prompts to evaluate on instead, a file like --data. With --init: some that the drafter never learnt from."),
    ] = None,
    eval_every: Annotated[int, typer.Option(help="Steps between evaluations; 0: only at the end.")] = 500,
    patience: Annotated[int, typer.Option(help="Stop after this many evaluations without a better one; 0: never.")] = 0,
    save_minutes: Annotated[float, typer.Option(help="Minutes between checkpoints.")] = 1.0,
    shard_target: Annotated[
        bool,
        typer.Option("--shard-target", help="Under torchrun: divide the target over the processes, gather each matrix when it is used."),
    ] = False,
    seed: common.Seed = 0,
    dtype: Annotated[str | None, typer.Option(help="float32 | bfloat16. Default: bfloat16 where the GPU or the CPU multiplies it.")] = None,
    as_json: common.AsJson = False,
    *,
    load: LoadSettings,
) -> None:
    """Train a drafter for a target: the target answers your prompts, and the drafter learns to foresee it. Ctrl-C saves
    everything."""
    with StageProgress(quiet=as_json) as progress:
        progress("starting", 0, 1, "")
        import torch

        from ..ops import place
        from ..train.answers import Answering
        from ..train.job import TrainJob
        from ..train.losses import LossMix
        from ..train.memory import cpu_dtype
        from ..train.recipes import read_recipe, train_recipe
        from ..train.run import train as run
        from ..train.trainer import TrainSettings

        where = str(place(load.device))
        cuda = where.startswith("cuda")
        if dtype not in (None, "float32", "bfloat16"):
            raise OutriderError(f"--dtype must be float32 or bfloat16 for training, got {dtype!r}")
        kind = getattr(torch, dtype) if dtype else torch.bfloat16 if cuda else cpu_dtype()
        check_choices(style=style, optimizer=optimizer)
        check_numbers(
            {"--steps": steps, "--unroll": unroll, "--anchors": anchors, "--accumulate": accumulate, "--max-new": max_new,
             "--max-prompt": max_prompt, "--limit": limit, "--slots": slots, "--layers": layers,
             "--answer-processes": answer_processes},
            {"--greedy": greedy, "--survival": survival, "--hold": hold, "--four-bits-from": four_bits_from, "--thin": thin},
            {"--minutes": minutes, "--answer-minutes": answer_minutes, "--save-minutes": save_minutes, "--lr": lr},
        )  # fmt: skip
        common.check_folder("--out", to)
        if not 0.0 <= temperature <= 100.0:
            raise OutriderError(f"--temperature must be in [0, 100], got {temperature:g}")
        rise, most, longest = (
            (warmup or 50, max_new or 192, max_prompt or 512) if cuda else (warmup or 10, max_new or 96, max_prompt or 256)
        )
        read, tapped = (common.numbers(text, int, option) if text else () for text, option in ((reads, "--reads"), (taps, "--taps")))
        settings = TrainSettings(
            steps=steps, unroll=unroll or (5 if cuda else 3), survival=survival, loss=LossMix.parse(loss), lr=lr,
            warmup=rise, hold=hold,
            muon=optimizer == "muon", accumulate=accumulate, seed=seed, eval_every=eval_every, patience=patience,
            save_minutes=save_minutes,
            four_bits_from=four_bits_from, thin=thin,
        )  # fmt: skip
        job = TrainJob(
            target=target, data=data, out=to, texts=texts, init=init, style=style, layers=layers, reads=read,
            # type: ignore[arg-type]
            hidden=hidden, intermediate=intermediate, taps=tapped, position_offset=position_offset, clusters=clusters,
            recall=recall, max_prompt=longest,
            answering=Answering(most, temperature, slots, greedy, seed=seed, processes=answer_processes),
            minutes=minutes, answer_minutes=answer_minutes, limit=limit, heldout=heldout, judge=judge, anchors=anchors,
            settings=settings,
            device=where, dtype=kind, shard_target=shard_target, command=shlex.join(["outrider", *sys.argv[1:]]),
        )  # fmt: skip
        if recipe is None:
            result = run(job, progress.say, progress)
        else:
            result = train_recipe(job, read_recipe(recipe), progress.say, progress, given(ctx))
    if not result:
        return  # rank 0 speaks
    if as_json:
        out.print_json(data={"drafter": str(to / "drafter"), **result})
    elif "full" in result:
        final = result.get("clustered") or result["full"]
        per = final["tokens_per_cycle"]
        out.print(
            f"held-out prompts, greedy: {per[4]:.2f} tokens a cycle at K = 4, {per[8]:.2f} at K = 8; "
            f"first draft right {final['acceptance_by_position'][0]:.0%}"
        )
        if "too_few_steps" not in result:
            out.print(f"use it: outrider chat {target} --drafter {to / 'drafter'}")
    if "too_few_steps" in result:
        raise typer.Exit(1)
    if "stopped" in result:
        raise typer.Exit(128 + int(result["stopped"]))


def given(ctx: typer.Context) -> frozenset[str]:
    """Options that the command line names, as recipes call them: they win over the recipe's."""
    other = {"greedy": "greedy_share", "answer_processes": "processes"}
    named = (name for name in ctx.params if str(ctx.get_parameter_source(name)).endswith("COMMANDLINE"))
    return frozenset(other.get(name, name) for name in named)


def check_choices(style: str, optimizer: str) -> None:
    if style not in ("auto", "plain", "gemma"):
        raise OutriderError(f"--style must be auto, plain or gemma, got {style!r}")
    if optimizer not in ("muon", "adamw"):
        raise OutriderError(f"--optimizer must be muon or adamw, got {optimizer!r}")


def check_numbers(counts: Mapping[str, int | None], shares: Mapping[str, float], sizes: Mapping[str, float | None]) -> None:
    for name, count in counts.items():
        if count is not None and count < 1:
            raise OutriderError(f"{name} must be at least 1, got {count}")
    for name, share in shares.items():
        if not 0.0 <= share <= 1.0:
            raise OutriderError(f"{name} must be in [0, 1], got {share}")
    for name, size in sizes.items():
        if size is not None and not 0 < size < float("inf"):
            raise OutriderError(f"{name} must be above 0, got {size:g}")
