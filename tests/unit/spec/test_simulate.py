"""Replaying traces: the books are exact, and the controller keeps its promises on made-up drafters."""

import gzip
import random
from dataclasses import replace
from pathlib import Path

import pytest
from tests.costs import linear
from tests.simulate import NamedController as Controller
from tests.simulate import (
    Trace,
    clairvoyant,
    compare,
    fixed_seconds,
    plain,
    read_traces,
    replay,
    static_oracle,
    write_traces,
)
from tests.traces import Fixed, broken, synthetic

from outrider.spec.acceptance import AcceptanceProfile, measure
from outrider.spec.acceptance import read as read_card
from outrider.spec.acceptance import write as write_card
from outrider.spec.cost import CURVE_LENGTH, CostTable
from outrider.spec.plan import DraftContext
from outrider.types import OutriderError

MACHINES = {
    "two CPU cores": linear(5.5e-3, 1e-3, {"mtp": 4.5e-4}),
    "GPU": linear(18e-3, 1e-4, {"mtp": 4.2e-4}),
    "mixture of experts": linear(4e-3, 9e-4, {"mtp": 3e-4}),
}


def measure_card(traces: list[Trace], weights: str) -> AcceptanceProfile:
    return measure([(t.runs, t.confidence) for t in traces], weights)


def fresh(cost):
    return Controller(CostTable.from_json(cost.to_json()), ("mtp", "ngram"))


def test_fixed_k_is_counted_by_hand():
    cost = linear(1.0, 0.1, {"mtp": 0.01})
    trace = Trace("t", "c", "mtp", (2, 0, 0, 1, 0))
    out = replay([trace], Fixed("mtp", 2), cost)
    # at 0: two right, three emitted; at 3: K = 1 (two left), one right, two emitted
    assert out.cycles == 2 and (out.drafted, out.accepted) == (3, 3)
    assert out.seconds["t"] == pytest.approx((1.3 + 0.02) + (1.2 + 0.01))
    assert replay([trace], Fixed(None, 0), cost).seconds["t"] == pytest.approx(5 * 1.1)


def test_oracles_bound_every_fixed_policy():
    cost = MACHINES["two CPU cores"]
    traces = synthetic(6, 3, copying=0.4)
    for trace in traces:
        tries = {
            (n, k): replay([trace], Fixed(n, k), cost).seconds[trace.id] for n in ("mtp", "ngram") for k in (0, 1, 3, 8)
        }
        assert tries == pytest.approx({at: fixed_seconds(trace, *at, cost) for at in tries})
        fixed = min(tries.values())
        assert clairvoyant(trace, cost) <= static_oracle(trace, cost) <= fixed + 1e-12
        assert plain(trace, cost) == pytest.approx(replay([trace], Fixed(None, 0), cost).seconds[trace.id])


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("kind", ["mixed", "hard", "copying"])
def test_ours_against_the_oracle_and_plain_decoding(machine, kind):
    options = {"mixed": {}, "hard": {"easiness": (0.1, 0.5)}, "copying": {"copying": 0.4}}[kind]
    cost = MACHINES[machine]
    comparison = compare(synthetic(16, 11, (64, 256), **options), cost, fresh(cost), noise=0.05)
    assert comparison.of_static >= 0.95
    assert comparison.of_best_fixed >= 0.97
    assert comparison.worst[1] >= 0.97


@pytest.mark.parametrize("machine", MACHINES)
def test_a_broken_drafter_costs_less_than_three_percent(machine):
    cost = MACHINES[machine]
    controller = fresh(cost)
    comparison = compare(broken(10, 5), cost, controller)
    assert comparison.speedup >= 0.985 and comparison.worst[1] >= 0.97
    assert len(controller.warnings) == 1


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("batch", [2, 5, 16])
def test_no_batch_is_slower_than_plain(machine, batch):
    cost = CostTable.from_json(MACHINES[machine].to_json())
    for traces in (
        synthetic(24, 8, (40, 120)),
        synthetic(24, 9, (40, 120), easiness=(0.1, 0.5)),
        broken(24, 10, (40, 120)),
    ):
        ours = replay(traces, fresh(cost), cost, batch, noise=0.03)
        assert ours.rate / replay(traces, Fixed(None, 0), cost, batch).rate >= 0.97


def test_a_wrong_table_is_mended_while_running():
    """Measured while another program was busy: K looks three times dearer than it is."""
    truth = MACHINES["GPU"]
    wrong = linear(18e-3, 20e-3, {"mtp": 4.2e-4})
    traces = synthetic(30, 12, (200, 300), easiness=(0.7, 0.9))
    ours = replay(traces, Controller(wrong, ("mtp",)), truth, noise=0.03)
    plain = replay(traces, Fixed(None, 0), truth)
    assert ours.rate / plain.rate > 1.3


