"""`outrider bench`: speed and correctness, compared with other settings and engines; resumable."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.console import Console

from ..config import LoadSettings, parse_draft_tokens, parse_tree
from ..types import OutriderError, require
from . import common
from .common import out
from .progress import StageProgress

if TYPE_CHECKING:
    from ..bench.harness import Contestant, DraftMode, Settings

LOADED = ("dtype", "ops", "quantize", "tensor_parallel", "max_context", "kv_dtype", "tree")


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    model: common.Model = "smollm2"
    suite: Annotated[str, "quick (47 prompts) | full (800 more) | a .jsonl file."] = "quick"
    drafters: Annotated[str, "Comma-separated: auto, ngram, a drafter's folder or id, draft:MODEL."] = "auto"
    draft_tokens: Annotated[str, "Comma-separated: 0 (plain decoding), 1..16, auto."] = "0,4,auto"
    tree: Annotated[str, "Maximum tokens per draft tree, comma-separated: 2..16; off; auto (if it pays)."] = "auto"
    temperature: Annotated[str, "Temperatures, comma-separated; 0 is greedy."] = "0"
    batch: Annotated[str, "Sequences at once, comma-separated."] = "1"
    against: Annotated[str, "Comma-separated: transformers, llama-cpp, where they are installed."] = ""
    repeats: Annotated[int, "Runs per cell; the median counts."] = 3
    limit: Annotated[int | None, "At most N prompts per category."] = None
    categories: Annotated[str, "Only prompts of these categories, comma-separated."] = ""
    max_tokens: Annotated[int | None, "Maximum tokens of an answer. Default: the suite's."] = None
    data: Annotated[Path | None, "Folder of the benchmark files. Default: benchmarks/data of the checkout."] = None
    out: Annotated[Path, "Folder for cells.jsonl, run.json and report.html."] = Path("bench-out")
    resume: Annotated[bool, "Finish the run in --out; nothing finished is repeated."] = False
    seed: common.Seed = 0
    as_json: common.AsJson = False


@common.loading(*common.MACHINE, *common.ROOM)
@common.taking(BenchOptions)
def bench(asked: BenchOptions, load: LoadSettings) -> None:
    """Time decoding with several drafters and K over many kinds of prompts, and check that the texts are identical.

    Contestants run in turn; figures have 95 % intervals.

    Example: outrider bench smollm2 --draft-tokens 0,4,auto --against llama-cpp --out results
    """
    from .. import __version__
    from ..bench import harness, workloads

    listed = (asked.drafters, asked.tree, asked.draft_tokens, asked.against)
    guessers, trees, ks, peers = (tuple(dict.fromkeys(common.parts(text))) for text in listed)
    mend = "leave it out for the model's own, or say --draft-tokens 0 for plain decoding"
    require(bool(guessers), f"--drafters names none: {mend}")
    require(bool(trees), "--tree is empty: give for instance off,16,auto")
    require(bool(ks), "--draft-tokens is empty: give for instance 0,4,auto")
    modes = _modes(guessers, ks, trees)
    common.check_folder("--out", asked.out)
    load = replace(load, drafter=guessers[0], tree=trees[0] if len(trees) == 1 else "auto", seed=asked.seed)
    one = load.tensor_parallel == 1 or len(guessers) == 1
    require(one, "--tensor-parallel times one drafter at a time: give one with --drafters")
    temperatures = common.numbers(asked.temperature, float, "--temperature")
    batches = common.numbers(asked.batch, int, "--batch")
    if asked.repeats < 1 or any(b < 1 for b in batches) or any(t < 0 for t in temperatures):
        raise OutriderError("--repeats and --batch must be at least 1, --temperature at least 0")
    for option, least in (("--limit", asked.limit), ("--max-tokens", asked.max_tokens)):
        require(least is None or least >= 1, f"{option} must be at least 1, got {least}")
    prompts = workloads.load_suite(
        asked.suite, asked.data, limit=asked.limit, categories=common.parts(asked.categories)
    )
    if asked.max_tokens is not None:
        prompts = [replace(p, max_tokens=min(p.max_tokens, asked.max_tokens)) for p in prompts]
    settings = {name: getattr(asked, name) for name in ("model", "suite", "repeats", "seed", "max_tokens")}
    settings |= {"contestants": [*(mode.name for mode in modes), *peers], "prompts": len(prompts)}
    settings |= {"temperatures": temperatures, "batches": batches, "machine": _machine(load), "version": __version__}
    settings |= {name: load.options()[name] for name in LOADED}
    store = harness.Store(asked.out, settings, asked.resume)
    count = harness.total(settings, prompts)
    if len(store.done) < count:
        contestants = _contestants(asked.model, modes, peers=peers, batch=max(batches), load=load)
        with StageProgress() as progress:
            for done, cell in enumerate(harness.run(contestants, prompts, settings, store=store), 1):
                if cell is not None:
                    progress("bench", done, count, f"{cell.category} · {cell.contestant}")
    _report(asked.out, settings, asked.as_json)


def _report(folder: Path, settings: Settings, as_json: bool) -> None:
    """Prints a run's results and writes them as a page."""
    from ..bench import harness, report

    rows = report.summarise(list(harness.read_cells(folder)))
    page = folder / "report.html"
    page.write_text(report.html(settings, rows, common.command_line()), encoding="utf-8")
    if as_json:
        print(json.dumps({"settings": settings, "rows": [asdict(r) for r in rows]}))
    else:
        for title, some in report.by_setting(rows):
            above = ["", *(row.category for row in some)]
            cells = [(r.category if r.category != last else "", *report.texts(r)) for r, last in zip(some, above)]
            shown = common.table(("category", *report.COLUMNS), cells, ("category", "contestant"), title=title)
            # the 80 columns of a pipe are too few
            Console(width=max(out.width, 110), highlight=False).print(shown)
        out.print(f"report: {page}")
    for row in rows:
        if "/" in row.contestant and row.category == report.ALL and row.identical is not None and row.identical < 1.0:
            share = 100 * (1 - row.identical)
            raise OutriderError(
                f"{row.contestant} gave another text than plain decoding on {share:.1f} % of prompts: a bug"
            )


