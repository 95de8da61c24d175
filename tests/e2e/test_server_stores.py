"""Stored objects of a server: uploaded files, batches over them, responses to continue. Bounded, and private to each
client."""

from __future__ import annotations

import asyncio
import gc
import json
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import openai
import pytest
from tests.server_fakes import VOCAB, FakeEngine, Served, tokenizer
from tests.waiting import until

from outrider.engine.text import LONG_TEXT
from outrider.server import batch as batch_lines
from outrider.server import batches, stores
from outrider.server.app import Server
from outrider.server.batch import BatchFile, answer_file
from outrider.server.errors import MAX_MEMBERS, ApiError
from outrider.server.model_info import ServedModel
from outrider.server.settings import ServerSettings
from outrider.server.stores import FileStore, ResponseStore, StoredResponse

TOK = tokenizer()
HI: Any = [{"role": "user", "content": "hi"}]
CHAT = "/v1/chat/completions"
KEYS = ("alpha", "beta")


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with Served(FakeEngine(TOK), TOK, api_keys=KEYS, max_concurrent=4) as s:
        yield s


def line(id: str, url: str = CHAT, **body: Any) -> str:
    return json.dumps(
        {
            "custom_id": id,
            "method": "POST",
            "url": url,
            "body": {"model": "fake", "messages": HI, "max_tokens": 12, **body},
        }
    )


def ended(client: openai.OpenAI, id: str) -> Any:
    until(
        lambda: client.batches.retrieve(id).status in ("completed", "failed", "cancelled", "expired"),
        lambda: "the batch runs on",
    )
    return client.batches.retrieve(id)


def run(client: openai.OpenAI, text: str) -> Any:
    file = client.files.create(file=("in.jsonl", text.encode()), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h", metadata={"a": "b"})
    return ended(client, batch.id)


def rows(client: openai.OpenAI, id: str) -> dict[str, Any]:
    return {r["custom_id"]: r for r in map(json.loads, client.files.content(id).text.splitlines())}


def test_a_batch_says_what_the_command_says(served: Served, tmp_path: Path) -> None:
    client = served.client("alpha")
    text = "\n".join(
        [*(line(f"r{i}", seed=i if i % 2 else None) for i in range(9)), "", line("r0"), line("no", temperature=9), "{"]
    )
    batch = run(client, text)
    assert batch.status == "completed" and batch.metadata == {"a": "b"} and batch.in_progress_at and batch.completed_at
    assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (12, 9, 3)
    good = rows(client, batch.output_file_id)
    wrong = rows(client, batch.error_file_id)
    assert wrong["no"]["response"]["status_code"] == 400 and wrong["r0"]["error"]["code"] == "duplicate_custom_id"
    source = tmp_path / "in.jsonl"
    source.write_text(text)
    server = Server.offline(ServedModel(FakeEngine(TOK), TOK, VOCAB, 2048), ServerSettings("fake"))
    answer_file(server, BatchFile(source, tmp_path / "out.jsonl", "fake"))
    alone = {
        r["custom_id"]: r
        for r in map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())
        if r["error"] is None
    }
    for id, row in good.items():
        batch_text, other = (r["response"]["body"]["choices"][0]["message"]["content"] for r in (row, alone[id]))
        assert batch_text == other


