"""`outrider train`: a drafter for your model in one command."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

from ..config import LoadSettings
from ..train.config import TrainConfig
from . import common
from .common import out
from .progress import StageProgress

RecipeName = Annotated[
    str | None,
    typer.Option(help="All other settings, as a TOML file; or 'shipped', 'further', 'dflash' (for smollm2)."),
]


@common.loading("device")
@common.taking(TrainConfig)
def train(
    ctx: typer.Context,
    asked: TrainConfig,
    load: LoadSettings,
    recipe: RecipeName = None,
    as_json: common.AsJson = False,
) -> None:
    """Train a drafter: the target answers your prompts, and the drafter learns to predict it. Ctrl-C saves all."""
    with StageProgress(quiet=as_json) as progress:
        progress("starting", 0, 1, "")
        from ..ops import place
        from ..train.recipes import Recipe, read_recipe, train_recipe

        common.check_folder("--out", asked.out)
        config = replace(asked, device=str(place(load.device)), command=common.command_line()).validated()
        given = (name for name in ctx.params if str(ctx.get_parameter_source(name)).endswith("COMMANDLINE"))
        chosen = Recipe("") if recipe is None else read_recipe(recipe)
        result = train_recipe(config, chosen, progress.say, progress, frozenset(given))
    if as_json:
        out.print_json(data={"drafter": str(asked.out / "drafter"), **result})
    elif "full" in result:
        final = result.get("clustered") or result["full"]
        per = final["tokens_per_cycle"]
        out.print(
            f"held-out prompts, greedy: {per[4]:.2f} tokens per cycle at K = 4, {per[8]:.2f} at K = 8; "
            f"first draft token right {final['acceptance_by_position'][0]:.0%}"
        )
        if "too_few_steps" not in result:
            out.print(f"use it: outrider chat {asked.target} --drafter {asked.out / 'drafter'}")
    if "stopped" in result:
        raise typer.Exit(128 + int(result["stopped"]))
    if "too_few_steps" in result:
        raise typer.Exit(1)
