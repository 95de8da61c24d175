"""`outrider doctor`: what is installed, which kernels and devices this machine offers, what would be faster."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.text import Text

from .. import __version__
from ..types import OutriderError
from . import common
from .common import out

State = Literal["ok", "note", "bad"]
MARKS = {"ok": ("ok  ", "green"), "note": ("note", "yellow"), "bad": ("BAD ", "red")}
EXTRAS = {
    "serve": ("fastapi", "uvicorn", "prometheus_client", "llguidance", "httpx"),
    "gpu": ("triton",),
    "audio": ("soundfile", "soxr"),
    "ray": ("ray",),
}


@dataclass(frozen=True)
class Diagnosis:
    state: State
    what: str
    found: str
    advice: str = ""  # remedy


def doctor(
    as_json: common.AsJson = False,
    build: Annotated[bool, typer.Option(help="Compile the CPU kernels if that was not done yet.")] = True,
    kernels: Annotated[bool, typer.Option("--kernels", help="List which kernel serves which operation here.")] = False,
    report: Annotated[
        bool, typer.Option("--report", help="Check and time kernels and the default model; a page for an issue.")
    ] = False,
) -> None:
    """Print what is installed, which kernels and GPU will be used, and what would make this machine faster.

    Exit code 1 when something is missing without which nothing runs well.
    """
    if kernels:
        return _kernels(as_json)
    if report:
        return _report(as_json)
    findings = [*_python(), *_extras(), *_cpu(build), *_gpu(), *_storage()]
    if as_json:
        print(json.dumps([asdict(f) for f in findings], indent=2))
    else:
        for f in findings:
            out.print(Text.assemble(MARKS[f.state], f" {f.what:<16} {f.found}"))
            if f.advice:
                out.print(f"     {'':<16} → {f.advice}", style="dim")
    if any(f.state == "bad" for f in findings):
        raise typer.Exit(1)


def _report(as_json: bool) -> None:
    """Print the page. Exit code 1 if a check of it failed."""
    from .report import lines, title

    if as_json:
        raise OutriderError("--report is a page for people: leave --json out")
    findings = [*_python(), *_extras(), *_cpu(build=True), *_gpu(), *_storage()]
    failed = False
    print(f"**{title()}**\n")
    for line in lines([f"{f.what:<16} {f.found}" for f in findings]):
        print(line, flush=True)
        failed = failed or "**NO**" in line
    if failed:
        raise typer.Exit(1)


def _kernels(as_json: bool) -> None:
    """Print the tables of CPU and GPU kernels. Without the GPU extra a line says so."""
    from ..ops.cpu.build import BuildError
    from ..ops.cpu.certify import level_rows
    from ..ops.registry import KernelRow
    from ..platforms.processor import processor_name

    tables: list[tuple[str, list[KernelRow]]] = []
    notes = []
    try:
        tables.append((f"CPU kernels; {processor_name()}", level_rows()))
    except BuildError as error:
        notes.append(f"no CPU kernels: {error}")
    if importlib.util.find_spec("triton") is not None:
        from ..ops.triton.certify import kernel_rows

        gpu_rows, about = kernel_rows(say=lambda problem: common.note(f"comparing bits: {problem}"))
        tables.append((f"GPU kernels, those of an operation with the same bits; {about}", gpu_rows))
    else:
        notes.append("no GPU kernels: triton is missing (pip install 'outrider[gpu]')")
    if as_json:
        print(json.dumps([asdict(row) for _, rows in tables for row in rows], indent=2))
        return
    heads = ("operation", "when", "kernel", "source", "here")
    for title, rows in tables:
        lines = [(row.operation, row.when, row.kernel, row.source, row.here) for row in rows]
        out.print(common.table(heads, lines, heads, title=title))
    for note in notes:
        out.print(note)


def _python() -> Iterator[Diagnosis]:
    yield Diagnosis("ok", "outrider", f"{__version__} in {Path(__file__).resolve().parents[1]}")
    yield Diagnosis("ok", "python", f"{platform.python_version()} ({sys.platform}, {platform.machine()})")
    torch = _version("torch")
    yield (
        Diagnosis("ok", "torch", torch)
        if torch
        else Diagnosis("bad", "torch", found="missing", advice="pip install torch")
    )


def _extras() -> Iterator[Diagnosis]:
    for extra, modules in EXTRAS.items():
        missing = [m for m in modules if importlib.util.find_spec(m) is None]
        if missing:
            without = f"without {', '.join(missing)}"
            yield Diagnosis("note", f"extra {extra}", found=without, advice=f"pip install 'outrider[{extra}]'")
        else:
            yield Diagnosis("ok", f"extra {extra}", ", ".join(f"{m} {_version(m) or ''}".strip() for m in modules))


def _cpu(build: bool) -> Iterator[Diagnosis]:
    from ..ops.cpu.build import WHEEL_LEVELS, BuildError, best_isa, compiler, found, missing, shared_object
    from ..platforms.processor import machine, performance_cores, processor_name, usable_cores

    isa = best_isa()
    cores = usable_cores()
    slow = {"generic": "this processor has no AVX2: expect plain C speed", "avx2": "AVX-512 with VNNI would be faster"}
    fast = performance_cores()
    kinds = "" if fast is None else f" ({fast} of them fast, which is how many threads there are)"
    about = f"{processor_name()}, {cores} cores for this process{kinds}, kernels: {isa}"
    yield Diagnosis("note" if isa in slow else "ok", "processor", found=about, advice=slow.get(isa, ""))
    for level in WHEEL_LEVELS.get(machine(), ["generic"]):
        lacks = ", ".join(sorted(missing(level)))
        other = f"this machine lacks {lacks}" if lacks else f"--ops cpu:{level}"
        yield Diagnosis("ok", f"level {level}", "in use" if level == isa else other)
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    if load > cores / 2:
        advice = "other processes will slow decoding and spoil measured costs"
        yield Diagnosis("note", "load", found=f"{load:.1f} on {cores} cores", advice=advice)
    try:
        kernels = str(found(isa) or "")
        if not kernels:
            name = compiler()
            kernels = f"{shared_object()} (by {name})" if build else f"compiled by {name} when first needed"
        yield Diagnosis("ok", "CPU kernels", kernels)
    except BuildError as error:
        advice = "install gcc or clang, or: pip install ziglang; without a compiler: --ops reference, slowly"
        yield Diagnosis("bad", "CPU kernels", found=str(error), advice=advice)


def _gpu() -> Iterator[Diagnosis]:
    if _version("torch") is None:
        return
    import torch

    if not torch.cuda.is_available():
        about = "none"
        mend = "check the driver with nvidia-smi"
        if not torch.version.cuda:
            about = "none (torch is built without CUDA)"
            mend = "an NVIDIA driver is here: install a CUDA build of torch"
        seen = shutil.which("nvidia-smi") is not None
        yield Diagnosis("note" if seen else "ok", "GPU", found=about, advice=mend if seen else "")
        return
    for i in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(i)
        free, total = torch.cuda.mem_get_info(i)
        old = p.major < 8
        text = f"cuda:{i} {p.name}, compute {p.major}.{p.minor}, {free / 2**30:.0f} of {total / 2**30:.0f} GiB free"
        advice = "bf16 needs compute capability 8.0 or later" if old else ""
        yield Diagnosis("note" if old else "ok", "GPU", found=text, advice=advice)
    if importlib.util.find_spec("triton") is None:
        yield Diagnosis("bad", "GPU kernels", found="triton is missing", advice="pip install 'outrider[gpu]'")
    else:
        yield Diagnosis("ok", "GPU kernels", f"triton {_version('triton')}, CUDA {torch.version.cuda}")


def _storage() -> Iterator[Diagnosis]:
    from ..ops.cpu.build import cache_root, writable

    folder = cache_root()
    # a real write also detects a file in its place, a read-only mount and a full disk
    if not writable(folder):
        yield Diagnosis(
            "bad", "cache", found=f"{folder} can't be written", advice="set OUTRIDER_CACHE to a folder that can"
        )
    else:
        free = shutil.disk_usage(folder).free / 2**30
        low = "models need room: set OUTRIDER_CACHE and HF_HOME to a larger disk" if free < 5 else ""
        yield Diagnosis("note" if low else "ok", "cache", found=f"{folder}, {free:.0f} GiB free", advice=low)


def _version(module: str) -> str | None:
    try:
        return importlib.metadata.version(module.replace("_", "-"))
    except importlib.metadata.PackageNotFoundError:
        return None
