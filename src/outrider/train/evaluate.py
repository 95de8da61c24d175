"""Evaluates a drafter: exact tokens per cycle for every K over the target's own answers.

A drafted token counts only if all before it were right, so along every chain that counts the drafter's tokens are the
answer's: feeding the answer gives, for all anchors at once, how many drafted tokens match. The evaluation then visits
only the anchors that decoding would: from an anchor with m matches, min(m, K) + 1 tokens are emitted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
import torch
from torch import Tensor

from ..models.decoder import TextModel
from ..ops.reference import ReferenceOps, as_tensor
from ..spec.acceptance import Runs
from ..spec.choose import SamplingBatch
from ..spec.drafter import guess_next
from ..spec.slot_sampling import sampling_batch
from ..types import MAX_DRAFT, SamplingParams
from .clock import Halt, Halted
from .clusters import cluster_of
from .data import Sequences, make_batch, plan_epoch
from .export import Json
from .losses import chunk_rows
from .net import TrainNet
from .target import capture

Walk = tuple[int, int, np.ndarray]
Recorded = list[tuple[Tensor, Tensor]]  # per step: states [A, h] of the drafter and the head's choices [A]


@dataclass(frozen=True)
class Judged:
    """Per answer and anchor: number of right drafted tokens, and the drafter's confidence in each."""

    right: list[np.ndarray]  # int64 [anchors]
    sure: list[np.ndarray]  # float32 [anchors, most]; undefined behind the first wrong token

    def runs(self) -> list[Runs]:
        """Accepted tokens and confidences, from which an acceptance profile is measured."""
        return [(right.tolist(), sure.tolist()) for right, sure in zip(self.right, self.sure, strict=True)]


@dataclass(frozen=True)
class Judge:
    """Evaluates a drafter in the form in which it is stored, with its target."""

    model: TextModel
    net: TrainNet
    full: bool = True  # score all rows of the head, also where the drafter has clusters
    halt: Halt = lambda: False  # asked before each batch; True ends the evaluation with Halted

    @cached_property
    def weights(self) -> dict[str, Tensor]:
        return {k: v.detach() for k, v in self.net.cast(self.model.dtype, self.net.config.weight_bits).items()}

    @property
    def head(self) -> Tensor:  # [V, h]
        return as_tensor(self.model.head) if self.net.config.tied_to_target else self.weights["embed"]

    @cached_property
    def clusters(self) -> tuple[Tensor, Tensor] | None:
        """Ids [C, S], and the cluster of each token [V]; None: all tokens are scored."""
        order = self.weights.get("token_ordering")
        count = self.net.config.clusters
        return None if self.full or not count or order is None else (order.view(count, -1), cluster_of(order, count))

    def score(self, g: Tensor, cluster_bonus: Tensor | None) -> tuple[None, Tensor]:
        """Logits [A, V] of states [A, h], -inf outside the best clusters; the signature is spec.drafter.Score's."""
        z = (g @ self.head.T).float()
        if self.clusters is not None:
            near = (g @ self.weights["centroids"].T).float()
            top = self.net.config.cluster_top
            best = (near if cluster_bonus is None else near + cluster_bonus).topk(top, dim=-1).indices
            chosen = torch.zeros_like(near, dtype=torch.bool).scatter_(1, best, True)
            z = z.masked_fill_(~chosen[:, self.clusters[1]], float("-inf"))
        return None, z

    def choose(self, g: Tensor, sampling: SamplingBatch, at: Tensor, weigh: bool = True) -> tuple[Tensor, Tensor]:
        """Tokens [A] for states g [A, h], and the drafter's confidence in each, float32 [A] (only with `weigh`, else
        0), among the scored tokens. `at` [A]: the positions guessed. Computed in pieces, so that nothing of size [A, V]
        is allocated."""
        step = chunk_rows(g.device, 8 * self.head.shape[0] * (4 if sampling.any_sampled else 1))
        # the reference defines the noise
        ids = None if self.clusters is None else self.clusters[0]
        ops = ReferenceOps()
        out = torch.zeros_like(at)
        sure = torch.zeros(len(at), device=g.device)
        for rows in torch.arange(len(g), device=g.device).split(step):
            some = sampling.select(rows)
            out[rows], z = guess_next(some, at[rows], score=partial(self.score, g[rows]), ops=ops, clusters=ids)
            if weigh:
                sure[rows] = some.likely(z, out[rows])
        return out, sure

    @torch.no_grad()
    def drafts(
        self,
        data: Sequences,
        most: int = MAX_DRAFT,
        temperature: float = 0.0,
        record: Recorded | None = None,
        weigh: bool = False,
    ) -> Judged:
        """Per sequence: for anchors p-1, p, ..., n-3, how many of up to `most` drafted tokens are right, drafted as the
        answers were chosen: at their temperature, with their noise. `record` receives every step that counts; `weigh`:
        also computes the drafter's confidence."""
        out: list[np.ndarray] = [np.zeros(0, np.int64)] * len(data)
        confidence: list[np.ndarray] = [np.zeros((0, most), np.float32)] * len(data)
        model = self.model
        device = self.model.device
        anchors = 16384 if device.type == "cuda" else 1024  # few on a CPU: a batch ends when its last draft fails
        for which in plan_epoch(data, anchors, tokens=8 * anchors, seed=0, epoch=0):
            if self.halt():
                raise Halted
            batch = make_batch(data, which, 1).to(device)
            count = batch.ids.shape[0]
            width = batch.ids.shape[1] - batch.first
            alive = batch.anchors[0]  # rows of [B·Tq]
            right = torch.zeros(count * width, dtype=torch.int64, device=device)
            sure = torch.zeros(count * width, most, device=device)
            ends = torch.from_numpy(data.lengths[which]).to(device)
            params = [SamplingParams(temperature=temperature, seed=int(seed)) for seed in data.seeds[which]]
            sampling = sampling_batch(
                params, [[]] * count, outputs=[[]] * count, vocab=model.config.vocab_size, device=device
            )
            seen = capture(model, batch.ids, self.net.taps)
            for j, g in enumerate(self.net.unroll(self.weights, model, seen, batch=batch, steps=most), 1):
                b, at = batch.where(alive)
                at = at + j + 1  # position being guessed
                inside = at < ends[b]
                alive = alive[inside]
                b = b[inside]
                at = at[inside]
                if not alive.numel():
                    break
                states = g.reshape(count * width, -1)[alive]
                choice, likely = self.choose(states, sampling.select(b), at, weigh=weigh)
                if record is not None:
                    record.append((states, choice))
                sure[alive, j - 1] = likely
                alive = alive[choice == batch.ids[b, at]]
                right[alive] += 1
            grid = right.view(count, width).cpu().numpy()
            trust = sure.view(count, width, most).cpu().numpy()
            for row, i in enumerate(which):
                lo = int(data.prompts[i]) - 1 - batch.first
                hi = lo + int(data.lengths[i]) - 1 - int(data.prompts[i])
                out[i] = grid[row, lo:hi]
                confidence[i] = trust[row, lo:hi]
        return Judged(out, confidence)


