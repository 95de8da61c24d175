"""choose.py against a slow, scalar statement of the same rules; rows independent of the batch; history kept by
commit."""

import math
import random

import numpy as np
import pytest
import torch

from outrider.ops.noise import gumbel
from outrider.ops.reference import ReferenceOps
from outrider.spec.choose import accept
from outrider.spec.slot_sampling import sampling_batch
from outrider.types import Draft, SamplingParams

OPS = ReferenceOps()
V = 23
EOS = 2


def slow(
    row: torch.Tensor, p: SamplingParams, prompt: list[int], output: list[int], allowed: set[int] | None = None
) -> list[float]:
    """The definition, one token at a time (float32 scalars, so that equal logits stay equal)."""
    f = np.float32
    z = list(row.numpy())
    text = prompt + output
    for t in range(len(z)):
        n = output.count(t)
        if t in text:
            z[t] = z[t] / f(p.repetition_penalty) if z[t] > 0 else z[t] * f(p.repetition_penalty)
        z[t] = z[t] - f(p.frequency_penalty) * f(n) - f(p.presence_penalty) * f(n > 0) + f(p.logit_bias.get(t, 0.0))
        if allowed is not None and t not in allowed:
            z[t] = -math.inf
    for w in p.bad_words:
        if len(w) == 1 or tuple(text[-(len(w) - 1) :]) == w[:-1]:
            z[w[-1]] = -math.inf
    if len(output) < p.min_tokens:
        for t in (*p.stop_token_ids, *(() if p.ignore_eos else (EOS,))):
            z[t] = -math.inf
    if p.temperature == 0:
        return z
    z = [v / f(p.temperature) for v in z]
    if p.top_k:
        floor = sorted(z, reverse=True)[: p.top_k][-1]
        z = [v if v >= floor else -math.inf for v in z]
    best = max(z)
    mass = [math.exp(v - best) for v in z]
    if p.top_p < 1:
        z = [v if sum(m for u, m in zip(z, mass, strict=True) if u > v) < p.top_p * sum(mass) else -math.inf for v in z]
    return [v if math.exp(v - best) >= p.min_p else -math.inf for v in z]


def random_params(rng: random.Random) -> SamplingParams:
    def some(value, off):
        return value if rng.random() < 0.5 else off

    return SamplingParams(
        temperature=rng.choice([0.0, 0.7, 1.3]),
        top_k=some(rng.randint(1, V), 0),
        top_p=some(rng.uniform(0.2, 0.99), 1.0),
        min_p=some(rng.uniform(0.0, 0.3), 0.0),
        repetition_penalty=some(1.3, 1.0),
        presence_penalty=some(0.7, 0.0),
        frequency_penalty=some(-0.4, 0.0),
        logit_bias=some({rng.randrange(V): 3.0, rng.randrange(V): -100.0, 0: 0.5}, {}),
        bad_words=some(tuple(tuple(rng.randrange(4) for _ in range(rng.randint(1, 3))) for _ in range(3)), ()),
        min_tokens=some(4, 0),
        stop_token_ids=some((5, 7), ()),
        ignore_eos=rng.random() < 0.3,
        seed=rng.randrange(-(2**63), 2**64),
    )


def ragged(rng: random.Random, count: int):
    """B sequences with 0..3 drafts each: params, prompts, outputs, drafts [B, 3], row_seq, row_offset."""
    params = [random_params(rng) for _ in range(count)]
    prompts = [[rng.randrange(4) for _ in range(rng.randint(1, 6))] for _ in range(count)]
    outputs = [[rng.randrange(6) for _ in range(rng.randint(0, 6))] for _ in range(count)]
    drafts = torch.tensor([[rng.randrange(4) for _ in range(3)] for _ in range(count)])
    rows = [(b, j) for b in range(count) for j in range(rng.randint(0, 3) + 1)]
    return params, prompts, outputs, drafts, torch.tensor([b for b, _ in rows]), torch.tensor([j for _, j in rows])


@pytest.mark.parametrize("seed", range(40))
def test_process_is_its_definition_and_sees_the_drafted_prefix(seed):
    rng = random.Random(seed)
    params, prompts, outputs, drafts, seq, off = ragged(rng, rng.randint(1, 4))
    logits = torch.randn(len(seq), V, generator=torch.Generator().manual_seed(seed)) * 2
    if seed % 3 == 0:
        logits = logits.round()  # ties
    before = logits.clone()
    batch = sampling_batch(params, prompts, outputs, V, "cpu", [EOS])
    z = batch.process(logits, seq, off, drafts)
    assert torch.equal(logits, before), "the caller's logits were changed"
    for r, (b, j) in enumerate(zip(seq.tolist(), off.tolist(), strict=True)):
        want = slow(logits[r], params[b], prompts[b], outputs[b] + drafts[b, :j].tolist())
        torch.testing.assert_close(z[r], torch.tensor(np.array(want, dtype=np.float32)), rtol=1e-5, atol=1e-5)


