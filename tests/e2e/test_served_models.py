"""Two models in one server whose memory holds one: mixed requests, none wrong, none lost."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from tests import tiny
from tests.running import running

from outrider.cli.serve import check_options
from outrider.config import EngineConfig, LoadSettings
from outrider.llm import LLM
from outrider.server.main import HttpServer
from outrider.server.model_pool import ModelPool, read_names
from outrider.server.settings import ServerSettings
from outrider.types import OutriderError

ENGINE = EngineConfig(max_batch=4, max_context=128)


def load_model(model: str) -> LLM:
    return LLM.load(model, drafter="ngram", draft_tokens=2, threads=1, engine=ENGINE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models")
    tiny.write_target("llama", path / "one")
    tiny.write_target("qwen3", path / "two")
    return path


def ask(http: httpx.Client, model: str, i: int) -> str:
    body = {"model": model, "prompt": f"number {i}", "max_tokens": 6, "seed": i, "temperature": 1.0}
    answer = http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == model
    return str(answer.json()["choices"][0]["text"])


def test_mixed_requests_under_memory_pressure(folder: Path) -> None:
    listed = read_names([str(folder / "one"), f"other={folder / 'two'}"])
    settings = ServerSettings("one", port=0, max_concurrent=4, max_queued=64)
    shelf = ModelPool.listed(listed, load_model, ENGINE, 1, settings, cuda=False)  # a byte: each of them only alone
    with running(HttpServer(shelf, settings)) as url, httpx.Client(base_url=url, timeout=120) as http:
        cards = http.get("/v1/models").json()["data"]
        assert [(c["id"], c["outrider"]["state"]) for c in cards] == [("one", "unloaded"), ("other", "unloaded")]
        assert all(c["outrider"]["max_context"] == 128 and c["outrider"]["bytes"] > 0 for c in cards)
        work = [(("one", "other")[i // 4 % 2], i) for i in range(24)]
        alone = {item: ask(http, *item) for item in work[:8]}  # nobody beside them
        with ThreadPoolExecutor(8) as pool:
            together = dict(zip(work, pool.map(lambda item: ask(http, *item), work)))
        assert {item: together[item] for item in alone} == alone and alone[work[0]] != alone[work[4]]
        states = {c["id"]: c["outrider"]["state"] for c in http.get("/v1/models").json()["data"]}
        assert sorted(states.values()) == ["loaded", "unloaded"]
        metrics = http.get("/metrics").text
        evictions = dict(
            line.rsplit(" ", 1) for line in metrics.splitlines() if line.startswith("outrider_model_evictions_total{")
        )
        assert len(evictions) == 2 and min(map(float, evictions.values())) >= 1
        assert f"outrider_new_tokens_total {6.0 * 32}" in metrics  # nothing is lost with a model that was put back
        # either model for tokens too; unknown ones are told which there are
        assert http.post("/tokenize", json={"model": "other", "prompt": "ab"}).json()["count"] == 2
        missing = http.post(
            "/v1/chat/completions", json={"model": "third", "messages": [{"role": "user", "content": "x"}]}
        )
        assert missing.status_code == 404 and "'one', 'other'" in missing.json()["error"]["message"]
        assert [m["name"] for m in http.get("/api/tags").json()["models"]] == ["one", "other"]
        assert http.post("/api/show", json={"model": "third"}).status_code == 404


def test_what_makes_no_sense_with_several_models() -> None:
    listed = read_names(["smollm2", "other=org/name"])
    for load, name, memory_gib, message in (
        (LoadSettings(), "x", None, "--name is for one model"),
        (LoadSettings(drafter="some/drafter"), None, None, "can't fit 2 models"),
        (LoadSettings(), None, 0.0, "--memory must be more than 0"),
        (LoadSettings(tensor_parallel=2), None, None, "--tensor-parallel serves one model"),
    ):
        with pytest.raises(OutriderError, match=message):
            check_options(listed, load, name=name, memory_gib=memory_gib)
    with pytest.raises(OutriderError, match="--memory is shared by several models"):
        check_options(read_names(["smollm2"]), LoadSettings(), name=None, memory_gib=4.0)
