"""Properties that must hold on a GPU, as plain functions: pytest runs them (test_gpu_*.py), and so does benchmarks/gpu_suite.py
where there is no pytest. Each raises AssertionError, or returns figures worth a line. Models are shallow where depth
adds nothing.

On a machine without a GPU the same functions run on tiny models with the plain ops (`Place.here()`): a check that
cannot run is found before it costs device time.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from tests.gpu.company import batches, crowd, prefill_idle
from tests.gpu.engines import engine_tokens, mixed, one_launch, preempted
from tests.gpu.place import GIB, HERE, KS, LAYERS

import gpu_peer
from gpu_rig import SIZES, Rig, collect, plain_run, speculative_run
from outrider.models.config import ModelConfig
from outrider.models.names import tensor_plan
from outrider.types import SamplingParams
from outrider.weights.load import kept_dtype


# ---- bitwise equality
@torch.inference_mode()
def equality(size: str) -> str:
    """Logits and tokens of every position are the same bits for K = 0 and K in 1..16, alone and in a batch of 8."""
    p = HERE
    with Rig(
        p.raw(size), p.assistant(size), p.ops(), p.device, p.dtype, slots=8, context=p.context + p.steps + 128
    ) as rig:
        seqs = rig.open(8, p.context, p.steps + 64)
        tokens, logits = plain_run(rig, seqs, p.context, p.steps)
        for b in (0, 7):
            alone, alone_logits = plain_run(rig, seqs[b : b + 1], p.context, p.steps)
            assert torch.equal(alone[0], tokens[b]), (
                f"{size}: sequence {b} alone decodes other tokens than in a batch of 8"
            )
            if p.gpu:
                assert torch.equal(alone_logits[0], logits[b]), (
                    f"{size}: sequence {b} alone has other logits than in a batch of 8"
                )
            del alone_logits
        rates = []
        for batch in (1, 8):
            for k in KS:
                same = speculative_run(rig, seqs[:batch], p.context, k, tokens[:batch], logits[:batch])
                assert same.equal_tokens, (
                    f"{size} K={k} batch {batch}: tokens differ from position {same.first_difference}"
                )
                assert same.equal_logits or not p.gpu, (
                    f"{size} K={k} batch {batch}: logits differ from position {same.first_difference}"
                )
                assert same.accepted > 0.3, (
                    f"{size} K={k}: the stand-in drafter is right three times in four, accepted {same.accepted}"
                )
                rates.append(same.accepted)
        return f"{p.steps} tokens, K {KS}, batch 1 and 8; accepted a cycle {min(rates):.2f}..{max(rates):.2f}"


# ---- against transformers
def weights_of(model: Any, config: ModelConfig, dtype: torch.dtype) -> dict[str, Any]:
    """A transformers model's weights under our names."""
    stored = model.state_dict()
    out = {}
    for name, plan in tensor_plan(config).items():
        parts = [stored[s].to(kept_dtype(plan, dtype)) for s in plan.sources]
        out[name] = (parts[0] if len(parts) == 1 else torch.cat(parts)).reshape(plan.shape).clone()
    return out


@torch.inference_mode()
def parity(size: str, kind: str) -> str:
    """Relative error of the last positions' logits between transformers and this engine, on one shallow model."""
    p = HERE
    wide = kind == "float32"
    dtype = torch.float32 if wide or not p.gpu else torch.bfloat16
    count = (
        64 if wide else min(1100, p.context + 200)
    )  # float32: few enough rows for the decode kernels; bfloat16: past the windows
    raw = p.raw(size)
    config = ModelConfig.from_hf(raw)
    torch.manual_seed(3)  # the weights must not depend on which checks ran before
    theirs = gpu_peer.build(raw, p.device, dtype)
    for (
        name,
        x,
    ) in theirs.state_dict().items():  # transformers starts norms and scales at one: a forgotten one would not show
        if x.is_floating_point() and x.dim() < 2:
            # Norms of 1 would make scores of ±16 and more (the scale is 1.0): softmax then picks one key, and which one
            # is up to rounding. Trained weights keep scores moderate; so do these.
            start = 0.25 if "q_norm" in name or "k_norm" in name else 1.0
            x.fill_(start).mul_(1.0 + 0.1 * torch.randn_like(x))
        if not wide and name.endswith("router.proj.weight"):
            # The 8th and 9th of 128 random experts are nearly tied, and bfloat16 decides otherwise in some layer of
            # most rows. Two experts more than are chosen leave gaps that rounding seldom crosses; float32 sees them
            # all.
            x[(config.moe.top_k if config.moe is not None else 0) + 2 :] *= 0.01
    ids = torch.randint(3, config.vocab_size, (count,), device=p.device)
    expected = theirs(ids[None], logits_to_keep=48).logits[0].float()
    weights = weights_of(theirs, config, dtype)
    del theirs
    collect()
    with Rig(raw, None, p.ops(), p.device, dtype, slots=1, context=count + 64, weights=weights) as rig:
        seq, _ = rig.store.open()
        assert rig.store.reserve(seq, count)
        hidden = torch.cat([rig.prefill(seq, ids[:-17], 0), rig.prefill(seq, ids[-17:], count - 17)])
        got = rig.model.logits(hidden[-48:]).float()
        assert got.shape == expected.shape and bool(got.isfinite().all())
        rows = (got - expected).norm(dim=-1) / expected.norm(dim=-1)
        # a router that rounds otherwise picks another expert: single rows of the mixture may differ in bfloat16
        error = float(rows.median() if config.moe is not None and not wide else rows.max())
        limit = (
            1e-3 if wide or not p.gpu else 2.5e-2
        )  # two that round to bfloat16 at every op: 1.2e-2 to 2.1e-2 seen, float32 3e-6
        assert error <= limit, f"{size} {kind}: relative error {error:.2e} > {limit}"
        return f"relative error {error:.2e}, worst row {float(rows.max()):.2e}"


