"""Retry-After tells the expected wait. Catches: a constant, and quick refusals that make places look short."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from types import SimpleNamespace

import pytest

from outrider.server import fair, limits
from outrider.server.errors import ApiError
from outrider.server.fair import FairExecutor, FairGate, WaitEstimate
from outrider.server.limits import Admission
from outrider.server.settings import ServerSettings


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        for module in (fair, limits):
            monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.now))


def test_an_estimate() -> None:
    estimate = WaitEstimate()
    assert estimate.until_free() == 1  # nothing is known
    for _ in range(10):
        estimate.held(60.0, 4)
        estimate.held(0.001, 4)  # refused at once
    assert (estimate.until_free(1), estimate.until_free(3)) == (15, 45)
    for _ in range(40):
        estimate.held(2.0, 4)
    assert estimate.until_free(1) == 1
    estimate.held(1e6, 1)
    assert estimate.until_free(1) == fair.MAX_RETRY_S


def test_a_full_server_tells_when_a_place_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    admission = Admission(ServerSettings("m", max_concurrent=4, max_queued=4))

    def refused(sequences: int, client: str) -> ApiError:
        with pytest.raises(ApiError) as error, admission.enter(sequences, client):
            pass
        return error.value

    for _ in range(20):
        with ExitStack() as places:
            for client in ("a", "b"):
                places.enter_context(admission.enter(4, client))
            clock.now += 80.0
    with ExitStack() as places:
        for client in ("a", "b"):
            places.enter_context(admission.enter(4, client))
        one = refused(1, "c").retry_after
        four = refused(4, "c").retry_after
        assert (
            one is not None and four is not None and 10 <= one <= 20 and 3 * one <= four <= 4 * one
        )  # of eight places 80 s each
    with admission.enter(7, "a"):
        error = refused(1, "a")
        assert (error.code, error.retry_after) == ("client_full", one)


def test_a_gate_and_a_desk_tell_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)

    async def check() -> tuple[int | None, int | None]:
        gate = FairGate(1, 1, "a test")
        seconds = []
        for _ in range(5):
            async with gate.enter("a"):
                clock.now += 7.0
        async with gate.enter("a"):
            waiting = asyncio.ensure_future(gate.acquire("a"))
            await asyncio.sleep(0)
            with pytest.raises(ApiError) as refused:
                await gate.acquire("a")
            seconds.append(refused.value.retry_after)
            waiting.cancel()
        executor = FairExecutor(1, 1)

        def work() -> None:
            clock.now += 9.0

        for _ in range(5):
            await executor.run("a", work)
        first = [asyncio.ensure_future(executor.run("a", work)) for _ in range(8)]
        done = await asyncio.gather(*first, return_exceptions=True)
        seconds.append(next(e.retry_after for e in done if isinstance(e, ApiError)))
        executor.close()
        return seconds[0], seconds[1]

    assert asyncio.run(check()) == (7, 9)
