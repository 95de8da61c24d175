"""The ingress before replicas that die, leave, are full or are not there: what clients see of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from starlette.types import Message
from tests.server_fakes import VOCAB, FakeEngine, tokenizer
from tests.waiting import PATIENCE

from outrider.cluster.ingress import Forward, Ingress, ReplicaLost, ReplicaRefused
from outrider.cluster.owner import owner_of, replica_tag
from outrider.cluster.replica import Replica
from outrider.cluster.totals import MAX_GONE, Snapshot, Totals
from outrider.server.batch import receiving
from outrider.server.errors import MAX_MEMBERS
from outrider.server.model_info import ServedModel
from outrider.server.settings import ServerSettings

CHAT = {"model": "fake", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 40, "seed": 3}


class Pair:
    """Two real replicas with scripted engines; `plan` says what happens to each request in turn."""

    def __init__(self, *plan: str) -> None:
        self.replicas: list[Replica] = []
        self.plan = list(plan)
        self.sent: list[str] = []
        self.there = 2

    @asynccontextmanager
    async def up(self, hold: int | None = None, **settings: Any) -> AsyncIterator[Ingress]:
        tok = tokenizer()
        self.replicas = [
            Replica(
                n,
                ServedModel(FakeEngine(tok, hold=hold), tok, VOCAB, 2048, ""),
                ServerSettings(model_name="fake", host="0.0.0.0"),
            )
            for n in "ab"
        ]
        for replica in self.replicas:
            await replica.start()
        front = ServerSettings(**{"model_name": "fake", **settings})
        try:
            yield Ingress(self, front, retries=2, wait=0.5)
        finally:
            for replica in self.replicas:
                await replica.stop()

    async def send(self, request: Forward) -> AsyncIterator[str | list[Message]]:
        fate = self.plan.pop(0) if self.plan else ""
        self.sent.append(fate)
        if fate == "full":
            raise ReplicaRefused
        if fate == "nobody":
            raise TimeoutError
        if fate == "silence":
            await asyncio.sleep(60)
        if fate == "dead":
            raise ReplicaLost
        replica = self.replicas[len(self.sent) % 2]
        yield replica.name
        if fate == "dies unseen":
            raise ReplicaLost
        if fate == "leaves":
            replica._server.admission.closing = True
        async for batch in replica.answer(request):
            bodies = [i for i, m in enumerate(batch) if m["type"] == "http.response.body"]
            if fate == "dies" and bodies:
                yield batch[: bodies[0] + 1]
                raise ReplicaLost
            yield batch

    async def snapshots(self) -> list[Snapshot]:
        return [r.snapshot() for r in self.replicas[: self.there]]

    async def gather(self, request: Forward) -> list[tuple[int, bytes]]:
        return [await r.whole(request) for r in self.replicas[: self.there]]


async def ask(
    ingress: Ingress,
    body: object = None,
    path: str = "/v1/chat/completions",
    leave_after: int | None = None,
    method: str = "POST",
    **headers: str,
) -> tuple[int, dict[str, str], bytes]:
    """One request through ASGI: status, headers, body. `leave_after`: the client is gone after so many messages."""
    raw = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    sent: list[Message] = []
    gone = asyncio.Event()

    async def send(message: Message) -> None:
        sent.append(message)
        if leave_after is not None and len(sent) >= leave_after:
            gone.set()

    named = [
        (k.replace("_", "-").encode(), v.encode())
        for k, v in {"host": "127.0.0.1", "content_type": "application/json", **headers}.items()
    ]
    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "query_string": b"",
        "headers": named,
        "client": ("10.0.0.1", 1),
    }
    await asyncio.wait_for(ingress(scope, receiving(raw, gone), send), PATIENCE)
    if not sent:
        return 0, {}, b""
    seen = [k.decode() for k, _ in sent[0]["headers"]]
    assert len(seen) == len(set(seen)), f"a header twice: {seen}"
    return (
        sent[0]["status"],
        {k.decode(): v.decode() for k, v in sent[0]["headers"]},
        b"".join(m.get("body", b"") for m in sent[1:]),
    )


def text_of(body: bytes) -> str:
    return str(json.loads(body)["choices"][0]["message"]["content"])


def events(body: bytes) -> list[Any]:
    return [json.loads(line[6:]) for line in body.decode().splitlines() if line.startswith("data: {")]


def value(ingress: Ingress, name: str) -> float:
    sample = ingress.registry.get_sample_value(name)
    assert sample is not None
    return sample


def test_answers_and_refusals_are_a_single_servers() -> None:
    async def run() -> None:
        async with Pair().up() as ingress:
            status, headers, body = await ask(ingress, CHAT)
            assert status == 200 and headers["x-outrider-replica"] in "ab" and headers["x-request-id"] and text_of(body)
            status, _, streamed = await ask(ingress, {**CHAT, "stream": True})
            assert "".join(e["choices"][0]["delta"].get("content", "") for e in events(streamed)) == text_of(body)
            status, _, body = await ask(ingress, {"nope": 1})
            assert status == 400 and json.loads(body)["error"]["code"] == "unknown_field"
            assert (await ask(ingress, path="/v1/models", method="GET"))[0] == 200
            assert (await ask(ingress, CHAT, host="elsewhere.example"))[0] == 403

    asyncio.run(run())


def test_deaths_before_the_first_byte_are_not_seen() -> None:
    async def run() -> None:
        pair = Pair("", "dead", "dies unseen", "", "leaves", "")
        async with pair.up() as ingress:
            expected = text_of((await ask(ingress, CHAT))[2])
            status, _, body = await ask(ingress, CHAT)
            assert status == 200 and text_of(body) == expected and len(pair.sent) == 4
            assert value(ingress, "outrider_cluster_retries_total") == 2
            status, _, body = await ask(ingress, CHAT)  # the first one shuts down: its 503 is not the cluster's
            assert status == 200 and text_of(body) == expected and len(pair.sent) == 6

    asyncio.run(run())


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/api/chat", "/v1/responses"])
def test_a_death_in_a_stream_ends_it_with_an_error_event(path: str) -> None:
    async def run() -> None:
        pair = Pair("dies")
        async with pair.up() as ingress:
            request: dict[str, object] = {"model": "fake", "stream": True}
            request |= {"input": "hi"} if "responses" in path else {"messages": CHAT["messages"]}
            request |= {"max_tokens": 400} if "messages" in path else {}
            status, _, body = await ask(ingress, request, path)
            last = body.decode().strip().splitlines()[-1].removeprefix("data: ")
            assert status == 200 and "replica that wrote this answer is gone" in last and json.loads(last)
            assert len(pair.sent) == 1 and value(ingress, "outrider_cluster_broken_streams_total") == 1
            assert await settled(pair)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("plan", "status", "code"),
    [
        (("dead",) * 3, 503, "no_replica"),
        (("nobody",), 503, "no_replica"),
        (("silence",), 503, "no_replica"),
        (("full",), 429, "server_full"),
        (("dead", "full"), 429, "server_full"),
    ],
)
def test_nobody_there_is_a_clean_refusal(plan: tuple[str, ...], status: int, code: str) -> None:
    async def run() -> None:
        async with Pair(*plan).up() as ingress:
            told, headers, body = await ask(ingress, {**CHAT, "stream": True})
            assert (told, json.loads(body)["error"]["code"]) == (status, code) and int(headers["retry-after"]) >= 1

    asyncio.run(run())


async def settled(pair: Pair) -> bool:
    async with asyncio.timeout(PATIENCE):
        while any(r._server.admission.in_flight for r in pair.replicas):
            await asyncio.sleep(0.01)
    return True


def test_a_client_that_leaves_frees_its_place() -> None:
    async def run() -> None:
        pair = Pair()
        async with pair.up(hold=5) as ingress:
            await ask(ingress, {**CHAT, "stream": True}, leave_after=3)
            assert await settled(pair) and value(ingress, "outrider_cluster_cancelled_total") == 1
            assert sum(int(r._server.metrics.aborted._value.get()) for r in pair.replicas) == 1

    asyncio.run(run())


def test_keys_and_sizes_are_checked_at_the_door() -> None:
    async def run() -> None:
        pair = Pair()
        async with pair.up(api_keys=("secret",), max_body=2048) as ingress:
            assert (await ask(ingress, CHAT))[0] == 401 and (await ask(ingress, path="/metrics", method="GET"))[
                0
            ] == 401
            assert (await ask(ingress, path="/health", method="GET"))[0] == 200
            assert (await ask(ingress, {"x": "y" * 4096}, authorization="Bearer secret"))[0] == 413 and not pair.sent
            assert (await ask(ingress, CHAT, authorization="Bearer secret"))[0] == 200

    asyncio.run(run())


def test_metrics_are_each_replicas_and_their_sum() -> None:
    async def run() -> None:
        pair = Pair()
        async with pair.up() as ingress:
            for _ in range(3):
                await ask(ingress, CHAT)
            _, _, page = await ask(ingress, path="/metrics", method="GET")
            rows = dict(line.rsplit(" ", 1) for line in page.decode().splitlines() if not line.startswith("#"))
            each = [float(rows[f'outrider_replica_new_tokens_total{{replica="{r}"}}']) for r in "ab"]
            assert min(each) > 0 and float(rows["outrider_new_tokens_total"]) == sum(each)
            assert (
                float(rows['outrider_request_seconds_bucket{le="+Inf"}']) == 3
                and rows["outrider_cluster_replicas_ready"] == "2.0"
            )
            assert float(rows['outrider_http_requests_total{route="chat",status="200"}']) == 3
            pair.there = 1  # one is gone; what it had counted stays
            _, _, page = await ask(ingress, path="/metrics", method="GET")
            rows = dict(line.rsplit(" ", 1) for line in page.decode().splitlines() if not line.startswith("#"))
            assert float(rows["outrider_new_tokens_total"]) == sum(each) and rows["outrider_cluster_replicas"] == "1.0"
            pair.there = 0
            status, _, body = await ask(ingress, path="/health", method="GET")
            assert status == 503 and json.loads(body)["status"] == "no replica"

    asyncio.run(run())


def test_counts_of_many_that_are_gone_become_one_sum() -> None:
    totals = Totals()
    registry = CollectorRegistry()
    for i in range(MAX_GONE + 40):
        text = "# HELP outrider_steps_total x\n# TYPE outrider_steps_total counter\noutrider_steps_total 2.0\n"
        page = totals.text([Snapshot(f"r{i}", True, 0, text)], registry).decode()
        assert f"outrider_steps_total {2.0 * (i + 1)}" in page.splitlines()
    assert len(totals._last) == MAX_GONE + 1


# ---- what replicas store


def form(text: str) -> tuple[bytes, str]:
    """A body that uploads this text for a batch, and its content type."""
    head = '--x\r\nContent-Disposition: form-data; name="'
    parts = (f'{head}purpose"\r\n\r\nbatch\r\n', f'{head}file"; filename="in.jsonl"\r\n\r\n{text}\r\n')
    return "".join((*parts, "--x--\r\n")).encode(), "multipart/form-data; boundary=x"


def test_what_a_replica_stores_is_found_whichever_one_is_asked() -> None:
    """The replicas are asked by turns: a file uploaded to one was not there for a batch on the other."""

    async def run() -> None:
        pair = Pair()
        async with pair.up() as ingress:

            async def call(path: str, body: object = None, method: str = "POST", **headers: str) -> Any:
                status, _, raw = await ask(ingress, body, path, method=method, **headers)
                assert status == 200, (path, raw)
                return json.loads(raw)

            line = {"custom_id": "a", "url": "/v1/chat/completions", "body": {"messages": CHAT["messages"]}}
            raw, kind = form(json.dumps(line))
            files = [(await call("/v1/files", raw, content_type=kind))["id"] for _ in range(2)]
            assert {owner_of(f"/v1/files/{id}", b"") for id in files} == {replica_tag(name) for name in "ab"}
            for id in files * 2:
                assert (await call(f"/v1/files/{id}", method="GET"))["id"] == id
                batch = await call("/v1/batches", {"input_file_id": id, "endpoint": "/v1/chat/completions"})
                async with asyncio.timeout(PATIENCE):
                    while batch["status"] != "completed":
                        await asyncio.sleep(0.01)
                        batch = await call(f"/v1/batches/{batch['id']}", method="GET")
                status, _, output = await ask(
                    ingress, path=f"/v1/files/{batch['output_file_id']}/content", method="GET"
                )
                assert status == 200 and json.loads(output)["custom_id"] == "a"
            listed = (await call("/v1/files", method="GET"))["data"]
            assert {f["id"] for f in listed if f["purpose"] == "batch"} == set(files) and len(listed) == 6
            assert len((await call("/v1/batches", method="GET"))["data"]) == 4
            said = await call("/v1/responses", {"model": "fake", "input": "hi"})
            for _ in range(3):
                said = await call("/v1/responses", {"input": "go on", "previous_response_id": said["id"]})
                assert (await call(f"/v1/responses/{said['id']}", method="GET"))["id"] == said["id"]
            for id in files:
                assert (await call(f"/v1/files/{id}", method="DELETE"))["deleted"]

    asyncio.run(run())


def test_an_id_whose_owner_is_gone_says_so() -> None:
    async def run() -> None:
        pair = Pair()
        async with pair.up() as ingress:
            gone = f"{replica_tag('dead')}-{'0' * 32}"
            status, _, body = await ask(ingress, path=f"/v1/files/file-{gone}", method="GET")
            assert status == 404 and "a replica that is gone" in body.decode()
            body_of = {"model": "fake", "input": "go on", "previous_response_id": f"resp_{gone}"}
            status, _, body = await ask(ingress, body_of, "/v1/responses")
            assert status == 400 and "a replica that is gone" in body.decode()
            body_of = {"input_file_id": f"file-{gone}", "endpoint": "/v1/chat/completions"}
            status, _, body = await ask(ingress, body_of, "/v1/batches")
            assert status == 404 and "a replica that is gone" in body.decode()
            pair.there = 0
            assert (await ask(ingress, path="/v1/files", method="GET"))[0] == 503

    asyncio.run(run())


def test_owners_are_read_from_paths_and_fields_only() -> None:
    tag = replica_tag("a")
    id = f"resp_{tag}-12ab"
    assert owner_of(f"/v1/responses/{id}/input_items", b"") == tag
    assert owner_of("/v1/responses", json.dumps({"previous_response_id": id}).encode()) == tag
    spoken = json.dumps({"previous_response_id": id})  # in a text, not a field
    assert owner_of("/v1/responses", json.dumps({"input": spoken}).encode()) == ""
    for other in (
        b'{"previous_response_id": 3}',
        b'{"previous_response_id": "resp_12ab"}',
        b'["previous_response_id"]',
    ):
        assert owner_of("/v1/responses", other) == ""
    assert owner_of("/v1/responses", b'{"previous_response_id"') == "" == owner_of("/v1/files/file-12ab", b"")


def test_a_body_that_is_dear_to_read_is_not_read_for_its_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four megabytes of objects hold an ingress's event loop for half a second; every replica refuses them."""
    body = b'{"previous_response_id": "resp_12ab", "input": [' + b"{}," * MAX_MEMBERS + b"{}]}"
    read: list[bytes] = []
    monkeypatch.setattr(json, "loads", read.append)
    assert owner_of("/v1/responses", body) == "" and read == []
