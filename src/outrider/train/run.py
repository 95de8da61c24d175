"""`outrider train` from end to end: prompts -> the target's answers -> an unrolled training run -> a drafter on disk.

Everything lives in one folder and every stage continues where it stopped:

    OUT/prompts.npz        encoded prompts
    OUT/data/data-*.npz    sequences: prompt and the target's answer
    OUT/checkpoint.pt      the run; OUT/best.pt the weights of its best evaluation
    OUT/log.jsonl          learning curve and evaluations; OUT/curve.png
    OUT/drafter/           the result, with provenance.json
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from ..engine.text import Tokenizer
from ..models import build
from ..models.config import DrafterConfig, ModelConfig
from ..models.pairing import fits
from ..types import OutriderError, TextFiles
from ..weights import files as weight_files
from ..weights import hub
from ..weights.load import load_drafter, load_target, plain_all
from . import design
from .capture import DenseOps
from .clusters import Recall, choose_top, recall_curve
from .data import Prompt, Sequences, file_hash, load_folder, make_batch, plan_epoch, read_prompts
from .evaluate import Head, matches, states, summary
from .export import save_drafter, write_json
from .generate import Answering, answer_all
from .net import DraftNet, step_weights, target_weights
from .parallel import Group, process_group
from .trainer import JsonLog, Trainer, TrainSettings

Say = Callable[[str], None]
TOPS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)


@dataclass(frozen=True)
class TrainJob:
    target: str
    data: Path
    out: Path
    texts: bool = False  # plain text instead of prompts to answer
    init: str | None = None  # a drafter to start from
    style: Literal["auto", "plain", "gemma"] = "auto"
    layers: int = 6
    reads: tuple[int, ...] = ()  # plain style; empty: spread evenly
    hidden: int | None = None
    intermediate: int | None = None
    taps: tuple[int, ...] = ()
    position_offset: int = 2  # plain style: the constant position is L - offset
    clusters: int | None = None  # None: chosen by the vocabulary; 0: no clustered head
    recall: float = 0.99  # the clustered head's top is the cheapest that finds the full head's token this often
    max_prompt: int = 512
    answering: Answering = field(default_factory=Answering)
    answer_minutes: float | None = None  # stop answering after this long and train on what there is
    limit: int | None = None  # prompts
    heldout: int = 256
    settings: TrainSettings = field(default_factory=TrainSettings)
    device: str = "cpu"
    dtype: torch.dtype = torch.float32
    command: str = ""


@dataclass
class Target:
    model: Any
    config: ModelConfig
    text: TextFiles
    hash: str
    name: str = ""

    @property
    def eos_ids(self) -> tuple[int, ...]:
        return self.text.eos_ids or self.config.eos_ids


def open_target(name: str, device: str, dtype: torch.dtype) -> Target:
    files = hub.resolve(name)
    torch.backends.cuda.enable_cudnn_sdp(False)  # it plans anew for every shape, and every batch has its own
    config, weights, text = load_target(files, device, dtype)
    return Target(build(config, weights, DenseOps()), config, text, weight_files.fingerprint(files), name)


# ---- data -----------------------------------------------------------------------------------------------------------
def encode(prompts: list[Prompt], text: TextFiles, vocab: int, *, texts: bool, max_tokens: int, chat: bool = True) -> Sequences:
    """Prompts through the chat template (or plain texts, cut into pieces) as token sequences; over-long prompts are left out."""
    tokenizer, rows, index = Tokenizer.load(text), [], []
    template = chat and not texts and tokenizer.has_chat_template
    for i, prompt in enumerate(prompts):
        if template:
            ids = tokenizer.chat([{"role": "user", "content": prompt.text}])
        else:
            ids = tokenizer.encode(prompt.text, bos=True)
        pieces = [ids[lo : lo + max_tokens] for lo in range(0, len(ids), max_tokens)] if texts else [ids]
        for piece in pieces:
            if len(piece) >= (4 if texts else 1) and len(piece) <= max_tokens:
                rows.append(np.array(piece))
                index.append(i)
    if not rows:
        raise OutriderError(f"none of the {len(prompts)} prompts fits {max_tokens} tokens: raise --max-prompt")
    return Sequences.of(rows, [1 if texts else len(r) for r in rows], index, [False] * len(rows), vocab)


def prepare(job: TrainJob, target: Target, say: Say, group: Group) -> Sequences:
    """The training sequences: read from OUT where they are, made where not."""
    kept = job.out / "prompts.npz"
    most = job.max_prompt + job.answering.max_new if job.texts else job.max_prompt
    if group.first and not kept.exists():
        listed = read_prompts(job.data, job.limit)
        encode(listed, target.text, target.config.vocab_size, texts=job.texts, max_tokens=most).save(kept)
        write_json(job.out / "prompts.json", {"data": job.data.name, "data_sha256": file_hash(job.data)})
    group.wait()
    prompts = Sequences.load(kept)
    say(f"{len(prompts)} {'texts' if job.texts else 'prompts'}, {int(prompts.lengths.sum())} tokens")
    if job.texts:
        return prompts
    last = [0.0]

    def report(done: int, count: int, tokens: int, seconds: float) -> None:
        if seconds - last[0] >= 5 or done == count:
            last[0] = seconds
            say(f"answered {done}/{count} prompts, {tokens} tokens, {tokens / max(seconds, 1e-9):.0f} tok/s")

    rows = [prompts[i] for i in range(len(prompts))]
    deadline = None if job.answer_minutes is None else 60 * job.answer_minutes
    answer_all(target.model, rows, job.answering, job.out / "data", target.eos_ids, report=report, deadline=deadline, group=group)
    if job.device.startswith("cuda"):
        torch.cuda.empty_cache()
    group.wait()
    return load_folder(job.out / "data")


def heldout_lines(lines: np.ndarray, count: int) -> np.ndarray:
    """`count` of the prompts, spread over the file; the same whatever the shards are."""
    return lines[:: max(1, len(lines) // max(1, count))][:count] if count else lines[:0]


def split(data: Sequences, heldout: int) -> tuple[Sequences, Sequences]:
    """Train and held out, by prompt: held-out prompts are spread over the file, and only greedy answers are kept of them."""
    lines = np.unique(data.index)
    out = np.isin(data.index, heldout_lines(lines, min(heldout, len(lines) // 5)))
    aside = data.select(np.nonzero(out & data.greedy)[0]) if (out & data.greedy).any() else data.select(np.nonzero(out)[0])
    return data.select(np.nonzero(~out)[0]), aside


# ---- the drafter ----------------------------------------------------------------------------------------------------
def default_clusters(vocab: int) -> int:
    """A power of two near 4·√V that divides the vocabulary: 1024 of 49,152; 2048 of 262,144."""
    count = 1
    while vocab % (2 * count) == 0 and 2 * count <= 4.7 * vocab**0.5:
        count *= 2
    return count if count >= 8 else 0


def drafter_config(job: TrainJob, target: ModelConfig, target_hash: str) -> DrafterConfig:
    clusters = default_clusters(target.vocab_size) if job.clusters is None else job.clusters
    top = max(1, clusters // 16)
    style = ("gemma" if target.family in ("gemma3", "gemma4") else "plain") if job.style == "auto" else job.style
    if style == "gemma":
        return design.gemma(
            target, hidden=job.hidden or 256, intermediate=job.intermediate, clusters=clusters, cluster_top=top, target_hash=target_hash
        )
    reads = job.reads or design.spread_reads(target, min(job.layers, len(target.kv_layers)))
    return design.plain(
        target, reads=reads, hidden=job.hidden, intermediate=job.intermediate, taps=job.taps, clusters=clusters, cluster_top=top,
        position_offset=job.position_offset,
        target_hash=target_hash,
    )  # fmt: skip


def make_net(job: TrainJob, target: Target, data: Sequences, say: Say) -> DraftNet:
    model, settings = target.model, job.settings
    if job.init is not None:
        config, weights = load_drafter(job.init, "cpu", torch.float32)
        reason = fits(config, target.config)
        if reason is not None:
            raise OutriderError(f"--init {job.init}: {reason}")
        net = DraftNet(replace(config, target_hash=target.hash), target.config, settings.seed)
        net.load(plain_all(weights))
        return net.to(model.device)
    net = DraftNet(drafter_config(job, target.config, target.hash), target.config, settings.seed).to(model.device)
    few = [make_batch(data, b, 1).to(model.device) for b in plan_epoch(data, settings.anchors, settings.tokens, settings.seed, 0)[:2]]
    if net.config.tied_to_target and net.config.hidden == net.config.backbone_hidden:
        design.start_from_target(net, model)
        fitted = design.fit_inputs(net, model, few)
        say(f"drafter starts from target layers {net.config.reads}; its input explains {fitted:.0%} of the residual stream there")
    if net.config.gemma:
        design.start_gemma(net, model, few[0])
    if net.config.clusters:
        design.start_clusters(net, model, settings.seed)
    return net


def judge(
    target: Target, net: DraftNet, data: Sequences, categories: list[str] | None = None, *, most: int = 8, clustered: bool = False
) -> dict[str, Any]:
    """Tokens a cycle on held-out answers; score: at K = 4."""
    weights = net.cast(target.model.dtype)
    rows = target.model.head if net.config.tied_to_target else weights["embed"]
    head = Head(rows, weights["centroids"], weights["token_ordering"], net.config.cluster_top) if clustered else Head(rows)
    right = matches(target.model, net, {k: v.detach() for k, v in weights.items()}, head, data, most)
    result = summary(right, categories or ["all"] * len(data), most)
    return {"score": result["tokens_per_cycle"][min(4, most)], **result}


def tune_top(target: Target, net: DraftNet, data: Sequences, need: float, most: float = 0.1) -> tuple[int, list[Recall]]:
    """The recall / cost curve of the clustered head on held-out states, and the top it suggests."""
    weights = {k: v.detach() for k, v in net.cast(target.model.dtype).items()}
    rows = target.model.head if net.config.tied_to_target else weights["embed"]
    g, choices = states(target.model, net, weights, Head(rows), data)
    tops = tuple(t for t in TOPS if t <= net.config.clusters)
    curve = recall_curve(g, choices, weights["centroids"], weights["token_ordering"], tops)
    return choose_top(curve, need, most).top, curve


def provenance(job: TrainJob, target: Target, data: Sequences) -> dict[str, Any]:
    try:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        commit = ""
    return {
        "command": job.command or " ".join(sys.argv), "commit": commit or None, "target": job.target, "target_hash": target.hash,
        **json.loads((job.out / "prompts.json").read_text()), "sequences": len(data),
        "answer_tokens": data.answer_tokens, "greedy_share": round(float(data.greedy.mean()), 3), "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if job.device.startswith("cuda") else "cpu",
        "made": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "settings": asdict(job.settings) | {"loss": str(job.settings.loss), "greedy_loss": str(job.settings.greedy_loss or "")},
    }  # fmt: skip


def train(job: TrainJob, say: Say = print) -> dict[str, Any]:
    """The whole command. Returns the final evaluation (under torchrun: on rank 0; the others return nothing)."""
    try:
        job.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutriderError(f"--out {job.out}: {error.strerror}") from None
    with process_group(job.device) as group:
        return _train(replace(job, device=group.device), say if group.first else lambda _: None, group)


def _train(job: TrainJob, say: Say, group: Group) -> dict[str, Any]:
    target = open_target(job.target, job.device, job.dtype)
    data, aside = split(prepare(job, target, say, group), job.heldout)
    say(f"{len(data)} sequences to train on with {data.answer_tokens} answer tokens, {len(aside)} held out")
    net = make_net(job, target, data, say)
    group.share_(net.state_dict().values())
    cost = step_weights(net.config)
    share = sum(cost.values()) / target_weights(target.config)
    say(
        f"a draft step reads {sum(cost.values()) / 1e6:.2f} M weights ({share:.1%} of a target step), "
        f"{cost['head'] / 1e6:.2f} M of them in the head"
    )
    log_path = job.out / "log.jsonl"
    scored = (lambda: judge(target, net, aside)) if len(aside) else None
    log = JsonLog(log_path, say) if group.first else None
    trainer = Trainer(target.model, net, data, job.settings, evaluate=scored, log=log, group=group)
    resumed = trainer.resume(job.out)
    group.wait()  # all have read the checkpoint before rank 0 writes another
    if resumed:
        say(f"continuing from step {trainer.progress.step}")
    if group.first:
        trim_log(log_path, trainer.progress.step if resumed else -1)
    trainer.run(job.out)
    return _finish(job, target, net, data, aside, trainer, share, say) if group.first else {}


def _finish(
    job: TrainJob, target: Target, net: DraftNet, data: Sequences, aside: Sequences, trainer: Trainer, share: float, say: Say
) -> dict[str, Any]:
    """The best weights, the top of the clustered head, the final evaluation, the files."""
    best = job.out / "best.pt"
    if job.settings.patience and best.exists():
        net.load_state_dict(torch.load(best, map_location=target.model.device, weights_only=True)["net"])
    result: dict[str, Any] = {"draft_step_share": round(share, 4)}
    if len(aside):
        if net.config.clusters:
            top, curve = tune_top(target, net, aside, job.recall)
            net.config = replace(net.config, cluster_top=top)
            result["draft_step_share"] = round(sum(step_weights(net.config).values()) / target_weights(target.config), 4)
            result["recall"] = [asdict(r) for r in curve]
            result["clustered"] = judge(target, net, aside, clustered=True)
        result["full"] = judge(target, net, aside)
        trainer.log({"step": trainer.progress.step, "final": result})
    story = provenance(job, target, data)
    if len(aside):  # what a controller may expect before it has seen anything
        story["acceptance"] = {"greedy": result["clustered" if net.config.clusters else "full"]["acceptance_given_before"]}
    save_drafter(job.out / "drafter", net.config, net.export(), provenance=story)
    draw_curve(job.out / "log.jsonl", job.out / "curve.png")
    say(f"drafter written to {job.out / 'drafter'}")
    return result


def trim_log(path: Path, step: int) -> None:
    """Rows that the checkpoint does not cover will be made again."""
    if path.exists():
        rows = [line for line in path.read_text().splitlines() if json.loads(line)["step"] <= step]
        path.write_text("".join(r + "\n" for r in rows))


def draw_curve(log: Path, to: Path) -> None:
    """The learning curve as a picture, where matplotlib is installed."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        return
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    curve, evals = [r for r in rows if "loss" in r], [r for r in rows if "eval" in r]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4))
    left.plot([r["step"] for r in curve], [r["loss"] for r in curve])
    left.set(xlabel="step", ylabel="loss", title="training loss")
    for j in range(len(curve[0]["hit"]) if curve else 0):
        right.plot([r["step"] for r in curve], [r["hit"][j] for r in curve], label=f"position {j + 1}")
    if evals:
        right.plot([r["step"] for r in evals], [r["eval"]["acceptance_by_position"][0] for r in evals], "k.", label="held out, position 1")
    right.set(xlabel="step", ylabel="share of anchors", title="drafted token right, given those before it")
    right.legend()
    figure.tight_layout()
    figure.savefig(to, dpi=80)
    pyplot.close(figure)
