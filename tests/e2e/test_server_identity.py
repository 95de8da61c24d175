"""Identity: whatever happens to the list of keys, a client finds all of its own and nothing of the others'.

The server runs in the main thread, where SIGHUP arrives; clients run in threads and store, read, list and continue
while the key file is edited. Every answer holds the marker of its client's prompt, so an answer in the wrong hands shows.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests import tiny
from tests.lora import write_adapter
from tests.running import running
from tests.server_fakes import VOCAB, FakeEngine, Served, tokenizer
from tests.waiting import PATIENCE, until

from outrider import LLM
from outrider.cluster.ingress import Forward
from outrider.cluster.replica import Replica
from outrider.config import EngineConfig
from outrider.engine.step import Request
from outrider.models.config import ModelConfig
from outrider.server.limits import Keys, client_of, prefix_namespace
from outrider.server.main import HttpServer
from outrider.server.model_info import ServedModel
from outrider.server.settings import ServerSettings, read_keys
from outrider.types import SamplingParams

TOK = tokenizer()
CHAT = "/v1/chat/completions"
NAMES = ("alice", "bob", "carol", "dave")
# each step is the key file after an edit: removed, reordered, added in front, added again, all but one removed
EDITS = (
    ("bob", "carol"),
    ("carol", "bob"),
    ("dave", "carol", "bob"),
    ("bob", "dave", "alice", "carol"),
    ("carol",),
    ("alice", "bob", "carol", "dave"),
)


def marker(name: str) -> str:
    return f"<{name}'s text>"


def echo(request: Request) -> str:
    prompt = TOK.decode(request.prompt)
    return " ".join(marker(name) for name in NAMES if marker(name) in prompt) or "nobody"


@dataclass
class Client:
    name: str
    http: httpx.Client
    responses: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    batches: list[str] = field(default_factory=list)

    def call(self, method: str, path: str, **body: Any) -> httpx.Response:
        return self.http.request(method, path, headers={"Authorization": f"Bearer {self.name}"}, **body)

    def store(self) -> bool:
        """Store one thing of each kind; False if the key is not valid now, which may begin between two calls."""
        text = marker(self.name)
        previous = {"previous_response_id": self.responses[-1]} if self.responses else {}
        answer = self.call("POST", "/v1/responses", json={"input": text, "max_output_tokens": 99, **previous})
        if answer.status_code == 401:
            return False
        assert answer.status_code == 200, f"{self.name}: {answer.text}"
        said = answer.json()
        assert said["output"][0]["content"][0]["text"] == text, "only its own marker"
        self.responses.append(said["id"])

        line = {"custom_id": "a", "url": CHAT, "body": {"messages": [{"role": "user", "content": text}]}}
        form = {"files": {"file": (f"{self.name}.jsonl", json.dumps(line).encode())}, "data": {"purpose": "batch"}}
        answer = self.call("POST", "/v1/files", **form)
        if answer.status_code == 401:
            return False
        assert answer.status_code == 200, answer.text
        self.files.append(answer.json()["id"])

        answer = self.call("POST", "/v1/batches", json={"input_file_id": self.files[-1], "endpoint": CHAT})
        if answer.status_code == 200:
            self.batches.append(answer.json()["id"])
        assert answer.status_code in (200, 401, 429), answer.text
        return answer.status_code != 401

    def paths(self) -> Iterator[str]:
        yield from (f"/v1/responses/{id}" for id in self.responses)
        yield from (f"/v1/responses/{id}/input_items" for id in self.responses)
        yield from (f"/v1/files/{id}" for id in self.files)
        yield from (f"/v1/files/{id}/content" for id in self.files)
        yield from (f"/v1/batches/{id}" for id in self.batches)

    def sees_its_own(self) -> None:
        for path in self.paths():
            assert self.call("GET", path).status_code == 200, f"{self.name} lost {path}"
        files = self.call("GET", "/v1/files").json()["data"]
        uploads = {file["id"] for file in files if file["purpose"] == "batch"}
        assert uploads == set(self.files)
        batches = self.call("GET", "/v1/batches").json()["data"]
        assert {batch["id"] for batch in batches} == set(self.batches)
        for file in files:  # those that batches wrote, too
            content = self.call("GET", f"/v1/files/{file['id']}/content").text
            assert [name for name in NAMES if marker(name) in content] == [self.name]

    def sees_nothing_of(self, other: Client) -> None:
        for path in other.paths():
            assert self.call("GET", path).status_code == 404, f"{self.name} reads {other.name}'s {path}"
        for id in other.responses[:1]:
            body = {"input": "go on", "previous_response_id": id}
            assert self.call("POST", "/v1/responses", json=body).status_code == 400
        for id in other.files[:1]:
            body = {"input_file_id": id, "endpoint": CHAT}
            assert self.call("POST", "/v1/batches", json=body).status_code == 404
            assert self.call("DELETE", f"/v1/files/{id}").status_code == 404
        for id in other.batches[:1]:
            assert self.call("POST", f"/v1/batches/{id}/cancel").status_code == 404


@contextmanager
def traffic(clients: list[Client]) -> Iterator[list[BaseException]]:
    """Every client stores things all the while; the list receives what went wrong."""
    wrong: list[BaseException] = []
    over = threading.Event()

    def work(client: Client) -> None:
        try:
            while not over.wait(0.02) and len(client.responses) < 12:
                client.store()
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(client,)) for client in clients]
    for thread in threads:
        thread.start()
    try:
        yield wrong
    finally:
        over.set()
        for thread in threads:
            thread.join(PATIENCE)


def test_no_edit_of_the_keys_under_traffic_gives_a_client_what_is_another_s(tmp_path: Path) -> None:
    """Clients were their key's place in the list: without alice's line, bob became the first and read her answers."""
    keys_file = tmp_path / "keys"
    keys_file.write_text("\n".join(NAMES))
    engine = FakeEngine(TOK, say=echo)
    settings = ServerSettings(
        "fake", port=0, api_keys=read_keys(None, keys_file), api_key_file=keys_file, max_concurrent=4
    )
    server = HttpServer(ServedModel(engine, TOK, VOCAB, 2048), settings)
    keys: Keys = server.app.state.server.keys
    num_reloads = 0
    reload = keys.reload

    def counted_reload() -> None:
        nonlocal num_reloads
        reload()
        num_reloads += 1

    keys.reload = counted_reload  # type: ignore[method-assign]

    def play(url: str) -> None:
        with httpx.Client(base_url=url, timeout=PATIENCE) as http:
            clients = {name: Client(name, http) for name in NAMES}
            for client in clients.values():
                assert client.store()
            for number, valid in enumerate(EDITS):
                with traffic([*clients.values()]) as wrong:
                    keys_file.write_text("\n".join(valid))
                    os.kill(os.getpid(), signal.SIGHUP)
                    until(lambda: num_reloads > number)  # noqa: B023  # called in this round
                    for name in set(NAMES) - set(valid):
                        assert clients[name].call("GET", "/v1/models").status_code == 401
                assert not wrong, wrong
                for name in valid:
                    clients[name].sees_its_own()
                    for other in clients.values():
                        if other.name != name:
                            clients[name].sees_nothing_of(other)

    async def serve() -> None:
        task = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        try:
            await asyncio.to_thread(play, f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}")
        finally:
            server.should_exit = True
            await task

    before = signal.getsignal(signal.SIGHUP)
    try:
        asyncio.run(serve())
    finally:
        signal.signal(signal.SIGHUP, before)

    # fairness and the prefix cache know each client by one name and one namespace, through all edits
    identities: dict[str, set[tuple[str, bytes]]] = defaultdict(set)
    for request in engine.seen:
        text = TOK.decode(request.prompt)
        for name in NAMES:
            if marker(name) in text:
                identities[name].add((request.client, request.namespace))
    assert {name: len(found) for name, found in identities.items()} == dict.fromkeys(NAMES, 1)
    assert len({namespace for found in identities.values() for _, namespace in found}) == len(NAMES)


def test_a_client_sees_only_its_own_running_requests() -> None:
    """/slots told every client how long the prompts and answers of all others were."""
    engine = FakeEngine(TOK, hold=2)
    with Served(engine, TOK, api_keys=("alice", "bob")) as served:

        def slots(name: str) -> list[Any]:
            answer = served.http.get("/slots", headers={"Authorization": f"Bearer {name}"})
            assert answer.status_code == 200
            running: list[Any] = answer.json()
            return running

        body = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
        headers = {"Authorization": "Bearer alice"}
        with served.http.stream("POST", CHAT, headers=headers, json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            until(lambda: len(slots("alice")) == 1)
            assert slots("bob") == []
            engine.go.set()
            assert "data: [DONE]" in lines


def test_an_identity_is_no_place_in_a_list_and_not_the_key() -> None:
    one = Keys(ServerSettings("fake", api_keys=("alice", "bob")))
    other = Keys(ServerSettings("fake", api_keys=("bob",)))
    assert one.find(b"bob") == other.find(b"bob") == client_of(b"bob")
    assert one.find(b"alice") != one.find(b"bob") and one.find(b"mallory") is None and one.find(b"") is None
    assert "alice" not in client_of(b"alice")
    assert prefix_namespace("127.0.0.1") == b"" != prefix_namespace(client_of(b"bob"))


def test_a_fifo_in_place_of_the_key_file_does_not_stop_the_server(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """SIGHUP is handled on the event loop, where opening a fifo would wait for its writer."""
    file = tmp_path / "keys"
    file.write_text("alice")
    keys = Keys(ServerSettings("fake", api_keys=("alice",), api_key_file=file))
    file.unlink()
    os.mkfifo(file)
    keys.reload()
    assert keys.find(b"alice") and "are unchanged" in caplog.text


@pytest.mark.parametrize("share", [False, True])
def test_replicas_of_a_cluster_separate_the_prefixes_of_clients(share: bool) -> None:
    """The ingress holds the keys; replicas, which have none, put all clients into one namespace."""
    engine = FakeEngine(TOK)
    body = json.dumps({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}).encode()
    headers = ((b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()))

    async def play() -> None:
        settings = ServerSettings("fake", host="0.0.0.0", share_prefixes=share)
        replica = Replica("r0", ServedModel(engine, TOK, VOCAB, 2048), settings)
        await replica.start()
        for client in (client_of(b"alice"), client_of(b"bob"), client_of(b"alice")):
            async for _ in replica.answer(Forward("POST", CHAT, b"", headers, body, client)):
                pass
        await replica.stop()

    asyncio.run(play())
    first, second, third = [request.namespace for request in engine.seen]
    assert first == third
    assert (first == second == b"") if share else (first != second)


PROMPT = "abcabcab" * 6  # the same of all clients: pages in the wrong hands would show as cached tokens


@dataclass
class AdapterClient:
    """Asks the same of the base model and of every adapter, and knows the right answers."""

    name: str
    http: httpx.Client
    texts: dict[str, set[str]]  # by model: an adapter that is replaced meanwhile has two
    asked: set[str] = field(default_factory=set)

    def ask(self, model: str) -> int | None:
        """Cached tokens; None if the key is not valid now."""
        body = {"model": model, "prompt": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        headers = {"Authorization": f"Bearer {self.name}"}
        answer = self.http.post("/v1/completions", headers=headers, json=body)
        if answer.status_code == 401:
            return None
        assert answer.status_code == 200, answer.text
        content = answer.json()
        assert content["model"] == model
        assert content["choices"][0]["text"] in self.texts[model], f"{self.name} got another adapter than {model}"
        cached: int = content["usage"]["prompt_tokens_details"]["cached_tokens"]
        if model not in self.asked:
            assert cached == 0, f"{self.name} reads the prefix of another client, or of another adapter than {model}"
        self.asked.add(model)
        return cached


def test_adapters_and_prefixes_do_not_cross_while_keys_and_weights_change(tmp_path: Path) -> None:
    tiny.write(tiny.target("qwen3"), tmp_path / "base")
    config = ModelConfig.from_hf(json.loads((tmp_path / "base" / "config.json").read_text()))
    for seed, name in enumerate(("a", "b", "first", "second")):
        write_adapter(config, tmp_path / name, seed=seed, size=0.3)
    paths = {"a": str(tmp_path / "a"), "b": str(tmp_path / "b"), "c": str(tmp_path / "first")}
    engine = EngineConfig(max_batch=6, max_context=256)
    llm = LLM.load(
        str(tmp_path / "base"), drafter="ngram", device="cpu", ops="cpu", threads=1, draft_tokens=3,
        max_adapters=4, adapters={**paths, "other": str(tmp_path / "second")}, engine=engine,
    )  # fmt: skip
    greedy = SamplingParams(max_tokens=8, ignore_eos=True)
    alone = {name: llm.generate(PROMPT, greedy, adapter=name)[0].text for name in (None, *paths, "other")}
    assert len(set(alone.values())) == 5, "an answer tells its adapter"
    texts = {
        "tiny": {alone[None]},
        "tiny:a": {alone["a"]},
        "tiny:b": {alone["b"]},
        "tiny:c": {alone["c"], alone["other"]},
    }

    keys_file = tmp_path / "keys"
    keys_file.write_text("\n".join(NAMES))
    settings = ServerSettings(
        "tiny", port=0, runtime_adapters=True, api_keys=read_keys(None, keys_file), api_key_file=keys_file
    )
    server = HttpServer(ServedModel.of(llm), settings)
    keys: Keys = server.app.state.server.keys
    wrong: list[BaseException] = []
    over = threading.Event()

    def work(client: AdapterClient) -> None:
        try:
            while not over.is_set():
                for model in texts:
                    client.ask(model)
        except BaseException as error:
            wrong.append(error)

    with running(server) as url, httpx.Client(base_url=url, timeout=PATIENCE) as http:
        clients = {name: AdapterClient(name, http, texts) for name in NAMES}
        for (
            client
        ) in clients.values():  # one after the other: what the first leaves in the cache is the others' to miss
            for model in texts:
                client.ask(model)
        threads = [threading.Thread(target=work, args=(client,)) for client in clients.values()]
        for thread in threads:
            thread.start()
        try:
            for number, valid in enumerate(EDITS):
                keys_file.write_text("\n".join(valid))
                keys.reload()
                path = tmp_path / ("second" if number % 2 == 0 else "first")
                body = {"lora_name": "c", "lora_path": str(path), "load_inplace": True}
                headers = {"Authorization": f"Bearer {valid[0]}"}
                assert http.post("/v1/load_lora_adapter", headers=headers, json=body).status_code == 200
                for name in NAMES:
                    cached = clients[name].ask("tiny:a")
                    assert cached is None if name not in valid else cached, f"{name} lost its prefix"
        finally:
            over.set()
            for thread in threads:
                thread.join(PATIENCE)
    assert not wrong, wrong
