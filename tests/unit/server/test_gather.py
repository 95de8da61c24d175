"""Requests that come at once are waited for, a moment, so that their prompts run together."""

from __future__ import annotations

import asyncio
import time
from contextlib import ExitStack

from tests.server_fakes import FakeEngine, tokenizer

from outrider.engine.engine import Event
from outrider.engine.scheduler import Request
from outrider.server.runner import Runner
from outrider.types import SamplingParams

TOK = tokenizer()


def asked(i: int, max_tokens: int = 8) -> Request:
    return Request(str(i), [7, 8, 9], SamplingParams(max_tokens=max_tokens, seed=i))


class Noted(FakeEngine):
    """Remembers how many requests were there at its steps."""

    def __init__(self, delay: float) -> None:
        super().__init__(TOK, lambda r: "word " * 500, draft=0, delay=delay)
        self.sizes: list[int] = []

    def step(self) -> list[Event]:
        self.sizes.append(len(self.running))
        return super().step()


async def answered(runner: Runner, request: Request) -> None:
    stream = runner.stream([request.id])
    await runner.submit([request], stream)
    while stream.open:
        await stream.next(60)


def test_the_first_step_waits_for_all_who_come_together() -> None:
    async def run(gather_s: float) -> int:
        engine = Noted(0.001)
        runner = Runner(engine, gather_s=gather_s)
        runner.start()
        with ExitStack() as coming:
            for _ in range(5):
                coming.enter_context(runner.expecting())
            first = asyncio.create_task(answered(runner, asked(0)))
            await asyncio.sleep(0.1)  # each is prepared in its time
            while not gather_s and not engine.sizes:
                await asyncio.sleep(0.001)
            others = [asyncio.create_task(answered(runner, asked(i))) for i in range(1, 6)]
            await asyncio.sleep(0)
        await asyncio.gather(first, *others)
        await runner.stop()
        return engine.sizes[0]

    assert asyncio.run(run(120.0)) == 6
    assert asyncio.run(run(0.0)) == 1


def test_nobody_is_waited_for_long_or_by_many() -> None:
    async def run() -> None:
        engine = Noted(0.002)
        runner = Runner(engine, gather_s=0.05)
        runner.start()
        with runner.expecting():  # this one never comes
            began = time.monotonic()
            await asyncio.wait_for(answered(runner, asked(0)), 60)
            assert time.monotonic() - began >= 0.05, "it was waited for once"
        runner._gather_s = 1000.0
        tasks = [asyncio.create_task(answered(runner, asked(i, 1500))) for i in range(1, 7)]
        while runner._outbox.speaking < 6:
            await asyncio.sleep(0.001)
        steps = len(engine.sizes)
        with runner.expecting():  # one beside six
            while len(engine.sizes) < steps + 20 and any(not task.done() for task in tasks):
                await asyncio.sleep(0.001)
        assert len(engine.sizes) > steps
        runner._gather_at = 0.0
        with ExitStack() as coming:
            for _ in range(9):
                coming.enter_context(runner.expecting())
            async with asyncio.timeout(60):
                await runner.stop()  # the end of the server does not wait for them
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(run())
