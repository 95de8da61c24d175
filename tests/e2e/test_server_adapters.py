"""Adapters over HTTP: names, cards, mixed traffic, loading and unloading at run time."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests import tiny
from tests.lora import write_adapter
from tests.running import running
from tests.stress.adapter_churn import churn

from outrider import LLM
from outrider.config import EngineConfig
from outrider.models.config import ModelConfig
from outrider.ops.lowrank import Adapter
from outrider.server.main import HttpServer
from outrider.server.model_info import ServedModel
from outrider.server.settings import ServerSettings
from outrider.types import SamplingParams


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lora")
    tiny.write(tiny.target("qwen3"), folder / "base")
    config = ModelConfig.from_hf(json.loads((folder / "base" / "config.json").read_text()))
    for i, name in enumerate(("a", "b", "c")):
        write_adapter(config, folder / name, seed=i, size=0.3)
    return folder


@pytest.fixture(scope="module")
def llm(files: Path) -> LLM:
    return LLM.load(
        str(files / "base"), drafter="ngram", device="cpu", ops="cpu", threads=1, draft_tokens=3, max_adapters=2,
        adapters={name: str(files / name) for name in "ab"}, engine=EngineConfig(max_batch=6, max_context=256),
    )  # fmt: skip


@pytest.fixture(scope="module")
def http(llm: LLM) -> Iterator[httpx.Client]:
    settings = ServerSettings("tiny", port=0, runtime_adapters=True)
    with running(HttpServer(ServedModel.of(llm), settings)) as url, httpx.Client(base_url=url, timeout=120) as client:
        yield client


def complete(http: httpx.Client, model: str, **more: Any) -> httpx.Response:
    body = {"model": model, "prompt": "abcabcab", "max_tokens": 8, "temperature": 0, "ignore_eos": True, **more}
    return http.post("/v1/completions", json=body)


def test_names(http: httpx.Client, llm: LLM) -> None:
    """BASE:NAME and NAME answer with the adapter, as the engine does alone; others share the batch."""
    want = {
        name: llm.generate("abcabcab", SamplingParams(max_tokens=8, ignore_eos=True), adapter=name)[0].text
        for name in (None, "a", "b")
    }
    names = {"tiny": None, "tiny:a": "a", "b": "b", "tiny:b": "b"}
    with ThreadPoolExecutor(4) as pool:
        answers = dict(zip(names, pool.map(lambda name: complete(http, name).json(), names), strict=True))
    for name, adapter in names.items():
        assert answers[name]["choices"][0]["text"] == want[adapter]
        assert answers[name]["model"] == ("tiny" if adapter is None else f"tiny:{adapter}")
    assert len(set(want.values())) == 3
    assert 'outrider_adapter_drafted_total{adapter="a"}' in http.get("/metrics").text


def test_cards_and_unknown_names(http: httpx.Client) -> None:
    cards = {card["id"]: card for card in http.get("/v1/models").json()["data"]}
    assert list(cards) == ["tiny", "tiny:a", "tiny:b"] and cards["tiny:a"]["parent"] == "tiny"
    assert http.get("/v1/models/tiny:b").json()["root"] == "b"
    refused = complete(http, "tiny:none")
    assert refused.status_code == 404 and "this server has 'tiny' and 'tiny:a', 'tiny:b'" in refused.text
    assert http.get("/v1/models/tiny:none").status_code == 404


def test_scores_and_embeddings_use_the_adapter(http: httpx.Client) -> None:
    scores = [complete(http, name, echo=True, logprobs=1, max_tokens=1).json() for name in ("tiny", "tiny:a")]
    logprobs = [answer["choices"][0]["logprobs"]["token_logprobs"] for answer in scores]
    assert logprobs[0] != logprobs[1]
    vectors = [
        http.post("/v1/embeddings", json={"model": name, "input": "abc"}).json()["data"][0]["embedding"]
        for name in ("tiny", "tiny:a")
    ]
    assert vectors[0] != vectors[1]


def test_an_adapter_that_left_memory_is_read_by_a_reader(
    http: httpx.Client, llm: LLM, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was read in the engine's thread, or on the event loop: every client waited for the file."""
    assert llm.adapters is not None
    llm.adapters.add("c", str(files / "c"))  # two are in memory
    threads: list[str] = []
    load = llm.adapters.load

    def noted(name: str, path: str) -> Adapter:
        threads.append(threading.current_thread().name)
        return load(name, path)

    monkeypatch.setattr(llm.adapters, "load", noted)
    try:
        for name in "abcabc":
            if len(threads) % 2 == 0:
                assert complete(http, f"tiny:{name}").status_code == 200
            else:
                assert http.post("/v1/embeddings", json={"model": f"tiny:{name}", "input": "abc"}).status_code == 200
    finally:
        llm.adapters.remove("c")
    assert len(threads) >= 5 and all(name.startswith("outrider-reader") for name in threads), threads


