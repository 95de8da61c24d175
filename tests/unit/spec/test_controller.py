"""The controller's single decisions."""

import time

import pytest
from tests.costs import linear
from tests.simulate import NamedController as Controller

from outrider.spec.acceptance import AcceptanceProfile, Source
from outrider.spec.cost import CostTable
from outrider.spec.plan import CostPart, DraftContext, StepTiming, VerifiedTree
from outrider.spec.tuning import Tuning
from outrider.types import NO_DRAFT, OutriderError

CHEAP = linear(18e-3, 1e-4, {"mtp": 4e-4})  # a GPU: a row costs next to nothing
DEAR = linear(5.5e-3, 1e-3, {"mtp": 4.5e-4})  # two CPU cores


def view(id="a", remaining=100, mtp=16, ngram=0, match=0, fixed=False, adapter=""):
    return DraftContext(id, {"mtp": mtp, "ngram": ngram}, match, remaining, 100, fixed, adapter=adapter)


def run(controller, cycles, right, id="a", **options):
    """`right`: tokens a draft gets right, whatever its length. Returns the choices."""
    out = []
    for _ in range(cycles):
        choice = controller.plan([view(id, **options)])[0]
        controller.observe(id, choice.drafter, choice.k, min(choice.k, right), None)
        out.append(choice)
    return out


def copy(table):
    return CostTable.from_json(table.to_json())


def test_a_good_drafter_is_used_at_length_and_a_bad_one_not_at_all():
    assert run(Controller(copy(CHEAP), ("mtp",)), 60, 16)[-1].k >= 12
    assert sum(c.k for c in run(Controller(copy(DEAR), ("mtp",)), 60, 0)[-30:]) <= 2  # a probe or two


def test_a_draft_that_ends_at_once_under_a_plan_without_one_is_learnt_from():
    """A plan may be run again after a later one without drafts was noted. This ended every step from then on."""
    controller = Controller(copy(DEAR), ("mtp",))
    assert controller.plan([view(mtp=0)])[0] == NO_DRAFT
    controller.observe("a", "mtp", 0, 0, [0.01])
    assert controller.plan([view(mtp=4)])[0].k <= 4


def test_k_follows_the_price():
    few = run(Controller(copy(DEAR), ("mtp",)), 80, 3)[-1].k
    many = run(Controller(copy(CHEAP), ("mtp",)), 80, 3)[-1].k
    assert 1 <= few <= 3 <= many <= 6


def test_a_copying_drafter_is_rated_by_its_match_whatever_its_name():
    tuning = Tuning()
    for name, copying in (("suffix", frozenset({"suffix"})), ("suffix", frozenset())):
        controller = Controller(copy(DEAR), (name,), copying=copying)
        view_of_match = DraftContext("a", {name: 4}, 30, 100, 100)
        offer = controller.rater.offer(view_of_match, name)
        assert offer is not None
        prior = tuning.copy_prior[offer.source.match] if copying else tuning.default_prior
        assert offer.source.match == (len(tuning.copy_prior) - 1 if copying else 0)
        assert offer.stats.prior[0] == prior[0]


@pytest.mark.parametrize("remaining", [1, 2, 3, 9])
def test_never_drafts_beyond_what_may_be_emitted(remaining):
    controller = Controller(copy(CHEAP), ("mtp", "ngram"), {"mtp": AcceptanceProfile("", (0.98,), (), 0)})
    run(controller, 30, 16, "warm")
    assert controller.plan([view(remaining=remaining, ngram=16, match=12)])[0].k <= remaining - 1
    both = controller.plan([view("x", remaining=remaining), view("y", remaining=50)])
    assert both[0].k <= remaining - 1


def test_never_drafts_more_than_is_offered():
    controller = Controller(copy(CHEAP), ("mtp", "ngram"))
    run(controller, 30, 16, "warm")
    assert controller.plan([view(mtp=3)])[0].k <= 3
    assert controller.plan([view(mtp=0)])[0] == NO_DRAFT


def test_a_long_match_beats_the_trained_drafter_and_a_short_one_does_not():
    controller = Controller(copy(DEAR), ("mtp", "ngram"))
    run(controller, 40, 2)
    assert controller.plan([view(ngram=16, match=12)])[0].drafter == "ngram"
    assert controller.plan([view(ngram=16, match=1)])[0].drafter == "mtp"


