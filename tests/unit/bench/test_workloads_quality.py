"""What is asked, and whether an answer is right."""

import pytest

from outrider.bench.quality import function, grade, last_number, letter, passes
from outrider.bench.workloads import load_graded, load_suite
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


def test_numbers_and_letters():
    assert last_number("so 3 + 4 = 7\n#### 1,234.50 dollars") == "1234.50"
    assert last_number("It is 12, then 18.") == "18" and last_number("none") is None
    assert grade({"kind": "gsm8k", "answer": "18"}, "#### 18.0") and not grade({"kind": "gsm8k", "answer": "18"}, "180")
    assert letter("The answer is B.") == "B" and letter("A") == "A" and letter("ABBA") is None
    with pytest.raises(OutriderError, match="unknown check"):
        grade({"kind": "essay"}, "")


PROMPT = 'import math\n\ndef twice(x):\n    """Double x."""\n'
TEST = "def check(candidate):\n    assert candidate(3) == 6\n"


def test_code_is_run():
    assert passes(
        PROMPT,
        "Here:\n```python\ndef twice(x):\n    return int(math.fsum([x, x]))\n```\nDone.",
        TEST,
        "twice",
        seconds=60,
    )
    assert passes(PROMPT, "    return x + x\n", TEST, "twice", seconds=60)
    assert not passes(PROMPT, "```python\ndef twice(x):\n    return x\n```", TEST, "twice")
    assert not passes(PROMPT, "```python\ndef twice(x:\n```", TEST, "twice")
    assert "import math" in function(PROMPT, "```python\ndef twice(x):\n    return 2\n```", "twice")


def test_code_that_hangs_or_grabs_memory_is_stopped():
    assert not passes(PROMPT, "    while True:\n        pass\n", TEST, "twice", seconds=1)
    assert not passes(PROMPT, "    return len(bytearray(4 << 30)) and 6\n", TEST, "twice", seconds=5)


def test_the_canonical_answers_are_right():
    graded = load_graded(3)
    assert sorted({p.category for p in graded}) == ["gsm8k", "humaneval", "mmlu"] and len(graded) == 9
    for prompt in graded:
        assert prompt.check is not None
        if prompt.category != "humaneval":
            assert grade(prompt.check, prompt.check["answer"])


def test_a_record_with_a_prompt_and_turns_is_asked_its_prompt(tmp_path):
    """It was refused for want of a question_id, by a message that named only fields it had."""
    (tmp_path / "p.jsonl").write_text(
        '{"id": "a", "category": "c", "prompt": "hello", "turns": ["other"], "max_tokens": 7}\n'
    )
    (prompt,) = load_suite(str(tmp_path / "p.jsonl"))
    assert (prompt.id, prompt.category, prompt.text, prompt.max_tokens) == ("a", "c", "hello", 7)
