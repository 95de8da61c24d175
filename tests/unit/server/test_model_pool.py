"""Several models in one server: who is loaded, who makes room, who waits."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from unittest.mock import patch

import pytest
from httpx import ASGITransport, AsyncClient
from starlette.requests import Request
from starlette.types import Message
from tests.server_fakes import VOCAB, FakeEngine, tokenizer

from outrider.engine.metrics import Metrics
from outrider.server import model_pool as pool_module
from outrider.server import trim as trim_module
from outrider.server.app import LARGE_BODY_BYTES, Server, create_app
from outrider.server.batch import BatchLine, answered
from outrider.server.errors import ApiError
from outrider.server.model_info import ServedModel
from outrider.server.model_pool import PATIENCE_S, ModelPool, PoolSlot, total
from outrider.server.settings import ServerSettings
from outrider.types import OutriderError

TOK = tokenizer()


class Loader:
    """Counts what is loaded, and can hold a load up or fail it."""

    def __init__(self) -> None:
        self.order: list[str] = []
        self.go = threading.Event()
        self.go.set()
        self.error: Exception | None = None

    def slot(self, name: str, size: int) -> PoolSlot:
        def load() -> ServedModel:
            assert self.go.wait(30)
            self.order.append(name)
            if self.error is not None:
                raise self.error
            return ServedModel(FakeEngine(TOK), TOK, VOCAB, 128, nbytes=size)

        return PoolSlot(name, load, size)


def run(
    work: Callable[[ModelPool, Loader], Coroutine[object, object, None]],
    limit: int | None = 15,
    now: list[float] | None = None,
) -> None:
    loader = Loader()
    clock = now if now is not None else [0.0]

    async def inner() -> None:
        slots = [loader.slot("a", 10), loader.slot("b", 10), loader.slot("c", 4)]
        model_pool = ModelPool(slots, limit, ServerSettings("a", port=0))
        try:
            async with asyncio.timeout(60):
                await work(model_pool, loader)
        finally:
            loader.go.set()
            await model_pool.stop()

    with patch.object(pool_module, "time", SimpleNamespace(monotonic=lambda: clock[0])):
        asyncio.run(inner())


async def use(model_pool: ModelPool, name: str) -> None:
    slot = model_pool.find(name)
    assert (await model_pool.acquire(slot)).name == name
    model_pool.release(slot)


def there(model_pool: ModelPool) -> list[str]:
    return [m.name for m in model_pool.loaded]


def test_loads_on_demand_and_the_least_recently_used_makes_room() -> None:
    async def work(model_pool: ModelPool, loader: Loader) -> None:
        assert there(model_pool) == [] and model_pool.find(None).name == "a"
        for name in ("a", "c", "a"):
            await use(model_pool, name)
        assert there(model_pool) == ["a", "c"] and loader.order == ["a", "c"]
        await use(model_pool, "b")  # 10 + 4 + 10 > 15: c was used least recently, and that is not enough
        assert there(model_pool) == ["b"]
        await use(model_pool, "c")
        assert (
            there(model_pool) == ["b", "c"]
            and model_pool.slots["a"].evictions == 1
            and model_pool.slots["b"].state == "loaded"
        )

    run(work)


def test_without_a_limit_all_stay() -> None:
    async def work(model_pool: ModelPool, loader: Loader) -> None:
        for name in ("a", "b", "c", "a", "b"):
            await use(model_pool, name)
        assert there(model_pool) == ["a", "b", "c"] and len(loader.order) == 3

    run(work, limit=None)


def test_a_model_in_use_is_never_put_back_and_those_who_wait_get_it_together() -> None:
    async def work(model_pool: ModelPool, loader: Loader) -> None:
        a = model_pool.find("a")
        await model_pool.acquire(a)
        waiting = [asyncio.ensure_future(use(model_pool, "b")) for _ in range(3)]
        for _ in range(20):
            await asyncio.sleep(0)
        assert there(model_pool) == ["a"] and not any(w.done() for w in waiting)
        model_pool.release(a)
        await asyncio.gather(*waiting)
        assert there(model_pool) == ["b"] and loader.order == ["a", "b"]

    run(work)


def test_a_model_on_its_way_out_is_not_lent() -> None:
    async def work(model_pool: ModelPool, loader: Loader) -> None:
        await use(model_pool, "a")
        other = asyncio.ensure_future(use(model_pool, "b"))
        await asyncio.sleep(0)  # it is decided that a goes; nothing has been unloaded yet
        assert not model_pool.ready(model_pool.find("a"))
        await asyncio.gather(other, use(model_pool, "a"))
        assert loader.order == ["a", "b", "a"]

    run(work)


def test_newcomers_stand_back_once_another_has_waited_long() -> None:
    now = [0.0]

    async def work(model_pool: ModelPool, loader: Loader) -> None:
        a = model_pool.find("a")
        await model_pool.acquire(a)
        other = asyncio.ensure_future(use(model_pool, "b"))
        await asyncio.sleep(0)
        await model_pool.acquire(a)  # in time: nobody waited long yet
        now[0] += PATIENCE_S + 1
        assert not model_pool.ready(a)
        late = asyncio.ensure_future(use(model_pool, "a"))
        await asyncio.sleep(0)
        assert not late.done()
        model_pool.release(a)
        model_pool.release(a)
        await asyncio.gather(other, late)
        assert loader.order == ["a", "b", "a"]

    run(work, now=now)


def test_who_leaves_the_line_holds_up_nobody() -> None:
    async def work(model_pool: ModelPool, loader: Loader) -> None:
        a = model_pool.find("a")
        await model_pool.acquire(a)
        gone = asyncio.ensure_future(use(model_pool, "b"))
        stays = asyncio.ensure_future(use(model_pool, "c"))
        await asyncio.sleep(0)
        assert not stays.done()  # c would fit beside a, but b was first
        gone.cancel()
        await stays
        assert there(model_pool) == ["a", "c"] and a.users == 1 and model_pool.slots["c"].users == 0

    run(work)


def test_who_leaves_while_it_loads_borrows_nothing() -> None:
    async def work(model_pool: ModelPool, loader: Loader) -> None:
        loader.go.clear()
        gone = asyncio.ensure_future(use(model_pool, "b"))
        while not model_pool.slots["b"].loading:
            await asyncio.sleep(0)
        assert model_pool.slots["b"].state == "loading"
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
        loader.go.set()
        await use(model_pool, "a")
        assert there(model_pool) == ["a"] and all(s.users == 0 for s in model_pool.slots.values())

    run(work)


def test_a_model_that_cannot_be_loaded_is_told_to_those_who_asked() -> None:
    async def work(model_pool: ModelPool, loader: Loader) -> None:
        loader.error = OutriderError("/secret/place/weights.gguf is cut off")
        with pytest.raises(ApiError) as error:
            await use(model_pool, "b")
        assert (
            error.value.status == 503 and "weights.gguf" in error.value.message and "secret" not in error.value.message
        )
        loader.error = None
        await use(model_pool, "b")

    run(work)


def test_unknown_models_are_told_which_there_are() -> None:
    async def work(model_pool: ModelPool, loader: Loader) -> None:
        with pytest.raises(ApiError, match="this server has 'a', 'b', 'c'") as error:
            model_pool.find("d")
        assert error.value.status == 404

    run(work)


def test_counts_outlive_a_model() -> None:
    async def work(model_pool: ModelPool, loader: Loader) -> None:
        a = model_pool.find("a")
        (await model_pool.acquire(a)).backend.engine.metrics.new_tokens = 7
        model_pool.release(a)
        await use(model_pool, "b")
        assert there(model_pool) == ["b"] and model_pool.metrics.new_tokens == 7

    run(work)
    summed = total(
        [Metrics(new_tokens=1, finished={"stop": 1}), Metrics(new_tokens=2, finished={"stop": 2, "length": 1})]
    )
    assert summed.new_tokens == 3 and summed.finished == {"stop": 3, "length": 1}


def test_names_on_the_command_line(tmp_path_factory: pytest.TempPathFactory) -> None:
    odd = tmp_path_factory.mktemp("models") / "x=y"
    odd.mkdir()
    read = pool_module.read_names(["smollm2", "big=org/name", str(odd)])
    assert list(read.items()) == [("smollm2", "smollm2"), ("big", "org/name"), ("x=y", str(odd))]
    with pytest.raises(OutriderError, match="two models would have the name 'smollm2'"):
        pool_module.read_names(["smollm2", "smollm2=org/name"])


def test_a_c_library_without_malloc_trim_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trim_module.ctypes, "CDLL", lambda _: object())  # musl
    trim_module.trim()


def test_what_was_frozen_goes_when_its_model_is_put_back() -> None:
    """The server freezes what is there when it starts; the first model's cycles are among it."""

    class Cycle:
        def __init__(self) -> None:
            self.me = self

    frozen = gc.get_freeze_count()
    gone = weakref.ref(Cycle())
    gc.freeze()
    try:
        pool_module._free()
        assert gone() is None and gc.get_freeze_count() > 0
    finally:
        if not frozen:
            gc.unfreeze()


