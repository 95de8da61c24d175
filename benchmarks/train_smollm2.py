"""The drafter of the default model on one GPU, in stages that share a folder. No stage needs another to be in the same process.

    python benchmarks/train_smollm2.py selftest                      # kernels and speed at the real shapes, dummy weights
    python benchmarks/train_smollm2.py data   --target smollm2.gguf  # the target answers the prompts (KEEP/prompts.npz)
    python benchmarks/train_smollm2.py ablate --target smollm2.gguf  # short runs, one change each; writes KEEP/choice.json
    python benchmarks/train_smollm2.py main   --target smollm2.gguf --minutes 5.5
    python benchmarks/train_smollm2.py finish --target smollm2.gguf  # Spec-Bench, T = 1, clusters; table rows and the drafter
    python benchmarks/train_smollm2.py tune   --target smollm2.gguf  # the shipped drafter, tuned on T = 1 answers (train_tune.py)
    python benchmarks/train_smollm2.py long   --target smollm2.gguf  # it goes on learning: T = 1, 4 bits, new clusters (train_long.py)

Results are appended to $OUT/*.jsonl as they come.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import numpy as np
import torch
from train_common import BASE, BEGAN, DEVICE, DTYPE, bench_answers, brief, build_net, give, note, say, score
from train_long import long
from train_tune import tune

from outrider.models.config import ModelConfig
from outrider.train import run
from outrider.train.clusters import balanced_kmeans, cluster_of, fit_centroids, likely_together, recall_curve
from outrider.train.data import Sequences, load_folder, make_batch, plan_epoch
from outrider.train.evaluate import Head, states
from outrider.train.generate import Answerer, Answering, answer_all
from outrider.train.losses import LossMix
from outrider.train.net import DraftNet, step_weights, target_weights
from outrider.train.trainer import Trainer, TrainSettings


# ---- stages ---------------------------------------------------------------------------------------------------------
def selftest(args: argparse.Namespace, out: Path, keep: Path) -> None:
    """Every GPU path at the real shapes on random weights: is it right, and how fast."""
    from torch.nn.functional import scaled_dot_product_attention as sdpa

    from outrider.models import build
    from outrider.train.capture import DenseOps, capture, causal_attention
    from outrider.train.head_kernel import head_terms
    from outrider.train.losses import Teacher, row_terms
    from outrider.train.net import rotate
    from outrider.weights.load import dummy_weights

    g = torch.Generator(device=DEVICE).manual_seed(0)
    z, logp = (torch.randn(n, 49152, device=DEVICE, generator=g) * 3 for n in (64, 80))
    logp, rows, weight = (
        logp.log_softmax(-1),
        torch.randint(80, (64,), device=DEVICE, generator=g),
        torch.rand(64, device=DEVICE, generator=g),
    )
    mix, best = LossMix(1.0, 0.5, 0.3, 0.2).rows(64, DEVICE), logp.argmax(-1)
    want = row_terms(z, logp[rows], best[rows], weight, mix)
    terms, got = torch.empty(64, 3, device=DEVICE), z.clone()
    head_terms(got, logp, best, rows, weight, mix, terms)
    say(
        f"head kernel: gradient off by {float((got - want[3]).abs().max()):.2e}, "
        f"terms by {float((terms - torch.stack(want[:3], 1)).abs().max()):.2e}"
    )
    q, k, v = (torch.randn(2, 9, n, 64, device=DEVICE, dtype=DTYPE, generator=g) for n in (100, 160, 160))
    i, j = torch.arange(60, 160, device=DEVICE)[:, None], torch.arange(160, device=DEVICE)[None]
    wrong = (causal_attention(q, k, v, 0.125) - sdpa(q, k, v, attn_mask=j <= i, scale=0.125)).abs().max()
    say(f"lower-right attention: off by {float(wrong):.2e}")
    x, turned = q.transpose(1, 2).requires_grad_(), torch.rand(100, 1, 32, device=DEVICE, generator=g)
    spun, want_spun = rotate(x, turned.cos(), turned.sin()), rotate(x.detach().cpu(), turned.cos().cpu(), turned.sin().cpu())
    spun.backward(spun.detach())  # turning back what was turned gives x
    assert x.grad is not None
    off, back = (spun.detach().cpu() - want_spun).abs().max(), (x.grad - x).abs().max()
    say(f"rotation: off by {float(off):.2e}, its gradient by {float(back):.2e}")

    shape = dict(
        model_type="llama", hidden_size=576, num_attention_heads=9, num_key_value_heads=3, num_hidden_layers=30, intermediate_size=1536,
        vocab_size=49152, rms_norm_eps=1e-5, rope_theta=1e5, tie_word_embeddings=True, max_position_embeddings=8192, eos_token_id=2,
    )  # fmt: skip
    config = ModelConfig.from_hf(shape)
    model = build(config, dummy_weights(config, DEVICE, DTYPE), DenseOps())
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 49152, size=n) for n in rng.integers(60, 120, size=3000)]
    for slots in (1024, 2048):
        machine = Answerer(model, Answering(64, slots=slots), 400, (2,))
        began, made = time.perf_counter(), 0
        for _, _, answer in machine.answer(prompts):
            made += len(answer)
        torch.cuda.synchronize()
        say(f"answering with {slots} slots: {made / (time.perf_counter() - began):.0f} tok/s in all")
        for limit in (256, 512):
            machine.run_steps(4, limit)
            torch.cuda.synchronize()
            began = time.perf_counter()
            machine.run_steps(16, limit)
            torch.cuda.synchronize()
            say(f"  one step, {limit} keys: {(time.perf_counter() - began) / 16 * 1e3:.2f} ms")
        del machine
        torch.cuda.empty_cache()
    rows_ = [np.concatenate([p, rng.integers(3, 49152, size=150)]) for p in prompts]
    data = Sequences.of(rows_, [len(p) for p in prompts], range(3000), [True] * 3000, 49152)
    target = run.Target(model, config, None, "dummy")  # type: ignore[arg-type]
    net = build_net(target, data, {})
    settings = TrainSettings(steps=30, log_every=10, four_bits_from=0.5, average=0.9, greedy_loss=LossMix(0.5, 0.5, 0.5))
    trainer = Trainer(model, net, data, settings, log=lambda row: say(json.dumps(row)))
    trainer.run()
    batch = make_batch(data, plan_epoch(data, 16384, 65536, 0, 0)[0], 5).to(DEVICE)

    def timed(what: str, call: Any, times: int = 5) -> Any:
        call()
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(times):
            kept = call()
        torch.cuda.synchronize()
        say(f"{what}: {(time.perf_counter() - began) / times * 1e3:.1f} ms")
        return kept

    say(f"batch {tuple(batch.ids.shape)} first {batch.first} anchors {batch.anchors[0].numel()}")
    seen = timed("target forward", lambda: capture(model, batch.ids))
    timed("teacher", lambda: Teacher.of(model, seen.hidden.flatten(0, 1)[batch.teacher], DTYPE))
    timed("loss (forward of all)", lambda: trainer.loss(batch))
    timed("loss and backward", lambda: trainer.loss(batch)[0].backward())

    def whole_step() -> None:
        trainer.loss(batch)[0].backward()
        trainer.update(1e-3)

    timed("update", whole_step)
    few = data.select(np.arange(300))
    some = torch.randn(20000, 576, device=DEVICE, dtype=DTYPE, generator=g)
    timed("clusters by use", lambda: likely_together(some, model.head, 1024), 1)
    timed("evaluation of 300 answers", lambda: score(target, net, few, None, 8), 1)
    say(f"memory {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")


def data_stage(args: argparse.Namespace, out: Path, keep: Path, target: run.Target) -> Sequences:
    prompts = Sequences.load(keep / "prompts.npz")
    if args.limit:
        prompts = prompts.select(np.arange(len(prompts))[:: max(1, len(prompts) // args.limit)][: args.limit])
    last = [0.0]

    def report(done: int, count: int, tokens: int, seconds: float) -> None:
        if seconds - last[0] > 4 or done == count:
            last[0] = seconds
            say(f"answered {done}/{count}, {tokens} tokens, {tokens / seconds:.0f} tok/s")

    rows = [prompts[i] for i in range(len(prompts))]
    how = Answering(args.max_new, 0.8, args.slots, 0.5, seed=1)
    answer_all(target.model, rows, how, keep / "data", target.eos_ids, report=report, deadline=args.answer_seconds)
    data = load_folder(keep / "data")
    lengths = data.lengths - data.prompts
    say(f"{len(data)} sequences, {data.answer_tokens} answer tokens, mean {lengths.mean():.0f}, greedy {data.greedy.mean():.2f}")
    half = np.array_split(np.random.default_rng(0).permutation(len(data)), 3)
    for n, which in enumerate(half):  # so that a later machine need not answer again
        data.select(which).save(out / f"data-{n:05d}.npz")
    return data


VARIANTS: list[tuple[str, str, dict[str, Any], dict[str, Any]]] = [
    # name, group, change of the drafter, change of the settings
    ("base", "base", {}, {}),
    ("8 layers", "reads", dict(reads=(3, 7, 11, 14, 18, 22, 25, 29), intermediate=176), {}),
    ("6 upper layers 14..29", "reads", dict(reads=(14, 17, 20, 23, 26, 29)), {}),
    ("4 layers 14,20,26,29", "reads", dict(reads=(14, 20, 26, 29), intermediate=768), {}),
    ("lr 4e-3", "lr", {}, dict(lr=4e-3)),
    ("AdamW", "optimizer", {}, dict(muon=False)),
    ("loss soft", "loss", {}, dict(loss=LossMix(1, 0, 0, 0))),
    ("loss hard", "loss", {}, dict(loss=LossMix(0, 0, 1, 0))),
    ("loss 0.1 soft + 0.9 tv", "loss", {}, dict(loss=LossMix(0.1, 0.9, 0, 0))),
    ("loss soft + lk", "loss", {}, dict(loss=LossMix(0.5, 0, 0, 0.5))),
    ("taps 9,19", "taps", dict(taps=(9, 19)), {}),
    ("survival weights", "survival", {}, dict(survival=0.7)),
    ("random start", "start", dict(start="random"), {}),
    ("position L-1", "position", dict(position_offset=1), {}),
    ("unroll 3", "unroll", {}, dict(unroll=3)),
    ("unroll 1", "unroll", {}, dict(unroll=1)),
    ("all read layer 29", "last", dict(reads=(29,) * 6), {}),
    ("plain text", "texts", {}, {}),
]
NEED = {
    "reads": 1.003,
    "lr": 1.0,
    "optimizer": 1.0,
    "loss": 1.0,
    "taps": 1.01,
    "survival": 1.003,
    "position": 1.003,
    "start": 1.01,
}  # to be chosen


def ablate(args: argparse.Namespace, out: Path, keep: Path, target: run.Target) -> None:
    data, aside = run.split(load_folder(keep / "data"), 512)
    bench, categories, _ = bench_answers(target, keep, 0.0, 256, args.bench_limit)
    say(
        f"ablations on {len(data)} sequences, {len(aside)} held out, "
        f"{len(bench)} benchmark answers of {np.mean(bench.lengths - bench.prompts):.0f} tokens"
    )
    plain = texts_of(data)
    results: dict[str, Any] = {}
    for name, group, shape, change in VARIANTS:
        if args.only and name not in args.only.split(";"):
            continue
        if time.perf_counter() - BEGAN > args.deadline:
            say("time is up")
            break
        settings = TrainSettings(**{"steps": args.steps, "warmup": 20, "log_every": 60, "muon": True, **change})
        train_on = plain if group == "texts" else data
        net = build_net(target, train_on, shape)
        began = time.perf_counter()
        trainer = Trainer(
            target.model,
            net,
            train_on,
            settings,
            log=lambda row: say(f"  {row['step']} loss {row['loss']} hit {row['hit']} {row['steps_per_s']}/s"),
        )
        try:
            trainer.run()
        except Exception as error:
            say(f"{name}: {error}")
            note(out, "ablations.jsonl", {"name": name, "error": str(error)})
            continue
        took = time.perf_counter() - began
        held = score(target, net, aside, None, 8)
        on_bench = score(target, net, bench, categories, 8)
        cost = step_weights(replace(net.config, clusters=1024, cluster_top=64))
        results[name] = (group, shape, change, held["tokens_per_cycle"][4])
        say(f"{name}: {took:.1f} s; held out {brief(held)}; bench {brief(on_bench)}")
        settings_row = {k: str(v) if k == "loss" else v for k, v in asdict(settings).items() if k != "loss"} | {"loss": str(settings.loss)}
        note(out, "ablations.jsonl", {
            "name": name, "group": group, "seconds": round(took, 1), "held_out": held, "bench": on_bench, "weights_a_step": cost,
            "share": round(sum(cost.values()) / target_weights(target.config), 4), "settings": settings_row,
        })  # fmt: skip
        del trainer, net
    if "base" in results:
        choose(results, keep, out)


def texts_of(data: Sequences) -> Sequences:
    """The prompts as plain text: every position an anchor, nothing of the target's own answers."""
    keep = np.nonzero(data.prompts >= 64)[0]
    rows = [data[int(i)][: data.prompts[i]][-256:] for i in keep]
    return Sequences.of(rows, [1] * len(rows), data.index[keep], [False] * len(rows), 49152)


