"""The cost table: what is measured comes back, what is not is sensible, and noise does not move choices."""

import itertools
import random
import statistics

import pytest
from tests.costs import linear
from tests.simulate import NamedController as Controller
from tests.simulate import replay
from tests.traces import synthetic

from outrider.spec.cost import CURVE_LENGTH, CostTable, machine_name
from outrider.spec.plan import VERIFY, CostPart, DraftContext, StepTiming
from outrider.spec.timing import ProbeGrid, TimedDrafter, agrees, measure
from outrider.types import OutriderError

MTP = (TimedDrafter("mtp"),)


class Machine:
    """A clock that only moves when something is run on it."""

    def __init__(self, base=5e-3, row=1e-3, token=4e-4, key=1e-7, compile_s=0.0, noise=0.0):
        self.now = 0.0
        self.base = base
        self.row = row
        self.token = token
        self.key = key
        self.compile_s = compile_s
        self.noise = noise
        self.seen = set()
        self.rng = random.Random(0)

    def seconds(self, part, batch, k, context):
        if part == VERIFY:
            return self.base + self.row * batch * (k + 1) + self.key * batch * context
        return self.token * k

    def probe(self, part, batch, k, context):
        if (part, batch, k) not in self.seen:
            self.now += self.compile_s
            self.seen.add((part, batch, k))
        self.now += self.seconds(part, batch, k, context) * (1.0 + self.noise * self.rng.random())

    def clock(self):
        return self.now


def test_measured_times_come_back_and_the_rest_is_interpolated():
    machine = Machine()
    table = measure(machine.probe, MTP, clock=machine.clock)
    for batch, k, context in [
        (1, 0, 256),
        (1, 5, 256),
        (1, 12, 300),
        (4, 4, 256),
        (3, 2, 256),
        (16, 16, 256),
        (1, 3, 1024),
        (24, 4, 256),
    ]:
        assert table.verify(batch, k, context) == pytest.approx(machine.seconds(VERIFY, batch, k, context), rel=0.03)
    assert table.draft("mtp", 1, 6) == pytest.approx(6 * 4e-4, rel=0.01)
    assert table.free("ngram") and not table.free("mtp")


def test_a_draft_of_one_pass_costs_the_same_whatever_k():
    """By its slope from 0 to 8 tokens a block drafter's 16 were taken to cost twice what 8 do."""
    machine = Machine()
    machine.seconds = lambda part, batch, k, context: Machine.seconds(machine, part, batch, 2, context)
    flat = measure(machine.probe, (TimedDrafter("dflash", one_pass=True),), clock=machine.clock)
    assert {round(flat.draft("dflash", batch, k), 9) for batch in (1, 4, 9) for k in range(1, CURVE_LENGTH)} == {8e-4}
    assert flat.draft("dflash", 1, 0) == 0.0
    probed = [cell for cell in machine.seen if cell[0] == CostPart("draft", "dflash")]
    assert {k for _, _, k in probed} == {4}, "one width says it all"


@pytest.mark.parametrize("base, row, compile_s", [(5e-3, 1e-3, 0.0), (0.1, 0.05, 0.0), (5e-3, 1e-3, 0.2)])
def test_measuring_stays_within_three_seconds(base, row, compile_s):
    machine = Machine(base, row, token=5e-3, compile_s=compile_s)
    table = measure(machine.probe, MTP, clock=machine.clock)
    assert machine.now <= 3.0 * 1.35  # the last cell may overrun by its own first run
    assert table.verify(8, 4, 256) == pytest.approx(machine.seconds(VERIFY, 8, 4, 256), rel=0.3)


def test_a_machine_too_slow_for_the_budget_still_gets_a_table():
    machine = Machine(base=2.0, row=0.5)
    table = measure(machine.probe, (), clock=machine.clock)
    assert table.verify(1, 0, 256) < table.verify(1, 16, 256)


def test_what_compiling_took_is_never_a_time():
    """Kernels that compile for longer than there is to measure: a draft costs what the run after that took, or it would
    never be tried."""
    machine = Machine(compile_s=2.0)
    table = measure(machine.probe, MTP, clock=machine.clock)
    assert table.draft("mtp", 1, 4) == pytest.approx(4 * 4e-4, rel=0.1)
    assert table.verify(1, 0, 256) < 0.01 and table.verify(1, 16, 256) < 0.1


def test_times_never_fall_with_k():
    machine = Machine(noise=0.3)
    table = measure(machine.probe, MTP, clock=machine.clock)
    for batch in (1, 2, 5, 16, 40):
        curve = table.curve("mtp", batch, 700)
        assert len(curve) == CURVE_LENGTH and all(a <= b for a, b in itertools.pairwise(curve))


class Shared(Machine):
    """Beside a busy process: everything takes twice as long, but every fourth step that is short enough is left in
    peace."""

    runs = 0

    def probe(self, part, batch, k, context):
        self.runs += 1
        seconds = self.seconds(part, batch, k, context)
        self.now += seconds if seconds < 7.5e-3 and self.runs % 4 == 0 else 2.0 * seconds


