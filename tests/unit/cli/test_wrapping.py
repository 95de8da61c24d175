"""Words at the terminal's edge. Bugs caught: a word that is cut in two, text that is lost or doubled, code with line
breaks that it does not have."""

from __future__ import annotations

import random

import pytest

from outrider.cli.wrapping import WordWrap


class Screen:
    """A terminal of this width: it breaks lines at its edge, moves the cursor left and erases to the end of a line."""

    def __init__(self, width: int):
        self.width = width
        self.lines = [""]
        self.broken: list[int] = []  # lines that the terminal broke by itself

    def write(self, text: str) -> None:
        at = 0
        while at < len(text):
            if text.startswith("\x1b[", at):
                end = next(i for i in range(at + 2, len(text)) if text[i].isalpha())
                if text[end] == "D":
                    self.lines[-1] = self.lines[-1][: -int(text[at + 2 : end])]
                at = end + 1
                continue
            if text[at] == "\n":
                self.lines.append("")
            else:
                if len(self.lines[-1]) == self.width:
                    self.broken.append(len(self.lines) - 1)
                    self.lines.append("")
                self.lines[-1] += text[at]
            at += 1


def shown(text: str, width: int, pieces: int) -> Screen:
    screen = Screen(width)
    wrap = WordWrap(screen.write, lambda: width)
    cuts = sorted(random.Random(pieces).choices(range(len(text) + 1), k=pieces))
    for start, end in zip([0, *cuts], [*cuts, len(text)]):
        wrap(text[start:end])
    return screen


PROSE = "The lighthouse keeper counted extraordinary waves until the morning came and then slept.\n\nA second line."


@pytest.mark.parametrize("width", [16, 20, 33, 80])
@pytest.mark.parametrize("pieces", [0, 7, 40])
def test_words_stay_whole(width: int, pieces: int) -> None:
    screen = shown(PROSE, width, pieces)
    assert " ".join(screen.lines).split() == PROSE.split()
    assert not screen.broken and all(len(line) < width for line in screen.lines)


def test_a_word_longer_than_the_line_is_cut_and_complete() -> None:
    text = "see https://example.org/" + "x" * 60 + " there"
    screen = shown(text, 24, 9)
    assert "".join(screen.lines).replace(" ", "") == text.replace(" ", "")
    assert not screen.broken


def test_code_gets_no_line_breaks() -> None:
    code = "```python\nprint('a rather long line of code that does not fit')\n```\nand words again after the code block"
    screen = shown(code, 20, 12)
    assert screen.broken  # by the terminal alone: a copy of the text has one line
    assert " ".join(screen.lines).split()[-5:] == ["again", "after", "the", "code", "block"]