def walk(right: np.ndarray, k: int) -> Walk:
    """Follows decoding through one answer's matches. Returns tokens emitted after the first, cycles, and how many
    cycles accepted at least j = 1..k."""
    left = len(right)
    at = 0
    cycles = 0
    tokens = 0
    reached = np.zeros(k, dtype=np.int64)
    while at < left:
        accepted = min(int(right[at]), k)
        reached[:accepted] += 1
        emitted = min(accepted + 1, left - at)
        cycles = cycles + 1
        tokens = tokens + emitted
        at = at + emitted
    return tokens, cycles, reached


def per_cycle(walked: Sequence[Walk]) -> float:
    """Tokens per cycle over all these walks."""
    return round(sum(w[0] for w in walked) / max(1, sum(w[1] for w in walked)), 4)


def summary(right: list[np.ndarray], categories: Sequence[str], most: int = MAX_DRAFT, at: int = 4) -> Json:
    """tokens_per_cycle {K: value} over all answers; acceptance_by_position: share of cycles at K = `at` (and, for later
    positions, at K = most) that accepted at least j; first_position_all_anchors: the first's, decoded from or not;
    by_category at K = `at`."""
    walked = {k: [walk(r, k) for r in right] for k in range(1, most + 1)}
    by: dict[str, list[Walk]] = {name: [] for name in sorted(set(categories))}
    for name, one in zip(categories, walked[at], strict=True):
        by[name].append(one)
    cycles = {k: max(1, sum(w[1] for w in walked[k])) for k in (at, most)}
    first, whole = (np.sum([w[2] for w in walked[k]], axis=0) / cycles[k] for k in (at, most))
    flat = np.concatenate(right)
    return {
        "tokens_per_cycle": {k: per_cycle(walks) for k, walks in walked.items()},
        "acceptance_by_position": [round(float(v), 4) for v in [*first, *whole[len(first) :]]],
        "first_position_all_anchors": round(int((flat > 0).sum()) / max(1, len(flat)), 4),
        "by_category": {name: per_cycle(walks) for name, walks in by.items()},
        "answers": len(right),
        "tokens": len(flat),
    }


def cycle_costs(draft_cost: float, verify_cost: float = 0.02, once: bool = False) -> list[float]:
    """Estimated costs of a cycle for K = 0..16, relative to a plain step: `draft_cost` per draft step (`once`: per
    draft, whatever K is), `verify_cost` per additional verified row."""
    draft_steps = [min(k, 1) if once else k for k in range(MAX_DRAFT + 1)]
    return [1.0 + steps * draft_cost + k * verify_cost for k, steps in enumerate(draft_steps)]


def best_k(tokens_per_cycle: Mapping[int, float], costs: Sequence[float]) -> int:
    """The K with the most tokens per unit of time; 0 if plain decoding is fastest. costs: of a cycle, by K."""
    rates = {0: 1.0 / costs[0], **{k: tokens / costs[k] for k, tokens in tokens_per_cycle.items()}}
    return max(rates, key=lambda k: rates[k])
