"""The target's choice is an exact draw from its distribution, by chi-square."""

import pytest
import torch

from outrider.ops.reference import ReferenceOps
from outrider.spec.slot_sampling import sampling_batch
from outrider.types import SamplingParams

OPS = ReferenceOps()


def renorm(x: torch.Tensor) -> torch.Tensor:
    return x / x.sum(-1, keepdim=True)


def chi_square(seen: torch.Tensor, law: torch.Tensor) -> float:
    """p-value; cells that expect fewer than 5 are pooled."""
    expect = law.double() * seen.sum()
    small = expect < 5
    o = torch.cat((seen[~small].double(), seen[small].sum()[None].double()))
    e = torch.cat((expect[~small], expect[small].sum()[None]))
    o = o[e > 0]
    e = e[e > 0]
    assert seen[law == 0].sum() == 0, "an impossible outcome was seen"
    return float(torch.special.gammaincc(torch.tensor((len(o) - 1) / 2.0), ((o - e) ** 2 / e).sum() / 2))


@pytest.mark.parametrize("case", ["plain", "filters", "penalties"])
def test_the_choice_draws_from_the_exact_law(case):
    """100k draws of one token: top-p, top-k, min-p, penalties, bias and temperature against the law computed apart."""
    vocab = 24
    n = 100_000
    logits = torch.randn(1, vocab, generator=torch.Generator().manual_seed(3), dtype=torch.float32) * 1.5
    prompt = [1, 2, 2, 5]
    output = [2, 7, 7]
    drafted = [7, 9]
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
