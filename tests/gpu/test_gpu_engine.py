"""The GPU checks under pytest; they run without it too (benchmarks/gpu_suite.py)."""

from __future__ import annotations

import os

import pytest
import torch
from tests.gpu import checks

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    checks.warm_up()


def test_a_cycle_is_one_launch() -> None:
    checks.one_launch()


def test_the_engine_emits_what_plain_decoding_emits() -> None:
    checks.engine_tokens()


@pytest.mark.parametrize("size", checks.LAYERS)
def test_rows_stand_alone(size: str) -> None:
    checks.prefill_idle(size)


@pytest.mark.parametrize("size", ["E2B", "26B-A4B", "31B"])
def test_64_sequences_and_prompts_as_alone(size: str) -> None:
    checks.crowd(size)


def test_preemption_changes_nothing() -> None:
    checks.preempted()


@pytest.mark.parametrize("size", ["E2B", "31B"])
def test_logits_at_batches_to_256(size: str) -> None:
    checks.batches(size)


def test_64_mixed_requests_as_alone() -> None:
    checks.mixed()


@pytest.mark.parametrize("size", checks.LAYERS)
def test_bitwise_equality(size: str) -> None:
    checks.equality(size)


@pytest.mark.parametrize("kind", ["bfloat16", "float32"])
@pytest.mark.parametrize("size", checks.LAYERS)
def test_against_transformers(size: str, kind: str) -> None:
    pytest.importorskip("transformers")
    checks.parity(size, kind)


def test_memory_beside_weights_and_cache() -> None:
    checks.memory()


@pytest.mark.skipif(not os.environ.get("OUTRIDER_SMOLLM2"), reason="OUTRIDER_SMOLLM2 names no .gguf")
def test_smollm2() -> None:
    print(checks.smollm2())


@pytest.mark.skipif(not os.environ.get("OUTRIDER_SMOLLM2"), reason="OUTRIDER_SMOLLM2 names no .gguf")
def test_a_block_drafter_from_a_folder() -> None:
    print(checks.block_drafter())
