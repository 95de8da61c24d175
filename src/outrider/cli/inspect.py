"""`outrider inspect`: a model's layers, size and cost, from its configuration alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated

from rich.table import Table
from rich.text import Text

from ..bench.machines import Hardware, machine
from ..config import LoadSettings
from ..models.config import ForeignDict, ModelConfig
from ..models.inspect import model_size, report
from ..types import require
from . import common
from .common import out

if TYPE_CHECKING:
    from ..weights.files import Files
    from ..weights.sizes import HeldBytes, HeldFormat, StoredSize

CPU = Hardware(label="a CPU", bandwidth=0.0, rate=0.0, memory=0.0, is_cpu=True)  # only its formats matter here
VERDICT = {True: ("fits", "green"), False: ("does not fit", "red")}


@dataclass(frozen=True, kw_only=True)
class InspectOptions:
    model: common.Model
    context: Annotated[int, "Context length for which FLOP per byte are computed."] = 1024
    gpu: Annotated[str | None, "Does it fit this card, and with how much context? rtx4090, h200, …"] = None
    max_concurrent: common.PlannedSequences = None
    quality: Annotated[bool, "Load it on the CPU and measure what rounding costs there."] = False
    as_json: common.AsJson = False


@common.loading(*common.PLANNING)
@common.taking(InspectOptions)
def inspect(asked: InspectOptions, load: LoadSettings) -> None:
    """Show a model's size, layers and memory, and whether it fits a card, before any download.

    Example: outrider inspect google/gemma-4-E2B-it --gpu rtx4090

    --gpu plans the memory of a card as `outrider serve` does with the same options, and names options that would make
    the model fit, or leave more context. Several --drafter may be given: does it fit, and what does a step cost?

    --quality loads the model as the CPU kernels hold it (--quantize int8 | int4 for dense checkpoints) and again in
    float32, and prints both perplexities on a short text and how far the logits are apart. With --gpu and --quantize
    int8 | int4 | fp8 it is rounded as a GPU rounds it; the measuring is still done here, without one."""
    from .model_facts import read  # needs torch, which --help does not

    card = None if asked.gpu is None else machine(asked.gpu)
    check_options(asked, load, card)
    files, config, stored = read(asked.model, load.quantize if card is not None and not card.is_cpu else None)
    data = {
        "model": asked.model,
        **describe_model(config, stored, asked.context, load=load, card=card),
        **describe_files(files, load),
    }
    data |= describe_drafters(files, config, load, token_bytes=data["bytes_per_token"], card=card)
    if card is not None:
        from .model_facts import on_card, with_sequences

        data["gpu"] = on_card(asked.model, with_sequences(load, asked.max_concurrent, card), card)
    if asked.quality:
        data["rounding"] = measure_rounding(asked.model, load, on_gpu=card is not None)
    if asked.as_json:
        print(json.dumps(data))
    else:
        show(data)


def check_options(asked: InspectOptions, load: LoadSettings, card: Hardware | None) -> None:
    require(asked.context >= 1, f"--context must be at least 1, got {asked.context}")
    fp8_weights = load.quantize == "fp8"
    require(card is not None or not fp8_weights, "--quantize takes int8 or int4 without --gpu, got 'fp8'")
    int8_kv = load.engine.kv_dtype == "int8"
    require(card is None or not int8_kv, "--kv-dtype int8 is for CPUs: with --gpu say fp8, or leave it out")


def kv_item_bytes(config: ModelConfig, kv_dtype: str) -> float:
    """Bytes of one number of K/V; in int8 each row of a head has a factor, too."""
    return {"fp8": 1.0, "int8": 1 + 4 / config.layers[0].attn.head_dim}.get(kv_dtype, 2.0)


def describe_model(
    config: ModelConfig, stored: StoredSize, context: int, load: LoadSettings, card: Hardware | None
) -> ForeignDict:
    """Size, layers and memory, with the weights as they will be held."""
    from .model_facts import loaded_weights

    quantize = load.quantize
    weights = loaded_weights(
        config, stored, quantize=quantize, on=card if card is not None or quantize is None else CPU
    )
    per_parameter = weights.token / model_size(config).active
    kv_item = kv_item_bytes(config, load.engine.kv_dtype)
    return {
        **report(config, per_parameter, context, total_bytes=weights.total, kv_item=kv_item),
        "formats": {name: round(nbytes) for name, nbytes in stored.formats.items()},
        "held": [layout_row(how, sizes) for how, sizes in stored.layouts.items()],
    }


def describe_files(files: Files, load: LoadSettings) -> ForeignDict:
    """The encoders of images and sound next to the model."""
    from ..weights.audio import audio_config
    from ..weights.repos import companion
    from ..weights.vision import vision_config

    mmproj = companion(files.path, "mmproj") if files.gguf is not None else None
    vision = vision_config(files) if load.vision else None
    audio = audio_config(files) if load.audio else None
    return {
        "mmproj": None if mmproj is None else str(mmproj),
        "vision_bytes": 0 if vision is None else vision.nbytes(),
        "audio_bytes": 0 if audio is None else audio.nbytes(),
    }


def describe_drafters(
    files: Files, config: ModelConfig, load: LoadSettings, token_bytes: float, card: Hardware | None
) -> ForeignDict:
    """Whether each drafter fits, and what its step costs."""
    from .model_facts import drafter_names, drafter_of

    names = drafter_names(files, load)
    kv_item = kv_item_bytes(config, load.engine.kv_dtype)
    drafters = [drafter_of(name, files, config, token=token_bytes, kv_item=kv_item, on=card) for name in names]
    one_block_drafter = sum("taps" in drafter.about for drafter in drafters) == 1
    unlike = "two of --drafter are an MTP and a block drafter (DFlash, DSpark, EAGLE-3)"
    require(len(drafters) != 2 or one_block_drafter, unlike)
    fields = ("drafter", "second_drafter")
    return {field: {"name": name, **drafter.about} for field, name, drafter in zip(fields, names, drafters)}


def measure_rounding(model: str, load: LoadSettings, on_gpu: bool) -> ForeignDict:
    """Perplexities as held and in float32. on_gpu: rounded as a GPU rounds it."""
    from ..bench.rounding import measure

    kv_dtype = load.engine.kv_dtype
    rounding = measure(model, load.quantize, kv_dtype=kv_dtype, gpu=on_gpu and load.quantize is not None)
    about = {"held": load.quantize or "as stored", "kv": kv_dtype, "line": rounding.line()}
    return {**about, **asdict(rounding)}


def layout_row(how: HeldFormat, sizes: HeldBytes) -> ForeignDict:
    """GGUF tensors of one format, for JSON."""
    return {
        **asdict(how),
        "tensors": sizes.tensors,
        "bytes": round(sizes.stored),
        "cpu_bytes": round(sizes.cpu),
        "gpu_bytes": round(sizes.gpu),
    }


def amount(n: float, unit: str = "") -> str:
    for size, name in ((1e12, "T"), (1e9, "G" if unit else "B"), (1e6, "M"), (1e3, "k")):
        if n >= size:
            return f"{n / size:.3g} {name}{unit}"
    return f"{n:.3g} {unit}".rstrip()


def in_bytes(n: float) -> str:
    return amount(n, "B")


def show(data: ForeignDict) -> None:
    about = f"  {data['model_type']}, vocabulary {data['vocabulary']:,}, hidden {data['hidden']}"
    out.print(Text.assemble((data["model"], "bold"), about))
    facts = Table.grid(padding=(0, 2))
    for title, text in facts_of(data):
        facts.add_row(title, text)
    out.print(facts)

    routed = any(row["experts"] for row in data["layers"])
    heads = ("layers", "type", "q/kv", "size", "window", "K/V", "MLP", *(["experts"] if routed else []), "each")
    cells = []
    for rows in alike_layers(data["layers"]):
        row = rows[0]
        numbers = spans([row["index"] for row in rows])
        attention = (f"{row['heads']}/{row['kv_heads']}", str(row["head_dim"]), str(row["window"] or "–"), owner(row))
        experts = [f"{row['experts_per_token']} of {row['experts']}"] if routed else []
        mlp = (str(row["intermediate"]), *experts)
        cells.append((numbers, row["type"], *attention, *mlp, amount(row["parameters"])))
    out.print(common.table(heads, cells, ("layers", "type", "K/V")))


def alike_layers(layers: list[ForeignDict]) -> list[list[ForeignDict]]:
    """Layers of the same shape that read the same K/V, in the order of each group's first layer."""
    groups: dict[str, list[ForeignDict]] = {}
    for row in layers:
        shape = repr({**row, "index": None, "kv_from": owner(row)})
        groups.setdefault(shape, []).append(row)
    return list(groups.values())


