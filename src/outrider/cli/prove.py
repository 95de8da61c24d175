"""`outrider prove`: a certificate of losslessness for your own model and drafter."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from ..config import LoadSettings
from ..types import MAX_DRAFT, require
from . import common
from .common import err, out


@dataclass(frozen=True, kw_only=True)
class ProveOptions:
    model: common.Model
    prompts: Annotated[Path | None, "A .jsonl file of prompts (default: eight built in)."] = None
    count: Annotated[int, "How many prompts to use."] = 8
    ks: Annotated[str, typer.Option("--k", help="Draft lengths to try, comma-separated.")] = "1,2,4,8,16"
    temperatures: Annotated[str, "Temperatures to try, comma-separated; 0 is greedy."] = "0,0.7,1.0"
    max_tokens: common.MaxTokens = 64
    seed: common.Seed = 7
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Print a line for every case.")] = False
    raw: Annotated[bool, "No chat template: continue the prompts as they are."] = False
    as_json: common.AsJson = False
    adapter: common.Adapters = None


@common.loading("drafter", "device", "dtype", "ops", "threads", "quantize", *common.ROOM)
@common.taking(ProveOptions)
def prove(asked: ProveOptions, load: LoadSettings) -> None:
    """Check, on your machine and with your weights, that speculation changes nothing. Exit code 1 if anything
    differs."""
    from ..bench.prove import COMPARED
    from ..bench.prove import prove as run

    lengths = common.numbers(asked.ks, int, "--k")
    heats = common.numbers(asked.temperatures, float, "--temperatures")
    require(all(1 <= k <= MAX_DRAFT for k in lengths), f"--k must be in 1..{MAX_DRAFT}, got {asked.ks}")
    require(asked.count >= 1, f"--count must be at least 1, got {asked.count}")
    for heat in heats:
        common.sampling(temperature=heat, max_tokens=asked.max_tokens)  # refused before anything is loaded
    texts = common.prompt_texts(asked.prompts)
    load = common.with_adapters(load, asked.adapter)
    require(len(load.adapters) <= 1, "prove takes one adapter at a time: leave out the others")
    llm = common.load_llm(asked.model, load, asked.as_json)
    llm.adapter = next(iter(load.adapters), None)
    ids = [llm.encode_chat(text, asked.raw) for text in texts[: asked.count]]
    findings = []
    for finding in run(llm, ids, lengths, max_tokens=asked.max_tokens, seed=asked.seed, temperatures=heats):
        findings.append(finding)
        if not asked.as_json and (asked.verbose or not finding.passed):
            mark = ("same", "green") if finding.passed else ("DIFFERS", "bold red")
            err.print(Text.assemble(mark, f"  {finding.check}: {finding.case}: {finding.detail}"))
    passed = all(f.passed for f in findings)
    if asked.as_json:
        about = {
            "model": asked.model,
            "adapter": llm.adapter,
            "drafter": llm.drafter_note,
            "ops": llm.model.ops.name,
            "passed": passed,
        }
        print(json.dumps({**about, "findings": [vars(f) for f in findings]}))
    else:
        heads = ("check", "what is compared", "passed")
        adapted = f" with adapter {llm.adapter}" if llm.adapter is not None else ""
        title = f"{asked.model}{adapted} · {llm.drafter_note}"
        checks = {f.check: [one.passed for one in findings if one.check == f.check] for f in findings}
        rows = [(check, COMPARED[check], f"{sum(results)} of {len(results)}") for check, results in checks.items()]
        out.print(common.table(heads, rows, heads, title=title))
        out.print("lossless" if passed else "not lossless: see above", style="bold green" if passed else "bold red")
    raise typer.Exit(0 if passed else 1)
