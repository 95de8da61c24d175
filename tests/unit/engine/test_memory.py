"""Context by default: what the model knows and the memory holds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.engines import VARIANTS, request, tiny_engine

from outrider.config import EngineConfig
from outrider.engine import memory
from outrider.engine.memory import (
    CPU_KV_BYTES,
    UNKNOWN,
    KVBudget,
    captured_bytes,
    container_bytes,
    free_bytes,
    penalty_bytes,
    plan_kv_memory,
)
from outrider.engine.prefill_budget import max_batched_prefill, prefill_idle, prefill_with_decodes
from outrider.models.builtin_configs import BUILTIN_CONFIGS
from outrider.models.config import ModelConfig
from outrider.models.inspect import work_bytes
from outrider.spec.slot_sampling import SamplingFeatures, SlotSampling
from outrider.types import OutriderError

LLAMA = ModelConfig.from_hf({**VARIANTS["llama"], "max_position_embeddings": 32768})
PER_TOKEN = 2 * 2 * 2 * 8 * 4  # K and V, two layers, two heads of 8, float32
PLENTY = 1 << 40


def test_the_default_is_all_the_model_knows_where_memory_allows() -> None:
    assert plan_kv_memory(EngineConfig(), LLAMA, torch.float32, PLENTY).max_context == 32768
    huge = ModelConfig.from_hf({**VARIANTS["llama"], "max_position_embeddings": 1 << 30})
    scarce = plan_kv_memory(EngineConfig(max_batch=1), huge, torch.float32, CPU_KV_BYTES * 2)
    assert scarce.max_context == CPU_KV_BYTES // PER_TOKEN - 32 and scarce.tokens * PER_TOKEN <= CPU_KV_BYTES
    assert plan_kv_memory(EngineConfig(max_batch=1), huge, torch.float32, PLENTY).max_context * PER_TOKEN <= PLENTY // 8


def test_what_is_asked_for_is_given_up_to_the_models_own_limit() -> None:
    assert plan_kv_memory(EngineConfig(max_context=100), LLAMA, torch.float32, PLENTY).max_context == 100
    assert plan_kv_memory(EngineConfig(max_context=1 << 20), LLAMA, torch.float32, PLENTY).max_context == 32768


def test_more_than_the_memory_is_refused_in_one_line() -> None:
    with pytest.raises(OutriderError, match=r"32768 tokens of context need .* GiB .* lower --max-context"):
        plan_kv_memory(EngineConfig(max_context=32768), LLAMA, torch.float32, 1 << 20)
    windows = ModelConfig.from_hf(VARIANTS["mistral"])  # every layer slides: its K/V does not grow
    assert plan_kv_memory(EngineConfig(max_context=4096), windows, torch.float32, 1 << 10).max_context == 4096


def test_a_gpu_is_divided_between_windows_and_whole_contexts() -> None:
    """31B on an H200, 90 % of its 139.8 GiB: 61.4 GB of weights, a drafter and the driver, what steps and captured
    passes need. It held 4,096 positions for all users together, and 38 sequences of 8k when 69 GB were taken for
    granted here."""
    large = ModelConfig.from_hf(dict(BUILTIN_CONFIGS["google/gemma-4-31B-it"]))
    left = int(0.9 * 139.8 * 2**30 - 61.4e9 - 1.6e9) - work_bytes(large.vocab_size, 2048) - captured_bytes(large, 256)
    left -= penalty_bytes(254, large.vocab_size)
    got = plan_kv_memory(EngineConfig(), large, torch.bfloat16, 0, batch=254, budget=left)
    assert got.max_context == 262144 and got.tokens >= 262144 and got.tokens >= 40 * 8192
    assert got.window_tokens is not None and got.window_tokens >= 40 * (1024 + 17)
    full = 10 * 2 * 4 * 512 * 2
    sliding = 50 * 2 * 16 * 256 * 2
    assert got.tokens * full + got.window_tokens * sliding <= left
    few = plan_kv_memory(EngineConfig(max_context=4096), large, torch.bfloat16, 0, batch=4, budget=69 * 10**9)
    assert few.tokens == 4 * 4096 + 32, "no more than can be used"
    small = plan_kv_memory(EngineConfig(), large, torch.bfloat16, 0, batch=256, budget=4 * 10**9)
    assert 4096 < small.max_context < 262144, "less memory, less context"
    with pytest.raises(OutriderError, match="lower --max-context"):
        plan_kv_memory(EngineConfig(max_context=200_000), large, torch.bfloat16, 0, batch=8, budget=4 * 10**9)
    flat = plan_kv_memory(EngineConfig(), LLAMA, torch.float32, 0, batch=4, budget=1 << 30)
    assert (flat.max_context, flat.tokens, flat.window_tokens) == (32768, 4 * 32768 + 32, None)


def test_free_memory_is_known_here() -> None:
    assert 0 < free_bytes(torch.device("cpu")) < 1 << 50


@pytest.mark.parametrize(
    ("limit", "used", "stat", "file"),
    [("memory.max", "memory.current", "memory.stat", "file"),
     ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_cache")],
)  # fmt: skip
def test_the_limit_of_a_container_counts_and_files_in_memory_do_not(
    tmp_path: Path, limit: str, used: str, stat: str, file: str
) -> None:
    assert container_bytes(tmp_path) == UNKNOWN
    (tmp_path / limit).parent.mkdir(exist_ok=True)
    for name, text in ((limit, "4000000"), (used, "3000000\n"), (stat, f"anon 1000000\n{file} 2000000\n")):
        (tmp_path / name).write_text(text)
    assert container_bytes(tmp_path) == 3_000_000
    (tmp_path / limit).write_text("500000")
    assert container_bytes(tmp_path) == 0
    (tmp_path / limit).write_text("max")
    assert container_bytes(tmp_path) == UNKNOWN


def test_a_long_prompt_runs_by_default_and_too_long_a_one_says_what_to_do() -> None:
    engine = tiny_engine(max_context=None, page_size=32, prefill_chunk=512)
    engine.validate(request("a", [2] * 10_000))
    with pytest.raises(OutriderError, match=r"prompt has 20000 tokens; the context holds 16384: shorten it$"):
        engine.validate(request("a", [2] * 20_000))
    with pytest.raises(
        OutriderError, match=r"context holds 512: shorten it or raise --max-context \(the model knows up to 16384\)"
    ):
        tiny_engine().validate(request("a", [2] * 600))


def test_small_models_take_more_prompts_at_once() -> None:
    """A pass of a large one would hold running streams up for longer than a quarter of a second."""
    rows = {
        size: max_batched_prefill(ModelConfig.from_hf(BUILTIN_CONFIGS[f"google/gemma-4-{size}-it"]), 8192)
        for size in ("E2B", "12B", "26B-A4B", "31B")
    }
    assert rows == {"E2B": 8192, "12B": 4096, "26B-A4B": 8192, "31B": 2048}
    assert max_batched_prefill(ModelConfig.from_hf(BUILTIN_CONFIGS["google/gemma-4-31B-it"]), 0) == 0, (
        "where prompts run one by one they still do"
    )
    beside = {
        size: prefill_with_decodes(ModelConfig.from_hf(BUILTIN_CONFIGS[f"google/gemma-4-{size}-it"]), 512, 1.5e12, 1024)
        for size in ("E2B", "E4B", "31B")
    }
    assert beside == {"E2B": 1024, "E4B": 512, "31B": 512}
    assert prefill_with_decodes(ModelConfig.from_hf(BUILTIN_CONFIGS["google/gemma-4-E2B-it"]), 16, 0.0, 512) == 16, (
        "a CPU says how many, whatever the model"
    )
    large = ModelConfig.from_hf(BUILTIN_CONFIGS["google/gemma-4-31B-it"])
    rows = {gib: prefill_idle(large, 2048, 8192, gib << 30) for gib in (0, 2, 4, 14)}
    assert rows == {0: 2048, 2: 2048, 4: 4096, 14: 8192}, "a card with little room to spare takes no larger passes"
    assert prefill_idle(large, 0, 0, 0) == 0


def test_captured_passes_are_counted() -> None:
    """They were not, and what they hold was missing from the memory that is left for work."""
    small, large = (ModelConfig.from_hf(dict(BUILTIN_CONFIGS[f"google/gemma-4-{size}-it"])) for size in ("E2B", "31B"))
    assert captured_bytes(small, 0) == 0
    assert 77 << 20 < captured_bytes(small, 2048) < 1 << 30
    assert 307 << 20 < captured_bytes(large, 256) < 1 << 30


def test_tables_of_penalties_are_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first request with penalties allocates tables for every slot: 340 MB at 257 rows of 262,144 tokens."""
    tables = SlotSampling(9, 64, (), torch.device("cpu"))
    tables.grow(SamplingFeatures(penalties=True))
    penalties = tables.penalties
    assert penalties is not None
    allocated = penalties.in_prompt.nbytes + penalties.counts.nbytes
    gathered = allocated * 8 // 9
    assert penalty_bytes(8, 64) == allocated + gathered
    seen: list[int] = []

    def planned(*_: object, free: int, **__: object) -> KVBudget:
        seen.append(free)
        return KVBudget(64, 128)

    monkeypatch.setattr(memory, "free_bytes", lambda device: 1 << 30)
    monkeypatch.setattr(memory, "plan_kv_memory", planned)
    tiny_engine("llama")
    assert seen == [(1 << 30) - penalty_bytes(8, 64)]
