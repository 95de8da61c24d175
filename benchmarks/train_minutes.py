"""Gain of N minutes of `outrider train`, and whether its forecast was right: every model for every length.

    python benchmarks/train_minutes.py --models smollm2.gguf qwen.gguf random --minutes 10 30 60 --data PROMPTS.jsonl \
        --out runs/minutes --cores 0,1

Each run is a process pinned to the cores. Of the prompts --judge many, spread over the file, are never trained on:
they give the tokens per cycle of every drafter, greedily. `random` is a Llama of 50 million random weights made here:
its steps cost what a model's do, its text is noise. One JSON line per run goes to OUT/minutes.jsonl as soon as it is
over; a run that stands there is not made again. Needs no network where models are given as paths.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

from tests.dummy_checkpoint import write_gguf

from outrider.models.config import ModelConfig
from outrider.prompts import read_prompts
from outrider.train.data import Sequences

DATA = Path(__file__).parent / "data" / "spec_bench_question.jsonl"
SHAPE = {"model_type": "llama", "vocab_size": 32000, "hidden_size": 512, "num_hidden_layers": 10}
SHAPE |= {"num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 1536, "rms_norm_eps": 1e-5}
SHAPE |= {"max_position_embeddings": 2048, "eos_token_id": 1, "tie_word_embeddings": True}


def outrider(cores: str, *words: object) -> subprocess.CompletedProcess[str]:
    """The command on these cores; what it says goes to the terminal."""
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    pinned = ["taskset", "-c", cores, sys.executable, "-m", "outrider", *map(str, words)]
    return subprocess.run(pinned, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path})


def random_model(out: Path) -> Path:
    target = out / "random.gguf"
    if not target.exists():
        write_gguf(target, ModelConfig.from_hf(SHAPE), "q8_0")
    return target


def one_run(name: str, model: Path | str, minutes: float, args: argparse.Namespace) -> dict[str, Any]:
    folder = args.out / f"{name}-{minutes:g}"
    began = time.perf_counter()
    load = os.getloadavg()[0]
    arguments = ("--target", model, "--data", args.out / "train.jsonl", "--minutes", minutes, "--out", folder)
    code = outrider(args.cores, "train", *arguments, "--device", "cpu").returncode
    row: dict[str, Any] = {"model": name, "minutes": minutes, "code": code, "load": [load, os.getloadavg()[0]]}
    row["seconds"] = round(time.perf_counter() - began, 1)
    forecast = folder / "forecast.json"
    row["forecast"] = json.loads(forecast.read_text()) if forecast.exists() else None
    if not (folder / "drafter" / "provenance.json").exists():
        return row
    story = json.loads((folder / "drafter" / "provenance.json").read_text())
    data = Sequences.load(folder / "data.npz")
    row["happened"] = {"answered": data.answer_tokens, "steps": story["steps"], "training_s": story["seconds"]}
    heldout = ("--prompts", args.out / "heldout.jsonl", "--max-tokens", 96, "--device", "cpu", "--json")
    judged = outrider(args.cores, "eval-drafter", model, folder / "drafter", *heldout)
    if judged.returncode == 0:
        record = json.loads(judged.stdout)
        row["tokens_per_cycle"] = {k: record["tokens_per_cycle"][k] for k in ("1", "2", "4", "8")}
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["smollm2", "random"], help="paths, names, or `random`")
    parser.add_argument("--minutes", nargs="+", type=float, default=[10.0, 30.0, 60.0])
    parser.add_argument("--data", type=Path, default=DATA, help="prompts as JSON lines, gzipped or not")
    parser.add_argument("--judge", type=int, default=24, help="prompts that are only evaluated on")
    parser.add_argument("--out", type=Path, default=Path("runs/minutes"))
    parser.add_argument("--cores", default="0,1", help="as taskset takes them")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    prompts = read_prompts(args.data)
    aside = {int(i * len(prompts) / args.judge) for i in range(args.judge)}
    for name, wanted in (("train", False), ("heldout", True)):
        some = ({"prompt": p.text, "category": p.category} for i, p in enumerate(prompts) if (i in aside) == wanted)
        (args.out / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some), encoding="utf-8")
    log = args.out / "minutes.jsonl"
    done = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    for minutes in args.minutes:  # all models at one length first: a run that is cut short has compared them
        for model in args.models:
            name = Path(model).stem
            if any((row["model"], row["minutes"]) == (name, minutes) for row in done):
                continue
            row = one_run(name, random_model(args.out) if model == "random" else model, minutes, args)
            with log.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
