"""The toys of docs/extending.md, run as they are printed there."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from tests.engines import VOCAB, request, run, tiny_engine
from tests.unit.ops import ternary

PAGE = Path(__file__).resolve().parents[3] / "docs" / "extending.md"
TOYS = {
    name: source
    for name, source in re.findall(r"<!-- toy: (\w+) -->\n```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
}
PROMPT = [3, 5, 7, 9, 11, 3, 5, 7, 9, 13]


@pytest.fixture
def toy(request: pytest.FixtureRequest) -> Iterator[Any]:
    """The module that a block of the page makes."""
    name = f"toy_{request.param}"
    module = ModuleType(name)
    sys.modules[name] = module  # dataclasses look their module up
    exec(compile(TOYS[request.param], f"{PAGE.name}: {request.param}", "exec"), module.__dict__)
    yield module
    del sys.modules[name]


def test_every_block_that_imports_is_a_toy() -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    assert [block for block in blocks if "import " in block] == list(TOYS.values())


@pytest.mark.parametrize("toy", ["drafter"], indirect=True)
@pytest.mark.parametrize("graphs", [False, True])
def test_a_toy_drafter_changes_no_token(toy: Any, graphs: bool) -> None:
    engine = tiny_engine("llama", toy.RepeatDrafter(), graphs=graphs)
    jobs = [request("a", PROMPT, drafter="repeat"), request("b", PROMPT[2:], drafter="repeat", temperature=2.0, seed=3)]
    assert run(engine, jobs) == run(tiny_engine("llama"), jobs_without_drafts(jobs))
    assert engine.metrics.drafted > 0 and engine.metrics.drafter_failures == 0


def jobs_without_drafts(jobs: list[Any]) -> list[Any]:
    return [type(job)(job.id, job.prompt, job.params, 0, False) for job in jobs]


@pytest.mark.parametrize("toy", ["sampling"], indirect=True)
@pytest.mark.parametrize("graphs", [False, True])
def test_a_toy_sampling_option_is_enforced_with_drafts(toy: Any, graphs: bool) -> None:
    option = toy.AllowedTokens((4, 7, 33, 60), VOCAB)
    jobs = [request("a", PROMPT, k=4, grammar=option, temperature=1.5, seed=2), request("b", PROMPT, k=4)]
    engine = tiny_engine("llama", graphs=graphs)
    tokens = run(engine, jobs)
    assert set(tokens["a"]) <= {4, 7, 33, 60} and len(set(tokens["a"])) > 1
    assert tokens == run(tiny_engine("llama"), jobs_without_drafts(jobs))
    assert engine.metrics.drafted > 0


@pytest.mark.parametrize("toy", ["format"], indirect=True)
def test_a_toy_format_has_the_values_of_its_definition(toy: Any) -> None:
    weight = ternary.Ternary().quantise(torch.randn(6, 20))
    stored = toy.read("q_proj", weight.shape, weight.tensors)
    assert torch.equal(stored.format.dequantise(stored), weight.format.dequantise(weight))
    assert toy.ternary({})("model.layers.0.q_proj") is toy.TERNARY


@pytest.mark.parametrize("toy", ["program"], indirect=True)
def test_a_toy_program_runs_what_it_supports(toy: Any) -> None:
    """Steps with a sampled sequence run in the next program."""
    engine = tiny_engine("llama", k=0)
    program = toy.GreedyProgram(engine.runner)
    engine.executors.insert(0, program)
    batches: list[int] = []
    launch = program.launch

    def recorded(plan: Any) -> Any:
        batches.append(len(plan.batch.decode))
        return launch(plan)

    program.launch = recorded
    jobs = [request("a", PROMPT), request("b", PROMPT[3:]), request("c", PROMPT, temperature=1.0, max_tokens=6)]
    assert run(engine, jobs) == run(tiny_engine("llama", k=0), jobs)
    assert max(batches) == 2