LARGE = "word " * (LARGE_BODY_BYTES // 4)


@pytest.mark.parametrize(
    ("path", "body"), [("/v1/completions", {"prompt": LARGE}), ("/v1/embeddings", {"input": LARGE})]
)
def test_a_large_body_holds_up_no_other_while_its_model_loads(path: str, body: dict[str, str]) -> None:
    async def work(model_pool: ModelPool, loader: Loader) -> None:
        loader.go.clear()
        app = create_app(model_pool, ServerSettings("a", port=0))
        async with AsyncClient(transport=ASGITransport(app), base_url="http://127.0.0.1") as client:
            call = asyncio.ensure_future(client.post(path, json={"model": "b", **body}))
            while not model_pool.slots["b"].loading:
                assert not call.done(), call.result().text
                await asyncio.sleep(0.001)
            assert not app.state.server.big_bodies._held
            loader.go.set()
            assert (await call).status_code == 400  # longer than the context

    run(work)


@pytest.mark.parametrize(
    ("path", "body"), [("/tokenize", {"prompt": "hi"}), ("/api/generate", {}), ("/api/chat", {"messages": []})]
)
def test_who_needs_no_engine_waits_for_a_load_no_longer_than_allowed(path: str, body: dict[str, object]) -> None:
    async def work(model_pool: ModelPool, loader: Loader) -> None:
        loader.go.clear()
        app = create_app(model_pool, ServerSettings("a", port=0, timeout=0.05))
        async with (
            AsyncClient(transport=ASGITransport(app), base_url="http://127.0.0.1") as client,
            asyncio.timeout(30),
        ):
            answer = await client.post(path, json={"model": "b", **body})
        assert (
            answer.status_code == 408 and model_pool.slots["b"].users == 0 and app.state.server.admission.in_flight == 0
        )

    run(work)


def test_a_server_that_closes_loads_nothing() -> None:
    async def work(model_pool: ModelPool, loader: Loader) -> None:
        app = create_app(model_pool, ServerSettings("a", port=0))
        app.state.server.admission.closing = True
        async with AsyncClient(transport=ASGITransport(app), base_url="http://127.0.0.1") as client:
            answer = await client.post("/api/generate", json={"model": "b"})
        assert answer.status_code == 503 and not loader.order

    run(work)


@pytest.mark.parametrize(
    ("headers", "waits"),
    [
        ({}, False),
        ({"content-length": "12"}, False),
        ({"content-length": str(LARGE_BODY_BYTES + 1)}, True),
        ({"transfer-encoding": "chunked"}, True),
    ],
)
def test_only_bodies_that_may_be_large_wait_for_their_turn(headers: dict[str, str], waits: bool) -> None:
    """A GET has neither a length nor a body."""

    async def work(model_pool: ModelPool, loader: Loader) -> None:
        server = Server(model_pool, ServerSettings("a", port=0))
        scope = {
            "type": "http",
            "headers": [(k.encode(), v.encode()) for k, v in headers.items()],
            "state": {"client": "me"},
        }

        async def receive() -> Message:
            return {"type": "http.request", "body": b"", "more_body": False}

        async with server.received(Request(scope, receive)) as got:
            assert list(server.big_bodies._held) == (["me"] if waits else [])
            got.room.close()
            assert not server.big_bodies._held

    run(work)


def test_a_batch_does_not_load_a_broken_model_again_and_again() -> None:
    async def work(pool: ModelPool, loader: Loader) -> None:
        loader.error = OutriderError("the file is damaged")
        body = {"model": "b", "messages": [{"role": "user", "content": "Say it"}]}
        line = BatchLine(1, "batch_req_1", b"")
        url = "/v1/chat/completions"
        status, _ = await answered(Server(pool, ServerSettings("a", port=0)), line, url, body, client="me")
        assert status == 503 and loader.order == ["b"]

    run(work)
