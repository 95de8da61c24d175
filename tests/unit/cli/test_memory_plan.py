"""`inspect` and `predict` plan a card's memory as the engine does at its start."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from outrider.bench.machines import Hardware, machine
from outrider.cli.memory_plan import LoadedBytes, plan_memory, remedies
from outrider.cli.model_facts import plan_of
from outrider.config import EngineConfig, LoadSettings
from outrider.engine.memory import KVBudget
from outrider.models.builtin_configs import BUILTIN_CONFIGS
from outrider.models.config import ModelConfig
from outrider.ops.backend import GPU_CAPABILITIES

LARGE = "google/gemma-4-31B-it"


def config_of(name: str) -> ModelConfig:
    return ModelConfig.from_hf(BUILTIN_CONFIGS[name])


@pytest.mark.parametrize("engine", [EngineConfig(), EngineConfig(max_batch=10, gpu_memory=0.7, kv_dtype="fp8")])
def test_the_plan_is_the_engines_own(engine: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """`inspect` counted the whole card and no drafter: 189,244 tokens where the server had far fewer."""
    config = config_of(LARGE)
    on = machine("h200")
    loaded = LoadedBytes(weights=61.4e9, drafter=0.94e9, media=1.15e9)
    free = int(on.memory_bytes - loaded.total)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, on.memory_bytes))
    ops = SimpleNamespace(capabilities=GPU_CAPABILITIES)
    target = SimpleNamespace(config=config, ops=ops, device=torch.device("cuda"))
    dtype = torch.float8_e4m3fn if engine.kv_dtype == "fp8" else torch.bfloat16
    served = KVBudget.of(engine, target, dtype, ())  # type: ignore[arg-type]
    plan = plan_memory(config, loaded, on, engine)
    assert (plan.context, plan.tokens) == (served.max_context, served.tokens) and plan.fits


def test_the_gpu_backend_promises_what_is_planned_with() -> None:
    pytest.importorskip("triton")
    from outrider.ops.formats import MODES
    from outrider.ops.triton.ops import TritonOps

    assert TritonOps.capabilities is GPU_CAPABILITIES and GPU_CAPABILITIES.quantizes == tuple(MODES)


def test_drafter_and_encoders_are_counted() -> None:
    on = machine("h100")
    plan = plan_of(LARGE, LoadSettings(), on)
    alone = plan_of(LARGE, LoadSettings(drafter="none", vision=False, audio=False), on)
    assert plan.drafter > 5e8 and plan.media > 1e9 and alone.drafter == alone.media == 0
    assert plan.context < alone.context and plan.granted == int(0.9 * plan.memory)


def test_remedies_make_a_model_fit() -> None:
    """Each named option, set, gives the context that is named next to it."""
    on = machine("rtx4090")
    settings = LoadSettings()

    def planned(changed: LoadSettings):
        return plan_of(LARGE, changed, on)

    assert not planned(settings).fits
    proposals = remedies(settings, planned, has_media=True)
    first = proposals[0]
    assert "--quantize int4" in first.options and first.context > 0 and len(proposals) <= 3
    expected = {"quantize": "int4", "max_batch": 10, "vision": False, "audio": False, "kv_dtype": "fp8"}
    assert first.context == planned(settings.changed({**expected, "gpu_memory": 0.97})).context
    assert any(remedy.options.startswith("--tensor-parallel") for remedy in proposals)


def test_the_table_of_the_gpu_guide_is_the_plan() -> None:
    """docs/gpu.md: maximum context of every size on every card, with the options of the footnotes."""
    guide = (Path(__file__).parents[3] / "docs" / "gpu.md").read_text(encoding="utf-8")
    cards = ("rtx5070ti", "rtx4090", "rtx5090", "l40s", "h100", "h200")
    rows = re.findall(r"^\| (E2B|E4B|12B|26B-A4B|31B) \| [\d.]+ GB \| (.*) \|$", guide, re.MULTILINE)
    assert len(rows) == 5
    for size, cells in rows:
        for card, cell in zip(cards, cells.split(" | "), strict=True):
            number, _, mark = cell.partition(" ")
            settings = LoadSettings()
            if mark == "¹":
                settings = settings.changed({"max_batch": 10})
            plan = plan_of(f"google/gemma-4-{size}-it", settings, machine(card))
            expected = 0 if number == "no" else int(number.replace(",", ""))
            assert plan.context == expected, f"{size} on {card}: {plan.context:,}, in the guide {cell}"


def test_the_guides_footnotes_are_the_plan() -> None:
    few = {"max_batch": 10}
    small = {"quantize": "int4"}
    tight = {**small, **few, "vision": False, "audio": False, "kv_dtype": "fp8", "gpu_memory": 0.97}
    for size, card, changes, context in (
        ("12B", "rtx4090", {"quantize": "int8"}, 99_181),
        ("12B", "rtx5090", few, 190_368),
        ("31B", "l40s", small, 162_551),
        ("31B", "rtx5090", small, 8_742),
        ("31B", "rtx5090", {**small, **few}, 64_691),
        ("31B", "rtx4090", tight, 39_852),
        ("31B", "h100", few, 113_279),
    ):
        plan = plan_of(f"google/gemma-4-{size}-it", LoadSettings().changed(changes), machine(card))
        assert plan.context == context, f"{size} on {card} with {changes}: {plan.context:,}"


def test_predict_and_inspect_promise_the_same_context() -> None:
    """`predict` planned for its --batch alone, so it promised more than `serve` gives."""
    from outrider.cli.model_facts import with_sequences

    on = machine("h100")
    inspected = with_sequences(LoadSettings(), None, on)
    predicted = with_sequences(LoadSettings(), None, on, least=64)
    assert inspected == predicted == LoadSettings()
    assert with_sequences(LoadSettings(), 8, on).engine.max_batch == 10
    assert with_sequences(LoadSettings(), None, on, least=300).engine.max_batch == 302


def test_a_cpu_is_planned_as_a_cpu() -> None:
    small = config_of("google/gemma-4-E2B-it")
    on = Hardware("a laptop", 50, 0.5, 16, is_cpu=True)
    plan = plan_memory(small, LoadedBytes(3.3e9), on, EngineConfig())
    assert plan.fits and plan.context < small.max_context and plan.granted == plan.memory
    assert not plan_memory(small, LoadedBytes(17e9), on, EngineConfig()).fits