def runs_a_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def test_long_lines_and_their_results_do_not_hold_up_the_event_loop(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line of four megabytes of objects stopped every client for half a second, and so did each after it."""
    on_loop: list[tuple[str, bool]] = []

    def watched(module: ModuleType, name: str) -> None:
        function = getattr(module, name)

        def noted(value: Any) -> Any:
            on_loop.append((name, runs_a_loop()))
            return function(value)

        monkeypatch.setattr(module, name, noted)

    watched(batch_lines, "parse")
    watched(batches, "_encoded_line")
    objects = json.dumps({"custom_id": "many", "method": "POST", "url": CHAT, "body": {"x": [{}] * (MAX_MEMBERS + 1)}})
    client = served.client("alpha")
    done = run(client, "\n".join([line("long", user="x" * 2 * LONG_TEXT), objects, line("short")]))
    assert (done.request_counts.completed, done.request_counts.failed) == (2, 1)
    (refused,) = client.files.content(done.error_file_id).text.splitlines()
    assert json.loads(refused)["error"]["code"] == "line_too_complex"
    assert on_loop.count(("parse", True)) == 1 and on_loop.count(("parse", False)) == 2, "the short one is read at once"
    assert on_loop.count(("_encoded_line", False)) == 3 and ("_encoded_line", True) not in on_loop


def test_stored_responses_are_read_off_the_event_loop(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """A response that goes on from a megabyte of text was read and written on the loop whenever it was asked for."""
    on_loop: list[bool] = []
    get = ResponseStore.get

    def noted(store: ResponseStore, client: str, id: str, param: str | None = None) -> StoredResponse:
        on_loop.append(runs_a_loop())
        return get(store, client, id, param)

    monkeypatch.setattr(ResponseStore, "get", noted)
    client = served.client("alpha")
    id = client.responses.create(input="hi", model="fake").id
    assert client.responses.retrieve(id).id == id
    assert client.responses.input_items.list(id).data
    client.responses.create(input="on", model="fake", previous_response_id=id)
    client.responses.delete(id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(id)
    assert on_loop == [False] * 5


def test_files_come_back_byte_by_byte_and_can_be_deleted(served: Served) -> None:
    client = served.client("alpha")
    data = b'{"a": "\xc3\xa9"}\r\n\n--x\r{}\x00\n'
    file = client.files.create(file=("ä.jsonl", data), purpose="batch")
    assert file.bytes == len(data) and client.files.content(file.id).content == data
    assert file.id in [f.id for f in client.files.list()]
    assert client.files.delete(file.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(file.id)


def test_a_client_sees_only_what_is_its_own(served: Served) -> None:
    owner = served.client("alpha")
    other = served.client("beta")
    batch = run(owner, line("a"))
    assert (
        not list(other.files.list())
        and not list(other.batches.list())
        and batch.id in [b.id for b in owner.batches.list()]
    )
    for ask in (lambda: other.files.content(batch.output_file_id), lambda: other.batches.retrieve(batch.id)):
        with pytest.raises(openai.NotFoundError):
            ask()
    with pytest.raises(openai.NotFoundError):
        other.batches.create(input_file_id=batch.input_file_id, endpoint=CHAT, completion_window="24h")
    said = owner.responses.create(model="fake", input="hi")
    with pytest.raises(openai.NotFoundError):
        other.responses.retrieve(said.id)
    with pytest.raises(openai.BadRequestError, match="not found"):
        other.responses.create(model="fake", input="go on", previous_response_id=said.id)


def test_a_batch_can_be_cancelled() -> None:
    engine = FakeEngine(TOK, hold=2)
    with Served(engine, TOK, max_concurrent=2) as s:
        client = s.client()
        file = client.files.create(
            file=("in.jsonl", "\n".join(line(f"r{i}") for i in range(20)).encode()), purpose="batch"
        )
        batch = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
        until(lambda: len(engine.running) == 2, lambda: "nothing runs")
        with pytest.raises(openai.ConflictError):
            client.files.delete(file.id)
        assert client.batches.cancel(batch.id).status == "cancelling"
        assert ended(client, batch.id).status == "cancelled"
        s.settle()
        again = client.batches.create(
            input_file_id=file.id, endpoint=CHAT, completion_window="24h"
        )  # and the server's end ends it
        until(lambda: len(engine.running) == 2, lambda: "nothing runs")
    assert again.id in s.state.batches._of and s.state.batches._of[again.id].status == "cancelled"


def test_a_line_may_take_longer_than_a_heartbeat(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heartbeats of a connection are not part of a line's result."""
    monkeypatch.setattr("outrider.server.call.KEEP_ALIVE_S", 0.01)
    engine = FakeEngine(TOK, hold=2)
    with Served(engine, TOK) as s:
        client = s.client()
        file = client.files.create(file=("in.jsonl", line("slow").encode()), purpose="batch")
        batch = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
        until(lambda: len(engine.running) == 1, lambda: "nothing runs")
        time.sleep(0.1)
        engine.go.set()
        assert rows(client, ended(client, batch.id).output_file_id)["slow"]["response"]["status_code"] == 200


def test_a_line_may_take_longer_than_the_timeout_of_requests() -> None:
    """Lines wait behind everything else of their client; with --timeout they died of it, with a final 408."""
    engine = FakeEngine(TOK, hold=2)
    with Served(engine, TOK, timeout=0.2, max_concurrent=2) as s:
        client = s.client()
        text = "\n".join(line(f"r{i}") for i in range(6))
        file = client.files.create(file=("in.jsonl", text.encode()), purpose="batch")
        batch = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
        until(lambda: len(engine.running) == 2, lambda: "nothing runs")
        with pytest.raises(openai.APIStatusError) as late:  # a request keeps its limit
            client.chat.completions.create(model="fake", messages=HI)
        assert late.value.status_code == 408
        time.sleep(0.5)
        engine.go.set()
        batch = ended(client, batch.id)
        assert (batch.request_counts.completed, batch.request_counts.failed) == (6, 0)


def test_a_batch_ends_with_its_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.server.batches.WINDOW_S", 0.5)
    engine = FakeEngine(TOK, hold=2)
    with Served(engine, TOK, max_concurrent=2) as s:
        client = s.client()
        text = "\n".join([line("bad", temperature=9), *(line(f"r{i}") for i in range(4)), "{"])
        file = client.files.create(file=("in.jsonl", text.encode()), purpose="batch")
        batch = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
        batch = ended(client, batch.id)
        assert batch.status == "expired" and batch.expired_at
        assert (batch.request_counts.total, batch.request_counts.failed) == (6, 6)
        wrong = [json.loads(row) for row in client.files.content(batch.error_file_id).text.splitlines()]
        codes = [row["error"] and row["error"]["code"] for row in wrong]
        assert codes.count("batch_expired") >= 4 and len(codes) == 6
        assert {"r0", "r1", "r2", "r3"} <= {row["custom_id"] for row in wrong}
        s.settle()  # what ran is aborted


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"files": {"file": ("a", b"x")}, "data": {"purpose": "fine-tune"}}, "purpose"),
    ({"files": {"other": ("a", b"x")}, "data": {"purpose": "batch"}}, "file"),
    ({"json": {"file": "x"}}, "multipart"),
    ({"content": b"\xff" * 40, "headers": {"content-type": "multipart/form-data; boundary=x"}}, "file"),
    ({"content": b"", "headers": {"content-type": "multipart/form-data"}}, "multipart"),
]


