"""Masks that advance along a draft. Catches: a draft followed past where it leaves the grammar, a matcher left advanced
after masks(), an end token refused or anything else allowed when the text is complete."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher
from tests.server_fakes import VOCAB, masks, tokenizer

from outrider.engine import grammar
from outrider.engine.grammar import GrammarCompiler, GrammarMatcher, schema_grammar
from outrider.server.grammar_sandbox import GrammarSandbox
from outrider.server.grammar_source import GrammarSource
from outrider.types import OutriderError

TOK = tokenizer()
COMPILER = GrammarCompiler(TOK.json, VOCAB, TOK.eos_ids)
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["x", "yy"]}, "n": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["a", "n"],
    "additionalProperties": False,
}


def allowed(row: np.ndarray) -> set[str]:
    return {TOK.token_bytes(int(i)).decode() for i in np.nonzero(row)[0]}


def test_a_draft_is_cut_where_it_leaves_the_grammar() -> None:
    matcher = COMPILER.compile(schema_grammar(SCHEMA)).matcher()
    drafts = TOK.encode('{"a":"z"}')
    rows, valid = masks(matcher, drafts)
    assert rows.shape == (len(drafts) + 1, VOCAB) and rows.dtype == bool
    assert valid == len('{"a":"')
    assert allowed(rows[0]) == {"{"} and allowed(rows[valid]) == {"x", "y"}
    assert rows[valid + 1 :].all()  # not reachable


def test_masks_leave_the_matcher_where_it_was() -> None:
    matcher = COMPILER.compile(schema_grammar(SCHEMA)).matcher()
    matcher.advance(TOK.encode('{"a":'))
    before, _ = masks(matcher, [])
    masks(matcher, [*TOK.encode('"x","n":7}'), *TOK.eos_ids])
    masks(matcher, TOK.encode("nonsense"))
    after, _ = masks(matcher, [])
    assert (before == after).all()
    matcher.advance(TOK.encode('"yy","n":12}'))
    assert matcher.done


def test_a_complete_text_allows_end_tokens_only() -> None:
    matcher = COMPILER.compile(schema_grammar(SCHEMA)).matcher()
    matcher.advance(TOK.encode('{"a":"x","n":7}'))
    rows, valid = masks(matcher, [TOK.eos_ids[1], 50])
    assert set(np.nonzero(rows[0])[0]) == set(TOK.eos_ids) and valid == 1
    matcher.advance([TOK.eos_ids[1]])


def test_white_space_is_bounded() -> None:
    matcher = COMPILER.compile(schema_grammar({"type": "object"})).matcher()
    assert masks(matcher, TOK.encode("{   "))[1] == 2  # one blank, not three


def test_a_failure_ends_the_text_and_says_why() -> None:
    matcher = COMPILER.compile(schema_grammar({"type": "object"})).matcher()
    matcher.advance(TOK.encode("x"))
    assert matcher.failed is not None and "outside the grammar" in matcher.failed
    rows, _ = masks(matcher, [50, 60])
    assert set(np.nonzero(rows[0])[0]) == set(TOK.eos_ids)


@pytest.mark.parametrize(
    "schema",
    [{"not": {}}, {"type": "strin"}, {"$ref": "#"}, {"$ref": "http://x/y"}, {"type": "string", "pattern": "(?=a)"}],
)
def test_schemas_that_cannot_be_enforced_are_refused(schema: dict[str, object]) -> None:
    with pytest.raises(OutriderError, match="can't be compiled"):
        COMPILER.compile(schema_grammar(schema))


def test_regex() -> None:
    matcher = COMPILER.compile(LLMatcher.grammar_from_regex("ab{1,2}")).matcher()
    assert masks(matcher, TOK.encode("abbb"))[1] == 3


@settings(max_examples=30)
@given(seed=st.integers(0, 2**32 - 1), width=st.integers(0, 5))
def test_masked_choice_with_drafts_is_masked_choice_without(seed: int, width: int) -> None:
    """Whatever is drafted, choosing under the masks gives the text that choosing one token at a time gives, and it is
    valid."""
    rng = np.random.default_rng(seed)
    prefer = rng.permutation(VOCAB)

    def choose(row: np.ndarray) -> int:
        return int(prefer[np.nonzero(row[prefer])[0][0]])

    grammar = COMPILER.compile(schema_grammar(SCHEMA))
    plain = []
    matcher = grammar.matcher()
    while not plain or plain[-1] not in TOK.eos_ids:
        plain.append(choose(masks(matcher, [])[0][0]))
        matcher.advance(plain[-1:])
    drafted = []
    matcher = grammar.matcher()
    while not drafted or drafted[-1] not in TOK.eos_ids:
        at = len(drafted)
        drafts = [t if rng.random() < 0.8 else int(rng.integers(VOCAB)) for t in plain[at : at + width]]
        rows, _ = masks(matcher, drafts)
        step: list[int] = []
        for j in range(len(drafts) + 1):
            step.append(choose(rows[j]))
            if step[-1] in TOK.eos_ids or j == len(drafts) or step[-1] != drafts[j]:
                break
        matcher.advance(step)
        drafted += step
    assert drafted == plain
    value = json.loads(TOK.decode(plain))
    assert value["a"] in ("x", "yy") and 0 <= value["n"] <= 99


def test_a_draft_that_breaks_the_parser_costs_the_draft_only() -> None:
    """Plain decoding might never go where the draft went, so a failure there must not end the answer."""

    class Parser:
        """Refuses nothing; its mask fails once 7 has been consumed."""

        def __init__(self) -> None:
            self.taken: list[int] = []

        def deep_copy(self) -> Parser:
            return Parser()

        def is_stopped(self) -> bool:
            return False

        def try_consume_tokens(self, tokens: list[int]) -> int:
            self.taken += tokens
            return len(tokens)

        def rollback(self, n: int) -> bool:
            del self.taken[len(self.taken) - n :]
            return True

        def unsafe_compute_mask_ptr(self, pointer: int, size: int) -> None: ...

        def is_error(self) -> bool:
            return 7 in self.taken

        def get_error(self) -> str:
            return "too complex"

    matcher = GrammarMatcher(Parser(), 32, [1])
    matcher.advance([3, 4])
    rows = matcher.bits([5, 7, 6])
    assert matcher.failed is None and (rows[2:] == -1).all()  # the draft ends before the token behind which it fails
    assert matcher._inner.taken == [3, 4]
    matcher.advance([7])
    assert masks(matcher, [])[0][0].nonzero()[0].tolist() == [1] and "too complex" in str(
        matcher.failed
    )  # there plain decoding fails too


AMBIGUOUS = 'root ::= e\ne ::= e e | [a-z ] | ""'


def test_masks_that_take_too_long_end_their_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock is ours: each look at it is a tenth of a second of processor time."""
    now = iter(range(10**6))
    monkeypatch.setattr(grammar.time, "thread_time", lambda: next(now) / 10)
    matcher = COMPILER.compile(schema_grammar(SCHEMA)).matcher()
    masks(matcher, [])
    assert matcher.failed is None  # a slow mask or two are forgiven
    rows, _ = masks(matcher, TOK.encode('{"a":"x"}'))
    assert matcher.slow and matcher.failed is not None and "take too long" in matcher.failed
    assert allowed(rows[0]) == {"{"}
    masks(matcher, TOK.encode("{"))
    assert "take too long" in str(matcher.failed)  # it is not tried anew


def test_a_trial_follows_the_grammar_and_refuses_slow_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    sandbox = GrammarSandbox(COMPILER, 1.0, 1 << 28)
    source = GrammarSource("gbnf", AMBIGUOUS, "grammar")
    computed: list[int] = []
    fill = GrammarMatcher._fill
    monkeypatch.setattr(GrammarMatcher, "_fill", lambda self, row: computed.append(1) or fill(self, row))
    assert sandbox._compile(source)
    assert len(computed) > grammar.REHEARSED  # with these few tokens it is quick
    monkeypatch.setattr(grammar, "MASK_SECONDS", 0.0)
    monkeypatch.setattr(grammar, "MASK_BURST", 0.0)
    with pytest.raises(OutriderError, match="take too long"):
        sandbox._compile(source)
