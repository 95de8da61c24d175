"""`outrider predict`: memory, ms per token and the best K, before anything is downloaded."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from ..bench import machines
from ..bench import predict as model_of
from ..config import LoadSettings
from ..models.audio_config import MAX_SECONDS
from ..models.block_config import is_block
from ..models.config import DrafterConfig, ForeignDict
from ..models.inspect import kv_bytes, model_size
from ..spec import acceptance
from ..types import OutriderError, require
from . import common
from .common import out

if TYPE_CHECKING:
    from .memory_plan import MemoryPlan


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
    batch: Annotated[int, "Sequences at once."] = 1
    max_concurrent: common.PlannedSequences = None
    context: Annotated[int, "Tokens before the one being decoded."] = 1024
    as_json: common.AsJson = False


@common.loading(*common.PLANNING)
@common.taking(PredictOptions)
def predict(asked: PredictOptions, load: LoadSettings) -> None:
    """Predict a model's speed on a machine before any download: ms per token, best K, speed-up, memory.

    Memory is planned as `outrider serve` plans it with the same options. --drafter none with --accept predicts n-gram
    drafts, which take no time.

    Example: outrider predict google/gemma-4-31B-it --gpu h200 --accept 0.72
    """
    if asked.gpu == "list":
        _list_machines()
        return
    require(asked.batch >= 1 and asked.context >= 1, "--batch and --context must be at least 1")
    require(asked.model != "", "predict what? name a model: outrider predict google/gemma-4-31B-it")
    from ..weights.audio import audio_config  # these need torch, which --help does not
    from ..weights.vision import vision_config
    from .model_facts import loaded_weights, plan_of, read, with_sequences

    files, config, stored = read(asked.model)
    on = _machine(asked.gpu, loaded_weights(config, stored, quantize=None, on=None).token / model_size(config).active)
    if load.quantize is not None and not on.is_cpu:
        files, config, stored = read(asked.model, load.quantize)
    weights = loaded_weights(config, stored, quantize=load.quantize, on=on)
    helper, profile = _drafter(asked.model, load)
    setup = model_of.Setup(
        target=config,
        drafter=helper,
        on=on,
        batch=asked.batch,
        context=asked.context,
        weight_bytes=weights.token / model_size(config).active,
        kv_item=1.0 if load.engine.kv_dtype in ("fp8", "int8") else 2.0,
        gpus=load.tensor_parallel,
    )
    plan = plan_of(asked.model, with_sequences(load, asked.max_concurrent, on, least=asked.batch), on)
    data = model_of.predict(setup, _accepted(asked.accept, setup, profile)) | _memory(plan, setup)
    vision = vision_config(files) if load.vision else None
    audio = audio_config(files) if load.audio else None
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


def _list_machines() -> None:
    figures = [(name, on.label, on.bandwidth, on.rate, on.memory) for name, on in machines.MACHINES.items()]
    rows = [(name, label, f"{bandwidth:g}", f"{rate:g}", f"{gb:g}") for name, label, bandwidth, rate, gb in figures]
    out.print(common.table(("name", "machine", "GB/s", "TFLOP/s", "GB"), rows, ("name", "machine")))


def _machine(name: str, weight_bytes: float) -> machines.Hardware:
    """A machine of the table, or this machine, measured with weights of this size."""
    if name != "here":
        return machines.machine(name)
    from ..bench.here import here
    from ..engine.machine_load import OtherLoad

    others = OtherLoad()
    measured = here(weight_bytes)
    common.note_of(others)
    return measured


def _memory(plan: MemoryPlan, setup: model_of.Setup) -> ForeignDict:
    """Memory on one card, and if this batch and context fit the plan of `serve`."""
    kv = setup.batch * kv_bytes(setup.target, setup.context, setup.kv_item) / setup.gpus
    need = {"weights": plan.weights, "drafter": plan.drafter, "media": plan.media, "kv": kv}
    need["total"] = sum(need.values())
    fits = plan.context >= setup.context and plan.tokens >= setup.batch * setup.context
    return {
        "memory_gb": {name: nbytes / 1e9 for name, nbytes in need.items()},
        "fits": fits,
        "max_context": plan.context,
    }


def _show_cost(title: str, size: str, cost: model_of.SoftCost) -> None:
    tower = f"tower {cost.tower_tflop:.2f} TFLOP, about {duration(cost.tower_ms)}"
    prompt = f"in the prompt {cost.prompt_tflop:.2f} TFLOP, about {duration(cost.prompt_ms)}"
    out.print(f"{title}   {size}: {tower}; {prompt}")


def duration(ms: float) -> str:
    return f"{ms:.1f} ms" if ms < 1000 else f"{ms / 1000:.3g} s"


def _drafter(model: str, load: LoadSettings) -> tuple[DrafterConfig | None, acceptance.AcceptanceProfile | None]:
    """The drafter's configuration and, if on this disk, its acceptance profile. Nothing is downloaded."""
    from ..weights import hub
    from ..weights.files import fingerprint, translate
    from .model_facts import drafter_names

    names = drafter_names(hub.resolve(model, weights=False), load)
    if not names:
        return None, None
    name = names[0]
    files = hub.resolve(name, "drafter", weights=False)
    if is_block(files.config):
        raise OutriderError(f"{name}: predictions know MTP drafters only; --drafter none predicts plain decoding")
    profile = acceptance.read(Path(files.path), fingerprint(files)) if Path(name).exists() else None
    return translate(DrafterConfig.from_hf, files), profile


def _accepted(
    accept: str | None, setup: model_of.Setup, known: acceptance.AcceptanceProfile | None
) -> model_of.Acceptance:
    """Acceptance: as requested, else from the drafter's profile, else a typical one; none without a drafter."""
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
    fits = ("" if data["fits"] else " (does not fit: `outrider inspect MODEL --gpu CARD` names what would)", "bold red")
    parts = f"weights {need['weights']:.1f}, drafter {need['drafter']:.2f}, images and sound {need['media']:.2f}"
    out.print(Text.assemble(f"memory  {need['total']:.1f} GB", fits, f": {parts}, K/V {need['kv']:.2f}"))
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