def test_what_one_request_taught_the_next_one_knows():
    controller = Controller(copy(DEAR), ("mtp",))
    run(controller, 60, 0, "first")
    controller.finish("first")
    assert sum(c.k for c in run(controller, 30, 0, "second")) <= 3


def test_a_broken_drafter_is_named_once():
    controller = Controller(copy(DEAR), ("mtp",))
    run(controller, 3000, 0)
    assert len(controller.warnings) == 1 and "does not fit this target" in controller.warnings[0]
    good = Controller(copy(DEAR), ("mtp",))
    run(good, 300, 2)
    assert good.warnings == []


def test_probing_stays_under_one_percent_and_finds_a_drafter_that_recovers():
    controller = Controller(copy(DEAR), ("mtp",))
    choices = run(controller, 2000, 0)
    cost = DEAR.curve("mtp", 1, 100)
    lost = sum(cost[c.k] - cost[0] for c in choices[50:])
    assert lost / (1950 * cost[0]) < 0.01
    back = run(controller, 4000, 4)
    assert back[-1].k >= 2


def test_a_k_that_was_asked_for_teaches_nothing():
    controller = Controller(copy(DEAR), ("mtp",))
    for _ in range(50):
        controller.plan([view("free", mtp=0), view("asked", mtp=0, fixed=True)])
        controller.observe("asked", "mtp", 8, 0, None)
    controller.observe("planned elsewhere", "mtp", 4, 0, None)
    controller.plan([view("free", mtp=0)])
    assert not any(stats.judged for stats in controller.acceptance.values()) and len(controller.states) == 3


def test_an_adapted_target_has_an_acceptance_of_its_own():
    """One estimate for all switched drafting off for the base model where an adapter's answers refused every draft."""
    controller = Controller(copy(DEAR), ("mtp",))
    for turn in range(6):
        assert run(controller, 40, 6, id=f"base {turn}")[-1].k >= 3
        drafted = run(controller, 40, 0, id=f"adapted {turn}", adapter="pirate")
        for id in (f"base {turn}", f"adapted {turn}"):
            controller.finish(id)
    assert sum(choice.k for choice in drafted) <= 4, "a new request of the adapter knows it from the start"
    learnt = controller.acceptance
    assert learnt[Source("mtp")].a[0] > 0.9 > 0.1 > learnt[Source("mtp", adapter="pirate")].a[0]
    assert [w for w in controller.warnings if "'pirate'" in w] == controller.warnings != []
    assert run(controller, 4, 6, id="new", adapter="knight")[-1].k >= 3, "another one starts from the base model's"


def test_only_so_many_adapters_are_remembered():
    controller = Controller(copy(DEAR), ("mtp",), tuning=Tuning(adapters=3))
    for i in range(9):
        run(controller, 1, 1, id=str(i), adapter=f"adapter {i}")
    assert [source.adapter for source in controller.acceptance] == ["", *(f"adapter {i}" for i in (6, 7, 8))]


def test_those_whose_k_was_asked_for_are_company():
    """Rows cost what they cost in a batch of so many: who drafts as if alone holds up the one beside it."""
    table = copy(DEAR)
    sizes = []
    curve = table.curve
    table.curve = lambda name, batch, *where, **named: sizes.append(batch) or curve(name, batch, *where, **named)
    controller = Controller(table, ("mtp",))
    run(controller, 20, 2)
    sizes.clear()
    assert controller.plan([view("b", mtp=0, fixed=True), view()])[0] == NO_DRAFT
    assert set(sizes) == {2}
    assert controller.reuse(["a"]) is None and controller.reuse(["b", "a"]) is not None


def test_without_drafters_everything_is_plain():
    controller = Controller(copy(CHEAP), ())
    assert controller.plan([view()])[0].k == 0 and [c.k for c in controller.plan([view("a"), view("b")])] == [0, 0]
    assert controller.plan([]) == []


def test_the_card_s_prior_is_where_it_starts():
    modest, bold = (Controller(copy(DEAR), ("mtp",), {"mtp": AcceptanceProfile("", (p,), (), 0)}) for p in (0.1, 0.95))
    assert modest.plan([view()])[0].k == 0 and bold.plan([view()])[0].k == 2  # short until something was accepted


def test_in_a_batch_the_easy_sequence_drafts_and_the_hard_one_does_not():
    controller = Controller(copy(DEAR), ("mtp",))
    for _ in range(80):
        seqs = [view("easy"), view("hard")]
        for v, c in zip(seqs, controller.plan(seqs)):
            controller.observe(v.state, c.drafter, c.k, c.k if v.state == "easy" else 0, None)
    easy, hard = controller.plan([view("easy"), view("hard")])
    assert easy.k >= 3 and hard.k == 0


