"""Verifiers that keep the target's distribution with the highest acceptance (but not, as `choose` does, the same text).

*Rejection* (Leviathan et al. 2023; Chen et al. 2023): accept drafted token i with min(1, p/q); the first refusal draws
from the residual max(p - q, 0), a draft without refusal earns a bonus token from p.
*Block* (Sun et al. 2024, arXiv 2403.10444, algorithm 2): decides over the whole block, from the running weight
    w_0 = 1,  w_i = min(1, w_{i-1} · p(x_i)/q(x_i))      the probability with which prefix x_1..x_i is kept
    s_i = Σ_x max(w_i·p(x | x_1..x_i) - q(x | x_1..x_i), 0),  h_i = s_i / (s_i + 1 - w_i)
keeps the longest prefix with u_i < h_i, and draws the next token from max(w·p - q, 0). It never keeps less in
expectation.

q must be the law that the draft was drawn from: `Draft.q`, or a point mass at the drafted tokens when that is None (a
deterministic drafter). Taking softmax(draft logits) for greedily drafted tokens would bias the output.

The acceptance probabilities and residuals are pure functions, which the tests integrate exactly; randomness is an
argument. Shapes: p [B, K+1, V], q [B, K, V], tokens [B, K], lengths [B]; sequences may draft fewer than K.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops.noise import gumbel, uniform
from ..types import Draft, Verdict
from .choose import VERIFY_SALT, stream


def proposal(draft: Draft, like: Tensor) -> Tensor:
    """q [B, K+1, V] in the dtype of `like` (p): a point mass where the draft has none, zero from the draft's end on, so
    that the residual there is p itself."""
    q = torch.zeros_like(like)
    width = draft.tokens.shape[1]
    if draft.q is not None:
        q[:, :width] = draft.q
    else:
        q[:, :width].scatter_(2, draft.tokens.clamp(0, like.shape[2] - 1)[:, :, None], 1.0)
    return q * (torch.arange(width + 1, device=like.device) < draft.lengths[:, None])[:, :, None]


def ratios(p: Tensor, q: Tensor, tokens: Tensor) -> Tensor:
    """p/q [B, K] of the drafted tokens, finite. p = 0 gives 0, so that an impossible token is never emitted; q = 0 < p
    (a q that has underflowed) counts as very large."""
    at = tokens.clamp(0, p.shape[2] - 1)[:, :, None]
    own_p, own_q = (t[:, : tokens.shape[1]].gather(2, at)[:, :, 0] for t in (p, q))
    huge = torch.finfo(p.dtype).max
    return torch.where(own_q > 0, own_p / own_q, (own_p > 0) * torch.full_like(own_p, huge)).clamp(max=huge)


def residual(p: Tensor, q: Tensor, weight: Tensor | float = 1.0) -> Tensor:
    """max(weight·p - q, 0), normalised over the last axis; p where nothing is left (then refusing had probability
    0)."""
    left = (weight * p - q).clamp(min=0)
    total = left.sum(-1, keepdim=True)
    return torch.where(total > 0, left / total.clamp(min=torch.finfo(p.dtype).tiny), p)


def token_accept(p: Tensor, q: Tensor, draft: Draft) -> Tensor:
    """Probability [B, K] of accepting each drafted token, given that those before it were."""
    real = torch.arange(draft.tokens.shape[1], device=p.device) < draft.lengths[:, None]
    return ratios(p, q, draft.tokens).clamp(max=1.0) * real


def block_accept(p: Tensor, q: Tensor, draft: Draft) -> tuple[Tensor, Tensor]:
    """h [B, K]: entry i-1 is the chance to keep the prefix of length i if no longer one is kept; and w [B, K+1]."""
    width = draft.tokens.shape[1]
    ratio = ratios(p, q, draft.tokens)
    weights = [torch.ones_like(p[:, 0, 0])]
    for i in range(width):
        weights.append((weights[-1] * ratio[:, i]).clamp(max=1.0))
    w = torch.stack(weights, 1)  # [B, K + 1]
    surplus = (w[:, :, None] * p - q).clamp(min=0).sum(-1)  # at the draft's end q is 0: h is w itself there
    down = surplus + (1.0 - w)
    h = torch.where(down > 0, surplus / down.clamp(min=torch.finfo(p.dtype).tiny), 1.0)[:, 1:]
    return h * (torch.arange(1, width + 1, device=p.device) <= draft.lengths[:, None]), w


def verify_rejection(p: Tensor, draft: Draft, u: Tensor, noise: Tensor) -> Verdict:
    """u [B, K] uniform in (0, 1); noise [B, V] Gumbel, for the token after the accepted ones."""
    q = proposal(draft, p)
    accepted = (u < token_accept(p, q, draft)).to(torch.int64).cumprod(1).sum(1)
    return _emit(p, q, torch.ones_like(p[:, 0, 0]), draft, accepted, noise)


def verify_block(p: Tensor, draft: Draft, u: Tensor, noise: Tensor) -> Verdict:
    """The same contract as `verify_rejection`."""
    q = proposal(draft, p)
    h, w = block_accept(p, q, draft)
    kept = (u < h) * torch.arange(1, h.shape[1] + 1, device=p.device)
    accepted = torch.cat((torch.zeros_like(draft.lengths)[:, None], kept), 1).amax(1)
    return _emit(p, q, w.gather(1, accepted[:, None])[:, 0], draft, accepted, noise)


def randomness(seed: Tensor, start: Tensor, width: int, vocab: int) -> tuple[Tensor, Tensor]:
    """u [B, width] and Gumbel noise [B, vocab] for the block that starts at position `start` [B]. No state; used up by
    one block only (see `choose.stream`), and independent of what the draft was drawn with."""
    key = stream(seed, start, VERIFY_SALT)[:, None]
    zero = torch.zeros_like(key)
    u = uniform(key, zero + 1, torch.arange(width, device=seed.device))
    return u, gumbel(key, zero, torch.arange(vocab, device=seed.device))


def _emit(p: Tensor, q: Tensor, weight: Tensor, draft: Draft, accepted: Tensor, noise: Tensor) -> Verdict:
    at = accepted[:, None, None].expand(-1, 1, p.shape[2])
    law = residual(p.gather(1, at)[:, 0], q.gather(1, at)[:, 0], weight[:, None])  # [B, V]
    token = (law.log() + noise).argmax(-1, keepdim=True)  # log 0 = -inf is never chosen
    tokens = torch.cat((draft.tokens, torch.zeros_like(token)), 1).scatter(1, accepted[:, None], token)
    return Verdict(accepted, tokens, accepted + 1)
