"""`outrider bench-server MODEL`: the server that is started for the test."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest

from outrider.cli.bench_server import server
from outrider.types import OutriderError

TALKATIVE = """#!{python}
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer

class Answer(BaseHTTPRequestHandler):
    def do_GET(self):
        sys.stderr.write("a request was answered\\n" * 20000)  # more than a pipe holds
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{{"data": [{{"id": "m"}}]}}')

server = HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Answer)
print(f"serving m at http://127.0.0.1:{{server.server_port}} (page at /)", flush=True)
server.serve_forever()
"""
FAILING = "#!{python}\nimport sys\nsys.exit('drafter: none\\nno such model')\n"


def stand_in(path: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path.write_text(script.format(python=sys.executable))
    os.chmod(path, 0o755)
    monkeypatch.setattr(sys, "executable", str(path))
    monkeypatch.setenv("OUTRIDER_CACHE", str(path.parent / "cache"))


def test_a_server_that_logs_a_lot_is_not_held_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(tmp_path / "python", TALKATIVE, monkeypatch)
    with server("m", "auto", 1, None) as url:
        for _ in range(3):
            assert urlopen(f"{url}/v1/models", timeout=120).status == 200


def test_a_server_that_does_not_start_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(tmp_path / "python", FAILING, monkeypatch)
    with (
        pytest.raises(OutriderError, match="the server for m did not start: no such model"),
        server("m", "auto", 1, None),
    ):
        pass


def test_sigterm_ends_the_server_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(tmp_path / "python", TALKATIVE, monkeypatch)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended, server("m", "auto", 1, None) as url:
        os.kill(os.getpid(), signal.SIGTERM)
        signal.pause()  # in case it is not delivered at once
    assert ended.value.code == 143 and signal.getsignal(signal.SIGTERM) is before
    with pytest.raises(URLError):
        urlopen(f"{url}/health", timeout=120)
