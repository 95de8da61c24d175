"""An operator's view of a running server: certificates, keys read again, process metrics."""

from __future__ import annotations

import asyncio
import os
import signal
import ssl
from pathlib import Path

import httpx
import pytest
from tests.running import running
from tests.server_fakes import VOCAB, FakeEngine, Served, tokenizer

from outrider.server.main import HttpServer
from outrider.server.model_info import ServedModel
from outrider.server.settings import ServerSettings, read_keys
from outrider.types import OutriderError

TLS = Path(__file__).parents[1] / "data" / "tls"
TOK = tokenizer()


def server(**settings: object) -> HttpServer:
    return HttpServer(ServedModel(FakeEngine(TOK), TOK, VOCAB, 2048), ServerSettings("fake", port=0, **settings))  # type: ignore[arg-type]


def test_https() -> None:
    trust = ssl.create_default_context(cafile=str(TLS / "cert.pem"))
    with running(server(ssl_certfile=TLS / "cert.pem", ssl_keyfile=TLS / "key.pem")) as url:
        with httpx.Client(base_url=url.replace("http:", "https:"), verify=trust, timeout=120) as http:
            body = {"prompt": "hello", "max_tokens": 4, "stream": True}
            assert "[DONE]" in http.post("/v1/completions", json=body).text
            assert http.get("/health").status_code == 200
        with pytest.raises(httpx.TransportError):
            httpx.get(url + "/health", timeout=120)


@pytest.mark.parametrize(
    "certificate, key, told",
    [("missing.pem", None, "No such file"), ("cert.pem", None, "can't use"), ("key.pem", "key.pem", "can't use")],
)
def test_a_certificate_that_cannot_be_used_is_found_before_the_model_is_loaded(
    certificate: str, key: str | None, told: str
) -> None:
    with pytest.raises(OutriderError, match=told):
        ServerSettings("fake", ssl_certfile=TLS / certificate, ssl_keyfile=TLS / key if key else None)
    with pytest.raises(OutriderError, match="needs --ssl-certfile"):
        ServerSettings("fake", ssl_keyfile=TLS / "key.pem")


def test_keys_are_read_again_on_sighup(tmp_path: Path) -> None:
    """In the main thread, where signals arrive."""
    file = tmp_path / "keys"
    file.write_text("old\n")

    async def check() -> None:
        it = server(api_keys=read_keys("own", file), api_key="own", api_key_file=file)
        keys = it.app.state.server.keys
        read = asyncio.Event()
        reload = keys.reload
        keys.reload = lambda: (reload(), read.set())
        task = asyncio.create_task(it.serve())
        while not it.started:
            await asyncio.sleep(0.01)
        url = f"http://127.0.0.1:{it.servers[0].sockets[0].getsockname()[1]}"
        async with httpx.AsyncClient(base_url=url, timeout=120) as http:

            async def allowed() -> list[str]:
                keys = ("own", "old", "new")
                return [
                    k
                    for k in keys
                    if (await http.get("/v1/models", headers={"Authorization": f"Bearer {k}"})).status_code == 200
                ]

            assert await allowed() == ["own", "old"]
            for text, then in (("# the old one leaked\nnew\n", ["own", "new"]), ("# nobody\n", ["own", "new"])):
                file.write_text(text)  # a file without keys is a mistake: they stay as they were
                read.clear()
                os.kill(os.getpid(), signal.SIGHUP)
                await asyncio.wait_for(read.wait(), 60)
                assert await allowed() == then
        it.should_exit = True
        await task

    before = signal.getsignal(signal.SIGHUP)
    try:
        asyncio.run(check())
    finally:
        signal.signal(signal.SIGHUP, before)


def test_process_metrics() -> None:
    with Served(FakeEngine(TOK), TOK) as s:
        text = httpx.get(f"{s.url}/metrics", timeout=120).text
    for name in (
        "process_resident_memory_bytes",
        "process_cpu_seconds_total",
        "process_open_fds",
        "outrider_build_info{",
    ):
        assert f"\n{name}" in text, name
