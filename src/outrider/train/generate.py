"""The target answers prompts, many at a time: plain batched decoding over dense K/V, finished slots refilled.

Slots 0..greedy-1 take the most likely token, the others sample. Prompts are taken longest first, so that the slots of
a moment have like lengths. A step looks at keys up to `limit`, which grows and shrinks in strides; on a GPU the step of
each limit is captured once as a CUDA graph. Nothing waits for the device but one look at the finished slots every few steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..ops.reference import gumbel
from ..types import OutriderError
from .capture import DenseKV, SlotKV
from .data import Sequences
from .losses import exact_logits
from .parallel import Group

STRIDE = 128  # limits are multiples of this
EVERY = 8  # steps between looks at the finished slots
PREFILL_TOKENS = 32768


@dataclass(frozen=True)
class Answering:
    """How to answer. `coupled`: noise as the engine draws it from (seed, position), for evaluating coupled drafting."""

    max_new: int = 192
    temperature: float = 0.8
    slots: int = 1024
    greedy_share: float = 0.5
    coupled: bool = False
    seed: int = 0


class Answerer:
    def __init__(self, model: Any, how: Answering, max_prompt: int, eos_ids: tuple[int, ...]):
        self.model, self.how, self.device = model, how, model.device
        config, dev = model.config, model.device
        slots = how.slots
        room = -(-(max_prompt + how.max_new + EVERY + 1) // STRIDE) * STRIDE
        if room > config.max_context + STRIDE + EVERY:
            raise OutriderError(f"prompts of {max_prompt} tokens and {how.max_new} more do not fit {config.max_context} positions")
        shapes = {i: config.layers[i].attn for i in config.kv_layers}
        make = lambda a: torch.zeros((slots, a.kv_heads, room, a.head_dim), dtype=model.dtype, device=dev)  # noqa: E731
        self.kv = SlotKV(
            torch.zeros(slots, dtype=torch.int64, device=dev), torch.arange(slots, device=dev),
            {i: make(a) for i, a in shapes.items()}, {i: make(a) for i, a in shapes.items()}, STRIDE,
        )  # fmt: skip
        self.token = torch.zeros(slots, dtype=torch.int64, device=dev)
        self.start = torch.zeros(slots, dtype=torch.int64, device=dev)  # prompt lengths
        self.done = torch.ones(slots, dtype=torch.bool, device=dev)
        self.out = torch.zeros((slots, how.max_new), dtype=torch.int32, device=dev)
        self.seeds = torch.zeros(slots, dtype=torch.int64, device=dev)
        self.cold = round(slots * how.greedy_share)  # slots that are greedy
        self.eos = torch.tensor(eos_ids or (-1,), dtype=torch.int64, device=dev)
        self.vocabulary = torch.arange(config.vocab_size, device=dev)
        self.graphs: dict[int, Any] = {}
        self.mix = np.random.default_rng(how.seed)
        self.noise = torch.Generator(device=dev).manual_seed(how.seed)
        if dev.type == "cuda":
            torch.cuda.manual_seed(how.seed)

    # ---- one token -------------------------------------------------------------------------------------------------
    def choose(self, z: Tensor, slots: Tensor | None, position: Tensor) -> Tensor:
        """z [n, V] float32 of `slots` (None: all, in order) -> tokens [n]; position [n] of the tokens chosen."""
        if self.how.greedy_share >= 1.0:
            return z.argmax(-1)
        if slots is None and self.cold:
            return torch.cat((z[: self.cold].argmax(-1), self._sample(z[self.cold :], self.seeds[self.cold :], position[self.cold :])))
        if slots is None:
            return self._sample(z, self.seeds, position)
        return torch.where(slots < self.cold, z.argmax(-1), self._sample(z, self.seeds[slots], position))

    def _sample(self, z: Tensor, seeds: Tensor, position: Tensor) -> Tensor:
        if self.how.coupled:
            return (z / self.how.temperature + gumbel(seeds[:, None], position[:, None], self.vocabulary)).argmax(-1)
        rare = torch.empty_like(z)
        # a captured graph advances the default generator of the device, and only that one
        rare = rare.exponential_() if z.is_cuda else rare.exponential_(generator=self.noise)
        return (z / self.how.temperature).sub_(rare.clamp_min_(1e-20).log_()).argmax(-1)

    @torch.no_grad()
    def step(self) -> None:
        kv, model = self.kv, self.model
        hidden = model.forward(self.token, kv)
        token = self.choose(exact_logits(model, hidden), None, kv.positions + 1)
        count = kv.positions + 1 - self.start  # [B] answer tokens there were before this one
        at = count.clamp(max=self.how.max_new - 1)
        kept = self.out.gather(1, at[:, None])[:, 0]
        self.out[kv.slots, at] = torch.where(self.done, kept, token.int())
        over = (token[:, None] == self.eos[None, :]).any(1) | (count + 1 >= self.how.max_new)
        kv.positions.add_((~self.done).long())
        self.token.copy_(torch.where(self.done, self.token, token))
        self.done.logical_or_(over)

    def run_steps(self, count: int, limit: int) -> None:
        self.kv.limit = limit
        if self.device.type != "cuda":
            for _ in range(count):
                self.step()
            return
        if limit not in self.graphs:
            self.step()  # for real; it also warms the libraries up before the capture
            count -= 1
            graph = torch.cuda.CUDAGraph()
            pool = next(iter(self.graphs.values())).pool() if self.graphs else None
            with torch.cuda.graph(graph, pool=pool):
                self.step()
            self.graphs[limit] = graph
        for _ in range(count):
            self.graphs[limit].replay()

    # ---- prompts into slots ----------------------------------------------------------------------------------------
    @torch.no_grad()
    def prefill(self, slots: list[int], prompts: list[np.ndarray], seeds: list[int]) -> None:
        dev, width = self.device, max(len(p) for p in prompts)
        ids = np.zeros((len(prompts), width), dtype=np.int64)
        for i, p in enumerate(prompts):
            ids[i, : len(p)] = p
        lengths = torch.tensor([len(p) for p in prompts], device=dev)
        where = torch.tensor(slots, device=dev)
        kv = DenseKV.of(len(prompts), width, dev)
        hidden = self.model.forward(torch.from_numpy(ids).to(dev).reshape(-1), kv).view(len(prompts), width, -1)
        for layer in self.kv.keys:
            self.kv.keys[layer][where, :, :width] = kv.keys[layer]
            self.kv.values[layer][where, :, :width] = kv.values[layer]
        self.seeds[where] = torch.tensor(seeds, device=dev)
        last = hidden[torch.arange(len(prompts), device=dev), lengths - 1]
        token = self.choose(exact_logits(self.model, last), where, lengths)
        self.token[where], self.start[where], self.kv.positions[where] = token, lengths, lengths
        self.out[where, 0] = token.int()
        self.done[where] = (token[:, None] == self.eos[None, :]).any(1) | (self.how.max_new == 1)

    def answer(self, prompts: list[np.ndarray], seeds: list[int] | None = None) -> Iterator[tuple[int, bool, np.ndarray]]:
        """Yields (number of the prompt, greedy?, answer tokens) as they finish; EOS is the last token where it came."""
        order = sorted(range(len(prompts)), key=lambda i: -len(prompts[i]))
        slots, how = self.how.slots, self.how
        owner = [-1] * slots
        ran = np.zeros(slots, dtype=np.int64)  # upper bound of each slot's position
        while order or any(o >= 0 for o in owner):
            free = [s for s in range(slots) if owner[s] < 0]
            # refill when it is worth a prefill
            if order and (len(free) >= max(1, slots // 16) or len(free) == slots):
                self.mix.shuffle(free)  # or the longest prompts of a refill would all be answered greedily
                self._refill(free, order, prompts, seeds, owner, ran)
            active = [s for s in range(slots) if owner[s] >= 0]
            need = int(ran[active].max()) + EVERY + 1
            self.run_steps(EVERY, -(-need // STRIDE) * STRIDE)
            ran[active] += EVERY
            done = self.done.cpu().numpy()
            finished = [s for s in active if done[s]]
            if finished:
                where = torch.tensor(finished, device=self.device)
                out = self.out[where].cpu().numpy()
                count = (self.kv.positions[where] - self.start[where] + 1).cpu().numpy()
                for row, s in enumerate(finished):
                    yield owner[s], s < self.cold or how.greedy_share >= 1.0, out[row, : count[row]].copy()
                    owner[s] = -1

    def _refill(
        self, free: list[int], order: list[int], prompts: list[np.ndarray], seeds: list[int] | None, owner: list[int], ran: np.ndarray
    ) -> None:
        while free and order:
            width = len(prompts[order[0]])
            count = max(1, min(len(free), len(order), PREFILL_TOKENS // width))
            taken, order[:count] = order[:count], []
            where, free[:count] = free[:count], []
            self.prefill(where, [prompts[i] for i in taken], [0 if seeds is None else seeds[i] for i in taken])
            for s, i in zip(where, taken, strict=True):
                owner[s], ran[s] = i, len(prompts[i])


def answer_all(
    model: Any, prompts: list[np.ndarray], how: Answering, folder: Path, eos_ids: tuple[int, ...],
    shard: int = 8192, report: Callable[[int, int, int, float], None] | None = None, deadline: float | None = None,
    group: Group | None = None,
) -> None:  # fmt: skip
    """Answer every prompt that has none in `folder` yet; shards are written as answers finish, so a killed run loses little.
    Of several processes each takes every n-th prompt and writes shards of its own.
    `report(prompts done, prompts in all, tokens made, seconds)`; stops early after `deadline` seconds."""
    folder.mkdir(parents=True, exist_ok=True)
    group = group or Group()
    own = f"data-{group.rank}-" if group.world > 1 else "data-"
    for part in folder.glob(own + "*.part"):
        part.unlink()
    had = {int(i) for path in folder.glob("data-*.npz") for i in Sequences.load(path).index}
    todo = [i for i in range(group.rank, len(prompts), group.world) if i not in had]
    number = 1 + max((int(p.stem.removeprefix(own)) for p in folder.glob(own + "?????.npz")), default=-1)
    began, made = time.perf_counter(), 0
    rows: list[tuple[np.ndarray, int, int, bool]] = []

    def flush() -> None:
        nonlocal number, rows
        if rows:
            made_rows, given, lines, cold = zip(*rows, strict=True)
            Sequences.of(made_rows, given, lines, cold, model.config.vocab_size).save(folder / f"{own}{number:05d}.npz")
            number, rows = number + 1, []

    if not todo or (deadline is not None and deadline <= 0):
        return
    machine = Answerer(model, how, max(len(prompts[i]) for i in todo), eos_ids)
    finished = 0
    for n, greedy, answer in machine.answer([prompts[i] for i in todo], seeds=[how.seed + i for i in todo]):
        i = todo[n]
        rows.append((np.concatenate([prompts[i], answer]), len(prompts[i]), i, greedy))
        made, finished = made + len(answer), finished + 1
        if len(rows) >= shard:
            flush()
        if report is not None and finished % 64 == 0:
            report(len(had) + finished, len(prompts), made, time.perf_counter() - began)
        if deadline is not None and time.perf_counter() - began > deadline:
            break
    flush()
    if report is not None:
        report(len(had) + finished, len(prompts), made, time.perf_counter() - began)
