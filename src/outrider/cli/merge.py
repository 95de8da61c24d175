"""`outrider merge`: a checkpoint with a LoRA adapter added into its weights."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from . import common


def merge(
    model: common.Model,
    adapter: Annotated[str, typer.Option(metavar="PATH", help="A PEFT folder, a .gguf adapter or a Hugging Face id.")],
    to: Annotated[Path, typer.Option("--out", metavar="DIR", help="A new folder for the merged checkpoint.")],
) -> None:
    """Write MODEL with a LoRA adapter added into its weights (float32 sums, then the stored dtype).

    The merged checkpoint runs on every executor at full speed. Its answers can differ in the last bits from those of
    the adapter next to the base, since the sum is rounded once more. A quantised MODEL is refused.

    Example: outrider merge org/model --adapter ./my-adapter --out ./merged
    """
    from ..weights.adapter import merge as run

    changed = run(model, adapter, to, common.note)
    common.out.print(f"{to}: {changed} tensors changed")
