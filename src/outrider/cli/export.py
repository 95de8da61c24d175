"""`outrider export`: a block drafter in a layout that other engines read."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from . import common


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
    from ..train.tools import export_drafter

    common.check_folder("--out", to)
    raw = export_drafter(drafter, to, layout)
    common.out.print(f"{to}: {raw['architectures'][0]}")
