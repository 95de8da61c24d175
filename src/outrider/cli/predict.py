"""`outrider predict`: memory, ms per token and the best K, before anything is downloaded."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from .. import svg
from ..bench import predict as model_of
from ..bench import predict_trees as trees
from ..bench import several
from ..bench.predict_images import image_costs
from ..models.builtin_configs import BUILTIN_CONFIGS
from ..models.vision_config import VisionConfig
from ..spec import acceptance_profile
from ..types import OutriderError
from ..weights.files import translate
from . import common
from .common import out
from .inspect import per_weight, read, read_drafter

WITHIN = 0.15


@dataclass(frozen=True, kw_only=True)
class PredictOptions:
    model: Annotated[
        str,
        typer.Argument(help="smollm2, a folder, a .gguf file, or a Hugging Face id. With --check: all if left out."),
    ] = ""
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
    tree: Annotated[int | None, "Also drafts that branch: trees of at most N tokens, 2..16."] = None
    second: Annotated[
        float | None, "--tree: how often a second guess is right where the best is wrong. Default: the card's, or 0.35."
    ] = None
    tensor_parallel: Annotated[int, "Over N GPUs; also shows 1, 2, 4 and 8, replicas, and many users."] = 1
    link: Annotated[
        str | None, "nvlink | nvlink3 | nvlink-bridge | pcie5 | pcie | pcie3. Default: the usual one of that GPU."
    ] = None
    bandwidth: Annotated[float | None, "GB/s: instead of the table's."] = None
    rate: Annotated[float | None, "Dense TFLOP/s: instead of the table's."] = None
    plot: Annotated[Path | None, "Write the roofline here (.svg)."] = None
    check: Annotated[
        Path | None,
        "Compare with measured runs (JSONL); exit code 1 where one of a single sequence at up to 4k is off "
        "by over 15 %.",
    ] = None
    as_json: common.AsJson = False


@common.taking(PredictOptions)
def predict(asked: PredictOptions) -> None:
    """Predict speed from config.json alone: memory needed, ms per token, best K, speed-up, and why it would not pay.

    Example: outrider predict google/gemma-4-31B-it --gpu h200 --accept 0.72
    """
    if asked.plot is not None:
        common.check_file("--plot", asked.plot, ".svg")
    if asked.gpu == "list":
        _list_machines()
        return
    if asked.tensor_parallel < 1:
        raise OutriderError(f"--tensor-parallel must be at least 1, got {asked.tensor_parallel}")
    by = several.link(asked.link, asked.gpu)
    if asked.batch < 1 or asked.context < 1 or (asked.bits is not None and asked.bits <= 0):
        raise OutriderError("--batch and --context must be at least 1, --bits positive")
    for option, given in (("--bandwidth", asked.bandwidth), ("--rate", asked.rate)):
        if given is not None and not given > 0:
            raise OutriderError(f"{option} must be more than 0, got {given:g}")
    on = _here(asked.model, asked.bits) if asked.gpu == "here" else model_of.machine(asked.gpu)
    on = replace(on, bandwidth=asked.bandwidth or on.bandwidth, rate=asked.rate or on.rate)
    if asked.check is not None:
        rows = [row for row in model_of.read_measured(asked.check) if asked.model in ("", row["model"])]
        if not rows:
            raise OutriderError(f"{asked.check} has no measured run of {asked.model}")
        setups = {name: _setup(replace(asked, model=name), on) for name in sorted({row["model"] for row in rows})}
        _check([model_of.check(setups[row["model"]], row) for row in rows], asked.as_json)
        return
    if not asked.model:
        raise OutriderError("predict what? name a model: outrider predict google/gemma-4-31B-it")
    setup = _setup(asked, on)
    if asked.tensor_parallel > 1:
        setup = replace(setup, several=several.Several(asked.tensor_parallel, by))
    known = _card(_drafter(asked)) if setup.drafter is not None else None
    accepted = _accepted(asked.accept, setup, known)
    data = model_of.predict(setup, accepted)
    points: list[trees.TreePoint] = []
    if asked.tree is None and asked.second is not None:
        raise OutriderError("--second says how often a tree's second guess is right: add --tree N")
    card = known.second if known is not None else None
    second = next(s for s in (asked.second, card, trees.SECOND) if s is not None)
    if asked.tree is not None:
        if setup.drafter is None and asked.accept is None:
            raise OutriderError(
                "--tree: no drafter is known for this model: name one with --drafter, or what it is worth with --accept"
            )
        points = trees.tree_points(setup, accepted, asked.tree, second)
    if asked.plot is not None:
        roof, knee, marks = model_of.roofline(setup)
        title, across = f"{asked.model} on {on.label}, batch {asked.batch}", "floating-point operations per byte moved"
        sides = ("memory-bound", knee, "compute-bound")
        text = svg.lines(title, across, "TFLOP/s", [("what the machine can do", roof)], marks=marks, divide=sides)
        asked.plot.write_text(text, encoding="utf-8")
    more = _several(setup, accepted, by) if asked.tensor_parallel > 1 else {}
    files = read(asked.model)[0]
    vision = translate(VisionConfig.from_hf, files) if files.gguf is None else None
    images = image_costs(vision, setup) if vision is not None else []
    if asked.as_json:
        branched = {"second": second, "trees": [vars(p) for p in points]} if points else {}
        print(json.dumps({"model": asked.model, **data, **branched, **more, "images": images}))
        return
    _show(asked.model, data)
    for cost in images:
        out.print(
            f"image   {cost['tokens']} tokens: tower {cost['tower_tflop']:.2f} TFLOP, about {cost['tower_ms']:.1f} ms; "
            f"in the prompt {cost['prompt_tflop']:.2f} TFLOP, about {cost['prompt_ms']:.1f} ms"
        )
    if points:
        _show_trees(points, second)
    if asked.tensor_parallel > 1:
        _show_several(more, asked.tensor_parallel, by)


def _setup(asked: PredictOptions, on: model_of.Hardware) -> model_of.Setup:
    _, config, kept = read(asked.model)
    where = _drafter(asked)
    if asked.drafter == "auto" and where is not None and where not in BUILTIN_CONFIGS and not Path(where).exists():
        where = None  # nothing is fetched for a prediction
    helper = read_drafter(where)[0] if where is not None else None
    if asked.bits is not None:
        return model_of.Setup(config, helper, on, asked.batch, asked.context, asked.bits / 8)
    size = per_weight(config, kept)
    return model_of.Setup(config, helper, on, asked.batch, asked.context, size, stored=kept.total)


def _drafter(asked: PredictOptions) -> str | None:
    from ..weights import hub

    named = None if asked.drafter == "none" else asked.drafter
    return hub.auto_drafter(asked.model)[0] if asked.drafter == "auto" else named


def _card(where: str | None) -> acceptance_profile.AcceptanceProfile | None:
    """The acceptance profile in the drafter's own folder."""
    from ..weights import hub
    from ..weights.files import fingerprint

    if where is None or not Path(where).exists():
        return None
    files = hub.resolve(where, "drafter")
    return acceptance_profile.read(Path(files.path), fingerprint(files))