def warm_up() -> str:
    """Compile what the checks need, sizes side by side: a thread each, as compilers do not hold the interpreter."""
    if not HERE.gpu:
        return "nothing to compile"
    began = time.perf_counter()

    def one(size: str, dtype: torch.dtype) -> None:
        with torch.inference_mode():
            rig = Rig(HERE.raw(size), HERE.assistant(size), HERE.ops(), "cuda", dtype, slots=8, context=1536)
            seqs = rig.open(8, 64, 64)
            ids = torch.randint(3, 999, (320,), device="cuda")
            rig.prefill(seqs[0], ids[:47])
            if dtype == torch.bfloat16:
                rig.prefill(seqs[0], ids)
                for batch, k in ((1, 0), (1, 1), (1, 16), (8, 0), (8, 1), (8, 4), (8, 16)):
                    run = rig.graph(seqs[:batch], k, 64, 512, eager=True)
                    run.graph.replay()
            torch.cuda.synchronize()
            rig.free()

    with ThreadPoolExecutor(10) as pool:
        jobs = [pool.submit(one, size, dtype) for dtype in (torch.bfloat16, torch.float32) for size in SIZES]
        failed = [f"{type(e).__name__}: {str(e)[:120]}" for e in (job.exception() for job in jobs) if e is not None]
    collect()
    return f"{time.perf_counter() - began:.1f} s" + (f"; failed: {failed}" if failed else "")


# ---- memory
@torch.inference_mode()
def memory() -> str:
    """31B: a prompt chunk, plain steps and cycles of 16 take at most 2 GiB beside weights and K/V."""
    p = HERE
    collect()
    with Rig(p.raw("31B", 0), p.assistant("31B"), p.ops(), p.device, p.dtype, slots=2, context=1600) as rig:
        p.sync()
        base = torch.cuda.memory_allocated() if p.gpu else 0
        if p.gpu:
            torch.cuda.reset_peak_memory_stats()
        seqs = rig.open(2, 64, 1100)
        ids = torch.randint(3, rig.config.vocab_size, (1024,), device=p.device)
        rig.prefill(seqs[0], ids)
        for batch, k in ((1, 0), (1, 16), (2, 8)):
            run = rig.graph(seqs[:batch], k, 64, 2048)
            run.graph.replay()
            p.sync()
            del run
        beside = (torch.cuda.max_memory_reserved() - base) / GIB if p.gpu else 0.0
        assert beside <= 2.0, f"{beside:.2f} GiB beside weights and K/V"
        return f"{beside:.2f} GiB beside {base / GIB:.1f} GiB of weights and K/V"


