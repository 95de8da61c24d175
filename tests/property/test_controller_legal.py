"""Whatever happens, the controller's choices are legal and its books stay sane."""

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.costs import linear
from tests.simulate import NamedController as Controller
from tests.simulate import Trace, replay
from tests.traces import Fixed

from outrider.spec.cost import CostTable
from outrider.spec.plan import DraftContext, StepTiming

NAMES = st.sampled_from(["a", "b", "c", "d"])
VIEW = st.tuples(
    NAMES, st.integers(0, 16), st.integers(0, 16), st.integers(0, 20), st.integers(1, 40), st.integers(0, 5000)
)
BATCH = st.lists(VIEW, min_size=1, max_size=4, unique_by=lambda v: v[0])
MACHINE = st.tuples(st.floats(1e-4, 1e-1), st.floats(0, 1e-2), st.floats(0, 1e-2))


@settings(max_examples=60)
@given(MACHINE, st.lists(st.tuples(BATCH, st.integers(0, 16), st.floats(1e-5, 1.0)), max_size=40))
def test_choices_are_legal(machine, cycles):
    base, row, token = machine
    controller = Controller(linear(base, row, {"mtp": token}), ("mtp", "ngram"))
    for raw, luck, seconds in cycles:
        views = [DraftContext(i, {"mtp": m, "ngram": n}, match, left, context) for i, m, n, match, left, context in raw]
        choices = controller.plan(views)
        assert len(choices) == len(views)
        for v, c in zip(views, choices):
            assert (c.drafter is None) == (c.k == 0)
            assert 0 <= c.k <= max(0, v.remaining - 1)
            assert c.drafter is None or c.k <= v.drafter_available[c.drafter]
            controller.observe(v.state, c.drafter, c.k, min(luck, c.k), [0.5] * c.k if luck % 2 else None)
        widest = max(c.k for c in choices)
        controller.observe_step(
            StepTiming(len(views), widest, context=100, seconds=seconds, drafter=choices[0].drafter)
        )
        controller.finish("")  # applies all observations
        assert all(0.0 < a < 1.0 for stats in controller.acceptance.values() for a in stats.a)
        assert 0.0 <= controller._explored < controller._time
    for name in "abcd":
        controller.finish(name)
    assert not controller.states


@settings(max_examples=40)
@given(st.lists(st.integers(0, 16), min_size=60, max_size=200), st.floats(0.02, 0.25))
def test_a_request_never_loses_more_than_its_risk(runs, row):
    """Against any acceptance pattern at all: two plain steps and 1.5 % of the tokens, and at most one draft over it."""
    cost = linear(1.0, row, {"mtp": row / 3})
    trace = Trace("t", "any", "mtp", tuple(runs))
    ours = replay([trace], Controller(CostTable.from_json(cost.to_json()), ("mtp",)), cost)
    plain = replay([trace], Fixed(None, 0), cost)
    step = cost.verify(1, 0, 0)
    worst_draft = cost.curve("mtp", 1, 0)[16] - step
    assert ours.seconds["t"] - plain.seconds["t"] <= (2.0 + 0.025 * len(runs)) * step + worst_draft


def test_same_history_same_choices():
    trace = Trace("t", "any", "mtp", tuple((i * 7) % 5 for i in range(200)))
    cost = linear(5e-3, 1e-3, {"mtp": 4e-4})
    first, second = (replay([trace], Controller(CostTable.from_json(cost.to_json()), ("mtp",)), cost) for _ in range(2))
    assert first == second
