"""The harness: every cell once, whatever interrupts it; figures by hand."""

import json
from itertools import islice

import pytest
from tests.unit.bench.fakes import FakeLLM

from outrider.bench import report
from outrider.bench.harness import PLAIN, DraftMode, Ours, Store, groups, read_cells, run, total
from outrider.prompts import Prompt
from outrider.types import OutriderError

PROMPTS = [Prompt(f"{c}/{i}", c, "word " * (i + 3), 12 + i) for c in ("qa", "haiku") for i in range(3)]


def settings(**changes):
    base = dict(model="m", suite="quick", contestants=(PLAIN, "x/K=4", "x/auto"), temperatures=(0.0,), batches=(1,), repeats=2,
                prompts=6, seed=0, machine="test", version="0")  # fmt: skip
    return {**base, **changes}


def contestants(llm):
    modes = (DraftMode(PLAIN, "x", 0), DraftMode("x/K=4", "x", 4), DraftMode("x/auto", "x", None))
    return [Ours(mode, llm) for mode in modes]


def test_an_interrupted_run_resumes_without_repeating(tmp_path):
    chosen = settings()
    whole = total(chosen, PROMPTS)
    llm = FakeLLM()
    list(islice(run(contestants(llm), PROMPTS, chosen, Store(tmp_path / "r", chosen, False)), 13))
    first = llm.engine.runs
    with (tmp_path / "r" / "cells.jsonl").open("a") as file:
        file.write('{"contestant": "x/au')  # killed in the middle of a line
    again = FakeLLM()
    ticks = list(run(contestants(again), PROMPTS, chosen, Store(tmp_path / "r", chosen, True)))
    cells = list(read_cells(tmp_path / "r"))
    assert len(cells) == len({c.key for c in cells}) == whole == 36
    assert ticks.count(None) == 13 and len(ticks) == whole
    assert first - 3 + again.engine.runs - 3 == whole  # each process warms its three contestants up once
    assert set(run(contestants(again), PROMPTS, chosen, Store(tmp_path / "r", chosen, True))) == {None}
    assert len(list(read_cells(tmp_path / "r"))) == whole


def test_a_folder_belongs_to_one_run(tmp_path):
    Store(tmp_path, settings(repeats=5), False)  # it failed before its first cell: nothing is lost by another
    Store(tmp_path, settings(), False)
    (tmp_path / "cells.jsonl").write_text("{}\n")
    with pytest.raises(OutriderError, match="--resume"):
        Store(tmp_path, settings(), False)
    with pytest.raises(OutriderError, match="another repeats: 2, now 3"):
        Store(tmp_path, settings(repeats=3), True)


def test_contestants_take_turns(tmp_path):
    chosen = settings()
    cells = run(contestants(FakeLLM()), PROMPTS, chosen, Store(tmp_path, chosen, False))
    order = [(c.group, c.repeat, c.contestant) for c in cells]
    for i in range(0, len(order), 3):
        assert len({e[:2] for e in order[i : i + 3]}) == 1 and len({e[2] for e in order[i : i + 3]}) == 3
    assert {order[i][2] for i in range(0, len(order), 3)} == {PLAIN, "x/K=4", "x/auto"}  # nobody always comes first


def test_groups_are_of_one_category_and_full():
    result = groups(PROMPTS, 2)
    assert [len(g) for g in result] == [2, 2, 2, 2]
    assert all(len({p.category for p in g}) == 1 for g in result)


def figures(tmp_path, llm, **changes):
    chosen = settings(**changes)
    ran = list(run(contestants(llm), PROMPTS, chosen, Store(tmp_path, chosen, False)))
    cells = list(read_cells(tmp_path))
    assert cells == ran
    return cells, {(r.contestant, r.category): r for r in report.summarise(cells)}


def test_figures(tmp_path):
    _, rows = figures(tmp_path, FakeLLM())
    assert rows[PLAIN, "all"].ms_per_token == pytest.approx(10.0)
    assert rows["x/auto", "all"].speedup == pytest.approx(2.0) and rows["x/auto", "qa"].low == pytest.approx(2.0)
    four = rows["x/K=4", "haiku"]
    assert four.speedup == pytest.approx(1.25) and four.tokens_per_second == pytest.approx(125.0)
    assert (
        four.acceptance == pytest.approx(0.5)
        and four.tokens_per_cycle == pytest.approx(3.0)
        and four.by_position == (0.5,) * 4
    )
    assert four.identical == 1.0 and four.ttft_ms == pytest.approx(10.0)


def test_another_text_is_seen(tmp_path):
    _, rows = figures(tmp_path, FakeLLM(wrong=True))
    assert rows["x/auto", "all"].identical == 0.0


def test_intervals_hold_the_truth_and_widen_with_noise():
    def pair(ratio):
        return (report._Median(1.0, 100, ""), report._Median(1.0 / ratio, 100, ""))

    narrow = [pair(1.5 + 0.01 * (i % 3)) for i in range(30)]
    wide = [pair(1.0 + 0.5 * (i % 3)) for i in range(30)]
    for pairs in (narrow, wide):
        middle, low, high = report._interval(pairs)
        assert low <= middle <= high
    assert report._interval(wide)[2] - report._interval(wide)[1] > 5 * (
        report._interval(narrow)[2] - report._interval(narrow)[1]
    )


def test_report(tmp_path):
    cells, _ = figures(tmp_path / "run", FakeLLM(), batches=(1, 2))
    rows = report.summarise(cells)
    info = json.loads((tmp_path / "run" / "run.json").read_text())
    page = report.html(info, rows, "outrider bench <x>")
    assert "outrider bench &lt;x&gt;" in page and all(f"<dt>{name}</dt>" in page for name in report.COLUMNS)
    assert f"{info['prompts']} of {info['suite']}" in page and page.count("<div") == page.count("</div>") == 4
    assert page.count("<svg") == 2 and "http" not in page.replace("http://www.w3.org/2000/svg", "")
    assert page.count("linear-gradient(") == 18, "a bar in each row's speed-up"
    assert [(title, len(some)) for title, some in report.by_setting(rows)] == [
        ("temperature 0, batch 1", 9),
        ("temperature 0, batch 2", 9),
    ]
