"""`outrider cluster-head`: give an existing drafter a clustered head."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from ..config import LoadSettings
from . import common
from .common import out


@dataclass(frozen=True, kw_only=True)
class ClusterHeadOptions:
    drafter: Annotated[str, typer.Argument(help="An MTP drafter's folder or id.")]
    to: Annotated[Path, typer.Option("--out", help="Where the drafter with the new head goes.")]
    clusters: Annotated[int | None, "How many. Default: by the vocabulary (2048 for Gemma's)."] = None
    top: Annotated[
        int | None, "Clusters scored a step. Default: by recall where --target is given, else 1/64 of them."
    ] = None
    target: Annotated[str | None, "With --prompts: tune the centroids and choose top on this target's own answers."] = (
        None
    )
    prompts: Annotated[Path | None, "JSON lines of prompts for --target."] = None
    limit: Annotated[int | None, "Use only N prompts, spread over the file."] = 256
    recall: Annotated[float, "With --target: find the full head's token this often."] = 0.99
    max_tokens: common.MaxTokens = 96
    seed: common.Seed = 0
    as_json: common.AsJson = False


@common.loading("device")
@common.taking(ClusterHeadOptions)
def cluster_head(asked: ClusterHeadOptions, load: LoadSettings) -> None:
    """Group a drafter's vocabulary so that a draft step scores only the best few clusters (the big Gemma drafters
    have no such head)."""
    from ..ops import place
    from ..train.tools import ClusterSettings, EvalRequest, cluster_drafter

    common.check_folder("--out", asked.to)
    where = str(place(load.device))
    prompts = None if asked.prompts is None else EvalRequest(asked.prompts, asked.limit, asked.max_tokens, device=where)
    wanted = ClusterSettings(asked.clusters, asked.top, asked.recall, asked.seed)
    result = cluster_drafter(asked.drafter, asked.to, wanted, asked.target or "", prompts, where)
    if asked.as_json:
        out.print_json(data=result)
    else:
        out.print(
            f"{result['clusters']} clusters, {result['top']} scored a step ({result['share']:.1%} of the vocabulary): "
            f"the head reads "
            f"{result['head_weights'] / 1e6:.1f} M weights instead of {result['full_head_weights'] / 1e6:.1f} M; "
            f"written to {asked.to}"
        )
