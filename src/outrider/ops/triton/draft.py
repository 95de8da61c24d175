"""Gemma 4's drafters on a GPU: `FusedDrafter` runs a whole round in one launch (draft_kernel.py says how).

The layers' matrices are copied once into one flat tensor in the order of use, so that layers of one shape are a loop; the
drafter's own weights become views of it. The product of `pre`'s second half with `post` is taken once: the fed-back state
then never leaves the drafter's width. With `narrow` matrices and head are int8, one factor a row: a draft need not be exact.
Batches beyond `most` sequences go step by step through the drafter itself.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...types import AttnSpec, KVView
from .draft_kernel import attend_phase, best_token, cluster_phase, down_phase, gate_phase, head_phase, out_phase, pre_phase, q_phase, sync

LOG2E = 1.4426950408889634
SPINS = 1 << 22  # a second or two: a program that never comes must not hang the device
CUTS = 128  # units of work a phase: what divides every shape, and nearly all processors of an H100 or H200


@triton.jit
def layer_run(
    w, ws, norms, keys, values, tables, table_stride, page_stride, positions, cos, sin, s0,
    batch, tick, first, last, spins, counter, probe, FIRST_LAYER: tl.constexpr, COUNT: tl.constexpr, NORMS: tl.constexpr,
    H: tl.constexpr, INTER: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, WINDOW: tl.constexpr,
    SCALE: tl.constexpr, S: tl.constexpr, KEYS: tl.constexpr, PAGE: tl.constexpr, ELEMENTS: tl.constexpr, ACTIVATION: tl.constexpr,
    CUTS: tl.constexpr, X: tl.constexpr, X0: tl.constexpr, X1: tl.constexpr, Q: tl.constexpr, P: tl.constexpr, ML: tl.constexpr,
    YP: tl.constexpr, ACT: tl.constexpr, Y: tl.constexpr,
    EPS: tl.constexpr, STRIDE: tl.constexpr, Q8: tl.constexpr, G: tl.constexpr, SYNC: tl.constexpr, PROBE: tl.constexpr,
):  # fmt: skip
    """COUNT layers of one shape over the same K/V. Phases are numbered from 1 + 5 · FIRST_LAYER."""
    WIDE: tl.constexpr = HEADS * D
    R_Q: tl.constexpr = WIDE // CUTS if WIDE >= CUTS else 1
    R_OUT: tl.constexpr = H * HEADS // CUTS if H * HEADS >= CUTS else 1
    R_GATE: tl.constexpr = INTER // CUTS if INTER >= CUTS else 1
    R_DOWN: tl.constexpr = H // CUTS if H >= CUTS else 1
    BN_Q: tl.constexpr = ELEMENTS // H if ELEMENTS // H < R_Q else R_Q
    BN_OUT: tl.constexpr = ELEMENTS // D if ELEMENTS // D < R_OUT else R_OUT
    BN_GATE: tl.constexpr = ELEMENTS // H // 2 if ELEMENTS // H // 2 < R_GATE else R_GATE
    BK: tl.constexpr = ELEMENTS // R_DOWN if ELEMENTS // R_DOWN < INTER else INTER
    CH: tl.constexpr = 8192 // H if 8192 // H < HEADS else HEADS
    for i in range(COUNT):
        layer = FIRST_LAYER + i
        phase = 1 + 5 * layer
        wl = w + i * (2 * WIDE * H + 3 * INTER * H)
        sl = ws + i * (WIDE + H + 2 * INTER + H)
        nl = norms + layer * NORMS
        if (phase >= first) & (phase < last):
            spins = q_phase(
                wl, sl, nl, norms + tl.maximum(layer - 1, 0) * NORMS, s0, layer == 0, batch, tick + phase, spins, counter, probe,
                H, WIDE, R_Q, BN_Q, X, X0, X1, Y, Q, EPS, STRIDE, Q8, G, SYNC, PROBE,
            )  # fmt: skip
        if (phase + 1 >= first) & (phase + 1 < last):
            spins = attend_phase(
                keys, values, tables, table_stride, page_stride, positions, cos, sin, nl + 4 * H + 16, s0, batch, tick + phase + 1, spins,
                counter, probe, SCALE, HEADS, KV_HEADS, D, WINDOW, S, KEYS, PAGE, Q, P, ML, EPS, STRIDE, G, SYNC, PROBE,
            )  # fmt: skip
        if (phase + 2 >= first) & (phase + 2 < last):
            spins = out_phase(
                wl + WIDE * H, sl + WIDE, s0, positions, batch, tick + phase + 2, spins, counter, probe,
                H, HEADS, D, WINDOW, S, KEYS, R_OUT, BN_OUT, P, ML, YP, STRIDE, Q8, G, SYNC, PROBE,
            )  # fmt: skip
        if (phase + 3 >= first) & (phase + 3 < last):
            spins = gate_phase(
                wl + 2 * WIDE * H, sl + WIDE + H, nl, s0, batch, tick + phase + 3, spins, counter, probe,
                H, HEADS, INTER, R_GATE, BN_GATE, CH, ACTIVATION, X0, X1, YP, ACT, EPS, STRIDE, Q8, G, SYNC, PROBE,
            )  # fmt: skip
        if (phase + 4 >= first) & (phase + 4 < last):
            spins = down_phase(
                wl + 2 * WIDE * H + 2 * INTER * H, sl + WIDE + H + 2 * INTER, s0, batch, tick + phase + 4, spins, counter, probe,
                H, INTER, R_DOWN, BK, ACT, Y, STRIDE, Q8, G, SYNC, PROBE,
            )  # fmt: skip
    return spins


@triton.jit(
    do_not_specialize=["batch", "from_step", "to_step", "first", "last", "steps", "feature_stride", "stride_a", "stride_b"],
    do_not_specialize_on_alignment=["newest", "positions", "tables_a", "tables_b", "out", "temperature", "hot", "seed", "position"],
)
def round_kernel(
    w, ws, norms, head, head_s, cluster_ids, table, features, newest, out, scratch, ids, counter, epochs, probe,
    keys_a, values_a, tables_a, cos_a, sin_a, keys_b, values_b, tables_b, cos_b, sin_b, positions, temperature, hot, seed, position,
    table_scale, feature_stride, stride_a, stride_b, page_stride_a, page_stride_b, batch, steps, from_step, to_step, first, last,
    H: tl.constexpr, HB: tl.constexpr, INTER: tl.constexpr, VOCAB: tl.constexpr, CLUSTERS: tl.constexpr, TOP: tl.constexpr,
    COUNT_A: tl.constexpr, HEADS_A: tl.constexpr, KV_A: tl.constexpr, D_A: tl.constexpr, WINDOW_A: tl.constexpr, SCALE_A: tl.constexpr,
    S_A: tl.constexpr, KEYS_A: tl.constexpr,
    COUNT_B: tl.constexpr, HEADS_B: tl.constexpr, KV_B: tl.constexpr, D_B: tl.constexpr, WINDOW_B: tl.constexpr, SCALE_B: tl.constexpr,
    S_B: tl.constexpr, KEYS_B: tl.constexpr,
    ELEMENTS: tl.constexpr, AHEAD: tl.constexpr, NORMS: tl.constexpr, ACTIVATION: tl.constexpr, EPS: tl.constexpr, PAGE: tl.constexpr,
    CUTS: tl.constexpr, X0: tl.constexpr, X1: tl.constexpr, MG: tl.constexpr, Q: tl.constexpr, P: tl.constexpr, ML: tl.constexpr,
    YP: tl.constexpr, ACT: tl.constexpr, Y: tl.constexpr, C: tl.constexpr, BV: tl.constexpr, STRIDE: tl.constexpr,
    Q8: tl.constexpr, G: tl.constexpr, SYNC: tl.constexpr, PROBE: tl.constexpr, SPINS: tl.constexpr,
):  # fmt: skip
    """Phases first..last-1 of steps from_step..to_step-1: 0 input, five a layer, head, clusters; at the end the last token."""
    pid = tl.program_id(0)
    LAYERS: tl.constexpr = COUNT_A + COUNT_B
    HEAD: tl.constexpr = 1 + 5 * LAYERS
    END: tl.constexpr = HEAD + (2 if CLUSTERS > 0 else 1)  # phases a step; also the number of the one that hands out the last token
    R: tl.constexpr = H // CUTS if H >= CUTS else 1
    BK: tl.constexpr = ELEMENTS // R if ELEMENTS // R < 2048 else 2048
    RUN_A: tl.constexpr = 2 * H * HB + H * H + CLUSTERS * H  # where the first run's matrices begin
    ROWS_A: tl.constexpr = 3 * H + CLUSTERS
    RUN_B: tl.constexpr = RUN_A + COUNT_A * (2 * HEADS_A * D_A * H + 3 * INTER * H)
    ROWS_B: tl.constexpr = ROWS_A + COUNT_A * (HEADS_A * D_A + 2 * H + 2 * INTER)
    BN_HEAD: tl.constexpr = ELEMENTS // H
    base = tl.load(epochs + pid)
    spins = tl.full((), SPINS, tl.int32)
    for step in range(from_step, to_step):
        tick = base + (step - from_step) * END
        if first == 0:
            spins = pre_phase(
                w, ws, table, features, feature_stride, newest, out, scratch, ids, step, steps, batch, table_scale, tick, spins, counter,
                probe, H, HB, R, BK, 0, MG, BV, STRIDE, Q8, G, SYNC, PROBE,
            )  # fmt: skip
        spins = layer_run(
            w + RUN_A, ws + ROWS_A, norms + H, keys_a, values_a, tables_a, stride_a, page_stride_a, positions, cos_a, sin_a, scratch,
            batch, tick, first, last, spins, counter, probe, 0, COUNT_A, NORMS, H, INTER, HEADS_A, KV_A, D_A, WINDOW_A, SCALE_A, S_A,
            KEYS_A, PAGE, ELEMENTS, ACTIVATION, CUTS, 0, X0, X1, Q, P, ML, YP, ACT, Y, EPS, STRIDE, Q8, G, SYNC, PROBE,
        )  # fmt: skip
        if COUNT_B > 0:
            spins = layer_run(
                w + RUN_B, ws + ROWS_B, norms + H, keys_b, values_b, tables_b, stride_b, page_stride_b, positions, cos_b, sin_b, scratch,
                batch, tick, first, last, spins, counter, probe, COUNT_A, COUNT_B, NORMS, H, INTER, HEADS_B, KV_B, D_B, WINDOW_B, SCALE_B,
                S_B, KEYS_B, PAGE, ELEMENTS, ACTIVATION, CUTS, 0, X0, X1, Q, P, ML, YP, ACT, Y, EPS, STRIDE, Q8, G, SYNC, PROBE,
            )  # fmt: skip
        last_norms = norms + H + (LAYERS - 1) * NORMS
        if (first <= HEAD) & (last > HEAD):
            if CLUSTERS > 0:
                spins = head_phase(
                    w + 2 * H * HB, ws + 2 * H, w + 2 * H * HB + H * H, ws + 3 * H, last_norms, norms, scratch, ids, temperature, hot, seed,
                    position, step, batch, tick + HEAD, spins, counter, probe,
                    H, CLUSTERS, R, CLUSTERS // CUTS if CLUSTERS >= CUTS else 1, 1, True, X1, Y, MG, C, BV, EPS, STRIDE, Q8, G, SYNC, PROBE,
                )  # fmt: skip
            else:
                spins = head_phase(
                    w + 2 * H * HB, ws + 2 * H, head, head_s, last_norms, norms, scratch, ids, temperature, hot, seed,
                    position, step, batch, tick + HEAD, spins, counter, probe,
                    H, VOCAB, R, BN_HEAD, AHEAD, False, X1, Y, MG, C, BV, EPS, STRIDE, Q8, G, SYNC, PROBE,
                )  # fmt: skip
        if CLUSTERS > 0:  # noqa: SIM102
            if (first <= HEAD + 1) & (last > HEAD + 1):
                SIZE: tl.constexpr = VOCAB // CLUSTERS
                spins = cluster_phase(
                    head, head_s, cluster_ids, last_norms, norms, scratch, ids, temperature, hot, seed, position, step, batch,
                    tick + HEAD + 1, spins, counter, probe, H, CLUSTERS, SIZE, TOP, CLUSTERS // CUTS if CLUSTERS >= CUTS else 1,
                    512 if CLUSTERS > 512 else CLUSTERS, 2 * BN_HEAD if 2 * BN_HEAD < SIZE else SIZE, X1, Y, C, BV, EPS, STRIDE, Q8, G,
                    SYNC, PROBE,
                )  # fmt: skip
    if last > END:
        tick = base + (to_step - from_step) * END
        spins = sync(counter, tick, spins, probe, G, SYNC, PROBE)
        for b in range(pid, batch, G):
            tl.store(out + b * steps + to_step - 1, best_token(scratch + b * STRIDE, ids + b * 256, BV, G).to(tl.int64))
        if SYNC:
            tl.store(epochs + pid, tick + 1)


# ---- packing ------------------------------------------------------------------------------------------------------------------
def narrowed(dense: Tensor) -> tuple[Tensor, Tensor]:
    """int8 [N, K] and one float32 factor a row, in pieces: no float32 copy of a whole head."""
    out = torch.empty(dense.shape, dtype=torch.int8, device=dense.device)
    factors = torch.empty(dense.shape[0], dtype=torch.float32, device=dense.device)
    for piece in range(0, dense.shape[0], 32768):
        x = dense[piece : piece + 32768].float()
        factor = x.abs().amax(1).clamp_min(1e-30) / 127.0
        out[piece : piece + 32768] = (x / factor[:, None]).round().to(torch.int8)
        factors[piece : piece + 32768] = factor
    return out, factors


@dataclass(frozen=True)
class Run:
    """Layers of one shape over the same K/V."""

    spec: AttnSpec
    rope: int
    count: int
    splits: int
    keys: int  # a block


def power(n: int) -> bool:
    return n > 0 and n & (n - 1) == 0


def runs_of(blocks: list[Any]) -> list[Run]:
    out: list[Run] = []
    for block in blocks:
        s = block.spec
        splits = max(1, min(64, CUTS // s.kv_heads))
        keys = 32 if s.head_dim > 256 else 16 if s.kv_heads <= 2 else 64
        run = Run(s, block.rope, 1, splits, keys)
        if out and replace(out[-1], count=1) == run:
            out[-1] = replace(out[-1], count=out[-1].count + 1)
        else:
            out.append(run)
    return out


def unsupported(drafter: Any) -> str | None:
    """Why a round of this drafter can't run in one launch."""
    config = drafter.config
    if not config.gemma:
        return "not one of Gemma 4's"
    inter = {block.down.shape[1] for block in drafter.blocks}
    specs = [block.spec for block in drafter.blocks]
    if len(inter) > 1 or len(runs_of(drafter.blocks)) > 2:
        return "more than two kinds of layers"
    size = config.vocab_size // config.clusters if config.clusters else config.vocab_size
    numbers = [config.hidden, *inter, *(s.heads * s.head_dim for s in specs), *(s.heads for s in specs), size]
    if not all(power(n) for n in numbers) or any(not power(s.head_dim) or s.head_dim < 32 or s.heads // s.kv_heads > 16 for s in specs):
        return "sizes that are no powers of two"
    if config.clusters and (not power(config.clusters) or config.clusters > CUTS * 32 or config.hidden < 16):
        return "an odd number of clusters"
    weights = [drafter.pre, drafter.post, drafter.head, *(m for b in drafter.blocks for m in (b.qkv, b.out, b.gate_up, b.down))]
    return None if all(isinstance(m, Tensor) for m in weights) else "packed weights"


class FusedDrafter:
    """Gemma4Assistant's own methods, and `draft` for a whole round."""

    def __init__(
        self, drafter: Any, narrow: bool = False, most: int = 2, programs: int | None = None, warps: int = 8, ahead: int = 6,
        elements: int | None = None, probe: int = 0,
    ):  # fmt: skip
        """most: sequences that share a launch; programs: None takes one a processor; ahead: tiles of the head fetched early;
        elements: of a tile; probe: ticks whose clocks are kept."""
        config, device = drafter.config, drafter.device
        self.drafter, self.config, self.ops, self.target = drafter, config, drafter.ops, drafter.target
        self.start, self.step, self.candidates, self.full_logits = drafter.start, drafter.step, drafter.candidates, drafter.full_logits
        self.most, self.warps, self.narrow = most, warps, narrow
        self.runs = runs_of(drafter.blocks)
        self.sync = device.type in ("cuda", "meta")
        if programs is None:
            programs = min(256, torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else CUTS + 4
        self.programs, self.probe_ticks = programs, probe
        cuts = min(CUTS, 1 << (programs.bit_length() - 1))  # no phase may have more units a sequence than there are programs
        self._pack(narrow)
        h, inter = config.hidden, drafter.blocks[0].down.shape[1]
        heads, splits = max(r.spec.heads for r in self.runs), max(r.spec.heads * r.splits for r in self.runs)
        wide = max(r.spec.heads * r.spec.head_dim for r in self.runs)
        parts = max(r.spec.heads * r.splits * r.spec.head_dim for r in self.runs)
        sizes = dict(
            X=h, X0=h, X1=h, MG=h, Q=wide, P=parts, ML=2 * splits, YP=heads * h, ACT=inter, Y=h, C=max(16, config.clusters), BV=256,
        )  # fmt: skip
        at, offsets = 0, {}
        for name, size in sizes.items():
            offsets[name] = at
            at += -(-size // 64) * 64
        del offsets["X"]  # it is 0
        self.scratch = torch.zeros((most, at), dtype=torch.float32, device=device)
        self.ids = torch.zeros((most, 256), dtype=torch.int32, device=device)
        self.counter = torch.zeros(256, dtype=torch.int32, device=device)  # [0] arrivals; [64] set when a program was missed
        self.epochs = torch.zeros(programs, dtype=torch.int32, device=device)
        self.probe = torch.zeros((programs, max(1, probe), 2), dtype=torch.int64, device=device)
        self.constants: dict[str, Any] = dict(
            H=h, HB=config.backbone_hidden, INTER=inter, VOCAB=config.vocab_size, CLUSTERS=config.clusters, TOP=config.cluster_top,
            ELEMENTS=max(2 * h, elements or (32768 if narrow else 16384)), AHEAD=ahead, NORMS=self.norm_stride,
            ACTIVATION=config.activation, EPS=config.norm_eps, CUTS=cuts, STRIDE=at, Q8=narrow, G=programs,
            SYNC=self.sync, PROBE=probe, SPINS=SPINS, **offsets,
        )  # fmt: skip
        for name, run in zip("AB", [*self.runs, *self.runs]):
            s = run.spec
            self.constants |= {
                f"COUNT_{name}": run.count, f"HEADS_{name}": s.heads, f"KV_{name}": s.kv_heads, f"D_{name}": s.head_dim,
                f"WINDOW_{name}": s.window or 0, f"SCALE_{name}": s.scale * LOG2E, f"S_{name}": run.splits, f"KEYS_{name}": run.keys,
            }  # fmt: skip
        if len(self.runs) == 1:
            self.constants["COUNT_B"] = 0
        self.phases = 1 + 5 * len(drafter.blocks) + (2 if config.clusters else 1)
        self.table_scale = float(torch.tensor(self.target.config.embed_scale, dtype=drafter.dtype))

    def _pack(self, narrow: bool) -> None:
        drafter, config = self.drafter, self.config
        h, wide = config.hidden, config.backbone_hidden
        pre_hidden = drafter.pre[:, wide:]
        mix = (pre_hidden.float() @ drafter.post.float()).to(drafter.dtype)
        matrices = [drafter.pre[:, :wide], pre_hidden, mix]
        if config.clusters:
            matrices.append(drafter.centroids)
        for b in drafter.blocks:
            matrices += [b.qkv, b.out, b.gate_up, b.down]
        total, rows = sum(m.numel() for m in matrices), sum(m.shape[0] for m in matrices)
        self.flat = torch.empty(total, dtype=torch.int8 if narrow else drafter.dtype, device=drafter.device)
        self.factors = torch.ones(rows, dtype=torch.float32, device=drafter.device)
        at = row = 0
        views = []
        for m in matrices:
            view = self.flat[at : at + m.numel()].view(m.shape)
            if narrow:
                small, factor = narrowed(m)
                view.copy_(small)
                self.factors[row : row + m.shape[0]] = factor
            else:
                view.copy_(m)
            views.append(view)
            at, row = at + m.numel(), row + m.shape[0]
        if not narrow:
            layers = views[-4 * len(drafter.blocks) :]
            drafter.blocks = [
                replace(b, qkv=layers[4 * i], out=layers[4 * i + 1], gate_up=layers[4 * i + 2], down=layers[4 * i + 3])
                for i, b in enumerate(drafter.blocks)
            ]
        head: Tensor = drafter.head.reshape(-1, h)
        self.head, self.head_factors = narrowed(head) if narrow else (head, self.factors)
        self.cluster_ids = drafter.cluster_ids.to(torch.int32).contiguous() if config.clusters else self.factors
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

    def draft(
        self, last: Tensor, features: Tensor, kv: KVView, steps: int, temperature: Tensor, hot: Tensor, seed: Tensor, position: Tensor,
        end: Any = None,
    ) -> tuple[Tensor, None, Tensor]:  # fmt: skip
        """Tokens [B, steps] as ops.cpu's drafter guesses them; no confidence, so that drafts never end themselves."""
        size = last.shape[0]
        lengths = torch.full_like(last, steps)
        if size > self.most:
            return self._by_steps(last, features, kv, steps, temperature, hot, seed, position), None, lengths
        state = self.drafter.start(kv, features)
        out = torch.empty((size, steps), dtype=torch.int64, device=last.device)
        parts: list[Any] = []
        strides, pages = [], []
        for run in (self.runs * 2)[:2]:
            keys, values = kv.keys[run.spec.kv_layer], kv.values[run.spec.kv_layer]
            assert keys is not None and values is not None
            table = kv.tables[run.spec.group]
            parts += [keys, values, table, *state.angles[run.rope]]
            strides.append(table.stride(0))
            pages.append(keys.stride(0))

        def launch(from_step: int, to_step: int, first: int, end: int) -> None:
            round_kernel[(self.programs,)](
                self.flat, self.factors, self.norms, self.head, self.head_factors, self.cluster_ids, self.target.table, features, last, out,
                self.scratch, self.ids, self.counter, self.epochs, self.probe, *parts, kv.positions, temperature, hot.view(torch.uint8),
                seed, position, self.table_scale, features.stride(0), *strides, *pages, size, steps, from_step, to_step, first, end,
                PAGE=kv.page_size, num_warps=self.warps, num_stages=1, **self.constants,
            )  # fmt: skip

        if self.sync:
            launch(0, steps, 0, self.phases + 1)
        else:  # programs that run one after another cannot wait for each other
            for step in range(steps):
                for phase in range(self.phases):
                    launch(step, step + 1, phase, phase + 1)
            launch(steps, steps, self.phases, self.phases + 1)
        return out, None, lengths

    def _by_steps(
        self, token: Tensor, features: Tensor, kv: KVView, steps: int, temperature: Tensor, hot: Tensor, seed: Tensor, position: Tensor
    ) -> Tensor:
        state = self.drafter.start(kv, features)
        hidden, guesses = features[:, : self.config.backbone_hidden], []
        for j in range(steps):
            g, hidden = self.drafter.step(self.target.embed(token), hidden, state)
            ids, logits = self.drafter.candidates(g)
            best = self.ops.gumbel_argmax(torch.where(hot, 1.0 / temperature, 1.0)[:, None] * logits, seed, position + j, ids, hot)
            token = best if ids is None else ids.gather(1, best[:, None])[:, 0]
            guesses.append(token)
        return torch.stack(guesses, 1)
