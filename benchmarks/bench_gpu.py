"""How near to the memory limit a GPU runs, with dummy weights of every Gemma 4 size.

python benchmarks/bench_gpu.py --sizes 31B --k 0,4,8,16 --batch 1 --context 1024 --against-hf
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import torch
import typer

import gpu_table
from outrider.cli.common import note, numbers, out, parts
from outrider.types import OutriderError


def bench_gpu(
    sizes: Annotated[
        str, typer.Option(help="Comma-separated: E2B, E4B, 12B, 26B-A4B, 31B.")
    ] = "E2B,E4B,12B,26B-A4B,31B",
    k: Annotated[
        str, typer.Option("--k", help="Drafted tokens per cycle, comma-separated; 0 is plain decoding.")
    ] = "0,1,2,4,8,16",
    batch: Annotated[str, typer.Option(help="Sequences at once, comma-separated, up to 256 and more.")] = "1,2,4,8,16",
    context: Annotated[
        str, typer.Option(help="Tokens before the step that is timed, comma-separated.")
    ] = "256,4096,32768",
    accept: Annotated[
        str,
        typer.Option(
            help="SYNTHETIC acceptance: share of drafted tokens (0.72), or chances by position (0.9,0.8). Default: as "
            "Google published."
        ),
    ] = "",
    against_hf: Annotated[
        bool, typer.Option("--against-hf", help="Also time transformers on the same shapes.")
    ] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="Batch 1 at 1k, K = 0, 4, 8, 16, and transformers: three minutes.")
    ] = False,
    output: Annotated[Path, typer.Option("--out", help="Folder for gpu.jsonl, gpu.txt and plots.")] = Path(
        "bench-gpu-out"
    ),
) -> None:
    """Times whole cycles as CUDA graphs and sets them against the memory limit. Acceptance is assumed and marked
    synthetic."""
    if not torch.cuda.is_available():
        raise OutriderError("bench_gpu.py needs a CUDA device")
    settings = gpu_table.GpuBenchSettings(
        parts(sizes), numbers(k, int, "--k"), numbers(batch, int, "--batch"), numbers(context, int, "--context"),
        numbers(accept, float, "--accept") if accept else None, against_hf,
    )  # fmt: skip
    if quick:
        settings = replace(gpu_table.quick(), sizes=settings.sizes)
    command = " ".join(["python", "benchmarks/bench_gpu.py", *sys.argv[1:]])

    def save(found: list[gpu_table.Record]) -> None:
        gpu_table.write(output, found, command)

    records = gpu_table.run(settings, note, save=save)
    out.print(gpu_table.text_table(gpu_table.table(records)))
    for path in gpu_table.write(output, records, command):
        note(f"wrote {path}")


if __name__ == "__main__":
    typer.run(bench_gpu)
