"""The prompts of `outrider bench`."""

import pytest

from outrider.bench.workloads import load_suite
from outrider.types import OutriderError

SPEC_BENCH = {"translation", "summarization", "qa", "math_reasoning", "rag", "writing", "roleplay", "reasoning", "math", "coding",
              "extraction", "stem", "humanities"}  # fmt: skip


def test_both_suites_cover_every_category():
    for suite in ("quick", "full"):
        prompts = load_suite(suite)
        assert {p.category for p in prompts} >= SPEC_BENCH | {"creative", "short", "humaneval", "gsm8k"}
        assert all(p.text.strip() and p.max_tokens > 0 for p in prompts) and len({p.id for p in prompts}) == len(
            prompts
        )
        assert all(p.max_tokens <= 64 for p in prompts if p.category == "short")
    assert len(load_suite("full")) == 480 + 32 + 164 + 200


def test_suites_can_be_thinned():
    assert len(load_suite("quick", limit=1)) == len({p.category for p in load_suite("quick")})
    assert {p.category for p in load_suite("quick", categories=("qa", "short"))} == {"qa", "short"}
    with pytest.raises(OutriderError, match="no category 'poems'"):
        load_suite("quick", categories=("poems",))
    with pytest.raises(OutriderError, match="unknown suite"):
        load_suite("huge")


def test_bad_prompt_files_are_one_line(tmp_path):
    (tmp_path / "p.jsonl").write_text('{"id": "a", "category": "c", "prompt": "hello"}\n{"id": "b"}\n')
    with pytest.raises(OutriderError, match=r"p.jsonl:2"):
        load_suite(str(tmp_path / "p.jsonl"))
    (tmp_path / "p.jsonl").write_text('{"id": "a", "prompt": "hello"}\n{"id": "a", "prompt": "there"}\n')
    with pytest.raises(OutriderError, match="two prompts have the same id"):
        load_suite(str(tmp_path / "p.jsonl"))
    with pytest.raises(OutriderError, match="--data"):
        load_suite("full", tmp_path)


def test_a_record_with_a_prompt_and_turns_is_asked_its_prompt(tmp_path):
    """It was refused for want of a question_id, by a message that named only fields it had."""
    (tmp_path / "p.jsonl").write_text(
        '{"id": "a", "category": "c", "prompt": "hello", "turns": ["other"], "max_tokens": 7}\n'
    )
    (prompt,) = load_suite(str(tmp_path / "p.jsonl"))
    assert (prompt.id, prompt.category, prompt.text, prompt.max_tokens) == ("a", "c", "hello", 7)
