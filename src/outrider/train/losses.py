"""The loss of a draft step, fused with the head.

p is the target's distribution at the position, q the drafter's. Per row, weighted:

    soft · CE(p, q)  +  tv · ½Σ|p − q|  +  hard · −log q(argmax p)

Σmin(p, q) = 1 − TV is the probability that rejection sampling accepts the drafted token; `hard` is the greedy
objective. Rows may have different weights: greedy and sampled answers need different losses. The head is the expensive
part (one vocabulary per row and step), so the logits are computed in chunks, turned into their own gradient in place,
and multiplied back at once: nothing of size [rows, V] outlives its chunk. A head tied to the target gets no gradient.

On a CPU even that is too expensive for a large vocabulary. There a batch's loss uses some thousands of tokens
(`Scored`): those that are likely under the target somewhere in the batch, those of the answers, and random ones that
represent all others.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..models.decoder import TextModel
from ..ops.reference import as_tensor
from ..types import OutriderError, require

# bytes of logits made at once; plain torch makes about eight more tensors of that size
CHUNK_BYTES = 1 << 30
CPU_CHUNK_BYTES = 1 << 25
LIKELY = 8  # likeliest tokens of each target distribution, which the loss always includes
RANDOM_SHARE = 0.25  # share of the scored tokens that is drawn from the other tokens
CPU_LOSS_ROWS = 64  # rows of logits at once: plain torch passes over them some twenty times, so they must fit the cache


def chunk_rows(device: torch.device, row_bytes: int) -> int:
    return max(1, (CHUNK_BYTES if device.type == "cuda" else CPU_CHUNK_BYTES) // row_bytes)


@dataclass(frozen=True)
class LossMix:
    soft: float = 1.0
    tv: float = 0.5
    hard: float = 0.0

    @staticmethod
    def parse(text: str) -> LossMix:
        """Parses `soft=1,tv=0.5`; missing terms are 0."""
        values = dict.fromkeys((f.name for f in fields(LossMix)), 0.0)
        for part in text.split(","):
            name, _, number = part.strip().partition("=")
            try:
                if name not in values:
                    raise ValueError
                values[name] = float(number)
            except ValueError:
                raise OutriderError(f"loss: {part!r} is not TERM=NUMBER with a term of {', '.join(values)}") from None
        require(any(values.values()), "loss: every term is 0, so there is nothing to learn")
        return LossMix(**values)

    def rows(self, count: int, device: torch.device) -> Tensor:
        """Repeats the mix for every row: float32 [count, 3]."""
        return torch.tensor([list(asdict(self).values())], dtype=torch.float32, device=device).expand(count, -1)


@dataclass(frozen=True)
class Scored:
    """The tokens that a batch's loss uses, in order; None: the whole vocabulary."""

    ids: Tensor | None = None  # int64 [S], ascending
    bias: Tensor | None = None  # float32 [S]: log of how many tokens each represents

    def rows(self, head: Tensor) -> Tensor:
        """These tokens' rows of a head [V, h]."""
        return head if self.ids is None else head.index_select(0, self.ids)

    @staticmethod
    def choose(likely: Tensor, said: Tensor, count: int, vocab: int, seed: tuple[int, ...]) -> Scored:
        """Chooses tokens. likely [N, LIKELY]: of each target distribution, best first; said [M]: tokens of the batch.
        Required tokens are included even if they exceed `count`; then come the most frequent likely ones, then random
        ones."""
        must = torch.cat((likely[:, 0], said)).unique()
        candidates, often = likely.unique(return_counts=True)
        room = max(0, int(count * (1 - RANDOM_SHARE)) - must.numel())
        wanted = candidates[often.argsort(descending=True, stable=True)][:room]
        sure = torch.cat((must, wanted)).unique()
        drawn = np.random.default_rng(seed).choice(vocab, size=max(1, count - sure.numel()), replace=False)
        others = torch.from_numpy(drawn).to(sure.device)
        others = others[~torch.isin(others, sure)]
        ids, order = torch.cat((sure, others)).sort()
        stands = math.log((vocab - sure.numel()) / max(1, others.numel()))
        bias = torch.cat((torch.zeros(sure.numel()), torch.full((others.numel(),), max(0.0, stands)))).to(sure.device)
        return Scored(ids, bias[order])


def drawn(weight: Tensor, count: int, luck: float) -> tuple[Tensor, Tensor]:
    """Draws `count` of the rows with weight [A], in proportion to their weights; also returns how many rows each
    represents [count]. Averaged over luck in [0, 1), a sum over them is the sum over all rows. Uses evenly spaced marks
    on the line of summed weights; nothing waits for the device."""
    ends = weight.double().cumsum(0)
    marks = (torch.arange(count, device=weight.device, dtype=torch.float64) + luck) * (ends[-1] / count)
    some = torch.searchsorted(ends, marks, right=True).clamp_(max=weight.shape[0] - 1)
    return some, (ends[-1] / count / weight[some]).float()