def test_confidence_pays():
    cost = MACHINES["two CPU cores"]
    sure = synthetic(30, 13, confident=True)
    blind = [Trace(t.id, t.category, t.drafter, t.runs) for t in sure]
    assert replay(sure, fresh(cost), cost).rate > 1.05 * replay(blind, fresh(cost), cost).rate


def test_traces_are_kept_and_read(tmp_path):
    traces = synthetic(3, 1, copying=0.3, confident=True)
    write_traces(tmp_path / "t.jsonl", traces)
    assert list(read_traces(tmp_path / "t.jsonl")) == traces
    (tmp_path / "bad.jsonl").write_text('{"id": 1}\n')
    with pytest.raises(OutriderError, match=r"bad.jsonl:1"):
        list(read_traces(tmp_path / "bad.jsonl"))
    with pytest.raises(OutriderError, match="entries"):
        Trace("t", "c", "mtp", (1, 2), ngram=(1,))


def test_a_damaged_file_of_traces_is_one_line(tmp_path):
    write_traces(tmp_path / "t.jsonl", synthetic(3, 1))
    whole = gzip.compress((tmp_path / "t.jsonl").read_bytes(), mtime=0)
    for damaged in (whole[:-9], whole[:12] + b"\xff" * 8 + whole[20:], b"{}", gzip.compress(b"\xff")):
        (tmp_path / "t.jsonl.gz").write_bytes(damaged)
        with pytest.raises(OutriderError, match=r"cannot read traces from .*t\.jsonl\.gz: "):
            list(read_traces(tmp_path / "t.jsonl.gz"))
    (tmp_path / "t.jsonl").write_text("[" * 200_000)
    with pytest.raises(OutriderError, match=r"t\.jsonl:1: not a trace"):
        list(read_traces(tmp_path / "t.jsonl"))


RECORDED = (
    Path(__file__).parents[2] / "data" / "smollm2_traces.jsonl.gz"
)  # the quick suite, SmolLM2-135M with the first shipped drafter
MEASURED = (3.15, 3.55, 4.05, 4.65, 5.15, 5.95, 6.65, 7.55, 8.75)  # ms: two CPU cores, 1..9 rows


def measured(first: float = 0.55, further: float = 0.3) -> CostTable:
    rows = [*MEASURED, *(MEASURED[-1] + 0.95 * (k + 1) for k in range(CURVE_LENGTH - len(MEASURED)))]
    draft = [0.0, *(first + further * k for k in range(CURVE_LENGTH - 1))]
    return CostTable({(1, 256): [t / 1e3 for t in rows]}, {"mtp": {1: [t / 1e3 for t in draft]}})


def test_recorded_answers_against_the_oracle_and_every_fixed_k():
    """A real drafter with its confidences. The card comes from one half of the prompts and is held against the other,
    which come in several orders: what a prompt loses depends on a few coin tosses (its shortest answers have 11
    tokens), so the mean counts."""
    traces = list(read_traces(RECORDED))
    cost = measured()
    by_prompt: dict[str, list[float]] = {}
    by_category: dict[str, list[float]] = {}
    for order in range(8):
        half = order % 2
        shuffled = random.Random(order)
        card = measure_card([t for i, t in enumerate(traces) if i % 2 != half], "")
        judged = [t for i, t in enumerate(traces) if i % 2 == half]
        shuffled.shuffle(judged)
        ours = Controller(CostTable.from_json(cost.to_json()), ("mtp", "ngram"), {"mtp": card})
        comparison = compare(judged, cost, ours, noise=0.03, seed=order)
        assert comparison.of_static >= 0.98 and comparison.of_best_fixed >= 1.03 and comparison.speedup > 1.4
        assert comparison.worst[1] >= 0.92
        again = Controller(CostTable.from_json(ours.cost.to_json()), ours.drafters, {"mtp": card})
        spent = replay(judged, again, cost, noise=0.03, seed=order).seconds
        for trace in judged:
            by_prompt.setdefault(trace.id, []).append(fixed_seconds(trace, "mtp", 0, cost) / spent[trace.id])
        for category in {t.category for t in judged}:
            of_category = [t for t in judged if t.category == category]
            best = min(sum(fixed_seconds(t, "mtp", k, cost) for t in of_category) for k in range(9))
            by_category.setdefault(category, []).append(best / sum(spent[t.id] for t in of_category))
    assert min(sum(v) / len(v) for v in by_prompt.values()) >= 0.97
    assert min((sum(v) / len(v), c) for c, v in by_category.items())[0] >= 0.97


