"""Fit the rates of `outrider predict` to the published measurements, and write them into src/outrider/bench/rates.py.

    python tools/fit_predict.py            fit, write, and print every cell
    python tools/fit_predict.py --check    print every cell with the rates as they are; exit 1 if one is off by more

The cells are those of the docs' tables of one H200 (docs/gpu-measured.md, docs/gpu.md, README.md): the newest figure
of each table per model, format, number of sequences and K. tests/unit/bench/test_predict.py checks that rates.py holds
them.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))
from outrider.bench.machines import machine  # noqa: E402
from outrider.bench.predict import (  # noqa: E402
    DraftWork,
    PassWork,
    Setup,
    draft_step_time,
    draft_work,
    pass_time,
    verify_work,
)
from outrider.bench.rates import CONTEXT, Cell, Rates  # noqa: E402
from outrider.cli.model_facts import read  # noqa: E402
from outrider.models.builtin_configs import BUILTIN_CONFIGS  # noqa: E402
from outrider.models.config import DrafterConfig  # noqa: E402
from outrider.models.inspect import model_size  # noqa: E402

RATES_FILE = ROOT / "src" / "outrider" / "bench" / "rates.py"
TOLERANCE = 0.15
TOKENS_PER_CYCLE = 3.88  # of the published tables, at K = 4
ONE_SEQUENCE_COMMIT = "ecdcd10"  # of the docs' table of one sequence
FORMATS_COMMIT = "cb1e96d"  # of the docs' table of quantised weights
# Bounds of the search: shares stay below 1, times above 0.
BOUNDS = {
    "reach16": (0.7, 0.99), "reach8": (0.6, 0.99), "reach4": (0.5, 0.99), "expert_reach": (0.4, 1.0),
    "kv_reach": (0.4, 1.0), "rate16": (0.2, 0.8), "narrow_rate": (0.1, 0.8), "narrow_rate_few": (0.03, 0.5),
    "sharpness": (1.0, 6.0), "kernel_us": (0.8, 4.0), "ple_us": (1.0, 20.0), "moe_us": (2.0, 60.0),
    "row_us": (0.01, 4.0), "row_power": (0.2, 1.0), "draft_layer_us": (2.0, 40.0), "draft_head_us": (2.0, 60.0),
}  # fmt: skip


def history() -> list[dict[str, object]]:
    lines = (ROOT / "benchmarks" / "history" / "gpu.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def cells() -> list[Cell]:
    """Every published cell. Older figures of a cell are replaced by newer ones of the same table."""
    engine: dict[tuple[str, str, int, int], Cell] = {}
    graphs: dict[tuple[str, str, int, int], Cell] = {}
    blocks: dict[tuple[str, str, int, int], Cell] = {}

    def add(table: dict[tuple[str, str, int, int], Cell], cell: Cell) -> None:
        table[cell.size, cell.format, cell.batch, cell.k] = cell

    for row in history():
        table = row.get("engine_tok_s", {})
        assert isinstance(table, dict)
        for name, engines in table.items():
            match = re.fullmatch(r"(\S+?)( int4)?, (plain|K = 4)", name)
            if match is None:
                continue
            k = 0 if match[3] == "plain" else 4
            for batch, speed in engines["outrider"].items():
                if not isinstance(speed, list):  # ranges of early runs, all measured again
                    ms = 1e3 * int(batch) * (TOKENS_PER_CYCLE if k else 1.0) / speed
                    add(engine, Cell(match[1], (match[2] or " bf16").strip(), int(batch), k, round(ms, 3)))
        cycles = row.get("cycles_ms")
        if isinstance(cycles, dict) and row["commit"] == ONE_SEQUENCE_COMMIT and row["batch"] == 1:
            size = str(row["model"]).removeprefix("google/gemma-4-").removesuffix("-it")
            for k_text, ms in cycles.items():
                add(graphs, Cell(size, "bf16", 1, int(k_text), round(ms, 3)))
        figures = row.get("figures")
        if row["commit"] == FORMATS_COMMIT and isinstance(figures, dict):
            for name, ms in figures.get("ms", {}).items():
                match = re.fullmatch(r"(\S+) (int4|int8|fp8) (\d+)x(\d+)", name)
                if match is not None:
                    add(graphs, Cell(match[1], match[2], int(match[3]), int(match[4]), round(ms, 3)))
        for size, times in row.get("block_cycles_ms", {}).items():  # type: ignore[attr-defined]
            for name, ms in times.items():
                match = re.fullmatch(r"(?:plain|MTP (\d+)) (\d+)", name)
                if match is not None:
                    add(blocks, Cell(size, "bf16", int(match[2]), int(match[1] or 0), round(ms, 3)))
    return [*engine.values(), *graphs.values(), *blocks.values()]


def setup_of(cell: Cell) -> Setup:
    name = f"google/gemma-4-{cell.size}-it"
    quantize = None if cell.format == "bf16" else cell.format
    _, config, stored = read(name, quantize)
    drafter = DrafterConfig.from_hf(BUILTIN_CONFIGS[f"{name}-assistant"]) if cell.k else None
    weight_bytes = stored.gpu_token / model_size(config).active
    return Setup(config, drafter, machine("h200"), cell.batch, CONTEXT, weight_bytes)


Work = tuple[PassWork, DraftWork | None]


def work_of(cell: Cell) -> Work:
    """The target's pass and one draft step, which do not depend on the rates."""
    setup = setup_of(cell)
    return verify_work(setup, cell.k), draft_work(setup)