@dataclass(frozen=True)
class Teacher:
    """The target's next-token distribution at N positions, over the scored tokens (S of them)."""

    logp: Tensor  # [N, S] log-probabilities: near 0 for the tokens that matter, where bfloat16 is finest
    best: Tensor  # int64 [N] which of the scored tokens is likeliest

    @staticmethod
    @torch.no_grad()
    def of(model: TextModel, hidden: Tensor, dtype: torch.dtype, scored: Scored = Scored()) -> Teacher:
        """hidden [N, H] after the final norm."""
        rows = None if scored.ids is None else scored.rows(as_tensor(model.head)).float()
        size = model.config.vocab_size if rows is None else len(rows)
        logp = torch.empty((len(hidden), size), dtype=dtype, device=hidden.device)
        best = torch.empty(len(hidden), dtype=torch.int64, device=hidden.device)
        step = chunk_rows(hidden.device, 4 * size)
        for part, p, top in zip(hidden.split(step), logp.split(step), best.split(step), strict=True):
            z = exact_logits(model, part) if rows is None else capped(part.float() @ rows.T, model.config.softcap)
            top.copy_(z.argmax(-1))
            p.copy_((z if scored.bias is None else z + scored.bias).log_softmax(-1))
        return Teacher(logp, best)


@torch.no_grad()
def likely_tokens(model: TextModel, hidden: Tensor) -> Tensor:
    """hidden [N, H] -> the target's LIKELY likeliest tokens [N, LIKELY], best first."""
    step = chunk_rows(hidden.device, 4 * model.config.vocab_size)
    return torch.cat([exact_logits(model, part).topk(LIKELY, dim=-1).indices for part in hidden.split(step)])


def capped(z: Tensor, cap: float | None) -> Tensor:
    return z if cap is None else torch.tanh(z / cap) * cap


def exact_logits(model: TextModel, hidden: Tensor) -> Tensor:
    """Float32 logits; on a GPU directly from the accumulators of the bf16 product, so that no near tie is rounded to a
    tie."""
    if hidden.is_cuda and hidden.dtype == torch.bfloat16 and isinstance(model.head, Tensor):
        return capped(torch.mm(hidden, model.head.T, out_dtype=torch.float32), model.config.softcap)
    return model.logits(hidden)


def row_terms(z: Tensor, logp: Tensor, best: Tensor, weight: Tensor, mix: Tensor) -> tuple[Tensor, ...]:
    """The definition. z, logp [A, V]; best, weight [A]; mix [A, 3] the factors of soft, tv, hard
    -> weighted loss [A], alpha [A], hit [A] and the gradient by z [A, V]."""
    soft, tv, hard = mix.unbind(1)
    z = z.float()
    logp = logp.float()
    logq = z.log_softmax(-1)
    p = logp.exp()
    q = logq.exp()
    alpha = torch.minimum(p, q).sum(-1)
    distance = 0.5 * (p - q).abs().sum(-1)
    sign = torch.where(q > p, 1.0, -1.0)
    pull = 0.5 * q * (sign - (sign * q).sum(-1, keepdim=True))  # d distance / d z
    at = best[:, None]
    loss = soft * -(p * logq).sum(-1) + tv * distance + hard * -logq.gather(1, at)[:, 0]
    grad = soft[:, None] * (q - p) + tv[:, None] * pull
    grad = grad + hard[:, None] * q.scatter_add(1, at, torch.full_like(at, -1, dtype=q.dtype))
    hit = z.gather(1, at)[:, 0] >= z.max(-1).values
    return weight * loss, alpha, hit.float(), weight[:, None] * grad


class HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        g: Tensor,
        head: Tensor,
        teacher: Teacher,
        rows: Tensor,
        weight: Tensor,
        mix: Tensor,
        bias: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        count = g.shape[0]
        vocab = head.shape[0]
        terms = torch.empty((count, 3), dtype=torch.float32, device=g.device)
        back = torch.empty_like(g)
        head_grad = torch.zeros(head.shape, dtype=torch.float32, device=g.device) if ctx.needs_input_grad[1] else None
        step = chunk_rows(g.device, g.element_size() * vocab)
        step = step if g.is_cuda else min(step, CPU_LOSS_ROWS)
        for part, at, w, mixed, to, out in zip(*(t.split(step) for t in (g, rows, weight, mix, terms, back))):
            z = part @ head.T  # [chunk, V], becomes its own gradient
            if bias is not None:
                z = z + bias.to(z.dtype)
            if z.is_cuda:
                from .kernels import head_terms

                head_terms(z, teacher.logp, best=teacher.best, rows=at, weight=w, mix=mixed, out=to)
            else:
                *three, grad = row_terms(z, teacher.logp[at], best=teacher.best[at], weight=w, mix=mixed)
                to.copy_(torch.stack(three, 1))
                z = grad.to(z.dtype)
            torch.mm(z, head, out=out)
            if head_grad is not None:
                head_grad += z.T @ part
        ctx.save_for_backward(back, head_grad)
        ctx.head_dtype = head.dtype
        ctx.mark_non_differentiable(terms)
        return terms[:, 0].sum(), terms

    @staticmethod
    def backward(ctx: Any, up: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        back, head_grad = ctx.saved_tensors
        head = None if head_grad is None else (head_grad * up).to(ctx.head_dtype)
        return back * up.to(back.dtype), head, None, None, None, None, None


def head_loss(
    g: Tensor, head: Tensor, teacher: Teacher, rows: Tensor, weight: Tensor, mix: Tensor, bias: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """g [A, h] · head [S, h] (+ bias [S]) against row rows[a] of the teacher -> (sum of weighted losses, alpha [A],
    hit [A]). mix float32 [A, 3]: soft, tv, hard."""
    loss, terms = HeadLoss.apply(g, head, teacher, rows, weight, mix, bias)
    return loss, terms[:, 1], terms[:, 2]
