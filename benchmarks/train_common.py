"""What the stages of the smollm2 training benchmarks share: the log, Spec-Bench answers, scores, the drafter in pieces."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))
os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")

import numpy as np
import torch

from outrider.train import design, run
from outrider.train.data import Sequences, make_batch, plan_epoch, read_prompts
from outrider.train.evaluate import Head, matches, summary
from outrider.train.generate import Answerer, Answering
from outrider.train.net import DraftNet

BENCH = Path(__file__).parent / "data" / "spec_bench_question.jsonl"
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPE = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
BASE: dict[str, Any] = dict(reads=(4, 9, 14, 19, 24, 29), intermediate=352, taps=(), position_offset=2, start="target")
BEGAN = time.perf_counter()


def say(text: str) -> None:
    print(f"[{time.perf_counter() - BEGAN:7.1f}] {text}", flush=True)


def note(out: Path, name: str, row: dict[str, Any]) -> None:
    with open(out / name, "a") as file:
        file.write(json.dumps(row) + "\n")


def build_net(target: run.Target, data: Sequences, change: dict[str, Any], seed: int = 0) -> DraftNet:
    shape = BASE | change
    config = design.plain(
        target.config, reads=tuple(shape["reads"]), intermediate=shape["intermediate"], taps=tuple(shape["taps"]),
        position_offset=shape["position_offset"], target_hash=target.hash,
    )  # fmt: skip
    net = DraftNet(config, target.config, seed).to(DEVICE)
    if shape["start"] == "target":
        design.start_from_target(net, target.model)
        few = plan_epoch(data, 16384, 65536, 0, 0)[:2]
        fitted = design.fit_inputs(net, target.model, [make_batch(data, b, 1).to(DEVICE) for b in few])
        say(f"inputs explain {fitted:.3f}")
    return net


def bench_answers(
    target: run.Target, keep: Path, temperature: float, max_new: int, limit: int | None = None
) -> tuple[Sequences, list[str], list[int]]:
    """Spec-Bench questions answered by the target: greedily, or with the engine's coupled noise."""
    prompts = read_prompts(BENCH, limit)
    kept = keep / f"bench-{temperature:g}-{max_new}-{len(prompts)}.npz"
    if not kept.exists():
        encoded = run.encode(prompts, target.text, target.config.vocab_size, texts=False, max_tokens=8000)
        rows = [encoded[i] for i in range(len(encoded))]
        hot = temperature > 0
        how = Answering(max_new, temperature or 1.0, min(480, len(rows)), 0.0 if hot else 1.0, coupled=hot)
        machine = Answerer(target.model, how, max(len(r) for r in rows), target.eos_ids)
        done = sorted(machine.answer(rows, list(range(len(rows)))), key=lambda d: d[0])
        Sequences.of([np.concatenate([rows[n], a]) for n, _, a in done], [len(rows[n]) for n, _, _ in done], [n for n, _, _ in done],
                     [not hot] * len(done), target.config.vocab_size).save(kept)  # fmt: skip
        del machine
        if DEVICE.type == "cuda":
            torch.cuda.empty_cache()
    data = Sequences.load(kept)
    return data, [prompts[i].category for i in data.index], data.index.tolist()


def score(target: run.Target, net: DraftNet, data: Sequences, categories: list[str] | None, most: int, head: Head | None = None,
          seeds: list[int] | None = None) -> dict[str, Any]:  # fmt: skip
    weights = {k: v.detach() for k, v in net.cast(DTYPE).items()}
    right = matches(target.model, net, weights, head or Head(target.model.head), data, most, seeds=seeds)
    return summary(right, categories or ["all"] * len(data), most)


def brief(result: dict[str, Any]) -> str:
    tpc = result["tokens_per_cycle"]
    first = result["acceptance_by_position"][:5]
    return f"K=4 {tpc.get(4, 0):.3f} (categories {result['mean_of_categories']:.3f}) K=8 {tpc.get(8, 0):.3f} by position {first}"


def give(drafter: Path, out: Path) -> None:
    """The drafter in pieces that fit through: cat model.safetensors.* > model.safetensors."""
    blob = (drafter / "model.safetensors").read_bytes()
    for n in range(0, len(blob), 15 << 20):
        (out / f"model.safetensors.{n // (15 << 20)}").write_bytes(blob[n : n + (15 << 20)])
    small = {p.name: json.loads(p.read_text()) for p in drafter.glob("*.json")}
    (out / "drafter.json").write_text(json.dumps(small, indent=1))
