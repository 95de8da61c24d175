"""Breaks streamed text between words at the terminal's edge."""

from __future__ import annotations

from collections.abc import Callable

from rich.cells import cell_len

from .common import out

FENCE = "```"


class WordWrap:
    """Writes pieces of a text as they come. A word that crosses the edge moves to the next line.

    Lines of a fenced code block are written unchanged and wrapped by the terminal, so that they can be copied.
    """

    def __init__(self, write: Callable[[str], None], width: Callable[[], int]):
        self.write = write
        self.width = width
        self.column = 0
        self.word = ""  # the visible part of the last word
        self.line = ""  # the beginning of the line, as far as a fence can reach
        self.in_code = False

    def __call__(self, text: str) -> None:
        written = []
        width = max(2, self.width() - 1)  # terminals wrap by themselves after the last column
        for char in text:
            written.append(self.placed(char, width))
        if written:
            self.write("".join(written))

    def placed(self, char: str, width: int) -> str:
        """The text to write for the next character."""
        if char == "\n":
            if self.line.lstrip().startswith(FENCE):
                self.in_code = not self.in_code
            self.start_line()
            self.line = ""
            return char
        if len(self.line) < 80:
            self.line += char
        fenced = self.in_code or self.line.lstrip().startswith(FENCE)
        if fenced or char in "\r\t\x1b":
            return char
        cells = cell_len(char)
        if char == " ":
            self.word = ""
            if self.column + cells > width:
                self.start_line()
                return "\n"
            self.column += cells
            return char
        if self.column + cells <= width:
            self.word += char
            self.column += cells
            return char
        moved = self.word
        if cell_len(moved) == self.column:  # the word fills the line and is cut
            moved = ""
        erase = f"\x1b[{cell_len(moved)}D\x1b[K" if moved else ""
        self.start_line()
        self.word = moved + char
        self.column = cell_len(self.word)
        return f"{erase}\n{self.word}"

    def start_line(self) -> None:
        self.column = 0
        self.word = ""


def answer_writer() -> Callable[[str], None]:
    """Writes an answer to standard output: wrapped at words on a terminal, else unchanged."""

    def write(text: str) -> None:
        out.print(text, end="")

    if not out.is_terminal or out.is_dumb_terminal:
        return write

    def write_raw(text: str) -> None:  # rich would show the escapes
        out.file.write(text)
        out.file.flush()

    return WordWrap(write_raw, lambda: out.size.width)