@pytest.mark.parametrize("i", range(len(REFUSED)))
def test_uploads_that_are_none(served: Served, i: int) -> None:
    body, said = REFUSED[i]
    headers = {"Authorization": "Bearer alpha", **body.pop("headers", {})}
    answer = served.http.post("/v1/files", headers=headers, **body)
    assert answer.status_code == 400 and said in answer.json()["error"]["message"]


def test_batches_that_cannot_run(served: Served) -> None:
    client = served.client("alpha")
    empty = run(client, "\n\n")
    assert empty.status == "failed" and "no request" in empty.errors.data[0].message
    file = client.files.create(file=("in.jsonl", line("a", "/v1/completions").encode()), purpose="batch")
    with pytest.raises(openai.BadRequestError, match="endpoint"):
        client.batches.create(input_file_id=file.id, endpoint="/v1/embeddings", completion_window="24h")
    with pytest.raises(openai.NotFoundError):
        client.batches.create(input_file_id="file-none", endpoint=CHAT, completion_window="24h")
    batch = ended(client, client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h").id)
    assert rows(client, batch.error_file_id)["a"]["error"]["code"] == "mismatched_url"


def test_the_file_store_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "MAX_FILES", 2)
    monkeypatch.setattr(stores, "MAX_FILE_BYTES", 10)
    store = FileStore()
    a = store.new("c", "a", "batch")
    store.append(a, b"12345678")
    b = store.new("c", "b", "batch")
    with pytest.raises(ApiError, match="MiB"):
        store.append(b, b"123")
    with pytest.raises(ApiError, match="room"):
        store.new("c", "c", "batch")
    store.delete(a)
    store.append(b, b"123")
    folder = b.path.parent
    store.close()
    assert not folder.exists()