def _accepted(
    accept: str | None, setup: model_of.Setup, known: acceptance_profile.AcceptanceProfile | None
) -> model_of.Acceptance:
    """The requested acceptance; else the drafter's profile; else a usual drafter's; none without a drafter."""
    if accept is not None or (setup.drafter is not None and known is None):
        return model_of.Acceptance.parse("0.72" if accept is None else accept)
    if known is None:
        return model_of.Acceptance.nothing(
            "no drafter is known for this model: n-gram matches alone, whose gain depends on the text"
        )
    return model_of.Acceptance.by_position(
        list(accumulate(known.accepted, mul)), f"the drafter's card ({known.judged} tokens judged)"
    )


def _here(model: str, bits: float | None) -> model_of.Hardware:
    from ..bench.here import here

    if bits is not None or not model:
        return here(bits / 8 if bits is not None else 2.0)
    _, config, kept = read(model)
    return here(per_weight(config, kept))


def _show(model: str, data: model_of.Prediction) -> None:
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
            cells = [f"{point[key]:.2f}" for key in ("cycle_ms", "tokens", "ms_per_token", "speedup")]  # type: ignore[literal-required]
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


def _show_trees(points: list[trees.TreePoint], second: float) -> None:
    best = max(points, key=lambda p: p.speedup)
    table = Table(
        "depth",
        "tokens verified",
        "cycle ms",
        "tokens per cycle",
        "ms per token",
        "speed-up",
        title=f"trees of a fixed shape, a next guess right in {second:.0%} where the best is wrong",
    )
    for p in points:
        cells = (str(p.nodes), f"{p.cycle_ms:.2f}", f"{p.tokens:.2f}", f"{p.ms_per_token:.2f}", f"{p.speedup:.2f}x")
        table.add_row(str(p.depth), *cells, style="bold" if p is best else "")
    out.print(table)


