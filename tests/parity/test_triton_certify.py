"""Certification of the GPU's kernels, through Triton's interpreter where there is no GPU: a kernel broken on purpose
never serves, and a card that nobody compared serves what it certified."""

from __future__ import annotations

import logging
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

CUDA = torch.cuda.is_available()
if not CUDA:
    os.environ["TRITON_INTERPRET"] = "1"

pytest.importorskip("triton")

from outrider.ops import registry  # noqa: E402
from outrider.ops.registry import Certification, Registry, Result  # noqa: E402
from outrider.ops.triton import TritonOps, certify  # noqa: E402
from outrider.ops.triton.card import Card  # noqa: E402
from outrider.ops.triton.gemm_launch import DenseCall  # noqa: E402
from outrider.ops.triton.kernels import DENSE, TABLE  # noqa: E402

DEVICE = "cuda" if CUDA else "cpu"
ROWS = (1, 2, 5)
LINEAR = next(kernel for kernel in TABLE if kernel.name == "linear_kernel")
UNKNOWN = Card("Unheard-of 9000", (8, 6), 46, shared=101376, cuda=False, hopper=False)


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(certify, "cache_root", lambda: tmp_path)


def problems(ops: TritonOps, table: Registry) -> certify.Problems:
    return certify.Problems(
        ops, table, dtype=torch.float32, rows=5, dense_shapes=((48, 64),), quantised_shape=(64, 128), heads=((8, 2, 32),),
        attention_rows=5,
    )  # fmt: skip


def last_row_differs(call: DenseCall) -> Tensor:
    """A sum in another order, in the last of several rows."""
    result = call.linear_launch().run()
    if len(result) > 1:
        result[-1] = torch.nextafter(result[-1], torch.full_like(result[-1], torch.inf))
    return result


def test_a_kernel_broken_on_purpose_is_rejected_and_the_others_agree(caplog: pytest.LogCaptureFixture) -> None:
    broken = replace(
        LINEAR, name="broken", launch=last_row_differs, micros=lambda shape, card: -1.0, runs_on=lambda card: True
    )
    ops = TritonOps(DEVICE, pdl=False)
    ops.registry = Registry((broken, *TABLE), ops.card)
    x = torch.randn(5, 64, device=DEVICE)
    w = torch.randn(48, 64, device=DEVICE)
    assert ops.registry.choose(DENSE, DenseCall(x, w, ops.gemm).shape).name == "broken"
    results = registry.certify(ops.registry, problems(ops, ops.registry).probes(), ROWS)
    certification = Certification("card", "2026-11-19").with_results(results)
    assert certification.rejected == {"broken": "dense 48 x 64 at 2 rows: row 1 has other bits than alone"}
    assert {r.order for r in results} == {"dense product", "quantised product", "attention"}
    with caplog.at_level(logging.WARNING, "outrider"):
        ops.apply(certification)
    assert len(caplog.messages) == 1 and "kernel broken is not used" in caplog.messages[0]
    alone = torch.cat([ops.linear(row, w) for row in x.split(1)])
    assert torch.equal(ops.linear(x, w), alone)
    assert ops.capabilities.independent_rows == TritonOps.capabilities.independent_rows


def test_an_unknown_card_certifies_at_its_first_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was promised the 8,192 independent rows of an H200; its tiles of more than 128 rows add in another order."""
    starts = []

    def child(ops: TritonOps) -> None:
        starts.append(ops)
        result = Result(
            "linear_kernel", "dense product", "dense", defines=True, complete=False, rows=129, note="differs"
        )
        registry.save(Certification(certify.identity(ops), "2026-11-19", (result,)), certify.stored_at(ops))

    monkeypatch.setattr(certify, "certify_in_child", child)
    for _ in range(2):
        ops = TritonOps(DEVICE, pdl=False, card=UNKNOWN)
        certify.apply_certification(ops)
        assert ops.capabilities.independent_rows == 129
        assert "linear_kernel" not in ops.registry.rejected
    assert len(starts) == 1
    known = TritonOps(DEVICE, pdl=False, card=replace(UNKNOWN, name=certify.COMPARED_CARDS[0]))
    certify.apply_certification(known)
    assert known.capabilities.independent_rows == 8192 and len(starts) == 1


def test_a_kernel_that_ends_its_process_does_not_end_the_start(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is tried once: a kernel that hangs would cost ten minutes of every start."""
    starts: list[TritonOps] = []

    def child(ops: TritonOps) -> None:
        starts.append(ops)
        raise subprocess.CalledProcessError(-6, "outrider")

    monkeypatch.setattr(certify, "certify_in_child", child)
    ops = TritonOps(DEVICE, pdl=False, card=UNKNOWN)
    with caplog.at_level(logging.WARNING, "outrider"):
        for _ in range(2):
            certify.apply_certification(ops)
    assert [text for text in caplog.messages if "could not be compared" in text] == caplog.messages[1:]
    assert len(starts) == 1 and "SIGABRT" in certify.failure_file(ops).read_text()


def test_the_child_sees_the_card_at_hand_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    assert certify.visible_device(1) == "6"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert certify.visible_device(1) == "1"


def test_doctor_tells_date_result_and_reason() -> None:
    done = Certification("card", "2026-11-19").with_results(
        [
            Result("linear_kernel", "dense product", "dense", defines=True, complete=True, rows=8192),
            Result(
                "gemm_wgmma", "dense product", "dense", defines=False, complete=False, rows=129, note="row 0 differs"
            ),
        ]
    )
    kernels = {kernel.name: kernel for kernel in TABLE}
    outcomes = {name: certify.outcome(done, kernel) for name, kernel in kernels.items()}
    assert outcomes["linear_kernel"] == f"certified {done.date}: 1 problems, up to 8192 rows"
    assert outcomes["gemm_wgmma"] == f"rejected {done.date}: row 0 differs"
    assert outcomes["expand_kernel"] == "yes, not compared"
