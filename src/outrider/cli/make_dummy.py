"""`outrider make-dummy`: a full-size checkpoint with random weights, to measure speed and memory without the
download."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..models.builtin_configs import BUILTIN_CONFIGS
from ..models.config import DrafterConfig
from ..types import OutriderError
from .common import check_folder, out


def make_dummy(
    model: Annotated[
        str, typer.Argument(help="google/gemma-4-…, Qwen/Qwen2.5-1.5B-Instruct or -0.5B-, a folder or a .gguf file.")
    ],
    to: Annotated[Path, typer.Argument(help="OUT.gguf, or a folder for safetensors (bfloat16).")],
    fmt: Annotated[
        str, typer.Option("--format", help="q4_0 | q4_1 | q5_0 | q5_1 | q8_0 | q4_k_m | q6_k | bf16 | f16.")
    ] = "q4_0",
    seed: Annotated[int, typer.Option(help="Of the weights.")] = 0,
) -> None:
    """Write a checkpoint of full size with random weights. The text it makes means nothing; its speed and memory are
    the model's."""
    from ..weights import hub
    from ..weights.dummy_file import FORMATS, SHAPES, nbytes, tensors, write_folder, write_gguf
    from ..weights.files import Files, model_config, translate
    from ..weights.progress import progress

    if fmt not in FORMATS:
        raise OutriderError(f"--format {fmt}: known are {', '.join(FORMATS)}")
    known = SHAPES.get(model) or BUILTIN_CONFIGS.get(model)
    raw = dict(known) if known is not None and not Path(model).exists() else hub.resolve(model, weights=False).config
    drafter = "assistant" in str(raw.get("model_type")) or "backbone_hidden_size" in raw
    gguf = to.suffix == ".gguf"
    if not gguf and fmt != "bf16":
        raise OutriderError(f"a folder of safetensors is written in bf16: say --format bf16, or name {to}.gguf")
    files = Files(model, to, raw)
    config = translate(DrafterConfig.from_hf, files) if drafter else model_config(files)
    check_folder("--out", to.parent)
    with progress(f"Writing {to.name}", sum(map(nbytes, tensors(config, fmt)))) as advance:
        if gguf:
            size = write_gguf(to, config, fmt, seed, advance)
        else:
            size = write_folder(to, raw, config, seed, advance)
    out.print(f"{to}: {size / 1e9:.2f} GB of dummy weights in the shape of {model}")
