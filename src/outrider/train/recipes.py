"""Recipes: training runs written down, so that one command makes a drafter again.

A recipe is a TOML file of [[phase]] tables. Each is a run of its own under OUT/1-NAME, OUT/2-NAME, ..., the next going
on from the drafter of the one before and learning from its answers too; OUT/drafter is the last one's, with the story
of all. Keys of a phase are fields of TrainJob, Answering or TrainSettings; `answer_seed` and `seed` are the two seeds.
What the command line says by itself holds for all phases; its --minutes is shared out as the recipe's minutes are.
"""

from __future__ import annotations

import json
import os
import shutil
import tomllib
from dataclasses import dataclass, fields, replace
from importlib import resources
from pathlib import Path

from ..models.config import DrafterConfig
from ..types import OutriderError
from .answers import Answering
from .export import Json, write_json
from .finish import draw_curve
from .job import Say, TrainJob
from .losses import LossMix
from .model_card import model_card
from .run import Progress, train
from .trainer import Row, TrainSettings

OWN = ("name", "minutes")
NAMES = {
    TrainJob: {f.name for f in fields(TrainJob)}
    - {"target", "data", "judge", "out", "answering", "settings", "carry", "command", "device", "dtype"},
    Answering: {f.name for f in fields(Answering)} - {"seed"},
    TrainSettings: {f.name for f in fields(TrainSettings)} - {"minutes", "muon", "anchors", "tokens", "scored", "keep"},
}


@dataclass(frozen=True)
class Phase:
    name: str
    minutes: float
    values: Json  # whatever TOML holds; checked by `applied`


def read_recipe(name: str) -> list[Phase]:
    """A shipped recipe by name, or a TOML file."""
    path = Path(name)
    shipped = resources.files("outrider") / "assets" / "recipes" / f"{name}.toml"
    try:
        raw = tomllib.loads(
            path.read_text(encoding="utf-8") if path.suffix == ".toml" else shipped.read_text(encoding="utf-8")
        )
    except (OSError, UnicodeDecodeError):
        raise OutriderError(f"--recipe {name}: no such file; shipped recipes: shipped, further") from None
    except tomllib.TOMLDecodeError as error:
        raise OutriderError(f"--recipe {name}: not TOML ({error})") from None
    phases = raw.get("phase")
    if not isinstance(phases, list) or not phases or not all(isinstance(p, dict) for p in phases):
        raise OutriderError(f"--recipe {name}: holds no [[phase]] tables")
    found = []
    for number, table in enumerate(phases, 1):
        minutes = table.get("minutes")
        if not isinstance(minutes, int | float) or minutes <= 0:
            raise OutriderError(f"--recipe {name}: phase {number} needs 'minutes', a number above 0")
        found.append(
            Phase(str(table.get("name", number)), float(minutes), {k: v for k, v in table.items() if k not in OWN})
        )
    return found


def applied(job: TrainJob, phase: Phase, keep: frozenset[str] = frozenset()) -> TrainJob:
    """The job with a phase's values; names in `keep` stay as the job has them."""
    own: Json = {}
    answers: Json = {}
    settings: Json = {}
    for name, value in phase.values.items():
        if name in keep:
            continue
        value = tuple(value) if isinstance(value, list) else value
        if name in ("loss", "greedy_loss"):
            settings[name] = LossMix.parse(str(value))
        elif name == "optimizer":
            settings["muon"] = value == "muon"
        elif name == "answer_seed":
            answers["seed"] = value
        elif name in NAMES[TrainSettings]:
            settings[name] = value
        elif name in NAMES[Answering]:
            answers[name] = value
        elif name in NAMES[TrainJob]:
            own[name] = value
        else:
            raise OutriderError(f"recipe, phase {phase.name!r}: unknown key {name!r}")
    return replace(job, **own, answering=replace(job.answering, **answers), settings=replace(job.settings, **settings))


def train_recipe(
    job: TrainJob, phases: list[Phase], say: Say = print, progress: Progress | None = None,
    keep: frozenset[str] = frozenset()
) -> Row:  # fmt: skip
    """All phases, each where it stopped. `job.minutes` (None: the recipe's own) is shared out among them, unless steps
    are asked for."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise OutriderError("--recipe runs in one process: give torchrun the options of one phase at a time")
    own_folder = (job.out / f"1-{phases[0].name}" / "run.json").exists()
    if (job.out / "run.json").exists() or ((job.out / "drafter").exists() and not own_folder):
        raise OutriderError(f"--out {job.out}: holds a drafter that this recipe did not make: choose another --out")
    total = sum(p.minutes for p in phases)
    by_steps = "steps" in keep
    result: Row = {}
    init, carry = job.init, job.carry
    stories: list[Row] = []
    for number, phase in enumerate(phases, 1):
        scale = 1.0 if job.minutes is None else job.minutes / total
        own = applied(replace(job, init=init, carry=carry), phase, keep)
        limit = (
            own.answer_minutes if own.answer_minutes is None or "answer_minutes" in keep else own.answer_minutes * scale
        )
        folder = job.out / f"{number}-{phase.name}"
        own = replace(own, out=folder, minutes=None if by_steps else phase.minutes * scale, answer_minutes=limit)
        say(
            f"phase {number} of {len(phases)}: {phase.name}"
            + ("" if own.minutes is None else f", {own.minutes:.3g} minutes")
        )
        result = train(own, say, progress)
        if "stopped" in result:
            publish(job.out, folder, result, stories)
            return result
        stories.append(json.loads((folder / "drafter" / "provenance.json").read_text()))
        init, carry = str(folder / "drafter"), (*carry, folder / "data.npz")
    publish(job.out, folder, result, stories)
    return result


def publish(out: Path, last: Path, result: Row, stories: list[Row]) -> None:
    """OUT/drafter: the last phase's files, with the provenance, logs and card of all phases."""
    made, to = last / "drafter", out / "drafter"
    if not (made / "model.safetensors").exists():
        return
    shutil.copytree(made, to, dirs_exist_ok=True)
    current = json.loads((made / "provenance.json").read_text())
    runs = stories if stories and stories[-1] == current else [*stories, current]
    head = {k: current[k] for k in ("target", "target_hash", "data", "data_sha256", "device", "torch")}
    write_json(to / "provenance.json", {**head, "runs": runs})
    config = DrafterConfig.from_hf(json.loads((to / "config.json").read_text()))
    (to / "README.md").write_text(model_card(config, result, runs), encoding="utf-8")
    logs = sorted(p for p in out.glob("*-*/log.jsonl"))
    rows = [{"run": n, **json.loads(line)} for n, path in enumerate(logs, 1) for line in path.read_text().splitlines()]
    (to / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    draw_curve(last / "log.jsonl", to / "curve.png")