def _several(setup: model_of.Setup, accept: model_of.Acceptance, by: several.Link) -> dict[str, object]:
    return {
        "link": by.label,
        "layouts": model_of.layouts(setup, accept, by),
        "replicas": model_of.replicas(setup, accept, setup.gpus),
        "needs": [model_of.needed(setup, accept, by, users) for users in (100, 10_000)],
    }


def _show_several(more: dict[str, Any], gpus: int, by: several.Link) -> None:
    table = Table(
        "GPUs",
        "GB each",
        "plain ms",
        "best K",
        "ms per token",
        "tokens/s of all",
        title=f"one model over several, {by.label}",
    )
    for one in more["layouts"]:
        cells = (f"{one['plain_ms']:.2f}", str(one["best_k"]), f"{one['ms']:.2f}", f"{one['tokens_per_second']:.0f}")
        table.add_row(str(one["gpus"]), f"{one['memory_gb']:.1f}{'' if one['fits'] else ' (does not fit)'}", *cells)
    out.print(table)
    whole, shared = more["replicas"], next(one for one in more["layouts"] if one["gpus"] == gpus)
    if whole is None:
        out.print(f"{gpus} replicas instead: the model does not fit one GPU")
    else:
        better = "replicas win" if whole["tokens_per_second"] > shared["tokens_per_second"] else "dividing wins"
        out.print(
            f"{gpus} replicas instead: {whole['ms']:.2f} ms per token, {whole['tokens_per_second']:.0f} tokens/s of "
            f"all: {better}"
        )
    for users, need in zip((100, 10_000), more["needs"]):
        said = "cannot be served at 50 ms per token"
        if need is not None:
            said = (
                f"{need['gpus']} GPUs: {need['replicas']} replicas of {need['each']}, {need['batch']} users each, "
                f"{need['ms']:.1f} ms per token"
            )
        out.print(f"{users:,} users at once: {said}")


def _list_machines() -> None:
    table = Table("name", "machine", "GB/s", "TFLOP/s", "GB")
    for name, on in model_of.MACHINES.items():
        table.add_row(name, on.label, f"{on.bandwidth:g}", f"{on.rate:g}", f"{on.memory:g}")
    out.print(table)


def _check(found: list[model_of.Check], as_json: bool) -> None:
    if as_json:
        print(json.dumps([{**vars(c), "off": round(c.off, 4)} for c in found]))
    else:
        table = Table("run", "predicted ms", "measured ms", "off")
        for one in found:
            off = f"{100 * one.off:+.1f} %" if one.judged else f"({100 * one.off:+.1f} %)"
            table.add_row(one.what, f"{one.predicted_ms:.2f}", f"{one.measured_ms:.2f}", off)
        out.print(table)
        if not all(one.judged for one in found):
            out.print(f"in brackets: batches and contexts beyond {model_of.JUDGED_CONTEXT}, shown but not judged")
    if any(one.judged and abs(one.off) > WITHIN for one in found):
        raise typer.Exit(1)