def predicted_ms(work: Work, k: int, rates: Rates) -> float:
    hardware = replace(machine("h200"), rates=rates)
    verify, draft = work
    drafting = 0.0 if draft is None else k * draft_step_time(draft, hardware).total
    return 1e3 * (pass_time(verify, hardware).total + drafting)


def errors(rates: Rates, published: Sequence[Cell], work: Sequence[Work]) -> list[float]:
    """Predicted over measured, as logarithms."""
    return [math.log(predicted_ms(one, cell.k, rates) / cell.ms) for cell, one in zip(published, work)]


def loss(values: Sequence[float]) -> float:
    """A norm of high order: the largest errors count most."""
    return sum(value**8 for value in values) ** (1 / 8)


def fitted(start: Rates, measure: Callable[[Rates], float], rounds: int) -> Rates:
    """A random search from `start`: steps in one to three parameters, wider after a success."""
    rng = random.Random(0)
    best = start
    least = measure(best)
    width = 0.2
    for _ in range(rounds):
        changes = {}
        for name in rng.sample(list(BOUNDS), rng.choice((1, 2, 3))):
            low, high = BOUNDS[name]
            changes[name] = min(high, max(low, getattr(best, name) * math.exp(rng.gauss(0, width))))
        candidate = replace(best, **changes)
        score = measure(candidate)
        if score < least:
            best = candidate
            least = score
            width = min(0.4, width * 1.3)
        else:
            width = max(0.01, width * 0.98)
    return best


def parameters_of(size: str) -> int:
    return model_size(read(f"google/gemma-4-{size}-it")[1]).total


def write(rates: Rates, published: Sequence[Cell]) -> None:
    values = {field.name: getattr(rates, field.name) for field in fields(Rates)}
    lines = ["H200 = Rates("]
    lines += [f"    {name}={value}," for name, value in values.items()]
    lines += [")", "# of each size's weights, by which a model is recognised", "PARAMETERS = {"]
    sizes = sorted({cell.size for cell in published})
    lines += [f'    "{size}": {parameters_of(size)},' for size in sizes]
    lines += ["}", "CELLS: tuple[Cell, ...] = ("]
    lines += [
        f'    Cell("{cell.size}", "{cell.format}", batch={cell.batch}, k={cell.k}, ms={cell.ms}),' for cell in published
    ]
    lines += [")"]
    text = RATES_FILE.read_text(encoding="utf-8")
    body = "# <fitted>\n" + "\n".join(lines) + "\n# </fitted>"
    RATES_FILE.write_text(re.sub(r"# <fitted>.*# </fitted>", lambda _: body, text, flags=re.S), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="fit nothing")
    parser.add_argument("--rounds", type=int, default=6000, help="steps of the search")
    options = parser.parse_args()
    published = cells()
    work = [work_of(cell) for cell in published]
    rates = machine("h200").rates
    if not options.check:
        rates = fitted(rates, lambda candidate: loss(errors(candidate, published, work)), options.rounds)
        rates = replace(rates, **{field.name: float(f"{getattr(rates, field.name):.4g}") for field in fields(Rates)})
        write(rates, published)
    worst = 0.0
    for cell, error in zip(published, errors(rates, published, work)):
        off = math.exp(error) - 1
        worst = max(worst, abs(off))
        print(f"{cell.size:8} {cell.format:5} {cell.batch:3} x K={cell.k:<2} {cell.ms:8.3f} ms  {off:+.1%}")
    print(f"{len(published)} cells, worst {worst:.1%}")
    if worst > TOLERANCE:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