def _modes(drafters: Sequence[str], ks: Sequence[str], trees: Sequence[str]) -> list[DraftMode]:
    """Drafting modes to compare, plain decoding first. A drafter is named by the last part of its path, or by the whole
    path if two end alike, as folders of training runs do (a/drafter, b/drafter)."""
    from ..bench.harness import PLAIN, DraftMode

    last = [Path(drafter).name for drafter in drafters]
    lengths = dict.fromkeys(map(parse_draft_tokens, ks))
    draft_modes = [DraftMode(PLAIN, drafters[0], 0)] if 0 in lengths else []
    for drafter, k, tree in product(drafters, (k for k in lengths if k != 0), trees):
        short = Path(drafter).name
        name = f"{short if last.count(short) == 1 else drafter}/{'auto' if k is None else f'K={k}'}"
        if len(trees) == 1:  # set when the model is loaded
            draft_modes.append(DraftMode(name, drafter, k))
        else:
            draft_modes.append(DraftMode(f"{name} tree={tree}", drafter, k=k, tree=parse_tree(tree)))
    return draft_modes


def _contestants(
    model: str, modes: list[DraftMode], peers: Sequence[str], batch: int, load: LoadSettings
) -> list[Contestant]:
    from ..bench import harness
    from ..bench.peers import build

    entries: list[Contestant] = []
    # the same prompt is repeated: a prefix cache would hide its cost
    engine = replace(load.engine, max_batch=batch, prefix_cache=False)
    for drafter in dict.fromkeys(mode.drafter for mode in modes):
        llm = common.load_llm(model, replace(load, drafter=drafter, engine=engine))
        entries += [harness.Ours(mode, llm) for mode in modes if mode.drafter == drafter]
    if peers:
        from ..weights import hub

        entries += [build(name, llm, Path(hub.resolve(model).path), load=load) for name in peers]
    return entries


def _machine(load: LoadSettings) -> str:
    import torch

    from ..ops import place
    from ..spec.cost import machine_name

    where = place(load.device)
    return machine_name(torch.cuda.get_device_name(where) if where.type == "cuda" else None, load.threads)
