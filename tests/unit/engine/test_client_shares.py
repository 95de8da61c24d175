"""Clients share the steps of an engine on a CPU."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from tests.engines import FixedDrafts
from tests.scheduling import CountingCache, next_step

from outrider.engine.prefill_budget import PrefillBudget
from outrider.engine.scheduler import BACKGROUND_EVERY, Scheduler
from outrider.engine.step import Request, Sequence
from outrider.types import SamplingParams


@pytest.mark.parametrize(("streams", "each"), [(0, 1), (1, 1), (2, 2), (3, 3), (6, 3)])
def test_prompts_without_end_get_the_time_of_one_client(streams: int, each: int) -> None:
    """A client's endless prompts next to streams of others get a piece in each step, in every second, or in every
    third. A short prompt of another client does not wait for that."""
    scheduler = Scheduler(CountingCache(9, 10_000), 9, PrefillBudget(512, with_decodes=16), 16, 1 << 30, FixedDrafts())

    def seq(client: str, length: int) -> Sequence:
        return Sequence(Request(client, [1] * length, SamplingParams(max_tokens=99), client=client), 0.0, [1] * length)

    decoding = [seq("many", 2), *(seq(f"stream {i}", 2) for i in range(streams))]
    long = seq("many", 161)
    short = seq("other", 5)
    for one in decoding:
        scheduler.add(one)
    next_step(scheduler)
    for one in decoding:
        one.computed = 1
    scheduler.add(long)
    steps = 0
    while long.computed < 160:
        if steps == 4:
            scheduler.add(short)
        batch = next_step(scheduler)
        steps = steps + 1
        assert len(batch.decode) == len(decoding) and sum(item.num_tokens for item in batch.prompts) <= 16
        if steps == 5:
            assert short in [item.seq for item in batch.prompts]
        for item in batch.prompts:
            item.seq.computed += item.num_tokens
        if short.computed:
            scheduler.remove(short)
            short.computed = 0
    assert 9 * each < steps <= 12 * each


def decoding(client: str, number: int = 0) -> Sequence:
    """A sequence whose prompt is computed once it runs."""
    request = Request(f"{client} {number}", [1] * 2, SamplingParams(max_tokens=999), client=client)
    return Sequence(request, 0.0, [1] * 2)


def test_clients_in_the_background_have_a_part_in_every_fourth_step() -> None:
    scheduler = Scheduler(CountingCache(9, 10_000), 9, PrefillBudget(512, with_decodes=16), 16, 1 << 30, FixedDrafts())
    reader = decoding("reader")
    leaver = decoding("leaver")
    prompt = Sequence(Request("p", [1] * 400, SamplingParams(), client="leaver"), 0.0, [1] * 400)
    for seq in (reader, leaver):
        scheduler.add(seq)
    next_step(scheduler)
    reader.computed = leaver.computed = 1
    scheduler.add(prompt)
    scheduler.background = frozenset({"leaver", "somebody else"})
    for step in range(1, 3 * BACKGROUND_EVERY + 1):
        scheduler.schedule()  # a plan that does not run counts for nothing
        batch = next_step(scheduler)
        part = step % BACKGROUND_EVERY == 0
        assert [row.seq for row in batch.decode] == ([reader, leaver] if part else [reader])
        assert bool(batch.prompts) == part
        for chunk in batch.prompts:
            prompt.computed += chunk.num_tokens
    reader.paused = True  # nobody else wants the time
    assert leaver in [row.seq for row in next_step(scheduler).decode]
    reader.paused = False
    scheduler.background = frozenset()
    assert len(next_step(scheduler).decode) == 2


def test_a_prompt_does_not_wait_for_streams_in_the_background() -> None:
    scheduler = Scheduler(CountingCache(9, 10_000), 9, PrefillBudget(512, with_decodes=16), 16, 1 << 30, FixedDrafts())
    leaver = decoding("leaver")
    scheduler.add(leaver)
    next_step(scheduler)
    leaver.computed = 1
    scheduler.background = frozenset({"leaver"})
    scheduler.add(Sequence(Request("p", [1] * 300, SamplingParams(), client="reader"), 0.0, [1] * 300))
    batch = next_step(scheduler)
    assert [chunk.num_tokens for chunk in batch.prompts] == [299] and not batch.decode


def test_where_rows_are_cheap_nobody_stays_behind() -> None:
    prefill = PrefillBudget(512, with_decodes=512)  # a GPU's
    scheduler = Scheduler(CountingCache(9, 10_000), 9, prefill, 16, 1 << 30, FixedDrafts())
    for client in ("reader", "leaver"):
        scheduler.add(decoding(client))
    scheduler.background = frozenset({"leaver"})
    for chunk in next_step(scheduler).prompts:
        chunk.seq.computed = 1
    assert all(len(next_step(scheduler).decode) == 2 for _ in range(8))


def test_texts_that_are_scored_share_the_time_of_prompts() -> None:
    """A pass of 64 rows ran for each text before every step: seven of one client made others' streams wait for all."""
    prefill = PrefillBudget(512, with_decodes=16, choices=(4, 8, 16))
    scheduler = Scheduler(CountingCache(9, 10_000), 9, prefill, 16, 1 << 30, FixedDrafts())
    assert scheduler.scored_rows("texts", 64) == scheduler.scored_rows("texts", 64) == 64, "nobody else is there"
    reader = decoding("reader")
    scheduler.add(reader)
    assert scheduler.scored_rows("texts", 64) == 16, "it waits for its first step"
    next_step(scheduler)
    reader.computed = 1
    prefill.observe(0, 0.010)
    passes = []
    for step in range(40):
        for client in ("texts", "texts", "texts", "other texts"):
            rows = scheduler.scored_rows(client, 64)
            if rows > 0:
                passes.append((step, client))
                assert rows == 16
                scheduler.charge_scored(client, 0.040)  # four steps
        assert reader in [row.seq for row in next_step(scheduler).decode]
    counts = {client: [c for _, c in passes].count(client) for client in ("texts", "other texts")}
    assert min(counts.values()) >= 4 and sum(counts.values()) <= 12, "together they have the time of the stream"
    assert scheduler.scored_rows("reader", 64) == 64, "its own streams are no others"
    reader.paused = True
    assert scheduler.scored_rows("texts", 64) == 64


