"""Which clients give way: what they leave unread counts, what they read is taken off, and all is forgotten in time."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from outrider.server import standing
from outrider.server.standing import HALF_LIFE_S, MAX_CLIENTS, TOLERATED, Standing


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(standing, "time", SimpleNamespace(monotonic=clock.monotonic))
    return clock


def test_who_stops_an_answer_now_and_then_is_not_in_the_background(clock: Clock) -> None:
    clients = Standing()
    for _ in range(100):
        clients.left("reader", unread_tokens=0)
        clients.read("reader")
        clock.now += 1.0
    assert not clients.background()
    clients.left("reader", unread_tokens=40)
    assert not clients.background()


def test_an_unread_stream_and_answers_left_are_remembered_for_a_while(clock: Clock) -> None:
    clients = Standing()
    clients.left("unread", unread_tokens=128)
    for _ in range(20):
        clients.left("leaver", unread_tokens=0)
    assert clients.background() == {"unread", "leaver"}
    clock.now += HALF_LIFE_S
    assert clients.background() == {"leaver"}
    clock.now += HALF_LIFE_S
    assert not clients.background()
    clients.left("leaver", unread_tokens=0)
    assert not clients.background()


def test_who_reads_comes_back(clock: Clock) -> None:
    clients = Standing()
    for _ in range(10):
        clients.unused("client")
    assert clients.background() == {"client"}
    clients.read("client")
    clients.read("client")
    assert not clients.background()


def test_invented_clients_take_no_memory(clock: Clock) -> None:
    clients = Standing()
    for i in range(2 * MAX_CLIENTS):
        clients.read(f"reader {i}")
        clients.unused(f"client {i}")
        clock.now += 0.001
    assert len(clients._waste) == MAX_CLIENTS and not clients._until
    for i in range(3 * int(TOLERATED)):
        clients.left(f"client {i % 2}", unread_tokens=8)
    assert clients.background() == {"client 0", "client 1"}