def choose(results: dict[str, Any], keep: Path, out: Path) -> None:
    """The base, with every change that was worth it by itself on the held-out prompts (group by group the best one)."""
    base, why = results["base"][3], []
    shape: dict[str, Any] = {}
    change: dict[str, Any] = {}
    for group, need in NEED.items():
        mine = sorted(((r[3], n, r) for n, r in results.items() if r[0] == group), reverse=True, key=lambda m: m[0])
        if mine and mine[0][0] > base * need:
            _, name, (_, s, c, value) = mine[0]
            shape |= s
            change |= {k: (asdict(v) if isinstance(v, LossMix) else v) for k, v in c.items()}
            why.append(f"{name}: {base:.3f} -> {value:.3f}")
    choice = {"shape": shape, "change": change, "why": why}
    say(f"choice: {choice}")
    for folder in (keep, out):
        (folder / "choice.json").write_text(json.dumps(choice))


def main_stage(args: argparse.Namespace, out: Path, keep: Path) -> None:
    choice = json.loads(args.choice) if args.choice else json.loads((keep / "choice.json").read_text())
    shape, change = BASE | choice["shape"], dict(choice["change"])
    if "loss" in change:
        change["loss"] = LossMix(**change["loss"])
    settings = TrainSettings(
        **{"minutes": args.minutes, "warmup": 100, "log_every": 50, "eval_every": 1000, "save_every": 100000, "hold": 0.25, **change}
    )
    if args.steps_main:
        settings = replace(settings, minutes=None, steps=args.steps_main)
    folder = keep / "run"
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("prompts.npz", "prompts.json"):
        if (keep / name).exists():
            shutil.copy(keep / name, folder / name)
    if not (folder / "data").exists():
        shutil.copytree(keep / "data", folder / "data")
    command = (
        f"outrider train --target smollm2 --data prompts_train.jsonl.gz --out runs/smollm2 --minutes {args.minutes:g} --reads "
        + ",".join(map(str, shape["reads"])) + f" --intermediate {shape['intermediate']} --loss {settings.loss} --lr {settings.lr:g}"
        + (f" --taps {','.join(map(str, shape['taps']))}" if shape["taps"] else "") + f" --unroll {settings.unroll} --max-prompt 1024"
        + f" --max-new {args.max_new} --warmup {settings.warmup} --hold {settings.hold:g}"
        + f" --optimizer {'muon' if settings.muon else 'adamw'}"
        + (f" --survival {settings.survival:g}" if settings.survival else "")
        + (" --position-offset 1" if shape["position_offset"] == 1 else "")
    )  # fmt: skip
    job = run.TrainJob(
        target=args.target, data=Path("prompts_train.jsonl.gz"), out=folder, style="plain", reads=tuple(shape["reads"]),
        intermediate=shape["intermediate"], taps=tuple(shape["taps"]), position_offset=shape["position_offset"], clusters=args.clusters,
        max_prompt=1024, answering=Answering(args.max_new, 0.8, args.slots, 0.5, seed=1),
        heldout=512, answer_minutes=0.0, settings=settings, device=str(DEVICE), dtype=DTYPE, command=command,
    )  # fmt: skip
    say(command)
    result = run.train(job, say)
    say(f"full {brief(result['full'])}")
    for name in ("log.jsonl", "curve.png"):
        if (folder / name).exists():
            shutil.copy(folder / name, out / name)
    give(folder / "drafter", out)


