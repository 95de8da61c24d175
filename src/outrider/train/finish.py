"""The end of a run: the top of the clustered head, the evaluation, and a folder that holds everything a drafter has.

config.json, generation_config.json, model.safetensors    the drafter
acceptance.json                                           what the controller expects of it (spec/acceptance.py)
README.md                                                 its card: what it is, what it reaches, how it was made
provenance.json, log.jsonl, curve.svg                     where it comes from
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from importlib import resources
from pathlib import Path

import torch

from .. import svg
from ..models.block_config import BlockConfig
from ..models.config import DrafterConfig
from ..models.decoder import TextModel
from ..models.inspect import drafter_size, model_size
from ..spec import acceptance
from ..spec.acceptance import Runs
from ..types import MAX_DRAFT
from ..weights import files as weight_files
from ..weights import hub
from .clock import Halt, Halted
from .clusters import choose_top, recall_curve
from .data import Sequences
from .evaluate import Judge, Judged, Recorded, summary
from .export import Json, read_json, save_drafter
from .net import DrafterModule, TrainNet
from .seen_prompts import FIELD, pack
from .trainer import Row, Trainer, read_rows

# over the held-out answers: is the last the best; full head, clustered head, clustered head on the sampled answers
PASSES = 4
TEMPLATE = resources.files("outrider") / "assets" / "model_card.md"
COLUMNS = (1, 2, 3, 4, 6, 8)
VIEWS = {"clustered": "greedy, clustered head", "full": "greedy, full head", "sampled": "sampled, coupled"}


def scored(result: Judged, most: int) -> Json:
    """Tokens per cycle; score: at K = 4."""
    result_summary = summary(result.right, ["all"] * len(result.right), most)
    return {"score": result_summary["tokens_per_cycle"][min(4, most)], **result_summary}


def judge(model: TextModel, net: TrainNet, data: Sequences, temperature: float, halt: Halt = lambda: False) -> Json:
    """An evaluation during training on held-out answers: greedy ones with the full head, and under "sampled" those
    drawn at `temperature`, with the head as deployed. score: tokens per cycle at K = 4, the mean of both if both exist.
    Raises Halted if `halt` ends it."""
    evaluations = [
        scored(Judge(model, net, full=kind, halt=halt).drafts(data.select(data.greedy == kind), 8, heat), 8)
        for kind, heat in ((True, 0.0), (False, temperature))
        if (data.greedy == kind).any()
    ]
    if len(evaluations) == 1:
        return evaluations[0]
    cold, hot = evaluations
    return {**cold, "sampled": hot, "score": round((cold["score"] + hot["score"]) / 2, 4)}


def load_best(trainer: Trainer) -> int:
    """Loads the weights of the best evaluation if they are better than the last ones, so that no better drafter is
    overwritten. If the evaluation of the last ones was given up and only the initial drafter was evaluated, keeps the
    last ones. Returns the step of the net's weights. Last weights that lose stay in OUT/last."""
    job = trainer.config
    net = trainer.net
    step = trainer.progress.step
    path = trainer.config.out / "best.pt"
    won = trainer.judge(ties=True)
    if won or not path.exists():
        return step
    best = torch.load(path, map_location=trainer.device, weights_only=True)
    if won is None and best["step"] == 0 and not 0 < job.eval_every <= step:
        return step
    if best["step"] != step:
        save_drafter(job.out / "last", net.config, net.export())
    net.load_state_dict(best["net"])
    return int(best["step"])


