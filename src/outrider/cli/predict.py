"""`outrider predict`: memory, ms per token and the best K, before anything is downloaded."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from ..bench import machines
from ..bench import predict as model_of
from ..models.audio_config import MAX_SECONDS, AudioConfig
from ..models.block_config import is_block
from ..models.builtin_configs import BUILTIN_CONFIGS
from ..models.config import DrafterConfig, ForeignDict
from ..models.vision_config import VisionConfig
from ..spec import acceptance
from ..types import OutriderError, require
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
    bits: Annotated[float | None, "Bits per weight. Default: as stored in the checkpoint."] = None
    as_json: common.AsJson = False


@common.taking(PredictOptions)
def predict(asked: PredictOptions) -> None:
    """Predict speed from config.json alone: memory needed, ms per token, best K, speed-up, and why it would not pay.

    Example: outrider predict google/gemma-4-31B-it --gpu h200 --accept 0.72
    """
    if asked.gpu == "list":
        table = machines.MACHINES.items()
        rows = [(name, on.label, *(f"{v:g}" for v in (on.bandwidth, on.rate, on.memory))) for name, on in table]
        out.print(common.table(("name", "machine", "GB/s", "TFLOP/s", "GB"), rows, ("name", "machine")))
        return
    sensible = asked.batch >= 1 and asked.context >= 1 and (asked.bits is None or asked.bits > 0)
    require(sensible, "--batch and --context must be at least 1, --bits positive")
    require(asked.model != "", "predict what? name a model: outrider predict google/gemma-4-31B-it")
    from ..weights.files import translate  # needs torch, which --help does not

    files, config, kept = read(asked.model)
    size = per_weight(config, kept) if asked.bits is None else asked.bits / 8
    if asked.gpu == "here":
        from ..bench.here import here

        on = here(size)
    else:
        on = machines.machine(asked.gpu)
    helper, known = _drafter(asked)
    stored = kept.total if asked.bits is None else None
    setup = model_of.Setup(config, helper, on, asked.batch, asked.context, size, stored)
    data = model_of.predict(setup, _accepted(asked.accept, setup, known))
    vision = translate(VisionConfig.from_hf, files) if files.gguf is None else None
    audio = translate(AudioConfig.from_hf, files) if files.gguf is None else None
    images = model_of.image_costs(vision, setup) if vision is not None else []
    clip = model_of.audio_cost(audio, setup) if audio is not None else None
    if asked.as_json:
        of_media = {"images": [vars(cost) for cost in images], "sound": None if clip is None else vars(clip)}
        print(json.dumps({"model": asked.model, **data, **of_media}))
        return
    _show(asked.model, data)
    for cost in images:
        _show_cost("image", f"{cost.tokens} tokens", cost)
    if clip is not None:
        _show_cost("sound", f"{MAX_SECONDS:g} s, {clip.tokens} tokens", clip)


def _show_cost(title: str, size: str, cost: model_of.SoftCost) -> None:
    tower = f"tower {cost.tower_tflop:.2f} TFLOP, about {cost.tower_ms:.1f} ms"
    prompt = f"in the prompt {cost.prompt_tflop:.2f} TFLOP, about {cost.prompt_ms:.1f} ms"
    out.print(f"{title}   {size}: {tower}; {prompt}")


def _drafter(asked: PredictOptions) -> tuple[DrafterConfig | None, acceptance.AcceptanceProfile | None]:
    """The drafter's configuration and, where it lies on this disk, its acceptance profile. Nothing is fetched."""
    from ..weights import hub
    from ..weights.files import fingerprint, translate

    where = hub.auto_drafter(asked.model)[0] if asked.drafter == "auto" else asked.drafter
    local = where is not None and Path(where).exists()
    if where is None or where == "none" or (asked.drafter == "auto" and where not in BUILTIN_CONFIGS and not local):
        return None, None
    files = hub.resolve(where, "drafter", weights=False)
    if is_block(files.config):
        raise OutriderError(f"{where}: predictions know MTP drafters only; --drafter none predicts plain decoding")
    known = acceptance.read(Path(files.path), fingerprint(files)) if local else None
    return translate(DrafterConfig.from_hf, files), known


def _accepted(
    accept: str | None, setup: model_of.Setup, known: acceptance.AcceptanceProfile | None
) -> model_of.Acceptance:
    """The requested acceptance; else the drafter's profile; else a usual drafter's; none without a drafter."""
    if accept is not None or (setup.drafter is not None and known is None):
        return model_of.Acceptance.parse("0.72" if accept is None else accept)
    if known is None:
        said = "no drafter is known for this model: n-gram matches alone, whose gain depends on the text"
        return model_of.Acceptance.by_position([0.0], said)
    said = f"the drafter's card ({known.judged} tokens judged)"
    return model_of.Acceptance.by_position(list(accumulate(known.accepted, mul)), said)


def _show(model: str, data: ForeignDict) -> None:
    need = data["memory_gb"]
    best = data["best_k"]
    where = f" on {data['machine']}, batch {data['batch']}, context {data['context']}"
    out.print(Text.assemble((model, "bold"), where))
    fits = ("" if data["fits"] else " (does not fit)", "bold red")
    held = f": weights {need['weights']:.1f}, drafter {need['drafter']:.2f}, K/V {need['kv']:.2f}"
    out.print(Text.assemble(f"memory  {need['total']:.1f} GB", fits, held))
    split = ", ".join(f"{name} {ms:.2f}" for name, ms in data["plain_parts_ms"].items())
    out.print(f"plain   {data['plain_ms']:.2f} ms per token ({split})")
    out.print(f"assumed {data['acceptance']}")
    out.print(f"basis   {data['basis']}")
    if data["drafter"] is None and best > 0:
        brings = ": this is what one that takes no time would bring at that acceptance"
        out.print(Text.assemble(("no drafter is known", "bold"), brings))
    rows = []
    for point in data["points"]:
        if point["k"] in ((0, 1, 2, 4, 6, 8, 12, 16, best) if best or data["drafter"] else (0,)):
            times = [f"{point[key]:.2f}" for key in ("cycle_ms", "tokens", "ms_per_token")]
            style = "bold" if point["k"] == best else ""
            rows.append([Text(cell, style) for cell in (str(point["k"]), *times, f"{point['speedup']:.2f}x")])
    out.print(common.table(("K", "cycle ms", "tokens per cycle", "ms per token", "speed-up"), rows, ()))
    if data["drafter"] is None and best == 0:
        shows = "--accept 0.72 shows what one as good as that brings, `outrider train` makes one"
        out.print(f"no speed-up is promised without a drafter: {shows}")
        return
    if best == 0:
        out.print("speculation will not pay here:")
    elif data["why"]:
        out.print(f"K={best} brings only {data['speedup']:.2f}x:")
    for reason in data["why"]:
        out.print(f"- {reason}")