def test_loading_and_unloading(http: httpx.Client, files: Path) -> None:
    def post(what: str, **body: Any) -> httpx.Response:
        return http.post(f"/v1/{what}_lora_adapter", json=body)

    assert post("load", lora_name="c", lora_path=str(files / "c")).status_code == 200
    third = complete(http, "tiny:c").json()["choices"][0]["text"]
    for body, said in (
        ({"lora_name": "c", "lora_path": str(files / "c")}, "loaded already"),
        ({"lora_name": "d", "lora_path": str(files / "none")}, "does not exist"),
        ({"lora_name": "../d", "lora_path": str(files / "c")}, "letters, digits"),
        ({"lora_name": "d"}, "lora_path"),
    ):
        refused = post("load", **body)
        assert refused.status_code == 400 and said in refused.json()["error"]["message"], refused.text
        assert str(files.parent) not in refused.text
    assert post("load", lora_name="c", lora_path=str(files / "a"), load_inplace=True).status_code == 200
    assert complete(http, "tiny:c").json()["choices"][0]["text"] != third
    assert post("unload", lora_name="c").status_code == 200
    assert post("unload", lora_name="c").status_code == 404
    assert complete(http, "tiny:c").status_code == 404
    assert complete(http, "tiny:a").status_code == 200


def test_a_load_in_place_that_fails_leaves_the_adapter_in_place(http: httpx.Client, files: Path) -> None:
    """The old adapter was unloaded before the new one was read: a mistyped path took it from everybody."""
    body = {"lora_name": "a", "lora_path": str(files / "mistyped"), "load_inplace": True}
    before = complete(http, "tiny:a").json()["choices"][0]["text"]
    cards = http.get("/v1/models").json()["data"]
    refused = http.post("/v1/load_lora_adapter", json=body)
    assert refused.status_code == 400 and "does not exist" in refused.text
    assert http.get("/v1/models").json()["data"] == cards
    after = complete(http, "tiny:a")
    assert after.status_code == 200 and after.json()["choices"][0]["text"] == before


def test_a_replaced_adapter_stays_with_the_requests_that_began_with_it(llm: LLM, files: Path) -> None:
    """A read of the old weights that ends after the swap must not bring them back under the name."""
    pool = llm.adapters
    assert pool is not None
    first = pool.get("b")
    load = pool.load
    late: list[Any] = []

    def slow(name: str, path: str) -> Any:
        adapter = load(name, path)
        if pool.load is slow:  # another thread swaps between this read and its end
            pool.load = load
            late.append(pool.add("b", str(files / "c"), replace=True))
        return adapter

    pool._loaded.pop("b")  # evicted: the next request reads it again
    pool.load = slow
    try:
        read = pool.get("b")
    finally:
        pool.load = load
    assert read.digest == first.digest, "the request that asked before the swap"
    assert pool.get("b") is late[0] and late[0].digest != first.digest
    pool.add("b", str(files / "b"), replace=True)
    assert pool.get("b").digest == first.digest


def test_many_loads_under_traffic_leave_memory_where_it_was(tmp_path: Path) -> None:
    """200 loads and unloads; tests/stress/adapter_churn.py makes as many as are asked for and reads the memory too."""
    result = churn(400, 1, tmp_path)
    assert result["bad"] == [] and result["adapter_bytes_left"] == 0 and result["answers"] > 0


def test_run_time_loading_is_off_by_default(llm: LLM) -> None:
    with running(HttpServer(ServedModel.of(llm), ServerSettings("tiny", port=0))) as url:
        refused = httpx.post(f"{url}/v1/load_lora_adapter", json={"lora_name": "x", "lora_path": "/x"}, timeout=60)
    assert refused.status_code == 403 and "--runtime-adapters" in refused.text