def finish(trainer: Trainer, target_hash: str, aside: Sequences, halt: Halt = lambda: False) -> Row:
    """Chooses the best weights and the clusters scored per step, evaluates as far as `halt` allows, and writes the
    files."""
    job = trainer.config
    model = trainer.model
    net = trainer.net
    result: Row = {"step": load_best(trainer)}
    runs: list[Runs] = []
    cold = aside.select(aside.greedy)
    hot = aside.select(~aside.greedy)
    with suppress(Halted):
        if len(cold):
            states: Recorded = []
            full = Judge(model, net, halt=halt)
            last = full.drafts(cold, record=states, weigh=not net.config.clusters)
            result["full"] = scored(last, MAX_DRAFT)
            if isinstance(net, DrafterModule) and net.config.clusters:
                g, choice = (torch.cat(each) for each in zip(*states))
                curve = recall_curve(
                    g, choice, centroids=full.weights["centroids"], order=full.weights["token_ordering"]
                )
                top = job.cluster_top or choose_top(curve, job.cluster_recall).top
                net.config = replace(net.config, cluster_top=top)
                result["recall"] = [asdict(r) for r in curve]
                last = Judge(model, net, full=False, halt=halt).drafts(cold, weigh=True)
                result["clustered"] = scored(last, MAX_DRAFT)
            runs = last.runs()
            if len(hot):
                result["sampled"] = scored(Judge(model, net, full=False, halt=halt).drafts(hot, 8, job.temperature), 8)
    if job.kind == "dflash":
        result["draft_unit"] = "pass"
    result["draft_step_share"] = round(drafter_size(net.config).step / model_size(model.config).active, 4)
    if "full" in result:
        trainer.hooks.log({"step": trainer.progress.step, "final": result})
    write_drafter(trainer, target_hash, result=result, runs=runs)
    return result


def write_drafter(trainer: Trainer, target_hash: str, result: Row, runs: list[Runs]) -> None:
    """Writes OUT/drafter. Without a result: without acceptance profile, log and curve."""
    out = trainer.config.out
    net = trainer.net
    story = provenance(trainer, target_hash)
    folder = out / "drafter"
    log = out / "log.jsonl"
    (folder / acceptance.FILE).unlink(missing_ok=True)  # belongs to other weights
    save_drafter(
        folder, net.config, weights=net.export(), provenance=story, card=model_card(net.config, result, [story])
    )
    if any(len(right) for right, _ in runs):
        print_of = weight_files.fingerprint(hub.resolve(str(folder), kind="drafter"))
        acceptance.write(folder, acceptance.measure(runs, print_of))
    if result:
        draw_curve(log, out / "curve.svg")
        for path in (log, out / "curve.svg"):
            if path.exists():
                shutil.copyfile(path, folder / path.name)


def provenance(trainer: Trainer, target_hash: str) -> Row:
    job = trainer.config
    data = trainer.data
    commit = ""
    source = read_json(job.out / "prompts.json")
    digests = source.get("digests", [])
    trained_on = {FIELD: pack(digests[line] for line in set(data.index.tolist()))} if digests else {}
    with suppress(OSError, subprocess.SubprocessError):
        commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10).stdout.strip()
    return {
        "command": job.command or " ".join(sys.argv),
        "commit": commit or None,
        "target": job.target,
        "target_hash": target_hash,
        "data": source["data"],
        "data_sha256": source["data_sha256"],
        **trained_on,
        "sequences": len(data),
        "started_from": job.init,
        "answer_tokens": data.answer_tokens,
        "greedy_share": round(float(data.greedy.mean()), 3),
        "temperature": job.temperature,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if job.cuda else "cpu",
        "made": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "steps": trainer.progress.step,
        "seconds": round(trainer.progress.seconds, 1),
        "settings": {**job.identity(), **asdict(trainer.sizes)},
    }


def draw_curve(log: Path, to: Path) -> None:
    """Writes the learning curve as SVG."""
    rows = read_rows(log)
    curve = [r for r in rows if "loss" in r]
    evals = [r for r in rows if "eval" in r]
    if not curve:
        return
    right = [(f"position {j + 1}", [(r["step"], r["hit"][j]) for r in curve]) for j in range(len(curve[0]["hit"]))]
    if evals:
        right.append(("held out, position 1", [(r["step"], r["eval"]["acceptance_by_position"][0]) for r in evals]))
    loss = svg.lines("training loss", "step", y_label="", series=[("loss", [(r["step"], r["loss"]) for r in curve])])
    hits = svg.lines("draft token right, given those before it", "step", y_label="share of anchors", series=right)
    to.write_text(svg.stacked([loss, hits]), encoding="utf-8")


