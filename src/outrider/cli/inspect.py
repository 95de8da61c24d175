"""`outrider inspect`: a model's layers, size and cost, from its configuration alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Annotated

from rich.table import Table
from rich.text import Text

from ..bench.machines import machine
from ..config import LoadSettings
from ..models.block_config import BlockConfig, is_block
from ..models.config import DrafterConfig, ForeignDict, ModelConfig
from ..models.inspect import context_that_fits, drafter_report, drafter_size, model_size, report
from ..types import OutriderError, require
from . import common
from .common import out

if TYPE_CHECKING:
    from ..weights.files import Files
    from ..weights.sizes import StoredSize

VERDICT = {True: ("fits", "green"), False: ("does not fit", "red")}


@dataclass(frozen=True, kw_only=True)
class InspectOptions:
    model: common.Model
    drafter: Annotated[
        list[str] | None,
        "Does this drafter (MTP, DFlash, DSpark, EAGLE-3, draft:MODEL; or two) fit, and what does a step cost?",
    ] = None
    context: Annotated[int, "Context length for which FLOP per byte are computed."] = 1024
    gpu: Annotated[str | None, "Does it fit this card, and with how much context? rtx4090, h200, …"] = None
    quality: Annotated[bool, "Load it on the CPU and measure what rounding costs there."] = False
    quantize: Annotated[
        str | None,
        "Of a dense checkpoint rounded to int8 | int4: --quality. With --gpu: what the card then holds; also fp8.",
    ] = None
    as_json: common.AsJson = False


@common.loading("kv_dtype", "vision", "audio")
@common.taking(InspectOptions)
def inspect(asked: InspectOptions, load: LoadSettings) -> None:
    """Parameters, layers, bytes for a token, K/V, arithmetic intensity, and whether a drafter fits. No weights are
    needed.

    Example: outrider inspect google/gemma-4-E2B-it --gpu rtx4090

    --quality loads the model as the CPU kernels hold it (--quantize int8 | int4 for dense checkpoints) and again in
    float32, and prints both perplexities on a short text and how far the logits are apart. With --gpu and --quantize
    int8 | int4 | fp8 it is rounded as a GPU rounds it; the measuring is still done here, without one."""
    from ..weights.audio import audio_config
    from ..weights.repos import companion
    from ..weights.vision import vision_config

    kv_dtype = load.engine.kv_dtype
    require(asked.context >= 1, f"--context must be at least 1, got {asked.context}")
    known = ("int8", "int4") if asked.gpu is None else ("int8", "int4", "fp8")
    takes = f"{', '.join(known[:-1])} or {known[-1]}{' without --gpu' if asked.gpu is None else ''}"
    require(asked.quantize in (None, *known), f"--quantize takes {takes}, got {asked.quantize!r}")
    files, config, kept = read(asked.model, asked.quantize if asked.gpu is not None else None)
    named = asked.drafter or []
    if len(named) > 1:
        LoadSettings(drafter=named)  # checks them
    require(asked.gpu is None or kv_dtype != "int8", "--kv-dtype int8 is for CPUs: with --gpu say fp8, or leave it out")
    # int8: each row of a head has a factor
    kv_item = {"fp8": 1.0, "int8": 1 + 4 / config.layers[0].attn.head_dim}.get(kv_dtype, 2.0)
    size = per_weight(config, kept)
    data = {"model": asked.model, **report(config, size, asked.context, kept.total, kv_item)}
    data["formats"] = {name: round(nbytes) for name, nbytes in kept.formats.items()}
    mmproj = companion(files.path, "mmproj") if files.gguf is not None else None
    data["mmproj"] = None if mmproj is None else str(mmproj)
    vision = vision_config(files) if load.vision else None
    data["vision_bytes"] = 0 if vision is None else vision.nbytes()
    audio = audio_config(files) if load.audio else None
    data["audio_bytes"] = 0 if audio is None else audio.nbytes()
    beside = data["vision_bytes"] + data["audio_bytes"]  # bytes that are loaded with the model
    helpers = [drafter_of(name, files, config, data["bytes_per_token"], kv_item) for name in named]
    pair = len(helpers) != 2 or sum("taps" in about for about, _ in helpers) == 1
    require(pair, "two of --drafter are an MTP and a block drafter (DFlash, DSpark, EAGLE-3)")
    for field, name, (about, nbytes) in zip(("drafter", "second_drafter"), named, helpers):
        data[field] = {"name": name, **about}
        beside += nbytes
    if asked.gpu is not None:
        data["gpu"] = on_card(asked.gpu, config, kept.gpu, beside, kv_item)
    if asked.quality or (asked.quantize is not None and asked.gpu is None):
        from ..bench.rounding import measure

        found = measure(asked.model, asked.quantize, kv_dtype=kv_dtype, gpu=None not in (asked.gpu, asked.quantize))
        held = {"held": asked.quantize or "as stored", "kv": kv_dtype, "line": found.line()}
        data["rounding"] = {**held, **asdict(found)}
    if asked.as_json:
        print(json.dumps(data))
    else:
        show(data)


def on_card(gpu: str, config: ModelConfig, weights: float, other_bytes: float, kv_item: float) -> dict[str, object]:
    """Whether the weights, and those loaded with them, fit on a GPU, and how much context then fits."""
    on = machine(gpu)
    tokens = context_that_fits(config, on.memory * 1e9, weights + other_bytes, kv_item)
    about = {"name": on.label, "memory": round(on.memory * 1e9), "weights": round(weights)}
    return {**about, "fits": tokens > 0, "context": tokens}


def read(name: str, quantize: str | None = None) -> tuple[Files, ModelConfig, StoredSize]:
    """A model's files and configuration, and the size of its weights (quantize: the GPU's format for dense matrices).
    Gemma 4's configurations are built in: nothing is downloaded for them."""
    from ..weights import hub
    from ..weights.files import model_config
    from ..weights.sizes import stored_size

    files = hub.resolve(name, weights=False)
    config = model_config(files)
    return files, config, stored_size(files, config, quantize)


