"""Gemma 4's own metadata: the files are the official ones, their sampling reaches every API, and their chat templates
give transformers' text and ids.

OUTRIDER_GEMMA_TOKENIZER names the official tokenizer.json (or .json.xz), for the slow test of the ids."""

from __future__ import annotations

import hashlib
import lzma
import os
from dataclasses import replace
from pathlib import Path
from shutil import copyfile
from typing import Any

import pytest
from tests.gemma_conversations import Conversation, conversation
from tests.server_fakes import FakeEngine, Served, tokenizer
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from outrider.engine.step import Request
from outrider.engine.text import Tokenizer
from outrider.types import OutriderError
from outrider.weights import hub
from outrider.weights.files import text_files

DATA = Path(__file__).parents[2] / "data" / "gemma4"
TEMPLATES = sorted(path.name for path in (DATA / "templates").iterdir())
OFFICIAL = {
    "E2B-it/config.json": "1b28f3d2c3100f6c594754b81107428bd7b822a7f48272ca681dae9d2ec38330",
    "E4B-it/config.json": "33b10c02df3c2e8536cf323d29d53262aaa2f4d11dbe19bc729373fbe90295d4",
    "E2B-it/generation_config.json": "d4226bbe3117d2d253ba4609720ba82c6c4ce4627a9a6ae05387c78983ac03de",
    "E2B-it/processor_config.json": "32bdf45d2ad4cc29a0822ddd157a182de76644f0419a6228d151495256e9813c",
    "E2B-it/tokenizer_config.json": "90c3a3ba5bf53818383a58e1a776cbcacd2a038d4812eaa373e1522f2d06f3df",
    "E2B-it-assistant/config.json": "7f42f559a6a69ffaeaf6b61a1ece3a562a2ed5ad00b8d30f16917ba5ab1bcbe9",
    "templates/gemma4_v4.jinja": "2f1b4d75d067bae3fe44e676721c7f077d243bc007156cb9c2f8b5836613d082",
}
TOKENIZER = os.environ.get("OUTRIDER_GEMMA_TOKENIZER", "")
TOKENIZER_SHA = "cc8d3a0ce36466ccc1278bf987df5f71db1719b9ca6b4118264f45cb627bfe0f"


def official_folder(folder: Path, template: str, tokenizer_json: str) -> Path:
    for name in ("config.json", "generation_config.json", "processor_config.json", "tokenizer_config.json"):
        copyfile(DATA / "E2B-it" / name, folder / name)
    copyfile(DATA / "templates" / template, folder / "chat_template.jinja")
    (folder / "tokenizer.json").write_text(tokenizer_json, encoding="utf-8")
    return folder


@pytest.mark.parametrize("name", OFFICIAL)
def test_the_files_are_the_official_ones(name: str) -> None:
    assert hashlib.sha256((DATA / name).read_bytes()).hexdigest() == OFFICIAL[name]


def test_generation_config_reaches_every_api(tmp_path: Path) -> None:
    official = text_files(hub.resolve(official_folder(tmp_path, TEMPLATES[-1], "{}"), weights=False))
    assert set(official.eos_ids) == {1, 106, 50}
    small = tokenizer(gemma=True)
    files = replace(official, build=small.files.build, specials=small.files.specials)
    served = Tokenizer(files)
    engine = FakeEngine(served)
    requests: list[Request] = []

    def say(request: Request) -> str:
        requests.append(request)
        return "a"

    engine.say = say
    messages = [{"role": "user", "content": "q"}]
    bodies: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": messages},
        "/v1/completions": {"prompt": "q"},
        "/v1/responses": {"input": "q"},
        "/v1/messages": {"messages": messages, "max_tokens": 5},
        "/api/chat": {"model": "fake", "messages": messages, "stream": False},
        "/api/generate": {"model": "fake", "prompt": "q", "stream": False},
    }
    with Served(engine, served) as s:
        for path, body in bodies.items():
            requests.clear()
            answer = s.http.post(path, json=body)
            assert answer.status_code == 200, (path, answer.text)
            (params,) = [request.params for request in requests]
            assert (params.temperature, params.top_k, params.top_p) == (1.0, 64, 0.95), path


def theirs(case: Conversation, template: str, specials: dict[str, str]) -> str | None:
    """transformers' text; None if the template refuses the conversation."""
    options = {"add_generation_prompt": case.add_generation_prompt, **case.variables, **specials}
    try:
        (text,), _ = render_jinja_template([case.messages], tools=case.tools, chat_template=template, **options)
    except Exception:
        return None
    return str(text)


def ours(case: Conversation, tok: Tokenizer) -> str | None:
    try:
        return tok.render(case.messages, case.tools, case.add_generation_prompt, **case.variables)
    except OutriderError:
        return None


@pytest.mark.parametrize("template", TEMPLATES)
def test_conversations_have_transformers_text(template: str) -> None:
    source = (DATA / "templates" / template).read_text(encoding="utf-8")
    tok = Tokenizer(replace(tokenizer(gemma=True).files, chat_template=source))
    rendered = 0
    for seed in range(200):
        case = conversation(seed)
        want = theirs(case, source, dict(tok.files.specials))
        assert ours(case, tok) == want, seed
        rendered += want is not None
    assert rendered >= 150


@pytest.mark.slow
@pytest.mark.skipif(not TOKENIZER, reason="OUTRIDER_GEMMA_TOKENIZER names the official tokenizer.json")
@pytest.mark.parametrize("template", TEMPLATES)
def test_conversations_have_transformers_ids(tmp_path: Path, template: str) -> None:
    path = Path(TOKENIZER)
    data = lzma.decompress(path.read_bytes()) if path.suffix == ".xz" else path.read_bytes()
    assert hashlib.sha256(data).hexdigest() == TOKENIZER_SHA
    folder = official_folder(tmp_path, template, data.decode())
    tok = Tokenizer(text_files(hub.resolve(folder, weights=False)))
    reference = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    source = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    compared = 0
    for seed in range(200):
        case = conversation(seed)
        text = theirs(case, source, dict(tok.files.specials))
        assert ours(case, tok) == text, seed
        if text is None:
            continue
        ids = tok.prompt(case.messages, case.tools, case.add_generation_prompt, **case.variables).ids
        assert ids == reference(text, add_special_tokens=False)["input_ids"], seed
        compared += 1
    assert compared >= 150
