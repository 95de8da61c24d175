"""deploy/nginx.conf with a real nginx: the page's own requests pass, a stranger's origin does not, answers stream."""

from __future__ import annotations

import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from tests.server_fakes import FakeEngine, Served, tokenizer
from tests.waiting import PATIENCE, until

NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
pytestmark = pytest.mark.skipif(NGINX is None, reason="nginx is not installed")
SNIPPET = Path(__file__).resolve().parents[2] / "deploy" / "nginx.conf"
TOK = tokenizer()
ENGINE = FakeEngine(TOK, hold=4)
BODY = {"model": "fake", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 30}


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("nginx")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with Served(ENGINE, TOK) as served:
        text = (
            SNIPPET.read_text()
            .replace("outrider:8000", f"127.0.0.1:{served.port}")
            .replace("listen 80;", f"listen 127.0.0.1:{port};")
        )
        places = "".join(f"{n}_temp_path {folder}/{n}; " for n in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi"))
        config = folder / "nginx.conf"
        config.write_text(f"daemon off; pid {folder}/pid; events {{}}\nhttp {{ access_log off; {places}\n{text}\n}}\n")
        process = subprocess.Popen([str(NGINX), "-c", str(config), "-e", str(folder / "errors")])
        try:
            until(lambda: process.poll() is not None or answers(port))
            assert process.poll() is None, (folder / "errors").read_text()
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(30)


def answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_own_origin_passes_and_others_do_not(proxy: str) -> None:
    def status(origin: str | None) -> int:
        headers = {} if origin is None else {"Origin": origin}
        return httpx.post(f"{proxy}/v1/chat/completions", json=BODY, headers=headers, timeout=PATIENCE).status_code

    ENGINE.go.set()
    assert httpx.get(proxy, timeout=PATIENCE).status_code == 200
    assert [status(o) for o in (None, proxy, proxy.replace("http:", "https:"))] == [200, 200, 200]
    assert [status(o) for o in ("http://evil.example", proxy + ".evil.example", "null")] == [403, 403, 403]


def test_tokens_come_as_they_are_made(proxy: str) -> None:
    ENGINE.go.clear()
    with httpx.stream(
        "POST", f"{proxy}/v1/chat/completions", json={**BODY, "stream": True}, timeout=PATIENCE
    ) as answer:
        lines = answer.iter_lines()
        assert next(lines).startswith("data: ")  # it comes although the answer cannot end yet
        ENGINE.go.set()
        assert "data: [DONE]" in lines