def drafter_of(
    name: str, target_files: Files, target: ModelConfig, token: float, kv_item: float
) -> tuple[ForeignDict, float]:
    """`show`'s report on a drafter, and the bytes of its weights. token: bytes that a token of the target reads. A step
    of a block drafter drafts all tokens (EAGLE-3's one); without a head it reads the target's as well."""
    from ..weights import hub
    from ..weights.files import check_draft_model, translate
    from ..weights.sizes import stored_size

    if name.startswith("draft:"):
        files, model, kept = read(name[6:])
        reason = None
        try:
            check_draft_model(target_files, files)
        except OutriderError as error:
            reason = str(error)
        return drafter_report(model.model_type, reason, model_size(model).total, kept.token, token), kept.total
    files = hub.resolve(name, "drafter", weights=False)
    if is_block(files.config):
        block = translate(BlockConfig.from_hf, files)
        reason = block.misfit(target)
        block = replace(block, taps=block.tapped(target))
        kept = stored_size(files, block)
        kv = sum(2 * own.attn.kv_heads * own.attn.head_dim for own in block.layers)
        about: ForeignDict = {
            "layout": block.layout,
            "taps": list(block.taps or ()),
            "block": block.block,
            "layers": len(block.layers),
            "kv_bytes_per_token": round(kv * kv_item),
            "draft_tokens": block.max_tokens,
        }
        return drafter_report(block.kind, reason, kept.parameters, kept.token, token, **about), kept.total
    config = translate(DrafterConfig.from_hf, files)
    reason = config.misfit(target)
    size = drafter_size(config)
    kept = stored_size(files, config)
    about = {
        "reads": list(config.read_layers(target)) if reason is None else None,
        "clusters": config.clusters,
        "clusters_scored": config.cluster_top,
        "draft_tokens": config.draft_tokens,
    }
    step = size.step * (kept.total / kept.parameters)
    return drafter_report(config.model_type, reason, size.total, step, token, **about), kept.total


def per_weight(config: ModelConfig, size: StoredSize) -> float:
    """Average bytes per weight that a token reads."""
    return size.token / model_size(config).active


def amount(n: float, unit: str = "") -> str:
    for size, name in ((1e12, "T"), (1e9, "G" if unit else "B"), (1e6, "M"), (1e3, "k")):
        if n >= size:
            return f"{n / size:.3g} {name}{unit}"
    return f"{n:.3g} {unit}".rstrip()


