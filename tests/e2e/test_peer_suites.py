"""The cases of llama.cpp's and vLLM's server tests (tests/peer_suites.py), and the table of them in the docs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests import peer_suites_anthropic, peer_suites_vllm
from tests.conformance import CONTEXT, Api, endless_target
from tests.peer_suites import CASES, PeerCase
from tests.server_fakes import FakeEngine, Served, tokenizer

from outrider.config import EngineConfig
from outrider.llm import LLM

assert peer_suites_anthropic and peer_suites_vllm  # their cases are in the table, too
PAGE = Path(__file__).parents[2] / "docs" / "api-reference.md"


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    folder = endless_target(tmp_path_factory.mktemp("peers") / "target")
    llm = LLM.load(str(folder), drafter="ngram", threads=1, engine=EngineConfig(max_batch=8, max_context=CONTEXT))
    assert llm.tokenizer is not None
    with (
        Served(
            llm.engine, llm.tokenizer, CONTEXT, llm.config.vocab_size, max_concurrent=8, timeout=120.0
        ) as open_to_all,
        Served(FakeEngine(tok := tokenizer()), tok, api_keys=("secret",)) as keyed,
    ):
        client = Api(open_to_all.url)
        client.keyed = keyed.url
        yield client


@pytest.mark.parametrize("case", [c for c in CASES if c.check is not None], ids=lambda c: f"{c.suite} {c.name}")
def test_peer_case(api: Api, case: PeerCase) -> None:
    assert case.check is not None
    case.check(api)


def test_the_docs_tell_the_counts_and_every_purpose() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for case in CASES:
        assert not case.purpose or f"| {case.purpose}" in text, f"{case.name}: no row begins with {case.purpose!r}"
    for suite in sorted({c.suite for c in CASES}):
        kinds = Counter(
            "missing" if c.check is None else "purpose" if c.purpose else "pass" for c in CASES if c.suite == suite
        )
        apply = kinds["pass"] + kinds["missing"]
        counts = [kinds.total(), kinds["purpose"], apply, kinds["pass"], f"{100 * kinds['pass'] / apply:.1f} %"]
        row = f"| {suite} | {' | '.join(map(str, counts))} |"
        assert row in text, f"docs/api-reference.md should say: {row}"
        assert kinds["pass"] / apply >= 0.96, [c.name for c in CASES if c.suite == suite and c.check is None]
    names = [f"{c.suite} {c.name}" for c in CASES]
    assert len(set(names)) == len(names), [n for n, count in Counter(names).items() if count > 1]
