"""`outrider predict`: memory, ms per token and the best K, before anything is downloaded."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from ..bench import predict as model_of
from ..models.block_config import is_block
from ..models.builtin_configs import BUILTIN_CONFIGS
from ..models.config import DrafterConfig, ForeignDict
from ..models.vision_config import VisionConfig
from ..spec import acceptance_profile
from ..types import OutriderError, require
from ..weights.files import translate
from . import common
from .common import out
from .inspect import per_weight, read


@dataclass(frozen=True, kw_only=True)
class PredictOptions:
    model: common.Model = ""
    gpu: Annotated[
        str, typer.Option("--gpu", "--machine", help="One of the table (--gpu list), or here: measure this machine.")
    ] = "h200"
    accept: Annotated[
        str | None,
        "Share of drafted tokens accepted at K=4 (0.72), at another K (0.58@8), by position. Default: the "
        "drafter's card, or 0.72.",
    ] = None
    drafter: Annotated[
        str, "auto | none (n-gram: drafting takes no time; needs --accept) | a drafter's folder or id."
    ] = "auto"
    batch: Annotated[int, "Sequences at once."] = 1
    context: Annotated[int, "Tokens before the one being decoded."] = 1024
    bits: Annotated[float | None, "Bits a weight. Default: as the checkpoint stores it."] = None
    as_json: common.AsJson = False


@common.taking(PredictOptions)
def predict(asked: PredictOptions) -> None:
    """Predict speed from config.json alone: memory needed, ms per token, best K, speed-up, and why it would not pay.

    Example: outrider predict google/gemma-4-31B-it --gpu h200 --accept 0.72
    """
    if asked.gpu == "list":
        _list_machines()
        return
    if asked.batch < 1 or asked.context < 1 or (asked.bits is not None and asked.bits <= 0):
        raise OutriderError("--batch and --context must be at least 1, --bits positive")
    require(asked.model != "", "predict what? name a model: outrider predict google/gemma-4-31B-it")
    files, config, kept = read(asked.model)
    size = per_weight(config, kept) if asked.bits is None else asked.bits / 8
    if asked.gpu == "here":
        from ..bench.here import here

        on = here(size)
    else:
        on = model_of.machine(asked.gpu)
    helper, known = _drafter(asked)
    stored = kept.total if asked.bits is None else None
    setup = model_of.Setup(config, helper, on, asked.batch, asked.context, size, stored=stored)
    data = model_of.predict(setup, _accepted(asked.accept, setup, known))
    vision = translate(VisionConfig.from_hf, files) if files.gguf is None else None
    images = model_of.image_costs(vision, setup) if vision is not None else []
    if asked.as_json:
        print(json.dumps({"model": asked.model, **data, "images": [vars(cost) for cost in images]}))
        return
    _show(asked.model, data)
    for cost in images:
        out.print(
            f"image   {cost.tokens} tokens: tower {cost.tower_tflop:.2f} TFLOP, about {cost.tower_ms:.1f} ms; "
            f"in the prompt {cost.prompt_tflop:.2f} TFLOP, about {cost.prompt_ms:.1f} ms"
        )


def _drafter(asked: PredictOptions) -> tuple[DrafterConfig | None, acceptance_profile.AcceptanceProfile | None]:
    """The drafter's configuration and, where it lies on this disk, its acceptance profile. Nothing is fetched."""
    from ..weights import hub
    from ..weights.files import fingerprint

    where = hub.auto_drafter(asked.model)[0] if asked.drafter == "auto" else asked.drafter
    local = where is not None and Path(where).exists()
    if where is None or where == "none" or (asked.drafter == "auto" and where not in BUILTIN_CONFIGS and not local):
        return None, None
    files = hub.resolve(where, "drafter", weights=False)
    if is_block(files.config):
        raise OutriderError(f"{where}: predictions know MTP drafters only; --drafter none predicts plain decoding")
    known = acceptance_profile.read(Path(files.path), fingerprint(files)) if local else None
    return translate(DrafterConfig.from_hf, files), known


def _accepted(
    accept: str | None, setup: model_of.Setup, known: acceptance_profile.AcceptanceProfile | None
) -> model_of.Acceptance:
    """The requested acceptance; else the drafter's profile; else a usual drafter's; none without a drafter."""
    if accept is not None or (setup.drafter is not None and known is None):
        return model_of.Acceptance.parse("0.72" if accept is None else accept)
    if known is None:
        said = "no drafter is known for this model: n-gram matches alone, whose gain depends on the text"
        return model_of.Acceptance.by_position([0.0], said)
    return model_of.Acceptance.by_position(
        list(accumulate(known.accepted, mul)), f"the drafter's card ({known.judged} tokens judged)"
    )


def _show(model: str, data: ForeignDict) -> None:
    need, parts = data["memory_gb"], data["plain_parts_ms"]
    out.print(
        Text.assemble((model, "bold"), f" on {data['machine']}, batch {data['batch']}, context {data['context']}")
    )
    fits = ("" if data["fits"] else " (does not fit)", "bold red")
    held = f": weights {need['weights']:.1f}, drafter {need['drafter']:.2f}, K/V {need['kv']:.2f}"
    out.print(Text.assemble(f"memory  {need['total']:.1f} GB", fits, held))
    split = ", ".join(f"{name} {ms:.2f}" for name, ms in parts.items())
    out.print(f"plain   {data['plain_ms']:.2f} ms per token ({split})")
    out.print(f"assumed {data['acceptance']}")
    if data["drafter"] is None and data["best_k"] > 0:
        out.print(
            Text.assemble(
                ("no drafter is known", "bold"), ": this is what one that takes no time would bring at that acceptance"
            )
        )
    table = Table("K", "cycle ms", "tokens per cycle", "ms per token", "speed-up")
    shown = (0, 1, 2, 4, 6, 8, 12, 16) if data["best_k"] or data["drafter"] else (0,)
    for point in data["points"]:
        if point["k"] in (*shown, data["best_k"]):
            columns = ("cycle_ms", "tokens", "ms_per_token", "speedup")
            cells = [f"{point[key]:.2f}" for key in columns]
            table.add_row(
                str(point["k"]), *cells[:3], f"{cells[3]}x", style="bold" if point["k"] == data["best_k"] else ""
            )
    out.print(table)
    if data["drafter"] is None and data["best_k"] == 0:
        out.print(
            "no speed-up is promised without a drafter: --accept 0.72 shows what one as good as that brings, "
            "`outrider train` makes one"
        )
        return
    if data["best_k"] == 0:
        out.print("speculation will not pay here:")
    elif data["why"]:
        out.print(f"K={data['best_k']} brings only {data['speedup']:.2f}x:")
    for reason in data["why"]:
        out.print(f"- {reason}")


def _list_machines() -> None:
    table = Table("name", "machine", "GB/s", "TFLOP/s", "GB")
    for name, on in model_of.MACHINES.items():
        table.add_row(name, on.label, f"{on.bandwidth:g}", f"{on.rate:g}", f"{on.memory:g}")
    out.print(table)