def show(data: ForeignDict) -> None:
    about = f"  {data['model_type']}, vocabulary {data['vocabulary']:,}, hidden {data['hidden']}"
    out.print(Text.assemble((data["model"], "bold"), about))
    facts = Table.grid(padding=(0, 2))
    for row in facts_of(data):
        facts.add_row(*row)
    out.print(facts)

    routed = any(row["experts"] for row in data["layers"])
    heads = ("layers", "type", "q/kv", "size", "window", "K/V", "MLP", *(["experts"] if routed else []), "each")
    cells = []
    for _, group in groupby(data["layers"], key=lambda row: {**row, "index": None, "kv_from": owner(row)}):
        rows = list(group)
        row = rows[0]
        last = rows[-1]
        span = str(row["index"]) if row is last else f"{row['index']}–{last['index']}"
        attention = (f"{row['heads']}/{row['kv_heads']}", str(row["head_dim"]), str(row["window"] or "–"), owner(row))
        experts = [f"{row['experts_per_token']} of {row['experts']}"] if routed else []
        cells.append((span, row["type"], *attention, str(row["intermediate"]), *experts, amount(row["parameters"])))
    out.print(common.table(heads, cells, ("layers", "type", "K/V")))


def owner(row: ForeignDict) -> str:
    """Whose K/V a layer reads, in words."""
    if row["kv_from"] != row["index"]:
        return f"of layer {row['kv_from']}"
    return "own, v = k" if row["k_eq_v"] else "own"


def facts_of(data: ForeignDict) -> Iterator[tuple[str, str | Text]]:
    """What is known of a model, line by line: a title and a text."""
    size = lambda nbytes: amount(nbytes, "B")  # noqa: E731
    parts = [f"{k.replace('_', ' ')} {amount(n)}" for k, n in data["parameters_by_part"].items() if n >= 1e5]
    yield "parameters", amount(data["parameters"]) + (f"  ({', '.join(parts)})" if parts else "")
    read = f"{amount(data['active_parameters'])} parameters, {size(data['bytes_per_token'])}"
    yield "read for a token", f"{read} at {data['bits_per_weight']:g} bits"
    whole = f"{size(data['kv_bytes_full_context'])} for all {data['max_context']:,} positions"
    yield "K/V", f"{size(data['kv_bytes_per_token'])} a token, {whole}"
    each = data["intensity"]
    decode = " · ".join(f"{k.removeprefix('decode_')}: {v:.1f}" for k, v in each.items() if k != "prefill")
    context = f"(at {data['context']} tokens of context)"
    yield "FLOP a byte", f"prefill {each['prefill']:.0f}; tokens at once {decode}  {context}"
    for drafter in filter(None, (data["drafter"], data.get("second_drafter"))):
        why = "" if drafter["fits"] else f": {drafter['reason']}"
        seen = drafter["reads"] if drafter["fits"] else None
        reads = f", reads the K/V of layers {', '.join(map(str, seen))}" if seen else ""
        head = f", scores {drafter['clusters_scored']} of {drafter['clusters']} clusters" if drafter["clusters"] else ""
        yield "drafter", Text.assemble(f"{drafter['name']} ", VERDICT[drafter["fits"]], why)
        step = f"{size(drafter['bytes_per_step'])} a step ({100 * drafter['share_of_target']:.2g} % of a target pass)"
        yield "", f"{amount(drafter['parameters'])} parameters, {step}{reads}{head}"
        if "taps" in drafter:
            kind = f"{drafter['model_type']} ({drafter['layout']}), {drafter['layers']} layers"
            taps = f"reads the target after layers {', '.join(map(str, drafter['taps']))}"
            kv = f"its own K/V take {size(drafter['kv_bytes_per_token'])} a token"
            yield "", f"{kind}, up to {drafter['draft_tokens']} tokens a draft; {taps}; {kv}"
    kinds = {name: nbytes for name, nbytes in data["formats"].items() if nbytes >= 0.001 * data["bytes"]}
    if [*kinds] != ["dense"]:
        yield "weights", f"{size(data['bytes'])}: " + ", ".join(f"{size(n)} {name}" for name, n in kinds.items())
    if data["vision_bytes"]:
        yield "vision", f"{size(data['vision_bytes'])} in 16 bits for images (--no-vision leaves it out)"
    if data["audio_bytes"]:
        yield "audio", f"{size(data['audio_bytes'])} in 16 bits for sound (--no-audio leaves it out)"
    if data["mmproj"]:
        yield "projector", f"{data['mmproj']} (mmproj, next to the model)"
    if card := data.get("gpu"):
        more = f" with {card['context']:,} tokens of context" if card["fits"] else ""
        held = f"{size(card['memory'])}, weights take {size(card['weights'])}: "
        yield card["name"], Text.assemble(held, VERDICT[card["fits"]], more)
    if "rounding" in data:
        yield "rounding", f"{data['rounding']['held']}: {data['rounding']['line']}"
