"""deploy/nginx.conf with a real nginx: the page's own requests pass, a stranger's origin does not, answers stream."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from tests.server_fakes import FakeEngine, Served, tokenizer

NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
pytestmark = pytest.mark.skipif(NGINX is None, reason="nginx is not installed")
SNIPPET = Path(__file__).resolve().parents[2] / "deploy" / "nginx.conf"
TOK = tokenizer()
BODY = {"model": "fake", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 30}


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("nginx")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with Served(FakeEngine(TOK, delay=0.05), TOK) as served:
        text = SNIPPET.read_text().replace("outrider:8000", f"127.0.0.1:{served.port}").replace("listen 80;", f"listen 127.0.0.1:{port};")
        places = "".join(f"{n}_temp_path {folder}/{n}; " for n in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi"))
        config = folder / "nginx.conf"
        config.write_text(f"daemon off; pid {folder}/pid; events {{}}\nhttp {{ access_log off; {places}\n{text}\n}}\n")
        process = subprocess.Popen([str(NGINX), "-c", str(config), "-e", str(folder / "errors")])
        try:
            deadline = time.monotonic() + 30
            while socket.socket().connect_ex(("127.0.0.1", port)) != 0:
                assert process.poll() is None and time.monotonic() < deadline, (folder / "errors").read_text()
                time.sleep(0.05)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(30)


def test_own_origin_passes_and_others_do_not(proxy: str) -> None:
    def status(origin: str | None) -> int:
        headers = {} if origin is None else {"Origin": origin}
        return httpx.post(f"{proxy}/v1/chat/completions", json=BODY, headers=headers, timeout=60).status_code

    assert httpx.get(proxy).status_code == 200
    assert [status(o) for o in (None, proxy, proxy.replace("http:", "https:"))] == [200, 200, 200]
    assert [status(o) for o in ("http://evil.example", proxy + ".evil.example", "null")] == [403, 403, 403]


def test_tokens_come_as_they_are_made(proxy: str) -> None:
    times = []
    with httpx.stream("POST", f"{proxy}/v1/chat/completions", json={**BODY, "stream": True}, timeout=60) as answer:
        for _ in answer.iter_lines():
            times.append(time.monotonic())
    assert times[-1] - times[0] > 0.1  # not in one piece at the end
