"""Gemma 4's small clustered drafters on a GPU: `FusedDrafter` runs a whole round in one launch (draft_kernel.py).

The layers' matrices are copied once into one flat tensor in the order of use, so that layers of one shape are a loop;
the drafter's own weights become views of it. The product of `pre`'s second half with `post` is computed once, so the
fed-back state keeps the drafter's width. Batches of more than `most` sequences run step by step (spec.drafter).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from ...types import MAX_DRAFT, AttnSpec, DraftEnd, DraftNoise, KVView
from .draft_kernel import (
    angles,
    attend_phase,
    best_token,
    down_phase,
    fetch,
    gate_phase,
    head_phase,
    out_phase,
    pre_phase,
    q_phase,
    rank_phase,
    score_phase,
    sync,
)
from .quant_config import sm_count

LOG2E = 1.4426950408889634
SPINS = 1 << 22  # a second or two: a program that never arrives must not hang the device
WORK_UNITS = 128  # units of work per phase: divides every shape, and is nearly the number of SMs of an H100 or H200
BLOCK_ELEMENTS = 4096  # elements of a block of keys: two blocks of keys and of values lie in registers


@triton.jit
def layer_run(
    w, norms, keys, values, tables, table_stride, page_stride, positions, s0,
    batch, tick, first, last, spins, counter, FIRST_LAYER: tl.constexpr, COUNT: tl.constexpr, NORMS: tl.constexpr,
    H: tl.constexpr, INTER: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr,
    WINDOW: tl.constexpr, SCALE: tl.constexpr, S: tl.constexpr, BN: tl.constexpr, PAGE: tl.constexpr,
    ACTIVATION: tl.constexpr, WORK_UNITS: tl.constexpr, X: tl.constexpr, X0: tl.constexpr, X1: tl.constexpr,
    A: tl.constexpr, Q: tl.constexpr, P: tl.constexpr, ML: tl.constexpr, YP: tl.constexpr, ACT: tl.constexpr,
    Y: tl.constexpr, EPS: tl.constexpr, STRIDE: tl.constexpr, G: tl.constexpr, SYNC: tl.constexpr,
):
    """COUNT layers of one shape over the same K/V. Phases are numbered from 1 + 5 · FIRST_LAYER."""
    WIDE: tl.constexpr = HEADS * D
    COLS: tl.constexpr = 128 if D > 128 else D
    for i in range(COUNT):
        layer = FIRST_LAYER + i
        phase = 1 + 5 * layer
        wl = w + i * (2 * WIDE * H + 3 * INTER * H)
        nl = norms + layer * NORMS
        if (phase >= first) & (phase < last):
            spins = q_phase(
                wl, nl, norms + tl.maximum(layer - 1, 0) * NORMS, s0, layer == 0, batch, tick + phase, spins, counter,
                H, WIDE, WIDE // WORK_UNITS, X, X0, X1, Y, Q, EPS, STRIDE, G, SYNC,
            )
        if (phase + 1 >= first) & (phase + 1 < last):
            spins = attend_phase(
                keys, values, tables, table_stride, page_stride, positions, nl + 4 * H + 16, s0, batch,
                tick + phase + 1, spins,
                counter, SCALE, HEADS, KV_HEADS, D, WINDOW, S, BN, PAGE, A, Q, P, ML, EPS, STRIDE, G, SYNC,
            )
        if (phase + 2 >= first) & (phase + 2 < last):
            spins = out_phase(
                wl + WIDE * H, s0, batch, tick + phase + 2, spins, counter,
                H, HEADS, D, S, COLS, WORK_UNITS, P, ML, YP, STRIDE, G, SYNC,
            )
        if (phase + 3 >= first) & (phase + 3 < last):
            spins = gate_phase(
                wl + 2 * WIDE * H, nl, s0, batch, tick + phase + 3, spins, counter,
                H, WIDE // COLS, INTER, INTER // WORK_UNITS, ACTIVATION, X0, X1, YP, ACT, EPS, STRIDE, G, SYNC,
            )
        if (phase + 4 >= first) & (phase + 4 < last):
            spins = down_phase(
                wl + 2 * WIDE * H + 2 * INTER * H, s0, batch, tick + phase + 4, spins, counter,
                H, INTER, H // WORK_UNITS, ACT, Y, STRIDE, G, SYNC,
            )
    return spins


@triton.jit(
    do_not_specialize=[
        "batch", "from_step", "to_step", "first", "last", "steps", "feature_stride", "stride_a", "stride_b", "turn",
    ],
    do_not_specialize_on_alignment=[
        "newest", "positions", "tables_a", "tables_b", "out", "temperature", "sampled", "seed", "position",
    ],
)
def round_kernel(
    w, norms, head, cluster_ids, table, features, newest, out, scratch, best, scores, tokens, counter, epochs,
    keys_a, values_a, tables_a, freqs_a, keys_b, values_b, tables_b, freqs_b, positions, temperature, sampled, seed,
    position,
    table_scale, feature_stride, stride_a, stride_b, page_stride_a, page_stride_b, turn, batch, steps, from_step,
    to_step, first, last,
    H: tl.constexpr, HB: tl.constexpr, HBP: tl.constexpr, INTER: tl.constexpr, CLUSTERS: tl.constexpr,
    SIZE: tl.constexpr, TOP: tl.constexpr, PIECES: tl.constexpr, COUNT_A: tl.constexpr, HEADS_A: tl.constexpr,
    KV_A: tl.constexpr, D_A: tl.constexpr, WINDOW_A: tl.constexpr, SCALE_A: tl.constexpr, S_A: tl.constexpr,
    BN_A: tl.constexpr, COUNT_B: tl.constexpr, HEADS_B: tl.constexpr, KV_B: tl.constexpr, D_B: tl.constexpr,
    WINDOW_B: tl.constexpr, SCALE_B: tl.constexpr, S_B: tl.constexpr, BN_B: tl.constexpr, NORMS: tl.constexpr,
    ACTIVATION: tl.constexpr, EPS: tl.constexpr, PAGE: tl.constexpr, WORK_UNITS: tl.constexpr, SLAB: tl.constexpr,
    X: tl.constexpr, X0: tl.constexpr, X1: tl.constexpr, MG: tl.constexpr, A: tl.constexpr, Q: tl.constexpr,
    P: tl.constexpr, ML: tl.constexpr, YP: tl.constexpr, ACT: tl.constexpr, Y: tl.constexpr, GN: tl.constexpr,
    C: tl.constexpr, L: tl.constexpr, STRIDE: tl.constexpr, G: tl.constexpr, SYNC: tl.constexpr, SPINS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Phases first..last-1 of steps from_step..to_step-1: 0 input, five a layer, head, rank, score; at the end the last
    token. turn: what a position must be added to for the rotation."""
    pid = tl.program_id(0)
    LAYERS: tl.constexpr = COUNT_A + COUNT_B
    HEAD: tl.constexpr = 1 + 5 * LAYERS
    END: tl.constexpr = HEAD + 3  # phases per step; also the number of the one that returns the last token
    MIX: tl.constexpr = 2 * H * HB
    RUN_A: tl.constexpr = MIX + H * H + CLUSTERS * H  # where the first run's matrices begin
    RUN_B: tl.constexpr = RUN_A + COUNT_A * (2 * HEADS_A * D_A * H + 3 * INTER * H)
    for i in tl.static_range(4):  # prefetch all weights into L2: the target's have evicted them
        fetch(w + (pid * 4 + i) * SLAB, SLAB, SYNC)
    if PDL:
        gdc_wait()
    base = tl.load(epochs + pid)
    spins = tl.full((), SPINS, tl.int32)
    if (from_step == 0) & (first == 0):
        b = G - 1 - pid  # the last programs have the least work
        if b < batch:
            at = tl.load(positions + b) + turn
            angles(scratch + b * STRIDE + A, at, freqs_a, D_A // 2)
            if COUNT_B > 0:
                angles(scratch + b * STRIDE + A + D_A, at, freqs_b, D_B // 2)
    warm = tl.full((), 0, tl.int32)
    for b in range(batch):
        warm |= tl.load(sampled + b).to(tl.int32)
    for step in range(from_step, to_step):
        tick = base + (step - from_step) * END
        if first == 0:
            spins = pre_phase(
                w, table, features, feature_stride, newest, out, scratch, best, step, steps, batch, table_scale, tick,
                spins, counter,
                H, HB, HBP, H // WORK_UNITS, X, MG, STRIDE, G, SYNC,
            )
        spins = layer_run(
            w + RUN_A, norms + H, keys_a, values_a, tables_a, stride_a, page_stride_a, positions, scratch,
            batch, tick, first, last, spins, counter, 0, COUNT_A, NORMS, H, INTER, HEADS_A, KV_A, D_A, WINDOW_A,
            SCALE_A, S_A,
            BN_A, PAGE, ACTIVATION, WORK_UNITS, X, X0, X1, A, Q, P, ML, YP, ACT, Y, EPS, STRIDE, G, SYNC,
        )
        if COUNT_B > 0:
            spins = layer_run(
                w + RUN_B, norms + H, keys_b, values_b, tables_b, stride_b, page_stride_b, positions, scratch,
                batch, tick, first, last, spins, counter, COUNT_A, COUNT_B, NORMS, H, INTER, HEADS_B, KV_B, D_B,
                WINDOW_B, SCALE_B,
                S_B, BN_B, PAGE, ACTIVATION, WORK_UNITS, X, X0, X1, A + D_A, Q, P, ML, YP, ACT, Y, EPS, STRIDE, G, SYNC,
            )
        if (first <= HEAD) & (last > HEAD):
            R_HEAD: tl.constexpr = CLUSTERS // WORK_UNITS if CLUSTERS > H else H // WORK_UNITS
            spins = head_phase(
                w + MIX, w + MIX + H * H, norms + H + (LAYERS - 1) * NORMS, norms, cluster_ids, scratch, temperature,
                sampled, seed, position,
                warm, step, batch, tick + HEAD, spins, counter, H, CLUSTERS, SIZE, R_HEAD, X1, Y, MG, GN, C, EPS,
                STRIDE, G, SYNC,
            )
        if (first <= HEAD + 1) & (last > HEAD + 1):
            spins = rank_phase(
                head, scratch, batch, tick + HEAD + 1, spins, counter,
                H, CLUSTERS, SIZE, TOP, CLUSTERS // WORK_UNITS, C, L, STRIDE, G, SYNC,
            )
        if (first <= HEAD + 2) & (last > HEAD + 2):
            spins = score_phase(
                head, cluster_ids, table, scratch, best, scores, tokens, temperature, sampled, seed, position, step,
                batch, tick + HEAD + 2,
                spins, counter, H, HB, SIZE, TOP, PIECES, GN, L, STRIDE, G, SYNC,
            )
    if last > END:
        tick = base + (to_step - from_step) * END
        spins = sync(counter, tick, spins, G, SYNC)
        for b in range(pid, batch, G):
            tl.store(out + b * steps + to_step - 1, best_token(best + b * 256, G).to(tl.int64))
        if SYNC:
            tl.store(epochs + pid, tick + 1)


# ---- packing
@dataclass(frozen=True)
class LayerRun:
    """Layers of one shape over the same K/V."""

    spec: AttnSpec
    rope: int
    count: int


def power(n: int) -> bool:
    return n > 0 and n & (n - 1) == 0


def runs_of(blocks: list[Any]) -> list[LayerRun]:
    out: list[LayerRun] = []
    for block in blocks:
        run = LayerRun(block.spec, block.rope, 1)
        if out and replace(out[-1], count=1) == run:
            out[-1] = replace(out[-1], count=out[-1].count + 1)
        else:
            out.append(run)
    return out


def unsupported(drafter: Any) -> str | None:
    """Why a round of this drafter can't run in one launch, or should not."""
    config = drafter.config
    if not config.gemma or not config.clusters:
        return "not one of Gemma 4's with a clustered head"
    inter = {block.down.shape[1] for block in drafter.blocks}
    specs = [block.spec for block in drafter.blocks]
    if len(inter) > 1 or len(runs_of(drafter.blocks)) > 2:
        return "more than two kinds of layers"
    if config.hidden > 512 or max(inter) > 4096:
        return "too wide: its weights are worth more than the steps between them"
    size = config.vocab_size // config.clusters
    numbers = [config.hidden, *inter, *(n for s in specs for n in (s.heads, s.head_dim)), config.clusters, size]
    if not all(power(n) for n in numbers) or any(s.head_dim < 32 for s in specs):
        return "sizes that are no powers of two"
    return None if all_dense(drafter) else "packed weights"


def all_dense(drafter: Any) -> bool:
    layers = (m for b in drafter.blocks for m in (b.qkv, b.out, b.gate_up, b.down))
    return all(isinstance(m, Tensor) for m in (drafter.pre, drafter.post, drafter.head, *layers))


class FusedDrafter:
    """The drafter's own methods, and `draft` for a whole round."""

    has_runner_ups = True

    def __init__(
        self, drafter: Any, most: int = 1, programs: int | None = None, splits: tuple[int, int] = (32, 32),
        pdl: bool = False,
    ):
        """most: sequences that share a launch (two take longer than step by step); programs: None: one per SM;
        splits: of the keys of a windowed and of a full layer; pdl: programmatic dependent launch."""
        config, device = drafter.config, drafter.device
        self.drafter, self.config, self.ops, self.target = drafter, config, drafter.ops, drafter.target
        self.start, self.step, self.candidates = drafter.start, drafter.step, drafter.candidates
        self.cluster_ids: Tensor = drafter.cluster_ids
        self.most = most
        self.runs = runs_of(drafter.blocks)
        self.sync = device.type in ("cuda", "meta")
        self.pdl = self.sync and pdl
        programs = self.programs = programs or min(256, sm_count(device))
        # no phase may have more units per sequence than there are programs
        cuts = min(WORK_UNITS, 1 << (programs.bit_length() - 1))
        self._pack()
        h, inter, size = config.hidden, drafter.blocks[0].down.shape[1], config.vocab_size // config.clusters
        cut = [splits[0] if r.spec.window else splits[1] for r in self.runs]
        wide = max(r.spec.heads * r.spec.head_dim for r in self.runs)
        parts = [(r.spec.heads * n, r.spec.head_dim) for r, n in zip(self.runs, cut)]
        sizes = dict(
            X=h, X0=h, X1=h, MG=h, A=sum(r.spec.head_dim for r in self.runs), Q=wide,
            P=max(n * d for n, d in parts), ML=max(2 * n for n, _ in parts),
            YP=max(r.spec.heads * r.spec.head_dim // min(128, r.spec.head_dim) for r in self.runs) * h, ACT=inter, Y=h,
            GN=h, C=config.clusters, L=config.cluster_top,
        )
        at, offsets = 0, {}
        for name, count in sizes.items():
            offsets[name] = at
            at += -(-count // 64) * 64
        self.scratch = torch.zeros((most, at), dtype=torch.float32, device=device)
        self.best = torch.zeros((most, 256), dtype=torch.int64, device=device)
        # each program's two best, by step
        self.scores = torch.full((most, MAX_DRAFT, 2 * 256), float("-inf"), device=device)
        self.tokens = torch.zeros((most, MAX_DRAFT, 2 * 256), dtype=torch.int32, device=device)
        self.counter = torch.zeros(128, dtype=torch.int32, device=device)  # [0] arrivals; [64] set when one was missed
        self.alarm = self.counter[64:65]  # a barrier timed out: the draft of that round is invalid
        self.epochs = torch.zeros(programs, dtype=torch.int32, device=device)
        self.size = 1  # sequences of the last round
        self.lengths = torch.arange(MAX_DRAFT + 1, device=device)[:, None].repeat(1, most)  # [steps, B], all `steps`
        pieces = 1 << max(0, (cuts // config.cluster_top).bit_length() - 1)
        self.constants: dict[str, int | float | str | bool] = dict(
            H=h, HB=config.backbone_hidden, HBP=triton.next_power_of_2(config.backbone_hidden), INTER=inter,
            CLUSTERS=config.clusters,
            SIZE=size, TOP=config.cluster_top, PIECES=min(pieces, size), NORMS=self.norm_stride,
            ACTIVATION=config.activation,
            EPS=config.norm_eps, WORK_UNITS=cuts, SLAB=self.flat.numel() // (4 * programs) // 64 * 64, STRIDE=at,
            G=programs, SYNC=self.sync, SPINS=SPINS, PDL=self.pdl, **offsets,
        )
        for name, run, n in zip("AB", [*self.runs, *self.runs], [*cut, *cut]):
            s = run.spec
            self.constants |= {
                f"COUNT_{name}": run.count, f"HEADS_{name}": s.heads, f"KV_{name}": s.kv_heads, f"D_{name}": s.head_dim,
                f"WINDOW_{name}": s.window or 0, f"SCALE_{name}": s.scale * LOG2E, f"S_{name}": n,
                f"BN_{name}": max(1, min(16, BLOCK_ELEMENTS // s.head_dim)),
            }
        if len(self.runs) == 1:
            self.constants["COUNT_B"] = 0
        self.phases = 1 + 5 * len(drafter.blocks) + 3
        self.table_scale = float(torch.tensor(self.target.config.embed_scale, dtype=drafter.dtype))

    def _pack(self) -> None:
        drafter, config = self.drafter, self.config
        h, wide = config.hidden, config.backbone_hidden
        pre_hidden = drafter.pre[:, wide:]
        mix = (pre_hidden.float() @ drafter.post.float()).to(drafter.dtype)
        matrices = [drafter.pre[:, :wide], pre_hidden, mix, drafter.centroids]
        for b in drafter.blocks:
            matrices += [b.qkv, b.out, b.gate_up, b.down]
        self.flat = torch.empty(sum(m.numel() for m in matrices), dtype=drafter.dtype, device=drafter.device)
        at, views = 0, []
        for m in matrices:
            views.append(self.flat[at : at + m.numel()].view(m.shape))
            views[-1].copy_(m)
            at += m.numel()
        layers = views[-4 * len(drafter.blocks) :]
        drafter.blocks = [
            replace(b, qkv=layers[4 * i], out=layers[4 * i + 1], gate_up=layers[4 * i + 2], down=layers[4 * i + 3])
            for i, b in enumerate(drafter.blocks)
        ]
        self.head = drafter.head.reshape(-1, h)
        self.ids = drafter.cluster_ids.to(torch.int32).contiguous()
        dim = max(b.spec.head_dim for b in drafter.blocks)
        self.norm_stride = 4 * h + 16 + dim
        norms = torch.zeros(h + self.norm_stride * len(drafter.blocks), dtype=torch.float32, device=drafter.device)
        norms[:h] = drafter.blocks[-1].next_norm
        for i, b in enumerate(drafter.blocks):
            line = norms[h + i * self.norm_stride :]
            for j, part in enumerate((b.attn_norm, b.post_attn_norm, b.mlp_norm, b.post_mlp_norm)):
                line[j * h : (j + 1) * h] = part
            line[4 * h : 4 * h + 1] = b.scalar
            line[4 * h + 16 : 4 * h + 16 + b.spec.head_dim] = b.q_norm
        self.norms = norms

    def runner_ups(self, steps: int) -> tuple[Tensor, Tensor]:
        """The two best of each program: of more, in one piece of a cluster, the others stay hidden."""
        return self.scores[: self.size, :steps], self.tokens[: self.size, :steps]

    @property
    def states(self) -> Tensor:
        """float32 [most, h]: what the head was given in the last step of the last round."""
        at = self.constants["GN"]
        return self.scratch[:, at : at + self.config.hidden]

    def draft(
        self, last: Tensor, features: Tensor, kv: KVView, steps: int, noise: DraftNoise, end: DraftEnd | None = None
    ) -> tuple[Tensor, None, Tensor]:
        """Tokens [B, steps] as ops.cpu's drafter guesses them; no confidence, so that drafts never end themselves."""
        size = self.size = last.shape[0]
        out = torch.empty((size, steps), dtype=torch.int64, device=last.device)
        parts: list[Tensor] = []
        strides, pages = [], []
        for run in (self.runs * 2)[:2]:
            keys, values = kv.keys[run.spec.kv_layer], kv.values[run.spec.kv_layer]
            assert keys is not None and values is not None
            table = kv.tables[run.spec.group]
            parts += [keys, values, table, self.drafter.inv_freqs[run.rope]]
            strides.append(table.stride(0))
            pages.append(keys.stride(0))

        def launch(from_step: int, to_step: int, first: int, end: int) -> None:
            round_kernel[(self.programs,)](
                self.flat, self.norms, self.head, self.ids, self.target.table, features, last, out,
                self.scratch, self.best, self.scores, self.tokens, self.counter, self.epochs, *parts, kv.positions,
                noise.temperature, noise.sampled.view(torch.uint8), noise.seed, noise.position, self.table_scale,
                features.stride(0), *strides, *pages,
                2 - self.config.position_offset, size, steps,
                from_step, to_step, first, end, PAGE=kv.page_size, num_warps=8, num_stages=1, **self.constants,
                launch_pdl=self.pdl,
            )

        if self.sync:
            launch(0, steps, 0, self.phases + 1)
        else:  # programs that run one after another cannot wait for each other
            for step in range(steps):
                for phase in range(self.phases):
                    launch(step, step + 1, phase, phase + 1)
            launch(steps, steps, self.phases, self.phases + 1)
        return out, None, self.lengths[steps, :size]