def test_without_a_card_it_learns_the_same():
    traces = list(read_traces(RECORDED))
    cost = measured()
    comparison = compare(traces, cost, fresh(cost), noise=0.03)
    assert comparison.of_static >= 0.95 and comparison.of_best_fixed >= 1.0


def test_a_card_that_praises_a_broken_drafter_costs_less_than_three_percent():
    traces = list(read_traces(RECORDED))
    cost = measured()
    card = measure_card(traces, "")
    sure = random.Random(3)
    lies = [
        Trace(
            t.id,
            t.category,
            t.drafter,
            t.runs,
            confidence=tuple(tuple(sure.random() ** 3 for _ in range(16)) for _ in t.runs),
        )
        for t in broken(20, 5)
    ]
    controller = Controller(CostTable.from_json(cost.to_json()), ("mtp", "ngram"), {"mtp": card})
    comparison = compare(lies, cost, controller, noise=0.03)
    assert comparison.speedup >= 0.98 and comparison.worst[1] >= 0.95 and len(controller.warnings) == 1


def test_a_card_belongs_to_its_weights(tmp_path):
    card = measure_card(synthetic(3, 1, confident=True), "these")
    write_card(tmp_path, card)
    assert read_card(tmp_path, "these") == card and read_card(tmp_path, "others") is None
    for judged in ("1", "1e999"):
        text = f'{{"weights": "these", "accepted": [2.0], "trust": [0.5], "judged": {judged}}}'
        (tmp_path / "acceptance.json").write_text(text)
        assert read_card(tmp_path, "these") is None and read_card(tmp_path / "nowhere", "these") is None
    with pytest.raises(OutriderError, match="no drafts"):
        measure_card([], "")


def small_card(first: float):
    """Acceptance after a short training run: 8 held-out answers of 13 tokens, 96 first positions judged, hardly any
    later ones."""
    luck = random.Random(0)
    runs = [
        [next((j for j in range(16) if luck.random() >= (first if j == 0 else 0.5)), 16) for _ in range(13)]
        for _ in range(8)
    ]
    sure = tuple((0.5,) * 16 for _ in range(13))
    return measure_card([Trace(str(i), "c", "mtp", tuple(r), confidence=sure) for i, r in enumerate(runs)], "w")


def test_a_card_says_how_much_was_judged_and_claims_nothing_beyond(tmp_path):
    """Catches: 0.71 at every position that was never reached."""
    card = small_card(0.3)
    assert card.seen[0] == 96 and sum(card.seen) == card.judged and max(card.accepted) < 0.6
    write_card(tmp_path, card)
    assert read_card(tmp_path, "w") == card and card.counts == card.seen
    older = replace(card, seen=())
    assert sum(older.counts) == pytest.approx(card.judged) and sorted(older.counts, reverse=True) == list(older.counts)


@pytest.mark.parametrize("tokens", [32, 64, 256])
@pytest.mark.parametrize("first", [None, 0.3, 0.6])
@pytest.mark.parametrize("machine", [*MACHINES, "measured"])
def test_a_useless_drafter_costs_three_percent_of_the_first_answer(machine, first, tokens):
    """Nothing it drafts is ever right, whatever a card of 96 judged positions promises; None: it has no card. In
    virtual time."""
    cost = measured() if machine == "measured" else MACHINES[machine]
    card = None if first is None else small_card(first)
    cards = {} if card is None else {"mtp": card}
    controller = Controller(CostTable.from_json(cost.to_json()), ("mtp", "ngram"), cards)
    answer = Trace("first", "c", "mtp", (0,) * tokens, confidence=((0.9,) * 16,) * tokens)
    replayed = replay([answer], controller, cost)
    assert replayed.seconds["first"] <= 1.03 * plain(answer, cost)
    row = cost.curve("mtp", 1, 64)[1] / cost.curve(None, 1, 64)[0] - 1.0  # of a plain step, for one drafted token
    assert replayed.drafted * row <= 0.03 * tokens + 1.0 and replayed.accepted == 0


def test_a_card_of_many_judged_tokens_is_trusted_from_the_first_cycle():
    card = measure_card(list(read_traces(RECORDED)), "w")
    strong, weak = (
        Controller(measured(), ("mtp",), {"mtp": replace(card, seen=tuple(c * share for c in card.seen))})
        for share in (1.0, 0.01)
    )
    view = DraftContext("a", {"mtp": 16}, 0, 100, 64)
    assert strong.plan([view])[0].k > 2 > weak.plan([view])[0].k
