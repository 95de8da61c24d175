"""Losslessness of the rejection and block verifiers, by enumeration: every draft, every number of accepted tokens and
every next token is weighted with its exact probability; no sampling, so a bias of 1e-9 would show. Then the same code
with real randomness, against chi-square, through several cycles."""

import pytest
import torch

from outrider.ops.reference import ReferenceOps
from outrider.spec.rejection import (
    block_accept,
    proposal,
    randomness,
    residual,
    token_accept,
    verify_block,
    verify_rejection,
)
from outrider.spec.slot_sampling import sampling_batch
from outrider.types import Draft, SamplingParams

V, OPS = 4, ReferenceOps()
KINDS = ["good", "equal", "bad", "adversarial", "outside", "disjoint", "underflow", "greedy", "wrong"]


def tables(kind: str, k: int, seed: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Next-token laws after every prefix: target P[i] [V^i, V] for i <= k, drafter Q[i] for i < k; float64."""
    gen = torch.Generator().manual_seed(seed)

    def soft(i: int, sharp: float) -> torch.Tensor:
        return torch.softmax(torch.randn(V**i, V, generator=gen, dtype=torch.float64) * sharp, -1)

    P, Q = [soft(i, 1.5) for i in range(k + 1)], []
    for i in range(k):
        p = P[i]
        if kind == "good":
            q = 0.9 * p + 0.1 * soft(i, 1.0)
        elif kind == "equal":
            q = p.clone()
        elif kind == "bad":
            q = soft(i, 2.0)
        elif kind == "adversarial":  # nearly all mass where the target has least
            q = torch.full_like(p, 1e-6).scatter(1, p.argmin(-1, keepdim=True), 1 - 3e-6)
        elif kind == "outside":  # tokens that the target cannot say, and tokens that the drafter cannot
            p = P[i] = renorm(p * torch.tensor([1.0, 0.0, 1.0, 1.0]).double())
            q = renorm(soft(i, 1.0) * torch.tensor([1.0, 1.0, 0.0, 1.0]).double())
        elif kind == "disjoint":
            p = P[i] = renorm(p * torch.tensor([1.0, 0.0, 1.0, 0.0]).double())
            q = renorm(soft(i, 1.0) * torch.tensor([0.0, 1.0, 0.0, 1.0]).double())
        elif kind == "underflow":
            q = renorm(soft(i, 1.0) * torch.tensor([1.0, 1e-300, 1.0, 1.0]).double())
        elif kind == "greedy":  # a point mass, handed over as q = None
            q = torch.zeros_like(p).scatter(1, soft(i, 2.0).argmax(-1, keepdim=True), 1.0)
        else:  # wrong: a point mass on a token of probability 0
            p = P[i] = renorm(p * torch.tensor([1.0, 1.0, 1.0, 0.0]).double())
            q = torch.zeros_like(p)
            q[:, 3] = 1.0
        Q.append(q)
    return P, Q


def renorm(x: torch.Tensor) -> torch.Tensor:
    return x / x.sum(-1, keepdim=True)


def every_draft(P, Q, k: int, length: int, point: bool) -> tuple[torch.Tensor, Draft, torch.Tensor]:
    """All V^k drafts as one batch: p [V^k, k+1, V], the Draft, and the probability of each."""
    path = torch.arange(V**k)
    tokens = torch.stack([path // V ** (k - 1 - i) % V for i in range(k)], 1) if k else path[:, None][:, :0]
    p = torch.stack([P[i][path // V ** (k - i)] for i in range(k + 1)], 1)
    q = torch.stack([Q[i][path // V ** (k - i)] for i in range(k)], 1) if k else p[:, :0]
    chance = q.gather(2, tokens[:, :, None])[:, :, 0].prod(1)
    return p, Draft(tokens, torch.full((V**k,), length), None if point else q), chance


def law(kind: str, method: str, k: int, length: int, seed: int):
    """Exact law of the next k+1 tokens (accepted drafts, the verifier's own, then the target's), the target's law, and
    the probability that a given prefix [depth][prefix] is drafted and kept."""
    P, Q = tables(kind, k, seed)
    p, draft, chance = every_draft(P, Q, k, length, kind in ("greedy", "wrong"))
    q = proposal(draft, p)
    if method == "token":
        a = token_accept(p, q, draft)
        w = torch.ones(V**k, k + 1, dtype=torch.float64)
        stay = torch.cat((torch.ones(V**k, 1), a.cumprod(1)), 1)  # P(at least i accepted)
        exactly = stay - torch.cat((stay[:, 1:], torch.zeros(V**k, 1)), 1)
    else:
        h, w = block_accept(p, q, draft)
        h = torch.cat((torch.ones(V**k, 1), h), 1)
        longer = torch.cat(((1 - h[:, 1:]).flip(1).cumprod(1).flip(1), torch.ones(V**k, 1)), 1)  # no longer prefix kept
        exactly = h * longer
    path = torch.arange(V**k)
    got = torch.zeros(1, dtype=torch.float64)
    want = torch.ones(1, dtype=torch.float64)
    kept = []
    for i in range(k + 1):
        here = (chance * exactly[:, i])[:, None] * residual(
            p[:, i], q[:, i], w[:, i, None]
        )  # [V^k, V] cut after i tokens
        at = (path // V ** (k - i))[:, None] * V + torch.arange(V)
        got = (got[:, None] * P[i]).reshape(-1).scatter_add(0, at.reshape(-1), here.reshape(-1))
        want = (want[:, None] * P[i]).reshape(-1)
        kept.append(
            torch.zeros(V**i, dtype=torch.float64).scatter_add(0, path // V ** (k - i), chance * exactly[:, i:].sum(1))
        )
    return got, want, kept


@pytest.fixture
def double():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("k", [0, 1, 2, 3])
@pytest.mark.parametrize("method", ["token", "block"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_emitted_law_is_the_targets(kind, method, k, double):
    for seed in range(4):
        for length in range(k + 1):
            got, want, _ = law(kind, method, k, length, seed)
            assert float((got - want).abs().sum() / 2) < 1e-9
            assert abs(float(got.sum()) - 1) < 1e-9


@pytest.mark.parametrize("kind", KINDS)
def test_block_keeps_every_prefix_at_least_as_often(kind, double):
    better = 0.0
    for seed in range(6):
        for k in (1, 2, 3):
            token, block = law(kind, "token", k, k, seed)[2], law(kind, "block", k, k, seed)[2]
            assert all(bool((b >= t - 1e-12).all()) for b, t in zip(block, token, strict=True))
            better += sum(float(b.sum() - t.sum()) for b, t in zip(block[1:], token[1:], strict=True))
    if kind in ("good", "bad"):
        assert better > 0.01, "block verification should gain something here"
    if kind in ("greedy", "wrong", "equal", "disjoint"):
        assert abs(better) < 1e-9, "a point mass leaves nothing to gain"


def test_softmax_q_for_a_greedy_draft_would_be_biased(double):
    """The mistake to avoid, seen by the same enumeration: drafting the argmax but verifying with the soft q."""
    P, Q = tables("good", 1, 0)
    x = int(Q[0].argmax())
    draft = Draft(torch.tensor([[x]]), torch.tensor([1]), Q[0][None])
    p = torch.stack([P[0], P[1][x][None]], 1)
    a = token_accept(p, proposal(draft, p), draft)[0, 0]
    got = a * torch.eye(V)[x] + (1 - a) * residual(P[0][0], Q[0][0])
    assert float((got - P[0][0]).abs().sum() / 2) > 0.1


def chi_square(seen: torch.Tensor, law: torch.Tensor) -> float:
    """p-value; cells that expect fewer than 5 are pooled."""
    expect = law.double() * seen.sum()
    small = expect < 5
    o = torch.cat((seen[~small].double(), seen[small].sum()[None].double()))
    e = torch.cat((expect[~small], expect[small].sum()[None]))
    o, e = o[e > 0], e[e > 0]
    assert seen[law == 0].sum() == 0, "an impossible outcome was seen"
    return float(torch.special.gammaincc(torch.tensor((len(o) - 1) / 2.0), ((o - e) ** 2 / e).sum() / 2))


@pytest.mark.parametrize("verify", [verify_rejection, verify_block])
@pytest.mark.parametrize("kind", ["good", "bad", "outside", "greedy"])
def test_the_vectorised_verifiers_draw_from_the_targets_law(kind, verify):
    """200k sequences through several cycles with the counter-based noise, K = 2 or fewer: a Markov chain of 4 tokens.
    Positions that were refused are drafted again: noise that was used twice would show."""
    n, steps = 200_000, 4
    P, Q = (torch.cat([t[1], t[1][:1]]) for t in tables(kind, 2, 3))  # [V + 1, V] by the last token; row V: the start
    seed, last = torch.arange(n), torch.full((n,), V)
    out, filled = torch.zeros(n, steps + 3, dtype=torch.int64), torch.zeros(n, dtype=torch.int64)
    batch = sampling_batch([SamplingParams(temperature=1.0)], [[0]], [[]], V, "cpu")
    batch.seed, batch.temperature, batch.sampled = seed, torch.ones(n), torch.ones(n, dtype=torch.bool)
    for _ in range(steps):
        at, prev, tokens, q, p = filled, last, [], [], [P[last]]
        for j in range(2):
            token, law_q = batch.draw(Q[prev].log(), at + j, at, OPS, V)
            tokens.append(token)
            q.append(law_q)
            p.append(P[token])
            prev = token
        draft = Draft(
            torch.stack(tokens, 1),
            torch.where(seed % 8 == 0, seed % 3, 2),
            None if kind == "greedy" else torch.stack(q, 1),
        )
        verdict = verify(torch.stack(p, 1), draft, *randomness(seed, at, 2, V))
        assert torch.equal(verdict.counts, verdict.accepted + 1) and bool((verdict.accepted <= draft.lengths).all())
        for j in range(3):  # write what was emitted, as far as it is needed
            place = torch.where((j < verdict.counts) & (at + j < steps), at + j, steps)
            out.scatter_(1, place[:, None], verdict.tokens[:, j : j + 1])
        last = verdict.tokens.gather(1, verdict.accepted[:, None])[:, 0]
        filled = at + verdict.counts
        last = torch.where(filled >= steps, 0, last)
        filled = filled.clamp(max=steps)
    cell = ((out[:, 0] * V + out[:, 1]) * V + out[:, 2]) * V + out[:, 3]
    want = P[V][:, None, None, None] * P[:V, :, None, None] * P[None, :V, :, None] * P[None, None, :V, :]
    assert chi_square(torch.bincount(cell, minlength=V**4), want.reshape(-1)) > 1e-4


@pytest.mark.parametrize("case", ["plain", "filters", "penalties"])
def test_coupled_choice_draws_from_the_exact_law(case):
    """100k draws of one token: top-p, top-k, min-p, penalties, bias and temperature against the law computed apart."""
    vocab, n = 24, 100_000
    logits = torch.randn(1, vocab, generator=torch.Generator().manual_seed(3), dtype=torch.float32) * 1.5
    prompt, output, drafted = [1, 2, 2, 5], [2, 7, 7], [7, 9]
    params = {
        "plain": SamplingParams(temperature=1.3, seed=99),
        "filters": SamplingParams(temperature=0.9, top_k=14, top_p=0.85, min_p=0.02, seed=1 << 40),
        "penalties": SamplingParams(
            temperature=0.7,
            top_p=0.97,
            repetition_penalty=1.4,
            presence_penalty=0.5,
            frequency_penalty=0.3,
            logit_bias={4: 1.0, 7: 2.0},
            seed=5,
        ),
    }[case]
    z = logits[0].double().clone()
    for t in range(vocab):
        times = (output + drafted).count(t)
        if t in prompt + output + drafted:
            z[t] = z[t] / params.repetition_penalty if z[t] > 0 else z[t] * params.repetition_penalty
        z[t] += params.logit_bias.get(t, 0.0) - params.frequency_penalty * times - params.presence_penalty * (times > 0)
    want = torch.softmax(z / params.temperature, -1)
    if params.top_k:
        want = renorm(torch.where(want >= want.topk(params.top_k).values[-1], want, 0.0))
    order = want.argsort(descending=True)
    ahead = want[order].cumsum(0) - want[order]
    want = want.scatter(0, order, torch.where(ahead < params.top_p, want[order], 0.0))
    want = renorm(torch.where(want >= params.min_p * want.max(), want, 0.0))

    batch = sampling_batch([params], [prompt], [output], vocab, "cpu")
    seen = torch.zeros(vocab, dtype=torch.int64)
    zero = torch.zeros(1, dtype=torch.int64)
    one = batch.process(logits, zero, zero + 2, torch.tensor([drafted]))
    for chunk in torch.arange(n).split(20_000):
        row = torch.zeros_like(chunk)
        seen += torch.bincount(batch.choose(one.expand(len(chunk), -1), row, chunk, OPS), minlength=vocab)
    assert chi_square(seen, want) > 1e-3
