"""The fused loss against autograd, term by term; the kernel's definition is `row_terms`."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from outrider.train import losses
from outrider.train.losses import LossMix, Scored, Teacher, drawn, head_loss
from outrider.types import OutriderError

MIXES = [LossMix(1, 0, 0), LossMix(0, 1, 0), LossMix(0, 0, 1), LossMix(1, 0.5, 0.3)]


def reference(
    g: torch.Tensor, head: torch.Tensor, teacher: Teacher, rows: torch.Tensor, weight: torch.Tensor, mix: LossMix
):
    logq = (g @ head.T).log_softmax(-1)
    p = teacher.logp[rows].exp()
    q = logq.exp()
    best = teacher.best[rows]
    accept = torch.minimum(p, q).sum(-1)
    loss = mix.soft * -(p * logq).sum(-1) + mix.tv * 0.5 * (p - q).abs().sum(-1)
    loss = loss + mix.hard * -logq.gather(1, best[:, None])[:, 0]
    return (weight * loss).sum(), accept, (logq.argmax(-1) == best).to(g.dtype)


@pytest.mark.parametrize("mix", MIXES, ids=str)
def test_fused_loss_is_autograds(mix: LossMix, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "CPU_CHUNK_BYTES", 8 * 37 * 3)  # several chunks, the last one short
    r = torch.Generator().manual_seed(0)
    g = torch.randn(10, 6, generator=r).requires_grad_()
    head = torch.randn(37, 6, generator=r).requires_grad_()
    logp = (2 * torch.randn(5, 37, generator=r)).log_softmax(-1)
    teacher = Teacher(logp, logp.argmax(-1))
    rows = torch.randint(5, (10,), generator=r)
    weight = torch.rand(10, generator=r)
    want = reference(g, head, teacher, rows, weight, mix)
    want_grads = torch.autograd.grad(3 * want[0], (g, head))
    got = head_loss(g, head, teacher, rows, weight, mix.rows(10, g.device))
    grads = torch.autograd.grad(3 * got[0], (g, head))
    for ours, theirs in zip((*got, *grads), (*want, *want_grads), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_a_frozen_head_gets_no_gradient() -> None:
    logp = torch.zeros(1, 5).log_softmax(-1)
    g = torch.randn(1, 3, requires_grad=True)
    head = torch.randn(5, 3)
    head_loss(
        g,
        head,
        Teacher(logp, logp.argmax(-1)),
        torch.zeros(1, dtype=torch.int64),
        torch.ones(1),
        LossMix().rows(1, g.device),
    )[0].backward()
    assert g.grad is not None and head.grad is None


def test_teacher_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "CPU_CHUNK_BYTES", 4 * 11 * 2)
    head = torch.randn(11, 4)
    model = SimpleNamespace(config=SimpleNamespace(vocab_size=11), head=head, logits=lambda h: h @ head.T)
    hidden = torch.randn(5, 4)
    teacher = Teacher.of(model, hidden, torch.float32)
    torch.testing.assert_close(teacher.logp, (hidden @ head.T).log_softmax(-1))
    assert torch.equal(teacher.best, (hidden @ head.T).argmax(-1))


def test_a_mix_reads_and_writes_itself() -> None:
    for mix in MIXES:
        assert LossMix.parse(f"soft={mix.soft}, tv={mix.tv},hard={mix.hard}") == mix
    for bad in ("soft", "soft=x", "sort=1", "soft=0"):
        with pytest.raises(OutriderError, match=r"^loss: "):
            LossMix.parse(bad)


def test_some_scored_tokens_stand_for_all() -> None:
    """Everything that must be scored is, rising and once; the random ones weigh as many as they stand for, so that the
    loss over a part of the vocabulary is about the loss over all of it."""
    r = torch.Generator().manual_seed(0)
    vocab = 4000
    hidden = 16
    head = torch.randn(vocab, hidden, generator=r) * 0.5
    states = torch.randn(60, hidden, generator=r)
    states = states * 4
    z = states @ head.T
    said = torch.randint(vocab, (50,), generator=r)
    scored = Scored.choose(z.topk(8).indices, said, 1500, vocab, (1, 2))
    ids = scored.ids
    assert ids is not None and scored.bias is not None and 1200 < ids.numel() <= 1500
    assert bool((ids.diff() > 0).all()) and set(z.argmax(-1).tolist()) | set(said.tolist()) <= set(ids.tolist())
    assert scored.ids.equal(Scored.choose(z.topk(8).indices, said, 1500, vocab, (1, 2)).ids)  # type: ignore[arg-type]
    model = SimpleNamespace(
        head=head, config=SimpleNamespace(vocab_size=vocab, softcap=None), logits=lambda h: h @ head.T
    )
    part = Teacher.of(model, states, torch.float32, scored)  # type: ignore[arg-type]
    whole = Teacher.of(model, states, torch.float32)  # type: ignore[arg-type]
    assert ids[part.best].equal(whole.best)
    g = states + 0.5 * torch.randn(60, hidden, generator=r)
    rows = torch.arange(60)
    weight = torch.ones(60)
    some, alpha, hit = head_loss(g, scored.rows(head), part, rows, weight, LossMix().rows(60, g.device), scored.bias)
    every, alpha_all, hit_all = head_loss(g, head, whole, rows, weight, LossMix().rows(60, g.device))
    torch.testing.assert_close(some, every, rtol=0.03, atol=0)
    torch.testing.assert_close(alpha.mean(), alpha_all.mean(), rtol=0.05, atol=0)
    assert float((hit - hit_all).abs().mean()) < 0.1


def test_drawn_rows_stand_for_all() -> None:
    """Over where the marks begin, every row counts once on average, whatever its weight; heavy rows come more often."""
    weight = torch.tensor([0.1, 2.0, 0.4, 0.4, 1.1, 0.05])
    value = torch.tensor([3.0, -1.0, 2.0, 0.5, 4.0, 7.0])
    sums = []
    often = torch.zeros(6)
    for n in range(2000):
        some, scale = drawn(weight, 3, (n + 0.5) / 2000)
        sums.append((value[some] * scale).sum())
        often += torch.bincount(some, minlength=6) / 2000
        torch.testing.assert_close(weight[some] * scale, torch.full((3,), float(weight.sum()) / 3))
    torch.testing.assert_close(torch.stack(sums).mean(), value.sum(), rtol=5e-3, atol=0)
    torch.testing.assert_close(often, 3 * weight / weight.sum(), rtol=0.02, atol=1e-3)
    assert int(drawn(torch.ones(4), 4, 0.999999)[0].max()) == 3 and drawn(torch.ones(4), 4, 0.5)[0].tolist() == [
        0,
        1,
        2,
        3,
    ]
