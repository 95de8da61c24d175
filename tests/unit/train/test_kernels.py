"""The training kernels against their plain twins: on the GPU where there is one, else through Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from outrider.ops.attention import rotate as plain_rotate
from outrider.ops.cpu.packing import quantize_rows
from outrider.train.kernels import Rotate, head_terms, turn
from outrider.train.losses import row_terms
from outrider.train.net import four_bits, four_bits_all

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def test_head_terms_with_a_mix_a_row() -> None:
    """Catches: a mix read from the wrong row, the end of the vocabulary inside a block."""
    r = torch.Generator().manual_seed(0)
    z = torch.randn(6, 83, generator=r) * 2
    logp = (2 * torch.randn(4, 83, generator=r)).log_softmax(-1)
    rows = torch.randint(4, (6,), generator=r)
    weight = torch.rand(6, generator=r)
    mix = torch.rand(6, 3, generator=r)
    mix[0, 2:] = 0
    best = logp.argmax(-1)
    *want, grad = row_terms(z, logp[rows], best[rows], weight, mix)
    got = z.to(DEVICE)
    terms = torch.empty(6, 3, device=DEVICE)
    head_terms(got, *(x.to(DEVICE) for x in (logp, best, rows, weight, mix)), terms)
    torch.testing.assert_close(got.cpu(), grad, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(terms.cpu(), torch.stack(want, 1), rtol=1e-4, atol=1e-5)


def test_rotation_of_a_slice() -> None:
    """Catches: strides of a slice of qkv, heads that are no power of two."""
    r = torch.Generator().manual_seed(1)
    qkv = torch.randn(5, 7, 8, generator=r)
    angle = torch.randn(5, 4, generator=r)
    want = plain_rotate(qkv[:, 3:6], angle.cos(), angle.sin())
    got = turn(qkv[:, 3:6].to(DEVICE), angle.cos().to(DEVICE), angle.sin().to(DEVICE), 1.0)
    torch.testing.assert_close(got.cpu(), want)


def test_rotation_and_its_gradient() -> None:
    """Catches: the period of the angles, the direction of the way back, gradients in another layout."""
    r = torch.Generator().manual_seed(2)
    x = torch.randn(10, 3, 8, generator=r)
    up = torch.randn(3, 10, 8, generator=r)
    angle = torch.randn(5, 4, generator=r)
    ours = x.clone().to(DEVICE).requires_grad_()
    theirs = x.clone().requires_grad_()
    want = plain_rotate(theirs, angle.cos().repeat(2, 1), angle.sin().repeat(2, 1)).transpose(0, 1)
    got = Rotate.apply(ours, angle.cos().to(DEVICE), angle.sin().to(DEVICE)).transpose(0, 1)
    torch.testing.assert_close(got.cpu(), want)
    want.backward(up)
    got.backward(up.to(DEVICE))
    assert ours.grad is not None and theirs.grad is not None
    torch.testing.assert_close(ours.grad.cpu(), theirs.grad)


def test_four_bits_are_those_of_the_cpu() -> None:
    """Catches: another rounding than the packed weights', a gradient that stops at the rounding."""
    w = torch.randn(5, 96, generator=torch.Generator().manual_seed(3)).mul_(0.1)
    w[0, :32] = 0.25  # a block of one value
    want = quantize_rows(w, "int4").dense()
    leaf = w.clone().requires_grad_()
    got = four_bits(leaf)
    torch.testing.assert_close(got.detach(), want, rtol=0, atol=1e-6)
    got.sum().backward()
    assert leaf.grad is not None and torch.equal(leaf.grad, torch.ones_like(w))


def test_four_bits_of_all_matrices_at_once() -> None:
    """Catches: a matrix that gets its neighbour's blocks or gradient."""
    r = torch.Generator().manual_seed(4)
    shapes = [(3, 64), (1, 32), (5, 96)]
    ups = []
    ours, theirs = (
        [w.clone().requires_grad_() for w in [torch.randn(s, generator=r) for s in shapes]] for _ in range(2)
    )
    for a, b in zip(ours, theirs, strict=True):
        b.data.copy_(a.data)
        ups.append(torch.randn(a.shape, generator=r).bfloat16())
    got = four_bits_all(ours, torch.bfloat16)
    want = [four_bits(w).to(torch.bfloat16) for w in theirs]
    torch.autograd.backward(got, ups)
    torch.autograd.backward(want, ups)
    for a, b, x, y in zip(got, want, ours, theirs, strict=True):
        assert torch.equal(a, b) and x.grad is not None and y.grad is not None and torch.equal(x.grad, y.grad)
    assert four_bits_all([], torch.float32) == []