def test_a_row_never_depends_on_the_rest_of_the_batch():
    rng = random.Random(5)
    for trial in range(30):
        params, prompts, outputs, drafts, seq, off = ragged(rng, 5)
        vocab = 600 if trial % 2 else 61  # beyond and within the head that is sorted first
        logits = torch.randn(len(seq), vocab)
        position = 40 + off
        whole = sampling_batch(params, prompts, outputs, vocab, "cpu", [EOS])
        z = whole.process(logits, seq, off, drafts)
        tokens = whole.choose(z, seq, position, OPS)
        for r, b in enumerate(seq.tolist()):
            alone = sampling_batch(params[b : b + 1], prompts[b : b + 1], outputs[b : b + 1], vocab, "cpu", [EOS])
            zero = torch.zeros(1, dtype=torch.int64)
            one = alone.process(logits[r : r + 1], zero, off[r : r + 1], drafts[b : b + 1])
            assert torch.equal(one[0], z[r])
            assert int(alone.choose(one, zero, position[r : r + 1], OPS)) == int(tokens[r])


def test_verifying_a_block_equals_committing_token_by_token():
    rng = random.Random(11)
    for _ in range(30):
        params, prompts, outputs, drafts, _, _ = ragged(rng, 3)
        logits = torch.randn(3, 4, V)  # [B, K + 1, V] whatever was drafted
        block = sampling_batch(params, prompts, outputs, V, "cpu", [EOS])
        seq = torch.arange(3).repeat_interleave(4)
        off = torch.arange(4).repeat(3)
        z = block.process(logits.view(12, V), seq, off, drafts).view(3, 4, V)
        step = sampling_batch(params, prompts, outputs, V, "cpu", [EOS])
        slots = torch.arange(3)
        none = torch.zeros(3, 0, dtype=torch.int64)
        for j in range(4):
            assert torch.equal(step.process(logits[:, j], slots, torch.zeros(3, dtype=torch.int64), none), z[:, j])
            if j < 3:
                step.commit(drafts[:, j : j + 1], torch.ones(3, dtype=torch.int64))
        # and in one commit of different counts, which a rebuild must agree with
        counts = torch.tensor([0, 2, 3])
        block.commit(torch.cat((drafts, drafts[:, :1]), 1), counts)
        grown = [o + drafts[b, : int(counts[b])].tolist() for b, o in enumerate(outputs)]
        again = sampling_batch(params, prompts, grown, V, "cpu", [EOS])
        assert (block.out_len is again.out_len is None) or torch.equal(block.out_len, again.out_len)
        first = torch.zeros(3, dtype=torch.int64)
        assert torch.equal(
            block.process(logits[:, 0], slots, first, none), again.process(logits[:, 0], slots, first, none)
        )


def test_grammar_masks_and_wins_over_min_tokens():
    p = SamplingParams(temperature=1.0, min_tokens=3, top_p=0.9)
    batch = sampling_batch([p, p], [[1], [1]], [[], []], V, "cpu", [EOS])
    mask = torch.zeros(2, V, dtype=torch.bool)
    mask[0, [EOS, 9]] = True
    mask[1, EOS] = True  # the grammar is finished: nothing but the end may follow
    rows = torch.arange(2)
    z = batch.process(
        torch.randn(2, V), rows, torch.zeros(2, dtype=torch.int64), torch.zeros(2, 0, dtype=torch.int64), grammar=mask
    )
    assert z[0].isfinite().nonzero().tolist() == [[9]]
    assert z[1].isfinite().nonzero().tolist() == [[EOS]]


def test_plain_greedy_costs_nothing_and_takes_the_lowest_id_on_ties():
    batch = sampling_batch(
        [SamplingParams(), SamplingParams(temperature=1e-7, top_p=0.5)], [[1]] * 2, [[]] * 2, V, "cpu", [EOS]
    )
    assert not batch.any_sampled and batch.cut is None
    assert batch.penalties is batch.bias is batch.bad_words is batch.min_tokens is None
    logits = torch.zeros(2, V)
    logits[:, [7, 4, 19]] = 1.0
    rows = torch.arange(2)
    z = batch.process(logits, rows, rows, torch.zeros(2, 0, dtype=torch.int64))
    assert z is logits
    assert batch.choose(z, rows, rows, OPS).tolist() == [4, 4]