def test_a_table_measured_beside_a_busy_process_has_the_ratios_of_a_quiet_one():
    """By the least samples, as once on GPUs, a short step is timed in peace and a long one disturbed; and there the
    table is trusted at every later start."""
    quiet = Machine()
    busy = Shared()
    table = measure(quiet.probe, MTP, ProbeGrid((1,), (256,)), clock=quiet.clock).curve("mtp", 1, 256)
    beside = measure(busy.probe, MTP, ProbeGrid((1,), (256,)), clock=busy.clock).curve("mtp", 1, 256)
    assert max(abs(beside[k] / beside[0] * table[0] / table[k] - 1.0) for k in range(CURVE_LENGTH)) < 0.03


def test_a_busy_machine_does_not_price_drafts_out():
    """A table measured next to a busy process must lead to the drafts of a quiet one, cycle by cycle."""
    chosen = []
    for machine in (Machine(), Shared()):
        table = measure(machine.probe, MTP, ProbeGrid((1,), (256,)), clock=machine.clock)
        controller = Controller(table, ("mtp",))
        ks = []
        for _ in range(60):
            (choice,) = controller.plan([DraftContext("a", {"mtp": 16}, 0, 200, 256)])
            controller.observe("a", choice.drafter, choice.k, min(choice.k, 3))
            ks.append(choice.k)
        chosen.append(ks)
    quiet, busy = chosen
    assert quiet[-1] >= 2 and abs(sum(quiet) - sum(busy)) <= 0.1 * sum(quiet)


def test_a_slower_machine_moves_the_drift_and_no_ratio():
    table = linear(5e-3, 1e-3, {"mtp": 4e-4})
    before = list(table.curve("mtp", 1, 100))
    for i in range(400):
        table.observe(StepTiming(1, 4, 100, before[4] * (1.0 if i < 200 else 2.0), "mtp"))
    assert table.drift == pytest.approx(0.69, abs=0.05)
    assert table.curve("mtp", 1, 100)[4] / table.curve(None, 1, 100)[0] == pytest.approx(
        before[4] / before[0], rel=0.01
    )


def test_a_wrong_cell_is_corrected_by_contrast():
    """The table believes K = 4 costs 1.55 plain steps; really it costs 1.2. Interleaved steps must find out."""
    table = linear(5e-3, 1e-3, {"mtp": 0.0})
    plain = table.verify(1, 0, 100)
    for _ in range(300):
        table.observe(StepTiming(1, 0, 100, plain, None))
        table.observe(StepTiming(1, 4, 100, 1.2 * plain, "mtp"))
    assert table.curve("mtp", 1, 100)[4] / table.curve("mtp", 1, 100)[0] == pytest.approx(1.2, rel=0.05)


def test_a_cell_three_times_too_slow_is_corrected_within_a_few_hundred_steps():
    true = linear(3e-3, 4e-4, {"mtp": 2e-4})
    times = true.curve("mtp", 1, 100)
    verify = [true.verify(1, k, 100) for k in range(CURVE_LENGTH)]
    verify[4] *= 3.0
    table = CostTable({(1, 0): verify}, {"mtp": {1: [2e-4 * k for k in range(CURVE_LENGTH)]}})
    rng = random.Random(0)
    for i in range(300):
        k = (3, 4)[i % 2]
        table.observe(StepTiming(1, k, 100, times[k] * rng.gauss(1.0, 0.1), "mtp"))
    got = table.curve("mtp", 1, 100)
    assert got[4] / got[3] == pytest.approx(times[4] / times[3], rel=0.15)


def test_a_cell_timed_at_a_busy_moment_does_not_make_wider_ones_expensive():
    """Curves rose with K by taking the largest time so far: two cells that were three times too high cost 30 to 40 % of
    the speed for good, since the wider cells looked as expensive and were never tried."""
    right = [3e-3 + 4e-4 * k for k in range(CURVE_LENGTH)]
    spiked = [seconds * (3.0 if k in (3, 4) else 1.0) for k, seconds in enumerate(right)]
    got = CostTable({(1, 0): spiked}, {}).curve(None, 1, 100)
    assert got == sorted(got) and got[5:] == right[5:] and got[3] == got[4] == right[5]