def test_where_rows_are_cheap_a_client_has_one_pass_per_step() -> None:
    prefill = PrefillBudget(512, with_decodes=512)  # a GPU's
    scheduler = Scheduler(CountingCache(9, 10_000), 9, prefill, 16, 1 << 30, FixedDrafts())
    scheduler.add(decoding("reader"))
    for chunk in next_step(scheduler).prompts:
        chunk.seq.computed = 1
    for _ in range(4):
        assert [scheduler.scored_rows(client, 64) for client in ("a", "a", "b", "a", "b")] == [64, 0, 64, 0, 0]
        scheduler.charge_scored("a", 1.0)
        assert next_step(scheduler).decode


# ---- a server under attack, by a clock of its own


@dataclass
class Client:
    """Sends its next request a while after the last one ended, or was left."""

    name: str
    prompt: int
    answer: int
    pause_ms: float = 50.0
    patience_ms: float = 1e9  # leaves an answer that takes longer
    wait_until: float = 0.0
    began: float = 0.0
    running: Sequence | None = None
    times: list[float] = field(default_factory=list)


def simulate(clients: list[Client], background: frozenset[str], seconds: float) -> None:
    """Simulates steps with measured costs: SmolLM2 on two cores with AVX-512."""
    prefill = PrefillBudget(512, with_decodes=16, choices=(4, 8, *range(16, 513, 16)))
    scheduler = Scheduler(CountingCache(10, 10**6), 10, prefill, 1, 1 << 30, FixedDrafts())
    scheduler.background = background
    rng = random.Random(1)
    now = 0.0
    number = 0
    while now < 1e3 * seconds:
        for client in clients:
            seq = client.running
            if seq is not None and now - client.began > client.patience_ms:
                scheduler.remove(seq)
                client.running = None
                client.wait_until = now + client.pause_ms
            if client.running is None and now >= client.wait_until:
                number += 1
                tokens = [1] * client.prompt
                request = Request(str(number), tokens, SamplingParams(max_tokens=client.answer), client=client.name)
                client.running = Sequence(request, now, list(tokens))
                client.began = now
                scheduler.add(client.running)
        batch = next_step(scheduler)
        prompt_rows = sum(chunk.num_tokens for chunk in batch.prompts)
        decode_ms = 1.25 + 0.41 * len(batch.decode) if batch.decode else 0.0
        prompt_ms = 1.4 + 0.41 * prompt_rows if prompt_rows else 0.0
        now += decode_ms + prompt_ms or 1.0
        if batch.decode:
            prefill.observe(0, decode_ms)
            if prompt_rows:
                prefill.observe(prompt_rows, decode_ms + prompt_ms)
        for chunk in batch.prompts:
            chunk.seq.computed += chunk.num_tokens
        for row in batch.decode:
            row.seq.tokens.append(1)
            row.seq.computed += 1
        for client in clients:
            seq = client.running
            if seq is not None and seq.remaining == 0:
                scheduler.remove(seq)
                client.times.append(now - client.began)
                client.running = None
                client.wait_until = now + client.pause_ms * rng.uniform(0.5, 1.5)


def slowest(num_prompting: int, background: frozenset[str]) -> float:
    """p99 of a client that reads its answers, beside attackers and clients that send prompts all the time."""
    reader = Client("reader", prompt=14, answer=32)
    unread = Client("unread", 14, 10**6)
    leaver = Client("leaver", 20, 200, 100.0, patience_ms=175.0)
    odd = Client("odd", 14, 4, 20.0, patience_ms=50.0)
    prompting = [Client(f"prompts {i}", 30, 1, 5.0) for i in range(num_prompting)]
    simulate([reader, unread, leaver, odd, *prompting], background, 60.0)
    assert unread.running is not None and len(unread.running.tokens) > 1000, "it goes on, too"
    assert all(len(client.times) > 100 for client in prompting)
    return sorted(reader.times)[int(0.99 * len(reader.times))]


def alone() -> float:
    reader = Client("reader", prompt=14, answer=32)
    simulate([reader], frozenset(), 10.0)
    return max(reader.times)


@pytest.mark.parametrize(("num_prompting", "most"), [(0, 1.6), (1, 2.0), (2, 2.2), (4, 2.7)])
def test_a_client_that_reads_keeps_its_share_under_attack(num_prompting: int, most: float) -> None:
    """Without the background, and with prompts charged for their rows, it was 2.5 to 4.7 times its time alone."""
    attacked = slowest(num_prompting, frozenset({"unread", "leaver", "odd"}))
    assert attacked <= most * alone()
    assert attacked < 0.7 * slowest(num_prompting, frozenset())
