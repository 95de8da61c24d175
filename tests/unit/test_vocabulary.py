"""Words that mislead readers who know the field, or that were only ours, do not come back.

The project says TMA, SM, stream-K, zero-point, chain, tree, draft token. Each entry names the word, why it is out and
what to write instead. Words that are ours and stay are in docs/glossary.md.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = [p for p in (ROOT / "src").rglob("*") if p.suffix in (".py", ".c", ".h", ".cu", ".cuh", ".js")]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")]
KERNELS = [p for p in SOURCES if {"triton", "cuda"} & set(p.parts)]

# word (a regular expression, case ignored): where it is looked for, what to write instead
OUT: dict[str, tuple[list[Path], str]] = {
    r"copy engine": (SOURCES + PAGES, "TMA: CUDA's copy engines are something else"),
    r"\bprocessors?\b(?! time)": (KERNELS, "SM"),
    r"matrix instruction of four warps": (KERNELS, "wgmma"),
    r"\bdealt\b": (SOURCES + PAGES, "distributed; the GEMM is stream-K"),
    r"\babreast\b": (SOURCES + PAGES, "side by side; the kernel is a 2-split"),
    r"\bnursery\b": (SOURCES + PAGES, "grammar sandbox"),
    r"\bclerk\b": (SOURCES + PAGES, "tokenizer process"),
    r"\blet_next_kernel_in\b|\bwait_for_kernel_ahead\b": (SOURCES, "pdl_trigger, pdl_wait"),
    r"\boutrider load ": ([p for p in PAGES if p.name != "CHANGELOG.md"], "bench-server"),
}
# class names that said how a thing came about, or stood for several things
CLASSES = """
Ahead Arm Asked Asks Behind Beside Branches Choice ControlText Cut Dealt Desk Flight Front Guessed Heard Held How Lane
LaneTold Led Machine Pace Parted Passes Piece Planted Room SeqView Share Shelf Spoken StepTold Taken Team Together Told
Walk Wanted Yield
"""

# parts of a program are things, not persons: "no request", "the caller", "a sequence that"
PERSONS = re.compile(r"\b(?:nobody|somebody|whoever|everybody)\b", re.I)
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def words_of(source: str) -> list[tuple[int, str]]:
    """(line, text) of every comment and docstring."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    lines = [(token.start[0], token.string) for token in tokens if token.type == tokenize.COMMENT]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, DOCUMENTED) and (text := ast.get_docstring(node, clean=False)) is not None:
            lines += enumerate(text.splitlines(), node.body[0].lineno)
    return lines


def test_parts_of_a_program_are_not_persons() -> None:
    places = [
        f"{path.relative_to(ROOT)}:{number}: {text.strip()[:90]}"
        for path in SOURCES
        if path.suffix == ".py"
        for number, text in words_of(path.read_text(encoding="utf-8"))
        if PERSONS.search(text)
    ]
    assert not places, "\n".join(places)


@pytest.mark.parametrize("word", OUT)
def test_misleading_words_stay_out(word: str) -> None:
    places, instead = OUT[word]
    matches = []
    for path in places:
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if re.search(word, line, re.I):
                matches.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:90]}")
    assert not matches, f"write {instead}:\n" + "\n".join(matches)


def test_class_names_say_what_a_thing_is() -> None:
    pattern = re.compile(rf"^\s*class ({'|'.join(CLASSES.split())})\b", re.M)
    places = [
        f"{path.relative_to(ROOT)}: class {match[1]}"
        for path in SOURCES
        if path.suffix == ".py"
        for match in pattern.finditer(path.read_text(encoding="utf-8"))
    ]
    assert not places, "\n".join(places)
