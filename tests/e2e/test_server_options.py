"""The options of a server behind others: foreign pages, names, a proxy's path, logs for machines, few file
descriptors."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator

import httpx
import pytest
from tests.server_fakes import FakeEngine, Served, tokenizer
from tests.waiting import PATIENCE

from outrider.server.limits import Keys, RequestGuard
from outrider.server.settings import ServerSettings

TOK = tokenizer()
BODY = {"messages": [{"role": "user", "content": "a secret"}], "max_tokens": 3}
PAGE = "https://app.example"


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    options = {
        "allowed_origins": (PAGE + "/",),
        "trusted_hosts": ("llm.example",),
        "root_path": "/llm",
        "api_keys": ("k",),
    }
    with Served(FakeEngine(TOK), TOK, **options) as s:
        yield s


def post(s: Served, **headers: str) -> httpx.Response:
    return s.http.post("/v1/chat/completions", json=BODY, headers={"Authorization": "Bearer k", **headers})


def test_pages_of_an_allowed_origin_may_call(served: Served) -> None:
    preflight = {
        "Origin": PAGE,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization",
    }
    before = served.http.options("/v1/chat/completions", headers=preflight)  # a browser asks first, without the key
    assert before.status_code == 204 and before.headers["access-control-allow-origin"] == PAGE
    assert (
        "POST" in before.headers["access-control-allow-methods"]
        and "authorization" in before.headers["access-control-allow-headers"]
    )
    answer = post(served, Origin=PAGE)
    assert (
        answer.status_code == 200
        and answer.headers["access-control-allow-origin"] == PAGE
        and answer.headers["vary"] == "Origin"
    )
    refused = served.http.post("/v1/chat/completions", json=BODY, headers={"Origin": PAGE})
    assert (
        refused.status_code == 401 and refused.headers["access-control-allow-origin"] == PAGE
    )  # the page shall see why


def test_clients_for_browsers_may_send_their_headers(served: Served) -> None:
    wanted = (
        "authorization,content-type,x-stainless-lang,x-stainless-retry-count,anthropic-dangerous-direct-browser-access"
    )
    asked = {"Origin": PAGE, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": wanted}
    allowed = served.http.options("/v1/chat/completions", headers=asked).headers["access-control-allow-headers"]
    assert allowed == wanted
    odd = served.http.options("/v1/chat/completions", headers={**asked, "Access-Control-Request-Headers": "a;b<c>"})
    assert "a;b" not in odd.headers["access-control-allow-headers"]


@pytest.mark.parametrize(
    "origin", ["https://evil.example", "http://app.example", "https://app.example.evil.example", "null"]
)
def test_other_pages_may_not(served: Served, origin: str) -> None:
    answer = post(served, Origin=origin)
    assert answer.status_code == 403 and answer.json()["error"]["code"] == "foreign_origin"
    assert answer.headers["access-control-allow-origin"] == origin  # so that the page can say why
    before = served.http.options(
        "/v1/chat/completions", headers={"Origin": origin, "Access-Control-Request-Method": "POST"}
    )
    assert before.status_code == 204 and "access-control-allow-credentials" not in before.headers


LOCAL = [
    "http://localhost:3000",
    "https://localhost",
    "http://127.0.0.1:8080",
    "http://[::1]:5173",
    "vscode-webview://1abc",
    "app://obsidian.md",
]


@pytest.mark.parametrize("origin", [*LOCAL, "tauri://localhost"])
def test_pages_and_programs_of_this_machine_may_call(served: Served, origin: str) -> None:
    answer = post(served, Origin=origin)
    assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] == origin


NOT_LOCAL = [
    "http://localhost.evil.example",
    "http://127.0.0.1.evil.example:80",
    "http://evil.example/localhost",
    "app:",
    "ftp://localhost",
    "file://",
]


@pytest.mark.parametrize("origin", NOT_LOCAL)
def test_what_only_looks_local_may_not(served: Served, origin: str) -> None:
    assert post(served, Origin=origin).status_code == 403


def test_local_pages_are_let_in_on_loopback_only() -> None:
    def may(host: str) -> bool:
        settings = ServerSettings("m", host=host)
        return RequestGuard(None, settings, lambda *_: None, Keys(settings))._may_call("http://localhost:3000")  # type: ignore[arg-type]

    assert may("127.0.0.1") and not may("0.0.0.0")


def test_any_page_may_where_all_are_allowed() -> None:
    with Served(FakeEngine(TOK), TOK, allowed_origins=("*",)) as s:
        answer = post(s, Origin="https://anywhere.example")
        assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] == "https://anywhere.example"


def test_only_trusted_names(served: Served) -> None:
    assert [post(served, Host=h).status_code for h in ("llm.example", "llm.example:443", "evil.example", "")] == [
        200,
        200,
        403,
        403,
    ]


def test_a_path_before_ours(served: Served) -> None:
    """The proxy takes it off; keys, routes and metrics go by what is left."""
    assert served.http.get("/health").status_code == 200  # open, without a key
    assert served.http.get("/").status_code == 200 and served.http.get("/page/app.js").status_code == 200
    assert served.http.get("/v1/models").status_code == 401
    assert post(served).status_code == 200
    text = served.http.get("/metrics", headers={"Authorization": "Bearer k"}).text
    assert 'route="chat",status="200"' in text


SERVER = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
from tests.server_fakes import FakeEngine, VOCAB, tokenizer
from outrider.server.main import listen, serve
from outrider.server.model_info import ServedModel
from outrider.server.settings import ServerSettings
tok, listener = tokenizer(), listen("127.0.0.1", 0)
print(listener.getsockname()[1], flush=True)
serve(ServedModel(FakeEngine(tok), tok, VOCAB, 2048), ServerSettings("fake", port=0, log_json=True, request_timeout=600.0), listener)
"""


def test_few_file_descriptors_and_logs_for_machines() -> None:
    """More connections come than there are descriptors: the server answers on, and says little. Each line it says is
    JSON. (It would say a line of every silent connection that was too slow for it: here none is, however slow the
    machine.)"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path)}
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )
    try:
        assert server.stdout is not None
        port = int(server.stdout.readline())
        url = f"http://127.0.0.1:{port}"
        silent = []
        for i in range(400):
            silent.append(socket.create_connection(("127.0.0.1", port), timeout=PATIENCE))
            if i % 100 == 99:
                assert httpx.get(f"{url}/health", timeout=PATIENCE).status_code == 200
        assert httpx.post(f"{url}/v1/chat/completions", json=BODY, timeout=PATIENCE).status_code == 200
        assert (
            httpx.post(
                f"{url}/v1/chat/completions", json={**BODY, "nonsense": "a secret"}, timeout=PATIENCE
            ).status_code
            == 400
        )
        for connection in silent:
            connection.close()
    finally:
        server.terminate()
        said = server.communicate(timeout=PATIENCE)[1]
    lines = [json.loads(line) for line in said.splitlines()]
    assert 2 <= len(lines) < 40 and all(set(line) == {"time", "level", "logger", "message"} for line in lines)
    assert any("unknown_field" in line["message"] for line in lines) and "a secret" not in said
