"""The controller and a draft model: used from the first cycle where it should pay, and not where reading the text would
eat the gain."""

from tests.costs import linear
from tests.simulate import NamedController as Controller

from outrider.spec.cost import CostTable
from outrider.spec.draft_model import DraftModel
from outrider.spec.plan import READING, DraftContext
from outrider.spec.timing import ProbeGrid, TimedDrafter, measure

NAME = "draft_model"


def controller(step: float, per_token: float) -> Controller:
    """A plain step takes 1, a row 0.05 more, a draft step `step`, reading a token `per_token`."""
    table = linear(0.95, 0.05, {NAME: step})
    table.reading[NAME] = per_token
    return Controller(table, (NAME, "ngram"), {NAME: DraftModel.profile})


def view(unread: int, remaining: int) -> DraftContext:
    return DraftContext("a", {NAME: 16}, 0, remaining, 64 + unread, unread=unread)


def test_it_drafts_from_the_first_cycle_where_the_measured_step_is_cheap() -> None:
    (choice,) = controller(0.2, 0.04).plan([view(60, 64)])
    assert (
        choice.drafter == NAME and choice.k >= 2 and choice.stop > choice.drop > 0
    )  # and ends drafts by their confidence at once


def test_it_does_not_where_the_step_is_dear() -> None:
    assert controller(0.9, 0.04).plan([view(60, 64)])[0].k == 0


def test_a_long_text_is_not_read_for_a_short_answer() -> None:
    dear = controller(0.2, 0.04)
    assert dear.plan([view(1000, 64)])[0].k == 0  # 40 plain steps of reading for 64 tokens
    for _ in range(40):
        dear.observe("a", None, 0, 0)
        assert dear.plan([view(1000, 64)])[0].k == 0  # nor to find out
    assert controller(0.2, 0.04).plan([view(1000, 64), view(1000, 64)._replace(state="b")])[0].k == 0
    assert controller(0.2, 0.04).plan([view(10, 64), view(10, 64)._replace(state="b")])[0].k > 0
    assert controller(0.2, 0.002).plan([view(1000, 64)])[0].k > 0  # where reading is cheap it is done


def test_what_reading_takes_is_measured_and_kept() -> None:
    now = [0.0]

    def probe(part: str, batch: int, k: int, context: int) -> None:
        now[0] += {"verify": 0.01 + 0.001 * k, "draft": 0.01 + 0.003 * k, "reading": 0.013 + 0.0005 * READING}[
            part.kind
        ]

    table = measure(
        probe, (TimedDrafter(NAME, reads=True),), ProbeGrid((1, 2), (64,)), clock=lambda: now[0], whole=True
    )
    assert abs(table.reading[NAME] - 0.0005) < 1e-9
    assert CostTable.from_json(table.to_json()).reading == table.reading
    assert abs(table.draft(NAME, 1, 4) - 0.008) < 1e-9