def test_one_client_leaves_room_for_the_files_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client with 256 files, or 256 MiB of them, shut out all others."""
    monkeypatch.setattr(stores, "MAX_FILES", 8)
    monkeypatch.setattr(stores, "MAX_FILE_BYTES", 80)
    store = FileStore()
    try:
        many = [store.new("many", "x", "batch") for _ in range(7)]
        with pytest.raises(ApiError, match=r"7 files of this client and 7 in all .* room for 7 and 8"):
            store.new("many", "x", "batch")
        other = store.new("other", "x", "batch")
        store.append(many[0], b"x" * 70)
        with pytest.raises(ApiError, match="of one client"):
            store.append(many[1], b"x")
        store.append(other, b"x" * 10)
    finally:
        store.close()


def test_no_client_evicts_the_responses_and_batches_of_another(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest were evicted, whoever's: 1,024 short answers of one client took those of all others with them."""
    monkeypatch.setattr(stores, "MAX_RESPONSES", 6)
    monkeypatch.setattr(stores, "MAX_RESPONSE_BYTES", 4000)
    store = ResponseStore()
    for i in range(2):
        store.put("few", [], [{"text": "x" * 600}], {"id": f"few {i}"})
    for i in range(40):
        store.put("many", [], [], {"id": f"many {i}"})
    assert store.get("few", "few 0") and store.get("few", "few 1") and len(store._of) == 6
    for i in range(4):
        store.put("large", [], [{"text": "x" * 1500}], {"id": f"large {i}"})
    assert store.get("few", "few 0") and store.get("large", "large 3") and store.bytes <= 4000
    assert store.bytes == sum(map(len, store._of.values()))

    monkeypatch.setattr(batches, "MOST_KEPT", 4)
    clients = [served.client(key) for key in KEYS]
    batch_ids = []
    for client in (*clients, *[clients[1]] * 6):
        file = client.files.create(file=("in.jsonl", line("a").encode()), purpose="batch")
        batch = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
        batch_ids.append(ended(client, batch.id).id)
    assert clients[0].batches.retrieve(batch_ids[0]).status == "completed"
    with pytest.raises(openai.NotFoundError):
        clients[1].batches.retrieve(batch_ids[1])


# ---- responses


def test_a_response_goes_on_from_another(served: Served) -> None:
    client = served.client("alpha")
    first = client.responses.create(model="fake", input="My name is Ann.", instructions="Be brief.")
    again = client.responses.retrieve(first.id)
    assert again.output_text == first.output_text and again.store and first.previous_response_id is None
    second = client.responses.create(model="fake", input="And mine?", previous_response_id=first.id)
    prompt = TOK.decode(served.engine.seen[-1].prompt, keep_special=True)
    messages = ["My name is Ann.", first.output_text, "And mine?"]
    assert [prompt.index(text) for text in messages] == sorted(prompt.index(text) for text in messages)
    assert "Be brief." not in prompt and second.previous_response_id == first.id  # instructions hold for one turn
    with client.responses.stream(
        model="fake", input="Go on.", previous_response_id=second.id, instructions="Slowly."
    ) as stream:
        third = stream.get_final_response()
    prompt = TOK.decode(served.engine.seen[-1].prompt, keep_special=True)
    assert prompt.index("Slowly.") < prompt.index("Ann") < prompt.index("And mine?") < prompt.index("Go on.")
    assert client.responses.retrieve(third.id).output_text == third.output_text
    assert client.responses.input_items.list(third.id).data[0].content[0].text == "Go on."
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)


def test_what_is_not_stored_cannot_be_gone_on_from(served: Served) -> None:
    client = served.client("alpha")
    said = client.responses.create(model="fake", input="hi", store=False)
    assert said.store is False
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(model="fake", input="go on", previous_response_id=said.id)
    assert (refused.value.code, refused.value.param) == ("previous_response_not_found", "previous_response_id")
    headers = {"Authorization": "Bearer alpha"}
    counted: httpx.Response = served.http.post(
        "/v1/responses/input_tokens", headers=headers, json={"input": "x", "previous_response_id": said.id}
    )
    assert counted.status_code == 400


def test_the_response_store_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "MAX_RESPONSES", 3)
    monkeypatch.setattr(stores, "MAX_RESPONSE_BYTES", 400)
    store = ResponseStore()
    for i in range(5):
        store.put("c", [], [], {"id": f"r{i}"})
    assert len(store._of) == 3 and store.get("c", "r2").response == {"id": "r2"}
    store.put("c", [], [], {"id": "r5"})  # r3 was used least recently
    with pytest.raises(ApiError):
        store.get("c", "r3")
    store.put("c", [], [{"text": "x" * 350}], {"id": "big"})
    assert store.bytes <= 400 and store.get("c", "big")
    store.put("c", [], [{"text": "x" * 500}], {"id": "bigger"})
    assert store.bytes <= 400 and store.get("c", "big")
    store.delete("c", "big")
    assert store.bytes == len(store._of) == 0
    store.put("c", [{"role": "user", "content": "\ud800ü"}], [], {"id": "r"})
    assert store.get("c", "r").messages == [{"role": "user", "content": "\ud800ü"}] and store.bytes > 40
    assert not any(map(gc.is_tracked, store._of.values())), "nothing that a collection walks"
