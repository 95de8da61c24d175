"""`outrider train`, `eval-drafter`, `export`: make a drafter, measure it, write it in other engines' layouts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from ..config import LoadSettings
from ..train.config import EvalConfig, TrainConfig
from ..types import require
from . import common
from .common import err, note, out
from .progress import StageProgress

if TYPE_CHECKING:
    from ..train.trainer import Row

WARN = "yellow"
RECIPE = "All other settings, as a TOML file; or 'shipped', 'further', 'dflash' (for smollm2)."


@common.loading("device")
@common.taking(TrainConfig)
def train(
    ctx: typer.Context,
    asked: TrainConfig,
    load: LoadSettings,
    recipe: Annotated[str | None, typer.Option(help=RECIPE)] = None,
    as_json: common.AsJson = False,
) -> None:
    """Train a drafter: the target answers your prompts, and the drafter learns to predict it. Ctrl-C saves all."""
    with StageProgress(quiet=as_json) as progress:
        progress("starting", 0, 1, "")
        from ..ops import place
        from ..train.recipes import Recipe, read_recipe, train_recipe

        common.check_folder("--out", asked.out)
        config = replace(asked, device=str(place(load.device)), command=common.command_line()).validated()
        on_command_line = (name for name in ctx.params if str(ctx.get_parameter_source(name)).endswith("COMMANDLINE"))
        chosen = Recipe("") if recipe is None else read_recipe(recipe)
        result = train_recipe(config, chosen, say=progress.say, progress=progress, keep=frozenset(on_command_line))
    if as_json:
        out.print_json(data={"drafter": str(asked.out / "drafter"), **result})
    elif "full" in result:
        final = result.get("clustered") or result["full"]
        per = final["tokens_per_cycle"]
        out.print(
            f"held-out prompts, greedy: {per[4]:.2f} tokens per cycle at K = 4, {per[8]:.2f} at K = 8; "
            f"first draft token right {final['acceptance_by_position'][0]:.0%}"
        )
        gain = result.get("gain")
        if gain is not None:
            verdict = gain["verdict"].capitalize()
            out.print(f"measured here on held-out prompts: {gain['speedup']:.2f} × plain decoding. {verdict}")
        if "too_few_steps" not in result:
            is_useful = gain is None or gain["useful"]
            to_try = "to try it" if is_useful else "to try it all the same"
            out.print(f"{to_try}: outrider chat {asked.target} --drafter {asked.out / 'drafter'}")
    if "stopped" in result:
        raise typer.Exit(128 + int(result["stopped"]))
    if "too_few_steps" in result:
        raise typer.Exit(1)


@common.loading("device", "dtype")
@common.taking(EvalConfig)
def eval_drafter(
    asked: EvalConfig,
    load: LoadSettings,
    model: common.Model,
    drafter: Annotated[str, typer.Argument(help="A folder or id of an MTP, DFlash or EAGLE-3 drafter.")],
    card: Annotated[bool, typer.Option("--card", help="Write acceptance.json into the drafter's folder.")] = False,
    as_json: common.AsJson = False,
) -> None:
    """Measure a drafter: acceptance by position and by category, tokens per cycle for K = 1..16, and the fastest K."""
    from ..ops import place
    from ..train.tools import evaluate_drafter

    common.sampling(max_tokens=asked.max_tokens, temperature=asked.temperature)  # refused before anything is loaded
    where = str(place(load.device))
    kind = load.dtype or ("bfloat16" if where.startswith("cuda") else "float32")
    require(kind in ("float32", "bfloat16"), f"--dtype must be float32 or bfloat16 here, got {kind!r}")
    config = replace(asked, device=where, dtype=kind)
    result = evaluate_drafter(model, drafter, config=config, card=card, say=common.teller(as_json))
    if as_json:
        out.print_json(data=result)
        return
    accepted = result["acceptance_by_position"]
    by_category = result["by_category"].items()
    rows = [(str(k), f"{v:.3f}", f"{accepted[k - 1]:.3f}") for k, v in result["tokens_per_cycle"].items()]
    out.print(common.table(("K", "tokens per cycle", "accepted up to position K"), rows, ()))
    named = [(name, f"{value:.3f}") for name, value in sorted(by_category, key=lambda item: -item[1])]
    out.print(common.table(("category", "tokens per cycle at K = 4"), named, ("category",)))
    share = result["draft_step_share"]
    basis = "cycles timed on this machine" if result["costs_measured"] else "bytes read, not timed here"
    predicted = f"{result['predicted_speedup']:.2f} × plain" if result["best_k"] else "plain decoding is fastest"
    out.print(f"a draft step reads {share:.1%} of what a target step reads")
    out.print(f"predicted best K for one request: {result['best_k']} ({predicted}; {basis})")
    warn_of_training(result)


def warn_of_training(result: Row) -> None:
    """Says how many of the prompts the drafter was trained on."""
    count = result["trained_on"]
    total = result["answers"]
    advice = "measure on prompts that it has not seen"
    if count is None:
        if result["same_file"]:
            err.print(
                f"the drafter was trained on this file: on new prompts it is right less often; {advice}", style=WARN
            )
    elif count == 0:
        note("none of these prompts was in the drafter's training")
    elif "unseen" in result:
        unseen = result["unseen"]
        better = f"{unseen['tokens_per_cycle'][4]:.3f} tokens per cycle at K = 4"
        on_new = f"on the {unseen['answers']} others: {better}"
        err.print(f"the drafter was trained on {count} of these {total} prompts; {on_new}", style=WARN)
    else:
        err.print(f"the drafter was trained on these prompts: on new ones it is right less often; {advice}", style=WARN)


def export(
    drafter: Annotated[str, typer.Argument(help="A DFlash or EAGLE-3 drafter: a folder or a Hugging Face id.")],
    layout: Annotated[
        Literal["speculators", "vllm"],
        typer.Option("--to", help="speculators (vLLM reads it too), or vllm (z-lab's; SGLang reads it too)."),
    ],
    to: Annotated[Path, typer.Option("--out", metavar="DIR", help="A new folder for the drafter.")],
) -> None:
    """Write a DFlash or EAGLE-3 drafter in another layout. The weights stay as they are.

    Example: outrider export runs/mine/drafter --to vllm --out ./for-vllm
    """
    from ..train.tools import export_drafter, usage

    common.check_folder("--out", to)
    raw = export_drafter(drafter, to, layout)
    out.print(f"{to}: {raw['architectures'][0]}, the weights unchanged. To use it:")
    for command in usage(drafter, to, raw):
        out.print(f"  {command}")
