"""Recipes: settings of a training run in a TOML file, and runs of several phases.

Keys are the fields of TrainConfig. A file without [[phase]] tables is one run in OUT. With them, each phase is a run
under OUT/1-NAME, OUT/2-NAME, ...: it starts from the drafter of the previous phase and also trains on its answers.
OUT/drafter is the last one's, with the provenance of all. Keys above the tables hold for every phase. Options of the
command line win; its --minutes is divided over the phases in proportion to their own minutes.
"""

from __future__ import annotations

import json
import shutil
import tomllib
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path

from ..models.block_config import BlockConfig, is_block
from ..models.config import DrafterConfig
from ..types import OutriderError, require
from .config import Say, TrainConfig
from .export import Json, read_json, write_json
from .finish import draw_curve, model_card
from .run import Progress, train
from .trainer import Row, read_rows


@dataclass(frozen=True)
class Phase:
    name: str
    minutes: float
    values: Json


@dataclass(frozen=True)
class Recipe:
    name: str
    values: Json = field(default_factory=dict)
    phases: tuple[Phase, ...] = ()


def read_recipe(name: str) -> Recipe:
    """Reads a shipped recipe by name, or a TOML file."""
    shipped = resources.files("outrider") / "assets" / "recipes" / f"{name}.toml"
    try:
        raw = tomllib.loads((Path(name) if name.endswith(".toml") else shipped).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError):
        raise OutriderError(f"--recipe {name}: no such file; shipped recipes: shipped, further, dflash") from None
    except tomllib.TOMLDecodeError as error:
        raise OutriderError(f"--recipe {name}: not TOML ({error})") from None
    tables = raw.pop("phase", [])
    raw.pop("about", None)
    if not isinstance(tables, list) or not all(isinstance(t, dict) for t in tables) or not (tables or raw):
        raise OutriderError(f"--recipe {name}: holds no settings and no [[phase]] tables")
    phases = []
    for number, table in enumerate(tables, 1):
        title = str(table.pop("name", number))
        minutes = table.pop("minutes", None)
        good = isinstance(minutes, int | float) and minutes > 0
        require(good, f"--recipe {name}: phase {number} needs 'minutes', a number above 0")
        phases.append(Phase(title, float(minutes), table))
    return Recipe(name, raw, tuple(phases))


def train_recipe(
    config: TrainConfig, recipe: Recipe, say: Say = print, progress: Progress | None = None, keep: Collection[str] = ()
) -> Row:
    """Trains the run, or all phases, each resuming where it stopped. Names in `keep` were given on the command line."""
    config = config.with_values(recipe.values, f"--recipe {recipe.name}", keep)
    if not recipe.phases:
        return train(config, say, progress)
    out = config.out
    folders = [config.out / f"{number}-{p.name}" for number, p in enumerate(recipe.phases, 1)]
    foreign = (out / "drafter").exists() and not (folders[0] / "run.json").exists()
    if foreign or (out / "run.json").exists():
        raise OutriderError(f"--out {out}: holds a drafter that this recipe did not make: choose another --out")
    scale = 1.0 if config.minutes is None else config.minutes / sum(p.minutes for p in recipe.phases)
    for number, (phase, folder) in enumerate(zip(recipe.phases, folders, strict=True), 1):
        phase_config = config.with_values(phase.values, f"phase {phase.name!r}", keep)
        limit = phase_config.answer_minutes
        if limit is not None and "answer_minutes" not in keep:
            limit *= scale
        minutes = None if "steps" in keep else phase.minutes * scale
        say(f"phase {number} of {len(folders)}: {phase.name}" + ("" if minutes is None else f", {minutes:.3g} minutes"))
        settings = replace(phase_config, out=folder, minutes=minutes, answer_minutes=limit)
        result = train(settings, say, progress, measures_gain=number == len(folders))
        if "stopped" in result or "too_few_steps" in result:
            break
        config = replace(config, init=str(folder / "drafter"), carry=(*config.carry, folder / "data.npz"))
    publish(out, folders[:number], result)
    return result


def publish(out: Path, folders: list[Path], result: Row) -> None:
    """Writes OUT/drafter: the last phase's files, with provenance, logs and card of all phases so far."""
    source = folders[-1] / "drafter"
    to = out / "drafter"
    if not (source / "model.safetensors").exists():
        return
    shutil.copytree(source, to, dirs_exist_ok=True)
    runs = [read_json(folder / "drafter" / "provenance.json") for folder in folders]
    head = {k: runs[-1][k] for k in ("target", "target_hash", "data", "data_sha256", "device", "torch")}
    write_json(to / "provenance.json", {**head, "runs": runs})
    raw = read_json(to / "config.json")
    config = BlockConfig.from_hf(raw) if is_block(raw) else DrafterConfig.from_hf(raw)
    (to / "README.md").write_text(model_card(config, result, runs), encoding="utf-8")
    rows = ({"run": n, **row} for n, folder in enumerate(folders, 1) for row in read_rows(folder / "log.jsonl"))
    (to / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    draw_curve(folders[-1] / "log.jsonl", to / "curve.svg")
