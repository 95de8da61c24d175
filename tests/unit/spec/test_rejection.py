"""Edges of the rejection verifiers; their exactness is shown in tests/property/test_rejection_exact.py."""

import pytest
import torch

from outrider.spec.rejection import block_accept, proposal, randomness, ratios, residual, verify_block, verify_rejection
from outrider.types import Draft

V = 6
BOTH = pytest.mark.parametrize("verify", [verify_rejection, verify_block])


def point(*tokens: int) -> torch.Tensor:
    return torch.nn.functional.one_hot(torch.tensor(tokens), V).float()


def draft(tokens: list[list[int]], lengths: list[int], q: torch.Tensor | None = None) -> Draft:
    return Draft(torch.tensor(tokens, dtype=torch.int64).view(len(lengths), -1), torch.tensor(lengths), q)


@BOTH
def test_greedy_targets_accept_the_equal_prefix(verify):
    """Point masses on both sides: whatever the noise, the outcome is the coupled one."""
    p = torch.stack([point(1, 2, 3, 4)] * 5)
    drafts = draft([[1, 2, 3], [1, 9, 3], [5, 2, 3], [1, 2, 3], [1, 2, 3]], [3, 3, 3, 2, 0])
    for start in range(5):
        verdict = verify(p, drafts, *randomness(torch.arange(5), torch.full((5,), start), 3, V))
        assert verdict.accepted.tolist() == [3, 1, 0, 2, 0]
        assert [t[:n] for t, n in zip(verdict.tokens.tolist(), verdict.counts.tolist())] == [
            [1, 2, 3, 4],
            [1, 2],
            [1],
            [1, 2, 3],
            [1],
        ]


@BOTH
def test_without_a_draft_it_samples_the_target(verify):
    p = torch.softmax(torch.randn(3, 1, V), -1)
    verdict = verify(p, draft([], [0, 0, 0]), *randomness(torch.arange(3), torch.zeros(3, dtype=torch.int64), 0, V))
    assert verdict.accepted.tolist() == [0, 0, 0] and verdict.tokens.shape == (3, 1)


@BOTH
def test_a_sequence_does_not_depend_on_the_others(verify):
    torch.manual_seed(0)
    p, q = torch.softmax(torch.randn(6, 4, V), -1), torch.softmax(torch.randn(6, 3, V), -1)
    whole = draft(torch.randint(0, V, (6, 3)).tolist(), [3, 2, 1, 0, 3, 3], q)
    seed, start = torch.arange(6), torch.arange(6) + 7
    verdict = verify(p, whole, *randomness(seed, start, 3, V))
    for b in range(6):
        one = slice(b, b + 1)
        alone = verify(
            p[one], Draft(whole.tokens[one], whole.lengths[one], q[one]), *randomness(seed[one], start[one], 3, V)
        )
        n = int(alone.counts)
        assert n == int(verdict.counts[b]) and torch.equal(alone.tokens[0, :n], verdict.tokens[b, :n])


def test_ratios_are_finite_and_refuse_the_impossible():
    p, q = torch.tensor([[[0.0, 0.5, 0.5, 0.0]]]), torch.tensor([[[0.5, 0.0, 0.25, 0.0]]])
    at = [float(ratios(p, q, torch.tensor([[t]]))) for t in range(4)]
    assert at[0] == 0 and at[1] > 1e30 and at[2] == 2 and at[3] == 0
    assert all(torch.tensor(at).isfinite())


def test_residual_falls_back_to_p_when_nothing_is_left():
    p = torch.tensor([0.25, 0.75])
    assert torch.equal(residual(p, p), p)
    torch.testing.assert_close(residual(p, torch.tensor([0.5, 0.5])), torch.tensor([0.0, 1.0]))


def test_equal_laws_keep_the_whole_block():
    """p = q makes the block's chance 0/0: it must be read as 1."""
    p = torch.softmax(torch.randn(2, 4, V), -1)
    drafts = draft([[1, 2, 3], [4, 5, 0]], [3, 2], p[:, :3].clone())
    h, w = block_accept(p, proposal(drafts, p), drafts)
    assert h[0].tolist() == pytest.approx([1, 1, 1]) and h[1].tolist() == pytest.approx([1, 1, 0])
    assert (w[0] == 1).all()


def test_noise_of_another_block_is_another():
    seed = torch.tensor([5, 5, 6])
    u, noise = randomness(seed, torch.tensor([10, 11, 10]), 4, V)
    assert len(set(u.flatten().tolist())) == u.numel() and len(set(noise.flatten().tolist())) == noise.numel()
