"""`outrider train`: a drafter for your model in one command."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from ..config import LoadSettings
from ..types import OutriderError
from . import common
from .common import out
from .progress import StageProgress


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    target: Annotated[str, "The model to draft for: smollm2, a folder, a .gguf file, or a Hugging Face id."]
    data: Annotated[Path, "Prompts as JSON lines ({'prompt': ...}), gzipped or not."]
    to: Annotated[Path, typer.Option("--out", help="Folder of the run; the same command continues it.")]
    kind: Annotated[str, "mtp: reads the target's K/V. dflash, eagle3: kinds that other engines load too."] = "mtp"
    recipe: Annotated[
        str | None, "All other settings, as a TOML file; or 'shipped', 'further', 'dflash' (for smollm2)."
    ] = None
    adapter: Annotated[
        str | None,
        typer.Option(metavar="PATH", help="A LoRA adapter (folder, .gguf file, id): draft for the target with it."),
    ] = None
    init: Annotated[str | None, "Start from this drafter (for a fine-tuned or quantised target)."] = None
    eval_data: Annotated[Path | None, "Prompts to evaluate on, a file like --data. Default: held-out ones."] = None
    limit: Annotated[int | None, "Use only the first prompts."] = None
    steps: Annotated[int, "Optimizer steps."] = 2000
    minutes: Annotated[
        float | None, "Wall-clock time of everything (loading, answering, training, evaluation), instead of --steps."
    ] = None
    lr: Annotated[float, "Learning rate."] = 2e-3
    max_new: Annotated[int | None, "Maximum tokens per answer. Default: 192, on a CPU 96."] = None
    as_json: common.AsJson = False


@common.loading("device")
@common.taking(TrainOptions)
def train(ctx: typer.Context, asked: TrainOptions, load: LoadSettings) -> None:
    """Train a drafter: the target answers your prompts, and the drafter learns to predict it. Ctrl-C saves all."""
    with StageProgress(quiet=asked.as_json) as progress:
        progress("starting", 0, 1, "")
        from ..ops import place
        from ..train.config import TrainConfig
        from ..train.recipes import Recipe, read_recipe, train_recipe

        if asked.max_new is not None and asked.max_new < 1:
            raise OutriderError(f"--max-new must be a whole number of at least 1, got {asked.max_new}")
        common.check_folder("--out", asked.to)
        own = ("kind", "init", "adapter", "eval_data", "limit", "steps", "minutes", "lr")
        config = TrainConfig(
            asked.target,
            asked.data,
            asked.to,
            max_new=asked.max_new or 0,
            device=str(place(load.device)),
            command=common.command_line(),
            **{name: getattr(asked, name) for name in own},
        ).validated()
        given = (name for name in ctx.params if str(ctx.get_parameter_source(name)).endswith("COMMANDLINE"))
        chosen = Recipe("") if asked.recipe is None else read_recipe(asked.recipe)
        result = train_recipe(config, chosen, progress.say, progress, frozenset(given))
    if not result:
        return  # only rank 0 prints
    if asked.as_json:
        out.print_json(data={"drafter": str(asked.to / "drafter"), **result})
    elif "full" in result:
        final = result.get("clustered") or result["full"]
        per = final["tokens_per_cycle"]
        out.print(
            f"held-out prompts, greedy: {per[4]:.2f} tokens per cycle at K = 4, {per[8]:.2f} at K = 8; "
            f"first draft token right {final['acceptance_by_position'][0]:.0%}"
        )
        if "too_few_steps" not in result:
            out.print(f"use it: outrider chat {asked.target} --drafter {asked.to / 'drafter'}")
    if "stopped" in result:
        raise typer.Exit(128 + int(result["stopped"]))
    if "too_few_steps" in result:
        raise typer.Exit(1)