def test_guess_with_the_targets_logits_is_the_targets_choice():
    settings = [(0, 0, 1), (0.7, 5, 0.9), (1.3, 0, 0.8), (1, 0, 1)]
    params = [SamplingParams(temperature=t, top_k=k, top_p=p, seed=s) for s, (t, k, p) in enumerate(settings)]
    batch = sampling_batch(params, [[1]] * 4, [[]] * 4, V, "cpu", [EOS])
    rows = torch.arange(4)
    for t in range(50):
        logits = torch.randn(4, V)
        at = torch.full((4,), t)
        chosen = batch.choose(
            batch.process(logits, rows, torch.zeros_like(rows), torch.zeros(4, 0, dtype=torch.int64)), rows, at, OPS
        )
        assert torch.equal(batch.guess(logits, at, OPS), chosen)
        order = torch.stack(
            [torch.randperm(V) for _ in range(4)]
        )  # candidates in any order, as a clustered head gives them
        assert torch.equal(batch.guess(logits.gather(1, order), at, OPS, order), chosen)


def test_lean_is_the_heat_of_a_clusters_luckiest_token():
    """Nothing where cold; nothing where a filter would cut the lucky token off."""
    clusters = torch.randperm(20).view(5, 4)
    at = torch.tensor([3, 4, 5, 6, 7])
    settings = [(1.3, 0, 1, 0), (0, 0, 1, 0), (1, 5, 1, 0), (1, 0, 0.9, 0), (1, 0, 1, 0.1)]
    params = [
        SamplingParams(temperature=t, top_k=k, top_p=p, min_p=m, seed=s) for s, (t, k, p, m) in enumerate(settings)
    ]
    cluster_bonus = sampling_batch(params, [[1]] * 5, [[]] * 5, V, "cpu").cluster_bonus(clusters, at, OPS)
    noise = [max(float(gumbel(torch.tensor(0), at[0], token)) for token in cluster) for cluster in clusters]
    assert cluster_bonus is not None and not cluster_bonus[1:].any()
    torch.testing.assert_close(cluster_bonus[0], 1.3 * torch.tensor(noise))
    sampled, cold = (sampling_batch([p], [[1]], [[]], V, "cpu") for p in params[:2])
    assert torch.equal(sampled.cluster_bonus(clusters, at[:1], OPS), cluster_bonus[:1])
    assert sampled.cluster_bonus(None, at[:1], OPS) is None and cold.cluster_bonus(clusters, at[:1], OPS) is None


def test_logprobs_are_those_of_the_raw_logits():
    logits = torch.randn(3, V)
    tokens = torch.tensor([1, 5, 9])
    chosen, values, ids = OPS.logprob_rows(logits, tokens, 3).split((1, 3, 3), 1)
    chosen = chosen[:, 0]
    ids = ids.long()
    want = logits.log_softmax(-1)
    torch.testing.assert_close(chosen, want[torch.arange(3), tokens])
    torch.testing.assert_close(values, want.topk(3).values)
    assert torch.equal(ids, want.topk(3).indices)


def test_accept_counts_the_equal_prefix_within_the_draft_length():
    chosen = torch.tensor([[1, 2, 3, 4]] * 5)
    drafts = torch.tensor([[1, 2, 3], [1, 9, 3], [9, 2, 3], [1, 2, 3], [1, 2, 3]])
    verdict = accept(chosen, Draft(drafts, torch.tensor([3, 3, 3, 2, 0])))
    assert verdict.accepted.tolist() == [3, 1, 0, 2, 0]
    assert verdict.counts.tolist() == [4, 2, 1, 3, 1]


def test_noise_is_finite_for_a_large_vocabulary():
    """One infinite value would decide the token: at 262144 entries even a chance of 2^-24 is met every 64 tokens."""
    for position in range(40):
        assert gumbel(torch.tensor(1), torch.tensor(position), torch.arange(262144)).isfinite().all()


def test_noise_is_fine_enough_for_rare_tokens():
    """A token of probability p wins about when E = exp(-gumbel) < p. Noise of 24 bits has E on a grid of 2^-24, so that
    tokens rarer than that are drawn at a wrong rate: the small values must not lie on that grid, and be as many as they
    should."""
    e = torch.cat(
        [torch.exp(-gumbel(torch.tensor(s), torch.tensor(3), torch.arange(1 << 20)).double()) for s in range(16)]
    )
    small = e[e < 2.0**-17] * 2.0**24
    assert 80 < len(small) < 180  # 16 · 2^20 · 2^-17 = 128 are expected
    assert 0.2 < float((small % 1).std()) < 0.4  # uniform: 0.29