# ---- a real model
def smollm2() -> str:
    """Tokens per second of the default model, plain and speculative, and the same text. OUTRIDER_SMOLLM2: its .gguf."""
    path = os.environ.get("OUTRIDER_SMOLLM2")
    if not path:
        return "skipped: OUTRIDER_SMOLLM2 is not set"
    import outrider
    from outrider.llm import LLM

    folder = Path(outrider.__file__).parent / "assets" / "drafters" / "smollm2"
    drafter = str(folder) if folder.is_dir() else "ngram"
    prompts = (
        "Write a Python function that merges two sorted lists.",
        "List the numbers from one to forty.",
        "Why is the sky blue?",
    )
    params = SamplingParams(max_tokens=128, ignore_eos=True)
    notes = []
    texts = {}
    for label, which, k in (
        ("plain", "none", 0),
        (drafter.rpartition("/")[2] if folder.is_dir() else "ngram", drafter, 4),
    ):
        llm = LLM.load(path, drafter=which, draft_tokens=k, device=HERE.device)
        chats = [llm.chat_prompt([{"role": "user", "content": text}]) for text in prompts]
        llm.generate(chats, params)  # compiles and captures
        answers = [llm.generate([chat], params)[0] for chat in chats]
        texts[label] = [a.token_ids for a in answers]
        rate = sum(a.stats.decode_tps for a in answers) / len(answers)
        accepted = sum(a.stats.accepted for a in answers) / max(1, sum(a.stats.drafted for a in answers))
        notes.append(f"{label} {rate:.0f} tokens/s" + (f" ({accepted:.0%} of drafts accepted)" if k else ""))
        del llm
        collect()
    first, second = texts.values()
    assert first == second, "speculative text differs from plain text"
    return "; ".join(notes)


def block_drafter() -> str:
    """`LLM.load` with a DFlash drafter from a folder (OUTRIDER_DFLASH; else random weights), as a user has it: chains
    and trees, greedy and drawn, alone and in a batch, have the text of plain decoding. OUTRIDER_SMOLLM2: the .gguf."""
    path = os.environ.get("OUTRIDER_SMOLLM2")
    if not path:
        return "skipped: OUTRIDER_SMOLLM2 is not set"
    from outrider.llm import LLM
    from outrider.train.block_net import BlockModule, new_block
    from outrider.train.config import TrainConfig
    from outrider.train.export import save_drafter
    from outrider.train.target import describe

    with TemporaryDirectory() as folder:
        drafter = os.environ.get("OUTRIDER_DFLASH") or folder
        if drafter == folder:
            config = describe(path).config
            job = TrainConfig(path, Path(), Path(), kind="dflash", layers=2).resolved()
            net = BlockModule(new_block(job, config))
            save_drafter(Path(folder), net.config, net.export())
        count = 96 if HERE.gpu else 8
        heats = [SamplingParams(max_tokens=count, ignore_eos=True, temperature=t, seed=7) for t in (0.0, 1.0)]
        prompts = ["List the numbers from one to forty.", "Why is the sky blue?"]
        plain = LLM.load(path, drafter="none", device=HERE.device, max_batch=8)
        want = [[c.token_ids for c in plain.generate(prompts, params)] for params in heats]
        del plain
        collect()
        llm = LLM.load(path, drafter=drafter, draft_tokens=7, device=HERE.device, max_batch=8)
        took = []
        for tree in ("off", 15):
            for params, texts in zip(heats, want, strict=True):
                alone = [llm.generate(prompt, params, tree=tree)[0] for prompt in prompts]
                batch = llm.generate(prompts * 4, params, tree=tree)
                assert [c.token_ids for c in alone] == texts, f"tree {tree}, T {params.temperature}: another text"
                assert [c.token_ids for c in batch] == texts * 4, f"tree {tree}, T {params.temperature}: in a batch"
                assert all(c.stats.drafted and c.stats.drafter_off is None for c in (*alone, *batch))
                took.append(f"{2 * count / sum(c.stats.cycles for c in alone):.2f}")
        executors = ", ".join(e.name for e in llm.engine.executors)
        del llm
        collect()
    return f"tokens per cycle: chains {took[0]} greedy, {took[1]} at T = 1; trees {took[2]}, {took[3]}; {executors}"


def all_checks() -> list[tuple[str, Callable[[], str]]]:
    """In the order that finds most, soonest."""
    checks: list[tuple[str, Callable[[], str]]] = [("warm-up", warm_up), ("one launch a cycle", one_launch)]
    checks += [("engine tokens", engine_tokens), ("64 mixed requests", mixed), ("preemption", preempted)]
    for size in LAYERS:
        checks.append((f"rows alone {size}", lambda size=size: prefill_idle(size)))  # type: ignore[misc]
    for size in ("E2B", "26B-A4B", "31B"):
        checks.append((f"crowd {size}", lambda size=size: crowd(size)))  # type: ignore[misc]
    for size in ("E2B", "31B"):
        checks.append((f"batches to 256 {size}", lambda size=size: batches(size)))  # type: ignore[misc]
    for size in LAYERS:
        checks.append((f"equality {size}", lambda size=size: equality(size)))  # type: ignore[misc]
    for kind in ("bfloat16", "float32"):
        for size in LAYERS:
            checks.append((f"parity {size} {kind}", lambda size=size, kind=kind: parity(size, kind)))  # type: ignore[misc]
    return [*checks, ("memory 31B", memory), ("smollm2", smollm2), ("block drafter", block_drafter)]