@pytest.mark.parametrize("wrong", [(4, 4), (1, CURVE_LENGTH)], ids=["K = 4", "every draft"])
def test_choices_recover_from_a_table_measured_at_a_bad_moment(wrong):
    """The controller itself decides what is tried. After the first prompts it must be near the speed of the right
    table, in the middle one of five runs: a single run depends on which drafts happen to be tried."""
    true = linear(3e-3, 4e-4, {"mtp": 2e-4})
    verify = [true.verify(1, k, 100) * (3.0 if wrong[0] <= k <= wrong[1] else 1.0) for k in range(CURVE_LENGTH)]

    def recovered(seed: int) -> float:
        traces = synthetic(40, seed, easiness=(0.55, 0.9), confident=True)
        late = [trace.id for trace in traces[20:]]
        table = CostTable({(1, 0): list(verify)}, {"mtp": {1: [2e-4 * k for k in range(CURVE_LENGTH)]}})
        ours = replay(traces, Controller(table, ("mtp",)), true, noise=0.1, seed=seed)
        best = replay(traces, Controller(true, ("mtp",)), true)
        return sum(best.seconds[i] for i in late) / sum(ours.seconds[i] for i in late)

    assert statistics.median(recovered(seed) for seed in range(5)) > 0.9


def test_a_draft_that_was_dropped_says_nothing_of_plain_steps():
    table = linear(3e-3, 4e-4, {"mtp": 2e-4})
    before = list(table.curve("mtp", 1, 100))
    for i in range(200):
        table.observe(StepTiming(1, i % 2 * 4, 100, before[4] if i % 2 else before[0] + 5 * 2e-4, "mtp"))
    assert table.curve("mtp", 1, 100) == before


def test_a_stored_table_is_checked_by_its_ratios():
    machine = Machine()
    table = measure(machine.probe, MTP, clock=machine.clock)
    spent = machine.now
    assert agrees(table, machine.probe, "mtp", 256, clock=machine.clock)
    assert machine.now - spent < 0.6
    slower = Machine(base=1e-2, row=2e-3, token=8e-4)  # twice as slow in all: the same choices
    assert agrees(table, slower.probe, "mtp", 256, clock=slower.clock)
    wider = Machine(row=3e-3)
    assert not agrees(table, wider.probe, "mtp", 256, clock=wider.clock)


def test_a_true_table_is_kept_beside_a_busy_process():
    machine = Machine()
    busy = Shared()
    table = measure(machine.probe, MTP, ProbeGrid((1,), (256,)), clock=machine.clock)
    assert agrees(table, busy.probe, "mtp", 256, clock=busy.clock)


@pytest.mark.parametrize("whole", [False, True])
def test_a_stored_table_without_a_drafter_is_checked_too(whole):
    """Only n-gram matches: there is no drafter's cell to time, and the drafted cycle is a verify pass."""
    machine = Machine()
    table = measure(machine.probe, (), clock=machine.clock, whole=whole)
    assert agrees(table, machine.probe, None, 256, clock=machine.clock, whole=whole)
    wider = Machine(row=3e-3)
    assert not agrees(table, wider.probe, None, 256, clock=wider.clock, whole=whole)


def test_a_table_or_a_clock_of_zeros_is_measured_again():
    machine = Machine()
    assert not agrees(CostTable({(1, 0): [0.0] * CURVE_LENGTH}, {}), machine.probe, None, 256, clock=machine.clock)
    assert not agrees(linear(5e-3, 1e-3), machine.probe, None, 256, clock=lambda: 0.0)


def test_one_interrupted_step_moves_nothing_much():
    table = linear(5e-3, 1e-3)
    usual = table.verify(1, 0, 100)
    for _ in range(20):
        table.observe(StepTiming(1, 0, 100, usual, None))
    table.observe(StepTiming(1, 0, 100, 50 * usual, None))
    assert abs(table.drift) < 0.03


def test_kept_tables_are_only_used_for_the_same_machine_model_and_version(tmp_path):
    key = f"{machine_name()} model 1"
    table = CostTable(
        {(1, 0): [1.0 + k for k in range(CURVE_LENGTH)]}, {"mtp": {1: [0.1 * k for k in range(CURVE_LENGTH)]}}, key=key
    )
    table.save(tmp_path / "a" / "cost.json")
    again = CostTable.load(tmp_path / "a" / "cost.json", key)
    assert again is not None and again.to_json() == table.to_json()
    assert CostTable.load(tmp_path / "a" / "cost.json", f"{machine_name()} model 2") is None
    assert CostTable.load(tmp_path / "none.json", key) is None
    (tmp_path / "bad.json").write_text('{"verify": 3}')
    assert CostTable.load(tmp_path / "bad.json", key) is None


def test_bad_tables_are_refused_in_one_line():
    with pytest.raises(OutriderError, match="17 finite times"):
        CostTable({(1, 0): [1.0, 2.0]}, {})
    with pytest.raises(OutriderError, match="at least one"):
        CostTable({}, {})


def test_without_figures_it_guesses_and_learns():
    table = CostTable()
    for i in range(200):
        table.observe(StepTiming(1, i % 2 * 4, 100, 7e-3 if i % 2 == 0 else 7.5e-3, "mtp" if i % 2 else None))
    assert table.curve("mtp", 1, 100)[4] / table.curve("mtp", 1, 100)[0] == pytest.approx(7.5 / 7, rel=0.1)