def spans(numbers: list[int]) -> str:
    """Ascending numbers as spans: 0–4, … 54–58. The middle ones of more than two are left out."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    texts = [str(span[0]) if len(span) == 1 else f"{span[0]}–{span[-1]}" for span in runs]
    return ", ".join(texts) if len(texts) <= 2 else f"{texts[0]}, … {texts[-1]}"


def owner(row: ForeignDict) -> str:
    """Describes whose K/V a layer reads."""
    if row["kv_from"] != row["index"]:
        return f"of layer {row['kv_from']}"
    return "own, v = k" if row["k_eq_v"] else "own"


def facts_of(data: ForeignDict) -> Iterator[tuple[str, str | Text]]:
    """The facts of a model, line by line: a title and a text."""
    parts = [f"{k.replace('_', ' ')} {amount(n)}" for k, n in data["parameters_by_part"].items() if n >= 1e5]
    yield "parameters", amount(data["parameters"]) + (f"  ({', '.join(parts)})" if parts else "")
    read = f"{amount(data['active_parameters'])} parameters, {in_bytes(data['bytes_per_token'])}"
    yield "read for a token", f"{read} at {data['bits_per_weight']:.3g} bits"
    yield "K/V", kv_line(data)
    each = data["intensity"]
    decode = " · ".join(f"{k.removeprefix('decode_')}: {v:.1f}" for k, v in each.items() if k != "prefill")
    context = f"(at {data['context']} tokens of context)"
    yield "FLOP a byte", f"prefill {each['prefill']:.0f}; tokens at once {decode}  {context}"
    for drafter in filter(None, (data["drafter"], data.get("second_drafter"))):
        why = "" if drafter["fits"] else f": {drafter['reason']}"
        seen = drafter["reads"] if drafter["fits"] else None
        reads = f", reads the K/V of layers {', '.join(map(str, sorted(set(seen))))}" if seen else ""
        head = f", scores {drafter['clusters_scored']} of {drafter['clusters']} clusters" if drafter["clusters"] else ""
        yield "drafter", Text.assemble(f"{drafter['name']} ", VERDICT[drafter["fits"]], why)
        step = (
            f"{in_bytes(drafter['bytes_per_step'])} a step ({100 * drafter['share_of_target']:.2g} % of a target pass)"
        )
        yield "", f"{amount(drafter['parameters'])} parameters, {step}{reads}{head}"
        if "taps" in drafter:
            kind = f"{drafter['model_type']} ({drafter['layout']}), {drafter['layers']} layers"
            taps = f"reads the target after layers {', '.join(map(str, drafter['taps']))}"
            kv = f"its own K/V take {in_bytes(drafter['kv_bytes_per_token'])} a token"
            yield "", f"{kind}, up to {drafter['draft_tokens']} tokens a draft; {taps}; {kv}"
    kinds = {name: size for name, size in data["formats"].items() if size >= 0.001 * data["bytes"]}
    if [*kinds] != ["dense"]:
        yield (
            "weights",
            f"{in_bytes(data['bytes'])}: " + ", ".join(f"{in_bytes(n)} {name}" for name, n in kinds.items()),
        )
    for layout in data["held"]:
        tensors = f"{layout['tensors']} {layout['format']} tensor{'s' if layout['tensors'] > 1 else ''}"
        cpu = f"{layout['cpu']} on a CPU ({in_bytes(layout['cpu_bytes'])})"
        yield "", f"{tensors}: {cpu}, {layout['gpu']} on a GPU ({in_bytes(layout['gpu_bytes'])})"
    if data["vision_bytes"]:
        yield "vision", f"{in_bytes(data['vision_bytes'])} in 16 bits for images (--no-vision leaves it out)"
    if data["audio_bytes"]:
        yield "audio", f"{in_bytes(data['audio_bytes'])} in 16 bits for sound (--no-audio leaves it out)"
    if data["mmproj"]:
        yield "projector", f"{data['mmproj']} (mmproj, next to the model)"
    if data.get("gpu") is not None:
        yield from card_facts(data["gpu"])
    if "rounding" in data:
        yield "rounding", f"{data['rounding']['held']}: {data['rounding']['line']}"


def card_facts(card: ForeignDict) -> Iterator[tuple[str, str | Text]]:
    """Lines on the memory of a card."""
    parts = {"weights": card["weights"], "drafter": card["drafter"], "images and sound": card["media"]}
    listed = ", ".join(f"{name} {in_bytes(size)}" for name, size in parts.items() if size)
    share = f"{in_bytes(card['memory'])}, of which the engine takes {in_bytes(card['granted'])}: {listed}; "
    more = f" with {card['context']:,} tokens of context" if card["fits"] else ""
    yield card["name"], Text.assemble(share, VERDICT[card["fits"]], more)
    if card["fits"]:
        yield "", f"K/V for {card['tokens']:,} tokens of all sequences together"
    else:
        yield "", card["reason"]
    if card["would_fit"]:
        named = " · ".join(f"{remedy['options']} ({remedy['context']:,})" for remedy in card["would_fit"])
        yield "", f"{'more context' if card['fits'] else 'it would fit'} with {named}"


def kv_line(data: ForeignDict) -> str:
    """K/V bytes per token; windows keep a bounded number of tokens, so later tokens cost less than the first."""
    first = data["kv_bytes_per_token"]
    later = data["kv_bytes_per_late_token"]
    whole = f"{in_bytes(data['kv_bytes_full_context'])} for all {data['max_context']:,} positions"
    window = max(row["window"] or 0 for row in data["layers"])
    if later == first or window >= data["max_context"]:
        return f"{in_bytes(first)} a token, {whole}"
    growing = f"{in_bytes(later)} a token in full layers" if later else "no more"
    window_note = f"sliding layers keep the last {window:,} tokens: {in_bytes(window * (first - later))}"
    return f"{growing}; {window_note}; {whole}"
