"""A quick start: one command is imported, and torch without its shape rules, which come when somebody needs them."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest

from outrider.cli.main import COMMANDS, app
from outrider.cli.quick import Later, quick_start
from outrider.ops.cpu import build

CHILD = """
import sys
from outrider.cli.main import app
app(("generate",))
assert "outrider.cli.generate" in sys.modules and "outrider.cli.drafters" not in sys.modules and "torch" not in sys.modules
from outrider.cli.quick import RULES, Later, quick_start
with quick_start("cpu"):
    import torch
assert isinstance(sys.modules[RULES], Later) and "torch._refs" not in sys.modules
seeded = torch.rand(2, generator=torch.Generator().manual_seed(1))  # of kernels' certification and random weights
assert "torch._refs" not in sys.modules
layer, x = torch.nn.Linear(4, 3), torch.randn(2, 4)
layer(x).sum().backward()  # what runs and what trains models asks nobody for shapes
table, ids = torch.nn.Embedding(5, 3, device="meta"), torch.zeros(2, dtype=torch.int64, device="meta")
try:
    table(ids)
    raise SystemExit("shapes without rules")
except NotImplementedError:
    pass
assert sys.modules[RULES].register_meta and not isinstance(sys.modules[RULES], Later) and "torch._refs" in sys.modules
assert table(ids).shape == (2, 3)
assert torch.equal(torch.rand(2, generator=torch.Generator().manual_seed(1)), seeded)
"""

FIRST_START = """
from outrider.cli.quick import quick_start
with quick_start("cpu"):
    from outrider.ops import choose
from outrider.ops.cpu.ops import CpuOps
assert isinstance(choose("cpu", "cpu"), CpuOps)
"""


def test_help_of_all_commands_needs_no_torch() -> None:
    """One import at the top of a command made `outrider --help` three times as slow."""
    child = "import sys; from outrider.cli.main import app; app(); assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", child], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr


def test_torch_starts_without_its_shape_rules_and_gets_them_when_asked() -> None:
    done = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr


def test_kernels_are_certified_in_a_quick_start(tmp_path: Path) -> None:
    """A first start without an earlier certification fell back to torch's operators, which are many times slower."""
    library = build.shared_object()
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / library.name).symlink_to(library)
    env = {**os.environ, "OUTRIDER_CACHE": str(tmp_path)}
    command = [sys.executable, "-c", FIRST_START]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert list((tmp_path / "certified").iterdir())


def test_a_stand_in_is_replaced_by_what_it_stands_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "slow_module.py").write_text("answer = 42\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    here = Later("slow_module")
    monkeypatch.setitem(sys.modules, "slow_module", here)
    assert not hasattr(here, "__path__") and sys.modules["slow_module"] is here
    assert here.answer == 42 and sys.modules["slow_module"] is not here


def test_collecting_garbage_goes_on_after_imports() -> None:
    with quick_start("cuda"):
        assert not gc.isenabled()
    assert gc.isenabled()


def test_every_command_is_where_its_name_says() -> None:
    assert [c.name for c in app().registered_commands] == list(COMMANDS)
