"""`outrider train`: a drafter for your model in one command."""

from __future__ import annotations

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
    target: Annotated[
        str, typer.Option(help="The model to draft for: smollm2, a folder, a .gguf file, or a Hugging Face id.")
    ],
    data: Annotated[Path, typer.Option(help="Prompts as JSON lines ({'prompt': ...}), gzipped or not.")],
    to: Annotated[Path, typer.Option("--out", help="Folder of the run; the same command continues it.")],
    kind: Annotated[
        str, typer.Option(help="mtp: reads the target's K/V. dflash, eagle3: kinds that other engines load too.")
    ] = "mtp",
    recipe: Annotated[
        str | None,
        typer.Option(help="All other settings, as a TOML file; or 'shipped', 'further', 'dflash' (for smollm2)."),
    ] = None,
    adapter: Annotated[
        str | None,
        typer.Option(metavar="PATH", help="A LoRA adapter (folder, .gguf file, id): draft for the target with it."),
    ] = None,
    init: Annotated[
        str | None, typer.Option(help="Start from this drafter (for a fine-tuned or quantised target).")
    ] = None,
    eval_data: Annotated[
        Path | None, typer.Option(help="Prompts to evaluate on, a file like --data. Default: held-out ones.")
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Use only the first prompts.")] = None,
    steps: Annotated[int, typer.Option(help="Optimizer steps.")] = 2000,
    minutes: Annotated[
        float | None,
        typer.Option(
            help="Wall-clock time of everything (loading, answering, training, evaluation), instead of --steps."
        ),
    ] = None,
    lr: Annotated[float, typer.Option(help="Learning rate.")] = 2e-3,
    max_new: Annotated[int | None, typer.Option(help="Maximum tokens per answer. Default: 192, on a CPU 96.")] = None,
    as_json: common.AsJson = False,
    *,
    load: LoadSettings,
) -> None:
    """Train a drafter: the target answers your prompts, and the drafter learns to predict it. Ctrl-C saves all."""
    with StageProgress(quiet=as_json) as progress:
        progress("starting", 0, 1, "")
        from ..ops import place
        from ..train.config import TrainConfig
        from ..train.recipes import Recipe, read_recipe, train_recipe

        if max_new is not None and max_new < 1:
            raise OutriderError(f"--max-new must be a whole number of at least 1, got {max_new}")
        common.check_folder("--out", to)
        config = TrainConfig(
            target,
            data,
            to,
            kind=kind,
            init=init,
            adapter=adapter,
            eval_data=eval_data,
            limit=limit,
            steps=steps,
            minutes=minutes,
            lr=lr,
            max_new=max_new or 0,
            device=str(place(load.device)),
            command=common.command_line(),
        ).validated()
        given = (name for name in ctx.params if str(ctx.get_parameter_source(name)).endswith("COMMANDLINE"))
        chosen = Recipe("") if recipe is None else read_recipe(recipe)
        result = train_recipe(config, chosen, progress.say, progress, frozenset(given))
    if not result:
        return  # rank 0 speaks
    if as_json:
        out.print_json(data={"drafter": str(to / "drafter"), **result})
    elif "full" in result:
        final = result.get("clustered") or result["full"]
        per = final["tokens_per_cycle"]
        out.print(
            f"held-out prompts, greedy: {per[4]:.2f} tokens per cycle at K = 4, {per[8]:.2f} at K = 8; "
            f"first draft token right {final['acceptance_by_position'][0]:.0%}"
        )
        if "too_few_steps" not in result:
            out.print(f"use it: outrider chat {target} --drafter {to / 'drafter'}")
    if "stopped" in result:
        raise typer.Exit(128 + int(result["stopped"]))
    if "too_few_steps" in result:
        raise typer.Exit(1)