def test_confidence_ends_drafts_once_it_is_calibrated():
    controller = Controller(copy(DEAR), ("mtp",))
    assert controller.plan([view()])[0].stop == 0.0
    for i in range(120):
        choice = controller.plan([view()])[0]
        right = min(choice.k, i % 4)
        drafted = min(choice.k, right) if choice.drop else choice.k  # ends before the token it is not sure of
        controller.observe(
            "a", choice.drafter, drafted, right, ([0.95] * right + [0.1] * choice.k)[: min(choice.k, drafted + 1)]
        )
    choice = controller.plan([view()])[0]
    trust = controller.trust("mtp")
    assert 0.0 < choice.drop < choice.stop < 1.0 and trust[15] > 0.8 > 0.2 > trust[1]


def test_a_request_near_its_limit_of_losses_drafts_small_trees():
    """Not lines: where tokens are drawn a line is right half as often, so such a request would go on losing."""
    controller = Controller(
        copy(DEAR), ("mtp",), {"mtp": AcceptanceProfile("", (0.9,), tuple((i + 0.5) / 16 for i in range(16)), 0)}
    )
    seen = []
    for _ in range(6):  # nothing is ever right
        (choice,) = controller.plan([DraftContext("a", {"mtp": 16}, 0, 200, 300, nodes=16)])
        drafted = min(choice.nodes, 3)
        tree = VerifiedTree.of([0] * drafted, []) if choice.nodes else None
        controller.observe("a", choice.drafter, drafted, 0, [0.5] * drafted if tree else None, tree)
        seen.append(choice)
    drafts = [c for c in seen if c.k]
    assert (
        len(drafts) > 1
        and all(c.nodes == c.k + 1 for c in drafts)
        and drafts[-1].k < drafts[0].k
        and seen[-1] == NO_DRAFT
    )


@pytest.mark.parametrize(
    "extra,path,taken", [(1e-5, [5, 6, 7], True), (8e-3, [5, 6, 7], False), (2e-3, [1, 2, 3], False)]
)
def test_trees_of_a_fixed_size_are_taken_where_they_pay(extra, path, taken):
    """extra: what a tree costs beside a line as deep, of a plain step of 10 ms. path: where the right tokens stood in
    the trees that were run. Cheap and useful; dear; fairly cheap, but their main line alone would have brought as
    much."""
    drafting = [2e-4 * k for k in range(17)]
    cost = CostTable(
        {(1, 0): [0.01] * 17},
        {"mtp": {1: drafting}, CostPart("tree", "mtp"): {1: [t + extra * (t > 0) for t in drafting]}},
    )
    c = Controller(cost, ("mtp",), {"mtp": AcceptanceProfile("", (0.6,), (), 0)})
    parents = [0, 1, 2, 3, 0, 5, 6, *[0] * 9]
    for _ in range(400):
        (choice,) = c.plan([DraftContext("a", {"mtp": 16}, 0, 200, 300, nodes=16)])
        tree = VerifiedTree.of(parents, path) if choice.nodes else None
        c.observe("a", choice.drafter, 16 if tree else choice.k, 3 if tree else min(1, choice.k), None, tree)
    assert (choice.nodes == 16) == taken and 1 <= choice.k <= 16 - 8 * taken


def test_impossible_counts_are_refused():
    controller = Controller(copy(DEAR), ("mtp",))
    with pytest.raises(OutriderError, match="accepted 3 of 2"):
        controller.observe("a", "mtp", 2, 3, None)


def test_a_decision_takes_microseconds():
    controller = Controller(copy(DEAR), ("mtp", "ngram"))
    run(controller, 300, 2, ngram=4, match=3)
    best = 1.0
    for _ in range(50):  # of several the best, and processor time: other work on the machine is not ours to test
        began = time.thread_time()
        for _ in range(200):
            choice = controller.plan([view(ngram=4, match=3)])[0]
            controller.observe("a", choice.drafter, choice.k, min(choice.k, 2), None)
            controller.observe_step(StepTiming(1, choice.k, context=100, seconds=8e-3, drafter=choice.drafter))
        best = min(best, (time.thread_time() - began) / 200)
    assert best < 60e-6  # 18 µs on an idle core; a wide margin for a busy one
