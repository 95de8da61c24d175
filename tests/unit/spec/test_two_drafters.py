"""The controller chooses between two network drafters by what was measured: acceptance and cost."""

from __future__ import annotations

from collections import Counter

import pytest
from tests.simulate import NamedController as Controller

from outrider.spec.acceptance import AcceptanceProfile
from outrider.spec.cost import CURVE_LENGTH, CostTable
from outrider.spec.plan import DraftContext

NAMES = ("mtp", "dflash", "ngram")
VERIFY = {(b, c): [10e-3 + 1e-4 * b * (k + 1) for k in range(CURVE_LENGTH)] for b in (1, 4) for c in (0, 4096)}


def table(per_token: float, per_pass: float) -> CostTable:
    """An MTP drafter takes `per_token` for each token, a block drafter `per_pass` whatever K."""
    mtp = [per_token * k for k in range(CURVE_LENGTH)]
    block = [0.0, *[per_pass] * (CURVE_LENGTH - 1)]
    return CostTable(VERIFY, {"mtp": {1: mtp, 4: mtp}, "dflash": {1: block, 4: block}})


def used(controller: Controller, right: dict[str, int], cycles: int = 400, size: int = 1) -> Counter[str | None]:
    """Which drafter the later half of the cycles used; right: how many tokens of a draft each gets right."""
    seen: Counter[str | None] = Counter()
    for cycle in range(cycles):
        views = [DraftContext(f"{i}", {"mtp": 16, "dflash": 7}, 0, 1000, 100) for i in range(size)]
        for view, plan in zip(views, controller.plan(views), strict=True):
            accepted = min(plan.k, right.get(plan.drafter or "", 0))
            controller.observe(view.state, plan.drafter, plan.k, accepted)
            seen[plan.drafter] += cycle >= cycles // 2
    return seen


@pytest.mark.parametrize("size", [1, 3])
def test_acceptance_makes_each_of_them_win(size: int) -> None:
    """At the same price; the drafter that loses is tried now and then, within what probes may cost."""
    for better, worse in (("mtp", "dflash"), ("dflash", "mtp")):
        controller = Controller(table(3e-4, 1.2e-3), NAMES)
        seen = used(controller, {better: 5, worse: 1}, size=size)
        assert seen[better] > 0.9 * seen.total() and seen[worse] > 0
        assert controller._explored < 0.02 * controller._time


@pytest.mark.parametrize("size", [1, 3])
def test_cost_makes_each_of_them_win(size: int) -> None:
    """Both get the same number of tokens right."""
    right = {"mtp": 4, "dflash": 4}
    assert used(Controller(table(2e-4, 4e-3), NAMES), right, size=size)["mtp"] > 180 * size
    assert used(Controller(table(2e-3, 1e-3), NAMES), right, size=size)["dflash"] > 180 * size


def test_one_that_was_thought_worse_is_found_to_be_better() -> None:
    """By its profile it is hardly ever right, so that without comparing it would never be used."""
    prior = {name: AcceptanceProfile("", (a,), (), 0) for name, a in (("mtp", 0.8), ("dflash", 0.3))}
    assert used(Controller(table(3e-4, 1e-3), NAMES, prior), {"mtp": 3, "dflash": 7}, 2000)["dflash"] > 800


def test_the_choice_follows_the_text() -> None:
    controller = Controller(table(3e-4, 1e-3), NAMES)
    assert used(controller, {"mtp": 6, "dflash": 1})["mtp"] > 180
    assert used(controller, {"mtp": 1, "dflash": 6}, 2000)["dflash"] > 800


def test_one_drafter_is_never_compared() -> None:
    """A single network drafter causes no plan that was not made before."""
    controller = Controller(table(3e-4, 1e-3), ("mtp", "ngram"))
    assert {*used(controller, {"mtp": 4})} == {"mtp"}
    assert controller._explored == 0.0
