"""Rows in any company: every op by itself, and whole passes of 64 sequences and of prompts, against the same rows
alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from tests.gpu.place import HERE, Place

from gpu_rig import Rig, plain_run, speculative_run
from outrider.models.config import ModelConfig
from outrider.models.names import tensor_plan
from outrider.ops.backend import ExpertWeights
from outrider.types import KVView

BORDERS = (
    1015,
    8185,
    500,
    0,
    57,
    2040,
    4090,
    1022,
)  # 17 rows from here cross the borders of windows, splits and their sizes


@torch.inference_mode()
def prefill_idle(size: str) -> str:
    """Every product of the target for 1 to 2,048 rows, its experts likewise, and its attention for 1 to 17 rows of 1, 8
    and 64 sequences and as the end of prompt chunks: a row has the same bits."""
    p = HERE
    ops = p.ops()
    config = ModelConfig.from_hf(p.raw(size, 0))
    draw = torch.Generator(p.device).manual_seed(7)

    def rand(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(shape, generator=draw, device=p.device, dtype=torch.float32) * scale).to(p.dtype)

    shapes = set()
    for name, plan in tensor_plan(config).items():
        part = name.rpartition(".")[2]
        if plan.role in ("matrix", "embedding") and len(plan.shape) == 2 and part != "ple_embed":
            shapes.add((part == "gate_up", *plan.shape))
    bad: list[Any] = []
    for gated, n, k in sorted(shapes):
        most = 8192 if p.gpu else 136
        x = rand(most, k)
        w = rand(n, k, scale=k**-0.5)
        run = (lambda a: ops.gated_linear(a, w, config.activation)) if gated else (lambda a: ops.linear(a, w))
        full = run(x)
        rows = [
            m
            for m in (*range(1, 18), 32, 33, 40, 64, 65, 72, 100, 128, 160, 256, 272, 320, 640, 1024, 1280, 2048, 4096)
            if m < most
        ]
        bad += [(n, k, gated, m) for m in rows if not torch.equal(run(x[most - m :]), full[most - m :])]
        full = None
    if config.moe is not None:
        bad += _experts_alone(p, ops, config, rand)
    kinds = {replace(layer.attn, kv_layer=0) for layer in config.layers}
    count = 17
    page = 16
    per = -(-(max(BORDERS) + count) // page)
    for spec in sorted(kinds, key=str):
        pages = rand(1 + len(BORDERS) * per, spec.kv_heads, page, spec.head_dim)
        values = rand(*pages.shape)
        table = (
            (1 + torch.randperm(len(BORDERS) * per, generator=draw, device=p.device))
            .view(len(BORDERS), per)
            .to(torch.int32)
        )
        q = rand(len(BORDERS) * count, spec.heads * spec.head_dim, scale=spec.head_dim**-0.5)

        def attend(b: slice, first: int, rows: int, times: int = 1) -> torch.Tensor:
            """`rows` queries from the `first` one on of each of the sequences `b`, these so many times over."""
            starts = torch.tensor(BORDERS[b] * times, device=p.device)
            positions = (starts[:, None] + first + torch.arange(rows, device=p.device)).flatten()
            here = table[b].repeat(times, 1)
            kv = KVView(
                page, [pages], [values], {"full": here, "sliding": here}, positions,
                torch.arange(len(starts), device=p.device).repeat_interleave(rows),
                (torch.arange(len(starts) + 1, device=p.device) * rows).to(torch.int32), rows,
                int(max(BORDERS[b])) + first + rows,
            )  # fmt: skip
            some = (
                q.view(len(BORDERS), count, -1)[b, first : first + rows]
                .repeat(times, 1, 1)
                .reshape(len(starts) * rows, -1)
            )
            return ops.attend(some, spec, kv).view(len(starts), rows, -1)

        full = attend(slice(0, len(BORDERS)), 0, count)
        for i in range(len(BORDERS)):
            for rows in (1, 2, 5, 9, 17):
                for first in range(0, count - rows + 1, rows):
                    if not torch.equal(attend(slice(i, i + 1), first, rows)[0], full[i, first : first + rows]):
                        bad.append((spec.heads, spec.head_dim, spec.window, BORDERS[i], first, rows))
        crowd = attend(slice(0, len(BORDERS)), 0, count, 8)
        bad += [
            (spec.heads, spec.head_dim, spec.window, "64 sequences", i)
            for i in range(8)
            if not torch.equal(crowd[i], full[i % 8])
        ]
        bad += [
            (spec.heads, spec.head_dim, spec.window, "64 sequences of one row")
            for _ in range(1)
            if not torch.equal(attend(slice(0, 8), 3, 1, 8)[:8, 0], full[:, 3])
        ]
        # Prompt chunks that end with these rows, packed; a chunk and the rows of a verify pass in one launch.
        chunks = [min(BORDERS[i] + count, 700) if i % 2 else count for i in range(len(BORDERS))]
        fresh = [rand(c - count, q.shape[1], scale=spec.head_dim**-0.5) for c in chunks]
        rows_of = torch.cat([torch.cat((f, q[i * count : (i + 1) * count])) for i, f in enumerate(fresh)])
        starts = torch.tensor([0, *chunks]).cumsum(0)
        kv = KVView(
            page, [pages], [values], {"full": table, "sliding": table},
            torch.cat([torch.arange(at + count - c, at + count) for at, c in zip(BORDERS, chunks)]).to(p.device),
            torch.repeat_interleave(torch.arange(len(chunks)), torch.tensor(chunks)).to(p.device),
            starts.to(p.device, torch.int32),
            max(chunks), max(BORDERS) + count,
        )  # fmt: skip
        packed = ops.attend(rows_of, spec, kv)
        for i, end in enumerate(starts[1:].tolist()):
            if not torch.equal(packed[end - count : end], full[i]):
                bad.append((spec.heads, spec.head_dim, spec.window, "prompt chunk", BORDERS[i], chunks[i]))
    assert not bad or not p.gpu, f"{size}: {len(bad)} rows depend on their company: {bad[:6]}"
    return f"{len(shapes)} products, {len(kinds)} kinds of attention"


def _experts_alone(p: Place, ops: Any, config: ModelConfig, rand: Callable[..., torch.Tensor]) -> list[Any]:
    """The routed experts of one layer: which numbers of rows give other bits."""
    moe = config.moe
    assert moe is not None
    most = 8192 if p.gpu else 64
    hidden = config.hidden
    x = rand(most, hidden)
    z = rand(most, hidden)
    weights = ExpertWeights(
        rand(moe.experts, hidden, scale=0.05), torch.rand(moe.experts, device=p.device) + 0.5,
        rand(moe.experts, 2 * moe.intermediate, hidden, scale=0.02),
        rand(moe.experts, hidden, moe.intermediate, scale=0.04), moe.top_k, config.activation,
    )  # fmt: skip
    full = ops.moe(z, x, weights)
    rows = [m for m in (1, 2, 5, 8, 16, 40, 64, 128, 320, 1024) if m < most]
    return [
        ("experts", m)
        for m in rows
        if not torch.equal(ops.moe(z[most - m :], x[most - m :], weights), full[most - m :])
    ]


@torch.inference_mode()
def crowd(size: str) -> str:
    """64 sequences decoded together, plainly and with 4 drafted tokens, against each alone; then the same tokens as one
    prompt chunk."""
    p = HERE
    batch, steps = (
        (64, 160) if p.gpu else (5, 8)
    )  # 160 tokens as a prompt: tiles that no decoding of a single sequence takes
    with Rig(
        p.raw(size), p.assistant(size), p.ops(), p.device, p.dtype, slots=batch, context=p.context + steps + 128
    ) as rig:
        seqs = rig.open(batch, p.context, steps + 64)
        tokens, logits = plain_run(rig, seqs, p.context, steps)
        for b in (0, batch // 2, batch - 1):
            alone, alone_logits = plain_run(rig, seqs[b : b + 1], p.context, steps)
            assert torch.equal(alone[0], tokens[b]), (
                f"{size}: sequence {b} alone decodes other tokens than among {batch}"
            )
            assert torch.equal(alone_logits[0], logits[b]) or not p.gpu, (
                f"{size}: sequence {b} alone has other logits than among {batch}"
            )
            first = (seqs[b].slot * 7919 + 11) % rig.config.vocab_size  # what Rig.graph starts a sequence with
            ids = torch.cat((torch.tensor([first], device=p.device), alone[0, :-1]))
            again = rig.model.logits(rig.prefill(seqs[b], ids, p.context))
            assert torch.equal(again.argmax(-1), alone[0]), f"{size}: sequence {b} as a prompt has other best tokens"
            assert torch.equal(again, alone_logits[0]) or not p.gpu, (
                f"{size}: sequence {b} as a prompt has other logits"
            )
            last = rig.model.logits(rig.prefill(seqs[b], ids, p.context, last=True))
            assert torch.equal(last, again[-1:]) or not p.gpu, (
                f"{size}: the last row of a prompt, wanted alone, has other logits"
            )
            del alone_logits, again
        same = speculative_run(rig, seqs, p.context, 4, tokens, logits)
        assert same.equal_tokens, f"{size} K=4 batch {batch}: tokens differ from position {same.first_difference}"
        assert same.equal_logits or not p.gpu, (
            f"{size} K=4 batch {batch}: logits differ from position {same.first_difference}"
        )
        return f"{steps} tokens of {batch} sequences, K 0 and 4, and as prompts"


@torch.inference_mode()
def batches(size: str) -> str:
    """Logits of a row at batch 1, 16, 64 and 256, decoded plainly and with 4 drafted tokens: one set of bits."""
    p = HERE
    sizes, steps = ((1, 16, 64, 256), 12) if p.gpu else ((1, 2, 4, 8), 6)
    with Rig(
        p.raw(size), p.assistant(size), p.ops(), p.device, p.dtype, slots=sizes[-1], context=p.context + steps + 96
    ) as rig:
        seqs = rig.open(sizes[-1], p.context, steps + 80)
        tokens, logits = plain_run(rig, seqs, p.context, steps)
        for batch in sizes[:-1]:
            fewer, fewer_logits = plain_run(rig, seqs[:batch], p.context, steps)
            assert torch.equal(fewer, tokens[:batch]), f"{size}: other tokens at batch {batch} than at {sizes[-1]}"
            assert torch.equal(fewer_logits, logits[:batch]) or not p.gpu, (
                f"{size}: other logits at batch {batch} than at {sizes[-1]}"
            )
            del fewer_logits
        for batch in sizes:
            same = speculative_run(rig, seqs[:batch], p.context, 4, tokens[:batch], logits[:batch])
            assert same.equal_tokens, f"{size} K=4 batch {batch}: tokens differ from position {same.first_difference}"
            assert same.equal_logits or not p.gpu, (
                f"{size} K=4 batch {batch}: logits differ from position {same.first_difference}"
            )
        return f"logits of {steps} tokens at batch {sizes}, K 0 and 4"
