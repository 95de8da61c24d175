"""Muon makes every direction learn at one rate; who gets which optimizer is decided by name."""

from __future__ import annotations

import torch
from torch import nn

from outrider.train.trainer import make_optimizers


def test_muon_takes_the_step_of_earlier_versions() -> None:
    """Nesterov momentum of 0.95, orthogonalised, scaled by 0.2·√max(rows, columns), decoupled weight decay."""
    r = torch.Generator().manual_seed(0)
    for shape in ((20, 20), (40, 16), (16, 40)):
        weight = nn.Parameter(torch.randn(shape, generator=r))
        before = weight.detach().clone()
        (muon,) = make_optimizers({"pre": weight}, 0.1, 0.01, muon=True)
        weight.grad = torch.randn(shape, generator=r) * 7
        muon.step()
        step = (before * (1 - 0.1 * 0.01) - weight.detach()) / (0.1 * 0.2 * max(shape) ** 0.5)
        values = torch.linalg.svdvals(step)
        assert values.max() < 1.3 and values.median() > 0.65
        left, _, right = torch.linalg.svd(weight.grad, full_matrices=False)
        assert torch.nn.functional.cosine_similarity(step.flatten(), (left @ right).flatten(), dim=0) > 0.95


def test_names_decide() -> None:
    names = ("pre", "layers.0.qkv", "embed", "centroids", "norm")
    params = {n: nn.Parameter(torch.ones(4) if n == "norm" else torch.ones(4, 4)) for n in names}
    muon, adam = make_optimizers(params, 1e-3, 0.1, muon=True)
    assert isinstance(muon, torch.optim.Muon)
    assert {id(p) for p in muon.param_groups[0]["params"]} == {id(params["pre"]), id(params["layers.0.qkv"])}
    decay = {id(p): g["weight_decay"] for g in adam.param_groups for p in g["params"]}
    assert decay == {id(params["embed"]): 0.1, id(params["centroids"]): 0.1, id(params["norm"]): 0.0}
    (only,) = make_optimizers(params, 1e-3, 0.1, muon=False)
    assert sum(len(g["params"]) for g in only.param_groups) == 5


def test_both_learn_an_ill_conditioned_map() -> None:
    r = torch.Generator().manual_seed(1)
    x = torch.randn(256, 8, generator=r) * torch.logspace(0, -1, 8)
    want = torch.randn(8, 8, generator=r)
    for muon in (True, False):
        weight = nn.Parameter(torch.zeros(8, 8))
        optimizers = make_optimizers({"pre": weight}, 0.03, 0.0, muon)
        losses = []
        for _ in range(400):
            loss = ((x @ (weight - want).T) ** 2).mean()
            loss.backward()
            losses.append(loss.item())
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        assert losses[-1] < 0.05 * losses[0]
