"""`outrider cluster-head`: give an existing drafter a clustered head."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..config import LoadSettings
from . import common
from .common import out


@common.loading("device")
def cluster_head(
    drafter: Annotated[str, typer.Argument(help="An MTP drafter's folder or id.")],
    to: Annotated[Path, typer.Option("--out", help="Where the drafter with the new head goes.")],
    clusters: Annotated[
        int | None, typer.Option(help="How many. Default: by the vocabulary (2048 for Gemma's).")
    ] = None,
    top: Annotated[
        int | None,
        typer.Option(help="Clusters scored a step. Default: by recall where --target is given, else 1/64 of them."),
    ] = None,
    target: Annotated[
        str | None, typer.Option(help="With --prompts: tune the centroids and choose top on this target's own answers.")
    ] = None,
    prompts: Annotated[Path | None, typer.Option(help="JSON lines of prompts for --target.")] = None,
    limit: Annotated[int | None, typer.Option(help="Use only so many prompts, spread over the file.")] = 256,
    recall: Annotated[float, typer.Option(help="With --target: find the full head's token this often.")] = 0.99,
    max_tokens: common.MaxTokens = 96,
    seed: common.Seed = 0,
    as_json: common.AsJson = False,
    *,
    load: LoadSettings,
) -> None:
    """Group a drafter's vocabulary so that a draft step scores only the best few clusters (the big Gemma drafters
    have no such head)."""

    from ..ops import place
    from ..train.tools import cluster_drafter

    common.check_folder("--out", to)
    where = str(place(load.device))
    result = cluster_drafter(
        drafter,
        to,
        clusters=clusters,
        top=top,
        target=target,
        prompts=prompts,
        limit=limit,
        recall=recall,
        max_new=max_tokens,
        seed=seed,
        device=where,
        say=common.teller(as_json),
    )
    if as_json:
        out.print_json(data=result)
    else:
        out.print(
            f"{result['clusters']} clusters, {result['top']} scored a step ({result['share']:.1%} of the vocabulary): "
            f"the head reads "
            f"{result['head_weights'] / 1e6:.1f} M weights instead of {result['full_head_weights'] / 1e6:.1f} M; "
            f"written to {to}"
        )