# ---- the model card --------------------------------------------------------------------------------------------------
def model_card(config: DrafterConfig | BlockConfig, result: Json, runs: Sequence[Json]) -> str:
    """Text of the card. `result`: from `finish`; `runs`: provenance of every run, the last one last."""
    measured = any(view in result for view in VIEWS)
    parts = {
        "target": runs[-1]["target"],
        "description": described(config),
        "hash": runs[-1]["target_hash"],
        "figures": figures(result) if measured else "Not measured: the run was stopped before its evaluation.",
        "phases": "\n".join(f"{number}. {trained(run)}" for number, run in enumerate(runs, 1)),
        "commands": "\n".join(dict.fromkeys(str(run["command"]) for run in runs)),
    }
    return TEMPLATE.read_text(encoding="utf-8").format(**parts)


def trained(run: Json) -> str:
    start = f" It went on from {run['started_from']}." if run.get("started_from") else ""
    answers = f"{run['sequences']} answers of the target ({run['answer_tokens']} tokens"
    kinds = f"{run['greedy_share']:.0%} of them greedy, the others at T = {run['temperature']:g}"
    spent = f"{run['made'][:10]}, {run['device']}, {run['seconds']:.0f} s of training: {run['steps']} steps"
    return f"{spent} over {answers}, {kinds}) to the prompts of {run['data']}.{start}"


def described(config: DrafterConfig | BlockConfig) -> str:
    some = config.layers[0]
    count = len(config.layers)
    tapped = ", ".join(map(str, config.taps or ()))
    size = f"{some.attn.heads} heads of {some.attn.head_dim}, MLP {some.intermediate}, hidden {config.hidden}"
    if isinstance(config, BlockConfig):
        block = f"; {config.max_tokens} tokens in one pass, mask token {config.mask_id}" if config.mask_id >= 0 else ""
        return (
            f"{'DFlash' if config.kind == 'dflash' else 'EAGLE-3'} in the speculators layout: {count} layers ({size}) "
            f"over the target's hidden states after layers {tapped}{block}; the target's own embedding and head. "
            f"`outrider export` writes it in vLLM's layout."
        )
    read = ", ".join(map(str, config.reads or ()))
    reads = f" that read the K/V cache of the target's layers {read}" if read else ""
    taps = f", fed the target's hidden states after layers {tapped} too" if tapped else ""
    untied_head = f"a head of its own ({config.vocab_size} tokens)"
    head = "head tied to the target's embedding" if config.tied_to_target else untied_head
    if config.clusters:
        head += f", in {config.clusters} clusters of which {config.cluster_top} are scored a step"
    bits = f" Its layers were trained as {config.weight_bits} bits hold them." if config.weight_bits else ""
    return f"{count} query-only layers ({size}){reads}{taps}; {head}.{bits}"


def figures(result: Json) -> str:
    lines = ["Tokens per cycle on held-out prompts, walked exactly:", ""]
    lines.append("| | " + " | ".join(f"K = {k}" for k in COLUMNS) + " | first position |")
    lines.append("|---" * (len(COLUMNS) + 2) + "|")
    for view, title in VIEWS.items():
        if view in result:
            tokens_per_cycle = {int(k): v for k, v in result[view]["tokens_per_cycle"].items()}
            cells = " | ".join(f"{tokens_per_cycle[k]:.3f}" if k in tokens_per_cycle else "" for k in COLUMNS)
            lines.append(f"| {title} | {cells} | {result[view]['acceptance_by_position'][0]:.3f} |")
    counted = result.get("clustered", result.get("full"))
    if counted:
        share = f"A draft {result.get('draft_unit', 'step')} reads {result['draft_step_share']:.2%} of a target step."
        lines += ["", f"{counted['answers']} greedy answers, {counted['tokens']} tokens. {share}"]
    return "\n".join(lines)