def finish(args: argparse.Namespace, out: Path, keep: Path, target: run.Target) -> None:
    """Final figures: full head, clusters of several sizes (centroids fitted on states of the training data), T = 1."""
    from outrider.weights.load import load_drafter

    config, weights = load_drafter(str(args.drafter or keep / "run" / "drafter"), "cpu", torch.float32)
    net = DraftNet(config, target.config).to(DEVICE)
    net.load(weights)
    cast = {k: v.detach() for k, v in net.cast(DTYPE).items()}
    full = Head(target.model.head)
    bench, categories, _ = bench_answers(target, keep, 0.0, 256, args.bench_limit)
    result = score(target, net, bench, categories, 16)
    say(f"Spec-Bench, greedy, full head: {brief(result)}")
    say(json.dumps(result))
    note(out, "finish.jsonl", {"what": "greedy full", "result": result})
    base = result["tokens_per_cycle"][4]
    if config.clusters:
        own = Head(target.model.head, cast["centroids"], cast["token_ordering"], config.cluster_top)
        result = score(target, net, bench, categories, 16, own)
        say(f"shipped clusters {config.clusters} top {config.cluster_top}: {brief(result)}")
        share = sum(step_weights(config).values()) / target_weights(target.config)
        note(out, "finish.jsonl", {
            "what": "greedy clustered", "clusters": config.clusters, "top": config.cluster_top, "result": result,
            "weights_a_step": step_weights(config), "share": share,
        })  # fmt: skip
    hot, hot_categories, seeds = bench_answers(target, keep, 1.0, 256, args.bench_limit)
    for name, head in [("T=1 coupled full", full)] + ([("T=1 coupled clustered", own)] if config.clusters else []):
        result = score(target, net, hot, hot_categories, 8, head, seeds)
        say(f"{name}: {brief(result)}")
        note(out, "finish.jsonl", {"what": name, "result": result})
    # clusters: states of training answers, the label is the cluster of the full head's choice
    data, aside = run.split(load_folder(keep / "data"), 512)
    few = data.select(np.random.default_rng(0).permutation(len(data))[: args.cluster_sequences])
    g, c = states(target.model, net, cast, full, few)
    held_g, held_c = states(target.model, net, cast, full, aside)
    say(f"{g.shape[0]} states to fit clusters on, {held_g.shape[0]} held out")
    kept: dict[str, Any] = {}
    for count in (256, 512, 1024, 2048):
        order, means = balanced_kmeans(target.model.head, count)
        fitted = fit_centroids(g, cluster_of(order, count)[c], means, args.cluster_steps, 1e-2, 16384)
        tops = tuple(t for t in run.TOPS if t <= count)
        raw, tuned = (recall_curve(held_g, held_c, m, order, tops) for m in (means, fitted))
        note(out, "finish.jsonl", {"clusters": count, "means": [asdict(r) for r in raw], "fitted": [asdict(r) for r in tuned]})
        say(f"{count} clusters: " + " ".join(f"{r.top}:{r.recall:.4f}" for r in tuned if r.share < 0.12))
        tried = 0
        for point in tuned:
            if point.share < 0.1 and point.recall > 0.975 and tried < 4:
                tried += 1
                result = score(target, net, bench, categories, 8, Head(target.model.head, fitted.to(DTYPE), order, point.top))
                per, lost = result["tokens_per_cycle"], 1 - result["tokens_per_cycle"][4] / base
                note(out, "finish.jsonl", {
                    "clusters": count, "top": point.top, "share": point.share, "loss": lost, "weights": point.weights, "bench": per,
                })  # fmt: skip
                say(f"  top {point.top} ({point.share:.1%}): K=4 {per[4]:.3f}, {-lost:+.2%}, {point.weights / 1e6:.2f} M weights")
        kept |= {f"order{count}": order.cpu().numpy().astype(np.uint16), f"centroids{count}": fitted.half().cpu().numpy()}
    np.savez_compressed(out / "clusters.npz", **kept)


def arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser()
    p.add_argument("stages", help="comma separated: selftest, data, ablate, main, finish, tune, long")
    p.add_argument("--target", default="smollm2")
    p.add_argument("--keep", default="/root/keep/smollm2")
    p.add_argument("--slots", type=int, default=2048)
    p.add_argument("--max-new", type=int, default=192)
    p.add_argument("--limit", type=int, default=0)
    p.add_argument("--answer-seconds", type=float, default=130.0)
    p.add_argument("--deadline", type=float, default=520.0, help="no ablation starts later than this many seconds into the process")
    p.add_argument("--steps", type=int, default=120)
    p.add_argument("--steps-main", type=int, default=0)
    p.add_argument("--minutes", type=float, default=5.5)
    p.add_argument("--clusters", type=int, default=1024)
    p.add_argument("--only", default="")
    p.add_argument("--choice", default="")
    p.add_argument("--drafter", default="")
    p.add_argument("--bench-limit", type=int, default=None)
    p.add_argument("--cluster-sequences", type=int, default=6000)
    p.add_argument("--cluster-steps", type=int, default=300)
    p.add_argument("--top", type=int, default=48, help="tune: clusters scored a step")
    p.add_argument("--seconds", type=float, default=70.0, help="tune: how long to train")
    p.add_argument("--tune-lr", type=float, default=4e-4)
    p.add_argument("--tune-loss", default="soft=1,tv=0.5")
    p.add_argument("--hot-share", type=float, default=0.5, help="tune: share of sequences sampled at T = 1, the others greedy")
    p.add_argument("--budget", type=float, default=560.0, help="long: seconds of the whole process")
    p.add_argument("--reserve", type=float, default=45.0, help="long: of these, for what comes after training")
    p.add_argument("--hot", type=int, default=46000, help="long: prompts answered at T = 1")
    p.add_argument("--cold", type=int, default=18000, help="long: prompts answered greedily")
    p.add_argument("--long-lr", type=float, default=1.5e-3)
    p.add_argument("--hot-loss", default="soft=0.3,tv=1")
    p.add_argument("--greedy-loss", default="soft=0.5,tv=0.5,hard=0.5")
    p.add_argument("--cluster-pull", type=float, default=0.1)
    p.add_argument("--four-bits-from", type=float, default=0.5)
    p.add_argument("--eval-every", type=int, default=700)
    p.add_argument("--recluster", action="store_true")
    p.add_argument("--muon", action="store_true", help="long: Muon instead of AdamW for the matrices")
    p.add_argument("--anchors", type=int, default=16384, help="long: query rows a batch")
    return p.parse_args()


def main() -> None:
    args = arguments()
    out, keep = Path(os.environ.get("OUT", "runs/out")), Path(args.keep)
    for folder in (out, keep):
        folder.mkdir(parents=True, exist_ok=True)
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    stages = {"data": data_stage, "ablate": ablate, "finish": finish, "tune": tune, "long": long}
    target: run.Target | None = None
    for stage in args.stages.split(","):
        say(f"---- {stage}")
        if stage == "selftest":
            selftest(args, out, keep)
        elif stage == "main":
            main_stage(args, out, keep)
        elif stage in stages:
            if target is None:
                target = run.open_target(args.target, str(DEVICE), DTYPE)
                say("target loaded")
            stages[stage](args, out, keep, target)
        else:
            raise SystemExit(f"no stage {stage!r}")


if __name__ == "__main__":
    main()
