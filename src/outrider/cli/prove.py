"""`outrider prove`: a certificate of losslessness for your own model and drafter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from ..config import LoadSettings
from ..types import MAX_DRAFT, OutriderError
from . import common
from .common import err, out


@common.loading("drafter", "device", "dtype", "ops", "threads", "quantize", *common.ROOM)
def prove(
    model: common.Model,
    prompts: Annotated[Path | None, typer.Option(help="A .jsonl file of prompts (default: eight built in).")] = None,
    count: Annotated[int, typer.Option(help="How many prompts to use.")] = 8,
    ks: Annotated[str, typer.Option("--k", help="Draft lengths to try, separated by commas.")] = "1,2,4,8,16",
    temperatures: Annotated[str, typer.Option(help="To try, separated by commas; 0 is greedy.")] = "0,0.7,1.0",
    max_tokens: common.MaxTokens = 64,
    seed: common.Seed = 7,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="A line for every case.")] = False,
    raw: Annotated[bool, typer.Option(help="No chat template: continue the prompts as they are.")] = False,
    as_json: common.AsJson = False,
    *,
    load: LoadSettings,
) -> None:
    """Check, on your machine and with your weights, that speculation changes nothing. Exit code 1 if anything
    differs."""
    from ..bench.prove import COMPARED
    from ..bench.prove import prove as run

    lengths, heats = common.numbers(ks, int, "--k"), common.numbers(temperatures, float, "--temperatures")
    if not all(1 <= k <= MAX_DRAFT for k in lengths):
        raise OutriderError(f"--k must be in 1..{MAX_DRAFT}, got {ks}")
    if count < 1:
        raise OutriderError(f"--count must be at least 1, got {count}")
    for heat in heats:
        common.sampling(temperature=heat, max_tokens=max_tokens)  # refused before anything is loaded
    texts = common.prompt_texts(prompts)
    llm = common.load_llm(model, load, as_json)
    ids = [llm.encode_chat(text, raw) for text in texts[:count]]
    findings = []
    for finding in run(llm, ids, lengths, max_tokens, seed, heats):
        findings.append(finding)
        if not as_json and (verbose or not finding.passed):
            mark = ("same", "green") if finding.passed else ("DIFFERS", "bold red")
            err.print(Text.assemble(mark, f"  {finding.check}: {finding.case}: {finding.detail}"))
    passed = all(f.passed for f in findings)
    if as_json:
        about = {"model": model, "drafter": llm.drafter_note, "ops": llm.model.ops.name, "passed": passed}
        print(json.dumps({**about, "findings": [vars(f) for f in findings]}))
    else:
        table = Table("check", "what is compared", "passed", title=f"{model} · {llm.drafter_note}")
        for check in dict.fromkeys(f.check for f in findings):
            mine = [f for f in findings if f.check == check]
            table.add_row(check, COMPARED[check], f"{sum(f.passed for f in mine)} of {len(mine)}")
        out.print(table)
        out.print("lossless" if passed else "not lossless: see above", style="bold green" if passed else "bold red")
    raise typer.Exit(0 if passed else 1)
