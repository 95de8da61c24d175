"""The Vercel AI SDK (npm) as a client. Run by `make test-clients`, which installs what package.json pins."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from tests import tiny
from tests.server_fakes import Served

from outrider.config import EngineConfig
from outrider.llm import LLM

HERE = Path(__file__).parent


def test_vercel_ai_sdk(tmp_path: Path) -> None:
    if shutil.which("node") is None or not (HERE / "node_modules" / "ai").is_dir():
        pytest.skip("needs node and `npm install` in tests/clients: make test-clients")
    tiny.write_target("llama", tmp_path / "target")
    config = tmp_path / "target" / "config.json"  # a token is a byte here: tools need room
    config.write_text(config.read_text().replace('"max_position_embeddings": 512', '"max_position_embeddings": 2048'))
    llm = LLM.load(str(tmp_path / "target"), drafter="ngram", draft_tokens=2, threads=1, engine=EngineConfig(10, 2048))
    assert llm.tokenizer is not None
    with Served(llm.engine, llm.tokenizer, llm.engine.max_context, llm.config.vocab_size, max_concurrent=8) as served:
        command = ["node", str(HERE / "vercel.mjs"), f"{served.url}/v1", "fake"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
